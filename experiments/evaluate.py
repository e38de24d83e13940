"""Evaluates the newest checkpoint of a run on held-out prompts, sampled and greedy.

    python -m experiments.evaluate --workdir=DIR [--prompts=512] [--show=3]

The config is the run's own; the prompts and random keys are those of the run's evaluations, so the final evaluation of
a finished run is reproduced.
"""

import argparse
import json

from estr_jax.run import api, command_line


def program() -> int:
  parser = argparse.ArgumentParser(prog="python -m experiments.evaluate", description="Evaluates a run.")
  parser.add_argument("--workdir", required=True, help="the folder of the run")
  parser.add_argument("--prompts", type=int, help="held-out prompts; as many as the run's own evaluation by default")
  parser.add_argument("--show", type=int, default=3, help="how many sampled trajectories to print")
  arguments = parser.parse_args()
  found = api.evaluate(arguments.workdir, prompts=arguments.prompts)
  for trajectory in found.trajectories["sampled"][: arguments.show]:
    print(f"reward {trajectory.reward:g}: {found.tokenizer.decode(trajectory.tokens)!r}")
  accuracy = {f"eval/{kind}_accuracy": value for kind, value in found.accuracy.items()}
  print(json.dumps({"version": found.version, "prompts": found.prompts, **accuracy}))
  return 0


if __name__ == "__main__":
  command_line.main(program)
