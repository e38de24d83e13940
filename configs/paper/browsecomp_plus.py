"""BrowseComp-Plus with Qwen3-30B-A3B: search over many turns, judged by a model.

    python -m experiments.plan --config=configs/paper/browsecomp_plus.py --topology=v5p:4x4x4 --role=learner

A prompt of 2,048 tokens and 32,768 for all responses (sibling). For plans only as long as
estr_jax.tasks has no task of this name. Values marked "sibling" are the sibling paper's, and those marked "ours" are
nobody else's, since the paper gives neither.
"""

from configs import default
from configs.paper import shapes


def get_config(arg: str = ""):
  if arg:
    raise ValueError(f"configs/paper/browsecomp_plus.py:{arg} is unknown; it takes no argument")
  c = default.get_config()
  shapes.recipe(c)
  shapes.qwen3_30b_a3b(c)
  c.task.name = "search"
  c.steps = 100  # ours
  c.sampling.context = 2048 + 32_768  # sibling
  c.batch.groups = 32  # ours
  c.queue.capacity = 128  # ours
  c.staleness.max = 6  # sibling
  c.batch.microbatches = 4  # ours, for v5p:4x4x4: one row a device
  c.mesh.fsdp = 8
  c.mesh.expert = 8
  return c
