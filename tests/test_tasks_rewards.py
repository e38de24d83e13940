"""Rewards and environments, by cases worked out by hand."""

import numpy as np
import pytest

from estr_jax.tasks import TASKS, calculator
from estr_jax.tasks.task import HELDOUT, TRAIN


@pytest.mark.parametrize(
  ("turns", "worth"),
  [
    (["5:05,7:12,9:21,3:24,$"], 1.0),
    (["3:03,9:12,7:19,5:24,$"], 1.0),  # any order
    (["3:99,9:12,7:19,5:24,$"], 1.0),  # only the last total counts
    (["5:05,7:12,9:21,3:25,$"], 0.0),
    (["5:05,7:12,9:21,24:24,$"], 0.0),
    (["5:05,5:10,9:19,5:24,$"], 0.0),  # not the question's digits
    (["5:05,7:12,9:21,3:24,"], 0.0),  # cut off
    (["5:05,7:12,9:21,$"], 0.0),
    (["5:05,7:12,9:21,3:24,3:24,$"], 0.0),
    (["5:05,7:12,9:21,3:24,$$"], 0.0),
    (["5:05,7:12,9:21,3:24,$", "$"], 0.0),
    ([], 0.0),
  ],
)
def test_arithmetic_reward(turns, worth):
  """Fails if the digits used are not compared, any total but the last is, or an unfinished turn is paid."""
  assert TASKS["arithmetic"].reward("3+5+7+9=24", turns) == worth


def test_arithmetic_answer_names_the_digits_sorted():
  """Fails if question and reward disagree about the order of the digits."""
  example = next(e for e in TASKS["arithmetic"].examples(TRAIN) if e["question"] == "7+5+9+3=")
  assert example["answer"] == "3+5+7+9=24"


def test_arithmetic_demonstrations_err_in_some_totals():
  """Fails if totals are never corrupted, or if the demonstration goes on from the right one all the same."""
  task, rng = TASKS["arithmetic"], np.random.default_rng(0)
  examples = list(task.examples(TRAIN))[::2]
  worth = [task.reward(e["answer"], [text for text, _ in task.demonstrate(rng, **e)]) for e in examples]
  assert 0.36 < np.mean(worth) < 0.5  # 0.8 ** 4 = 0.41, and a few that hit the right total by chance


@pytest.mark.parametrize(
  ("turns", "response"),
  [
    (["<7*8>"], "=56;"),
    (["<1*2>"], "=02;"),
    (["<7*8>", "<56+46>"], "=102;"),
    (["<56+10>"], "=066;"),
    (["<07*008>"], "=56;"),
    (["<999*999>"], "=998001;"),
    (["<1000*1>"], None),
    (["<7*8>", "#102$"], None),
    (["#102$"], None),
    (["#1<7*8>"], None),
    ([], None),
  ],
)
def test_calculator_response(turns, response):
  """Fails if an operator is swapped, a width is not kept, or a malformed call is answered."""
  assert TASKS["calculator"].respond("7*8+46=", turns) == response


def test_calculator_answers_no_more_than_its_number_of_calls():
  """Fails if a policy can call without end, or if the last call allowed is refused."""
  call = ["<1+1>"]
  assert TASKS["calculator"].respond("", call * calculator.MAX_CALLS) == "=002;"
  assert TASKS["calculator"].respond("", call * (calculator.MAX_CALLS + 1)) is None


@pytest.mark.parametrize(
  ("turns", "worth"),
  [
    (["#102$"], 1.0),
    (["<7*8>", "<56+46>", "#0102$"], 1.0),
    (["<7*8>", "#103$"], 0.0),
    (["#102"], 0.0),
    (["102$"], 0.0),
    (["#102$$"], 0.0),
    (["#102#103$"], 0.0),
    (["#103#102$"], 0.0),
    (["#102$", "<7*8>"], 0.0),
  ],
)
def test_calculator_reward(turns, worth):
  """Fails if an answer without its end, a list of answers, or one that is not the last turn is paid."""
  assert TASKS["calculator"].reward("102", turns) == worth


def test_calculator_demonstrations_have_the_bad_habit():
  """Fails if the guesses are right, rare or near the truth, or if using the tool does not pay."""
  task, rng = TASKS["calculator"], np.random.default_rng(0)
  examples = list(task.examples(TRAIN))
  guesses, worth = [], {1: [], 2: [], 3: []}
  for i in range(4000):
    example = examples[i % len(examples)]
    turns = [text for text, by_policy in task.demonstrate(rng, **example) if by_policy]
    worth[len(turns)].append(task.reward(example["answer"], turns))
    if len(turns) == 1:
      guesses.append(int(turns[0][1:-1]) - int(example["answer"]))
  assert 0.5 < len(worth[1]) / 4000 < 0.6
  assert sum(worth[1]) == sum(worth[2]) == 0 and len(worth[2]) > 100
  assert 0.8 < np.mean(worth[3]) < 0.95
  assert np.std(guesses) > 40 and set(np.sign(guesses)) == {-1, 1}


def test_calculator_demonstrations_leave_room_for_exploration():
  """Fails if operands keep one order, which would leave no fork token in a tool call."""
  task, rng = TASKS["calculator"], np.random.default_rng(3)
  firsts = [task.demonstrate(rng, "7*8+46=", "102")[0][0] for _ in range(2000)]
  assert 0.8 < firsts.count("<7*8>") / firsts.count("<8*7>") < 1.25
  assert all(calculator.SMALLEST <= int(text[1:-1]) <= calculator.LARGEST for text in firsts if text[0] == "#")


def test_calculator_questions_and_answers_fit_their_widths():
  """Fails if a product or a sum outgrows the width at which the demonstrations copy it."""
  examples = [example for split in (TRAIN, HELDOUT) for example in TASKS["calculator"].examples(split)]
  answers = [int(example["answer"]) for example in examples]
  assert min(answers) == calculator.SMALLEST and max(answers) == calculator.LARGEST
  assert len(answers) == 9 * 9 * 90


@pytest.mark.parametrize(
  ("reply", "worth"),
  [
    ("8<|im_end|>", 1.0),
    (" 8.\n<|im_end|>", 1.0),
    ("08</s>", 1.0),
    ("8", 0.0),  # cut off
    ("8.", 0.0),
    ("8 or 9<|im_end|>", 0.0),
    ("18<|im_end|>", 0.0),
    ("-8<|im_end|>", 0.0),
    ("8.5<|im_end|>", 0.0),
    ("eight<|im_end|>", 0.0),
    ("5, 6, 7, 8<|im_end|>", 0.0),
    ("8<|im_end|><|im_end|>", 0.0),
    ("\u0668<|im_end|>", 0.0),  # a digit, and not an ASCII one
    ("", 0.0),
  ],
)
def test_sums_reward(reply, worth):
  """Fails if an unfinished reply is paid, a part of a number is judged, or more than the number is let through."""
  assert TASKS["sums"].reward("8", [reply]) == worth
