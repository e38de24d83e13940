"""The fetching of weights over hosts that are plain objects in memory."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from weights_cases import PARAMS, assert_blocks_are, by_host, wants

from estr_jax.errors import UserError
from estr_jax.structs import NO_VERSION
from estr_jax.waiting import NoAnswer
from estr_jax.weights.fetch import Stream, WeightSource
from estr_jax.weights.parts import Part
from estr_jax.weights.store import Snapshot, VersionGone, WeightStore


class MemoryHost:
  """A `weights.fetch.Host` around a store; it notes what it is asked, and what is cancelled."""

  def __init__(self, number: int, fault: Callable[[], None] = lambda: None):
    self.address = f"host-{number}"
    self.store = WeightStore(leads=number == 0)
    self.fault = fault  # called before a stream begins
    self.asked: list[tuple[str, int]] = []
    self.opened = self.cancelled = 0
    self.closed = False

  def newer(self, than: int, wait_s: float) -> Stream:
    self.asked.append(("newer", than))
    return self._stream(lambda: self.store.newer(than, wait_s))

  def exactly(self, version: int, wait_s: float) -> Stream:
    self.asked.append(("exactly", version))
    return self._stream(lambda: self.store.exactly(version, wait_s))

  def close(self) -> None:
    self.closed = True

  def _stream(self, ask: Callable[[], Snapshot | None]) -> Stream:
    self.opened += 1

    def parts() -> Iterator[Part]:
      self.fault()
      snapshot = ask()
      if snapshot is not None:
        yield from snapshot.stream(wants(PARAMS))

    return Stream(parts(), self._cancel)

  def _cancel(self) -> None:
    self.cancelled += 1


def two_hosts() -> list[MemoryHost]:
  return [MemoryHost(0), MemoryHost(1)]


def publish(hosts: list[MemoryHost], version: int) -> None:
  for host, held in zip(hosts, by_host()):
    host.store.publish(version, held)


def source(hosts: list[MemoryHost], patience_s: float = 5.0) -> WeightSource:
  return WeightSource(hosts, wants(PARAMS), patience_s=patience_s)


def test_blocks_come_from_every_host_without_a_network():
  """Fails if the fetching needs more of a host than the protocol, or leaves a stream open."""
  hosts = two_hosts()
  assert source(hosts).fetch(NO_VERSION, 0) is None
  publish(hosts, 7)
  told: list[int] = []
  version, blocks = source(hosts).fetch(NO_VERSION, 5, told.append)
  assert version == 7 and told == [7]
  assert_blocks_are(blocks, PARAMS)
  assert_blocks_are(source(hosts).fetch_exactly(7), PARAMS)
  assert [host.opened for host in hosts] == [host.cancelled for host in hosts]


def test_the_first_host_names_the_version_and_the_others_are_asked_for_that_one():
  """Fails if another host is asked for its newest."""
  hosts = two_hosts()
  publish(hosts, 3)
  source(hosts).fetch(2, 5)
  source(hosts).fetch_exactly(3)
  assert hosts[0].asked == [("newer", 2), ("exactly", 3)]
  assert hosts[1].asked == [("exactly", 3), ("exactly", 3)]


def test_a_version_that_is_gone_is_said_or_started_over():
  """Fails if the newest is not taken where any will do, or another one is where one was asked for."""
  hosts = two_hosts()
  publish(hosts, 1)

  def two_updates(version: int) -> None:
    if version == 1:
      for later in (2, 3):
        publish(hosts, later)

  assert source(hosts).fetch(NO_VERSION, 5, two_updates)[0] == 3
  with pytest.raises(VersionGone, match="version 1 of the weights is gone"):
    source(hosts).fetch_exactly(1)


def test_the_first_fault_cancels_the_streams_that_still_wait():
  """Fails if the fetch waits for a host that has yet to begin while another has failed for good."""
  cancelled, waiting = threading.Event(), threading.Event()

  class Waiting(MemoryHost):
    def _cancel(self) -> None:
      super()._cancel()
      cancelled.set()

  def wait() -> None:
    waiting.set()
    assert cancelled.wait(20)

  def fail() -> None:
    waiting.wait(20)
    raise RuntimeError("broken")

  hosts = [MemoryHost(0), MemoryHost(1, fail), Waiting(2, wait)]
  publish(hosts, 1)
  hosts[2].store.publish(1, [])
  start = time.monotonic()
  with pytest.raises(RuntimeError, match="broken"):
    source(hosts).fetch(NO_VERSION, 5)
  assert time.monotonic() - start < 10
  assert [host.cancelled for host in hosts] == [1, 1, 1]


def test_a_host_that_is_about_to_start_is_given_patience():
  """Fails if the first silence ends the fetch, or none does."""
  silences = iter(range(2))

  def start_late() -> None:
    if next(silences, None) is not None:
      raise NoAnswer("host-1")

  hosts = [MemoryHost(0), MemoryHost(1, start_late)]
  publish(hosts, 1)
  assert source(hosts).fetch(NO_VERSION, 5)[0] == 1

  def silent() -> None:
    raise NoAnswer("host-1")

  hosts[1].fault = silent
  with pytest.raises(UserError, match=r"no answer from the learner at host-1 for \d+ s while waiting for weights"):
    source(hosts, patience_s=0.3).fetch(NO_VERSION, 5)


def test_close_ends_every_host():
  hosts = two_hosts()
  source(hosts).close()
  assert all(host.closed for host in hosts)
