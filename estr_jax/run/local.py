"""Mode async on one machine: a learner and a sampler process, started from here.

Each gets its job on its standard input, objects of the user's own included, which no command line could carry.
"""

import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from estr_jax.errors import UserError
from estr_jax.objective.losses import METHODS, Method
from estr_jax.run import options
from estr_jax.run.options import Settings
from estr_jax.run.workdir import read_summary
from estr_jax.runtime.launch import launch, receive_job
from estr_jax.tasks import TASKS
from estr_jax.tasks.task import Task


class Job(NamedTuple):
  """What a process of the run needs."""

  config: dict[str, Any]
  task: Task | None  # of the user's own
  method: Method | None  # of the user's own
  workdir: Path
  name: str  # of the config
  quiet: bool

  def settings(self) -> Settings:
    return options.make(self.config, task=self.task, loss=self.method)


def run_processes(settings: Settings, workdir: Path, name: str, *, quiet: bool = False) -> dict[str, Any]:
  """Runs a learner and a sampler until the learner is done; the arguments and the result are those of `run_learner`.

  Raises:
    UserError: what the learner or the sampler says.
    KeyboardInterrupt: this process was asked to end.
  """
  task = None if TASKS.get(settings.task.name) is settings.task else settings.task
  method = None if METHODS.get(settings.config.loss.name) is settings.method else settings.method
  job = Job(settings.config.to_dict(), task, method, workdir, name, quiet)
  # Where this process finds its modules, the others find them too; to be known before the rest can be read.
  try:
    data = cloudpickle.dumps((sys.path, cloudpickle.dumps(job)))
  except (TypeError, pickle.PicklingError) as error:
    raise UserError(
      f"the task or loss that was passed cannot be sent to another process ({error}); keep locks, files and devices "
      "out of it, or take mode=sync"
    ) from error
  program = [sys.executable, "-m", "estr_jax.run.process", f"--workdir={workdir}"]
  commands = {role: [*program, f"--role={role}"] for role in ("learner", "sampler")}
  launch(commands, data, workdir, say=(lambda line: None) if quiet else _to_stderr)
  return read_summary(workdir)


def _to_stderr(line: str) -> None:
  print(line, file=sys.stderr)


def received() -> Job:
  """The job of this process, which `run_processes` started."""
  path, data = cloudpickle.loads(receive_job())
  sys.path[:] = path
  return cloudpickle.loads(data)
