"""Which samplers are alive, and what they say that they do. No lock of its own: the broker holds one."""

import dataclasses
from collections.abc import Callable

from estr_jax.structs import NO_VERSION

# Seconds that a sampler may stay in one state without a sign of progress before its leases are given back.
# A worker that compiles is slow, not dead; one that decodes reports at every chunk.
STATE_DEADLINE_S = {
  "joining": 900.0,
  "compiling": 900.0,
  "fetching": 600.0,
  "waiting": 600.0,
  "decoding": 120.0,
}


@dataclasses.dataclass
class Member:
  pid: int | None
  state: str
  version: int  # of the weights it holds
  heard_at: float
  progress_at: float  # when it entered its state, or last leased or put
  acknowledged: list[int]  # the versions it held, in order
  waited_s: float = 0.0  # for prompts and weights, since the first join, of all processes under this name
  reported_s: float | None = None  # what the newest of them said of it; None right after it joined


class Roster:
  """The samplers by name. Times are in seconds of `clock`."""

  def __init__(self, lease_timeout_s: float, clock: Callable[[], float]):
    self._lease_timeout_s = lease_timeout_s
    self._clock = clock
    self._members: dict[str, Member] = {}

  def join(self, name: str, pid: int) -> None:
    """A new process under this name; what an earlier one acknowledged stays on record."""
    member = self._member(name)
    now = self._clock()
    member.pid, member.state, member.version, member.reported_s = pid, "joining", NO_VERSION, None
    member.heard_at = member.progress_at = now

  def progress(self, name: str) -> None:
    """The sampler leased or put: alive, whatever its last beat said."""
    member = self._member(name)
    member.heard_at = member.progress_at = self._clock()

  def hear(self, name: str, version: int, waited_s: float) -> None:
    member = self._member(name)
    member.heard_at = self._clock()
    # Calls come from several threads of the sampler and may overtake each other: only what is newer counts.
    if version > member.version:
      member.acknowledged.append(version)
      member.version = version
    if member.reported_s is None:
      member.reported_s = waited_s
    elif waited_s > member.reported_s:
      member.waited_s += waited_s - member.reported_s
      member.reported_s = waited_s

  def beat(self, name: str, state: str, seconds_in_state: float) -> None:
    """Raises ValueError on a state without a deadline."""
    if state not in STATE_DEADLINE_S:
      raise ValueError(f"state {state!r} of sampler {name} is none of {', '.join(STATE_DEADLINE_S)}")
    member = self._member(name)
    now = self._clock()
    member.heard_at = now
    # A lease or a put since the state began is progress that the sampler's own count does not know of.
    member.progress_at = max(member.progress_at, now - seconds_in_state)
    member.state = state

  def lost(self, name: str) -> bool:
    """Whether the leases of this sampler go back: not heard of for the lease timeout, or stuck in its state."""
    member = self._members[name]
    now = self._clock()
    silent = now - member.heard_at > self._lease_timeout_s
    return silent or now - member.progress_at > STATE_DEADLINE_S[member.state]

  def names(self) -> list[str]:
    return sorted(self._members)

  def states(self) -> dict[str, dict]:
    return {n: {"state": m.state, "version": m.version, "pid": m.pid} for n, m in sorted(self._members.items())}

  def waited_s(self) -> float:
    return sum(member.waited_s for member in self._members.values())

  def acknowledged(self) -> dict[str, list[int]]:
    return {name: list(member.acknowledged) for name, member in sorted(self._members.items())}

  def describe(self) -> str:
    """One line for a person who wonders whom the learner waits for."""
    if not self._members:
      return "no sampler has joined"
    now = self._clock()
    return ", ".join(
      f"{name} {'lost' if self.lost(name) else m.state} for {now - m.progress_at:.0f} s"
      f" (heard {now - m.heard_at:.0f} s ago)"
      for name, m in sorted(self._members.items())
    )

  def _member(self, name: str) -> Member:
    if name not in self._members:
      now = self._clock()
      self._members[name] = Member(None, "joining", NO_VERSION, now, now, [])
    return self._members[name]
