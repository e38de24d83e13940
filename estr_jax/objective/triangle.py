"""The policy triangle: three policies score every token, and a trust region lives on one named edge.

mu is the behaviour policy that sampled the token, q the proximal policy (the learner's weights before the update,
recomputed by the learner), pi the policy that is being updated:

    direct     E = pi / mu
    proximal   U = pi / q
    behaviour  B = q / mu,      E = B U

The edge decides the result: with one update per batch pi = q, so U is 1 for ever and neither its clip nor an
importance weight acts.
"""

import jax

from estr_jax.structs import Batch

EDGES = ("direct", "proximal")  # the edges that a clipped surrogate may live on; B does not move with theta


def log_ratio(logprob_BT: jax.Array, batch: Batch, edge: str) -> jax.Array:
  """log of the ratio on an edge that moves with theta, differentiable in `logprob_BT`; f32 [B, T]."""
  if edge == "direct":
    return logprob_BT - batch.logprob
  if edge == "proximal":
    return logprob_BT - _proximal(batch)
  raise ValueError(f"edge is one of {EDGES}, not {edge!r}")


def log_behaviour_ratio(batch: Batch) -> jax.Array:
  """log B = log q - log mu, f32 [B, T]; a constant of the batch."""
  return _proximal(batch) - batch.logprob


def needs_proximal(edge: str) -> bool:
  """Whether the batch must carry the learner's recomputed log q."""
  return edge == "proximal"


def _proximal(batch: Batch) -> jax.Array:
  if batch.proximal is None:
    raise ValueError("this edge needs batch.proximal (log q): recompute it before the update")
  return jax.lax.stop_gradient(batch.proximal)
