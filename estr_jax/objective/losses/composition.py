"""How a loss is put together: keep x weight x shaper, with every input of exp made safe before and not after.

A token without a finite ratio, and one outside the data mask, is kept by nobody.
"""

import jax
import jax.numpy as jnp

from estr_jax.objective.surrogates import clipped_surrogate
from estr_jax.objective.triangle import log_ratio
from estr_jax.structs import Batch, Scores, TokenLoss


def usable(batch: Batch, *values_BT: jax.Array) -> jax.Array:
  """bool [B, T]: policy tokens whose stored log-prob and given values are finite."""
  result = batch.mask & jnp.isfinite(batch.logprob)
  for value_BT in values_BT:
    result &= jnp.isfinite(jax.lax.stop_gradient(value_BT))
  return result


def clipped(
  policy: Scores,
  batch: Batch,
  *,
  edge: str,
  keep_BT: jax.Array | bool = True,
  weight_BT: jax.Array | float = 1.0,
  clip_low: jax.Array | float,
  clip_high: jax.Array | float,
) -> TokenLoss:
  """-keep x weight x min(r A, clip(r) A) with r on `edge`; `weight_BT` is a constant and finite where kept."""
  delta = log_ratio(policy.logprob, batch, edge)
  keep_BT = keep_BT & usable(batch, delta)
  objective, clip_BT = clipped_surrogate(
    jnp.where(keep_BT, delta, 0.0), batch.advantage, clip_low=clip_low, clip_high=clip_high
  )
  return finish(weight_BT * objective, keep_BT, clip_BT)


def reinforce(
  policy: Scores, batch: Batch, *, keep_BT: jax.Array, weight_BT: jax.Array | float, bounded_BT: jax.Array
) -> TokenLoss:
  """-keep x sg(weight) x A log pi: a constant weight on the score function; `bounded_BT` marks changed weights."""
  logprob_BT = jnp.where(keep_BT, policy.logprob, 0.0)
  return finish(jax.lax.stop_gradient(weight_BT) * batch.advantage * logprob_BT, keep_BT, bounded_BT)


def finish(objective_BT: jax.Array, keep_BT: jax.Array, clip_BT: jax.Array) -> TokenLoss:
  """The TokenLoss of an objective that is finite where kept."""
  return TokenLoss(jnp.where(keep_BT, -objective_BT, 0.0), keep_BT, keep_BT & clip_BT)
