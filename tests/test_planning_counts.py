"""What a plan counts: operations of a jaxpr, and bytes of a compiled program with its loops multiplied out."""

import ast
import dataclasses
import functools
import textwrap

import jax
import jax.numpy as jnp
import pytest
from model_cases import LLAMA
from processes import on_eight_devices

from estr_jax.model import decoder
from estr_jax.model.attention import attend_sequences
from estr_jax.planning import flops, hlo


def test_a_loop_counts_as_often_as_it_runs():
  """Fails if a scanned layer counts once, as XLA's own cost analysis has it, or a multiply-add as one operation."""

  def scanned(x, w):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

  x, w = jnp.zeros((3, 5)), jnp.zeros((7, 5, 5))
  assert flops.count(jax.make_jaxpr(scanned)(x, w)) == 7 * 2 * 3 * 5 * 5


def test_recomputation_counts():
  """Fails if the backward pass of a rematerialised layer counts as one that kept everything."""

  def loss(x, w, wrap):
    return jnp.sum(wrap(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w))(x))

  x, w = jnp.zeros((3, 5)), jnp.zeros((5, 5))
  for wrap, products in ((lambda f: f, 6), (jax.checkpoint, 8)):
    step = jax.value_and_grad(functools.partial(loss, wrap=wrap), argnums=(0, 1))
    assert flops.count(jax.make_jaxpr(step)(x, w)) == products * 2 * 3 * 5 * 5


@pytest.mark.parametrize(("platform", "length", "share"), [("tpu", 4096, 5 / 8), ("tpu", 1024, 1), ("cpu", 1024, 1)])
def test_attention_counts_the_blocks_below_the_diagonal(platform, length, share):
  """Fails if the branch of another platform counts, or the kernel as if it looked at later tokens too."""
  q, k = (jax.ShapeDtypeStruct((2, length, heads, 64), jnp.bfloat16) for heads in (4, 2))
  segment = jax.ShapeDtypeStruct((2, length), jnp.int32)
  jaxpr = jax.make_jaxpr(attend_sequences)(q, k, k, segment)
  assert flops.count(jaxpr, platform) == 2 * 2 * (2 * 4) * length**2 * 64 * share


def test_what_is_kept_of_attention_is_not_computed_again():
  """Fails if remat "attention" loses the kernel's result on the way, or the count cannot see that it is kept."""
  config = dataclasses.replace(LLAMA, layers=3, remat="full")
  tokens = segment = jax.ShapeDtypeStruct((2, 1024), jnp.int32)

  def counted(config) -> float:
    def loss(params, tokens, segment):
      return jnp.sum(decoder.forward(config, params, tokens, segment))

    return flops.count(jax.make_jaxpr(jax.grad(loss))(decoder.abstract_params(config), tokens, segment))

  kept = dataclasses.replace(config, remat="attention")
  kernel = flops.splash("fwd", (2, config.heads, 1024, config.head_dim), blocks=1)
  assert counted(config) - counted(kept) == 3 * kernel


MESH = {"data": 2, "fsdp": 4, "tensor": 1, "expert": 1}


@pytest.mark.parametrize(
  ("attributes", "groups"),
  [
    ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
    ("replica_groups=[2,4]<=[8], x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("replica_groups=[4,2]<=[2,4]T(1,0), x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}, x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}, x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("replica_groups=mesh['a'=8] {'a':(2)2}, x", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}, x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("source_target_pairs={{0,1},{1,0}}, x", [[0, 1], [1, 0]]),
    ("to_apply=%add", []),
  ],
)
def test_groups_of_devices_are_read_in_every_spelling(attributes, groups):
  """Fails if a spelling of replica_groups is misread, and communication is put on the wrong axis."""
  assert hlo.device_groups(attributes) == groups


def test_axes_are_those_along_which_a_group_differs():
  """Fails if the order of the mesh's axes is turned round."""
  assert hlo.axes_of([0, 1, 2, 3], MESH) == ("fsdp",)
  assert hlo.axes_of([1, 5], MESH) == ("data",)
  assert hlo.axes_of(range(8), MESH) == ("data", "fsdp")


def test_sizes_know_dtypes_and_memories():
  """Fails if a tuple's element, a narrow dtype or a layout is misread, or VMEM counts as HBM."""
  assert hlo.size("f32[3,4]{1,0:T(8,128)}") == 48
  assert hlo.size("(bf16[8]{0}, s4[8]{0}, pred[], /*index=3*/f8e4m3fn[2])") == 16 + 4 + 1 + 2
  assert hlo.size("(f32[8]{0:T(128)S(1)}, f32[2]{0})", hbm_only=True) == 8


HAND = """HloModule hand

%body (state: (s32[], f32[100,64])) -> (s32[], f32[100,64]) {
  %state = (s32[], f32[100,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[100,64]{1,0} get-tuple-element(%state), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %double = f32[100,64]{1,0} add(%x, %x), metadata={op_name="a
}}
b"}
  ROOT %out = (s32[], f32[100,64]{1,0}) tuple(%next, %double)
}

%condition (state.1: (s32[], f32[100,64])) -> pred[] {
  %state.1 = (s32[], f32[100,64]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %ten = s32[] constant(10)
  ROOT %less = pred[] compare(%i.1, %ten), direction=LT
}

%taking (whole: f32[100,64], at: s32[]) -> f32[1,64] {
  %whole = f32[100,64]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  ROOT %row = f32[1,64]{1,0} dynamic-slice(%whole, %at, %zero.1), dynamic_slice_sizes={1,64}
}

ENTRY %main (x.1: f32[100,64]) -> f32[1,64] {
  %x.1 = f32[100,64]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[100,64]{1,0}) tuple(%zero, %x.1)
  %loop = (s32[], f32[100,64]{1,0}) while(%start), condition=%condition, body=%body
  %y = f32[100,64]{1,0} get-tuple-element(%loop), index=1
  ROOT %taken = f32[1,64]{1,0} fusion(%y, %zero), kind=kLoop, calls=%taking
}
"""


