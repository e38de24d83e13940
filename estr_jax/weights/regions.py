"""Boxes of parameters: what a learner host holds, and what a sampler process wants."""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Region:
  """The indices start <= i < stop of one parameter, along each of its axes. Raises ValueError on a box beyond it."""

  name: str  # such as "layers/attention/q/kernel"
  whole: tuple[int, ...]  # the shape of the parameter
  start: tuple[int, ...]
  stop: tuple[int, ...]

  def __post_init__(self):
    ranks = {len(self.whole), len(self.start), len(self.stop)}
    if len(ranks) > 1 or not all(
      0 <= lo <= hi <= size for lo, hi, size in zip(self.start, self.stop, self.whole, strict=True)
    ):
      raise ValueError(f"{self.name}: {self.start} to {self.stop} is no part of shape {self.whole}")

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(hi - lo for lo, hi in zip(self.start, self.stop))

  @property
  def size(self) -> int:
    """Elements."""
    return math.prod(self.shape)

  def common(self, other: "Region") -> "Region | None":
    """What both hold; None where that is nothing. Raises ValueError where the parameter has another shape there."""
    if self.whole != other.whole:
      raise ValueError(f"{self.name} has shape {self.whole} on one side and {other.whole} on the other")
    start = tuple(map(max, self.start, other.start))
    stop = tuple(map(min, self.stop, other.stop))
    if any(lo >= hi for lo, hi in zip(start, stop)):
      return None
    return Region(self.name, self.whole, start, stop)

  def within(self, outer: "Region") -> tuple:
    """The index of this region in an array that holds `outer`; it gives a view, of a scalar too."""
    shifted = zip(self.start, self.stop, outer.start)
    return (*(slice(lo - at, hi - at) for lo, hi, at in shifted), ...)

  def __str__(self) -> str:
    return f"{self.name}[{', '.join(f'{lo}:{hi}' for lo, hi in zip(self.start, self.stop))}]"


def region_at(name: str, whole: tuple[int, ...], index: Index) -> Region:
  """The region of a shard, whose index JAX gives as one slice an axis."""
  bounds = [one.indices(size)[:2] for one, size in zip(index, whole, strict=True)]
  return Region(name, tuple(whole), tuple(lo for lo, _ in bounds), tuple(hi for _, hi in bounds))


def by_name(regions: Iterable[Region]) -> dict[str, list[Region]]:
  named: dict[str, list[Region]] = {}
  for region in regions:
    named.setdefault(region.name, []).append(region)
  return named


def raw(array: np.ndarray) -> np.ndarray:
  """The same elements as mere bytes: numpy copies bfloat16 and its like several times slower than those."""
  return array.view(f"V{array.itemsize}")
