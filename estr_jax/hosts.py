"""The processes of one role: a group joined by `jax.distributed`, whose devices make one mesh.

Every process of a group runs the same program and makes the same calls of this module in the same order, from one
thread. Process 0 leads: it alone talks to people and to the other role, and tells the others what it decided. A group
of one process needs none of this, and every call is then free.
"""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from estr_jax.errors import UserError

AUTO = "auto"  # let JAX find the group, as it can on Cloud TPU and GKE

_JOIN_S = 300  # for all processes of a group to come
_FRAME = 4096  # bytes of the first part of a message
_LONG_FRAME = 4096 * 4096  # bytes of each of the others
_SIZE = 8  # bytes of it that say how long the whole is

T = TypeVar("T")


def join(coordinator: str, processes: int | None, process: int | None) -> None:
  """Makes this process one of a group; before any other call of JAX.

  Args:
    coordinator: "HOST:PORT" of process 0, or AUTO.
    processes: how many there are; None with AUTO.
    process: which of them this is; None with AUTO.

  Raises:
    UserError: the others did not come, or there is nothing to find a group by.
  """
  address = None if coordinator == AUTO else coordinator
  try:
    jax.distributed.initialize(address, processes, process, initialization_timeout=_JOIN_S)
  except (RuntimeError, ValueError) as error:
    line = " ".join(str(error).split())[:200]
    remedy = (
      "JAX finds none here; name HOST:PORT of its first process, with --processes and --process"
      if coordinator == AUTO
      else f"not all came within {_JOIN_S} s; start all of them, with the same --coordinator and --processes"
    )
    raise UserError(f"--coordinator={coordinator}: no group of processes ({line}): {remedy}") from error


def leads() -> bool:
  return jax.process_index() == 0


def alone() -> bool:
  return jax.process_count() == 1


def broadcast(value: Any = None) -> Any:
  """What process 0 gives, on every process; the others' argument is ignored. Anything that can be pickled."""
  if alone():
    return value
  data = pickle.dumps(value) if leads() else b""
  data = len(data).to_bytes(_SIZE, "little") + data
  # Frames of two sizes, each a program of its own: most messages fit into the first, and none fills a device's memory.
  found = multihost_utils.broadcast_one_to_all(_frame(data[:_FRAME], _FRAME)).tobytes()
  size = _SIZE + int.from_bytes(found[:_SIZE], "little")
  parts = [found]
  for start in range(_FRAME, size, _LONG_FRAME):
    parts.append(multihost_utils.broadcast_one_to_all(_frame(data[start : start + _LONG_FRAME], _LONG_FRAME)).tobytes())
  return pickle.loads(b"".join(parts)[_SIZE:size])


def lead(call: Callable[[], T]) -> T:
  """What `call` returns on process 0, where alone it is made, on every process; they raise what it raises, too."""
  if alone():
    return call()
  outcome: tuple[T | None, Exception | None] = None, None
  if leads():
    try:
      outcome = call(), None
    except Exception as error:  # handed to all, and raised below
      outcome = None, _portable(error)
  value, fault = broadcast(outcome)
  if fault is not None:
    raise fault
  return value


def leader_first(call: Callable[[], T]) -> T:
  """What `call` returns, made on process 0 before the others, which find what it leaves on a shared disk."""
  made: list[T] = []
  lead(lambda: made.append(call()))
  return made[0] if made else call()


def gather(value: Any) -> list[Any]:
  """What every process gives, in their order, on all of them. Anything that can be pickled."""
  if alone():
    return [value]
  data = pickle.dumps(value)
  sizes = multihost_utils.process_allgather(np.int32(len(data)))
  rows = multihost_utils.process_allgather(_frame(data, _bucket(int(sizes.max()))))
  return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def whole(tree: Any) -> Any:
  """Arrays that lie on the mesh, as numpy on every process."""
  return jax.tree.map(lambda leaf: multihost_utils.process_allgather(leaf, tiled=True), tree)


def _portable(fault: Exception) -> Exception:
  """The fault, or its words where it cannot travel; the others would wait for it for ever."""
  try:
    pickle.loads(pickle.dumps(fault))
  except Exception:
    return RuntimeError(f"{type(fault).__name__}: {fault}")
  return fault


def _bucket(size: int) -> int:
  bucket = _FRAME
  while bucket < size:
    bucket *= 2
  return bucket


def _frame(data: bytes, size: int) -> np.ndarray:
  frame = np.zeros(size, np.uint8)
  frame[: len(data)] = np.frombuffer(data, np.uint8)
  return frame
