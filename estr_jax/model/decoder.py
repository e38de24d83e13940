"""The decoder: one transformer whose flags cover Llama, Qwen2.5, Qwen3 and Qwen3-MoE.

The layers are Flax NNX modules, stacked along a leading axis and scanned. The other rooms see pure
functions of a nested dict of float32 parameters: `init`, `forward` for whole sequences, `extend` for
sequences that grow in a key-value cache, and `head_kernel`. `forward_routed` and `extend_routed` tell in addition
what the routers of a mixture of experts chose.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from estr_jax.model.attention import ATTENDED, Keys, attend, attend_sequences, rotate
from estr_jax.model.config import DecoderConfig
from estr_jax.model.moe import Mixture, Routed
from estr_jax.model.sharding import BATCH_AXES
from estr_jax.structs import Params

_SMALL_VOCABULARY = 1024

_policies = jax.checkpoint_policies
_keep_attended = _policies.save_only_these_names(ATTENDED)
_keep_products = _policies.save_from_both_policies(_policies.dots_with_no_batch_dims_saveable, _keep_attended)

# What the backward pass keeps of each layer. None of them keeps scores; "attention" and "dots" keep what the attention
# kernel of a TPU returns, "dots" also what the products with weights do. Inside of a scan nothing can be shared between
# the passes anyway, so the barriers of prevent_cse would only be in the way.
REMAT: dict[str, Callable[[Callable], Callable]] = {
  "none": lambda body: body,
  "dots": functools.partial(jax.checkpoint, policy=_keep_products, prevent_cse=False),
  "attention": functools.partial(jax.checkpoint, policy=_keep_attended, prevent_cse=False),
  "full": functools.partial(jax.checkpoint, prevent_cse=False),
}


class Attention(nnx.Module):
  """Projections, optional biases and query-key norms; the keys come from the caller."""

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
    c = config
    linear = functools.partial(nnx.LinearGeneral, dtype=c.dtype, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)
    self.q = linear(c.width, (c.heads, c.head_dim), use_bias=c.qkv_bias)
    self.k = linear(c.width, (c.kv_heads, c.head_dim), use_bias=c.qkv_bias)
    self.v = linear(c.width, (c.kv_heads, c.head_dim), use_bias=c.qkv_bias)
    self.o = linear((c.heads, c.head_dim), c.width, axis=(-2, -1), use_bias=False)
    if c.qk_norm:
      norm = functools.partial(nnx.RMSNorm, c.head_dim, epsilon=c.norm_eps, dtype=c.dtype, rngs=rngs)
      self.q_norm, self.k_norm = norm(), norm()
    self.qk_norm, self.theta = c.qk_norm, c.rope_theta

  def project(self, x_BTD: jax.Array, position_BT: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
    if self.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    return rotate(q, position_BT, self.theta), rotate(k, position_BT, self.theta), v


class SwiGLU(nnx.Module):
  """The gated feed-forward layer (Shazeer, arXiv 2002.05202)."""

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
    c = config
    linear = functools.partial(
      nnx.Linear, use_bias=False, dtype=c.dtype, kernel_init=nnx.initializers.normal(0.02), rngs=rngs
    )
    self.gate = linear(c.width, c.mlp_width)
    self.up = linear(c.width, c.mlp_width)
    self.down = linear(c.mlp_width, c.width)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Layer(nnx.Module):
  """Pre-norm attention and feed-forward, with the meeting of queries and keys left to the caller."""

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
    norm = functools.partial(nnx.RMSNorm, config.width, epsilon=config.norm_eps, dtype=config.dtype, rngs=rngs)
    self.attention_norm, self.mlp_norm = norm(), norm()
    self.attention = Attention(config, rngs)
    self.mlp = Mixture(config, rngs) if config.experts else SwiGLU(config, rngs)

  def project(self, x_BTD: jax.Array, position_BT: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return self.attention.project(self.attention_norm(x_BTD), position_BT)

  def finish(
    self,
    x_BTD: jax.Array,
    attended_BTHK: jax.Array,
    *,
    there_BT: jax.Array,
    recorded_BTk: jax.Array | None,
    mesh: Mesh | None,
  ) -> tuple[jax.Array, Routed | None]:
    """The layer's output, and where it is sparse what it chose; the keywords are those of `Mixture`."""
    x_BTD = x_BTD + self.attention.o(attended_BTHK)
    normed_BTD, routed = self.mlp_norm(x_BTD), None
    if isinstance(self.mlp, Mixture):
      y_BTD, routed = self.mlp(normed_BTD, there_BT, recorded_BTk, mesh)
    else:
      y_BTD = self.mlp(normed_BTD)
    return x_BTD + y_BTD, routed


