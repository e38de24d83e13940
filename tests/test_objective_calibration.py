"""tau from a wanted mask fraction: the quantile, what a config may ask for, and a run that finds its own."""

import contextlib
import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags
from runtime_cases import abstract_state, assert_trees_equal, config, final_params, train

from configs import default
from estr_jax.errors import UserError
from estr_jax.lab.staleness import Simulated
from estr_jax.learner.checkpoint import Checkpoints
from estr_jax.objective.calibration import quantile_threshold
from estr_jax.objective.keys import calibrated_fraction
from estr_jax.objective.losses import SCORES
from estr_jax.run import command_line, learner, options, parts
from estr_jax.runtime.rollouts import LocalRollouts
from estr_jax.tasks import TASKS

ROOT = Path(__file__).parent.parent


def above(score, where, tau) -> int:
  return sum(1 for s, there in zip(np.ravel(score), np.ravel(where)) if there and np.isfinite(s) and s > tau)


@pytest.mark.parametrize(("fraction", "masked"), [(0.1, 1), (0.5, 5), (0.29, 2), (0.3, 3), (0.95, 9), (0.05, 0)])
def test_the_wanted_fraction_exceeds_the_threshold(fraction, masked):
  """Kills: the other end of the distribution, an index off by one, an interpolated quantile, 0.3 x 10 = 2.99."""
  score = np.array([[5.0, 1.0, 9.0, 3.0, 7.0], [2.0, 8.0, 4.0, 10.0, 6.0]])
  tau = quantile_threshold(score, np.ones((2, 5), bool), fraction)
  assert above(score, np.ones(10), tau) == masked and tau in score


def test_a_thousand_tokens():
  """Kills: a fraction that is rounded up, where 0.29 x 100 is 28.999 in floating point."""
  score = np.random.default_rng(0).exponential(size=100)
  for percent in range(1, 100):
    assert above(score, np.ones(100), quantile_threshold(score, np.ones(100, bool), percent / 100)) == percent


def test_only_finite_policy_tokens_count():
  """Kills: padding, a NaN or an inf among the scores."""
  score = np.array([np.nan, 1.0, 2.0, np.inf, 3.0, 4.0, 100.0, 0.0])
  where = np.array([True, True, True, True, True, True, False, False])
  assert quantile_threshold(score, where, 0.25) == 3.0
  assert quantile_threshold(score, where, 0.5) == 2.0


def test_ties_are_kept_or_dropped_together():
  """Kills: a threshold between equals that drops more than the wanted fraction."""
  score, everywhere = np.array([1.0, 2.0, 2.0, 2.0, 3.0]), np.ones(5, bool)
  assert quantile_threshold(score, everywhere, 0.2) == 2.0
  assert quantile_threshold(score, everywhere, 0.6) == 2.0
  assert above(score, everywhere, quantile_threshold(score, everywhere, 0.6)) == 1
  assert quantile_threshold(score, everywhere, 0.8) == 1.0
  assert quantile_threshold(np.full(7, 0.25), np.ones(7, bool), 0.9) == 0.25
  assert quantile_threshold(np.full(1, 0.25), np.ones(1, bool), 0.01) == 0.25


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_fraction_outside_its_range(fraction):
  """Kills: a percentage that passes as a fraction."""
  with pytest.raises(ValueError, match=r"in \(0, 1\)"):
    quantile_threshold(np.ones(3), np.ones(3, bool), fraction)


@pytest.mark.parametrize("score", [[], [np.nan, np.inf]])
def test_nothing_finite_is_said(score):
  """Kills: an IndexError, or a NaN for tau."""
  with pytest.raises(ValueError, match="no token has a finite score"):
    quantile_threshold(np.array(score), np.ones(len(score), bool), 0.1)


def asked(tau, mode="async", name="estr", **changes):
  c = default.get_config()
  c.mode, c.loss.name = mode, name
  c.loss[name].tau = tau
  for key, value in changes.items():
    group, _, leaf = key.rpartition("__")
    c[group][leaf] = value
  options.make(c)
  return c


def test_what_tau_may_be():
  """Kills: a number that is refused, a fraction that is misread, or a calibration of a loss that is not in force."""
  assert calibrated_fraction(asked(2.0)) is None
  assert calibrated_fraction(asked(2)) is None
  assert calibrated_fraction(asked(float("inf"))) is None
  for name in SCORES:
    assert calibrated_fraction(asked("calibrate:0.01", name=name)) == 0.01
  assert calibrated_fraction(asked("calibrate:1e-3", "simulated", staleness__inter=1)) == 1e-3
  c = asked(2.0)
  c.loss.name = "ppo"
  assert calibrated_fraction(c) is None


@pytest.mark.parametrize(
  "tau", ["calibrate", "calibrate:", "calibrate:2", "calibrate:0", "calibrate:a", "0.5x", 0, -1.0, None, True, [1.0]]
)
def test_what_tau_may_not_be(tau):
  """Kills: a traceback, or a run with a tau that nobody meant."""
  with pytest.raises(
    UserError, match=r"loss\.estr\.tau=.* is neither a number above 0, or inf, nor calibrate:FRACTION"
  ):
    asked(tau)


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"mode": "sync"}, "mode=sync nothing is ever stale"),
    ({"mode": "simulated"}, r"staleness\.intra=0 and staleness\.inter=0 none is"),
    ({"staleness__max": 0}, r"staleness\.max=0 none is"),
    ({"mode": "simulated", "staleness__inter": 100}, "waits for the batch of version 100"),
  ],
)
def test_calibration_where_it_cannot_happen(changes, words):
  """Kills: a run that never masks, and says nothing."""
  with pytest.raises(UserError, match=words):
    asked("calibrate:0.01", **changes)


