"""Weights as the tests of their rooms publish and want them: numpy arrays."""

import jax
import ml_dtypes
import numpy as np

from estr_jax.model.sharding import path_name
from estr_jax.weights.receive import Blocks
from estr_jax.weights.regions import Region
from estr_jax.weights.store import Piece

PARAMS = {
  "embed": np.arange(32, dtype=np.float32).reshape(8, 4),
  "layers": {"up": np.arange(48).reshape(2, 4, 6).astype(ml_dtypes.bfloat16)},
  "scale": np.float32(1.5).reshape(()),
}


def leaves(params: dict) -> dict[str, np.ndarray]:
  return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def whole(name: str, array: np.ndarray) -> Region:
  return Region(name, array.shape, (0,) * array.ndim, array.shape)


def wants(params: dict) -> list[Region]:
  return [whole(name, array) for name, array in leaves(params).items()]


def pieces(params: dict) -> list[Piece]:
  return [Piece(whole(name, array), array) for name, array in leaves(params).items()]


def cut(piece: Piece, axis: int, parts: int) -> list[Piece]:
  """A piece in equal parts along an axis."""
  region, found = piece.region, []
  for lo in range(0, region.whole[axis], step := region.whole[axis] // parts):
    start = (*region.start[:axis], lo, *region.start[axis + 1 :])
    stop = (*region.stop[:axis], lo + step, *region.stop[axis + 1 :])
    part = Region(region.name, region.whole, start, stop)
    found.append(Piece(part, piece.array()[part.within(region)]))
  return found


def by_host() -> list[list[Piece]]:
  """What two hosts hold of PARAMS: halves of what has axes, the first alone what has none."""
  embed, up, scale = pieces(PARAMS)
  (embed_0, embed_1), (up_0, up_1) = cut(embed, 0, 2), cut(up, 2, 2)
  return [[embed_0, up_1, scale], [embed_1, up_0]]


def assert_blocks_are(blocks: Blocks, params: dict) -> None:
  """Bit for bit, with their types."""
  assert {region.name for region in blocks} == leaves(params).keys()
  for region, block in blocks.items():
    expected = leaves(params)[region.name][region.within(whole(region.name, np.empty(region.whole)))]
    assert (block.dtype, block.shape) == (expected.dtype, expected.shape), region
    assert block.tobytes() == expected.tobytes(), region
