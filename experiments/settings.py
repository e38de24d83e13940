"""From the command line to a checked configuration."""

import difflib
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict, config_flags

from estr_jax.errors import UserError
from estr_jax.learner.optimizer import DECAYS, OPTIMIZERS
from estr_jax.model.decoder import REMAT
from estr_jax.model.sharding import BATCH_AXES
from estr_jax.objective.advantages import ESTIMATORS
from estr_jax.objective.aggregation import AGGREGATIONS
from estr_jax.objective.losses import LOSSES, METHODS, SCORES, arguments, choices, keywords, needs
from estr_jax.objective.penalties import ANCHORS, KL_ESTIMATORS
from estr_jax.objective.triangle import EDGES
from estr_jax.runtime.launch import launched
from estr_jax.tasks import TASKS
from estr_jax.transport.security import is_loopback

MODES = ("async", "sync", "simulated")


def parse(argv: Sequence[str], define: Callable[[], None]) -> None:
  """Parses the flags. Raises UserError, in one line, for whatever the command line or a config file has wrong."""
  define()
  try:
    rest = flags.FLAGS(list(argv))
    if flags.FLAGS.config is not None:
      flags.FLAGS.config.to_dict()  # a file that cannot be read is reported at its first use
      _read_infinite_tau(flags.FLAGS.config)
  except flags.Error as error:
    # What a config file raised comes as a whole traceback; its last line is what the file said.
    raise UserError(str(error).strip().splitlines()[-1]) from error
  except (OSError, ImportError) as error:
    raise UserError(f"the config file cannot be read: {_one_line(error)}") from error
  except (AttributeError, KeyError) as error:
    raise UserError(f"unknown config key: {_one_line(error)}; every key stands in configs/default.py") from error
  except (TypeError, ValueError) as error:
    raise UserError(f"the configuration is wrong: {_one_line(error)}") from error
  if len(rest) > 1:
    raise UserError(f"unknown argument {rest[1]!r}; flags look like --workdir=DIR and --config.steps=10")


def _read_infinite_tau(config: ConfigDict) -> None:
  """--config.loss.estr.tau=inf is a string, since the key takes strings too."""
  for name in SCORES:
    if config.loss[name].tau == "inf":
      config.loss[name].tau = math.inf


def main(program: Callable[[], int]) -> None:
  """Runs a program; a user's mistake is one line on standard error and exit status 2."""
  try:
    sys.exit(program())
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    if jax.distributed.is_initialized():  # an interpreter waits at its end for the other processes, and they for it
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(2)
    sys.exit(2)
  except KeyboardInterrupt:
    if not launched():  # else the launcher says it
      print("interrupted; run the same command again to go on from the last checkpoint", file=sys.stderr)
    # Everything has been unwound, but threads of XLA or Orbax may be at work, with which an interpreter cannot end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


def define_config() -> None:
  """Defines --config, with --config.KEY=VALUE for each of its keys."""
  config_flags.DEFINE_config_file("config", None, "A file of configs/, as FILE.py or FILE.py:ARGUMENT.")


def config_name() -> str:
  """The config file as the command line named it, argument included."""
  return flags.FLAGS["config"].config_filename


def check(config: ConfigDict) -> None:
  """Raises UserError for the first key that is unknown, impossible, or contradicts another."""
  from configs.default import get_config

  _check_keys(config.to_dict(), get_config().to_dict())
  for test, line in _rules(config):
    if not test:
      raise UserError(line)


def _one_line(error: Exception) -> str:
  text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
  return " ".join(text.split())


def _check_keys(given: dict, known: dict, path: str = "") -> None:
  for key, value in given.items():
    if key not in known:
      near = difflib.get_close_matches(key, known, n=1, cutoff=0)
      hint = f"; the nearest known one is {path}{near[0]}" if near else ""
      raise UserError(f"unknown config key {path}{key}{hint}")
    if isinstance(known[key], dict):
      if not isinstance(value, dict):
        raise UserError(f"config key {path}{key} is a group of keys, not {value!r}")
      _check_keys(value, known[key], f"{path}{key}.")
  missing = known.keys() - given.keys()
  if missing:
    raise UserError(f"config key {path}{min(missing)} is missing; start from configs/default.py")


def flat(tree: dict, path: str = "") -> Iterator[tuple[str, Any]]:
  """("a.b", value) of every leaf."""
  for key, value in tree.items():
    if isinstance(value, dict):
      yield from flat(value, f"{path}{key}.")
    else:
      yield f"{path}{key}", value


def loss_arguments(c: ConfigDict) -> dict[str, Any]:
  """The keyword arguments of the configured loss. A tau that is to be calibrated is infinite until it is."""
  given = arguments(c.loss.name, c.loss)
  return given if calibrated_fraction(c) is None else given | {"tau": math.inf}


