"""Says whether a config's learner or sampler fits a TPU slice, and how fast it can be there, without a TPU.

    python -m experiments.plan --config=configs/paper/dapo_math.py --role=learner
    python -m experiments.plan --config=configs/paper/dapo_math.py --role=sampler --topology=v5p:2x2x1
    python -m experiments.plan --config=configs/paper/gsm8k_multiturn.py --role=learner --sweep

compiles the program that the learner would run there (the train step; of a sampler, the decode step) with libtpu, which
`pip install -e '.[tpu]'` brings, and reads memory, operations and communication off it. The compiler is stopped before
it makes machine code, which takes minutes and changes none of the figures; --machine_code lets it. The mesh is that of
the config, `mesh` or `sampling.mesh`, and the slice its `slices.learner` or `slices.sampler`; --config.mesh.fsdp=16,
--topology=v6e:8x8 and the like give others. It ends with FITS, or with DOES NOT FIT and exit status 1. Times are lower
bounds, from peak rates.

--sweep compiles meshes and microbatches (of a sampler, numbers of slots) for --sweep_seconds and ranks those that fit.
Without libtpu the program is compiled for CPUs: operations and communication are counted there, memory is an estimate.
"""

import difflib
import sys
import time

from absl import flags
from ml_collections import ConfigDict

from estr_jax.errors import UserError
from estr_jax.planning import compiler, plan_search, plans, report
from estr_jax.planning.chips import GIB, Slice, parse_slice
from estr_jax.run import command_line
from estr_jax.run.options import Settings

FLAGS = flags.FLAGS

ROLES = ("learner", "sampler")


def define_flags() -> None:
  command_line.define_config()
  flags.DEFINE_string("topology", None, "A slice, such as v5p:4x4x4 or v6e:8x8; by default that of the config.")
  flags.DEFINE_string("role", "learner", "learner or sampler.")
  flags.DEFINE_bool("machine_code", False, "Compile to the end, which takes minutes and proves that it can be done.")
  flags.DEFINE_bool("sweep", False, "Rank meshes and microbatches instead.")
  flags.DEFINE_float("sweep_seconds", 480, "After so long a sweep compiles nothing new.")


def check(config: ConfigDict | None) -> tuple[Settings, Slice]:
  """What the command line asks for. Raises UserError, in one line, for what cannot be planned."""
  if config is None:
    raise UserError("name a config: --config=configs/paper/dapo_math.py")
  if FLAGS.role not in ROLES:
    near = difflib.get_close_matches(FLAGS.role, ROLES, n=1, cutoff=0)[0]
    raise UserError(f"--role={FLAGS.role} is unknown: it is one of {', '.join(ROLES)} (nearest: {near})")
  topology = FLAGS.topology or config.slices[FLAGS.role]
  if not topology:
    raise UserError(f"name a slice: --topology=v5p:4x4x4, or slices.{FLAGS.role} in the config")
  place = parse_slice(topology)
  settings = plans.settings_of(config)
  if FLAGS.sweep:
    return settings, place
  plans.check_chips(config, FLAGS.role, place, place.name)
  return settings, place


def program() -> int:
  command_line.parse(sys.argv, define_flags, __doc__)
  settings, place = check(FLAGS.config)
  start = time.monotonic()

  def say(what: str) -> None:
    print(f"[{time.monotonic() - start:4.0f} s] {what}", file=sys.stderr, flush=True)

  role, of = FLAGS.role, f"{FLAGS.role} of {command_line.config_name()} on {place.name}"
  without = "" if plans.has_libtpu() else "no libtpu here (pip install -e '.[tpu]'): compiled for CPUs, an estimate"
  if FLAGS.sweep:
    found = plan_search.sweep(settings, role, place, FLAGS.sweep_seconds, say)
    print(f"{of}, {without or 'as compiled'}; new compilations for {FLAGS.sweep_seconds:.0f} s")
    print("\n".join(plan_search.table(found, role)))
    return 0 if found.ranked else 1
  if without:
    print(without)
  say(f"compiling the {of}")
  plan = None
  try:
    plan = plans.plan_of(settings, role, place, machine_code=FLAGS.machine_code)
  except compiler.Exhausted as error:
    print(f"HBM a device: at least {error.needed / GIB:.2f} GiB needed of {place.chip.hbm_bytes / GIB:.2f}")
  else:
    print(f"{of}, {plan.what}")
    print("\n".join(report.lines(plan)))
  best = plan_search.largest(settings, role, place, plan and plan.memory, say)
  say("done")
  if best is not None:
    choice, memory = best
    gib = (memory.total + report.RESERVED) / GIB
    what = "most slots, by doubling, that fit" if role == "sampler" else "largest microbatch that fits"
    print(f"{what}: {plan_search.named(choice, role)}; {gib:.2f} GiB")
  if plan is not None and plan.fits:
    print("FITS")
    return 0
  advice = f"set {plan_search.named(best[0], role)}" if best else plan_search.advice(settings, role)
  print(f"DOES NOT FIT: {advice}")
  return 1


if __name__ == "__main__":
  command_line.main(program)
