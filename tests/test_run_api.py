"""Checkpoints by version, and losses compared on one batch: a run of four steps, of which versions 2 and 4 are kept."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

import estr_jax
from estr_jax.objective.losses import LOSSES
from estr_jax.objective.triangle import log_reference_ratio
from estr_jax.tasks import TASKS

# An untrained policy never solves the task, and without reward no weight would move: reward something else.
TASK = dataclasses.replace(TASKS["calculator"], name="thirds", reward=lambda answer, turns: len(turns[-1]) % 3 / 2)
CONFIG = {
  "mode": "sync",
  "steps": 4,
  "checkpoint.every": 2,
  "batch.groups": 2,
  "batch.group_size": 4,
  "sampling.slots": 8,
  "eval.prompts": 2,
  "eval.every": 0,
  "eval.every_prompts": 2,
  "eval.slots": 8,
  "sampling.temperature": 0.8,
  "optimizer.learning_rate": 3e-2,
  "loss.clip_low": 0.05,
}
PROMPTS = [{"question": "7*8+46=", "answer": "102"}, {"question": "2*3+10=", "answer": "16"}]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def folder(cache, tmp_path_factory):
  made = tmp_path_factory.mktemp("runs") / "run"
  estr_jax.train({**CONFIG, "cache_dir": cache}, made, task=TASK, quiet=True)
  return made


@pytest.fixture(scope="module")
def newest(folder):
  return estr_jax.load(folder, task=TASK)


@pytest.fixture(scope="module")
def stale(folder):
  """Groups that version 2 sampled."""
  return estr_jax.sample(estr_jax.load(folder, version=2, task=TASK), PROMPTS, samples=4)


def test_load_takes_the_version_that_is_asked_for(cache, folder, newest, tmp_path):
  """Fails if the newest checkpoint is read whatever is asked for, or one is read under another's version."""
  assert newest.version == 4 == estr_jax.load(folder, version=4, task=TASK).version
  older = estr_jax.load(folder, version=2, task=TASK)
  assert older.version == 2 and older.metrics["step"].tolist() == [0, 1, 2, 3, 4]
  estr_jax.train({**CONFIG, "cache_dir": cache, "steps": 2}, tmp_path / "short", task=TASK, quiet=True)
  jax.tree.map(np.testing.assert_array_equal, older.params, estr_jax.load(tmp_path / "short", task=TASK).params)
  with pytest.raises(AssertionError):
    jax.tree.map(np.testing.assert_array_equal, older.params, newest.params)


@pytest.mark.parametrize("version", [0, 3, 5])
def test_load_names_the_versions_that_are_kept(folder, version):
  """Fails if a version that is gone ends in a traceback, or the line does not say which are left."""
  with pytest.raises(estr_jax.UserError, match=rf"no checkpoint of version {version} .* are: 2, 4$") as error:
    estr_jax.load(folder, version=version, task=TASK)
  assert "\n" not in str(error.value)


def test_compare_losses_follows_the_formulas(newest, stale):
  """Fails if delta is not log pi - log mu in this order, if a decision is another loss's, or if names change places."""
  losses = {
    "wide": partial(LOSSES["estr"], tau=np.inf),
    "estr": partial(LOSSES["estr"], tau=0.02, eps=0.05),
    "fixed": partial(LOSSES["fixed_width"], width=0.1),
    "ppo": LOSSES["ppo"],
  }
  found = estr_jax.compare_losses(newest, stale, losses)
  batch, delta, mask = found.batch, found.delta, found.batch.mask
  assert found.version == 4 and list(found.losses) == list(losses)
  assert all(isinstance(array, np.ndarray) for decided in found.losses.values() for array in decided)
  assert mask.shape == (8, newest.settings.config.sampling.context) and (batch.staleness[mask] == 2).all()
  assert (delta[~mask] == 0).all() and (delta[mask] > 0).any() and (delta[mask] < 0).any()
  kept = {name: decided.keep for name, decided in found.losses.items()}
  np.testing.assert_array_equal(kept["wide"], mask)
  np.testing.assert_array_equal(kept["ppo"], mask)
  np.testing.assert_array_equal(kept["estr"], mask & (delta**2 <= 0.02 * (batch.entropy + 0.05)))
  np.testing.assert_array_equal(kept["fixed"], mask & (np.abs(delta) <= 0.1))
  assert 0 < kept["estr"].sum() < mask.sum() and (kept["estr"] != kept["fixed"]).any()
  # The run's clip_low and the default clip_high.
  high, low = (batch.advantage > 0) & (delta > np.log(1.28)), (batch.advantage < 0) & (delta < np.log(0.95))
  np.testing.assert_array_equal(found.losses["ppo"].clipped, mask & (high | low))
  assert high.any() and low.any()


