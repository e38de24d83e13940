"""Trust regions: which tokens may move the policy. Detached masks, one value a token.

Every function takes log-probs or a log-ratio [B, T] and returns `keep` bool [B, T]. None carries a gradient, and a
value that is not finite is never kept: a stored log-prob of -inf has no ratio.
"""

import jax
import jax.numpy as jnp


def entropy_scaled(log_ratio_BT: jax.Array, entropy_BT: jax.Array, *, tau: float, eps: float) -> jax.Array:
  """ESTR (Zhao et al., arXiv 2607.22186): keep iff delta^2 / (H + eps) <= tau.

  H is the behaviour policy's full-vocabulary entropy, recorded while sampling, in nats.
  """
  delta = jax.lax.stop_gradient(log_ratio_BT)
  return jnp.isfinite(delta) & (jnp.square(delta) <= tau * (entropy_BT + eps))


def ratio_band(log_ratio_BT: jax.Array, *, low: float, high: float) -> jax.Array:
  """IcePop's band: keep iff low <= ratio <= high."""
  delta = jax.lax.stop_gradient(log_ratio_BT)
  return jnp.isfinite(delta) & (delta >= jnp.log(low)) & (delta <= jnp.log(high))


def bernoulli_kl(log_p_BT: jax.Array, log_q_BT: jax.Array) -> jax.Array:
  """KL(Bernoulli(p) || Bernoulli(q)) in nats: of "this token or any other", from the two log-probs."""

  def term(log_a, log_b):
    return jnp.where(jnp.isneginf(log_a), 0.0, jnp.exp(log_a) * (log_a - log_b))

  return term(log_p_BT, log_q_BT) + term(_log1mexp(log_p_BT), _log1mexp(log_q_BT))


def bernoulli_kl_ball(log_p_BT: jax.Array, log_q_BT: jax.Array, *, phi: float) -> jax.Array:
  """KPop: keep iff KL(p || q) <= phi and KL(q || p) <= phi, of the sampled token's Bernoulli."""
  log_p, log_q = jax.lax.stop_gradient(log_p_BT), jax.lax.stop_gradient(log_q_BT)
  inside = (bernoulli_kl(log_p, log_q) <= phi) & (bernoulli_kl(log_q, log_p) <= phi)
  return jnp.isfinite(log_p) & jnp.isfinite(log_q) & inside


def _log1mexp(x: jax.Array) -> jax.Array:
  """log(1 - exp(x)) for x <= 0, accurate at both ends; -inf at 0."""
  x = jnp.minimum(x, 0.0)
  return jnp.where(x > -jnp.log(2.0), jnp.log(-jnp.expm1(x)), jnp.log1p(-jnp.exp(x)))
