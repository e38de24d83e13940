"""The sampler's side of the weight channel: from every learner host the blocks that this process needs, in parallel."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import NamedTuple

import grpc

from estr_jax.errors import UserError
from estr_jax.weights.receive import Blocks, Receiver, manifest_of
from estr_jax.weights.regions import Region, region_to_message
from estr_jax.weights.store import VersionGone
from estr_jax.wire import estr_jax_pb2 as pb
from estr_jax.wire import estr_jax_pb2_grpc as pb_grpc
from estr_jax.wire import security
from estr_jax.wire.calls import PAUSE_S, WAIT_S, open_channel, patiently, translated, until
from estr_jax.wire.security import Tls

# Seconds until a stream counts as unanswered, on top of the time that it was asked to wait.
_FETCH_S = 900.0

_Opened = tuple[pb.Manifest, Iterator[pb.WeightsPart]]  # a stream's beginning and the rest of it


class Membership(NamedTuple):
  """Whose weights, in which life of the learner, and where they are."""

  sampler: str
  incarnation: str
  hosts: tuple[str, ...]  # addresses of all learner hosts; the first names the versions


class WeightSource:
  """Fetches the wanted regions of one process. One call at a time.

  Every call raises StaleIncarnation once the learner restarted, UserError when a host gave no answer for `patience_s`
  seconds, and ValueError, naming the parameter, where the blocks are damaged or do not cover the regions exactly once.
  """

  def __init__(
    self,
    membership: Membership,
    wanted: Sequence[Region],
    *,
    patience_s: float,
    tls: Tls | None = None,
    token: str | None = None,
  ):
    """Raises UserError where a host is beyond loopback without TLS and token."""
    self._membership = membership
    self._wanted = tuple(wanted)
    self._messages = [region_to_message(region) for region in wanted]
    self._patience_s = patience_s
    self._metadata = security.token_metadata(token)
    self._channels = [open_channel(address, tls, token) for address in membership.hosts]

  def fetch(
    self, have_version: int, wait_s: float, named: Callable[[int], None] = lambda version: None
  ) -> tuple[int, Blocks] | None:
    """The newest weights above `have_version` (NO_VERSION: any): (version, blocks); None after `wait_s` seconds.

    `named` is called with the version as soon as the learner has named it, before its blocks move, and again with
    another one where the fetch has to start over; the other processes of a sampler then ask for exactly that one.
    """

    def ask(seconds: float) -> tuple[int, Blocks] | None:
      try:
        return self._patiently(lambda: self._attempt({"above": have_version}, seconds, named))
      except VersionGone:
        return None  # the learner moved on meanwhile: start over with its newest

    return until(wait_s, ask, lambda answer: answer is not None)

  def fetch_exactly(self, version: int) -> Blocks:
    """The blocks of a version that the learner has named. Raises VersionGone where a host holds it no more."""

    def ask(seconds: float) -> tuple[int, Blocks] | None:
      return self._patiently(lambda: self._attempt({"exactly": version}, seconds, lambda version: None))

    found = until(self._patience_s, ask, lambda answer: answer is not None)
    if found is None:
      raise self._missing(0, version)
    return found[1]

  def close(self) -> None:
    """Ends the present call."""
    for channel in self._channels:
      channel.close()

  def _patiently(self, attempt: Callable[[], tuple[int, Blocks] | None]) -> tuple[int, Blocks] | None:
    return patiently(attempt, "weights", self._patience_s)

  def _attempt(self, which: dict[str, int], wait_s: float, named: Callable[[int], None]) -> tuple[int, Blocks] | None:
    """None where the first host has nothing to send now."""
    hosts = range(len(self._channels))
    # The streams end before the pool waits for its threads, which read them.
    with futures.ThreadPoolExecutor(len(hosts), "weights") as pool, contextlib.closing(_Streams()) as streams:
      first = self._open(0, which, wait_s, streams)
      if first is None:
        return None
      version = first[0].version
      named(version)
      others = [pool.submit(self._open_exactly, host, version, streams) for host in hosts[1:]]
      opened = [first, *_all(others)]
      receiver = Receiver(self._wanted, [manifest for manifest, _ in opened])
      _all([pool.submit(receiver.fill, host, parts) for host, (_, parts) in enumerate(opened)])
      return version, receiver.blocks

  def _open_exactly(self, host: int, version: int, streams: "_Streams") -> _Opened:
    deadline = time.monotonic() + self._patience_s
    while (opened := self._open(host, {"exactly": version}, WAIT_S, streams)) is None:
      if time.monotonic() > deadline:
        raise self._missing(host, version)
      time.sleep(PAUSE_S)
    return opened

  def _open(self, host: int, which: dict[str, int], wait_s: float, streams: "_Streams") -> _Opened | None:
    """None where the host has nothing to send now."""
    address = self._membership.hosts[host]
    request = pb.FetchRequest(
      sampler=self._membership.sampler,
      incarnation=self._membership.incarnation,
      wait_s=wait_s,
      wanted=self._messages,
      **which,
    )
    stub = pb_grpc.WeightChannelStub(self._channels[host])
    call = stub.Fetch(request, timeout=wait_s + _FETCH_S, metadata=self._metadata)
    streams.add(call)

    def parts() -> Iterator[pb.WeightsPart]:
      with translated(address, "weights"):
        yield from call

    stream = parts()
    manifest = manifest_of(stream)
    return None if manifest is None else (manifest, stream)

  def _missing(self, host: int, version: int) -> UserError:
    return UserError(
      f"the learner's host at {self._membership.hosts[host]} had no weights of version {version} to send for "
      f"{self._patience_s:.0f} s; look at its output"
    )


class _Streams:
  """The calls of one attempt; when it ends, however it does, none goes on."""

  def __init__(self):
    self._lock = threading.Lock()
    self._calls: list[grpc.Call] = []
    self._closed = False

  def add(self, call: grpc.Call) -> None:
    with self._lock:
      self._calls.append(call)
      if self._closed:  # another host's fault ended the attempt just now
        call.cancel()

  def close(self) -> None:
    with self._lock:
      self._closed = True
      for call in self._calls:
        call.cancel()


def _all(tasks: Sequence[futures.Future]) -> list:
  """The results in order; raises the first fault at once, whoever has it."""
  for task in futures.as_completed(tasks):
    task.result()
  return [task.result() for task in tasks]
