"""Learner and sampler sides over a real port."""

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable

import grpc
import ml_dtypes
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import held_port
from weights_cases import assert_blocks_are, pieces, wants

from estr_jax.errors import UserError
from estr_jax.rollout_queue.broker import Broker, StaleIncarnation
from estr_jax.structs import NO_VERSION, Prompt, Trajectory
from estr_jax.weights.fetch import WeightSource
from estr_jax.weights.store import WeightStore
from estr_jax.wire import client as client_module
from estr_jax.wire import service
from estr_jax.wire.client import Client
from estr_jax.wire.security import Tls
from estr_jax.wire.weight_host import weight_source

MODEL = {"layers": "2", "width": "64"}
PARAMS = {"a": {"b": np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16)}}


def prompts_at(group: int) -> list[Prompt]:
  return [Prompt(id=group, group=group, tokens=np.array([group, 5], np.int32), answer="a", task="t")]


def answer(prompt: Prompt, version: int) -> list[Trajectory]:
  mask = np.array([False, False, True])
  return [
    Trajectory(
      tokens=np.array([*prompt.tokens, 9], np.int32),
      mask=mask,
      logprob=np.where(mask, np.float32(-np.inf), np.float32(0)),
      entropy=np.where(mask, np.float32(0.25), np.float32(0)),
      gini=np.where(mask, np.float32(0.125), np.float32(0)),
      version=np.where(mask, version, NO_VERSION).astype(np.int32),
      reward=1.0,
      prompt_id=prompt.id,
      group=prompt.group,
      task="t",
      finish="stop",
      turns=1,
      seconds=0.1,
    )
  ]


def make_broker(**changes) -> Broker:
  settings = {
    "last_version": 10**6,
    "groups_per_batch": 2,
    "max_staleness": 1,
    "admission": "wait",
    "capacity": 8,
    "lease_timeout_s": 100.0,
  }
  return Broker(prompts_at, **{**settings, **changes})


class Pair:
  """A server and the clients of it, closed in the right order."""

  def __init__(self, broker: Broker | None = None, address: str = "127.0.0.1:0", **security):
    self.broker = broker or make_broker()
    self.store = WeightStore()
    self.security = security
    self.server = service.serve(address, self.broker, self.store, description=MODEL, **security)
    self.clients = []
    self.sources = []

  def client(self, name: str = "a", **changes) -> Client:
    if "tls" in self.security:
      changes = {**self.security, **changes}
    made = Client(self.server.address, name, **{"description": MODEL, "patience_s": 60.0, **changes})
    self.clients.append(made)
    return made

  def source(self, client: Client, patience_s: float = 60.0) -> WeightSource:
    made = weight_source(client.membership(), wants(PARAMS), patience_s=patience_s, **self.security)
    self.sources.append(made)
    return made

  def close(self) -> None:
    for one in (*self.sources, *self.clients):
      one.close()
    self.server.stop(0.1)


def eventually(holds: Callable[[], bool]) -> None:
  deadline = time.monotonic() + 60
  while not holds():
    assert time.monotonic() < deadline
    time.sleep(0.01)


@pytest.fixture
def one_long_call(monkeypatch):
  """A wait is one call of its whole length, not several short ones, after each of which a late answer would be seen."""
  monkeypatch.setattr("estr_jax.waiting.WAIT_S", 1000.0)


@pytest.fixture
def heard(monkeypatch):
  """The samplers whose calls have reached the learner since their join."""
  found, check = set(), service._check_incarnation

  def hear(sampler, theirs, ours):
    check(sampler, theirs, ours)
    found.add(sampler)

  monkeypatch.setattr(service, "_check_incarnation", hear)
  return found


@pytest.fixture
def pair():
  made = Pair()
  yield made
  made.close()


