"""Log-prob and entropy: one definition, after the temperature, of the whole vocabulary, in nats."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references

from estr_jax.objective.scoring import score, score_logits

scores = jax.jit(score_logits)
TEMPERATURES = (0.7, 1.0, 1.3)
B, T, D, V = 2, 7, 5, 19


def some_logits(spread: float) -> tuple[np.ndarray, np.ndarray]:
  random = np.random.default_rng(0)
  return random.normal(size=(B, T, V)).astype(np.float32) * spread, random.integers(0, V, size=(B, T))


def hidden_states() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  random = np.random.default_rng(1)
  hidden_BTD = random.normal(size=(B, T, D)).astype(np.float32)
  return hidden_BTD, random.normal(size=(D, V)).astype(np.float32), random.integers(0, V, size=(B, T))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_score_logits_agrees_with_float64(temperature, spread):
  """Kills: log2, unscaled logits (in either quantity), top-k entropy, a temperature that multiplies."""
  logits_V, targets = some_logits(spread)
  logprob, entropy = scores(logits_V, targets, temperature=temperature)
  want_logprob, want_entropy = references.score_logits(logits_V, targets, temperature)
  assert logprob.dtype == entropy.dtype == jnp.float32
  np.testing.assert_allclose(logprob, want_logprob, rtol=2e-6, atol=2e-6)
  np.testing.assert_allclose(entropy, want_entropy, rtol=2e-6, atol=2e-6)


@jax.jit
@jax.grad
def score_gradient(logits_V, targets, temperature, logprob_weight, entropy_weight):
  logprob, entropy = score_logits(logits_V, targets, temperature=temperature)
  return jnp.sum(logprob_weight * logprob + entropy_weight * entropy)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_score_logits_gradient_is_onehot_minus_p_over_temperature(temperature):
  """Kills: a gradient that misses 1 / temperature, and an entropy that carries a gradient."""
  logits_V, targets = some_logits(2.0)

  gradient = score_gradient(logits_V, targets, temperature, 1.0, 0.0)
  want = references.score_logits_gradient(logits_V, targets, temperature)
  np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(score_gradient(logits_V, targets, temperature, 0.0, 1.0), 0.0)


def test_uniform_logits_have_the_entropy_log_v_in_nats():
  """Kills: log2, top-k entropy."""
  logprob, entropy = scores(np.zeros((1, 1000), np.float32), np.array([3]), temperature=0.5)
  np.testing.assert_allclose([logprob[0], entropy[0]], [-np.log(1000), np.log(1000)], rtol=1e-6)


@pytest.mark.parametrize("peak", [20.0, 80.0, 200.0, 1e30])
def test_peaked_logits(peak):
  """Kills: 0 * -inf in the entropy, a negative entropy, a log-prob above 0, a gradient that is not finite."""
  logits_V = np.zeros((2, 50), np.float32)
  logits_V[:, 7] = peak
  targets = np.array([7, 8])
  logprob, entropy = scores(logits_V, targets, temperature=1.0)
  want_logprob, want_entropy = references.score_logits(logits_V, targets, 1.0)
  np.testing.assert_allclose(logprob, want_logprob, rtol=1e-5, atol=2e-7)
  np.testing.assert_allclose(entropy, want_entropy, rtol=1e-5, atol=2e-7)
  assert (np.asarray(entropy) >= 0).all() and (np.asarray(logprob) <= 0).all()
  gradient = score_gradient(logits_V, targets, 1.0, 1.0, 1.0)
  np.testing.assert_allclose(gradient, references.score_logits_gradient(logits_V, targets, 1.0), atol=1e-6)


def test_forbidden_vocabulary_entries_count_as_probability_zero():
  """Kills: an entropy that is NaN where a logit is -inf (a padded vocabulary)."""
  logits_V, targets = some_logits(1.0)
  padded_V = np.concatenate([logits_V, np.full((B, T, 3), -np.inf, np.float32)], axis=-1)
  for got, want in zip(
    scores(padded_V, targets, temperature=1.3),
    references.score_logits(logits_V, targets, 1.3),
  ):
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_bfloat16_logits_are_scored_in_float32():
  """Kills: a softmax taken in the dtype of the logits (bfloat16 is wrong in the third digit)."""
  logits_V, targets = some_logits(3.0)
  narrow_V = jnp.asarray(logits_V, jnp.bfloat16)
  logprob, entropy = scores(narrow_V, targets, temperature=0.7)
  want_logprob, want_entropy = references.score_logits(np.asarray(narrow_V, np.float64), targets, 0.7)
  assert logprob.dtype == entropy.dtype == jnp.float32
  np.testing.assert_allclose(logprob, want_logprob, rtol=2e-6, atol=2e-6)
  np.testing.assert_allclose(entropy, want_entropy, rtol=2e-6, atol=2e-6)


@functools.cache
def score_and_gradients(chunk):
  def total(hidden_BTD, head_DV, targets_BT, weight_BT, temperature):
    logprob_BT, entropy_BT = score(hidden_BTD, head_DV, targets_BT, temperature=temperature, chunk=chunk)
    return jnp.sum(weight_BT * logprob_BT), (logprob_BT, entropy_BT)

  return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("chunk", [1, 3, T, T + 4])
def test_score_by_chunks_agrees_with_float64(temperature, chunk):
  """Kills: chunks put back in the wrong order, padding that shifts the rest, an unscaled or sign-flipped gradient."""
  hidden_BTD, head_DV, targets_BT = hidden_states()
  weight_BT = np.random.default_rng(2).normal(size=(B, T)).astype(np.float32)

  (_, (logprob_BT, entropy_BT)), (to_hidden, to_head) = score_and_gradients(chunk)(
    hidden_BTD, head_DV, targets_BT, weight_BT, temperature
  )
  logits_BTV = hidden_BTD.astype(np.float64) @ head_DV.astype(np.float64)
  want_logprob, want_entropy = references.score_logits(logits_BTV, targets_BT, temperature)
  assert logprob_BT.shape == entropy_BT.shape == (B, T)
  np.testing.assert_allclose(logprob_BT, want_logprob, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(entropy_BT, want_entropy, rtol=1e-5, atol=1e-5)
  to_logits = weight_BT[..., None] * references.score_logits_gradient(logits_BTV, targets_BT, temperature)
  np.testing.assert_allclose(to_hidden, to_logits @ head_DV.T, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(to_head, np.einsum("btd,btv->dv", hidden_BTD, to_logits), rtol=1e-4, atol=1e-5)


def test_bfloat16_states_give_float32_logits():
  """Kills: logits accumulated or rounded in bfloat16, which moves a log-prob by hundredths of a nat."""
  hidden_BTD, head_DV, targets_BT = (jnp.asarray(x) for x in hidden_states())
  hidden_BTD = hidden_BTD.astype(jnp.bfloat16)
  logprob_BT, entropy_BT = jax.jit(functools.partial(score, temperature=1.0, chunk=3))(hidden_BTD, head_DV, targets_BT)
  rounded_DV = np.asarray(head_DV.astype(jnp.bfloat16), np.float64)
  want = references.score_logits(np.asarray(hidden_BTD, np.float64) @ rounded_DV, targets_BT, 1.0)
  np.testing.assert_allclose(logprob_BT, want[0], rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(entropy_BT, want[1], rtol=1e-4, atol=1e-4)


def test_no_array_holds_the_logits_of_all_tokens():
  """Kills: a score that computes [B, T, V] at once, in the forward or in the backward pass."""
  hidden_BTD, head_DV, targets_BT = (jnp.asarray(x) for x in hidden_states())

  def total(hidden_BTD):
    return jnp.sum(score(hidden_BTD, head_DV, targets_BT, temperature=1.0, chunk=1)[0])

  lowered = str(jax.make_jaxpr(jax.grad(total))(hidden_BTD))
  assert f"f32[{B},1,{V}]" in lowered
  for stacked in (f"[{B},{T},{V}]", f"[{T},{B},1,{V}]"):
    assert stacked not in lowered
