"""DAPO-Math with Qwen2.5-7B: single-turn mathematics, evaluated on AIME.

    python -m experiments.plan --config=configs/paper/dapo_math.py --topology=v5p:4x4x4 --role=learner

A prompt of 2,048 tokens and a response of 16,384 (sibling). For plans only as long as
estr_jax.tasks has no task of this name. Values marked "sibling" are the sibling paper's, and those marked "ours" are
nobody else's, since the paper gives neither.
"""

from configs import default
from configs.paper import shapes


def get_config(arg: str = ""):
  if arg:
    raise ValueError(f"configs/paper/dapo_math.py:{arg} is unknown; it takes no argument")
  c = default.get_config()
  shapes.recipe(c)
  shapes.qwen2_5_7b(c)
  c.task.name = "dapo_math"
  c.steps = 200  # ours
  c.sampling.context = 2048 + 16_384  # sibling
  c.batch.groups = 64  # sibling: 512 sequences a minibatch, of 8 samples a prompt
  c.queue.capacity = 256  # ours
  c.staleness.max = 5  # sibling
  c.batch.microbatches = 8  # ours, for v5p:4x4x4: one row a device
  c.mesh.fsdp = 64
  c.slices.learner = "v5p:4x4x4"  # ours
  return c
