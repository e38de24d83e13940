"""The key that names the task."""

from collections.abc import Iterable, Iterator

from ml_collections import ConfigDict

from estr_jax.options import Key, Keys, under
from estr_jax.tasks.task import Task


def keys(names: Iterable[str]) -> Keys:
  return under("task", {"name": Key("calculator", "what is learnt", choices=sorted(names))})


def rules(c: ConfigDict, task: Task) -> Iterator[str]:
  """What is wrong between keys and what the task brings."""
  if not c.model.folder and task.alphabet is None:
    yield (
      f"task.name={task.name} speaks to a chat model and model.folder is empty; `make smollm2` fetches one, then set "
      "model.folder"
    )
  if c.warm_start.steps and task.demonstrate is None:
    yield (f"warm_start.steps={c.warm_start.steps}, but task {task.name} brings no demonstrations; set it to 0")
