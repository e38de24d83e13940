"""The sampler's loop: lease prompts, decode, put finished groups, and take new weights as they come."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from estr_jax import hosts
from estr_jax.errors import UserError
from estr_jax.model.config import DecoderConfig
from estr_jax.model.decoder import abstract_params
from estr_jax.model.sharding import shardings
from estr_jax.rollout_queue.broker import Lease, StaleIncarnation
from estr_jax.sampler.engine import Engine
from estr_jax.structs import NO_VERSION, Params, Prompt, Trajectory, Weights
from estr_jax.weights.fetch import WeightSource
from estr_jax.weights.placement import placed
from estr_jax.weights.store import VersionGone
from estr_jax.wire.client import Client
from estr_jax.wire.weight_host import Membership

_FETCH_WAIT_S = 10.0  # of one call for newer weights
_IDLE_WAIT_S = 1.0  # of one call for prompts while nothing else is to be done
_PAUSE_S = 0.002  # before looking again for weights that are on their way
_GOODBYE_S = 5.0  # for the weights' thread to end

_WAITS = ("fetching", "waiting")  # states in which the sampler waits for the learner


class Status:
  """What the sampler is doing, as its heartbeat reports it. Written by the loop, read by the beats' thread."""

  def __init__(self):
    self._lock = threading.Lock()
    self._state, self._since = "joining", time.monotonic()
    self.waited_s = 0.0  # for prompts and weights, since the start

  def set(self, state: str) -> None:
    """Progress: it starts the clock of the state anew, unless the sampler goes on waiting as before."""
    with self._lock:
      if state == self._state and state in _WAITS:
        return
      now = time.monotonic()
      if self._state in _WAITS:
        self.waited_s += now - self._since
      self._state, self._since = state, now

  def waiting_s(self) -> float:
    """Seconds since the present wait began; 0 outside waits."""
    state, seconds = self.report()
    return seconds if state in _WAITS else 0.0

  def report(self) -> tuple[str, float]:
    with self._lock:
      return self._state, time.monotonic() - self._since


class _State(NamedTuple):
  """What a process of a group tells the others of its fetching."""

  named: int  # by the learner, to process 0
  arrived: int  # all of its regions are on the devices
  gone: int  # the learner holds it no more
  fault: Exception | None


class Fetcher:
  """Fetches newer weights in a thread, so that decoding goes on meanwhile.

  In a group each process fetches what its own devices need. The learner names a version to process 0, the others ask
  for exactly that one, and it counts when all of them have it; not before does process 0 ask for the next.
  """

  def __init__(self, source: WeightSource, abstract: Params):
    self._source, self._abstract = source, abstract
    self._named = self._gone = self._tried = NO_VERSION
    self._arrived: Weights | None = None
    self._newest: Weights | None = None
    self._fault: Exception | None = None
    self._stopped, self._agreed, self._asked = threading.Event(), threading.Event(), threading.Event()
    self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
    self._thread.start()

  def newest(self) -> Weights | None:
    """None before the first ones arrived. Raises what the thread died of, on every process of the group."""
    arrived = self._arrived
    version = NO_VERSION if arrived is None else arrived.version
    states = hosts.gather(_State(self._named, version, self._gone, self._fault))
    for state in states:
      if state.fault is not None:
        raise state.fault
    if any(state.gone == states[0].arrived != NO_VERSION for state in states):
      self._arrived = None  # some process came too late for it
      self._agreed.set()
    elif version != NO_VERSION and all(state.arrived == version for state in states):
      self._newest, self._arrived = arrived, None
      self._agreed.set()
    elif not hosts.leads() and states[0].named not in (self._named, version):
      self._named = states[0].named
      self._asked.set()
    return self._newest

  def stop(self) -> None:
    """The thread ends, and its present call with it."""
    self._stopped.set()
    self._agreed.set()
    self._asked.set()
    self._source.close()

  def join(self, seconds: float) -> None:
    """Waits for the thread: an interpreter must not end while it moves arrays."""
    self._thread.join(seconds)

  def _run(self) -> None:
    try:
      while not self._stopped.is_set():
        if hosts.leads():
          self._fetch_newer()
        else:
          self._fetch_named()
    except Exception as fault:  # handed to the loop's thread by `newest`
      self._fault = fault

  def _fetch_newer(self) -> None:
    self._agreed.clear()
    have = NO_VERSION if self._newest is None else self._newest.version
    found = self._source.fetch(have, _FETCH_WAIT_S, self._name)
    if found is None:
      return
    version, blocks = found
    self._arrived = Weights(version, placed(self._abstract, blocks))
    self._agreed.wait()

  def _name(self, version: int) -> None:
    self._named = version

  def _fetch_named(self) -> None:
    self._asked.wait()
    self._asked.clear()
    version = self._named
    if version in (NO_VERSION, self._tried):  # or it was asked for while it was already on its way
      return
    self._tried = version
    try:
      self._arrived = Weights(version, placed(self._abstract, self._source.fetch_exactly(version)))
    except VersionGone:
      self._gone = version


