"""The files of a run: each step once, nothing torn, nothing undefined."""

import json
import os

import diagnostics_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from estr_jax.errors import UserError
from estr_jax.objective import diagnostics
from estr_jax.observe import writers
from estr_jax.observe.glossary import GLOSSARY
from estr_jax.observe.writers import MetricsFile
from estr_jax.structs import Mean

needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a file that is always full, of Linux")


def _row(step):
  return {"step": step, "rollout/reward": step / 10}


def _written(path, steps):
  with MetricsFile(path) as metrics:
    for step in steps:
      metrics.append(_row(step))


def test_a_row_is_on_disk_when_append_returns(tmp_path):
  """Fails if rows stay in a buffer that a killed process takes with it."""
  path = tmp_path / "metrics.jsonl"
  metrics = MetricsFile(path)
  metrics.append(_row(1))
  assert writers.read(path) == [_row(1)]
  metrics.append(_row(2))
  assert writers.read(path) == [_row(1), _row(2)]
  metrics.close()


def test_resume_drops_later_steps_and_repeats_none(tmp_path):
  """Fails if rows after the checkpoint stay (>= for >), or if the checkpoint's own row is lost."""
  path = tmp_path / "metrics.jsonl"
  _written(path, [0, 1, 2, 3, 4])
  with MetricsFile(path, resume_step=2) as metrics:
    assert metrics.last_step == 2
    assert [row["step"] for row in writers.read(path)] == [0, 1, 2]
    metrics.append(_row(3))
  assert [row["step"] for row in writers.read(path)] == [0, 1, 2, 3]
  assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", ['{"step": 3, "rollout/rew', '{"step": 3}', "\0\0\0"])
def test_a_torn_last_line_is_left_out_and_not_built_upon(tmp_path, torn):
  """Fails if a cut line breaks reading, or if the next row is glued to it."""
  path = tmp_path / "metrics.jsonl"
  _written(path, [1, 2])
  path.write_text(path.read_text() + torn)
  assert [row["step"] for row in writers.read(path)] == [1, 2]
  with MetricsFile(path, resume_step=5) as metrics:
    metrics.append(_row(3))
  assert writers.read(path) == [_row(1), _row(2), _row(3)]


@pytest.mark.parametrize("damage", ["not json", "[1]", "{}", '{"step": null}'])
def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_lost(tmp_path, damage):
  """Fails if damage is skipped in silence, or if the file is rewritten without it."""
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\n' + damage + '\n{"step": 3}\n')
  before = path.read_text()
  with pytest.raises(UserError, match="line 2"):
    MetricsFile(path, resume_step=3)
  assert path.read_text() == before


def test_a_new_run_does_not_overwrite_an_old_one(tmp_path):
  """Fails if opening without resume_step truncates a file that holds rows."""
  path = tmp_path / "metrics.jsonl"
  _written(path, [1])
  with pytest.raises(UserError, match="already holds 1"):
    MetricsFile(path)
  assert writers.read(path) == [_row(1)]


@pytest.mark.parametrize("step", [2, 1])
def test_a_second_row_for_a_step_is_refused(tmp_path, step):
  """Fails if < stands for <=, or if the last step is forgotten by a resume."""
  path = tmp_path / "metrics.jsonl"
  _written(path, [1, 2])
  with MetricsFile(path, resume_step=2) as metrics, pytest.raises(ValueError, match=f"step {step} "):
    metrics.append(_row(step))
  assert len(writers.read(path)) == 2


def test_an_undefined_name_is_refused_with_the_nearest_one(tmp_path):
  """Fails if names are not checked, or checked after the write."""
  path = tmp_path / "metrics.jsonl"
  with MetricsFile(path) as metrics, pytest.raises(ValueError, match="'rollout/reward'"):
    metrics.append({"step": 1, "rollout/rewards": 1.0})
  assert writers.read(path) == []


