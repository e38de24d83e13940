"""A run's folder: whether it can be used, whether its run is done, and whether a config may go on with it."""

import json
import tempfile
from pathlib import Path

from ml_collections import ConfigDict

from estr_jax.errors import UserError
from estr_jax.observe.writers import write_text
from experiments import settings

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


def make(path: str) -> Path:
  """The folder, made and found writable. Raises UserError where it is not."""
  workdir = Path(path).expanduser().absolute()
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=workdir).close()  # under a name of its own: several processes may try at once
  except OSError as error:
    raise UserError(f"--workdir={path} cannot be written: {error.strerror}; choose another folder") from error
  return workdir


def finished(config: ConfigDict, workdir: Path) -> bool:
  """Whether the run of this config has done its steps and written all its files.

  Raises:
    UserError: it has, and was started with another config.
  """
  summary, report = workdir / "summary.json", workdir / "report.html"
  try:
    done = json.loads(summary.read_text())["steps"] >= config.steps
    done = done and report.stat().st_mtime >= summary.stat().st_mtime
  except (OSError, ValueError, KeyError, TypeError):  # absent or damaged: it is written anew at the end
    return False
  if done:
    check_same(config, workdir)
  return done


def record_config(config: ConfigDict, workdir: Path) -> None:
  """Writes config.json."""
  # tau may be infinite, for which only Python's JSON has a word.
  write_text(workdir / "config.json", json.dumps(config.to_dict(), indent=2) + "\n")


def check_same(config: ConfigDict, workdir: Path) -> None:
  """Raises UserError unless config.json is there and differs from `config` only in what may change."""
  before, after = dict(settings.flat(read_config(workdir))), dict(settings.flat(config.to_dict()))
  for name in sorted(before.keys() | after.keys()):
    free = name.startswith(MAY_CHANGE) or (name == "steps" and config.optimizer.decay == "constant")
    if not free and (name not in before or name not in after or before[name] != after[name]):
      there, here = (tree.get(name, "absent") for tree in (before, after))
      raise UserError(
        f"{workdir} holds a run with another config: {name} was {there} and is {here}; "
        "take the old value to go on, or another --workdir to start anew"
      )


def read_config(workdir: Path) -> dict:
  """config.json as it was written. Raises UserError where it is absent or damaged."""
  path = workdir / "config.json"
  try:
    config = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise UserError(f"{path} cannot be read ({error}); name the --workdir of a run, or take another one") from error
  if not isinstance(config, dict):
    raise UserError(f"{path} holds no config; take another --workdir to start anew")
  return config
