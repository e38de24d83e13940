"""Versioned weights on a learner host: the pieces that it holds, and the stream of those that somebody wants.

No host holds or moves the whole model: over all hosts the pieces are a partition of the parameters. Numbers travel as
raw little-endian bytes under numpy's or ml_dtypes' dtype name, so bfloat16 and float8 survive.
"""

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from estr_jax.model.sharding import path_name
from estr_jax.structs import NO_VERSION, Params
from estr_jax.weights.parts import Chunk, Manifest, Part
from estr_jax.weights.regions import Region, by_name, raw, region_at

# Large enough for full loopback speed, far below any message limit.
CHUNK_BYTES = 4 << 20


class VersionGone(Exception):
  """The version that was asked for is not held any more: take the newest."""


class Piece:
  """A region that this host holds. It comes to the host's memory at the first use, once, and leaves the device then."""

  def __init__(self, region: Region, data: jax.Array | np.ndarray):
    """`data` must stay valid until it was used (no donated buffers)."""
    self.region = region
    self.dtype = np.dtype(data.dtype)
    self._data = data
    self._lock = threading.Lock()
    self._checksums: dict[tuple[Region, int], int] = {}

  def array(self) -> np.ndarray:
    with self._lock:
      self._data = np.asarray(self._data, order="C")
      return self._data

  def checksum(self, block: Region, offset: int, data: bytes) -> int:
    """Of a chunk of a block of this piece; computed once, since several samplers ask for the same."""
    key = (block, offset)
    if key not in self._checksums:
      self._checksums[key] = zlib.crc32(data)
    return self._checksums[key]

  def prefetch(self) -> None:
    """Starts the way to the host, so that several devices' transfers overlap."""
    with self._lock:
      if isinstance(self._data, jax.Array):
        self._data.copy_to_host_async()


def pieces_of(params: Params) -> list[Piece]:
  """What this process serves of device arrays: of every shard the first replica, where one of its devices has it."""
  return [
    Piece(region_at(path_name(path), leaf.shape, shard.index), shard.data)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    for shard in leaf.addressable_shards
    if shard.replica_id == 0
  ]


class Snapshot:
  """This host's pieces of one version."""

  def __init__(self, version: int, pieces: Sequence[Piece]):
    self.version = version
    self._pieces: dict[str, list[Piece]] = {}
    for piece in pieces:
      self._pieces.setdefault(piece.region.name, []).append(piece)

  def stream(self, wanted: Sequence[Region]) -> Iterator[Part]:
    """A manifest of the blocks in which pieces and wanted regions meet, at once; then their chunks, block by block.

    Raises ValueError where a parameter has another shape here.
    """
    named = by_name(wanted)
    blocks = [pair for name, regions in named.items() for pair in _meetings(self._pieces.get(name, []), regions)]
    dtypes = {name: self._pieces[name][0].dtype.name for name in named if name in self._pieces}
    yield Manifest(self.version, dtypes, tuple(block for _, block in blocks))
    for piece, _ in blocks:
      piece.prefetch()
    for index, (piece, block) in enumerate(blocks):
      yield from _chunks(index, piece, block)


class WeightStore:
  """Holds the newest version, and the one before it where a sampler may have been told to fetch it. Thread-safe."""

  def __init__(self, *, leads: bool = True):
    """`leads`: this host tells samplers which version there is, so it knows whether the one before is asked for."""
    self._changed = threading.Condition()
    self._leads = leads
    self._held: list[Snapshot] = []  # oldest first
    self._named = NO_VERSION  # the newest that `newer` gave out

  def publish(self, version: int, pieces: Sequence[Piece]) -> None:
    """Adds the newest version; nothing is fetched yet. Raises ValueError on a version below the newest."""
    with self._changed:
      if self._held and version < self._held[-1].version:
        raise ValueError(f"version {version} is below {self._held[-1].version}, which is published")
      # One that was never fetched still fills the devices' memory.
      before = [one for one in self._held[-1:] if not self._leads or one.version == self._named]
      self._held = [*(one for one in before if one.version < version), Snapshot(version, pieces)]
      self._changed.notify_all()

  def newer(self, than: int, wait_s: float) -> Snapshot | None:
    """The newest weights where their version is above `than`; None after `wait_s` seconds."""

    def look() -> Snapshot | None:
      newest = self._held[-1]
      if newest.version <= than:
        return None
      self._named = newest.version
      return newest

    return self._wait(look, wait_s)

  def exactly(self, version: int, wait_s: float) -> Snapshot | None:
    """The weights of `version`; None where they are still to come after `wait_s` seconds. Raises VersionGone."""

    def look() -> Snapshot | None:
      held = {snapshot.version: snapshot for snapshot in self._held}
      if version not in held and version < max(held):
        raise VersionGone(f"version {version} of the weights is gone; this host holds {sorted(held)}")
      return held.get(version)

    return self._wait(look, wait_s)

  def _wait(self, look: Callable[[], Snapshot | None], wait_s: float) -> Snapshot | None:
    deadline = time.monotonic() + wait_s
    with self._changed:
      while True:
        found = look() if self._held else None
        left = deadline - time.monotonic()
        if found is not None or left <= 0:
          return found
        self._changed.wait(left)


def _meetings(pieces: Sequence[Piece], regions: Sequence[Region]) -> Iterator[tuple[Piece, Region]]:
  """What the pieces hold of the regions, region by region; all of one parameter."""
  for region in regions:
    for piece in pieces:
      if (block := piece.region.common(region)) is not None:
        yield piece, block


def _chunks(index: int, piece: Piece, block: Region) -> Iterator[Chunk]:
  """The numbers of a block of the piece; `index` is its place in the manifest."""
  offset = 0
  for run in _runs(raw(piece.array())[block.within(piece.region)]):
    data = run.tobytes()
    yield Chunk(index, offset, data, piece.checksum(block, offset, data))
    offset += len(data)


def _runs(array: np.ndarray) -> Iterator[np.ndarray]:
  """Consecutive parts of an array in C order, each whole rows along one axis and at most CHUNK_BYTES (or an element).

  A part is copied when it is sent, so a cut across the rows of a piece is never held as a whole.
  """
  if array.nbytes <= CHUNK_BYTES or array.ndim == 0:
    yield array
    return
  row_bytes = array.nbytes // len(array)
  if array.ndim > 1 and row_bytes > CHUNK_BYTES:
    for row in array:
      yield from _runs(row)
    return
  rows = max(1, CHUNK_BYTES // row_bytes)
  for first in range(0, len(array), rows):
    yield array[first : first + rows]
