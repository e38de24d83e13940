"""Weights as the tests of their rooms publish and want them: numpy arrays, whole."""

import jax
import numpy as np

from estr_jax.model.sharding import path_name
from estr_jax.weights.receive import Blocks
from estr_jax.weights.regions import Region
from estr_jax.weights.store import Piece


def leaves(params: dict) -> dict[str, np.ndarray]:
  return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def whole(name: str, array: np.ndarray) -> Region:
  return Region(name, array.shape, (0,) * array.ndim, array.shape)


def wants(params: dict) -> list[Region]:
  return [whole(name, array) for name, array in leaves(params).items()]


def pieces(params: dict) -> list[Piece]:
  return [Piece(whole(name, array), array) for name, array in leaves(params).items()]


def assert_blocks_are(blocks: Blocks, params: dict) -> None:
  """Bit for bit, with their types."""
  assert {region.name for region in blocks} == leaves(params).keys()
  for region, block in blocks.items():
    expected = leaves(params)[region.name][region.within(whole(region.name, np.empty(region.whole)))]
    assert (block.dtype, block.shape) == (expected.dtype, expected.shape), region
    assert block.tobytes() == expected.tobytes(), region