def test_compare_losses_sees_no_change_where_there_is_none(newest, stale):
  """Fails if pi is scored at another temperature, or one token off: a policy agrees with itself only."""
  fresh = estr_jax.compare_losses(newest, estr_jax.sample(newest, PROMPTS, samples=4), {})
  assert np.abs(fresh.delta).max() < 1e-4 < np.abs(estr_jax.compare_losses(newest, stale, {}).delta).max()


def test_a_row_is_a_trajectory_of_sample(newest, stale):
  """Fails if rows are in another order than the trajectories of `sample`."""
  found = estr_jax.compare_losses(newest, stale, {})
  for row, trajectory in enumerate(trajectory for group in stale for trajectory in group):
    size = len(trajectory.tokens)
    np.testing.assert_array_equal(found.batch.tokens[row, :size], trajectory.tokens)
    np.testing.assert_array_equal(found.batch.segment[row], np.arange(found.batch.segment.shape[1]) < size)


def test_compare_losses_takes_a_loss_of_ones_own(newest, stale):
  """Fails if a default is overwritten, a key of the run does not arrive, or q is not the policy before its update."""
  arrived = {}

  def mine(policy, batch, *, edge: str, clip_low: float, clip_high: float = 3.0):
    arrived.update(edge=edge, clip=(clip_low, clip_high), log_u=np.abs(policy.logprob - batch.proximal).max())
    return LOSSES["ppo"](policy, batch, edge=edge, clip_low=clip_low, clip_high=clip_high)

  assert estr_jax.compare_losses(newest, stale, {"mine": mine}).losses["mine"].keep.any()
  assert arrived == {"edge": "direct", "clip": (0.05, 3.0), "log_u": 0}


def needs_reference(policy, batch):
  return log_reference_ratio(policy.logprob, batch)


def needs_more(policy, batch, *, more: float):
  raise AssertionError("called without what it needs")


@pytest.mark.parametrize(
  ("change", "loss", "words"),
  [
    (lambda groups: [], LOSSES["ppo"], "no trajectories"),
    (lambda groups: [*groups, groups[0]], LOSSES["ppo"], "in the batch twice"),
    (lambda groups: [groups[0], groups[1][:2]], LOSSES["ppo"], "as many trajectories each"),
    (lambda groups: groups, needs_reference, r"loss it: this loss needs batch\.reference"),
    (lambda groups: groups, LOSSES["score_centering"], r"loss it: this loss needs .*vocabulary"),
    (lambda groups: groups, needs_more, "loss it needs more, which no config has"),
  ],
)
def test_what_cannot_be_compared(newest, stale, change, loss, words):
  """Fails if a wrong batch or loss ends in another exception than a user's, or in a number."""
  with pytest.raises(estr_jax.UserError, match=words):
    estr_jax.compare_losses(newest, change(stale), {"it": loss})


def test_trajectories_that_cannot_be_compared(folder, newest):
  """Fails if NaN rewards become decisions, or rollouts from the future are compared."""
  with pytest.raises(estr_jax.UserError, match="without a reward"):
    estr_jax.compare_losses(newest, estr_jax.sample(newest, ["7*8+46="], samples=2), LOSSES)
  older = estr_jax.load(folder, version=2, task=TASK)
  with pytest.raises(estr_jax.UserError, match="sampled by version 4, newer than the policy's 2"):
    estr_jax.compare_losses(older, estr_jax.sample(newest, PROMPTS, samples=2), LOSSES)
