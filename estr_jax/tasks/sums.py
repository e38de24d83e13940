"""Chat, single turn: sums of two digits for a small instruction-tuned model.

There are only 100 ordered pairs, of which 20 are held out in either order and in every phrasing. Crossed with
28 phrasings that makes 2,240 training and 560 held-out prompts: held-out accuracy speaks of new pairs in known
phrasings. The reply is begun for the model ("3 + 5 = "), which knows such sums but, left to itself, talks.
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
SYSTEM = "Add."
SENTENCES = ("What is {}?", "{} = ?", "Compute {}.", "Calculate {}.", "How much is {}?", "Find {}.", "Tell me {}.")
EXPRESSIONS = ("{}+{}", "{} + {}", "{} plus {}", "{} added to {}")
HELDOUT_UNEQUAL, HELDOUT_EQUAL = 9, 2  # pairs: 9 in both orders and 2 doubles make 20 of the 100

# The rest of the reply: a number, at most a full stop, and the special token that ends a turn.
_REPLY = re.compile(r"\s*([0-9]+)\.?\s*<[^<>]*>")


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
  """The chat, and the beginning of the reply."""
  a, b = re.findall("[0-9]", question)
  messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
  return tokenizer.chat(messages) + tokenizer.encode(f"{a} + {b} = ")


def reward(answer: str, turns: Sequence[str]) -> float:
  """1.0 if the rest of the reply is the sum and nothing else, and the policy ended it, else 0.0."""
  written = _REPLY.fullmatch(turns[-1]) if turns else None
  return float(written is not None and same_number(written[1], answer))


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
