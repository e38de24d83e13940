"""From groups of trajectories to one batch of fixed shape, and the staleness that the groups really have.

Host code: NumPy in, NumPy out. The shape never changes between steps, so the train step compiles once.
"""

from collections.abc import Sequence

import numpy as np

from estr_jax.objective.advantages import group_advantage
from estr_jax.structs import NO_VERSION, Batch, Mean, Trajectory

STALENESS_BINS = 65  # a histogram counts 0, 1, ... versions; its last bin is "or more"

_Placed = tuple[Trajectory, float]  # a trajectory and the advantage of its policy tokens


def assemble(
  groups: Sequence[Sequence[Trajectory]],
  *,
  rows: int,
  length: int,
  advantage_scale: str,
  advantage_eps: float,
  pack: bool,
) -> Batch:
  """Lays the trajectories of some groups into one batch of NumPy arrays [rows, length].

  The result depends on the trajectories only, not on the order in which they arrived: padded rows stand
  in the order of prompt ids, packed rows are filled first-fit-decreasing by length, ties by prompt id.

  Args:
    groups: the trajectories of each prompt group; the advantage is relative to the group.
    rows: B. With `pack` False one trajectory a row, and rows left over are padding.
    length: T, tokens.
    advantage_scale: of `group_advantage`, "std" or "none".
    advantage_eps: of `group_advantage`, added to the standard deviation.
    pack: whether a row may hold several trajectories, each its own segment.

  Raises:
    ValueError: a trajectory longer than `length`, one whose first token claims to be sampled (nothing
      predicts it), the same prompt id twice, or more trajectories than fit.
  """
  placed: list[_Placed] = []
  for group in groups:
    ordered = sorted(group, key=lambda trajectory: trajectory.prompt_id)
    reward_GN = np.asarray([[trajectory.reward for trajectory in ordered]], np.float32)
    advantage_N = group_advantage(reward_GN, scale=advantage_scale, eps=advantage_eps)[0]
    placed.extend(zip(ordered, map(float, advantage_N)))
  placed.sort(key=lambda item: item[0].prompt_id)
  _check(placed, length)
  layout = _first_fit_decreasing(placed, length) if pack else [[item] for item in placed]
  if len(layout) > rows:
    raise ValueError(f"{len(placed)} trajectories need {len(layout)} rows of {length} tokens and the batch has {rows}")
  return _fill(layout, rows, length)


def _check(placed: Sequence[_Placed], length: int) -> None:
  previous = None
  for trajectory, _ in placed:
    size = len(trajectory.tokens)
    if size > length:
      raise ValueError(f"trajectory {trajectory.prompt_id} has {size} tokens and a row of the batch holds {length}")
    if size and trajectory.mask[0]:
      raise ValueError(f"trajectory {trajectory.prompt_id} marks its first token as sampled, but no token precedes it")
    if trajectory.prompt_id == previous:
      raise ValueError(f"trajectory {trajectory.prompt_id} is in the batch twice")
    previous = trajectory.prompt_id


def _first_fit_decreasing(placed: Sequence[_Placed], length: int) -> list[list[_Placed]]:
  layout: list[list[_Placed]] = []
  room: list[int] = []
  for item in sorted(placed, key=lambda item: (-len(item[0].tokens), item[0].prompt_id)):
    size = len(item[0].tokens)
    row = next((row for row, left in enumerate(room) if left >= size), len(layout))
    if row == len(layout):
      layout.append([])
      room.append(length)
    layout[row].append(item)
    room[row] -= size
  return layout


def _fill(layout: Sequence[Sequence[_Placed]], rows: int, length: int) -> Batch:
  shape = (rows, length)
  batch = Batch(
    tokens=np.zeros(shape, np.int32),
    mask=np.zeros(shape, bool),
    logprob=np.zeros(shape, np.float32),
    entropy=np.zeros(shape, np.float32),
    version=np.full(shape, NO_VERSION, np.int32),
    segment=np.zeros(shape, np.int32),
    advantage=np.zeros(shape, np.float32),
  )
  for row, items in enumerate(layout):
    start = 0
    for segment, (trajectory, advantage) in enumerate(items, start=1):
      span = np.s_[row, start : start + len(trajectory.tokens)]
      batch.tokens[span] = trajectory.tokens
      batch.mask[span] = trajectory.mask
      batch.logprob[span] = trajectory.logprob
      batch.entropy[span] = trajectory.entropy
      batch.version[span] = trajectory.version
      batch.segment[span] = segment
      batch.advantage[span] = np.where(trajectory.mask, advantage, 0)
      start += len(trajectory.tokens)
  return batch


def staleness(groups: Sequence[Sequence[Trajectory]], target_version: int) -> dict[str, Mean | np.ndarray]:
  """What the rollouts of one update were like, and how old they are, in versions.

  Delta_intra is last - first version inside a trajectory, Delta_inter is target - last, and a token's age
  is target - its version. A trajectory without a policy token counts in `rollout/*` only.

  Args:
    groups: the groups that the update consumes.
    target_version: the version of the weights that the update starts from.

  Returns:
    `rollout/*` and `staleness/*` by the names of the glossary; histograms are i64 [STALENESS_BINS].

  Raises:
    ValueError: a token newer than the target, that is a rollout from before a restore.
  """
  trajectories = [trajectory for group in groups for trajectory in group]
  intra, inter, token = [], [], [np.zeros(0, np.int64)]
  for trajectory in trajectories:
    version = trajectory.version[trajectory.mask].astype(np.int64)
    if not version.size:
      continue
    if version.max() > target_version:
      raise ValueError(
        f"trajectory {trajectory.prompt_id} was sampled by version {version.max()}, "
        f"newer than the learner's {target_version}"
      )
    intra.append(version[-1] - version[0])
    inter.append(target_version - version[-1])
    token.append(target_version - version)
  metrics: dict[str, Mean | np.ndarray] = {
    "rollout/reward": _mean([trajectory.reward for trajectory in trajectories]),
    "rollout/length": _mean([trajectory.mask.sum() for trajectory in trajectories]),
    "rollout/turns": _mean([trajectory.turns for trajectory in trajectories]),
    "rollout/seconds": _mean([trajectory.seconds for trajectory in trajectories]),
    "rollout/truncated": _mean([trajectory.finish == "length" for trajectory in trajectories]),
  }
  for name, versions in (("intra", intra), ("inter", inter), ("token", np.concatenate(token))):
    versions = np.asarray(versions, np.int64)
    metrics[f"staleness/{name}"] = _mean(versions)
    capped = np.minimum(versions, STALENESS_BINS - 1)
    metrics[f"staleness/{name}_histogram"] = np.bincount(capped, minlength=STALENESS_BINS)
  return metrics


def _mean(values) -> Mean:
  values = np.asarray(values, np.float64)
  return Mean(values.sum(), values.size)
