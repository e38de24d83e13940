"""The groups of the prompt stream and where each stands. No lock of its own: the broker holds one.

A group is fresh (never leased in this incarnation), leased, returned (its lease was given back), queued (its
trajectories are here), or done (taken, or dropped over age). Leased, returned and queued groups are live.
"""

import dataclasses
from collections.abc import Callable, Collection

from estr_jax.structs import Prompt, Trajectory


@dataclasses.dataclass
class Live:
  prompts: list[Prompt]
  leased_at: int  # the learner's version at the first lease; a later lease keeps it
  holder: str | None  # the sampler, while leased
  trajectories: list[Trajectory] | None = None  # once queued

  @property
  def returned(self) -> bool:
    return self.holder is None and self.trajectories is None

  @property
  def queued(self) -> list[Trajectory]:
    """The trajectories. Raises RuntimeError while they are not here."""
    if self.trajectories is None:
      raise RuntimeError(f"group {self.prompts[0].group} is not queued")
    return self.trajectories


class Ledger:
  """Keeps every group in exactly one place."""

  def __init__(self, prompts_at: Callable[[int], list[Prompt]]):
    self._prompts_at = prompts_at
    self._next_group = 0
    self._restored: list[int] = []  # fresh groups below next_group
    self.live: dict[int, Live] = {}
    self.arrived: list[int] = []  # queued groups in order of arrival

  def lease(self, sampler: str, max_groups: int, version: int, may_grow: Callable[[int], bool]) -> list[list[Prompt]]:
    """Returned groups first, then fresh ones in stream order while `may_grow(number of live groups)`."""
    granted = []
    # Returned groups are live already, so no bound applies: refusing one could leave the learner waiting for it.
    for group in sorted(g for g, live in self.live.items() if live.returned)[:max_groups]:
      self.live[group].holder = sampler
      granted.append(self.live[group].prompts)
    while len(granted) < max_groups and may_grow(len(self.live)):
      group = self._restored[0] if self._restored else self._next_group
      prompts = list(self._prompts_at(group))  # may raise: nothing has moved yet
      if self._restored:
        self._restored.pop(0)
      else:
        self._next_group += 1
      self.live[group] = Live(prompts, version, sampler)
      granted.append(prompts)
    return granted

  def give_back(self, which: Callable[[int, str], bool]) -> int:
    """Returns the leased groups for which `which(group, holder)`; how many there were."""
    chosen = [live for group, live in self.live.items() if live.holder is not None and which(group, live.holder)]
    for live in chosen:
      live.holder = None
    return len(chosen)

  def hold_again(self, sampler: str, groups: Collection[int]) -> None:
    """Those of `groups` that were returned meanwhile are leased to `sampler` as before."""
    for group in groups:
      if group in self.live and self.live[group].returned:
        self.live[group].holder = sampler

  def queue(self, group: int, trajectories: list[Trajectory]) -> None:
    self.live[group].holder, self.live[group].trajectories = None, trajectories
    self.arrived.append(group)

  def remove(self, group: int) -> Live:
    """The group is done."""
    if group in self.arrived:
      self.arrived.remove(group)
    return self.live.pop(group)

  def done(self, group: int) -> bool:
    return 0 <= group < self._next_group and group not in self.live and group not in self._restored

  def cursor(self) -> dict:
    return {"next_group": self._next_group, "unfinished": sorted([*self._restored, *self.live])}

  def restore(self, cursor: dict) -> None:
    if self._next_group or self.live:
      raise ValueError("restore before the first lease")
    self._next_group, self._restored = cursor["next_group"], sorted(cursor["unfinished"])