def test_the_whole_path_of_two_updates(pair):
  """Join, weights, lease, put, take, new weights, farewell. Fails if any record changes on its way."""
  client = pair.client()
  client.join()
  source = pair.source(client)
  assert source.fetch(NO_VERSION, 0) is None
  pair.store.publish(0, pieces(PARAMS))
  version, blocks = source.fetch(NO_VERSION, 5)
  assert version == 0
  assert_blocks_are(blocks, PARAMS)
  for version in (0, 1):
    lease = client.lease(2, 5)
    assert lease.version <= version and not lease.finished
    for group in lease.groups:
      sent = answer(group[0], version)
      assert client.put(sent) == "accepted"
      assert client.put(sent) == "duplicate"
    batch = pair.broker.take(version, 5)
    assert [group[0].group for group in batch] == [2 * version, 2 * version + 1]
    assert batch[0][0].logprob.tolist() == [0, 0, -np.inf]
    pair.store.publish(version + 1, pieces(PARAMS))
    # Published, not yet announced by a take: what the sampler holds is no longer the future.
    assert source.fetch(version, 5)[0] == version + 1
    assert pair.broker.stats()["version"] == version + 1
  pair.broker.finish()
  assert client.lease(1, 5).finished
  assert pair.broker.farewell(0) == []


def test_a_waiting_lease_is_woken_by_the_learner(pair, one_long_call, heard):
  """Fails if a blocked lease is answered only when its wait of 200 s is over."""
  client = pair.client()
  client.join()
  for group in client.lease(8, 1).groups:
    client.put(answer(group[0], 0))
  pair.broker.take(0, 1)
  heard.clear()

  def announce():
    eventually(lambda: bool(heard))
    time.sleep(0.1)  # from being heard to waiting it is no longer
    pair.broker.announce(1)

  learner = threading.Thread(target=announce)
  learner.start()
  start = time.monotonic()
  assert client.lease(1, 200).version == 1
  assert time.monotonic() - start < 100
  learner.join()


def test_a_different_model_is_refused_with_its_key(pair):
  for theirs, line in (
    ({"layers": "2", "width": "32"}, 'differs from the learner in width: "32" at the sampler, "64" at the learner'),
    ({"layers": "2"}, "in width: missing at the sampler"),
    ({**MODEL, "moe": "8"}, "missing at the learner"),
  ):
    with pytest.raises(UserError, match=line) as caught:
      pair.client(description=theirs).join()
    assert "\n" not in str(caught.value)


@pytest.fixture
def placed_pair():
  """A pair whose port nobody else takes while its server is down."""
  with held_port() as port:
    made = Pair(address=f"127.0.0.1:{port}")
    yield made
    made.close()


def test_a_restarted_learner_makes_the_sampler_join_again(placed_pair):
  """Fails if work of a former life is accepted, or if the port cannot be taken again."""
  pair = placed_pair
  client = pair.client()
  client.join()
  group = client.lease(1, 1).groups[0]
  source = pair.source(client)
  address = pair.server.address
  pair.server.stop(0.1)
  pair.server = service.serve(address, make_broker(), pair.store, description=MODEL)
  for call in (
    lambda: client.put(answer(group[0], 0)),
    lambda: client.lease(1, 0),
    lambda: source.fetch(NO_VERSION, 0),
    lambda: source.fetch_exactly(0),
  ):
    with pytest.raises(StaleIncarnation, match="join again"):
      call()
  client.join()
  assert client.lease(1, 1).groups[0][0].id == group[0].id
  assert pair.source(client).fetch(NO_VERSION, 0) is None


def test_malformed_groups_come_back_as_value_errors(pair):
  client = pair.client()
  client.join()
  group = client.lease(1, 1).groups[0]
  bad = answer(group[0], 0)
  bad[0].entropy[2] = np.nan
  with pytest.raises(ValueError, match="entropy"):
    client.put(bad)


