"""Round trips: trajectories and prompts as messages, weights as a stream."""

import dataclasses
import re
from collections.abc import Iterable, Iterator

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from weights_cases import assert_blocks_are, pieces, wants, whole

from estr_jax.structs import Prompt, Trajectory
from estr_jax.weights import store as weights
from estr_jax.weights.receive import Receiver, manifest_of
from estr_jax.wire import codec
from estr_jax.wire import estr_jax_pb2 as pb

INT64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def trajectories(draw) -> Trajectory:
  length = draw(st.integers(0, 9))

  def array(dtype, **elements):
    return draw(hnp.arrays(dtype, length, elements=hnp.from_dtype(np.dtype(dtype), **elements)))

  return Trajectory(
    tokens=array(np.int32),
    mask=array(np.bool_),
    logprob=array(np.float32),  # NaN, infinities, -0.0 and subnormals included
    entropy=array(np.float32),
    gini=array(np.float32),
    version=array(np.int32),
    reward=draw(st.floats()),
    prompt_id=draw(INT64),
    group=draw(INT64),
    task=draw(st.text()),
    finish=draw(st.text()),
    turns=draw(INT64),
    seconds=draw(st.floats()),
    vocabulary=draw(st.none() | hnp.arrays(np.float32, (length, 3))) if length else None,
    experts=draw(st.none() | hnp.arrays(np.uint8, (length, 3, 2))) if length else None,
  )


def exact(record) -> dict:
  """Every field down to its bits, with its type."""
  fields = {}
  for field in dataclasses.fields(record):
    value = getattr(record, field.name)
    if isinstance(value, np.ndarray):
      fields[field.name] = (value.dtype, value.shape, value.tobytes())
    else:
      fields[field.name] = (type(value), np.float64(value).tobytes() if isinstance(value, float) else value)
  return fields


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(trajectory=trajectories())
def test_a_trajectory_survives_bit_for_bit(trajectory):
  """Fails on a field left out, swapped, rounded through another type, or shortened."""
  message = pb.Trajectory.FromString(codec.trajectory_to_message(trajectory).SerializeToString())
  back = codec.trajectory_from_message(message)
  assert exact(back) == exact(trajectory)
  assert back.logprob.flags.writeable


def test_minus_infinity_survives():
  one, zero = np.array([-np.inf], np.float32), np.zeros(1, np.float32)
  mask, ids = np.array([True]), np.array([3], np.int32)
  sent = Trajectory(ids, mask, one, zero, zero, ids, 0.5, 1, 2, "t", "stop", 1, 0.1)
  assert codec.trajectory_from_message(codec.trajectory_to_message(sent)).logprob[0] == -np.inf


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(tokens=hnp.arrays(np.int32, st.integers(0, 5)), number=INT64, text=st.text())
def test_a_prompt_survives_bit_for_bit(tokens, number, text):
  prompt = Prompt(id=number, group=-number - 1, tokens=tokens, answer=text, task=text + "x")
  assert exact(codec.prompt_from_message(codec.prompt_to_message(prompt))) == exact(prompt)


def test_a_wrong_type_is_refused_by_name_not_cast():
  """Fails if a float64 log-prob is rounded in silence."""
  mask, ids = np.array([True]), np.array([3], np.int32)
  zero = np.zeros(1, np.float32)
  bad = Trajectory(ids, mask, np.zeros(1), zero, zero, ids, 0.0, 0, 0, "t", "stop", 1, 0.1)
  with pytest.raises(ValueError, match="logprob has to be float32"):
    codec.trajectory_to_message(bad)


def test_a_torn_array_is_refused_by_name():
  with pytest.raises(ValueError, match="entropy has 5 bytes"):
    codec.trajectory_from_message(pb.Trajectory(entropy=b"12345"))
  with pytest.raises(ValueError, match="vocabulary has 12 bytes"):
    codec.trajectory_from_message(pb.Trajectory(tokens=b"12345678", vocabulary=b"123456789012"))
  with pytest.raises(ValueError, match="experts has 6 bytes"):
    codec.trajectory_from_message(pb.Trajectory(tokens=b"12345678", experts=b"123456", experts_per_token=2))


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


def stream() -> Iterator[pb.WeightsPart]:
  return weights.Snapshot(3, pieces(params())).stream(wants(params()))


