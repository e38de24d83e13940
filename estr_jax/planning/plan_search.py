"""Other plans near the one that was asked for: the largest microbatch that fits, and a ranking of meshes."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator

from jax.sharding import AbstractMesh

from estr_jax.errors import UserError
from estr_jax.model import decoder, sharding
from estr_jax.planning import estimates, plans, report, roofline
from estr_jax.planning.chips import GIB, Slice
from estr_jax.planning.compiler import Exhausted
from estr_jax.planning.hlo import Memory
from estr_jax.run.options import Settings

_MOST_SLOTS = 64  # times those of the config
_HOPELESS = 2.0  # an estimate this many times above the memory is not worth a compilation


def choices(settings: Settings, role: str) -> list[Settings]:
  """The settings with every microbatch (of a sampler: with slots halved and doubled) that the mesh allows, growing."""
  c = settings.config
  if role == "sampler":
    slots, shards = c.sampling.slots, plans.shards_of(c.sampling.mesh)
    factors = [2.0**i for i in range(-6, int(math.log2(_MOST_SLOTS)) + 1)]
    return [settings.changed({"sampling.slots": int(slots * f)}) for f in factors if slots * f % shards == 0]
  rows, shards = c.batch.groups * c.batch.group_size, plans.shards_of(c.mesh)
  if rows % shards:
    return []
  a_device = rows // shards
  return [
    settings.changed({"batch.microbatches": a_device // part})
    for part in range(1, a_device + 1)
    if a_device % part == 0
  ]


def size_of(settings: Settings, role: str) -> int:
  return settings.config.sampling.slots if role == "sampler" else plans.rows_of(settings)


def named(settings: Settings, role: str) -> str:
  """A choice in the words of the config."""
  c = settings.config
  if role == "sampler":
    return f"sampling.slots={c.sampling.slots}"
  rows = plans.rows_of(settings)
  return f"batch.microbatches={c.batch.microbatches}, {rows} row{'s' * (rows > 1)} a device"


def _memory(settings: Settings, role: str, place: Slice) -> Memory | None:
  """None where the compiler gave up for want of it."""
  if not plans.has_libtpu():
    return plans.memory_estimate(settings, role)
  try:
    return plans.plan_of(settings, role, place).memory
  except Exhausted:
    return None


def largest(
  settings: Settings, role: str, place: Slice, memory: Memory | None, say: Callable[[str], None]
) -> tuple[Settings, Memory] | None:
  """The largest choice that fits, each compiled, upwards from one that fits or downwards from one that does not.

  Args:
    memory: of the config itself; None where the compiler gave up on it.
  """
  found = (settings, memory) if memory is not None and report.fits(memory, place) else None
  fitted, here, others = found is not None, size_of(settings, role), choices(settings, role)
  larger = [other for other in others if size_of(other, role) > here]
  smaller = [other for other in reversed(others) if size_of(other, role) < here]
  for other in larger if fitted else smaller:
    say(f"trying {named(other, role)}")
    needed = _memory(other, role, place)
    fits = False
    if needed is not None and report.fits(needed, place):
      found, fits = (other, needed), True
    if fits != fitted:
      break
  return found


def meshes(sides: tuple[int, ...]) -> list[dict[str, int]]:
  """Every mesh whose axes are products of the sides of a slice, each side in one axis."""
  found = set()
  for axes in itertools.product(sharding.AXES, repeat=len(sides)):
    sizes = dict.fromkeys(sharding.AXES, 1)
    for axis, side in zip(axes, sides):
      sizes[axis] *= side
    found.add(tuple(sizes.items()))
  return [dict(sizes) for sizes in sorted(found)]


def candidates(settings: Settings, role: str, place: Slice) -> list[Settings]:
  """The configs of a sweep that can be hoped to fit, the most promising by an estimate first."""
  model = plans.model_of(settings)
  params = decoder.abstract_params(model)
  hopeful = []
  for sizes in meshes(place.sides):
    if sizes["expert"] > 1 and not model.experts:
      continue
    try:
      sharding.shardings(params, AbstractMesh(tuple(sizes.values()), tuple(sizes)))
    except UserError:
      continue
    mesh = "sampling.mesh" if role == "sampler" else "mesh"
    other = settings.changed({f"{mesh}.{axis}": size for axis, size in sizes.items()})
    for choice in choices(other, role):
      if plans.memory_estimate(choice, role).total < _HOPELESS * place.chip.hbm_bytes:
        hopeful.append(choice)
  return sorted(hopeful, key=lambda choice: _promise(choice, role))


def _promise(settings: Settings, role: str) -> float:
  """Smaller is better: bytes that a device takes in for a token, or for a sampler, holds for one."""
  c = settings.config
  model, sizes = plans.model_of(settings), plans.mesh_of(settings, role).to_dict()
  if role == "sampler":
    return plans.memory_estimate(settings, role).total / c.sampling.slots
  rows, length = plans.rows_of(settings), c.sampling.context
  return estimates.learner_exchange(model, sizes, rows, length, c.batch.microbatches)


@dataclasses.dataclass(frozen=True)
class Sweep:
  ranked: list[tuple[Settings, report.Plan]]  # those that fit, the fastest first
  failed: list[tuple[Settings, str]]  # and why
  left: int  # for which there was no time


def sweep(settings: Settings, role: str, place: Slice, seconds: float, say: Callable[[str], None]) -> Sweep:
  """Compiles candidates until the time is over; what is larger than a choice that did not fit is not tried."""
  start = time.monotonic()
  ranked: list[tuple[Settings, report.Plan]] = []
  failed: list[tuple[Settings, str]] = []
  todo = candidates(settings, role, place)
  too_large: dict[tuple, float] = {}
  for done, choice in enumerate(todo):
    if time.monotonic() - start > seconds:
      return Sweep(_ranked(ranked), failed, len(todo) - done)
    mesh = tuple(plans.mesh_of(choice, role).to_dict().items())
    what = f"{describe(choice, role)}; {named(choice, role)}"
    if size_of(choice, role) >= too_large.get(mesh, math.inf):
      failed.append((choice, "larger than one that does not fit"))
      continue
    say(f"{done + 1} of {len(todo)}: {what}")
    try:
      plan = plans.plan_of(choice, role, place)
      reason = None if plan.fits else f"{(plan.memory.total + report.RESERVED) / GIB:.1f} GiB"
    except Exhausted as error:
      reason = f"{error.needed / GIB:.1f} GiB at least"
    except UserError as error:
      failed.append((choice, str(error)))
      continue
    if reason is None:
      ranked.append((choice, plan))
    else:
      failed.append((choice, reason))
      too_large[mesh] = min(size_of(choice, role), too_large.get(mesh, math.inf))
  return Sweep(_ranked(ranked), failed, 0)


def _ranked(plans: list[tuple[Settings, report.Plan]]) -> list[tuple[Settings, report.Plan]]:
  """By tokens a second; of equals, which compute bounds, first the one that has most of the rest to spare."""

  def order(pair: tuple[Settings, report.Plan]) -> tuple[float, float]:
    plan = pair[1]
    return -plan.rate, (plan.roofline.hbm + sum(plan.roofline.ici.values())) / plan.tokens

  return sorted(plans, key=order)


def describe(settings: Settings, role: str) -> str:
  return roofline.describe(plans.mesh_of(settings, role).to_dict())


def table(found: Sweep, role: str) -> Iterator[str]:
  size = "slots" if role == "sampler" else "rows"
  yield f"{'mesh':<32} {size:>6} {'GiB':>7} {'step, s':>9} {'tokens/s':>9} {'MFU, %':>7}  bound"
  for settings, plan in found.ranked:
    gib = (plan.memory.total + report.RESERVED) / GIB
    yield (
      f"{describe(settings, role):<32} {size_of(settings, role):>6} {gib:>7.2f} {plan.roofline.seconds:>9.4f} "
      f"{plan.rate:>9.0f} {100 * plan.mfu:>7.1f}  {plan.roofline.bound}"
    )
  for settings, why in found.failed:
    yield f"{describe(settings, role):<32} {size_of(settings, role):>6}  does not fit: {why}"
  if found.left:
    yield f"not tried for want of time: {found.left}"


def advice(settings: Settings, role: str) -> str:
  """What to change where no microbatch and no number of slots fits, the cheapest first."""
  c = settings.config
  if role == "sampler":
    if c.transport.weights_dtype != "bfloat16":
      return "set transport.weights_dtype=bfloat16"
    return "take more chips along sampling.mesh.tensor"
  if c.model.remat != "full":
    return f"set model.remat=full in place of {c.model.remat}"
  if c.mesh.data > 1:
    return f"move mesh.data={c.mesh.data} to mesh.fsdp, which shares out weights and optimizer"
  return "take more chips along mesh.tensor, which shares out a row's activations, or a larger slice along mesh.fsdp"
