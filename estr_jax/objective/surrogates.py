"""Surrogates: the differentiable shapers of a ratio."""

import jax
import jax.numpy as jnp

# exp of a larger log-ratio says nothing more about the token, and overflows soon after; past it the gradient is 0.
MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio_BT: jax.Array) -> jax.Array:
  """exp of a log-ratio kept within +-MAX_LOG_RATIO."""
  return jnp.exp(jnp.clip(log_ratio_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_surrogate(
  log_ratio_BT: jax.Array,
  advantage_BT: jax.Array,
  *,
  clip_low: jax.Array | float,
  clip_high: jax.Array | float,
  dual: jax.Array | float = jnp.inf,
) -> tuple[jax.Array, jax.Array]:
  """PPO's pessimistic objective min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al., arXiv 1707.06347).

  Args:
    log_ratio_BT: finite; the gradient flows through it.
    advantage_BT: constant.
    clip_low, clip_high: distances from 1; DAPO's clip-higher (arXiv 2503.14476) is clip_high > clip_low, and inf is
      no clip.
    dual: where A < 0 the objective is at least dual x A, so that a huge ratio ends its push (Ye et al.,
      arXiv 1912.09729); inf is none.

  Returns:
    (objective, clipped), [B, T]; `clipped` where a bound took the gradient away: an outward move past the clip, a
    ratio past `dual`, or one past exp(MAX_LOG_RATIO).
  """
  ratio = bounded_exp(log_ratio_BT)
  bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  objective = jnp.minimum(ratio * advantage_BT, bounded * advantage_BT)
  negative = advantage_BT < 0
  objective = jnp.where(negative & (ratio > dual), jnp.where(negative, dual, 0.0) * advantage_BT, objective)
  clipped = jnp.where(negative, (ratio < 1 - clip_low) | (ratio > dual), ratio > 1 + clip_high)
  clipped |= jnp.abs(log_ratio_BT) > MAX_LOG_RATIO
  return objective, clipped & (advantage_BT != 0)