def test_bytes_by_hand():
  """Fails if a loop's step is ignored, a sliced operand counts in full, or what only names values counts."""
  assert list(hlo.loops(HAND)) == [("loop", 5)]
  counter = 3 * 4  # the add of two numbers
  each = 2 * 25_600 + 25_600 + counter  # of the loop's body
  assert hlo.traffic(HAND, {"data": 1}).hbm_bytes == 5 * each + (256 + 4 + 256)


def test_a_loop_of_unknown_length_counts_once_and_is_told():
  """Fails if a loop that stops by data is taken for one that never runs, or passes in silence."""
  moved = hlo.traffic(HAND.replace("direction=LT", "direction=NE"), {"data": 1})
  assert moved.unknown_loops == 1
  assert 0 < moved.hbm_bytes < hlo.traffic(HAND, {"data": 1}).hbm_bytes


PERMUTED = """HloModule permuted

ENTRY %main (x.1: f32[64]) -> f32[64] {
  %x.1 = f32[64]{0} parameter(0)
  ROOT %out = f32[64]{0} collective-permute(%x.1), source_target_pairs={{0,0},{1,2},{2,1},{3,3}}
}
"""


def test_a_permutation_that_leaves_the_first_device_alone_moves_the_others():
  """Fails if the first pair stands for all."""
  (moved,) = hlo.traffic(PERMUTED, {"data": 2, "fsdp": 2}).collectives
  assert (moved.axes, moved.bytes) == (("data", "fsdp"), 256)
  still = PERMUTED.replace("{1,2},{2,1},", "")
  assert hlo.traffic(still, {"data": 2, "fsdp": 2}).collectives == ()


NESTED = """HloModule nested

%renaming (p: bf16[64,8]) -> bf16[8,64] {
  %p = bf16[64,8]{1,0} parameter(0)
  ROOT %b = bf16[8,64]{1,0} bitcast(%p)
}

%multiplying (x: bf16[4,8], w: bf16[64,8], unused: bf16[128]) -> bf16[4,64] {
  %x = bf16[4,8]{1,0} parameter(0)
  %w = bf16[64,8]{1,0} parameter(1)
  %unused = bf16[128]{0} parameter(2)
  %f = bf16[8,64]{1,0} fusion(%w), kind=kLoop, calls=%renaming
  ROOT %c = bf16[4,64]{1,0} convolution(%x, %f), dim_labels=bf_io->bf
}

ENTRY %main (x.1: bf16[4,8], w.1: bf16[64,8], u.1: bf16[128]) -> bf16[4,64] {
  %x.1 = bf16[4,8]{1,0} parameter(0)
  %w.1 = bf16[64,8]{1,0} parameter(1)
  %u.1 = bf16[128]{0} parameter(2)
  ROOT %out = bf16[4,64]{1,0} fusion(%x.1, %w.1, %u.1), kind=kOutput, calls=%multiplying
}
"""


def test_an_operand_that_is_only_renamed_on_its_way_is_read():
  """Fails if a weight that reaches its product through a nested fusion counts as nothing."""
  assert hlo.traffic(NESTED, {"data": 1}).hbm_bytes == 2 * (4 * 8 + 64 * 8 + 4 * 64)


BUFFERS = """BufferAssignment:
allocation 0: size 512, thread-local:
allocation 1: size 4096, parameter 2, shape |f32[32,32]| at ShapeIndex {}, maybe-live-out:
 value: <1 p{} @0> (size=4096,offset=0): f32[32,32]{1,0}
allocation 2: size 1024, maybe-live-out:
allocation 3: size 64, color 1, preallocated-temp:
allocation 4: size 8192, preallocated-temp:
"""


def test_memory_by_hand():
  """Fails if VMEM counts as HBM, an argument that is written over counts twice, or a kind is mistaken."""
  assert hlo.memory(BUFFERS) == hlo.Memory(arguments=4096, outputs=1024, temporaries=8192 + 512)
  with pytest.raises(ValueError, match="no buffer assignment"):
    hlo.memory("something else")


PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from estr_jax.model.sharding import make_mesh
from estr_jax.planning import hlo

mesh = make_mesh({"data": 2, "fsdp": 4, "tensor": 1, "expert": 1})
put = lambda spec, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

def step(x, w):  # the weights of every layer are gathered along fsdp, once a layer
  def layer(x, w):
    w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
    return jnp.tanh(x @ w), None
  return jax.lax.scan(layer, x, w)[0]

compiled = jax.jit(step).lower(put(P("data"), 8, 64), put(P(None, "fsdp"), 6, 64, 64)).compile()
moved = hlo.traffic(compiled.as_text(), dict(mesh.shape))
assert not moved.unknown_loops
print({(c.kind, c.axes): c.bytes for c in moved.collectives})
"""


def test_a_compiled_program_gathers_what_its_sharding_says():
  """Fails if the text of a real compiler is not understood: six layers of 64 x 64, of which three quarters come in."""
  printed = on_eight_devices(textwrap.dedent(PROGRAM))
  assert ast.literal_eval(printed) == {("all-gather", ("fsdp",)): 6 * 64 * 64 * 4 * 3 / 4}
