"""Masks by a fixed threshold: which tokens or sequences are too far from another policy."""

from typing import Literal

import jax
import jax.numpy as jnp

from estr_jax.objective import trust_regions
from estr_jax.objective.losses import composition
from estr_jax.objective.losses.hyper import Bound, NatsBound, Positive
from estr_jax.objective.scopes import sequence_max, sequence_mean
from estr_jax.objective.surrogates import bounded_exp
from estr_jax.objective.triangle import log_behaviour_ratio, log_ratio
from estr_jax.structs import Batch, Scores, TokenLoss


def icepop(
  policy: Scores, batch: Batch, *, edge: str, low: Positive = 0.5, high: Bound = 5.0, clip_low: float, clip_high: float
) -> TokenLoss:
  """A band [low, high] on a ratio (IcePop, arXiv 2510.18855).

  edge "proximal" is the original: B = q / mu is both the band's ratio and a detached weight, times PPO(pi / q); its
  mask does not move with theta. Edge "direct" masks by pi / mu and clips the same ratio, with no weight.

  Args:
    low: the smallest ratio that is kept.
    high: the largest ratio that is kept.
  """
  if edge == "proximal":
    log_b = log_behaviour_ratio(batch)
    keep_BT = trust_regions.ratio_band(log_b, low=low, high=high)
    weight_BT: composition.Number = bounded_exp(jnp.where(keep_BT, log_b, 0.0))
  else:
    keep_BT = trust_regions.ratio_band(log_ratio(policy.logprob, batch, edge), low=low, high=high)
    weight_BT = 1.0
  return composition.clipped(
    policy, batch, edge=edge, keep_BT=keep_BT, weight_BT=weight_BT, clip_low=clip_low, clip_high=clip_high
  )


def kpop(
  policy: Scores, batch: Batch, *, edge: str, phi: NatsBound = 0.1, clip_low: float, clip_high: float
) -> TokenLoss:
  """keep iff both Bernoulli KLs between pi and mu of the sampled token are at most phi, times PPO on `edge` (KPop).

  Public code that recomputes q takes q and mu instead, which is the direct edge at the first update of a batch.

  Args:
    phi: the largest KL that is kept; ours, since public code runs from 0.1 to 2.
  """
  keep_BT = trust_regions.bernoulli_kl_ball(policy.logprob, batch.logprob, phi=phi)
  return composition.clipped(policy, batch, edge=edge, keep_BT=keep_BT, clip_low=clip_low, clip_high=clip_high)


