"""The losses: named compositions of a mask, a weight and a shaper on an edge of the policy triangle.

The contract. A loss is `loss(policy, batch, **hyper) -> TokenLoss`:

* `policy.logprob` is log pi of the batch's tokens and carries the gradient, as does `policy.vocabulary`. What else of
  `policy` and `batch` can be None is computed only where the loss asks for it (`needs`), and is a constant to it.
* `value` is the token's loss, to be minimised; it is exactly 0, with a gradient of exactly 0, where not `keep`.
* `keep` is a subset of `batch.mask`, detached, and depends on theta where its edge does: it is computed anew at every
  update. It touches nothing else: not the advantages, not the rewards, not the denominator.
* `clipped` marks kept tokens on which a bound acted: a clip took the gradient away, or a method's cap cut a weight.
  Ratios beyond exp(+-MAX_LOG_RATIO) are cut everywhere; that is marked where it takes the gradient of a shaper.
* A token whose stored log-prob is not finite has no ratio, and is not kept by any loss that reads a ratio.
* Masks and weights are detached; a shaper is differentiated.
* Scopes. A token's loss reads that token. A sequence's reads its own segment. A group's or a batch's reads all that
  it is given: such a loss depends on how a batch is split into microbatches, and its entry in METHODS says so.
* Nothing is reduced here: `aggregation` weighs the policy tokens of the whole global batch, kept or not.
* Numbers in `hyper` may be traced, so that one compiled step serves a sweep; words are static, and their choices stand
  in the signature.

* What a loss has of its own are config keys (`options.keys_of`): those of its keyword arguments that have a default.
  The docstring's "Args:" says what they mean, `losses.hyper` what they may be. Those without one are keys that losses
  share.

To add a loss: one function, one entry in METHODS, and one float64 reference in tests/references.py; then
`make pages` writes what is written from the code.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from estr_jax.objective.losses import bands, centering, clips, entropy_scaled, weights
from estr_jax.objective.losses.entropy_scaled import SCORES
from estr_jax.objective.triangle import MissingInput
from estr_jax.structs import Batch, Scores, TokenLoss

Loss = Callable[..., TokenLoss]  # (policy, batch, **hyper)

__all__ = ["LOSSES", "METHODS", "SCORES", "Loss", "Method", "arguments", "keywords", "needs", "own_values"]


@dataclasses.dataclass(frozen=True)
class Method:
  """A loss and its place in the field."""

  loss: Loss
  edge: str  # of its mask or weight, or of its shaper where it has no other; see below
  operator: str  # mask, weight, shaper, and what of
  scope: str  # the widest thing that one token's loss reads: token, sequence, group or batch
  source: str


# Edges: E = pi / mu, U = pi / q, B = q / mu. "E|U" is where `loss.edge` chooses between direct and proximal, "E or B"
# where it does so for a mask or weight. A method of fixed edge that takes `edge` all the same clips there.
METHODS: dict[str, Method] = {
  "estr": Method(
    entropy_scaled.estr, "E", "mask delta^2 / (H + eps) <= tau, clip", "token", "Zhao et al., arXiv 2607.22186"
  ),
  "estr_learner_entropy": Method(
    entropy_scaled.estr_learner_entropy, "E", "ESTR with the entropy of pi", "token", "ablation of ours"
  ),
  "estr_gini": Method(entropy_scaled.estr_gini, "E", "ESTR with 1 - sum mu^2", "token", "ablation of ours"),
  "estr_power": Method(entropy_scaled.estr_power, "E", "ESTR with (H + eps)^power", "token", "ablation of ours"),
  "estr_one_sided": Method(
    entropy_scaled.estr_one_sided, "E", "ESTR for outward moves only", "token", "ablation of ours"
  ),
  "estr_soft": Method(entropy_scaled.estr_soft, "E", "weight exp(-S / 2 tau), clip", "token", "ablation of ours"),
  "fixed_width": Method(entropy_scaled.fixed_width, "E", "mask |delta| <= width, clip", "token", "control of ours"),
  "ppo": Method(clips.ppo, "E|U", "clip", "token", "Schulman et al., arXiv 1707.06347"),
  "dual_clip": Method(clips.dual_clip, "E|U", "clip, bounded at A < 0", "token", "Ye et al., arXiv 1912.09729"),
  "gspo": Method(clips.gspo, "E|U", "clip of the geometric ratio", "sequence", "Zheng et al., arXiv 2507.18071"),
  "gmpo": Method(clips.gmpo, "E|U", "geometric mean of one-sided clips", "sequence", "Zhao et al., arXiv 2507.20673"),
  "sapo": Method(clips.sapo, "E|U", "sigmoid gate", "token", "Gao et al., arXiv 2511.20347"),
  "stable_reinforce": Method(
    clips.stable_reinforce, "E|U", "bound before exp, clip, 3-sigma mask", "batch", "Zhang et al., arXiv 2505.02835"
  ),
  "sat": Method(clips.sat, "E|U", "clip shrunk above a quantile of |delta|", "batch", "arXiv 2607.18722"),
  "bandpo": Method(clips.bandpo, "E|U", "clip to an f-divergence ball", "token", "arXiv 2603.04918"),
  "gapo": Method(clips.gapo, "E|U", "clip by the group's success", "group", "arXiv 2609.00444, second-hand"),
  "clip_cov": Method(clips.clip_cov, "E|U", "clip, mask of high covariance", "batch", "Cui et al., arXiv 2505.22617"),
  "kl_cov": Method(clips.kl_cov, "E|U", "|log r| on high covariance", "batch", "Cui et al., arXiv 2505.22617"),
  "icepop": Method(bands.icepop, "E or B", "mask by a band (on B: weight too), clip", "token", "arXiv 2510.18855"),
  "kpop": Method(bands.kpop, "E", "mask by two Bernoulli KLs, clip", "token", "Ring team's notes"),
  "ipo": Method(bands.ipo, "E", "mask |pi - mu| <= bound", "token", "prime-rl"),
  "dppo_tv": Method(bands.dppo_tv, "E", "mask of outward moves by TV, capped weight", "token", "arXiv 2602.04879"),
  "dppo_kl": Method(bands.dppo_kl, "E", "mask of outward moves by KL, capped weight", "token", "arXiv 2602.04879"),
  "m2po": Method(bands.m2po, "E", "mask by the second moment", "batch", "arXiv 2510.01161, second-hand"),
  "trm": Method(bands.trm, "E", "mask by the worst token", "sequence", "arXiv 2512.23075"),
  "opsm": Method(bands.opsm, "E|U", "mask of sequences at A < 0, clip", "sequence", "DeepSeek-V3.2"),
  "tis": Method(weights.tis, "E or B", "truncated weight", "token or sequence", "Yao et al., Flash-RL"),
  "mis": Method(weights.mis, "E or B", "masked weight", "token or sequence", "Liu & Li, RL collapse"),
  "decoupled": Method(weights.decoupled, "B, U", "weight, clip", "token", "Hilton et al., arXiv 2110.00641"),
  "a3po": Method(weights.a3po, "E", "decoupled by interpolation", "token", "arXiv 2512.06547"),
  "cispo": Method(weights.cispo, "E|U", "clipped weight", "token", "MiniMax-M1, arXiv 2506.13585"),
  "gipo": Method(weights.gipo, "E|U", "Gaussian weight in log r", "token", "arXiv 2603.03955"),
  "vespo": Method(weights.vespo, "E|U", "weight W^k exp(l (1 - W))", "sequence", "arXiv 2602.10693"),
  "vcpo": Method(weights.vcpo, "E", "truncated weight, own baseline", "group", "arXiv 2602.17616, a proxy norm"),
  "asympo": Method(weights.asympo, "none", "weight 1 / mean NLL", "sequence", "arXiv 2606.03070"),
  "stare": Method(weights.stare, "E|U", "dual clip, weight on surprise", "batch", "arXiv 2606.19236"),
  "score_centering": Method(centering.score_centering, "E", "weight less its mean", "token", "arXiv 2609.20807"),
}

LOSSES: dict[str, Loss] = {name: method.loss for name, method in METHODS.items()}


def keywords(loss: Callable[..., Any]) -> list[str]:
  """The names of the hyper-parameters of a loss, or of its score."""
  return [p.name for p in inspect.signature(loss).parameters.values() if p.kind is p.KEYWORD_ONLY]


def own_values(name: str, keys: Mapping[str, Any]) -> Mapping[str, Any]:
  """What the `loss` keys of a config hold for one loss alone; many have nothing."""
  return keys.get(name, {})


def arguments(name: str, loss: Loss, keys: Mapping[str, Any]) -> dict[str, Any]:
  """The keyword arguments of a loss from the `loss` keys of a config: its own first, then those that losses share."""
  own = own_values(name, keys)
  return {key: own[key] if key in own else keys[key] for key in keywords(loss)}


def needs(loss: Loss, name: str) -> bool:
  """Whether a loss, its hyper-parameters bound, reads "proximal", "reference", "entropy" or "vocabulary".

  Found by tracing it without that: the code of the loss is the only place that says so.
  """

  def of(dtype: str, *more: int) -> Any:
    """What stands for a jax.Array."""
    return jax.ShapeDtypeStruct((1, 1, *more), dtype)

  token, integer, boolean = of("float32"), of("int32"), of("bool")
  given = dict.fromkeys(("proximal", "reference", "entropy"), token)
  given |= {"vocabulary": of("float32", 2), name: None}
  policy = Scores(token, given["entropy"], given["entropy"], given["vocabulary"])
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
    proximal=given["proximal"],
    reference=given["reference"],
    vocabulary=given["vocabulary"],
  )
  try:
    jax.eval_shape(loss, policy, batch)
  except MissingInput:
    return True
  return False
