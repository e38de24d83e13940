"""The ratios of a token that an f-divergence ball around its anchor policy allows.

The vocabulary is reduced to "this token or another": with p the anchor's probability of the token, a ratio r gives the
token p r, and the ball is D(r) = p f(r) + (1 - p) f((1 - p r) / (1 - p)) <= radius. Every function takes log p [B, T]
and returns (low, high), with low in [0, 1] and high in [1, 1 / p] (BandPO, arXiv 2603.04918).
"""

import jax
import jax.numpy as jnp

_CERTAIN = 1e-6  # of 1 - p, below which no float32 tells the other tokens
_HALVINGS = 40
_LARGEST = 100.0  # no band reaches further


def tv_band(log_p: jax.Array, radius: float) -> tuple[jax.Array, jax.Array]:
  """f = |u - 1| / 2: 1 +- radius / p."""
  return _within_simplex(log_p, 1 - radius * jnp.exp(-log_p), 1 + radius * jnp.exp(-log_p))


def chi2_band(log_p: jax.Array, radius: float) -> tuple[jax.Array, jax.Array]:
  """f = (u - 1)^2: 1 +- sqrt(radius (1 - p) / p)."""
  reach = jnp.sqrt(radius * -jnp.expm1(log_p) * jnp.exp(-log_p))
  return _within_simplex(log_p, 1 - reach, 1 + reach)


def kl_band(log_p: jax.Array, radius: float) -> tuple[jax.Array, jax.Array]:
  """f = u - 1 - log u, so that D is KL(anchor || pi): by bisection in log r."""
  certain = -jnp.expm1(log_p) < _CERTAIN
  log_p = jnp.where(certain, jnp.log(0.5), log_p)
  p = jnp.exp(log_p)

  def divergence(log_r):
    # log1p(-p r) of a token that would take everything is -inf: further than any radius.
    return -p * log_r + (1 - p) * (jnp.log1p(-p) - jnp.log1p(-jnp.minimum(jnp.exp(log_p + log_r), 1.0)))

  def halve(_, interval):
    inside, outside = interval
    middle = 0.5 * (inside + outside)
    within = divergence(middle) <= radius
    return jnp.where(within, middle, inside), jnp.where(within, outside, middle)

  one = jnp.zeros_like(log_p)
  high, _ = jax.lax.fori_loop(0, _HALVINGS, halve, (one, jnp.minimum(-log_p, jnp.log(_LARGEST))))
  low, _ = jax.lax.fori_loop(0, _HALVINGS, halve, (one, one - 30.0))
  # A token that is certain can only lose: D(r) = -log r.
  return jnp.where(certain, jnp.exp(-radius), jnp.exp(low)), jnp.where(certain, 1.0, jnp.exp(high))


def _within_simplex(log_p, low, high):
  return jnp.maximum(low, 0.0), jnp.minimum(jnp.minimum(high, jnp.exp(-log_p)), _LARGEST)
