"""ESTR, its named ablations, and its control: a mask whose width follows the token's entropy, on the direct edge.

    S = delta^2 / (scale + eps),   delta = log pi - log mu,   keep iff S <= tau,   times the clipped surrogate

The mask lives on pi / mu whatever edge the clip takes. SCORES gives S of each method whose mask is S <= tau, so that
tau can be calibrated.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from estr_jax.objective import trust_regions
from estr_jax.objective.losses import composition
from estr_jax.objective.losses.hyper import Bound, Nats, NatsBound, Positive
from estr_jax.objective.triangle import log_ratio, required
from estr_jax.structs import Batch, Scores, TokenLoss


def score(policy: Scores, batch: Batch, *, eps: float) -> jax.Array:
  """S of ESTR, f32 [B, T]; NaN or inf where a token has no ratio."""
  return trust_regions.scaled_square(_delta(policy, batch), batch.entropy, eps=eps, power=1.0)


def learner_entropy_score(policy: Scores, batch: Batch, *, eps: float) -> jax.Array:
  entropy_BT = jax.lax.stop_gradient(required(policy.entropy, "policy.entropy"))
  return trust_regions.scaled_square(_delta(policy, batch), entropy_BT, eps=eps, power=1.0)


def gini_score(policy: Scores, batch: Batch, *, eps: float) -> jax.Array:
  return trust_regions.scaled_square(_delta(policy, batch), batch.gini, eps=eps, power=1.0)


def power_score(policy: Scores, batch: Batch, *, eps: float, power: float) -> jax.Array:
  return trust_regions.scaled_square(_delta(policy, batch), batch.entropy, eps=eps, power=power)


SCORES: dict[str, Callable[..., jax.Array]] = {  # (policy, batch, **hyper) -> S, f32 [B, T]
  "estr": score,
  "estr_learner_entropy": learner_entropy_score,
  "estr_gini": gini_score,
  "estr_power": power_score,
}


def estr(
  policy: Scores, batch: Batch, *, edge: str, tau: Bound = 1.0, eps: Nats = 0.01, clip_low: float, clip_high: float
) -> TokenLoss:
  """1[delta^2 / (H + eps) <= tau] x clipped surrogate, H the behaviour policy's recorded entropy.

  The paper's edge is "direct": one ratio, pi / mu, serves the mask and the clip (Zhao et al., arXiv 2607.22186).

  Args:
    tau: the largest S that is kept; ours.
    eps: added to H, so that a token of no entropy has a width too; the paper's.
  """
  score_BT = score(policy, batch, eps=eps)
  return _masked(policy, batch, score_BT, edge=edge, tau=tau, clip_low=clip_low, clip_high=clip_high)


def estr_learner_entropy(
  policy: Scores, batch: Batch, *, edge: str, tau: Bound = 1.0, eps: Nats = 0.01, clip_low: float, clip_high: float
) -> TokenLoss:
  """ESTR with the entropy of pi at the update in place of mu's while sampling. An ablation of ours.

  Args:
    tau: the largest S that is kept; ours.
    eps: added to the entropy of pi; the paper's for H.
  """
  score_BT = learner_entropy_score(policy, batch, eps=eps)
  return _masked(policy, batch, score_BT, edge=edge, tau=tau, clip_low=clip_low, clip_high=clip_high)


def estr_gini(
  policy: Scores, batch: Batch, *, edge: str, tau: Bound = 1.0, eps: Positive = 0.01, clip_low: float, clip_high: float
) -> TokenLoss:
  """ESTR with the Gini impurity 1 - sum mu^2, which the first-order theory gives before it is replaced by H.

  E[delta^2] = sigma^2 sum_w mu_w (1 - mu_w) under a logit perturbation of variance sigma^2. An ablation of ours.

  Args:
    tau: the largest S that is kept; ours.
    eps: added to the Gini impurity, which has no unit; the paper's for H.
  """
  score_BT = gini_score(policy, batch, eps=eps)
  return _masked(policy, batch, score_BT, edge=edge, tau=tau, clip_low=clip_low, clip_high=clip_high)


def estr_power(
  policy: Scores,
  batch: Batch,
  *,
  edge: str,
  tau: Bound = 1.0,
  eps: Nats = 0.01,
  power: Positive = 0.5,
  clip_low: float,
  clip_high: float,
) -> TokenLoss:
  """ESTR with S = delta^2 / (H + eps)^power: 1 is ESTR, 0 a fixed band. An ablation of ours.

  Args:
    tau: the largest S that is kept; ours.
    eps: added to H before the power is taken; the paper's.
    power: the exponent of H + eps: the smaller, the less the width follows H.
  """
  score_BT = power_score(policy, batch, eps=eps, power=power)
  return _masked(policy, batch, score_BT, edge=edge, tau=tau, clip_low=clip_low, clip_high=clip_high)


def estr_one_sided(
  policy: Scores, batch: Batch, *, edge: str, tau: Bound = 1.0, eps: Nats = 0.01, clip_low: float, clip_high: float
) -> TokenLoss:
  """ESTR that drops a token only where its update would move pi further from mu, as PPO's clip does.

  Outward is A delta > 0: a raised probability that A raises further, or a lowered one that A lowers. An ablation of
  ours.

  Args:
    tau: the largest S that is kept of outward moves; ours.
    eps: added to H, so that a token of no entropy has a width too; the paper's.
  """
  score_BT = score(policy, batch, eps=eps)
  inward_BT = batch.advantage * _delta(policy, batch) <= 0
  score_BT = jnp.where(inward_BT & jnp.isfinite(score_BT), 0.0, score_BT)
  return _masked(policy, batch, score_BT, edge=edge, tau=tau, clip_low=clip_low, clip_high=clip_high)


def estr_soft(
  policy: Scores, batch: Batch, *, edge: str, tau: Bound = 1.0, eps: Nats = 0.01, clip_low: float, clip_high: float
) -> TokenLoss:
  """ESTR with the weight exp(-S / (2 tau)), detached, in place of the mask. An ablation of ours.

  Nothing is dropped but what has no S. A Gaussian in z = delta / sqrt(H + eps) of standard deviation sqrt(tau).

  Args:
    tau: the S at which the weight has fallen to exp(-1/2); nothing is cut off there. Ours.
    eps: added to H, so that a token of no entropy has a width too; the paper's.
  """
  score_BT = score(policy, batch, eps=eps)
  there_BT = jnp.isfinite(score_BT)
  weight_BT = jnp.exp(-jnp.where(there_BT, score_BT, 0.0) / (2 * tau))
  return composition.clipped(
    policy, batch, edge=edge, keep_BT=there_BT, weight_BT=weight_BT, clip_low=clip_low, clip_high=clip_high
  )


def fixed_width(
  policy: Scores, batch: Batch, *, edge: str, width: NatsBound = 0.5, clip_low: float, clip_high: float
) -> TokenLoss:
  """1[|delta| <= width] x clipped surrogate: what ESTR is where H + eps is constant, tau (H + eps) = width^2.

  The control that tells an entropy-scaled mask from any mask.

  Args:
    width: the largest |delta| that is kept; ours.
  """
  keep_BT = trust_regions.at_most(jnp.abs(_delta(policy, batch)), width)
  return composition.clipped(policy, batch, edge=edge, keep_BT=keep_BT, clip_low=clip_low, clip_high=clip_high)


def _delta(policy: Scores, batch: Batch) -> jax.Array:
  return jax.lax.stop_gradient(log_ratio(policy.logprob, batch, "direct"))


def _masked(
  policy: Scores, batch: Batch, score_BT: jax.Array, *, edge: str, tau: float, clip_low: float, clip_high: float
) -> TokenLoss:
  keep_BT = trust_regions.at_most(score_BT, tau)
  return composition.clipped(policy, batch, edge=edge, keep_BT=keep_BT, clip_low=clip_low, clip_high=clip_high)
