"""From counts to times, by numbers that a hand can check; and the command line."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs.paper import browsecomp_plus, dapo_math, gsm8k_multiturn
from estr_jax.errors import UserError
from estr_jax.planning import plan_search, plans, report, roofline
from estr_jax.planning.chips import CHIPS, GIB, Slice, parse_slice, span_bandwidth
from estr_jax.planning.hlo import Collective, Memory, Traffic
from estr_jax.run import parts

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


def layout_2x2() -> roofline.Layout:
  return roofline.Layout({"data": 2, "fsdp": 2}, np.stack(np.indices((2, 2)), axis=-1))


def test_a_group_differs_along_its_axes_only():
  """Fails if the other axes are not held still, or devices are put elsewhere in the torus."""
  assert layout_2x2().group(("fsdp",)) == [(0, 0), (0, 1)]
  assert layout_2x2().group(("data",)) == [(0, 0), (1, 0)]
  cpu = SimpleNamespace(platform="cpu")
  devices = np.array([SimpleNamespace(id=i, **vars(cpu)) for i in range(8)]).reshape(4, 2)
  mesh = SimpleNamespace(shape={"fsdp": 4, "tensor": 2}, devices=devices)
  assert roofline.layout_of(mesh, Slice("v5p", (2, 2, 2))).group(("tensor",)) == [(0, 0, 0), (0, 0, 1)]


def test_the_roofline_by_hand():
  """Fails if FLOPs are not shared out over chips, or HBM and ICI are not those of one device."""
  moved = Traffic(3276e9, (Collective("all-gather", ("fsdp",), 90e9), Collective("all-reduce", ("fsdp",), 45e9)), 0)
  place = Slice("v6e", (2, 2))
  roof = roofline.roofline(4 * 918e12, moved, place, layout_2x2())
  assert (roof.compute, roof.hbm, roof.ici) == (1.0, 2.0, {("fsdp",): 1.5})
  assert (roof.seconds, roof.bound) == (2.0, "HBM")
  memory = Memory(10 * GIB, 1 * GIB, 19.5 * GIB)
  made = report.Plan(place, "a step", memory, 4 * 918e12, 2 * 918e12, moved, roof, tokens=1000)
  assert made.mfu == 0.25 and made.fits and made.rate == 500
  text = "\n".join(report.lines(made))
  assert "31.00 of 31.25" in text and "bound by HBM" in text and "500 a second, 125 a chip" in text
  assert "estimate" not in text
  assert "an estimate" in "\n".join(report.lines(dataclasses.replace(made, estimated=True)))
  full = dataclasses.replace(made, memory=Memory(31 * GIB, 0, 0))
  assert not full.fits  # the runtime needs some of it


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
  settings = plans.settings_of(config.get_config())
  c, model = settings.config, parts.model_of(settings, None)
  assert roofline.active_params(model) / 1e9 == pytest.approx(billions, abs=0.01)
  assert c.sampling.context == context
  for role in ("learner", "sampler"):
    assert np.prod(list(plans.mesh_of(settings, role).to_dict().values())) == parse_slice(c.slices[role]).chips


def test_model_flops_by_hand():
  """Fails if attention counts in full rather than causally, or recomputation is taken for work."""
  model = parts.model_of(plans.settings_of(dapo_math.get_config()), None)
  attention = 6 * 28 * 28 * 128 * 1024**2
  assert roofline.train_flops(model, 3, 1024) == 3 * (6 * roofline.active_params(model) * 1024 + attention)


def run(*arguments: str) -> subprocess.CompletedProcess:
  command = [sys.executable, "-m", "experiments.plan", *arguments]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


PAPER = "--config=configs/paper/dapo_math.py"


@pytest.mark.parametrize(
  ("arguments", "line"),
  [
    ([], "name a config: --config="),
    (["--config=configs/default.py"], "name a slice: --topology="),
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


SMALL = {
  "model.layers": 4,
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
  "sampling.mesh.fsdp": 1,
  "sampling.mesh.tensor": 4,
}


def run_small(role: str, *more: str) -> str:
  keys = [f"--config.{key}={value}" for key, value in SMALL.items()]
  done = run(PAPER, "--topology=v6e:2x2", f"--role={role}", *keys, *more)
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(plans.has_libtpu(), reason="libtpu is here")
def test_without_libtpu_it_says_so_and_estimates():
  """Fails if a missing extra is a traceback, or an estimate passes for what a TPU's compiler said."""
  text = run_small("learner")
  assert text.startswith("no libtpu here (pip install -e '.[tpu]')")
  assert "HBM a device, GiB, an estimate" in text and "as compiled for CPUs" in text and text.endswith("FITS\n")
  assert "all-gather along fsdp" in text


with_libtpu = pytest.mark.skipif(not plans.has_libtpu(), reason="compiles for a TPU, which needs libtpu")


@pytest.mark.slow
@with_libtpu
@pytest.mark.parametrize("role", ["learner", "sampler"])
def test_four_layers_fit(role):
  """Fails if a program of the product no longer compiles for a TPU, or the plan cannot read what comes out."""
  text = run_small(role, "--machine_code")
  assert text.endswith("FITS\n") and "bound by" in text
  assert ("largest microbatch that fits: " if role == "learner" else "most slots, by doubling, that fit: ") in text


@pytest.mark.slow
@with_libtpu
def test_a_sweep_ranks_what_fits():
  """Fails if a mesh of the slice is left out, or the order is not that of the rates."""
  lines = run_small("learner", "--sweep", "--sweep_seconds=90").splitlines()[2:]
  rates = [float(line.split()[-3]) for line in lines if line.endswith(("compute", "HBM", "ICI"))]
  assert len(rates) >= 2 and rates == sorted(rates, reverse=True)


def test_meshes_of_a_slice():
  """Fails if a side is used twice or left out, or two sides cannot share an axis."""
  found = plan_search.meshes((2, 4))
  assert len(found) == 16 and {"data": 8, "fsdp": 1, "tensor": 1, "expert": 1} in found
  assert {"data": 2, "fsdp": 4, "tensor": 1, "expert": 1} in found
  assert all(np.prod(list(sizes.values())) == 8 for sizes in found)


def growing(monkeypatch, gib_a_row: float):
  monkeypatch.setattr(
    plan_search, "_memory", lambda settings, role, place: Memory(gib_a_row * GIB * plans.rows_of(settings), 0, 0)
  )


@pytest.mark.parametrize(("gib_a_row", "rows"), [(3.0, 8), (8.0, 2), (10.0, 2), (20.0, 1), (40.0, None)])
def test_the_largest_microbatch(monkeypatch, gib_a_row, rows):
  """Fails if the search stops early, goes the wrong way, or takes a microbatch that does not fit."""
  c = dapo_math.get_config()  # 512 rows
  c.mesh.update({"data": 1, "fsdp": 64, "tensor": 1, "expert": 1})
  c.batch.microbatches = 4  # 2 rows a device
  growing(monkeypatch, gib_a_row)
  memory = Memory(gib_a_row * GIB * 2, 0, 0)
  found = plan_search.largest(plans.settings_of(c), "learner", Slice("v6e", (8, 8)), memory, lambda _: None)
  assert (found and plans.rows_of(found[0])) == rows
