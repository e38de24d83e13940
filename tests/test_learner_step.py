"""The train step, through its effect on the parameters."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import (
  HYPER,
  MODEL,
  OBJECTIVE,
  ROWS,
  WIDE,
  batch,
  compiled_step,
  flat,
  fresh_state,
  initial_params,
  mesh,
  rule,
  train_step,
)
from processes import on_eight_devices

from estr_jax.errors import UserError
from estr_jax.learner.step import check_ratio, compilations, init_state, make_score_step, score_tokens
from estr_jax.model import decoder
from estr_jax.objective.scoring import score_logits
from estr_jax.structs import Mean

scores = jax.jit(functools.partial(score_tokens, MODEL, temperature=0.8, chunk=5, entropy=True))


def moved(data, *, step=None) -> np.ndarray:
  """What one update adds to the parameters: -0.1 x the gradient."""
  step = train_step() if step is None else step
  return flat(step(fresh_state(), data)[0].params) - flat(initial_params())


def test_scores_are_aligned_with_their_tokens():
  """Fails if hidden[t] scores token t, if the wrapped column survives, or if the temperature is left out."""
  data = batch(**WIDE, pack=True)
  assert data.segment.max() >= 2
  ours = [np.asarray(x) for x in scores(initial_params(), data.tokens, data.segment) if x is not None]

  @jax.jit
  def alone(tokens_BT):
    logits = decoder.forward(MODEL, initial_params(), tokens_BT, jnp.ones_like(tokens_BT))
    logits = logits @ decoder.head_kernel(MODEL, initial_params())
    return score_logits(logits[:, :-1], tokens_BT[:, 1:], temperature=0.8)

  seen = np.zeros_like(data.segment, bool)
  for segment in range(1, data.segment.max() + 1):
    where = data.segment == segment
    start, size = where.argmax(axis=1), where.sum(axis=1)
    cut = np.zeros_like(data.tokens)
    for row in range(len(cut)):
      cut[row, : size[row]] = data.tokens[row, start[row] : start[row] + size[row]]
    expected = alone(cut)
    for row in np.flatnonzero(size):
      span = slice(start[row] + 1, start[row] + size[row])
      for our, theirs in zip(ours, expected):
        np.testing.assert_allclose(our[row, span], theirs[row, : size[row] - 1], atol=1e-5)
      seen[row, span] = True
  assert seen[data.mask].all() and not any(our[~seen].any() for our in ours)


def test_the_first_token_of_a_full_row_has_no_score():
  """Fails if the first token is taken to follow the last, where one segment fills the row."""
  data = batch()
  assert (data.segment[:, 0] == data.segment[:, -1]).any()
  assert not np.asarray(scores(initial_params(), data.tokens, data.segment).logprob)[:, 0].any()


def test_the_gradient_is_that_of_the_whole_batchs_mean():
  """Fails if the denominator counts kept tokens, rows or all positions, or if the loss has the wrong sign."""
  data = batch()

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def reference(params):
    delta = scores(params, data.tokens, data.segment).logprob - data.logprob
    keep = data.mask & (jax.lax.stop_gradient(delta) ** 2 <= data.entropy + 0.01)
    ratio = jnp.exp(delta)
    surrogate = jnp.minimum(ratio * data.advantage, jnp.clip(ratio, 0.8, 1.28) * data.advantage)
    return jnp.sum(jnp.where(keep, surrogate, 0.0)) / data.mask.sum(), keep.sum()

  gradient, kept = reference(initial_params())
  assert 0 < kept < data.mask.sum()  # some tokens are masked, or the test cannot tell
  assert np.abs(flat(gradient)).max() > 1e-3
  np.testing.assert_allclose(moved(data), 0.1 * flat(gradient), atol=2e-7, rtol=1e-4)


def test_penalties_and_the_step_size():
  """Fails if a bonus or a penalty has the wrong sign, coefficient, anchor or denominator, if the coefficient that acts
  is not the one that was just adapted, or if the effective sample size is that of one microbatch."""
  data = batch()
  data = dataclasses.replace(data, reference=(data.logprob - 0.3).astype(np.float32))
  objective = dataclasses.replace(OBJECTIVE, entropy_bonus=True, kl=("k2", "reference"), ess_step=True)
  above = np.float32(data.entropy[data.mask].mean() + 0.1)
  hyper = HYPER._replace(
    kl_coefficient=np.float32(0.7),
    entropy_target=above,
    entropy_step=np.float32(0.02),
    entropy_largest=np.float32(0.05),
  )

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def penalty(params):
    policy = scores(params, data.tokens, data.segment)
    token = 0.7 * 0.5 * jnp.square(policy.logprob - data.reference) - 0.02 * policy.entropy
    return jnp.sum(jnp.where(data.mask, token, 0.0)) / data.mask.sum(), policy.logprob

  gradient, logprob = penalty(initial_params())
  weight = np.exp(np.where(data.mask, np.asarray(logprob) - data.logprob, 0.0).sum(axis=1))  # a sequence a row
  scale = np.sqrt(weight.sum() ** 2 / (len(weight) * np.square(weight).sum()))
  assert scale < 0.9 and np.abs(flat(gradient)).max() > 1e-3
  state, metrics = train_step(microbatches=2, objective=objective, hyper=hyper)(fresh_state(), data)
  wanted = scale * (moved(data) - 0.1 * flat(gradient))
  np.testing.assert_allclose(flat(state.params) - flat(initial_params()), wanted, atol=3e-7, rtol=1e-4)
  assert float(state.entropy_coefficient) == float(metrics["loss/entropy_coefficient"].value()) == np.float32(0.02)
  np.testing.assert_allclose(metrics["optimizer/learning_rate"].value(), 0.1 * scale, rtol=1e-5)


def test_two_microbatches_equal_one():
  """Fails if each microbatch has its own denominator, if rows are lost in the split, or if counts do not add."""
  data = batch()
  # Unequal numbers of tokens, so that a mean of means is another number.
  data.mask[: ROWS // 4, 3:] = False
  one, metrics = train_step()(fresh_state(), data)
  two, metrics_two = train_step(microbatches=2)(fresh_state(), data)
  np.testing.assert_allclose(flat(two.params), flat(one.params), atol=2e-7)
  assert metrics.keys() == metrics_two.keys()
  for name in metrics:
    np.testing.assert_allclose(metrics_two[name].value(), metrics[name].value(), rtol=2e-5, atol=1e-7, err_msg=name)


def test_padding_changes_nothing():
  """Fails if padded rows or columns enter the loss, the denominator or attention."""
  padded = batch(**WIDE)
  padded.tokens[padded.segment == 0] = 7
  np.testing.assert_allclose(moved(padded), moved(batch()), atol=2e-7)


def test_packed_equals_padded():
  """Fails if a packed segment sees its neighbour, keeps the row's positions, or is scored across its border."""
  packed = batch(**WIDE, pack=True)
  assert packed.segment.max() >= 2
  padded = moved(batch())
  assert np.abs(padded).max() > 1e-4
  np.testing.assert_allclose(moved(packed), padded, atol=2e-7)


