"""Trust regions at their boundaries, the Bernoulli KL at the ends of [0, 1], and the bands of f-divergence balls."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from objective_batches import tokens

from estr_jax.objective import divergence_bands, trust_regions
from estr_jax.objective.surrogates import MAX_LOG_RATIO, clipped_surrogate

bernoulli_kl = jax.jit(trust_regions.bernoulli_kl)
bernoulli_kl_ball = jax.jit(trust_regions.bernoulli_kl_ball)
ratio_band = jax.jit(trust_regions.ratio_band)
probability_change = jax.jit(trust_regions.probability_change)
largest = jax.jit(trust_regions.largest)


@jax.jit
def entropy_scaled(delta, entropy, tau, eps, power=1.0):
  return trust_regions.at_most(trust_regions.scaled_square(delta, entropy, eps=eps, power=power), tau)


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
  keep = entropy_scaled(np.log(ratio), np.full_like(ratio, entropy), tau, 0.01)
  np.testing.assert_array_equal(keep, [[False, True, True, True, False]])


def test_the_power_scales_the_entropy():
  """Kills: a power of S or of delta. delta = 0.5, H + eps = 0.25: 0.25 / 0.25^p is 0.5 at p = 1/2 and 4 at p = 2."""
  zero = np.zeros((1, 1), np.float32)
  for power, score in ((0.0, 0.25), (0.5, 0.5), (1.0, 1.0), (2.0, 4.0)):
    got = trust_regions.scaled_square(zero - 0.5, zero + 0.125, eps=0.125, power=power)
    np.testing.assert_allclose(got, score, rtol=1e-6)


def test_the_edges_of_a_region_belong_to_it():
  """Kills: < in place of <= in any of the three regions."""
  zero = np.zeros((1, 1), np.float32)
  assert entropy_scaled(zero + 0.5, zero + 0.75, 0.25, 0.25).all()
  assert entropy_scaled(zero - 0.5, zero + 0.75, 0.25, 0.25).all()
  assert not entropy_scaled(zero + 0.5, zero + 0.75, 0.2499, 0.25).any()
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
  assert not entropy_scaled(bad, one, wide, 0.01).any()
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


def test_the_vocabulary_kl_passes_over_what_mu_never_says():
  """0 log 0 = 0; pi = mu has none; KL((1/2, 1/2, 0) || (1/4, 1/2, 1/4)) = ln 2 / 2. Kills: NaN, KL(pi || mu) = inf."""
  with np.errstate(divide="ignore"):
    log_m, log_p = np.log([[0.5, 0.5, 0.0]] * 2), np.log([[0.25, 0.5, 0.25], [0.5, 0.5, 0.0]])
  policy, batch = tokens([-1.0, -1.0], -1.0, vocabulary=log_m, policy_vocabulary=log_p)
  got = trust_regions.vocabulary_kl(policy, batch)[0]
  np.testing.assert_allclose(got[0], 0.5 * np.log(2), rtol=1e-6)


def test_a_change_of_probability_does_not_cancel():
  """Kills: exp(a) - exp(b), whose float32 difference of near equals has no right digits."""
  log_p = np.float32([-0.01, -3.0, -1e-6, -20.0, -2.0, -0.5])
  log_q = np.nextafter(log_p, np.float32(-100.0))
  log_q[-2:] = [-0.5, -2.0]
  np.testing.assert_allclose(probability_change(log_p, log_q), references.probability_change(log_p, log_q), rtol=3e-6)


def test_the_largest_of_some_tokens():
  """Kills: ties that are all taken, a number of 0 that takes none, tokens outside the set, a row-wise order."""
  value = np.float32([[3.0, 9.0, 5.0], [5.0, 1.0, 5.0]])
  where = np.array([[True, False, True], [True, True, True]])
  for number, want in ((0, [0, 0, 1, 0, 0, 0]), (1, [0, 0, 1, 0, 0, 0]), (3, [0, 0, 1, 1, 0, 1]), (99, where.ravel())):
    np.testing.assert_array_equal(np.asarray(largest(value, where, number)).ravel(), np.array(want, bool))
  assert not largest(value, np.zeros((2, 3), bool), 2).any()


def divergence(log_p, r, name):
  """D(r) = p f(r) + (1 - p) f((1 - p r) / (1 - p)), in float64 from its definition."""
  f = {"kl": lambda u: u - 1 - np.log(u), "tv": lambda u: np.abs(u - 1) / 2, "chi2": lambda u: (u - 1) ** 2}[name]
  p, other = np.exp(log_p), -np.expm1(log_p)
  with np.errstate(divide="ignore"):
    return p * f(r) + other * f(np.maximum(1 - p * r, 0.0) / other)


ANCHORS = np.log(np.array([[1e-7, 1e-4, 0.01, 0.2, 0.5, 0.9, 0.999]]))
FUNCTIONS = {"kl": divergence_bands.kl_band, "tv": divergence_bands.tv_band, "chi2": divergence_bands.chi2_band}


@pytest.mark.parametrize("radius", [0.005, 0.05, 0.5])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_ends_of_a_band_lie_on_the_sphere(name, radius):
  """D(end) = radius, wherever the simplex (r in [0, 1 / p]) and the cap of 100 let it.

  Kills: KL of the other direction, the other half of D left out, a bisection that stops early, p for 1 - p.
  """
  log_p = ANCHORS.astype(np.float32).astype(np.float64)
  low, high = (np.asarray(x, np.float64) for x in jax.jit(FUNCTIONS[name])(jnp.float32(log_p), radius))
  # chi2 as the paper's closed form 1 +- sqrt(radius (1 - p) / p) has it: D = p (r - 1)^2 / (1 - p).
  assert ((low <= 1) & (low >= 0) & (high >= 1) & (high <= np.minimum(np.exp(-log_p), 100) * (1 + 1e-6))).all()
  ends = {"low": (low, low > 1e-12), "high": (high, high < np.minimum(np.exp(-log_p), 100.0) * (1 - 1e-4))}
  for end, (r, inside) in ends.items():
    assert inside.any(), end
    np.testing.assert_allclose(divergence(log_p, r, name)[inside], radius, rtol=5e-4, err_msg=end)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_certain_token_can_only_lose(name):
  """p = 1: the upper end is 1; KL's lower end is exp(-radius), TV's 1 - radius. Kills: NaN and inf at the end."""
  low, high = jax.jit(FUNCTIONS[name])(np.zeros((1, 1), np.float32), 0.05)
  np.testing.assert_allclose(high, 1.0, rtol=1e-6)
  np.testing.assert_allclose(low, {"kl": np.exp(-0.05), "tv": 0.95, "chi2": 1.0}[name], rtol=1e-6)


# ---- The clipped surrogate by hand.


def surrogate(log_ratio, advantage, **bounds):
  def total(x):
    objective, clipped = clipped_surrogate(x, jnp.float32(advantage), **bounds)
    return jnp.sum(objective), (objective, clipped)

  gradient, (objective, clipped) = jax.jit(jax.grad(total, has_aux=True))(jnp.float32(log_ratio))
  return np.asarray(objective), np.asarray(clipped), np.asarray(gradient)


def test_the_clip_acts_outward_only():
  """Kills: a clip that acts like a mask, on both sides; min taken for max. Ratios of 2 and 1/2 with A of both signs."""
  delta, A = np.log([2.0, 2.0, 0.5, 0.5]), [1.0, -1.0, 1.0, -1.0]
  objective, clipped, gradient = surrogate(delta, A, clip_low=0.2, clip_high=0.28)
  np.testing.assert_allclose(objective, [1.28, -2.0, 0.5, -0.8], rtol=1e-6)
  np.testing.assert_array_equal(clipped, [True, False, False, True])
  np.testing.assert_allclose(gradient, [0.0, -2.0, 0.5, 0.0], rtol=1e-6)


def test_clip_higher():
  """DAPO: a ratio of 1.25 is clipped by 0.2 and free under 0.28; 0.75 is clipped by both when A < 0.

  Kills: clip_low and clip_high swapped, or one of them used on both sides.
  """
  delta, A = np.log([1.25, 0.75, 1.25, 0.75]), [1.0, -1.0, -1.0, 1.0]
  for high, want, clips in ((0.2, 1.2, [1, 1, 0, 0]), (0.28, 1.25, [0, 1, 0, 0])):
    objective, clipped, _ = surrogate(delta, A, clip_low=0.2, clip_high=high)
    np.testing.assert_array_equal(clipped, np.array(clips, bool))
    np.testing.assert_allclose(objective, [want, -0.8, -1.25, 0.75], rtol=1e-6)


def test_a_ratio_of_one_is_not_clipped_by_a_clip_of_zero():
  """Kills: >= in place of > in `clipped`, which counts on-policy tokens as clipped."""
  assert not surrogate([0.0, 0.0], [1.0, -1.0], clip_low=0.0, clip_high=0.0)[1].any()


def test_the_dual_clip_ends_the_push_of_a_huge_ratio():
  """Kills: dual on A > 0, dual as a ratio's upper clip for both signs, a gradient past it."""
  delta, A = np.log([4.0, 4.0, 2.5]), [1.0, -1.0, -1.0]
  objective, clipped, gradient = surrogate(delta, A, clip_low=0.2, clip_high=9.0, dual=3.0)
  np.testing.assert_allclose(objective, [4.0, -3.0, -2.5], rtol=1e-6)
  np.testing.assert_array_equal(clipped, [False, True, False])
  np.testing.assert_allclose(gradient, [4.0, 0.0, -2.5], rtol=1e-6)


def test_an_enormous_ratio_is_finite_without_a_gradient_and_marked():
  """Kills: exp of an unbounded log-ratio, whose inf turns into NaN; a bound that acts in silence."""
  delta, A = np.array([300.0, -300.0, 300.0]), [-1.0, 1.0, 0.0]
  objective, clipped, gradient = surrogate(delta, A, clip_low=np.inf, clip_high=np.inf)
  np.testing.assert_allclose(objective, [-np.exp(MAX_LOG_RATIO), np.exp(-MAX_LOG_RATIO), 0.0], rtol=1e-6)
  np.testing.assert_array_equal(gradient, 0.0)
  np.testing.assert_array_equal(clipped, [True, True, False])
