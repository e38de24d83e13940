"""What arrives from the learner's hosts, checked and put together: each wanted region once, in one buffer."""

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import ml_dtypes  # noqa: F401  makes np.dtype("bfloat16") and the float8 names known
import numpy as np

from estr_jax.weights.parts import Chunk, Manifest, Part
from estr_jax.weights.regions import Region, by_name, raw

Blocks = dict[Region, np.ndarray]  # a wanted region -> its numbers


def manifest_of(parts: Iterator[Part]) -> Manifest | None:
  """The first part of a stream; None where the stream is empty. Raises ValueError where it is something else."""
  first = next(parts, None)
  if first is not None and not isinstance(first, Manifest):
    raise ValueError("the stream of weights does not begin with its manifest")
  return first


class Receiver:
  """Buffers for the wanted regions, filled from one stream a host; the streams may be read in parallel."""

  def __init__(self, wanted: Sequence[Region], manifests: Sequence[Manifest]):
    """Raises ValueError, naming the parameter, unless the hosts' blocks are a partition of the wanted regions."""
    self.version = _one_version(manifests)
    self.blocks = _buffers(wanted, _one_dtype_each(manifests))
    named = by_name(wanted)
    homes = [[(block, _home(block, named)) for block in manifest.blocks] for manifest in manifests]
    self._views = [  # of each host's blocks
      [(block, raw(self.blocks[home])[block.within(home)]) for block, home in host] for host in homes
    ]
    pieces: dict[Region, list[Region]] = {region: [] for region in wanted}
    for block, home in itertools.chain.from_iterable(homes):
      pieces[home].append(block)
    for region, blocks in pieces.items():
      _check_partition(region, blocks)

  def fill(self, host: int, parts: Iterable[Part]) -> None:
    """Reads the rest of a host's stream. Raises ValueError where a chunk is missing, out of place or damaged."""
    views = self._views[host]
    filled = [0] * len(views)  # bytes
    for part in parts:
      if not isinstance(part, Chunk) or not 0 <= part.block < len(views):
        raise ValueError(f"a part of version {self.version} belongs to no block of its manifest")
      filled[part.block] = self._put(part, *views[part.block], filled[part.block])
    for (block, view), size in zip(views, filled, strict=True):
      if size != view.nbytes:
        raise ValueError(f"{block}: {size} of {view.nbytes} bytes arrived")

  def _put(self, chunk: Chunk, block: Region, view: np.ndarray, filled: int) -> int:
    """Copies a chunk to its place in the view of its block, of which `filled` bytes are there; how many are now."""
    end = chunk.offset + len(chunk.data)
    if chunk.offset != filled or end > view.nbytes or end % view.itemsize or not chunk.data:
      raise ValueError(f"{block}: bytes {chunk.offset}..{end} after {filled} of {view.nbytes}")
    if zlib.crc32(chunk.data) != chunk.crc32:
      raise ValueError(f"{block}: the checksum of bytes {chunk.offset}..{end} of version {self.version} differs")
    numbers = np.frombuffer(chunk.data, view.dtype)
    place = view[_run(block, chunk.offset // view.itemsize, len(numbers))]
    place[...] = numbers.reshape(place.shape)
    return end


def _one_version(manifests: Sequence[Manifest]) -> int:
  versions = {manifest.version for manifest in manifests}
  if len(versions) != 1:
    raise ValueError(f"the learner's hosts offer versions {sorted(versions)}, not one")
  return versions.pop()


def _one_dtype_each(manifests: Sequence[Manifest]) -> dict[str, np.dtype]:
  dtypes: dict[str, np.dtype] = {}
  for name, dtype in (pair for manifest in manifests for pair in manifest.dtypes.items()):
    if dtypes.setdefault(name, np.dtype(dtype)) != np.dtype(dtype):
      raise ValueError(f"{name}: the learner's hosts hold it in different types")
  return dtypes


def _buffers(wanted: Sequence[Region], dtypes: Mapping[str, np.dtype]) -> Blocks:
  """Room for every wanted region."""
  blocks: Blocks = {}
  for region in wanted:
    if region.name not in dtypes:
      raise ValueError(f"{region.name}: no learner host holds any of it")
    blocks[region] = np.empty(region.shape, dtypes[region.name])
  return blocks


def _home(block: Region, named: Mapping[str, Sequence[Region]]) -> Region:
  """The wanted region that holds the block."""
  for region in named.get(block.name, ()):
    if region.common(block) == block:
      return region
  raise ValueError(f"{block} was sent and belongs to no wanted region")


def _check_partition(region: Region, blocks: Sequence[Region]) -> None:
  """Raises ValueError unless the blocks, all within the region, cover it exactly once."""
  starts = np.array([block.start for block in blocks], np.int64).reshape(len(blocks), len(region.whole))
  stops = np.array([block.stop for block in blocks], np.int64).reshape(starts.shape)
  for index, block in enumerate(blocks):
    after = slice(index + 1, None)
    if np.any(np.all((starts[after] < block.stop) & (stops[after] > block.start), axis=1)):
      raise ValueError(f"{block}: a part of it is served twice")
  there = sum(block.size for block in blocks)
  if there != region.size:
    raise ValueError(f"{region}: the learner's hosts hold {there} of its {region.size} numbers")


def _run(block: Region, first: int, count: int) -> tuple:
  """The index of `count` numbers from `first` on, in C order, as a view. Raises ValueError unless they are whole rows
  along one axis.
  """
  index: tuple = ()
  left, stride = first, math.prod(block.shape)
  for size in block.shape:
    stride //= size
    at, left = divmod(left, stride)
    if left == 0 and count % stride == 0 and at + count // stride <= size:
      return (*index, slice(at, at + count // stride), ...)
    index = (*index, at)
  if block.shape or count != 1:
    raise ValueError(f"{block}: numbers {first}..{first + count} are no rows of it")
  return (...,)
