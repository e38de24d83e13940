"""From groups of trajectories to one batch of fixed shape, and the staleness that the groups really have.

Host code: NumPy in, NumPy out. The shape never changes between steps, so the train step compiles once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from estr_jax.objective.advantages import ESTIMATORS
from estr_jax.structs import NO_EXPERT, Batch, Mean, Metric, Trajectory

STALENESS_BINS = 65  # a histogram counts 0, 1, ... versions; its last bin is "or more"

_Placed = tuple[Trajectory, float]  # a trajectory and the advantage of its policy tokens


def assemble(
  groups: Sequence[Sequence[Trajectory]],
  target_version: int,
  *,
  rows: int,
  length: int,
  advantage: str,
  advantage_eps: float,
  pack: bool,
) -> Batch:
  """Lays the trajectories of some groups into one batch of NumPy arrays [rows, length].

  The result depends on the trajectories only, not on the order in which they arrived: padded rows stand
  in the order of prompt ids, packed rows are filled first-fit-decreasing by length, ties by prompt id.

  Args:
    groups: the trajectories of each prompt group, as many of each.
    target_version: the version of the weights that the update starts from.
    rows: B. With `pack` False one trajectory a row, and rows left over are padding.
    length: T, tokens.
    advantage: a key of `advantages.ESTIMATORS`.
    advantage_eps: added to its standard deviation.
    pack: whether a row may hold several trajectories, each its own segment.

  Raises:
    ValueError: a trajectory longer than `length`, one whose first token claims to be sampled (nothing
      predicts it), the same prompt id twice, or more trajectories than fit.
  """
  placed = _advantages(groups, advantage, advantage_eps)
  _check(placed, length)
  layout = _first_fit_decreasing(placed, length) if pack else [[item] for item in placed]
  if len(layout) > rows:
    raise ValueError(f"{len(placed)} trajectories need {len(layout)} rows of {length} tokens and the batch has {rows}")
  return _fill(layout, rows, length, target_version)


def _advantages(groups: Sequence[Sequence[Trajectory]], advantage: str, eps: float) -> list[_Placed]:
  """By prompt id, so that the order of arrival leaves no trace in a sum."""
  ordered = [sorted(group, key=lambda trajectory: trajectory.prompt_id) for group in groups if group]
  ordered.sort(key=lambda group: group[0].prompt_id)
  if len({len(group) for group in ordered}) > 1:
    raise ValueError(f"groups of one batch have as many trajectories each, not {[len(group) for group in ordered]}")
  if not ordered:
    return []
  reward_GN = np.asarray([[trajectory.reward for trajectory in group] for group in ordered], np.float64)
  advantage_GN = ESTIMATORS[advantage](reward_GN, eps).astype(np.float32)
  placed = [item for group, row_N in zip(ordered, advantage_GN) for item in zip(group, map(float, row_N))]
  return sorted(placed, key=lambda item: item[0].prompt_id)


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


def _fill(layout: Sequence[Sequence[_Placed]], rows: int, length: int, target_version: int) -> Batch:
  def zeros(dtype: Any, *more: int) -> Any:
    """What stands for a jax.Array until the batch is placed."""
    return np.zeros((rows, length, *more), dtype)

  prompts = sorted({trajectory.group for items in layout for trajectory, _ in items})
  batch = Batch(
    tokens=zeros(np.int32),
    mask=zeros(bool),
    logprob=zeros(np.float32),
    entropy=zeros(np.float32),
    gini=zeros(np.float32),
    staleness=zeros(np.int32),
    segment=zeros(np.int32),
    group=zeros(np.int32),
    reward=zeros(np.float32),
    advantage=zeros(np.float32),
  )
  recorded = {t.vocabulary.shape[1] for items in layout for t, _ in items if t.vocabulary is not None}
  if recorded:
    (V,) = recorded  # one vocabulary, or a fault
    batch = dataclasses.replace(batch, vocabulary=zeros(np.float32, V))
  routed = {t.experts.shape[1:] for items in layout for t, _ in items if t.experts is not None}
  if routed:
    (choices,) = routed  # (layers, experts a token) of one model, or a fault
    experts: Any = np.full((rows, length, *choices), NO_EXPERT, np.uint8)
    batch = dataclasses.replace(batch, experts=experts)
  for row, items in enumerate(layout):
    start = 0
    for segment, (trajectory, advantage) in enumerate(items, start=1):
      span = np.s_[row, start : start + len(trajectory.tokens)]
      batch.tokens[span] = trajectory.tokens
      batch.mask[span] = trajectory.mask
      batch.logprob[span] = trajectory.logprob
      batch.entropy[span] = trajectory.entropy
      batch.gini[span] = trajectory.gini
      batch.staleness[span] = np.where(trajectory.mask, target_version - trajectory.version, 0)
      batch.segment[span] = segment
      batch.group[span] = 1 + prompts.index(trajectory.group)
      batch.reward[span] = trajectory.reward
      if batch.vocabulary is not None:
        batch.vocabulary[span] = trajectory.vocabulary
      if batch.experts is not None:
        batch.experts[span] = trajectory.experts
      batch.advantage[span] = np.where(trajectory.mask, advantage, 0)
      start += len(trajectory.tokens)
  return batch


def staleness(groups: Sequence[Sequence[Trajectory]], target_version: int) -> dict[str, Metric]:
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
  metrics: dict[str, Metric] = {
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


def _mean(values: ArrayLike) -> Mean:
  numbers = np.asarray(values, np.float64)
  return Mean(numbers.sum(), numbers.size)
