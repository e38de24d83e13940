"""What a process of a run does: the learner's side, or the sampler's."""

import contextlib
import dataclasses
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from estr_jax.errors import UserError
from estr_jax.lab.staleness import OnPolicy, Simulated
from estr_jax.learner import step
from estr_jax.learner.checkpoint import Checkpoints
from estr_jax.model import sharding
from estr_jax.model.decoder import DecoderConfig
from estr_jax.model.tokenizers import Tokenizer
from estr_jax.observe.report import write_report
from estr_jax.observe.terminal import View
from estr_jax.observe.writers import MetricsFile, read, write_json
from estr_jax.runtime import launch
from estr_jax.runtime.learner_loop import before_and_after, learner_loop
from estr_jax.runtime.rollouts import LocalRollouts, RemoteRollouts, Rollouts
from estr_jax.runtime.sampler_loop import abstract_weights, sampler_loop
from estr_jax.tasks.prompts import PromptStream
from estr_jax.transport.broker import Broker
from estr_jax.transport.client import Client
from estr_jax.transport.service import serve
from estr_jax.transport.weights import WeightStore
from experiments import assembly, settings
from experiments.workdir import check_same, record_config

_FAREWELL_S = 10.0  # for the samplers to hear that the run is over


def sampler(config: ConfigDict, workdir: Path, name: str) -> int:
  """Samples for the learner of the same config until it says that the run is over; returns the exit status."""
  launch.die_with_parent()
  assembly.use_compilation_cache(config)
  tokenizer = assembly.tokenizer_of(config)
  model = assembly.model_of(config, tokenizer)
  mesh = sharding.make_mesh(config.sampling.mesh.to_dict())
  engine = assembly.engine_of(config, model, tokenizer, mesh)
  address = launch.find_learner(workdir, config.transport.address)
  client = Client(
    address,
    name,
    description=assembly.description(config, model, tokenizer),
    patience_s=config.queue.deadline_s,
    tls=assembly.tls_of(config),
    token=assembly.token_of(config),
  )
  print(f"{name} (process {os.getpid()}) samples for the learner at {address}", flush=True)
  abstract = abstract_weights(model, config.transport.weights_dtype, mesh)
  sampler_loop(engine, client, abstract, group_size=config.batch.group_size, deadline_s=config.queue.deadline_s)
  print(f"{name} is done after {engine.sampled_tokens} policy tokens", flush=True)
  return 0


def learner(config: ConfigDict, workdir: Path, name: str) -> int:
  """Trains to the end, and writes the summary and the report; returns the exit status."""
  launch.die_with_parent()
  # Unwinds like Ctrl-C: the terminal is given back, and a checkpoint that is being written is finished.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  edge = settings.edge_of(config)
  loss = f"{config.loss.name} on the {edge} edge" if edge else config.loss.name
  title = f"{config.task.name} · {loss} · {config.mode}"
  with launch.only_learner(workdir), View(title, config.steps) as view:
    view.phase("starting")
    summary = train(config, workdir, view) | {"config_name": name}
    write_json(workdir / "summary.json", summary)
    view.phase("writing the report")
    report = write_report(workdir)
  changes = [f"{kind} {a['before']:.3f} -> {a['after']:.3f}" for kind, a in summary["accuracy"].items()]
  print(f"held-out accuracy on {summary['prompts']} prompts: {', '.join(changes)}")
  if settings.calibrated_fraction(config) is not None and summary["tau"] is None:
    print(f"loss.{config.loss.name}.tau was never found, so nothing was masked: no batch was stale enough")
  print(f"report: {report}")
  return 0


def train(config: ConfigDict, workdir: Path, view: View) -> dict:
  """The learner's side, and in modes sync and simulated the only one, from the last checkpoint to the end.

  Returns:
    The summary. What is counted by rows covers resumptions; process ids, acknowledged versions, compilations and
    wall_s are of this start.
  """
  began = time.monotonic()
  assembly.use_compilation_cache(config)
  tokenizer = assembly.tokenizer_of(config)
  model = assembly.model_of(config, tokenizer)
  view.phase("preparing prompts", detail=config.task.name)
  stream = assembly.stream_of(config, tokenizer)
  mesh = assembly.mesh_of(config)
  update = assembly.update_of(config, model, mesh)
  evaluate = assembly.evaluator_of(config, model, tokenizer, stream, mesh)
  with contextlib.closing(Checkpoints(workdir / "checkpoints")) as checkpoints:
    latest = checkpoints.latest()
    if (
      latest not in (None, 0, config.steps)
      and config.mode == "simulated"
      and (config.staleness.intra or config.staleness.inter)
    ):
      raise UserError(
        f"{workdir} holds step {latest} of a simulated run, whose past weights are not kept: going on would not have "
        "the staleness that was asked for; take another --workdir to start anew"
      )
    if latest is not None:
      check_same(config, workdir)
    record_config(config, workdir)
    version_0 = functools.partial(assembly.initial_params, config, model, tokenizer, stream, view)
    reference = update.place(version_0()) if "reference" in update.learner.anchors else None
    metrics_path = workdir / "metrics.jsonl"
    if latest is None:
      cursor = None
      metrics_path.unlink(missing_ok=True)  # nothing of a start that left no checkpoint counts
      state = update.init(version_0() if reference is None else reference)
    else:
      state, record = checkpoints.restore(update.abstract, latest)
      if record["seed"] != config.seed:
        raise UserError(f"the checkpoint of step {latest} was drawn with seed {record['seed']}, not {config.seed}")
      cursor = record["cursor"]
      if update.learner.calibration is not None and record["tau"] is not None:  # found once, and never again
        update = dataclasses.replace(update, learner=update.learner.with_tau(record["tau"]))
      view.resume(latest)
    source = rollouts_of(config, workdir, model, tokenizer, mesh, stream, cursor, latest or 0, view)
    with MetricsFile(metrics_path, resume_step=latest) as metrics_file, source as (rollouts, participants):
      learner_loop(
        state,
        rollouts,
        update.learner,
        assembly.schedule_of(config),
        reference=reference,
        evaluate=evaluate,
        checkpoints=checkpoints,
        host_record={"seed": config.seed},
        metrics_file=metrics_file,
        view=view,
      )
      participants = participants()
  return {
    **summarise(config, metrics_path),
    **participants,
    "compilations": step.compilations(update.learner.train_step),
    "wall_s": time.monotonic() - began,
  }


