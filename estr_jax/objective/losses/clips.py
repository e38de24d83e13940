"""Shapers: how far a ratio may carry its gradient."""

from typing import Literal

import jax
import jax.numpy as jnp

from estr_jax.objective import trust_regions
from estr_jax.objective.divergence_bands import chi2_band, kl_band, tv_band
from estr_jax.objective.losses import composition
from estr_jax.objective.losses.hyper import Bound, Fraction, NatsBound, Positive, RatioBound
from estr_jax.objective.scopes import first_of_sequence, group_sum, sequence_mean
from estr_jax.objective.surrogates import MAX_LOG_RATIO, bounded_exp
from estr_jax.objective.triangle import log_anchor
from estr_jax.structs import Batch, Scores, TokenLoss


def ppo(policy: Scores, batch: Batch, *, edge: str, clip_low: float, clip_high: float) -> TokenLoss:
  """min(r A, clip(r) A) and no other trust region: PPO, GRPO by its group advantages, DAPO by clip_high > clip_low."""
  return composition.clipped(policy, batch, edge=edge, clip_low=clip_low, clip_high=clip_high)


def dual_clip(
  policy: Scores, batch: Batch, *, edge: str, clip_low: float, clip_high: float, dual: RatioBound = 3.0
) -> TokenLoss:
  """PPO whose loss at A < 0 is also bounded by dual x |A|; dual is above 1 (Ye et al., arXiv 1912.09729).

  Args:
    dual: the largest ratio that counts at A < 0; above 1, or it would cut ratios of 1.
  """
  return composition.clipped(policy, batch, edge=edge, clip_low=clip_low, clip_high=clip_high, dual=dual)


def gspo(policy: Scores, batch: Batch, *, edge: str, clip_low: Bound = 3e-4, clip_high: Bound = 4e-4) -> TokenLoss:
  """PPO on the sequence's geometric ratio s = exp(mean log r); every token carries its sequence's value.

  The sequence form of Zheng et al. (arXiv 2507.18071), meant for aggregation "sequence_mean". With "sequence_sum" it
  is LUSPO, the sequence's loss times its length, over that aggregation's constant. The mean is over the tokens that
  have a ratio.

  Args:
    clip_low: the lower end of the clip of s is 1 - clip_low.
    clip_high: the upper end of the clip of s is 1 + clip_high.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, edge)
  log_s = sequence_mean(delta, there_BT, batch.segment)
  return composition.shaped(log_s, batch, keep_BT=there_BT, clip_low=clip_low, clip_high=clip_high)


def gmpo(policy: Scores, batch: Batch, *, edge: str, band: NatsBound = 0.4) -> TokenLoss:
  """-A exp(mean of the clipped log r): the geometric mean in place of the arithmetic (Zhao et al., arXiv 2507.20673).

  log r is cut at +band where A > 0 and at -band where A < 0, and a cut token has no gradient. Every token carries its
  sequence's value; meant for aggregation "sequence_mean".

  Args:
    band: the largest |log r| of a token, on the side to which its advantage pushes it.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, edge)
  frozen = jax.lax.stop_gradient(delta)
  cut_BT = jnp.where(batch.advantage >= 0, frozen > band, frozen < -band) & (batch.advantage != 0)
  delta = jnp.where(cut_BT, jnp.clip(frozen, -band, band), delta)
  token_loss = composition.shaped(sequence_mean(delta, there_BT, batch.segment), batch, keep_BT=there_BT)
  return token_loss._replace(clipped=token_loss.clipped | (there_BT & cut_BT))


