"""Each metric of a batch against a token-by-token count, and its algebra."""

import dataclasses

import diagnostics_reference as reference
import jax
import numpy as np
import pytest

from estr_jax.objective.diagnostics import (
  ENTROPY_EDGES,
  SCORE_EDGES,
  SCORE_EPS,
  SCORE_QUANTILES,
  STALENESS_EDGES,
  derive,
  diagnose,
  effective_sample_size,
  score_quantile,
  version_switches,
)
from estr_jax.observe.glossary import GLOSSARY
from estr_jax.structs import Batch, Mean, Scores, TokenLoss

EDGES_32 = ENTROPY_EDGES.astype(np.float32)
EDGES = {
  "entropy_edges": EDGES_32,
  "staleness_edges": STALENESS_EDGES,
  "score_edges": SCORE_EDGES.astype(np.float32),
  "eps": 0.01,
}
metrics = jax.jit(diagnose)


def hand_made(log_pi, log_mu, *, entropy=1.0, staleness=0, segment=1, mask=True, keep=None):
  """(policy, batch, token loss) of one row of tokens; a scalar stands for every token.

  Padded, so that rows of few tokens share a compiled program.
  """
  values = (log_pi, log_mu, entropy, staleness, segment, mask)
  (T,) = np.broadcast_shapes((1,), *map(np.shape, values))

  def full(value, dtype=np.float32):
    return np.pad(np.broadcast_to(np.asarray(value, dtype), (1, T)), [(0, 0), (0, -T % 40)])

  batch = Batch(
    tokens=full(1, np.int32),
    mask=full(mask, bool),
    logprob=full(log_mu),
    entropy=full(entropy),
    gini=full(0.5),
    staleness=full(staleness, np.int32),
    segment=full(segment, np.int32),
    group=full(1, np.int32),
    reward=full(0),
    advantage=full(1),
  )
  policy = Scores(full(log_pi), full(0.7), None)
  there = batch.mask & np.isfinite(batch.logprob)
  keep = there if keep is None else there & full(keep, bool)
  return policy, batch, TokenLoss(full(0), keep, np.zeros_like(keep))


def assert_same(got, want, rtol=1e-4):
  assert set(got) == set(want)
  for name in want:
    (total, count), (want_total, want_count) = (jax.tree.leaves(metrics[name]) for metrics in (got, want))
    np.testing.assert_allclose(total, want_total, rtol=rtol, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(count, want_count, err_msg=name)


@pytest.mark.parametrize("seed", range(12))
def test_metrics_agree_with_a_count_by_hand(seed):
  """Kills: a metric over masked or kept tokens only, or with a wrong ratio, sign, bin, denominator, edge or switch."""
  policy, batch, token_loss = reference.case(seed)
  want = reference.diagnostics(policy, batch, token_loss, **EDGES)
  assert_same(metrics(policy, batch, token_loss), want)
  assert want["loss/mask_fraction"][1] > 5


@pytest.mark.parametrize("kind", ["policy", "certain", "unsampled", "broken", "lost", "tool"])
def test_one_token_of_every_kind(kind):
  """Kills: a NaN or inf in a sum where there is a single token, without a ratio, an entropy, or a past."""
  policy, batch, token_loss = reference.case(3, shape=(1, 1), kinds=(kind,))
  got = metrics(policy, batch, token_loss)
  assert_same(got, reference.diagnostics(policy, batch, token_loss, **EDGES))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


def test_two_halves_merge_to_the_whole():
  """Kills: a metric that divides before it is merged (a mean of means)."""
  first, second = reference.case(1), reference.case(2)
  few = first[1].mask & (np.arange(first[1].mask.size).reshape(first[1].mask.shape) > 14)
  first = first[0], dataclasses.replace(first[1], mask=few), first[2]
  whole = jax.tree.map(lambda a, b: np.concatenate([a, b]), first, second)
  first, second, whole = metrics(*first), metrics(*second), metrics(*whole)
  merged = {name: first[name].merge(second[name]) for name in whole}
  assert_same(merged, whole)
  for name, value in derive(merged).items():
    np.testing.assert_allclose(value, derive(whole)[name], rtol=1e-4, err_msg=name)
  halves = 0.5 * (first["policy/entropy"].value() + second["policy/entropy"].value())
  assert abs(halves - whole["policy/entropy"].value()) > 1e-3


def test_masked_tokens_do_not_count():
  """Kills: a metric that reads padding or tool tokens."""
  policy, batch, token_loss = reference.case(2)
  clean = metrics(policy, batch, token_loss)
  for bad in (0.0, 7.0, -np.inf, np.nan):
    outside = [
      np.where(batch.mask, x, np.float32(bad)) for x in (batch.logprob, batch.entropy, *policy[:2], batch.advantage)
    ]
    age = np.where(batch.mask, batch.staleness, 5)
    spoilt = dataclasses.replace(
      batch, logprob=outside[0], entropy=outside[1], advantage=outside[4], staleness=age.astype(np.int32)
    )
    got = metrics(Scores(outside[2], outside[3], None), spoilt, token_loss)
    for name, mean in clean.items():
      for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(mean)):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_tokens_without_a_stored_logprob_count_in_the_fractions_only():
  """Kills: such a token in the moments of delta, or out of the mask fraction."""
  got = metrics(*hand_made([-1.0, -1.0, -1.0, -1.0], [-1.0, -np.inf, np.nan, -1.5]))
  assert got["loss/mask_fraction"].value() == 0.5
  assert got["policy/entropy"].count == 4
  for name in ("rollout_kl", "rollout_kl_k1", "chi_square", "abs_delta", "ratio", "ratio_square"):
    assert got[f"policy/{name}"].count == 2
  assert got["policy/abs_delta"].value() == 0.25
  assert np.sum(got["policy/abs_delta_by_entropy"].count) == 2
  assert np.sum(got["policy/score_histogram"].total) == 2


