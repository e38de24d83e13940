"""What arrives from the learner's hosts, checked and put together: each wanted region once, in one buffer."""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence

import ml_dtypes  # noqa: F401  makes np.dtype("bfloat16") and the float8 names known
import numpy as np

from estr_jax.weights.regions import Region, by_name, raw, region_from_message
from estr_jax.wire import estr_jax_pb2 as pb

Blocks = dict[Region, np.ndarray]  # a wanted region -> its numbers


def manifest_of(parts: Iterator[pb.WeightsPart]) -> pb.Manifest | None:
  """The first part of a stream; None where the stream is empty. Raises ValueError where it is something else."""
  first = next(parts, None)
  if first is None:
    return None
  if first.WhichOneof("part") != "manifest":
    raise ValueError("the stream of weights does not begin with its manifest")
  return first.manifest


class Receiver:
  """Buffers for the wanted regions, filled from one stream a host; the streams may be read in parallel."""

  def __init__(self, wanted: Sequence[Region], manifests: Sequence[pb.Manifest]):
    """Raises ValueError, naming the parameter, unless the hosts' blocks are a partition of the wanted regions."""
    versions = {manifest.version for manifest in manifests}
    if len(versions) != 1:
      raise ValueError(f"the learner's hosts offer versions {sorted(versions)}, not one")
    (self.version,) = versions
    dtypes: dict[str, np.dtype] = {}
    for tensor in (tensor for manifest in manifests for tensor in manifest.tensors):
      if dtypes.setdefault(tensor.name, np.dtype(tensor.dtype)) != np.dtype(tensor.dtype):
        raise ValueError(f"{tensor.name}: the learner's hosts hold it in different types")
    self.blocks: Blocks = {}
    for region in wanted:
      if region.name not in dtypes:
        raise ValueError(f"{region.name}: no learner host holds any of it")
      self.blocks[region] = np.empty(region.shape, dtypes[region.name])
    named = by_name(wanted)
    self._views: list[list[tuple[Region, np.ndarray]]] = []  # of each host's blocks
    pieces: dict[Region, list[Region]] = {region: [] for region in wanted}
    for manifest in manifests:
      views = []
      for block in map(region_from_message, manifest.blocks):
        home = next((region for region in named.get(block.name, []) if region.common(block) == block), None)
        if home is None:
          raise ValueError(f"{block} was sent and belongs to no wanted region")
        pieces[home].append(block)
        views.append((block, raw(self.blocks[home])[block.within(home)]))
      self._views.append(views)
    for region, blocks in pieces.items():
      _check_partition(region, blocks)

  def fill(self, host: int, parts: Iterable[pb.WeightsPart]) -> None:
    """Reads the rest of a host's stream. Raises ValueError where a chunk is missing, out of place or damaged."""
    views = self._views[host]
    filled = [0] * len(views)  # bytes
    for part in parts:
      chunk = part.chunk
      if part.WhichOneof("part") != "chunk" or not 0 <= chunk.block < len(views):
        raise ValueError(f"a part of version {self.version} belongs to no block of its manifest")
      block, view = views[chunk.block]
      data = chunk.data
      end = chunk.offset + len(data)
      if chunk.offset != filled[chunk.block] or end > view.nbytes or end % view.itemsize or not data:
        raise ValueError(f"{block}: bytes {chunk.offset}..{end} after {filled[chunk.block]} of {view.nbytes}")
      if zlib.crc32(data) != chunk.crc32:
        raise ValueError(f"{block}: the checksum of bytes {chunk.offset}..{end} of version {self.version} differs")
      numbers = np.frombuffer(data, view.dtype)
      place = view[_run(block, chunk.offset // view.itemsize, len(numbers))]
      place[...] = numbers.reshape(place.shape)
      filled[chunk.block] = end
    for (block, view), size in zip(views, filled, strict=True):
      if size != view.nbytes:
        raise ValueError(f"{block}: {size} of {view.nbytes} bytes arrived")


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
