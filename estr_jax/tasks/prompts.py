"""The seeded stream of prompts. Its cursor is one integer, the group, so a restart resumes it exactly."""

import errno
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from estr_jax.errors import UserError
from estr_jax.structs import Prompt
from estr_jax.tasks.task import HELDOUT, TRAIN, Example, Task

if TYPE_CHECKING:
  from estr_jax.model.tokenizers import Tokenizer


class PromptStream:
  """Prompts of one task by group number; the same seed gives the same prompts for ever.

  The examples of a split are shuffled anew in each pass. Construction writes the task's examples below `data_dir`
  unless they lie there already; importing the two data libraries for it takes some seconds.
  """

  def __init__(
    self,
    task: Task,
    tokenizer: "Tokenizer",
    *,
    data_dir: str | os.PathLike,
    seed: int,
    group_size: int,
    max_prompt_tokens: int,
  ):
    """Raises UserError if `data_dir` cannot be written, or if a prompt is longer than `max_prompt_tokens`.

    The longest question of either split is tried here, so that a run fails at its start rather than in its middle;
    every other prompt is checked when it is asked for.
    """
    import grain  # slow to import, and needed nowhere else

    self._task, self._tokenizer = task, tokenizer
    self._group_size, self._max_prompt_tokens = group_size, max_prompt_tokens
    examples = {split: [dict(example) for example in task.examples(split)] for split in (TRAIN, HELDOUT)}
    for of_split in examples.values():
      self._tokens(max((example["question"] for example in of_split), key=len))
    sources = _prepare(task.name, examples, pathlib.Path(data_dir))
    shuffled = {name: grain.MapDataset.source(source).seed(seed).shuffle() for name, source in sources.items()}
    self._train = shuffled[TRAIN].repeat()
    self._heldout = shuffled[HELDOUT]

  def at(self, group: int) -> list[Prompt]:
    """The `group_size` prompts of a group: one example, ids from group * group_size on."""
    first = group * self._group_size
    example = _text(self._train[group])
    return self._prompts(example, range(first, first + self._group_size), group)

  def heldout(self, n: int) -> list[Prompt]:
    """The first n held-out prompts in a seeded order, each a group of its own. Raises UserError if there are fewer."""
    if n > len(self._heldout):
      raise UserError(
        f"task {self._task.name}: {n} held-out prompts asked for, but there are {len(self._heldout)}; ask for fewer"
      )
    return [prompt for i in range(n) for prompt in self._prompts(_text(self._heldout[i]), range(i, i + 1), i)]

  def examples(self, n: int) -> list[Example]:
    """The first n training examples in the seeded order, going round as often as needed: demonstrations start here."""
    return [_text(self._train[i]) for i in range(n)]

  def _prompts(self, example: Example, ids: Sequence[int], group: int) -> list[Prompt]:
    tokens = self._tokens(example["question"])
    return [Prompt(id, group, tokens, example["answer"], self._task.name) for id in ids]

  def _tokens(self, question: str) -> np.ndarray:
    tokens = np.asarray(self._task.encode(self._tokenizer, question), np.int32)
    if len(tokens) > self._max_prompt_tokens:
      raise UserError(
        f"task {self._task.name}: the prompt of {question!r} has {len(tokens)} tokens, "
        f"more than the limit of {self._max_prompt_tokens}; raise sampling.context"
      )
    return tokens


def _text(record: Mapping[str, bytes]) -> dict[str, str]:
  return {key: value.decode() for key, value in record.items()}


def _prepare(name: str, examples: Mapping[str, Sequence[Example]], data_dir: pathlib.Path) -> Mapping[str, Sequence]:
  """Writes the examples once and returns random access to each split.

  The folder is named by a digest of the examples, so it is made anew whenever they change. It is written aside
  and renamed: of several processes that prepare at once, one wins and the others use its files.
  """
  from estr_jax.tasks import builder  # imports tensorflow_datasets, which is slow

  digest = hashlib.sha256(json.dumps(examples, sort_keys=True).encode()).hexdigest()[:12]
  folder = data_dir / f"{name}-{digest}"
  try:
    if not folder.exists():
      data_dir.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryDirectory(dir=data_dir, prefix=".writing-", ignore_cleanup_errors=True) as aside:
        written = pathlib.Path(aside) / "data"
        builder.write(examples, os.fspath(written))
        shutil.rmtree(written / "downloads")
        _rename_unless_there(written, folder)
    return {split: builder.source(examples, os.fspath(folder), split) for split in examples}
  except OSError as error:
    reason = os.strerror(error.errno) if error.errno else error
    raise UserError(
      f"cannot keep the prompts of task {name} in {folder}: {reason}; mend it or choose another folder"
    ) from error


def _rename_unless_there(written: pathlib.Path, folder: pathlib.Path) -> None:
  try:
    written.rename(folder)
  except OSError as error:
    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
      raise