def test_an_empty_batch_counts_nothing():
  """Kills: a count of at least 1, or NaN, for a batch without a policy token; a quantile or ESS of nothing."""
  got = metrics(*hand_made([-1.0, -2.0], -1.0, mask=False))
  for mean in got.values():
    assert np.all(mean.total == 0) and np.all(mean.count == 0) and np.isnan(mean.value()).all()
  derived = derive(got)
  assert derived.pop("policy/score_histogram").sum() == 0
  assert np.isnan(list(derived.values())).all()


def test_every_metric_is_in_the_glossary():
  """Kills: a metric that a row would refuse, or whose meaning nobody wrote down."""
  got = metrics(*reference.case(0))
  assert set(got) | set(derive(got)) <= set(GLOSSARY)


def bin_of(entropy: float) -> int:
  got = metrics(*hand_made(-1.0, -1.25, entropy=entropy))
  counts = np.asarray(got["policy/abs_delta_by_entropy"].count)
  assert counts.sum() == 1 and counts.shape == (len(ENTROPY_EDGES) - 1,)
  np.testing.assert_array_equal(got["policy/abs_delta_by_entropy"].total, 0.25 * counts)
  np.testing.assert_array_equal(got["policy/delta_square_by_entropy"].total, 0.0625 * counts)
  np.testing.assert_array_equal(got["policy/token_share_by_entropy"].value(), counts)
  np.testing.assert_array_equal(got["loss/mask_fraction_by_entropy"].count, counts)
  return int(counts.argmax())


@pytest.mark.parametrize("index", range(len(ENTROPY_EDGES)))
def test_an_entropy_on_an_edge_opens_the_bin_above(index):
  """Kills: bins shifted by one, closed above, or compared in another precision than the entropies."""
  last = len(ENTROPY_EDGES) - 2
  assert bin_of(EDGES_32[index]) == min(index, last)
  assert bin_of(np.nextafter(EDGES_32[index], np.float32(-1))) == max(index - 1, 0)


def test_entropies_beyond_the_edges_are_in_the_outer_bins():
  """Kills: a token that falls out of the histogram (H rounded below 0, or above the last edge)."""
  assert (bin_of(-1e-6), bin_of(50.0)) == (0, len(ENTROPY_EDGES) - 2)


def test_the_bins_of_staleness():
  """0, 1, 2, 3, 4, 5-8, 9-16, 17-32, 33 or more. Kills: a bin shifted by one, or the old left out."""
  first = [0, 1, 2, 3, 4, 5, 9, 17, 33]
  ages = np.array([*first, 4, 8, 16, 32, 1000])
  got = metrics(*hand_made(-1.0, -1.0, staleness=ages, keep=ages < 9))
  np.testing.assert_array_equal(got["loss/mask_fraction_by_staleness"].count, [1, 1, 1, 1, 2, 2, 2, 2, 2])
  np.testing.assert_array_equal(got["loss/mask_fraction_by_staleness"].value(), [0, 0, 0, 0, 0, 0, 1, 1, 1])


