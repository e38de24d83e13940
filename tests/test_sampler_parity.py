"""What the sampler records is what the learner would compute: one definition of log-prob and entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_cases import CONTEXT, MODEL, engine, prompts, run, weights

from estr_jax.learner.step import score_tokens
from estr_jax.model import decoder
from estr_jax.objective import scoring
from estr_jax.structs import NO_VERSION, Prompt


def teacher_forced(trajectory, params, temperature):
  """(logprob_T, entropy_T, gini_T) of the whole trajectory under one set of weights."""
  tokens = np.zeros((1, CONTEXT), np.int32)
  segment = np.zeros((1, CONTEXT), np.int32)
  tokens[0, : len(trajectory.tokens)] = trajectory.tokens
  segment[0, : len(trajectory.tokens)] = 1
  scores = _score(params, tokens, segment, temperature)
  return [np.asarray(value)[0, : len(trajectory.tokens)] for value in scores[:3]]


@jax.jit
def _score(params, tokens, segment, temperature):
  return score_tokens(MODEL, params, tokens, segment, temperature=temperature, chunk=CONTEXT, entropy=True)


def stepwise(trajectory, params_of, temperature):
  """(logprob_T, entropy_T, gini_T) where each position's keys are written by the weights that were in the sampler then.

  The keys of a position are written when it is fed, which happens under the version of the next policy token.
  """
  policy = np.flatnonzero(trajectory.mask)
  cache = decoder.empty_cache(MODEL, 1, CONTEXT)
  scores = np.zeros((3, len(trajectory.tokens)))
  for position in range(policy[-1]):
    writer = trajectory.version[policy[policy > position][0]]
    params = params_of[int(writer)]
    hidden, cache = _extend(params, trajectory.tokens[None, position : position + 1], jnp.array([[position]]), cache)
    logits = scoring.logits(hidden[:, 0], decoder.head_kernel(MODEL, params))
    target = trajectory.tokens[None, position + 1]
    values = scoring.score_logits(logits, target, temperature=temperature)
    scores[:, position + 1] = [float(value[0]) for value in values[:3]]
  return scores


def check_record(trajectory, wanted):
  """What was recorded of the policy tokens against (logprob, entropy, gini) of them."""
  for name, values in zip(("logprob", "entropy", "gini"), wanted):
    np.testing.assert_allclose(getattr(trajectory, name)[trajectory.mask], values, atol=1e-4, err_msg=name)


@jax.jit
def _extend(params, tokens, position, cache):
  return decoder.extend(MODEL, params, tokens, position, jnp.arange(1), cache)


@pytest.fixture(scope="module")
def versions():
  return [weights(v) for v in range(3)]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_recorded_equals_teacher_forced_across_chunks_refills_and_turns(versions, temperature):
  """Fails if temperature is missing on one side, or a key is written at a wrong position after a refill or a turn."""
  trajectories = run(engine(temperature=temperature), prompts(10), lambda chunk: versions[0])
  assert max(t.turns for t in trajectories) == 3
  for trajectory in trajectories:
    wanted = teacher_forced(trajectory, versions[0].params, temperature)
    check_record(trajectory, [values[trajectory.mask] for values in wanted])


@pytest.mark.parametrize("rebuild", [True, False])
def test_every_token_is_scored_under_its_own_version_after_a_switch_in_flight(versions, rebuild):
  """Fails if a token is stamped with another version than the one that sampled it, or if a rebuild keeps old keys."""
  trajectories = run(
    engine(temperature=0.7, rebuild_cache=rebuild), prompts(10), lambda chunk: versions[min(chunk // 2, 2)]
  )
  params_of = {w.version: w.params for w in versions}
  assert any(len(np.unique(t.version[t.mask])) > 1 for t in trajectories)
  for trajectory in trajectories:
    mask = trajectory.mask
    if rebuild:
      by_version = {v: teacher_forced(trajectory, params, 0.7) for v, params in params_of.items()}
      wanted = [[by_version[int(trajectory.version[i])][k][i] for i in np.flatnonzero(mask)] for k in range(3)]
    else:
      wanted = [values[mask] for values in stepwise(trajectory, params_of, 0.7)]
    check_record(trajectory, wanted)


def test_the_recorded_distribution_is_the_one_that_was_sampled_from(versions):
  """Fails if the distribution is recorded before the temperature, of a neighbour, or at a shifted position."""
  for trajectory in run(engine(temperature=0.7, record_vocabulary=True), prompts(10), lambda chunk: versions[0]):
    mask = trajectory.mask
    log_mu = trajectory.vocabulary[mask].astype(np.float64)
    assert log_mu.shape == (mask.sum(), MODEL.vocab_size)
    chosen = np.take_along_axis(log_mu, trajectory.tokens[mask][:, None], axis=1)[:, 0]
    np.testing.assert_allclose(chosen, trajectory.logprob[mask], atol=1e-6)
    np.testing.assert_allclose(-(np.exp(log_mu) * log_mu).sum(axis=1), trajectory.entropy[mask], atol=1e-5)
    np.testing.assert_allclose(1 - np.exp(2 * log_mu).sum(axis=1), trajectory.gini[mask], atol=1e-5)


def test_prompt_and_environment_tokens_carry_nothing(versions):
  """Fails if an observation is marked as sampled, or a refilled slot leaks its predecessor's record."""
  for trajectory in run(engine(record_vocabulary=True), prompts(10), lambda chunk: versions[0]):
    outside = ~trajectory.mask
    assert not any(getattr(trajectory, name)[outside].any() for name in ("logprob", "entropy", "gini", "vocabulary"))
    assert (trajectory.version[outside] == NO_VERSION).all()
    assert (trajectory.version[trajectory.mask] == 0).all()
    assert not trajectory.mask[0]


