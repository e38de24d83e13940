"""The queue between samplers and the learner: leases out, trajectories in, batches on. Thread-safe.

`ledger` says what states a group has, `admission` which rules keep the staleness cap, `liveness` who is lost.
"""

import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from estr_jax.rollout_queue import admission as rules
from estr_jax.rollout_queue.ledger import Ledger, Live
from estr_jax.rollout_queue.liveness import Roster
from estr_jax.structs import Mean, Prompt, Trajectory

# How long a blocked call sleeps before it looks for leases that ran out meanwhile.
_POLL_S = 0.2


class StaleIncarnation(Exception):
  """The learner restarted: work in flight and weights belong to its former life; join again."""


class NotReady(Exception):
  """The batch is not complete; says what is missing and how the samplers are."""


@dataclasses.dataclass(frozen=True)
class Lease:
  groups: list[list[Prompt]]
  version: int  # start these groups with weights of this version or a newer one
  finished: bool  # the run is over: go home


class Broker:
  """Times are in seconds of `clock`, ages in versions. Raises ValueError on settings under which no batch can form."""

  def __init__(
    self,
    prompts_at: Callable[[int], list[Prompt]],
    *,
    groups_per_batch: int,
    max_staleness: int,
    admission: Literal["wait", "drop"],
    capacity: int,
    last_version: int,
    lease_timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    """`prompts_at` is called under the broker's lock, so it need not be thread-safe; `capacity` bounds live groups.

    No group is leased that the updates up to `last_version` do not need, so samplers are idle at the end.
    """
    if admission not in ("wait", "drop"):
      raise ValueError(f"admission is {admission!r}, not 'wait' or 'drop'")
    if groups_per_batch < 1 or max_staleness < 0:
      raise ValueError(f"groups_per_batch {groups_per_batch} has to be >= 1, max_staleness {max_staleness} >= 0")
    if capacity < groups_per_batch:
      raise ValueError(f"capacity {capacity} is below groups_per_batch {groups_per_batch}: no batch could form")
    self.incarnation = uuid.uuid4().hex
    self.lease_timeout_s = lease_timeout_s
    self._groups_per_batch = groups_per_batch
    self._max_staleness = max_staleness
    self._admission = admission
    self._capacity = capacity
    self._last_version = last_version
    self._clock = clock
    self._changed = threading.Condition()
    self._roster = Roster(lease_timeout_s, clock)
    self._version = 0
    self._batch_taken = False  # at the present version
    self._finished = False
    self._told: set[str] = set()  # samplers that know that the run is over
    self._ledger = Ledger(prompts_at)
    self._counts = {"accepted": 0, "dropped": 0, "duplicate": 0, "rejected": 0, "expired": 0}
    self._generated = Mean(0, 0)
    self._accepted = Mean(0, 0)

  def join(self, sampler: str, pid: int) -> None:
    """A sampler process starts; the leases of an earlier process under its name are given back."""
    with self._changed:
      self._roster.join(sampler, pid)
      self._told.discard(sampler)
      self._give_back(lambda group, holder: holder == sampler)

  def lease(self, sampler: str, max_groups: int, wait_s: float, *, holding: Collection[int] | None = None) -> Lease:
    """Up to `max_groups` groups in stream order, given-back ones first; none if nothing is free within `wait_s`.

    `holding`, where given, names the groups that the sampler knows to hold. Its other leases were lost with an answer
    that never reached it, and are given back; of its own that ran out meanwhile it takes back those that nobody else
    has got, rather than be given them a second time.
    """
    if max_groups < 1:
      raise ValueError(f"max_groups is {max_groups}, has to be >= 1")
    deadline = self._clock() + wait_s
    with self._changed:
      if holding is not None:
        self._give_back(lambda group, holder: holder == sampler and group not in holding)
        self._ledger.hold_again(sampler, holding)
      while True:
        self._roster.progress(sampler)
        if self._finished:
          self._told.add(sampler)
          self._changed.notify_all()
          return Lease([], self._version, finished=True)
        self._expire()
        groups = self._ledger.lease(sampler, max_groups, self._version, self._may_grow)
        if groups or self._clock() >= deadline:
          return Lease(groups, self._version, finished=False)
        self._sleep(deadline)

  def put(self, sampler: str, trajectories: Sequence[Trajectory]) -> str:
    """Hands in one finished group, whoever leased it; safe to repeat.

    Returns: "accepted"; "duplicate" (the group is here or done already); "from_the_future" (a token's version is above
      the learner's: the group is leased again); "over_age" (admission "drop": older than max_staleness).
    Raises: ValueError, naming the field, on a malformed group, and on a token older than the group's first lease where
      the cap is kept by waiting.
    """
    if not trajectories:
      raise ValueError("trajectories: the group is empty")
    group = trajectories[0].group
    with self._changed:
      self._roster.progress(sampler)
      if self._ledger.done(group):
        self._counts["duplicate"] += 1
        return "duplicate"
      if group not in self._ledger.live:
        raise ValueError(f"group {group} was never leased")
      live = self._ledger.live[group]
      if live.trajectories is not None:
        self._counts["duplicate"] += 1
        return "duplicate"
      rules.check_group(trajectories, [prompt.id for prompt in live.prompts])
      receipt = self._judge(live, trajectories)
      self._generated = self._generated.merge(_lengths(trajectories))
      if receipt == "from_the_future":
        self._counts["rejected"] += 1
        self._ledger.give_back(lambda other, holder: other == group and holder == sampler)
      elif receipt == "over_age":
        self._counts["dropped"] += 1
        self._ledger.remove(group)
      else:
        self._counts["accepted"] += 1
        self._ledger.queue(group, sorted(trajectories, key=lambda t: t.prompt_id))
      self._changed.notify_all()
      return receipt

  def announce(self, version: int) -> None:
    """The learner has weights of `version`: call it before they can reach a sampler. A lower version changes nothing.

    Raises ValueError where the cap is kept by waiting and a batch was left out, since the cap could not hold then.
    """
    with self._changed:
      if version <= self._version:
        return
      skipped = version > self._version + 1 or not self._batch_taken
      if self._admission == "wait" and skipped and self._ledger.live:
        raise ValueError(f"version {version} without the batch of version {version - 1}: take or restore first")
      self._version, self._batch_taken = version, False
      self._changed.notify_all()

  def take(self, version: int, wait_s: float) -> list[list[Trajectory]]:
    """The batch that turns `version` into `version + 1`: groups_per_batch groups, by group, each by prompt id.

    Every group counts as trained from here on: checkpoint `cursor()` together with the update.
    Raises: NotReady after `wait_s`; ValueError on a version below an announced one.
    """
    deadline = self._clock() + wait_s
    self.announce(version)
    with self._changed:
      if version < self._version:
        raise ValueError(f"version {version} is below {self._version}, which the learner announced")
      self._batch_taken = False
      self._drop_over_age()
      while True:
        self._expire()
        batch = self._select()
        if batch is not None:
          taken = [self._ledger.remove(group).queued for group in batch]
          self._batch_taken = True
          for trajectories in taken:
            self._accepted = self._accepted.merge(_lengths(trajectories))
          self._changed.notify_all()
          return taken
        if self._clock() >= deadline:
          raise NotReady(self._missing(wait_s))
        self._sleep(deadline)

  def hear(self, sampler: str, version: int, waited_s: float) -> None:
    """A sign of life: the version that the sampler samples with, and how long it has waited for us since its start."""
    with self._changed:
      self._roster.hear(sampler, version, waited_s)

  def beat(self, sampler: str, state: str, seconds_in_state: float) -> None:
    """What the sampler does. Raises ValueError on an unknown state."""
    with self._changed:
      self._roster.beat(sampler, state, seconds_in_state)
      self._expire()

  def cursor(self) -> dict:
    """JSON: where the prompt stream stands. Live groups are unfinished: after a restart they are leased anew."""
    with self._changed:
      return self._ledger.cursor()

  def restore(self, cursor: dict, version: int) -> None:
    """Continues from a `cursor()` saved with the weights of `version`. Raises ValueError once a group was leased."""
    with self._changed:
      self._ledger.restore(cursor)
      self._version, self._batch_taken = version, False
      self._changed.notify_all()

  def finish(self) -> None:
    """The run is over: every `lease` says so from now on."""
    with self._changed:
      self._finished = True
      self._changed.notify_all()

  def farewell(self, wait_s: float) -> list[str]:
    """After `finish`: waits until every living sampler has been told; the names of those that have not."""
    deadline = self._clock() + wait_s
    with self._changed:
      while True:
        waiting = [n for n in self._roster.names() if n not in self._told and not self._roster.lost(n)]
        if not waiting or self._clock() >= deadline:
          return waiting
        self._sleep(deadline)

  def stats(self) -> dict:
    """Counts since the start, of groups; lengths are means of policy tokens a trajectory.

    `generated_length` covers every group that arrived once, `accepted_length` those that were taken: their difference
    is the length bias of admission.
    """
    with self._changed:
      self._expire()
      live = self._ledger.live.values()
      return {
        "version": self._version,
        "queued": len(self._ledger.arrived),
        "leased": sum(group.holder is not None for group in live),
        "returned": sum(group.returned for group in live),
        **self._counts,
        "generated_length": self._generated,
        "accepted_length": self._accepted,
        "samplers": self._roster.states(),
        "sampler_waited_s": self._roster.waited_s(),
        "acknowledged": self._roster.acknowledged(),
      }

  def _may_grow(self, live: int) -> bool:
    paced = self._admission == "drop" or rules.may_lease(
      live,
      batch_taken=self._batch_taken,
      groups_per_batch=self._groups_per_batch,
      max_staleness=self._max_staleness,
    )
    needed = (self._last_version - self._version - self._batch_taken) * self._groups_per_batch
    return paced and live < min(self._capacity, needed)

  def _judge(self, live: Live, trajectories: Sequence[Trajectory]) -> str:
    if rules.newest_version(trajectories) > self._version:
      return "from_the_future"
    oldest = rules.oldest_version(trajectories)
    if self._admission == "drop":
      return "over_age" if self._version - oldest > self._max_staleness else "accepted"
    if oldest < live.leased_at:
      raise ValueError(f"version: a token of {oldest} in a group leased for version {live.leased_at} or newer")
    return "accepted"

  def _select(self) -> list[int] | None:
    size, arrived = self._groups_per_batch, self._ledger.arrived
    if self._admission == "drop":
      return sorted(arrived[:size]) if len(arrived) >= size else None
    leased_at = {group: live.leased_at for group, live in self._ledger.live.items()}
    return rules.select_batch(
      leased_at, arrived, version=self._version, groups_per_batch=size, max_staleness=self._max_staleness
    )

  def _drop_over_age(self) -> None:
    if self._admission == "wait":
      return
    for group in list(self._ledger.arrived):
      if self._version - rules.oldest_version(self._ledger.live[group].queued) > self._max_staleness:
        self._ledger.remove(group)
        self._counts["dropped"] += 1
    self._changed.notify_all()

  def _give_back(self, which: Callable[[int, str], bool]) -> int:
    returned = self._ledger.give_back(which)
    if returned:
      self._changed.notify_all()
    return returned

  def _expire(self) -> None:
    lost = {name for name in self._roster.names() if self._roster.lost(name)}
    self._counts["expired"] += self._give_back(lambda group, holder: holder in lost)

  def _missing(self, wait_s: float) -> str:
    outstanding = [(g, live.holder or "nobody") for g, live in self._ledger.live.items() if live.trajectories is None]
    groups = ", ".join(f"{group} at {holder}" for group, holder in sorted(outstanding)[:8])
    return (
      f"batch of version {self._version} after {wait_s:.0f} s: {len(self._ledger.arrived)} groups here, "
      f"{self._groups_per_batch} needed; outstanding: {groups or 'none'}; samplers: {self._roster.describe()}"
    )

  def _sleep(self, deadline: float) -> None:
    self._changed.wait(max(0.0, min(_POLL_S, deadline - self._clock())))


def _lengths(trajectories: Sequence[Trajectory]) -> Mean:
  return Mean(rules.policy_tokens(trajectories), len(trajectories))
