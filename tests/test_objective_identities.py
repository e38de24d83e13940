"""What must hold between the losses, whatever their numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_batches import DEFAULTS, KINDS, build, run, tokens

from estr_jax.objective.losses import LOSSES, reduce
from estr_jax.objective.triangle import EDGES, log_behaviour_ratio, log_ratio, needs_proximal


def mixed(seed: int):
  """A batch with all kinds of tokens."""
  return build(np.random.default_rng(seed).choice(KINDS, size=18), (3, 6), seed)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("seed", range(4))
def test_estr_without_a_bound_is_ppo_bit_for_bit(edge, seed):
  """Kills: anything that ESTR adds to the surrogate besides its mask."""
  logprob_BT, batch = mixed(seed)
  (unbounded, gradient), (plain, plain_gradient) = (
    run(name, edge, logprob_BT, batch, DEFAULTS | {"tau": np.inf}) for name in ("estr", "ppo")
  )
  for got, want in zip((*unbounded, gradient), (*plain, plain_gradient)):
    np.testing.assert_array_equal(got, want)
  assert (run("estr", edge, logprob_BT, batch)[0].keep != plain.keep).any()


@pytest.mark.parametrize("entropy, eps", [(0.0, 0.49), (0.24, 0.25), (0.48, 0.01)])
def test_constant_entropy_is_a_fixed_band(entropy, eps):
  """H + eps = C keeps |delta| <= sqrt(tau C), which is IcePop with the band exp(-+sqrt(tau C)).

  Kills: eps multiplied, added to S, or left out; a one-sided mask.
  """
  delta = np.linspace(-2, 2, 40)
  logprob_BT, batch = tokens(delta - 3.0, -3.0, entropy=entropy, advantage=np.where(np.arange(40) % 2, 1.0, -1.0))
  half_width = np.sqrt(0.8 * 0.49)
  values = DEFAULTS | {"tau": 0.8, "eps": eps, "low": np.exp(-half_width), "high": np.exp(half_width)}
  scaled, scaled_gradient = run("estr", "direct", logprob_BT, batch, values)
  np.testing.assert_array_equal(scaled.keep[0], np.abs(delta) <= half_width)
  fixed, fixed_gradient = run("icepop", "direct", logprob_BT, batch, values)
  for got, want in zip((*scaled, scaled_gradient), (*fixed, fixed_gradient)):
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_tokens_have_gradient_minus_advantage(name, edge):
  """Kills: a wrong sign, a mask that drops on-policy tokens, a weight or a clip that acts at ratio 1."""
  log_p, advantage = np.array([-1e-6, -0.3, -2.0, -15.0]), np.array([1.0, -0.5, 0.0, 2.0])
  logprob_BT, batch = tokens(log_p, log_p, entropy=[0.0, 0.2, 1.0, 3.0], advantage=advantage, log_q=log_p)
  token_loss, gradient = run(name, edge, logprob_BT, batch)
  assert token_loss.keep.all() and not token_loss.clipped.any()
  np.testing.assert_array_equal(token_loss.value, -batch.advantage)
  np.testing.assert_array_equal(gradient, -batch.advantage)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_of_one_is_not_clipped_by_a_clip_of_zero(advantage):
  """Kills: >= in place of > in `clipped`, which counts on-policy tokens as clipped."""
  logprob_BT, batch = tokens([-1.0] * 4, -1.0, advantage=advantage)
  token_loss, _ = run("ppo", "direct", logprob_BT, batch, DEFAULTS | {"clip_low": 0.0, "clip_high": 0.0})
  assert not token_loss.clipped.any()


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", ["estr", "icepop"])
def test_the_mask_and_the_weight_are_detached(name, edge):
  """The gradient is the one with `keep` and the weight frozen. Kills: a soft mask, a weight that moves with theta."""
  logprob_BT, batch = mixed(5)
  token_loss, gradient = run(name, edge, logprob_BT, batch)
  frozen = token_loss.keep
  weight = np.exp(np.where(frozen, log_behaviour_ratio(batch), 0.0)) if (name, edge) == ("icepop", "proximal") else 1.0

  @jax.jit
  @jax.grad
  def by_hand(logprob_BT):
    ratio = jnp.exp(jnp.where(frozen, log_ratio(logprob_BT, batch, edge), 0.0))
    bounded = jnp.clip(ratio, 1 - DEFAULTS["clip_low"], 1 + DEFAULTS["clip_high"])
    surrogate = jnp.minimum(ratio * batch.advantage, bounded * batch.advantage)
    return -jnp.sum(jnp.where(frozen, weight * surrogate, 0.0))

  np.testing.assert_allclose(gradient, by_hand(logprob_BT), rtol=1e-6)
  assert (gradient != 0).sum() > 3


def test_a_masked_token_moves_in_neither_direction_and_a_clipped_one_only_inward():
  """Kills: a trust region that acts like the clip. The four tokens are outside both, with A of both signs."""
  log_mu, delta, advantage = -2.0, np.array([0.9, 0.9, -0.9, -0.9]), np.array([1.0, -1.0, 1.0, -1.0])
  logprob_BT, batch = tokens(log_mu + delta, log_mu, entropy=0.1, advantage=advantage)
  _, masked = run("estr", "direct", logprob_BT, batch)
  np.testing.assert_array_equal(masked, 0.0)
  token_loss, gradient = run("ppo", "direct", logprob_BT, batch)
  np.testing.assert_array_equal(gradient[0] == 0, [True, False, False, True])
  np.testing.assert_array_equal(token_loss.clipped[0], [True, False, False, True])


def test_clip_higher():
  """DAPO: a ratio of 1.25 is clipped by 0.2 and free under 0.28; 0.75 is clipped by both when A < 0.

  Kills: clip_low and clip_high swapped, or one of them used on both sides.
  """
  log_pi = np.log([1.25, 0.75, 1.25, 0.75]) - 3.0
  logprob_BT, batch = tokens(log_pi, -3.0, advantage=[1.0, -1.0, -1.0, 1.0])
  symmetric, _ = run("ppo", "direct", logprob_BT, batch, DEFAULTS | {"clip_high": 0.2})
  higher, _ = run("ppo", "direct", logprob_BT, batch, DEFAULTS | {"clip_high": 0.28})
  np.testing.assert_array_equal(symmetric.clipped[0], [True, True, False, False])
  np.testing.assert_array_equal(higher.clipped[0], [False, True, False, False])
  np.testing.assert_allclose(symmetric.value[0], [-1.2, 0.8, 1.25, -0.75], rtol=1e-6)
  np.testing.assert_allclose(higher.value[0], [-1.25, 0.8, 1.25, -0.75], rtol=1e-6)


def test_the_ratios_of_the_triangle_multiply():
  """log B + log U = log E. Kills: an edge with its two policies swapped or taken from the wrong pair."""
  logprob_BT, batch = tokens([-1.0, -2.5], [-2.0, -0.5], log_q=[-0.25, -4.0])
  np.testing.assert_array_equal(log_ratio(logprob_BT, batch, "direct"), [[1.0, -2.0]])
  np.testing.assert_array_equal(
    log_behaviour_ratio(batch) + log_ratio(logprob_BT, batch, "proximal"), log_ratio(logprob_BT, batch, "direct")
  )
  assert (needs_proximal("direct"), needs_proximal("proximal")) == (False, True)


def test_the_two_edges_of_icepop_differ_at_the_first_update():
  """With pi = q and B = 1.5 the original weighs the token by 1.5 and never clips it; the direct one clips it.

  Kills: the weight left out, put on the direct edge, or taken from pi / mu with a gradient.
  """
  log_q = np.full(4, -2.0 + np.log(1.5))
  logprob_BT, batch = tokens(log_q, -2.0, log_q=log_q)
  original, original_gradient = run("icepop", "proximal", logprob_BT, batch)
  direct, direct_gradient = run("icepop", "direct", logprob_BT, batch)
  np.testing.assert_allclose(original.value, -1.5, rtol=1e-6)
  np.testing.assert_allclose(original_gradient, -1.5, rtol=1e-6)
  np.testing.assert_allclose(direct.value, -1.28, rtol=1e-6)
  np.testing.assert_array_equal(direct_gradient, 0.0)
  assert direct.clipped.all() and not original.clipped.any()


def test_which_masks_move_with_theta():
  """Kills: the original IcePop's band on an edge of pi, and an ESTR mask on an edge of q."""
  here, far = np.full(4, -1.0), np.full(4, -9.0)
  moved_policy, moved_proximal = tokens(far, here, log_q=here), tokens(here, here, log_q=far)
  assert run("icepop", "proximal", *moved_policy)[0].keep.all()
  assert not run("icepop", "direct", *moved_policy)[0].keep.any()
  assert not run("icepop", "proximal", *moved_proximal)[0].keep.any()
  assert run("icepop", "direct", *moved_proximal)[0].keep.all()
  for name in ("estr", "kpop"):
    for edge in EDGES:
      assert not run(name, edge, *moved_policy)[0].keep.any()
      assert run(name, edge, *moved_proximal)[0].keep.all()


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", LOSSES)
def test_rubbish_outside_the_mask_changes_nothing(name, edge):
  """Kills: a value or a gradient that reads a tool token's or a padded token's record."""
  logprob_BT, batch = mixed(7)

  def outside(bad):
    def spoil(array):
      return np.where(batch.mask, array, np.float32(bad))

    fields = {field: spoil(getattr(batch, field)) for field in ("logprob", "entropy", "advantage", "proximal")}
    token_loss, gradient = run(name, edge, spoil(logprob_BT), dataclasses.replace(batch, **fields))
    return *token_loss, gradient

  for clean, *spoilt in zip(*(outside(bad) for bad in (0.0, np.nan, -np.inf, np.inf))):
    for one in spoilt:
      np.testing.assert_array_equal(one, clean)


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_with_the_whole_denominator_add_up(name):
  """Kills: a denominator of kept tokens, and a mean of the microbatches' means: both give another loss."""
  logprob_BT, batch = mixed(5)
  batch = dataclasses.replace(batch, mask=batch.mask & (np.arange(18).reshape(3, 6) >= 4))
  values = DEFAULTS | {"tau": 0.3, "low": 0.8, "high": 1.5, "phi": 0.3}
  policy = batch.mask.sum()

  def part(rows):
    mask = batch.mask & np.isin(np.arange(3), rows)[:, None]
    token_loss, gradient = run(name, "direct", logprob_BT, dataclasses.replace(batch, mask=mask), values)
    return token_loss, gradient / policy, mask.sum()

  whole_loss, whole_gradient, _ = part([0, 1, 2])
  (first_loss, first_gradient, first), (second_loss, second_gradient, second) = part([0]), part([1, 2])
  whole = reduce(whole_loss, policy)
  np.testing.assert_allclose(whole, whole_loss.value.sum(dtype=np.float64) / policy, rtol=1e-5)
  np.testing.assert_allclose(reduce(first_loss, policy) + reduce(second_loss, policy), whole, rtol=1e-5)
  np.testing.assert_allclose(first_gradient + second_gradient, whole_gradient, rtol=1e-6)

  by_kept = reduce(first_loss, first_loss.keep.sum()) + reduce(second_loss, second_loss.keep.sum())
  of_means = 0.5 * (reduce(first_loss, first) + reduce(second_loss, second))
  for wrong in (by_kept, of_means):
    assert abs(wrong - whole) > 0.02 * abs(whole)
