"""A run's weights as a Hugging Face style folder."""

import contextlib
import sys

import jax
import numpy as np
import pytest
from runtime_cases import config

from estr_jax.errors import UserError
from estr_jax.learner.checkpoint import Checkpoints
from estr_jax.model import decoder, hf
from estr_jax.observe.writers import MetricsFile
from estr_jax.run import options, parts
from estr_jax.run.update import update_of
from estr_jax.run.workdir import record_config
from experiments import export


def test_the_newest_checkpoint_is_written(tmp_path, monkeypatch, capsys):
  """Fails if an older checkpoint or a rounded tensor is written, or another folder is written over."""
  c = config(tmp_path / "cache", "sync")
  settings = options.make(c)
  model = parts.model_of(settings, parts.tokenizer_of(settings))
  update = update_of(settings, model, parts.mesh_of(settings))
  run = tmp_path / "run"
  run.mkdir()
  record_config(c, run)
  MetricsFile(run / "metrics.jsonl").close()
  with contextlib.closing(Checkpoints(run / "checkpoints")) as checkpoints:
    for step in (3, 4):
      params = decoder.init(model, jax.random.key(step))
      checkpoints.save(step, update.init(params), {})
  for dtype in ("float32", "bfloat16"):
    folder = tmp_path / dtype
    monkeypatch.setattr(sys, "argv", ["export", f"--workdir={run}", f"--folder={folder}", f"--dtype={dtype}"])
    assert export.program() == 0 and "version 4" in capsys.readouterr().out
    held, found = hf.load(folder, dtype=dtype)
    assert held == model
    wanted = jax.tree.map(lambda leaf, dtype=dtype: np.asarray(leaf).astype(dtype), params)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
  with pytest.raises(UserError, match="is not empty"):
    export.program()
