"""What every task promises: splits, alphabets, demonstrations, and calm in the face of hostile text."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estr_jax.model.tokenizers import CharTokenizer
from estr_jax.tasks import TASKS, sums
from estr_jax.tasks.task import HELDOUT, TRAIN, same_number

DEMONSTRATED = [name for name, task in TASKS.items() if task.demonstrate is not None]

HOSTILE = [
  "",
  "$",
  "#$",
  "#",
  "<>",
  "<*>",
  "<7*8",
  "7*8>",
  "<<7*8>>",
  "<7*8*9>",
  "<7**8>",
  "<-7*8>",
  "<7*8>\n",
  "#102$\n",
  "<" + "9" * 5000 + "*" + "9" * 5000 + ">",
  "#" + "9" * 5000 + "$",
  "9" * 5000,
  "<\u0667*\u0668>",
  "#\u0661\u0660\u0662$",
  "\u00b3",
  "5:05,7:12,9:21,3:\u00b24,$",
  "\x00\ud800",
]


def canonical(name: str, question: str) -> tuple[str, ...]:
  """What the splits must not share: the terms of a sum in any order, the factors of a product in any order."""
  numbers = re.findall("[0-9]+", question)
  return (*sorted(numbers[:2]), numbers[2]) if name == "calculator" else tuple(sorted(numbers))


@pytest.mark.parametrize("name", TASKS)
def test_splits_share_no_question_in_any_order(name):
  """Fails if the split is decided by the question's text instead of by what it asks."""
  train, heldout = ([example["question"] for example in TASKS[name].examples(split)] for split in (TRAIN, HELDOUT))
  assert len(set(train)) == len(train) and len(set(heldout)) == len(heldout)
  assert not {canonical(name, q) for q in train} & {canonical(name, q) for q in heldout}


def test_split_sizes():
  """Fails if the shares are swapped, or the split hangs on hash(), which differs from process to process.

  At least 512 prompts are held out, for an evaluation.
  """
  sizes = {name: [len(list(task.examples(split))) for split in (TRAIN, HELDOUT)] for name, task in TASKS.items()}
  assert sizes == {"arithmetic": [5557, 1004], "calculator": [6363, 927], "sums": [2240, 560]}


@pytest.mark.parametrize("name", TASKS)
def test_examples_are_the_same_every_time(name):
  """Fails if the order hangs on a set, or a split is a generator that is used up."""
  assert list(TASKS[name].examples(TRAIN)) == list(TASKS[name].examples(TRAIN))


def test_twenty_ordered_pairs_of_the_sums_are_held_out_in_both_orders():
  """Fails if only one order of a pair is held out."""
  questions = [example["question"] for example in TASKS["sums"].examples(HELDOUT)]
  pairs = {tuple(map(int, re.findall("[0-9]", question))) for question in questions}
  assert len(pairs) == 20 and {(b, a) for a, b in pairs} == pairs


@pytest.mark.parametrize("name", DEMONSTRATED)
def test_alphabet_covers_questions_demonstrations_and_stops(name):
  """Fails if a character is missing from the alphabet, or a stop string is not one token."""
  task = TASKS[name]
  tokenizer = CharTokenizer(task.alphabet)
  rng = np.random.default_rng(0)
  for split in (TRAIN, HELDOUT):
    for example in list(task.examples(split))[::7]:
      text = example["question"] + "".join(piece for piece, _ in task.demonstrate(rng, **example))
      assert tokenizer.decode(tokenizer.encode(text)) == text
      assert task.encode(tokenizer, example["question"]) == tokenizer.encode(example["question"])
  assert all(len(tokenizer.encode(stop)) == 1 for stop in task.stop)


@pytest.mark.parametrize("name", DEMONSTRATED)
def test_demonstrations_are_episodes_that_the_environment_would_have_played(name):
  """Fails if a demonstration's observation differs from respond(), or if it breaks off before the episode ends."""
  task = TASKS[name]
  rng = np.random.default_rng(1)
  for example in list(task.examples(TRAIN))[::5]:
    pieces = task.demonstrate(rng, **example)
    turns = []
    for text, by_policy in pieces:
      if by_policy:
        turns.append(text)
        assert text.endswith(("$", *task.stop))
      else:
        assert task.respond(example["question"], turns) == text
    assert pieces[-1][1] and turns[-1].endswith("$") and task.respond(example["question"], turns) is None


@pytest.mark.parametrize("name", DEMONSTRATED)
def test_demonstrations_follow_the_generator_alone(name):
  """Fails if a demonstration draws from a global generator."""
  task = TASKS[name]
  examples = list(task.examples(TRAIN))[:50]
  first, again = (
    [task.demonstrate(rng, **example) for example in examples]
    for rng in (np.random.default_rng(2), np.random.default_rng(2))
  )
  assert first == again


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_worth_nothing_and_raises_nothing(name, text):
  """Fails if a number is parsed by int() (which refuses 5,000 digits), matched by \\d, or anchored by $."""
  task = TASKS[name]
  question, answer = (next(iter(task.examples(TRAIN)))[key] for key in ("question", "answer"))
  assert task.reward(answer, [text]) == 0.0
  assert task.respond(question, [text]) is None


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=100, deadline=None)
@given(turns=st.lists(st.text(st.sampled_from("0123456789*+-=<>;:,#$. \n\u0663"), max_size=30), max_size=6))
def test_no_text_raises(name, turns):
  """Fails if any text, or no turn at all, raises; an observation stays short."""
  task = TASKS[name]
  question, answer = (next(iter(task.examples(TRAIN)))[key] for key in ("question", "answer"))
  assert task.reward(answer, turns) in (0.0, 1.0)
  response = task.respond(question, turns)
  assert response is None or len(response) <= 8


def test_same_number_ignores_leading_zeros_only():
  """Fails if zeros are stripped at the end, if 0 is lost, or if text that is no number equals zero."""
  assert same_number("0102", "102") and same_number("00", "0") and same_number("0", "0")
  assert not same_number("102", "1020") and not same_number("", "0") and not same_number("1\n", "1")


def test_sums_prompt_is_a_short_system_message_the_question_and_the_beginning_of_the_reply():
  """Fails if the template's own, longer system message is let in, the question is altered, or the digits change."""

  class Recorder:
    def chat(self, messages):
      self.messages = messages
      return [1, 2]

    def encode(self, text):
      return list(text)

  recorder = Recorder()
  assert TASKS["sums"].encode(recorder, "What is 3+5?") == [1, 2, *"3 + 5 = "]
  assert [message["role"] for message in recorder.messages] == ["system", "user"]
  assert recorder.messages[0]["content"] == sums.SYSTEM and recorder.messages[1]["content"] == "What is 3+5?"
