"""Sums over sequences and groups, and weights of whole sequences, against loops over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_batches import build, tokens

from estr_jax.objective import scopes, sequence_weights

SEGMENTS = np.array([[1, 1, 2, 3, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2], [0] * 7, [3, 3, 3, 3, 3, 3, 3]], np.int32)
SHAPE = SEGMENTS.shape


def random_values(seed=0):
  random = np.random.default_rng(seed)
  return random.normal(size=SHAPE).astype(np.float32), random.random(SHAPE) < 0.6


def by_segment(function, value_BT, segment_BT):
  """At each token, `function` of the values of its segment of its row."""
  result = np.zeros(value_BT.shape, np.float64)
  for row, column in np.ndindex(*value_BT.shape):
    mine = [value_BT[row, j] for j in range(value_BT.shape[1]) if segment_BT[row, j] == segment_BT[row, column]]
    result[row, column] = function(np.array(mine, np.float64))
  return result


@pytest.mark.parametrize("name, function", [("sequence_sum", np.sum), ("sequence_max", np.max)])
def test_sequence_reductions(name, function):
  """Kills: a scan that crosses a border, counts its own token twice, or sees only what lies before it."""
  value, _ = random_values()
  got = jax.jit(getattr(scopes, name))(value, SEGMENTS)
  np.testing.assert_allclose(got, by_segment(function, value, SEGMENTS), rtol=1e-5, atol=1e-6)


def test_sequence_mean_and_tokens():
  """Kills: a mean over all tokens of the segment, 0 / 0 of a segment without any, NaN read where not `where`."""
  value, where = random_values(1)
  where[1, 1:] = False
  count = by_segment(np.sum, where.astype(np.float32), SEGMENTS)
  total = by_segment(np.sum, np.where(where, value, 0.0), SEGMENTS)
  spoilt = np.where(where, value, np.nan)
  np.testing.assert_array_equal(jax.jit(scopes.sequence_tokens)(where, SEGMENTS), count)
  got = jax.jit(scopes.sequence_mean)(spoilt, where, SEGMENTS)
  np.testing.assert_allclose(got, total / np.maximum(count, 1), rtol=1e-5, atol=1e-6)


def test_the_first_of_each_sequence_counts_it_once():
  """Kills: the first token of a segment that is not `where`, a token that is counted in the row's next segment."""
  for seed in range(5):
    _, where = random_values(seed)
    want = np.zeros(SHAPE, bool)
    for row in range(SHAPE[0]):
      for segment in range(4):
        here = np.flatnonzero(where[row] & (SEGMENTS[row] == segment))
        want[row, here[:1]] = True
    np.testing.assert_array_equal(jax.jit(scopes.first_of_sequence)(where, SEGMENTS), want)


def test_group_sum():
  """Kills: a sum over a row in place of a group, a number of groups that is too small for the largest id."""
  value, _ = random_values(2)
  group = np.random.default_rng(0).integers(0, 29, size=SHAPE).astype(np.int32)
  group[-1, -1] = SHAPE[0] * SHAPE[1]
  want = [[value[group == g].sum(dtype=np.float64) for g in row] for row in group]
  np.testing.assert_allclose(jax.jit(scopes.group_sum)(value, group), want, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_sequence_sum_is_a_sequence_sum():
  """d sum_t c_t s_t / d v_j = the sum of c over j's segment. Kills: a scan whose gradient is that of one direction."""
  value, _ = random_values(3)
  weight, _ = random_values(4)
  gradient = jax.jit(jax.grad(lambda v: jnp.sum(weight * scopes.sequence_sum(v, SEGMENTS))))(value)
  np.testing.assert_allclose(gradient, by_segment(np.sum, weight, SEGMENTS), rtol=1e-5, atol=1e-6)


def test_sequence_weights_and_what_they_are_worth():
  """w = prod pi / mu over the policy tokens with a ratio, each sequence once.

  Kills: a weight for each token, NaN of a stored -inf, the geometric mean, padding counted as a sequence.
  """
  for seed in range(6):
    policy, batch = build(seed)
    weights = []
    for row in range(batch.mask.shape[0]):
      for segment in np.unique(batch.segment[row]):
        here = batch.mask[row] & (batch.segment[row] == segment) & np.isfinite(batch.logprob[row])
        delta = (policy.logprob[row][here] - batch.logprob[row][here]).sum(dtype=np.float64)
        weights += [np.exp(np.clip(delta, -20, 20))] if here.any() else []
    total, square, count = jax.jit(sequence_weights.sequence_weight_sums)(policy, batch)
    np.testing.assert_allclose(total, np.sum(weights), rtol=2e-5)
    np.testing.assert_allclose(square, np.sum(np.square(weights)), rtol=4e-5)
    assert count == len(weights)


def test_the_effective_share():
  """Kills: n in place of 1, a ratio of sums that is not squared. (1 + 3)^2 / (2 (1 + 9)) = 0.8; nothing is worth 1."""
  np.testing.assert_allclose(sequence_weights.effective_share(4.0, 10.0, 2.0), 0.8, rtol=1e-6)
  np.testing.assert_allclose(sequence_weights.effective_share(3.0, 3.0, 3.0), 1.0, rtol=1e-6)
  assert sequence_weights.effective_share(0.0, 0.0, 0.0) == 1.0
  policy, batch = tokens([-1.0, -1.0], [-1.0, -1.0 - np.log(3)], segment=[1, 2])
  share = sequence_weights.effective_share(*sequence_weights.sequence_weight_sums(policy, batch))
  np.testing.assert_allclose(share, 0.8, rtol=1e-6)
