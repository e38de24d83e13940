"""From checked settings to the update: the objective, its numbers, and the compiled step on the learner's mesh."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from estr_jax.learner import batching, optimizer, step
from estr_jax.model import sharding
from estr_jax.model.config import DecoderConfig
from estr_jax.objective.keys import first_calibration
from estr_jax.objective.losses import SCORES, keywords
from estr_jax.run.options import Settings
from estr_jax.runtime.learner_loop import Calibration, Learner
from estr_jax.structs import Batch, Params, TrainState


@dataclasses.dataclass(frozen=True)
class Update:
  """The update of a config, and the shape of the state that it moves."""

  learner: Learner
  abstract: TrainState
  init: Callable[[Params], TrainState]


def update_of(settings: Settings, model: DecoderConfig, mesh: Mesh) -> Update:
  """The update on the learner's mesh."""
  c = settings.config
  objective, hyper = objective_of(settings)
  rule = optimizer_of(settings)
  shared = dict(
    mesh=mesh,
    microbatches=c.batch.microbatches,
    temperature=c.sampling.temperature,
    score_chunk=c.learner.score_chunk,
  )
  diagnostics = c.learner.diagnostics
  entropy = diagnostics or objective.reads("entropy", hyper)
  train_step = step.make_train_step(model, objective, rule, entropy=entropy, diagnostics=diagnostics, **shared)
  assemble = functools.partial(
    batching.assemble,
    rows=c.batch.groups * c.batch.group_size,
    length=c.sampling.context,
    advantage=c.advantage.name,
    advantage_eps=c.advantage.eps,
    pack=False,
  )
  rows = NamedSharding(mesh, sharding.BATCH_SPEC)

  def place(batch: Batch) -> Batch:
    """Every process has the whole batch, and takes the rows of its devices."""
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(rows, leaf, leaf.shape), batch)

  read = [name for name in ("proximal", "reference") if objective.reads(name, hyper)]
  anchors = dict.fromkeys(read, step.make_score_step(model, **shared)) if read else {}
  make_score = functools.partial(step.make_score_step, model, **shared, entropy=objective.reads("entropy", hyper))
  return Update(
    learner=Learner(assemble, place, train_step, hyper, anchors, calibration_of(settings, hyper, make_score)),
    abstract=step.abstract_state(model, rule, mesh),
    init=functools.partial(step.init_state, model, rule, mesh=mesh, entropy_coefficient=c.loss.entropy.coefficient),
  )


def objective_of(settings: Settings) -> tuple[step.Objective, step.Hyper]:
  """What the update minimises: its static half, and its numbers."""
  c, loss, bonus = settings.config, settings.config.loss, settings.config.loss.entropy
  hyper = settings.loss_arguments
  numbers = {name: np.float32(value) for name, value in hyper.items() if not isinstance(value, str)}
  words = {name: value for name, value in hyper.items() if isinstance(value, str)}
  adaptive = bonus.target > 0
  objective = step.Objective(
    loss=functools.partial(settings.method.loss, **words),
    aggregation=loss.aggregation,
    aggregation_tokens=c.sampling.context,
    entropy_bonus=adaptive or bonus.coefficient > 0,
    kl=(loss.kl.estimator, loss.kl.anchor) if loss.kl.coefficient > 0 else None,
    router_balance=loss.router_balance > 0,
    ess_step=c.optimizer.ess_step,
  )
  target = bonus.target if adaptive else -np.inf
  scalars = (loss.kl.coefficient, target, bonus.step, bonus.largest, loss.router_balance)
  return objective, step.Hyper(numbers, *map(np.float32, scalars))


def optimizer_of(settings: Settings) -> optax.GradientTransformation:
  """The Optax rule."""
  o = settings.config.optimizer
  return optimizer.make(
    optimizer=o.name,
    learning_rate=o.learning_rate,
    warmup_steps=o.warmup_steps,
    decay=o.decay,
    total_steps=settings.config.steps,
    b1=o.b1,
    b2=o.b2,
    eps=o.eps,
    weight_decay=o.weight_decay,
    clip_norm=o.clip_norm,
  )


def calibration_of(
  settings: Settings, hyper: step.Hyper, make_score: Callable[..., step.ScoreStep]
) -> Calibration | None:
  """How tau is found, where it is to be calibrated."""
  fraction = settings.calibrated_fraction
  if fraction is None:
    return None
  score = SCORES[settings.config.loss.name]
  score = functools.partial(score, **{name: hyper.loss[name] for name in keywords(score)})
  return Calibration(
    make_score(read=score),
    fraction=fraction,
    first_version=first_calibration(settings.config),
    stale_share=0.5 if settings.config.mode == "async" else 0.0,
  )
