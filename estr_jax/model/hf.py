"""Weights in the Hugging Face layout: config.json and safetensors, in one file or in shards with an index.

One table, `_entries`, says for each parameter of the decoder which tensor of the file it is; `load` and `save` both
follow it. Tensors are read and written one at a time, so that the host holds one copy of the model, or, where it is
read onto a mesh, no more than a tensor beside what its devices hold (and, while writing, one shard of it).
"""

import contextlib
import dataclasses
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16", by which safetensors asks for it)
import numpy as np
import safetensors
import safetensors.numpy

from estr_jax.errors import UserError
from estr_jax.model.config import DecoderConfig
from estr_jax.model.hf_config import check_same, read_config, read_json, settings, source_settings
from estr_jax.structs import Params

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEMPLATES = "additional_chat_templates"
DTYPES = ("F32", "BF16", "F16")  # of stored tensors; quantised ones would need their scales
TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "chat_template.jinja",
  "special_tokens_map.json",
  "vocab.json",
  "merges.txt",
  "generation_config.json",
)


_Names = tuple[str, ...]  # the keys that lead to a parameter in the nested dict
_Sizes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Entry:
  """One parameter and the tensor that holds it, or the tensors: one a layer, or one for each expert of each layer."""

  path: _Names
  tensor: str  # in the file; each "{}" stands for an index along a stacked axis
  stacked: tuple[int, ...]  # leading axes of the parameter: layers, experts
  axes: tuple[tuple[int, ...], ...]  # for each axis of the tensor the axes of the parameter that it flattens
  transposed: bool = False  # a kernel: `axes` are inputs, outputs, and the file holds [outputs, inputs]

  @property
  def shape(self) -> tuple[int, ...]:
    return sum(self.axes, self.stacked)

  @property
  def stored(self) -> tuple[int, ...]:
    flat = tuple(math.prod(group) for group in self.axes)
    return flat[::-1] if self.transposed else flat

  def tensors(self) -> Iterator[tuple[tuple[int, ...], str]]:
    for index in np.ndindex(self.stacked):
      yield index, self.tensor.format(*index)

  def stored_slices(self, slices: tuple[slice, ...]) -> tuple[slice, ...]:
    """Which part of the tensor holds a part of the parameter, whose slices leave the stacked axes out."""
    found, rest = [], list(slices)
    for group in self.axes:
      (first, *inner), rest = rest[: len(group)], rest[len(group) :]
      if any(len(range(*s.indices(size))) != size for s, size in zip(inner, group[1:])):
        raise UserError(
          f"{'/'.join(self.path)} can be split along the first of its axes {group} only: change the rules"
        )
      start, stop, _ = first.indices(group[0])
      found.append(slice(start * math.prod(group[1:]), stop * math.prod(group[1:])))
    return tuple(found[::-1] if self.transposed else found)

  def from_file(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return (tensor.T if self.transposed else tensor).reshape(shape)

  def to_file(self, value: np.ndarray) -> np.ndarray:
    if not self.transposed:
      return np.ascontiguousarray(value.reshape(self.stored))
    return np.ascontiguousarray(value.reshape(self.stored[::-1]).T)


def _entries(config: DecoderConfig) -> list[_Entry]:
  c = config
  layer, layers = "model.layers.{}.", (c.layers,)

  def kernel(path: _Names, tensor: str, inputs: _Sizes, outputs: _Sizes, stacked: _Sizes = layers) -> _Entry:
    return _Entry(path, f"{tensor}.weight", stacked, (inputs, outputs), transposed=True)

  def vector(path: _Names, tensor: str, shape: _Sizes, stacked: _Sizes = layers) -> _Entry:
    return _Entry(path, tensor, stacked, (shape,))

  width, heads = (c.width,), (c.heads, c.head_dim)
  attention, names = ("layers", "attention"), f"{layer}self_attn."
  entries = [_Entry(("embed", "embedding"), "model.embed_tokens.weight", (), ((c.vocab_size,), width))]
  for name, count in {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}.items():
    outputs: _Sizes = (count, c.head_dim)
    entries.append(kernel((*attention, name, "kernel"), f"{names}{name}_proj", width, outputs))
    if c.qkv_bias:
      entries.append(vector((*attention, name, "bias"), f"{names}{name}_proj.bias", outputs))
  if c.qk_norm:
    for name in ("q_norm", "k_norm"):
      entries.append(vector((*attention, name, "scale"), f"{names}{name}.weight", (c.head_dim,)))
  entries.append(kernel((*attention, "o", "kernel"), f"{names}o_proj", heads, width))
  leaf: _Names
  stacked: _Sizes
  if c.experts:
    mlp_width, tensors, leaf, stacked = (c.expert_mlp_width,), f"{layer}mlp.experts.{{}}.", (), (c.layers, c.experts)
    entries.append(kernel(("layers", "mlp", "router", "kernel"), f"{layer}mlp.gate", width, (c.experts,)))
  else:
    mlp_width, tensors, leaf, stacked = (c.mlp_width,), f"{layer}mlp.", ("kernel",), layers
  for name, inputs, outputs in (("gate", width, mlp_width), ("up", width, mlp_width), ("down", mlp_width, width)):
    entries.append(kernel(("layers", "mlp", name, *leaf), f"{tensors}{name}_proj", inputs, outputs, stacked))
  entries.append(vector(("layers", "attention_norm", "scale"), f"{layer}input_layernorm.weight", width))
  entries.append(vector(("layers", "mlp_norm", "scale"), f"{layer}post_attention_layernorm.weight", width))
  entries.append(vector(("final_norm", "scale"), "model.norm.weight", width, ()))
  if not c.tied_head:
    entries.append(kernel(("head", "kernel"), "lm_head", width, (c.vocab_size,), ()))
  return entries


def load(
  folder: str | Path, config: DecoderConfig | None = None, dtype: str = "float32", *, places: Any = None
) -> tuple[DecoderConfig, Params]:
  """Reads a Hugging Face style folder.

  Args:
    folder: holds config.json and model.safetensors, or shards with model.safetensors.index.json.
    config: what the caller expects; its dtype and remat are kept, everything else must be what the folder holds.
      None takes the folder's shape with the decoder's own defaults for those two.
    dtype: of the parameters returned.
    places: a sharding for each parameter, of `sharding.shardings(decoder.abstract_params(config), mesh)`. Every host
      then reads what its devices hold and no more, and has one tensor at a time in its memory.

  Returns:
    The config, and the parameters in the nesting of `decoder.init`: NumPy arrays, or with `places` JAX arrays there.

  Raises:
    UserError: a file or tensor is missing, has another shape or dtype, or is left over; the config is another one.
  """
  folder = Path(folder)
  held = read_config(folder)
  if config is None:
    config = DecoderConfig(**held)
  check_same(folder, held, config)
  entries = _entries(config)
  files = _locate(folder)
  _check_names(folder, entries, files)
  params: Params = {}
  with contextlib.ExitStack() as stack:
    shards = {name: _open(stack, folder / name) for name in sorted(set(files.values()))}

    def read(entry: _Entry, tensor: str, slices: tuple[slice, ...]) -> np.ndarray:
      where = folder / files[tensor]
      try:
        found = shards[files[tensor]].get_slice(tensor)
      except safetensors.SafetensorError as e:
        raise UserError(f"{where} lacks the tensor {tensor} that {INDEX} places there: fetch the folder again") from e
      if tuple(found.get_shape()) != entry.stored:
        raise UserError(
          f"{where}: {tensor} has shape {tuple(found.get_shape())}, but config.json makes it {entry.stored}: "
          "take the config.json that belongs to the weights"
        )
      if found.get_dtype() not in DTYPES:
        raise UserError(f"{where}: {tensor} is {found.get_dtype()}, not one of {', '.join(DTYPES)}: take other weights")
      axes = entry.shape[len(entry.stacked) :]
      shape = tuple(len(range(*s.indices(size))) for s, size in zip(slices, axes))
      return entry.from_file(found[entry.stored_slices(slices)], shape).astype(dtype)

    for entry in entries:
      if places is None:
        _insert(params, entry.path, _read_whole(entry, dtype, read))
      else:
        _insert(params, entry.path, _read_onto(entry, dtype, _lookup(places, entry.path), read))
  return config, params


def _read_whole(entry: _Entry, dtype: str, read: Callable[..., np.ndarray]) -> np.ndarray:
  value = np.empty(entry.shape, dtype)
  everything = (slice(None),) * (len(entry.shape) - len(entry.stacked))
  for index, tensor in entry.tensors():
    value[index] = read(entry, tensor, everything)
  return value


def _read_onto(entry: _Entry, dtype: str, place: jax.sharding.Sharding, read: Callable[..., np.ndarray]) -> jax.Array:
  """The parameter on its devices, each tensor cut and written into its place there before the next one is read."""
  depth = len(entry.stacked)
  parts: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}  # devices that hold the same part share one reading
  for device, slices in place.devices_indices_map(entry.shape).items():
    if device in place.addressable_devices:
      parts.setdefault(tuple(s.indices(n)[:2] for s, n in zip(slices, entry.shape)), []).append(device)
  shape = place.shard_shape(entry.shape)
  buffers = {device: jnp.zeros(shape, dtype, device=device) for devices in parts.values() for device in devices}
  for index, tensor in entry.tensors():
    for ranges, devices in parts.items():
      if all(start <= i < stop for i, (start, stop) in zip(index, ranges)):
        piece = read(entry, tensor, tuple(slice(*r) for r in ranges[depth:])).reshape((1,) * depth + shape[depth:])
        start = [i - first for i, (first, _) in zip(index, ranges)] + [0] * (len(shape) - depth)
        for device in devices:
          buffers[device] = _write(buffers[device], piece, np.asarray(start, np.int32))
        jax.block_until_ready([buffers[device] for device in devices])  # or the pieces would queue up in memory
  return jax.make_array_from_single_device_arrays(entry.shape, place, list(buffers.values()))


