"""The benchmark program, but for its numbers: those depend on the machine, and no test waits for them."""

import sys

import pytest

from estr_jax.run import command_line
from experiments.benchmark import __main__ as benchmark
from experiments.benchmark import checks, scoring
from experiments.benchmark.checks import Check
from experiments.benchmark.scoring import Size


def test_an_unknown_benchmark_is_one_line_and_status_2(monkeypatch, capsys):
  """Fails if a misspelt name measures something else, or ends in a traceback."""
  monkeypatch.setattr(sys, "argv", ["benchmark", "scorign"])
  with pytest.raises(SystemExit) as end:
    command_line.main(benchmark.program)
  assert end.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "unknown benchmark 'scorign'" in line and "scoring" in line


def test_the_exit_status_tells_whether_a_limit_is_exceeded(monkeypatch, capsys):
  """Fails if a number above its limit, or none at all, passes."""
  monkeypatch.setattr(sys, "argv", ["benchmark", "some"])
  for measured, status, word in ((1.0, 0, "ok"), (1.1, 1, "short"), (float("nan"), 1, "short")):
    checks = (lambda measured=measured: iter([Check("a number", measured, 1.0)]),)
    monkeypatch.setitem(benchmark.BENCHMARKS, "some", checks)
    assert benchmark.program() == status
    assert capsys.readouterr().out.startswith(word)


def test_the_equality_check_holds_at_a_tiny_size_and_sees_a_difference(monkeypatch):
  """Fails if the check compares a form with itself."""
  tiny = Size(rows=2, length=3, width=4, vocabulary=19, chunk=8)
  assert [check.ok for check in scoring.equality(tiny)] == [True] * 3
  exact = scoring.score
  monkeypatch.setattr(scoring, "score", lambda *a, temperature, **k: exact(*a, temperature=1.01 * temperature, **k))
  assert not any(check.ok for check in scoring.equality(tiny))


def test_ratios_are_of_the_first_over_the_second(monkeypatch):
  """Fails if the ratio is upside down, or if the warm-up counts."""
  now = [0.0]
  monkeypatch.setattr(checks.time, "process_time", lambda: now[0])

  def takes(*durations):
    left = list(durations)

    def run():
      now[0] += left.pop(0)

    return run

  assert checks.ratios(takes(100, 3, 3), takes(1, 1, 1), pairs=2) == [3, 3]
