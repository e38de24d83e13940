"""The importance weight of a whole sequence and how many sequences the weights are worth."""

import jax
import jax.numpy as jnp

from estr_jax.objective.scopes import first_of_sequence, sequence_sum
from estr_jax.objective.surrogates import MAX_LOG_RATIO
from estr_jax.structs import Batch, Scores


def log_sequence_weight(log_ratio_BT: jax.Array, where_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
  """log of the product of the ratios of a sequence's tokens `where_BT`, at each of its tokens; bounded, [B, T]."""
  total_BT = sequence_sum(jnp.where(where_BT, log_ratio_BT, 0.0), segment_BT)
  return jnp.clip(total_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_weight_sums(policy: Scores, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(sum of w, sum of w^2, sequences) with w = prod pi / mu, detached; they add across microbatches."""
  delta_BT = jax.lax.stop_gradient(policy.logprob) - batch.logprob
  finite_BT = batch.mask & jnp.isfinite(delta_BT)
  weight_BT = jnp.exp(log_sequence_weight(delta_BT, finite_BT, batch.segment))
  once_BT = first_of_sequence(finite_BT, batch.segment)
  weight_BT = jnp.where(once_BT, weight_BT, 0.0)
  return jnp.sum(weight_BT), jnp.sum(jnp.square(weight_BT)), jnp.sum(once_BT).astype(jnp.float32)


def effective_share(total: jax.Array, total_square: jax.Array, count: jax.Array) -> jax.Array:
  """Effective sample size / count = (sum w)^2 / (n sum w^2), in (0, 1]; 1 where there is nothing."""
  there = total_square > 0
  return jnp.where(there, jnp.square(total) / jnp.where(there, count * total_square, 1.0), 1.0)
