"""The keys of a run as a whole: how it goes, how long, and when it is measured and saved."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from estr_jax.model.keys import undivided
from estr_jax.options import NOT_NEGATIVE, POSITIVE, Key, Keys, Range, under

MODES = ("async", "sync", "simulated")

RUN: Keys = {
  "seed": Key(0, "from which prompts, new weights, sampling and evaluation are drawn", Range(least=0, below=2**32)),
  "mode": Key(
    "async",
    "async: learner and samplers are processes joined by gRPC. sync: one process, each batch sampled by the newest "
    "weights. simulated: one process, each token sampled by the version that `staleness` asks for",
    choices=MODES,
  ),
  "steps": Key(100, "length of the run", Range("optimizer updates", above=0)),
  "cache_dir": Key("~/.cache/estr_jax", "prepared prompts, warm starts and compiled programs, shared by all runs"),
}

CHECKPOINT: Keys = under("checkpoint", {"every": Key(20, "updates between two checkpoints", POSITIVE)})

EVAL: Keys = under(
  "eval",
  {
    "prompts": Key(512, "held-out prompts of the evaluations before the first update and after the last", POSITIVE),
    "every": Key(20, "updates between two evaluations during the run; 0: none", NOT_NEGATIVE),
    "every_prompts": Key(128, "held-out prompts of an evaluation during the run", POSITIVE),
    "slots": Key(128, "sequences that are evaluated side by side", POSITIVE),
  },
)


def rules(c: ConfigDict) -> Iterator[str]:
  """What is wrong between keys."""
  yield from undivided(c, "eval.slots", c.eval.slots, "mesh")
