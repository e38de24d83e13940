"""What a task is: an environment made of two pure functions of text, and the examples that feed it.

A turn is the text that the policy wrote while it had the word, its closing stop or eos string included; a turn
that was cut off lacks it. `turns` lists an episode's turns in order, the newest last. Every function here takes
whatever a policy can write and never raises on it.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
  from estr_jax.model.tokenizers import Tokenizer

TRAIN, HELDOUT = "train", "heldout"

Example = Mapping[str, str]  # {"question": ..., "answer": ...}
Piece = tuple[str, bool]  # text, and whether the policy wrote it


@dataclasses.dataclass(frozen=True)
class Task:
  """One environment. All of it is text in, text out."""

  name: str
  alphabet: str | None  # what a character-level tokenizer must know; None = the task needs a chat tokenizer
  examples: Callable[[str], Iterable[Example]]  # of a split, in a fixed order; the two splits share no question
  encode: Callable[["Tokenizer", str], list[int]]  # (tokenizer, question) -> prompt tokens
  stop: tuple[str, ...]  # strings of one token each that end a turn; eos always does
  respond: Callable[[str, Sequence[str]], str | None]  # (question, turns) -> the environment's text; None = over
  reward: Callable[[str, Sequence[str]], float]  # (answer, turns) -> 0.0 or 1.0
  demonstrate: Callable[[np.random.Generator, str, str], list[Piece]] | None  # (rng, question, answer) -> the rest


def is_heldout(key: str, one_in: int) -> bool:
  """Whether the examples of `key` belong to the held-out split: about one key in `one_in`, the same for ever.

  A key names what must not be shared between the splits, such as a sum whatever the order of its terms.
  """
  return zlib.crc32(key.encode()) % one_in == 0


def same_number(digits: str, answer: str) -> bool:
  """Compares two strings of ASCII digits as numbers. Text, not int(): a policy may write any number of digits."""
  return bool(re.fullmatch("[0-9]+", digits)) and digits.lstrip("0") == answer.lstrip("0")


def as_text(tokenizer: "Tokenizer", question: str) -> list[int]:
  """The `encode` of a task whose prompt is the question as it stands."""
  return tokenizer.encode(question)


def single_turn(question: str, turns: Sequence[str]) -> None:
  """The `respond` of a task in which the policy speaks once."""
