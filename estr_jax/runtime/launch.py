"""Starts the learner and the samplers of a run on this machine, and looks after them."""

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from estr_jax.errors import UserError
from estr_jax.observe.writers import write_json

LOCK = ".lock"  # in the workdir: held by the learner
RENDEZVOUS = "learner.json"  # in the workdir: where the learner listens, written by the learner
PARENT_PIPE = "ESTR_JAX_PARENT_PIPE"  # set for children, whose standard input then ends when the parent does
LEARNER_PID = "ESTR_JAX_LEARNER_PID"  # set for samplers: whose rendezvous counts

_LOOK_S = 0.2
_RESTARTS = 3  # of a sampler; it holds nothing that the learner could not lease anew
_UNWIND_S = 20.0  # for a process to end after SIGTERM, a checkpoint on its way included
_GOODBYE_S = 20.0  # for a sampler to see that the run is over


def announce_learner(workdir: Path, address: str) -> None:
  """The learner says where it listens."""
  write_json(workdir / RENDEZVOUS, {"address": address, "pid": os.getpid()})


def find_learner(workdir: Path, address: str) -> str:
  """The learner's address: `address` itself, or, where its port is 0, what the learner wrote into the workdir.

  Only a launched sampler waits for that file, and its launcher ends it when the learner ends: a warm start may take as
  long as it takes. What a learner of an earlier start wrote does not count.

  Raises:
    UserError: the port is 0 and nobody launched this process.
  """
  if not address.endswith(":0"):
    return address
  if LEARNER_PID not in os.environ:
    raise UserError(f"transport.address={address} is not known before the learner runs; name a port for both sides")
  path = workdir / RENDEZVOUS
  while True:
    if path.exists():
      found = json.loads(path.read_text())
      if found["pid"] == int(os.environ[LEARNER_PID]):
        return found["address"]
    time.sleep(_LOOK_S)


@contextlib.contextmanager
def only_learner(workdir: Path) -> Iterator[None]:
  """Holds the workdir for this process. Raises UserError where another learner works in it."""
  try:
    lock = os.open(workdir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
  except OSError as error:
    raise UserError(f"{workdir} cannot be locked: {error.strerror}; free some space or take another folder") from error
  try:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      holder = os.read(lock, 20).decode()
      raise UserError(f"process {holder} is training in {workdir}; stop it, or take another --workdir") from error
    with contextlib.suppress(OSError):  # the number only helps a reader, and a full disk is reported by who needs it
      os.truncate(lock, 0)
      os.write(lock, str(os.getpid()).encode())
    yield
  finally:
    os.close(lock)


def launched() -> bool:
  """Whether `launch` started this process."""
  return PARENT_PIPE in os.environ


def die_with_parent() -> None:
  """Ends this process when the one that launched it is gone, however it went."""
  if not launched():
    return

  def watch():
    os.read(0, 1)  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
    os._exit(1)

  threading.Thread(target=watch, name="parent", daemon=True).start()


@dataclasses.dataclass
class _Child:
  role: str
  process: subprocess.Popen
  restarts: int = 0


def launch(commands: Mapping[str, Sequence[str]], workdir: Path) -> int:
  """Runs the learner and the samplers until the learner ends.

  A sampler that is killed is started again; a learner that is killed ends the run, whose next start resumes it.

  Args:
    commands: role -> command; "learner", and any number of others, which are samplers.
    workdir: gets each sampler's output as ROLE.log.

  Returns:
    The exit status.
  """
  environment = {**os.environ, PARENT_PIPE: "1"}

  def start(role: str) -> subprocess.Popen:
    with contextlib.nullcontext() if role == "learner" else open(workdir / f"{role}.log", "ab") as output:
      return subprocess.Popen(
        commands[role], stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, start_new_session=True
      )

  learner = _Child("learner", start("learner"))
  environment[LEARNER_PID] = str(learner.process.pid)
  children = {role: _Child(role, start(role)) for role in commands if role != "learner"}
  interrupted = threading.Event()
  for name in (signal.SIGINT, signal.SIGTERM):
    signal.signal(name, lambda *_: interrupted.set())
  try:
    while learner.process.poll() is None:
      if interrupted.wait(_LOOK_S):
        print("interrupted; run the same command again to go on from the last checkpoint", file=sys.stderr)
        return 130
      for child in children.values():
        status = child.process.poll()
        if status is None or status == 0:
          continue
        log = workdir / f"{child.role}.log"
        if status > 0 or child.restarts == _RESTARTS:
          print(f"{child.role} ended with status {status}: {_last_line(log)} (all of it: {log})", file=sys.stderr)
          return _shell_status(status)
        child.restarts += 1
        print(f"{child.role} was killed by signal {-status}; started again", file=sys.stderr)
        child.process = start(child.role)
    status = learner.process.returncode
    if status < 0:
      print(
        f"the learner was killed by signal {-status}; run the same command again to go on from the last checkpoint",
        file=sys.stderr,
      )
    if status == 0:
      deadline = time.monotonic() + _GOODBYE_S
      for child in children.values():
        _wait(child.process, deadline - time.monotonic())
    return _shell_status(status)
  finally:
    for child in (learner, *children.values()):
      if child.process.poll() is None:
        child.process.terminate()
        if not _wait(child.process, _UNWIND_S):
          child.process.kill()
          child.process.wait()


def _shell_status(status: int) -> int:
  """A child's return code as a shell reports it: 128 + signal where a signal ended it."""
  return status if status >= 0 else 128 - status


def _wait(process: subprocess.Popen, seconds: float) -> bool:
  try:
    process.wait(max(0.0, seconds))
  except subprocess.TimeoutExpired:
    return False
  return True


def _last_line(log: Path) -> str:
  lines = log.read_text(errors="replace").strip().splitlines()
  return lines[-1] if lines else "it said nothing"
