"""Checkpoints: what is written is what was, a fault is one line, and a run goes on as if it had not stopped."""

import dataclasses
import shutil
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import MODEL, batch, flat, fresh_state, initial_params, mesh, rule, train_step
from processes import on_eight_devices

from estr_jax.errors import UserError
from estr_jax.learner import optimizer
from estr_jax.learner.checkpoint import Checkpoints, load_params, restore_params, save_params
from estr_jax.learner.step import abstract_state
from estr_jax.model import decoder
from estr_jax.model.sharding import shardings

ADAM = optimizer.make(
  optimizer="adamw",
  learning_rate=1e-2,
  warmup_steps=2,
  decay="cosine",
  total_steps=6,
  b1=0.9,
  b2=0.95,
  eps=1e-8,
  weight_decay=0.1,
  clip_norm=1.0,
)
HOST = {"cursor": 12, "seed": 3, "key": [0, 2**32 - 1], "nested": {"x": 0.1}}


def equal(a, b) -> bool:
  same = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b)
  return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(same))


def abstract_params():
  params = decoder.abstract_params(MODEL)
  place = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)  # noqa: E731
  return jax.tree.map(place, params, shardings(params, mesh()))


@pytest.fixture
def checkpoints(tmp_path):
  made = Checkpoints(tmp_path / "run")
  yield made
  made.close()


def test_a_resumed_run_equals_a_straight_one_bit_for_bit(checkpoints):
  """Fails if moments, schedule or step are not restored, or if donation spoils a save that is under way."""
  step = train_step(update=ADAM)
  state, kept = fresh_state(update=ADAM), None
  for seed in range(4):
    if seed == 2:
      kept = jax.device_get(state)
      checkpoints.save(2, state, HOST)  # and the next step deletes its buffers at once
    state, _ = step(state, batch(seed))
  checkpoints.wait()
  resumed, host = checkpoints.restore(abstract_state(MODEL, ADAM, mesh()), checkpoints.latest())
  assert host == HOST
  assert equal(jax.device_get(resumed), kept)
  for seed in (2, 3):
    resumed, _ = step(resumed, batch(seed))
  assert equal(resumed, state)


def test_the_newest_two_are_kept(checkpoints):
  """Fails if the disk fills up with old checkpoints, or if the only one left is the one being written."""
  assert checkpoints.latest() is None
  state = fresh_state()
  for step in (1, 2, 3):
    checkpoints.save(step, state, {})
  checkpoints.wait()
  assert checkpoints.latest() == 3
  assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["2", "3"]


_EIGHT = """
import sys
import numpy as np
from learner_cases import MODEL, flat, mesh, rule
from estr_jax.learner.checkpoint import Checkpoints
from estr_jax.learner.step import abstract_state
checkpoints = Checkpoints(sys.argv[1])
state, _ = checkpoints.restore(abstract_state(MODEL, rule(), mesh(2, 2, 2)), 5)
assert len({shard.device for shard in state.params["embed"]["embedding"].addressable_shards}) == 8
assert state.params["embed"]["embedding"].addressable_shards[0].data.shape == (6, 8)
np.save(sys.argv[2], flat(state))
checkpoints.close()
"""


def test_a_checkpoint_restores_onto_another_mesh(checkpoints, tmp_path):
  """Fails if a checkpoint remembers the devices that wrote it."""
  state = fresh_state()
  checkpoints.save(5, state, {})
  checkpoints.wait()
  on_eight_devices(_EIGHT, checkpoints.folder, tmp_path / "flat.npy")
  np.testing.assert_array_equal(np.load(tmp_path / "flat.npy"), flat(state))


def test_another_model_is_one_clear_line(checkpoints):
  """Fails if a changed config restores a truncated tensor, or dies with Orbax's tree of differences."""
  checkpoints.save(1, fresh_state(), {})
  checkpoints.wait()
  wider = dataclasses.replace(MODEL, mlp_width=64)
  with pytest.raises(UserError, match=r"another model or optimizer: .*mlp.* is .*32.* there and .*64.* here"):
    checkpoints.restore(abstract_state(wider, rule(), mesh()), 1)
  with pytest.raises(UserError, match=r"opt_state.* is absent there"):
    checkpoints.restore(abstract_state(MODEL, ADAM, mesh()), 1)


