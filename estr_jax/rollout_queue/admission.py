"""What the queue lets in, and which groups make a batch. Pure functions.

The staleness cap of admission "wait". Let K = groups_per_batch, S = max_staleness, and let u(g) be the learner's
version when group g was first leased. A sampler starts g with weights of version >= u(g), so every token of g is at
least that new, and g keeps the cap if it is trained at a version <= u(g) + S. Call a group live from its first lease
until it is taken. Two rules keep the cap and throw nothing away:

  pacing     at version v a new group is leased only while live < (S + 1) K before the batch of version v is taken, and
             only while live < S K after it. Where every batch so far took K groups this is the same as
             leased so far < (v + S + 1) K.
  selection  the batch of version v leaves, for every d = 1..S, at most d K live groups with u <= v + d - S.

Invariant, before the batch of version v is taken: for every d = 0..S, at most (d + 1) K live groups have
u <= v + d - S. By induction: selection leaves at most d K of them after batch v, which is the invariant of v + 1 for
d - 1; a group leased at v or v + 1 counts only for the larger d, which the two halves of pacing bound. With d = 0 the
groups whose last chance is this batch, u <= v - S, are at most K: they fit, and the selection (which takes them all)
exists, since the K oldest live groups are one. Selection without d > 0 is not enough: a batch of only young groups
can leave more than K old ones to a later batch.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from estr_jax.structs import Trajectory


def check_group(trajectories: Sequence[Trajectory], prompt_ids: Collection[int]) -> None:
  """Raises ValueError, naming the field, unless these are the finished trajectories of exactly these prompts."""
  ids = sorted(t.prompt_id for t in trajectories)
  if ids != sorted(prompt_ids):
    raise ValueError(f"prompt_id: the group's prompts are {sorted(prompt_ids)}, the trajectories answer {ids}")
  for trajectory in trajectories:
    try:
      _check_trajectory(trajectory)
    except ValueError as fault:
      raise ValueError(f"trajectory of prompt {trajectory.prompt_id}: {fault}") from None


def _check_trajectory(t: Trajectory) -> None:
  for name in ("mask", "logprob", "entropy", "gini", "version"):
    length = len(getattr(t, name))
    if length != len(t.tokens):
      raise ValueError(f"{name} has length {length}, tokens {len(t.tokens)}")
  if not t.mask.any():
    raise ValueError("mask holds no policy token")
  for name in ("entropy", "gini"):
    if not np.isfinite(getattr(t, name)).all():
      raise ValueError(f"{name} is not finite")
  if t.vocabulary is not None and (len(t.vocabulary) != len(t.tokens) or np.isnan(t.vocabulary).any()):
    raise ValueError("vocabulary is NaN, or not as long as tokens")
  if t.experts is not None and len(t.experts) != len(t.tokens):
    raise ValueError(f"experts has length {len(t.experts)}, tokens {len(t.tokens)}")
  # log mu = -inf is possible (a token that rounding made impossible); the losses handle it.
  if np.isnan(t.logprob).any() or np.isposinf(t.logprob).any():
    raise ValueError("logprob is NaN or +inf")
  if (t.version[t.mask] < 0).any():
    raise ValueError("version is negative at a policy token")
  if not np.isfinite(t.reward):
    raise ValueError(f"reward is {t.reward}")


def oldest_version(trajectories: Sequence[Trajectory]) -> int:
  return min(int(t.version[t.mask].min()) for t in trajectories)


def newest_version(trajectories: Sequence[Trajectory]) -> int:
  return max(int(t.version[t.mask].max()) for t in trajectories)


def policy_tokens(trajectories: Sequence[Trajectory]) -> int:
  return sum(int(t.mask.sum()) for t in trajectories)


def may_lease(live: int, *, batch_taken: bool, groups_per_batch: int, max_staleness: int) -> bool:
  """The pacing rule, for one more group."""
  return live < (max_staleness if batch_taken else max_staleness + 1) * groups_per_batch


def select_batch(
  leased_at: Mapping[int, int], arrived: Sequence[int], *, version: int, groups_per_batch: int, max_staleness: int
) -> list[int] | None:
  """The selection rule: the batch of `version`, first come first served as far as the cap allows.

  Args:
    leased_at: u(g) of every live group.
    arrived: the live groups whose trajectories are here, in order of arrival.

  Returns: the groups, ascending, or None while a group that has to be in this batch, or any K-th one, is missing.
  """
  chosen: list[int] = []
  for bound in sorted(set(leased_at.values())):
    later_batches = bound + max_staleness - version
    members = sum(u <= bound for u in leased_at.values())
    need = members - later_batches * groups_per_batch - len(chosen)
    if need > 0:
      ready = [g for g in arrived if leased_at[g] <= bound and g not in chosen]
      if len(ready) < need:
        return None
      chosen += ready[:need]
  if len(chosen) > groups_per_batch:
    raise RuntimeError(f"{len(chosen)} groups have their last chance at version {version}: pacing was not kept")
  chosen += [g for g in arrived if g not in chosen][: groups_per_batch - len(chosen)]
  return sorted(chosen) if len(chosen) == groups_per_batch else None
