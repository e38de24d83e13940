"""The sampler's side of gRPC. Every call has a deadline; a learner that does not answer is given `patience_s`."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from estr_jax.rollout_queue.broker import Lease, StaleIncarnation
from estr_jax.structs import NO_VERSION, Trajectory
from estr_jax.waiting import NoAnswer, patiently, until
from estr_jax.wire import codec, security
from estr_jax.wire import estr_jax_pb2 as pb
from estr_jax.wire import estr_jax_pb2_grpc as pb_grpc
from estr_jax.wire.calls import open_channel, translated
from estr_jax.wire.security import Tls
from estr_jax.wire.weight_host import Membership

# Seconds until a call counts as unanswered, on top of the time that it was asked to wait.
_CALL_S = 30.0
_BEATS_PER_TIMEOUT = 5

T = TypeVar("T")


class Client:
  """One sampler's connection; its weights come through a `weight_source`. The calls may come from several threads.

  Every call but `join` raises StaleIncarnation once the learner restarted: drop the work in flight AND the weights
  (the learner may have gone back to an older version), `join` again, and fetch anew with the new membership.
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
    self._channel = open_channel(address, tls, token)
    self._address = address
    self._name = name
    self._description = dict(description)
    self._patience_s = patience_s
    self._metadata = security.token_metadata(token)
    self._rollouts = pb_grpc.RolloutsStub(self._channel)
    self._incarnation = ""
    self._hosts: tuple[str, ...] = ()  # that serve weights, the one here first
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
      reply = self._call(self._rollouts.Join, request, _CALL_S, "leave to join")
      with self._holding_lock:
        self._holding.clear()
      self._version = NO_VERSION  # weights of a former life of the learner count for nothing
      self._incarnation, self._hosts = reply.incarnation, (self._address, *reply.other_hosts)
      self._beat_every_s = reply.lease_timeout_s / _BEATS_PER_TIMEOUT

  def lease(self, max_groups: int, wait_s: float) -> Lease:
    """Up to `max_groups` groups; none after `wait_s` seconds. Start them with weights of `version` or newer."""
    with self._lease_lock:

      def ask(seconds: float) -> Lease:
        with self._holding_lock:
          holding = sorted(self._holding)
        request = pb.LeaseRequest(caller=self._caller(), max_groups=max_groups, wait_s=seconds, holding=holding)
        reply = self._call(self._rollouts.Lease, request, seconds + _CALL_S, "prompts")
        return Lease(codec.groups_from_messages(reply.groups), reply.version, reply.finished)

      lease = until(wait_s, ask, lambda answer: bool(answer.groups) or answer.finished)
      with self._holding_lock:
        self._holding.update(prompts[0].group for prompts in lease.groups)
      return lease

  def put(self, trajectories: Sequence[Trajectory]) -> str:
    """Hands in one finished group; the receipts are those of `Broker.put`. Raises ValueError on a malformed group."""
    messages = [codec.trajectory_to_message(trajectory) for trajectory in trajectories]
    request = pb.PutRequest(caller=self._caller(), trajectories=messages)
    reply = self._call(self._rollouts.Put, request, _CALL_S, "the receipt of a group")
    with self._holding_lock:
      self._holding.discard(trajectories[0].group)
    return reply.receipt

  def membership(self) -> Membership:
    """What `weight_source` needs, in this process or in another one of the same sampler, until the next join."""
    if not self._incarnation:
      raise RuntimeError("join before the weights")
    return Membership(self._name, self._incarnation, self._hosts)

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
        self._unary(self._rollouts.Beat, request, max(1.0, self._beat_every_s), "a beat")
      except (NoAnswer, StaleIncarnation):
        pass  # after the join that the sampler's own calls lead to, beats count again
      except Exception as fault:
        self._beat_fault = fault
        return
      self._closing.wait(self._beat_every_s)

  def _caller(self) -> pb.Caller:
    return pb.Caller(sampler=self._name, incarnation=self._incarnation, version=self._version, waited_s=self._waited_s)

  def _unary(self, method: Callable[..., T], request: Message, deadline_s: float, what: str) -> T:
    with translated(self._address, what):
      return method(request, timeout=deadline_s, metadata=self._metadata)

  def _call(self, method: Callable[..., T], request: Message, deadline_s: float, what: str) -> T:
    if self._beat_fault is not None:
      raise self._beat_fault
    return patiently(lambda: self._unary(method, request, deadline_s, what), what, self._patience_s)
