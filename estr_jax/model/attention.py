"""Attention: the one function through which every query meets its keys."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Keys(NamedTuple):
  """Some of the keys and values that a query may look at; J divides the number of query heads."""

  k_BSJK: jax.Array
  v_BSJK: jax.Array
  visible_BTS: jax.Array  # bool, True where query t may look at key s


def attend(q_BTHK: jax.Array, *parts: Keys) -> jax.Array:
  """Grouped-query attention over the keys of all parts, which are never copied together.

  Scores and softmax are float32 whatever the inputs are. A query that sees no key (padding) returns the
  mean of the values instead of NaN, so that padding cannot poison gradients.

  Returns:
    [B, T, H, K] in the dtype of the queries.
  """
  B, T, H, K = q_BTHK.shape
  J = parts[0].k_BSJK.shape[2]
  q_BTJGK = q_BTHK.reshape(B, T, J, H // J, K)

  def score(part: Keys) -> jax.Array:
    scores = jnp.einsum("BTJGK,BSJK->BJGTS", q_BTJGK, part.k_BSJK, preferred_element_type=jnp.float32) * K**-0.5
    return jnp.where(part.visible_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)

  weights = jax.nn.softmax(jnp.concatenate([score(part) for part in parts], axis=-1), axis=-1)
  ends = [sum(part.k_BSJK.shape[1] for part in parts[:i]) for i in range(1, len(parts))]
  mixed = [
    jnp.einsum("BJGTS,BSJK->BTJGK", w.astype(part.v_BSJK.dtype), part.v_BSJK)
    for w, part in zip(jnp.split(weights, ends, axis=-1), parts)
  ]
  return functools.reduce(jnp.add, mixed).reshape(B, T, H, K)


def rotate(x_BTHK: jax.Array, position_BT: jax.Array, theta: float) -> jax.Array:
  """Rotary position embedding, halves rotated (Su et al., arXiv 2104.09864; the Hugging Face layout)."""
  K = x_BTHK.shape[-1]
  frequency = theta ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
  angle = position_BT[..., None, None].astype(jnp.float32) * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTHK.dtype)
