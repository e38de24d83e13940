"""The KL penalties by exact expectations over a vocabulary, and the entropy bonus and its coefficient by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_batches import build, tokens

from estr_jax.objective.penalties import ANCHORS, KL_ESTIMATORS, adapt_coefficient, entropy_bonus, kl_penalty
from estr_jax.objective.triangle import MissingInput

PI, REF = np.array([0.4, 0.3, 0.2, 0.06, 0.04]), np.array([0.2, 0.25, 0.05, 0.3, 0.2])


def every_action(anchor):
  """(policy, batch) of one context with every action once; the anchor is REF, and all else is rubbish."""
  fields = {"reference": "reference", "proximal": "proximal", "direct": "logprob"}
  policy, batch = tokens(np.log(PI), np.full(5, np.nan), log_q=np.full(5, np.nan), reference=np.full(5, np.nan))
  return policy, dataclasses.replace(batch, **{fields[anchor]: np.log(REF, dtype=np.float32)[None]})


def penalty(policy, batch, estimator, anchor):
  """(penalty [B, T], its gradient in log pi)."""

  def total(logprob_BT):
    value = kl_penalty(policy._replace(logprob=logprob_BT), batch, estimator=estimator, anchor=anchor)
    return jnp.sum(value), value

  gradient, value = jax.jit(jax.grad(total, has_aux=True))(policy.logprob)
  return np.asarray(value, np.float64), np.asarray(gradient, np.float64)


def kl(p, q):
  return np.sum(p * np.log(p / q))


def in_logits(gradient_V):
  """E_pi of g(a) d log pi(a) / d logits = pi (g - E g)."""
  return PI * (gradient_V - PI @ gradient_V)


@pytest.mark.parametrize("anchor", ANCHORS)
def test_estimators_on_the_samples_of_pi(anchor):
  """As numbers k1 and k3 have the mean KL(pi || ref), k2 has not. As losses, k1 has gradient 0, k2 that of
  KL(pi || ref), k3 that of KL(ref || pi), exactly, over the vocabulary.

  Kills: ref / pi for pi / ref, another anchor, a half that is missing, k3's terms of the wrong sign.
  """
  of_pi_ref = PI * (np.log(PI / REF) - kl(PI, REF))  # d KL(pi || ref) / d logits
  of_ref_pi = PI - REF  # d KL(ref || pi) / d logits
  want = {"k1": (kl(PI, REF), 0.0), "k2": (None, of_pi_ref), "k3": (kl(PI, REF), of_ref_pi)}
  assert set(want) == set(KL_ESTIMATORS)
  for estimator, (mean, gradient) in want.items():
    value, in_logprob = (x[0] for x in penalty(*every_action(anchor), estimator, anchor))
    np.testing.assert_allclose(in_logits(in_logprob), gradient, atol=1e-6, err_msg=estimator)
    if mean is None:
      np.testing.assert_allclose(value, 0.5 * np.log(PI / REF) ** 2, rtol=1e-5)
    else:
      np.testing.assert_allclose(PI @ value, mean, rtol=1e-5, err_msg=estimator)


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_a_token_without_a_ratio_has_no_penalty(estimator, anchor):
  """Kills: NaN of a stored -inf or of rubbish outside the mask, in the value or in the gradient."""
  for seed in range(4):
    policy, batch = build(seed)
    value, gradient = penalty(policy, batch, estimator, anchor)
    record = {"reference": batch.reference, "proximal": batch.proximal, "direct": batch.logprob}[anchor]
    there = batch.mask & np.isfinite(record)
    assert there.any()
    with np.errstate(invalid="ignore"):
      delta = np.clip(policy.logprob.astype(np.float64) - record, -20, 20)[there]
    want = {"k1": delta, "k2": delta**2 / 2, "k3": np.exp(-delta) - 1 + delta}[estimator]
    np.testing.assert_allclose(value[there], want, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(value[~there], 0.0)
    np.testing.assert_array_equal(gradient[~there], 0.0)
    assert np.isfinite(gradient).all()


def test_a_penalty_needs_its_anchor():
  """Kills: a missing reference that silently becomes mu."""
  policy, batch = tokens(-1.0, -1.0)
  for anchor in ("reference", "proximal"):
    with pytest.raises(MissingInput, match=anchor):
      kl_penalty(policy, batch, estimator="k2", anchor=anchor)
  with pytest.raises(ValueError, match="'mu'"):
    kl_penalty(policy, batch, estimator="k2", anchor="mu")


def test_the_entropy_bonus_is_a_loss():
  """Kills: a bonus that lowers the entropy."""
  policy, _ = tokens([-1.0, -2.0], -1.0, entropy=[0.5, 2.0])
  np.testing.assert_array_equal(entropy_bonus(policy), [[-0.5, -2.0]])
  with pytest.raises(MissingInput, match="entropy"):
    entropy_bonus(policy._replace(entropy=None))


def test_the_coefficient_steps_toward_the_target():
  """(carried on, acting now), by hand. Kills: a step of the wrong sign, no bounds, <= for <, a coefficient that
  acts above the target, one that is used before its step."""
  rule = jax.jit(lambda c, entropy: adapt_coefficient(c, entropy, target=0.5, step=0.01, largest=0.025))
  for coefficient, entropy, carried, acting in (
    (0.0, 0.4, 0.01, 0.01),
    (0.01, 0.49, 0.02, 0.02),
    (0.02, 0.1, 0.025, 0.025),
    (0.02, 0.6, 0.01, 0.0),
    (0.02, 0.5, 0.01, 0.0),
    (0.005, 0.9, 0.0, 0.0),
  ):
    got = rule(jnp.float32(coefficient), jnp.float32(entropy))
    np.testing.assert_allclose(got, (carried, acting), rtol=1e-5, atol=1e-9)
