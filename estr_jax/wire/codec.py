"""Records to messages and back, bit for bit.

Everything that arrives is checked for shape here; what a trajectory has to mean is checked in `admission`.
"""

from collections.abc import Sequence

import numpy as np

from estr_jax.structs import Prompt, Trajectory
from estr_jax.weights.parts import Chunk, Manifest, Part
from estr_jax.weights.regions import Region
from estr_jax.wire import estr_jax_pb2 as pb

_I4, _F4, _U1 = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")
_ARRAYS: dict[str, np.dtype] = {"tokens": _I4, "mask": _U1, "logprob": _F4, "entropy": _F4, "gini": _F4, "version": _I4}
_TYPES: dict[str, type[np.generic]] = {
  "tokens": np.int32,
  "mask": np.bool_,
  "logprob": np.float32,
  "entropy": np.float32,
  "gini": np.float32,
  "version": np.int32,
}


def prompt_to_message(prompt: Prompt) -> pb.Prompt:
  """Raises ValueError where `tokens` is not an i32 [P]."""
  return pb.Prompt(
    id=prompt.id,
    group=prompt.group,
    tokens=_to_bytes("tokens", prompt.tokens),
    answer=prompt.answer,
    task=prompt.task,
  )


def prompt_from_message(message: pb.Prompt) -> Prompt:
  return Prompt(
    id=message.id,
    group=message.group,
    tokens=_from_bytes("tokens", message.tokens),
    answer=message.answer,
    task=message.task,
  )


def groups_from_messages(messages: Sequence[pb.Group]) -> list[list[Prompt]]:
  return [[prompt_from_message(prompt) for prompt in group.prompts] for group in messages]


def trajectory_to_message(trajectory: Trajectory) -> pb.Trajectory:
  """Raises ValueError, naming the field, where an array has not the type and rank that `Trajectory` states."""
  return pb.Trajectory(
    **{name: _to_bytes(name, getattr(trajectory, name)) for name in _ARRAYS},
    vocabulary=_vocabulary_to_bytes(trajectory.vocabulary),
    experts=_experts_to_bytes(trajectory.experts),
    experts_per_token=0 if trajectory.experts is None else trajectory.experts.shape[2],
    reward=trajectory.reward,
    prompt_id=trajectory.prompt_id,
    group=trajectory.group,
    task=trajectory.task,
    finish=trajectory.finish,
    turns=trajectory.turns,
    seconds=trajectory.seconds,
  )


def trajectory_from_message(message: pb.Trajectory) -> Trajectory:
  """Raises ValueError, naming the field, where the bytes are no whole number of elements."""
  arrays = {name: _from_bytes(name, getattr(message, name)) for name in _ARRAYS}
  return Trajectory(
    **arrays,
    vocabulary=_vocabulary_from_bytes(message.vocabulary, len(arrays["tokens"])),
    experts=_experts_from_bytes(message.experts, len(arrays["tokens"]), message.experts_per_token),
    reward=message.reward,
    prompt_id=message.prompt_id,
    group=message.group,
    task=message.task,
    finish=message.finish,
    turns=message.turns,
    seconds=message.seconds,
  )


def region_to_message(region: Region) -> pb.Region:
  return pb.Region(name=region.name, whole=region.whole, start=region.start, stop=region.stop)


def region_from_message(message: pb.Region) -> Region:
  """Raises ValueError, naming the parameter, on a box beyond it."""
  return Region(message.name, tuple(message.whole), tuple(message.start), tuple(message.stop))


def part_to_message(part: Part) -> pb.WeightsPart:
  if isinstance(part, Manifest):
    return pb.WeightsPart(manifest=_manifest_to_message(part))
  return pb.WeightsPart(chunk=pb.Chunk(block=part.block, offset=part.offset, data=part.data, crc32=part.crc32))


def part_from_message(message: pb.WeightsPart) -> Part:
  """Raises ValueError on a message that is empty, or a manifest that is none."""
  match message.WhichOneof("part"):
    case "manifest":
      return _manifest_from_message(message.manifest)
    case "chunk":
      chunk = message.chunk
      return Chunk(chunk.block, chunk.offset, chunk.data, chunk.crc32)
  raise ValueError("a part of the weights is neither a manifest nor a chunk")


def _manifest_to_message(manifest: Manifest) -> pb.Manifest:
  tensors = [pb.Tensor(name=name, dtype=dtype) for name, dtype in manifest.dtypes.items()]
  blocks = [region_to_message(block) for block in manifest.blocks]
  return pb.Manifest(version=manifest.version, tensors=tensors, blocks=blocks)


def _manifest_from_message(message: pb.Manifest) -> Manifest:
  dtypes: dict[str, str] = {}
  for tensor in message.tensors:
    if dtypes.setdefault(tensor.name, tensor.dtype) != tensor.dtype:
      raise ValueError(f"{tensor.name}: the manifest gives it the types {dtypes[tensor.name]} and {tensor.dtype}")
  return Manifest(message.version, dtypes, tuple(map(region_from_message, message.blocks)))


def _to_bytes(name: str, array: np.ndarray) -> bytes:
  # A silent cast would round an int64 token or a float64 log-prob on its way: the record's type is the contract.
  if array.dtype != _TYPES[name] or array.ndim != 1:
    raise ValueError(f"{name} has to be {np.dtype(_TYPES[name])} of rank 1, got {array.dtype} of rank {array.ndim}")
  return array.astype(_ARRAYS[name], copy=False).tobytes()


def _from_bytes(name: str, data: bytes) -> np.ndarray:
  dtype = _ARRAYS[name]
  if len(data) % dtype.itemsize:
    raise ValueError(f"{name} has {len(data)} bytes, not a multiple of {dtype.itemsize}")
  return np.frombuffer(data, dtype).astype(_TYPES[name])  # a copy: writable, in native byte order


def _vocabulary_to_bytes(vocabulary: np.ndarray | None) -> bytes:
  if vocabulary is None:
    return b""
  if vocabulary.dtype != np.float32 or vocabulary.ndim != 2 or not vocabulary.size:
    raise ValueError(f"vocabulary has to be float32 [T, V], got {vocabulary.dtype} {vocabulary.shape}")
  return vocabulary.astype(_F4, copy=False).tobytes()


def _vocabulary_from_bytes(data: bytes, length: int) -> np.ndarray | None:
  if not data:
    return None
  if not length or len(data) % (length * _F4.itemsize):
    raise ValueError(f"vocabulary has {len(data)} bytes, not a multiple of 4 for each of {length} tokens")
  return np.frombuffer(data, _F4).astype(np.float32).reshape(length, -1)


def _experts_to_bytes(experts: np.ndarray | None) -> bytes:
  if experts is None:
    return b""
  if experts.dtype != np.uint8 or experts.ndim != 3 or not experts.size:
    raise ValueError(f"experts has to be uint8 [T, L, k], got {experts.dtype} {experts.shape}")
  return experts.tobytes()


def _experts_from_bytes(data: bytes, length: int, k: int) -> np.ndarray | None:
  if not data:
    return None
  if length < 1 or k < 1 or len(data) % (length * k):
    raise ValueError(f"experts has {len(data)} bytes, not a multiple of {k} for each of {length} tokens")
  return np.frombuffer(data, _U1).reshape(length, -1, k).copy()