def edge_of(c: ConfigDict) -> str | None:
  """The edge that the config chooses for its loss; None where the loss has a fixed one, or none."""
  return c.loss.edge if "edge" in keywords(LOSSES[c.loss.name]) else None


def calibrated_fraction(c: ConfigDict) -> float | None:
  """FRACTION of the loss's tau=calibrate:FRACTION, to be masked; None where tau is a number, or there is none."""
  return _calibrate(c.loss[c.loss.name].tau) if c.loss.name in SCORES else None


def _calibrate(tau: Any) -> float | None:
  word, colon, fraction = str(tau).partition(":")
  try:
    return float(fraction) if word == "calibrate" and colon else None
  except ValueError:
    return None


def _tau_rules(c: ConfigDict) -> Iterator[tuple[bool, str]]:
  for name in SCORES:
    tau = c.loss[name].tau
    number, fraction = isinstance(tau, (int, float)) and not isinstance(tau, bool), _calibrate(tau)
    yield (
      (number and tau > 0) or (fraction is not None and 0 < fraction < 1),
      f"loss.{name}.tau={tau} is neither a number above 0 nor calibrate:FRACTION with a fraction between 0 and 1",
    )
  if calibrated_fraction(c) is None:
    return
  given, s = f"loss.{c.loss.name}.tau={c.loss[c.loss.name].tau}", c.staleness
  yield (
    c.mode != "sync",
    f"{given} needs a stale batch, and in mode=sync nothing is ever stale; give tau as a number",
  )
  yield (
    c.mode != "simulated" or s.intra + s.inter > 0,
    f"{given} needs a stale batch, and with staleness.intra=0 and staleness.inter=0 none is; give tau as a number",
  )
  yield (
    c.mode != "async" or s.max > 0,
    f"{given} needs a stale batch, and with staleness.max=0 none is; give tau as a number",
  )
  first = first_calibration(c)
  yield (
    first < c.steps,
    f"{given} waits for the batch of version {first}, the first as stale as planned, and steps={c.steps} ends before; "
    "take more steps",
  )


def _loss_rules(path: str, own: ConfigDict, words: dict[str, tuple[str, ...]]) -> Iterator[tuple[bool, str]]:
  """For the keys that a loss has of its own."""
  for key, among in words.items():
    yield _choice(f"{path}.{key}", own[key], among)
  for low, high in (("low", "high"), ("ratio_low", "ratio_high")):
    if low in own:
      yield (
        own[low] < own[high],
        f"{path}.{low}={own[low]} is not below {path}.{high}={own[high]}, so no ratio lies between them",
      )
  for key in ("quantile", "share"):
    if key in own:
      yield own[key] < 1, f"{path}.{key}={own[key]} is a fraction, and must be below 1"
  if "dual" in own:
    yield own.dual > 1, f"{path}.dual={own.dual} must be above 1, or it would cut ratios of 1"


def first_calibration(c: ConfigDict) -> int:
  """The first version whose batch can calibrate tau: past the warm-up, whose updates are smaller than the run's."""
  planned = c.staleness.intra + c.staleness.inter if c.mode == "simulated" else 1
  return c.optimizer.warmup_steps + planned


def _idle_keys(c: ConfigDict) -> Iterator[tuple[bool, str, list[str]]]:
  """(whether some keys do nothing, why, which)."""
  meshes = [f"sampling.mesh.{axis}" for axis in c.sampling.mesh]
  yield c.mode != "async", f"in mode={c.mode}, where the learner samples on its own mesh", meshes
  yield c.optimizer.name == "sgd", "under sgd", ["optimizer.b2", "optimizer.eps"]
  clips = ["loss.clip_low", "loss.clip_high"]
  taken, own = keywords(LOSSES[c.loss.name]), c.loss[c.loss.name]
  shared = [f"loss.{key}" for key in ("edge", "clip_low", "clip_high") if key not in taken or key in own]
  yield True, f"on loss.name={c.loss.name}", shared
  others = [f"loss.{name}.{key}" for name in LOSSES if name != c.loss.name for key in c.loss[name]]
  yield True, f"while loss.name={c.loss.name}", others
  yield c.loss.name == "vcpo", "on loss.name=vcpo, which has a baseline of its own", ["advantage.name", "advantage.eps"]
  yield c.advantage.name in ("dr_grpo", "rloo"), f"on advantage.name={c.advantage.name}", ["advantage.eps"]
  weighed = c.loss.name == "tis" or (c.loss.name == "mis" and own.scope != "geometric")
  yield weighed and c.loss.edge == "direct", "on the direct edge, where a weight stands in for the clip", clips
  yield not c.loss.kl.coefficient, "while loss.kl.coefficient=0", ["loss.kl.estimator", "loss.kl.anchor"]
  yield not c.loss.entropy.target, "while loss.entropy.target=0", ["loss.entropy.step", "loss.entropy.largest"]