def test_beats_arrive_and_their_faults_surface(pair):
  """Fails if beats stop silently: a wrong state would cost the leases much later."""
  pair.broker.lease_timeout_s = 0.5  # which says how often a beat comes; the leases themselves are held for longer
  client = pair.client()
  client.join()
  after = {"joining": "compiling", "compiling": "decoding"}

  def state() -> tuple[str, float]:  # the next one once the learner knows of the last, however many beats that takes
    return after.get(pair.broker.stats()["samplers"]["a"]["state"], "napping"), 0.0

  client.holds(4, 0.0)
  client.lease(1, 0)
  client.holds(4, 1.5)
  client.start_beats(state)
  deadline = time.monotonic() + 60
  with pytest.raises(ValueError, match="napping"):
    while time.monotonic() < deadline:
      client.lease(1, 0)
      time.sleep(0.02)
  stats = pair.broker.stats()
  assert stats["acknowledged"] == {"a": [4]}
  assert stats["sampler_waited_s"] == 1.5
  assert stats["samplers"]["a"]["state"] == "decoding"


def test_a_state_function_that_fails_surfaces_at_the_next_call(pair):
  """Fails if the beats die silently with it."""
  client = pair.client()
  client.join()

  def broken():
    raise KeyError("no state")

  client.start_beats(broken)
  deadline = time.monotonic() + 60
  with pytest.raises(KeyError, match="no state"):
    while time.monotonic() < deadline:
      client.lease(1, 0)
      time.sleep(0.02)


def test_a_lost_lease_answer_heals_at_the_next_lease(pair):
  """Fails if a group whose answer never arrived stays with a sampler that does not know of it."""
  client = pair.client()
  client.join()
  pair.broker.lease("a", 1, 0)  # the learner granted group 0; the answer was lost
  assert [group[0].group for group in client.lease(2, 1).groups] == [0, 1]
  assert [group[0].group for group in client.lease(2, 1).groups] == [2, 3]  # and what it holds stays


def test_no_answer_ends_in_one_line_that_says_what_was_waited_for():
  with socket.socket() as nobody:
    nobody.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{nobody.getsockname()[1]}"
    client = Client(address, "a", description=MODEL, patience_s=0.5)
    with pytest.raises(UserError, match=rf"no answer from the learner at {address} for \d+ s while waiting for leave"):
      client.join()
    client.close()


def test_a_frozen_learner_meets_the_deadline(monkeypatch):
  """Fails if a call to a learner that accepts and never answers has no deadline."""
  monkeypatch.setattr(client_module, "_CALL_S", 0.3)
  with socket.socket() as frozen:
    frozen.bind(("127.0.0.1", 0))
    frozen.listen()
    client = Client(f"127.0.0.1:{frozen.getsockname()[1]}", "a", description=MODEL, patience_s=0.5)
    start = time.monotonic()
    with pytest.raises(UserError, match="no answer"):
      client.join()
    assert time.monotonic() - start < 25  # below the 30 s of a call that is not shortened
    client.close()


def test_a_port_in_use_is_refused(pair):
  """Fails with SO_REUSEPORT, where a second learner would take half of the calls."""
  with pytest.raises(UserError, match=f"cannot listen on {pair.server.address}: the port is in use"):
    service.serve(pair.server.address, make_broker(), WeightStore(), description=MODEL)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "learner.example:1"])
def test_beyond_loopback_needs_tls_and_a_token(address):
  """Fails if one of the two is enough, or if only the server checks."""
  for half in ({}, {"token": "t"}, {"tls": Tls("c", "k")}):
    with pytest.raises(UserError, match="beyond loopback without"):
      service.serve(address, make_broker(), WeightStore(), description=MODEL, **half)
    with pytest.raises(UserError, match="beyond loopback without"):
      Client(address, "a", description=MODEL, patience_s=1.0, **half)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost:http", ":80", "127.0.0.1:99999"])
