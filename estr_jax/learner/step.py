"""The train step: score a batch, take the loss, accumulate gradients, update; jitted once over a mesh."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from estr_jax.errors import UserError
from estr_jax.learner.optimizer import learning_rate
from estr_jax.model import decoder
from estr_jax.model.decoder import DecoderConfig
from estr_jax.model.sharding import BATCH_SPEC, shardings
from estr_jax.objective.diagnostics import diagnose
from estr_jax.objective.losses import reduce
from estr_jax.objective.scoring import score
from estr_jax.structs import Batch, Mean, Params, TokenLoss, TrainState

Loss = Callable[[jax.Array, Batch], TokenLoss]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Mean]]]  # jitted
ScoreStep = Callable[[Params, Batch], jax.Array]  # jitted


def abstract_state(model: DecoderConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
  """Shape, dtype and sharding of every leaf of the train state, without computing one."""
  params = decoder.abstract_params(model)
  state = jax.eval_shape(lambda p: TrainState(jnp.int32(0), p, optimizer.init(p)), params)
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state, shardings(state, mesh)
  )


def init_state(model: DecoderConfig, optimizer: optax.GradientTransformation, params: Params, mesh: Mesh) -> TrainState:
  """Version 0: `params` and a fresh optimizer state, placed by the sharding rules.

  The state owns its buffers, so donating it to the train step leaves `params` usable.
  """
  places = _places(abstract_state(model, optimizer, mesh))
  create = jax.jit(
    lambda p: TrainState(jnp.int32(0), jax.tree.map(jnp.copy, p), optimizer.init(p)), out_shardings=places
  )
  return create(params)


def _places(tree):
  return jax.tree.map(lambda leaf: leaf.sharding, tree)


def score_tokens(
  model: DecoderConfig, params: Params, tokens_BT: jax.Array, segment_BT: jax.Array, *, temperature: float, chunk: int
) -> tuple[jax.Array, jax.Array]:
  """The learner's log-prob and entropy of every token given those before it in its segment.

  The hidden state at t - 1 scores token t, so the results are aligned with the tokens; both are 0 at the
  first token of a segment and at padding.

  Returns:
    (logprob_BT, entropy_BT), f32, nats, at `temperature`.
  """
  hidden_BTD = decoder.forward(model, params, tokens_BT, segment_BT)
  # Rolled rather than cut, so that T stays a size that divides well; the wrapped column is dropped below.
  target_BT = jnp.roll(tokens_BT, -1, axis=1)
  scores = score(hidden_BTD, decoder.head_kernel(model, params), target_BT, temperature=temperature, chunk=chunk)
  index_T = jnp.arange(tokens_BT.shape[1])
  follows_BT = (segment_BT == jnp.roll(segment_BT, 1, axis=1)) & (segment_BT > 0) & (index_T > 0)
  logprob_BT, entropy_BT = (jnp.where(follows_BT, jnp.roll(value, 1, axis=1), 0.0) for value in scores)
  return logprob_BT, entropy_BT


def _split(batch: Batch, microbatches: int, mesh: Mesh) -> Batch:
  """[B, T] -> [M, B / M, T], interleaved so that every device keeps the rows that it holds."""
  place = NamedSharding(mesh, P(None, *BATCH_SPEC))

  def split(array_BT: jax.Array) -> jax.Array:
    rows, length = array_BT.shape
    parts = array_BT.reshape(rows // microbatches, microbatches, length).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(parts, place)

  return jax.tree.map(split, batch)


def _check_rows(rows: int, microbatches: int, mesh: Mesh) -> None:
  shards = mesh.shape["data"] * mesh.shape["fsdp"]
  if rows % (microbatches * shards):
    raise UserError(
      f"{rows} rows do not divide into {microbatches} microbatches over mesh.data x mesh.fsdp = {shards} shards; "
      f"make the rows of a batch a multiple of {microbatches * shards}"
    )


def make_train_step(
  model: DecoderConfig,
  loss: Loss,
  optimizer: optax.GradientTransformation,
  *,
  mesh: Mesh,
  microbatches: int,
  temperature: float,
  score_chunk: int,
  diagnostics: bool,
) -> TrainStep:
  """Builds the jitted `(state, batch) -> (state, metrics)`.

  The state is donated: its buffers are gone after the call, so whoever keeps old weights copies them first.
  Gradients accumulate in float32 over the microbatches, and every microbatch is divided by the number of
  policy tokens of the WHOLE batch, so the split changes nothing.

  Args:
    model: the decoder.
    loss: from log-probs and a batch to a `TokenLoss`.
    optimizer: of `optimizer.make`.
    mesh: rows are split over data and fsdp, parameters by the rules of model/sharding.py.
    microbatches: M; B must be a multiple of M x data x fsdp.
    temperature: the sampling temperature, by which logits are divided.
    score_chunk: of `scoring.score`.
    diagnostics: whether the metrics hold everything of `objective.diagnostics`.

  Returns:
    The step. Metrics: `loss/objective`, `optimizer/*`, `policy/max_abs_delta` (over tokens with a finite
    stored log-prob), and with `diagnostics` those of `diagnose`.
  """
  places = _places(abstract_state(model, optimizer, mesh))

  def microbatch_loss(params: Params, batch: Batch, denominator: jax.Array):
    logprob_BT, entropy_BT = score_tokens(
      model, params, batch.tokens, batch.segment, temperature=temperature, chunk=score_chunk
    )
    token_loss = loss(logprob_BT, batch)
    delta_BT = jnp.abs(jax.lax.stop_gradient(logprob_BT) - batch.logprob)
    largest = jnp.max(jnp.where(batch.mask & jnp.isfinite(delta_BT), delta_BT, 0.0))
    metrics = diagnose(logprob_BT, entropy_BT, batch, token_loss) if diagnostics else {}
    return reduce(token_loss, denominator), (metrics, largest)

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Mean]]:
    _check_rows(batch.tokens.shape[0], microbatches, mesh)
    denominator = jnp.maximum(batch.mask.sum(), 1).astype(jnp.float32)

    def accumulate(carry, part: Batch):
      objective, gradient = carry
      (value, aux), new = jax.value_and_grad(microbatch_loss, has_aux=True)(state.params, part, denominator)
      gradient = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), gradient, new)
      return (objective + value, jax.lax.with_sharding_constraint(gradient, places.params)), aux

    nothing = (jnp.float32(0), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), state.params))
    parts = _split(batch, microbatches, mesh)
    (objective, gradient), (stacked, largest_M) = jax.lax.scan(accumulate, nothing, parts)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    metrics = jax.tree.map(lambda array_M: array_M.sum(axis=0), stacked)  # totals and counts of Means
    once = jnp.float32(1)
    metrics["loss/objective"] = Mean(objective * denominator, denominator)
    metrics["policy/max_abs_delta"] = Mean(largest_M.max(), once)
    metrics["optimizer/gradient_norm"] = Mean(optax.tree.norm(gradient), once)
    metrics["optimizer/learning_rate"] = Mean(learning_rate(opt_state), once)
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), metrics

  return jax.jit(
    step,
    donate_argnums=0,
    in_shardings=(places, NamedSharding(mesh, BATCH_SPEC)),
    out_shardings=(places, NamedSharding(mesh, P())),
  )


def make_score_step(
  model: DecoderConfig, *, mesh: Mesh, microbatches: int, temperature: float, score_chunk: int
) -> ScoreStep:
  """Builds the jitted `(params, batch) -> logprob_BT` f32, for `batch.proximal`: log q under the weights before an
  update. Needed only where `triangle.needs_proximal(edge)`; the arguments are those of `make_train_step`."""
  abstract = decoder.abstract_params(model)

  def step(params: Params, batch: Batch) -> jax.Array:
    _check_rows(batch.tokens.shape[0], microbatches, mesh)

    def one(part: Batch) -> jax.Array:
      return score_tokens(model, params, part.tokens, part.segment, temperature=temperature, chunk=score_chunk)[0]

    return jax.lax.map(one, _split(batch, microbatches, mesh)).swapaxes(0, 1).reshape(batch.tokens.shape)

  rows = NamedSharding(mesh, BATCH_SPEC)
  return jax.jit(step, in_shardings=(shardings(abstract, mesh), rows), out_shardings=rows)


def compilations(step: TrainStep | ScoreStep) -> int:
  """How many programs a step holds; more than 1 is a fault where every batch is of one shape and one kind of array."""
  return step._cache_size()


def check_ratio(metrics: Mapping[str, Mean | np.ndarray]) -> None:
  """Fails where stale tokens have a ratio of exactly 1, which real arithmetic does not give.

  A learner that compares its weights with themselves masks and clips nothing, and looks healthy.

  Args:
    metrics: those of the train step together with those of `batching.staleness`.

  Raises:
    RuntimeError: `policy/max_abs_delta` is 0 while `staleness/token` is above 0.
  """
  stale, largest = float(metrics["staleness/token"].value()), float(metrics["policy/max_abs_delta"].value())
  if stale > 0 and largest == 0:
    raise RuntimeError(
      f"the trust region is silently off: tokens are {stale:.2f} versions old on average and yet every log-ratio "
      "against the behaviour policy is exactly 0; the stored log-probs must be the sampler's, not recomputed ones"
    )
