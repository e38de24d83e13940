"""A process that `local.run_processes` started: python -m estr_jax.run.process --workdir=DIR --role=learner|sampler

Its job comes on its standard input; the arguments say it to whoever looks at the list of processes.
"""

import signal
import sys

from estr_jax.errors import UserError
from estr_jax.run.local import received
from estr_jax.runtime import launch


def main(role: str) -> int:
  job = received()
  launch.die_with_parent()
  # Unwinds like Ctrl-C: the terminal is given back, and a checkpoint that is being written is finished.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  settings = job.settings()
  if role == "sampler":
    from estr_jax.run.sampler import run_sampler

    run_sampler(settings, job.workdir, role)
  else:
    from estr_jax.run.learner import run_learner

    run_learner(settings, job.workdir, job.name, quiet=job.quiet)
  return 0


def program() -> int:
  role = sys.argv[-1].removeprefix("--role=")
  try:
    return main(role)
  except UserError as error:
    if role == "learner" and launch.report_fault(str(error)):
      return error.status
    raise


if __name__ == "__main__":
  from estr_jax.run import command_line

  command_line.main(program)
