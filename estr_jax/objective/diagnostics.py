"""What a batch says about its own off-policyness; sums and counts that add across microbatches.

Every metric is a `Mean`, and so is a vector of them by bin. What is no mean (an effective sample size, a quantile) is
derived on the host, once the sums of the whole batch are there (`derive`).
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from estr_jax.objective.sequence_weights import sequence_weight_sums
from estr_jax.objective.surrogates import MAX_LOG_RATIO
from estr_jax.objective.triangle import required
from estr_jax.objective.trust_regions import scaled_square, vocabulary_kl
from estr_jax.structs import Batch, Mean, Metric, Scores, TokenLoss, mean_of

# Bins of the behaviour entropy, nats. Fine near zero, where a fixed band and ESTR's differ most. Fixed bins and not the
# deciles of a batch: those do not add across microbatches, move from step to step, and coincide where a policy is
# certain of most tokens.
ENTROPY_EDGES = np.array([0.0, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.4, 0.7, 1.0, 1.4, 2.0, 3.0, 20.0])

# First staleness of each bin, versions: 0, 1, 2, 3, 4, 5-8, 9-16, 17-32, 33 or more.
STALENESS_EDGES = np.array([0, 1, 2, 3, 4, 5, 9, 17, 33])

# S = delta^2 / (H + SCORE_EPS), whatever the loss, so that runs of different losses compare; the eps is ESTR's.
SCORE_EPS = 0.01
SCORE_BINS_PER_DECADE = 10  # a quantile read off the histogram is right within a factor of 10^(1 / 10) = 1.26
# The bins below the first and from the last edge on are open; together there is one more bin than edges.
SCORE_EDGES = 10.0 ** (np.arange(-6 * SCORE_BINS_PER_DECADE, 3 * SCORE_BINS_PER_DECADE + 1) / SCORE_BINS_PER_DECADE)
SCORE_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}

_OLDEST = 1023  # position and age share the 31 bits of an i32, which leaves rows of two million tokens


def diagnose(policy: Scores, batch: Batch, token_loss: TokenLoss) -> dict[str, Mean]:
  """Means over the policy tokens of a batch.

  Args:
    policy: the learner's scores under the weights before the update, entropy included.
    batch: the batch.
    token_loss: what the loss returned for it.

  Returns:
    name -> Mean; names and formulas are in observe.glossary. Tokens whose stored log-prob is not finite count in the
    fractions, and not in the moments of delta; one whose stored entropy is not finite is in no mean or bin of H.
  """
  mask = batch.mask
  delta = jax.lax.stop_gradient(policy.logprob - batch.logprob)
  finite = mask & jnp.isfinite(delta)
  known = mask & jnp.isfinite(batch.entropy)
  delta = jnp.where(finite, delta, 0.0)
  bounded = jnp.clip(delta, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  ratio = jnp.exp(bounded)
  # ratio - 1 would round away the difference of nearly equal policies.
  deviation = jnp.expm1(bounded)
  outside = mask & ~token_loss.keep
  high, low = batch.advantage > 0, batch.advantage < 0
  switch = version_switches(batch)

  def mean(value, where):
    return Mean(jnp.sum(jnp.where(where, value, 0.0)), _count(where))

  outside_H, known_H, abs_H, square_H, finite_H = _sum_by(
    _bin(batch.entropy, ENTROPY_EDGES[1:-1]),
    len(ENTROPY_EDGES) - 1,
    (outside & known, known, *(jnp.where(known, value, 0) for value in (jnp.abs(delta), jnp.square(delta), finite))),
  )
  sign = 1 + high.astype(jnp.int32) - low.astype(jnp.int32)
  outside_A, mask_A = _sum_by(sign, 3, (outside, mask))
  outside_V, mask_V = _sum_by(_bin(batch.staleness, STALENESS_EDGES[1:]), len(STALENESS_EDGES), (outside, mask))
  weight, weight_square, sequences = sequence_weight_sums(policy, batch)
  return _exact(policy, batch, known) | {
    "loss/mask_fraction": mean(outside, mask),
    "loss/mask_fraction_by_entropy": Mean(outside_H, known_H),
    "loss/mask_fraction_by_advantage": Mean(outside_A, mask_A),
    "loss/mask_fraction_by_staleness": Mean(outside_V, mask_V),
    "loss/mask_fraction_at_switch": mean(outside, switch),
    "loss/mask_fraction_off_switch": mean(outside, mask & ~switch),
    "loss/clip_fraction": mean(token_loss.clipped, mask),
    "loss/clip_fraction_high": mean(token_loss.clipped & high, mask),
    "loss/clip_fraction_low": mean(token_loss.clipped & low, mask),
    "policy/entropy": mean(batch.entropy, known),
    "policy/entropy_at_switch": mean(batch.entropy, known & switch),
    "policy/entropy_off_switch": mean(batch.entropy, known & ~switch),
    "policy/learner_entropy": mean(jax.lax.stop_gradient(policy.entropy), mask),
    "policy/rollout_kl": mean(deviation - delta, finite),
    "policy/rollout_kl_k1": mean(-delta, finite),
    "policy/chi_square": mean(jnp.square(deviation), finite),
    "policy/abs_delta": mean(jnp.abs(delta), finite),
    "policy/abs_delta_at_switch": mean(jnp.abs(delta), finite & switch),
    "policy/abs_delta_off_switch": mean(jnp.abs(delta), finite & ~switch),
    "policy/switch_share": mean(switch, mask),
    "policy/ratio": mean(ratio, finite),
    "policy/ratio_square": mean(jnp.square(ratio), finite),
    "policy/ratio_deviation_kept": mean(jnp.abs(deviation), finite & ~outside),
    "policy/ratio_deviation_masked": mean(jnp.abs(deviation), finite & outside),
    "policy/sequence_weight": Mean(weight, sequences),
    "policy/sequence_weight_square": Mean(weight_square, sequences),
    "policy/abs_delta_by_entropy": Mean(abs_H, finite_H),
    "policy/delta_square_by_entropy": Mean(square_H, finite_H),
    "policy/token_share_by_entropy": _share(finite_H),
    "policy/token_share_by_staleness": _share(mask_V),
    "policy/score_histogram": _share(
      _histogram(scaled_square(delta, batch.entropy, eps=SCORE_EPS, power=1.0), finite & known)
    ),
  }


def _exact(policy: Scores, batch: Batch, known_BT: jax.Array) -> dict[str, Mean]:
  """Expectations under mu, over the whole vocabulary in place of the sampled token; where mu was recorded.

  At low entropy a sampled mean square says nothing: the rare token that carries it is hardly ever drawn.
  """
  if batch.vocabulary is None:
    return {}
  log_mu = batch.vocabulary
  mu = jnp.exp(log_mu)
  log_pi = required(policy.vocabulary, "policy.vocabulary")
  delta = jnp.where(mu > 0, jax.lax.stop_gradient(log_pi) - log_mu, 0.0)
  square_BT = jnp.sum(mu * jnp.square(delta), axis=-1)
  there_BT = known_BT & jnp.isfinite(square_BT)
  home_BT = _bin(batch.entropy, ENTROPY_EDGES[1:-1])
  square_H, there_H = _sum_by(home_BT, len(ENTROPY_EDGES) - 1, (jnp.where(there_BT, square_BT, 0.0), there_BT))
  kl_BT = jnp.where(there_BT, vocabulary_kl(policy, batch), 0.0)
  return {
    "policy/exact_square_by_entropy": Mean(square_H, there_H),
    "policy/exact_kl": Mean(jnp.sum(kl_BT), _count(there_BT)),
  }


def derive(metrics: Mapping[str, Metric]) -> dict[str, float | np.ndarray]:
  """What is a function of the whole batch's means: ESS, KL / entropy, quantiles of S, and its histogram as counts.

  Args:
    metrics: those of `diagnose`, summed over the microbatches.

  Returns:
    name -> value, NaN where nothing was counted.
  """

  def mean(name: str) -> float:
    return float(mean_of(metrics, name).value())

  entropy, histogram = mean("policy/entropy"), np.asarray(mean_of(metrics, "policy/score_histogram").total, np.int64)
  return {
    "policy/ess": effective_sample_size(mean("policy/ratio"), mean("policy/ratio_square")),
    "policy/sequence_ess": effective_sample_size(mean("policy/sequence_weight"), mean("policy/sequence_weight_square")),
    "policy/kl_per_entropy": mean("policy/rollout_kl") / entropy if entropy > 0 else float("nan"),
    "policy/score_histogram": histogram,
    **{f"policy/score_{name}": score_quantile(histogram, level) for name, level in SCORE_QUANTILES.items()},
  }


def effective_sample_size(ratio: float, ratio_square: float) -> float:
  """ESS / n = mean(w)^2 / mean(w^2) of importance ratios; 1 on policy."""
  return ratio**2 / ratio_square if ratio_square > 0 else float("nan")


def score_quantile(histogram: np.ndarray, level: float) -> float:
  """The smallest S below or at which a share `level` of the tokens lies, as well as the histogram tells.

  Args:
    histogram: counts in the bins of SCORE_EDGES; may be of many steps.
    level: in (0, 1].

  Returns:
    A value in the bin that holds the quantile: right within a factor of 10^(1 / SCORE_BINS_PER_DECADE). The first edge
    stands for all that is below it, the last one for all above; NaN where nothing was counted.
  """
  upto = np.cumsum(histogram, dtype=np.float64)
  if upto[-1] == 0:
    return float("nan")
  rank = level * upto[-1]
  home = int(np.argmax(upto >= rank))
  if home == 0 or home == len(SCORE_EDGES):
    return float(SCORE_EDGES[0 if home == 0 else -1])
  low, high = SCORE_EDGES[home - 1], SCORE_EDGES[home]
  return float(low * (high / low) ** ((rank - upto[home - 1]) / histogram[home]))


def version_switches(batch: Batch) -> jax.Array:
  """bool [B, T]: policy tokens of another version than the policy token before them in their sequence.

  Tool tokens may stand between the two. Within one batch versions differ where the staleness does; ages of _OLDEST
  versions and more count as one.
  """
  position_T = jnp.arange(batch.mask.shape[1])
  begins_BT = batch.segment != jnp.roll(batch.segment, 1, axis=1)
  begin_BT = jax.lax.cummax(jnp.where(begins_BT, position_T, 0), axis=1)
  # One running maximum carries the latest policy token's position, and in its low digits that token's age.
  age_BT = jnp.clip(batch.staleness, 0, _OLDEST)
  latest_BT = jax.lax.cummax(jnp.where(batch.mask, position_T * (_OLDEST + 1) + age_BT, -1), axis=1)
  before_BT = jnp.roll(latest_BT, 1, axis=1).at[:, 0].set(-1)
  same_BT = (before_BT >= 0) & (before_BT // (_OLDEST + 1) >= begin_BT)
  return batch.mask & same_BT & (before_BT % (_OLDEST + 1) != age_BT)


def _count(where_BT: jax.Array) -> jax.Array:
  return jnp.sum(where_BT).astype(jnp.float32)


def _bin(value_BT: jax.Array, inner_edges: np.ndarray) -> jax.Array:
  """i32 [B, T]: how many of the edges a value has reached; 0 for a NaN."""
  edges_E = jnp.asarray(inner_edges, value_BT.dtype)
  return jnp.sum(value_BT >= edges_E[:, None, None], axis=0)


def _sum_by(bin_BT: jax.Array, bins: int, values: Sequence[jax.Array]) -> list[jax.Array]:
  """f32 [bins] for each value [B, T]: its sum in each bin.

  Bin after bin, so that nothing [bins, B, T] ever lives; rows are added last, so that devices which hold rows of their
  own meet once.
  """
  sums_EB = jax.lax.map(
    lambda index: [jnp.sum(jnp.where(bin_BT == index, value_BT, 0), axis=1) for value_BT in values],
    jnp.arange(bins),
  )
  return [jnp.sum(value_EB, axis=1).astype(jnp.float32) for value_EB in sums_EB]


def _histogram(score_BT: jax.Array, where_BT: jax.Array) -> jax.Array:
  """f32 [len(SCORE_EDGES) + 1]: tokens in each bin, from how many have reached each edge."""
  score_BT = jnp.where(where_BT, score_BT, -1.0)
  reached_EB = jax.lax.map(lambda edge: jnp.sum(score_BT >= edge, axis=1), jnp.asarray(SCORE_EDGES, jnp.float32))
  reached_E = jnp.sum(reached_EB, axis=1)
  return -jnp.diff(reached_E, prepend=jnp.sum(where_BT), append=0).astype(jnp.float32)


def _share(count_N: jax.Array) -> Mean:
  return Mean(count_N, jnp.broadcast_to(jnp.sum(count_N), count_N.shape))
