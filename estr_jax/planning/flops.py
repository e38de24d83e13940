"""Floating-point operations of a program, counted from its jaxpr: what is computed, recomputation included."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

# Products of [queries, keys] size that each of splash attention's kernels computes for a block: q k and p v; then,
# going back, p anew, dp and dq in one kernel, and p anew, dv, dp and dk in the other.
_SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}


def count(jaxpr: core.ClosedJaxpr, platform: str = "tpu") -> float:
  """Operations of all matrix products of all devices together; a multiply-add counts as two.

  Loops count as often as they run, and a loop of unknown length once. What differs by platform counts as `platform`
  has it, and what no result needs does not count, as in what is recomputed of a layer whose attention was kept. A
  Pallas kernel counts by its own cost estimate, or by `splash` for splash attention; another one without an estimate is
  an error, since it would be left out silently.
  """
  needed, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
  return _sum(needed, platform)


def _sum(jaxpr: core.ClosedJaxpr | core.Jaxpr, platform: str) -> float:
  return sum(_of_equation(equation, platform) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _of_equation(equation: Any, platform: str) -> float:
  name, params = equation.primitive.name, equation.params
  shapes: list[tuple[int, ...]] = [getattr(var.aval, "shape", ()) for var in equation.invars]
  if name == "dot_general":
    return _dot(params["dimension_numbers"], *shapes[:2])
  if name in ("ragged_dot", "ragged_dot_general"):
    rows, inputs = shapes[0][-2:]
    return 2 * rows * inputs * shapes[1][-1]
  if name == "conv_general_dilated":
    out, kernel = equation.outvars[0].aval.shape, shapes[1]
    return 2 * math.prod(out) * math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
  if name == "pallas_call":
    return _kernel(params, [var.aval for var in equation.invars])
  if name == "scan":
    return params["length"] * _sum(params["jaxpr"], platform)
  if name == "while":
    return _sum(params["body_jaxpr"], platform)
  if name == "cond":
    branches, platforms = params["branches"], params.get("branches_platforms")
    if platforms is not None:
      chosen = next(i for i, names in enumerate(platforms) if names is None or platform in names)
      return _sum(branches[chosen], platform)
    return max(_sum(branch, platform) for branch in branches)
  if name == "shard_map":  # its jaxpr is that of one device
    return params["mesh"].size * _sum(params["jaxpr"], platform)
  return sum(_sum(inner, platform) for inner in _inner(params))


def _inner(params: dict[str, Any]) -> list[Any]:
  """The jaxprs that an equation calls: each once, as calls, remat and custom derivatives do."""
  return [value for value in params.values() if isinstance(value, (core.Jaxpr, core.ClosedJaxpr))]


def _dot(dimensions: Any, left: Sequence[int], right: Sequence[int]) -> float:
  (_, contracted), (_, batch) = dimensions
  free = [size for i, size in enumerate(right) if i not in (*contracted, *batch)]
  return 2 * math.prod(left) * math.prod(free)


def _kernel(params: dict[str, Any], operands: Sequence[Any]) -> float:
  name = str(params["name"])
  if "splash_m" in name:
    phase = next(phase for phase in _SPLASH if f"_{phase}_" in name)
    queries = next(operand.shape for operand in operands if jnp.issubdtype(operand.dtype, jnp.floating))
    return splash(phase, queries, params["grid_mapping"].grid[-1])  # the grid ends in blocks along T
  if params.get("cost_estimate") is None:
    raise NotImplementedError(f"the Pallas kernel {name} has no cost estimate; give planning/flops.py a formula")
  return float(params["cost_estimate"].flops)


def splash(phase: str, queries: Sequence[int], blocks: int) -> float:
  """Of a causal splash kernel: the blocks on and below the diagonal, of `blocks` along each side.

  Args:
    phase: fwd, dq or dkv.
    queries: [..., H, T, K].
    blocks: along T.
  """
  *batch, length, width = queries
  share = (blocks + 1) / (2 * blocks)
  return _SPLASH[phase] * 2 * math.prod(batch) * length * length * width * share
