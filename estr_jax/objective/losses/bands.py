"""Masks by a fixed threshold: which tokens or sequences are far from the policy that sampled them."""

import jax.numpy as jnp

from estr_jax.objective import trust_regions
from estr_jax.objective.losses import composition
from estr_jax.objective.triangle import log_behaviour_ratio, log_ratio
from estr_jax.structs import Batch, Scores, TokenLoss


def icepop(
  policy: Scores, batch: Batch, *, edge: str, low: float, high: float, clip_low: float, clip_high: float
) -> TokenLoss:
  """IcePop: a band [low, high] on a ratio.

  edge "proximal" is the original: B = q / mu is both the band's ratio and a detached weight, times PPO(pi / q); its
  mask does not move with theta. Edge "direct" masks by pi / mu and clips the same ratio, with no weight.
  """
  if edge == "proximal":
    log_b = log_behaviour_ratio(batch)
    keep_BT = trust_regions.ratio_band(log_b, low=low, high=high)
    weight_BT = jnp.exp(jnp.where(keep_BT, log_b, 0.0))
  else:
    keep_BT = trust_regions.ratio_band(log_ratio(policy.logprob, batch, edge), low=low, high=high)
    weight_BT = 1.0
  return composition.clipped(
    policy, batch, edge=edge, keep_BT=keep_BT, weight_BT=weight_BT, clip_low=clip_low, clip_high=clip_high
  )


def kpop(policy: Scores, batch: Batch, *, edge: str, phi: float, clip_low: float, clip_high: float) -> TokenLoss:
  """KPop: keep iff both Bernoulli KLs between pi and mu of the sampled token are at most phi, times PPO on `edge`."""
  keep_BT = trust_regions.bernoulli_kl_ball(policy.logprob, batch.logprob, phi=phi)
  return composition.clipped(policy, batch, edge=edge, keep_BT=keep_BT, clip_low=clip_low, clip_high=clip_high)
