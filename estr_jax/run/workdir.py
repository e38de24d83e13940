"""A run's folder: whether it can be used, whether its run is done, and whether a config may go on with it."""

import json
import tempfile
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from estr_jax.errors import UserError
from estr_jax.observe.writers import CONFIG, REPORT, SUMMARY, write_text
from estr_jax.options import as_path
from estr_jax.run import options
from estr_jax.run.options import Settings
from estr_jax.tasks import TASKS
from estr_jax.tasks.task import Task

CHECKPOINTS = "checkpoints"

# May differ between a run and its resumption; everything else would make it another run. "a." is all of a group.
# So may "steps", where the learning rate does not depend on them.
MAY_CHANGE = (
  "cache_dir",
  "checkpoint.",
  "eval.every",
  "eval.slots",
  "mesh.",
  "queue.",
  "sampling.mesh.",
  "slices.",
  "transport.address",
  "transport.tls_certificate",
  "transport.tls_key",
  "transport.token_file",
)


def make(path: str | Path) -> Path:
  """The folder, made and found writable. Raises UserError where it is not."""
  workdir = as_path("workdir", path).absolute()
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=workdir).close()  # under a name of its own: several processes may try at once
  except OSError as error:
    raise UserError(f"workdir {path} cannot be written: {error.strerror}; choose another folder") from error
  return workdir


def finished(config: ConfigDict, workdir: Path) -> bool:
  """Whether the run of this config has done its steps and written all its files.

  Raises:
    UserError: it has, and was started with another config.
  """
  summary, report = workdir / SUMMARY, workdir / REPORT
  try:
    done = json.loads(summary.read_text(encoding="utf-8"))["steps"] >= config.steps
    done = done and report.stat().st_mtime >= summary.stat().st_mtime
  except (OSError, ValueError, KeyError, TypeError):  # absent or damaged: it is written anew at the end
    return False
  if done:
    check_same(config, workdir)
  return done


def record_config(config: ConfigDict, workdir: Path) -> None:
  """Writes config.json."""
  # tau may be infinite, for which only Python's JSON has a word.
  write_text(workdir / CONFIG, json.dumps(config.to_dict(), indent=2) + "\n")


def check_same(config: ConfigDict, workdir: Path) -> None:
  """Raises UserError unless config.json is there and differs from `config` only in what may change."""
  before, after = dict(options.flat(read_config(workdir))), dict(options.flat(config.to_dict()))
  for name in sorted(before.keys() | after.keys()):
    free = may_change(name) or (name == "steps" and config.optimizer.decay == "constant")
    if not free and (name not in before or name not in after or before[name] != after[name]):
      there, here = (tree.get(name, "absent") for tree in (before, after))
      raise UserError(
        f"{workdir} holds a run with another config: {name} was {there} and is {here}; "
        "take the old value to go on, or another folder to start anew"
      )


def may_change(name: str) -> bool:
  """Whether a key may differ between a run and its resumption."""
  return any(name.startswith(key) if key.endswith(".") else name == key for key in MAY_CHANGE)


def read_summary(workdir: Path) -> dict[str, Any]:
  """summary.json of a finished run."""
  return json.loads((workdir / SUMMARY).read_text(encoding="utf-8"))


def read_config(workdir: Path) -> dict[str, Any]:
  """config.json as it was written. Raises UserError where it is absent or damaged."""
  path = workdir / CONFIG
  try:
    config = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise UserError(f"{path} cannot be read ({error}); name the folder of a run, or take another one") from error
  if not isinstance(config, dict):
    raise UserError(f"{path} holds no config; take another folder to start anew")
  return config


def read_settings(workdir: Path, *, task: Task | None = None) -> Settings:
  """The settings of the run in a folder, for what needs no loss: one that was passed to the run is left out.

  Raises:
    UserError: there is no run, its task was passed to it and is not passed here, or another version wrote it.
  """
  config = read_config(workdir)
  try:
    name, loss = config["task"]["name"], config["loss"]["name"]
    if loss not in options.METHODS:
      config["loss"] = options.defaults().loss.to_dict()
  except (KeyError, TypeError, AttributeError) as error:
    raise UserError(f"the config of {workdir} is of another version ({error}); use the one that wrote it") from error
  if name not in TASKS and task is None:
    raise UserError(f"the run in {workdir} has a task of its own, {name}; pass it, as task=...")
  try:
    return options.make(config, task=task)
  except UserError as error:
    raise UserError(f"the config of {workdir}: {error}") from error
