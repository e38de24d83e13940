"""The policy triangle: three policies score every token, and a trust region lives on one named edge.

mu is the behaviour policy that sampled the token, q the proximal policy (the learner's weights before the update,
recomputed by the learner), pi the policy that is being updated:

    direct     E = pi / mu
    proximal   U = pi / q
    behaviour  B = q / mu,      E = B U

The edge decides the result: with one update per batch pi = q, so U is 1 for ever and neither its clip nor an
importance weight acts.
"""

from typing import TypeVar

import jax

from estr_jax.structs import Batch

EDGES = ("direct", "proximal")  # the edges that a clipped surrogate may live on; B does not move with theta

T = TypeVar("T")


class MissingInput(ValueError):
  """A loss asked for something that this batch or these scores do not carry."""


def required(value: T | None, name: str) -> T:
  """`value`, or MissingInput where it is None."""
  if value is None:
    raise MissingInput(f"this loss needs {name}, which was not computed")
  return value


def log_ratio(logprob_BT: jax.Array, batch: Batch, edge: str) -> jax.Array:
  """log of the ratio on an edge that moves with theta, differentiable in `logprob_BT`; f32 [B, T]."""
  return logprob_BT - log_anchor(batch, edge)


def log_anchor(batch: Batch, edge: str) -> jax.Array:
  """log-prob of the policy that the ratio of an edge divides by: mu on direct, q on proximal; f32 [B, T]."""
  if edge not in EDGES:
    raise ValueError(f"edge is one of {EDGES}, not {edge!r}")
  return batch.logprob if edge == "direct" else _proximal(batch)


def log_behaviour_ratio(batch: Batch) -> jax.Array:
  """log B = log q - log mu, f32 [B, T]; a constant of the batch."""
  return _proximal(batch) - batch.logprob


def log_reference_ratio(logprob_BT: jax.Array, batch: Batch) -> jax.Array:
  """log pi - log of the policy of version 0, f32 [B, T]."""
  return logprob_BT - jax.lax.stop_gradient(required(batch.reference, "batch.reference"))


def _proximal(batch: Batch) -> jax.Array:
  return jax.lax.stop_gradient(required(batch.proximal, "batch.proximal"))
