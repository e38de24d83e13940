"""Group advantages against float64."""

import numpy as np
import pytest
import references

from estr_jax.objective.advantages import group_advantage

REWARD_GN = np.array([[1.0, 0.0, 0.0, 1.0, 1.0], [0.3, -2.0, 5.0, 0.1, 0.0]])


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.1])
def test_grpo(eps):
  """Kills: the sample standard deviation, an eps inside the root or missing, statistics over all groups."""
  advantage_GN = group_advantage(REWARD_GN, scale="std", eps=eps)
  assert advantage_GN.dtype == np.float32
  np.testing.assert_allclose(advantage_GN, references.grpo_advantage(REWARD_GN, eps), rtol=1e-6)


def test_dr_grpo_does_not_divide():
  """Kills: "none" that still divides by the standard deviation."""
  advantage_GN = group_advantage(REWARD_GN, scale="none", eps=1e-6)
  np.testing.assert_allclose(advantage_GN, references.dr_grpo_advantage(REWARD_GN), rtol=1e-6)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e9 + 0.7])
def test_equal_rewards_have_advantage_exactly_zero(scale, eps, reward):
  """Kills: rounding of the mean, blown up by a standard deviation that is also rounding; 0 / 0 when eps is 0."""
  with np.errstate(all="raise"):
    advantage_GN = group_advantage(np.array([[reward] * 7, [0.0] * 6 + [1.0]]), scale=scale, eps=eps)
  np.testing.assert_array_equal(advantage_GN[0], 0.0)
  assert (advantage_GN[1] != 0).all()


def test_a_group_of_one_has_no_advantage():
  """Kills: a lone sample that is compared with anything but itself."""
  np.testing.assert_array_equal(group_advantage(np.array([[3.7]]), scale="std", eps=1e-6), [[0.0]])


def test_unknown_scale():
  """Kills: a misspelt scale that silently falls back to one of the two."""
  with pytest.raises(ValueError, match="'stdev'"):
    group_advantage(REWARD_GN, scale="stdev", eps=1e-6)
