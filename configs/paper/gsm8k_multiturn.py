"""GSM8K with Qwen2.5-7B: several turns with a tool, of which the sibling allows five.

    python -m experiments.plan --config=configs/paper/gsm8k_multiturn.py --role=learner
    python -m experiments.train --config=configs/paper/gsm8k_multiturn.py:smoke --workdir=DIR

A prompt of 2,048 tokens and 8,192 for all responses (sibling). The task itself is not in estr_jax.tasks yet, so this
config can be planned but not trained. `:smoke` can: the same recipe on a tiny model of the same family and the task
`calculator`, in about a minute on a laptop. Whose the values are: configs/paper/recipe.py.
"""

from configs.paper import recipe, shapes


def get_config(arg: str = ""):
  c = recipe.begin("gsm8k_multiturn", arg)
  shapes.qwen2_5_7b(c)
  c.task.name = "gsm8k"
  c.steps = 200  # ours
  c.sampling.context = 2048 + 8192  # sibling
  c.batch.groups = 32  # sibling: 256 sequences a minibatch, of 8 samples a prompt
  c.batch.microbatches = 4  # ours
  c.queue.capacity = 128  # ours
  c.staleness.max = 13  # sibling
  c.slices.sampler, c.slices.samplers, c.sampling.slots = "v6e:2x2", 16, 64  # ours
  c.sampling.mesh.tensor = 4
  return recipe.finish(c, arg, smoke_task="calculator")
