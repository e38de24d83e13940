"""The losses: named compositions of a trust region, a weight and a surrogate on an edge of the policy triangle.

The contract. A loss is `loss(logprob_BT, batch, **hyper) -> TokenLoss`:

* `logprob_BT` is log pi of the batch's tokens and the only input that carries a gradient.
* `value` is the token's loss, to be minimised; it is exactly 0, with a gradient of exactly 0, where not `keep`.
* `keep` is a subset of `batch.mask`, detached, and depends on theta: it is computed anew at every update. It touches
  nothing else: not the advantages, not the rewards, not the denominator.
* `clipped` marks kept tokens whose gradient the clip removed.
* A token whose stored log-prob is not finite has no ratio, and is not kept by any loss.
* Nothing is reduced here: `reduce` divides by the policy tokens of the whole global batch, kept or not.

To add a loss: one function, one entry in LOSSES, one float64 reference in the tests.
"""

import jax
import jax.numpy as jnp

from estr_jax.objective import trust_regions
from estr_jax.objective.surrogates import clipped_surrogate
from estr_jax.objective.triangle import log_behaviour_ratio, log_ratio
from estr_jax.structs import Batch, TokenLoss


def ppo(logprob_BT: jax.Array, batch: Batch, *, edge: str, clip_low: float, clip_high: float) -> TokenLoss:
  """The clipped surrogate and no other trust region: PPO, and GRPO by its group advantages."""
  everything = jnp.ones_like(batch.mask)
  return _clipped(logprob_BT, batch, edge=edge, keep_BT=everything, weight=1.0, clip_low=clip_low, clip_high=clip_high)


def estr(
  logprob_BT: jax.Array, batch: Batch, *, edge: str, tau: float, eps: float, clip_low: float, clip_high: float
) -> TokenLoss:
  """Entropy-scaled trust region (Zhao et al., arXiv 2607.22186).

  M = 1[delta^2 <= tau (H + eps)] with delta = log pi - log mu, times the clipped surrogate. The paper's edge is
  "direct": one ratio, pi / mu, serves the mask and the clip. On "proximal" the mask stays on pi / mu and the clip acts
  on pi / q.
  """
  keep_BT = trust_regions.entropy_scaled(log_ratio(logprob_BT, batch, "direct"), batch.entropy, tau=tau, eps=eps)
  return _clipped(logprob_BT, batch, edge=edge, keep_BT=keep_BT, weight=1.0, clip_low=clip_low, clip_high=clip_high)


def icepop(
  logprob_BT: jax.Array, batch: Batch, *, edge: str, low: float, high: float, clip_low: float, clip_high: float
) -> TokenLoss:
  """IcePop: a fixed band [low, high] on a ratio.

  edge "proximal" is the original: B = q / mu is both the band's ratio and a detached weight, times PPO(pi / q); its
  mask does not move with theta. Edge "direct" masks by pi / mu and clips the same ratio, with no weight.
  """
  if edge == "proximal":
    log_b = log_behaviour_ratio(batch)
    keep_BT = trust_regions.ratio_band(log_b, low=low, high=high)
    weight = jnp.exp(jnp.where(keep_BT, log_b, 0.0))
  else:
    keep_BT = trust_regions.ratio_band(log_ratio(logprob_BT, batch, edge), low=low, high=high)
    weight = 1.0
  return _clipped(logprob_BT, batch, edge=edge, keep_BT=keep_BT, weight=weight, clip_low=clip_low, clip_high=clip_high)


def kpop(logprob_BT: jax.Array, batch: Batch, *, edge: str, phi: float, clip_low: float, clip_high: float) -> TokenLoss:
  """KPop: keep iff both Bernoulli KLs between pi and mu of the sampled token are at most phi, times PPO on `edge`."""
  keep_BT = trust_regions.bernoulli_kl_ball(logprob_BT, batch.logprob, phi=phi)
  return _clipped(logprob_BT, batch, edge=edge, keep_BT=keep_BT, weight=1.0, clip_low=clip_low, clip_high=clip_high)


LOSSES = {"estr": estr, "ppo": ppo, "icepop": icepop, "kpop": kpop}


def _clipped(logprob_BT, batch, *, edge, keep_BT, weight, clip_low, clip_high) -> TokenLoss:
  """keep x weight x clipped surrogate; the inputs of exp are made safe before, not after."""
  delta = log_ratio(logprob_BT, batch, edge)
  finite_BT = jnp.isfinite(jax.lax.stop_gradient(delta)) & jnp.isfinite(batch.logprob)
  keep_BT = keep_BT & batch.mask & finite_BT
  objective, clipped_BT = clipped_surrogate(
    jnp.where(keep_BT, delta, 0.0), batch.advantage, clip_low=clip_low, clip_high=clip_high
  )
  return TokenLoss(jnp.where(keep_BT, -weight * objective, 0.0), keep_BT, keep_BT & clipped_BT)


def reduce(token_loss: TokenLoss, denominator: jax.Array) -> jax.Array:
  """The scalar loss: the sum over tokens by `denominator`, the policy tokens of the WHOLE global batch (at least 1).

  Microbatches and devices that share one denominator add up to the loss of the whole batch.
  """
  return jnp.sum(token_loss.value) / denominator
