"""What must hold between the losses, whatever their numbers: limits, exact equalities, symmetries of a batch."""

import dataclasses

import jax
import numpy as np
import pytest
from objective_batches import CONFIG, SHAPE, build, hyper, on_policy, run, spoilt, tokens

from estr_jax.objective.losses import LOSSES, METHODS, needs
from estr_jax.objective.triangle import EDGES, MissingInput, log_behaviour_ratio, log_ratio

CLIP = {"clip_low": CONFIG.clip_low, "clip_high": CONFIG.clip_high}
NO_CLIP = {"clip_low": np.inf, "clip_high": np.inf}
SEEDS = (1, 2, 3, 4)


def same(one, other, rtol=0.0):
  """Every array of two results; bit for bit where rtol is 0."""
  for field, got, want in zip(one._fields, one, other):
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol / 10, err_msg=field)


def differ(one, other) -> bool:
  return any(not np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(one, other))


def rows(batch, chosen):
  """The batch as a microbatch sees it that holds only some of its rows: the others are padding."""
  here = np.isin(np.arange(len(batch.mask)), chosen)[:, None]
  integers = {name: np.where(here, getattr(batch, name), 0) for name in ("segment", "group")}
  return dataclasses.replace(batch, mask=batch.mask & here, **integers)


# ---- Limits of the entropy-scaled mask.


@pytest.mark.parametrize("edge", EDGES)
def test_estr_without_a_bound_is_ppo_bit_for_bit(edge):
  """Kills: anything that ESTR, its one-sided or its soft form adds to the surrogate besides its mask or weight."""
  for seed in SEEDS:
    policy, batch = build(seed)
    plain = run("ppo", policy, batch, edge=edge)
    for name in ("estr", "estr_one_sided", "estr_soft"):
      same(run(name, policy, batch, edge=edge, tau=np.inf), plain)
    assert differ(run("estr", policy, batch, edge=edge, tau=1e-3), plain)


@pytest.mark.parametrize("entropy, eps", [(0.0, 0.49), (0.24, 0.25), (0.48, 0.01)])
def test_constant_entropy_is_a_fixed_width(entropy, eps):
  """H + eps = C keeps |delta| <= sqrt(tau C). Kills: eps multiplied, added to S, or left out; a one-sided mask."""
  for seed in SEEDS:
    policy, batch = build(seed)
    batch = dataclasses.replace(batch, entropy=np.full(SHAPE, entropy, np.float32))
    scaled = run("estr", policy, batch, tau=0.8, eps=eps)
    same(scaled, run("fixed_width", policy, batch, width=np.sqrt(0.8 * 0.49)))
    with np.errstate(invalid="ignore"):
      inside = batch.mask & (np.abs(policy.logprob - batch.logprob) <= np.sqrt(0.8 * 0.49))
    np.testing.assert_array_equal(scaled.keep, inside)


def test_the_power_of_the_scale():
  """Kills: the power on delta or on S; a power that is not the entropy's. 0 is a fixed width sqrt(tau), 1 is ESTR."""
  for seed in SEEDS:
    policy, batch = build(seed)
    same(run("estr_power", policy, batch, power=0.0, tau=0.2), run("fixed_width", policy, batch, width=np.sqrt(0.2)))
    same(run("estr_power", policy, batch, power=1.0, tau=0.2), run("estr", policy, batch, tau=0.2))


def test_the_scales_of_the_ablations():
  """Kills: ESTR by the learner's entropy or by Gini that reads another field, or is scaled otherwise than by H."""
  for seed in SEEDS:
    policy, batch = build(seed)
    of_learner = dataclasses.replace(batch, entropy=policy.entropy)
    of_gini = dataclasses.replace(batch, entropy=batch.gini)
    same(run("estr_learner_entropy", policy, batch, tau=0.1), run("estr", policy, of_learner, tau=0.1))
    same(run("estr_gini", policy, batch, tau=0.1), run("estr", policy, of_gini, tau=0.1))


def test_one_sided_estr_drops_what_estr_drops_outward_and_no_more():
  """Kills: the side taken from delta alone, or from A alone, or the inner side."""
  for seed in SEEDS:
    policy, batch = build(seed)
    both, one = (run(name, policy, batch, tau=0.05) for name in ("estr", "estr_one_sided"))
    usable = run("ppo", policy, batch).keep
    with np.errstate(invalid="ignore"):
      outward = batch.advantage * (policy.logprob - batch.logprob) > 0
    np.testing.assert_array_equal(one.keep, both.keep | (usable & ~outward))


