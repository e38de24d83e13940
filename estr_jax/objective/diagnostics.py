"""What a batch says about its own off-policyness; sums and counts that add across microbatches."""

import jax
import jax.numpy as jnp
import numpy as np

from estr_jax.objective.surrogates import MAX_LOG_RATIO
from estr_jax.structs import Batch, Mean, Scores, TokenLoss

# Bins of the behaviour entropy, nats. Fine near zero, where a fixed band and ESTR's differ most.
ENTROPY_EDGES = np.array([0.0, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.4, 0.7, 1.0, 1.4, 2.0, 3.0, 20.0])


def diagnose(policy: Scores, batch: Batch, token_loss: TokenLoss) -> dict[str, Mean]:
  """Means over the policy tokens of a batch.

  Args:
    policy: the learner's scores under the weights before the update, entropy included.
    batch: the batch.
    token_loss: what the loss returned for it.

  Returns:
    name -> Mean; names and formulas are in observe.glossary. Tokens whose stored log-prob is not finite count in the
    fractions, and not in the moments of delta.
  """
  mask = batch.mask
  delta = jax.lax.stop_gradient(policy.logprob - batch.logprob)
  finite = mask & jnp.isfinite(delta)
  delta = jnp.where(finite, delta, 0.0)
  bounded = jnp.clip(delta, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  ratio = jnp.exp(bounded)
  # ratio - 1 would round away the KL of nearly equal policies.
  kl = jnp.expm1(bounded) - delta

  def mean(value, where):
    return Mean(jnp.sum(jnp.where(where, value, 0.0)), jnp.sum(where).astype(jnp.float32))

  bins = jnp.searchsorted(jnp.asarray(ENTROPY_EDGES[1:-1], jnp.float32), batch.entropy, side="right")
  in_bin = jax.nn.one_hot(bins, len(ENTROPY_EDGES) - 1, dtype=jnp.float32) * finite[..., None]
  per_bin = jnp.sum(in_bin, axis=(0, 1))
  return {
    "loss/mask_fraction": mean(~token_loss.keep, mask),
    "loss/clip_fraction": mean(token_loss.clipped, mask),
    "policy/entropy": mean(batch.entropy, mask),
    "policy/learner_entropy": mean(jax.lax.stop_gradient(policy.entropy), mask),
    "policy/rollout_kl": mean(kl, finite),
    "policy/abs_delta": mean(jnp.abs(delta), finite),
    "policy/ratio": mean(ratio, finite),
    "policy/ratio_square": mean(jnp.square(ratio), finite),
    "policy/abs_delta_by_entropy": Mean(jnp.sum(in_bin * jnp.abs(delta)[..., None], axis=(0, 1)), per_bin),
    "policy/token_share_by_entropy": Mean(per_bin, jnp.broadcast_to(jnp.sum(per_bin), per_bin.shape)),
  }


def effective_sample_size(ratio: float, ratio_square: float) -> float:
  """ESS / n = mean(w)^2 / mean(w^2) of the token importance ratios; 1 on policy."""
  return ratio**2 / ratio_square if ratio_square > 0 else float("nan")
