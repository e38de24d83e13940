"""Waits with a deadline: patience with a learner that does not answer, and a long wait in several short calls."""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from estr_jax.errors import UserError

# One call asks the learner to wait at most this long; a longer wait is several calls.
WAIT_S = 10.0
# Between two calls that the learner answered early and empty because too many others wait.
PAUSE_S = 0.2
_BACKOFF_S = (0.1, 2.0)  # first and largest

T = TypeVar("T")


class NoAnswer(Exception):
  """A host that does not answer; it may be about to start."""

  def __init__(self, address: str):
    super().__init__(address)
    self.address = address


def patiently(call: Callable[[], T], what: str, patience_s: float) -> T:
  """Repeats `call`, as each of ours may be, while it raises NoAnswer; UserError after `patience_s` seconds."""
  start = time.monotonic()
  for pause_s in _pauses():
    try:
      return call()
    except NoAnswer as fault:
      if time.monotonic() - start + pause_s > patience_s:
        raise UserError(
          f"no answer from the learner at {fault.address} for {time.monotonic() - start:.0f} s while waiting for "
          f"{what}; check that it runs, and that address and TLS settings are the same on both sides"
        ) from None
    time.sleep(pause_s)
  raise AssertionError("the pauses never end")


def until(wait_s: float, ask: Callable[[float], T], done: Callable[[T], bool]) -> T:
  """Calls `ask(seconds to wait)` until `done`, or until `wait_s` seconds are over."""
  deadline = time.monotonic() + wait_s
  while True:
    asked_at = time.monotonic()
    seconds = max(0.0, min(WAIT_S, deadline - asked_at))
    answer = ask(seconds)
    now = time.monotonic()
    if done(answer) or now >= deadline:
      return answer
    if now - asked_at < seconds:
      time.sleep(min(PAUSE_S, deadline - now))


def _pauses() -> Iterator[float]:
  pause, largest = _BACKOFF_S
  while True:
    yield pause
    pause = min(2 * pause, largest)