def _choice(name: str, value: Any, choices: Sequence[str]) -> tuple[bool, str]:
  near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0)[0]
  return value in choices, f"{name}={value!r} is unknown: it is one of {', '.join(choices)} (nearest: {near})"


# Bounds, for which inf says "none".
_BOUNDS = {
  "tau",
  "width",
  "phi",
  "bound",
  "cap",
  "dual",
  "high",
  "band",
  "clip_low",
  "clip_high",
  "clip_norm",
  "radius",
}


def _in_float32(key: str, value: float) -> bool:
  """Whether the number survives its way to the device: no NaN, no overflow, nothing that is rounded to 0."""
  if value == math.inf:
    return key.split(".")[-1] in _BOUNDS
  limits = np.finfo(np.float32)
  return value == 0 or float(limits.tiny) <= abs(value) <= float(limits.max)


def _rules(c: ConfigDict) -> Iterator[tuple[bool, str]]:
  """(holds, what to say where it does not)."""
  from configs.default import get_config

  known = dict(flat(get_config().to_dict()))
  yield _choice("mode", c.mode, MODES)
  yield _choice("task.name", c.task.name, sorted(TASKS))
  yield _choice("loss.name", c.loss.name, sorted(LOSSES))
  yield _choice("loss.edge", c.loss.edge, EDGES)
  yield _choice("loss.aggregation", c.loss.aggregation, sorted(AGGREGATIONS))
  yield _choice("loss.kl.estimator", c.loss.kl.estimator, sorted(KL_ESTIMATORS))
  yield _choice("loss.kl.anchor", c.loss.kl.anchor, ANCHORS)
  yield _choice("advantage.name", c.advantage.name, sorted(ESTIMATORS))
  yield _choice("optimizer.name", c.optimizer.name, sorted(OPTIMIZERS))
  yield _choice("optimizer.decay", c.optimizer.decay, DECAYS)
  yield _choice("model.remat", c.model.remat, sorted(REMAT))
  yield _choice("model.dtype", c.model.dtype, ("float32", "bfloat16"))
  yield _choice("transport.weights_dtype", c.transport.weights_dtype, ("float32", "bfloat16"))
  yield _choice("staleness.admission", c.staleness.admission, ("wait", "drop"))
  positive = (
    "steps batch.groups batch.group_size batch.microbatches sampling.slots sampling.context sampling.chunk "
    "sampling.temperature staleness.segment_tokens queue.lease_timeout_s queue.deadline_s learner.score_chunk "
    "checkpoint.every eval.prompts eval.every_prompts eval.slots optimizer.learning_rate optimizer.clip_norm "
    "mesh.data mesh.fsdp mesh.tensor mesh.expert sampling.mesh.data sampling.mesh.fsdp sampling.mesh.tensor "
    "sampling.mesh.expert slices.samplers model.width model.layers model.heads model.kv_heads model.head_dim "
    "model.mlp_width model.rope_theta model.norm_eps advantage.eps optimizer.eps warm_start.batch "
    "warm_start.demonstrations warm_start.learning_rate loss.clip_low loss.clip_high loss.entropy.step "
    "loss.entropy.largest"
  )
  values = dict(flat(c.to_dict()))
  yield from _tau_rules(c)
  for key, value in values.items():
    if not isinstance(value, str):
      yield _in_float32(key, value), f"{key}={value} must be a finite number that float32 holds"
  for key in positive.split():
    yield values[key] > 0, f"{key}={values[key]} must be above 0"
  for key, value in values.items():
    if key.count(".") == 2 and key.split(".")[1] in LOSSES and not isinstance(value, str):
      yield value > 0, f"{key}={value} must be above 0"
  not_negative = (
    "loss.entropy.coefficient loss.entropy.target loss.kl.coefficient loss.router_balance "
    "model.vocabulary staleness.intra staleness.inter staleness.max warm_start.steps eval.every optimizer.warmup_steps "
    "optimizer.weight_decay"
  )
  for key in not_negative.split():
    yield values[key] >= 0, f"{key}={values[key]} must not be negative"
  for key in ("optimizer.b1", "optimizer.b2"):
    yield 0 <= values[key] < 1, f"{key}={values[key]} must be in 0 .. 1, 1 excluded"
  is_loopback(c.transport.address)  # raises for what is no host:port
  yield 0 <= c.seed < 2**32, f"seed={c.seed} must be in 0 .. 2^32 - 1"
  for name, loss in LOSSES.items():
    yield from _loss_rules(f"loss.{name}", c.loss[name], choices(loss))
  bonus = c.loss.entropy
  yield (
    not bonus.target or bonus.coefficient <= bonus.largest,
    f"loss.entropy.coefficient={bonus.coefficient} is above loss.entropy.largest={bonus.largest}, to which the first "
    "update would cut it; raise the one or lower the other",
  )
  loss = functools.partial(LOSSES[c.loss.name], **loss_arguments(c))
  yield (
    c.sampling.record_vocabulary or not needs(loss, "vocabulary"),
    f"loss.name={c.loss.name} reads the whole distribution of each token; set sampling.record_vocabulary=True",
  )
  yield (
    c.model.heads % c.model.kv_heads == 0,
    f"model.heads={c.model.heads} is no multiple of model.kv_heads={c.model.kv_heads}",
  )
  yield c.model.head_dim % 2 == 0, f"model.head_dim={c.model.head_dim} is odd; rotary positions turn pairs"
  experts, chosen = c.model.experts, c.model.experts_per_token
  yield (
    experts == chosen == c.model.expert_mlp_width == 0 or (1 <= chosen <= experts and c.model.expert_mlp_width > 0),
    f"model.experts={experts} with model.experts_per_token={chosen} and model.expert_mlp_width="
    f"{c.model.expert_mlp_width}: set all three, with no more experts a token than there are, or leave all at 0",
  )
  for idle, because, keys in _idle_keys(c):
    for key in keys:
      yield (
        not idle or values[key] == known[key],
        f"{key}={values[key]} has no effect {because}; leave it at its default",
      )
  truncated = (
    "the probabilities of truncated sampling are renormalised over the surviving tokens, which shifts every log-ratio "
    "and shrinks the entropy that scales the trust region; leave top_p=1 and top_k=0"
  )
  yield c.sampling.top_p == 1.0, f"sampling.top_p={c.sampling.top_p} is refused for training: {truncated}"
  yield c.sampling.top_k == 0, f"sampling.top_k={c.sampling.top_k} is refused for training: {truncated}"
  asked = c.staleness.intra or c.staleness.inter
  yield (
    not asked or c.mode == "simulated",
    f"staleness.intra={c.staleness.intra} and staleness.inter={c.staleness.inter} are set exactly in mode=simulated "
    f"only, and mode is {c.mode}; choose that mode, or bound it with staleness.max in mode=async",
  )
  for what, rows, mesh, more in (
    ("batch.groups x batch.group_size", c.batch.groups * c.batch.group_size, "mesh", ["batch.microbatches"]),
    ("sampling.slots", c.sampling.slots, "sampling.mesh" if c.mode == "async" else "mesh", []),
    ("eval.slots", c.eval.slots, "mesh", []),
    ("warm_start.batch", c.warm_start.batch if c.warm_start.steps else 0, "mesh", []),
  ):
    keys = [*more, *(f"{mesh}.{axis}" for axis in BATCH_AXES)]
    parts = math.prod(values[key] for key in keys)
    yield rows % parts == 0, f"{what} = {rows} does not divide by {' x '.join(keys)} = {parts}; change one of them"
  yield (
    METHODS[c.loss.name].scope != "group" or c.batch.microbatches == 1,
    f"loss.name={c.loss.name} compares the samples of a prompt, which batch.microbatches={c.batch.microbatches} tears "
    "apart; set it to 1",
  )
  yield (
    not c.loss.kl.coefficient or c.loss.kl.anchor != "proximal",
    "loss.kl.anchor=proximal is always 0, since a batch is used for one update; take reference or direct",
  )
  yield (
    c.batch.group_size > 1,
    "batch.group_size=1 leaves every advantage at 0, since it is relative to the group; take 2 or more",
  )
  yield (
    c.queue.capacity >= c.batch.groups,
    f"queue.capacity={c.queue.capacity} is below batch.groups={c.batch.groups}, so no batch could ever form; raise it",
  )
  task = TASKS[c.task.name]
  yield (
    bool(c.model.folder) or task.alphabet is not None,
    f"task.name={c.task.name} speaks to a chat model and model.folder is empty; `make smollm2` fetches one, then set "
    "model.folder",
  )
  yield (
    c.warm_start.steps == 0 or task.demonstrate is not None,
    f"warm_start.steps={c.warm_start.steps}, but task {c.task.name} brings no demonstrations; set it to 0",
  )
  yield (
    not c.model.folder or Path(c.model.folder).expanduser().is_dir(),
    f"model.folder={c.model.folder} does not exist; name a Hugging Face style folder (`make smollm2` makes one)",
  )
