"""A process that `local.run_processes` started: python -m estr_jax.run.process --workdir=DIR --role=learner|sampler

Its job comes on its standard input, its role as an argument; the folder is there for whoever lists the processes.
"""

import sys

from estr_jax.errors import UserError
from estr_jax.run.local import received
from estr_jax.runtime import launch


def main(role: str) -> int:
  job = received()
  launch.die_with_parent()
  launch.unwind_on_sigterm()
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
  if role not in ("learner", "sampler"):
    raise UserError(f"{sys.argv[-1]} is no role; a run starts this program by itself")
  try:
    return main(role)
  except UserError as error:
    if role == "learner" and launch.report_fault(str(error)):
      return error.status
    raise


if __name__ == "__main__":
  from estr_jax.run import command_line

  command_line.main(program)
