"""Score centering: what truncating or masking a weight adds to the expected score is taken away again."""

from typing import Literal

import jax
import jax.numpy as jnp

from estr_jax.objective.losses import composition
from estr_jax.objective.losses.hyper import Bound, Positive
from estr_jax.objective.surrogates import bounded_exp
from estr_jax.objective.triangle import required
from estr_jax.structs import Batch, Scores, TokenLoss


def score_centering(
  policy: Scores, batch: Batch, *, weight: Literal["tis", "mis", "one"] = "tis", low: Positive = 0.5, high: Bound = 2.0
) -> TokenLoss:
  """-A [sg(w_a) log p_a - sum_v sg(m_v w_v) log p_v], p = pi, m = mu (Marek & Ryabinin, arXiv 2609.20807).

  The sum is the expectation under mu of the weighted score, which importance weights w = p / m make 0 and truncated
  ones do not. weight "one" is w = 1, "tis" min(p / m, high), "mis" p / m where low <= p / m <= high and 0 elsewhere;
  a sampled token of weight 0 keeps its correction. The sum is exact: it runs over the whole recorded distribution of
  mu, where the paper's implementation records the most probable tokens and models the rest.

  Args:
    weight: how w is bounded: "tis" cuts it, "mis" drops it, and "one" puts 1 in its place.
    low: the smallest p / m that "mis" keeps; the others do not read it.
    high: the largest p / m, beyond which "tis" cuts and "mis" drops; 5 goes with "mis".
  """
  there_BT = composition.usable(batch, policy.logprob)
  # [B, T, V]; a token outside the mask has no recorded distribution, and its own pi stands in.
  log_p = jnp.where(there_BT[..., None], required(policy.vocabulary, "policy.vocabulary"), 0.0)
  log_m = jnp.where(there_BT[..., None], required(batch.vocabulary, "batch.vocabulary"), 0.0)
  frozen = jax.lax.stop_gradient(log_p)
  expected_BT = jnp.sum(jnp.exp(log_m) * _weigh(frozen - log_m, weight, low, high) * log_p, axis=-1)
  delta = jnp.where(there_BT, jax.lax.stop_gradient(policy.logprob) - batch.logprob, 0.0)
  sampled_BT = _weigh(delta, weight, low, high)
  logprob_BT = jnp.where(there_BT, policy.logprob, 0.0)
  bounded_BT = (sampled_BT != bounded_exp(delta)) if weight != "one" else False
  return composition.finish(batch.advantage * (sampled_BT * logprob_BT - expected_BT), there_BT, bounded_BT)


def _weigh(log_ratio: jax.Array, weight: str, low: float, high: float) -> jax.Array:
  ratio = bounded_exp(log_ratio)
  return {
    "one": jnp.ones_like(ratio),
    "tis": jnp.minimum(ratio, high),
    "mis": jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0),
  }[weight]