def test_version_switches():
  """Kills: a switch lost over a tool token, seen across sequences or at a first token, or read at the tool token."""
  _, batch, _ = hand_made(
    -1.0,
    -1.0,
    mask=np.array([0, 1, 1, 0, 1, 1, 0, 1, 1, 1], bool),
    segment=[1, 1, 1, 1, 1, 1, 2, 2, 2, 0],
    staleness=[9, 5, 5, 9, 4, 4, 9, 1, 0, 0],
  )
  batch = jax.tree.map(lambda x: np.concatenate([x, x[:, ::-1]]), batch)  # a second row begins with a policy token
  got = np.asarray(jax.jit(version_switches)(batch))
  np.testing.assert_array_equal(np.flatnonzero(got[0]), [4, 8])
  np.testing.assert_array_equal(got, reference.switches(batch))


def test_what_happens_at_switches_is_told_apart():
  """Kills: the two sides exchanged."""
  got = metrics(
    *hand_made(
      [-1.0, -1.5, -1.0], -1.0, entropy=[0.1, 2.0, 0.3], staleness=[1, 0, 0], keep=np.array([True, False, True])
    )
  )
  at = [got[f"{name}_at_switch"].value() for name in ("loss/mask_fraction", "policy/abs_delta", "policy/entropy")]
  off = [got[f"{name}_off_switch"].value() for name in ("loss/mask_fraction", "policy/abs_delta", "policy/entropy")]
  np.testing.assert_allclose(at, [1.0, 0.5, 2.0])
  np.testing.assert_allclose(off, [0.0, 0.0, 0.2], rtol=1e-6)


@pytest.mark.parametrize("delta", [1e-4, -1e-4, 2e-3])
def test_a_small_rollout_kl_is_not_rounding(delta):
  """r - 1 - log r is about delta^2 / 2. Kills: exp(delta) - 1, whose rounding is larger than that of either sign."""
  log_mu = np.float32(-0.5)
  log_pi = np.float32(log_mu + np.float32(delta))
  exact = float(log_pi) - float(log_mu)
  got = metrics(*hand_made(log_pi, log_mu))
  np.testing.assert_allclose(got["policy/rollout_kl"].value(), np.expm1(exact) - exact, rtol=2e-2)
  np.testing.assert_allclose(got["policy/chi_square"].value(), np.expm1(exact) ** 2, rtol=1e-5)


def test_both_estimators_are_of_kl_of_the_rollout_policy_to_the_learner():
  """Weighted by mu, the mean over a vocabulary is the divergence itself. Kills: KL(pi || mu), a sign, another chi^2."""
  mu, pi = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
  expectation = dict.fromkeys(("rollout_kl", "rollout_kl_k1", "chi_square"), 0.0)
  for p, q in zip(mu, pi):
    got = metrics(*hand_made(np.log(q), np.log(p)))
    for name in expectation:
      expectation[name] += p * float(got[f"policy/{name}"].value())
  kl = np.sum(mu * np.log(mu / pi))
  want = {"rollout_kl": kl, "rollout_kl_k1": kl, "chi_square": np.sum((pi - mu) ** 2 / mu)}
  for name, value in want.items():
    np.testing.assert_allclose(expectation[name], value, rtol=1e-5, err_msg=name)


def test_a_huge_ratio_stays_finite():
  """Kills: exp of an unbounded log-ratio, of a token or of a sequence's sum."""
  got = metrics(*hand_made([-1e-3] * 40, [-90.0] * 40))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
  assert np.isfinite(list(derive(got)[f"policy/{name}"] for name in ("ess", "sequence_ess", "kl_per_entropy"))).all()


def test_effective_sample_size():
  """mean(w)^2 / mean(w^2). Kills: its inverse, and a division by zero on an empty batch."""
  weights = np.array([0.5, 1.0, 4.0])
  want = weights.sum() ** 2 / (weights**2).sum() / 3
  np.testing.assert_allclose(effective_sample_size(weights.mean(), (weights**2).mean()), want)
  assert effective_sample_size(1.0, 1.0) == 1.0
  assert np.isnan(effective_sample_size(0.0, 0.0))


