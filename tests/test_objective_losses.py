"""Every loss on every edge against its float64 reference: value, trust region, clip and gradient."""

import numpy as np
import pytest
import references
from hypothesis import given, settings
from objective_batches import DEFAULTS, KINDS, build, cases, hyper, run, tokens

from estr_jax.objective.losses import LOSSES
from estr_jax.objective.triangle import EDGES

EVERY = [(name, edge) for name in LOSSES for edge in EDGES]


def check(name, edge, logprob_BT, batch, values):
  token_loss, gradient = run(name, edge, logprob_BT, batch, values)
  want = references.LOSSES[name](logprob_BT, batch, edge=edge, **hyper(name, values))
  np.testing.assert_array_equal(token_loss.keep, want.keep)
  np.testing.assert_array_equal(token_loss.clipped, want.clipped)
  np.testing.assert_allclose(token_loss.value, want.value, rtol=3e-5, atol=1e-6)
  np.testing.assert_allclose(gradient, want.gradient, rtol=3e-5, atol=1e-6)
  dropped = ~want.keep
  np.testing.assert_array_equal(token_loss.value[dropped], 0.0)
  np.testing.assert_array_equal(gradient[dropped], 0.0)
  assert not (token_loss.keep & ~batch.mask).any()
  return want


def test_every_loss_has_a_reference():
  """Kills: a loss that is added to LOSSES and not held against float64."""
  assert set(LOSSES) == set(references.LOSSES)


@pytest.mark.parametrize("name, edge", EVERY)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_loss_agrees_with_float64(name, edge, case):
  """Kills: a wrong sign, edge, clip side, weight, entropy scale, KL direction; a token outside the mask or with no
  stored log-prob that is kept; a masked token whose value or gradient is not exactly 0; a NaN."""
  check(name, edge, *case)


@pytest.mark.parametrize("name, edge", EVERY)
def test_the_reference_batches_reach_every_branch(name, edge):
  """Kills: generated batches that have become so tame that the comparison above cannot fail."""
  size = 18 * 40
  random = np.random.default_rng(5)
  wants = [
    check(name, edge, *build(random.choice(KINDS, size=18), (3, 6), seed, DEFAULTS), DEFAULTS) for seed in range(40)
  ]
  keep, clipped, gradient = (
    np.concatenate([getattr(want, field) for want in wants]) for field in ("keep", "clipped", "gradient")
  )
  assert keep.size == size
  assert 0.1 * size < keep.sum() < 0.8 * size
  assert clipped.sum() > 0.005 * size
  assert (gradient > 0).sum() > 0.05 * size and (gradient < 0).sum() > 0.05 * size


@pytest.mark.parametrize("name, edge", EVERY)
@pytest.mark.parametrize("kind", ["padding", "tool", "unsampled", "broken"])
def test_a_batch_without_a_usable_token_has_loss_and_gradient_zero(name, edge, kind):
  """Kills: NaN from a stored log-prob of -inf or NaN, and 0 / 0 or a kept token in an empty batch."""
  want = check(name, edge, *build([kind] * 18, (3, 6), 0), DEFAULTS)
  assert not want.keep.any()


@pytest.mark.parametrize("name, edge", EVERY)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_enormous_ratio_stays_finite(name, edge, advantage):
  """Kills: exp of an unbounded log-ratio, whose inf turns into NaN in the gradient."""
  values = DEFAULTS | {"tau": np.inf, "phi": np.inf, "low": 0.0, "high": np.inf}
  logprob_BT, batch = tokens([-1e-6, -300.0], [-300.0, -1e-6], advantage=advantage, log_q=[-300.0, -1e-6])
  token_loss, gradient = run(name, edge, logprob_BT, batch, values)
  assert np.isfinite(token_loss.value).all() and np.isfinite(gradient).all()


@pytest.mark.parametrize("name", LOSSES)
def test_an_edge_needs_its_policy(name):
  """Kills: an unknown edge, or a missing proximal policy, that silently becomes the direct edge."""
  logprob_BT, batch = tokens(-1.0, -1.0)
  with pytest.raises(ValueError, match="proximal"):
    LOSSES[name](logprob_BT, batch, edge="proximal", **hyper(name))
  with pytest.raises(ValueError, match="'behaviour'"):
    LOSSES[name](logprob_BT, batch, edge="behaviour", **hyper(name))