@contextlib.contextmanager
def rollouts_of(
  config: ConfigDict,
  workdir: Path,
  model: DecoderConfig,
  tokenizer: Tokenizer,
  mesh: Mesh,
  stream: PromptStream,
  cursor: dict | None,
  version: int,
  view: View,
) -> Iterator[tuple[Rollouts, Callable[[], dict]]]:
  """The source of batches of the config's mode, and a function that names who took part, to be called at the end."""
  s = config.staleness
  if config.mode != "async":
    schedule = (
      OnPolicy() if config.mode == "sync" else Simulated(inter=s.inter, intra=s.intra, segment_tokens=s.segment_tokens)
    )
    engine = assembly.engine_of(config, model, tokenizer, mesh)
    rollouts = LocalRollouts(engine, stream.at, schedule, groups_per_batch=config.batch.groups, cursor=cursor)
    yield rollouts, lambda: {"process_ids": {"learner": os.getpid()}, "acknowledged_versions": {}}
    return
  broker = Broker(
    stream.at,
    groups_per_batch=config.batch.groups,
    max_staleness=s.max,
    admission=s.admission,
    capacity=config.queue.capacity,
    last_version=config.steps,
    lease_timeout_s=config.queue.lease_timeout_s,
  )
  if cursor is not None:
    broker.restore(cursor, version)
  store = WeightStore()
  server = serve(
    config.transport.address,
    broker,
    store,
    description=assembly.description(config, model, tokenizer),
    tls=assembly.tls_of(config),
    token=assembly.token_of(config),
  )

  def show(broker: Broker) -> None:
    view.samplers({name: member["state"] for name, member in broker.stats()["samplers"].items()})

  def participants() -> dict:
    broker.farewell(_FAREWELL_S)
    stats = broker.stats()
    pids = {name: member["pid"] for name, member in stats["samplers"].items()}
    return {"process_ids": {"learner": os.getpid(), **pids}, "acknowledged_versions": stats["acknowledged"]}

  try:
    launch.announce_learner(workdir, server.address)
    yield (
      RemoteRollouts(
        broker,
        store,
        weights_dtype=config.transport.weights_dtype,
        deadline_s=config.queue.deadline_s,
        on_wait=show,
      ),
      participants,
    )
  finally:
    server.stop()


def summarise(config: ConfigDict, metrics_path: Path) -> dict:
  """What came out, from the rows of the whole run."""
  rows = read(metrics_path)
  trained = [row for row in rows if "rollout/reward" in row]

  def mean(name: str) -> float | None:
    values = [row[name] for row in trained if row.get(name) is not None]
    return float(np.mean(values)) if values else None

  with_tau = [row for row in trained if "loss/tau" in row]
  calibrated = bool(with_tau) and settings.calibrated_fraction(config) is not None
  steps_s = sum(row["time/step_s"] for row in trained)
  ages = np.sum([row["staleness/token_histogram"] for row in trained], axis=0)
  return {
    "mode": config.mode,
    "loss": config.loss.name,
    "edge": settings.edge_of(config),
    "tau": with_tau[-1]["loss/tau"] if with_tau else None,
    "tau_calibrated_at": with_tau[0]["step"] - 1 if calibrated else None,  # the version that the update started from
    "task": config.task.name,
    "steps": rows[-1]["step"],
    "prompts": config.eval.prompts,
    "accuracy": before_and_after(rows),
    "staleness": {
      **{name: mean(f"staleness/{name}") for name in ("intra", "inter", "token")},
      "max_token": int(np.flatnonzero(ages).max()),
    },
    "tokens_per_s": {
      "trained": sum(row["policy/tokens"] for row in trained) / steps_s,
      "sampled": mean("throughput/sampled_tokens_per_s"),
    },
    "steps_s": steps_s,
  }
