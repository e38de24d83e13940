"""The optimizer: a learning-rate schedule, gradient clipping and an Optax rule by name."""

import re
from typing import Any

import jax
import optax

from estr_jax.errors import UserError
from estr_jax.model.sharding import path_name
from estr_jax.structs import Params, Scalar

DECAYS = ("constant", "cosine", "linear")

_NOT_DECAYED = re.compile(r"(norm/scale|bias)$")


def decayed(params: Params) -> Any:
  """Which leaves weight decay shrinks: a tree of bools, False for norms and biases."""
  return jax.tree_util.tree_map_with_path(lambda path, _: not _NOT_DECAYED.search(path_name(path)), params)


def _adamw(
  learning_rate: Scalar, *, b1: float, b2: float, eps: float, weight_decay: float
) -> optax.GradientTransformation:
  return optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed)


def _sgd(
  learning_rate: Scalar, *, b1: float, b2: float, eps: float, weight_decay: float
) -> optax.GradientTransformation:
  del b2, eps  # only Adam has them
  return optax.chain(optax.add_decayed_weights(weight_decay, decayed), optax.sgd(learning_rate, momentum=b1))


# Adam rescales small gradients and SGD does not, which matters to what a trust region's mask does.
OPTIMIZERS = {"adamw": _adamw, "sgd": _sgd}


def schedule(peak: float, *, warmup_steps: int, decay: str, total_steps: int) -> optax.Schedule:
  """Linear from peak / warmup_steps to `peak` in `warmup_steps`, then `decay` towards 0 at `total_steps`.

  Raises:
    UserError: an unknown decay, or a warm-up that leaves no step to decay in.
  """
  if decay not in DECAYS:
    raise UserError(f"optimizer.decay={decay!r} is unknown; choose one of {', '.join(DECAYS)}")
  left = total_steps - warmup_steps
  if decay != "constant" and left <= 0:
    raise UserError(
      f"optimizer.warmup_steps={warmup_steps} leaves none of the {total_steps} steps for {decay} decay; lower it"
    )
  after = {
    "constant": lambda: optax.constant_schedule(peak),
    "cosine": lambda: optax.cosine_decay_schedule(peak, left),
    "linear": lambda: optax.linear_schedule(peak, 0.0, left),
  }[decay]()
  if warmup_steps == 0:
    return after
  # The first update already moves: step 0 has peak / warmup_steps, step warmup_steps has the peak.
  warmup = optax.linear_schedule(peak / warmup_steps, peak, max(warmup_steps - 1, 1))
  return optax.join_schedules([warmup, after], [warmup_steps])


def make(
  *,
  optimizer: str,
  learning_rate: float,
  warmup_steps: int,
  decay: str,
  total_steps: int,
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
  clip_norm: float,
) -> optax.GradientTransformation:
  """Clips the global gradient norm at `clip_norm`, then applies `OPTIMIZERS[optimizer]`.

  The learning rate of the newest update stands in the state: `learning_rate(opt_state)`. With "sgd", `b1`
  is the momentum.

  Raises:
    UserError: an unknown optimizer or decay, or a clip_norm that is not positive.
  """
  if optimizer not in OPTIMIZERS:
    raise UserError(f"optimizer.name={optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
  if clip_norm <= 0:
    raise UserError(f"optimizer.clip_norm={clip_norm} must be positive; use inf to leave gradients as they are")
  rate = schedule(learning_rate, warmup_steps=warmup_steps, decay=decay, total_steps=total_steps)
  rule = optax.inject_hyperparams(OPTIMIZERS[optimizer], static_args=("b1", "b2", "eps", "weight_decay"))
  return optax.chain(
    optax.clip_by_global_norm(clip_norm),
    rule(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay),
  )


def learning_rate(opt_state: Any) -> jax.Array:
  """The learning rate f32 [] that the newest update used, from the state of an optimizer of `make`."""
  _, injected = opt_state  # of the clip, of the rule
  return injected.hyperparams["learning_rate"]
