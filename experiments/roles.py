"""What a process of a run does: the learner's side, or the sampler's."""

import contextlib
import dataclasses
import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from estr_jax import hosts
from estr_jax.errors import UserError
from estr_jax.lab.staleness import OnPolicy, Simulated
from estr_jax.learner import step
from estr_jax.learner.checkpoint import Checkpoints
from estr_jax.model import sharding
from estr_jax.model.decoder import DecoderConfig
from estr_jax.model.tokenizers import Tokenizer
from estr_jax.observe.report import write_report
from estr_jax.observe.terminal import View
from estr_jax.observe.writers import MetricsFile, Row, read, write_json
from estr_jax.runtime import launch
from estr_jax.runtime.learner_loop import before_and_after, learner_loop
from estr_jax.runtime.rollouts import LocalRollouts, RemoteRollouts, Rollouts
from estr_jax.runtime.sampler_loop import abstract_weights, sampler_loop
from estr_jax.tasks.prompts import PromptStream
from estr_jax.transport.broker import Broker
from estr_jax.transport.client import Client
from estr_jax.transport.fetch import WeightSource
from estr_jax.transport.placement import wanted_by
from estr_jax.transport.security import is_loopback
from estr_jax.transport.service import Server, serve, serve_weights
from estr_jax.transport.weights import WeightStore
from experiments import assembly, settings
from experiments.workdir import check_same, record_config

_FAREWELL_S = 10.0  # for the samplers to hear that the run is over


def sampler(config: ConfigDict, workdir: Path, name: str) -> int:
  """Samples for the learner of the same config until it says that the run is over; returns the exit status.

  In a group of processes all of them sample, and the first speaks with the learner.
  """
  launch.die_with_parent()
  assembly.use_compilation_cache(config)
  tokenizer = assembly.tokenizer_of(config)
  model = assembly.model_of(config, tokenizer)
  mesh = sharding.make_mesh(config.sampling.mesh.to_dict(), said="sampling.mesh")
  engine = assembly.engine_of(config, model, tokenizer, mesh)
  abstract = abstract_weights(model, config.transport.weights_dtype, mesh)
  patience_s = config.queue.deadline_s
  safety = {"tls": assembly.tls_of(config), "token": assembly.token_of(config)}
  client = None
  if hosts.leads():
    address = launch.find_learner(workdir, config.transport.address)
    description = assembly.description(config, model, tokenizer)
    client = Client(address, name, description=description, patience_s=patience_s, **safety)
    print(f"{name} (process {os.getpid()}) samples for the learner at {address}", flush=True)
  source = functools.partial(WeightSource, wanted=wanted_by(abstract), patience_s=patience_s, **safety)
  sampler_loop(engine, client, source, abstract, group_size=config.batch.group_size, deadline_s=patience_s)
  if hosts.leads():
    print(f"{name} is done after {engine.sampled_tokens} policy tokens", flush=True)
  return 0


def learner(config: ConfigDict, workdir: Path, name: str) -> int:
  """Trains to the end, and writes the summary and the report; returns the exit status.

  In a group of processes all of them train, and the first does the rest.
  """
  launch.die_with_parent()
  # Unwinds like Ctrl-C: the terminal is given back, and a checkpoint that is being written is finished.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  edge = settings.edge_of(config)
  loss = f"{config.loss.name} on the {edge} edge" if edge else config.loss.name
  title = f"{config.task.name} · {loss} · {config.mode}"
  if not hosts.leads():
    with open(os.devnull, "w") as nowhere, View(title, config.steps, file=nowhere) as view:
      train(config, workdir, view)
    return 0
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
  stream = hosts.leader_first(lambda: assembly.stream_of(config, tokenizer))
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
    metrics_path = workdir / "metrics.jsonl"
    if hosts.leads():
      record_config(config, workdir)
      if latest is None:
        metrics_path.unlink(missing_ok=True)  # nothing of a start that left no checkpoint counts
    abstract = update.abstract.params
    version_0 = functools.partial(assembly.initial_params, config, model, tokenizer, stream, abstract, view)
    reference = version_0() if "reference" in update.learner.anchors else None
    if latest is None:
      cursor = None
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
    with recorder(metrics_path, latest, view) as record, source as (rollouts, participants):
      learner_loop(
        state,
        rollouts,
        update.learner,
        assembly.schedule_of(config),
        reference=reference,
        evaluate=evaluate,
        checkpoints=checkpoints,
        host_record={"seed": config.seed},
        record=record,
        view=view,
      )
      participants = participants()
  return {
    **(summarise(config, metrics_path) if hosts.leads() else {}),
    **participants,
    "compilations": step.compilations(update.learner.train_step),
    "wall_s": time.monotonic() - began,
  }


@contextlib.contextmanager
def recorder(path: Path, resume_step: int | None, view: View) -> Iterator[Callable[[Row], None]]:
  """Where rows go: into metrics.jsonl and to the view, on the process that leads."""
  if not hosts.leads():
    yield lambda row: None
    return
  with MetricsFile(path, resume_step=resume_step) as file:

    def record(row: Row) -> None:
      file.append(row)
      view.step(row)

    yield record


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
  store, broker = WeightStore(leads=hosts.leads()), None
  if hosts.leads():
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

  def show(broker: Broker) -> None:
    view.samplers({name: member["state"] for name, member in broker.stats()["samplers"].items()})

  def participants() -> dict:
    def farewell() -> dict:
      broker.farewell(_FAREWELL_S)
      return broker.stats()

    stats = hosts.lead(farewell)
    pids = {name: member["pid"] for name, member in stats["samplers"].items()}
    return {"process_ids": {"learner": os.getpid(), **pids}, "acknowledged_versions": stats["acknowledged"]}

  server = served(config, broker, store, assembly.description(config, model, tokenizer))
  try:
    if hosts.leads():
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


def served(config: ConfigDict, broker: Broker | None, store: WeightStore, description: Mapping[str, str]) -> Server:
  """The services of this process of the learner: the first has the broker, the others serve weights only."""
  address = config.transport.address
  safety = {"tls": assembly.tls_of(config), "token": assembly.token_of(config)}
  incarnation = hosts.broadcast(broker.incarnation if broker is not None else None)
  made: list[Server] = []
  # The others first: who joins the learner is told of all of them.
  if broker is None:
    here = f"{address.rpartition(':')[0]}:0" if is_loopback(address) else address  # on one machine a port is one's own
    made.append(serve_weights(here, store, incarnation=incarnation, **safety))
  _, *others = hosts.gather(made and reachable(made[0].address))
  hosts.lead(lambda: made.append(serve(address, broker, store, description=description, other_hosts=others, **safety)))
  return made[0]


def reachable(address: str) -> str:
  """Where others find what listens on `address`: this host's own name in place of "all interfaces"."""
  host, _, port = address.rpartition(":")
  return f"{socket.getfqdn()}:{port}" if host in ("0.0.0.0", "[::]") else address


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
