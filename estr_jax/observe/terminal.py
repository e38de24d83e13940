"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

import collections
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

# At the top, although they are slow: the panel is drawn by a thread, and a library that swaps the import system for its
# own lazy one while it is imported itself (as tensorflow-datasets does) must not meet an import there.
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from estr_jax.observe.writers import Row

_PLAIN_INTERVAL_S = 5.0  # plain step lines are at least so far apart
_PHASE_INTERVAL_S = 10.0  # between two lines of one phase off a terminal
_REFRESH_HZ = 2  # a redraw costs some milliseconds of a core that the run needs
_HISTORY = 240  # rows kept for the sparklines
_ETA_ROWS = 20  # rows whose mean duration the ETA extrapolates
_BLOCKS = "▁▂▃▄▅▆▇█"


class _Quantity(NamedTuple):
  label: str
  name: str  # in the glossary
  form: str  # a format specification


_LEARNING = (
  _Quantity("reward", "rollout/reward", ".3f"),
  _Quantity("entropy, nats", "policy/entropy", ".3f"),
  _Quantity("rollout KL", "policy/rollout_kl", ".2g"),
  _Quantity("|delta|", "policy/abs_delta", ".2g"),
  _Quantity("masked", "loss/mask_fraction", ".2%"),
  _Quantity("clipped", "loss/clip_fraction", ".2%"),
  _Quantity("sampled acc.", "eval/sampled_accuracy", ".1%"),
  _Quantity("greedy acc.", "eval/greedy_accuracy", ".1%"),
)
_FLOW = (
  _Quantity("stale intra", "staleness/intra", ".2f"),
  _Quantity("stale inter", "staleness/inter", ".2f"),
  _Quantity("stale token", "staleness/token", ".2f"),
  _Quantity("queued", "queue/queued", ".0f"),
  _Quantity("trained tok/s", "throughput/tokens_per_s", ",.0f"),
  _Quantity("sampled tok/s", "throughput/sampled_tokens_per_s", ",.0f"),
  _Quantity("learner waits", "time/wait_rollouts_s", ".2f s"),
  _Quantity("sampler waits", "time/sampler_wait_s", ".2f s"),
)
_PLAIN_LINE = (_LEARNING[0], _LEARNING[1], _LEARNING[4], _FLOW[2], _FLOW[4])


class _Phase(NamedTuple):
  name: str
  done: int | None
  total: int | None
  detail: str
  since: float


