"""Rebuilds the report of a run: python -m experiments.report --workdir=DIR"""

import argparse
import sys

from estr_jax.errors import UserError
from estr_jax.observe.report import write_report


def main() -> int:
  parser = argparse.ArgumentParser(prog="python -m experiments.report", description="Rebuilds the report of a run.")
  parser.add_argument("--workdir", required=True, help="the folder of the run")
  try:
    print(write_report(parser.parse_args().workdir))
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
