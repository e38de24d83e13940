"""Weights of a learner of several hosts, by slices, over real ports."""

import itertools
import time

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import held_port
from processes import on_eight_devices
from weights_cases import PARAMS, assert_blocks_are, by_host, pieces, wants

from estr_jax.errors import UserError
from estr_jax.rollout_queue.broker import Broker, StaleIncarnation
from estr_jax.structs import NO_VERSION
from estr_jax.weights.fetch import WeightSource
from estr_jax.weights.regions import Region
from estr_jax.weights.store import Piece, VersionGone, WeightStore
from estr_jax.wire import service
from estr_jax.wire.weight_host import Membership, weight_source


class Hosts:
  """A learner of several hosts on loopback, and sources that fetch from them."""

  def __init__(self, count: int = 2, token: str | None = None):
    self.token = token
    self.broker = Broker(
      lambda group: [],
      groups_per_batch=1,
      max_staleness=1,
      admission="drop",
      capacity=1,
      last_version=100,
      lease_timeout_s=100.0,
    )
    self.stores = [WeightStore(leads=host == 0) for host in range(count)]
    self.servers = [
      service.serve_weights("127.0.0.1:0", store, incarnation=self.broker.incarnation, token=token)
      for store in self.stores[1:]
    ]
    others = [server.address for server in self.servers]
    first = service.serve("127.0.0.1:0", self.broker, self.stores[0], description={}, other_hosts=others, token=token)
    self.servers.insert(0, first)
    self.sources: list[WeightSource] = []

  def publish(self, version: int, *, late: int = 0) -> None:
    """On every host but the last `late`."""
    held = by_host()
    for store, host in zip(self.stores[: len(self.stores) - late], itertools.count()):
      store.publish(version, held[host] if host < len(held) else [])

  def source(self, wanted=None, **changes) -> WeightSource:
    fields = {
      "sampler": "a",
      "incarnation": self.broker.incarnation,
      "hosts": tuple(server.address for server in self.servers),
    }
    settings = {"patience_s": 60.0, "token": self.token}
    settings.update((key, changes.pop(key)) for key in list(changes) if key in settings)
    membership = Membership(**{**fields, **changes})
    self.sources.append(weight_source(membership, wants(PARAMS) if wanted is None else wanted, **settings))
    return self.sources[-1]

  def close(self) -> None:
    for source in self.sources:
      source.close()
    for server in self.servers:
      server.stop(0.1)


@pytest.fixture
def hosts():
  made = Hosts()
  yield made
  made.close()


def test_blocks_come_from_every_host_and_the_version_is_named_first(hosts):
  """Fails if a host is not asked, or a sampler's other processes hear of a version late or not at all."""
  hosts.publish(7)
  told = []
  version, blocks = hosts.source().fetch(NO_VERSION, 5, told.append)
  assert version == 7 and told == [7]
  assert_blocks_are(blocks, PARAMS)
  assert_blocks_are(hosts.source().fetch_exactly(7), PARAMS)
  assert hosts.source().fetch(7, 0) is None
  assert hosts.broker.stats()["version"] == 7  # what a sampler can hold is announced


def test_another_host_has_no_queue_and_is_healthy(hosts):
  """Fails if a probe finds no service there, or the queue is answered by a host without a broker."""
  with grpc.insecure_channel(hosts.servers[1].address) as channel:
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", "estr_jax.wire.WeightChannel"):
      assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status == 1
    with pytest.raises(grpc.RpcError) as caught:
      stub.Check(health_pb2.HealthCheckRequest(service="estr_jax.wire.Rollouts"), timeout=60)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_versions_are_never_mixed(hosts):
  """Fails if a host that has published the next version already sends that one."""
  hosts.publish(1)
  other = {"embed": -PARAMS["embed"], "layers": {"up": -PARAMS["layers"]["up"]}, "scale": -PARAMS["scale"]}

  def next_version(version: int) -> None:
    for store in hosts.stores:
      store.publish(2, pieces(other))

  version, blocks = hosts.source().fetch(NO_VERSION, 5, next_version)
  assert version == 1
  assert_blocks_are(blocks, PARAMS)


