"""Terms added to the loss of every policy token, whatever the trust region keeps: an entropy bonus, a KL penalty."""

import jax
import jax.numpy as jnp

from estr_jax.objective.surrogates import MAX_LOG_RATIO
from estr_jax.objective.triangle import log_ratio, log_reference_ratio, required
from estr_jax.structs import Batch, Scalar, Scores


def entropy_bonus(policy: Scores) -> jax.Array:
  """-H(pi), nats, [B, T]; to be multiplied by a coefficient. The gradient flows through the whole vocabulary."""
  return -required(policy.entropy, "policy.entropy")


def adapt_coefficient(
  coefficient: jax.Array, entropy: jax.Array, *, target: Scalar, step: Scalar, largest: Scalar
) -> tuple[jax.Array, jax.Array]:
  """The adaptive entropy coefficient of Skywork-OR1 (He et al., arXiv 2505.22312).

  Once an update, before its use: a step up where `entropy` (nats) is below `target`, else a step down, kept in
  [0, largest]. The bonus acts only while the entropy is below the target, though the coefficient lives on.

  Returns:
    (the coefficient to carry on, the one that acts now).
  """
  below = entropy < target
  moved = jnp.clip(coefficient + jnp.where(below, step, -step), 0.0, largest)
  return moved, jnp.where(below, moved, 0.0)


def k1(log_ratio_BT: jax.Array) -> jax.Array:
  """log pi / ref: unbiased as a number; as a loss its expected gradient is 0, so it only adds noise."""
  return log_ratio_BT


def k2(log_ratio_BT: jax.Array) -> jax.Array:
  """(log pi / ref)^2 / 2: biased as a number; as a loss its gradient on pi's own samples is that of KL(pi || ref)."""
  return 0.5 * jnp.square(log_ratio_BT)


def k3(log_ratio_BT: jax.Array) -> jax.Array:
  """ref / pi - 1 - log ref / pi: unbiased and never negative as a number; as a loss its gradient on pi's own samples
  is that of KL(ref || pi)."""
  return jnp.expm1(-log_ratio_BT) + log_ratio_BT


# Schulman's estimators (joschu.net/blog/kl-approx.html) of KL(pi || anchor) from samples of pi.
KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
ANCHORS = ("reference", "proximal", "direct")  # the weights of version 0, q, or mu


def kl_penalty(policy: Scores, batch: Batch, *, estimator: str, anchor: str) -> jax.Array:
  """One of KL_ESTIMATORS against one of ANCHORS, nats, [B, T]; to be multiplied by a coefficient.

  A token without a finite log-ratio has a penalty of 0, and the log-ratio is bounded where k3 exponentiates it.
  """
  delta = (
    log_reference_ratio(policy.logprob, batch) if anchor == "reference" else log_ratio(policy.logprob, batch, anchor)
  )
  finite_BT = batch.mask & jnp.isfinite(jax.lax.stop_gradient(delta))
  bounded = jnp.clip(jnp.where(finite_BT, delta, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)
  return jnp.where(finite_BT, KL_ESTIMATORS[estimator](bounded), 0.0)