def test_the_effective_sample_size_of_sequences():
  """Two sequences of weights e^0.5 and e^-1. Kills: the tokens' ESS under that name, or a weight per token."""
  got = metrics(*hand_made([-1.0, -1.0, -2.0, -1.0], [-1.25, -1.25, -1.0, -1.0], segment=[1, 1, 2, 2]))
  weights = np.exp([0.5, -1.0])
  want = weights.sum() ** 2 / (2 * (weights**2).sum())
  np.testing.assert_allclose(derive(got)["policy/sequence_ess"], want, rtol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_quantiles_of_the_histogram_are_those_of_the_tokens_within_a_bin(seed):
  """Kills: a bin off by one, the wrong end of the distribution, or another S."""
  random = np.random.default_rng(seed)
  delta = random.normal(size=4000) * 10 ** random.uniform(-3, 0, 4000)
  entropy = random.exponential(size=4000).astype(np.float32)
  case = hand_made(np.full(4000, -5.0) + delta, -5.0, entropy=entropy)
  case = jax.tree.map(lambda x: x.reshape(100, 40), case)  # short rows compile faster
  derived = derive(metrics(*case))
  exact = reference.score(*case[:2], SCORE_EPS)
  for name, level in SCORE_QUANTILES.items():
    want = np.quantile(exact, level, method="inverted_cdf")
    assert 10**-0.1 * 0.999 < derived[f"policy/score_{name}"] / want < 10**0.1 * 1.001, name


def test_the_ends_of_the_histogram_of_scores():
  """Kills: a token of S = 0 or of an enormous S that is lost, and a quantile beyond the edges."""
  counts = np.zeros(len(SCORE_EDGES) + 1)
  counts[0], counts[-1] = 2, 1
  got = metrics(*hand_made([-1.0, -1.0, -90.0], [-1.0, -1.0, -1.0], entropy=0.0))
  np.testing.assert_array_equal(got["policy/score_histogram"].total, counts)
  assert score_quantile(counts, 0.5) == SCORE_EDGES[0] and score_quantile(counts, 0.9) == SCORE_EDGES[-1]


def test_derived_metrics_are_of_the_sums():
  """Kills: KL / H of another KL or entropy, and a histogram that a row would hold as shares."""
  got = {name: Mean(np.asarray(m.total), np.asarray(m.count)) for name, m in metrics(*reference.case(5)).items()}
  derived = derive(got)
  want = got["policy/rollout_kl"].value() / got["policy/entropy"].value()
  np.testing.assert_allclose(derived["policy/kl_per_entropy"], want)
  assert derived["policy/score_histogram"].dtype == np.int64
  assert derived["policy/score_histogram"].sum() == got["policy/abs_delta_by_entropy"].count.sum()


def test_exact_moments_are_expectations_over_the_vocabulary():
  """Kills: the sampled token for the expectation, pi for mu as its weight, a KL in the other direction, a wrong bin."""
  random = np.random.default_rng(0)
  mu, pi = (random.dirichlet(np.full(5, 0.3), size=4) for _ in range(2))
  mu[0] = [1, 0, 0, 0, 0]  # certain: nothing else is ever drawn
  mask = np.array([True, True, False, True])
  entropy = -np.sum(mu * np.log(np.maximum(mu, 1e-300)), axis=1)
  policy, batch, token_loss = hand_made(
    np.log(pi[:, 0]), np.log(np.maximum(mu[:, 0], 1e-30)), entropy=entropy, mask=mask
  )

  def whole(probability):
    with np.errstate(divide="ignore"):
      return np.pad(np.log(probability)[None], [(0, 0), (0, 36), (0, 0)]).astype(np.float32)

  batch = dataclasses.replace(batch, vocabulary=whole(mu))
  got = metrics(policy._replace(vocabulary=whole(pi)), batch, token_loss)
  want, count, kl = np.zeros(len(ENTROPY_EDGES) - 1), np.zeros(len(ENTROPY_EDGES) - 1), 0.0
  for t in np.flatnonzero(mask):
    home = sum(entropy[t] >= edge for edge in ENTROPY_EDGES[1:-1])
    count[home] += 1
    for m, p in zip(mu[t], pi[t]):
      if m > 0:
        want[home] += m * (np.log(p) - np.log(m)) ** 2
        kl += m * (np.log(m) - np.log(p))
  np.testing.assert_allclose(got["policy/exact_square_by_entropy"].total, want, rtol=1e-4, atol=1e-6)
  np.testing.assert_array_equal(got["policy/exact_square_by_entropy"].count, count)
  np.testing.assert_allclose(got["policy/exact_kl"].total, kl, rtol=1e-4)
