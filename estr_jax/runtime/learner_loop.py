"""The learner's loop: take a batch, update, publish, write a row. The same in every mode."""

import dataclasses
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from estr_jax import hosts
from estr_jax.errors import UserError
from estr_jax.learner import batching, step
from estr_jax.learner.checkpoint import Checkpoints
from estr_jax.objective import diagnostics
from estr_jax.objective.calibration import quantile_threshold
from estr_jax.observe.terminal import View
from estr_jax.observe.writers import Row, to_row
from estr_jax.runtime.rollouts import Groups, Rollouts
from estr_jax.structs import Batch, Metric, Params, TrainState, Weights, histogram_of, mean_of

Evaluate = Callable[[Weights, int], Mapping[str, float]]  # (weights, held-out prompts) -> eval/* metrics


# A quantile of S below this is rounding between sampler and learner: the weights have not moved yet.
_ROUNDING = 1e-8


@dataclasses.dataclass(frozen=True)
class Calibration:
  """How tau is found: as the quantile of S, on the first batch that is stale enough.

  Until then tau is infinite. Later batches may be staler, and more of them masked.
  """

  score_step: step.ScoreStep  # S, f32 [B, T]
  fraction: float  # of that batch's policy tokens that tau masks
  first_version: int  # an update from an earlier version waits
  stale_share: float  # so does one of whose policy tokens fewer are stale


@dataclasses.dataclass(frozen=True)
class Learner:
  """What an update needs."""

  assemble: Callable[[Groups, int], Batch]  # of the version that the update starts from
  place: Callable[[Batch], Batch]  # onto the mesh
  train_step: step.TrainStep
  hyper: step.Hyper
  # "proximal", "reference": what the objective reads of the batch besides the record, by what computes it
  anchors: Mapping[str, step.ScoreStep]
  calibration: Calibration | None

  def tau(self) -> float | None:
    """The bound of the loss, where it has one and, if it is to be calibrated, it has been."""
    tau = float(self.hyper.loss.get("tau", np.inf))
    return tau if np.isfinite(tau) else None

  def with_tau(self, tau: float) -> "Learner":
    hyper = self.hyper._replace(loss={**self.hyper.loss, "tau": np.float32(tau)})
    return dataclasses.replace(self, hyper=hyper)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """When things happen, in updates."""

  steps: int
  checkpoint_every: int
  eval_every: int  # 0 = none in between
  eval_prompts: int  # before the first update and after the last
  eval_every_prompts: int