def test_a_masked_token_moves_nothing():
  """Fails if a token outside the trust region has a gradient: it is the only one in the batch."""
  data = batch()
  data.mask[:] = False
  data.mask[0, 3] = True
  data.advantage[0, 3], data.entropy[0, 3], data.logprob[0, 3] = 1.0, 0.0, -9.0
  assert train_step()(fresh_state(), data)[1]["loss/mask_fraction"].value() == 1.0
  assert not moved(data).any()
  data.logprob[0, 3] = scores(initial_params(), data.tokens, data.segment).logprob[0, 3]
  assert moved(data).any()


def test_an_infinite_stored_logprob_stays_finite_end_to_end():
  """Fails with 0 x inf = NaN in the gradient or in a metric."""
  data = batch()
  data.logprob[tuple(np.argwhere(data.mask)[4])] = -np.inf
  new, metrics = train_step()(fresh_state(), data)
  assert np.isfinite(flat(new.params)).all()
  assert np.abs(flat(new.params) - flat(initial_params())).max() > 1e-4  # the other tokens still train
  assert all(np.isfinite(np.asarray(mean.total)).all() for mean in metrics.values())


def test_a_batch_without_policy_tokens_is_a_step_without_motion():
  """Fails with 0 / 0."""
  data = batch()
  data.mask[:] = False
  assert not moved(data).any()
  assert train_step()(fresh_state(), data)[1]["loss/objective"].value() == 0


