"""Trains a policy.

    python -m experiments.train --config=configs/quickstart.py --workdir=DIR [--config.KEY=VALUE ...]

In mode async the default --role=all starts a learner and a sampler process on this machine and looks after them;
--role=learner and --role=sampler start one of them alone. The other modes are one process. Running the same command
again goes on from the last checkpoint. DIR gets metrics.jsonl, summary.json, config.json, report.html, checkpoints and
the sampler's log.
"""

import os
import sys
import time
from pathlib import Path

from absl import flags

from estr_jax.errors import UserError
from experiments import settings

FLAGS = flags.FLAGS

ROLES = ("all", "learner", "sampler")

# May differ between a run and its resumption; everything else would make it another run.
_MAY_CHANGE = ("steps", "cache_dir", "checkpoint", "eval", "queue", "transport")


def define_flags() -> None:
  settings.define_config()
  flags.DEFINE_string("workdir", None, "Where the run keeps its files.")
  flags.DEFINE_enum("role", "all", ROLES, "What this process is, in mode async.")
  flags.DEFINE_string("sampler_name", "sampler", "This sampler's name; each sampler of a run needs its own.")


def program() -> int:
  settings.parse(sys.argv, define_flags)
  if FLAGS.config is None or FLAGS.workdir is None:
    raise UserError("name a config and a folder: --config=configs/quickstart.py --workdir=DIR")
  config = FLAGS.config
  settings.check(config)
  workdir = make_workdir(FLAGS.workdir)
  if config.mode != "async" and FLAGS.role != "all":
    raise UserError(f"--role={FLAGS.role} has no meaning in mode={config.mode}, which is one process; leave it out")
  if config.mode == "async" and FLAGS.role == "all":
    return launch_all(workdir)
  if FLAGS.role == "sampler":
    return run_sampler(config, workdir, FLAGS.sampler_name)
  return run_learner(config, workdir)


def make_workdir(path: str) -> Path:
  workdir = Path(path).expanduser().absolute()
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    probe = workdir / ".writable"
    probe.touch()
    probe.unlink()
  except OSError as error:
    raise UserError(f"--workdir={path} cannot be written: {error.strerror}; choose another folder") from error
  return workdir


def launch_all(workdir: Path) -> int:
  from estr_jax.runtime.launch import launch

  program = [sys.executable, "-m", "experiments.train"]
  shared = [argument for argument in sys.argv[1:] if not argument.lstrip("-").startswith("role")]
  commands = {
    "learner": [*program, *shared, "--role=learner"],
    "sampler": [*program, *shared, "--role=sampler"],
  }
  return launch(commands, workdir, environment={})


def run_sampler(config, workdir: Path, name: str) -> int:
  from estr_jax.runtime import launch
  from estr_jax.runtime.sampler_loop import device_placer, sampler_loop
  from estr_jax.transport.client import Client
  from experiments import assembly

  launch.die_with_parent()
  assembly.use_compilation_cache(config)
  tokenizer = assembly.tokenizer_of(config)
  model = assembly.model_of(config, tokenizer)
  engine = assembly.engine_of(config, model, tokenizer)
  address = launch.find_learner(workdir, config.transport.address, config.queue.deadline_s)
  client = Client(
    address,
    name,
    description=assembly.description(config, model, tokenizer),
    patience_s=config.queue.deadline_s,
    tls=assembly.tls_of(config),
    token=assembly.token_of(config),
  )
  print(f"{name} (process {os.getpid()}) samples for the learner at {address}", flush=True)
  try:
    place = device_placer(config.transport.weights_dtype)
    sampler_loop(engine, client, place, group_size=config.batch.group_size, deadline_s=config.queue.deadline_s)
  finally:
    client.close()
  print(f"{name} is done after {engine.sampled_tokens} policy tokens", flush=True)
  return 0


def run_learner(config, workdir: Path) -> int:
  from estr_jax.observe.report import write_report
  from estr_jax.observe.terminal import View
  from estr_jax.observe.writers import write_json
  from estr_jax.runtime import launch

  launch.die_with_parent()
  began = time.monotonic()
  record_config(config, workdir)
  title = f"{config.task.name} · {config.loss.name} on the {config.loss.edge} edge · {config.mode}"
  with View(title, config.steps) as view:
    view.phase("starting")
    summary = train(config, workdir, view)
    summary["wall_s"] = time.monotonic() - began
    write_json(workdir / "summary.json", summary)
    view.phase("writing the report")
    report = write_report(workdir)
  accuracy = summary["accuracy"]
  print(
    f"held-out accuracy on {summary['prompts']} prompts: "
    + ", ".join(f"{kind} {a['before']:.3f} -> {a['after']:.3f}" for kind, a in accuracy.items())
  )
  print(f"report: {report}")
  return 0


def record_config(config, workdir: Path) -> None:
  """Writes config.json, or checks that a resumed run has the config that the run began with."""
  import json

  from estr_jax.observe.writers import plain, write_json

  path, now = workdir / "config.json", plain(config.to_dict())
  if path.exists():
    before = json.loads(path.read_text())
    for name in sorted(now):
      if name not in _MAY_CHANGE and before.get(name) != now[name]:
        raise UserError(
          f"{workdir} holds a run with another config: {name} was {before.get(name)} and is {now[name]}; "
          "take the old value to go on, or another --workdir to start anew"
        )
  write_json(path, now)


