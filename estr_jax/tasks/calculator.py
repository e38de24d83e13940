"""Character level, multi-turn: a product and a sum, with a calculator at hand.

    question     7*8+46=
    policy       <7*8>
    environment  =56;
    policy       <56+46>
    environment  =102;
    policy       #102$

Operands may come in either order. The policy may also answer at once, from memory, and be wrong: that is the
habit its demonstrations show more often than not, so that greedy decoding answers wrongly while sampling now
and then meets the tool.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from estr_jax.tasks.task import HELDOUT, Example, Piece, Task, as_text, is_heldout, same_number

FACTORS = range(1, 10)
ADDENDS = range(10, 100)
HELDOUT_ONE_IN = 8  # of the questions, whatever the order of their factors
MAX_CALLS = 4  # two suffice; the episode ends rather than answer a fifth
SMALLEST, LARGEST = 11, 180  # answers

FROM_MEMORY = 0.55  # demonstrations that guess at once
AFTER_ONE_CALL = 0.1  # of the others, those that guess after the product
MISCOPIED = 0.03  # numbers copied with one digit wrong

# At most three digits a side, so that a result has at most six: no call can fill the context or the processor.
_CALL = re.compile(r"<([0-9]{1,3})([*+])([0-9]{1,3})>")
_ANSWER = re.compile(r"#([0-9]+)\$")


def examples(split: str) -> Iterator[Example]:
  """All questions `a*b+c=` with a, b in 1..9 and c in 10..99; a*b+c and b*a+c are in the same split."""
  for a in FACTORS:
    for b in FACTORS:
      for c in ADDENDS:
        if is_heldout(f"{min(a, b)}*{max(a, b)}+{c}", HELDOUT_ONE_IN) == (split == HELDOUT):
          yield {"question": f"{a}*{b}+{c}=", "answer": str(a * b + c)}


def respond(question: str, turns: Sequence[str]) -> str | None:
  """The calculator's result, `=56;`; None after an answer, a malformed call, or MAX_CALLS calls.

  Products have at least two digits and sums at least three, so that the policy copies from fixed places.
  """
  call = _CALL.fullmatch(turns[-1]) if turns else None
  if call is None or len(turns) > MAX_CALLS:
    return None
  return _result(*call.groups())


def reward(answer: str, turns: Sequence[str]) -> float:
  """1.0 if the newest turn is `#number$` with the right number, leading zeros or not, else 0.0."""
  written = _ANSWER.fullmatch(turns[-1]) if turns else None
  return float(written is not None and same_number(written[1], answer))


def demonstrate(rng: np.random.Generator, question: str, answer: str) -> list[Piece]:
  """A guess, or the two calls with now and then a digit miscopied, which the calculator then takes at its word."""
  if rng.random() < FROM_MEMORY:
    return [(_guess(rng, answer), True)]
  a, b, c = re.findall("[0-9]+", question)
  pieces = _call(rng, a, "*", b)
  if rng.random() < AFTER_ONE_CALL:
    return [*pieces, (_guess(rng, answer), True)]
  pieces += _call(rng, pieces[-1][0][1:-1], "+", c)
  return [*pieces, (f"#{_copy(rng, pieces[-1][0][1:-1])}$", True)]


def _guess(rng: np.random.Generator, answer: str) -> str:
  """A wrong answer. Uniform over the others: a guess near the truth would let greedy decoding find its centre."""
  number = SMALLEST + int(rng.random() * (LARGEST - SMALLEST))
  number += number >= int(answer)
  return f"#{number:03d}$"


def _result(left: str, operator: str, right: str) -> str:
  if operator == "*":
    return f"={int(left) * int(right):02d};"
  return f"={int(left) + int(right):03d};"


def _call(rng: np.random.Generator, left: str, operator: str, right: str) -> list[Piece]:
  """A call, its numbers copied in either order, and the calculator's result."""
  left, right = _copy(rng, left), _copy(rng, right)
  if rng.random() < 0.5:
    left, right = right, left
  return [(f"<{left}{operator}{right}>", True), (_result(left, operator, right), False)]


def _copy(rng: np.random.Generator, digits: str) -> str:
  if rng.random() >= MISCOPIED:
    return digits
  place = int(rng.random() * len(digits))
  wrong = (int(digits[place]) + 1 + int(rng.random() * 9)) % 10
  return f"{digits[:place]}{wrong}{digits[place + 1 :]}"


TASK = Task(
  name="calculator",
  alphabet="0123456789*+=<>;#$",
  examples=examples,
  encode=as_text,
  stop=(">",),
  respond=respond,
  reward=reward,
  demonstrate=demonstrate,
)
