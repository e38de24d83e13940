"""The live view: fits a small terminal, and is quiet and complete without one."""

import io
import re

import pytest

from estr_jax.observe import terminal
from estr_jax.observe.glossary import GLOSSARY
from estr_jax.observe.terminal import View


class _Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


def _row(step, **more):
  return {"step": step, "rollout/reward": step / 100, "time/step_s": 2.0, "queue/queued": 3} | more


@pytest.fixture
def plain(monkeypatch):
  for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    monkeypatch.delenv(name, raising=False)
  clock, file = _Clock(), io.StringIO()
  return View("a run", 100, file=file, clock=clock), clock, file


@pytest.fixture
def live(monkeypatch):
  """A view that believes to be on a terminal of 80 x 24."""
  for name, value in {"TTY_COMPATIBLE": "1", "COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}.items():
    monkeypatch.setenv(name, value)
  monkeypatch.delenv("NO_COLOR", raising=False)
  file = io.StringIO()
  return View("a run " * 30, 100, file=file), file


def _steps(file):
  return [int(number) for number in re.findall(r"step (\d+)/100", file.getvalue())]


def test_plain_step_lines_are_seconds_apart_and_end_with_the_last_step(plain):
  """Fails if every step is printed, or if the last one is skipped because it came too soon."""
  view, clock, file = plain
  with view:
    for step in range(1, 101):
      clock.now += 0.5
      view.step(_row(step))
    # Before the view ends: an evaluation may follow the last step.
    assert _steps(file) == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]
  assert _steps(file)[-2:] == [91, 100]


def test_plain_view_that_ends_early_prints_the_step_it_reached(plain):
  """Fails if a crash hides how far the run came, or if a printed step is printed again."""
  view, clock, file = plain
  with pytest.raises(RuntimeError), view:
    for step in range(1, 8):
      clock.now += 0.1
      view.step(_row(step))
    raise RuntimeError
  assert _steps(file) == [1, 7]
  with view:
    clock.now += 10
    view.step(_row(8))
  assert _steps(file) == [1, 7, 8]


def test_plain_view_prints_one_line_per_phase(plain):
  """Fails if each report of progress is a line, or if a phase that comes again is not."""
  view, _, file = plain
  with view:
    for done in range(50):
      view.phase("warm start", done, 50, "loss 1.0")
    view.phase("compiling")
    view.phase("warm start", 0, 50)
    view.message("sampler-0 is gone")
  lines = file.getvalue().splitlines()
  assert [line.split("] ")[1] for line in lines] == [
    "a run",
    "warm start 0/50 loss 1.0",
    "compiling",
    "warm start 0/50",
    "sampler-0 is gone",
  ]
  assert "\x1b" not in file.getvalue()


def test_eta_extrapolates_the_latest_steps_to_the_end(plain):
  """Fails if the ETA counts from step 0 after a resume, or counts the steps done instead of those left."""
  view, _, file = plain
  with view:
    view.step(_row(40))
  assert "2:00 left" in file.getvalue()


def _frame(view):
  with view._console.capture() as capture:
    view._console.print(view._panel())
  return re.sub(r"\x1b\[[0-9;]*m", "", capture.get()).splitlines()


def test_the_fullest_panel_fits_80_by_24(live):
  """Fails if many samplers, long texts or a long history make the panel taller or wider than the terminal."""
  view, _ = live
  view.samplers({f"sampler-{n}": "decoding " * 20 for n in range(8)})
  for step in range(1, 300):
    view.step({"step": step} | {q.name: 12345.678 * step for q in (*terminal._LEARNING, *terminal._FLOW)})
  for n in range(5):
    view.message(f"message {n} [not markup] " * 10)
  view.phase("evaluating", 12, 512, "greedy " * 30)
  lines = _frame(view)
  assert len(lines) <= 24
  assert {len(line) for line in lines} == {80}
  assert any("and 6 more samplers" in line for line in lines) and any("message 4" in line for line in lines)


def test_a_panel_without_rows_groups_or_numbers_is_drawn(live):
  """Fails if sync runs (no queue), the row of the evaluation before training, or a null break the view."""
  view, _ = live
  assert any("no step yet" in line for line in _frame(view))
  view.step({"step": 0, "eval/greedy_accuracy": 0.5})
  view.step({"step": 1, "rollout/reward": None, "time/step_s": None})
  text = "\n".join(_frame(view))
  assert "50.0%" in text and "n/a" in text


def test_live_output_has_colour_unless_no_color_is_set(live, monkeypatch):
  """Fails if NO_COLOR is not respected, or if the test could not tell."""

  def coloured():
    file = io.StringIO()
    with View("a run", 100, file=file) as view:
      view.step(_row(50))
    return bool(re.search(r"\x1b\[[0-9;]*3[1-7]m", file.getvalue()))

  assert coloured()
  monkeypatch.setenv("NO_COLOR", "1")
  assert not coloured()


def test_every_quantity_shown_is_in_the_glossary():
  """Fails if the view waits for a name that no row will ever hold."""
  assert {q.name for q in (*terminal._LEARNING, *terminal._FLOW)} <= set(GLOSSARY)


@pytest.mark.parametrize(
  ("values", "width", "expected"),
  [([0, 7], 9, "▁█"), ([5, 5], 9, "▄▄"), ([0, None, 7], 9, "▁ █"), ([9, 0, 7], 2, "▁█"), ([None], 9, ""), ([1], 0, "")],
)
def test_sparkline(values, width, expected):
  """Fails if the oldest values are kept, a null is drawn as a number, or a flat line divides by zero."""
  assert terminal._sparkline(values, width) == expected


def test_drawing_imports_nothing(live, monkeypatch):
  """Fails if the drawing thread imports: it met a library that swaps the import system, and the run died."""
  view, _ = live
  with view:  # the first drawing, before any thread
    view.step(_row(1))
  asked = []
  monkeypatch.setattr("builtins.__import__", lambda name, *rest: asked.append(name))
  view._panel()
  monkeypatch.undo()
  assert asked == []
