"""Round trips: trajectories, prompts and parts of weights as messages."""

import ast
import dataclasses
import pathlib

import hypothesis
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from weights_cases import PARAMS, pieces, wants

from estr_jax.structs import Prompt, Trajectory
from estr_jax.weights.parts import Chunk, Manifest, Part
from estr_jax.weights.regions import Region
from estr_jax.weights.store import Snapshot
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


INT32 = st.integers(0, 2**31)
SIDES = st.lists(st.tuples(INT32, INT32, INT32).map(sorted), max_size=3)


@st.composite
def regions(draw) -> Region:
  sides = draw(SIDES)  # start, stop and size of each axis
  start, stop, size = (tuple(side[i] for side in sides) for i in range(3))
  return Region(draw(st.text()), size, start, stop)


def there_and_back(part: Part) -> Part:
  return codec.part_from_message(pb.WeightsPart.FromString(codec.part_to_message(part).SerializeToString()))


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(version=INT64, dtypes=st.dictionaries(st.text(), st.text()), blocks=st.lists(regions(), max_size=3))
def test_a_manifest_survives(version, dtypes, blocks):
  """Fails on a field left out, bounds that are swapped, or blocks in another order."""
  sent = Manifest(version, dtypes, tuple(blocks))
  assert there_and_back(sent) == sent


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(block=INT64, offset=INT64, data=st.binary(), crc32=st.integers(0, 2**32 - 1))
def test_a_chunk_survives_bit_for_bit(block, offset, data, crc32):
  sent = Chunk(block, offset, data, crc32)
  got = there_and_back(sent)
  assert got == sent and type(got) is Chunk


def test_a_stream_of_weights_survives_as_messages():
  """Fails if the first block, the first offset or an empty manifest, all of them zeros on the wire, are lost."""
  parts = list(Snapshot(0, pieces(PARAMS)).stream(wants(PARAMS)))
  assert list(map(there_and_back, parts)) == parts
  nothing = Manifest(0, {}, ())
  assert there_and_back(nothing) == nothing and isinstance(there_and_back(nothing), Manifest)


def test_a_malformed_part_is_refused():
  """Fails if it is taken for a chunk, or one of two types of a parameter is dropped in silence."""
  with pytest.raises(ValueError, match="neither a manifest nor a chunk"):
    codec.part_from_message(pb.WeightsPart())
  two = pb.Manifest(tensors=[pb.Tensor(name="w", dtype="float32"), pb.Tensor(name="w", dtype="bfloat16")])
  with pytest.raises(ValueError, match="w: the manifest gives it the types float32 and bfloat16"):
    codec.part_from_message(pb.WeightsPart(manifest=two))
  beyond = pb.Manifest(blocks=[pb.Region(name="w", whole=[4], start=[0], stop=[5])])
  with pytest.raises(ValueError, match=r"w: \(0,\) to \(5,\) is no part of shape \(4,\)"):
    codec.part_from_message(pb.WeightsPart(manifest=beyond))


SCHEMA = "estr_jax/wire/estr_jax.proto"
ROOT = pathlib.Path(__file__).parent.parent


def test_the_stubs_are_those_of_the_schema(tmp_path):
  """Fails if the schema is changed, and its stubs or their types are not made anew."""
  compiled = tmp_path / "schema"
  assert protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={compiled}", SCHEMA]) == 0
  (want,) = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file
  for message in want.message_type:
    for field in (*message.field, *(field for nested in message.nested_type for field in nested.field)):
      field.ClearField("json_name")  # which stubs leave out
  assert descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb) == want
  typed = {
    node.name: [line.target.id for line in node.body if isinstance(line, ast.AnnAssign) and line.target.id.islower()]
    for node in ast.parse((ROOT / SCHEMA).with_name("estr_jax_pb2.pyi").read_text()).body
    if isinstance(node, ast.ClassDef)
  }
  assert typed == {message.name: [field.name for field in message.field] for message in want.message_type}
