"""What a TPU chip can do, and how the chips of a slice are joined."""

import dataclasses
import math
import re

from estr_jax.errors import UserError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """Peaks of one chip; nothing reaches them, so times that follow from them are lower bounds."""

  flops: float  # bf16, a second
  hbm_bytes: float  # that programs can have
  hbm_bandwidth: float  # bytes a second
  link_bandwidth: float  # bytes a second, of one link of the interconnect in one direction
  dimensions: int  # of the torus
  wraps_at: int  # a side of the slice is a ring where this divides it; else it is a line

  def is_ring(self, side: int) -> bool:
    return side > 2 and side % self.wraps_at == 0


# Compute and memory: cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e (v5e: 197 TFLOP/s, 16 GB, 819 GB/s; v5p: 459, 95
# GiB, 2765; v6e: 918, 32, 1638; v4: 275, 32, 1228); memory, but for v4's, as the compiler of libtpu 0.0.42 gives it to
# programs. Links: the measured one-way figures of "How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus), which
# are a tenth below the documents' totals per chip. Rings: v4 and v5p are made of cubes of 4 x 4 x 4, joined by
# switches; v5e and v6e close a ring at the whole pod's side of 16 only.
CHIPS = {
  "v4": Chip(275e12, 32 * GIB, 1228e9, 45e9, dimensions=3, wraps_at=4),
  "v5e": Chip(197e12, 15.75 * GIB, 819e9, 45e9, dimensions=2, wraps_at=16),
  "v5p": Chip(459e12, 95.74 * GIB, 2765e9, 90e9, dimensions=3, wraps_at=4),
  "v6e": Chip(918e12, 31.25 * GIB, 1638e9, 90e9, dimensions=2, wraps_at=16),
}


@dataclasses.dataclass(frozen=True)
class Slice:
  """A part of a pod."""

  family: str  # a key of CHIPS
  sides: tuple[int, ...]

  @property
  def chip(self) -> Chip:
    return CHIPS[self.family]

  @property
  def chips(self) -> int:
    return math.prod(self.sides)

  @property
  def name(self) -> str:
    return f"{self.family}:{'x'.join(map(str, self.sides))}"


def parse_slice(text: str, said: str = "--topology") -> Slice:
  """`v5p:4x4x4` or `v6e:8x8`, which stands at the flag or config key `said`.

  Raises:
    UserError: unknown chips, or sides that such a slice cannot have.
  """
  advice = "write FAMILY:SIDES, such as v5p:4x4x4 or v6e:8x8"
  found = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", text)
  if not found:
    raise UserError(f"{said}={text!r} is no slice; {advice}")
  family, sides = found[1], tuple(map(int, found[2].split("x")))
  if family not in CHIPS:
    raise UserError(f"{said}={text}: unknown chips {family!r}; one of {', '.join(CHIPS)} is known")
  dimensions = CHIPS[family].dimensions
  if len(sides) != dimensions or 0 in sides:
    raise UserError(f"{said}={text}: a slice of {family} has {dimensions} sides above 0; {advice}")
  return Slice(family, sides)


def span_bandwidth(chip: Chip, coordinates: list[tuple[int, ...]], sides: tuple[int, ...]) -> float:
  """Bytes a second that one chip can take in while a group of chips moves data round.

  Every dimension of the torus in which the group extends brings one link, or two where the group closes a ring.

  Args:
    coordinates: of the chips of the group.
    sides: of the slice.
  """
  links = 0
  for dimension, side in enumerate(sides):
    extent = len({place[dimension] for place in coordinates})
    if extent > 1:
      links += 2 if extent == side and chip.is_ring(side) else 1
  return max(links, 1) * chip.link_bandwidth
