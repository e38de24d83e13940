"""Attention: where queries meet their keys. Whole sequences have a kernel on TPU; what grows in a cache does not."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from estr_jax.errors import UserError
from estr_jax.model.sharding import BATCH_AXES, batch_shards

ATTENDED = "attended"  # names what the kernel's backward pass reads, for the policies of jax.checkpoint

_LANES = 128  # of a TPU's vector registers
_COMPUTED_KEYS = 512  # how many keys of a block the kernel looks at together
_BLOCKS = (1024, 512, 256, _LANES)


class Keys(NamedTuple):
  """Some of the keys and values that a query may look at; J divides the number of query heads."""

  k_BSJK: jax.Array
  v_BSJK: jax.Array
  visible_BTS: jax.Array  # bool, True where query t may look at key s


def attend(q_BTHK: jax.Array, *parts: Keys) -> jax.Array:
  """Grouped-query attention over the keys of all parts, which are never copied together.

  Scores and softmax are float32 whatever the inputs are. A query that sees no key (padding) returns the
  mean of the values instead of NaN, so that padding cannot poison gradients.

  Returns:
    [B, T, H, K] in the dtype of the queries.
  """
  B, T, H, K = q_BTHK.shape
  J = parts[0].k_BSJK.shape[2]
  q_BTJGK = q_BTHK.reshape(B, T, J, H // J, K)

  def score(part: Keys) -> jax.Array:
    scores = jnp.einsum("BTJGK,BSJK->BJGTS", q_BTJGK, part.k_BSJK, preferred_element_type=jnp.float32) * K**-0.5
    return jnp.where(part.visible_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)

  weights = jax.nn.softmax(jnp.concatenate([score(part) for part in parts], axis=-1), axis=-1)
  ends = [sum(part.k_BSJK.shape[1] for part in parts[:i]) for i in range(1, len(parts))]
  mixed = [
    jnp.einsum("BJGTS,BSJK->BTJGK", w.astype(part.v_BSJK.dtype), part.v_BSJK)
    for w, part in zip(jnp.split(weights, ends, axis=-1), parts)
  ]
  return functools.reduce(jnp.add, mixed).reshape(B, T, H, K)


def attend_sequences(
  q_BTHK: jax.Array, k_BTJK: jax.Array, v_BTJK: jax.Array, segment_BT: jax.Array, *, mesh: Mesh | None = None
) -> jax.Array:
  """Grouped-query attention in which a token sees those of its own segment up to itself; J divides H.

  A token of padding (segment 0) sees the padding before it and itself, so nothing is ever NaN. On a TPU this is JAX's
  splash attention, which never holds T x T scores; elsewhere it is `attend`, and the backward pass takes the scores
  anew.

  Args:
    q_BTHK, k_BTJK, v_BTJK: after rotary positions.
    segment_BT: i32; segments are contiguous.
    mesh: of `sharding.make_mesh`; rows are split over BATCH_AXES, heads over tensor.

  Returns:
    [B, T, H, K] in the dtype of the queries.
  """
  local = functools.partial(
    jax.lax.platform_dependent, tpu=_attend_splash, default=jax.checkpoint(_attend_causal, prevent_cse=False)
  )
  if mesh is None or mesh.size == 1:
    return local(q_BTHK, k_BTJK, v_BTJK, segment_BT)
  rows, parts = q_BTHK.shape[0], batch_shards(mesh)
  if rows % parts:
    axes = " x ".join(f"mesh.{axis}" for axis in BATCH_AXES)
    raise UserError(f"{rows} rows of tokens do not divide over {axes} = {parts}: change one of them")
  # By hand: the partitioner cannot split a Pallas kernel, and would gather everything on every device.
  heads = P(BATCH_AXES, None, "tensor", None)
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(heads, heads, heads, P(BATCH_AXES, None)),
    out_specs=heads,
    check_vma=False,  # the kernel does not say along which axes its result varies
  )(q_BTHK, k_BTJK, v_BTJK, segment_BT)


def _attend_causal(q_BTHK: jax.Array, k_BTJK: jax.Array, v_BTJK: jax.Array, segment_BT: jax.Array) -> jax.Array:
  index_T = jnp.arange(segment_BT.shape[1])
  visible_BTS = (index_T[:, None] >= index_T) & (segment_BT[:, :, None] == segment_BT[:, None, :])
  return attend(q_BTHK, Keys(k_BTJK, v_BTJK, visible_BTS))


def splash_block(length: int) -> int:
  """Tokens of a block of the kernel, by which `length` is then padded to a multiple."""
  padded = -(-length // _LANES) * _LANES
  if padded <= _BLOCKS[0]:
    return padded
  return next(block for block in _BLOCKS if padded % block == 0)


def _attend_splash(
  q_BTHK: jax.Array, k_BTJK: jax.Array, v_BTJK: jax.Array, segment_BT: jax.Array, *, interpret: bool = False
) -> jax.Array:
  """JAX's Pallas kernel; `interpret` runs it on a CPU, for tests."""
  _, T, H, K = q_BTHK.shape
  block = splash_block(T)
  length = -(-T // block) * block
  computed = next(size for size in (_COMPUTED_KEYS, 384, 256, _LANES) if block % size == 0)

  def lay(x_BTHK):
    return jnp.pad(x_BTHK, ((0, 0), (0, length - T), (0, 0), (0, 0))).swapaxes(1, 2)

  kernel = splash.make_splash_mha(
    splash_mask.MultiHeadMask([splash_mask.CausalMask((length, length))] * H),
    block_sizes=splash.BlockSizes(
      block_q=block,
      block_kv=block,
      block_kv_compute=computed,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_kv_dkv_compute=computed,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    head_shards=1,
    q_seq_shards=1,
    residual_checkpoint_name=ATTENDED,
    interpret=interpret,
  )
  segment_BT = jnp.pad(segment_BT, ((0, 0), (0, length - T)))  # what is added is padding, and after everything else
  scaled_BTHK = (q_BTHK.astype(jnp.float32) * K**-0.5).astype(q_BTHK.dtype)
  attended_BHTK = jax.vmap(kernel)(
    lay(scaled_BTHK), lay(k_BTJK), lay(v_BTJK), splash.SegmentIds(segment_BT, segment_BT)
  )
  return attended_BHTK.swapaxes(1, 2)[:, :T]


def rotate(x_BTHK: jax.Array, position_BT: jax.Array, theta: float) -> jax.Array:
  """Rotary position embedding, halves rotated (Su et al., arXiv 2104.09864; the Hugging Face layout)."""
  K = x_BTHK.shape[-1]
  frequency = theta ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
  angle = position_BT[..., None, None].astype(jnp.float32) * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTHK.dtype)
