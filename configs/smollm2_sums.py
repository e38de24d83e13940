"""SmolLM2-135M-Instruct learns sums of two digits, asynchronously, on two cores.

    make smollm2-sums

or, with the folder that `make smollm2` fetched,

    python -m experiments.train --config=configs/smollm2_sums.py --workdir=DIR --config.model.folder=FOLDER

The same program as the quickstart, on a real model: two processes, gRPC, ESTR on the direct edge, no warm start. The
model knows the sums; what it learns is to answer with the number and to stop. `:smoke` is cut down for tests.

Expect, with seed 0: held-out accuracy on 512 prompts from 0.23 to 0.86 sampled and from 0.37 to 0.92 greedy, in 13
minutes on two CPU cores. One seed; other machines, and other timings of the two processes, give other digits.
"""

from configs import default


def get_config(arg: str = ""):
  c = default.get_config()
  c.task.name = "sums"
  c.model.folder = "~/.cache/estr_jax/smollm2-135m-instruct"
  c.steps = 16
  c.batch.groups = 6
  c.batch.group_size = 8
  c.batch.microbatches = 3
  c.optimizer.learning_rate = 1e-5
  c.optimizer.warmup_steps = 2
  c.sampling.slots = 48
  c.sampling.context = 40
  c.sampling.chunk = 4
  c.staleness.max = 2
  c.queue.capacity = 18
  c.transport.weights_dtype = "bfloat16"
  c.checkpoint.every = 10
  c.eval.prompts = 512
  c.eval.every = 0
  c.eval.slots = 128
  if arg == "smoke":
    c.steps = 2
    c.batch.groups = 2
    c.batch.group_size = 2
    c.batch.microbatches = 2
    c.sampling.slots = 4
    c.eval.prompts = 4
    c.eval.every_prompts = 4
    c.eval.slots = 4
  elif arg:
    raise ValueError(f"configs/smollm2_sums.py:{arg} is unknown; its one argument is :smoke")
  return c
