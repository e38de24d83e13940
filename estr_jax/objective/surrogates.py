"""Surrogates: the differentiable shapers of a ratio."""

import jax
import jax.numpy as jnp

# exp of a larger log-ratio says nothing more about the token, and overflows soon after; past it the gradient is 0.
MAX_LOG_RATIO = 20.0


def clipped_surrogate(
  log_ratio_BT: jax.Array, advantage_BT: jax.Array, *, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
  """PPO's pessimistic objective min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al., arXiv 1707.06347).

  Args:
    log_ratio_BT: finite; the gradient flows through it.
    advantage_BT: constant.
    clip_low, clip_high: distances from 1; DAPO's clip-higher (arXiv 2503.14476) is clip_high > clip_low.

  Returns:
    (objective, clipped), [B, T]; `clipped` where the clip took the gradient away, which is outward moves only, or
    the ratio is past exp(MAX_LOG_RATIO).
  """
  ratio = jnp.exp(jnp.clip(log_ratio_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO))
  bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  clipped = jnp.where(advantage_BT >= 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
  clipped |= jnp.abs(log_ratio_BT) > MAX_LOG_RATIO
  return jnp.minimum(ratio * advantage_BT, bounded * advantage_BT), clipped & (advantage_BT != 0)
