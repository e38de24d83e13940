"""DAPO-Math with Qwen2.5-7B: single-turn mathematics, evaluated on AIME.

    python -m experiments.plan --config=configs/paper/dapo_math.py --role=learner
    python -m experiments.train --config=configs/paper/dapo_math.py:smoke --workdir=DIR

A prompt of 2,048 tokens and a response of 16,384 (sibling). The task itself is not in estr_jax.tasks yet, so this
config can be planned but not trained. `:smoke` can: the same recipe on a tiny model of the same family and the task
`arithmetic`, in about a minute on a laptop. Whose the values are: configs/paper/recipe.py.
"""

from configs.paper import recipe, shapes


def get_config(arg: str = ""):
  c = recipe.begin("dapo_math", arg)
  shapes.qwen2_5_7b(c)
  c.task.name = "dapo_math"
  c.steps = 200  # ours
  c.sampling.context = 2048 + 16_384  # sibling
  c.batch.groups = 64  # sibling: 512 sequences a minibatch, of 8 samples a prompt
  c.batch.microbatches = 8  # ours
  c.queue.capacity = 256  # ours
  c.staleness.max = 5  # sibling
  c.slices.sampler, c.slices.samplers, c.sampling.slots = "v6e:2x2", 16, 64  # ours
  c.sampling.mesh.tensor = 4
  return recipe.finish(c, arg, smoke_task="arithmetic")
