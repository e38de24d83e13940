"""Calls to the learner's hosts: their channels, and what their faults mean."""

import contextlib
from collections.abc import Iterator

import grpc

from estr_jax.errors import UserError
from estr_jax.rollout_queue.broker import StaleIncarnation
from estr_jax.waiting import NoAnswer
from estr_jax.weights.store import VersionGone
from estr_jax.wire import security
from estr_jax.wire.security import Tls

_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


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
