"""Trains a policy.

    python -m experiments.train --config=configs/quickstart.py --workdir=DIR [--config.KEY=VALUE ...]
    python -m experiments.train --config=configs/quickstart.py --workdir=DIR --config.mode=sync --config.steps=50
    python -m experiments.train --config=configs/recipes.py:dapo --workdir=DIR --config.loss.edge=proximal

In mode async the default --role=all starts a learner and a sampler process on this machine and looks after them;
--role=learner and --role=sampler start one of them alone. The other modes have one role. A role whose devices hang on
several hosts is started on each of them, with --coordinator; they share DIR. Running the same command again goes on
from the last checkpoint. DIR gets metrics.jsonl, summary.json, config.json, report.html, checkpoints and the sampler's
log.
"""

import os
import re
import socket
import sys

from absl import flags

from estr_jax import hosts
from estr_jax.errors import UserError
from estr_jax.observe.writers import REPORT
from estr_jax.run import command_line, options, workdir
from estr_jax.run.local import run_processes
from estr_jax.runtime.launch import unwind_on_sigterm

FLAGS = flags.FLAGS

ROLES = ("all", "learner", "sampler")


def define_flags() -> None:
  command_line.define_config()
  flags.DEFINE_string("workdir", None, "Where the run keeps its files.")
  flags.DEFINE_enum("role", "all", ROLES, "What this process is, in mode async: all, learner or sampler.")
  flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of the first of several processes that share this role; auto on Cloud TPU and GKE."
  )
  flags.DEFINE_integer("processes", None, "How many processes share this role; not with --coordinator=auto.")
  flags.DEFINE_integer("process", None, "Which of them this is, from 0; not with --coordinator=auto.")
  flags.DEFINE_string("sampler_name", None, "A sampler's name, unique in its run; by default its host and process.")


def program() -> int:
  command_line.parse(sys.argv, define_flags, __doc__)
  if FLAGS.config is None or FLAGS.workdir is None:
    raise UserError("name a config and a folder: --config=configs/quickstart.py --workdir=DIR")
  settings = options.make(FLAGS.config)
  mode, folder, name = settings.config.mode, workdir.make(FLAGS.workdir), command_line.config_name()
  if mode != "async" and FLAGS.role != "all":
    raise UserError(f"--role={FLAGS.role} has no meaning in mode={mode}, which has one role; leave it out")
  if workdir.finished(settings.config, folder):
    print(f"{folder} holds this run, and it has done its {settings.config.steps} steps: see {folder / REPORT}")
    return 0
  if FLAGS.role == "learner" and settings.config.transport.address.endswith(":0"):
    raise UserError("samplers that are started by hand must know where to go: name a port in transport.address")
  group = group_of(mode)
  if mode == "async" and FLAGS.role == "all":
    summary = run_processes(settings, folder, name)
  else:
    unwind_on_sigterm()
    if group is not None:
      hosts.join(*group)
    if FLAGS.role == "sampler":
      from estr_jax.run.sampler import run_sampler

      run_sampler(settings, folder, FLAGS.sampler_name or f"{socket.gethostname()}-{os.getpid()}")
      return 0
    from estr_jax.run.learner import run_learner  # slow to import, and the launcher needs none of it

    summary = run_learner(settings, folder, name)
  if hosts.leads():
    from estr_jax.run.summary import in_words

    print("\n".join(in_words(summary, settings, folder / REPORT)))
  return 0


def group_of(mode: str) -> tuple[str, int | None, int | None] | None:
  """The arguments of `hosts.join`, or None for a role of one process. Raises UserError where the flags are at odds."""
  coordinator, processes, process = FLAGS.coordinator, FLAGS.processes, FLAGS.process
  if coordinator is None:
    if (processes, process) != (None, None):
      raise UserError("--processes and --process are of a group: name its first process with --coordinator=HOST:PORT")
    return None
  if mode == "async" and FLAGS.role == "all":
    raise UserError(f"--coordinator={coordinator} is of one role: name it with --role=learner or --role=sampler")
  if coordinator == hosts.AUTO:
    if (processes, process) != (None, None):
      raise UserError("--coordinator=auto finds --processes and --process by itself: leave them out")
    return coordinator, None, None
  if not re.fullmatch(r"[^:]+:[0-9]+", coordinator):
    raise UserError(f"--coordinator={coordinator} is neither HOST:PORT nor auto")
  if processes is None or process is None or not 0 <= process < processes:
    raise UserError(
      f"--coordinator={coordinator} needs --processes, how many there are, and --process, which of them this is, from 0"
    )
  return coordinator, processes, process


if __name__ == "__main__":
  command_line.main(program, "interrupted; run the same command again to go on from the last checkpoint")