@pytest.mark.parametrize(
  ("flag", "value"), [("2.5", 2.5), ("3", 3), ("calibrate:0.02", "calibrate:0.02"), ("inf", float("inf"))]
)
def test_tau_on_the_command_line(monkeypatch, flag, value):
  """Kills: a float key that refuses the string, or a number that arrives as one."""
  arguments = ["train", f"--config={ROOT / 'configs' / 'quickstart.py'}", f"--config.loss.estr.tau={flag}"]
  known = flags.FlagValues()
  monkeypatch.setattr(sys, "argv", arguments)  # where config_flags looks for the keys
  monkeypatch.setattr(flags, "FLAGS", known)
  command_line.parse(
    arguments, lambda: config_flags.DEFINE_config_file("config", None, "A config file.", flag_values=known), "Usage."
  )
  tau = options.make(known.config).config.loss.estr.tau
  assert tau == value and isinstance(tau, type(value))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def lively(monkeypatch):
  """An untrained policy never solves the task, and without reward no weight would move: reward something else."""
  task = dataclasses.replace(TASKS["calculator"], reward=lambda answer, turns: len(turns[-1]) % 3 / 2)
  monkeypatch.setitem(TASKS, "calculator", task)


def test_a_run_finds_its_tau_and_keeps_it(cache, tmp_path):
  """Kills: a tau of a fresh batch, one that is found anew at every step, one that does not act, or a wrong fraction.

  Until the batch of version 1 nothing is stale and nothing would be masked, so the run is, to the bit, the one that
  was given that tau from its start.
  """
  shape = dict(mode="simulated", steps=4, staleness__inter=1, batch__groups=4)
  summary, rows = train(config(cache, loss__estr__tau="calibrate:0.05", **shape), tmp_path / "found")
  taus = [row.get("loss/tau") for row in rows]
  assert taus[:2] == [None, None] and "loss/tau" not in rows[1] and taus[2] > 0 and set(taus[2:]) == {taus[2]}
  assert summary["tau"] == taus[2] and summary["tau_calibrated_at"] == 1 and summary["compilations"] == 1
  tokens = rows[2]["policy/tokens"]
  assert abs(rows[2]["loss/mask_fraction"] * tokens - np.floor(0.05 * tokens)) <= 1  # one token: the rounding of S
  assert rows[1]["loss/mask_fraction"] == 0
  given = config(cache, loss__estr__tau=taus[2], **shape)
  summary, same = train(given, tmp_path / "given")
  assert summary["tau"] == taus[2] and summary["tau_calibrated_at"] is None
  for name in ("loss/objective", "loss/mask_fraction", "optimizer/gradient_norm", "policy/score_histogram"):
    assert [row.get(name) for row in same[1:]] == [row.get(name) for row in rows[1:]], name
  assert_trees_equal(final_params(given, tmp_path / "given"), final_params(given, tmp_path / "found"))


@pytest.mark.parametrize("name", ["estr_learner_entropy", "estr_power"])
def test_other_scores_can_be_calibrated(cache, tmp_path, name):
  """Kills: S of another method, or one without what it reads of the learner."""
  c = config(cache, "simulated", loss__name=name, steps=2, staleness__inter=1, batch__groups=4)
  c.loss[name].tau = "calibrate:0.1"
  _, rows = train(c, tmp_path)
  tokens = rows[2]["policy/tokens"]
  assert abs(rows[2]["loss/mask_fraction"] * tokens - np.floor(0.1 * tokens)) <= 1


def test_a_resumed_run_keeps_its_tau(cache, tmp_path, monkeypatch):
  """Kills: a tau that a restart forgets, or finds anew on another batch; a record without it.

  Mode async on rollouts of this process, one version old; after the restart the first of them is fresh again.
  """

  @contextlib.contextmanager
  def local(settings, workdir, model, tokenizer, mesh, stream, cursor, version, view):
    engine = parts.engine_of(settings, model, tokenizer, mesh)
    yield (
      LocalRollouts(
        engine, stream.at, Simulated(inter=1, intra=0, segment_tokens=8), groups_per_batch=2, cursor=cursor
      ),
      lambda: {"process_ids": {}, "acknowledged_versions": {}},
    )

  monkeypatch.setattr(learner, "rollouts_of", local)
  taus = []
  for steps in (2, 4):
    c = config(cache, "async", steps=steps, loss__estr__tau="calibrate:0.05")
    summary, rows = train(c, tmp_path)
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:
      taus += [checkpoints.restore(abstract_state(c), step)[1]["tau"] for step in (steps - 1, steps)]
    assert summary["tau"] == taus[-1] and summary["tau_calibrated_at"] == 1
  tau = taus[1]
  assert tau > 0 and taus == [None, tau, tau, tau]
  assert rows[3]["staleness/token"] == 0 and [row.get("loss/tau") for row in rows] == [None, None, tau, tau, tau]
