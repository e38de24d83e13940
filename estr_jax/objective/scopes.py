"""Sums over a sequence or a prompt's group, handed back to each of its tokens.

A sequence is a segment of a row: contiguous, so its sum is a scan along the row and needs neither a scatter nor a
number of sequences. A group's sequences lie in any rows that the batch (or the microbatch) holds.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def sequence_sum(value_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
  """[B, T]: at each token the sum over the tokens of its segment; differentiable.

  One and the same number at all of them, so that a threshold never splits a sequence.
  """
  return _last(_scan(jnp.add, value_BT, segment_BT), segment_BT)


def sequence_max(value_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
  """[B, T]: at each token the largest value of its segment."""
  return _last(_scan(jnp.maximum, value_BT, segment_BT), segment_BT)


def sequence_mean(value_BT: jax.Array, where_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
  """[B, T]: at each token the mean over those tokens of its segment where `where_BT`; 0 where there are none."""
  total_BT = sequence_sum(jnp.where(where_BT, value_BT, 0.0), segment_BT)
  return total_BT / jnp.maximum(sequence_tokens(where_BT, segment_BT), 1.0)


def sequence_tokens(where_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
  """f32 [B, T]: how many tokens of its segment are `where_BT`."""
  return sequence_sum(where_BT.astype(jnp.float32), segment_BT)


def first_of_sequence(where_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
  """bool [B, T]: the first token of each segment that is `where_BT`; a sum over them counts each sequence once."""
  count_BT = _scan(jnp.add, where_BT.astype(jnp.float32), segment_BT)
  return where_BT & (count_BT == 1)


def group_sum(value_BT: jax.Array, group_BT: jax.Array) -> jax.Array:
  """[B, T]: at each token the sum over all tokens of its group that are here."""
  group_N = group_BT.ravel()
  total_N = jax.ops.segment_sum(value_BT.ravel(), group_N, num_segments=group_N.size + 1)
  return total_N[group_N].reshape(value_BT.shape)


def _last(value_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
  """At each token the value of its segment's last one."""
  return _scan(lambda carried, _: carried, value_BT[:, ::-1], segment_BT[:, ::-1])[:, ::-1]


def _scan(operation: Callable, value_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
  """Inclusive scan along each row that begins anew at every segment."""
  starts_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)

  def combine(earlier, later):
    value, started = earlier
    new, starts = later
    return jnp.where(starts, new, operation(value, new)), started | starts

  return jax.lax.associative_scan(combine, (value_BT, starts_BT), axis=1)[0]
