"""The keys of the objective: which loss, on which edge, with what besides, and which advantage.

What a loss has of its own is read off the loss (`options.keys_of`).
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from estr_jax.objective.advantages import ESTIMATORS, WITHOUT_DEVIATION
from estr_jax.objective.aggregation import AGGREGATIONS
from estr_jax.objective.losses import SCORES, Method, keywords, needs, own_values
from estr_jax.objective.penalties import ANCHORS, KL_ESTIMATORS
from estr_jax.objective.triangle import EDGES
from estr_jax.options import BOUND, NOT_NEGATIVE, POSITIVE, Idle, Key, Keys, Range, Word, keys_of, under

_CALIBRATE = Word("calibrate:FRACTION with a fraction between 0 and 1", lambda value: 0 < (fraction_of(value) or 0) < 1)


def fraction_of(tau: Any) -> float | None:
  """FRACTION of tau=calibrate:FRACTION, the share of tokens to be masked; None where tau is anything else."""
  word, colon, fraction = str(tau).partition(":")
  try:
    return float(fraction) if word == "calibrate" and colon else None
  except ValueError:
    return None


def keys(methods: Mapping[str, Method]) -> Keys:
  """For these losses by name."""

  def not_taken(key: str) -> Idle:
    def idle(c: ConfigDict) -> bool:
      return key not in keywords(methods[c.loss.name].loss) or key in own_values(c.loss.name, c.loss)

    return Idle("on a loss that does not take it (docs/methods.md)", idle)

  def weighed(c: ConfigDict) -> bool:
    weight = c.loss.name == "tis" or (c.loss.name == "mis" and c.loss.mis.scope != "geometric")
    return weight and c.loss.edge == "direct"

  no_clip = Idle("on the direct edge of tis and mis, where a weight stands in for the clip", weighed)
  no_kl = (Idle("while loss.kl.coefficient=0", lambda c: not c.loss.kl.coefficient),)
  no_target = (Idle("while loss.entropy.target=0", lambda c: not c.loss.entropy.target),)
  own_baseline = Idle("on loss.name=vcpo, which has a baseline of its own", lambda c: c.loss.name == "vcpo")
  no_deviation = Idle(
    f"on advantage.name={' or '.join(WITHOUT_DEVIATION)}", lambda c: c.advantage.name in WITHOUT_DEVIATION
  )
  loss: Keys = {
    "name": Key("estr", "the method; docs/methods.md describes them", choices=sorted(methods)),
    "edge": Key(
      "direct",
      "direct: the clip acts on pi / mu. proximal: on pi / q, q recomputed before each update. Some losses fix theirs",
      choices=EDGES,
      idle=(not_taken("edge"),),
    ),
    "clip_low": Key(0.2, "a ratio is cut at 1 - this; BRACE's", BOUND, idle=(not_taken("clip_low"), no_clip)),
    "clip_high": Key(0.28, "a ratio is cut at 1 + this; BRACE's", BOUND, idle=(not_taken("clip_high"), no_clip)),
    "aggregation": Key(
      "token_mean",
      "how tokens are weighed (docs/methods.md); sequence_sum divides by sampling.context",
      choices=sorted(AGGREGATIONS),
    ),
    "entropy.coefficient": Key(
      0.0, "coefficient of a bonus on the learner's entropy; with a target, the first", NOT_NEGATIVE
    ),
    "entropy.target": Key(
      0.0,
      "target of the entropy; above 0 the coefficient is adapted, and acts only while the batch's recorded entropy is "
      "below it",
      Range("nats", least=0),
    ),
    "entropy.step": Key(
      1e-4, "change of the adapted coefficient in an update; Skywork-OR1's", POSITIVE, idle=no_target
    ),
    "entropy.largest": Key(0.005, "largest adapted coefficient; Skywork-OR1's", POSITIVE, idle=no_target),
    "kl.coefficient": Key(0.0, "coefficient of a penalty on the KL from loss.kl.anchor", NOT_NEGATIVE),
    "kl.estimator": Key(
      "k2",
      "how the KL is estimated; as a loss only k2 has the gradient of KL(pi || anchor)",
      choices=sorted(KL_ESTIMATORS),
      idle=no_kl,
    ),
    "kl.anchor": Key(
      "reference",
      "from what the KL is taken. reference: the weights before the first update. proximal: q. direct: mu",
      choices=ANCHORS,
      idle=no_kl,
    ),
    "router_balance": Key(
      0.0,
      "of a mixture of experts: coefficient of a penalty on uneven load, the mean over layers of experts x sum (share "
      "of choices x mean probability), which is 1 where the load is even",
      NOT_NEGATIVE,
    ),
  }
  for name, method in methods.items():
    loss |= under(name, own_keys(name, method))
  advantage: Keys = {
    "name": Key(
      "grpo", "how rewards become advantages (docs/methods.md)", choices=sorted(ESTIMATORS), idle=(own_baseline,)
    ),
    "eps": Key(1e-6, "added to the standard deviation", POSITIVE, idle=(own_baseline, no_deviation)),
  }
  return under("loss", loss) | under("advantage", advantage)


def own_keys(name: str, method: Method) -> Keys:
  """What the loss declares, refused while another loss is chosen."""
  elsewhere = Idle(f"while loss.name is not {name}", lambda c: c.loss.name != name)
  keys = {}
  for key, declared in keys_of(method.loss).items():
    word = _CALIBRATE if key == "tau" and name in SCORES else None
    keys[key] = Key(declared.default, declared.meaning, declared.range, declared.choices, (elsewhere,), word)
  return keys


def calibrated_fraction(c: ConfigDict) -> float | None:
  """The share of tokens that the loss's tau is to mask, where it is to be calibrated."""
  return fraction_of(c.loss[c.loss.name].tau) if c.loss.name in SCORES else None