# ---- Limits of the others.


def test_dual_clip_without_a_bound_is_ppo_bit_for_bit():
  """Kills: a dual clip that acts where A >= 0, or at any other place than past its bound."""
  for seed in SEEDS:
    policy, batch = build(seed)
    for edge in EDGES:
      same(run("dual_clip", policy, batch, edge=edge, dual=np.inf), run("ppo", policy, batch, edge=edge))
      positive = dataclasses.replace(batch, advantage=np.abs(batch.advantage))
      same(run("dual_clip", policy, positive, edge=edge, dual=1.01), run("ppo", policy, positive, edge=edge))


def alone(seed):
  """A batch in which every sequence has one token."""
  policy, batch = build(seed)
  segment = np.where(batch.segment > 0, np.arange(1, SHAPE[1] + 1), 0).astype(np.int32)
  return policy, dataclasses.replace(batch, segment=segment)


@pytest.mark.parametrize("edge", EDGES)
def test_sequences_of_one_token(edge):
  """GSPO is PPO; GMPO is PPO with the clip [exp(-band), exp(band)]; every scope of TIS and MIS is the token's.

  Kills: a mean divided by anything but the tokens, a sum or a mean that crosses a border, one side cut by the other.
  """
  for seed in SEEDS:
    policy, batch = alone(seed)
    same(run("gspo", policy, batch, edge=edge, **CLIP), run("ppo", policy, batch, edge=edge), rtol=1e-6)
    band = {"clip_low": 1 - np.exp(-0.4), "clip_high": np.exp(0.4) - 1}
    same(run("gmpo", policy, batch, edge=edge, band=0.4), run("ppo", policy, batch, edge=edge, **band), rtol=2e-6)
    for name in ("tis", "mis"):
      token, sequence = (run(name, policy, batch, edge=edge, scope=scope) for scope in ("token", "sequence"))
      same(sequence, token, rtol=1e-6)
    geometric, token = (run("tis", policy, batch, edge=edge, scope=scope) for scope in ("geometric", "token"))
    same(geometric, token, rtol=1e-6)


def test_sat_with_one_size_of_delta_is_ppo():
  """Kills: >= in place of >, which shrinks every clip where the quantile is every token's own size."""
  for quantile in (0.9, 0.5):
    policy, batch = build(1, kinds=["policy"] * 18)
    sign = np.where(np.arange(18).reshape(SHAPE) % 2, 1, -1)
    batch = dataclasses.replace(batch, logprob=np.full(SHAPE, -2.0, np.float32))
    policy = policy._replace(logprob=(-2.0 + 0.5 * sign).astype(np.float32))
    same(run("sat", policy, batch, quantile=quantile), run("ppo", policy, batch, clip_low=0.2, clip_high=0.2))


def test_sat_draws_in_one_end_of_the_stalest():
  """|delta| of 0.1 nine times and then 0.3: q = 0.1 + 0.1 x 0.2 between the last two, c = 1 / (1 + (0.3 / q)^2).

  Kills: another kernel, a quantile without interpolation, the end chosen by A, both ends drawn in.
  """
  delta = np.array([0.1] * 10 + [0.3])
  q = 0.1
  c = 1 / (1 + (0.3 / q) ** 2)
  for sign in (1.0, -1.0):
    policy, batch = tokens(-3.0 + sign * delta, -3.0, advantage=sign)
    value = run("sat", policy, batch).value
    want = -sign * np.exp(sign * delta)
    want[-1] = -sign * (1 + sign * 0.2 * c)
    np.testing.assert_allclose(value[0], want, rtol=1e-5)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("scope", ["token", "sequence"])
def test_a_mask_and_a_truncation_without_bounds_are_one_weight(edge, scope):
  """Kills: a mask that loses the weight of what it keeps, and a band on another ratio than the weight's."""
  for seed in SEEDS:
    policy, batch = build(seed)
    words = {"edge": edge, "scope": scope}
    masked = run("mis", policy, batch, low=0.0, high=np.inf, **words)
    same(masked, run("tis", policy, batch, cap=np.inf, **words))


