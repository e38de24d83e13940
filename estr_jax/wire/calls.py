"""Calls to the learner's hosts: their channels, how long to be patient, and what their faults mean."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc

from estr_jax.errors import UserError
from estr_jax.rollout_queue.broker import StaleIncarnation
from estr_jax.weights.store import VersionGone
from estr_jax.wire import security
from estr_jax.wire.security import Tls

# One call asks the learner to wait at most this long; a longer wait is several calls.
WAIT_S = 10.0
# Between two calls that the learner answered early and empty because too many others wait.
PAUSE_S = 0.2
_BACKOFF_S = (0.1, 2.0)  # first and largest
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

T = TypeVar("T")


class NoAnswer(Exception):
  """A host that does not answer; it may be about to start."""

  def __init__(self, address: str):
    super().__init__(address)
    self.address = address


def open_channel(address: str, tls: Tls | None, token: str | None) -> grpc.Channel:
  """Raises UserError beyond loopback without TLS and token."""
  security.require_safe(address, tls, token)
  # A learner that restarts is found again soon, not after gRPC's own two minutes.
  options = [
    *security.MESSAGE_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
  ]
  if tls is None:
    return grpc.insecure_channel(address, options)
  return grpc.secure_channel(address, security.channel_credentials(tls), options)


@contextlib.contextmanager
def translated(address: str, what: str) -> Iterator[None]:
  """Turns a status into the fault that it stands for; NoAnswer where it is none of the learner's."""
  try:
    yield
  except grpc.RpcError as fault:
    code, details = fault.code(), fault.details()
    if code in _NO_ANSWER:
      raise NoAnswer(address) from None
    meanings = {
      grpc.StatusCode.ABORTED: StaleIncarnation,
      grpc.StatusCode.NOT_FOUND: VersionGone,
      grpc.StatusCode.INVALID_ARGUMENT: ValueError,
      grpc.StatusCode.FAILED_PRECONDITION: UserError,
      grpc.StatusCode.UNAUTHENTICATED: UserError,
    }
    if code in meanings:
      raise meanings[code](details) from None
    raise RuntimeError(f"the learner failed while waiting for {what}: {code.name}: {details}") from None


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