def test_compiled_once_and_the_state_is_donated():
  """Fails if outputs come back with another sharding or dtype than inputs, or if two states are held."""
  step = compiled_step(microbatches=2)
  state = fresh_state()
  for seed in range(3):
    old = jax.tree.leaves(state.params)
    state, metrics = step(state, batch(seed), HYPER)
    assert all(leaf.is_deleted() for leaf in old)
  assert compilations(step) == 1
  assert int(state.step) == 3
  np.testing.assert_allclose(metrics["optimizer/learning_rate"].value(), 0.1)


def test_the_initial_params_outlive_the_donated_state():
  """Fails if init_state hands out the caller's buffers, which the first step would then delete."""
  params = fresh_state().params
  train_step()(init_state(MODEL, rule(), params, mesh(), entropy_coefficient=0.0), batch())
  assert np.isfinite(flat(params)).all()


def test_rows_that_do_not_divide_are_one_clear_line():
  """Fails if the mistake surfaces as a reshape error deep in a trace."""
  with pytest.raises(UserError, match="8 rows do not divide into 3 microbatches"):
    train_step(microbatches=3)(fresh_state(), batch())


def test_score_step_gives_the_proximal_logprob():
  """Fails if the rows come back in the order of the microbatches."""
  data = batch()
  step = make_score_step(MODEL, mesh=mesh(), microbatches=2, temperature=0.8, score_chunk=5)
  proximal = step(fresh_state().params, data)
  np.testing.assert_allclose(proximal, scores(initial_params(), data.tokens, data.segment).logprob, atol=1e-6)
  assert np.abs(np.asarray(proximal)[data.mask]).min() > 0


def test_the_largest_ratio_survives_the_split():
  """Fails if max |delta| is summed or averaged over microbatches."""
  data = batch()
  where = tuple(np.argwhere(data.mask)[4])
  data.logprob[where] = -40.0
  largest = abs(float(scores(initial_params(), data.tokens, data.segment).logprob[where]) + 40.0)
  metrics = train_step(microbatches=2)(fresh_state(), data)[1]
  np.testing.assert_allclose(metrics["policy/max_abs_delta"].value(), largest, rtol=1e-5)


def test_a_trust_region_that_is_off_is_a_failure():
  """Fails if a learner that compares itself with itself trains on in silence."""
  stale, fresh = Mean(3.0, 2), Mean(0.0, 2)
  check_ratio({"staleness/token": stale, "policy/max_abs_delta": Mean(1e-6, 1)})
  check_ratio({"staleness/token": fresh, "policy/max_abs_delta": Mean(0.0, 1)})
  with pytest.raises(RuntimeError, match="silently off"):
    check_ratio({"staleness/token": stale, "policy/max_abs_delta": Mean(0.0, 1)})


_EIGHT = """
import json, sys
import numpy as np
from learner_cases import HYPER, batch, compiled_step, flat, fresh_state, mesh
step, state = compiled_step(microbatches=2, on=mesh(2, 2, 2)), fresh_state(mesh(2, 2, 2))
kernel = state.params["layers"]["mlp"]["up"]["kernel"]
shard = kernel.addressable_shards[0].data.shape
for seed in range(2):
  state, metrics = step(state, batch(seed), HYPER)
np.save(sys.argv[1], flat(state.params))
print(json.dumps([kernel.shape, shard, step._cache_size(), float(metrics["loss/objective"].value())]))
"""


def test_one_device_equals_eight(tmp_path):
  """Fails if a sharding rule, the microbatch split or a cross-device sum changes the update."""
  shape, shard, programs, objective = json.loads(on_eight_devices(_EIGHT, tmp_path / "params.npy"))
  assert shard == [shape[0], shape[1] // 2, shape[2] // 2] and programs == 1
  state = fresh_state()
  for seed in range(2):
    state, metrics = train_step(microbatches=2)(state, batch(seed))
  np.testing.assert_allclose(objective, metrics["loss/objective"].value(), rtol=1e-4, atol=1e-7)
  np.testing.assert_allclose(np.load(tmp_path / "params.npy"), flat(state.params), atol=1e-6)