def test_masks_without_a_bound_are_the_plain_ratio():
  """Kills: a clip or a weight besides the mask in M2PO, IPO and TRM."""
  for seed in SEEDS:
    policy, batch = build(seed, kinds=np.where(np.random.default_rng(seed).random(18) < 0.2, "tool", "policy"))
    plain = run("ppo", policy, batch, **NO_CLIP)
    same(run("m2po", policy, batch, bound=np.inf), plain)
    same(run("ipo", policy, batch, bound=1.0), plain)
    for divergence in ("k3", "vocabulary"):
      same(run("trm", policy, batch, divergence=divergence, bound=np.inf), plain)


def test_decoupled_ppo_is_original_icepop_without_a_band():
  """Kills: the behaviour weight with a gradient, left out, or upside down in one of the two."""
  for seed in SEEDS:
    policy, batch = build(seed)
    want = run("icepop", policy, batch, edge="proximal", low=0.0, high=np.inf)
    same(run("decoupled", policy, batch), want)


def test_a3po_of_fresh_tokens_is_ppo():
  """Kills: an off-by-one of the staleness: only d >= 2 moves the proximal policy away from mu."""
  for seed in SEEDS:
    policy, batch = build(seed)
    fresh = dataclasses.replace(batch, staleness=batch.staleness % 2)
    same(run("a3po", policy, fresh), run("ppo", policy, fresh))


def test_a3po_weight_and_ratio_multiply_to_the_direct_ratio():
  """q / mu times pi / q is pi / mu: without a clip all staleness is alike. With one, it is E^(1 / d) that is clipped.

  Kills: an interpolation that moves with theta, one between the wrong policies, the exponent d / (d - 1).
  """
  for seed in SEEDS:
    policy, batch = build(seed, kinds=["policy"] * 18)
    same(run("a3po", policy, batch, **NO_CLIP), run("ppo", policy, batch, **NO_CLIP), rtol=3e-6)
  for d in (1, 2, 5):
    E = 1.6
    policy, batch = tokens(np.log(E) - 3.0, -3.0, staleness=d)
    clipped = E ** (1 - 1 / d) * min(E ** (1 / d), 1.28)
    np.testing.assert_allclose(run("a3po", policy, batch).value, -clipped, rtol=1e-6)


def test_cispo_without_bounds_is_plain_importance_sampling():
  """Kills: 1 + clip_high taken for the cap itself, a minimum with the unclipped ratio."""
  for seed in SEEDS:
    policy, batch = build(seed)
    plain = run("tis", policy, batch, cap=np.inf)
    same(run("cispo", policy, batch, **NO_CLIP), plain)
    capped = run("cispo", policy, batch, clip_low=1.0, clip_high=0.5)
    same(capped, run("tis", policy, batch, cap=1.5))


def test_gipo_of_a_wide_gaussian_is_the_plain_ratio():
  """Kills: a Gaussian that multiplies, or is not detached."""
  for seed in SEEDS:
    policy, batch = build(seed)
    same(run("gipo", policy, batch, width=np.inf), run("ppo", policy, batch, **NO_CLIP))


def test_stare_of_a_high_entropy_is_the_dual_clip():
  """Kills: a gate the wrong way round, a boost that acts behind a closed gate."""
  for seed in SEEDS:
    policy, batch = build(seed)
    plain = run("dual_clip", policy, batch, dual=10.0)
    same(run("stare", policy, batch, target=0.0), plain)
    same(run("stare", policy, batch, target=np.inf, boost=1.0), plain)
    boosted = run("stare", policy, batch, target=np.inf, boost=2.0, share=1.0)
    good = batch.mask & (batch.advantage > 0)
    np.testing.assert_allclose(boosted.value, np.where(good, 2 * plain.value, plain.value), rtol=1e-6)


def test_stable_reinforce_within_its_bounds_is_ppo():
  """Kills: a bound that moves what it should leave, advantages that are standardised and not only looked at."""
  for seed in SEEDS:
    policy, batch = build(seed, kinds=["policy"] * 18)
    same(run("stable_reinforce", policy, batch, ratio_low=1e-9, ratio_high=1e9, sigmas=9.0), run("ppo", policy, batch))


