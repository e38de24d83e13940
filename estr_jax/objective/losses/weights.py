"""Detached weights: importance sampling, truncated, masked or damped."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from estr_jax.objective import trust_regions
from estr_jax.objective.losses import composition
from estr_jax.objective.losses.hyper import Bound, Fraction, Nats, NatsBound, Positive, RatioBound
from estr_jax.objective.scopes import first_of_sequence, group_sum, sequence_mean, sequence_sum
from estr_jax.objective.sequence_weights import log_sequence_weight
from estr_jax.objective.surrogates import bounded_exp
from estr_jax.objective.triangle import log_behaviour_ratio, required
from estr_jax.structs import Batch, Scores, TokenLoss

_Scope = Literal["token", "sequence", "geometric"]


def tis(
  policy: Scores,
  batch: Batch,
  *,
  edge: str,
  scope: _Scope = "token",
  cap: Bound = 2.0,
  clip_low: float,
  clip_high: float,
) -> TokenLoss:
  """Truncated importance sampling: the weight sg(min(rho, cap)), rho of a token or the product over its sequence.

  edge "proximal": rho = q / mu, times PPO(pi / q). Edge "direct": rho = pi / mu, times A log pi, with nothing to clip.
  scope "geometric" is the mean of log rho over the sequence in place of the sum.

  Args:
    scope: what rho is taken over: the token, its sequence's product, or its sequence's geometric mean.
    cap: the largest weight; above it the weight is cut.
  """
  log_rho, there_BT = _importance(policy, batch, edge, scope)
  rho = bounded_exp(log_rho)
  keep_BT, weight_BT = there_BT, jnp.minimum(rho, cap)
  return _weighted(policy, batch, edge, keep_BT, weight_BT, rho > cap, clip_low, clip_high)


def mis(
  policy: Scores,
  batch: Batch,
  *,
  edge: str,
  scope: _Scope = "token",
  low: Positive = 0.5,
  high: Bound = 2.0,
  clip_low: float,
  clip_high: float,
) -> TokenLoss:
  """Masked importance sampling: the weight sg(rho) where low <= rho <= high, and nothing elsewhere.

  Edges and scopes as in `tis`. A "geometric" ratio is a filter only: what it keeps has weight 1, and on the direct
  edge PPO(pi / mu) in place of A log pi.

  Args:
    scope: what rho is taken over: the token, its sequence's product, or its sequence's geometric mean.
    low: the smallest rho that is kept; 0.999 goes with scope "geometric".
    high: the largest rho that is kept; 1.001 goes with scope "geometric".
  """
  log_rho, there_BT = _importance(policy, batch, edge, scope)
  keep_BT = there_BT & trust_regions.ratio_band(log_rho, low=low, high=high)
  if scope == "geometric":
    return composition.clipped(policy, batch, edge=edge, keep_BT=keep_BT, clip_low=clip_low, clip_high=clip_high)
  return _weighted(policy, batch, edge, keep_BT, bounded_exp(log_rho), False, clip_low, clip_high)


def decoupled(policy: Scores, batch: Batch, *, clip_low: float, clip_high: float) -> TokenLoss:
  """sg(q / mu) PPO(pi / q): the behaviour corrects, the proximal policy clips (Hilton et al., arXiv 2110.00641)."""
  log_b = log_behaviour_ratio(batch)
  there_BT = jnp.isfinite(log_b)
  weight_BT = bounded_exp(jnp.where(there_BT, log_b, 0.0))
  return composition.clipped(
    policy, batch, edge="proximal", keep_BT=there_BT, weight_BT=weight_BT, clip_low=clip_low, clip_high=clip_high
  )


def a3po(policy: Scores, batch: Batch, *, clip_low: float, clip_high: float) -> TokenLoss:
  """Decoupled PPO whose proximal policy is interpolated and not recomputed (A-3PO, arXiv 2512.06547).

  log q = log mu + a (sg log pi - log mu) with a = (d - 1) / d of a token d > 0 versions old, else 0. At the update
  pi / q is E^(1 - a) and the weight q / mu is E^a, so d <= 1 is PPO on the direct edge.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, "direct")
  age_BT = jnp.maximum(batch.staleness, 1).astype(jnp.float32)
  frozen = jax.lax.stop_gradient(delta) * (age_BT - 1) / age_BT
  return composition.shaped(
    delta - frozen,
    batch,
    keep_BT=there_BT,
    weight_BT=bounded_exp(frozen),
    clip_low=clip_low,
    clip_high=clip_high,
  )


