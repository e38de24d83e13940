"""Evaluates the newest checkpoint of a run on held-out prompts, sampled and greedy.

    python -m experiments.evaluate --workdir=DIR [--prompts=512] [--show=3]

The config is the run's own; the prompts and random keys are those of the run's evaluations, so the final evaluation of
a finished run is reproduced.
"""

import argparse
import json
from pathlib import Path

import jax

from configs import default
from estr_jax.errors import UserError
from estr_jax.learner.checkpoint import restore_params
from estr_jax.model import decoder, sharding
from estr_jax.runtime.evaluation import accuracies
from estr_jax.structs import Weights
from experiments import assembly, settings
from experiments.workdir import read_config


def program() -> int:
  parser = argparse.ArgumentParser(prog="python -m experiments.evaluate", description="Evaluates a run.")
  parser.add_argument("--workdir", required=True, help="the folder of the run")
  parser.add_argument("--prompts", type=int, help="held-out prompts; as many as the run's own evaluation by default")
  parser.add_argument("--show", type=int, default=3, help="how many sampled trajectories to print")
  arguments = parser.parse_args()
  workdir = Path(arguments.workdir)
  config = load_config(workdir)
  if arguments.prompts is not None:
    config.eval.prompts = arguments.prompts
  settings.check(config)

  assembly.use_compilation_cache(config)
  tokenizer = assembly.tokenizer_of(config)
  model = assembly.model_of(config, tokenizer)
  weights = Weights(*restore_params(workdir / "checkpoints", decoder.abstract_params(model)))
  mesh = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])  # whatever mesh it was trained on
  evaluator = assembly.evaluator_of(config, model, tokenizer, assembly.stream_of(config, tokenizer), mesh)
  rollouts = evaluator.rollouts(weights, config.eval.prompts)
  for trajectory in rollouts["sampled"][: arguments.show]:
    print(f"reward {trajectory.reward:g}: {tokenizer.decode(trajectory.tokens)!r}")
  print(json.dumps({"version": weights.version, "prompts": config.eval.prompts, **accuracies(rollouts)}))
  return 0


def load_config(workdir: Path):
  """The config that a run was started with."""
  config = default.get_config()
  try:
    config.update(read_config(workdir))
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise UserError(f"the config of {workdir} is of another version ({error}); use the one that wrote it") from error
  return config


if __name__ == "__main__":
  settings.main(program)
