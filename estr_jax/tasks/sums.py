"""Chat, single turn: sums of two digits for a small instruction-tuned model.

There are only 100 ordered pairs, of which 20 are held out in either order and in every phrasing. Crossed with
28 phrasings that makes 2,240 training and 560 held-out prompts: held-out accuracy speaks of new pairs in known
phrasings.
"""

import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from estr_jax.tasks.task import HELDOUT, Example, Task, same_number, single_turn

if TYPE_CHECKING:
  from estr_jax.model.tokenizers import Tokenizer

# Replaces the longer default that chat templates bring.
SYSTEM = "Reply with one number."
SENTENCES = ("What is {}?", "{} = ?", "Compute {}.", "Calculate {}.", "How much is {}?", "Find {}.", "Tell me {}.")
EXPRESSIONS = ("{}+{}", "{} + {}", "{} plus {}", "the sum of {} and {}")
HELDOUT_UNEQUAL, HELDOUT_EQUAL = 9, 2  # pairs: 9 in both orders and 2 doubles make 20 of the 100
MOST_NUMBERS = 3  # as many as "3 + 5 = 8" holds

_NUMBER = re.compile("-?[0-9]+(?:[.,][0-9]+)*")


def examples(split: str) -> Iterator[Example]:
  """Every phrasing of every ordered pair of digits of the split."""
  heldout = heldout_pairs()
  for a, b in product(range(10), repeat=2):
    if ((min(a, b), max(a, b)) in heldout) == (split == HELDOUT):
      for sentence, expression in product(SENTENCES, EXPRESSIONS):
        question = sentence.format(expression.format(a, b))
        yield {"question": question[0].upper() + question[1:], "answer": str(a + b)}


def heldout_pairs() -> frozenset[tuple[int, int]]:
  """The pairs (a, b), a <= b, that training never sees; the same for ever."""
  pairs = sorted(
    ((a, b) for a in range(10) for b in range(a, 10)), key=lambda pair: zlib.crc32(f"{pair[0]}+{pair[1]}".encode())
  )
  unequal = [pair for pair in pairs if pair[0] != pair[1]]
  equal = [pair for pair in pairs if pair[0] == pair[1]]
  return frozenset(unequal[:HELDOUT_UNEQUAL] + equal[:HELDOUT_EQUAL])


def encode(tokenizer: "Tokenizer", question: str) -> list[int]:
  return tokenizer.chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}])


def reward(answer: str, turns: Sequence[str]) -> float:
  """1.0 if the reply's LAST number is the sum and it holds at most three numbers, else 0.0.

  The last, because a reply may restate the sum before its result; only one number of a reply is judged, so
  guessing several gains nothing. At most three, so that counting up to the result is not rewarded.
  """
  numbers = _NUMBER.findall(turns[-1]) if turns else []
  return float(0 < len(numbers) <= MOST_NUMBERS and same_number(numbers[-1], answer))


TASK = Task(
  name="sums",
  alphabet=None,
  examples=examples,
  encode=encode,
  stop=(),
  respond=single_turn,
  reward=reward,
  demonstrate=None,
)
