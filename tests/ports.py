"""Ports for processes that a test starts."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
  """A port of loopback that nobody else is given meanwhile, and that a process of the test can listen on.

  It is bound here and nobody listens on it here. A second socket may be bound to it where both ask for SO_REUSEADDR, as
  every server of gRPC does; JAX's coordinator and this socket ask for SO_REUSEPORT too. Of our own servers, which do
  not, only one can listen on it at a time.
  """
  with socket.socket() as place:
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
      place.setsockopt(socket.SOL_SOCKET, option, 1)
    place.bind(("127.0.0.1", 0))
    yield place.getsockname()[1]
