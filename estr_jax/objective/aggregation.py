"""How token losses become one number: a weight for every policy token of the WHOLE batch.

The weights are computed before the batch is split over microbatches and devices, whose weighted sums then add up to
the loss of the whole batch. They depend on the data mask alone: what a trust region drops stays in the denominator.
"""

import jax
import jax.numpy as jnp

from estr_jax.objective.scopes import first_of_sequence, sequence_tokens
from estr_jax.structs import Batch


def token_mean(batch: Batch, constant: float) -> jax.Array:
  """1 / (policy tokens of the batch): ESTR, DAPO."""
  del constant
  return jnp.ones(batch.mask.shape, jnp.float32) / jnp.maximum(jnp.sum(batch.mask), 1)


def sequence_mean(batch: Batch, constant: float) -> jax.Array:
  """1 / (sequences x policy tokens of the token's sequence): GRPO as published, GSPO."""
  del constant
  return 1 / (_sequences(batch) * jnp.maximum(sequence_tokens(batch.mask, batch.segment), 1))


def sequence_sum(batch: Batch, constant: float) -> jax.Array:
  """1 / (sequences x constant), the constant being the most tokens that a sequence can have: Dr.GRPO."""
  return jnp.ones(batch.mask.shape, jnp.float32) / (_sequences(batch) * constant)


AGGREGATIONS = {"token_mean": token_mean, "sequence_mean": sequence_mean, "sequence_sum": sequence_sum}


def reduce(value_BT: jax.Array, weight_BT: jax.Array) -> jax.Array:
  """The scalar: the weighted sum over tokens, whose values are 0 wherever they are not meant to count."""
  return jnp.sum(value_BT * weight_BT)


def _sequences(batch: Batch) -> jax.Array:
  """How many sequences have a policy token; at least 1."""
  return jnp.maximum(jnp.sum(first_of_sequence(batch.mask, batch.segment)), 1)
