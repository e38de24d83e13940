"""Staleness as a setting: which version samples which token, and the proof that it did."""

import collections
from collections.abc import Sequence

import numpy as np

from estr_jax.structs import Trajectory, Weights


def segment_versions(target: int, *, inter: int, intra: int, oldest: int = 0) -> list[int]:
  """The version of each segment of a trajectory that the update of version `target` will consume.

  Delta_intra = last - first = `intra` and Delta_inter = target - last = `inter`; segment k has version
  target - inter - intra + k. Where that is before `oldest`, the first version there is, it is `oldest`.
  """
  return [max(oldest, target - inter - intra + k) for k in range(intra + 1)]


class OnPolicy:
  """Every token under the weights that the update starts from."""

  segment_tokens = 1  # one segment has no border

  def __init__(self):
    self._newest: Weights | None = None

  def publish(self, weights: Weights) -> None:
    self._newest = weights

  def segments(self, target: int) -> list[Weights]:
    if self._newest is None or self._newest.version != target:
      raise ValueError(f"the newest weights are not those of version {target}")
    return [self._newest]


class Simulated:
  """Every token under the version that was asked for, from a history of past weights.

  In the first inter + intra updates the history does not reach back far enough, and the oldest weights that it has
  stand in for older ones; those tokens are less stale than asked for, and stamped with what they really are.
  """

  def __init__(self, *, inter: int, intra: int, segment_tokens: int):
    self.segment_tokens = segment_tokens
    self._inter, self._intra = inter, intra
    self._history: collections.deque[Weights] = collections.deque(maxlen=inter + intra + 1)

  def publish(self, weights: Weights) -> None:
    """Versions come one after the other."""
    if self._history and weights.version != self._history[-1].version + 1:
      raise ValueError(f"version {weights.version} after {self._history[-1].version}")
    self._history.append(weights)

  def segments(self, target: int) -> list[Weights]:
    oldest = self._history[0].version
    versions = segment_versions(target, inter=self._inter, intra=self._intra, oldest=oldest)
    return [self._history[version - oldest] for version in versions]


def check_realised(trajectories: Sequence[Trajectory], versions: Sequence[int], segment_tokens: int) -> None:
  """Raises RuntimeError unless the i-th policy token of every trajectory has the version of its segment.

  Args:
    trajectories: what was sampled.
    versions: of each segment.
    segment_tokens: policy tokens of each segment but the last.
  """
  for trajectory in trajectories:
    realised = trajectory.version[trajectory.mask]
    segment = np.minimum(np.arange(len(realised)) // segment_tokens, len(versions) - 1)
    requested = np.asarray(versions)[segment]
    if not np.array_equal(realised, requested):
      token = int(np.argmax(realised != requested))
      raise RuntimeError(
        f"policy token {token} of trajectory {trajectory.prompt_id} was sampled by version {realised[token]} where "
        f"version {requested[token]} was asked for"
      )
