"""Trust regions: how far a token is from another policy, and which tokens may move the policy.

Every function takes log-probs or a log-ratio [B, T] and returns a distance or `keep` bool [B, T]. None carries a
gradient, and a value that is not finite is never kept: a stored log-prob of -inf has no ratio.
"""

import jax
import jax.numpy as jnp

from estr_jax.objective.surrogates import MAX_LOG_RATIO
from estr_jax.objective.triangle import log_ratio, required
from estr_jax.structs import Batch, Scores


def scaled_square(log_ratio_BT: jax.Array, scale_BT: jax.Array, *, eps: float, power: float) -> jax.Array:
  """S = delta^2 / (scale + eps)^power, f32 [B, T], detached.

  With the behaviour policy's entropy as the scale (nats) and power 1 it is ESTR's (Zhao et al., arXiv 2607.22186).
  """
  return jnp.square(jax.lax.stop_gradient(log_ratio_BT)) / jnp.power(scale_BT + eps, power)


def at_most(score_BT: jax.Array, bound: float) -> jax.Array:
  """keep iff the score is finite and at most `bound`, which may be inf."""
  return jnp.isfinite(score_BT) & (score_BT <= bound)


def ratio_band(log_ratio_BT: jax.Array, *, low: float, high: float) -> jax.Array:
  """IcePop's band: keep iff low <= ratio <= high."""
  delta = jax.lax.stop_gradient(log_ratio_BT)
  return jnp.isfinite(delta) & (delta >= jnp.log(low)) & (delta <= jnp.log(high))


def bernoulli_kl(log_p_BT: jax.Array, log_q_BT: jax.Array) -> jax.Array:
  """KL(Bernoulli(p) || Bernoulli(q)) in nats: of "this token or any other", from the two log-probs."""
  log_p, log_q = jax.lax.stop_gradient((log_p_BT, log_q_BT))

  def term(log_a, log_b):
    return jnp.where(jnp.isneginf(log_a), 0.0, jnp.exp(log_a) * (log_a - log_b))

  return term(log_p, log_q) + term(_log1mexp(log_p), _log1mexp(log_q))


def bernoulli_kl_ball(log_p_BT: jax.Array, log_q_BT: jax.Array, *, phi: float) -> jax.Array:
  """KPop: keep iff KL(p || q) <= phi and KL(q || p) <= phi, of the sampled token's Bernoulli."""
  inside = (bernoulli_kl(log_p_BT, log_q_BT) <= phi) & (bernoulli_kl(log_q_BT, log_p_BT) <= phi)
  return jnp.isfinite(log_p_BT) & jnp.isfinite(log_q_BT) & inside


def sampled_kl(policy: Scores, batch: Batch) -> jax.Array:
  """r - 1 - log r with r = pi / mu: an unbiased estimate of KL(mu || pi) from the sampled token, nats, [B, T]."""
  delta = jax.lax.stop_gradient(log_ratio(policy.logprob, batch, "direct"))
  return jnp.expm1(jnp.clip(delta, -MAX_LOG_RATIO, MAX_LOG_RATIO)) - delta


def vocabulary_kl(policy: Scores, batch: Batch) -> jax.Array:
  """KL(mu || pi) over the whole vocabulary, nats, [B, T]; from the recorded distribution of mu."""
  log_mu = required(batch.vocabulary, "batch.vocabulary")
  log_pi = jax.lax.stop_gradient(required(policy.vocabulary, "policy.vocabulary"))
  mu = jnp.exp(log_mu)
  return jnp.sum(jnp.where(mu > 0, mu * (log_mu - log_pi), 0.0), axis=-1)


def probability_change(log_p_BT: jax.Array, log_q_BT: jax.Array) -> jax.Array:
  """p - q from the two log-probs, accurate also where they are nearly equal."""
  log_p_BT, log_q_BT = jax.lax.stop_gradient((log_p_BT, log_q_BT))
  larger, smaller = jnp.maximum(log_p_BT, log_q_BT), jnp.minimum(log_p_BT, log_q_BT)
  return jnp.sign(log_p_BT - log_q_BT) * jnp.exp(larger) * -jnp.expm1(smaller - larger)


def largest(value_BT: jax.Array, where_BT: jax.Array, number: jax.Array) -> jax.Array:
  """bool [B, T]: the `number`, at least one, largest values among the tokens `where_BT`; ties by position."""
  order = jnp.argsort(jnp.where(where_BT, -value_BT, jnp.inf).ravel(), stable=True)
  rank = jnp.argsort(order, stable=True).reshape(value_BT.shape)
  return where_BT & (rank < jnp.maximum(number, 1))


def _log1mexp(x: jax.Array) -> jax.Array:
  """log(1 - exp(x)) for x <= 0, accurate at both ends; -inf at 0."""
  x = jnp.minimum(x, 0.0)
  return jnp.where(x > -jnp.log(2.0), jnp.log(-jnp.expm1(x)), jnp.log1p(-jnp.exp(x)))
