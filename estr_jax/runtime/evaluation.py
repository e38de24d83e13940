"""Accuracy on held-out prompts, sampled and greedy."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from estr_jax.model.config import DecoderConfig
from estr_jax.model.tokenizers import Tokenizer
from estr_jax.sampler.engine import Engine, Sampling
from estr_jax.sampler.rollout import rollout
from estr_jax.structs import Prompt, Trajectory, Weights
from estr_jax.tasks.task import Task


class Evaluator:
  """Rolls out held-out prompts, each once sampled and once greedily, always with the same random keys."""

  def __init__(
    self,
    model: DecoderConfig,
    task: Task,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    key: jax.Array,
    mesh: Mesh,
  ):
    n = len(prompts)
    self._prompts = [(prompt, dataclasses.replace(prompt, id=n + prompt.id)) for prompt in prompts]
    self._first_greedy = n
    self._engine = Engine(model, task, tokenizer, sampling, key, greedy=range(n, 2 * n), mesh=mesh)

  def rollouts(self, weights: Weights, prompts: int) -> dict[str, list[Trajectory]]:
    """{"sampled": trajectories, "greedy": ...} of the first `prompts` held-out prompts."""
    pairs = [prompt for pair in self._prompts[:prompts] for prompt in pair]  # side by side, to share their prefill
    trajectories = rollout(self._engine, pairs, lambda _: weights, segments=1, segment_tokens=1)
    return {
      "sampled": [t for t in trajectories if t.prompt_id < self._first_greedy],
      "greedy": [t for t in trajectories if t.prompt_id >= self._first_greedy],
    }

  def __call__(self, weights: Weights, prompts: int) -> Mapping[str, float]:
    """{"eval/sampled_accuracy": mean reward, "eval/greedy_accuracy": ...}."""
    return accuracies(self.rollouts(weights, prompts))


def accuracies(rollouts: Mapping[str, Sequence[Trajectory]]) -> dict[str, float]:
  """{"eval/KIND_accuracy": mean reward} of each kind."""
  return {f"eval/{kind}_accuracy": float(np.mean([t.reward for t in done])) for kind, done in rollouts.items()}
