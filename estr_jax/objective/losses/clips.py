"""Shapers: how far a ratio may carry its gradient."""

from estr_jax.objective.losses import composition
from estr_jax.structs import Batch, Scores, TokenLoss


def ppo(policy: Scores, batch: Batch, *, edge: str, clip_low: float, clip_high: float) -> TokenLoss:
  """The clipped surrogate and no other trust region: PPO, and GRPO by its group advantages."""
  return composition.clipped(policy, batch, edge=edge, clip_low=clip_low, clip_high=clip_high)
