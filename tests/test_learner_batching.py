"""Batch assembly and realised staleness, against hand-made trajectories."""

import dataclasses

import numpy as np
import pytest

from estr_jax.learner.batching import STALENESS_BINS, assemble, staleness
from estr_jax.structs import NO_EXPERT, NO_VERSION, Trajectory


def trajectory(prompt_id, *, size=6, prompt=2, reward=0.0, versions=None, **changes) -> Trajectory:
  mask = np.arange(size) >= prompt
  version = np.full(size, NO_VERSION, np.int32)
  version[mask] = 0 if versions is None else versions
  rng = np.random.default_rng(prompt_id)
  made = Trajectory(
    tokens=rng.integers(1, 9, size).astype(np.int32),
    mask=mask,
    logprob=np.where(mask, -rng.random(size), 0).astype(np.float32),
    entropy=np.where(mask, rng.random(size), 0).astype(np.float32),
    gini=np.where(mask, rng.random(size), 0).astype(np.float32),
    version=version,
    reward=reward,
    prompt_id=prompt_id,
    group=prompt_id // 2,
    task="t",
    finish="stop",
    turns=1,
    seconds=0.0,
  )
  return dataclasses.replace(made, **changes)


def build(groups, *, rows=4, length=8, pack=False):
  return assemble(groups, 0, rows=rows, length=length, advantage="dr_grpo", advantage_eps=1e-6, pack=pack)


GROUPS = [
  [trajectory(2, reward=1.0, size=5), trajectory(3, size=8)],
  [trajectory(0, reward=0.0, size=3), trajectory(1, reward=1.0, size=4)],
]


def same(a, b) -> bool:
  return all(
    np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a) if f.name != "proximal"
  )


def test_rows_stand_by_prompt_id_whatever_the_arrival():
  """Fails if rows keep the order of arrival, which differs between a queue and a simulation."""
  shuffled = [GROUPS[1][::-1], GROUPS[0][::-1]]
  for pack in (False, True):
    assert same(build(GROUPS, pack=pack), build(shuffled, pack=pack))
  batch = build(GROUPS)
  for row, one in enumerate([*GROUPS[1], *GROUPS[0]]):
    np.testing.assert_array_equal(batch.tokens[row, : len(one.tokens)], one.tokens)
    np.testing.assert_array_equal(batch.segment[row], np.arange(8) < len(one.tokens))
    np.testing.assert_array_equal(batch.logprob[row, : len(one.tokens)], one.logprob)
    np.testing.assert_array_equal(batch.gini[row, : len(one.tokens)], one.gini)
    np.testing.assert_array_equal(batch.group[row], np.where(np.arange(8) < len(one.tokens), 1 + one.group, 0))
    np.testing.assert_array_equal(batch.reward[row], np.where(np.arange(8) < len(one.tokens), one.reward, 0))


def test_recorded_experts_stand_with_their_tokens():
  """Fails if padding claims a choice, or a packed trajectory takes its neighbour's."""
  groups = [
    [dataclasses.replace(t, experts=np.full((len(t.tokens), 3, 2), t.prompt_id, np.uint8)) for t in group]
    for group in GROUPS
  ]
  for pack in (False, True):
    batch = build(groups, pack=pack)
    sizes = np.bincount(batch.experts[..., 2, 1].ravel(), minlength=256)
    assert batch.experts.shape == (4, 8, 3, 2) and batch.experts.dtype == np.uint8
    assert sizes[:4].tolist() == [3, 4, 5, 8] and sizes[NO_EXPERT] == 32 - 20
    assert (batch.experts[batch.segment == 0] == NO_EXPERT).all()
  assert build(GROUPS).experts is None


def test_advantage_is_the_groups_own_and_only_on_policy_tokens():
  """Fails if the baseline is the batch's mean, or if prompt tokens carry an advantage."""
  batch = build([[trajectory(0, reward=1.0), trajectory(1, reward=3.0)], [trajectory(i, reward=9.0) for i in (2, 3)]])
  expected = np.zeros((4, 8))
  expected[0, 2:6], expected[1, 2:6] = -1.0, 1.0
  np.testing.assert_array_equal(batch.advantage, expected)


