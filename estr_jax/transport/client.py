"""The sampler's side of gRPC. Every call has a deadline; a learner that does not answer is given `patience_s`."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import grpc

from estr_jax.errors import UserError
from estr_jax.structs import NO_VERSION, Trajectory, Weights
from estr_jax.transport import estr_jax_pb2 as pb
from estr_jax.transport import estr_jax_pb2_grpc as pb_grpc
from estr_jax.transport import security, wire
from estr_jax.transport.broker import Lease, StaleIncarnation
from estr_jax.transport.security import Tls
from estr_jax.transport.weights import assemble

# Seconds until a call counts as unanswered, on top of the time that it was asked to wait.
_CALL_S = 30.0
_FETCH_S = 900.0
# One call asks the learner to wait at most this long; a longer wait is several calls.
_WAIT_S = 10.0
# Between two calls that the learner answered early and empty because too many others wait.
_PAUSE_S = 0.2
_BACKOFF_S = (0.1, 2.0)  # first and largest
_BEATS_PER_TIMEOUT = 5
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

T = TypeVar("T")


class Client:
  """One sampler's connection. The calls may come from several threads.

  Every call but `join` raises StaleIncarnation once the learner restarted: drop the work in flight AND the weights
  (the learner may have gone back to an older version), `join` again, and fetch anew with NO_VERSION.
  Every call raises UserError when the learner gave no answer for `patience_s` seconds, or refuses this sampler.
  """

  def __init__(
    self,
    address: str,
    name: str,
    *,
    description: Mapping[str, str],
    patience_s: float,
    tls: Tls | None = None,
    token: str | None = None,
  ):
    """`description` has to equal the learner's. Raises UserError beyond loopback without TLS and token."""
    security.require_safe(address, tls, token)
    # A learner that restarts is found again soon, not after gRPC's own two minutes.
    options = [
      *security.MESSAGE_OPTIONS,
      ("grpc.enable_http_proxy", 0),
      ("grpc.initial_reconnect_backoff_ms", 200),
      ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    if tls is None:
      self._channel = grpc.insecure_channel(address, options)
    else:
      self._channel = grpc.secure_channel(address, security.channel_credentials(tls), options)
    self._address = address
    self._name = name
    self._description = dict(description)
    self._patience_s = patience_s
    self._metadata = security.token_metadata(token)
    self._rollouts = pb_grpc.RolloutsStub(self._channel)
    self._weights = pb_grpc.WeightChannelStub(self._channel)
    self._incarnation = ""
    self._version, self._waited_s = NO_VERSION, 0.0
    self._beat_every_s = 0.0
    self._holding: set[int] = set()  # groups leased and not handed in
    self._holding_lock = threading.Lock()
    # One lease call at a time: a second would not yet know what the first is being given, and give it back.
    self._lease_lock = threading.Lock()
    self._closing = threading.Event()
    self._beats: threading.Thread | None = None
    self._beat_fault: Exception | None = None

  def join(self) -> None:
    """Introduces this process, after StaleIncarnation again. Raises UserError, naming the key, where models differ."""
    request = pb.JoinRequest(sampler=self._name, pid=os.getpid(), description=self._description)
    with self._lease_lock:
      reply = self._call(lambda: self._unary(self._rollouts.Join, request, _CALL_S), "leave to join")
      with self._holding_lock:
        self._holding.clear()
      self._version = NO_VERSION  # weights of a former life of the learner count for nothing
      self._incarnation = reply.incarnation
      self._beat_every_s = reply.lease_timeout_s / _BEATS_PER_TIMEOUT

  def lease(self, max_groups: int, wait_s: float) -> Lease:
    """Up to `max_groups` groups; none after `wait_s` seconds. Start them with weights of `version` or newer."""
    with self._lease_lock:

      def ask(seconds: float) -> Lease:
        with self._holding_lock:
          holding = sorted(self._holding)
        request = pb.LeaseRequest(caller=self._caller(), max_groups=max_groups, wait_s=seconds, holding=holding)
        reply = self._call(lambda: self._unary(self._rollouts.Lease, request, seconds + _CALL_S), "prompts")
        return Lease(wire.groups_from_messages(reply.groups), reply.version, reply.finished)

      lease = _until(wait_s, ask, lambda answer: bool(answer.groups) or answer.finished)
      with self._holding_lock:
        self._holding.update(prompts[0].group for prompts in lease.groups)
      return lease

  def put(self, trajectories: Sequence[Trajectory]) -> str:
    """Hands in one finished group; the receipts are those of `Broker.put`. Raises ValueError on a malformed group."""
    messages = [wire.trajectory_to_message(trajectory) for trajectory in trajectories]
    request = pb.PutRequest(caller=self._caller(), trajectories=messages)
    reply = self._call(lambda: self._unary(self._rollouts.Put, request, _CALL_S), "the receipt of a group")
    with self._holding_lock:
      self._holding.discard(trajectories[0].group)
    return reply.receipt

  def fetch_weights(self, have_version: int, wait_s: float) -> Weights | None:
    """The newest weights above `have_version` (NO_VERSION: any), params as nested numpy; None after `wait_s`."""

    def ask(seconds: float) -> Weights | None:
      request = pb.FetchRequest(caller=self._caller(), have_version=have_version, wait_s=seconds)
      deadline_s = seconds + _FETCH_S
      return self._call(lambda: assemble(self._unary(self._weights.Fetch, request, deadline_s)), "weights")

    return _until(wait_s, ask, lambda answer: answer is not None)

  def holds(self, version: int, waited_s: float) -> None:
    """What every later call tells the learner: the version sampled with, and the seconds waited since the start."""
    self._version, self._waited_s = version, waited_s

  def start_beats(self, state: Callable[[], tuple[str, float]]) -> None:
    """Reports `state() -> (state, seconds in it without progress)` from a thread until `close`.

    The states are those of `liveness.STATE_DEADLINE_S`. A beat that finds no learner is skipped: the calls of the
    sampler decide how long to be patient. Any other fault is raised by the sampler's next call.
    """
    if not self._incarnation:
      raise RuntimeError("join before the beats")
    self._beats = threading.Thread(target=self._beat_forever, args=(state,), name="beats", daemon=True)
    self._beats.start()

  def close(self) -> None:
    self._closing.set()
    self._channel.close()  # ends a beat under way
    if self._beats is not None:
      self._beats.join()

  def _beat_forever(self, state: Callable[[], tuple[str, float]]) -> None:
    while not self._closing.is_set():
      try:
        name, seconds = state()
        request = pb.BeatRequest(caller=self._caller(), state=name, seconds_in_state=seconds)
        self._unary(self._rollouts.Beat, request, max(1.0, self._beat_every_s))
      except grpc.RpcError as fault:
        # ABORTED: the learner restarted, which the sampler's own calls find out; after its join beats count again.
        if fault.code() not in (*_NO_ANSWER, grpc.StatusCode.ABORTED):
          self._beat_fault = _translated(fault, "a beat")
          return
      except Exception as fault:
        self._beat_fault = fault
        return
      self._closing.wait(self._beat_every_s)

  def _caller(self) -> pb.Caller:
    return pb.Caller(sampler=self._name, incarnation=self._incarnation, version=self._version, waited_s=self._waited_s)

  def _unary(self, method, request, deadline_s: float):
    return method(request, timeout=deadline_s, metadata=self._metadata)

  def _call(self, call: Callable[[], T], what: str) -> T:
    """Repeats `call` while nobody answers; every call of ours is safe to repeat."""
    if self._beat_fault is not None:
      raise self._beat_fault
    start = time.monotonic()
    for pause_s in _pauses():
      try:
        return call()
      except grpc.RpcError as fault:
        if fault.code() not in _NO_ANSWER:
          raise _translated(fault, what) from None
      if time.monotonic() - start + pause_s > self._patience_s:
        raise UserError(
          f"no answer from the learner at {self._address} for {time.monotonic() - start:.0f} s while waiting for "
          f"{what}; check that it runs, and that address and TLS settings are the same on both sides"
        )
      time.sleep(pause_s)
    raise AssertionError("the pauses never end")


def _pauses() -> Iterator[float]:
  pause, largest = _BACKOFF_S
  while True:
    yield pause
    pause = min(2 * pause, largest)


def _until(wait_s: float, ask: Callable[[float], T], done: Callable[[T], bool]) -> T:
  deadline = time.monotonic() + wait_s
  while True:
    asked_at = time.monotonic()
    seconds = max(0.0, min(_WAIT_S, deadline - asked_at))
    answer = ask(seconds)
    now = time.monotonic()
    if done(answer) or now >= deadline:
      return answer
    if now - asked_at < seconds:
      time.sleep(min(_PAUSE_S, deadline - now))


def _translated(fault: grpc.RpcError, what: str) -> Exception:
  code, details = fault.code(), fault.details()
  if code == grpc.StatusCode.ABORTED:
    return StaleIncarnation(details)
  if code == grpc.StatusCode.INVALID_ARGUMENT:
    return ValueError(details)
  if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED):
    return UserError(details)
  return RuntimeError(f"the learner failed while waiting for {what}: {code.name}: {details}")
