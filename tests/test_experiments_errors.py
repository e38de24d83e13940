"""A user's mistake is one line that says what, where and what to do; the exit status is not 0."""

import dataclasses
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from ml_collections import ConfigDict
from model_cases import QWEN3_MOE, make_params

from configs import default, quickstart, recipes
from estr_jax.errors import UserError
from estr_jax.model import hf
from estr_jax.run import options, parts

ROOT = pathlib.Path(__file__).parent.parent


def run(*arguments, **environment) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-m", "experiments.train", *map(str, arguments)],
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    capture_output=True,
    text=True,
    timeout=280,
  )


def assert_one_line(done: subprocess.CompletedProcess, *words: str) -> None:
  assert done.returncode == 2, done.stderr
  assert "Traceback" not in done.stderr + done.stdout
  lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
  assert len(lines) == 1, done.stderr
  for word in words:
    assert word in lines[0]


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--config=configs/quickstart.py", "--config.loss.taau=2"], ["taau"]),
    (["--config=configs/quickstart.py", "--config.nonsense=1"], ["unknown config key", "nonsense"]),
    (["--config=configs/quickstart.py", "--config.steps=soon"], ["steps"]),
    (["--config=configs/nowhere.py"], ["configs/nowhere.py"]),
    (["--config=configs/quickstart.py:fast"], ["fast", ":smoke"]),
    (["--config=configs/quickstart.py", "--config.sampling.top_p=0.9"], ["top_p", "renormalised"]),
    (["--config=configs/quickstart.py", "extra"], ["extra"]),
    (["--config=configs/quickstart.py", "--rool=learner"], ["rool"]),
    ([], ["--config", "--workdir"]),
  ],
)
def test_the_command_line(tmp_path, arguments, words):
  """Fails if a wrong command ends in a traceback, or with status 0."""
  workdir = [f"--workdir={tmp_path}"] if arguments else []
  assert_one_line(run(*arguments, *workdir), *words)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"mode": "asynch"}, "nearest: async"),
    ({"loss.name": "esrt"}, "nearest: estr"),
    ({"loss.edge": "behaviour"}, "direct, proximal"),
    ({"mode": "sync", "staleness.inter": 2}, "mode=simulated"),
    ({"staleness.intra": 1}, "mode=simulated"),
    ({"sampling.top_k": 50}, "refused for training"),
    ({"batch.microbatches": 3}, "does not divide"),
    ({"batch.group_size": 1}, "group_size"),
    ({"queue.capacity": 3}, "queue.capacity=3"),
    ({"task.name": "sums"}, "model.folder"),
    ({"model.folder": "/nowhere/at/all"}, "does not exist"),
    ({"loss.estr.tau": 0.0}, "loss.estr.tau"),
    ({"sampling.temperature": -1.0}, "temperature"),
    ({"seed": -1}, "seed"),
    ({"optimizer.decay": "cosin"}, "nearest: cosine"),
    ({"optimizer.name": "sgd", "optimizer.b2": 0.9}, "no effect under sgd"),
    ({"mesh.data": 0}, "mesh.data"),
    ({"model.heads": 0}, "model.heads"),
    ({"optimizer.b1": 1.0}, "optimizer.b1"),
    ({"optimizer.warmup_steps": -3}, "warmup_steps"),
    ({"transport.address": "127.0.0.1:99999"}, "host:port"),
    ({"loss.name": "icepop", "loss.icepop.low": 6.0}, "nothing lies between"),
    ({"loss.name": "stable_reinforce", "loss.stable_reinforce.ratio_low": 2000.0}, "nothing lies between"),
    ({"loss.sat.quantile": 90.0}, "must be above 0, below 1"),
    ({"loss.dual_clip.dual": 1.0}, "must be above 1"),
    ({"loss.mis.scope": "seq"}, "nearest: sequence"),
    ({"loss.name": "score_centering"}, "record_vocabulary=True"),
    ({"loss.name": "trm", "loss.trm.divergence": "vocabulary"}, "record_vocabulary=True"),
    ({"loss.name": "ipo", "loss.edge": "proximal"}, "no effect on a loss that does not take it"),
    ({"loss.kl.anchor": "proximal"}, "no effect while loss.kl.coefficient=0"),
    ({"loss.kl.anchor": "proximal", "loss.kl.coefficient": 0.1}, "is always 0"),
    ({"loss.estr.tau": 10**400}, "float32"),
    ({"loss.estr.tau": 1e-60}, "float32"),
    ({"loss.estr.eps": float("inf")}, "float32"),
    ({"sampling.temperature": float("inf")}, "sampling.temperature"),
    ({"optimizer.learning_rate": float("inf")}, "float32"),
    ({"loss.name": "gapo", "batch.microbatches": 2}, "compares the samples of a prompt"),
    ({"loss.name": "vcpo", "advantage.name": "rloo"}, "a baseline of its own"),
    ({"loss.name": "tis", "loss.clip_low": 0.1}, "a weight stands in for the clip"),
    ({"loss.entropy.target": 0.2, "loss.entropy.coefficient": 0.1}, "loss.entropy.largest"),
    ({"model.kv_heads": 3}, "no multiple"),
  ],
)
def test_contradictions_and_impossible_values(change, words):
  """Fails if a key is accepted that does nothing, or a value that cannot work."""
  c = default.get_config()
  for name, value in change.items():
    group, _, leaf = name.rpartition(".")
    (c[group] if group else c)[leaf] = value
  with pytest.raises(UserError, match=words):
    options.make(c)


