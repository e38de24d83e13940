"""What a benchmark reports: a number beside its limit; and how times are compared."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Check:
  """A measured number, which should not exceed its limit; NaN does."""

  what: str
  measured: float
  limit: float
  detail: str = ""

  @property
  def ok(self) -> bool:
    return self.measured <= self.limit

  def line(self) -> str:
    verdict = "ok   " if self.ok else "short"
    return f"{verdict}  {self.what}: {self.measured:.3g}, limit {self.limit:.3g}{self.detail and f' ({self.detail})'}"


def ratios(run: Callable[[], Any], base: Callable[[], Any], pairs: int) -> list[float]:
  """Processor seconds of `run` over those of `base`, all threads, side by side; which goes first alternates."""
  measured = []
  for pair in range(-1, pairs):  # the first warms up
    seconds = {}
    for one in (run, base) if pair % 2 else (base, run):
      start = time.process_time()
      jax.block_until_ready(one())
      seconds[one] = time.process_time() - start
    if pair >= 0:
      measured.append(seconds[run] / seconds[base])
  return measured


def compare(what: str, limit: float, run: Callable[[], Any], base: Callable[[], Any], pairs: int) -> Check:
  measured = ratios(run, base, pairs)
  low, _, high = statistics.quantiles(measured, n=4)
  return Check(f"time of {what}", statistics.median(measured), limit, f"{low:.3f} .. {high:.3f}, {pairs} pairs")
