"""Rebuilds the report of a run: python -m experiments.report --workdir=DIR"""

import argparse

from estr_jax.observe.report import write_report
from estr_jax.run import command_line


def program() -> int:
  parser = argparse.ArgumentParser(prog="python -m experiments.report", description="Rebuilds the report of a run.")
  parser.add_argument("--workdir", required=True, help="the folder of the run")
  print(write_report(parser.parse_args().workdir))
  return 0


if __name__ == "__main__":
  command_line.main(program)