class View:
  """Shows a run from start to end; a context manager. Its methods may be called from any thread.

  On a terminal it is one live panel that fits 80 x 24. Elsewhere (CI, nohup) it prints a line per phase and one more
  every few seconds of it, a step line every few seconds, and always the last step. NO_COLOR is respected.
  """

  def __init__(
    self,
    title: str,
    total_steps: int,
    *,
    file: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """
    Args:
      title: what runs, in a few words.
      total_steps: the step at which the run ends.
      file: where to write; standard output when None.
      clock: seconds, increasing.
    """
    self._title, self._total, self._done = title, total_steps, 0
    self._file = sys.stdout if file is None else file
    self._clock = clock
    self._lock = threading.RLock()
    self._console = Console(file=self._file)
    self._live: Any = None
    self._phase: _Phase | None = None
    self._rows: collections.deque[Row] = collections.deque(maxlen=_HISTORY)
    self._messages: collections.deque[str] = collections.deque(maxlen=2)
    self._samplers: dict[str, str] = {}
    self._started = clock()
    self._printed_at = self._phase_printed_at = -math.inf
    self._unprinted: Row | None = None

  def __enter__(self) -> "View":
    self._started = self._clock()
    if self._console.is_terminal and not self._console.is_dumb_terminal:
      self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=_REFRESH_HZ)
      self._live.start(refresh=True)
    else:
      self._print(self._title)
    return self

  def __exit__(self, *_: object) -> None:
    if self._live is not None:
      self._live.stop()
    elif self._unprinted is not None:
      self._print_step(self._unprinted)

  def phase(self, name: str, done: int | None = None, total: int | None = None, detail: str = "") -> None:
    """Long work outside the steps, with its progress where that is known. The next step ends it."""
    with self._lock:
      going = self._phase if self._phase is not None and self._phase.name == name else None
      self._phase = _Phase(name, done, total, detail, self._clock() if going is None else going.since)
      due = going is None or self._clock() - self._phase_printed_at >= _PHASE_INTERVAL_S
    if due and self._live is None:
      self._print(" ".join(filter(None, [name, _progress(done, total), detail])))
      self._phase_printed_at = self._clock()

  def resume(self, step: int) -> None:
    """The run goes on after `step`."""
    self._done = step
    self.message(f"resumed from the checkpoint of step {step}")

  def step(self, row: Row) -> None:
    """One more row of metrics; a row of an evaluation before training has step 0."""
    with self._lock:
      self._rows.append(row)
      self._done = row["step"]
      self._phase = None
    if self._live is None:
      if row["step"] >= self._total or self._clock() - self._printed_at >= _PLAIN_INTERVAL_S:
        self._print_step(row)
      else:
        self._unprinted = row

  def samplers(self, states: Mapping[str, str]) -> None:
    """What each sampler does now, by its name."""
    with self._lock:
      self._samplers = dict(states)

  def message(self, text: str) -> None:
    """Something worth reading once, such as a sampler that went away."""
    with self._lock:
      self._messages.append(text)
    if self._live is None:
      self._print(text)

  def _print(self, line: str) -> None:
    print(f"[{_duration(self._clock() - self._started)}] {line}", file=self._file, flush=True)

  def _print_step(self, row: Row) -> None:
    shown = [f"{q.label} {_value(row[q.name], q.form)}" for q in (*_PLAIN_LINE, *_LEARNING[-2:]) if q.name in row]
    left = [f"{_duration(eta)} left"] if (eta := self._eta()) else []
    self._print(f"step {row['step']}/{self._total}  " + "  ".join(shown + left))
    self._printed_at, self._unprinted = self._clock(), None

  def _eta(self) -> float | None:
    """Seconds until the last step, from the duration of the latest ones; None before there is one."""
    known = [seconds for seconds in self._series("time/step_s")[-_ETA_ROWS:] if seconds is not None]
    return sum(known) / len(known) * (self._total - self._done) if known else None

  def _series(self, name: str) -> list[float | None]:
    return [row[name] for row in self._rows if name in row]

  def _panel(self) -> Any:
    with self._lock:
      # Two columns of border and two of padding on either side... the rest is ours.
      width = max(40, self._console.width - 4)
      parts = [
        self._headline(width),
        self._activity(width),
        self._reward(width),
        self._table(width),
        *self._tail(width),
      ]
    return Panel(Group(*parts), title=f"[bold]{_escape(self._title)}[/]", title_align="left", border_style="dim")

  def _headline(self, width: int) -> Any:
    fraction = min(1.0, self._done / self._total) if self._total else 1.0
    eta = self._eta()
    left = f"step {self._done}/{self._total} "
    right = f" {fraction:4.0%}  elapsed {_duration(self._clock() - self._started)}  left {_duration(eta)}"
    bar = max(4, width - len(left) - len(right))
    full = round(bar * fraction)
    return Text.assemble((left, "bold"), ("━" * full, "green"), ("─" * (bar - full), "dim"), right)

  def _activity(self, width: int) -> Any:
    if self._phase is None:
      return Text("training" if self._done < self._total else "done", style="dim")
    phase = self._phase
    words = [
      phase.name,
      _progress(phase.done, phase.total),
      f"({_duration(self._clock() - phase.since)})",
      phase.detail,
    ]
    return Text(_cut(" ".join(filter(None, words)), width), style="yellow")

  def _reward(self, width: int) -> Any:
    spark = _sparkline(self._series("rollout/reward"), width - len("reward "))
    return Text.assemble("\nreward ", (spark or "no step yet", "cyan" if spark else "dim"), "\n")

  def _table(self, width: int) -> Any:
    table = Table.grid(padding=(0, 1), expand=True)
    half = (width - 3) // 2
    spark = max(0, half - 13 - 9 - 2)
    for column in range(2):
      table.add_column(width=13, style="dim", no_wrap=True)
      table.add_column(width=9, justify="right", no_wrap=True)
      table.add_column(width=spark + (0 if column else 1), style="cyan", no_wrap=True)
    for pair in zip(_LEARNING, _FLOW):
      cells = []
      for quantity in pair:
        series = self._series(quantity.name)
        value = _value(series[-1], quantity.form) if series else "-"
        cells += [quantity.label, value, _sparkline(series, spark)]
      table.add_row(*cells)
    return table

  def _tail(self, width: int) -> list[Any]:
    lines = [Text("")] if self._samplers or self._messages else []
    names = sorted(self._samplers)
    shown = names if len(names) <= 3 else names[:2]
    lines += [Text(_cut(f"{name}: {self._samplers[name]}", width)) for name in shown]
    if len(names) > len(shown):
      lines.append(Text(f"and {len(names) - len(shown)} more samplers", style="dim"))
    return lines + [Text(_cut(message, width), style="yellow") for message in self._messages]


def _sparkline(series: Sequence[float | None], width: int) -> str:
  """The latest `width` numbers as blocks between their least and greatest; a gap where there is none."""
  latest = series[-width:] if width > 0 else []
  known = [value for value in latest if value is not None]
  if not known:
    return ""
  low, span = min(known), max(known) - min(known)
  top = len(_BLOCKS) - 1

  def block(value: float | None) -> str:
    if value is None:
      return " "
    # A flat series sits in the middle: at the bottom it would look like zero.
    return _BLOCKS[round((value - low) / span * top) if span else top // 2]

  return "".join(map(block, latest))


def _value(value: float | None, form: str) -> str:
  number, _, unit = form.partition(" ")
  return "n/a" if value is None else " ".join(filter(None, [format(value, number), unit]))


def _progress(done: int | None, total: int | None) -> str:
  if done is None:
    return ""
  return f"{done:,}" if total is None else f"{done:,}/{total:,}"


def _duration(seconds: float | None) -> str:
  if seconds is None:
    return "--:--"
  minutes, second = divmod(round(seconds), 60)
  hours, minute = divmod(minutes, 60)
  return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _cut(text: str, width: int) -> str:
  line = " ".join(text.split())
  return line if len(line) <= width else line[: width - 1] + "…"


def _escape(text: str) -> str:
  return escape(text)
