"""The compiler in a process of its own, which is stopped as soon as the program is scheduled.

A TPU's compiler is done with all that a plan needs (which memory holds what, what is moved, in which order) in seconds,
and spends the minutes after that on machine code. It has no switch to stop there; but it can write down each stage.
"""

import dataclasses
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from estr_jax.errors import UserError
from estr_jax.planning import hlo
from estr_jax.planning.hlo import Memory
from estr_jax.planning.report import exhausted

# What the compiler writes, in this order: each is complete where the next one is there.
_PROGRAM, _BUFFERS, _LAST = (
  f"*.after_optimizations{end}.txt" for end in ("", "-buffer-assignment", "_after_buffer_assignment")
)


@dataclasses.dataclass(frozen=True)
class Job:
  """What is to be compiled."""

  traced: jax.stages.Traced
  platform: str  # tpu or cpu
  facts: Any  # what the asking process has to know of it; pickled


@dataclasses.dataclass(frozen=True)
class Compiled:
  facts: Any
  text: str  # the optimised HLO; scheduled, of a TPU's
  memory: Memory | None  # of a device; None of a CPU's, which says nothing about a TPU


class Exhausted(Exception):
  """The compiler gave up for want of memory; `needed` bytes a device at least."""

  def __init__(self, needed: float):
    super().__init__(f"{needed:.0f} bytes of HBM")
    self.needed = needed


def compile_apart(build: Callable[[], Job], *, machine_code: bool = False) -> Compiled:
  """Builds and compiles a job in another process.

  Args:
    build: pickled; runs there, before JAX has looked for devices.
    machine_code: whether to wait until the TPU's compiler is through, which proves that it can be.

  Raises:
    UserError: raised by `build`.
    Exhausted: the program does not fit.
    RuntimeError: anything else that went wrong there.
  """
  context = multiprocessing.get_context("spawn")
  with tempfile.TemporaryDirectory(prefix="estr-jax-plan-") as folder:
    receives, sends = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(build, folder, sends), daemon=True)
    child.start()
    sends.close()
    try:
      return _follow(receives, Path(folder), machine_code)
    finally:
      child.kill()
      child.join()


def _follow(receives: Connection, folder: Path, machine_code: bool) -> Compiled:
  facts, done, on_tpu = None, False, True
  while not done:
    if receives.poll(0.2):
      try:
        word, value = receives.recv()
      except EOFError:
        log = (folder / "log").read_text(errors="replace")
        raise RuntimeError(f"the compiler's process died; its last words: {log[-2000:]}") from None
      if word == "wrong":
        raise UserError(value)
      if word == "exhausted":
        raise Exhausted(value)
      if word == "failed":
        raise RuntimeError(value)
      if word == "facts":
        facts, on_tpu = value
      done = word == "done"
    elif on_tpu and not machine_code and facts is not None:
      done = any(folder.glob(_LAST))
  if not on_tpu:
    return Compiled(facts, (folder / "program").read_text(encoding="utf-8"), None)
  program, buffers = (next(folder.glob(pattern)).read_text(encoding="utf-8") for pattern in (_PROGRAM, _BUFFERS))
  return Compiled(facts, program, hlo.memory(buffers))


def _run(build: Callable[[], Job], folder: str, sends: Connection) -> None:
  """The child's part. Compilers talk a lot, so what they say goes into a file."""
  log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
  os.dup2(log, 1)
  os.dup2(log, 2)
  try:
    job = build()
    on_tpu = job.platform == "tpu"
    sends.send(("facts", (job.facts, on_tpu)))
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} if on_tpu else None
    compiled = job.traced.lower(lowering_platforms=(job.platform,)).compile(compiler_options=options)
    if not on_tpu:
      Path(folder, "program").write_text(compiled.as_text(), encoding="utf-8")
    sends.send(("done", None))
  except UserError as error:
    sends.send(("wrong", str(error)))
  except Exception as error:
    needed = exhausted(str(error))
    sends.send(("failed", traceback.format_exc()) if needed is None else ("exhausted", needed))