class Decoder(nnx.Module):
  """Embedding, stacked layers, final norm and, unless tied, a head."""

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
    c = config
    embedding_init = nnx.initializers.normal(0.02)
    self.embed = nnx.Embed(c.vocab_size, c.width, dtype=c.dtype, embedding_init=embedding_init, rngs=rngs)
    self.layers = nnx.vmap(lambda r: Layer(c, r), in_axes=0, out_axes=0)(rngs.split(c.layers))
    self.final_norm = nnx.RMSNorm(c.width, epsilon=c.norm_eps, dtype=c.dtype, rngs=rngs)
    if not c.tied_head:
      self.head = nnx.Linear(c.width, c.vocab_size, use_bias=False, kernel_init=embedding_init, rngs=rngs)


@functools.cache
def _graphs(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.GraphDef]:
  """The static halves of the whole decoder and of one of its layers."""
  decoder = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
  layer = nnx.eval_shape(lambda: Layer(config, nnx.Rngs(0)))
  return nnx.split(decoder)[0], nnx.split(layer)[0]


def init(config: DecoderConfig, key: jax.Array) -> Params:
  """Random float32 parameters as a nested dict; every leaf below "layers" is stacked along axis 0."""
  return nnx.to_pure_dict(nnx.split(Decoder(config, nnx.Rngs(key)))[1])


def abstract_params(config: DecoderConfig) -> Params:
  """The shapes and dtypes of `init`, without computing it."""
  return jax.eval_shape(functools.partial(init, config), jax.random.key(0))


def head_kernel(config: DecoderConfig, params: Params) -> jax.Array:
  """The output projection [D, V]."""
  head, vocabulary_axis = stored_head(config, params)
  return head if vocabulary_axis else head.T


def stored_head(config: DecoderConfig, params: Params) -> tuple[Any, int]:
  """The output projection as it is stored, or what a tree like `params` has in its place; and its vocabulary's axis."""
  return (params["embed"]["embedding"], 0) if config.tied_head else (params["head"]["kernel"], 1)


def _embed(decoder: Decoder, tokens: jax.Array) -> jax.Array:
  """Embeddings [..., D]. Of a small vocabulary by a matrix product, whose gradient is one too and not a scatter."""
  size, dtype = decoder.embed.num_embeddings, decoder.embed.dtype
  if size > _SMALL_VOCABULARY:
    return decoder.embed(tokens)
  return jax.nn.one_hot(tokens, size, dtype=dtype) @ decoder.embed.embedding[...].astype(dtype)


def positions(segment_BT: jax.Array) -> jax.Array:
  """Each token's place within its own segment; segments are contiguous."""
  index_T = jnp.arange(segment_BT.shape[1])
  first = jnp.concatenate([jnp.ones_like(segment_BT[:, :1], bool), segment_BT[:, 1:] != segment_BT[:, :-1]], axis=1)
  return index_T - jax.lax.cummax(jnp.where(first, index_T, 0), axis=1)


def forward(
  config: DecoderConfig,
  params: Params,
  tokens_BT: jax.Array,
  segment_BT: jax.Array,
  *,
  mesh: Mesh | None = None,
  routing: jax.Array | None = None,
) -> jax.Array:
  """Hidden states [B, T, D] after the final norm, for whole sequences, padded or packed.

  A token sees the tokens of its own segment up to itself; segment 0 is padding.

  Args:
    mesh: of `sharding.make_mesh`, where the parameters lie on one; it says where rows, heads and experts are.
    routing: for a mixture of experts, i32 [L, B, T, k], the experts to take instead of the routers' choice; -1 leaves
      an entry to the router. Weights are those of the routers at these experts, with their gradient.
  """
  return forward_routed(config, params, tokens_BT, segment_BT, mesh=mesh, routing=routing)[0]


def forward_routed(
  config: DecoderConfig,
  params: Params,
  tokens_BT: jax.Array,
  segment_BT: jax.Array,
  *,
  mesh: Mesh | None = None,
  routing: jax.Array | None = None,
) -> tuple[jax.Array, Routed | None]:
  """`forward`, and what the routers chose: None of a dense model. Padding has choices, which nothing computes."""
  decoder_graph, layer_graph = _graphs(config)
  decoder = nnx.merge(decoder_graph, params)
  position_BT = positions(segment_BT)

  def body(x_BTD, xs):
    layer_params, recorded_BTk = xs
    layer = nnx.merge(layer_graph, layer_params)
    q, k, v = layer.project(x_BTD, position_BT)
    attended_BTHK = attend_sequences(q, k, v, segment_BT, mesh=mesh)
    return layer.finish(x_BTD, attended_BTHK, there_BT=segment_BT > 0, recorded_BTk=recorded_BTk, mesh=mesh)

  x_BTD, routed = jax.lax.scan(REMAT[config.remat](body), _embed(decoder, tokens_BT), (params["layers"], routing))
  return decoder.final_norm(x_BTD), routed


@flax.struct.dataclass
class Cache:
  """Keys and values of S slots. Positions come after heads, so that what a head reads lies together."""

  k: jax.Array  # [L, S, J, T, K]
  v: jax.Array  # [L, S, J, T, K]


CACHE_SPEC = P(None, BATCH_AXES, "tensor", None, None)


def empty_cache(config: DecoderConfig, slots: int, length: int) -> Cache:
  shape = (config.layers, slots, config.kv_heads, length, config.head_dim)
  return Cache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))