def test_the_parts_of_the_covariance_losses():
  """Without candidates Clip-Cov is PPO; without a coefficient KL-Cov is the plain ratio. Kills: another base loss."""
  for seed in SEEDS:
    policy, batch = build(seed)
    same(run("clip_cov", policy, batch, low=1e9, high=2e9), run("ppo", policy, batch))
    same(run("kl_cov", policy, batch, coefficient=0.0), run("ppo", policy, batch, **NO_CLIP))


def test_gapo_of_a_group_that_is_right_or_alone_right():
  """With all right the clip is clip_low on both sides; with one of k right, clip_high above.

  Kills: c and k - c confused, a count of tokens in place of sequences, groups that are mixed up.
  """
  policy, batch = build(2, kinds=["policy"] * 18)
  segment = np.repeat([[1, 1, 2, 2, 2, 3]], 3, axis=0).astype(np.int32)
  batch = dataclasses.replace(batch, mask=np.ones(SHAPE, bool), segment=segment, group=np.ones(SHAPE, np.int32))
  policy = policy._replace(logprob=np.float32(-1.0) + np.zeros(SHAPE, np.float32))
  batch = dataclasses.replace(batch, logprob=np.full(SHAPE, -1.24, np.float32), advantage=np.ones(SHAPE, np.float32))
  all_right = dataclasses.replace(batch, reward=np.ones(SHAPE, np.float32))
  one_right = dataclasses.replace(batch, reward=np.zeros(SHAPE, np.float32))
  one_right.reward[1, 2:5] = 1.0
  for given, high in ((all_right, 0.2), (one_right, 0.28)):
    np.testing.assert_allclose(run("gapo", policy, given).value, -min(np.exp(0.24), 1 + high), rtol=1e-6)
  half = dataclasses.replace(batch, reward=np.repeat([[1, 1, 0, 0, 0, 1]], 3, axis=0).astype(np.float32))
  np.testing.assert_allclose(run("gapo", policy, half).value, -(1.2 + 0.08 * 3 / 8), rtol=1e-6)


def test_trm_by_hand():
  """mu = (1/2, 1/4, 1/4), pi = (1/4, 1/4, 1/2): KL(mu || pi) = ln 2 / 4; pi = (1/8, 3/8, 1/2): ln(4) / 2 + ...

  Kills: KL(pi || mu), a mean in place of the worst, the sampled token's term alone.
  """
  mu = np.array([0.5, 0.25, 0.25])
  near, far = np.array([0.25, 0.25, 0.5]), np.array([0.125, 0.375, 0.5])
  of_near, of_far = 0.25 * np.log(2), 0.5 * np.log(4) + 0.25 * np.log(2 / 3) + 0.25 * np.log(0.5)
  log_pi = np.log([near, near, far, near])
  policy, batch = tokens(
    log_pi[:, 0], np.log(0.5), vocabulary=np.log([mu] * 4), policy_vocabulary=log_pi, segment=[1, 1, 2, 2]
  )
  for bound, want in (
    (of_near * 0.99, [0, 0, 0, 0]),
    (of_near * 1.01, [1, 1, 0, 0]),
    (of_far * 0.99, [1, 1, 0, 0]),
    (of_far * 1.01, [1, 1, 1, 1]),
  ):
    got = run("trm", policy, batch, divergence="vocabulary", bound=bound)
    np.testing.assert_array_equal(got.keep[0], np.array(want, bool))
  np.testing.assert_allclose(got.value[0], -np.exp(log_pi[:, 0]) / 0.5, rtol=1e-6)


def test_opsm_drops_whole_unlikely_sequences_of_negative_advantage():
  """Kills: the sign of the mean, a sum in place of the mean, sequences of A >= 0 that are dropped too."""
  policy, batch = tokens(
    [-1.3, -1.0, -1.3, -1.0, -0.7, -1.0], -1.0, advantage=[-1, -1, 1, 1, -1, -1], segment=[1, 1, 2, 2, 3, 3]
  )
  np.testing.assert_array_equal(run("opsm", policy, batch, bound=0.149).keep[0], [0, 0, 1, 1, 1, 1])
  assert run("opsm", policy, batch, bound=0.151).keep.all()


