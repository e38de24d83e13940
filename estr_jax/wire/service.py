"""The learner's side of gRPC: on each host one port with the weight channel and health, on the first the queue too."""

import contextlib
import dataclasses
import hmac
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from estr_jax.errors import UserError
from estr_jax.rollout_queue.broker import Broker, Lease, StaleIncarnation
from estr_jax.weights.store import Snapshot, VersionGone, WeightStore
from estr_jax.wire import codec, security
from estr_jax.wire import estr_jax_pb2 as pb
from estr_jax.wire import estr_jax_pb2_grpc as pb_grpc
from estr_jax.wire.security import Tls

# Threads of the pool, and how many of them may block in a wait or be busy with a stream of weights. The rest is always
# free, so that a put, a beat or a health check never queues behind a sampler that has nothing to do.
_THREADS, _WAITS, _STREAMS = 64, 40, 8
# A blocked call looks this often whether its client or the server went away.
_SLICE_S = 0.5
_ROLLOUTS, _WEIGHTS = "estr_jax.wire.Rollouts", "estr_jax.wire.WeightChannel"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Server:
  """Answers in the background until `stop`."""

  address: str  # with the port that was picked
  _server: grpc.Server
  _health: health.HealthServicer
  _stopping: threading.Event

  def stop(self, grace_s: float = 1.0) -> None:
    """Refuses new calls and ends the present ones within `grace_s`; call `Broker.finish` and `farewell` before."""
    self._health.enter_graceful_shutdown()
    self._stopping.set()
    self._server.stop(grace_s).wait()


def serve(
  address: str,
  broker: Broker,
  store: WeightStore,
  *,
  description: Mapping[str, str],
  other_hosts: Sequence[str] = (),
  tls: Tls | None = None,
  token: str | None = None,
) -> Server:
  """Starts the services of the learner's first host on `address` ("host:port"; port 0 picks a free one).

  `description` says flatly what the model is; a sampler whose own differs is refused at Join. `other_hosts` are the
  addresses, as samplers reach them, of the hosts that `serve_weights` of this `broker.incarnation`.
  Raises: UserError on a port in use, and beyond loopback without TLS and a token.
  """

  def add(server: grpc.Server, waiter: _Waiter) -> None:
    pb_grpc.add_RolloutsServicer_to_server(_Rollouts(broker, description, other_hosts, waiter), server)
    # The learner may publish a version before it takes the next batch: what a sampler can hold is not the future.
    channel = _WeightChannel(broker.incarnation, store, waiter, on_serve=broker.announce)
    pb_grpc.add_WeightChannelServicer_to_server(channel, server)

  return _start(address, add, (_ROLLOUTS, _WEIGHTS), tls, token)


def serve_weights(
  address: str, store: WeightStore, *, incarnation: str, tls: Tls | None = None, token: str | None = None
) -> Server:
  """Starts the services of another host of the learner; `incarnation` is that of the first host's broker."""

  def add(server: grpc.Server, waiter: _Waiter) -> None:
    channel = _WeightChannel(incarnation, store, waiter, on_serve=lambda version: None)
    pb_grpc.add_WeightChannelServicer_to_server(channel, server)

  return _start(address, add, (_WEIGHTS,), tls, token)


def _start(
  address: str,
  add: Callable[[grpc.Server, "_Waiter"], None],
  names: Sequence[str],
  tls: Tls | None,
  token: str | None,
) -> Server:
  security.require_safe(address, tls, token)
  # Without SO_REUSEPORT a second learner on the same port fails instead of stealing half of the calls.
  options = [*security.MESSAGE_OPTIONS, ("grpc.so_reuseport", 0)]
  interceptors: list[grpc.ServerInterceptor] = [] if token is None else [_TokenCheck(token)]
  pool = futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="wire")
  server = grpc.server(pool, interceptors=interceptors, options=options)
  stopping = threading.Event()
  add(server, _Waiter(stopping))
  servicer = health.HealthServicer()
  health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
  credentials = None if tls is None else security.server_credentials(tls)
  try:
    port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
  except RuntimeError:
    port = 0
  if port == 0:
    pool.shutdown(wait=False)
    raise UserError(f"cannot listen on {address}: the port is in use or the host is not ours; choose another address")
  server.start()
  for name in ("", *names):
    servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
  return Server(f"{address.rpartition(':')[0]}:{port}", server, servicer, stopping)


class _Waiter:
  """Bounds how many threads of the pool block, and lets no blocked call outlive its client or the server."""

  def __init__(self, stopping: threading.Event):
    self._stopping = stopping
    self._waits = threading.BoundedSemaphore(_WAITS)
    self._streams = threading.BoundedSemaphore(_STREAMS)

  def wait(
    self, context: grpc.ServicerContext, wait_s: float, ask: Callable[[float], T], done: Callable[[T], bool]
  ) -> T:
    """Calls `ask(seconds)` in slices until `done`; at once, without waiting, where too many calls wait already."""
    blocking = self._waits.acquire(blocking=False)
    try:
      deadline = time.monotonic() + (wait_s if blocking else 0.0)
      while True:
        left = deadline - time.monotonic()
        answer = ask(max(0.0, min(_SLICE_S, left)))
        if done(answer) or left <= _SLICE_S or self._stopping.is_set() or not context.is_active():
          return answer
    finally:
      if blocking:
        self._waits.release()

  @contextlib.contextmanager
  def streaming(self) -> Iterator[bool]:
    """Whether the caller may stream now."""
    free = self._streams.acquire(blocking=False)
    try:
      yield free
    finally:
      if free:
        self._streams.release()


