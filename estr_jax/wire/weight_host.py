"""The learner's hosts as a sampler process reaches their weights over gRPC."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from estr_jax.weights.fetch import Stream, WeightSource
from estr_jax.weights.parts import Part
from estr_jax.weights.regions import Region
from estr_jax.wire import codec, security
from estr_jax.wire import estr_jax_pb2 as pb
from estr_jax.wire import estr_jax_pb2_grpc as pb_grpc
from estr_jax.wire.calls import open_channel, translated
from estr_jax.wire.security import Tls

# Seconds until a stream counts as unanswered, on top of the time that it was asked to wait.
_FETCH_S = 900.0


class Membership(NamedTuple):
  """Whose weights, in which life of the learner, and where they are."""

  sampler: str
  incarnation: str
  hosts: tuple[str, ...]  # addresses of all learner hosts; the first names the versions


def weight_source(
  membership: Membership,
  wanted: Sequence[Region],
  *,
  patience_s: float,
  tls: Tls | None = None,
  token: str | None = None,
) -> WeightSource:
  """Of the wanted regions, from all hosts of the learner; it raises StaleIncarnation once the learner restarted.

  Raises UserError where a host is beyond loopback without TLS and token.
  """
  messages = [codec.region_to_message(region) for region in wanted]
  hosts = [_WeightHost(address, membership, messages, tls, token) for address in membership.hosts]
  return WeightSource(hosts, wanted, patience_s=patience_s)


class _WeightHost:
  """A `weights.fetch.Host`. Its streams raise StaleIncarnation too."""

  def __init__(
    self, address: str, membership: Membership, wanted: Sequence[pb.Region], tls: Tls | None, token: str | None
  ):
    self.address = address
    self._membership = membership
    self._wanted = wanted
    self._metadata = security.token_metadata(token)
    self._channel = open_channel(address, tls, token)

  def newer(self, than: int, wait_s: float) -> Stream:
    return self._fetch(wait_s, above=than)

  def exactly(self, version: int, wait_s: float) -> Stream:
    return self._fetch(wait_s, exactly=version)

  def close(self) -> None:
    self._channel.close()

  def _fetch(self, wait_s: float, **version: int) -> Stream:
    request = pb.FetchRequest(
      sampler=self._membership.sampler,
      incarnation=self._membership.incarnation,
      wait_s=wait_s,
      wanted=self._wanted,
      **version,
    )
    stub = pb_grpc.WeightChannelStub(self._channel)
    call = stub.Fetch(request, timeout=wait_s + _FETCH_S, metadata=self._metadata)

    def parts() -> Iterator[Part]:
      with translated(self.address, "weights"):
        yield from map(codec.part_from_message, call)

    return Stream(parts(), call.cancel)