def test_m2po_drops_the_largest_outward_moves_first():
  """Outward squares 0.01, 0.04, 0.25: the mean of two is 0.025, of three 0.1. Kills: <, the mean over all tokens."""
  policy, batch = tokens([-0.9, -0.8, -0.5, -1.9, -1.0], -1.0, advantage=1.0)
  np.testing.assert_array_equal(run("m2po", policy, batch, bound=0.0251).keep[0], [1, 1, 0, 1, 1])
  np.testing.assert_array_equal(run("m2po", policy, batch, bound=0.0249).keep[0], [1, 0, 0, 1, 1])
  np.testing.assert_array_equal(run("m2po", policy, batch, bound=0.1001).keep[0], [1, 1, 1, 1, 1])
  np.testing.assert_array_equal(run("m2po", policy, batch, bound=0.0001).keep[0], [0, 0, 0, 1, 1])


def test_vcpo_norm_is_that_of_the_score_in_the_logits():
  """b of two sequences of one token, from || onehot - p ||^2 itself. Kills: p for 1 - p, w for w^2, a group mean."""
  p = np.array([[0.7, 0.2, 0.1], [0.05, 0.9, 0.05]])
  mu = np.array([0.5, 0.8])
  policy, batch = tokens(
    np.log(p[:, 0]), np.log(mu), policy_vocabulary=np.log(p), segment=[1, 2], reward=[1.0, 0.25], advantage=np.nan
  )
  policy = policy._replace(gini=(1 - (p**2).sum(-1, keepdims=True).T).astype(np.float32))
  norm = ((np.eye(3)[0] - p) ** 2).sum(-1)
  w = p[:, 0] / mu
  W = w**2 * norm
  b = W @ [1.0, 0.25] / W.sum()
  np.testing.assert_allclose(run("vcpo", policy, batch).gradient[0], -w * ([1.0, 0.25] - b), rtol=1e-5)


def test_a_vcpo_baseline_lies_among_the_rewards():
  """Kills: a norm that rounding makes negative at sure tokens, where the sum of the weights is then anything."""
  log_p = -(10.0 ** np.random.default_rng(0).uniform(-7.5, -5, size=40))
  policy, batch = tokens(log_p, log_p, segment=np.arange(1, 41), reward=np.arange(40) % 2)
  policy = policy._replace(gini=np.float32(1) - np.square(np.exp(policy.logprob)))
  R_less_b = -run("vcpo", policy, batch).gradient[0]
  assert ((R_less_b >= 0) == (np.arange(40) % 2 == 1)).all() and (np.abs(R_less_b) <= 1).all()


def test_asympo_of_a_group_of_mean_0_has_no_loss_and_yet_a_gradient():
  """Kills: a mean NLL with a gradient, which leaves none; one over the row or the batch."""
  for seed in SEEDS:
    policy, batch = build(seed)
    got = run("asympo", policy, batch)
    for row, segment in {(r, s) for r, s in zip(*np.nonzero(batch.mask)) for s in [batch.segment[r, s]]}:
      here = batch.mask & (np.arange(3)[:, None] == row) & (batch.segment == segment)
      np.testing.assert_allclose(got.value[here].mean(), batch.advantage[here][0], rtol=1e-5)
    assert (got.gradient != 0).any()


# ---- On-policy: the plain policy gradient.


def surprise_boosted(policy, batch):
  good = batch.mask & (batch.advantage > 0)
  number = int(np.ceil(0.1 * good.sum()))
  bar = np.sort(-policy.logprob[good])[::-1][number - 1] if number else np.inf
  return np.where(good & (-policy.logprob >= bar), 1.1, 1.0)


def without_its_chosen(policy, batch):
  A, log_p = (x[batch.mask].astype(np.float64) for x in (batch.advantage, policy.logprob))
  cov = np.full(SHAPE, -np.inf)
  cov[batch.mask] = (A - A.mean()) * (log_p - log_p.mean())
  cov[(cov <= 1) | (cov >= 5)] = -np.inf
  return np.where((cov == cov.max()) & (cov > -np.inf), 0.0, 1.0)


def over_mean_nll(policy, batch):
  result = np.ones(SHAPE)
  for row in range(SHAPE[0]):
    for segment in (1, 2, 3):
      here = batch.mask[row] & (batch.segment[row] == segment)
      if here.any():
        result[row, here] = 1 / -policy.logprob[row, here].mean(dtype=np.float64)
  return result


