"""Trust regions at their boundaries, and KPop's Bernoulli KL at the ends of [0, 1]."""

import itertools

import jax
import numpy as np
import pytest
import references

from estr_jax.objective import trust_regions

bernoulli_kl = jax.jit(trust_regions.bernoulli_kl)
bernoulli_kl_ball = jax.jit(trust_regions.bernoulli_kl_ball)
entropy_scaled = jax.jit(trust_regions.entropy_scaled)
ratio_band = jax.jit(trust_regions.ratio_band)

# The ratio bands of the paper at eps = 0.01: (tau, H, low, high).
BANDS = [
  (tau, entropy, low, high)
  for tau, row in {
    0.25: [(0.951, 1.051), (0.757, 1.32), (0.605, 1.65)],
    0.5: [(0.932, 1.073), (0.675, 1.48), (0.491, 2.04)],
    1.0: [(0.905, 1.105), (0.573, 1.75), (0.366, 2.73)],
    2.0: [(0.868, 1.152), (0.455, 2.20), (0.241, 4.14)],
    4.0: [(0.819, 1.221), (0.328, 3.05), (0.134, 7.46)],
  }.items()
  for entropy, (low, high) in zip((0.0, 0.3, 1.0), row)
]


@pytest.mark.parametrize("tau, entropy, low, high", BANDS)
def test_estr_has_the_published_ratio_bands(tau, entropy, low, high):
  """Kills: |delta| in place of its square, a missing eps, entropy in bits, tau on the wrong side."""
  ratio = np.array([[low * 0.99, low * 1.01, 1.0, high * 0.99, high * 1.01]])
  keep = entropy_scaled(np.log(ratio), np.full_like(ratio, entropy), tau=tau, eps=0.01)
  np.testing.assert_array_equal(keep, [[False, True, True, True, False]])


def test_the_edges_of_a_region_belong_to_it():
  """Kills: < in place of <= in any of the three regions."""
  zero = np.zeros((1, 1), np.float32)
  assert entropy_scaled(zero + 0.5, zero + 0.75, tau=0.25, eps=0.25).all()
  assert entropy_scaled(zero - 0.5, zero + 0.75, tau=0.25, eps=0.25).all()
  assert not entropy_scaled(zero + 0.5, zero + 0.75, tau=0.2499, eps=0.25).any()
  assert ratio_band(zero, low=1.0, high=2.0).all() and ratio_band(zero, low=0.5, high=1.0).all()
  assert not ratio_band(zero, low=1.001, high=2.0).any() and not ratio_band(zero, low=0.5, high=0.999).any()
  assert bernoulli_kl_ball(zero - 0.7, zero - 0.7, phi=0.0).all()


def test_the_ratio_band_has_two_sides():
  """Kills: low and high swapped, and bounds taken for log-ratios."""
  keep = ratio_band(np.log(np.array([[0.49, 0.51, 4.9, 5.1]])), low=0.5, high=5.0)
  np.testing.assert_array_equal(keep, [[False, True, True, False]])


def test_what_is_not_finite_is_not_kept():
  """Kills: a region so wide that it keeps a token with no ratio."""
  bad = np.array([[np.inf, -np.inf, np.nan]], np.float32)
  one, wide = np.ones_like(bad), float("inf")
  assert not entropy_scaled(bad, one, tau=wide, eps=0.01).any()
  assert not ratio_band(bad, low=0.0, high=wide).any()
  for log_p, log_q in ((bad, -one), (-one, bad), (bad, bad)):
    assert not bernoulli_kl_ball(log_p, log_q, phi=wide).any()


PROBABILITIES = (1e-8, 0.5, 1 - 1e-7, 1.0)


@pytest.mark.parametrize("p, q", list(itertools.product(PROBABILITIES, repeat=2)))
def test_bernoulli_kl_at_the_ends(p, q):
  """Kills: log(1 - p) by subtraction (0 or -inf near the ends), 0 log 0 = NaN, one half of the KL missing."""
  log_p, log_q = np.float32(np.log1p(p - 1)), np.float32(np.log1p(q - 1))
  with np.errstate(divide="ignore"):
    want = references.bernoulli_kl(log_p, log_q)
  np.testing.assert_allclose(bernoulli_kl(log_p, log_q), want, rtol=2e-6, atol=1e-14)


def test_bernoulli_kl_of_impossible_tokens():
  """Kills: NaN for p = 0, which is 0 log 0 + log(1 / (1 - q))."""
  log_half, impossible = np.float32(np.log(0.5)), np.float32(-np.inf)
  np.testing.assert_allclose(bernoulli_kl(impossible, log_half), np.log(2), rtol=1e-6)
  assert bernoulli_kl(log_half, impossible) == np.inf


def test_kpop_needs_both_directions():
  """Kills: KL(p || q) alone, KL(q || p) alone, and their mean: one is inside, the other outside."""
  log_p, log_q = np.float32(np.log(0.5)), np.float32(np.log(0.01))
  forward, backward = references.bernoulli_kl(log_p, log_q), references.bernoulli_kl(log_q, log_p)
  between, above = (forward + backward) * 0.51, max(forward, backward) * 1.01
  assert min(forward, backward) < between < max(forward, backward) < above
  for a, b in ((log_p, log_q), (log_q, log_p)):
    assert not bernoulli_kl_ball(np.full((1, 1), a), np.full((1, 1), b), phi=between).any()
    assert bernoulli_kl_ball(np.full((1, 1), a), np.full((1, 1), b), phi=above).all()
