"""Weights as a stream of parts, and put together again."""

import itertools
from collections.abc import Iterable, Iterator

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from weights_cases import assert_blocks_are, pieces, wants, whole

from estr_jax.weights import store
from estr_jax.weights.parts import Chunk, Part
from estr_jax.weights.receive import Receiver, manifest_of
from estr_jax.weights.regions import Region
from estr_jax.weights.store import Piece, Snapshot


def grids(shape: tuple[int, ...]) -> st.SearchStrategy:
  """Partitions of a shape into boxes: cuts along every axis."""
  cuts = st.tuples(*(st.sets(st.integers(1, size - 1), max_size=2) if size > 1 else st.just(set()) for size in shape))

  def boxes(axes):
    spans = [list(itertools.pairwise([0, *sorted(inner), size])) for inner, size in zip(axes, shape)]
    chosen = itertools.product(*spans)
    return [Region("w", shape, tuple(lo for lo, _ in box), tuple(hi for _, hi in box)) for box in chosen]

  return cuts.map(boxes)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_partition_becomes_any_other_and_moves_no_number_twice(data):
  """Fails if a cut that is finer, coarser or crosswise is put together wrongly, or more moves than is wanted."""
  shape = data.draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
  array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(np.int32)
  everything = Region("w", shape, (0,) * len(shape), shape)
  held = [Piece(region, array[region.within(everything)]) for region in data.draw(grids(shape))]
  regions = data.draw(grids(shape))
  wanted = regions[: data.draw(st.integers(1, len(regions)))]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(store, "CHUNK_BYTES", data.draw(st.sampled_from([4, 12, 40, 4096])))
    streams = [Snapshot(1, part).stream(wanted) for part in (held[::2], held[1::2])]
    receiver = Receiver(wanted, [manifest_of(stream) for stream in streams])
    moved = 0
    for host, stream in enumerate(streams):
      chunks = list(stream)
      moved += sum(len(chunk.data) for chunk in chunks)
      receiver.fill(host, chunks)
  assert moved == sum(region.size for region in wanted) * array.itemsize
  assert list(receiver.blocks) == wanted
  for region, block in receiver.blocks.items():
    np.testing.assert_array_equal(block, array[region.within(everything)])


def params() -> dict:
  rng = np.random.default_rng(0)
  return {
    "embed": rng.normal(size=(7, 5)).astype(np.float32),
    "layers": {
      "mlp": {"up": rng.normal(size=(2, 3, 4)).astype(ml_dtypes.bfloat16), "scale": np.float32(1.5).reshape(())},
      "norm": rng.normal(size=6).astype(ml_dtypes.float8_e4m3fn),
      "empty": np.zeros((0, 3), np.float16),
      "turned": np.asfortranarray(rng.normal(size=(4, 6))),
    },
  }


def stream() -> Iterator[Part]:
  return Snapshot(3, pieces(params())).stream(wants(params()))


def received(parts: Iterable[Part]) -> Receiver:
  parts = iter(parts)
  receiver = Receiver(wants(params()), [manifest_of(parts)])
  receiver.fill(0, parts)
  return receiver


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 4 << 20])
def test_weights_survive_bit_for_bit_whatever_the_chunk(monkeypatch, chunk_bytes):
  """Fails if a low-precision type, a scalar, an empty or a transposed array changes on its way."""
  monkeypatch.setattr(store, "CHUNK_BYTES", chunk_bytes)
  sizes = [len(part.data) for part in stream() if isinstance(part, Chunk)]
  assert max(sizes) <= max(chunk_bytes, 8)
  got = received(stream())
  assert got.version == 3
  assert_blocks_are(got.blocks, params())


def test_a_damaged_stream_is_noticed():
  """Fails if the checksum, the length or the order of the chunks is not looked at."""
  parts = list(stream())
  flipped = parts[1]._replace(data=bytes([parts[1].data[0] ^ 1]) + parts[1].data[1:])
  stray = Chunk(99, 0, b"1234", 0)
  for damaged, fault in (
    ([parts[0], flipped, *parts[2:]], r"embed\[0:7, 0:5\]: the checksum of bytes 0..140 of version 3"),
    (parts[:-1], "bytes arrived"),
    ([parts[0], parts[1], *parts[1:]], r"embed\[0:7, 0:5\]: bytes 0..140 after 140 of 140"),
    (parts[1:], "does not begin with its manifest"),
    ([*parts, stray], "belongs to no block"),
    ([*parts, parts[0]], "belongs to no block"),
  ):
    with pytest.raises(ValueError, match=fault):
      received(damaged)
  assert manifest_of(iter([])) is None


def test_two_parameters_of_one_name_are_noticed():
  """Fails if a key that holds a slash takes another parameter's place."""
  bad = {"a/b": np.zeros(2), "a": {"b": np.ones(2)}}
  both = [Piece(whole("a/b", array), array) for array in (bad["a/b"], bad["a"]["b"])]
  parts = Snapshot(0, both).stream([whole("a/b", np.zeros(2))])
  with pytest.raises(ValueError, match=r"a/b\[0:2\]: a part of it is served twice"):
    Receiver([whole("a/b", np.zeros(2))], [manifest_of(parts)])
