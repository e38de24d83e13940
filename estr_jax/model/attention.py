"""Attention: the one function through which every query meets its keys."""

import jax
import jax.numpy as jnp


def attend(q_BTHK: jax.Array, k_BSJK: jax.Array, v_BSJK: jax.Array, visible_BTS: jax.Array) -> jax.Array:
  """Grouped-query attention: H query heads share J key-value heads.

  Scores and softmax are float32 whatever the inputs are. A query that sees no key (padding) returns the
  mean of the values instead of NaN, so that padding cannot poison gradients.

  Args:
    q_BTHK: queries.
    k_BSJK: keys; H is a multiple of J.
    v_BSJK: values.
    visible_BTS: bool, True where query t may look at key s.

  Returns:
    [B, T, H, K] in the dtype of the queries.
  """
  B, T, H, K = q_BTHK.shape
  J = k_BSJK.shape[2]
  q_BTJGK = q_BTHK.reshape(B, T, J, H // J, K)
  scores = jnp.einsum("BTJGK,BSJK->BJGTS", q_BTJGK, k_BSJK, preferred_element_type=jnp.float32) * K**-0.5
  scores = jnp.where(visible_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(v_BSJK.dtype)
  return jnp.einsum("BJGTS,BSJK->BTJGK", weights, v_BSJK).reshape(B, T, H, K)


def rotate(x_BTHK: jax.Array, position_BT: jax.Array, theta: float) -> jax.Array:
  """Rotary position embedding, halves rotated (Su et al., arXiv 2104.09864; the Hugging Face layout)."""
  K = x_BTHK.shape[-1]
  frequency = theta ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
  angle = position_BT[..., None, None].astype(jnp.float32) * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTHK.dtype)