def sapo(policy: Scores, batch: Batch, *, edge: str, positive: Positive = 1.0, negative: Positive = 1.05) -> TokenLoss:
  """-A (4 / t) sigmoid(t (r - 1)): a soft gate of temperature t = `positive` where A > 0, else `negative`.

  Its gradient has weight 4 s (1 - s) r, which is 1 at r = 1 and fades on both sides (Gao et al., arXiv 2511.20347).

  Args:
    positive: the gate's temperature where A > 0; the higher, the narrower.
    negative: the gate's temperature where A <= 0.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, edge)
  temperature_BT = jnp.where(batch.advantage > 0, positive, negative)
  # 1 - sigmoid(-x) is sigmoid(x) whose derivative s (1 - s) does not cancel where r is large.
  gate = 1 - jax.nn.sigmoid(-temperature_BT * (bounded_exp(delta) - 1))
  beyond_BT = (jnp.abs(delta) > MAX_LOG_RATIO) & (batch.advantage != 0)
  return composition.finish(batch.advantage * 4 / temperature_BT * gate, there_BT, beyond_BT)


def stable_reinforce(
  policy: Scores,
  batch: Batch,
  *,
  edge: str,
  clip_low: float,
  clip_high: float,
  ratio_low: Positive = 1e-3,
  ratio_high: Positive = 1e3,
  sigmas: Positive = 3.0,
) -> TokenLoss:
  """PPO with r bounded to [ratio_low, ratio_high] before the exponential, and outlying advantages dropped.

  The bound takes the gradient also where PPO leaves it open. A token is dropped where its advantage lies further than
  `sigmas` population standard deviations from the mean over the tokens here that have a ratio (Zhang et al.,
  arXiv 2505.02835; the released code compares standardised advantages with bounds of the raw ones, a slip that is not
  repeated here).

  Args:
    ratio_low: what smaller ratios are raised to.
    ratio_high: what larger ratios are cut to.
    sigmas: the largest distance of a kept advantage from the mean, in standard deviations.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, edge)
  advantage_BT = jnp.where(there_BT, batch.advantage, 0.0)
  count = jnp.maximum(jnp.sum(there_BT), 1)
  mean = jnp.sum(advantage_BT) / count
  variance = jnp.sum(jnp.where(there_BT, jnp.square(advantage_BT - mean), 0.0)) / count
  keep_BT = there_BT & (jnp.square(advantage_BT - mean) <= jnp.square(sigmas) * variance)
  outside_BT = (delta < jnp.log(ratio_low)) | (delta > jnp.log(ratio_high))
  bounded = jnp.clip(delta, jnp.log(ratio_low), jnp.log(ratio_high))
  token_loss = composition.shaped(bounded, batch, keep_BT=keep_BT, clip_low=clip_low, clip_high=clip_high)
  acted_BT = keep_BT & outside_BT & (batch.advantage != 0)
  return token_loss._replace(clipped=token_loss.clipped | acted_BT)