def reward_less_baseline(policy, batch):
  """(R - b) / A with w = 1: b is the mean of R weighted by the sequences' norms."""
  result = np.ones(SHAPE)
  for group in (1, 2, 3):
    there = batch.mask & (batch.group == group)
    norm = np.where(there, 1 - 2 * np.exp(policy.logprob, dtype=np.float64) + 1 - policy.gini, 0.0)
    if there.any():
      b = (norm * np.where(there, batch.reward, 0.0)).sum() / norm.sum()
      result[there] = (batch.reward[there] - b) / batch.advantage[there]
  return result


# Where mu = q = pi a loss's gradient in log pi is -A, but for these, which multiply it on purpose.
ON_POLICY_FACTOR = {
  "asympo": over_mean_nll,  # divides by the response's mean NLL, on-policy or not
  "stare": surprise_boosted,  # boosts the most surprising good tokens while the entropy is low
  "clip_cov": without_its_chosen,  # drops its tokens of largest covariance
  "vcpo": reward_less_baseline,  # takes rewards and makes its own advantages
}
ON_POLICY_CHANGES = {"stare": {"target": np.inf}}  # the gate is open, whatever the entropy


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_method_is_the_plain_policy_gradient(name):
  """Kills: a wrong sign, a mask that drops on-policy tokens, a weight, a clip or a penalty that acts at ratio 1."""
  for seed in SEEDS:
    policy, batch = on_policy(seed)
    batch = dataclasses.replace(batch, advantage=np.where(batch.advantage == 0, np.float32(0.3), batch.advantage))
    factor = ON_POLICY_FACTOR[name](policy, batch) if name in ON_POLICY_FACTOR else np.ones(SHAPE)
    got = run(name, policy, batch, **ON_POLICY_CHANGES.get(name, {}))
    np.testing.assert_array_equal(got.keep, batch.mask & (factor != 0) if name == "clip_cov" else batch.mask)
    assert not got.clipped.any()
    want, probability = np.zeros(SHAPE), np.zeros_like(policy.vocabulary)
    want[batch.mask] = -(batch.advantage * factor)[batch.mask]
    np.testing.assert_allclose(got.gradient, want, rtol=2e-4 if name == "vcpo" else 2e-6, atol=1e-6)
    if name == "score_centering":  # A p_v: of mean 0 in the logits
      probability[batch.mask] = np.exp(policy.vocabulary[batch.mask])
    correction = -want[..., None] * probability
    np.testing.assert_allclose(got.vocabulary_gradient, correction, rtol=2e-6)


def test_the_exceptions_are_exceptions():
  """Kills: an entry of the table above that hides an agreement with -A."""
  for name, factor in ON_POLICY_FACTOR.items():
    factors = [factor(*on_policy(seed)) for seed in range(20)] if name != "vcpo" else [np.zeros(1)]
    assert any((f != 1).any() for f in factors), name


# ---- Score centering: expectations over the whole vocabulary.


def expected_logit_gradient(name, **changes):
  """E_mu of the gradient in the logits, [V], float64, with A = 1 for every action of one context."""
  log_m, log_p = (np.log(x) for x in ([0.4, 0.3, 0.2, 0.06, 0.04], [0.2, 0.25, 0.05, 0.3, 0.2]))
  V = len(log_m)
  policy, batch = tokens(log_p, log_m, vocabulary=[log_m] * V, policy_vocabulary=[log_p] * V)
  got = run(name, policy, batch, **changes)
  in_logprob = got.vocabulary_gradient[0].astype(np.float64) + np.diag(got.gradient[0])
  in_logits = in_logprob - in_logprob.sum(-1, keepdims=True) * np.exp(log_p)
  return np.exp(log_m) @ in_logits


@pytest.mark.parametrize("weight, high", [("one", 0.0), ("tis", 2.0), ("tis", 0.5), ("mis", 4.0), ("tis", 1e9)])
def test_centred_scores_have_mean_0(weight, high):
  """Kills: the correction left out, weighed by p, of the other sign, or itself differentiated."""
  np.testing.assert_allclose(expected_logit_gradient("score_centering", weight=weight, high=high), 0.0, atol=1e-7)
  if high < 1e9:
    truncated = {"one": ("tis", {"cap": 1e-9}), "tis": ("tis", {"cap": high}), "mis": ("mis", {"high": high})}[weight]
    assert np.abs(expected_logit_gradient(truncated[0], **truncated[1])).max() > (1e-11 if weight == "one" else 1e-2)


