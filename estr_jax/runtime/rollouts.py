"""Where the learner's batches come from: one interface, a local source and a remote one."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import jax

from estr_jax import hosts
from estr_jax.errors import UserError
from estr_jax.lab.staleness import OnPolicy, Simulated, check_realised
from estr_jax.rollout_queue.broker import Broker, NotReady
from estr_jax.sampler.engine import Engine
from estr_jax.sampler.rollout import rollout
from estr_jax.structs import Mean, Prompt, Trajectory, Weights
from estr_jax.weights.store import WeightStore, pieces_of

Groups = list[list[Trajectory]]

_LOOK_S = 1.0  # how often a wait for a batch shows what it waits for


class Rollouts(Protocol):
  """What the learner loop asks of a source of trajectories."""

  def take(self, version: int) -> Groups:
    """The groups of the update that turns `version` into version + 1; blocks."""

  def publish(self, weights: Weights) -> None:
    """Hands out new weights. The arrays are the receiver's: nobody donates them."""

  def cursor(self) -> dict:
    """JSON: the place in the prompt stream from which a resumed run goes on, all groups taken so far being trained."""

  def metrics(self) -> dict[str, Mean | float]:
    """What the source knows of itself, by names of the glossary."""

  def finish(self) -> None:
    """No further batch will be taken."""


class Rate:
  """How fast a count that only grows is growing."""

  def __init__(self):
    self._count, self._at = 0.0, time.monotonic()

  def since_last(self, count: float) -> float:
    """Per second since the last call, or since the start."""
    now = time.monotonic()
    rate = (count - self._count) / max(now - self._at, 1e-9)
    self._count, self._at = count, now
    return rate


class LocalRollouts:
  """Samples each batch in this process, when it is asked for: modes sync and simulated."""

  def __init__(
    self,
    engine: Engine,
    prompts_at: Callable[[int], list[Prompt]],
    schedule: OnPolicy | Simulated,
    *,
    groups_per_batch: int,
    cursor: dict | None,
  ):
    self._engine, self._prompts_at, self._schedule = engine, prompts_at, schedule
    self._groups_per_batch = groups_per_batch
    self._next_group = 0 if cursor is None else cursor["next_group"]
    self._sampled = Rate()

  def take(self, version: int) -> Groups:
    first = self._next_group
    self._next_group += self._groups_per_batch
    groups = [self._prompts_at(group) for group in range(first, self._next_group)]
    segments = self._schedule.segments(version)
    trajectories = rollout(
      self._engine,
      [prompt for group in groups for prompt in group],
      lambda segment: segments[segment],
      segments=len(segments),
      segment_tokens=self._schedule.segment_tokens,
    )
    check_realised(trajectories, [weights.version for weights in segments], self._schedule.segment_tokens)
    size = len(groups[0])
    return [trajectories[i : i + size] for i in range(0, len(trajectories), size)]

  def publish(self, weights: Weights) -> None:
    self._schedule.publish(weights)

  def cursor(self) -> dict:
    return {"next_group": self._next_group, "unfinished": []}

  def metrics(self) -> dict[str, Mean | float]:
    return {"throughput/sampled_tokens_per_s": self._sampled.since_last(self._engine.sampled_tokens)}

  def finish(self) -> None:
    pass


class RemoteRollouts:
  """Takes what sampler processes put into the queue: mode async.

  In a group of processes the first has the broker and hands every batch on; each serves its own part of the weights.
  """

  def __init__(
    self,
    broker: Broker | None,
    store: WeightStore,
    *,
    weights_dtype: str,
    deadline_s: float,
    on_wait: Callable[[Broker], None],
  ):
    """
    Args:
      broker: None where another process has it.
      store: of this process's part of the weights.
      weights_dtype: of the weights on the wire.
      deadline_s: the longest wait for a batch.
      on_wait: called about once a second while a batch is awaited.
    """
    self._broker, self._store = broker, store
    self._deadline_s, self._on_wait = deadline_s, on_wait
    self._cast = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf.astype(weights_dtype), params))
    self._sampled = Rate()
    # As of `Broker.stats`.
    self._last: dict[str, Any] = {
      "sampler_waited_s": 0.0,
      "accepted_length": Mean(0, 0),
      "generated_length": Mean(0, 0),
    }

  def take(self, version: int) -> Groups:
    deadline = time.monotonic() + self._deadline_s
    # One look at a time, so that the other processes of a group never wait long for what this one has to say.
    while (groups := hosts.lead(lambda: self._look(version, deadline))) is None:
      pass
    return groups

  def _look(self, version: int, deadline: float) -> Groups | None:
    if self._broker is None:
      raise RuntimeError("the learner's first process has no broker")
    try:
      return self._broker.take(version, _LOOK_S)
    except NotReady as reason:
      self._on_wait(self._broker)
      if time.monotonic() > deadline:
        raise UserError(
          f"no batch within queue.deadline_s = {self._deadline_s:.0f} s: {reason}; look at the samplers' logs"
        ) from reason
      return None

  def publish(self, weights: Weights) -> None:
    params = self._cast(weights.params)
    if self._broker is not None:
      # Before the store: a sampler that already samples with these weights must not come from the future.
      self._broker.announce(weights.version)
    self._store.publish(weights.version, pieces_of(params))

  def cursor(self) -> dict:
    return {} if self._broker is None else self._broker.cursor()

  def metrics(self) -> dict[str, Mean | float]:
    if self._broker is None:
      return {}
    stats = self._broker.stats()
    last, self._last = self._last, {name: stats[name] for name in self._last}
    accepted, generated = (
      Mean(stats[name].total - last[name].total, stats[name].count - last[name].count)
      for name in ("accepted_length", "generated_length")
    )
    return {
      "queue/queued": stats["queued"],
      "queue/leased": stats["leased"],
      "queue/dropped": stats["dropped"],
      "queue/accepted_length": accepted,
      "queue/generated_length": generated,
      "time/sampler_wait_s": stats["sampler_waited_s"] - last["sampler_waited_s"],
      "throughput/sampled_tokens_per_s": self._sampled.since_last(stats["generated_length"].total),
    }

  def finish(self) -> None:
    if self._broker is not None:
      self._broker.finish()
