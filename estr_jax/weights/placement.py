"""Between parameters on a mesh and the regions of this process: what its devices need, and how it gets there."""

from typing import Any

import jax
import numpy as np

from estr_jax.model.sharding import path_name
from estr_jax.structs import Params
from estr_jax.weights.receive import Blocks
from estr_jax.weights.regions import Region, region_at


def wanted_by(abstract: Params) -> list[Region]:
  """Every region that a device of this process needs, once; leaves are ShapeDtypeStructs with a sharding."""
  regions = (
    region_at(path_name(path), leaf.shape, index)
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
    for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
  )
  return list(dict.fromkeys(regions))


def placed(abstract: Params, blocks: Blocks) -> Params:
  """The arrays that `abstract` describes, from the blocks of `wanted_by(abstract)`; empties `blocks` on its way.

  Every process of the mesh makes its own part of the same arrays. Beside the blocks at most one parameter's part lies
  in the host's memory: parameters are converted, where their type differs, and moved one after the other.
  """

  def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    name = path_name(path)
    ready: Blocks = {}

    def part(index: Any) -> np.ndarray:  # an Index; JAX's types allow None, which JAX never gives
      region = region_at(name, leaf.shape, index)
      if region not in ready:  # several devices may hold the same
        ready[region] = np.asarray(blocks.pop(region), leaf.dtype)
      return ready[region]

    array = jax.make_array_from_callback(leaf.shape, leaf.sharding, part, dtype=leaf.dtype)
    # Otherwise all transfers wait at once, each with its block and its copy.
    return jax.block_until_ready(array)

  return jax.tree_util.tree_map_with_path(place, abstract)