def test_the_age_of_a_token_is_the_learners_version_less_its_own():
  """Fails if the difference is reversed, or if a prompt or padded token has an age."""
  groups = [[trajectory(0, versions=[3, 3, 5, 7]), trajectory(1, versions=7)]]
  batch = assemble(groups, 7, rows=2, length=8, advantage="grpo", advantage_eps=1e-6, pack=False)
  np.testing.assert_array_equal(batch.staleness, [[0, 0, 4, 4, 2, 0, 0, 0], [0] * 8])


def test_packing_keeps_every_trajectory_whole():
  """Fails if packing drops, cuts or overlaps a trajectory, or shares a segment number within a row."""
  padded, packed = build(GROUPS), build(GROUPS, pack=True)
  assert packed.segment.max() == 2

  def pieces(batch):
    found = set()
    for row in range(batch.tokens.shape[0]):
      for segment in range(1, batch.segment[row].max() + 1):
        where = batch.segment[row] == segment
        assert np.ptp(np.flatnonzero(where)) + 1 == where.sum()
        fields = ("tokens", "mask", "logprob", "entropy", "gini", "staleness", "group", "reward", "advantage")
        found.add(tuple(getattr(batch, name)[row][where].tobytes() for name in fields))
    return found

  assert pieces(packed) == pieces(padded) and len(pieces(packed)) == 4
  assert (packed.segment > 0).sum() == sum(len(one.tokens) for group in GROUPS for one in group)
  assert (packed.segment.max(axis=1) > 0).sum() == 3  # 8 | 5 + 3 | 4


@pytest.mark.parametrize(
  ("groups", "message"),
  [
    ([[trajectory(7, size=9)]], "trajectory 7 has 9 tokens and a row of the batch holds 8"),
    ([[trajectory(7, prompt=0)]], "marks its first token as sampled"),
    ([[trajectory(7), trajectory(7)]], "trajectory 7 is in the batch twice"),
    ([[trajectory(0), trajectory(1)], [trajectory(2)]], "as many trajectories each"),
    ([[trajectory(i) for i in range(5)]], "5 trajectories need 5 rows of 8 tokens and the batch has 4"),
  ],
)
def test_what_does_not_fit_is_an_error(groups, message):
  """Fails if a trajectory is cut or dropped without a word."""
  with pytest.raises(ValueError, match=message):
    build(groups)


def test_staleness_by_hand():
  """Fails if intra is max - min per batch, inter counts from the first token, or tool tokens have an age."""
  first = trajectory(0, size=6, versions=[3, 3, 4, 5])
  tool = trajectory(1, size=6, versions=6)
  tool.mask[3], tool.version[3] = False, NO_VERSION
  silent = trajectory(2, size=2, reward=4.0, finish="length")
  metrics = staleness([[first, tool], [silent]], 7)
  assert metrics["staleness/intra"].value() == (2 + 0) / 2
  assert metrics["staleness/inter"].value() == (2 + 1) / 2
  assert metrics["staleness/token"].value() == (4 + 4 + 3 + 2 + 1 * 3) / 7
  for name, bins in (("intra", {0: 1, 2: 1}), ("inter", {1: 1, 2: 1}), ("token", {1: 3, 2: 1, 3: 1, 4: 2})):
    histogram = metrics[f"staleness/{name}_histogram"]
    assert histogram.shape == (STALENESS_BINS,)
    assert dict(enumerate(histogram)) == {i: bins.get(i, 0) for i in range(STALENESS_BINS)}
  assert metrics["rollout/length"].value() == (4 + 3 + 0) / 3
  assert metrics["rollout/truncated"].value() == 1 / 3
  assert metrics["rollout/reward"].value() == 4 / 3


def test_a_very_old_token_counts_in_the_last_bin():
  """Fails if a histogram grows with the staleness, or drops what lies beyond it."""
  metrics = staleness([[trajectory(0)]], 1000)
  assert metrics["staleness/token_histogram"].shape == (STALENESS_BINS,)
  assert metrics["staleness/token_histogram"][-1] == 4
  assert metrics["staleness/token"].value() == 1000


def test_a_rollout_from_the_future_is_refused():
  """Fails if a rollout sampled before a restore trains the restored learner."""
  with pytest.raises(ValueError, match="sampled by version 8, newer than the learner's 7"):
    staleness([[trajectory(0, versions=8)]], 7)
