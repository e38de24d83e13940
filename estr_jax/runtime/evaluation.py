"""Accuracy on held-out prompts, sampled and greedy."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from estr_jax.model.decoder import DecoderConfig
from estr_jax.model.tokenizers import Tokenizer
from estr_jax.sampler.engine import Engine, Sampling
from estr_jax.sampler.rollout import rollout
from estr_jax.structs import Prompt, Trajectory, Weights
from estr_jax.tasks.task import Task


class Evaluator:
  """Rolls out held-out prompts once sampled and once greedily, always with the same random keys."""

  def __init__(
    self,
    model: DecoderConfig,
    task: Task,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    slots: int,
    context: int,
    chunk: int,
    temperature: float,
    key: jax.Array,
  ):
    self._prompts = prompts

    def engine(greedy: bool) -> Engine:
      sampling = Sampling(slots, context, chunk, temperature, greedy, rebuild_cache=False)
      return Engine(model, task, tokenizer, sampling, key)

    self._engines = {"sampled": engine(False), "greedy": engine(True)}

  def trajectories(self, weights: Weights, prompts: int, kind: str) -> list[Trajectory]:
    """The first `prompts` held-out prompts, rolled out; kind is "sampled" or "greedy"."""
    return rollout(self._engines[kind], self._prompts[:prompts], lambda _: weights, segments=1, segment_tokens=1)

  def __call__(self, weights: Weights, prompts: int) -> Mapping[str, float]:
    """{"eval/sampled_accuracy": mean reward, "eval/greedy_accuracy": ...}."""
    return {
      f"eval/{kind}_accuracy": float(np.mean([t.reward for t in self.trajectories(weights, prompts, kind)]))
      for kind in self._engines
    }
