"""From counts to times: how fast a step can be at best, and what holds it there."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from estr_jax.model import decoder
from estr_jax.model.config import DecoderConfig
from estr_jax.model.sharding import path_name
from estr_jax.planning.chips import Slice, span_bandwidth
from estr_jax.planning.hlo import Traffic


@dataclasses.dataclass(frozen=True)
class Layout:
  """Where in the torus the devices of a mesh are."""

  sizes: dict[str, int]  # of its axes
  coordinates: np.ndarray  # [*sizes, dimensions]

  def group(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The places of those devices that differ along `axes` only."""
    index = tuple(slice(None) if axis in axes else 0 for axis in self.sizes)
    return [tuple(place) for place in self.coordinates[index].reshape(-1, self.coordinates.shape[-1]).tolist()]


def describe(sizes: Mapping[str, int]) -> str:
  """A mesh in words, by the sizes of its axes."""
  return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


def layout_of(mesh: Mesh, place: Slice) -> Layout:
  """Of a mesh of TPU devices, or of others in the order of the slice's chips."""
  devices = np.ravel(mesh.devices)
  if devices[0].platform == "tpu":
    coordinates = np.array([device.coords for device in devices])
  else:
    coordinates = np.stack(np.unravel_index([device.id for device in devices], place.sides), axis=-1)
  return Layout(dict(mesh.shape), coordinates.reshape(*mesh.devices.shape, -1))


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Lower bounds of one step, seconds, if each resource alone were the limit."""

  compute: float
  hbm: float
  ici: dict[tuple[str, ...], float]  # by mesh axes; one after the other, as they may share links

  @property
  def seconds(self) -> float:
    """If everything overlaps that can."""
    return max(self.compute, self.hbm, sum(self.ici.values()))

  @property
  def bound(self) -> str:
    times = {"compute": self.compute, "HBM": self.hbm, "ICI": sum(self.ici.values())}
    return max(times, key=times.__getitem__)


def roofline(flops: float, traffic: Traffic, place: Slice, layout: Layout) -> Roofline:
  """Of a program whose `flops` are those of all devices together, evenly shared."""
  chip = place.chip
  ici: dict[tuple[str, ...], float] = {}
  for one in traffic.collectives:
    bandwidth = span_bandwidth(chip, layout.group(one.axes), place.sides)
    ici[one.axes] = ici.get(one.axes, 0.0) + one.bytes / bandwidth
  return Roofline(flops / place.chips / chip.flops, traffic.hbm_bytes / chip.hbm_bandwidth, ici)


def active_params(model: DecoderConfig) -> int:
  """Parameters that a token is multiplied with: of the experts those that it goes to, and no embedding by itself."""
  total = 0.0
  for path, leaf in jax.tree_util.tree_leaves_with_path(decoder.abstract_params(model)):
    name, size = path_name(path), math.prod(leaf.shape)
    if name == "embed/embedding":
      size *= model.tied_head
    elif name.endswith(("mlp/gate", "mlp/up", "mlp/down")):
      size *= model.experts_per_token / model.experts
    total += size
  return round(total)


def train_flops(model: DecoderConfig, rows: int, length: int) -> float:
  """What training on a batch is worth: 6 N a token, and causal attention forward and twice that back."""
  attention = 3 * 2 * model.layers * model.heads * model.head_dim * length**2
  return rows * (6 * active_params(model) * length + attention)


def decode_flops(model: DecoderConfig, slots: int, context: int) -> float:
  """Of one token for each slot, with a full cache."""
  return slots * (2 * active_params(model) + 4 * model.layers * model.heads * model.head_dim * context)


def decode_bytes(model: DecoderConfig, slots: int, context: int, weight_bytes: int) -> float:
  """What one decode step has to read in all: the weights once (but for the embedding's table) and a full cache."""
  weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(decoder.abstract_params(model)))
  weights -= 0 if model.tied_head else model.vocab_size * model.width
  cache = 2 * model.layers * slots * context * model.kv_heads * model.head_dim
  return weights * weight_bytes + cache * jnp.dtype(model.dtype).itemsize