def cispo(policy: Scores, batch: Batch, *, edge: str, clip_low: Bound = 1.0, clip_high: Bound = 0.28) -> TokenLoss:
  """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: no token loses its gradient (MiniMax-M1, arXiv 2506.13585).

  clip_low = 1 leaves the lower side open, as the source does.

  Args:
    clip_low: the smallest weight is 1 - clip_low; 1.0: no lower bound.
    clip_high: the largest weight is 1 + clip_high; ours.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, edge)
  ratio = bounded_exp(delta)
  weight_BT = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  return composition.reinforce(policy, batch, keep_BT=there_BT, weight_BT=weight_BT, bounded_BT=weight_BT != ratio)


def gipo(policy: Scores, batch: Batch, *, edge: str, width: NatsBound = 0.5) -> TokenLoss:
  """-r A exp(-(sg log r / width)^2 / 2): a Gaussian in log r damps both sides; no clip (GIPO, arXiv 2603.03955).

  Args:
    width: the Gaussian's standard deviation in log r; the source's run from 0.1 to 2.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, edge)
  weight_BT = jnp.exp(-0.5 * jnp.square(delta / width))
  return composition.shaped(delta, batch, keep_BT=there_BT, weight_BT=weight_BT)


def vespo(
  policy: Scores,
  batch: Batch,
  *,
  edge: str,
  positive_power: Positive = 2.0,
  positive_decay: Positive = 3.0,
  negative_power: Positive = 3.0,
  negative_decay: Positive = 2.0,
) -> TokenLoss:
  """-sg(W^k exp(l (1 - W))) A log pi with W the sequence's product of ratios (VESPO, arXiv 2602.10693).

  (k, l) = (positive_power, positive_decay) where A >= 0, else the negative ones; the weight is 1 at W = 1.

  Args:
    positive_power: the exponent k of W where A >= 0.
    positive_decay: l, by which a large W is damped, where A >= 0.
    negative_power: the exponent k of W where A < 0.
    negative_decay: l, by which a large W is damped, where A < 0.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, edge)
  log_w = log_sequence_weight(jax.lax.stop_gradient(delta), there_BT, batch.segment)
  k = jnp.where(batch.advantage >= 0, positive_power, negative_power)
  decay = jnp.where(batch.advantage >= 0, positive_decay, negative_decay)
  weight_BT = jnp.exp(decay + k * log_w - decay * jnp.exp(log_w))
  return composition.reinforce(policy, batch, keep_BT=there_BT, weight_BT=weight_BT)


def vcpo(policy: Scores, batch: Batch, *, cap: Bound = 8.0) -> TokenLoss:
  """Sequence TIS with the baseline of least variance (VCPO, arXiv 2602.17616): -min(w, cap) (R - b) log pi.

  w is the sequence's product of pi / mu and b = sum W R / sum W over the group, W = w^2 n. The paper's n is the squared
  norm of the sequence's gradient, which takes a backward pass for each; here it is that of its score in the logits,
  sum_t (1 - 2 p_t + sum_v p_v^2), which is exact up to the network's Jacobian: a proxy of ours. The rewards of the
  batch are read and its advantages are not; the released scripts also divide by the group's spread of rewards, which is
  not done here. The paper's step size is `optimizer.ess_step`. The group is what is here of it.

  Args:
    cap: the largest weight of a sequence; above it the weight is cut.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, "direct")
  rho = jnp.exp(log_sequence_weight(jax.lax.stop_gradient(delta), there_BT, batch.segment))
  gini_BT = jax.lax.stop_gradient(required(policy.gini, "policy.gini"))
  others_BT = -jnp.expm1(jnp.where(there_BT, jax.lax.stop_gradient(policy.logprob), 0.0))  # 1 - p_t
  # At least (1 - p_t)^2: rounded below 0 where p_t is nearly 1, weights of both signs would give any baseline.
  norm_BT = jnp.maximum(2 * others_BT - gini_BT, jnp.square(others_BT))
  norm_BT = sequence_sum(jnp.where(there_BT, norm_BT, 0.0), batch.segment)
  once_BT = first_of_sequence(there_BT, batch.segment)
  share_BT = jnp.where(once_BT, jnp.square(rho) * norm_BT, 0.0)
  total_BT = group_sum(share_BT, batch.group)
  reward_BT = jnp.where(there_BT, batch.reward, 0.0)
  baseline_BT = group_sum(share_BT * reward_BT, batch.group) / jnp.where(total_BT > 0, total_BT, 1.0)
  centred = dataclasses.replace(batch, advantage=jnp.where(there_BT, reward_BT - baseline_BT, 0.0))
  return composition.reinforce(policy, centred, keep_BT=there_BT, weight_BT=jnp.minimum(rho, cap), bounded_BT=rho > cap)


