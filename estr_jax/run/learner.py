"""The learner's role: from the last checkpoint to the end. In modes sync and simulated it is the only role."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from estr_jax import hosts
from estr_jax.errors import UserError
from estr_jax.learner import step
from estr_jax.learner.checkpoint import Checkpoints
from estr_jax.observe.report import write_report
from estr_jax.observe.terminal import View
from estr_jax.observe.writers import METRICS, SUMMARY, MetricsFile, Row, write_json
from estr_jax.run import parts
from estr_jax.run.options import Settings
from estr_jax.run.sources import rollouts_of
from estr_jax.run.start import initial_params
from estr_jax.run.summary import summarise
from estr_jax.run.update import Update, update_of
from estr_jax.run.workdir import CHECKPOINTS, check_same, record_config
from estr_jax.runtime import launch
from estr_jax.runtime.learner_loop import learner_loop
from estr_jax.structs import Params, TrainState


def run_learner(settings: Settings, workdir: Path, name: str, *, quiet: bool = False) -> dict[str, Any]:
  """Trains to the end, and writes the summary and the report.

  In a group of processes all of them train, and the first does the rest.

  Args:
    name: of the config, for the summary.
    quiet: show nothing of the run while it goes on.

  Returns:
    The summary; on another process than the first what it knows of itself.

  Raises:
    UserError: what the folder, the config or the run has wrong, as one line.
  """
  title = f"{settings.task.name} · {_loss(settings)} · {settings.config.mode}"
  if quiet or not hosts.leads():
    with open(os.devnull, "w", encoding="utf-8") as nowhere, View(title, settings.config.steps, file=nowhere) as view:
      return _recorded(settings, workdir, name, view) if hosts.leads() else train(settings, workdir, view)
  with View(title, settings.config.steps) as view:
    return _recorded(settings, workdir, name, view)


def _recorded(settings: Settings, workdir: Path, name: str, view: View) -> dict[str, Any]:
  with launch.only_learner(workdir):
    view.phase("starting")
    summary = train(settings, workdir, view) | {"config_name": name}
    write_json(workdir / SUMMARY, summary)
    view.phase("writing the report")
    write_report(workdir)
  return summary


def _loss(settings: Settings) -> str:
  name, edge = settings.config.loss.name, settings.edge
  return f"{name} on the {edge} edge" if edge else name


def train(settings: Settings, workdir: Path, view: View) -> dict[str, Any]:
  """`run_learner` without summary and report on disk.

  Returns:
    The summary. What is counted by rows covers resumptions; process ids, acknowledged versions, compilations and
    wall_s are of this start.
  """
  began = time.monotonic()
  parts.use_compilation_cache(settings)
  tokenizer = parts.tokenizer_of(settings)
  model = parts.model_of(settings, tokenizer)
  view.phase("preparing prompts", detail=settings.task.name)
  stream = hosts.leader_first(lambda: parts.stream_of(settings, tokenizer))
  mesh = parts.mesh_of(settings)
  update = update_of(settings, model, mesh)
  evaluate = parts.evaluator_of(settings, model, tokenizer, stream, mesh)
  metrics_path = workdir / METRICS
  with contextlib.closing(Checkpoints(workdir / CHECKPOINTS)) as checkpoints:
    latest = _take_over(settings, workdir, checkpoints)

    def version_0() -> Params:
      return initial_params(settings, model, tokenizer, stream, update.abstract.params, view)

    begun = _begin(settings, update, checkpoints, latest, version_0)
    if latest is not None:
      view.resume(latest)
    source = rollouts_of(settings, workdir, model, tokenizer, mesh, stream, begun.cursor, latest or 0, view)
    with _recorder(metrics_path, latest, view) as record, source as (rollouts, participants):
      learner_loop(
        begun.state,
        rollouts,
        begun.update.learner,
        parts.schedule_of(settings),
        reference=begun.reference,
        evaluate=evaluate,
        checkpoints=checkpoints,
        host_record={"seed": settings.config.seed},
        record=record,
        view=view,
      )
      took_part = participants()
  return {
    **(summarise(settings, metrics_path) if hosts.leads() else {}),
    **took_part,
    "compilations": step.compilations(update.learner.train_step),
    "wall_s": time.monotonic() - began,
  }


def _take_over(settings: Settings, workdir: Path, checkpoints: Checkpoints) -> int | None:
  """The step from which the run in the folder goes on, None where it begins. Raises UserError where it may not."""
  c, latest = settings.config, checkpoints.latest()
  stale = c.mode == "simulated" and (c.staleness.intra or c.staleness.inter)
  if stale and latest not in (None, 0, c.steps):
    raise UserError(
      f"{workdir} holds step {latest} of a simulated run, whose past weights are not kept: going on would not have "
      "the staleness that was asked for; take another folder to start anew"
    )
  if latest is not None:
    check_same(c, workdir)
  if hosts.leads():
    record_config(c, workdir)
    if latest is None:
      (workdir / METRICS).unlink(missing_ok=True)  # nothing of a start that left no checkpoint counts
  return latest


@dataclasses.dataclass(frozen=True)
class _Begun:
  """Where the loop begins."""

  update: Update
  state: TrainState
  reference: Params | None  # the weights of version 0, where the objective asks for them
  cursor: dict | None  # of the prompt stream


def _begin(
  settings: Settings, update: Update, checkpoints: Checkpoints, latest: int | None, version_0: Callable[[], Params]
) -> _Begun:
  """The state of version 0, or of the checkpoint. Raises UserError where that was drawn with another seed."""
  reference = version_0() if "reference" in update.learner.anchors else None
  if latest is None:
    return _Begun(update, update.init(version_0() if reference is None else reference), reference, None)
  state, record = checkpoints.restore(update.abstract, latest)
  if record["seed"] != settings.config.seed:
    raise UserError(f"the checkpoint of step {latest} was drawn with seed {record['seed']}, not {settings.config.seed}")
  if update.learner.calibration is not None and record["tau"] is not None:  # found once, and never again
    update = dataclasses.replace(update, learner=update.learner.with_tau(record["tau"]))
  return _Begun(update, state, reference, record["cursor"])


@contextlib.contextmanager
def _recorder(path: Path, resume_step: int | None, view: View) -> Iterator[Callable[[Row], None]]:
  """Where rows go: into metrics.jsonl and to the view, on the process that leads."""
  if not hosts.leads():
    yield lambda row: None
    return
  with MetricsFile(path, resume_step=resume_step) as file:

    def record(row: Row) -> None:
      file.append(row)
      view.step(row)

    yield record
