"""The prompt stream: seeded, resumable by one integer, prepared once and atomically."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

from estr_jax.errors import UserError
from estr_jax.model.tokenizers import CharTokenizer
from estr_jax.tasks import TASKS, prompts
from estr_jax.tasks.prompts import PromptStream
from estr_jax.tasks.task import HELDOUT, TRAIN

CALCULATOR = TASKS["calculator"]
TOKENIZER = CharTokenizer(CALCULATOR.alphabet)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


def stream(data_dir, task=CALCULATOR, **changes):
  settings = {"seed": 0, "group_size": 4, "max_prompt_tokens": 7} | changes
  return PromptStream(task, TOKENIZER, data_dir=data_dir, **settings)


def few(n):
  """The calculator with n examples a split."""
  return dataclasses.replace(CALCULATOR, examples=lambda split: list(CALCULATOR.examples(split))[:n])


def texts(prompts_of_group):
  return {TOKENIZER.decode(prompt.tokens) for prompt in prompts_of_group}


def test_a_group_is_one_question_with_ids_of_its_own(data_dir):
  """Fails if ids repeat or skip across groups, or a group mixes questions."""
  straight = stream(data_dir)
  made = [prompt for group in range(5) for prompt in straight.at(group)]
  assert [prompt.id for prompt in made] == list(range(20))
  assert [prompt.group for prompt in made] == [i // 4 for i in range(20)]
  for group in range(5):
    (question,) = texts(straight.at(group))
    a, b, c = (int(n) for n in question[:-1].replace("*", "+").split("+"))
    assert {prompt.answer for prompt in straight.at(group)} == {str(a * b + c)}
  assert made[0].tokens.dtype == np.int32 and {prompt.task for prompt in made} == {"calculator"}


def test_resuming_at_a_group_equals_the_straight_run(data_dir):
  """Fails if the stream depends on what was read before: a cursor is the group's number alone."""
  straight_stream, resumed = stream(data_dir), stream(data_dir)
  straight = [texts(straight_stream.at(group)) for group in range(30)]
  assert [texts(resumed.at(group)) for group in reversed(range(17, 30))] == straight[17:][::-1]


def test_another_seed_gives_another_order(data_dir):
  """Fails if the seed is not used."""
  streams = [stream(data_dir, seed=seed) for seed in (0, 1)]
  first, second = ([texts(one.at(group)) for group in range(30)] for one in streams)
  assert first != second


def test_each_pass_takes_every_example_once_in_a_new_order(data_dir):
  """Fails if passes are not reshuffled, or a shuffle repeats or drops examples."""
  made = stream(data_dir, task=few(50))
  passes = [[texts(made.at(group)).pop() for group in range(start, start + 50)] for start in (0, 50, 100)]
  wanted = sorted(example["question"] for example in few(50).examples(TRAIN))
  assert all(sorted(one) == wanted for one in passes)
  assert passes[0] != passes[1] and passes[1] != passes[2] and passes[0] != wanted


def test_heldout_prompts_are_held_out(data_dir):
  """Fails if an evaluation reads training prompts, repeats one, or changes between calls."""
  heldout = stream(data_dir).heldout(512)
  questions = [TOKENIZER.decode(prompt.tokens) for prompt in heldout]
  assert len(set(questions)) == 512
  assert set(questions) <= {example["question"] for example in CALCULATOR.examples(HELDOUT)}
  assert [prompt.id for prompt in heldout] == list(range(512))
  assert questions[:9] == [TOKENIZER.decode(prompt.tokens) for prompt in stream(data_dir).heldout(9)]


def test_too_many_heldout_prompts_asked_for(data_dir):
  """Fails if an evaluation silently repeats prompts."""
  with pytest.raises(UserError, match="task calculator: 928 held-out prompts asked for, but there are 927"):
    stream(data_dir).heldout(928)


def test_examples_for_demonstrations_come_from_training(data_dir):
  """Fails if demonstrations are drawn from held-out questions, or stop at the end of a pass."""
  made = stream(data_dir, task=few(30)).examples(70)
  assert len(made) == 70
  assert {example["question"] for example in made} == {example["question"] for example in few(30).examples(TRAIN)}


def test_a_prompt_longer_than_the_context_is_refused_at_the_start(data_dir):
  """Fails if a long prompt is cut, or found only when its turn comes."""
  with pytest.raises(UserError) as refused:
    stream(data_dir, max_prompt_tokens=6)
  (line,) = str(refused.value).splitlines()
  for part in ("calculator", "'1*1+10='", "has 7 tokens", "limit of 6", "sampling.context"):
    assert part in line


def test_a_prompt_that_the_first_check_missed_is_refused_in_its_turn(data_dir):
  """Fails if only the question with the most characters is ever measured."""
  questions = ("1*1+10=", "1*1=")
  task = dataclasses.replace(
    CALCULATOR,
    encode=lambda tokenizer, question: [1] * (7 if question == questions[0] else 9),
    examples=lambda split: [{"question": question, "answer": "1"} for question in questions],
  )
  made = stream(data_dir, task=task)
  with pytest.raises(UserError, match=r"'1\*1=' has 9 tokens"):
    for group in range(2):
      made.at(group)


def test_files_are_written_once_and_again_when_the_examples_change(tmp_path):
  """Fails if files are rewritten each time, or stale ones are read after an answer has changed."""
  stream(tmp_path, task=few(9))
  (folder,) = tmp_path.iterdir()
  times = lambda: {path: path.stat().st_mtime_ns for path in (tmp_path, *folder.rglob("*"))}  # noqa: E731
  before = times()
  stream(tmp_path, task=few(9))
  assert times() == before

  changed = [{"question": example["question"], "answer": "0"} for example in few(9).examples(TRAIN)]
  made = stream(tmp_path, task=dataclasses.replace(CALCULATOR, examples=lambda split: changed))
  assert made.at(0)[0].answer == "0" and len(list(tmp_path.iterdir())) == 2


def test_a_process_that_loses_the_race_uses_the_winners_files(tmp_path, monkeypatch):
  """Fails if the loser raises, overwrites the winner's files, or leaves its own behind."""
  write = prompts._rename_unless_there

  def another_was_first(written, folder):
    (folder / "prompts").mkdir(parents=True)
    for path in (written / "prompts").iterdir():
      path.rename(folder / "prompts" / path.name)
    (written / "prompts" / "late").mkdir()
    write(written, folder)

  monkeypatch.setattr(prompts, "_rename_unless_there", another_was_first)
  assert len(stream(tmp_path, task=few(9)).examples(9)) == 9
  (folder,) = tmp_path.iterdir()
  assert not (folder / "prompts" / "late").exists()


def test_a_folder_that_cannot_be_written_is_named_in_one_line(tmp_path):
  """Fails if the user meets a traceback."""
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"cannot keep the prompts of task calculator in .*file.*: File exists"):
    stream(tmp_path / "file")


def test_preparing_is_silent_and_without_tensorflow(tmp_path):
  """Fails if progress bars or notices reach the terminal, where they would tear the live view."""
  program = (
    "import sys; from estr_jax.tasks import TASKS, prompts; from estr_jax.model.tokenizers import CharTokenizer\n"
    "task = TASKS['calculator']; assert 'grain' not in sys.modules\n"
    f"prompts.PromptStream(task, CharTokenizer(task.alphabet), data_dir={os.fspath(tmp_path)!r},"
    " seed=0, group_size=4, max_prompt_tokens=7).at(0)\n"
    "assert 'tensorflow' not in sys.modules and 'tensorflow_datasets' in sys.modules\n"
  )
  run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
  assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