def test_an_unknown_key_names_the_nearest_known_one():
  """Fails if a config file may hold keys that nothing reads."""
  c = default.get_config().unlock()
  c.sampling = ConfigDict({**c.sampling.to_dict(), "temperatur": 0.7})
  with pytest.raises(UserError, match=r"sampling\.temperatur.*nearest.*sampling\.temperature"):
    options.make(c)


def test_every_config_passes_its_own_check():
  """Fails if a shipped config contradicts itself."""
  for arg in ("", "smoke"):
    options.make(quickstart.get_config(arg))
  for name in recipes.RECIPES:
    options.make(recipes.get_config(name))
  options.make(default.get_config())


def test_a_folder_that_cannot_be_written(tmp_path):
  """Fails if the run starts and loses its results at the end."""
  (tmp_path / "file").write_text("")
  done = run("--config=configs/quickstart.py", f"--workdir={tmp_path / 'file' / 'run'}")
  assert_one_line(done, "workdir", "cannot be written")


def test_a_port_in_use(tmp_path):
  """Fails if a second learner shares the port, or the launcher hangs."""
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    address = f"127.0.0.1:{taken.getsockname()[1]}"
    done = run(
      "--config=configs/quickstart.py:smoke",
      f"--workdir={tmp_path}",
      f"--config.transport.address={address}",
      f"--config.cache_dir={tmp_path / 'cache'}",
      "--config.warm_start.steps=0",
      "--role=learner",
    )
  assert_one_line(done, address, "in use")


def test_a_learner_started_by_hand_needs_a_port(tmp_path):
  """Fails if samplers would have to guess where a learner listens."""
  done = run("--config=configs/quickstart.py:smoke", f"--workdir={tmp_path}", "--role=learner")
  assert_one_line(done, "transport.address")


def test_beyond_loopback_needs_tls_and_a_token(tmp_path):
  """Fails if prompts and weights could be had by anyone on the network."""
  done = run(
    "--config=configs/quickstart.py:smoke",
    f"--workdir={tmp_path}",
    "--config.transport.address=0.0.0.0:50987",
    f"--config.cache_dir={tmp_path / 'cache'}",
    "--config.warm_start.steps=0",
    "--role=learner",
  )
  assert_one_line(done, "0.0.0.0:50987", "transport.tls_certificate", "transport.token_file")


def test_a_shape_beside_a_folder_is_that_of_the_folder(tmp_path):
  """Fails if a shape that the folder has not is ignored in silence, or one that it has is refused."""
  c = default.get_config()
  c.model.folder = str(tmp_path / "model")
  held = dataclasses.replace(QWEN3_MOE, rope_theta=1e4)
  hf.save(c.model.folder, held, make_params(held))
  c.model.experts, c.model.experts_per_token = held.experts, held.experts_per_token
  c.model.expert_mlp_width, c.model.vocabulary, c.model.layers = held.expert_mlp_width, held.vocab_size, 3
  assert dataclasses.replace(parts.model_of(options.make(c), None), remat=held.remat) == held
  c.model.layers = 5
  with pytest.raises(UserError, match=r"model\.layers=5, but the model in .* has 3; leave it at 2"):
    parts.model_of(options.make(c), None)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"sampling.record_routing": True}, "needs a model with 1 to 255 experts and this one has 0"),
    ({"loss.router_balance": 0.1}, "this one has none"),
    (
      {
        "sampling.record_routing": True,
        "model.experts": 256,
        "model.experts_per_token": 2,
        "model.expert_mlp_width": 8,
      },
      "this one has 256",
    ),
  ],
)
def test_routers_need_experts(change, words):
  """Fails if a dense model is to record or balance routers, or an expert's number does not fit into a byte."""
  c = default.get_config()
  c.update_from_flattened_dict(change)
  settings = options.make(c)
  with pytest.raises(UserError, match=words):
    parts.model_of(settings, parts.tokenizer_of(settings))
