"""Roles of several processes: two equal one with as many devices, and a group of samplers feeds a group of learners."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import held_port

from estr_jax.observe.writers import read

ROOT = Path(__file__).parents[1]
COMMON = [
  "--config=configs/default.py",
  "--config.task.name=arithmetic",
  "--config.steps=3",
  "--config.batch.groups=2",
  "--config.batch.group_size=4",
  "--config.sampling.slots=8",
  "--config.eval.prompts=4",
  "--config.eval.slots=8",
  "--config.eval.every=0",
  "--config.checkpoint.every=2",
]
MOE = [
  "--config.model.layers=4",
  "--config.model.experts=4",
  "--config.model.experts_per_token=2",
  "--config.model.expert_mlp_width=32",
  "--config.model.norm_topk_prob=True",
]
MEASURED_BY_A_CLOCK = ("time/", "throughput/", "rollout/seconds")


def start(arguments, workdir, *, devices=1, role=None, group=None, log):
  """A process of a run; `group` is (port, processes, process)."""
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
  env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
  command = [sys.executable, "-m", "experiments.train", *arguments, f"--workdir={workdir}"]
  if role is not None:
    command += [f"--role={role}", f"--sampler_name={role}"]
  if group is not None:
    port, processes, process = group
    command += [f"--coordinator=127.0.0.1:{port}", f"--processes={processes}", f"--process={process}"]
  with open(log, "wb") as output:
    return subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=env)


def finish(processes, logs):
  try:
    for process, log in zip(processes, logs):
      assert process.wait(timeout=1200) == 0, log.read_text(errors="replace")
  finally:
    for process in processes:
      process.kill()


def without_clocks(rows):
  return [{k: v for k, v in row.items() if not k.startswith(MEASURED_BY_A_CLOCK)} for row in rows]


@pytest.mark.slow
def test_two_processes_equal_one_and_another_mesh_goes_on_from_their_checkpoint(tmp_path):
  """Fails if a process takes the wrong rows, samples otherwise than the other, or writes what the other should.

  The experts of a mixture are on two devices: once of one process, once of two. Their run then goes on on one device.
  """
  settings, mesh = [*COMMON, *MOE, "--config.mode=sync"], ["--config.mesh.expert=2"]
  settings += [f"--config.cache_dir={tmp_path / 'cache'}"]
  settings += ["--config.loss.entropy.coefficient=0.005"]  # a random model's rewards are equal, and would move nothing
  logs = [tmp_path / f"{name}.log" for name in ("one", "first", "second", "later")]
  finish([start([*settings, *mesh, "--config.steps=3"], tmp_path / "one", devices=2, log=logs[0])], logs)
  settings = [*settings, "--config.steps=2"]
  with held_port() as port:
    pair = [start([*settings, *mesh], tmp_path / "two", group=(port, 2, i), log=logs[1 + i]) for i in range(2)]
    finish(pair, logs[1:])
  one, two = (read(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
  assert [row["step"] for row in two] == [0, 1, 2] and one[2]["optimizer/gradient_norm"] > 0
  assert without_clocks(one)[:2] == without_clocks(two)[:2]
  assert "report:" in logs[1].read_text(errors="replace") and "report:" not in logs[2].read_text(errors="replace")

  finish([start([*settings, "--config.steps=3"], tmp_path / "two", log=logs[3])], logs[3:])
  three = read(tmp_path / "two" / "metrics.jsonl")
  assert [row["step"] for row in three] == [0, 1, 2, 3]
  for name in ("rollout/reward", "rollout/length", "policy/entropy", "loss/objective", "optimizer/gradient_norm"):
    assert three[3][name] == pytest.approx(one[3][name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_a_group_of_samplers_feeds_a_group_of_learners(tmp_path):
  """Fails if a process waits for what another never says, or a slice of the weights comes from the wrong host."""
  settings = [*COMMON, "--config.mode=async", f"--config.cache_dir={tmp_path / 'cache'}"]
  settings += ["--config.mesh.fsdp=2", "--config.sampling.mesh.tensor=2", "--config.queue.capacity=4"]
  names, processes, logs = ("learner", "sampler"), [], []
  with contextlib.ExitStack() as ports:
    settings += [f"--config.transport.address=127.0.0.1:{ports.enter_context(held_port())}"]
    for role in names:
      port = ports.enter_context(held_port())
      for process in range(2):
        logs.append(tmp_path / f"{role}{process}.log")
        processes.append(start(settings, tmp_path / "run", role=role, group=(port, 2, process), log=logs[-1]))
    finish(processes, logs)
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["steps"] == 3 and set(summary["process_ids"]) == {"learner", "sampler"}
  assert summary["staleness"]["max_token"] <= 4 and len(summary["acknowledged_versions"]["sampler"]) > 1