def asympo(policy: Scores, batch: Batch) -> TokenLoss:
  """A x -log pi / sg(mean -log pi of the response): needs no behaviour log-probs and no ratio (ASymPO, 2606.03070).

  Meant for aggregation "sequence_mean", where the value of a response is its advantage: a group of mean 0 has no loss
  and yet a gradient. The sources give no floor of the mean; 1e-6 nats is ours.
  """
  finite_BT = batch.mask & jnp.isfinite(jax.lax.stop_gradient(policy.logprob))
  nll_BT = -jnp.where(finite_BT, policy.logprob, 0.0)
  mean_BT = jnp.maximum(sequence_mean(jax.lax.stop_gradient(nll_BT), finite_BT, batch.segment), 1e-6)
  return composition.finish(-batch.advantage * nll_BT / mean_BT, finite_BT, False)


def stare(
  policy: Scores,
  batch: Batch,
  *,
  edge: str,
  clip_low: float,
  clip_high: float,
  dual: RatioBound = 10.0,
  boost: Positive = 1.1,
  share: Fraction = 0.1,
  target: Nats = 0.3,
) -> TokenLoss:
  """Dual-clipped PPO with more weight on surprising good tokens while the entropy is low (STARE, arXiv 2606.19236).

  While pi's mean entropy over the policy tokens that are here is below `target` nats, the `share` of the tokens of
  A > 0 with the largest -log pi, rounded up, has weight `boost`. The released default leaves tokens of A < 0 alone.

  Args:
    dual: the largest ratio that counts at A < 0; above 1, or it would cut ratios of 1.
    boost: the weight of the surprising tokens; that of the others is 1.
    share: the fraction of the tokens of A > 0 that is boosted.
    target: the mean entropy of pi below which tokens are boosted.
  """
  token_loss = composition.clipped(policy, batch, edge=edge, clip_low=clip_low, clip_high=clip_high, dual=dual)
  entropy_BT = jax.lax.stop_gradient(required(policy.entropy, "policy.entropy"))
  policy_tokens = jnp.maximum(jnp.sum(batch.mask), 1)
  low = jnp.sum(jnp.where(batch.mask, entropy_BT, 0.0)) / policy_tokens < target
  candidate_BT = token_loss.keep & (batch.advantage > 0)
  surprisal_BT = -jax.lax.stop_gradient(policy.logprob)
  number = jnp.ceil(share * jnp.sum(candidate_BT))
  chosen_BT = trust_regions.largest(surprisal_BT, candidate_BT, number)
  return token_loss._replace(value=token_loss.value * jnp.where(low & chosen_BT, boost, 1.0))


def _importance(policy: Scores, batch: Batch, edge: str, scope: _Scope) -> tuple[jax.Array, jax.Array]:
  """(log rho of a scope, detached; where a token has one), [B, T]: rho = q / mu on proximal, pi / mu on direct."""
  if edge == "proximal":
    log_rho = log_behaviour_ratio(batch)
    there_BT = composition.usable(batch, log_rho)
    log_rho = jnp.where(there_BT, log_rho, 0.0)
  else:
    log_rho, there_BT = composition.safe_log_ratio(policy, batch, edge)
    log_rho = jax.lax.stop_gradient(log_rho)
  of_scope = {"token": lambda log_rho, *_: log_rho, "sequence": log_sequence_weight, "geometric": sequence_mean}[scope]
  return of_scope(log_rho, there_BT, batch.segment), there_BT


def _weighted(
  policy: Scores,
  batch: Batch,
  edge: str,
  keep_BT: jax.Array,
  weight_BT: jax.Array,
  bounded_BT: jax.Array | bool,
  clip_low: float,
  clip_high: float,
) -> TokenLoss:
  if edge == "direct":
    return composition.reinforce(policy, batch, keep_BT=keep_BT, weight_BT=weight_BT, bounded_BT=bounded_BT)
  token_loss = composition.clipped(
    policy, batch, edge=edge, keep_BT=keep_BT, weight_BT=weight_BT, clip_low=clip_low, clip_high=clip_high
  )
  return token_loss._replace(clipped=token_loss.clipped | (token_loss.keep & bounded_BT))
