"""What a run left, loaded: a policy and its record."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from estr_jax.learner.checkpoint import restore_params
from estr_jax.model import decoder, sharding
from estr_jax.model.config import DecoderConfig
from estr_jax.model.tokenizers import Tokenizer
from estr_jax.observe.writers import METRICS, Row, read
from estr_jax.options import as_path
from estr_jax.run import parts, workdir
from estr_jax.run.options import Settings
from estr_jax.structs import Params, Trajectory
from estr_jax.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Loaded:
  """What a run left: a policy and its record."""

  settings: Settings
  model: DecoderConfig
  params: Params  # f32
  version: int  # optimizer updates that made `params`
  tokenizer: Tokenizer
  metrics: dict[str, np.ndarray]  # [rows], or [rows, bins] of a histogram; NaN where a row lacks it; f64

  def text(self, trajectory: Trajectory) -> str:
    """All of it, prompt included."""
    return self.tokenizer.decode(trajectory.tokens)

  def reply(self, trajectory: Trajectory) -> str:
    """What came after the prompt: the policy's turns, and the environment's between them."""
    return self.tokenizer.decode(trajectory.tokens[int(np.argmax(trajectory.mask)) :])


def load(folder: str | Path, *, version: int | None = None, task: Task | None = None) -> Loaded:
  """A checkpoint of a run, with the metrics of all its steps.

  Args:
    folder: of the run.
    version: of the checkpoint, the newest where None. A run keeps its newest two; checkpoint.every is the number of
      updates between them.
    task: the task that was passed to `train`, where one was.

  Raises:
    UserError: there is no run, no checkpoint that can be read, or none of that version.
  """
  path = as_path("folder", folder)
  settings = workdir.read_settings(path, task=task)
  tokenizer = parts.tokenizer_of(settings)
  model = parts.model_of(settings, tokenizer)
  found, params = restore_params(path / workdir.CHECKPOINTS, decoder.abstract_params(model), step=version)
  return Loaded(settings, model, params, found, tokenizer, as_arrays(read(path / METRICS)))


def as_arrays(rows: Sequence[Row]) -> dict[str, np.ndarray]:
  """The rows of a run by name: f64 [rows], or [rows, bins]; NaN where a row lacks a name or has null there."""
  found = {}
  for name in dict.fromkeys(name for row in rows for name in row):
    shape = next((np.shape(row[name]) for row in rows if row.get(name) is not None), ())
    values = [np.full(shape, np.nan) if row.get(name) is None else row[name] for row in rows]
    found[name] = np.array(values, np.float64)
  return found


def one_device() -> Mesh:
  """Whatever mesh a policy was trained on, one device serves to look at it."""
  return sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
