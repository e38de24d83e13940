"""How a loss is put together: keep x weight x shaper, with every input of exp made safe before and not after.

A token without a finite ratio, and one outside the data mask, is kept by nobody.
"""

import jax
import jax.numpy as jnp

from estr_jax.objective.surrogates import clipped_surrogate
from estr_jax.objective.triangle import log_ratio
from estr_jax.structs import Batch, Scores, TokenLoss

Number = jax.Array | float


def usable(batch: Batch, *values_BT: jax.Array) -> jax.Array:
  """bool [B, T]: policy tokens whose stored log-prob and given values are finite."""
  result = batch.mask & jnp.isfinite(batch.logprob)
  for value_BT in values_BT:
    result &= jnp.isfinite(jax.lax.stop_gradient(value_BT))
  return result


def safe_log_ratio(policy: Scores, batch: Batch, edge: str) -> tuple[jax.Array, jax.Array]:
  """(log-ratio on an edge, 0 where there is none; where there is one), [B, T]; differentiable."""
  delta = log_ratio(policy.logprob, batch, edge)
  there_BT = usable(batch, delta)
  return jnp.where(there_BT, delta, 0.0), there_BT


def clipped(
  policy: Scores,
  batch: Batch,
  *,
  edge: str,
  keep_BT: jax.Array | bool = True,
  weight_BT: Number = 1.0,
  clip_low: Number,
  clip_high: Number,
  dual: Number = jnp.inf,
) -> TokenLoss:
  """-keep x weight x min(r A, clip(r) A) with r on `edge`; `weight_BT` is a constant and finite where kept."""
  delta, there_BT = safe_log_ratio(policy, batch, edge)
  return shaped(
    delta,
    batch,
    keep_BT=keep_BT & there_BT,
    weight_BT=weight_BT,
    clip_low=clip_low,
    clip_high=clip_high,
    dual=dual,
  )


def shaped(
  log_ratio_BT: jax.Array,
  batch: Batch,
  *,
  keep_BT: jax.Array,
  weight_BT: Number = 1.0,
  clip_low: Number = jnp.inf,
  clip_high: Number = jnp.inf,
  dual: Number = jnp.inf,
) -> TokenLoss:
  """`clipped` for a log-ratio of the caller's, finite where kept: of a sequence, or of an edge that moves."""
  objective, clip_BT = clipped_surrogate(
    jnp.where(keep_BT, log_ratio_BT, 0.0), batch.advantage, clip_low=clip_low, clip_high=clip_high, dual=dual
  )
  return finish(jax.lax.stop_gradient(weight_BT) * objective, keep_BT, clip_BT)


def reinforce(
  policy: Scores, batch: Batch, *, keep_BT: jax.Array, weight_BT: Number, bounded_BT: jax.Array | bool = False
) -> TokenLoss:
  """-keep x sg(weight) x A log pi: a constant weight on the score function; `bounded_BT` marks cut weights."""
  logprob_BT = jnp.where(keep_BT, policy.logprob, 0.0)
  return finish(jax.lax.stop_gradient(weight_BT) * batch.advantage * logprob_BT, keep_BT, bounded_BT)


def finish(objective_BT: jax.Array, keep_BT: jax.Array, clip_BT: jax.Array | bool) -> TokenLoss:
  """The TokenLoss of an objective that is finite where kept."""
  return TokenLoss(jnp.where(keep_BT, -objective_BT, 0.0), keep_BT, keep_BT & clip_BT)
