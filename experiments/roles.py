"""What a process of a run does: the learner's side, or the sampler's."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from estr_jax.errors import UserError
from estr_jax.lab.staleness import OnPolicy, Simulated
from estr_jax.learner import step
from estr_jax.learner.checkpoint import Checkpoints
from estr_jax.model.decoder import DecoderConfig
from estr_jax.model.tokenizers import Tokenizer
from estr_jax.observe.report import write_report
from estr_jax.observe.terminal import View
from estr_jax.observe.writers import MetricsFile, read, write_json, write_text
from estr_jax.runtime import launch
from estr_jax.runtime.learner_loop import before_and_after, learner_loop
from estr_jax.runtime.rollouts import LocalRollouts, RemoteRollouts, Rollouts
from estr_jax.runtime.sampler_loop import device_placer, sampler_loop
from estr_jax.tasks.prompts import PromptStream
from estr_jax.transport.broker import Broker
from estr_jax.transport.client import Client
from estr_jax.transport.service import serve
from estr_jax.transport.weights import WeightStore
from experiments import assembly, settings

# May differ between a run and its resumption; everything else would make it another run. "a." is all of a group.
# So may "steps", where the learning rate does not depend on them.
MAY_CHANGE = (
  "cache_dir",
  "checkpoint.",
  "eval.every",
  "eval.slots",
  "queue.",
  "transport.address",
  "transport.tls_certificate",
  "transport.tls_key",
  "transport.token_file",
)

_FAREWELL_S = 10.0  # for the samplers to hear that the run is over


def sampler(config: ConfigDict, workdir: Path, name: str) -> int:
  """Samples for the learner of the same config until it says that the run is over; returns the exit status."""
  launch.die_with_parent()
  assembly.use_compilation_cache(config)
  tokenizer = assembly.tokenizer_of(config)
  model = assembly.model_of(config, tokenizer)
  engine = assembly.engine_of(config, model, tokenizer)
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
  place = device_placer(config.transport.weights_dtype)
  sampler_loop(engine, client, place, group_size=config.batch.group_size, deadline_s=config.queue.deadline_s)
  print(f"{name} is done after {engine.sampled_tokens} policy tokens", flush=True)
  return 0


def learner(config: ConfigDict, workdir: Path, name: str) -> int:
  """Trains to the end, and writes the summary and the report; returns the exit status."""
  launch.die_with_parent()
  # Unwinds like an error: the terminal is given back, and a checkpoint that is being written is finished.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  title = f"{config.task.name} · {config.loss.name} on the {config.loss.edge} edge · {config.mode}"
  with launch.only_learner(workdir), View(title, config.steps) as view:
    view.phase("starting")
    summary = train(config, workdir, view) | {"config_name": name}
    write_json(workdir / "summary.json", summary)
    view.phase("writing the report")
    report = write_report(workdir)
  changes = [f"{kind} {a['before']:.3f} -> {a['after']:.3f}" for kind, a in summary["accuracy"].items()]
  print(f"held-out accuracy on {summary['prompts']} prompts: {', '.join(changes)}")
  print(f"report: {report}")
  return 0


def record_config(config: ConfigDict, workdir: Path, *, resumes: bool) -> None:
  """Writes config.json; where the run `resumes`, only after it has shown to be the config that the run began with."""
  path, now = workdir / "config.json", config.to_dict()
  if resumes:
    before, after = (dict(settings.flat(tree)) for tree in (json.loads(path.read_text()), now))
    for name in sorted(before.keys() | after.keys()):
      free = name.startswith(MAY_CHANGE) or (name == "steps" and config.optimizer.decay == "constant")
      if not free and (name not in before or name not in after or before[name] != after[name]):
        there, here = (tree.get(name, "absent") for tree in (before, after))
        raise UserError(
          f"{workdir} holds a run with another config: {name} was {there} and is {here}; "
          "take the old value to go on, or another --workdir to start anew"
        )
  write_text(path, json.dumps(now, indent=2) + "\n")  # tau may be infinite, for which only Python's JSON has a word


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
  update = assembly.update_of(config, model)
  evaluate = assembly.evaluator_of(config, model, tokenizer, stream)
  with contextlib.closing(Checkpoints(workdir / "checkpoints")) as checkpoints:
    latest = checkpoints.latest()
    if latest and config.mode == "simulated" and (config.staleness.intra or config.staleness.inter):
      raise UserError(
        f"{workdir} holds step {latest} of a simulated run, whose past weights are not kept: going on would not have "
        "the staleness that was asked for; take another --workdir to start anew"
      )
    record_config(config, workdir, resumes=latest is not None)
    metrics_path = workdir / "metrics.jsonl"
    if latest is None:
      cursor = None
      metrics_path.unlink(missing_ok=True)  # nothing of a start that left no checkpoint counts
      state = update.init(assembly.initial_params(config, model, tokenizer, stream, view))
    else:
      state, record = checkpoints.restore(update.abstract, latest)
      if record["seed"] != config.seed:
        raise UserError(f"the checkpoint of step {latest} was drawn with seed {record['seed']}, not {config.seed}")
      cursor = record["cursor"]
      view.resume(latest)
    source = rollouts_of(config, workdir, model, tokenizer, stream, cursor, latest or 0, view)
    with MetricsFile(metrics_path, resume_step=latest) as metrics_file, source as (rollouts, participants):
      learner_loop(
        state,
        rollouts,
        update.learner,
        assembly.schedule_of(config),
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
    engine = assembly.engine_of(config, model, tokenizer)
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

  steps_s = sum(row["time/step_s"] for row in trained)
  ages = np.sum([row["staleness/token_histogram"] for row in trained], axis=0)
  return {
    "mode": config.mode,
    "loss": config.loss.name,
    "edge": config.loss.edge,
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