def sat(
  policy: Scores, batch: Batch, *, edge: str, clip_low: Bound = 0.2, clip_high: Bound = 0.2, quantile: Fraction = 0.9
) -> TokenLoss:
  """PPO whose clip shrinks for the tokens that have drifted furthest (SAT, arXiv 2607.18722).

  Where |delta| on the direct edge is above its `quantile` q over the tokens here that have a ratio (linear between
  two of them), the endpoint on delta's side is drawn in: 1 + clip_high c where delta > 0, 1 - clip_low c where
  delta < 0, with c a Hill kernel of exponent 2. No public source gives the kernel's exact form:
  c = 1 / (1 + (delta / q)^2) is the standard one, and our reading.

  Args:
    clip_low: the lower end of the clip is 1 - clip_low before it shrinks.
    clip_high: the upper end of the clip is 1 + clip_high before it shrinks.
    quantile: the fraction of the tokens whose clip does not shrink.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, "direct")
  delta = jax.lax.stop_gradient(delta)
  size_BT = jnp.abs(delta)
  q = jnp.nanquantile(jnp.where(there_BT, size_BT, jnp.nan), quantile)
  kernel = 1 / (1 + jnp.square(size_BT / jnp.where(q > 0, q, 1.0)))
  shrink_BT = jnp.where((q > 0) & (size_BT > q), kernel, 1.0)
  low_BT = clip_low * jnp.where(delta < 0, shrink_BT, 1.0)
  high_BT = clip_high * jnp.where(delta > 0, shrink_BT, 1.0)
  return composition.clipped(policy, batch, edge=edge, keep_BT=there_BT, clip_low=low_BT, clip_high=high_BT)


def bandpo(
  policy: Scores,
  batch: Batch,
  *,
  edge: str,
  divergence: Literal["kl", "tv", "chi2"] = "kl",
  radius: Bound = 0.05,
  clip_low: float,
  clip_high: float,
) -> TokenLoss:
  """PPO whose band is the ball of an f-divergence around the anchor of the edge (BandPO, arXiv 2603.04918).

  With p the anchor's probability of the token, and the vocabulary reduced to "this token or another": "tv" gives
  1 +- radius / p, "chi2" 1 +- sqrt(radius (1 - p) / p), "kl" the r at which KL(anchor || pi) is `radius`. As in the
  released code the band is never narrower than [1 - clip_low, 1 + clip_high], and the ball ends at 100.

  Args:
    divergence: the f-divergence of the ball.
    radius: the largest divergence in the ball; in nats for "kl", without a unit for the others.
  """
  band = {"tv": tv_band, "chi2": chi2_band, "kl": kl_band}[divergence]
  delta, there_BT = composition.safe_log_ratio(policy, batch, edge)
  low_BT, high_BT = band(jnp.where(there_BT, log_anchor(batch, edge), -1.0), radius)
  low_BT = jnp.minimum(low_BT, 1 - clip_low)
  high_BT = jnp.maximum(high_BT, 1 + clip_high)
  return composition.shaped(delta, batch, keep_BT=there_BT, clip_low=1 - low_BT, clip_high=high_BT - 1)


def gapo(policy: Scores, batch: Batch, *, edge: str, clip_low: Positive = 0.2, clip_high: Positive = 0.28) -> TokenLoss:
  """PPO whose upper clip follows how hard the prompt was (GAPO, arXiv 2609.00444, token form; read second-hand).

  With c of the group's k sequences rewarded above 0 it is clip_low + (clip_high - clip_low) (k - c) / (k - 1) where
  A > 0: the full clip_high for the only right answer, or where none is, and clip_low where all are right. The group is
  what is here of it, and k - 1 is at least 1.

  Args:
    clip_low: the lower end of the clip is 1 - clip_low; the upper one is 1 + clip_low where all are right.
    clip_high: the upper end of the clip is 1 + clip_high where one of the group is right, or none.
  """
  once_BT = first_of_sequence(batch.mask, batch.segment)
  size_BT = group_sum(once_BT.astype(jnp.float32), batch.group)
  right_BT = group_sum((once_BT & (batch.reward > 0)).astype(jnp.float32), batch.group)
  hard_BT = (size_BT - right_BT) / jnp.maximum(size_BT - 1, 1)
  high_BT = clip_low + (clip_high - clip_low) * jnp.clip(hard_BT, 0.0, 1.0)
  return composition.clipped(policy, batch, edge=edge, clip_low=clip_low, clip_high=high_BT)


def clip_cov(
  policy: Scores,
  batch: Batch,
  *,
  edge: str,
  clip_low: float,
  clip_high: float,
  share: Fraction = 2e-4,
  low: Positive = 1.0,
  high: Bound = 5.0,
) -> TokenLoss:
  """PPO without the tokens that would lower the entropy most (Clip-Cov, Cui et al., arXiv 2505.22617).

  cov = (A - mean A) (log pi - mean log pi) over the tokens here that have a ratio. Among those with low < cov < high
  that the clip leaves alone, a `share` of all, rounded down, and at least one is dropped. The source draws them at
  random; here they are the largest, so that a replay drops the same ones.

  Args:
    share: the fraction of the tokens that is dropped.
    low: the covariance above which a token may be dropped.
    high: the covariance below which a token may be dropped.
  """
  token_loss = composition.clipped(policy, batch, edge=edge, clip_low=clip_low, clip_high=clip_high)
  covariance_BT = _covariance(policy, batch, token_loss.keep)
  candidate_BT = token_loss.keep & ~token_loss.clipped & (covariance_BT > low) & (covariance_BT < high)
  drop_BT = trust_regions.largest(covariance_BT, candidate_BT, jnp.floor(share * jnp.sum(token_loss.keep)))
  return TokenLoss(jnp.where(drop_BT, 0.0, token_loss.value), token_loss.keep & ~drop_BT, token_loss.clipped & ~drop_BT)


def kl_cov(
  policy: Scores, batch: Batch, *, edge: str, share: Fraction = 2e-4, coefficient: Positive = 0.1
) -> TokenLoss:
  """-r A, plus coefficient x |log r| on the tokens of largest covariance (KL-Cov, Cui et al., arXiv 2505.22617).

  cov as in `clip_cov`; a `share` of the tokens, rounded down, and at least one is penalised. There is no clip, and at
  r = 1 the penalty has no gradient.

  Args:
    share: the fraction of the tokens that is penalised.
    coefficient: the weight of the penalty |log r|.
  """
  delta, there_BT = composition.safe_log_ratio(policy, batch, edge)
  token_loss = composition.shaped(delta, batch, keep_BT=there_BT)
  number = jnp.floor(share * jnp.sum(there_BT))
  chosen_BT = trust_regions.largest(_covariance(policy, batch, there_BT), there_BT, number)
  # The derivative of jnp.abs at 0 is 1, which would push every on-policy token that is chosen.
  penalty_BT = jnp.where(delta == 0, 0.0, coefficient * jnp.abs(delta))
  return token_loss._replace(value=token_loss.value + jnp.where(chosen_BT, penalty_BT, 0.0))


def _covariance(policy: Scores, batch: Batch, where_BT: jax.Array) -> jax.Array:
  count = jnp.maximum(jnp.sum(where_BT), 1)

  def centred(value_BT):
    value_BT = jnp.where(where_BT, value_BT, 0.0)
    return value_BT - jnp.sum(value_BT) / count

  return centred(batch.advantage) * centred(jax.lax.stop_gradient(policy.logprob))