def test_params_are_read_without_the_optimizer(checkpoints):
  """Fails if an evaluation needs the optimizer's state, or accepts an empty folder."""
  checkpoints.save(7, fresh_state(), {})
  checkpoints.wait()
  version, params = restore_params(checkpoints.folder, abstract_params())
  assert version == 7 and equal(jax.device_get(params), initial_params())
  with pytest.raises(UserError, match="no checkpoint in"):
    restore_params(checkpoints.folder / "nowhere", abstract_params())


def test_a_failed_save_surfaces_and_the_one_before_stays(tmp_path):
  """Fails if a full disk is noticed only at the end, or if an old checkpoint goes before its successor is complete."""
  folder = tmp_path / "small"
  folder.mkdir()
  mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True)
  if mounted.returncode:
    pytest.skip("needs the right to mount a small tmpfs")
  try:
    checkpoints = Checkpoints(folder)
    state = fresh_state()
    checkpoints.save(1, state, {"cursor": 1})
    checkpoints.wait()
    grown = dataclasses.replace(state, params={"ballast": jnp.asarray(np.random.default_rng(0).random(4_000_000))})
    with pytest.raises(UserError, match=f"the disk is full: cannot write to {folder}; free some space"):
      checkpoints.save(2, grown, {})
      while checkpoints._manager.is_saving_in_progress():
        time.sleep(0.01)
      checkpoints.check()
    checkpoints.check()  # once is enough
    assert checkpoints.latest() == 1
    again = Checkpoints(folder)  # as the same command run again
    restored, host = again.restore(abstract_state(MODEL, rule(), mesh()), again.latest())
    assert host == {"cursor": 1} and equal(jax.device_get(restored), jax.device_get(state))
    again.close()
  finally:
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path, monkeypatch):
  """Fails if a user's mistake ends in a traceback of the storage layer."""

  def denied(*args, **kwargs):
    raise RuntimeError("background write") from PermissionError(13, "Permission denied")

  checkpoints = Checkpoints(tmp_path)
  monkeypatch.setattr(checkpoints._manager, "save", denied)
  with pytest.raises(UserError, match=f"cannot write to {tmp_path}: permission denied"):
    checkpoints.save(1, fresh_state(), {})


def test_other_faults_keep_their_traceback(tmp_path, monkeypatch):
  """Fails if every fault of the code is reported as a full disk."""

  def broken(*args, **kwargs):
    raise KeyError("a fault")

  checkpoints = Checkpoints(tmp_path)
  monkeypatch.setattr(checkpoints._manager, "save", broken)
  with pytest.raises(KeyError):
    checkpoints.save(1, fresh_state(), {})


def test_bare_params_appear_whole_or_not_at_all(tmp_path, monkeypatch):
  """Fails if a killed or failing writer leaves a folder that looks complete, or a second writer breaks the first."""
  folder = tmp_path / "deep" / "params"
  save_params(folder, initial_params())
  assert equal(jax.device_get(load_params(folder, abstract_params())), initial_params())
  save_params(folder, jax.tree.map(np.zeros_like, initial_params()))
  assert equal(jax.device_get(load_params(folder, abstract_params())), initial_params())
  assert [path.name for path in folder.parent.iterdir()] == ["params"]
  shutil.rmtree(folder)

  def interrupted(self, target):
    raise KeyboardInterrupt

  monkeypatch.setattr(Path, "rename", interrupted)
  with pytest.raises(KeyboardInterrupt):
    save_params(folder, initial_params())
  assert list(folder.parent.iterdir()) == []
  with pytest.raises(UserError, match="no parameters in"):
    load_params(folder, abstract_params())
