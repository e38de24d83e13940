"""From counts to times, by numbers that a hand can check; and the command line."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs.paper import browsecomp_plus, dapo_math, gsm8k_multiturn
from estr_jax.errors import UserError
from estr_jax.planning import report, roofline
from estr_jax.planning.chips import CHIPS, GIB, Slice, parse_slice, span_bandwidth
from estr_jax.planning.hlo import Collective, Traffic
from experiments import assembly, plan

ROOT = Path(__file__).parent.parent


def test_a_slice_is_read():
  """Fails if sides are swapped or chips miscounted."""
  place = parse_slice("v5p:2x4x4")
  assert (place.family, place.sides, place.chips, place.name) == ("v5p", (2, 4, 4), 32, "v5p:2x4x4")


@pytest.mark.parametrize("text", ["v5p", "v5p:", "v5p:4x4", "v6e:2x2x1", "v7x:2x2", "v6e:0x4", "v6e:axb"])
def test_a_wrong_slice_is_one_line(text):
  """Fails if a typing error reaches libtpu, whose messages nobody understands."""
  with pytest.raises(UserError, match="--topology="):
    parse_slice(text)


def test_links_by_the_span_of_a_group():
  """Fails if a line counts as a ring, or a group has links of a dimension in which it does not extend."""
  chip, sides = CHIPS["v5p"], (4, 4, 2)
  line = [(0, y, 0) for y in range(2)]
  ring = [(0, y, 0) for y in range(4)]
  plane = [(x, y, 0) for x in range(4) for y in range(4)]
  pair = [(0, 0, z) for z in range(2)]
  for group, links in ((line, 1), (ring, 2), (plane, 4), (pair, 1)):
    assert span_bandwidth(chip, group, sides) == links * 90e9
  assert span_bandwidth(CHIPS["v6e"], [(x, 0) for x in range(8)], (8, 8)) == 90e9


def mesh_2x2():
  devices = np.empty((2, 2), object)
  for x in range(2):
    for y in range(2):
      devices[x, y] = SimpleNamespace(coords=(x, y))
  return SimpleNamespace(axis_names=("data", "fsdp"), devices=devices)


def test_the_roofline_by_hand():
  """Fails if FLOPs are not shared out over chips, or HBM and ICI are not those of one device."""
  moved = Traffic(3276e9, (Collective("all-gather", ("fsdp",), 90e9), Collective("all-reduce", ("fsdp",), 45e9)), 0)
  roof = roofline.roofline(4 * 918e12, moved, Slice("v6e", (2, 2)), mesh_2x2())
  assert (roof.compute, roof.hbm, roof.ici) == (1.0, 2.0, {("fsdp",): 1.5})
  assert (roof.seconds, roof.bound) == (2.0, "HBM")
  memory = report.Memory(10 * GIB, 1 * GIB, 20 * GIB, 0)
  made = report.Plan(Slice("v6e", (2, 2)), memory, 4 * 918e12, 2 * 918e12, moved, roof, tokens=1000)
  assert made.mfu == 0.25 and made.fits
  text = "\n".join(report.lines(made))
  assert "31.00 of 32" in text and "bound by HBM" in text and "500 a second, 125 a chip" in text
  assert not report.Plan(made.place, report.Memory(33 * GIB, 0, 0, 0), 1, 1, moved, roof, 1).fits


@pytest.mark.parametrize(
  ("message", "gib"),
  [
    ("Ran out of memory in memory space hbm. Used 41.20G of 31.25G hbm. Exceeded hbm capacity by 9.95G.", 41.2),
    ("the total memory required for HLO temporaries (37.50G) exceeds available HBM (31.25G).", 37.5),
    ("some other failure", None),
  ],
)
def test_a_compiler_that_gives_up_says_what_it_wanted(message, gib):
  """Fails if a program that is too large ends in a traceback, or another failure in DOES NOT FIT."""
  assert report.exhausted(message) == (None if gib is None else gib * GIB)


@pytest.mark.parametrize(
  ("config", "billions", "context"),
  [(dapo_math, 7.07, 18_432), (gsm8k_multiturn, 7.07, 10_240), (browsecomp_plus, 3.04, 34_816)],
)
def test_the_papers_configs_have_the_papers_models(config, billions, context):
  """Fails if a shape is mistyped, a key unknown, or the rows do not divide; the counts are the model cards' but for the
  embedding's table, with which nothing is multiplied."""
  c = config.get_config()
  plan.check_config(c)
  model = assembly.model_of(c, None)
  assert roofline.active_params(model) / 1e9 == pytest.approx(billions, abs=0.01)
  assert c.sampling.context == context
  with pytest.raises(ValueError, match="no argument"):
    config.get_config("smok")


def test_model_flops_by_hand():
  """Fails if attention counts in full rather than causally, or recomputation is taken for work."""
  model = assembly.model_of(dapo_math.get_config(), None)
  attention = 6 * 28 * 28 * 128 * 1024**2
  assert roofline.train_flops(model, 3, 1024) == 3 * (6 * roofline.active_params(model) * 1024 + attention)


def run(*arguments: str) -> subprocess.CompletedProcess:
  command = [sys.executable, "-m", "experiments.plan", *arguments]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


PAPER = "--config=configs/paper/dapo_math.py"


@pytest.mark.parametrize(
  ("arguments", "line"),
  [
    ([PAPER], "name a config and a slice"),
    ([PAPER, "--topology=v5p:4x4"], "3 sides"),
    ([PAPER, "--topology=v5p:2x2x2"], "v5p:2x2x2 has 8 chips and"),
    ([PAPER, "--topology=v5p:4x4x4", "--role=learnr"], "nearest: learner"),
  ],
)
def test_a_wrong_command_is_one_line(arguments, line):
  """Fails if a mistake is a traceback, or exits as a plan that does not fit would."""
  done = run(*arguments)
  assert done.returncode == 2
  assert line in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(bool(importlib.util.find_spec("libtpu")), reason="libtpu is here")
def test_without_libtpu_it_says_what_to_install():
  """Fails if a missing extra is a traceback."""
  done = run(PAPER, "--topology=v5p:4x4x4")
  assert done.returncode == 2 and "pip install -e '.[tpu]'" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="compiles for a TPU, which needs libtpu")
@pytest.mark.parametrize("role", ["learner", "sampler"])
def test_two_layers_fit(role):
  """Fails if a program of the product no longer compiles for a TPU, or the plan cannot read what comes out."""
  small = {
    "model.layers": 2,
    "model.width": 512,
    "model.mlp_width": 1024,
    "model.vocabulary": 4096,
    "sampling.context": 1024,
    "sampling.slots": 8,
    "batch.groups": 2,
    "batch.group_size": 4,
    "batch.microbatches": 2,
    "learner.diagnostics": False,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
  }
  done = run(PAPER, "--topology=v6e:2x2", f"--role={role}", *(f"--config.{key}={v}" for key, v in small.items()))
  assert done.returncode == 0, done.stderr[-2000:]
  assert "FITS" in done.stdout and "bound by" in done.stdout
