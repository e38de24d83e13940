"""The quickstart: a tiny character model learns to use a calculator, asynchronously, in a few minutes on two cores.

    python -m experiments.train --config=configs/quickstart.py --workdir=DIR

A supervised warm start leaves a policy that answers from memory more often than it calls the calculator, and is then
wrong. ESTR, with a learner and a sampler process joined by gRPC, teaches it that the tool pays. `:smoke` is the same
program cut down to a few seconds, for tests.

Expect, with seed 0: held-out accuracy from 0.26 to 0.96 sampled and from 0.01 to 0.998 greedy, in about two minutes and
a half on two CPU cores after the installation. One seed; other machines round differently.
"""

from configs import default


def get_config(arg: str = ""):
  c = default.get_config()
  c.task.name = "calculator"
  c.warm_start.steps = 500
  c.steps = 150
  c.optimizer.decay = "linear"
  c.staleness.max = 2
  c.eval.every = 25
  if arg == "smoke":
    c.warm_start.steps = 20
    c.warm_start.demonstrations = 200
    c.steps = 2
    c.batch.groups = 2
    c.batch.group_size = 4
    c.sampling.slots = 8
    c.eval.prompts = 8
    c.eval.every_prompts = 4
    c.eval.slots = 8
  elif arg:
    raise ValueError(f"configs/quickstart.py:{arg} is unknown; its one argument is :smoke")
  return c
