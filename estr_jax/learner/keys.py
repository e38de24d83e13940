"""The keys of the update: batch, optimizer, scoring, and the supervised start."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from estr_jax.learner.optimizer import DECAYS, OPTIMIZERS
from estr_jax.model.keys import undivided
from estr_jax.options import BOUND, NOT_NEGATIVE, POSITIVE, Idle, Key, Keys, Range, under

WARM_START: Keys = under(
  "warm_start",
  {
    "steps": Key(
      0, "supervised training on the task's demonstrations before the first update; 0: none", Range("updates", least=0)
    ),
    "batch": Key(64, "demonstrations of a supervised update", POSITIVE),
    "learning_rate": Key(3e-3, "learning rate of the supervised updates", POSITIVE),
    "demonstrations": Key(20_000, "how many demonstrations are made", POSITIVE),
  },
)

BATCH: Keys = under(
  "batch",
  {
    "groups": Key(16, "prompts of an update", POSITIVE),
    "group_size": Key(8, "samples of a prompt", POSITIVE),
    "microbatches": Key(1, "parts in which a batch's gradient is computed, to save memory", POSITIVE),
  },
)

_UNDER_SGD = (Idle("under sgd", lambda c: c.optimizer.name == "sgd"),)
_DECAY = Range(least=0, below=1)

OPTIMIZER: Keys = under(
  "optimizer",
  {
    "name": Key("adamw", "the optimizer", choices=sorted(OPTIMIZERS)),
    "learning_rate": Key(1e-3, "learning rate after the warm-up", POSITIVE),
    "warmup_steps": Key(0, "how long the learning rate rises to that", Range("updates", least=0)),
    "decay": Key(
      "constant", "how the learning rate falls from there to 0 at the last update; constant: not at all", choices=DECAYS
    ),
    "b1": Key(0.9, "decay of the mean of gradients, or momentum", _DECAY),
    "b2": Key(0.95, "decay of the mean of squared gradients", _DECAY, idle=_UNDER_SGD),
    "eps": Key(1e-8, "added to the root of the mean of squared gradients", POSITIVE, idle=_UNDER_SGD),
    "weight_decay": Key(
      0.0,
      "share of a weight that an update takes off, times the learning rate; norms and biases are exempt",
      NOT_NEGATIVE,
    ),
    "clip_norm": Key(1.0, "largest global norm of the gradient", BOUND),
    "ess_step": Key(
      False, "whether the learning rate is multiplied by sqrt(effective sample size / sequences), as in VCPO"
    ),
  },
)

LEARNER: Keys = under(
  "learner",
  {
    "score_chunk": Key(
      2048, "entries of the vocabulary whose logits are in memory at once; a multiple of 128 on a TPU", POSITIVE
    ),
    "diagnostics": Key(True, "whether every row of metrics has the diagnostics of the objective"),
  },
)


def rules(c: ConfigDict) -> Iterator[str]:
  """What is wrong between keys."""
  rows = c.batch.groups * c.batch.group_size
  yield from undivided(c, "batch.groups x batch.group_size", rows, "mesh", ["batch.microbatches"])
  yield from undivided(c, "warm_start.batch", c.warm_start.batch if c.warm_start.steps else 0, "mesh")
  if c.batch.group_size == 1:
    yield "batch.group_size=1 leaves every advantage at 0, since it is relative to the group; take 2 or more"
