"""Scheduling: turns, ends of episodes, segments of weights."""

import dataclasses

import numpy as np
import pytest
from sampler_cases import CONTEXT, KEY, MODEL, TASK, TOKENIZER, engine, prompts, run, weights

from estr_jax.errors import UserError
from estr_jax.lab.staleness import check_realised
from estr_jax.sampler.engine import Engine, Sampling
from estr_jax.sampler.rollout import rollout
from estr_jax.structs import Prompt


@pytest.fixture(scope="module")
def versions():
  return [weights(v) for v in range(3)]


def test_an_episode_ends_for_the_reason_that_it_names(versions):
  """Fails if a full context is called a stop, or an answer of the environment is fed after the end."""
  trajectories = run(engine(), prompts(12), lambda _: versions[0])
  assert {"stop", "environment", "length"} >= {t.finish for t in trajectories} != set()
  for t in trajectories:
    last = int(t.tokens[-1])
    assert t.mask[-1]
    assert (t.finish == "stop") == (last == TOKENIZER.eos_id)
    if t.finish == "environment":
      assert t.turns == 3 and TOKENIZER.decode([last]) == "x"
    if t.finish == "length":
      assert len(t.tokens) > CONTEXT - 4
    assert t.reward == t.turns


def test_an_observation_stands_where_the_policy_paused(versions):
  """Fails if the observation is placed one token off or tokenised together with the turn."""
  seen = 0
  for t in run(engine(), prompts(12), lambda _: versions[0]):
    prompt = len(prompts(12)[t.prompt_id].tokens)
    turns = TOKENIZER.decode(t.tokens[prompt:]).split("abc", 1)
    observed = TOKENIZER.decode(t.tokens[prompt:][~t.mask[prompt:]])
    assert observed == "abc" * (len(observed) // 3) == "abc" * (t.turns - 1)
    seen += len(turns) > 1
  assert seen


def test_segments_switch_at_the_policy_token_asked_for_whatever_the_turns(versions):
  """Fails if a segment is counted in decode steps or tokens instead of policy tokens, or overruns inside a chunk."""
  trajectories = rollout(
    engine(slots=4, chunk=5), prompts(9), lambda segment: versions[segment], segments=3, segment_tokens=2
  )
  assert len(trajectories) == 9
  check_realised(trajectories, [0, 1, 2], 2)
  assert any(t.version[t.mask].max() == 2 for t in trajectories)
  with pytest.raises(RuntimeError, match="policy token 2 of trajectory"):
    check_realised(trajectories, [0, 1, 2], 3)


def test_a_segment_border_changes_nothing_when_the_weights_are_the_same(versions):
  """Fails if holding a sequence at a border disturbs its state."""
  straight = rollout(engine(), prompts(6), lambda _: versions[1], segments=1, segment_tokens=1)
  cut = rollout(engine(), prompts(6), lambda _: versions[1], segments=3, segment_tokens=2)
  for a, b in zip(straight, cut):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.logprob, b.logprob)


def test_a_prompt_that_fills_the_context_is_refused():
  """Fails if a too long prompt is cut silently."""
  with pytest.raises(UserError, match=r"sampling\.context is 8"):
    engine(context=8).admit([Prompt(3, 0, np.ones(8, np.int32), "", "echo")])


def test_a_stop_string_of_several_tokens_is_refused():
  """Fails if only the first token of a stop string would stop."""
  task = dataclasses.replace(TASK, stop=("ab",))
  with pytest.raises(UserError, match="single tokens"):
    Engine(MODEL, task, TOKENIZER, Sampling(2, 8, 2, 1.0, False, False, False), KEY)


def test_dropped_work_leaves_free_slots_and_no_trace(versions):
  """Fails if a sequence of before a restart is finished after it."""
  e = engine()
  e.set_weights(versions[0])
  e.admit(prompts(4))
  e.advance()
  e.drop_all()
  assert e.free == 4 and not e.can_move()
  fresh = run(engine(), prompts(6), lambda _: versions[0])
  for a, b in zip(run(e, prompts(6), lambda _: versions[0]), fresh):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.version, b.version)


def test_every_policy_token_is_counted_once(versions):
  """Fails if a finished sequence is counted again while its slot stays empty, or a dropped one is taken back."""
  counted = engine()
  done = run(counted, prompts(6), lambda _: versions[0])
  assert counted.sampled_tokens == sum(int(t.mask.sum()) for t in done)
  counted.admit(prompts(2))
  counted.advance()
  before = counted.sampled_tokens
  counted.drop_all()
  done = run(counted, prompts(3), lambda _: versions[0])
  assert counted.sampled_tokens - before == sum(int(t.mask.sum()) for t in done)
