"""Writes docs/tpu_plans.md: python -m experiments.plan_tables [--only=NAME ...] [--out=docs/tpu_plans.md]

Every plan of PLANS by the command that stands above it, each some minutes; with --only, those named, while the other
blocks stay as the page has them. Needs libtpu.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from estr_jax.planning.plans import has_libtpu

_HEAD = """# Plans for TPU slices

What `experiments.plan` prints for the paper's settings, compiled by libtpu 0.0.42 and JAX 0.10.2 without a TPU; written
by `python -m experiments.plan_tables`. Times are lower bounds from peak rates (estr_jax/planning/chips.py has them and
their sources), as if everything overlapped; MFU is 6 N a token and causal attention over that time, recomputation not
counted. Memory is what the compiler assigned, before machine code. Of a sampler's decode loop one token for each slot
counts, with a full cache.
"""

_V6E_LEARNER = ("--topology=v6e:8x8",)
_V5P_SAMPLER = ("--topology=v5p:2x2x1",)
_PAPER = {
  "gsm8k_multiturn": "GSM8K, Qwen2.5-7B",
  "dapo_math": "DAPO-Math, Qwen2.5-7B",
  "browsecomp_plus": "BrowseComp-Plus, Qwen3-30B-A3B",
}


def _plans() -> dict[str, tuple[str, tuple[str, ...]]]:
  """(title, arguments) of every plan by its name."""
  plans = {}
  for config, title in _PAPER.items():
    sparse = config == "browsecomp_plus"
    more = {
      "learner-v5p": ("learner, 64 chips of v5p", ()),
      # What a device keeps of 34,816 tokens and 48 layers has no room beside the rest in v6e's memory.
      "learner-v6e": ("learner, 64 chips of v6e", _V6E_LEARNER + ("--config.model.remat=full",) * sparse),
      "sampler-v6e": (f"sampler, {8 if sparse else 4} chips of v6e", ()),
      "sampler-v5p": ("sampler, 4 chips of v5p", _V5P_SAMPLER + ("--config.sampling.mesh.expert=1",) * sparse),
    }
    for name, (what, arguments) in more.items():
      base = (f"--config=configs/paper/{config}.py", f"--role={name.partition('-')[0]}")
      plans[f"{config}-{name}"] = (f"{title}, {what}", base + arguments)
  return plans


PLANS = _plans()


def heading(name: str) -> str:
  """A block down to its figures."""
  title, arguments = PLANS[name]
  return f"## {title}\n\n    python -m experiments.plan {' '.join(arguments)}\n"


def blocks(page: str) -> dict[str, str]:
  """The blocks of a page by name; those of no plan are left out."""
  found = {}
  for block in re.findall(r"^## .*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL):
    name = next((name for name in PLANS if block.startswith(heading(name))), None)
    if name is not None:
      found[name] = block.rstrip() + "\n"
  return found


def make(name: str) -> str:
  """Runs a plan. Its progress goes to standard error. Raises RuntimeError where there is no plan to print."""
  command = [sys.executable, "-m", "experiments.plan", *PLANS[name][1]]
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
  if done.returncode not in (0, 1) or not done.stdout:
    raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")
  lines = "".join(f"    {line}\n" for line in done.stdout.splitlines())
  return f"{heading(name)}\n{lines}"


def main() -> int:
  parser = argparse.ArgumentParser(prog="python -m experiments.plan_tables", description="Writes the plans.")
  parser.add_argument("--only", nargs="+", choices=PLANS, default=list(PLANS), help="plans to make anew")
  parser.add_argument("--out", type=Path, default=Path("docs/tpu_plans.md"), help="the file to write")
  asked = parser.parse_args()
  if not has_libtpu():
    print("error: the plans are a TPU compiler's, and libtpu is not here: pip install -e '.[tpu]'", file=sys.stderr)
    return 2
  for name in asked.only:
    print(name, file=sys.stderr)
    block = make(name)
    kept = blocks(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    kept[name] = block
    asked.out.write_text("\n".join([_HEAD, *(kept[name] for name in PLANS if name in kept)]), encoding="utf-8")
  print(asked.out)
  return 0


if __name__ == "__main__":
  sys.exit(main())
