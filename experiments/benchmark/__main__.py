"""Measures what the code promises about memory and time, and says where it falls short.

    python -m experiments.benchmark scoring

One line a check: what, measured, limit. The exit status is 1 where a limit is exceeded. Times are ratios of processor
seconds of programs that take turns in one process, so they hold on a busy machine too; the two numbers behind a ratio
are its quartiles.
"""

import sys
from collections.abc import Callable, Iterator, Sequence

from estr_jax.errors import UserError
from estr_jax.run import command_line
from experiments.benchmark.checks import Check
from experiments.benchmark.scoring import equality, memory, seconds
from experiments.benchmark.train_steps import train_steps

BENCHMARKS: dict[str, Sequence[Callable[[], Iterator[Check]]]] = {
  "scoring": (memory, equality, seconds, train_steps),
  "memory": (memory,),
  "equality": (equality,),
  "seconds": (seconds,),
  "train_steps": (train_steps,),
}


def parse(arguments: Sequence[str]) -> Sequence[Callable[[], Iterator[Check]]]:
  """The checks of the benchmark that the command line names."""
  names = ", ".join(BENCHMARKS)
  if len(arguments) != 1:
    raise UserError(f"name one benchmark: {names}")
  if arguments[0] not in BENCHMARKS:
    raise UserError(f"unknown benchmark {arguments[0]!r}; it is one of {names}")
  return BENCHMARKS[arguments[0]]


def program() -> int:
  if sys.argv[1:] in (["--help"], ["-h"]):
    print(f"{__doc__.strip()}\n\nBenchmarks: {', '.join(BENCHMARKS)}")
    return 0
  short = 0
  for measure in parse(sys.argv[1:]):
    for check in measure():
      print(check.line(), flush=True)
      short += not check.ok
  print(f"{short} of the limits exceeded" if short else "every limit kept")
  return 1 if short else 0


if __name__ == "__main__":
  command_line.main(program)
