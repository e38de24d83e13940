"""Who may talk to whom: loopback freely, anything beyond it under TLS and with a token."""

import dataclasses
import ipaddress
import pathlib

import grpc

from estr_jax.errors import UserError

TOKEN_HEADER = "authorization"

# One finished group of 16 trajectories of 32k tokens is about 9 MB; weights travel in chunks.
_MAX_MESSAGE_BYTES = 256 << 20
MESSAGE_OPTIONS = [
  ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
  ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
]


@dataclasses.dataclass(frozen=True)
class Tls:
  """PEM files. The server shows `certificate` and needs its `key`; a client trusts `certificate` and needs no key."""

  certificate: str
  key: str | None = None


def is_loopback(address: str) -> bool:
  """Whether "host:port" stays on this machine. Raises UserError where it is no "host:port"."""
  host, colon, port = address.rpartition(":")
  if not colon or not host or not port.isdigit() or int(port) > 65535:
    raise UserError(f'address "{address}" is no "host:port"; write one such as 127.0.0.1:8476')
  if host == "localhost":
    return True
  try:
    return ipaddress.ip_address(host.strip("[]")).is_loopback
  except ValueError:
    return False


def require_safe(address: str, tls: Tls | None, token: str | None) -> None:
  """Raises UserError where prompts, weights or the token would cross a network unprotected."""
  if not is_loopback(address) and (tls is None or not token):
    missing = " and ".join(name for name, there in (("TLS", tls is not None), ("a token", bool(token))) if not there)
    raise UserError(f"address {address} is beyond loopback without {missing}; set both, or use 127.0.0.1")


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
  if tls.key is None:
    raise UserError(f"the certificate {tls.certificate} has no key file; a learner under TLS needs both")
  return grpc.ssl_server_credentials([(_read(tls.key), _read(tls.certificate))])


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
  return grpc.ssl_channel_credentials(root_certificates=_read(tls.certificate))


def token_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
  return () if token is None else ((TOKEN_HEADER, f"Bearer {token}"),)


def _read(path: str) -> bytes:
  try:
    return pathlib.Path(path).read_bytes()
  except OSError as fault:
    raise UserError(f"cannot read the TLS file {path}: {fault.strerror}; give a readable PEM file") from None
