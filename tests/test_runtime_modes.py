"""The modes are one code path, and staleness is what was asked for."""

import dataclasses
import os

import jax
import numpy as np
import pytest
from runtime_cases import assert_trees_equal, config, final_params, train

from estr_jax.errors import UserError
from estr_jax.lab.staleness import OnPolicy, Simulated, segment_versions
from estr_jax.run import workdir
from estr_jax.runtime.launch import only_learner
from estr_jax.structs import Weights
from estr_jax.tasks import TASKS


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  """Compiled programs and prompts are shared by the runs of this file."""
  return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def lively(monkeypatch):
  """An untrained policy never solves the task, and without reward no weight would move: reward something else."""
  task = dataclasses.replace(TASKS["calculator"], reward=lambda answer, turns: len(turns[-1]) % 3 / 2)
  monkeypatch.setitem(TASKS, "calculator", task)


def test_sync_equals_simulated_without_staleness_bit_for_bit(cache, tmp_path):
  """Fails if the history hands out a neighbouring version, or anything else differs between the two modes."""
  runs = {}
  for mode in ("sync", "simulated"):
    c = config(cache, mode, steps=5)
    summary, rows = train(c, tmp_path / mode)
    assert summary["steps"] == 5 and summary["compilations"] == 1
    runs[mode] = (final_params(c, tmp_path / mode), [row["loss/objective"] for row in rows[1:]])
  assert_trees_equal(runs["sync"][0], runs["simulated"][0])
  assert runs["sync"][1] == runs["simulated"][1]
  stale = config(cache, "simulated", steps=5, staleness__inter=1)
  train(stale, tmp_path / "stale")
  with pytest.raises(AssertionError):  # the comparison can fail
    assert_trees_equal(runs["sync"][0], final_params(stale, tmp_path / "stale"))


