"""What a notebook calls, on runs of some seconds: train, load, sample, evaluate."""

import dataclasses
import json
import signal

import numpy as np
import pytest

import estr_jax
from estr_jax.objective.losses import composition
from estr_jax.run.loaded import as_arrays
from estr_jax.tasks import TASKS

SIGTERM = signal.getsignal(signal.SIGTERM)  # what it is before any run
# An untrained policy never solves the task, and without reward no weight would move: reward something else.
TASK = dataclasses.replace(TASKS["calculator"], name="thirds", reward=lambda answer, turns: len(turns[-1]) % 3 / 2)
SMALL = {
  "steps": 2,
  "batch.groups": 2,
  "batch.group_size": 4,
  "sampling.slots": 8,
  "eval.prompts": 4,
  "eval.every_prompts": 2,
  "eval.slots": 8,
  "optimizer.learning_rate": 3e-3,
}


def scaled(policy, batch, *, edge: str, scale: float = 1.0, clip_low: float, clip_high: float):
  """PPO times a number.

  Args:
    scale: of the objective.
  """
  token_loss = composition.clipped(policy, batch, edge=edge, clip_low=clip_low, clip_high=clip_high)
  return token_loss._replace(value=scale * token_loss.value)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def run(cache, tmp_path_factory):
  """(config, folder, result) of a run in this process with a task and a loss of its own."""
  config = {**SMALL, "mode": "sync", "cache_dir": cache, "loss": {"scaled": {"scale": 0.5}}}
  folder = tmp_path_factory.mktemp("runs") / "deep" / "first"
  return config, folder, estr_jax.train(config, folder, task=TASK, loss=scaled)


def test_a_run_in_this_process(run):
  """Fails if a file is not written, another loss or task trains, or the signals of the caller are changed."""
  _, folder, result = run
  assert result.workdir == folder and result.report.stat().st_size > 10_000
  assert (result.summary["loss"], result.summary["task"], result.summary["steps"]) == ("scaled", "thirds", 2)
  assert set(result.accuracy) == {"sampled", "greedy"} and result.summary["config_name"] == "python"
  assert json.loads((folder / "config.json").read_text())["loss"]["scaled"] == {"scale": 0.5}
  assert "scaled: scale 0.5" in result.report.read_text(encoding="utf-8")
  assert signal.getsignal(signal.SIGTERM) == SIGTERM


def test_the_loss_that_was_passed_is_the_one_that_trains(run, cache, tmp_path):
  """Fails if the objective is another than the function's: scaled by a half, the same first batch gives half of it."""
  config, _, _ = run
  once = {**config, "steps": 1, "loss.scaled.scale": 1.0}
  del once["loss"]
  whole = estr_jax.train(once, tmp_path / "whole", task=TASK, loss=scaled, quiet=True)
  half = estr_jax.load(run[1], task=TASK).metrics["loss/objective"][1]
  np.testing.assert_allclose(
    half, 0.5 * estr_jax.load(whole.workdir, task=TASK).metrics["loss/objective"][1], rtol=1e-5
  )
  assert half != 0


def test_a_finished_run_is_not_done_again(run, capsys):
  """Fails if a second call trains anew, says something, or takes another config for the same run."""
  config, folder, result = run
  before = (folder / "metrics.jsonl").stat().st_mtime_ns
  again = estr_jax.train(config, folder, task=TASK, loss=scaled)
  assert again.summary == result.summary and (folder / "metrics.jsonl").stat().st_mtime_ns == before
  assert capsys.readouterr().out == ""
  with pytest.raises(estr_jax.UserError, match=r"loss\.scaled\.scale was 0\.5 and is 2\.0"):
    estr_jax.train({**config, "loss": {"scaled": {"scale": 2.0}}}, folder, task=TASK, loss=scaled)


def test_load_gives_policy_and_metrics(run):
  """Fails if the weights are not those of the last update, or a metric loses a row."""
  _, folder, _ = run
  loaded = estr_jax.load(folder, task=TASK)
  assert loaded.version == 2 and loaded.settings.task is TASK
  assert loaded.model.vocab_size == loaded.tokenizer.vocab_size
  assert loaded.metrics["step"].tolist() == [0, 1, 2]
  assert np.isnan(loaded.metrics["rollout/reward"][0]) and np.isfinite(loaded.metrics["rollout/reward"][1:]).all()
  assert loaded.metrics["staleness/token_histogram"].shape[0] == 3
  with pytest.raises(estr_jax.UserError, match="has a task of its own, thirds; pass it, as task="):
    estr_jax.load(folder)