def test_the_draw_depends_on_the_prompt_alone(versions):
  """Fails if the slot, the chunk or the neighbours enter a random key."""
  runs = [
    run(engine(slots=slots, chunk=chunk), prompts(10), lambda _: versions[1])
    for slots, chunk in ((4, 3), (10, 5), (3, 24))
  ]
  for other in runs[1:]:
    for a, b in zip(runs[0], other):
      np.testing.assert_array_equal(a.tokens, b.tokens)
      np.testing.assert_allclose(a.logprob, b.logprob, atol=1e-5)
      assert (a.reward, a.finish, a.turns) == (b.reward, b.finish, b.turns)


def test_samples_of_one_group_differ(versions):
  """Fails if the key is derived from the group instead of the prompt id."""
  trajectories = run(engine(), prompts(2), lambda _: versions[0])
  assert trajectories[0].tokens[4:].tolist() != trajectories[1].tokens[4:].tolist()


def test_greedy_takes_the_most_probable_token(versions):
  """Fails if greedy decoding draws, or takes the least probable token."""
  first, again = (
    run(engine(greedy=range(5), slots=slots, chunk=chunk), prompts(5), lambda _: versions[0])
    for slots, chunk in ((4, 3), (2, 7))
  )
  for trajectory, other in zip(first, again, strict=True):
    probable = np.exp(trajectory.logprob[trajectory.mask])
    assert (probable >= 1 / MODEL.vocab_size).all()
    np.testing.assert_array_equal(trajectory.tokens, other.tokens)


def test_a_greedy_prompt_leaves_its_neighbours_sampled(versions):
  """Fails if greedy decoding is a setting of the engine, or is copied along with a shared prefill."""
  same = [Prompt(i, 0, np.array([1, 2], np.int32), "", "echo") for i in range(6)]
  mixed = run(engine(greedy={1, 4}), same, lambda _: versions[0])
  sampled = run(engine(), same, lambda _: versions[0])
  greedy = run(engine(greedy=range(6)), same, lambda _: versions[0])
  for i, trajectory in enumerate(mixed):
    wanted = greedy if i in (1, 4) else sampled
    np.testing.assert_array_equal(trajectory.tokens, wanted[i].tokens)
  assert mixed[0].tokens.tolist() != mixed[1].tokens.tolist()


def test_sampling_follows_the_recorded_distribution(versions):
  """Fails if tokens are drawn at another temperature than the one they are scored at."""
  same = np.array([1], np.int32)
  many = [Prompt(i, 0, same, "", "echo") for i in range(600)]
  first = run(engine(slots=64, temperature=0.7), many, lambda _: versions[0])
  token = np.array([t.tokens[1] for t in first])
  logprob = np.array([t.logprob[1] for t in first])
  for value in np.unique(token):
    p = np.exp(logprob[token == value][0])
    assert abs((token == value).mean() - p) < 5 * np.sqrt(p * (1 - p) / len(token)) + 1e-9
