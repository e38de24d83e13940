"""Writes the newest checkpoint of a run as a Hugging Face style folder.

    python -m experiments.export --workdir=DIR --folder=NEW [--dtype=bfloat16]

NEW gets config.json and safetensors in shards; of a run with model.folder also that folder's tokenizer files.
"""

import argparse
from pathlib import Path

import jax
import numpy as np

from estr_jax.learner.checkpoint import restore_params
from estr_jax.model import decoder, hf
from experiments import assembly, settings
from experiments.evaluate import load_config


def program() -> int:
  parser = argparse.ArgumentParser(prog="python -m experiments.export", description="Writes a run's weights.")
  parser.add_argument("--workdir", required=True, help="the folder of the run")
  parser.add_argument("--folder", required=True, help="what to write; must not exist, or be empty")
  parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the tensors")
  arguments = parser.parse_args()
  workdir = Path(arguments.workdir)
  config = load_config(workdir)
  settings.check(config)
  model = assembly.model_of(config, assembly.tokenizer_of(config))
  version, params = restore_params(workdir / "checkpoints", decoder.abstract_params(model))
  params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(arguments.dtype), params)
  hf.save(arguments.folder, model, params, source=config.model.folder or None)
  print(f"{arguments.folder} holds version {version} of {workdir} in {arguments.dtype}")
  return 0


if __name__ == "__main__":
  settings.main(program)
