"""GSM8K with Qwen2.5-7B: several turns with a tool, of which the sibling allows five.

    python -m experiments.plan --config=configs/paper/gsm8k_multiturn.py --topology=v5p:4x4x4 --role=learner

A prompt of 2,048 tokens and 8,192 for all responses (sibling). For plans only as long as
estr_jax.tasks has no task of this name. Values marked "sibling" are the sibling paper's, and those marked "ours" are
nobody else's, since the paper gives neither.
"""

from configs import default
from configs.paper import shapes


def get_config(arg: str = ""):
  if arg:
    raise ValueError(f"configs/paper/gsm8k_multiturn.py:{arg} is unknown; it takes no argument")
  c = default.get_config()
  shapes.recipe(c)
  shapes.qwen2_5_7b(c)
  c.task.name = "gsm8k"
  c.steps = 200  # ours
  c.sampling.context = 2048 + 8192  # sibling
  c.batch.groups = 32  # sibling: 256 sequences a minibatch, of 8 samples a prompt
  c.queue.capacity = 128  # ours
  c.staleness.max = 13  # sibling
  c.batch.microbatches = 4  # ours, for v5p:4x4x4: one row a device
  c.mesh.fsdp = 64
  c.slices.learner = "v5p:4x4x4"  # ours
  return c
