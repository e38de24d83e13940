"""Every loss in every form against its float64 reference: value, trust region, clip and gradient."""

import dataclasses

import numpy as np
import pytest
import references
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_batches import build, every_form, hyper, label, run

from estr_jax.objective.losses import LOSSES

# Numbers that are tried beside the defaults; a key of one loss alone as "loss.key".
TRIED = {
  "tau": [0.25, 4.0],
  "eps": [0.3],
  "power": [0.0, 2.0],
  "width": [0.1, 1.0],
  "clip_low": [0.05],
  "clip_high": [0.6],
  "dual": [1.5],
  "band": [0.1],
  "positive": [0.5],
  "negative": [2.0],
  "ratio_low": [0.5],
  "ratio_high": [1.7],
  "sigmas": [0.7, 1.5],
  "quantile": [0.37],
  "radius": [0.003, 0.7],
  "share": [0.13, 0.31],
  "clip_cov.low": [-0.3, 0.05],
  "clip_cov.high": [0.7],
  "coefficient": [1.5],
  "low": [0.9],
  "high": [1.3],
  "phi": [0.004, 0.9],
  "bound": [0.012, 0.13],
  "trm.bound": [0.03, 3.0],
  "cap": [1.15],
  "cispo.clip_low": [0.1],
  "positive_power": [1.0],
  "negative_decay": [2.5],
  "boost": [1.5],
  "target": [2.0],
  "score_centering.low": [0.9],
  "score_centering.high": [1.2],
}


def vary(name, form, seed) -> dict:
  """The hyper-parameters of one example: each keeps its default, or takes one of those tried."""
  random = np.random.default_rng(seed)
  values = hyper(name, **form)
  for key, default in values.items():
    tried = TRIED.get(f"{name}.{key}", TRIED.get(key, []))
    if not isinstance(default, str):
      # As float32, which is what the compiled loss is given.
      values[key] = float(np.float32(random.choice([default, *tried])))
  return values


def disturb(policy, batch, values, random):
  """The same example with every number off by some of float32's last places, for better or worse."""

  def off(x):
    return x * (1 + 1e-5 * random.choice([-1.0, 1.0], size=np.shape(x)))

  floats = ("logprob", "entropy", "gini", "advantage", "reward", "proximal", "vocabulary")
  batch = dataclasses.replace(batch, **{field: off(getattr(batch, field)) for field in floats})
  values = {
    key: value if isinstance(value, str) else value * (1 + random.choice([-1e-6, 1e-6]))
    for key, value in values.items()
  }
  logprob, entropy, gini, vocabulary = (off(x) for x in policy)
  return policy._replace(logprob=logprob, entropy=entropy, gini=gini, vocabulary=vocabulary), batch, values


def sensitivity(name, policy, batch, values, want: references.Loss):
  """How far the float64 value and gradient are moved by 16 of float32's last places in every input; None where a
  threshold lies within that, so that no float32 can be asked for the reference's answer."""
  if name in ("clip_cov", "kl_cov") and (batch.mask & np.isfinite(batch.logprob)).sum() == 2:
    return None  # two tokens have the same covariance, whatever they are
  random = np.random.default_rng(0)
  disturbed = [disturb(policy, batch, values, random) for _ in range(3)]
  moved = np.zeros(batch.mask.shape)
  for example in disturbed:
    other = references.evaluate(name, *example)
    distance = np.abs(other.value - want.value)
    if (other.keep != want.keep).any() or (other.clipped != want.clipped).any():
      return None
    if (distance > 5e-3 * np.abs(want.value) + 1e-3).any():  # a set that neither shows
      return None
    moved = np.maximum(moved, distance)
  return moved, references.gradients(name, *disturbed[0])


def check(name, policy, batch, values, moved=(0.0, (0.0, 0.0))) -> references.Loss:
  """Agreement to 1e-5, and in what is ill-conditioned to what a fiftieth of the disturbances has moved."""
  got, want = run(name, policy, batch, **values), references.evaluate(name, policy, batch, values)
  by_value, by_gradient = moved
  gradients = references.gradients(name, policy, batch, values)
  np.testing.assert_array_equal(got.keep, want.keep)
  np.testing.assert_array_equal(got.clipped, want.clipped)
  near(got.value, want.value, by_value)
  rounding = 1e-15 * np.abs(want.value) / references.STEP  # of a difference of huge values, in float64
  for mine, theirs, disturbed in zip((got.gradient, got.vocabulary_gradient), gradients, by_gradient):
    moved = np.abs(theirs - disturbed) if np.ndim(disturbed) else 0.0
    near(mine, theirs, moved + (rounding if mine.ndim == 2 else rounding[..., None]) / 0.02)
  dropped = ~want.keep
  for array in (got.entropy_gradient, got.gini_gradient):
    np.testing.assert_array_equal(array, 0.0)
  for array in (got.value, got.gradient, got.vocabulary_gradient):
    np.testing.assert_array_equal(array[dropped], 0.0)
  assert not (got.keep & ~batch.mask).any()
  return want