def first_calibration(c: ConfigDict) -> int:
  """The first version whose batch can calibrate tau: past the warm-up, whose updates are smaller than the run's."""
  planned = c.staleness.intra + c.staleness.inter if c.mode == "simulated" else 1
  return c.optimizer.warmup_steps + planned


def rules(c: ConfigDict, methods: Mapping[str, Method], arguments: Mapping[str, Any]) -> Iterator[str]:
  """What is wrong between keys; `arguments` are those of the configured loss."""
  yield from _calibration(c)
  for name in methods:
    own = own_values(name, c.loss)
    for low, high in (("low", "high"), ("ratio_low", "ratio_high")):
      if low in own and high in own and not own[low] < own[high]:
        yield (
          f"loss.{name}.{low}={own[low]} is not below loss.{name}.{high}={own[high]}, so nothing lies between them"
        )
  bonus, kl, name = c.loss.entropy, c.loss.kl, c.loss.name
  if bonus.target and bonus.coefficient > bonus.largest:
    yield (
      f"loss.entropy.coefficient={bonus.coefficient} is above loss.entropy.largest={bonus.largest}, to which the first "
      "update would cut it; raise the one or lower the other"
    )
  if not c.sampling.record_vocabulary and needs(functools.partial(methods[name].loss, **arguments), "vocabulary"):
    yield f"loss.name={name} reads the whole distribution of each token; set sampling.record_vocabulary=True"
  if methods[name].scope == "group" and c.batch.microbatches > 1:
    yield (
      f"loss.name={name} compares the samples of a prompt, which batch.microbatches={c.batch.microbatches} tears "
      "apart; set it to 1"
    )
  if kl.coefficient and kl.anchor == "proximal":
    yield "loss.kl.anchor=proximal is always 0, since a batch is used for one update; take reference or direct"


def _calibration(c: ConfigDict) -> Iterator[str]:
  if calibrated_fraction(c) is None:
    return
  given, s = f"loss.{c.loss.name}.tau={c.loss[c.loss.name].tau}", c.staleness
  fresh = {
    "sync": "in mode=sync nothing is ever stale",
    "simulated": "with staleness.intra=0 and staleness.inter=0 none is" if s.intra + s.inter == 0 else None,
    "async": "with staleness.max=0 none is" if s.max == 0 else None,
  }[c.mode]
  if fresh is not None:
    yield f"{given} needs a stale batch, and {fresh}; give tau as a number"
  first = first_calibration(c)
  if first >= c.steps:
    yield (
      f"{given} waits for the batch of version {first}, the first as stale as planned, and steps={c.steps} ends "
      "before; take more steps"
    )
