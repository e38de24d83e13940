"""The device side of sampling: one documented state and the jitted functions that move it.

A slot holds one sequence. Invariant between calls: `cache` holds the keys of every token of a slot but its last, which
is the input of the next decode step. So every policy token's logits come from a decode step, under the weights of that
moment, and feeding a prompt or an observation needs no logits at all.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from estr_jax.model import decoder
from estr_jax.model.config import DecoderConfig
from estr_jax.model.moe import Routed
from estr_jax.model.sharding import BATCH_AXES
from estr_jax.objective import scoring
from estr_jax.structs import NO_EXPERT, NO_VERSION, Params

NO_LIMIT = 2**30  # policy tokens


@flax.struct.dataclass
class Slots:
  """S sequences that grow side by side."""

  cache: decoder.Cache
  tokens: jax.Array  # i32 [S, T]
  mask: jax.Array  # bool [S, T]; sampled by the policy
  logprob: jax.Array  # f32 [S, T]
  entropy: jax.Array  # f32 [S, T], nats
  gini: jax.Array  # f32 [S, T]
  vocabulary: jax.Array | None  # f32 [S, T, V]; log mu of every token, where it is recorded
  experts: jax.Array | None  # u8 [S, T, L, k]; the routers' choice for every input token, where it is recorded
  version: jax.Array  # i32 [S, T]
  length: jax.Array  # i32 [S]; tokens present
  sampled: jax.Array  # i32 [S]; policy tokens among them
  seed: jax.Array  # i32 [S]; the prompt id, from which the slot's random keys are derived
  greedy: jax.Array  # bool [S]; take the most probable token instead of drawing one
  live: jax.Array  # bool [S]; it is the policy's turn


def places(slots: Slots, mesh: Mesh) -> Slots:
  """The NamedSharding of every leaf: sequences over BATCH_AXES, heads of the cache over tensor.

  What has one entry a slot is everywhere, since every host decides by it.
  """

  def place(path: tuple, leaf: Any) -> NamedSharding:
    if path[0].name == "cache":
      return NamedSharding(mesh, decoder.CACHE_SPEC)
    return NamedSharding(mesh, P(BATCH_AXES) if leaf.ndim > 1 else P())

  return jax.tree_util.tree_map_with_path(place, slots)


def _placed(slots: Slots, mesh: Mesh | None) -> Slots:
  return slots if mesh is None else jax.lax.with_sharding_constraint(slots, places(slots, mesh))


@functools.partial(
  jax.jit, static_argnames=("config", "slots", "context", "record_vocabulary", "record_routing", "mesh")
)
def empty(
  config: DecoderConfig,
  slots: int,
  context: int,
  *,
  record_vocabulary: bool,
  record_routing: bool,
  mesh: Mesh | None = None,
) -> Slots:
  """No sequence yet. On a mesh `slots` has to be a multiple of `batch_shards(mesh)`; routing is that of experts."""
  rows, grid = (slots,), (slots, context)
  choices = (*grid, config.layers, config.experts_per_token)
  state = Slots(
    cache=decoder.empty_cache(config, slots, context),
    tokens=jnp.zeros(grid, jnp.int32),
    mask=jnp.zeros(grid, bool),
    logprob=jnp.zeros(grid, jnp.float32),
    entropy=jnp.zeros(grid, jnp.float32),
    gini=jnp.zeros(grid, jnp.float32),
    vocabulary=jnp.zeros((*grid, config.vocab_size), jnp.float32) if record_vocabulary else None,
    experts=jnp.full(choices, NO_EXPERT, jnp.uint8) if record_routing else None,
    version=jnp.full(grid, NO_VERSION, jnp.int32),
    length=jnp.zeros(rows, jnp.int32),
    sampled=jnp.zeros(rows, jnp.int32),
    seed=jnp.zeros(rows, jnp.int32),
    greedy=jnp.zeros(rows, bool),
    live=jnp.zeros(rows, bool),
  )
  return _placed(state, mesh)


def _record_experts(
  experts_STLk: jax.Array, rows_R: jax.Array, position_RC: jax.Array, routed: Routed | None
) -> jax.Array:
  """Puts the choices for the input tokens at their positions; -1 is a token that is not there."""
  if routed is None:
    raise ValueError("there are no routers in a dense model whose choices could be recorded")
  column_RC = jnp.where(position_RC >= 0, position_RC, experts_STLk.shape[1])
  chosen_RCLk = jnp.moveaxis(routed.experts, 0, 2).astype(jnp.uint8)
  return experts_STLk.at[rows_R[:, None], column_RC].set(chosen_RCLk, mode="drop")


@functools.partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames="slots")
def feed(
  config: DecoderConfig,
  params: Params,
  slots: Slots,
  rows_R: jax.Array,
  tokens_RC: jax.Array,
  count_R: jax.Array,
  fresh_R: jax.Array,
  seed_R: jax.Array,
  greedy_R: jax.Array,
  *,
  mesh: Mesh | None = None,
) -> Slots:
  """Appends tokens that the policy did not sample, a prompt or an observation, and gives the policy the word.

  Args:
    config, params: the decoder.
    slots: the state; donated.
    rows_R: the slots, distinct; S for a row that is not there.
    tokens_RC: the tokens, left-aligned.
    count_R: how many, at least 1.
    fresh_R: bool; True starts a new sequence, False appends to the slot's own.
    seed_R: the prompt id of a fresh row; ignored otherwise.
    greedy_R: bool, of a fresh row; ignored otherwise.
    mesh: on which `slots` lie by `places`; R is then a multiple of `batch_shards(mesh)`.
  """
  C = tokens_RC.shape[1]
  column_C = jnp.arange(C)
  start_R = jnp.where(fresh_R, 0, slots.length.at[rows_R].get(mode="clip"))
  there_RC = column_C < count_R[:, None]
  outside = slots.tokens.shape[1]

  # The keys of the slot's last token were never written: it goes first, and the newest token waits in its place.
  last_R = slots.tokens.at[rows_R, start_R - 1].get(mode="clip")
  input_RC = jnp.concatenate([last_R[:, None], tokens_RC[:, :-1]], axis=1)
  position_RC = jnp.where(there_RC, start_R[:, None] - 1 + column_C, -1)
  _, cache, routed = decoder.extend_routed(config, params, input_RC, position_RC, rows_R, slots.cache, mesh=mesh)

  index = (rows_R[:, None], jnp.where(there_RC, start_R[:, None] + column_C, outside))
  fresh_rows = jnp.where(fresh_R, rows_R, slots.length.shape[0])
  vocabulary = slots.vocabulary
  if vocabulary is not None:
    vocabulary = vocabulary.at[fresh_rows].set(0.0, mode="drop")
  experts = slots.experts
  if experts is not None:
    experts = experts.at[fresh_rows].set(NO_EXPERT, mode="drop")
    experts = _record_experts(experts, rows_R, position_RC, routed)
  fed = dataclasses.replace(
    slots,
    cache=cache,
    tokens=slots.tokens.at[index].set(tokens_RC, mode="drop"),
    mask=slots.mask.at[fresh_rows].set(False, mode="drop"),
    logprob=slots.logprob.at[fresh_rows].set(0.0, mode="drop"),
    entropy=slots.entropy.at[fresh_rows].set(0.0, mode="drop"),
    gini=slots.gini.at[fresh_rows].set(0.0, mode="drop"),
    vocabulary=vocabulary,
    experts=experts,
    version=slots.version.at[fresh_rows].set(NO_VERSION, mode="drop"),
    length=slots.length.at[rows_R].set(start_R + count_R, mode="drop"),
    sampled=slots.sampled.at[fresh_rows].set(0, mode="drop"),
    seed=slots.seed.at[fresh_rows].set(seed_R, mode="drop"),
    greedy=slots.greedy.at[fresh_rows].set(greedy_R, mode="drop"),
    live=slots.live.at[rows_R].set(True, mode="drop"),
  )
  return _placed(fed, mesh)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="slots")
def share(
  slots: Slots,
  source_R: jax.Array,
  target_R: jax.Array,
  seed_R: jax.Array,
  greedy_R: jax.Array,
  *,
  mesh: Mesh | None = None,
) -> Slots:
  """Copies freshly fed slots to others, which then go their own way: the samples of a group share one prefill.

  Args:
    slots: the state; donated.
    source_R: slots to copy from.
    target_R: slots to copy to, distinct and none of the sources; S for a row that is not there.
    seed_R, greedy_R: of the targets.
    mesh: as of `feed`.
  """

  def copy(path: tuple, array: jax.Array) -> jax.Array:
    axis = 1 if path[0].name == "cache" else 0
    taken = jnp.take(array, source_R, axis=axis, mode="clip")
    return array.at[(slice(None),) * axis + (target_R,)].set(taken, mode="drop")

  copied = dataclasses.replace(
    jax.tree_util.tree_map_with_path(copy, slots),
    seed=slots.seed.at[target_R].set(seed_R, mode="drop"),
    greedy=slots.greedy.at[target_R].set(greedy_R, mode="drop"),
  )
  return _placed(copied, mesh)


@functools.partial(jax.jit, static_argnames=("config", "temperature", "steps", "mesh"), donate_argnames="slots")
def decode(
  config: DecoderConfig,
  params: Params,
  version: jax.Array,
  slots: Slots,
  key: jax.Array,
  stop_ids: jax.Array,
  limit: jax.Array,
  *,
  temperature: float,
  steps: int,
  mesh: Mesh | None = None,
) -> Slots:
  """Up to `steps` tokens for every slot whose turn it is, inside one compiled loop.

  A slot stops at a stop token, at the end of the context, or at `limit` policy tokens (it stays live then). The token
  at position p of prompt id i is drawn with fold_in(fold_in(key, i), p): neither the slot, nor the chunk, nor the
  neighbours enter.

  Args:
    config, params: the decoder.
    version: i32 [], stamped on every token sampled here.
    slots: the state; donated.
    key: the run's sampling key.
    stop_ids: i32 [K], tokens that end a turn.
    limit: i32 [], policy tokens.
    temperature: of the sampling distribution; the recorded scores are of that distribution.
    steps: the chunk.
    mesh: on which `slots` lie by `places`, and `params` by the sharding rules.
  """
  S, T = slots.tokens.shape
  rows_S = jnp.arange(S)
  head_DV = decoder.head_kernel(config, params)
  key_S = jax.vmap(lambda seed: jax.random.fold_in(key, seed))(slots.seed)

  def moving(slots):
    return slots.live & (slots.sampled < limit)

  def step(carry):
    count, slots = carry
    active_S = moving(slots)
    position_S = jnp.where(active_S, slots.length - 1, -1)
    last_S = slots.tokens[rows_S, jnp.maximum(position_S, 0)]
    inputs = (last_S[:, None], position_S[:, None], rows_S, slots.cache)
    hidden, cache, routed = decoder.extend_routed(config, params, *inputs, mesh=mesh)
    logits_SV = scoring.logits(hidden[:, 0], head_DV)
    draw = jax.vmap(lambda k, p, row: jax.random.categorical(jax.random.fold_in(k, p), row / temperature))
    drawn_S = draw(key_S, slots.length, logits_SV)
    token_S = jnp.where(slots.greedy, jnp.argmax(logits_SV, axis=-1), drawn_S).astype(jnp.int32)
    scores = scoring.score_logits(logits_SV, token_S, temperature=temperature)

    index = (rows_S, jnp.where(active_S, slots.length, T))
    vocabulary = slots.vocabulary
    if vocabulary is not None:
      log_mu_SV = scoring.score_vocabulary(logits_SV, temperature=temperature)
      vocabulary = vocabulary.at[index].set(log_mu_SV, mode="drop")
    experts = slots.experts
    if experts is not None:
      experts = _record_experts(experts, rows_S, position_S[:, None], routed)
    length_S = slots.length + active_S
    ended_S = jnp.isin(token_S, stop_ids) | (length_S >= T)
    stepped = dataclasses.replace(
      slots,
      cache=cache,
      tokens=slots.tokens.at[index].set(token_S, mode="drop"),
      mask=slots.mask.at[index].set(True, mode="drop"),
      logprob=slots.logprob.at[index].set(scores.logprob, mode="drop"),
      entropy=slots.entropy.at[index].set(scores.entropy, mode="drop"),
      gini=slots.gini.at[index].set(scores.gini, mode="drop"),
      vocabulary=vocabulary,
      experts=experts,
      version=slots.version.at[index].set(version, mode="drop"),
      length=length_S,
      sampled=slots.sampled + active_S,
      live=slots.live & ~(active_S & ended_S),
    )
    return count + 1, _placed(stepped, mesh)

  def unfinished(carry):
    count, slots = carry
    return (count < steps) & jnp.any(moving(slots))

  return _placed(jax.lax.while_loop(unfinished, step, (0, slots))[1], mesh)


@functools.partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames="slots")
def rebuild(config: DecoderConfig, params: Params, slots: Slots, *, mesh: Mesh | None = None) -> Slots:
  """Recomputes every slot's keys and values under new weights.

  The recorded experts stay: like the log-probs, they are those of the policy that sampled.
  """
  S, T = slots.tokens.shape
  position_ST = jnp.where(jnp.arange(T) < slots.length[:, None] - 1, jnp.arange(T), -1)
  _, cache = decoder.extend(config, params, slots.tokens, position_ST, jnp.arange(S), slots.cache, mesh=mesh)
  return _placed(dataclasses.replace(slots, cache=cache), mesh)


@functools.partial(jax.jit, static_argnames="mesh")
def read(slots: Slots, rows_R: jax.Array, *, mesh: Mesh | None = None) -> dict[str, jax.Array]:
  """The record of some slots by the names of a Trajectory, each [R, T, ...]; rows out of range repeat the last.

  On a mesh it is everywhere, so that every host of it can read it.
  """
  names = ("tokens", "mask", "logprob", "entropy", "gini", "version", "vocabulary", "experts")
  arrays = {name: getattr(slots, name) for name in names if getattr(slots, name) is not None}
  record = {name: array.at[rows_R].get(mode="clip") for name, array in arrays.items()}
  return record if mesh is None else jax.lax.with_sharding_constraint(record, NamedSharding(mesh, P()))
