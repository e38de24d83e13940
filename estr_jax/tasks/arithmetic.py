"""Character level, single turn: add four digits in any order, writing the running total after each.

`7+5+9+3=` may be continued by `5:05,7:12,9:21,3:24,$`. The order is free, so the digits are tokens of high
entropy and the totals tokens of nearly none.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from estr_jax.tasks.task import HELDOUT, Example, Piece, Task, as_text, is_heldout, single_turn

TERMS = 4
HELDOUT_ONE_IN = 8  # of the unordered sums
CORRUPTED_TOTALS = 0.2  # of the demonstrated totals; the demonstration goes on from the wrong one

_STEP = re.compile("([1-9]):([0-9]{2}),")
_TURN = re.compile(rf"(?:[1-9]:[0-9]{{2}},){{{TERMS}}}\$")


def examples(split: str) -> Iterator[Example]:
  """All ordered sums of four digits 1..9; a sum is held out in every order. The answer is `terms=total`."""
  for terms in product("123456789", repeat=TERMS):
    key = "+".join(sorted(terms))
    if is_heldout(key, HELDOUT_ONE_IN) == (split == HELDOUT):
      yield {"question": "+".join(terms) + "=", "answer": f"{key}={sum(map(int, terms))}"}


def reward(answer: str, turns: Sequence[str]) -> float:
  """1.0 if the turn uses each of the question's digits once and its last total is exact, else 0.0."""
  if len(turns) != 1 or not _TURN.fullmatch(turns[0]):
    return 0.0
  steps = _STEP.findall(turns[0])
  terms, total = answer.split("=")
  used = "+".join(sorted(digit for digit, _ in steps))
  return float(used == terms and int(steps[-1][1]) == int(total))


def demonstrate(rng: np.random.Generator, question: str, answer: str) -> list[Piece]:
  """The sum in a random order, with a fifth of the totals replaced by random ones."""
  terms = question.rstrip("=").split("+")
  total, text = 0, ""
  for index in rng.permutation(len(terms)):
    total += int(terms[index])
    if rng.random() < CORRUPTED_TOTALS:
      total = int(rng.random() * 9 * TERMS) + 1
    text += f"{terms[index]}:{total:02d},"
  return [(text + "$", True)]


TASK = Task(
  name="arithmetic",
  alphabet="0123456789+=:,$",
  examples=examples,
  encode=as_text,
  stop=(),
  respond=single_turn,
  reward=reward,
  demonstrate=demonstrate,
)
