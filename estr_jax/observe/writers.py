"""The files of a run: metrics.jsonl (one row per step), summary.json, config.json, report.html.

Whole files are replaced atomically; metrics.jsonl grows line by line, so that a killed run loses at most
the line it was writing. Numbers that are not finite become null, because JSON has no word for them.
"""

import contextlib
import difflib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from estr_jax.errors import UserError
from estr_jax.observe.glossary import GLOSSARY
from estr_jax.structs import Mean, Metric

METRICS, SUMMARY, CONFIG, REPORT = "metrics.jsonl", "summary.json", "config.json", "report.html"

Row = dict[str, Any]  # {"step": int, name of the glossary: number | list of numbers | None}


class MetricsFile:
  """Appends rows to metrics.jsonl, each step once, steps increasing."""

  def __init__(self, path: str | Path, resume_step: int | None = None):
    """Opens `path` for a new run, or, with `resume_step`, for one that goes on after that step.

    Args:
      path: the file; its folder is made.
      resume_step: the step of the checkpoint that the run goes on from. Rows after it are dropped, as those
        steps will be done again, and so is a last line that a killed process left unfinished.

    Raises:
      UserError: the file holds rows and `resume_step` is None; a line is damaged; the disk is full.
    """
    self.path = Path(path)
    rows = read(self.path) if self.path.exists() else []
    if rows and resume_step is None:
      raise UserError(
        f"{self.path} already holds {len(rows)} steps of another run: choose another folder, or delete that one"
      )
    kept = [row for row in rows if row["step"] <= resume_step] if resume_step is not None else []
    self.last_step: int | None = kept[-1]["step"] if kept else None
    write_text(self.path, "".join(_line(row) for row in kept))
    # Unbuffered: a row is in the operating system's hands, or its error is raised, when append returns.
    self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

  def append(self, row: Row) -> None:
    """Writes one row.

    Raises:
      ValueError: a name is not in the glossary, or the step is not after the last one.
      UserError: the disk is full.
    """
    check_names(row)
    if self.last_step is not None and row["step"] <= self.last_step:
      raise ValueError(f"step {row['step']} comes after step {self.last_step} in {self.path}: each step has one row")
    data = memoryview(_line(row).encode())
    with _faults_of_the_disk(self.path):
      while data:
        data = data[self._file.write(data) :]
    self.last_step = row["step"]

  def close(self) -> None:
    self._file.close()

  def __enter__(self) -> "MetricsFile":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def check_names(row: Row) -> None:
  """Raises ValueError for a name that the glossary does not define, with the nearest one that it does."""
  for name in row:
    if name != "step" and name not in GLOSSARY:
      near = difflib.get_close_matches(name, GLOSSARY, n=1, cutoff=0)[0]
      raise ValueError(f"metric {name!r} is not in estr_jax/observe/glossary.py; the nearest name is {near!r}")


def read(path: str | Path) -> list[Row]:
  """The rows of a metrics.jsonl. A last line without its newline was cut off by a kill and is left out.

  Raises:
    UserError: there is no such file, or a complete line is not a row.
  """
  path = Path(path)
  if not path.is_file():
    raise UserError(f"there is no {path}: give the folder of a run that has done at least one step")
  *lines, _torn = path.read_bytes().split(b"\n")
  rows = []
  for number, line in enumerate(lines, start=1):
    try:
      row = json.loads(line)
      if not isinstance(row["step"], int):
        raise TypeError("step")
    except (ValueError, KeyError, TypeError):
      raise UserError(f"{path} line {number} is not a row of metrics: delete that line") from None
    rows.append(row)
  return rows


def to_row(step: int, metrics: Mapping[str, Metric]) -> Row:
  """A row from metrics: a `Mean` becomes its value, a vector a list, a number that is not finite None."""
  values = {name: value.value() if isinstance(value, Mean) else value for name, value in metrics.items()}
  return {"step": int(step)} | {name: plain(np.asarray(value).tolist()) for name, value in values.items()}


def plain(value: Any) -> Any:
  """`value` as what JSON can hold: arrays and tuples as lists, numbers that are not finite as None.

  Raises:
    TypeError: the value, or something in it, has no JSON form.
  """
  if isinstance(value, Mapping):
    return {str(key): plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(item) for item in value]
  if isinstance(value, (np.ndarray, np.generic)):
    return plain(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return None
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  raise TypeError(f"{value!r} ({type(value).__name__}) has no JSON form")


def write_json(path: str | Path, obj: Any) -> None:
  """Replaces `path` by `obj` as indented JSON: after a crash the old or the new file stands, never half of one.

  Raises:
    UserError: the disk is full.
  """
  write_text(path, json.dumps(plain(obj), indent=2, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
  """Replaces `path` by `text`, atomically. Raises UserError when the disk is full."""
  path = Path(path)
  temporary = path.with_name(path.name + ".tmp")
  with _faults_of_the_disk(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(temporary, "w", encoding="utf-8") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)


def _line(row: Row) -> str:
  return json.dumps(plain(row), allow_nan=False) + "\n"


@contextlib.contextmanager
def _faults_of_the_disk(path: Path) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
      why, remedy = "the disk is full", "free some space"
    else:
      why, remedy = os.strerror(error.errno) if error.errno else str(error), "mend that"
    raise UserError(f"{why}: could not write {path}; {remedy} and run the same command again to go on") from error
