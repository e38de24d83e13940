"""A plan in words: what a slice holds and how fast it can be, line by line."""

import dataclasses
import re
from collections.abc import Iterator

from estr_jax.planning.chips import GIB, Slice
from estr_jax.planning.hlo import Memory, Traffic
from estr_jax.planning.roofline import Roofline

# Of the machine code of the paper's programs 0.15 GiB at most were seen; the runtime keeps 0.26 on v5p.
RESERVED = 0.5 * GIB


@dataclasses.dataclass(frozen=True)
class Plan:
  """What was found out about one program on one slice."""

  place: Slice
  what: str  # the mesh and a step of the program
  memory: Memory
  flops: float  # of all devices, recomputation included
  model_flops: float  # without
  traffic: Traffic
  roofline: Roofline
  tokens: int  # a step
  ideal_bytes: float | None = None  # of HBM for all devices, where something says what would do
  estimated: bool = False  # whether memory and HBM traffic are formulas, as no TPU's compiler was there

  @property
  def fits(self) -> bool:
    return fits(self.memory, self.place)

  @property
  def rate(self) -> float:
    """Tokens a second."""
    return self.tokens / self.roofline.seconds

  @property
  def mfu(self) -> float:
    return self.model_flops / (self.place.chips * self.place.chip.flops * self.roofline.seconds)


def fits(memory: Memory, place: Slice) -> bool:
  return memory.total + RESERVED <= place.chip.hbm_bytes


def lines(plan: Plan) -> Iterator[str]:
  memory, chip, roof = plan.memory, plan.place.chip, plan.roofline
  guess = ", an estimate" if plan.estimated else ""
  yield f"HBM a device, GiB{guess}"
  for name in ("arguments", "outputs", "temporaries"):
    yield f"  {name:<12} {getattr(memory, name) / GIB:9.2f}"
  yield f"  {'beside it':<12} {memory.beside / GIB:9.2f} other versions of the weights"
  yield f"  {'set aside':<12} {RESERVED / GIB:9.2f} for the runtime and machine code"
  yield f"  {'total':<12} {(memory.total + RESERVED) / GIB:9.2f} of {chip.hbm_bytes / GIB:.2f}"
  yield "a step"
  yield f"  computed     {plan.flops:9.3g} FLOP by all chips, from the jaxpr; model FLOP {plan.model_flops:.3g}"
  yield f"  HBM          {plan.traffic.hbm_bytes / 1e9:9.1f} GB a device{guess}"
  if plan.ideal_bytes is not None:
    ideal = plan.ideal_bytes / plan.place.chips
    yield f"               {plan.traffic.hbm_bytes / ideal:9.2f} x weights and cache read once ({ideal / 1e9:.1f} GB)"
  of_cpu = ", as compiled for CPUs" if plan.estimated else ""
  for one in plan.traffic.collectives:
    yield f"  ICI          {one.bytes / 1e9:9.3f} GB into a device: {one.kind} along {', '.join(one.axes)}{of_cpu}"
  if plan.traffic.unknown_loops:
    yield f"  loops whose length depends on data, counted once: {plan.traffic.unknown_loops}"
  yield "roofline, if everything overlaps"
  yield f"  compute      {roof.compute:9.4f} s"
  yield f"  HBM          {roof.hbm:9.4f} s"
  for axes, seconds in roof.ici.items():
    yield f"  ICI          {seconds:9.4f} s along {', '.join(axes)}"
  yield f"  step         {roof.seconds:9.4f} s, bound by {roof.bound}"
  yield f"  tokens       {plan.rate:9.0f} a second, {plan.rate / plan.place.chips:.0f} a chip"
  yield f"  MFU          {100 * plan.mfu:9.1f} %"


def exhausted(message: str) -> float | None:
  """The bytes of HBM that a compiler asked for when it gave up for want of them; None if that was not why.

  Where it says so of the temporaries alone, those are the bytes, and the arguments would come on top.
  """
  pattern = r"[Uu]sed ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm|\(([\d.]+)([KMGT])\) exceeds available HBM"
  found = re.search(pattern, message)
  if not found:
    return None
  number, unit = (one or other for one, other in zip(found.groups()[:2], found.groups()[2:]))
  return float(number) * 1024 ** (1 + "KMGT".index(unit))