class _Rollouts(pb_grpc.RolloutsServicer):
  def __init__(self, broker: Broker, description: Mapping[str, str], other_hosts: Sequence[str], waiter: _Waiter):
    self._broker = broker
    self._description = dict(description)
    self._other_hosts = tuple(other_hosts)
    self._waiter = waiter

  def Join(self, request, context):
    with _answering(context):
      _check_description(request.sampler, dict(request.description), self._description)
      self._broker.join(request.sampler, request.pid)
      return pb.JoinReply(
        incarnation=self._broker.incarnation,
        lease_timeout_s=self._broker.lease_timeout_s,
        other_hosts=self._other_hosts,
      )

  def Lease(self, request, context):
    with _answering(context):
      _hear(request.caller, self._broker)
      holding = frozenset(request.holding)

      def ask(seconds: float) -> Lease:
        return self._broker.lease(request.caller.sampler, request.max_groups, seconds, holding=holding)

      lease = self._waiter.wait(context, request.wait_s, ask, lambda answer: bool(answer.groups) or answer.finished)
      groups = [pb.Group(prompts=[codec.prompt_to_message(prompt) for prompt in group]) for group in lease.groups]
      return pb.LeaseReply(groups=groups, version=lease.version, finished=lease.finished)

  def Put(self, request, context):
    with _answering(context):
      _hear(request.caller, self._broker)
      trajectories = [codec.trajectory_from_message(message) for message in request.trajectories]
      return pb.PutReply(receipt=self._broker.put(request.caller.sampler, trajectories))

  def Beat(self, request, context):
    with _answering(context):
      _hear(request.caller, self._broker)
      self._broker.beat(request.caller.sampler, request.state, request.seconds_in_state)
      return pb.BeatReply()


class _WeightChannel(pb_grpc.WeightChannelServicer):
  def __init__(self, incarnation: str, store: WeightStore, waiter: _Waiter, on_serve: Callable[[int], None]):
    self._incarnation = incarnation
    self._store = store
    self._waiter = waiter
    self._on_serve = on_serve

  def Fetch(self, request, context):
    with _answering(context):
      _check_incarnation(request.sampler, request.incarnation, self._incarnation)
      wanted = [codec.region_from_message(message) for message in request.wanted]

      def ask(seconds: float) -> Snapshot | None:
        if request.WhichOneof("version") == "exactly":
          return self._store.exactly(request.exactly, seconds)
        return self._store.newer(request.above, seconds)

      snapshot = self._waiter.wait(context, request.wait_s, ask, lambda answer: answer is not None)
      if snapshot is None:
        return
      with self._waiter.streaming() as free:
        if free:
          self._on_serve(snapshot.version)
          yield from map(codec.part_to_message, snapshot.stream(wanted))


class _TokenCheck(grpc.ServerInterceptor):
  """Refuses calls without the token; the health service stays open, since probes carry none."""

  def __init__(self, token: str):
    self._expected = dict(security.token_metadata(token))[security.TOKEN_HEADER].encode()

  def intercept_service(self, continuation, details):
    given = dict(details.invocation_metadata).get(security.TOKEN_HEADER, "")
    if details.method.startswith("/grpc.health.") or hmac.compare_digest(given.encode(), self._expected):
      return continuation(details)

    def refuse(request, context):
      context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not the learner's; give both sides the same one")

    return grpc.unary_unary_rpc_method_handler(refuse)


@contextlib.contextmanager
def _answering(context: grpc.ServicerContext) -> Iterator[None]:
  """Turns what the caller can act on into a status; anything else is a fault of ours and keeps its traceback."""
  try:
    yield
  except StaleIncarnation as fault:
    context.abort(grpc.StatusCode.ABORTED, str(fault))
  except VersionGone as fault:
    context.abort(grpc.StatusCode.NOT_FOUND, str(fault))
  except UserError as fault:
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(fault))
  except ValueError as fault:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(fault))


def _hear(caller: pb.Caller, broker: Broker) -> None:
  _check_incarnation(caller.sampler, caller.incarnation, broker.incarnation)
  broker.hear(caller.sampler, caller.version, caller.waited_s)


def _check_incarnation(sampler: str, theirs: str, ours: str) -> None:
  if theirs != ours:
    raise StaleIncarnation(f"the learner restarted; {sampler} has to drop its work and join again")


def _check_description(sampler: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
  for key in sorted({*theirs, *ours}):
    if key not in theirs or key not in ours or theirs[key] != ours[key]:
      there = f'"{theirs[key]}"' if key in theirs else "missing"
      here = f'"{ours[key]}"' if key in ours else "missing"
      raise UserError(
        f"sampler {sampler} differs from the learner in {key}: {there} at the sampler, {here} at the learner; "
        "start both from the same config"
      )
