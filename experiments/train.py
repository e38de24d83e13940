"""Trains a policy.

    python -m experiments.train --config=configs/quickstart.py --workdir=DIR [--config.KEY=VALUE ...]

In mode async the default --role=all starts a learner and a sampler process on this machine and looks after them;
--role=learner and --role=sampler start one of them alone. The other modes are one process. Running the same command
again goes on from the last checkpoint. DIR gets metrics.jsonl, summary.json, config.json, report.html, checkpoints and
the sampler's log.
"""

import json
import os
import socket
import sys
from pathlib import Path

from absl import flags

from estr_jax.errors import UserError
from estr_jax.runtime.launch import launch, launched
from experiments import settings

FLAGS = flags.FLAGS

ROLES = ("all", "learner", "sampler")


def define_flags() -> None:
  settings.define_config()
  flags.DEFINE_string("workdir", None, "Where the run keeps its files.")
  flags.DEFINE_enum("role", "all", ROLES, "What this process is, in mode async.")
  flags.DEFINE_string("sampler_name", None, "A sampler's name, unique in its run; by default its host and process.")


def program() -> int:
  settings.parse(sys.argv, define_flags)
  if FLAGS.config is None or FLAGS.workdir is None:
    raise UserError("name a config and a folder: --config=configs/quickstart.py --workdir=DIR")
  config = FLAGS.config
  settings.check(config)
  workdir = make_workdir(FLAGS.workdir)
  if config.mode != "async" and FLAGS.role != "all":
    raise UserError(f"--role={FLAGS.role} has no meaning in mode={config.mode}, which is one process; leave it out")
  if finished(workdir, config.steps):
    print(f"{workdir} holds a run that has done its {config.steps} steps; raise --config.steps to go on")
    return 0
  if FLAGS.role == "learner" and config.transport.address.endswith(":0") and not launched():
    raise UserError("samplers that are started by hand must know where to go: name a port in transport.address")
  if config.mode == "async" and FLAGS.role == "all":
    return launch(commands(sys.argv[1:]), workdir)

  from experiments import roles  # imports JAX, which the launcher need not wait for

  if FLAGS.role == "sampler":
    return roles.sampler(config, workdir, FLAGS.sampler_name or f"{socket.gethostname()}-{os.getpid()}")
  return roles.learner(config, workdir, settings.config_name())


def make_workdir(path: str) -> Path:
  workdir = Path(path).expanduser().absolute()
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    probe = workdir / ".writable"
    probe.touch()
    probe.unlink()
  except OSError as error:
    raise UserError(f"--workdir={path} cannot be written: {error.strerror}; choose another folder") from error
  return workdir


def finished(workdir: Path, steps: int) -> bool:
  """Whether the run of this folder has done so many steps and written all its files."""
  summary, report = workdir / "summary.json", workdir / "report.html"
  if not (summary.is_file() and report.is_file()):
    return False
  return json.loads(summary.read_text())["steps"] >= steps and report.stat().st_mtime >= summary.stat().st_mtime


def commands(arguments: list[str]) -> dict[str, list[str]]:
  """This very command, once for each role."""
  shared = [argument for argument in arguments if not argument.lstrip("-").startswith("role=")]
  program = [sys.executable, "-m", "experiments.train", *shared]
  return {
    "learner": [*program, "--role=learner"],
    "sampler": [*program, "--role=sampler", "--sampler_name=sampler"],
  }


if __name__ == "__main__":
  settings.main(program)