def test_score_centering_without_truncation_is_importance_weighted_reinforce():
  """The correction is E_pi of the score, 0 in the logits. Kills: a correction that is not the expectation."""
  for seed in SEEDS:
    policy, batch = build(seed, kinds=["policy"] * 18)
    centred = run("score_centering", policy, batch, weight="tis", high=1e9)
    plain = run("tis", policy, batch, cap=np.inf)
    np.testing.assert_array_equal(centred.gradient, plain.gradient)
    in_vocabulary = np.where(batch.mask[..., None], centred.vocabulary_gradient, 0.0).astype(np.float64)
    p = np.exp(np.where(batch.mask[..., None], policy.vocabulary, 0.0), dtype=np.float64)
    seen = np.isfinite(batch.vocabulary).all(-1) & batch.mask  # where mu covers all that pi can say
    in_logits = in_vocabulary - p * in_vocabulary.sum(-1, keepdims=True)
    np.testing.assert_allclose(in_logits[seen], 0.0, atol=1e-5)


# ---- Symmetries of a batch.


@pytest.mark.parametrize("name", LOSSES)
def test_rubbish_outside_the_mask_changes_nothing(name):
  """Kills: a value, a gradient or a statistic that reads a tool token's or a padded token's record."""
  for seed in SEEDS:
    policy, batch = build(seed, kinds=np.random.default_rng(seed).choice(["policy", "tool"], size=18, p=[0.7, 0.3]))
    clean = run(name, *spoilt(policy, batch, 0.0))
    for bad in (np.nan, -np.inf, np.inf, 1e30):
      same(run(name, *spoilt(policy, batch, bad)), clean)


@pytest.mark.parametrize("name", LOSSES)
def test_the_order_of_rows_does_not_matter(name):
  """Kills: a statistic that runs over the rows in order, a neighbour's segment that is read."""
  for seed in SEEDS:
    policy, batch = build(seed)
    order = [2, 0, 1]
    turned = run(name, *jax.tree.map(lambda array: array[order], (policy, batch)))  # noqa: B023
    straight = jax.tree.map(lambda array: array[order], run(name, policy, batch))  # noqa: B023
    same(turned, straight, rtol=1e-5)


def packed_and_padded(seed):
  """The same sequences of 1, 2 and 3 tokens in one row, and one a row: two (policy, batch), and where they lie."""
  policy, batch = build(seed, kinds=["policy"] * 18)
  batch = dataclasses.replace(batch, mask=np.ones(SHAPE, bool), group=np.ones(SHAPE, np.int32))
  batch.group[0, 0] = 2
  # Row 0 of `build` may be short; every token of it is made a policy token of a known sequence.
  segment = np.zeros(SHAPE, np.int32)
  segment[0] = [1, 2, 2, 3, 3, 3]
  whole = np.arange(18).reshape(SHAPE)
  fill = lambda array: np.where(np.isfinite(array), array, np.float32(-1.0))  # noqa: E731
  policy, batch = jax.tree.map(lambda x: fill(x) if x.dtype == np.float32 else x, (policy, batch))
  packed = dataclasses.replace(batch, segment=segment, mask=segment > 0)
  places = np.full(SHAPE, -1)
  for row, columns in enumerate(([0], [1, 2], [3, 4, 5])):
    places[row, : len(columns)] = columns
  move = lambda array: array.reshape(18, *array.shape[2:])[np.maximum(places, 0)]  # noqa: E731
  spread_policy, spread = jax.tree.map(move, (policy, packed))
  spread = dataclasses.replace(spread, mask=places >= 0, segment=(places >= 0).astype(np.int32))
  return (policy, packed), (spread_policy, spread), (places >= 0, whole[0][places[places >= 0]])


@pytest.mark.parametrize("name", LOSSES)
def test_packed_rows_are_padded_rows(name):
  """Kills: a sum, a mean or a first token over a row in place of a segment."""
  for seed in SEEDS:
    packed, padded, (there, column) = packed_and_padded(seed)
    one, other = run(name, *packed), run(name, *padded)
    for field, got, want in zip(one._fields, other, one):
      np.testing.assert_allclose(got[there], want[0][column], rtol=1e-5, atol=1e-6, err_msg=field)


