"""Advantages from the rewards of a group of samples of one prompt."""

import numpy as np

SCALES = ("std", "none")


def group_advantage(reward_GN: np.ndarray, *, scale: str, eps: float) -> np.ndarray:
  """Each reward against its group's mean.

  scale "std" is GRPO (Shao et al., arXiv 2402.03300): A = (R - mean) / (std + eps), with the population standard
  deviation; "none" is Dr.GRPO (Liu et al., arXiv 2503.20783): A = R - mean. A group of equal rewards has
  advantage exactly 0 under both.

  Args:
    reward_GN: [G, N] rewards of N samples in each of G groups.
    scale: one of SCALES.
    eps: added to the standard deviation.

  Returns:
    float32 [G, N].
  """
  if scale not in SCALES:
    raise ValueError(f"scale is one of {SCALES}, not {scale!r}")
  reward_GN = np.asarray(reward_GN, np.float64)
  equal_G1 = (reward_GN == reward_GN[:, :1]).all(axis=1, keepdims=True)
  centred_GN = np.where(equal_G1, 0.0, reward_GN - reward_GN.mean(axis=1, keepdims=True))
  if scale == "std":
    centred_GN = centred_GN / np.where(equal_G1, 1.0, reward_GN.std(axis=1, keepdims=True) + eps)
  return centred_GN.astype(np.float32)
