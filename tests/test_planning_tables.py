"""The page of plans is the one that its command writes, and says what is claimed of it."""

import re
from pathlib import Path

import pytest

from experiments import plan_tables

PAGE = (Path(__file__).parent.parent / "docs/tpu_plans.md").read_text(encoding="utf-8")


def test_the_page_holds_the_plans_and_nothing_else():
  """Fails if a plan is added, renamed or asked for by another command than the page shows."""
  assert list(plan_tables.blocks(PAGE)) == list(plan_tables.PLANS)
  assert re.findall("^## ", PAGE, re.MULTILINE) == ["## "] * len(plan_tables.PLANS)


@pytest.mark.parametrize("name", plan_tables.PLANS)
def test_a_plan_fits_and_is_fast_enough(name):
  """Fails if the page is written from a plan that does not fit, or a learner falls below 50 % (dense) or 35 % (MoE)."""
  block = plan_tables.blocks(PAGE)[name]
  assert block.endswith("    FITS\n")
  mfu = float(re.search(r"MFU +([\d.]+) %", block)[1])
  if "learner" in name:
    assert mfu >= (35 if name.startswith("browsecomp") else 50)


def test_a_dense_sampler_reads_little_more_than_it_must():
  """Fails if a decode step copies its cache: more than 1.3 x weights and cache read once."""
  for name in ("gsm8k_multiturn-sampler-v6e", "dapo_math-sampler-v6e"):
    assert float(re.search(r"([\d.]+) x weights and cache", plan_tables.blocks(PAGE)[name])[1]) <= 1.3


def test_one_block_alone_is_made_anew(tmp_path, monkeypatch):
  """Fails if the other blocks are lost, moved, or taken from a plan that there is no more."""
  first, *_, last = plan_tables.PLANS
  monkeypatch.setattr(plan_tables, "has_libtpu", lambda: True)
  monkeypatch.setattr(plan_tables, "make", lambda name: f"{plan_tables.heading(name)}\n    new\n")
  out = tmp_path / "page.md"
  out.write_text(f"{plan_tables.heading(last)}\n    old\n\n## No plan of ours\n\n    old\n")
  monkeypatch.setattr("sys.argv", ["plan_tables", f"--out={out}", "--only", first])
  assert plan_tables.main() == 0
  made = plan_tables.blocks(out.read_text())
  assert list(made) == [first, last] and made[first].endswith("new\n") and made[last].endswith("old\n")
  assert "No plan of ours" not in out.read_text()
