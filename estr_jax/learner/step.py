"""The train step: score a batch, take the loss, accumulate gradients, update; jitted once over a mesh."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from estr_jax.errors import UserError
from estr_jax.learner.optimizer import learning_rate
from estr_jax.model import decoder
from estr_jax.model.config import DecoderConfig
from estr_jax.model.moe import Routed, load_balance, load_metrics
from estr_jax.model.sharding import BATCH_SPEC, batch_shards, shardings
from estr_jax.objective.aggregation import AGGREGATIONS, reduce
from estr_jax.objective.diagnostics import diagnose
from estr_jax.objective.losses import Loss, needs
from estr_jax.objective.penalties import adapt_coefficient, entropy_bonus, kl_penalty
from estr_jax.objective.scoring import logits, score, score_vocabulary
from estr_jax.objective.sequence_weights import effective_share, sequence_weight_sums
from estr_jax.structs import NO_EXPERT, Batch, Mean, Metric, Params, Scalar, Scores, TrainState, mean_of


class TrainStep(Protocol):
  """What `make_train_step` builds; jitted."""

  def __call__(self, state: TrainState, batch: Batch, hyper: "Hyper", /) -> tuple[TrainState, dict[str, Mean]]: ...

  def trace(self, state: TrainState, batch: Batch, hyper: "Hyper", /) -> jax.stages.Traced: ...


ScoreStep = Callable[[Params, Batch], jax.Array]  # jitted

# Of a microbatch: the metrics of `diagnose`, further sums by name, and the largest |delta|.
_Sums = tuple[dict[str, Mean], dict[str, Any], jax.Array]


def abstract_state(model: DecoderConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
  """Shape, dtype and sharding of every leaf of the train state, without computing one."""
  params = decoder.abstract_params(model)
  state = jax.eval_shape(lambda p: TrainState(jnp.int32(0), jnp.float32(0), p, optimizer.init(p)), params)
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state, shardings(state, mesh)
  )


def init_state(
  model: DecoderConfig,
  optimizer: optax.GradientTransformation,
  params: Params,
  mesh: Mesh,
  *,
  entropy_coefficient: float,
) -> TrainState:
  """Version 0: `params` and a fresh optimizer state, placed by the sharding rules.

  The state owns its buffers, so donating it to the train step leaves `params` usable.
  """
  places = _places(abstract_state(model, optimizer, mesh))
  create = jax.jit(
    lambda p: TrainState(jnp.int32(0), jnp.float32(entropy_coefficient), jax.tree.map(jnp.copy, p), optimizer.init(p)),
    out_shardings=places,
  )
  return create(params)


def _places(tree):
  return jax.tree.map(lambda leaf: leaf.sharding, tree)


def score_tokens_routed(
  model: DecoderConfig,
  params: Params,
  tokens_BT: jax.Array,
  segment_BT: jax.Array,
  *,
  temperature: float,
  chunk: int,
  entropy: bool,
  vocabulary: bool = False,
  experts: jax.Array | None = None,
  mesh: Mesh | None = None,
) -> tuple[Scores, Routed | None]:
  """The learner's scores of every token given those before it in its segment.

  The hidden state at t - 1 scores token t, so the results are aligned with the tokens; all are 0 at the
  first token of a segment and at padding. With `vocabulary` every log-prob is there too, for small vocabularies.

  Args:
    entropy: whether entropy and Gini impurity are there.
    experts: u8 [B, T, L, k], of a Batch: what the routers are to take instead of their own choice, where it is known.
    mesh: where the parameters lie by the sharding rules; None on one device.

  Returns:
    f32 [B, T] each, at `temperature`; `vocabulary` [B, T, V]. Then what the routers chose: None of a dense model.
  """
  routing = None
  if experts is not None:
    # Token t was the input at t, so its record needs no shift, though the choice decides how token t + 1 is scored.
    experts_LBTk = jnp.moveaxis(experts, 2, 0)
    routing = jnp.where(experts_LBTk == NO_EXPERT, -1, experts_LBTk.astype(jnp.int32))
  hidden_BTD, routed = decoder.forward_routed(model, params, tokens_BT, segment_BT, mesh=mesh, routing=routing)
  # Rolled rather than cut, so that T stays a size that divides well; the wrapped column is dropped below.
  target_BT = jnp.roll(tokens_BT, -1, axis=1)
  head, vocabulary_axis = decoder.stored_head(model, params)
  scores = score(
    hidden_BTD,
    head,
    target_BT,
    temperature=temperature,
    chunk=chunk,
    entropy=entropy,
    vocabulary_axis=vocabulary_axis,
    head_place=None if mesh is None else decoder.stored_head(model, shardings(params, mesh))[0],
  )
  if vocabulary:
    logits_BTV = logits(hidden_BTD, decoder.head_kernel(model, params))
    scores = scores._replace(vocabulary=score_vocabulary(logits_BTV, temperature=temperature))
  index_T = jnp.arange(tokens_BT.shape[1])
  follows_BT = (segment_BT == jnp.roll(segment_BT, 1, axis=1)) & (segment_BT > 0) & (index_T > 0)

  def align(value):
    there = follows_BT.reshape(follows_BT.shape + (1,) * (value.ndim - 2))
    return jnp.where(there, jnp.roll(value, 1, axis=1), 0.0)

  return jax.tree.map(align, scores), routed


def score_tokens(*args: Any, **options: Any) -> Scores:
  """`score_tokens_routed` without the routers."""
  return score_tokens_routed(*args, **options)[0]


def _split(tree: Any, microbatches: int, mesh: Mesh) -> Any:
  """Every [B, T, ...] -> [M, B / M, T, ...], interleaved so that every device keeps the rows that it holds."""
  place = NamedSharding(mesh, P(None, *BATCH_SPEC))

  def split(array_BT: jax.Array) -> jax.Array:
    rows, *rest = array_BT.shape
    parts = array_BT.reshape(rows // microbatches, microbatches, *rest).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(parts, place)

  return jax.tree.map(split, tree)


def _check_rows(rows: int, microbatches: int, mesh: Mesh) -> None:
  shards = batch_shards(mesh)
  if rows % (microbatches * shards):
    raise UserError(
      f"{rows} rows do not divide into {microbatches} microbatches over mesh.data x mesh.fsdp x mesh.expert = {shards} "
      f"shards; make the rows of a batch a multiple of {microbatches * shards}"
    )


@dataclasses.dataclass(frozen=True)
class Objective:
  """What the update minimises: the static half. Its numbers arrive as `Hyper`, traced."""

  loss: Loss  # (policy, batch, **hyper) -> TokenLoss, its strings bound
  aggregation: str  # of aggregation.AGGREGATIONS
  aggregation_tokens: float  # the constant of "sequence_sum"
  entropy_bonus: bool  # whether the coefficient in the state can be above 0
  kl: tuple[str, str] | None  # (estimator, anchor) of penalties.kl_penalty
  router_balance: bool  # whether the routers' load is balanced, of a mixture of experts
  ess_step: bool  # whether the update is scaled by sqrt(effective sample size / sequences), as in VCPO

  def reads(self, name: str, hyper: "Hyper") -> bool:
    """Whether it needs a `name` of `losses.needs`: for the loss, for the entropy bonus or as the anchor of the KL."""
    asked = self.entropy_bonus if name == "entropy" else self.kl is not None and self.kl[1] == name
    return asked or needs(functools.partial(self.loss, **hyper.loss), name)


class Hyper(NamedTuple):
  """The numbers of an objective, f32 scalars: traced, so that one compiled step serves all of them."""

  loss: Mapping[str, Scalar]
  kl_coefficient: Scalar
  entropy_target: Scalar  # nats; -inf lets the coefficient of the bonus stay as it is
  entropy_step: Scalar
  entropy_largest: Scalar
  router_balance: Scalar  # times the mean over layers of moe.load_balance


def make_train_step(
  model: DecoderConfig,
  objective: Objective,
  optimizer: optax.GradientTransformation,
  *,
  mesh: Mesh,
  microbatches: int,
  temperature: float,
  score_chunk: int,
  entropy: bool,
  diagnostics: bool,
) -> TrainStep:
  """Builds the jitted `(state, batch, hyper) -> (state, metrics)`.

  The state is donated: its buffers are gone after the call, so whoever keeps old weights copies them first.
  Gradients accumulate in float32 over the microbatches, and every token is weighed as a part of the WHOLE batch, so
  the split changes nothing (but for losses of group or batch scope, which see one microbatch at a time, and for the
  balance of the routers: its shares and mean probabilities are those of a microbatch, which counts by its tokens).

  Args:
    model: the decoder.
    objective: what is minimised.
    optimizer: of `optimizer.make`.
    mesh: rows are split over data, fsdp and expert, parameters by the rules of model/sharding.py.
    microbatches: M; B must be a multiple of M x data x fsdp x expert.
    temperature: the sampling temperature, by which logits are divided.
    score_chunk: of `scoring.score`.
    entropy: whether the learner's entropy is computed, which diagnostics, a bonus and some losses read.
    diagnostics: whether the metrics hold everything of `objective.diagnostics`.

  Returns:
    The step. Metrics: `loss/objective`, `loss/penalty`, `loss/entropy_coefficient`, `optimizer/*`,
    `policy/max_abs_delta` (over tokens with a finite stored log-prob), `router/*` of a mixture of experts, and with
    `diagnostics` those of `diagnose`.
  """
  places = _places(abstract_state(model, optimizer, mesh))

  def microbatch_loss(
    params: Params, batch: Batch, weight_BT: jax.Array, hyper: Hyper, coefficient: jax.Array, tokens: jax.Array
  ) -> tuple[jax.Array, _Sums]:
    policy, routed = score_tokens_routed(
      model,
      params,
      batch.tokens,
      batch.segment,
      temperature=temperature,
      chunk=score_chunk,
      entropy=entropy,
      vocabulary=batch.vocabulary is not None,
      experts=batch.experts,
      mesh=mesh,
    )
    token_loss = objective.loss(policy, batch, **hyper.loss)
    value = reduce(token_loss.value, weight_BT)
    penalty_BT = jnp.zeros_like(policy.logprob)
    if objective.entropy_bonus:
      penalty_BT += coefficient * entropy_bonus(policy)
    if objective.kl is not None:
      estimator, anchor = objective.kl
      penalty_BT += hyper.kl_coefficient * kl_penalty(policy, batch, estimator=estimator, anchor=anchor)
    penalty = reduce(jnp.where(batch.mask, penalty_BT, 0.0), weight_BT)
    if objective.router_balance:
      if routed is None:
        raise ValueError("there are no routers in a dense model whose load could be balanced")
      penalty += hyper.router_balance * (routed.load.tokens / tokens * load_balance(routed.load)).mean()
    delta_BT = jnp.abs(jax.lax.stop_gradient(policy.logprob) - batch.logprob)
    largest = jnp.max(jnp.where(batch.mask & jnp.isfinite(delta_BT), delta_BT, 0.0))
    sums: dict[str, Any] = {"loss/objective": value, "loss/penalty": penalty}
    if objective.ess_step:
      sums["weights"] = sequence_weight_sums(policy, batch)
    if routed is not None:
      sums["load"] = routed.load
    metrics = diagnose(policy, batch, token_loss) if diagnostics else {}
    return value + penalty, (metrics, sums, largest)

  def step(state: TrainState, batch: Batch, hyper: Hyper) -> tuple[TrainState, dict[str, Mean]]:
    _check_rows(batch.tokens.shape[0], microbatches, mesh)
    weight_BT = AGGREGATIONS[objective.aggregation](batch, objective.aggregation_tokens)
    coefficient, following = _entropy_coefficients(state.entropy_coefficient, batch, hyper)
    tokens = jnp.maximum(jnp.sum(batch.segment > 0), 1)

    def accumulate(gradient: Params, parts: tuple[Batch, jax.Array]) -> tuple[Params, _Sums]:
      part, weight = parts
      new, aux = jax.grad(microbatch_loss, has_aux=True)(state.params, part, weight, hyper, coefficient, tokens)
      gradient = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), gradient, new)
      return jax.lax.with_sharding_constraint(gradient, places.params), aux

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), state.params)
    parts = _split((batch, weight_BT), microbatches, mesh)
    gradient, (stacked, sums_M, largest_M) = jax.lax.scan(accumulate, nothing, parts)
    metrics, sums = jax.tree.map(lambda array_M: array_M.sum(axis=0), (stacked, sums_M))  # totals and counts of Means
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    rate = learning_rate(opt_state)
    if objective.ess_step:
      scale = jnp.sqrt(effective_share(*sums.pop("weights")))
      updates, rate = jax.tree.map(lambda leaf: scale * leaf, updates), scale * rate
    if "load" in sums:
      metrics |= load_metrics(sums.pop("load"), replayed=batch.experts is not None)
    once = jnp.float32(1)
    metrics |= {name: Mean(total, once) for name, total in sums.items()}
    metrics["loss/entropy_coefficient"] = Mean(coefficient, once)
    metrics["policy/max_abs_delta"] = Mean(largest_M.max(), once)
    metrics["optimizer/gradient_norm"] = Mean(optax.tree.norm(gradient), once)
    metrics["optimizer/learning_rate"] = Mean(rate, once)
    return TrainState(state.step + 1, following, optax.apply_updates(state.params, updates), opt_state), metrics

  everywhere = NamedSharding(mesh, P())
  return jax.jit(
    step,
    donate_argnums=0,
    in_shardings=(places, NamedSharding(mesh, BATCH_SPEC), everywhere),
    out_shardings=(places, everywhere),
  )


def _entropy_coefficients(coefficient: jax.Array, batch: Batch, hyper: Hyper) -> tuple[jax.Array, jax.Array]:
  """(what multiplies the bonus in this update, what the state carries on); by the recorded entropy of the batch."""
  tokens = jnp.maximum(jnp.sum(batch.mask), 1)
  entropy = jnp.sum(jnp.where(batch.mask, batch.entropy, 0.0)) / tokens
  adapted, acting = adapt_coefficient(
    coefficient,
    entropy,
    target=hyper.entropy_target,
    step=hyper.entropy_step,
    largest=hyper.entropy_largest,
  )
  adaptive = hyper.entropy_target > -jnp.inf
  return jnp.where(adaptive, acting, coefficient), jnp.where(adaptive, adapted, coefficient)


def make_score_step(
  model: DecoderConfig,
  *,
  mesh: Mesh,
  microbatches: int,
  temperature: float,
  score_chunk: int,
  entropy: bool = False,
  read: Callable[[Scores, Batch], jax.Array] = lambda policy, batch: policy.logprob,
) -> ScoreStep:
  """Builds the jitted `(params, batch) -> f32 [B, T]` of what `read` makes of a policy's scores.

  By default that is the log-prob, for `batch.proximal`, log q under the weights before an update, and for
  `batch.reference`. Needed only where `Objective.reads` says so.

  The arguments are those of `make_train_step`; `read` sees one microbatch at a time.
  """
  abstract = decoder.abstract_params(model)

  def step(params: Params, batch: Batch) -> jax.Array:
    _check_rows(batch.tokens.shape[0], microbatches, mesh)

    def one(part: Batch) -> jax.Array:
      policy = score_tokens(
        model,
        params,
        part.tokens,
        part.segment,
        temperature=temperature,
        chunk=score_chunk,
        entropy=entropy,
        experts=part.experts,
        mesh=mesh,
      )
      return read(policy, part)

    return jax.lax.map(one, _split(batch, microbatches, mesh)).swapaxes(0, 1).reshape(batch.tokens.shape)

  rows = NamedSharding(mesh, BATCH_SPEC)
  return jax.jit(step, in_shardings=(shardings(abstract, mesh), rows), out_shardings=rows)


def compilations(step: Any) -> int:
  """How many programs a step holds; more than 1 is a fault where every batch is of one shape and one kind of array."""
  return step._cache_size()  # which JAX's types do not know


def check_ratio(metrics: Mapping[str, Metric]) -> None:
  """Fails where stale tokens have a ratio of exactly 1, which real arithmetic does not give.

  A learner that compares its weights with themselves masks and clips nothing, and looks healthy.

  Args:
    metrics: those of the train step together with those of `batching.staleness`.

  Raises:
    RuntimeError: `policy/max_abs_delta` is 0 while `staleness/token` is above 0.
  """
  stale, largest = (float(mean_of(metrics, name).value()) for name in ("staleness/token", "policy/max_abs_delta"))
  if stale > 0 and largest == 0:
    raise RuntimeError(
      f"the trust region is silently off: tokens are {stale:.2f} versions old on average and yet every log-ratio "
      "against the behaviour policy is exactly 0; the stored log-probs must be the sampler's, not recomputed ones"
    )
