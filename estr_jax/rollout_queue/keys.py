"""The keys of the queue, and of the staleness that it bounds."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from estr_jax.options import Key, Keys, Range, under

STALENESS: Keys = under(
  "staleness",
  {
    "max": Key(4, "async: no token trained on is older than this", Range("versions", least=0)),
    "admission": Key("wait", "async: wait for groups that would grow too old, or drop them", choices=("wait", "drop")),
  },
)

QUEUE: Keys = under(
  "queue",
  {
    "capacity": Key(64, "groups leased to samplers or waiting for the learner", Range("groups", above=0)),
    "lease_timeout_s": Key(30.0, "a sampler silent for longer gives its groups back", Range("seconds", above=0)),
    "deadline_s": Key(
      900.0,
      "the longest wait of the learner for a batch, and of a sampler for the learner",
      Range("seconds", above=0),
    ),
  },
)


def rules(c: ConfigDict) -> Iterator[str]:
  """What is wrong between keys."""
  if c.queue.capacity < c.batch.groups:
    yield (
      f"queue.capacity={c.queue.capacity} is below batch.groups={c.batch.groups}, so no batch could ever form; raise it"
    )
