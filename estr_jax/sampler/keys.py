"""The keys of sampling."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from estr_jax.model.keys import mesh, undivided
from estr_jax.options import POSITIVE, Idle, Key, Keys, Range, under

_OWN_DEVICES = Idle("outside mode=async, where the learner samples on its own mesh", lambda c: c.mode != "async")

SAMPLING: Keys = under(
  "sampling",
  {
    "slots": Key(64, "sequences that grow side by side in one sampler", POSITIVE),
    "context": Key(36, "length of a sequence, prompt included", Range("tokens", above=0)),
    "chunk": Key(8, "decode steps between two looks of the host; new weights are taken there", POSITIVE),
    "temperature": Key(1.0, "by which logits are divided, in sampler and learner", POSITIVE),
    "top_p": Key(1.0, "anything but 1 is refused for training"),
    "top_k": Key(0, "0 is off; anything else is refused for training"),
    "record_vocabulary": Key(
      False,
      "whether log mu of the whole vocabulary travels with every token, as some losses need; for vocabularies of up to "
      "1,024",
    ),
    "record_routing": Key(
      False,
      "of a mixture of experts: whether a token's experts travel with it, layers x experts_per_token bytes, and the "
      "learner takes them in place of its own routers' choice, which rounding and new weights move elsewhere",
    ),
    "rebuild_cache": Key(
      False, "whether the attention cache of unfinished sequences is recomputed when new weights arrive"
    ),
  },
) | mesh("sampling.mesh", idle=(_OWN_DEVICES,))


def rules(c: ConfigDict) -> Iterator[str]:
  """What is wrong between keys."""
  truncated = (
    "the probabilities of truncated sampling are renormalised over the surviving tokens, which shifts every log-ratio "
    "and shrinks the entropy that scales the trust region; leave top_p=1 and top_k=0"
  )
  if c.sampling.top_p != 1.0:
    yield f"sampling.top_p={c.sampling.top_p} is refused for training: {truncated}"
  if c.sampling.top_k != 0:
    yield f"sampling.top_k={c.sampling.top_k} is refused for training: {truncated}"
  yield from undivided(c, "sampling.slots", c.sampling.slots, "sampling.mesh" if c.mode == "async" else "mesh")
