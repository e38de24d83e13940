"""Round trips: trajectories and prompts as messages, weights as a stream."""

import dataclasses

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from estr_jax.structs import Prompt, Trajectory
from estr_jax.transport import estr_jax_pb2 as pb
from estr_jax.transport import weights, wire

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
  message = pb.Trajectory.FromString(wire.trajectory_to_message(trajectory).SerializeToString())
  back = wire.trajectory_from_message(message)
  assert exact(back) == exact(trajectory)
  assert back.logprob.flags.writeable


def test_minus_infinity_survives():
  one, zero = np.array([-np.inf], np.float32), np.zeros(1, np.float32)
  mask, ids = np.array([True]), np.array([3], np.int32)
  sent = Trajectory(ids, mask, one, zero, zero, ids, 0.5, 1, 2, "t", "stop", 1, 0.1)
  assert wire.trajectory_from_message(wire.trajectory_to_message(sent)).logprob[0] == -np.inf


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(tokens=hnp.arrays(np.int32, st.integers(0, 5)), number=INT64, text=st.text())
def test_a_prompt_survives_bit_for_bit(tokens, number, text):
  prompt = Prompt(id=number, group=-number - 1, tokens=tokens, answer=text, task=text + "x")
  assert exact(wire.prompt_from_message(wire.prompt_to_message(prompt))) == exact(prompt)


def test_a_wrong_type_is_refused_by_name_not_cast():
  """Fails if a float64 log-prob is rounded in silence."""
  mask, ids = np.array([True]), np.array([3], np.int32)
  zero = np.zeros(1, np.float32)
  bad = Trajectory(ids, mask, np.zeros(1), zero, zero, ids, 0.0, 0, 0, "t", "stop", 1, 0.1)
  with pytest.raises(ValueError, match="logprob has to be float32"):
    wire.trajectory_to_message(bad)


def test_a_torn_array_is_refused_by_name():
  with pytest.raises(ValueError, match="entropy has 5 bytes"):
    wire.trajectory_from_message(pb.Trajectory(entropy=b"12345"))
  with pytest.raises(ValueError, match="vocabulary has 12 bytes"):
    wire.trajectory_from_message(pb.Trajectory(tokens=b"12345678", vocabulary=b"123456789012"))


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


def snapshot() -> weights.Snapshot:
  return weights.Snapshot(3, weights.flatten(params()))


def assert_same_params(left: dict, right: dict) -> None:
  left, right = weights.flatten(left), weights.flatten(right)
  assert left.keys() == right.keys()
  for name in left:
    assert (left[name].dtype, left[name].shape) == (right[name].dtype, right[name].shape), name
    assert left[name].tobytes() == right[name].tobytes(), name


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 4 << 20])
def test_weights_survive_bit_for_bit_whatever_the_chunk(monkeypatch, chunk_bytes):
  """Fails if a low-precision type, a scalar, an empty or a transposed array changes on its way."""
  monkeypatch.setattr(weights, "CHUNK_BYTES", chunk_bytes)
  got = weights.assemble(weights.stream(snapshot()))
  assert got.version == 3
  assert_same_params(got.params, params())


def test_a_damaged_stream_is_noticed():
  """Fails if the checksum, the length or the order of the chunks is not looked at."""
  parts = list(weights.stream(snapshot()))
  flipped = pb.WeightsPart.FromString(parts[1].SerializeToString())
  flipped.chunk.data = bytes([flipped.chunk.data[0] ^ 1]) + flipped.chunk.data[1:]
  for damaged, fault in (
    ([parts[0], flipped, *parts[2:]], "embed: the checksum"),
    (parts[:-1], "bytes arrived"),
    ([parts[0], parts[1], *parts[1:]], "embed: bytes"),
    (parts[1:], "does not begin with its manifest"),
  ):
    with pytest.raises(ValueError, match=fault):
      weights.assemble(damaged)
  assert weights.assemble([]) is None


def test_flatten_refuses_what_has_no_way_back():
  for bad in ({"a/b": 1}, {"a": {}}, {1: 2}):
    with pytest.raises(ValueError, match="parameter key"):
      weights.flatten(bad)


def test_the_store_holds_the_newest_and_fetches_it_once():
  """Fails if a lazy version is fetched at publish, or again at every request, or if an older version is let in."""
  calls = []

  def source():
    calls.append(1)
    return {"w": np.arange(3)}

  store = weights.WeightStore()
  assert store.snapshot_newer(-1, 0) is None
  store.publish(4, source)
  assert not calls
  assert store.snapshot_newer(4, 0) is None
  for _ in range(2):
    snapshot = store.snapshot_newer(3, 0)
    assert snapshot.version == 4 and snapshot.arrays()["w"].tolist() == [0, 1, 2]
  assert len(calls) == 1
  with pytest.raises(ValueError, match="below 4"):
    store.publish(3, {})
  store.publish(5, {"w": np.zeros(1)})
  assert store.snapshot_newer(4, 0).version == 5