def test_a_malformed_address_is_one_line(address):
  with pytest.raises(UserError, match="host:port"):
    service.serve(address, make_broker(), WeightStore(), description=MODEL)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_tls_and_token(tmp_path):
  """Fails if a wrong or missing token, or a client without TLS, gets through."""
  certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
  command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
  files = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
  subprocess.run([*command.split(), *files], check=True, capture_output=True)
  pair = Pair(tls=Tls(str(certificate), str(key)), token="secret")
  good = pair.client(tls=Tls(str(certificate)))
  good.join()
  assert good.lease(1, 1).groups
  pair.store.publish(0, pieces(PARAMS))
  assert pair.source(good).fetch(NO_VERSION, 5)[0] == 0
  for token in ("wrong", None):
    with pytest.raises(UserError, match="token"):
      pair.client(token=token).join()
  with pytest.raises(UserError, match="no answer"):
    pair.client(tls=None, patience_s=0.3).join()
  with pytest.raises(UserError, match=re.escape(f"cannot read the TLS file {tmp_path / 'none'}")):
    pair.client(tls=Tls(str(tmp_path / "none")))
  pair.close()


def test_the_health_service_serves_while_every_wait_is_taken(pair, monkeypatch, one_long_call, heard):
  """Fails if blocked leases can use up the threads that puts, beats and health checks need."""
  pair.server.stop(0.1)
  monkeypatch.setattr(service, "_THREADS", 4)
  monkeypatch.setattr(service, "_WAITS", 2)
  pair.server = service.serve("127.0.0.1:0", pair.broker, pair.store, description=MODEL)
  clients = [pair.client(name) for name in "abcde"]
  for client in clients:
    client.join()
  taken = clients[0].lease(8, 1).groups
  waits = [threading.Thread(target=pair.source(client).fetch, args=(NO_VERSION, 200)) for client in clients[1:]]
  for wait in waits:
    wait.start()
  eventually(lambda: heard >= set("bcde"))
  with grpc.insecure_channel(pair.server.address) as channel:
    check = health_pb2_grpc.HealthStub(channel).Check
    for name in ("", "estr_jax.wire.Rollouts", "estr_jax.wire.WeightChannel"):
      reply = check(health_pb2.HealthCheckRequest(service=name), timeout=60)
      assert reply.status == health_pb2.HealthCheckResponse.SERVING
  assert clients[0].put(answer(taken[0][0], 0)) == "accepted"
  assert all(wait.is_alive() for wait in waits)
  pair.store.publish(0, pieces(PARAMS))
  for wait in waits:
    wait.join()


def test_stop_does_not_wait_for_blocked_calls(placed_pair, one_long_call, heard):
  """Fails if a sampler that waits for weights, for 200 s here, keeps the learner's process alive."""
  pair = placed_pair
  client = pair.client()
  client.join()
  source = pair.source(client, patience_s=0.2)
  outcome = []

  def wait():
    try:
      source.fetch(NO_VERSION, 200)
    except UserError as fault:
      outcome.append(str(fault))

  thread = threading.Thread(target=wait)
  thread.start()
  eventually(lambda: bool(heard))
  time.sleep(0.1)  # from being heard to waiting it is no longer
  start = time.monotonic()
  pair.server.stop(0.1)
  thread.join()
  assert time.monotonic() - start < 60
  assert len(outcome) == 1 and "no answer from the learner" in outcome[0]


@pytest.mark.parametrize("gone", ["client", "server"])
def test_a_blocked_call_does_not_outlive_its_client_or_the_server(gone):
  """Fails if its thread stays blocked for the whole wait, or grants a lease to nobody."""

  class Context:
    def is_active(self) -> bool:
      return gone != "client"

  stopping = threading.Event()
  if gone == "server":
    stopping.set()
  asked = []
  service._Waiter(stopping).wait(Context(), 60.0, asked.append, lambda answer: False)
  assert len(asked) == 1 and asked[0] <= 1.0