def split(name, policy, batch, **changes):
  """The result of a batch whose rows go through as microbatches of one row each."""
  parts = [run(name, policy, rows(batch, [row]), **changes) for row in range(SHAPE[0])]
  return type(parts[0])(*(np.stack([part[i][row] for row, part in enumerate(parts)]) for i in range(len(parts[0]))))


ALONE = [name for name, method in METHODS.items() if "group" not in method.scope and "batch" not in method.scope]


@pytest.mark.parametrize("name", ALONE)
def test_microbatches_change_nothing_for_what_reads_a_token_or_a_sequence(name):
  """Kills: a statistic over the batch in a method that METHODS says has none."""
  for seed in SEEDS:
    policy, batch = build(seed)
    same(split(name, policy, batch), run(name, policy, batch), rtol=1e-6)


# What shows it on a generated batch: numbers with which the statistic acts.
ACTING = {
  "stable_reinforce": {"sigmas": 1.0},
  "m2po": {"bound": 0.004},
  "stare": {"target": np.inf, "boost": 2.0},
  "clip_cov": {"low": 0.0},
  "kl_cov": {"coefficient": 1.0},
  "gapo": {"clip_high": 2.0},
}


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(ALONE)))
def test_microbatches_do_change_what_reads_a_group_or_a_batch(name):
  """Kills: a scope in METHODS that is wider than the method's, and these tests if their split does nothing."""
  changed = [
    differ(split(name, *build(seed), **ACTING.get(name, {})), run(name, *build(seed), **ACTING.get(name, {})))
    for seed in range(30)
  ]
  assert any(changed)


# ---- The triangle, and what a loss needs.


def test_the_ratios_of_the_triangle_multiply():
  """log B + log U = log E. Kills: an edge with its two policies swapped or taken from the wrong pair."""
  policy, batch = tokens([-1.0, -2.5], [-2.0, -0.5], log_q=[-0.25, -4.0])
  np.testing.assert_array_equal(log_ratio(policy.logprob, batch, "direct"), [[1.0, -2.0]])
  product = log_behaviour_ratio(batch) + log_ratio(policy.logprob, batch, "proximal")
  np.testing.assert_array_equal(product, log_ratio(policy.logprob, batch, "direct"))


NEEDS = {
  "estr": ({"edge": "direct"}, set()),
  "ppo": ({"edge": "proximal"}, {"proximal"}),
  "estr_learner_entropy": ({"edge": "direct"}, {"entropy"}),
  "estr_gini": ({"edge": "proximal"}, {"proximal"}),
  "icepop": ({"edge": "proximal"}, {"proximal"}),
  "tis": ({"edge": "direct"}, set()),
  "decoupled": ({}, {"proximal"}),
  "a3po": ({}, set()),
  "trm": ({"divergence": "vocabulary"}, {"vocabulary"}),
  "vcpo": ({}, {"entropy"}),
  "stare": ({"edge": "direct"}, {"entropy"}),
  "score_centering": ({}, {"vocabulary"}),
  "asympo": ({}, set()),
}


@pytest.mark.parametrize("name", NEEDS)
def test_needs_are_found_by_tracing(name):
  """Kills: an input that is computed for nobody, or is missing where it is read."""
  changes, want = NEEDS[name]

  def loss(policy, batch):
    return LOSSES[name](policy, batch, **hyper(name, **changes))

  assert {field for field in ("proximal", "reference", "entropy", "vocabulary") if needs(loss, field)} == want


def test_needs_of_another_form():
  """Kills: needs that are a list by name, and know nothing of the words."""
  assert not needs(lambda *scores: LOSSES["trm"](*scores, divergence="k3", bound=0.5), "vocabulary")
  assert not needs(lambda *scores: LOSSES["ppo"](*scores, **hyper("ppo", edge="direct")), "proximal")


@pytest.mark.parametrize("name", [name for name in LOSSES if "edge" in hyper(name)])
def test_an_edge_needs_its_policy(name):
  """Kills: an unknown edge, or a missing proximal policy, that silently becomes the direct edge."""
  policy, batch = tokens(-1.0, -1.0)
  with pytest.raises(MissingInput, match="proximal"):
    LOSSES[name](policy, batch, **hyper(name, edge="proximal"))
  with pytest.raises(ValueError, match="'behaviour'"):
    LOSSES[name](policy, batch, **hyper(name, edge="behaviour"))
