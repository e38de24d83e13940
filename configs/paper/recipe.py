"""What the paper's settings share.

Values marked "paper" are the paper's; "sibling" are those of a sibling paper of the same group, since this one does not
say; "ours" are nobody else's, since neither does.
"""

from ml_collections import ConfigDict

from configs import default


def begin(name: str, arg: str) -> ConfigDict:
  """The shared part. Raises ValueError for an argument other than smoke."""
  if arg not in ("", "smoke"):
    raise ValueError(f"configs/paper/{name}.py:{arg} is unknown; its one argument is :smoke")
  c = default.get_config()
  c.mode = "async"
  c.loss.name = "estr"
  c.loss.estr.eps = 0.01  # paper
  c.loss.estr.tau = 1.0  # ours
  c.loss.clip_low, c.loss.clip_high = 0.2, 0.28  # sibling
  c.loss.aggregation = "token_mean"  # paper
  c.advantage.name = "grpo"  # paper
  c.optimizer.learning_rate = 1e-6  # sibling
  c.loss.kl.coefficient = c.loss.entropy.coefficient = 0.0  # sibling
  c.sampling.temperature = 1.0  # ours
  c.batch.group_size = 8  # sibling
  c.model.dtype = c.transport.weights_dtype = "bfloat16"  # ours
  c.model.remat = "attention"  # ours
  c.sampling.chunk = 32  # ours
  c.staleness.segment_tokens = 2048  # ours; simulated staleness only
  # Ours: one row of a microbatch on each of 64 chips; docs/tpu_plans.md has other slices.
  c.slices.learner, c.mesh.fsdp = "v5p:4x4x4", 64
  return c


def finish(c: ConfigDict, arg: str, *, smoke_task: str) -> ConfigDict:
  """The config itself, or for :smoke the same recipe on a model of the same family that a laptop trains in a minute."""
  return _shrink(c, smoke_task) if arg else c


def _shrink(c: ConfigDict, task: str) -> ConfigDict:
  tiny = default.get_config()
  c.task.name = task
  c.steps = 3
  for key in ("vocabulary", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width"):
    c.model[key] = tiny.model[key]
  if c.model.experts:
    c.model.experts, c.model.experts_per_token, c.model.expert_mlp_width = 4, 2, 64
  c.model.dtype = c.transport.weights_dtype = "float32"
  c.mesh, c.sampling.mesh, c.slices = tiny.mesh, tiny.sampling.mesh, tiny.slices
  c.sampling.context, c.sampling.chunk, c.sampling.slots = tiny.sampling.context, tiny.sampling.chunk, 8
  c.staleness.segment_tokens = tiny.staleness.segment_tokens
  c.batch.groups, c.batch.group_size, c.batch.microbatches, c.queue.capacity = 2, 4, 2, 8
  c.eval.prompts, c.eval.every_prompts, c.eval.slots = 8, 4, 8
  return c