@functools.partial(jax.jit, donate_argnums=0)
def _write(buffer: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_slice(buffer, piece, list(start))


def save(
  folder: str | Path, config: DecoderConfig, params: Params, source: str | Path | None = None, shard_bytes: int = 2**31
) -> None:
  """Writes a Hugging Face style folder, all of it or nothing; the tensors keep the parameters' dtype.

  Args:
    folder: must not exist, or be empty.
    config: the shape of the parameters.
    params: as `decoder.init` nests them; NumPy or JAX arrays.
    source: the folder whose config.json and tokenizer files go with the weights. None writes a config.json
      of the least that says the shape, and no tokenizer.
    shard_bytes: a file's largest size, unless one tensor is larger; also what is held beside the parameters.

  Raises:
    UserError: the folder is not empty, or the source is of another shape.
  """
  folder = Path(folder)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise UserError(f"{folder} is not empty: remove it or write to another folder")
  written = settings(config) if source is None else source_settings(Path(source), config)
  written["torch_dtype"] = str(np.dtype(_lookup(params, ("embed", "embedding")).dtype))
  written.pop("dtype", None)  # the newer name of torch_dtype, of which the source may have been right
  folder.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
    part = Path(scratch) / folder.name
    part.mkdir()
    (part / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    if source is not None:
      _copy_tokenizer(Path(source), part)
    _write_shards(part, _tensors(config, params), shard_bytes)
    part.rename(folder)


def _copy_tokenizer(source: Path, part: Path) -> None:
  for name in TOKENIZER_FILES:
    if (source / name).is_file():
      shutil.copyfile(source / name, part / name)
  if (source / TEMPLATES).is_dir():
    shutil.copytree(source / TEMPLATES, part / TEMPLATES)


def _locate(folder: Path) -> dict[str, str]:
  """The file's name for each tensor's name."""
  if (folder / INDEX).is_file():
    index = read_json(folder / INDEX, "fetch the folder again")
    if "weight_map" not in index:
      raise UserError(f"{folder / INDEX} has no weight_map: fetch the folder again")
    files = index["weight_map"]
    for name in sorted(set(files.values())):
      if not (folder / name).is_file():
        raise UserError(f"{folder} lacks the shard {name} that {INDEX} names: fetch the folder again")
    return files
  if not (folder / SINGLE).is_file():
    raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}: point to a Hugging Face style folder with weights")
  with contextlib.ExitStack() as stack:
    return dict.fromkeys(_open(stack, folder / SINGLE).keys(), SINGLE)


def _check_names(folder: Path, entries: list[_Entry], files: dict[str, str]) -> None:
  """Every parameter has its tensor, and every tensor is used: an ignored one means another architecture."""
  wanted = {tensor for entry in entries for _, tensor in entry.tensors()}
  where = folder / (INDEX if (folder / INDEX).is_file() else SINGLE)
  for tensor in sorted(wanted - set(files)):
    because = "" if tensor != "lm_head.weight" else ", but config.json says tie_word_embeddings false"
    raise UserError(f"{where} has no tensor {tensor}{because}: take the config.json that belongs to the weights")
  for tensor in sorted(set(files) - wanted):
    # Some files repeat a tied head, or store the rotary frequencies, which follow from the config.
    if tensor != "lm_head.weight" and not tensor.endswith("rotary_emb.inv_freq"):
      raise UserError(f"{where} holds the tensor {tensor}, which config.json does not account for: take other weights")


def _open(stack: contextlib.ExitStack, path: Path) -> Any:
  try:
    # Not mapped into memory, where what was read would stay.
    return stack.enter_context(safetensors.safe_open(path, "np", backend="pread"))
  except (safetensors.SafetensorError, OSError) as e:
    raise UserError(f"{path} cannot be read as safetensors ({e}): fetch the file again") from e


def _tensors(config: DecoderConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
  for entry in _entries(config):
    value = _lookup(params, entry.path)
    rows = range(len(value)) if entry.stacked else (...,)
    for row in rows:
      held = np.asarray(value[row])  # of a layer, where there are layers: a device is asked once for all experts of it
      for index in np.ndindex(entry.stacked[1:]):
        where = (row, *index) if entry.stacked else ()
        yield entry.tensor.format(*where), entry.to_file(held[index])


def _write_shards(part: Path, tensors: Iterator[tuple[str, np.ndarray]], shard_bytes: int) -> None:
  """Fills one shard at a time; the files get their names, which hold the number of shards, at the end."""
  shards: list[list[str]] = []
  total = 0
  held: dict[str, np.ndarray] = {}

  def flush() -> None:
    path = part / f"{len(shards)}.safetensors"
    safetensors.numpy.save_file(held, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library makes it private
    shards.append(list(held))
    held.clear()

  for name, tensor in tensors:
    if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > shard_bytes:
      flush()
    held[name] = tensor
    total += tensor.nbytes
  flush()

  if len(shards) == 1:
    (part / "0.safetensors").rename(part / SINGLE)
    return
  weight_map: dict[str, str] = {}
  for i, names in enumerate(shards):
    file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
    (part / f"{i}.safetensors").rename(part / file)
    weight_map |= dict.fromkeys(names, file)
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  (part / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _insert(tree: Params, path: tuple[str, ...], value: np.ndarray | jax.Array) -> None:
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value


def _lookup(tree: Params, path: tuple[str, ...]) -> Any:
  for key in path:
    tree = tree[key]
  return tree
