"""The losses: named compositions of a mask, a weight and a shaper on an edge of the policy triangle.

The contract. A loss is `loss(policy, batch, **hyper) -> TokenLoss`:

* `policy.logprob` is log pi of the batch's tokens and carries the gradient; `policy.entropy` is the learner's, there
  only where the loss asks for it. Everything else is a constant.
* `value` is the token's loss, to be minimised; it is exactly 0, with a gradient of exactly 0, where not `keep`.
* `keep` is a subset of `batch.mask`, detached, and depends on theta where its edge does: it is computed anew at every
  update. It touches nothing else: not the advantages, not the rewards, not the denominator.
* `clipped` marks kept tokens on which a bound acted: a clip took the gradient away, or a weight was cut.
* A token whose stored log-prob is not finite has no ratio, and is not kept by any loss that reads a ratio.
* Masks and weights are detached; a shaper is differentiated.
* Scopes. A token's loss reads that token. A sequence's reads its own segment. A group's or a batch's reads all that
  it is given: such a loss depends on how a batch is split into microbatches, and its entry in METHODS says so.
* Nothing is reduced here: `aggregation` weighs the policy tokens of the whole global batch, kept or not.
* Numbers in `hyper` may be traced, so that one compiled step serves a sweep; strings and bools are static.

To add a loss: one function, one entry in METHODS, its defaults in configs/default.py and one float64 reference in the
tests.
"""

import dataclasses
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp

from estr_jax.objective.losses.bands import icepop, kpop
from estr_jax.objective.losses.clips import ppo
from estr_jax.objective.losses.entropy_scaled import (
  SCORES,
  estr,
  estr_gini,
  estr_learner_entropy,
  estr_one_sided,
  estr_power,
  estr_soft,
  fixed_width,
)
from estr_jax.objective.triangle import MissingInput
from estr_jax.structs import Batch, Scores, TokenLoss

Loss = Callable[..., TokenLoss]  # (policy, batch, **hyper)

__all__ = ["LOSSES", "METHODS", "SCORES", "Loss", "Method", "keywords", "needs"]


@dataclasses.dataclass(frozen=True)
class Method:
  """A loss and its place in the field."""

  loss: Loss
  edge: str  # E, U, B, or E|U where the config chooses; none where no ratio is read
  operator: str  # mask, weight, shaper, and what of
  scope: str  # the widest thing that one token's loss reads: token, sequence, group or batch
  source: str


_ESTR = "Zhao et al., arXiv 2607.22186"

METHODS: dict[str, Method] = {
  "estr": Method(estr, "E", "mask by delta^2 / (H + eps), clip", "token", _ESTR),
  "ppo": Method(ppo, "E|U", "clip", "token", "Schulman et al., arXiv 1707.06347"),
  "icepop": Method(icepop, "E|B", "mask by a band (and weight on B), clip", "token", ""),
  "kpop": Method(kpop, "E", "mask by two Bernoulli KLs, clip", "token", ""),
  "fixed_width": Method(fixed_width, "E", "mask by |delta|, clip", "token", "control of ours"),
  "estr_learner_entropy": Method(estr_learner_entropy, "E", "mask by H of pi, clip", "token", "ablation of ours"),
  "estr_gini": Method(estr_gini, "E", "mask by Gini impurity, clip", "token", "ablation of ours"),
  "estr_power": Method(estr_power, "E", "mask by a power of H, clip", "token", "ablation of ours"),
  "estr_one_sided": Method(estr_one_sided, "E", "mask of outward moves, clip", "token", "ablation of ours"),
  "estr_soft": Method(estr_soft, "E", "weight by S, clip", "token", "ablation of ours"),
}

LOSSES: dict[str, Loss] = {name: method.loss for name, method in METHODS.items()}


def keywords(loss: Loss) -> list[str]:
  """The names of a loss's hyper-parameters."""
  return [p.name for p in inspect.signature(loss).parameters.values() if p.kind is p.KEYWORD_ONLY]


def needs(loss: Loss, name: str) -> bool:
  """Whether a loss, its hyper-parameters bound, reads "proximal" or "reference" (batch), or "entropy" (policy).

  Found by tracing it without that: the code of the loss is the only place that says so.
  """
  token = jax.ShapeDtypeStruct((1, 1), jnp.float32)
  integer, boolean = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1, 1), jnp.bool_)
  floats = {"proximal": token, "reference": token, "entropy": token} | {name: None}
  policy = Scores(token, floats["entropy"], token)
  batch = Batch(
    tokens=integer,
    mask=boolean,
    logprob=token,
    entropy=token,
    gini=token,
    staleness=integer,
    segment=integer,
    group=integer,
    reward=token,
    advantage=token,
    proximal=floats["proximal"],
    reference=floats["reference"],
  )
  try:
    jax.eval_shape(loss, policy, batch)
  except MissingInput:
    return True
  return False
