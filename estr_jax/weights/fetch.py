"""The sampler's side of the weights: from every learner host the blocks that this process needs, in parallel."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import NamedTuple, Protocol

from estr_jax.errors import UserError
from estr_jax.waiting import PAUSE_S, WAIT_S, patiently, until
from estr_jax.weights.parts import Manifest, Part
from estr_jax.weights.receive import Blocks, Receiver, manifest_of
from estr_jax.weights.regions import Region
from estr_jax.weights.store import VersionGone


class Stream(NamedTuple):
  """What a host sends."""

  parts: Iterator[Part]  # the manifest, then its chunks, block by block; none where there is nothing to send yet
  cancel: Callable[[], object]  # ends the reading of `parts`; called from another thread, and after the end too


class Host(Protocol):
  """A host of the learner, asked for the regions that this process wants.

  A call returns at once; whoever reads the stream waits, and gets its faults: NoAnswer where the host does not answer,
  VersionGone where it holds the version no more.
  """

  @property
  def address(self) -> str:
    """By which a person finds the host."""

  def newer(self, than: int, wait_s: float) -> Stream:
    """The newest weights where their version is above `than`; nothing after `wait_s` seconds."""

  def exactly(self, version: int, wait_s: float) -> Stream:
    """The weights of `version`; nothing where they are still to come after `wait_s` seconds."""

  def close(self) -> None:
    """Ends every stream."""


class _Opened(NamedTuple):
  """A stream that has something to send."""

  manifest: Manifest
  chunks: Iterator[Part]


def _unheard(version: int) -> None:
  """For whoever need not hear which version was named."""


class WeightSource:
  """Fetches the wanted regions of one process. One call at a time.

  Every call raises UserError when a host gave no answer for `patience_s` seconds, ValueError, naming the parameter,
  where the blocks are damaged or do not cover the regions exactly once, and what else a host's stream raises, such as
  StaleIncarnation once the learner restarted.
  """

  def __init__(self, hosts: Sequence[Host], wanted: Sequence[Region], *, patience_s: float):
    """`hosts` are all of the learner's, each asked for `wanted`; the first names the versions."""
    self._hosts = tuple(hosts)
    self._wanted = tuple(wanted)
    self._patience_s = patience_s

  def fetch(
    self, have_version: int, wait_s: float, named: Callable[[int], None] = _unheard
  ) -> tuple[int, Blocks] | None:
    """The newest weights above `have_version` (NO_VERSION: any): (version, blocks); None after `wait_s` seconds.

    `named` is called with the version as soon as the learner has named it, before its blocks move, and again with
    another one where the fetch has to start over; the other processes of a sampler then ask for exactly that one.
    """

    def ask(seconds: float) -> tuple[int, Blocks] | None:
      try:
        return self._patiently(lambda: self._attempt(lambda host: host.newer(have_version, seconds), named))
      except VersionGone:
        return None  # the learner moved on meanwhile: start over with its newest

    return until(wait_s, ask, lambda answer: answer is not None)

  def fetch_exactly(self, version: int) -> Blocks:
    """The blocks of a version that the learner has named. Raises VersionGone where a host holds it no more."""

    def ask(seconds: float) -> tuple[int, Blocks] | None:
      return self._patiently(lambda: self._attempt(lambda host: host.exactly(version, seconds), _unheard))

    found = until(self._patience_s, ask, lambda answer: answer is not None)
    if found is None:
      raise self._missing(self._hosts[0], version)
    return found[1]

  def close(self) -> None:
    """Ends the present call."""
    for host in self._hosts:
      host.close()

  def _patiently(self, attempt: Callable[[], tuple[int, Blocks] | None]) -> tuple[int, Blocks] | None:
    return patiently(attempt, "weights", self._patience_s)

  def _attempt(self, ask: Callable[[Host], Stream], named: Callable[[int], None]) -> tuple[int, Blocks] | None:
    """`ask` is put to the first host; None where that has nothing to send now."""
    # The streams end before the pool waits for its threads, which read them.
    with futures.ThreadPoolExecutor(len(self._hosts), "weights") as pool, contextlib.closing(_Streams()) as streams:
      first = streams.open(ask(self._hosts[0]))
      if first is None:
        return None
      version = first.manifest.version
      named(version)
      others = [pool.submit(self._open_exactly, host, version, streams) for host in self._hosts[1:]]
      opened = [first, *_all(others)]
      receiver = Receiver(self._wanted, [manifest for manifest, _ in opened])
      _all([pool.submit(receiver.fill, host, chunks) for host, (_, chunks) in enumerate(opened)])
      return version, receiver.blocks

  def _open_exactly(self, host: Host, version: int, streams: "_Streams") -> _Opened:
    deadline = time.monotonic() + self._patience_s
    while (opened := streams.open(host.exactly(version, WAIT_S))) is None:
      if time.monotonic() > deadline:
        raise self._missing(host, version)
      time.sleep(PAUSE_S)
    return opened

  def _missing(self, host: Host, version: int) -> UserError:
    return UserError(
      f"the learner's host at {host.address} had no weights of version {version} to send for "
      f"{self._patience_s:.0f} s; look at its output"
    )


class _Streams:
  """The streams of one attempt; when it ends, however it does, none goes on."""

  def __init__(self):
    self._lock = threading.Lock()
    self._all: list[Stream] = []
    self._closed = False

  def open(self, stream: Stream) -> _Opened | None:
    """Waits for its beginning; None where the host has nothing to send now."""
    with self._lock:
      self._all.append(stream)
      if self._closed:  # another host's fault ended the attempt just now
        stream.cancel()
    manifest = manifest_of(stream.parts)
    return None if manifest is None else _Opened(manifest, stream.parts)

  def close(self) -> None:
    with self._lock:
      self._closed = True
      for stream in self._all:
        stream.cancel()


def _all(tasks: Sequence[futures.Future]) -> list:
  """The results in order; raises the first fault at once, whoever has it."""
  for task in futures.as_completed(tasks):
    task.result()
  return [task.result() for task in tasks]