def test_every_metric_of_the_objective_is_defined():
  """Fails if diagnostics gains or renames a metric and the glossary does not."""
  shapes = jax.eval_shape(diagnostics.diagnose, *diagnostics_reference.case(0))
  derived = diagnostics.derive({name: Mean(np.zeros(m.total.shape), 0) for name, m in shapes.items()})
  assert set(shapes) | set(derived) <= set(GLOSSARY)
  assert all(metric.formula and metric.unit and metric.healthy for metric in GLOSSARY.values())


def test_to_row_divides_means_and_nulls_what_is_not_finite():
  """Fails if a Mean is written as (total, count), or if NaN reaches the file, alone or in a list."""
  row = writers.to_row(
    np.int64(3),
    {
      "rollout/reward": Mean(jnp.float32(3.0), jnp.float32(4.0)),
      "policy/entropy": Mean(0.0, 0.0),
      "policy/abs_delta_by_entropy": Mean(np.array([1.0, 0.0]), np.array([2.0, 0.0])),
      "policy/max_abs_delta": float("inf"),
      "staleness/intra_histogram": np.array([3, 1]),
    },
  )
  assert row == {
    "step": 3,
    "rollout/reward": 0.75,
    "policy/entropy": None,
    "policy/abs_delta_by_entropy": [0.5, None],
    "policy/max_abs_delta": None,
    "staleness/intra_histogram": [3, 1],
  }
  assert type(row["step"]) is int and type(row["staleness/intra_histogram"][0]) is int


def test_the_file_is_strict_json(tmp_path):
  """Fails if a bare NaN or Infinity is written, which only Python reads."""

  def refuse(word):
    raise AssertionError(word)

  with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
    metrics.append({"step": 1, "policy/entropy": float("nan"), "policy/abs_delta_by_entropy": [np.float32("inf")]})
  writers.write_json(tmp_path / "config.json", {"tau": float("inf"), "mesh": (1, np.int32(2))})
  json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
  config = json.loads((tmp_path / "config.json").read_text(), parse_constant=refuse)
  assert config == {"tau": None, "mesh": [1, 2]}


def test_what_has_no_json_form_leaves_the_old_file(tmp_path):
  """Fails if the file is opened before the object is known to be writable, or objects are written as repr."""
  path = tmp_path / "summary.json"
  writers.write_json(path, {"steps": 1})
  with pytest.raises(TypeError, match="no JSON form"):
    writers.write_json(path, {"steps": object()})
  assert json.loads(path.read_text()) == {"steps": 1}


@needs_dev_full
def test_a_full_disk_is_one_clear_line_and_the_old_file_stands(tmp_path):
  """Fails if ENOSPC keeps its traceback, or if the file itself is written instead of a copy."""
  path = tmp_path / "summary.json"
  writers.write_json(path, {"steps": 1})
  (tmp_path / "summary.json.tmp").symlink_to("/dev/full")
  with pytest.raises(UserError) as caught:
    writers.write_json(path, {"steps": 2})
  message = str(caught.value)
  assert "disk is full" in message and str(path) in message and "free some space" in message and "\n" not in message
  assert json.loads(path.read_text()) == {"steps": 1}


@needs_dev_full
def test_a_full_disk_while_appending_is_a_user_error(tmp_path):
  """Fails if append is not covered, or if the step counts as written."""
  metrics = MetricsFile(tmp_path / "metrics.jsonl")
  metrics.append(_row(1))
  metrics.close()
  with open("/dev/full", "ab", buffering=0) as full:
    metrics._file = full
    with pytest.raises(UserError, match="disk is full"):
      metrics.append(_row(2))
  assert metrics.last_step == 1


def test_other_faults_of_the_disk_have_their_own_words(tmp_path):
  """Fails if every OSError is called a full disk, or ends in a traceback."""
  (tmp_path / "summary.json").mkdir()
  with pytest.raises(UserError, match=r"Is a directory: could not write .*summary\.json"):
    writers.write_json(tmp_path / "summary.json", {})
