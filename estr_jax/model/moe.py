"""A mixture of experts in place of the feed-forward layer: every token is computed by the k experts of its choice.

Nothing is dropped and nothing has a capacity: the rows of a device, k for each token, are sorted by expert, and one
grouped matrix product gives each expert its own. Tokens that are not there (padding) go to no expert.

Letters: N tokens of a device, E experts, k experts a token, R = N k rows, D model width, F width of an expert.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from estr_jax.errors import UserError
from estr_jax.model.config import DecoderConfig
from estr_jax.model.sharding import BATCH_AXES, batch_shards
from estr_jax.structs import Mean


@flax.struct.dataclass
class Load:
  """What routers did, as sums over tokens, padding excluded; the sums of microbatches and of hosts add up.

  Leading axes, such as that of the layers, are left out below.
  """

  tokens: jax.Array  # f32 []
  assigned: jax.Array  # f32 [E]; how many of them went to each expert; the sum is k tokens
  probability: jax.Array  # f32 [E]; of the router, before the choice; the sum is the tokens
  entropy: jax.Array  # f32 []; of those probabilities, nats
  recorded: jax.Array  # f32 []; choices that were recorded, and taken in place of the router's own
  agreed: jax.Array  # f32 []; of them, those that the router would have taken too


@flax.struct.dataclass
class Routed:
  """What the routers of L layers chose, and the sums from which their metrics are taken."""

  experts: jax.Array  # i32 [L, B, T, k]
  load: Load  # each leaf with a leading axis L


def load_balance(load: Load) -> jax.Array:
  """E sum_e f_e P_e of each layer (Fedus et al., arXiv 2101.03961, eq. 4): 1 where the load is even, E at worst.

  f_e is the share of expert e in all choices, P_e its mean probability; only P has a gradient, so the mean over the
  layers, times a coefficient, is the auxiliary loss.
  """
  chosen = load.assigned.sum(axis=-1, keepdims=True)
  share = load.assigned / jnp.maximum(chosen, 1.0)
  probability = load.probability / jnp.maximum(load.tokens, 1.0)[..., None]
  return share.shape[-1] * (share * probability).sum(axis=-1)


def load_metrics(load: Load, *, replayed: bool) -> dict[str, Mean]:
  """`router/*` of the glossary, from the load [L, ...] of a whole batch.

  Args:
    replayed: whether choices were recorded, and the agreement has a meaning.
  """
  once = jnp.float32(1)
  balance_L = load_balance(load)
  share_LE = load.assigned / jnp.maximum(load.assigned.sum(axis=-1, keepdims=True), 1.0)
  metrics = {
    "router/balance": Mean(balance_L.mean(), once),
    "router/balance_max": Mean(balance_L.max(), once),
    "router/largest_share": Mean(share_LE.max(), once),
    "router/entropy": Mean(load.entropy.sum(), load.tokens.sum()),
    "router/dead_experts": Mean((load.assigned == 0).sum(), jnp.float32(load.assigned.size)),
  }
  return metrics | ({"router/agreement": Mean(load.agreed.sum(), load.recorded.sum())} if replayed else {})


def grouped_matmul(x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """Each group's rows times the group's own matrix.

  Args:
    x_RI: rows, those of group 0 first, then those of group 1, ...
    w_EIO: a matrix for each group.
    sizes_E: i32, rows of each group; their sum may be below R.

  Returns:
    [R, O]. Rows past the last group are 0, and so are their gradients, whatever stands in x there.
  """
  # A platform may leave rows of no group as they were, NaN included: they are cut off on both sides, since the
  # second cut protects the values and the first one the gradients.
  there_R1 = (jnp.arange(x_RI.shape[0]) < sizes_E.sum())[:, None]
  x_RI = jnp.where(there_R1, x_RI, 0)
  product = jax.lax.platform_dependent(x_RI, w_EIO, sizes_E, tpu=_megablox, default=jax.lax.ragged_dot)
  return jnp.where(there_R1, product, 0)


def _megablox(x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """JAX's Pallas kernel. `ragged_dot` has a kernel on TPU too, but its gradient for w computes every row E times."""
  R, (_, inputs, outputs) = x_RI.shape[0], w_EIO.shape
  rows = min(512, -(-R // 128) * 128)  # of a tile, by which the kernel wants R to be divided
  x_RI = jnp.pad(x_RI, ((0, -R % rows), (0, 0)))
  return gmm(x_RI, w_EIO, sizes_E, x_RI.dtype, (rows, min(inputs, 1024), min(outputs, 1024)))[:R]


# Two moves of rows, each the other's transpose. Written so, both directions are gathers: the transpose that JAX would
# derive scatters, which a TPU does row by row.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(k: int, x_ND: jax.Array, order_R: jax.Array, place_R: jax.Array) -> jax.Array:
  """Every token's row k times, in the order of the experts."""
  return x_ND.at[order_R // k].get(mode="promise_in_bounds")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(k: int, y_RD: jax.Array, order_R: jax.Array, place_R: jax.Array) -> jax.Array:
  """The sum of every token's k rows."""
  rows = y_RD.at[place_R].get(mode="promise_in_bounds")
  return rows.reshape(-1, k, *rows.shape[1:]).sum(axis=1)


def _keep_order(move: Callable) -> Callable:
  return lambda k, x, order_R, place_R: (move(k, x, order_R, place_R), (order_R, place_R))


_dispatch.defvjp(_keep_order(_dispatch), lambda k, order, g: (_combine(k, g, *order), None, None))
_combine.defvjp(_keep_order(_combine), lambda k, order, g: (_dispatch(k, g, *order), None, None))


def apply_experts(
  x_ND: jax.Array,
  expert_Nk: jax.Array,
  weight_Nk: jax.Array,
  gate_EDF: jax.Array,
  up_EDF: jax.Array,
  down_EFD: jax.Array,
) -> jax.Array:
  """The weighted sum of each token's experts, [N, D]; an index outside of 0 .. E - 1 adds nothing and costs nothing."""
  E, k = gate_EDF.shape[0], expert_Nk.shape[1]
  expert_R = expert_Nk.reshape(-1)
  group_R = jnp.where((expert_R >= 0) & (expert_R < E), expert_R, E)  # E: no expert, sorted to the end
  order_R = jnp.argsort(group_R)
  place_R = jnp.argsort(order_R)
  sizes_E = (group_R[:, None] == jnp.arange(E)).sum(axis=0, dtype=jnp.int32)
  x_RD = _dispatch(k, x_ND, order_R, place_R)
  weight_R1 = _dispatch(1, weight_Nk.reshape(-1, 1), order_R, place_R)
  hidden_RF = jax.nn.silu(grouped_matmul(x_RD, gate_EDF, sizes_E)) * grouped_matmul(x_RD, up_EDF, sizes_E)
  # The last product is linear, so the weight can go before it, where a row is shorter.
  hidden_RF = hidden_RF * weight_R1.astype(hidden_RF.dtype)
  return _combine(k, grouped_matmul(hidden_RF, down_EFD, sizes_E), order_R, place_R)


def route(
  x_ND: jax.Array, router_DE: jax.Array, there_N: jax.Array, recorded_Nk: jax.Array | None, *, k: int, normalised: bool
) -> tuple[jax.Array, jax.Array, Load]:
  """Chooses k experts for each token, and says what each counts; float32 whatever x is.

  Args:
    x_ND, router_DE: tokens and the router's kernel.
    there_N: bool; tokens that count in the load.
    recorded_Nk: choices to take instead of the router's own, or None; -1 leaves an entry to the router.
    k: experts a token.
    normalised: whether the weights of the chosen k sum to 1.

  Returns:
    (expert_Nk i32, weight_Nk f32, load). The gradient goes through the weights and the load's probabilities.
  """
  highest = jax.lax.Precision.HIGHEST  # a TPU multiplies float32 in bfloat16 otherwise
  logits_NE = jnp.matmul(x_ND.astype(jnp.float32), router_DE.astype(jnp.float32), precision=highest)
  count_N = there_N.astype(jnp.float32)
  expert_Nk = jax.lax.top_k(jax.lax.stop_gradient(logits_NE), k)[1]
  recorded = agreed = jnp.float32(0)
  if recorded_Nk is not None:
    known_Nk = recorded_Nk >= 0
    shared_Nk = known_Nk & (recorded_Nk[:, :, None] == expert_Nk[:, None, :]).any(axis=-1)
    recorded, agreed = (count_N @ choices_Nk.sum(axis=-1, dtype=jnp.float32) for choices_Nk in (known_Nk, shared_Nk))
    expert_Nk = jnp.where(known_Nk, recorded_Nk.astype(jnp.int32), expert_Nk)
  log_probability_NE = jax.nn.log_softmax(logits_NE, axis=-1)
  probability_NE = jnp.exp(log_probability_NE)
  if normalised:  # p_i / sum p over the chosen, without the division: recorded experts may be all but impossible now
    weight_Nk = jax.nn.softmax(jnp.take_along_axis(logits_NE, expert_Nk, axis=-1), axis=-1)
  else:
    weight_Nk = jnp.take_along_axis(probability_NE, expert_Nk, axis=-1)
  chosen_NE = (expert_Nk[:, :, None] == jnp.arange(logits_NE.shape[-1])).sum(axis=1, dtype=jnp.float32)
  load = Load(
    tokens=count_N.sum(),
    assigned=count_N @ chosen_NE,
    probability=count_N @ probability_NE,
    entropy=-count_N @ (probability_NE * log_probability_NE).sum(axis=-1),
    recorded=recorded,
    agreed=agreed,
  )
  return expert_Nk, weight_Nk, load


class Mixture(nnx.Module):
  """Router and experts; the feed-forward layer of a sparse model."""

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
    c = config
    normal = nnx.initializers.normal(0.02)
    self.router = nnx.Linear(c.width, c.experts, use_bias=False, kernel_init=normal, rngs=rngs)
    self.gate = nnx.Param(normal(rngs.params(), (c.experts, c.width, c.expert_mlp_width)))
    self.up = nnx.Param(normal(rngs.params(), (c.experts, c.width, c.expert_mlp_width)))
    self.down = nnx.Param(normal(rngs.params(), (c.experts, c.expert_mlp_width, c.width)))
    self.k, self.normalised, self.dtype = c.experts_per_token, c.norm_topk_prob, c.dtype

  def __call__(
    self, x_BTD: jax.Array, there_BT: jax.Array, recorded_BTk: jax.Array | None, mesh: Mesh | None
  ) -> tuple[jax.Array, Routed]:
    """The layer's output, and what it chose.

    On a mesh, rows lie on BATCH_AXES, so a device of the expert axis has tokens of its own and 1 / expert of the
    experts. It gathers the tokens of its peers along that axis, computes what its own experts add to each, and sums
    and scatters the results back. That moves about 2 (expert - 1) / expert of the group's tokens in and out of each
    device and sorts all of their rows there. An all-to-all would move k / expert of that at best, but it has to reserve
    for the worst case or drop tokens, and dropping is what would make a sampler and a learner disagree.
    All of this is written by hand: the partitioner, left to itself, gathers the tokens of the whole batch on every
    device for the sort.
    """
    B, _, D = x_BTD.shape
    E, k = self.router.out_features, self.k

    def local(
      x_BTD: jax.Array,
      there_BT: jax.Array,
      recorded_BTk: jax.Array | None,
      router_DE: jax.Array,
      gate_EDF: jax.Array,
      up_EDF: jax.Array,
      down_EFD: jax.Array,
      *,
      on_mesh: bool,
    ) -> tuple[jax.Array, jax.Array, Load]:
      shape = x_BTD.shape
      x_ND, there_N = x_BTD.reshape(-1, D), there_BT.reshape(-1)
      recorded_Nk = None if recorded_BTk is None else recorded_BTk.reshape(-1, k)
      expert_Nk, weight_Nk, load = route(x_ND, router_DE, there_N, recorded_Nk, k=k, normalised=self.normalised)
      chosen_BTk = expert_Nk.reshape(*shape[:2], k)
      expert_Nk = jnp.where(there_N[:, None], expert_Nk, E)
      gate_EDF, up_EDF, down_EFD = (w.astype(self.dtype) for w in (gate_EDF, up_EDF, down_EFD))
      if not on_mesh:
        return apply_experts(x_ND, expert_Nk, weight_Nk, gate_EDF, up_EDF, down_EFD).reshape(shape), chosen_BTk, load
      gather = functools.partial(jax.lax.all_gather, tiled=True)
      x_ND, expert_Nk, weight_Nk = (gather(a, "expert", axis=0) for a in (x_ND, expert_Nk, weight_Nk))
      first = jax.lax.axis_index("expert") * gate_EDF.shape[0]
      gate_EDF, up_EDF, down_EFD = (gather(w, "fsdp", axis=i) for w, i in ((gate_EDF, 1), (up_EDF, 1), (down_EFD, 2)))
      y_ND = apply_experts(x_ND, expert_Nk - first, weight_Nk, gate_EDF, up_EDF, down_EFD)
      y_ND = jax.lax.psum_scatter(jax.lax.psum(y_ND, "tensor"), "expert", scatter_dimension=0, tiled=True)
      return y_ND.reshape(shape), chosen_BTk, jax.lax.psum(load, BATCH_AXES)

    weights = self.router.kernel[...], self.gate[...], self.up[...], self.down[...]
    if mesh is None:
      y_BTD, chosen_BTk, load = local(x_BTD, there_BT, recorded_BTk, *weights, on_mesh=False)
      return y_BTD, Routed(chosen_BTk, load)
    if B % batch_shards(mesh):
      axes = " x ".join(f"mesh.{axis}" for axis in BATCH_AXES)
      raise UserError(f"{B} rows of tokens do not divide over {axes} = {batch_shards(mesh)}: change one of them")
    rows, widens, narrows = P(BATCH_AXES), P("expert", "fsdp", "tensor"), P("expert", "tensor", "fsdp")
    sharded = jax.shard_map(
      # What was gathered is gathered again for the backward pass rather than kept: it is as large as the layer.
      jax.checkpoint(functools.partial(local, on_mesh=True), policy=_saves, prevent_cse=False),
      mesh=mesh,
      in_specs=(rows, rows, rows, P(), widens, widens, narrows),
      out_specs=(rows, rows, P()),
      check_vma=False,  # the Pallas kernel does not say along which axes its result varies
    )
    y_BTD, chosen_BTk, load = sharded(x_BTD, there_BT, recorded_BTk, *weights)
    return y_BTD, Routed(chosen_BTk, load)


def _saves(primitive: Any, *_: Any, **__: Any) -> bool:
  return primitive.name not in ("all_gather", "convert_element_type")