def test_samples_are_grouped_by_prompt(run):
  """Fails if samples of two prompts are mixed, or a reward is made up where no answer was given."""
  loaded = estr_jax.load(run[1], task=TASK)
  groups = estr_jax.sample(loaded, ["7*8+46=", {"question": "2*3+10=", "answer": "16"}], samples=3)
  assert [len(group) for group in groups] == [3, 3]
  for group, question in zip(groups, ("7*8+46=", "2*3+10=")):
    for one in group:
      assert loaded.text(one) == question + loaded.reply(one) and loaded.reply(one)
      assert (one.version[one.mask] == 2).all()
  assert all(np.isnan(one.reward) for one in groups[0]) and all(one.reward in (0, 0.5, 1) for one in groups[1])
  assert len({loaded.reply(one) for group in groups for one in group}) > 1


def test_samples_follow_their_seed_and_greedy_has_none(run):
  """Fails if a seed does nothing, or greedy decoding draws."""
  loaded = estr_jax.load(run[1], task=TASK)

  def replies(**how):
    return [loaded.reply(one) for group in estr_jax.sample(loaded, ["7*8+46="], samples=4, **how) for one in group]

  assert replies(seed=1) == replies(seed=1) != replies(seed=2)
  assert len(set(replies(greedy=True))) == 1 and replies(greedy=True) == replies(greedy=True, seed=5)


@pytest.mark.parametrize(
  ("prompts", "how", "words"),
  [
    ([], {}, "nothing to sample"),
    (["7*8+46="], {"samples": 0}, "nothing to sample"),
    (["7*8+46=" * 9], {}, r"sampling\.context"),
    (["what?"], {}, "what"),
  ],
)
def test_what_cannot_be_sampled(run, prompts, how, words):
  """Fails if a wrong prompt ends in another exception than a user's."""
  with pytest.raises(estr_jax.UserError, match=words):
    estr_jax.sample(estr_jax.load(run[1], task=TASK), prompts, **how)


def test_evaluate_reproduces_the_runs_own_last_evaluation(run):
  """Fails if other prompts, keys or weights are evaluated."""
  _, folder, result = run
  found = estr_jax.evaluate(folder, task=TASK)
  assert found.version == 2 and found.prompts == 4
  assert found.accuracy == {kind: result.accuracy[kind]["after"] for kind in ("sampled", "greedy")}
  fewer = estr_jax.evaluate(folder, prompts=2, task=TASK)
  assert [len(done) for done in fewer.trajectories.values()] == [2, 2]
  with pytest.raises(estr_jax.UserError, match=r"eval\.prompts=0 must be above 0"):
    estr_jax.evaluate(folder, prompts=0, task=TASK)


def test_a_folder_without_a_run(tmp_path):
  """Fails if a wrong folder ends in a traceback, or is made."""
  for call in (estr_jax.load, estr_jax.evaluate):
    with pytest.raises(estr_jax.UserError, match=r"config\.json cannot be read"):
      call(tmp_path / "nowhere")
  assert not (tmp_path / "nowhere").exists()
  (tmp_path / "file").write_text("")
  with pytest.raises(estr_jax.UserError, match="cannot be written"):
    estr_jax.train(SMALL, tmp_path / "file" / "run")


def test_metrics_as_arrays():
  """Fails if a null becomes 0, or a row without a name shifts the others."""
  rows = [{"step": 0, "a": 1.0}, {"step": 1, "a": None, "h": [1, 2]}, {"step": 2, "h": [3, None]}]
  found = as_arrays(rows)
  np.testing.assert_array_equal(found["step"], [0, 1, 2])
  np.testing.assert_array_equal(found["a"], [1, np.nan, np.nan])
  np.testing.assert_array_equal(found["h"], [[np.nan, np.nan], [1, 2], [3, np.nan]])


@pytest.mark.slow
def test_processes_get_a_task_and_a_loss_of_ones_own(cache, tmp_path):
  """Fails if mode async trains without the objects that were passed, or a failure there ends in another exception."""
  config = {**SMALL, "cache_dir": cache, "loss.scaled.scale": 0.5}
  result = estr_jax.train(config, tmp_path / "run", task=TASK, loss=scaled, quiet=True)
  assert (result.summary["loss"], result.summary["task"]) == ("scaled", "thirds")
  assert result.summary["process_ids"].keys() == {"learner", "sampler"}
  assert estr_jax.load(tmp_path / "run", task=TASK).version == 2
  small = {**config, "sampling.context": 5}
  with pytest.raises(estr_jax.UserError, match=r"raise sampling\.context"):
    estr_jax.train(small, tmp_path / "failed", task=TASK, loss=scaled, quiet=True)


def test_the_package_loads_its_parts_when_they_are_used():
  """Fails if a name of __all__ is gone, or an unknown one is no AttributeError."""
  assert all(getattr(estr_jax, name) is not None for name in estr_jax.__all__)
  with pytest.raises(AttributeError, match="no attribute 'trane'"):
    _ = estr_jax.trane