def train(config, workdir: Path, view) -> dict:
  """Runs the learner's side, and in modes sync and simulated the only side, to the end; returns the summary."""
  from estr_jax.learner import step
  from estr_jax.learner.checkpoint import Checkpoints
  from estr_jax.observe.writers import MetricsFile
  from estr_jax.runtime.learner_loop import learner_loop
  from experiments import assembly

  assembly.use_compilation_cache(config)
  tokenizer = assembly.tokenizer_of(config)
  model = assembly.model_of(config, tokenizer)
  view.phase("preparing prompts", detail=config.task.name)
  stream = assembly.stream_of(config, tokenizer)
  update = assembly.update_of(config, model)
  record = {"seed": config.seed}

  checkpoints = Checkpoints(workdir / "checkpoints")
  latest = checkpoints.latest()
  if latest is None:
    cursor = None
    state = update.init(assembly.initial_params(config, model, tokenizer, stream, view))
  else:
    state, host = checkpoints.restore(update.abstract, latest)
    cursor = host["cursor"]
    view.message(f"resumed from the checkpoint of step {latest}")
  # Without a checkpoint nothing of an earlier start counts.
  metrics_path = workdir / "metrics.jsonl"
  if latest is None:
    metrics_path.unlink(missing_ok=True)

  source = Source(config, workdir, model, tokenizer, stream, cursor, latest, view)
  with MetricsFile(metrics_path, resume_step=latest) as metrics_file, source:
    learner_loop(
      state,
      source.rollouts,
      update.learner,
      assembly.schedule_of(config),
      evaluate=assembly.evaluator_of(config, model, tokenizer, stream),
      checkpoints=checkpoints,
      host_record=record,
      metrics_file=metrics_file,
      view=view,
    )
    summary = source.summary()
  checkpoints.close()
  return summarise(config, metrics_path) | summary | {"compilations": step.compilations(update.learner.train_step)}


class Source:
  """The rollouts of a mode, with the server that a remote source needs. A context manager."""

  def __init__(self, config, workdir: Path, model, tokenizer, stream, cursor: dict | None, version: int | None, view):
    from estr_jax.lab.staleness import OnPolicy, Simulated
    from estr_jax.runtime.rollouts import LocalRollouts, RemoteRollouts
    from estr_jax.transport.broker import Broker
    from estr_jax.transport.service import serve
    from estr_jax.transport.weights import WeightStore
    from experiments import assembly

    self._broker = self._server = None
    s = config.staleness
    if config.mode != "async":
      schedule = (
        OnPolicy()
        if config.mode == "sync"
        else Simulated(inter=s.inter, intra=s.intra, segment_tokens=s.segment_tokens)
      )
      engine = assembly.engine_of(config, model, tokenizer)
      self.rollouts = LocalRollouts(engine, stream.at, schedule, groups_per_batch=config.batch.groups, cursor=cursor)
      return
    self._broker = Broker(
      stream.at,
      groups_per_batch=config.batch.groups,
      max_staleness=s.max,
      admission=s.admission,
      capacity=config.queue.capacity,
      lease_timeout_s=config.queue.lease_timeout_s,
    )
    if cursor is not None:
      self._broker.restore(cursor, version)
    store = WeightStore()
    self._server = serve(
      config.transport.address,
      self._broker,
      store,
      description=assembly.description(config, model, tokenizer),
      tls=assembly.tls_of(config),
      token=assembly.token_of(config),
    )
    from estr_jax.runtime.launch import announce_learner

    announce_learner(workdir, self._server.address)
    self.rollouts = RemoteRollouts(
      self._broker,
      store,
      self._server,
      weights_dtype=config.transport.weights_dtype,
      deadline_s=config.queue.deadline_s,
      on_wait=lambda broker: view.samplers(
        {name: member["state"] for name, member in broker.stats()["samplers"].items()}
      ),
    )

  def __enter__(self) -> "Source":
    return self

  def __exit__(self, *_) -> None:
    if self._server is not None:
      self._server.stop()

  def summary(self) -> dict:
    """Who took part. Waits until the samplers know that the run is over."""
    if self._broker is None:
      return {"process_ids": {"learner": os.getpid()}, "acknowledged_versions": {}}
    self._broker.farewell(10.0)
    stats = self._broker.stats()
    pids = {name: member["pid"] for name, member in stats["samplers"].items()}
    return {"process_ids": {"learner": os.getpid(), **pids}, "acknowledged_versions": stats["acknowledged"]}


def summarise(config, metrics_path: Path) -> dict:
  """What came out, from the rows of the whole run."""
  import numpy as np

  from estr_jax.observe.writers import read
  from estr_jax.runtime.learner_loop import accuracies

  rows = read(metrics_path)
  trained = [row for row in rows if "rollout/reward" in row]

  def mean(name: str) -> float | None:
    values = [row[name] for row in trained if row.get(name) is not None]
    return float(np.mean(values)) if values else None

  ages = np.sum([row["staleness/token_histogram"] for row in trained], axis=0)
  return {
    "config_name": FLAGS["config"].config_filename if hasattr(FLAGS["config"], "config_filename") else "",
    "mode": config.mode,
    "loss": config.loss.name,
    "edge": config.loss.edge,
    "task": config.task.name,
    "steps": rows[-1]["step"],
    "prompts": config.eval.prompts,
    "accuracy": accuracies(rows),
    "staleness": {
      "intra": mean("staleness/intra"),
      "inter": mean("staleness/inter"),
      "token": mean("staleness/token"),
      "max_token": int(np.flatnonzero(ages).max()),
    },
    "tokens_per_s": {"trained": mean("throughput/tokens_per_s"), "sampled": mean("throughput/sampled_tokens_per_s")},
  }


if __name__ == "__main__":
  settings.main(program)