def received(parts: Iterable[pb.WeightsPart]) -> Receiver:
  parts = iter(parts)
  receiver = Receiver(wants(params()), [manifest_of(parts)])
  receiver.fill(0, parts)
  return receiver


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 4 << 20])
def test_weights_survive_bit_for_bit_whatever_the_chunk(monkeypatch, chunk_bytes):
  """Fails if a low-precision type, a scalar, an empty or a transposed array changes on its way."""
  monkeypatch.setattr(weights, "CHUNK_BYTES", chunk_bytes)
  sizes = [len(part.chunk.data) for part in stream() if part.WhichOneof("part") == "chunk"]
  assert max(sizes) <= max(chunk_bytes, 8)
  got = received(stream())
  assert got.version == 3
  assert_blocks_are(got.blocks, params())


def test_a_damaged_stream_is_noticed():
  """Fails if the checksum, the length or the order of the chunks is not looked at."""
  parts = list(stream())
  flipped = pb.WeightsPart.FromString(parts[1].SerializeToString())
  flipped.chunk.data = bytes([flipped.chunk.data[0] ^ 1]) + flipped.chunk.data[1:]
  stray = pb.WeightsPart(chunk=pb.Chunk(block=99, data=b"1234"))
  for damaged, fault in (
    ([parts[0], flipped, *parts[2:]], r"embed\[0:7, 0:5\]: the checksum of bytes 0..140 of version 3"),
    (parts[:-1], "bytes arrived"),
    ([parts[0], parts[1], *parts[1:]], r"embed\[0:7, 0:5\]: bytes 0..140 after 140 of 140"),
    (parts[1:], "does not begin with its manifest"),
    ([*parts, stray], "belongs to no block"),
  ):
    with pytest.raises(ValueError, match=fault):
      received(damaged)
  assert manifest_of(iter([])) is None


def test_two_parameters_of_one_name_are_noticed():
  """Fails if a key that holds a slash takes another parameter's place."""
  bad = {"a/b": np.zeros(2), "a": {"b": np.ones(2)}}
  both = [weights.Piece(whole("a/b", array), array) for array in (bad["a/b"], bad["a"]["b"])]
  parts = weights.Snapshot(0, both).stream([whole("a/b", np.zeros(2))])
  with pytest.raises(ValueError, match=r"a/b\[0:2\]: a part of it is served twice"):
    Receiver([whole("a/b", np.zeros(2))], [manifest_of(parts)])


class Lazy:
  """Numbers whose way to the host is counted."""

  dtype = np.dtype(np.int64)

  def __init__(self):
    self.fetched = 0

  def __array__(self, dtype=None, copy=None):
    self.fetched += 1
    return np.arange(3)


def test_a_piece_is_fetched_when_it_is_streamed_and_once():
  """Fails if a version is fetched when it is published or named, or again at every request, or unasked."""
  lazy, unasked, region = Lazy(), Lazy(), whole("w", np.arange(3))
  snapshot = weights.Snapshot(4, [weights.Piece(region, lazy), weights.Piece(whole("u", np.arange(3)), unasked)])
  for _ in range(2):
    parts = snapshot.stream([region])
    next(parts)
    assert lazy.fetched <= 1
    (chunk,) = [part.chunk for part in parts]
    assert chunk.data == np.arange(3).tobytes()
  assert (lazy.fetched, unasked.fetched) == (1, 0)


def test_the_store_holds_the_newest_and_the_one_before_that_was_named():
  """Fails if an older version is let in, or a named one is gone too soon, or one that nobody can ask for is kept."""
  store = weights.WeightStore()
  assert store.newer(-1, 0) is None and store.exactly(4, 0) is None
  store.publish(4, [])
  assert store.newer(4, 0) is None and store.exactly(5, 0) is None
  assert store.newer(3, 0).version == 4
  with pytest.raises(ValueError, match="below 4"):
    store.publish(3, [])
  store.publish(5, [])
  assert store.newer(3, 0).version == 5
  assert store.exactly(4, 0).version == 4
  store.publish(6, [])
  store.publish(7, [])
  for gone, held in ((5, "[7]"), (6, "[7]")):  # nobody was told of 6
    with pytest.raises(
      weights.VersionGone, match=re.escape(f"version {gone} of the weights is gone; this host holds {held}")
    ):
      store.exactly(gone, 0)


def test_a_store_that_does_not_name_versions_keeps_two():
  """Fails if a host drops a version of which the first host may just have told a sampler."""
  store = weights.WeightStore(leads=False)
  for version in (4, 5, 6):
    store.publish(version, [])
  assert [store.exactly(version, 0).version for version in (5, 6)] == [5, 6]
  with pytest.raises(weights.VersionGone, match=r"holds \[5, 6\]"):
    store.exactly(4, 0)
