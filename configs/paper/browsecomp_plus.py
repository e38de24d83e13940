"""BrowseComp-Plus with Qwen3-30B-A3B: search over many turns, judged by a model.

    python -m experiments.plan --config=configs/paper/browsecomp_plus.py --role=learner
    python -m experiments.train --config=configs/paper/browsecomp_plus.py:smoke --workdir=DIR

A prompt of 2,048 tokens and 32,768 for all responses (sibling). The task itself is not in estr_jax.tasks yet, so this
config can be planned but not trained. `:smoke` can: the same recipe on a tiny model of the same family and the task
`calculator`, in about a minute on a laptop. Whose the values are: configs/paper/recipe.py.
"""

from configs.paper import recipe, shapes


def get_config(arg: str = ""):
  c = recipe.begin("browsecomp_plus", arg)
  shapes.qwen3_30b_a3b(c)
  c.task.name = "search"
  c.steps = 100  # ours
  c.sampling.context = 2048 + 32_768  # sibling
  c.batch.groups = 32  # ours
  c.batch.microbatches = 4  # ours
  c.queue.capacity = 128  # ours
  c.staleness.max = 6  # sibling
  c.slices.sampler, c.slices.samplers, c.sampling.slots = "v6e:2x4", 16, 16  # ours
  c.sampling.mesh.tensor, c.sampling.mesh.expert = 4, 2
  return recipe.finish(c, arg, smoke_task="calculator")
