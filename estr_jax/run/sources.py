"""Where the learner's batches come from in each mode, and the services that samplers reach meanwhile."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jax.sharding import Mesh

from estr_jax import hosts
from estr_jax.lab.staleness import OnPolicy, Simulated
from estr_jax.model.config import DecoderConfig
from estr_jax.model.tokenizers import Tokenizer
from estr_jax.observe.terminal import View
from estr_jax.rollout_queue.broker import Broker
from estr_jax.run import parts
from estr_jax.run.options import Settings
from estr_jax.runtime import launch
from estr_jax.runtime.rollouts import LocalRollouts, RemoteRollouts, Rollouts
from estr_jax.tasks.prompts import PromptStream
from estr_jax.weights.store import WeightStore
from estr_jax.wire.security import is_loopback
from estr_jax.wire.service import Server, serve, serve_weights

_FAREWELL_S = 10.0  # for the samplers to hear that the run is over

Participants = Callable[[], dict]  # who took part, to be asked at the end


@contextlib.contextmanager
def rollouts_of(
  settings: Settings,
  workdir: Path,
  model: DecoderConfig,
  tokenizer: Tokenizer,
  mesh: Mesh,
  stream: PromptStream,
  cursor: dict | None,
  version: int,
  view: View,
) -> Iterator[tuple[Rollouts, Participants]]:
  """The source of batches of the config's mode; `cursor` and `version` are those of the checkpoint."""
  if settings.config.mode != "async":
    engine = parts.engine_of(settings, model, tokenizer, mesh)
    groups = settings.config.batch.groups
    local = LocalRollouts(engine, stream.at, _schedule(settings), groups_per_batch=groups, cursor=cursor)
    yield local, lambda: {"process_ids": {"learner": os.getpid()}, "acknowledged_versions": {}}
    return
  store, broker = WeightStore(leads=hosts.leads()), None
  if hosts.leads():
    broker = _broker(settings, stream, cursor, version)
  server = _served(settings, broker, store, parts.description(settings, model, tokenizer))
  try:
    if hosts.leads():
      launch.announce_learner(workdir, server.address)
    yield _remote(settings, broker, store, view), lambda: _participants(broker)
  finally:
    server.stop()


def _schedule(settings: Settings) -> OnPolicy | Simulated:
  s = settings.config.staleness
  if settings.config.mode == "sync":
    return OnPolicy()
  return Simulated(inter=s.inter, intra=s.intra, segment_tokens=s.segment_tokens)


def _broker(settings: Settings, stream: PromptStream, cursor: dict | None, version: int) -> Broker:
  c = settings.config
  broker = Broker(
    stream.at,
    groups_per_batch=c.batch.groups,
    max_staleness=c.staleness.max,
    admission=c.staleness.admission,
    capacity=c.queue.capacity,
    last_version=c.steps,
    lease_timeout_s=c.queue.lease_timeout_s,
  )
  if cursor is not None:
    broker.restore(cursor, version)
  return broker


def _remote(settings: Settings, broker: Broker | None, store: WeightStore, view: View) -> RemoteRollouts:
  def show(broker: Broker) -> None:
    view.samplers({name: member["state"] for name, member in broker.stats()["samplers"].items()})

  return RemoteRollouts(
    broker,
    store,
    weights_dtype=settings.config.transport.weights_dtype,
    deadline_s=settings.config.queue.deadline_s,
    on_wait=show,
  )


def _participants(broker: Broker | None) -> dict:
  """On every process of the group; `broker` is that of the first."""

  def farewell() -> dict:
    leading = _of_leader(broker)
    leading.farewell(_FAREWELL_S)
    return leading.stats()

  stats = hosts.lead(farewell)
  pids = {name: member["pid"] for name, member in stats["samplers"].items()}
  return {"process_ids": {"learner": os.getpid(), **pids}, "acknowledged_versions": stats["acknowledged"]}


def _served(settings: Settings, broker: Broker | None, store: WeightStore, description: Mapping[str, str]) -> Server:
  """The services of this process of the learner: the first has the broker, the others serve weights only."""
  address = settings.config.transport.address
  tls, token = parts.tls_of(settings), parts.token_of(settings)
  incarnation = hosts.broadcast(broker.incarnation if broker is not None else None)
  made: list[Server] = []
  # The others first: who joins the learner is told of all of them.
  if broker is None:
    here = f"{address.rpartition(':')[0]}:0" if is_loopback(address) else address  # on one machine a port is one's own
    made.append(serve_weights(here, store, incarnation=incarnation, tls=tls, token=token))
  _, *others = hosts.gather(made and reachable(made[0].address))
  hosts.lead(
    lambda: made.append(
      serve(address, _of_leader(broker), store, description=description, other_hosts=others, tls=tls, token=token)
    )
  )
  return made[0]


def _of_leader(broker: Broker | None) -> Broker:
  if broker is None:
    raise RuntimeError("the learner's first process has no broker")
  return broker


def reachable(address: str) -> str:
  """Where others find what listens on `address`: this host's own name in place of "all interfaces"."""
  host, _, port = address.rpartition(":")
  return f"{socket.getfqdn()}:{port}" if host in ("0.0.0.0", "[::]") else address
