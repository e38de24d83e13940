"""Each metric of a batch against a token-by-token count, and its algebra."""

import dataclasses

import jax
import numpy as np
import pytest
import references
from hypothesis import given, settings
from objective_batches import DEFAULTS, KINDS, build, cases, hyper, tokens

from estr_jax.objective.diagnostics import ENTROPY_EDGES, diagnose, effective_sample_size
from estr_jax.structs import TokenLoss

EDGES_32 = ENTROPY_EDGES.astype(np.float32)
metrics = jax.jit(diagnose)


def learner_entropy(batch) -> np.ndarray:
  """Some entropies of the learner, not those of the batch; NaN outside the mask."""
  values = np.where(batch.mask, np.sqrt(np.abs(batch.logprob)) + 0.1, np.nan)
  return np.where(np.isfinite(values) | ~batch.mask, values, 0.7).astype(np.float32)


def estr_of(logprob_BT, batch, values=DEFAULTS) -> TokenLoss:
  want = references.estr(logprob_BT, batch, edge="direct", **hyper("estr", values))
  return TokenLoss(want.value, want.keep, want.clipped)


def mixed(seed: int):
  return build(np.random.default_rng(seed).choice(KINDS, size=18), (3, 6), seed)


def assert_same(got, want, rtol=2e-5):
  assert set(got) == set(want)
  for name in want:
    np.testing.assert_allclose(got[name][0], want[name][0], rtol=rtol, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(got[name][1], want[name][1], err_msg=name)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_metrics_agree_with_a_count_by_hand(case):
  """Kills: a metric over masked tokens, over kept tokens only, or with the wrong ratio, sign or entropy."""
  logprob_BT, batch, values = case
  entropy_BT, token_loss = learner_entropy(batch), estr_of(logprob_BT, batch, values)
  got = metrics(logprob_BT, entropy_BT, batch, token_loss)
  assert_same(got, references.diagnostics(logprob_BT, entropy_BT, batch, token_loss, EDGES_32))


def test_two_halves_merge_to_the_whole():
  """Kills: a metric that divides before it is merged (a mean of means)."""
  first, second = mixed(1), mixed(2)
  first = first[0], dataclasses.replace(first[1], mask=first[1].mask & (np.arange(18).reshape(3, 6) > 9))
  whole = jax.tree.map(lambda a, b: np.concatenate([a, b]), first, second)

  def measure(case):
    logprob_BT, batch = case
    return metrics(logprob_BT, learner_entropy(batch), batch, estr_of(logprob_BT, batch))

  first, second, whole = measure(first), measure(second), measure(whole)
  assert_same({name: first[name].merge(second[name]) for name in whole}, whole)
  for name, mean in whole.items():
    np.testing.assert_allclose(first[name].merge(second[name]).value(), mean.value(), rtol=1e-5, err_msg=name)
  halves = 0.5 * (first["policy/entropy"].value() + second["policy/entropy"].value())
  assert abs(halves - whole["policy/entropy"].value()) > 1e-3


def test_masked_tokens_do_not_count():
  """Kills: a metric that reads padding or tool tokens."""
  logprob_BT, batch = mixed(2)
  token_loss = estr_of(logprob_BT, batch)
  clean = metrics(logprob_BT, learner_entropy(batch), batch, token_loss)
  for bad in (0.0, 7.0, -np.inf, np.nan):
    outside = [np.where(batch.mask, x, np.float32(bad)) for x in (batch.logprob, batch.entropy, logprob_BT)]
    spoilt = dataclasses.replace(batch, logprob=outside[0], entropy=outside[1])
    got = metrics(outside[2], np.where(batch.mask, learner_entropy(batch), np.float32(bad)), spoilt, token_loss)
    for name, mean in clean.items():
      for a, b in zip(got[name], mean):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_tokens_without_a_stored_logprob_count_in_the_fractions_only():
  """Kills: such a token in the moments of delta, or out of the mask fraction."""
  logprob_BT, batch = tokens([-1.0, -1.0, -1.0, -1.0], [-1.0, -np.inf, np.nan, -1.5])
  got = metrics(logprob_BT, batch.entropy, batch, estr_of(logprob_BT, batch))
  assert got["loss/mask_fraction"].value() == 0.5
  assert got["policy/entropy"].count == 4
  for name in ("policy/rollout_kl", "policy/abs_delta", "policy/ratio", "policy/ratio_square"):
    assert got[name].count == 2
  assert got["policy/abs_delta"].value() == 0.25
  assert np.sum(got["policy/abs_delta_by_entropy"].count) == 2


def test_an_empty_batch_counts_nothing():
  """Kills: a count of at least 1, or NaN, for a batch without a policy token."""
  logprob_BT, batch = tokens([-1.0, -2.0], -1.0, mask=False)
  for mean in metrics(logprob_BT, batch.entropy, batch, estr_of(logprob_BT, batch)).values():
    assert np.all(mean.total == 0) and np.all(mean.count == 0) and np.isnan(mean.value()).all()


def bin_of(entropy: float) -> int:
  logprob_BT, batch = tokens(-1.0, -1.25, entropy=entropy)
  got = metrics(logprob_BT, batch.entropy, batch, estr_of(logprob_BT, batch))
  counts = np.asarray(got["policy/abs_delta_by_entropy"].count)
  assert counts.sum() == 1 and counts.shape == (len(ENTROPY_EDGES) - 1,)
  np.testing.assert_array_equal(got["policy/abs_delta_by_entropy"].total, 0.25 * counts)
  np.testing.assert_array_equal(got["policy/token_share_by_entropy"].value(), counts)
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


@pytest.mark.parametrize("delta", [1e-4, -1e-4, 2e-3])
def test_a_small_rollout_kl_is_not_rounding(delta):
  """r - 1 - log r is about delta^2 / 2. Kills: exp(delta) - 1, whose rounding is larger than that of either sign."""
  log_mu = np.float32(-0.5)
  log_pi = np.float32(log_mu + np.float32(delta))
  exact = float(log_pi) - float(log_mu)
  logprob_BT, batch = tokens(log_pi, log_mu)
  got = metrics(logprob_BT, batch.entropy, batch, estr_of(logprob_BT, batch))["policy/rollout_kl"].value()
  np.testing.assert_allclose(got, np.expm1(exact) - exact, rtol=2e-2)


def test_the_rollout_kl_estimates_kl_of_the_rollout_policy_to_the_learner():
  """Weighted by mu, the mean over a vocabulary is KL(mu || pi). Kills: KL(pi || mu), and its sign."""
  mu, pi = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
  logprob_BT, batch = tokens(np.log(pi), np.log(mu))
  total = 0.0
  for t in range(3):
    one = jax.tree.map(lambda x, t=t: x[:, t : t + 1], batch)
    got = metrics(logprob_BT[:, t : t + 1], one.entropy, one, estr_of(logprob_BT[:, t : t + 1], one))
    total += mu[t] * float(got["policy/rollout_kl"].value())
  np.testing.assert_allclose(total, np.sum(mu * np.log(mu / pi)), rtol=1e-5)


def test_effective_sample_size():
  """mean(w)^2 / mean(w^2). Kills: its inverse, and a division by zero on an empty batch."""
  weights = np.array([0.5, 1.0, 4.0])
  want = weights.sum() ** 2 / (weights**2).sum() / 3
  np.testing.assert_allclose(effective_sample_size(weights.mean(), (weights**2).mean()), want)
  assert effective_sample_size(1.0, 1.0) == 1.0
  assert np.isnan(effective_sample_size(0.0, 0.0))
