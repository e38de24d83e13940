"""Starts the learner and the samplers of a run on this machine, and looks after them."""

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from estr_jax.errors import Killed, UserError
from estr_jax.observe.writers import write_json

LOCK = ".lock"  # in the workdir: held by the learner
RENDEZVOUS = "learner.json"  # in the workdir: where the learner listens, written by the learner
PARENT_PIPE = "ESTR_JAX_PARENT_PIPE"  # set for children, whose standard input then ends when the parent does
LAUNCH = "ESTR_JAX_LAUNCH"  # set for children: a word of this launch alone, by which a sampler knows its learner
FAULT_PIPE = "ESTR_JAX_FAULT_PIPE"  # set for the learner: where it writes the line of a user's mistake
_LENGTH = 8  # bytes before a job that say how long it is

_LOOK_S = 0.2
_RESTARTS = 3  # of a sampler; it holds nothing that the learner could not lease anew
_UNWIND_S = 20.0  # for a process to end after SIGTERM, a checkpoint on its way included
_GOODBYE_S = 20.0  # for a sampler to see that the run is over
_ASKED_TO_END = 130  # the status of a child that SIGTERM unwound


def announce_learner(workdir: Path, address: str) -> None:
  """The learner says where it listens."""
  write_json(workdir / RENDEZVOUS, {"address": address, "pid": os.getpid(), "launch": os.environ.get(LAUNCH)})


def find_learner(workdir: Path, address: str) -> str:
  """The learner's address: `address` itself, or, where its port is 0, what the learner wrote into the workdir.

  Only a launched sampler waits for that file, and its launcher ends it when the learner ends: a warm start may take as
  long as it takes. What a learner of an earlier start wrote does not count.

  Raises:
    UserError: the port is 0 and nobody launched this process.
  """
  if not address.endswith(":0"):
    return address
  if LAUNCH not in os.environ:
    raise UserError(f"transport.address={address} is not known before the learner runs; name a port for both sides")
  path = workdir / RENDEZVOUS
  while True:
    if path.exists():
      found = json.loads(path.read_text(encoding="utf-8"))
      if found["launch"] == os.environ[LAUNCH]:
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
      holder = os.read(lock, 20).decode() or "of another learner"
      raise UserError(f"process {holder} is training in {workdir}; stop it, or take another folder") from error
    except OSError as error:
      raise UserError(f"{workdir} cannot be locked: {error.strerror}; take a file system that has locks") from error
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


def unwind_on_sigterm() -> None:
  """SIGTERM unwinds like Ctrl-C: the terminal is given back, and a checkpoint that is being written is finished."""
  signal.signal(signal.SIGTERM, signal.default_int_handler)


def receive_job() -> bytes:
  """What `launch` hands to this process, on its standard input."""
  length = int.from_bytes(_read(_LENGTH), "little")
  return _read(length)


def _read(size: int) -> bytes:
  data = b""
  while len(data) < size:
    part = os.read(0, size - len(data))
    if not part:
      raise SystemExit("the process that started this one is gone")
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
    self._environment = {**os.environ, PARENT_PIPE: "1", LAUNCH: secrets.token_hex(8)}
    self._fault, self._learners_end = os.pipe()
    self._all: list[_Child] = []  # the learner first

  def start(self) -> subprocess.Popen:
    """The learner's process. Raises UserError where one cannot be started; those that were go on until `end`."""
    learner = self._start("learner")
    self._all.append(_Child("learner", learner))
    for role in self._commands:
      if role != "learner":
        self._all.append(_Child(role, self._start(role)))
    return learner

  @property
  def samplers(self) -> list[_Child]:
    return self._all[1:]

  def _start(self, role: str) -> subprocess.Popen:
    leads = role == "learner"
    more = {FAULT_PIPE: str(self._learners_end)} if leads else {}
    try:
      with contextlib.nullcontext() if leads else open(self._log(role), "ab") as output:
        process = subprocess.Popen(
          self._commands[role],
          stdin=subprocess.PIPE,
          stdout=output,
          stderr=output,
          env=self._environment | more,
          pass_fds=(self._learners_end,) if leads else (),
          start_new_session=True,
        )
    except OSError as error:
      raise UserError(f"the {role} cannot be started: {error.strerror}: {error.filename}") from error
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which is seen when it is looked at
      pipe = _stdin(process)
      pipe.write(len(self._job).to_bytes(_LENGTH, "little") + self._job)
      pipe.flush()
    return process

  def _log(self, role: str) -> Path:
    return self._workdir / f"{role}.log"

  def look_after(self, sampler: _Child, say: Callable[[str], None]) -> None:
    """Starts a killed sampler again. Raises UserError where it failed, or was killed too often."""
    status = sampler.process.poll()
    if status is None or status == 0:
      return
    by = _signal_of(status)
    if by is None or sampler.restarts == _RESTARTS:
      log = self._log(sampler.role)
      line = f"{sampler.role} ended with status {status}: {_last_line(log)} (all of it: {log})"
      raise UserError(line) if by is None else Killed(line, by)
    sampler.restarts += 1
    say(f"{sampler.role} was killed by signal {by}; started again")
    sampler.process = self._start(sampler.role)

  def learner_ended(self, status: int) -> None:
    """The samplers go home. Raises UserError, with the line of the learner, where it failed."""
    by = _signal_of(status)
    if by is not None:
      line = f"the learner was killed by signal {by}; run the same command again to go on from the last checkpoint"
      raise Killed(line, by)
    if status > 0:
      os.set_blocking(self._fault, False)
      with contextlib.suppress(BlockingIOError):  # it said nothing: a fault of ours, with its traceback above
        raise UserError(os.read(self._fault, 1 << 16).decode())
      raise UserError(f"the learner ended with status {status}; what it said stands above")
    deadline = time.monotonic() + _GOODBYE_S
    for child in self.samplers:
      _wait(child.process, deadline - time.monotonic())

  def end(self) -> None:
    """Ends those that still run."""
    for child in self._all:
      if child.process.poll() is None:
        child.process.terminate()
        if not _wait(child.process, _UNWIND_S):
          child.process.kill()
          child.process.wait()
      with contextlib.suppress(BrokenPipeError):
        _stdin(child.process).close()
    os.close(self._fault)
    os.close(self._learners_end)


def launch(
  commands: Mapping[str, Sequence[str]],
  job: bytes,
  workdir: Path,
  say: Callable[[str], None],
) -> None:
  """Runs the learner and the samplers until the learner ends.

  A sampler that is killed is started again; a learner that is killed ends the run, whose next start resumes it.

  Args:
    commands: role -> command; "learner", and any number of others, which are samplers.
    job: what each of them is to do, for `receive_job`.
    workdir: gets each sampler's output as ROLE.log.
    say: is told of a sampler that is started again.

  Raises:
    UserError: the learner or a sampler failed; Killed where a signal ended it.
    KeyboardInterrupt: this process was asked to end, by SIGINT or SIGTERM.
  """
  interrupted = threading.Event()
  with _signals(interrupted):
    children = _Children(commands, job, workdir)
    try:
      learner = children.start()
      while learner.poll() is None:
        if interrupted.wait(_LOOK_S):
          raise KeyboardInterrupt
        for child in children.samplers:
          children.look_after(child, say)
      children.learner_ended(learner.returncode)
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


def _signal_of(status: int) -> int | None:
  """What killed a child; None where it ended by itself."""
  if status == _ASKED_TO_END:
    return signal.SIGTERM.value
  return -status if status < 0 else None


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