@pytest.mark.parametrize(("intra", "inter"), [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_realised_staleness_is_the_requested_one_for_every_token(cache, tmp_path, intra, inter):
  """Fails if the history, the plan or the stamp is off by one anywhere after the history has filled.

  Every token is compared inside the run too (`check_realised`); this test counts the rows that the run wrote.
  """
  steps = intra + inter + 2
  c = config(
    cache,
    "simulated",
    steps=steps,
    staleness__intra=intra,
    staleness__inter=inter,
    staleness__segment_tokens=1,
  )
  _, rows = train(c, tmp_path / "run")
  for target, row in enumerate(rows[1:]):
    reached = np.flatnonzero(row["staleness/token_histogram"])
    oldest, newest = (max(0, target - age) for age in (intra + inter, inter))
    assert reached.max() == target - oldest
    assert reached.min() == target - newest
    if target >= intra + inter:
      # A trajectory of at most `intra` policy tokens ends before its last switch; the others cross exactly that many.
      assert np.flatnonzero(row["staleness/intra_histogram"]).max() == intra
      assert np.flatnonzero(row["staleness/inter_histogram"]).min() == inter


@pytest.mark.slow
def test_a_mixture_of_experts_trains_on_the_experts_that_its_sampler_recorded(cache, tmp_path):
  """Fails if the record is lost between sampler and learner, or belongs to other tokens: the first batch is fresh."""
  shape = dict(model__experts=4, model__experts_per_token=2, model__expert_mlp_width=32)
  how = dict(sampling__record_routing=True, loss__router_balance=0.01, staleness__inter=1)
  _, rows = train(config(cache, "simulated", steps=2, **shape, **how), tmp_path / "run")
  first, second = rows[1:]
  assert first["router/agreement"] == 1 and first["policy/max_abs_delta"] < 1e-4
  assert second["staleness/token"] == 1 and second["policy/max_abs_delta"] > 1e-3
  assert 0.5 < second["router/agreement"] <= 1
  np.testing.assert_allclose(first["loss/penalty"], 0.01 * first["router/balance"], rtol=1e-4)


def test_segment_versions():
  """Fails if intra and inter change places, or the last segment is not the newest."""
  assert segment_versions(9, inter=3, intra=2) == [4, 5, 6]
  assert segment_versions(9, inter=0, intra=0) == [9]
  assert segment_versions(3, inter=3, intra=2) == [0, 0, 0]
  assert segment_versions(4, inter=3, intra=2) == [0, 0, 1]
  assert segment_versions(9, inter=3, intra=2, oldest=5) == [5, 5, 6]


def test_the_history_holds_what_the_plan_needs():
  """Fails if the ring is one too short, or is indexed from its wrong end."""
  schedule = Simulated(inter=3, intra=2, segment_tokens=4)
  for version in range(12):
    schedule.publish(Weights(version, f"params {version}"))
    assert [w.version for w in schedule.segments(version)] == segment_versions(version, inter=3, intra=2)
    assert all(w.params == f"params {w.version}" for w in schedule.segments(version))
  with pytest.raises(ValueError, match="version 13 after 11"):
    schedule.publish(Weights(13, None))


def test_on_policy_refuses_old_weights():
  """Fails if sync mode could sample from weights before the last update."""
  schedule = OnPolicy()
  schedule.publish(Weights(4, None))
  assert [w.version for w in schedule.segments(4)] == [4]
  with pytest.raises(ValueError, match="version 5"):
    schedule.segments(5)


def test_a_stopped_sync_run_goes_on_to_the_same_end(cache, tmp_path):
  """Fails if a resumed run skips or repeats a prompt, a step, or a random draw, if it forgets the coefficient of the
  entropy bonus, or if its KL penalty is against the weights that it resumed from."""
  terms = dict(loss__entropy__target=10.0, loss__kl__coefficient=0.1)
  straight = config(cache, "sync", steps=4, **terms)
  _, rows = train(straight, tmp_path / "straight")
  for steps in (2, 4):
    _, resumed = train(config(cache, "sync", steps=steps, **terms), tmp_path / "resumed")
  assert [row["step"] for row in resumed] == [row["step"] for row in rows] == [0, 1, 2, 3, 4]
  for name in ("loss/objective", "loss/penalty", "loss/entropy_coefficient"):
    assert [row.get(name) for row in resumed] == [row.get(name) for row in rows], name
  assert rows[4]["loss/entropy_coefficient"] > rows[1]["loss/entropy_coefficient"] > 0
  assert_trees_equal(final_params(straight, tmp_path / "straight"), final_params(straight, tmp_path / "resumed"))


def test_a_workdir_of_another_config_is_refused(cache, tmp_path):
  """Fails if a run goes on under settings that it did not begin with."""
  c = config(cache, "sync")
  workdir.record_config(c, tmp_path)
  c.steps, c.eval.every, c.queue.capacity = 9, 3, 100  # may change
  workdir.check_same(c, tmp_path)
  c.loss.estr.tau = 2.0
  with pytest.raises(UserError, match=r"another config: loss\.estr\.tau was 1.0 and is 2.0"):
    workdir.check_same(c, tmp_path)
  c.optimizer.decay, c.steps = "linear", 10
  workdir.record_config(c, tmp_path)
  c.steps = 20
  with pytest.raises(UserError, match="steps was 10"):  # the learning rate would jump
    workdir.check_same(c, tmp_path)


def test_a_start_that_left_no_checkpoint_binds_nobody(cache, tmp_path):
  """Fails if a mistyped config locks its workdir."""
  workdir.record_config(config(cache, "sync", loss__estr__tau=3.0), tmp_path)
  _, rows = train(config(cache, "sync", steps=1), tmp_path)
  assert rows[-1]["step"] == 1


def test_a_finished_run_is_finished_for_its_own_config_only(cache, tmp_path):
  """Fails if a sweep that reuses a folder is told that it is done, or damaged files end in a traceback."""
  c = config(cache, "sync", steps=5)
  assert not workdir.finished(c, tmp_path)
  workdir.record_config(c, tmp_path)
  (tmp_path / "summary.json").write_text('{"steps": 5}')
  assert not workdir.finished(c, tmp_path)  # no report yet
  (tmp_path / "report.html").write_text("")
  assert workdir.finished(c, tmp_path)
  with pytest.raises(UserError, match=r"loss\.name was estr and is ppo"):
    workdir.finished(config(cache, "sync", steps=5, loss__name="ppo"), tmp_path)
  (tmp_path / "config.json").write_text("{garbage")
  with pytest.raises(UserError, match=r"config\.json cannot be read"):
    workdir.finished(c, tmp_path)
  (tmp_path / "summary.json").write_text("garbage")
  assert not workdir.finished(c, tmp_path)


def test_one_learner_a_workdir(tmp_path):
  """Fails if a second run could delete the files of the first."""
  with (
    only_learner(tmp_path),
    pytest.raises(UserError, match=f"process {os.getpid()} is training"),
    only_learner(tmp_path),
  ):
    pass
  with only_learner(tmp_path):
    pass


def test_a_simulated_run_is_not_resumed(cache, tmp_path):
  """Fails if a resumed run has less staleness than was asked for, and says nothing."""
  for steps in (1, 2):
    c = config(cache, "simulated", steps=steps, staleness__inter=2)
    if steps == 1:
      train(c, tmp_path)
    else:
      with pytest.raises(UserError, match="past weights are not kept"):
        train(c, tmp_path)


def test_weights_that_are_not_finite_are_neither_published_nor_saved(cache, tmp_path):
  """Fails if a diverged update overwrites the checkpoints."""
  c = config(cache, "sync", steps=4, optimizer__name="sgd", optimizer__learning_rate=1e30, optimizer__clip_norm=1e30)
  with pytest.raises(UserError, match="diverged"):
    train(c, tmp_path)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(final_params(c, tmp_path)))


@pytest.mark.parametrize("edge", ["direct", "proximal"])
@pytest.mark.parametrize("loss", ["estr", "ppo", "icepop", "kpop"])
def test_every_loss_trains_on_every_edge(cache, tmp_path, loss, edge):
  """Fails if a loss does not get the batch that its edge asks for."""
  c = config(cache, "simulated", steps=2, loss__name=loss, loss__edge=edge, staleness__inter=1)
  _, rows = train(c, tmp_path / "run")
  assert all(row["optimizer/gradient_norm"] > 0 for row in rows[1:])
