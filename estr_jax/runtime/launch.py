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
from typing import IO

from estr_jax.errors import Killed, UserError
from estr_jax.observe.writers import write_json

LOCK = ".lock"  # in the workdir: held by the learner
RENDEZVOUS = "learner.json"  # in the workdir: where the learner listens, written by the learner
PARENT_PIPE = "ESTR_JAX_PARENT_PIPE"  # set for children, whose standard input then ends when the parent does
LEARNER_PID = "ESTR_JAX_LEARNER_PID"  # set for samplers: whose rendezvous counts
FAULT_PIPE = "ESTR_JAX_FAULT_PIPE"  # set for the learner: where it writes the line of a user's mistake
_LENGTH = 8  # bytes before a job that say how long it is

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


def receive_job() -> bytes:
  """What `launch` hands to this process, on its standard input."""
  length = int.from_bytes(_read(_LENGTH), "little")
  return _read(length)


def _read(size: int) -> bytes:
  data = b""
  while len(data) < size:
    part = os.read(0, size - len(data))
    if not part:
      raise RuntimeError("the process that started this one is gone")
    data += part
  return data


def report_fault(line: str) -> bool:
  """Hands the line of a user's mistake to whoever launched this process; False where nobody takes it."""
  if FAULT_PIPE not in os.environ:
    return False
  os.write(int(os.environ[FAULT_PIPE]), line.encode())
  return True


@dataclasses.dataclass
class _Child:
  role: str
  process: subprocess.Popen
  restarts: int = 0


class _Children:
  """The processes of a run, as `launch` starts and ends them."""

  def __init__(self, commands: Mapping[str, Sequence[str]], job: bytes, workdir: Path):
    self._commands, self._job, self._workdir = commands, job, workdir
    self._environment = {**os.environ, PARENT_PIPE: "1"}
    self._fault, write_end = os.pipe()
    self.learner = _Child("learner", self._start("learner", write_end))
    os.close(write_end)  # the learner's alone: its end is then the end of what can be read
    self._environment[LEARNER_PID] = str(self.learner.process.pid)
    self.samplers = [_Child(role, self._start(role)) for role in commands if role != "learner"]

  def _start(self, role: str, fault_pipe: int | None = None) -> subprocess.Popen:
    environment = self._environment if fault_pipe is None else {**self._environment, FAULT_PIPE: str(fault_pipe)}
    with contextlib.nullcontext() if role == "learner" else open(self._log(role), "ab") as output:
      process = subprocess.Popen(
        self._commands[role],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=environment,
        pass_fds=() if fault_pipe is None else (fault_pipe,),
        start_new_session=True,
      )
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which is seen when it is looked at
      pipe = _stdin(process)
      pipe.write(len(self._job).to_bytes(_LENGTH, "little") + self._job)
      pipe.flush()
    return process

  def _log(self, role: str) -> Path:
    return self._workdir / f"{role}.log"

  def look_after(self, sampler: _Child) -> None:
    """Starts a killed sampler again. Raises UserError where it failed, or was killed too often."""
    status = sampler.process.poll()
    if status is None or status == 0:
      return
    if status > 0 or sampler.restarts == _RESTARTS:
      log = self._log(sampler.role)
      line = f"{sampler.role} ended with status {status}: {_last_line(log)} (all of it: {log})"
      raise UserError(line) if status > 0 else Killed(line, -status)
    sampler.restarts += 1
    print(f"{sampler.role} was killed by signal {-status}; started again", file=sys.stderr)
    sampler.process = self._start(sampler.role)

  def learner_ended(self) -> None:
    """The samplers go home. Raises UserError, with the line of the learner, where it failed."""
    status = self.learner.process.returncode
    if status < 0:
      raise Killed(
        f"the learner was killed by signal {-status}; run the same command again to go on from the last checkpoint",
        -status,
      )
    if status > 0:
      line = os.read(self._fault, 1 << 16).decode()
      raise UserError(line or f"the learner ended with status {status}; what it said stands above")
    deadline = time.monotonic() + _GOODBYE_S
    for child in self.samplers:
      _wait(child.process, deadline - time.monotonic())

  def end(self) -> None:
    """Ends those that still run."""
    for child in (self.learner, *self.samplers):
      if child.process.poll() is None:
        child.process.terminate()
        if not _wait(child.process, _UNWIND_S):
          child.process.kill()
          child.process.wait()
      with contextlib.suppress(BrokenPipeError):
        _stdin(child.process).close()
    os.close(self._fault)


def launch(commands: Mapping[str, Sequence[str]], job: bytes, workdir: Path) -> None:
  """Runs the learner and the samplers until the learner ends.

  A sampler that is killed is started again; a learner that is killed ends the run, whose next start resumes it.

  Args:
    commands: role -> command; "learner", and any number of others, which are samplers.
    job: what each of them is to do, for `receive_job`.
    workdir: gets each sampler's output as ROLE.log.

  Raises:
    UserError: the learner or a sampler failed; Killed where a signal ended it.
    KeyboardInterrupt: this process was asked to end, by SIGINT or SIGTERM.
  """
  interrupted = threading.Event()
  with _signals(interrupted):
    children = _Children(commands, job, workdir)
    try:
      while children.learner.process.poll() is None:
        if interrupted.wait(_LOOK_S):
          raise KeyboardInterrupt
        for child in children.samplers:
          children.look_after(child)
      children.learner_ended()
    finally:
      children.end()


@contextlib.contextmanager
def _signals(interrupted: threading.Event) -> Iterator[None]:
  """SIGINT and SIGTERM set the event meanwhile; of another thread than the main one they are not ours."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = {name: signal.signal(name, lambda *_: interrupted.set()) for name in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield
  finally:
    for name, handler in before.items():
      signal.signal(name, handler)


def _stdin(process: subprocess.Popen) -> IO[bytes]:
  if process.stdin is None:
    raise RuntimeError(f"process {process.pid} was started without a pipe to its standard input")
  return process.stdin


def _wait(process: subprocess.Popen, seconds: float) -> bool:
  try:
    process.wait(max(0.0, seconds))
  except subprocess.TimeoutExpired:
    return False
  return True


def _last_line(log: Path) -> str:
  lines = log.read_text(errors="replace").strip().splitlines()
  return lines[-1] if lines else "it said nothing"