@dataclasses.dataclass
class _Work:
  """Leased and not handed in."""

  waiting: collections.deque[Prompt]  # for a slot
  sizes: dict[int, int]  # group -> trajectories it will have
  done: dict[int, list[Trajectory]]  # group -> those that it has
  needs: int = NO_VERSION  # the version that the newest lease asks for

  @classmethod
  def nothing(cls) -> "_Work":
    return cls(collections.deque(), {}, {})


class _Learner:
  """What every process of a group hears of the learner: the first asks, and tells the others what it was told."""

  def __init__(self, client: Client | None):
    """`client` is that of the first process."""
    self._client = client

  def join(self) -> Membership:
    hosts.lead(lambda: self._asked().join())
    return hosts.lead(lambda: self._asked().membership())

  def lease(self, max_groups: int, wait_s: float) -> Lease:
    return hosts.lead(lambda: self._asked().lease(max_groups, wait_s))

  def put(self, trajectories: list[Trajectory]) -> None:
    hosts.lead(lambda: self._asked().put(trajectories))

  def holds(self, version: int, waited_s: float) -> None:
    if self._client is not None:
      self._client.holds(version, waited_s)

  def _asked(self) -> Client:
    if self._client is None:
      raise RuntimeError("the sampler's first process has no client")
    return self._client


def sampler_loop(
  engine: Engine,
  client: Client | None,
  source: Callable[[Membership], WeightSource],
  abstract: Params,
  *,
  group_size: int,
  deadline_s: float,
) -> None:
  """Samples until the learner says that the run is over.

  A learner that restarts ends the work in hand: it may have gone back to older weights, from which what was sampled
  here would come from the future.

  Args:
    engine: empty.
    client: not joined yet; closed at the end. In a group of processes the first has it, and tells the others what it
      is told; their engines make the same calls.
    source: of the regions that this process wants.
    abstract: the engine's parameters, as `abstract_weights` makes them.
    group_size: prompts of a group, by which the wish for prompts is counted.
    deadline_s: the longest wait for weights that the learner must have.

  Raises:
    UserError: the learner does not answer, or refuses this sampler.
  """
  status, learner = Status(), _Learner(client)
  fetcher = None
  try:
    while True:
      membership = learner.join()
      if fetcher is None and client is not None:
        client.start_beats(status.report)
      fetcher = Fetcher(source(membership), abstract)
      try:
        _sample(engine, learner, fetcher, status, group_size, deadline_s)
        return
      except StaleIncarnation:
        engine.drop_all()
        status.set("joining")
      finally:
        fetcher.stop()
        fetcher.join(_GOODBYE_S)
  finally:
    if client is not None:
      client.close()


def _sample(
  engine: Engine, learner: _Learner, fetcher: Fetcher, status: Status, group_size: int, deadline_s: float
) -> None:
  weights = _wait_for_weights(0, fetcher, status, deadline_s)
  work = _Work.nothing()
  while True:
    weights = fetcher.newest() or weights
    engine.set_weights(weights)
    learner.holds(weights.version, status.waited_s)
    idle = engine.free == engine.slots
    if idle and weights.version < work.needs:
      weights = _wait_for_weights(work.needs, fetcher, status, deadline_s)
      engine.set_weights(weights)
    room = engine.free - len(work.waiting)
    if room > 0 and weights.version >= work.needs:
      if idle and not work.waiting:
        status.set("waiting")
      lease = learner.lease(-(-room // group_size), _IDLE_WAIT_S if idle and not work.waiting else 0.0)
      if lease.finished:
        return
      for prompts in lease.groups:
        work.needs = max(work.needs, lease.version)
        work.sizes[prompts[0].group] = len(prompts)
        work.waiting.extend(prompts)
    if weights.version >= work.needs:
      engine.admit([work.waiting.popleft() for _ in range(min(engine.free, len(work.waiting)))])
    if not engine.can_move():
      continue
    status.set("decoding" if engine.sampled_tokens else "compiling")
    for trajectory in engine.advance():
      group = trajectory.group
      work.done.setdefault(group, []).append(trajectory)
      if len(work.done[group]) == work.sizes[group]:
        learner.put(work.done[group])
        del work.sizes[group], work.done[group]


def _wait_for_weights(version: int, fetcher: Fetcher, status: Status, deadline_s: float) -> Weights:
  """Weights of `version` or newer; the learner has them or is about to."""
  status.set("fetching")
  while (weights := fetcher.newest()) is None or weights.version < version:
    if hosts.lead(status.waiting_s) > deadline_s:
      raise UserError(
        f"no weights of version {version} from the learner within queue.deadline_s = {deadline_s:.0f} s; "
        "look at its output"
      )
    time.sleep(_PAUSE_S)
  return weights


def abstract_weights(model: DecoderConfig, dtype: str, mesh: Mesh) -> Params:
  """What an engine on the mesh takes: shape, dtype and sharding of every parameter."""
  params = abstract_params(model)
  return jax.tree.map(
    lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=where), params, shardings(params, mesh)
  )
