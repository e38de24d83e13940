"""A plan in words: what a slice holds and how fast it can be, line by line."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from estr_jax.planning.chips import GIB, Slice
from estr_jax.planning.hlo import Traffic
from estr_jax.planning.roofline import Roofline


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of HBM a device, by what they hold."""

  arguments: float
  outputs: float  # that are not written over an argument
  temporaries: float
  code: float

  @property
  def total(self) -> float:
    return self.arguments + self.outputs + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class Plan:
  """What was found out about one program on one slice."""

  place: Slice
  memory: Memory
  flops: float  # of all devices, recomputation included
  model_flops: float  # without
  traffic: Traffic
  roofline: Roofline
  tokens: int  # a step
  ideal_bytes: float | None = None  # of HBM for all devices, where something says what would do

  @property
  def fits(self) -> bool:
    return self.memory.total <= self.place.chip.hbm_bytes

  @property
  def mfu(self) -> float:
    return self.model_flops / (self.place.chips * self.place.chip.flops * self.roofline.seconds)


def memory_of(analysis: Any) -> Memory:
  """From `memory_analysis()` of a compiled program."""
  return Memory(
    analysis.argument_size_in_bytes,
    analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    analysis.temp_size_in_bytes,
    analysis.generated_code_size_in_bytes,
  )


def lines(plan: Plan) -> Iterator[str]:
  memory, chip, roof = plan.memory, plan.place.chip, plan.roofline
  yield "HBM a device, GiB"
  for name in ("arguments", "outputs", "temporaries", "code"):
    yield f"  {name:<12} {getattr(memory, name) / GIB:9.2f}"
  yield f"  {'total':<12} {memory.total / GIB:9.2f} of {chip.hbm_bytes / GIB:.0f}"
  yield "a step"
  yield f"  computed     {plan.flops:9.3g} FLOP by all chips, from the jaxpr; model FLOP {plan.model_flops:.3g}"
  yield f"  HBM          {plan.traffic.hbm_bytes / 1e9:9.1f} GB a device"
  if plan.ideal_bytes is not None:
    ideal = plan.ideal_bytes / plan.place.chips
    yield f"               {plan.traffic.hbm_bytes / ideal:9.2f} x weights and cache read once ({ideal / 1e9:.1f} GB)"
  for one in plan.traffic.collectives:
    yield f"  ICI          {one.bytes / 1e9:9.3f} GB into a device: {one.kind} along {', '.join(one.axes)}"
  if plan.traffic.unknown_loops:
    yield f"  loops whose length depends on data, counted once: {plan.traffic.unknown_loops}"
  yield "roofline, if everything overlaps"
  yield f"  compute      {roof.compute:9.4f} s"
  yield f"  HBM          {roof.hbm:9.4f} s"
  for axes, seconds in roof.ici.items():
    yield f"  ICI          {seconds:9.4f} s along {', '.join(axes)}"
  yield f"  step         {roof.seconds:9.4f} s, bound by {roof.bound}"
  rate = plan.tokens / roof.seconds
  yield f"  tokens       {rate:9.0f} a second, {rate / plan.place.chips:.0f} a chip"
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
