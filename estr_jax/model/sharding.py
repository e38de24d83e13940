"""Where every parameter lives on the mesh: one ordered list of rules."""

import re
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from estr_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")

BATCH_SPEC = P(("data", "fsdp"), None)

# (pattern of a leaf's path, its spec); the first match counts. An optimizer's moments match through the
# path of their parameter, which ends theirs. The leading axis of "layers" is the scanned one.
RULES = (
  (r"embed/embedding$", P("tensor", "fsdp")),
  (r"head/kernel$", P("fsdp", "tensor")),
  (r"attention/[qkv]/kernel$", P(None, "fsdp", "tensor", None)),
  (r"attention/[qkv]/bias$", P(None, "tensor", None)),
  (r"attention/o/kernel$", P(None, "tensor", None, "fsdp")),
  (r"mlp/(gate|up)/kernel$", P(None, "fsdp", "tensor")),
  (r"mlp/down/kernel$", P(None, "tensor", "fsdp")),
  (r"norm/scale$", P()),
  (r"(count|step|learning_rate)$", P()),
)


def make_mesh(shape: dict[str, int]) -> Mesh:
  """A mesh over all devices; `shape` maps every name of AXES to its size.

  Raises:
    UserError: the sizes do not multiply to the number of devices.
  """
  sizes = tuple(shape[axis] for axis in AXES)
  devices = jax.device_count()
  product = 1
  for size in sizes:
    product *= size
  if product != devices:
    raise UserError(
      f"mesh {dict(shape)} needs {product} devices and {devices} are here; set mesh.data, mesh.fsdp and mesh.tensor"
    )
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def path_name(path: tuple) -> str:
  """A leaf's path as `layers/attention/q/kernel`."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def shardings(tree: Any, mesh: Mesh, rules=RULES) -> Any:
  """The NamedSharding of every leaf of params, of an optimizer state or of a whole TrainState.

  Raises:
    UserError: a leaf that no rule matches, or an axis that its mesh axes do not divide.
  """

  def place(path, leaf) -> NamedSharding:
    name = path_name(path)
    spec = next((spec for pattern, spec in rules if re.search(pattern, name)), None)
    if spec is None:
      raise UserError(f"no sharding rule matches {name} {leaf.shape}; add one to RULES in model/sharding.py")
    for axis, (size, where) in enumerate(zip(leaf.shape, spec)):
      parts = 1 if where is None else mesh.shape[where]
      if size % parts:
        raise UserError(
          f"{name} has {size} entries along axis {axis}, which mesh.{where}={parts} does not divide; change the mesh"
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(place, tree)
