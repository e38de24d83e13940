"""The weight of every policy token of a batch, against loops over sequences."""

import dataclasses

import jax
import numpy as np
import pytest
from objective_batches import build

from estr_jax.objective.aggregation import AGGREGATIONS, reduce

CONSTANT = 11.0


def sequences(batch):
  """bool [B, T] of the policy tokens of each sequence that has any."""
  result = []
  for row in range(batch.mask.shape[0]):
    for segment in np.unique(batch.segment[row]):
      here = np.zeros(batch.mask.shape, bool)
      here[row] = batch.mask[row] & (batch.segment[row] == segment)
      result += [here] if here.any() else []
  return result


def token_mean(value, batch):
  return np.mean(value[batch.mask]) if batch.mask.any() else 0.0


def sequence_mean(value, batch):
  return np.mean([value[here].mean() for here in sequences(batch)]) if batch.mask.any() else 0.0


def sequence_sum(value, batch):
  return np.mean([value[here].sum() / CONSTANT for here in sequences(batch)]) if batch.mask.any() else 0.0


REFERENCES = {"token_mean": token_mean, "sequence_mean": sequence_mean, "sequence_sum": sequence_sum}


def weights(name, batch):
  return np.asarray(jax.jit(AGGREGATIONS[name], static_argnums=1)(batch, CONSTANT))


def values(batch, seed=0):
  """What a loss returns: 0 outside the mask."""
  return np.where(batch.mask, np.random.default_rng(seed).normal(size=batch.mask.shape), 0.0).astype(np.float32)


def test_every_aggregation_has_a_reference():
  """Kills: an aggregation that is added and not held against a loop."""
  assert set(AGGREGATIONS) == set(REFERENCES)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregation_agrees_with_a_loop(name):
  """Packed rows. Kills: rows in place of sequences, tool tokens in a length, a sequence without policy tokens that is
  counted, the constant on the wrong side."""
  for seed in range(8):
    _, batch = build(seed)
    if seed % 2:  # a sequence of tool tokens alone
      batch = dataclasses.replace(batch, mask=batch.mask & (batch.segment != 1))
    value = values(batch)
    got = reduce(value, weights(name, batch))
    np.testing.assert_allclose(got, REFERENCES[name](value.astype(np.float64), batch), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_batch_without_policy_tokens_is_finite(name):
  """Kills: 0 / 0."""
  _, batch = build(3)
  batch = dataclasses.replace(batch, mask=np.zeros_like(batch.mask))
  assert np.isfinite(weights(name, batch)).all()
  assert reduce(values(batch), weights(name, batch)) == 0.0


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_microbatches_with_the_weights_of_the_whole_batch_add_up(name):
  """Kills: weights of the microbatch itself: the mean of means is another number."""
  for seed in range(4):
    _, batch = build(seed)
    batch = dataclasses.replace(batch, mask=batch.mask & (np.arange(18).reshape(3, 6) >= 4))
    value, weight_BT = values(batch), weights(name, batch)
    whole = reduce(value, weight_BT)
    parts = [reduce(value[[row]], weight_BT[[row]]) for row in range(3)]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-5, atol=1e-7)


def test_a_mean_of_means_is_another_number():
  """Kills: the test above, were its rows so alike that a wrong denominator passed."""
  _, batch = build(0, kinds=["policy"] * 18)
  mask = np.array([[1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]], bool)
  batch = dataclasses.replace(batch, mask=mask, segment=np.ones((3, 6), np.int32))
  value = values(batch)
  whole = reduce(value, weights("token_mean", batch))
  means = np.mean([value[row][mask[row]].mean() for row in range(3)])
  assert abs(means - whole) > 0.02 * abs(whole)
  np.testing.assert_allclose(means, reduce(value, weights("sequence_mean", batch)), rtol=1e-5)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_weights_read_the_data_mask_alone(name):
  """Kills: a denominator that reads advantages, ratios, or anything else of the records."""
  _, batch = build(5)
  junk = np.full(batch.mask.shape, np.nan, np.float32)
  fields = ("logprob", "entropy", "gini", "reward", "advantage", "proximal", "reference")
  other = dataclasses.replace(batch, **dict.fromkeys(fields, junk))
  np.testing.assert_array_equal(weights(name, other), weights(name, batch))