def ipo(policy: Scores, batch: Batch, *, bound: Bound = 0.3) -> TokenLoss:
  """-r A with r = pi / mu, where |pi - mu| of the sampled token is at most `bound` (prime-rl's IPO); no clip.

  Args:
    bound: the largest change of the token's probability that is kept.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, "direct")
  change_BT = trust_regions.probability_change(policy.logprob, batch.logprob)
  return composition.shaped(delta, batch, keep_BT=there_BT & trust_regions.at_most(jnp.abs(change_BT), bound))


def dppo_tv(policy: Scores, batch: Batch, *, bound: Bound = 0.15, cap: Bound = 20.0) -> TokenLoss:
  """-A sg(min(r, cap)) log pi with r = pi / mu (DPPO, arXiv 2602.04879).

  Dropped where A > 0 and pi - mu is above `bound`, or A <= 0 and pi - mu is below -bound: outward moves only.

  Args:
    bound: the largest outward change of the token's probability that is kept.
    cap: the largest weight; above it the weight is cut.
  """
  change_BT = trust_regions.probability_change(policy.logprob, batch.logprob)
  outward_BT = jnp.where(batch.advantage > 0, change_BT, -change_BT)
  return _capped(policy, batch, trust_regions.at_most(outward_BT, bound), cap)


def dppo_kl(policy: Scores, batch: Batch, *, bound: NatsBound = 0.15, cap: Bound = 20.0) -> TokenLoss:
  """`dppo_tv` with KL(mu || pi) of the sampled token's Bernoulli in place of the change of probability.

  Dropped where that KL is above `bound` and the move is outward: pi above mu where A > 0, below it where A <= 0.

  Args:
    bound: the largest KL of an outward move that is kept; public ports take 0.05.
    cap: the largest weight; above it the weight is cut.
  """
  log_pi = policy.logprob
  far_BT = ~trust_regions.at_most(trust_regions.bernoulli_kl(batch.logprob, log_pi), bound)
  outward_BT = jnp.where(batch.advantage > 0, log_pi > batch.logprob, log_pi < batch.logprob)
  return _capped(policy, batch, ~(far_BT & outward_BT), cap)


def m2po(policy: Scores, batch: Batch, *, bound: Bound = 0.04) -> TokenLoss:
  """-r A, r = pi / mu, without the outward tokens that lift the second moment of log r above `bound` (M2PO).

  Outward is A > 0 and r > 1, or A < 0 and r < 1. Among these the largest (log r)^2 are dropped until the mean of the
  rest is at most `bound`; other tokens are never dropped (arXiv 2510.01161, read second-hand; a public trainer
  takes all tokens and q / mu). The statistic is of all tokens that are here.

  Args:
    bound: the largest mean of (log r)^2 over the outward tokens that are kept.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, "direct")
  square_BT = jnp.square(jax.lax.stop_gradient(delta))
  outward_BT = there_BT & (jnp.sign(batch.advantage) * jax.lax.stop_gradient(delta) > 0)
  sorted_N = jnp.sort(jnp.where(outward_BT, square_BT, jnp.inf).ravel())
  mean_N = jnp.cumsum(sorted_N) / (1 + jnp.arange(sorted_N.size))  # never falls, and is inf behind the outward ones
  kept = jnp.sum(mean_N <= bound)
  largest = jnp.where(kept > 0, sorted_N[jnp.maximum(kept - 1, 0)], -1.0)
  return composition.shaped(delta, batch, keep_BT=there_BT & (~outward_BT | (square_BT <= largest)))


def trm(
  policy: Scores, batch: Batch, *, divergence: Literal["k3", "vocabulary"] = "k3", bound: NatsBound = 0.5
) -> TokenLoss:
  """-r A, r = pi / mu, for the sequences whose worst token's divergence is at most `bound` (TRM, arXiv 2512.23075).

  divergence "vocabulary" is the paper's KL(mu || pi) over the whole vocabulary, from the recorded distribution of mu.
  "k3" is its estimate from the sampled token alone; the paper discusses such proxies. A token without a ratio has an
  infinite divergence. The paper's bound is not known.

  Args:
    divergence: how a token's divergence is measured.
    bound: the largest divergence that a token of a kept sequence has; ours.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, "direct")
  measure = {"k3": trust_regions.sampled_kl, "vocabulary": trust_regions.vocabulary_kl}[divergence]
  worst_BT = jnp.where(there_BT, measure(policy, batch), jnp.where(batch.mask, jnp.inf, 0.0))
  keep_BT = trust_regions.at_most(sequence_max(worst_BT, batch.segment), bound)
  return composition.shaped(delta, batch, keep_BT=there_BT & keep_BT)


def opsm(
  policy: Scores, batch: Batch, *, edge: str, bound: NatsBound = 0.1, clip_low: float, clip_high: float
) -> TokenLoss:
  """PPO without the sequences of A < 0 whose mean -log r is above `bound` (off-policy sequence masking, DeepSeek-V3.2).

  r on `edge`. Such a sequence has become unlikely already, and would be pushed further.

  Args:
    bound: the largest mean -log r, over its tokens, of a sequence of A < 0 that is kept; public ports take 1e-4.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, edge)
  mean_BT = sequence_mean(-jax.lax.stop_gradient(delta), there_BT, batch.segment)
  drop_BT = (batch.advantage < 0) & (mean_BT > bound)
  return composition.clipped(policy, batch, edge=edge, keep_BT=~drop_BT, clip_low=clip_low, clip_high=clip_high)


def _capped(policy: Scores, batch: Batch, keep_BT: jax.Array, cap: float) -> TokenLoss:
  delta, there_BT = composition.safe_log_ratio(policy, batch, "direct")
  ratio = bounded_exp(jax.lax.stop_gradient(delta))
  return composition.reinforce(
    policy, batch, keep_BT=there_BT & keep_BT, weight_BT=jnp.minimum(ratio, cap), bounded_BT=ratio > cap
  )
