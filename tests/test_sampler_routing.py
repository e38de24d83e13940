"""What the sampler records of a mixture's routers: the experts of every token that it gave the model."""

import functools

import jax
import numpy as np
import pytest
from sampler_cases import CONTEXT, SPARSE, engine, prompts, run, weights

from estr_jax.model import decoder
from estr_jax.structs import NO_EXPERT


@functools.cache
def versions():
  return [weights(v, SPARSE) for v in range(2)]


def sampled(weights_at, **options):
  return run(engine(model=SPARSE, record_routing=True, **options), prompts(8), weights_at)


@jax.jit
def _routed(params, tokens, segment):
  return decoder.forward_routed(SPARSE, params, tokens, segment)[1].experts


def whole(trajectory, params) -> np.ndarray:
  """[T, L, k]: what the routers choose on the whole sequence at once."""
  tokens, segment = np.zeros((2, 1, CONTEXT), np.int32)
  size = len(trajectory.tokens)
  tokens[0, :size], segment[0, :size] = trajectory.tokens, 1
  return np.moveaxis(np.asarray(_routed(params, tokens, segment))[:, 0, :size], 0, 1)


def test_the_record_is_the_choice_on_the_whole_sequence():
  """Fails if experts stand at the token that was drawn rather than the one that was the input, in another layer's
  place, or are lost in a prefill, an observation, a shared prompt or a refilled slot."""
  trajectories = sampled(lambda chunk: versions()[0])
  assert max(t.turns for t in trajectories) == 3
  for trajectory in trajectories:
    assert trajectory.experts.dtype == np.uint8
    np.testing.assert_array_equal(trajectory.experts[:-1], whole(trajectory, versions()[0].params)[:-1])
    assert (trajectory.experts[-1] == NO_EXPERT).all()
  assert len(np.unique(np.concatenate([t.experts[:-1, 1] for t in trajectories]))) == SPARSE.experts


@pytest.mark.parametrize("rebuild", [True, False])
def test_the_record_is_that_of_the_policy_that_sampled(rebuild):
  """Fails if a rebuild of the cache replaces the choices of the old weights by those of the new ones."""
  trajectories = sampled(lambda chunk: versions()[int(chunk >= 2)], rebuild_cache=rebuild)
  mixed = [t for t in trajectories if len(np.unique(t.version[t.mask])) > 1]
  assert mixed
  for trajectory in mixed:
    policy = np.flatnonzero(trajectory.mask)
    # A token is the input of the decode step, or of the feed, after which the next policy token was drawn.
    reader = np.array([trajectory.version[policy[policy > t][0]] for t in range(policy[-1])])
    assert np.unique(reader).tolist() == [0, 1]
    by_version = [whole(trajectory, w.params)[: policy[-1]] for w in versions()]
    old, new = reader == 0, reader == 1
    record = trajectory.experts[: policy[-1]]
    np.testing.assert_array_equal(record[old], by_version[0][old])
    assert (by_version[0][old] != by_version[1][old]).any()
    assert (record < SPARSE.experts).all()
    if rebuild:  # else the new weights choose by keys of the old ones, which no whole sequence has
      np.testing.assert_array_equal(record[new], by_version[1][new])


def test_nothing_is_recorded_unless_asked_for():
  """Fails if a run pays for a record that nobody reads."""
  (trajectory, *_) = run(engine(model=SPARSE), prompts(1), lambda chunk: versions()[0])
  assert trajectory.experts is None