def test_a_version_that_is_gone_is_said_and_the_newest_is_taken(hosts):
  """Fails if a fetch waits for what never comes, or ends with nothing."""
  hosts.publish(1)
  told = []

  def three_updates(version: int) -> None:
    told.append(version)
    if version == 1:
      for later in (2, 3, 4):
        hosts.publish(later)

  version, blocks = hosts.source().fetch(NO_VERSION, 5, three_updates)
  assert version == 4 and told == [1, 4]
  assert_blocks_are(blocks, PARAMS)
  with pytest.raises(VersionGone, match=r"version 1 of the weights is gone"):
    hosts.source().fetch_exactly(1)


def test_a_host_that_publishes_later_is_waited_for(hosts):
  """Fails if a host that is behind by a moment ends the fetch."""
  hosts.publish(1, late=1)
  version, blocks = hosts.source().fetch(NO_VERSION, 5, lambda version: hosts.publish(1))
  assert version == 1
  assert_blocks_are(blocks, PARAMS)


def test_a_host_that_never_has_the_version_is_named(hosts, monkeypatch):
  """Fails if the wait for it has no end."""
  monkeypatch.setattr("estr_jax.weights.fetch.WAIT_S", 0.1)
  hosts.publish(1, late=1)
  with pytest.raises(UserError, match=rf"host at {hosts.servers[1].address} had no weights of version 1 to send"):
    hosts.source(patience_s=0.3).fetch(NO_VERSION, 5)


def test_a_host_that_does_not_answer_is_named(hosts):
  hosts.publish(1)
  with held_port() as port:  # where nobody listens
    addresses = (hosts.servers[0].address, f"127.0.0.1:{port}")
    with pytest.raises(UserError, match=rf"no answer from the learner at {addresses[1]}"):
      hosts.source(hosts=addresses, patience_s=0.3).fetch(NO_VERSION, 5)


def test_a_restarted_learner_is_noticed_at_every_host(hosts):
  """Fails if one host serves a sampler of a former life."""
  hosts.publish(1)
  addresses = [server.address for server in hosts.servers]
  for order in (addresses, addresses[::-1]):
    with pytest.raises(StaleIncarnation, match="a has to drop its work and join again"):
      hosts.source(incarnation="former", hosts=tuple(order)).fetch(NO_VERSION, 5)


def test_one_host_s_fault_ends_the_fetch_at_once(monkeypatch):
  """Fails if the fetch goes on waiting for the other hosts, which would take it 150 s."""
  monkeypatch.setattr("estr_jax.weights.fetch.WAIT_S", 150.0)
  hosts = Hosts(3)
  hosts.publish(1, late=1)  # the last would be waited for
  former = service.serve_weights("127.0.0.1:0", hosts.stores[1], incarnation="former")
  addresses = (hosts.servers[0].address, former.address, hosts.servers[2].address)
  start = time.monotonic()
  with pytest.raises(StaleIncarnation):
    hosts.source(hosts=addresses).fetch(NO_VERSION, 5)
  assert time.monotonic() - start < 50
  former.stop(0.1)
  hosts.close()


def test_a_damaged_chunk_is_noticed_by_name(hosts, monkeypatch):
  monkeypatch.setattr(Piece, "checksum", lambda piece, block, offset, data: 1)
  hosts.publish(1)
  with pytest.raises(ValueError, match=r"\]: the checksum of bytes 0\.\.\d+ of version 1 differs"):
    hosts.source().fetch(NO_VERSION, 5)


def test_what_is_not_covered_exactly_once_is_noticed_by_name(hosts):
  """Fails if a number that nobody sent, or that two hosts sent, gets into the weights."""
  (embed_0, up_1, scale), (embed_1, up_0) = by_host()
  for version, (held, fault) in enumerate(
    (
      ([[embed_0, up_1, scale], [up_0]], r"embed\[0:8, 0:4\]: the learner's hosts hold 16 of its 32 numbers"),
      ([[embed_0, up_1], [embed_1, up_0]], r"scale: no learner host holds any of it"),
      ([[embed_0, up_1, scale], [embed_1, up_0, up_1]], r"layers/up\[0:2, 0:4, 3:6\]: a part of it is served twice"),
    )
  ):
    for store, ours in zip(hosts.stores, held):
      store.publish(version, ours)
    with pytest.raises(ValueError, match=fault):
      hosts.source().fetch(NO_VERSION, 5)


