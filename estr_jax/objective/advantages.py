"""Advantages from the rewards of the groups of one batch: one named estimator each, NumPy in and out.

Every estimator is `(reward_GN, eps) -> advantage_GN`: [G, N] rewards of N > 1 samples of each of G prompts, float64.
A group of equal rewards says nothing about which sample was better, and its advantage is exactly 0 under every
estimator that compares within the group.
"""

import numpy as np


def grpo(reward_GN: np.ndarray, eps: float) -> np.ndarray:
  """A = (R - mean) / (std + eps) within the group, population standard deviation (Shao et al., arXiv 2402.03300)."""
  centred_GN = _centred(reward_GN)
  std_G1 = np.asarray(reward_GN, np.float64).std(axis=1, keepdims=True)
  return _divide(centred_GN, std_G1 + eps)


def dr_grpo(reward_GN: np.ndarray, eps: float) -> np.ndarray:
  """A = R - mean within the group: no division by the spread (Liu et al., arXiv 2503.20783)."""
  del eps
  return _centred(reward_GN)


def rloo(reward_GN: np.ndarray, eps: float) -> np.ndarray:
  """A = R - mean of the OTHER samples of the group (Ahmadian et al., arXiv 2402.14740): N / (N - 1) x Dr.GRPO's."""
  del eps
  N = np.shape(reward_GN)[1]
  return _centred(reward_GN) * N / (N - 1)


def loo_normalised(reward_GN: np.ndarray, eps: float) -> np.ndarray:
  """RLOO's advantage divided by (the standard deviation of the whole batch's RLOO advantages + eps).

  The name is used in public for more than one normalisation; this is ours, and no paper's.
  """
  advantage_GN = rloo(reward_GN, eps)
  return _divide(advantage_GN, advantage_GN.std() + eps)


def reinforce_pp(reward_GN: np.ndarray, eps: float) -> np.ndarray:
  """REINFORCE++ (Hu et al., arXiv 2501.03262): A = (R - batch mean) / (batch std + eps), blind to groups.

  Mean and spread are over sequences; public trainers take them over tokens, where a long answer weighs more.
  """
  reward_GN = np.asarray(reward_GN, np.float64)
  if (reward_GN == reward_GN.flat[0]).all():
    return np.zeros_like(reward_GN)
  return (reward_GN - reward_GN.mean()) / (reward_GN.std() + eps)


def reinforce_pp_baseline(reward_GN: np.ndarray, eps: float) -> np.ndarray:
  """REINFORCE++ with a baseline (same source): R - group mean, divided by (its std over the batch + eps).

  Over sequences, as in `reinforce_pp`.
  """
  centred_GN = _centred(reward_GN)
  return _divide(centred_GN, centred_GN.std() + eps)


ESTIMATORS = {
  "grpo": grpo,
  "dr_grpo": dr_grpo,
  "rloo": rloo,
  "loo_normalised": loo_normalised,
  "reinforce_pp": reinforce_pp,
  "reinforce_pp_baseline": reinforce_pp_baseline,
}

WITHOUT_DEVIATION = ("dr_grpo", "rloo")  # these read no eps


def _centred(reward_GN: np.ndarray) -> np.ndarray:
  reward_GN = np.asarray(reward_GN, np.float64)
  equal_G1 = (reward_GN == reward_GN[:, :1]).all(axis=1, keepdims=True)
  return np.where(equal_G1, 0.0, reward_GN - reward_GN.mean(axis=1, keepdims=True))


def _divide(centred_GN: np.ndarray, spread: np.ndarray) -> np.ndarray:
  """0 stays 0 where there is no spread and eps is 0."""
  return np.divide(centred_GN, spread, out=np.zeros_like(centred_GN), where=centred_GN != 0)
