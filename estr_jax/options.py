"""How a config key is declared: default, meaning, unit, bounds, choices and when it has no effect, all in one place.

Each room declares the keys that it obeys in its own `keys.py`, with the rules between them; `run.options` puts them
together. The keys of a loss are declared by the loss: `keys_of` reads them off its signature and its docstring.
"""

import dataclasses
import difflib
import inspect
import math
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from estr_jax.errors import UserError

Value = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class Range:
  """What a number may be, and in what it is counted."""

  unit: str = ""
  above: float | None = None
  least: float | None = None  # allowed itself
  below: float | None = None
  most: float | None = None  # allowed itself
  infinite: bool = False  # whether inf is a value: "no bound"

  def said(self) -> str:
    """In words, such as "above 0, below 1"."""
    words = {"above": self.above, "at least": self.least, "below": self.below, "at most": self.most}
    said = [f"{word} {bound:,.12g}" for word, bound in words.items() if bound is not None]
    return ", ".join(said + ["or inf"] * self.infinite)

  def complaint(self, value: float) -> str | None:
    """What is wrong with a value, as "must be above 0"; None where nothing is."""
    if self.infinite and value == math.inf:
      return None
    if not in_float32(value):
      return "must be a finite number that float32 holds"
    inside = (
      (self.above is None or value > self.above)
      and (self.least is None or value >= self.least)
      and (self.below is None or value < self.below)
      and (self.most is None or value <= self.most)
    )
    return None if inside else f"must be {self.said()}"


def in_float32(value: float) -> bool:
  """Whether the number survives its way to the device: no NaN, no overflow, nothing that is rounded to 0."""
  limits = np.finfo(np.float32)
  return value == 0 or float(limits.tiny) <= abs(value) <= float(limits.max)


POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(least=0)
FRACTION = Range(above=0, below=1)
BOUND = Range(above=0, infinite=True)  # inf: there is none


@dataclasses.dataclass(frozen=True)
class Idle:
  """When a key has no effect. A value of it that is not the default is then refused."""

  because: str  # completes "has no effect ..."
  when: Callable[[ConfigDict], bool]


@dataclasses.dataclass(frozen=True)
class Word:
  """What a key that is a number takes besides numbers."""

  said: str  # what the word may be
  fits: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Key:
  """One key of a configuration; its type is that of its default."""

  default: Value
  meaning: str
  range: Range = Range()
  choices: Sequence[str] = ()  # of a key that is a word
  idle: tuple[Idle, ...] = ()
  word: Word | None = None

  def complaint(self, name: str, value: Value) -> str | None:
    """What is wrong with a value, as a whole sentence; None where nothing is."""
    if self.choices:
      return complaint_of_choice(name, value, self.choices)
    if self.word is not None and self.word.fits(value):
      return None
    if not _is_like(value, self.default):
      return self._neither(name, value) or f"{name}={value!r} is of another type than its default, {self.default!r}"
    if isinstance(value, bool | str):
      return None
    wrong = self.range.complaint(value)
    if wrong is None and isinstance(value, int) and self.range.below is None and abs(value) >= 2**31:
      wrong = "must fit into 32 bits"
    if wrong is None:
      return None
    return (self._neither(name, value) if in_float32(value) else None) or f"{name}={value} {wrong}"

  def _neither(self, name: str, value: Value) -> str | None:
    if self.word is None:
      return None
    return f"{name}={value!r} is neither a number {self.range.said()}, nor {self.word.said}"


def _is_like(value: Any, default: Value) -> bool:
  """Whether a value is of the type that the default has; a whole number is a float, too."""
  if isinstance(default, bool | str):
    return isinstance(value, type(default))
  return isinstance(value, (int, float) if isinstance(default, float) else int) and not isinstance(value, bool)


def as_path(said: str, value: str | os.PathLike) -> Path:
  """The path that somebody gave, with ~ as their home. Raises UserError, with `said` for its name, where it is none."""
  try:
    path = Path(value).expanduser()
    if "\0" in os.fspath(path):
      raise ValueError("it holds a null byte")
    os.fspath(path).encode("utf-8")
  except (TypeError, ValueError, RuntimeError) as error:
    raise UserError(f"{said}={value!r} is no path: {error}") from error
  return path


Keys = dict[str, Key]  # by dotted name


def complaint_of_choice(name: str, value: Any, choices: Sequence[str]) -> str | None:
  """What is wrong with a word; None where it is among the choices."""
  if value in choices:
    return None
  return f"{name}={value!r} is unknown: it is one of {', '.join(choices)} (nearest: {nearest(str(value), choices)})"


def under(group: str, keys: Mapping[str, Key]) -> Keys:
  """The keys as those of a group."""
  return {f"{group}.{name}": key for name, key in keys.items()}


def nearest(name: str, known: Iterable[str]) -> str:
  """The known name that is most like `name`."""
  return difflib.get_close_matches(name, list(known), n=1, cutoff=0)[0]


def keys_of(function: Callable) -> Keys:
  """The keys that a function declares: its keyword-only parameters that have a default.

  The default stands in the signature, the range in the annotation as `Annotated[float, Range(...)]`, the choices of a
  word as `Literal[...]`, and the meaning in the docstring, as an entry of its "Args:".

  Raises:
    ValueError: a parameter has no entry there.
  """
  hints = typing.get_type_hints(function, include_extras=True)
  meanings, keys = _args_of(inspect.getdoc(function) or ""), {}
  for name, parameter in inspect.signature(function).parameters.items():
    if parameter.kind is not parameter.KEYWORD_ONLY or parameter.default is parameter.empty:
      continue
    if name not in meanings:
      raise ValueError(f'{function.__name__}: the docstring says nothing of {name} under "Args:"')
    hint = hints.get(name)
    ranges = [found for found in getattr(hint, "__metadata__", ()) if isinstance(found, Range)]
    words = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    keys[name] = Key(parameter.default, meanings[name], ranges[0] if ranges else Range(), choices=words)
  return keys


def _args_of(docstring: str) -> dict[str, str]:
  """The entries of a docstring's "Args:", each as one line."""
  section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", docstring, re.MULTILINE)
  if section is None:
    return {}
  lines = section[1].rstrip().splitlines()
  indent = len(lines[0]) - len(lines[0].lstrip())
  entries = re.findall(
    rf"^ {{{indent}}}(\w+): ((?:.+\n?)(?:^ {{{indent + 1},}}\S.*\n?)*)", "\n".join(lines), re.MULTILINE
  )
  return {name: " ".join(text.split()) for name, text in entries}