def near(got, want, moved):
  allowed = 1e-5 * np.abs(want) + 1e-6 + 0.02 * moved
  wrong = ~(np.abs(got - want) <= allowed)
  assert not wrong.any(), f"at {np.argwhere(wrong).tolist()}: {got[wrong]}, not {want[wrong]}"


def test_every_loss_has_a_reference():
  """Kills: a loss that is added to LOSSES and not held against float64."""
  assert set(LOSSES) == set(references.LOSSES)


@pytest.mark.parametrize("name, form", every_form(), ids=label)
def test_loss_agrees_with_float64(name, form):
  """Kills: a wrong sign, edge, clip side, weight, scale, direction of a KL, scope; a token outside the mask or with no
  stored log-prob that is kept; a detached quantity that moves, or a moving one that is detached; a NaN.

  The counts at the end kill batches that have become so tame that the comparison cannot fail.
  """
  seen = {"kept": 0, "dropped": 0, "clipped": 0, "unstable": 0, "examples": 0}

  @settings(max_examples=25, deadline=None, derandomize=True, database=None)
  @given(seed=st.integers(0, 2**32 - 1))
  def agrees(seed):
    policy, batch = build(seed)
    values = vary(name, form, seed)
    want = references.evaluate(name, policy, batch, values)
    seen["examples"] += 1
    moved = sensitivity(name, policy, batch, values, want)
    if moved is None:
      seen["unstable"] += 1
      return
    check(name, policy, batch, values, moved)
    has_ratio = batch.mask & np.isfinite(batch.logprob)
    seen["kept"] += want.keep.sum()
    seen["dropped"] += (has_ratio & ~want.keep).sum()
    seen["clipped"] += want.clipped.sum()

  agrees()
  assert seen["unstable"] <= 0.15 * seen["examples"], seen
  assert seen["kept"] >= 100, seen
  assert (seen["dropped"] == 0) if name in references.NOTHING_DROPPED else (seen["dropped"] >= 10), seen
  unclipped = {name, f"{name}-{label(form)}"} & references.NOTHING_CLIPPED
  assert (seen["clipped"] == 0) if unclipped else (seen["clipped"] >= 1), seen


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["padding", "tool", "unsampled", "broken"])
def test_a_batch_without_a_usable_token_has_loss_and_gradient_zero(name, kind):
  """Kills: NaN from a stored log-prob of -inf or NaN, and 0 / 0 or a kept token in an empty batch."""
  want = check(name, *build(0, kinds=[kind] * 18), hyper(name))
  assert name == "asympo" or not want.keep.any()


@pytest.mark.parametrize("name, form", every_form(), ids=label)
def test_a_single_token(name, form):
  """Kills: a statistic of one token that is 0 / 0: a spread, a quantile, a group of one, k - 1."""
  for seed in range(6):
    policy, batch = build(seed, kinds=["policy"] * 18)
    batch = dataclasses.replace(batch, mask=np.arange(18).reshape(3, 6) == 0)
    check(name, policy, batch, hyper(name, **form))


# Numbers with which no mask stands between an enormous ratio and the gradient.
OPEN = {"tau": np.inf, "phi": np.inf, "low": 0.0, "high": np.inf, "bound": np.inf, "width": np.inf, "cap": np.inf}


@pytest.mark.parametrize("name, form", every_form(), ids=label)
def test_an_enormous_ratio_stays_finite(name, form):
  """Kills: exp of an unbounded log-ratio, whose inf turns into NaN in the gradient."""
  policy, batch = build(0, kinds=["policy"] * 18)
  up = np.arange(18).reshape(3, 6) % 2 == 0
  high, low = np.where(up, np.float32(-1e-6), np.float32(-300.0)), np.where(up, np.float32(-300.0), np.float32(-1e-6))
  policy, batch = policy._replace(logprob=high), dataclasses.replace(batch, logprob=low, proximal=low)
  got = run(name, policy, batch, **form, **{key: OPEN[key] for key in OPEN if key in hyper(name)})
  assert got.keep.any()
  for array in (got.value, got.gradient, got.vocabulary_gradient):
    assert np.isfinite(array).all()
