"""Every advantage estimator against a float64 loop over its formula."""

import numpy as np
import pytest

from estr_jax.objective.advantages import ESTIMATORS

REWARD_GN = np.array([[1.0, 0.0, 0.0, 1.0, 1.0], [0.3, -2.0, 5.0, 0.1, 0.0]])
EPS = 0.1
WITHIN_GROUP = [name for name in ESTIMATORS if name != "reinforce_pp"]


def mean(values):
  return sum(values) / len(values)


def std(values):
  return mean([(x - mean(values)) ** 2 for x in values]) ** 0.5


def grpo(rows, eps):
  return [[(R - mean(row)) / (std(row) + eps) for R in row] for row in rows]


def dr_grpo(rows, eps):
  return [[R - mean(row) for R in row] for row in rows]


def rloo(rows, eps):
  return [[R - mean([other for j, other in enumerate(row) if j != i]) for i, R in enumerate(row)] for row in rows]


def over_batch_std(rows, eps):
  everything = [A for row in rows for A in row]
  return [[A / (std(everything) + eps) for A in row] for row in rows]


def reinforce_pp(rows, eps):
  everything = [R for row in rows for R in row]
  return [[(R - mean(everything)) / (std(everything) + eps) for R in row] for row in rows]


REFERENCES = {
  "grpo": grpo,
  "dr_grpo": dr_grpo,
  "rloo": rloo,
  "loo_normalised": lambda rows, eps: over_batch_std(rloo(rows, eps), eps),
  "reinforce_pp": reinforce_pp,
  "reinforce_pp_baseline": lambda rows, eps: over_batch_std(dr_grpo(rows, eps), eps),
}


def test_every_estimator_has_a_reference():
  """Kills: an estimator that is added and not held against float64."""
  assert set(ESTIMATORS) == set(REFERENCES)


@pytest.mark.parametrize("eps", [0.0, 1e-6, EPS])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_agrees_with_its_formula(name, eps):
  """Kills: the sample standard deviation, an eps inside the root or missing, a mean that holds the sample itself,
  statistics over the wrong axis."""
  random = np.random.default_rng(0)
  for reward_GN in (REWARD_GN, random.normal(size=(7, 3)), random.integers(3, size=(9, 4)).astype(float)):
    spread = reward_GN[reward_GN.std(axis=1) > 0]
    want = REFERENCES[name](spread.tolist(), eps)
    np.testing.assert_allclose(ESTIMATORS[name](spread, eps), want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", WITHIN_GROUP)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e9 + 0.7])
def test_equal_rewards_have_advantage_exactly_zero(name, eps, reward):
  """Kills: rounding of the mean, blown up by a standard deviation that is also rounding; 0 / 0 when eps is 0."""
  with np.errstate(all="raise"):
    advantage_GN = ESTIMATORS[name](np.array([[reward] * 7, [0.0] * 6 + [1.0]]), eps)
  np.testing.assert_array_equal(advantage_GN[0], 0.0)
  assert (np.asarray(advantage_GN)[1] != 0).all()


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_batch_of_equal_rewards_has_no_advantage_at_all(name, eps):
  """Kills: 0 / 0 where the spread of the whole batch is 0."""
  with np.errstate(all="raise"):
    advantage_GN = ESTIMATORS[name](np.full((3, 4), 0.1), eps)
  np.testing.assert_array_equal(advantage_GN, 0.0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_two_samples(name):
  """Kills: N - 1 where N is meant, which at N = 2 is a factor of 2. By hand, at eps 0, for rewards 1 and 0."""
  A = 0.5 if name == "dr_grpo" else 1.0
  np.testing.assert_allclose(ESTIMATORS[name](np.array([[1.0, 0.0]]), 0.0), [[A, -A]])


@pytest.mark.parametrize("name", [name for name in WITHIN_GROUP if name not in ("rloo", "loo_normalised")])
def test_a_group_of_one_has_no_advantage(name):
  """Kills: a lone sample that is compared with anything but itself."""
  np.testing.assert_array_equal(ESTIMATORS[name](np.array([[3.7]]), 1e-6), [[0.0]])


@pytest.mark.parametrize("name", WITHIN_GROUP)
def test_groups_are_centred(name):
  """Kills: a baseline over the batch where one over the group is meant."""
  np.testing.assert_allclose(np.asarray(ESTIMATORS[name](REWARD_GN, EPS), np.float64).sum(axis=1), 0.0, atol=1e-6)
