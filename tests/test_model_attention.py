"""Attention over whole sequences: the plain form, the TPU's kernel, and both on a mesh."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from estr_jax.errors import UserError
from estr_jax.model import attention
from estr_jax.model.attention import Keys, attend, attend_sequences, splash_block
from estr_jax.model.sharding import AXES, BATCH_AXES

B, H, J, K = 2, 4, 2, 64


def inputs(length: int, dtype=np.float32):
  """Queries, keys, values, and two packed segments with padding after them."""
  rng = np.random.default_rng(0)
  q, k, v = (rng.normal(size=(B, length, heads, K)).astype(dtype) for heads in (H, J, J))
  ends = np.array([[length // 3, length - length // 8], [length // 2, length - 1]])
  segment = (np.arange(length) < ends[:, 1:]) * (1 + (np.arange(length) >= ends[:, :1]))
  return q, k, v, segment.astype(np.int32)


def dense(q, k, v, segment):
  """`attend` under the whole mask, which is how a decoder without a kernel would write it."""
  index = jnp.arange(q.shape[1])
  causal = index[:, None] >= index[None, :]
  return attend(q, Keys(k, v, causal & (segment[:, :, None] == segment[:, None, :])))


def value_and_gradients(function, arrays, there):
  q, k, v, segment = arrays
  weight = np.random.default_rng(1).normal(size=q.shape).astype(np.float32) * there

  def loss(q, k, v):
    out = function(q, k, v, segment)
    return jnp.sum(weight * out), out

  gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
  return out * there, *gradients


def test_the_plain_form_is_attend_under_the_causal_mask_of_segments():
  """Fails if a token sees a later one, another segment, or not itself; and if its gradient is another one."""
  arrays = inputs(13)
  for mine, wanted in zip(value_and_gradients(attend_sequences, arrays, 1), value_and_gradients(dense, arrays, 1)):
    np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-6)


def test_the_kernel_is_the_plain_form():
  """Fails if the kernel forgets the scale, the segments, the groups of heads, or the rows that pad T to a block."""
  arrays = inputs(200)
  there = (arrays[3] > 0)[..., None, None]
  kernel = functools.partial(attention._attend_splash, interpret=True)
  for mine, wanted in zip(value_and_gradients(kernel, arrays, there), value_and_gradients(dense, arrays, there)):
    np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=2e-5)
    assert np.abs(wanted).max() > 0.1


def test_padding_is_finite_through_the_kernel():
  """Fails if a row that is all padding gives NaN, in the result or in a gradient."""
  q, k, v, _ = inputs(128)
  segment = np.zeros((B, 128), np.int32)
  kernel = functools.partial(attention._attend_splash, interpret=True)
  for array in value_and_gradients(kernel, (q, k, v, segment), 1):
    assert np.isfinite(array).all()


@pytest.mark.parametrize("length", [1, 36, 128, 129, 1000, 1024, 1152, 2048, 5000, 10_240, 18_432, 34_816])
def test_blocks_divide_a_length_that_is_hardly_padded(length):
  """Fails if a length is padded by a lane's width or more, or a block is one that the kernel refuses."""
  block = splash_block(length)
  assert block % 128 == 0 and block <= 1024
  assert -(-length // block) * block - length < 128
  assert length < 2048 or length % 1024 or block == 1024


def test_rows_that_do_not_divide_are_one_line():
  """Fails if a batch that a mesh cannot hold is a traceback of the partitioner."""
  mesh = jax.sharding.AbstractMesh((2, 2, 1, 1), AXES)
  with pytest.raises(UserError, match=r"2 rows .* mesh\.data x mesh\.fsdp x mesh\.expert = 4"):
    jax.eval_shape(functools.partial(attend_sequences, mesh=mesh), *inputs(16))


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="compiles for a TPU, which needs libtpu")
@pytest.mark.parametrize(("length", "width"), [(2048, 128), (1536, 64), (36, 16)])
def test_it_compiles_for_a_tpu_and_holds_no_scores(length, width):
  """Fails if the kernel refuses a shape, if a mesh cannot split it, or if T x T scores exist anywhere."""
  from jax.experimental import topologies

  devices = topologies.get_topology_desc("v5p:2x2x1", "tpu").devices
  mesh = jax.make_mesh((1, 2, 2, 1), AXES, devices=devices)
  place = NamedSharding(mesh, P(BATCH_AXES, None, "tensor", None))
  q, k = (jax.ShapeDtypeStruct((2, length, heads, width), jnp.bfloat16, sharding=place) for heads in (4, 2))
  segment = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=NamedSharding(mesh, P(BATCH_AXES, None)))

  def loss(q, k, v, segment):
    return jnp.sum(attend_sequences(q, k, v, segment, mesh=mesh).astype(jnp.float32))

  text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, k, segment).compile().as_text()
  assert "tpu_custom_call" in text
  if length > 128:
    assert f"{length},{length}]" not in text
