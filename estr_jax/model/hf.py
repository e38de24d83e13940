"""Weights in the Hugging Face layout: config.json and safetensors, in one file or in shards with an index.

One table, `_entries`, says for each parameter of the decoder which tensor of the file it is; `load` and `save` both
follow it. Tensors are read and written one at a time, so that the host holds one copy of the model (and, while
writing, one shard of it).
"""

import contextlib
import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16", by which safetensors asks for it)
import numpy as np
import safetensors
import safetensors.numpy

from estr_jax.errors import UserError
from estr_jax.model.decoder import DecoderConfig
from estr_jax.model.hf_config import check_same, read_config, read_json, settings, source_settings
from estr_jax.structs import Params

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "chat_template.jinja",
  "special_tokens_map.json",
  "vocab.json",
  "merges.txt",
  "generation_config.json",
)


@dataclasses.dataclass(frozen=True)
class _Entry:
  """One parameter and the tensor that holds it (one tensor a layer, where `layered`)."""

  path: tuple[str, ...]  # in the nested dict of parameters
  tensor: str  # in the file; "{}" stands for the layer
  shape: tuple[int, ...]  # of the parameter, without the layers' axis
  stored: tuple[int, ...]  # of the tensor
  transposed: bool = False  # a kernel: the file holds [outputs, inputs]

  @property
  def layered(self) -> bool:
    return self.path[0] == "layers"

  def from_file(self, tensor: np.ndarray) -> np.ndarray:
    return (tensor.T if self.transposed else tensor).reshape(self.shape)

  def to_file(self, value: np.ndarray) -> np.ndarray:
    if not self.transposed:
      return np.ascontiguousarray(value.reshape(self.stored))
    return np.ascontiguousarray(value.reshape(self.stored[::-1]).T)


def _entries(config: DecoderConfig) -> list[_Entry]:
  c = config
  layer = "model.layers.{}."

  def kernel(path: tuple[str, ...], tensor: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> _Entry:
    stored = (math.prod(outputs), math.prod(inputs))
    return _Entry((*path, "kernel"), tensor + ".weight", inputs + outputs, stored, transposed=True)

  def vector(path: tuple[str, ...], tensor: str, shape: tuple[int, ...]) -> _Entry:
    return _Entry(path, tensor, shape, (math.prod(shape),))

  entries = [_Entry(("embed", "embedding"), "model.embed_tokens.weight", *[(c.vocab_size, c.width)] * 2)]
  for name, heads in {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}.items():
    path, tensor, outputs = ("layers", "attention", name), f"{layer}self_attn.{name}_proj", (heads, c.head_dim)
    entries.append(kernel(path, tensor, (c.width,), outputs))
    if c.qkv_bias:
      entries.append(vector((*path, "bias"), f"{tensor}.bias", outputs))
  if c.qk_norm:
    for name in ("q_norm", "k_norm"):
      path = ("layers", "attention", name, "scale")
      entries.append(vector(path, f"{layer}self_attn.{name}.weight", (c.head_dim,)))
  heads = (c.heads, c.head_dim)
  entries.append(kernel(("layers", "attention", "o"), f"{layer}self_attn.o_proj", heads, (c.width,)))
  for name, inputs, outputs in (
    ("gate", c.width, c.mlp_width),
    ("up", c.width, c.mlp_width),
    ("down", c.mlp_width, c.width),
  ):
    entries.append(kernel(("layers", "mlp", name), f"{layer}mlp.{name}_proj", (inputs,), (outputs,)))
  for path, tensor in {
    ("layers", "attention_norm"): f"{layer}input_layernorm",
    ("layers", "mlp_norm"): f"{layer}post_attention_layernorm",
    ("final_norm",): "model.norm",
  }.items():
    entries.append(vector((*path, "scale"), f"{tensor}.weight", (c.width,)))
  if not c.tied_head:
    entries.append(kernel(("head",), "lm_head", (c.width,), (c.vocab_size,)))
  return entries


def load(
  folder: str | Path, config: DecoderConfig | None = None, dtype: str = "float32"
) -> tuple[DecoderConfig, Params]:
  """Reads a Hugging Face style folder.

  Args:
    folder: holds config.json and model.safetensors, or shards with model.safetensors.index.json.
    config: what the caller expects; its dtype and remat are kept, everything else must be what the folder holds.
      None takes the folder's shape with the decoder's own defaults for those two.
    dtype: of the parameters returned.

  Returns:
    The config, and the parameters as NumPy arrays in the nesting of `decoder.init`.

  Raises:
    UserError: a file or tensor is missing, has another shape, or is left over; the config is another one.
  """
  folder = Path(folder)
  held = read_config(folder)
  if config is None:
    config = DecoderConfig(**held)
  check_same(folder, held, config)
  entries = _entries(config)
  files = _locate(folder)
  _check_names(folder, entries, config, files)
  params: Params = {}
  with contextlib.ExitStack() as stack:
    shards = {name: _open(stack, folder / name) for name in sorted(set(files.values()))}

    def read(entry: _Entry, tensor: str) -> np.ndarray:
      shard = shards[files[tensor]]
      try:
        found = tuple(shard.get_slice(tensor).get_shape())
      except safetensors.SafetensorError as e:
        raise UserError(
          f"{folder / files[tensor]} lacks the tensor {tensor} that {INDEX} places there: fetch the folder again"
        ) from e
      if found != entry.stored:
        raise UserError(
          f"{folder / files[tensor]}: {tensor} has shape {found}, but config.json makes it {entry.stored}: "
          "take the config.json that belongs to the weights"
        )
      return entry.from_file(shard.get_tensor(tensor))

    for entry in entries:
      if entry.layered:
        value = np.empty((config.layers, *entry.shape), dtype)
        for i in range(config.layers):
          value[i] = read(entry, entry.tensor.format(i))
      else:
        value = np.array(read(entry, entry.tensor), dtype, order="C")
      _insert(params, entry.path, value)
  return config, params


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
    for name in TOKENIZER_FILES if source is not None else ():
      if (Path(source) / name).is_file():
        shutil.copyfile(Path(source) / name, part / name)
    _write_shards(part, _tensors(config, params), shard_bytes)
    part.rename(folder)


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


def _check_names(folder: Path, entries: list[_Entry], config: DecoderConfig, files: dict[str, str]) -> None:
  """Every parameter has its tensor, and every tensor is used: an ignored one means another architecture."""
  layers = {e: range(config.layers) if e.layered else (0,) for e in entries}
  wanted = {e.tensor.format(i) for e in entries for i in layers[e]}
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
    return stack.enter_context(safetensors.safe_open(path, "np"))
  except (safetensors.SafetensorError, OSError) as e:
    raise UserError(f"{path} cannot be read as safetensors ({e}): fetch the file again") from e


def _tensors(config: DecoderConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
  for entry in _entries(config):
    value = _lookup(params, entry.path)
    if not entry.layered:
      yield entry.tensor, entry.to_file(np.asarray(value))
      continue
    for i in range(config.layers):
      yield entry.tensor.format(i), entry.to_file(np.asarray(value[i]))


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
  weight_map = {}
  for i, names in enumerate(shards):
    file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
    (part / f"{i}.safetensors").rename(part / file)
    weight_map |= dict.fromkeys(names, file)
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  (part / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _insert(tree: Params, path: tuple[str, ...], value: np.ndarray) -> None:
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value


def _lookup(tree: Params, path: tuple[str, ...]) -> Any:
  for key in path:
    tree = tree[key]
  return tree