def test_another_shape_is_refused_by_name(hosts):
  hosts.publish(1)
  with pytest.raises(ValueError, match=r"embed has shape \(8, 4\) on one side and \(8, 5\) on the other"):
    hosts.source(wants({"embed": np.zeros((8, 5))})).fetch(NO_VERSION, 5)
  with pytest.raises(ValueError, match=r"embed: \(0, 0\) to \(9, 4\) is no part of shape \(8, 4\)"):
    Region("embed", (8, 4), (0, 0), (9, 4))


def test_every_host_asks_for_the_token():
  """Fails if the hosts without a queue serve weights to anybody."""
  hosts = Hosts(token="secret")
  hosts.publish(1)
  assert hosts.source().fetch(NO_VERSION, 5)[0] == 1
  for host in range(2):
    with pytest.raises(UserError, match="token"):
      hosts.source(hosts=(hosts.servers[host].address,), token="wrong").fetch(NO_VERSION, 5)
  with pytest.raises(UserError, match="beyond loopback without"):
    hosts.source(hosts=(hosts.servers[0].address, "learner-1.example:8476"))
  hosts.close()


_EIGHT = """
import dataclasses
import jax, numpy as np
from sampler_cases import MODEL
from estr_jax.model import decoder
from estr_jax.model.sharding import make_mesh, path_name, shardings
from estr_jax.runtime.sampler_loop import abstract_weights
from estr_jax.structs import NO_VERSION
from estr_jax.weights.placement import placed, wanted_by
from estr_jax.weights.regions import region_at
from estr_jax.weights.store import pieces_of
from test_wire_weight_host import Hosts

model = dataclasses.replace(MODEL, layers=1, vocab_size=8, experts=4, experts_per_token=2, expert_mlp_width=8)
rng = np.random.default_rng(0)
params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), decoder.abstract_params(model))
devices = jax.devices()

def wanted_on(abstract, ours):  # as a process with these devices would say it
  regions = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
      if device in ours:
        regions[region_at(path_name(path), leaf.shape, index)] = None
  return list(regions)

learners = [(2, 2, 2, 1), (1, 8, 1, 1), (1, 2, 1, 4)]
samplers = [(1, 1, 2, 2), (1, 1, 1, 4), (2, 2, 2, 1), (1, 1, 1, 1)]
for sizes in learners:
  mesh = make_mesh(dict(zip(("data", "fsdp", "tensor", "expert"), sizes)))
  lie = jax.device_put(params, shardings(params, mesh))
  hosts = Hosts(2)
  pieces = pieces_of(lie)
  for host, store in enumerate(hosts.stores):  # each the pieces of its half of the devices
    ours = devices[4 * host : 4 * host + 4]
    store.publish(1, [piece for piece in pieces if piece._data.devices() <= set(ours)])
  for sampler in samplers:
    count = int(np.prod(sampler))
    there = make_mesh(dict(zip(("data", "fsdp", "tensor", "expert"), sampler)), devices[8 - count :])
    abstract = abstract_weights(model, "float32", there)
    blocks, sets = {}, []
    for half in np.array_split(np.array(devices[8 - count :]), 2):
      sets.append(wanted_on(abstract, set(half)))
      blocks |= hosts.source(sets[-1]).fetch(NO_VERSION, 5)[1] if sets[-1] else {}
    assert set().union(*sets) == set(wanted_by(abstract)) == set(blocks)
    got = placed(abstract, blocks)
    jax.tree.map(np.testing.assert_array_equal, got, params)
    assert all(jax.tree.leaves(jax.tree.map(lambda leaf, asked: leaf.sharding == asked.sharding, got, abstract)))
  hosts.close()
print("equal")
"""


def test_a_mesh_of_two_hosts_feeds_other_meshes_of_two_processes():
  """Fails if the hosts' pieces are no partition, or a slice of one mesh lands elsewhere on the other."""
  assert on_eight_devices(_EIGHT) == "equal\n"
