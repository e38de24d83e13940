"""Writes the newest checkpoint of a run as a Hugging Face style folder.

    python -m experiments.export --workdir=DIR --folder=NEW [--dtype=bfloat16]

NEW gets config.json and safetensors in shards; of a run with model.folder also that folder's tokenizer files.
"""

import argparse

import jax
import numpy as np

from estr_jax.model import hf
from estr_jax.run import api, command_line


def program() -> int:
  parser = argparse.ArgumentParser(prog="python -m experiments.export", description="Writes a run's weights.")
  parser.add_argument("--workdir", required=True, help="the folder of the run")
  parser.add_argument("--folder", required=True, help="what to write; must not exist, or be empty")
  parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the tensors")
  arguments = parser.parse_args()
  loaded = api.load(arguments.workdir)
  params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(arguments.dtype), loaded.params)
  hf.save(arguments.folder, loaded.model, params, source=loaded.settings.config.model.folder or None)
  print(f"{arguments.folder} holds version {loaded.version} of {arguments.workdir} in {arguments.dtype}")
  return 0


if __name__ == "__main__":
  command_line.main(program)
