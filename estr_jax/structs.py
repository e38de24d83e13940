"""The records that cross a room's border.

Shape legend: B sequences, T tokens, V vocabulary, G groups in a batch, N samples of a group, D model width,
S sampler slots, L layers, k experts a token.

Alignment, everywhere: index t of a token-aligned array speaks of token t itself, so `logprob[t]` is
log mu(tokens[t] | tokens[:t]). Entropies and log-probs are in nats. A version is the number of optimizer
updates that made a set of weights. `mask` is always the data mask (True = sampled by the policy); `keep`
is always the trust region.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

Params = Any  # a nested dict of arrays
Scalar = jax.Array | np.float32 | float  # f32 []

NO_VERSION = -1  # the version of a token that no policy sampled
NO_EXPERT = 255  # where no router's choice was recorded: experts are u8


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One request for one trajectory. Host.

  The `group_size` prompts of one group share `group` and `tokens` and differ in `id`, which names the
  trajectory for ever: its random key, its lease and its place in the queue are derived from it.
  """

  id: int  # group * group_size + index within the group
  group: int  # position in the seeded prompt stream
  tokens: np.ndarray  # i32 [P]
  answer: str  # what the reward function compares with
  task: str


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One finished rollout, token-aligned, prompt included. Host numpy; every array has length T."""

  tokens: np.ndarray  # i32 [T]
  mask: np.ndarray  # bool [T]; False for prompt, tool and observation tokens
  logprob: np.ndarray  # f32 [T]; log mu at the sampling temperature; 0 where not mask
  entropy: np.ndarray  # f32 [T]; full-vocabulary H of mu, nats, at the sampling temperature; 0 where not mask
  gini: np.ndarray  # f32 [T]; Gini impurity 1 - sum_w mu_w^2 of the same distribution; 0 where not mask
  version: np.ndarray  # i32 [T]; NO_VERSION where not mask
  reward: float
  prompt_id: int
  group: int
  task: str
  finish: str  # "stop" (the policy ended it), "length" (no room left), "environment" (the environment ended it)
  turns: int  # how often the policy was given the word
  seconds: float  # from admission to a slot until the end
  vocabulary: np.ndarray | None = None  # f32 [T, V]; log mu of the whole vocabulary, 0 where not mask; if asked for
  # u8 [T, L, k], if asked for: the experts that the sampler's routers gave each token as an input, prompt included;
  # NO_EXPERT where it never was one, as the last token.
  experts: np.ndarray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """What one update consumes, padded, or packed where a row holds several segments.

  Device. Where it is assembled, NumPy arrays stand in their place, and where it is planned, their shapes.
  """

  tokens: jax.Array  # i32 [B, T]
  mask: jax.Array  # bool [B, T]
  logprob: jax.Array  # f32 [B, T]
  entropy: jax.Array  # f32 [B, T]
  gini: jax.Array  # f32 [B, T]
  staleness: jax.Array  # i32 [B, T]; the learner's version - the token's; 0 where not mask
  segment: jax.Array  # i32 [B, T]; 0 = padding, 1.. = the sequences of a row
  group: jax.Array  # i32 [B, T]; 0 = padding, 1.. = the prompts of the batch
  reward: jax.Array  # f32 [B, T]; of the token's sequence
  advantage: jax.Array  # f32 [B, T]
  proximal: jax.Array | None = None  # f32 [B, T]; log q, recomputed by the learner before its update
  reference: jax.Array | None = None  # f32 [B, T]; log-prob under the weights of version 0
  vocabulary: jax.Array | None = None  # f32 [B, T, V]; log mu of the whole vocabulary, where it was recorded
  experts: jax.Array | None = None  # u8 [B, T, L, k]; as of a Trajectory, where they were recorded


class Scores(NamedTuple):
  """What a policy says about some tokens; float32, nats. `objective.scoring` has the definitions."""

  logprob: jax.Array  # at most 0
  entropy: jax.Array | None  # of the whole vocabulary; None where nobody asked for it
  gini: jax.Array | None  # 1 - sum of squared probabilities, there with the entropy; no gradient
  vocabulary: jax.Array | None = None  # [..., V]; every log-prob, for small vocabularies and where asked for


class TokenLoss(NamedTuple):
  """What a loss returns: per token, never a scalar. See `objective.losses` for the contract."""

  value: jax.Array  # f32 [B, T]; already zero where not keep
  keep: jax.Array  # bool [B, T]; the trust region
  clipped: jax.Array  # bool [B, T]; kept tokens whose ratio or weight a bound changed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """The learner's state; `step` is also the version of `params`."""

  step: jax.Array  # i32 []
  entropy_coefficient: jax.Array  # f32 []; of the entropy bonus in the next update
  params: Params
  opt_state: Any


class Weights(NamedTuple):
  """Parameters and the number of updates that made them."""

  version: int
  params: Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
  """A metric that adds correctly across microbatches, hosts and steps: sum it, then divide once.

  `total` and `count` are scalars, or vectors of one shape for a metric by bin.
  """

  total: jax.Array | np.ndarray | float
  count: jax.Array | np.ndarray | float

  def merge(self, other: "Mean") -> "Mean":
    return Mean(self.total + other.total, self.count + other.count)

  def value(self) -> np.ndarray:
    """The mean as numpy; NaN where nothing was counted."""
    total, count = np.asarray(self.total, np.float64), np.asarray(self.count, np.float64)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


Metric = Mean | np.ndarray | float  # a mean, a histogram, or a number of the host


def mean_of(metrics: Mapping[str, Metric], name: str) -> Mean:
  """The metric of that name, which has to be a mean. Raises TypeError where it is none."""
  metric = metrics[name]
  if not isinstance(metric, Mean):
    raise TypeError(f"metric {name} is {type(metric).__name__}, and not a Mean")
  return metric


def histogram_of(metrics: Mapping[str, Metric], name: str) -> np.ndarray:
  """The metric of that name, which has to be a histogram. Raises TypeError where it is none."""
  metric = metrics[name]
  if not isinstance(metric, np.ndarray):
    raise TypeError(f"metric {name} is {type(metric).__name__}, and not a histogram")
  return metric
