"""Says whether a config's learner or sampler fits a TPU slice, and how fast it can be there, without a TPU.

    python -m experiments.plan --config=configs/paper/dapo_math.py --topology=v5p:4x4x4 --role=learner

compiles the program that the learner would run there (the train step; of a sampler, the decode step) with libtpu, which
`pip install -e '.[tpu]'` brings, and reads memory, operations and communication off it. The mesh is that of the config;
--config.mesh.fsdp=16 and the like give another. It ends with FITS, or with DOES NOT FIT and exit status 1. Times are
lower bounds, from peak rates.
"""

import difflib
import importlib.util
import math
import os
import sys
import time

from absl import flags

from estr_jax.errors import UserError
from estr_jax.planning.chips import GIB, Slice, parse_slice
from experiments import settings

FLAGS = flags.FLAGS

ROLES = ("learner", "sampler")


def define_flags() -> None:
  settings.define_config()
  flags.DEFINE_string("topology", None, "A slice, such as v5p:4x4x4 or v6e:8x8.")
  flags.DEFINE_string("role", "learner", "learner or sampler.")


def check(config) -> Slice:
  """The slice of the command line. Raises UserError, in one line, for what cannot be planned."""
  if config is None or FLAGS.topology is None:
    raise UserError("name a config and a slice: --config=configs/paper/dapo_math.py --topology=v5p:4x4x4")
  if FLAGS.role not in ROLES:
    near = difflib.get_close_matches(FLAGS.role, ROLES, n=1, cutoff=0)[0]
    raise UserError(f"--role={FLAGS.role} is unknown: it is one of {', '.join(ROLES)} (nearest: {near})")
  place = parse_slice(FLAGS.topology)
  check_config(config)
  mesh = {axis: config.mesh[axis] for axis in config.mesh}
  if math.prod(mesh.values()) != place.chips:
    sizes = " x ".join(f"mesh.{axis}={size}" for axis, size in mesh.items())
    raise UserError(f"{place.name} has {place.chips} chips and {sizes} is {math.prod(mesh.values())}: change the mesh")
  shards = config.mesh.data * config.mesh.fsdp * config.mesh.expert
  if FLAGS.role == "sampler" and config.sampling.slots % shards:
    raise UserError(
      f"sampling.slots={config.sampling.slots} do not divide by mesh.data x mesh.fsdp x mesh.expert = {shards}"
    )
  return place


def check_config(config) -> None:
  """`settings.check`, but for the task, which a program on arrays does not depend on and which may not be there yet."""
  from estr_jax.tasks import TASKS

  checked = config.copy_and_resolve_references()
  if checked.task.name not in TASKS:
    checked.task.name = "calculator"
  settings.check(checked)


def devices_of(place: Slice) -> list:
  """The chips of a slice as devices that can be compiled for."""
  if not importlib.util.find_spec("libtpu"):
    raise UserError("a plan compiles with libtpu, which is not installed here: pip install -e '.[tpu]'")
  # There is no TPU whose metadata could be asked for, or that two plans could take from each other.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  from jax.experimental import topologies

  try:
    return list(topologies.get_topology_desc(place.name, "tpu").devices)
  except Exception as error:
    line = " ".join(str(error).split())[:200]
    raise UserError(f"--topology={place.name} is no slice that libtpu knows: {line}") from error


def program() -> int:
  settings.parse(sys.argv, define_flags)
  config = FLAGS.config
  place = check(config)
  devices = devices_of(place)
  if len(devices) != place.chips:
    raise UserError(f"{place.name} has {place.chips} chips but a program sees {len(devices)} devices; take v5p or v6e")
  start = time.monotonic()

  def say(what: str) -> None:
    print(f"[{time.monotonic() - start:4.0f} s] {what}", file=sys.stderr, flush=True)

  say(f"tracing the {FLAGS.role} of {settings.config_name()} for {place.name}")
  from experiments import planned  # slow to import

  job = planned.job_of(config, FLAGS.role, devices)
  say("compiling; minutes")
  plan, needed = planned.make(job, place)
  say("compiled")
  if plan is None:
    print(f"HBM a device: at least {needed / GIB:.2f} GiB needed of {place.chip.hbm_bytes / GIB:.0f}")
  else:
    from estr_jax.planning import report

    print(f"{FLAGS.role} of {settings.config_name()} on {place.name}, {job.describe()}")
    print("\n".join(report.lines(plan)))
    if plan.fits:
      print("FITS")
      return 0
  print(f"DOES NOT FIT: {planned.advice(config, FLAGS.role)}")
  return 1


if __name__ == "__main__":
  settings.main(program)
