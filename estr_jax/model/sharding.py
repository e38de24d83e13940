"""Where every parameter lives on the mesh: one ordered list of rules."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from estr_jax.errors import UserError

AXES = ("data", "fsdp", "tensor", "expert")

# The rows of a batch are split over the expert axis too: outside of the experts it would only repeat work.
BATCH_AXES = ("data", "fsdp", "expert")
BATCH_SPEC = P(BATCH_AXES, None)

# What is not an expert is split over both axes along which rows are, as fully sharded data parallelism does.
_FSDP = ("fsdp", "expert")

# (pattern of a leaf's path, its spec, the names of its axes); the first match counts. An optimizer's moments match
# through the path of their parameter, which ends theirs. The leading axis of "layers" is the scanned one.
RULES = (
  (r"embed/embedding$", P("tensor", _FSDP), "vocabulary width"),
  (r"head/kernel$", P(_FSDP, "tensor"), "width vocabulary"),
  (r"attention/q/kernel$", P(None, _FSDP, "tensor", None), "layers width heads head_dim"),
  (r"attention/[kv]/kernel$", P(None, _FSDP, "tensor", None), "layers width kv_heads head_dim"),
  (r"attention/q/bias$", P(None, "tensor", None), "layers heads head_dim"),
  (r"attention/[kv]/bias$", P(None, "tensor", None), "layers kv_heads head_dim"),
  (r"attention/o/kernel$", P(None, "tensor", None, _FSDP), "layers heads head_dim width"),
  (r"mlp/(gate|up)/kernel$", P(None, _FSDP, "tensor"), "layers width mlp_width"),
  (r"mlp/down/kernel$", P(None, "tensor", _FSDP), "layers mlp_width width"),
  (r"mlp/router/kernel$", P(None, _FSDP, None), "layers width experts"),
  (r"mlp/(gate|up)$", P(None, "expert", "fsdp", "tensor"), "layers experts width expert_mlp_width"),
  (r"mlp/down$", P(None, "expert", "tensor", "fsdp"), "layers experts expert_mlp_width width"),
  (r"norm/scale$", P(), ""),
  (r"(count|step|learning_rate|entropy_coefficient)$", P(), ""),
)


def make_mesh(shape: dict[str, int], devices: Sequence[jax.Device] | None = None, *, said: str = "mesh") -> Mesh:
  """A mesh over all devices, or over those given; `shape` maps every name of AXES to its size, as `said` in the config.

  Raises:
    UserError: a size is missing, or they do not multiply to the number of devices.
  """
  for axis in AXES:
    if axis not in shape:
      raise UserError(f"mesh {dict(shape)} has no size for {axis}: set {said}.{axis}, 1 where it is not used")
  sizes = tuple(shape[axis] for axis in AXES)
  count, product = jax.device_count() if devices is None else len(devices), math.prod(sizes)
  if product != count:
    keys = ", ".join(f"{said}.{axis}" for axis in AXES)
    raise UserError(f"{said} {dict(shape)} needs {product} devices and {count} are here; the product of {keys} decides")
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def batch_shards(mesh: Mesh) -> int:
  """Into how many parts the rows of a batch are split."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def path_name(path: tuple) -> str:
  """A leaf's path as `layers/attention/q/kernel`."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def shardings(tree: Any, mesh: Mesh | AbstractMesh, rules: Sequence[tuple[str, P, str]] = RULES) -> Any:
  """The NamedSharding of every leaf of params, of an optimizer state or of a whole TrainState.

  Raises:
    UserError: a leaf that no rule matches, or an axis that its mesh axes do not divide.
  """

  def place(path: tuple, leaf: Any) -> NamedSharding:
    name = path_name(path)
    found = next((rule for rule in rules if re.search(rule[0], name)), None)
    if found is None:
      raise UserError(f"no sharding rule matches {name} {leaf.shape}; add one to RULES in model/sharding.py")
    _, spec, axes = found
    for size, axis, where in zip(leaf.shape, axes.split(), spec):
      where = () if where is None else (where,) if isinstance(where, str) else where
      parts = math.prod(mesh.shape[one] for one in where)
      if size % parts:
        keys = " x ".join(f"mesh.{one}" for one in where)
        raise UserError(f"{name}: {axis} {size} is not divided by {keys} = {parts}; change the mesh")
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(place, tree)