def learner_loop(
  state: TrainState,
  rollouts: Rollouts,
  learner: Learner,
  schedule: Schedule,
  *,
  reference: Params | None,
  evaluate: Evaluate,
  checkpoints: Checkpoints,
  host_record: Mapping,
  record: Callable[[Row], None],
  view: View,
) -> None:
  """Trains until `schedule.steps` updates are done. Every process of the learner's group runs it, in step.

  Args:
    state: where to go on from; donated.
    rollouts: the source of batches; told of the weights of `state` first.
    learner: builds and applies updates.
    schedule: when to evaluate and to save.
    reference: the weights of version 0, placed like the state's, where `learner.anchors` has "reference".
    evaluate: of held-out prompts.
    checkpoints: of state, prompt cursor, tau and `host_record`.
    host_record: JSON that a resumed run checks.
    record: gets one row per update, and one of step 0 with the evaluation before training.
    view: shows the run.
  """
  copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))  # the state's own buffers are donated
  version = int(state.step)
  weights = Weights(version, copy(state.params))
  rollouts.publish(weights)
  if checkpoints.latest() is None:
    view.phase("evaluating before training", detail=f"{schedule.eval_prompts} held-out prompts")
    row = to_row(0, dict(evaluate(weights, schedule.eval_prompts)))
    record(row)
    checkpoints.save(0, state, {**host_record, "tau": learner.tau(), "cursor": rollouts.cursor()})
  view.phase("waiting for the first batch")
  ended = time.monotonic()
  while version < schedule.steps:
    began = time.monotonic()
    groups = rollouts.take(version)
    taken = time.monotonic()
    if step.compilations(learner.train_step) == 0:
      view.phase("compiling the train step")
    batch = learner.place(learner.assemble(groups, version))
    policies = {"proximal": state.params, "reference": reference}
    anchors = {name: score(policies[name], batch) for name, score in learner.anchors.items()}
    batch = dataclasses.replace(batch, **anchors)
    metrics = batching.staleness(groups, version)
    if learner.calibration is not None and learner.tau() is None:
      tau = _calibrated(learner.calibration, state.params, batch, metrics, version, view)
      learner = learner if tau is None else learner.with_tau(tau)
    state, device_metrics = learner.train_step(state, batch, learner.hyper)
    metrics |= jax.device_get(device_metrics)
    trained = time.monotonic()
    version += 1
    _check_finite(metrics, version)
    if any(np.any(t.logprob[t.mask] != 0) for group in groups for t in group):  # else everything was certain
      step.check_ratio(metrics)
    compiled = step.compilations(learner.train_step)
    if compiled != 1:
      raise RuntimeError(f"the train step was compiled {compiled} times by step {version}: a shape changed")

    weights = Weights(version, copy(state.params))
    rollouts.publish(weights)
    published = time.monotonic()
    tokens = float(mean_of(metrics, "rollout/length").total)
    derived = diagnostics.derive(metrics) if "policy/ratio" in metrics else {}
    metrics |= {"policy/tokens": tokens, **derived, **rollouts.metrics()}
    if (tau := learner.tau()) is not None:
      metrics["loss/tau"] = tau
    last = version == schedule.steps
    if last or (schedule.eval_every and version % schedule.eval_every == 0):
      metrics |= evaluate(weights, schedule.eval_prompts if last else schedule.eval_every_prompts)
    now = time.monotonic()
    metrics |= {
      "time/step_s": now - ended,
      "time/wait_rollouts_s": taken - began,
      "time/train_s": trained - taken,
      "time/publish_s": published - trained,
      "throughput/tokens_per_s": tokens / (now - ended),
    }
    ended = now
    row = to_row(version, metrics)
    # The row before the checkpoint: a run that is killed between the two repeats the step and rewrites its row.
    record(row)
    checkpoints.check()
    if last or version % schedule.checkpoint_every == 0:
      checkpoints.save(version, state, {**host_record, "tau": learner.tau(), "cursor": rollouts.cursor()})
  checkpoints.wait()
  rollouts.finish()  # not before all is saved: a run that is killed now still needs its samplers


def _calibrated(
  calibration: Calibration, params: Params, batch: Batch, metrics: Mapping[str, Metric], version: int, view: View
) -> float | None:
  """Tau, if this is the batch that gives it; `metrics` has its staleness."""
  histogram = histogram_of(metrics, "staleness/token_histogram")
  tokens, stale = histogram.sum(), histogram[1:].sum()
  if version < calibration.first_version or stale == 0 or stale < calibration.stale_share * tokens:
    return None
  score_BT, mask_BT = hosts.whole((calibration.score_step(params, batch), batch.mask))
  tau = quantile_threshold(score_BT, mask_BT, calibration.fraction)
  if tau < _ROUNDING:
    return None
  view.phase("tau is found", detail=f"{tau:.3g} masks {calibration.fraction:.2%} of the batch of version {version}")
  return tau


def _check_finite(metrics: Mapping[str, Metric], version: int) -> None:
  """Raises UserError before weights that are not finite are published or saved."""
  for name in ("loss/objective", "optimizer/gradient_norm"):
    value = float(mean_of(metrics, name).value())
    if not np.isfinite(value):
      raise UserError(
        f"{name} is {value} in the update to version {version}: training has diverged; start anew in another folder "
        "with a lower optimizer.learning_rate or a tighter trust region"
      )


def before_and_after(rows: list[Row]) -> dict[str, dict[str, float]]:
  """{"sampled": {"before", "after"}, "greedy": ...} from the first and the last evaluation of a run."""
  return {
    kind: {"before": values[0], "after": values[-1]}
    for kind in ("sampled", "greedy")
    if (values := [row[f"eval/{kind}_accuracy"] for row in rows if f"eval/{kind}_accuracy" in row])
  }
