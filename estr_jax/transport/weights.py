"""Versioned weights: held on the learner's side, streamed as a manifest and chunks, assembled on the sampler's side.

Tensors travel as raw little-endian bytes under numpy's or ml_dtypes' dtype name, so bfloat16 and float8 survive.
"""

import math
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  makes np.dtype("bfloat16") and the float8 names known
import numpy as np

from estr_jax.structs import Weights
from estr_jax.transport import estr_jax_pb2 as pb

# Large enough for full loopback speed, far below any message limit.
CHUNK_BYTES = 4 << 20

Arrays = Mapping[str, np.ndarray]


class Snapshot:
  """One version; its arrays are fetched at the first request, once, and its checksums are computed once."""

  def __init__(self, version: int, source: Arrays | Callable[[], Arrays]):
    self.version = version
    self._source = source
    self._lock = threading.Lock()
    self._arrays: Arrays | None = None
    self._manifest: pb.Manifest | None = None

  def arrays(self) -> Arrays:
    with self._lock:
      return self._fetched()

  def manifest(self) -> pb.Manifest:
    with self._lock:
      arrays = self._fetched()
      if self._manifest is None:
        tensors = [
          pb.Tensor(name=name, shape=array.shape, dtype=array.dtype.name, crc32=zlib.crc32(_flat_bytes(array)))
          for name, array in arrays.items()
        ]
        total = sum(array.nbytes for array in arrays.values())
        self._manifest = pb.Manifest(version=self.version, total_bytes=total, tensors=tensors)
      return self._manifest

  def _fetched(self) -> Arrays:
    if self._arrays is None:
      arrays = self._source() if callable(self._source) else self._source
      self._arrays = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in arrays.items()}
      self._source = self._arrays  # lets go of the device buffers that a callable holds
    return self._arrays


class WeightStore:
  """Holds the newest version only. Thread-safe."""

  def __init__(self):
    self._changed = threading.Condition()
    self._newest: Snapshot | None = None

  def publish(self, version: int, arrays: Arrays | Callable[[], Arrays]) -> None:
    """Replaces the held version. A callable is called at most once, at the first request, on another thread: what it
    reads must stay valid until then (no donated buffers). Raises ValueError on a version below the held one.
    """
    with self._changed:
      if self._newest is not None and version < self._newest.version:
        raise ValueError(f"version {version} is below {self._newest.version}, which is published")
      self._newest = Snapshot(version, arrays)
      self._changed.notify_all()

  def snapshot_newer(self, have: int, wait_s: float) -> Snapshot | None:
    """The newest weights where their version is above `have`, not fetched yet; None after `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    with self._changed:
      while self._newest is None or self._newest.version <= have:
        left = deadline - time.monotonic()
        if left <= 0:
          return None
        self._changed.wait(left)
      return self._newest


def stream(snapshot: Snapshot) -> Iterator[pb.WeightsPart]:
  """The manifest, then each tensor's chunks in order."""
  yield pb.WeightsPart(manifest=snapshot.manifest())
  for index, array in enumerate(snapshot.arrays().values()):
    flat = _flat_bytes(array)
    for offset in range(0, len(flat), CHUNK_BYTES):
      data = flat[offset : offset + CHUNK_BYTES].tobytes()
      yield pb.WeightsPart(chunk=pb.Chunk(tensor=index, offset=offset, data=data))


def assemble(parts: Iterable[pb.WeightsPart]) -> Weights | None:
  """Fills preallocated arrays from a stream; None for an empty stream.

  Returns: the weights, params as a nested dict of numpy arrays.
  Raises: ValueError where a chunk is missing, out of place or damaged, naming the tensor.
  """
  parts = iter(parts)
  first = next(parts, None)
  if first is None:
    return None
  if first.WhichOneof("part") != "manifest":
    raise ValueError("the stream of weights does not begin with its manifest")
  manifest = first.manifest
  arrays = [np.empty(tuple(tensor.shape), np.dtype(tensor.dtype)) for tensor in manifest.tensors]
  held = sum(array.nbytes for array in arrays)
  if held != manifest.total_bytes:
    raise ValueError(f"the tensors of version {manifest.version} hold {held} bytes, not {manifest.total_bytes}")
  filled = [0] * len(arrays)
  for part in parts:
    chunk = part.chunk
    if part.WhichOneof("part") != "chunk" or not 0 <= chunk.tensor < len(arrays):
      raise ValueError(f"a part of version {manifest.version} belongs to no tensor of its manifest")
    flat, end = _flat_bytes(arrays[chunk.tensor]), chunk.offset + len(chunk.data)
    if chunk.offset != filled[chunk.tensor] or end > len(flat):
      name = manifest.tensors[chunk.tensor].name
      raise ValueError(f"{name}: bytes {chunk.offset}..{end} after {filled[chunk.tensor]} of {len(flat)}")
    flat[chunk.offset : end] = np.frombuffer(chunk.data, np.uint8)
    filled[chunk.tensor] = end
  for tensor, array, size in zip(manifest.tensors, arrays, filled, strict=True):
    if size != array.nbytes:
      raise ValueError(f"{tensor.name}: {size} of {array.nbytes} bytes arrived")
    if zlib.crc32(_flat_bytes(array)) != tensor.crc32:
      raise ValueError(f"{tensor.name}: the checksum of version {manifest.version} differs")
  return Weights(
    manifest.version, unflatten({t.name: array for t, array in zip(manifest.tensors, arrays, strict=True)})
  )


def flatten(params: Mapping[str, Any]) -> dict[str, Any]:
  """A nested dict as {"a/b/c": leaf}. Raises ValueError where the way back would differ: a key that is no string or
  holds a slash, an empty dict.
  """
  flat = {}
  for key, value in params.items():
    if not isinstance(key, str) or "/" in key:
      raise ValueError(f"parameter key {key!r} is no string without a slash")
    if not isinstance(value, Mapping):
      flat[key] = value
    elif value:
      flat.update({f"{key}/{path}": leaf for path, leaf in flatten(value).items()})
    else:
      raise ValueError(f"parameter key {key!r} holds an empty dict")
  return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
  """The inverse of `flatten`."""
  params: dict[str, Any] = {}
  for path, leaf in flat.items():
    *parents, name = path.split("/")
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = leaf
  return params


def _flat_bytes(array: np.ndarray) -> np.ndarray:
  """The bytes of a C-contiguous array, as a view: u8 [nbytes]."""
  if math.prod(array.shape) == 0:
    return np.empty(0, np.uint8)
  return array.reshape(-1).view(np.uint8)
