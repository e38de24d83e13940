"""Two processes over gRPC: they finish, they acknowledge, and a killed one costs nothing."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from ports import held_port

from estr_jax.observe.writers import read

ROOT = pathlib.Path(__file__).parent.parent


def start(workdir, cache, *arguments) -> subprocess.Popen:
  return subprocess.Popen(
    [
      sys.executable,
      "-m",
      "experiments.train",
      "--config=configs/quickstart.py:smoke",
      f"--workdir={workdir}",
      f"--config.cache_dir={cache}",
      *arguments,
    ],
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def finish(process: subprocess.Popen) -> str:
  """What it said until its end. A hang has none, so the bound is one that a very slow machine keeps."""
  try:
    output, _ = process.communicate(timeout=900)
  except subprocess.TimeoutExpired:
    process.kill()
    raise
  return output


def pids(workdir) -> dict[str, int]:
  """Of the processes that run on this workdir, by role."""
  found = {}
  for folder in pathlib.Path("/proc").iterdir():
    if folder.name.isdigit():
      try:
        words = (folder / "cmdline").read_bytes().decode().split("\0")
      except OSError:  # gone meanwhile
        continue
      if f"--workdir={workdir}" in words:
        found |= {word.removeprefix("--role="): int(folder.name) for word in words if word.startswith("--role=")}
  return found


def steps(workdir) -> list[int]:
  path = workdir / "metrics.jsonl"
  return [row["step"] for row in read(path)] if path.exists() else []


def wait_for_step(workdir, process, step, seconds=900.0):
  deadline = time.monotonic() + seconds
  while not any(s >= step for s in steps(workdir)):
    assert process.poll() is None, process.communicate()[0]
    assert time.monotonic() < deadline, f"step {step} was not reached in {seconds} s; it has {steps(workdir)}"
    time.sleep(0.05)


@pytest.mark.timeout(1000)
def test_a_learner_and_a_sampler_finish_a_run_together(tmp_path):
  """Fails if the processes do not find each other, the sampler never takes new weights, or a file is not written."""
  process = start(tmp_path / "run", tmp_path / "cache", "--config.steps=6")
  output = finish(process)
  assert process.returncode == 0, output
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["process_ids"]["learner"] != summary["process_ids"]["sampler"]
  assert summary["staleness"]["token"] > 0
  assert summary["staleness"]["max_token"] <= 2  # staleness.max of the config
  assert len(summary["acknowledged_versions"]["sampler"]) > 1
  assert set(summary["accuracy"]) == {"sampled", "greedy"}
  assert summary["compilations"] == 1
  assert steps(tmp_path / "run") == [0, 1, 2, 3, 4, 5, 6]
  assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
  assert pids(tmp_path / "run") == {}


@pytest.mark.slow
def test_kill_9_of_the_learner_then_of_the_sampler_loses_and_repeats_no_step(tmp_path):
  """Fails if a resumed run skips or repeats a step, or a killed sampler takes its leases along."""
  run, cache = tmp_path / "run", tmp_path / "cache"
  arguments = ("--config.steps=60", "--config.checkpoint.every=5")
  process = start(run, cache, *arguments)
  wait_for_step(run, process, 12)
  os.kill(pids(run)["learner"], signal.SIGKILL)
  output = finish(process)
  assert process.returncode != 0 and "run the same command again" in output
  assert pids(run) == {}

  process = start(run, cache, *arguments)
  wait_for_step(run, process, 25)
  os.kill(pids(run)["sampler"], signal.SIGKILL)
  output = finish(process)
  assert process.returncode == 0, output
  assert "sampler was killed by signal 9; started again" in output
  assert steps(run) == list(range(61))
  assert json.loads((run / "summary.json").read_text())["steps"] == 60


@pytest.mark.slow
def test_kill_9_of_the_launcher_leaves_no_process_behind(tmp_path):
  """Fails if a learner or sampler outlives the command that started it."""
  process = start(tmp_path / "run", tmp_path / "cache", "--config.steps=100000")
  wait_for_step(tmp_path / "run", process, 3)
  process.kill()
  process.wait()
  deadline = time.monotonic() + 120  # in which nobody does that many steps
  while pids(tmp_path / "run") and time.monotonic() < deadline:
    time.sleep(0.1)
  assert pids(tmp_path / "run") == {}


@pytest.mark.slow
def test_a_sampler_of_another_model_is_refused_in_one_line(tmp_path):
  """Fails if weights of another shape are fetched, or the difference is not named."""
  with held_port() as port:
    address = f"--config.transport.address=127.0.0.1:{port}"
    learner = start(tmp_path / "run", tmp_path / "cache", "--role=learner", "--config.steps=5000", address)
    try:
      deadline = time.monotonic() + 900
      while not (tmp_path / "run" / "learner.json").exists():
        assert time.monotonic() < deadline and learner.poll() is None
        time.sleep(0.1)
      sampler = start(tmp_path / "run", tmp_path / "cache", "--role=sampler", "--config.model.mlp_width=128", address)
      output = finish(sampler)
      assert sampler.returncode == 2
      lines = [line for line in output.splitlines() if line.startswith("error: ")]
      assert len(lines) == 1 and "model.mlp_width" in lines[0] and '"128"' in lines[0]
      assert "Traceback" not in output
    finally:
      learner.kill()
      learner.wait()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "simulated", "async"])
def test_ctrl_c_ends_soon_with_one_line_and_the_run_goes_on_later(tmp_path, mode):
  """Fails if an interrupt ends in a traceback, a crash of the interpreter, or a hang; soon is counted in steps."""
  arguments = (f"--config.mode={mode}", "--config.steps=5000", "--config.checkpoint.every=1", "--config.eval.every=0")
  process = start(tmp_path / "run", tmp_path / "cache", *arguments)
  wait_for_step(tmp_path / "run", process, 3)
  process.send_signal(signal.SIGINT)
  last = steps(tmp_path / "run")[-1]
  output = finish(process)
  assert process.returncode == 130, output
  assert steps(tmp_path / "run")[-1] < last + 500
  assert output.count("interrupted; run the same command again") == 1
  assert "Traceback" not in output and "Fatal" not in output
  assert pids(tmp_path / "run") == {}