def extend(
  config: DecoderConfig,
  params: Params,
  tokens_RC: jax.Array,
  position_RC: jax.Array,
  rows_R: jax.Array,
  cache: Cache,
  *,
  mesh: Mesh | None = None,
) -> tuple[jax.Array, Cache]:
  """Feeds C further tokens to R slots of the cache: C = 1 is a decode step, C > 1 a prefill or an observation.

  Args:
    config, params: the decoder.
    tokens_RC: the tokens.
    position_RC: their positions, consecutive along C; -1 marks a token that is not there, whose keys are not written.
    rows_R: which slots; distinct, or out of range for rows that are not there. S of them are all slots in order.
    cache: must hold the keys of all earlier positions of those slots; on a mesh it lies by CACHE_SPEC.
    mesh: as of `forward`.

  Returns:
    Hidden states [R, C, D] after the final norm, and the cache.
  """
  return extend_routed(config, params, tokens_RC, position_RC, rows_R, cache, mesh=mesh)[:2]


def extend_routed(
  config: DecoderConfig,
  params: Params,
  tokens_RC: jax.Array,
  position_RC: jax.Array,
  rows_R: jax.Array,
  cache: Cache,
  *,
  mesh: Mesh | None = None,
) -> tuple[jax.Array, Cache, Routed | None]:
  """`extend`, and what the routers chose for the new tokens, [L, R, C, k]: None of a dense model."""
  decoder_graph, layer_graph = _graphs(config)
  decoder = nnx.merge(decoder_graph, params)
  _, S, _, T, _ = cache.k.shape
  there_RC = position_RC >= 0
  start_R1 = jnp.min(jnp.where(there_RC, position_RC, T), axis=1, keepdims=True)
  old_RCT = jnp.broadcast_to((jnp.arange(T) < start_R1)[:, None], (*position_RC.shape, T))
  new_RCC = (position_RC[:, None, :] <= position_RC[:, :, None]) & there_RC[:, None, :]
  all_slots = rows_R.shape[0] == S  # then row i is slot i, and no gather of rows is needed

  def body(x_RCD, xs):
    layer_params, *old = xs
    layer = nnx.merge(layer_graph, layer_params)
    q, k, v = layer.project(x_RCD, position_RC)
    if not all_slots:
      old = [rows.at[rows_R].get(mode="clip") for rows in old]
    old_k, old_v = (rows.swapaxes(1, 2) for rows in old)
    attended_RCHK = attend(q, Keys(old_k, old_v, old_RCT), Keys(k, v, new_RCC))
    x_RCD, routed = layer.finish(x_RCD, attended_RCHK, there_BT=there_RC, recorded_BTk=None, mesh=mesh)
    return x_RCD, (k, v, routed)

  x_RCD, (k, v, routed) = jax.lax.scan(body, _embed(decoder, tokens_RC), (params["layers"], cache.k, cache.v))
  # One write after the layers: a cache that were carried through them would be copied by each.
  if all_slots and position_RC.shape[1] == 1:
    cache = _write_step(cache, Cache(k, v), position_RC[:, 0], mesh)
  else:
    row_RC, column_RC = rows_R[:, None], jnp.where(there_RC, position_RC, T)  # T is out of range, and dropped

    def write(cache_LSJTK, new_LRCJK):
      new_RCLJK = jnp.moveaxis(new_LRCJK, 0, 2)
      return cache_LSJTK.at[:, row_RC, :, column_RC].set(new_RCLJK, mode="drop")

    cache = jax.tree.map(write, cache, Cache(k, v))
  return decoder.final_norm(x_RCD), cache, routed


def _write_step(cache: Cache, new: Cache, position_S: jax.Array, mesh: Mesh | None) -> Cache:
  """The keys and values of one further token of every slot, [L, S, 1, J, K], put into the cache.

  Slot by slot and not as one scatter, for which a TPU's compiler lays the whole cache out anew.
  """

  def local(cache: Cache, new: Cache, position_S: jax.Array) -> Cache:
    def write(slot, cache):
      there, at = position_S[slot] >= 0, (0, slot, 0, jnp.maximum(position_S[slot], 0), 0)

      def put(cache_LSJTK, new_LSCJK):
        new_LSJCK = jax.lax.dynamic_slice_in_dim(new_LSCJK, slot, 1, axis=1).swapaxes(2, 3)
        old_LSJCK = jax.lax.dynamic_slice(cache_LSJTK, at, new_LSJCK.shape)
        return jax.lax.dynamic_update_slice(cache_LSJTK, jnp.where(there, new_LSJCK, old_LSJCK), at)

      return jax.tree.map(put, cache, new)

    return jax.lax.fori_loop(0, position_S.shape[0], write, cache)

  if mesh is None or mesh.size == 1:
    return local(cache, new, position_S)
  # By hand: the partitioner does not know that a device's slots are its own, and would gather the cache.
  in_specs = (CACHE_SPEC, P(None, BATCH_AXES, None, "tensor", None), P(BATCH_AXES))
  return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=CACHE_SPEC)(cache, new, position_S)
