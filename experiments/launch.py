"""Prints the Kubernetes manifests of a run on TPU slices of GKE.

    python -m experiments.launch --config=configs/paper/dapo_math.py --render --image=IMAGE \
      --workdir=/shared/runs/dapo-math [--config.KEY=VALUE ...] > run.yaml
    python -m experiments.launch --config=configs/quickstart.py --render --image=IMAGE --workdir=/shared/runs/first \
      --config.slices.learner=v6e:1x1 --config.slices.sampler=v6e:1x1 > run.yaml
    python -m experiments.launch --config=configs/paper/gsm8k_multiturn.py --render --image=IMAGE \
      --workdir=/shared/runs/gsm8k --config.slices.samplers=8 | kubectl apply -f -

The slices are those of the config (slices.*); every --config.KEY=VALUE reaches every process. The workdir is a folder
of the volume that all hosts share, and its last part names the run. The README says what has to be there before.
"""

import math
import sys
from pathlib import Path, PurePosixPath

import yaml
from absl import flags
from ml_collections import ConfigDict, config_flags

from estr_jax.errors import UserError
from estr_jax.planning.chips import parse_slice
from estr_jax.planning.plans import check_chips, settings_of
from estr_jax.run import command_line
from estr_jax.runtime import jobset
from estr_jax.tasks import TASKS

FLAGS = flags.FLAGS

ROOT = Path(__file__).resolve().parent.parent
# Follow from where the processes run; a value of one's own would part them.
OURS = ("transport.address", "transport.tls_certificate", "transport.tls_key", "transport.token_file")


class _Plain(yaml.SafeDumper):
  def ignore_aliases(self, data) -> bool:
    """What two manifests share is written out in both: readers look for values, not for anchors."""
    return True


def define_flags() -> None:
  command_line.define_config()
  flags.DEFINE_bool("render", False, "Print the manifests.")
  flags.DEFINE_string("image", None, "The container image, as the cluster pulls it.")
  flags.DEFINE_string("workdir", None, f"Where the run keeps its files: a folder of {jobset.VOLUME}.")


def program() -> int:
  command_line.parse(sys.argv, define_flags, __doc__)
  if FLAGS.config is None or not FLAGS.image or not FLAGS.workdir:
    flags_needed = f"--config=configs/paper/dapo_math.py --image=IMAGE --workdir={jobset.VOLUME}/runs/NAME"
    raise UserError(f"name a config, an image and a folder: {flags_needed}")
  if not FLAGS.render:
    raise UserError("nothing is started from here; add --render, and pipe what it prints into kubectl apply -f -")
  config, given = FLAGS.config, overrides()
  check(config)
  workdir = PurePosixPath(FLAGS.workdir)
  if PurePosixPath(jobset.VOLUME) not in workdir.parents or ".." in workdir.parts:
    raise UserError(f"--workdir={FLAGS.workdir} is on no volume that all hosts share; take {jobset.VOLUME}/runs/NAME")
  manifests = jobset.manifests(
    workdir.name,
    FLAGS.image,
    [f"--config={config_file()}", f"--workdir={workdir}", *given],
    learner=pool_of(config, "learner"),
    sampler=pool_of(config, "sampler"),
    samplers=config.slices.samplers,
  )
  print(yaml.dump_all(manifests, Dumper=_Plain, sort_keys=False, width=math.inf), end="")
  if config.task.name not in TASKS:
    print(f"note: there is no task {config.task.name} yet, so these processes would refuse to start", file=sys.stderr)
  return 0


def check(config: ConfigDict) -> None:
  """`options.make`, but for what only the cluster can have. Raises UserError."""
  if config.mode != "async":
    raise UserError(f"mode={config.mode} is one role, which `python -m experiments.train` starts; launch mode=async")
  checked = config.copy_and_resolve_references()
  if checked.model.folder:
    checked.model.folder = "."  # on the volume, and not here
  settings_of(checked)


def pool_of(config: ConfigDict, role: str) -> jobset.Pool:
  """The nodes of the config's slice of a role. Raises UserError where there are none, or not as many as in its mesh."""
  key, text = f"slices.{role}", config.slices[role]
  if not text:
    raise UserError(f"{key} is empty; name a slice, as --config.{key}=v6e:2x2")
  place = parse_slice(text, key)
  check_chips(config, role, place, f"{key}={text}")
  try:
    return jobset.pool_of(place.family, place.sides)
  except UserError as error:
    raise UserError(f"{key}: {error}") from error


def config_file() -> str:
  """The config as a process finds it in the image. Raises UserError where it is not in this repository."""
  file, colon, argument = command_line.config_name().partition(":")
  path = Path(file).resolve()
  if not path.is_relative_to(ROOT / "configs"):
    raise UserError(f"--config={file} is not in configs/, which the image is made of; move it there")
  return f"{path.relative_to(ROOT)}{colon}{argument}"


def overrides() -> list[str]:
  """--config.KEY=VALUE as the command line had them, and the cache on the volume, so that a restart finds it."""
  given = config_flags.get_override_values(FLAGS["config"])
  for key in OURS:
    if key in given:
      raise UserError(f"--config.{key} is set by the launch, for each process its own; leave it out")
  given = {"cache_dir": f"{jobset.VOLUME}/cache"} | given
  return [f"--config.{key}={value}" for key, value in given.items()]


if __name__ == "__main__":
  command_line.main(program)
