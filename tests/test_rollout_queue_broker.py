"""The broker alone, on a clock that the test turns."""

import dataclasses
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from estr_jax.rollout_queue import admission
from estr_jax.rollout_queue.broker import Broker, NotReady
from estr_jax.rollout_queue.liveness import STATE_DEADLINE_S
from estr_jax.structs import NO_VERSION, Prompt, Trajectory

N = 2  # samples of a group


class Clock:
  def __init__(self):
    self.now = 100.0

  def __call__(self) -> float:
    return self.now


def prompts_at(group: int) -> list[Prompt]:
  tokens = np.array([group, 1], np.int32)
  return [Prompt(id=group * N + i, group=group, tokens=tokens, answer=str(group), task="t") for i in range(N)]


def answers(group: int, version: int, policy_tokens: int = 2) -> list[Trajectory]:
  mask = np.array([False] + [True] * policy_tokens)
  return [
    Trajectory(
      tokens=np.arange(len(mask), dtype=np.int32),
      mask=mask,
      logprob=np.where(mask, np.float32(-0.5), np.float32(0)),
      entropy=np.where(mask, np.float32(0.7), np.float32(0)),
      gini=np.where(mask, np.float32(0.4), np.float32(0)),
      version=np.where(mask, version, NO_VERSION).astype(np.int32),
      reward=1.0,
      prompt_id=prompt.id,
      group=group,
      task="t",
      finish="stop",
      turns=1,
      seconds=0.1,
    )
    for prompt in prompts_at(group)
  ]


def make(clock: Clock | None = None, **changes) -> Broker:
  settings = {
    "last_version": 10**6,
    "groups_per_batch": 2,
    "max_staleness": 1,
    "admission": "wait",
    "capacity": 100,
    "lease_timeout_s": 10.0,
  }
  return Broker(prompts_at, **{**settings, **changes}, clock=clock or Clock())


def leased(broker: Broker, sampler: str = "a", most: int = 100) -> list[int]:
  return [group[0].group for group in broker.lease(sampler, most, 0).groups]


def taken(broker: Broker, version: int) -> list[int]:
  return [group[0].group for group in broker.take(version, 0)]


def test_put_twice_is_trained_once():
  """Fails if a repeated put queues the group again, before or after it was taken."""
  broker = make()
  assert leased(broker, most=2) == [0, 1]
  assert [broker.put("a", answers(g, 0)) for g in (1, 0, 0)] == ["accepted", "accepted", "duplicate"]
  assert taken(broker, 0) == [0, 1]
  assert broker.put("a", answers(0, 0)) == "duplicate"
  with pytest.raises(NotReady):
    broker.take(1, 0)
  assert broker.stats()["duplicate"] == 2


def test_expired_lease_is_leased_once_more_and_the_late_put_counts_once():
  """Fails if an expired lease is lost, is handed out twice, or if both samplers' groups are trained."""
  clock = Clock()
  broker = make(clock)
  assert leased(broker, "a", 1) == [0]
  clock.now += 11
  assert leased(broker, "b", 1) == [0]  # before any fresh group
  assert leased(broker, "c", 1) == [1]
  assert broker.put("a", answers(0, 0)) == "accepted"
  assert broker.put("b", answers(0, 0)) == "duplicate"
  assert broker.stats()["expired"] == 1


def test_beats_keep_the_lease_until_the_deadline_of_the_state():
  """Fails if a compiling sampler counts as dead, or if a stuck one that still beats keeps its leases for ever."""
  clock = Clock()
  broker = make(clock)
  assert leased(broker, "a", 1) == [0]
  for state in ("compiling", "decoding"):
    entered, given_back_after = clock.now, None
    while given_back_after is None:
      clock.now += 5
      broker.beat("a", state, clock.now - entered)
      if broker.stats()["leased"] == 0:
        given_back_after = clock.now - entered
    assert STATE_DEADLINE_S[state] < given_back_after <= STATE_DEADLINE_S[state] + 5
    assert leased(broker, "a", 1) == [0]
  with pytest.raises(ValueError, match="napping"):
    broker.beat("a", "napping", 0)


def test_a_new_process_under_a_name_gives_the_old_leases_back_at_once():
  broker = make()
  broker.join("a", 1)
  assert leased(broker, "a", 1) == [0]
  broker.join("a", 2)
  assert leased(broker, "a", 1) == [0]
  assert broker.stats()["samplers"]["a"]["pid"] == 2


def test_a_lease_whose_answer_was_lost_is_given_back():
  """Fails if a group that the sampler does not know of stays leased to it."""
  broker = make()
  assert leased(broker, "a", 2) == [0, 1]
  again = broker.lease("a", 1, 0, holding={0})
  assert [group[0].group for group in again.groups] == [1]


def test_pacing_bounds_the_lead():
  """Fails if one group more than (version + max_staleness + 1) * K is leased at any version."""
  broker = make(max_staleness=2)
  for version in range(5):
    broker.announce(version)
    leased(broker)
    assert broker.cursor()["next_group"] == (version + 3) * 2
    for group in broker.cursor()["unfinished"]:
      broker.put("a", answers(group, version))
    broker.take(version, 0)
    assert leased(broker) == []  # the batch in training counts until its version is announced


def test_staleness_zero_is_synchronous():
  broker = make(max_staleness=0)
  for version in range(3):
    assert leased(broker) == [2 * version, 2 * version + 1] or version == 0
    for group in broker.cursor()["unfinished"]:
      broker.put("a", answers(group, version))
    assert taken(broker, version) == [2 * version, 2 * version + 1]
    assert leased(broker) == []
    broker.announce(version + 1)


def test_young_groups_cannot_crowd_out_old_ones():
  """Fails if selection only takes the groups whose last chance is now (six old groups would meet one batch of two)."""
  broker = make(max_staleness=2)
  assert leased(broker) == [0, 1, 2, 3, 4, 5]
  for group in (4, 5):
    broker.put("a", answers(group, 0))
  assert taken(broker, 0) == [4, 5]
  broker.announce(1)
  assert leased(broker, "b") == [6, 7]
  for group in (6, 7):
    broker.put("b", answers(group, 1))
  with pytest.raises(NotReady):
    broker.take(1, 0)
  for group in (2, 3):
    broker.put("a", answers(group, 0))
  assert taken(broker, 1) == [2, 3]


def test_back_pressure():
  """Fails if queued or given-back groups do not count against the capacity, or block their own return."""
  clock = Clock()
  broker = make(clock, admission="drop", capacity=3)
  assert leased(broker, "a") == [0, 1, 2]
  assert leased(broker, "b") == []
  broker.put("a", answers(1, 0))
  assert leased(broker, "b") == []
  clock.now += 11
  assert leased(broker, "b") == [0, 2]
  for group in (0, 2):
    broker.put("b", answers(group, 0))
  assert taken(broker, 0) == [0, 1]
  assert leased(broker, "b") == [3, 4]


def test_a_token_from_the_future_is_refused_and_its_group_leased_again():
  """Fails if only the last token's version is looked at."""
  broker = make()
  assert leased(broker, "a", 1) == [0]
  group = answers(0, 0)
  group[1].version[1] = 1
  assert broker.put("a", group) == "from_the_future"
  assert leased(broker, "b", 1) == [0]
  assert broker.put("a", group) == "from_the_future"
  assert leased(broker, "c", 1) == [1]  # b still holds 0
  broker.announce(0)
  assert broker.put("b", answers(0, 0)) == "accepted"


def test_drop_discards_over_age_groups_at_both_ends_and_counts_them():
  """Fails if age is measured from the newest token, or if the queue is not swept when the version moves."""
  broker = make(admission="drop")
  assert leased(broker, most=6) == [0, 1, 2, 3, 4, 5]
  broker.put("a", answers(0, 0, policy_tokens=1))
  with pytest.raises(NotReady):
    broker.take(2, 0)
  late = answers(1, 2, policy_tokens=5)
  late[0].version[1] = 0
  assert broker.put("a", late) == "over_age"
  for group in (2, 3):
    broker.put("a", answers(group, 1, policy_tokens=3))
  assert taken(broker, 2) == [2, 3]
  stats = broker.stats()
  assert (stats["dropped"], stats["accepted"]) == (2, 3)
  assert stats["generated_length"].value() == (1 + 5 + 3 + 3) / 4
  assert stats["accepted_length"].value() == 3
  assert broker.put("a", answers(1, 2)) == "duplicate"


def test_wait_refuses_tokens_older_than_the_lease():
  """Fails if a sampler with lagging weights can break the cap."""
  broker = make(max_staleness=0)
  leased(broker)
  for group in (0, 1):
    broker.put("a", answers(group, 0))
  broker.take(0, 0)
  broker.announce(1)
  assert leased(broker) == [2, 3]
  with pytest.raises(ValueError, match="version"):
    broker.put("a", answers(2, 0))


def test_wait_cannot_skip_a_batch():
  broker = make()
  leased(broker)
  with pytest.raises(ValueError, match="without the batch"):
    broker.announce(1)
  with pytest.raises(ValueError, match="without the batch"):
    broker.take(2, 0)


@pytest.mark.parametrize(
  ("field", "spoil"),
  [
    ("entropy", lambda t: dataclasses.replace(t, entropy=np.array([0, np.nan, 1], np.float32))),
    ("entropy", lambda t: dataclasses.replace(t, entropy=np.zeros(0, np.float32))),
    ("gini", lambda t: dataclasses.replace(t, gini=np.array([0, np.inf, 1], np.float32))),
    ("logprob", lambda t: dataclasses.replace(t, logprob=np.array([0, np.nan, 1], np.float32))),
    ("logprob", lambda t: dataclasses.replace(t, logprob=np.zeros(2, np.float32))),
    ("mask", lambda t: dataclasses.replace(t, mask=np.zeros(3, bool))),
    ("version", lambda t: dataclasses.replace(t, version=np.full(3, NO_VERSION, np.int32))),
    ("reward", lambda t: dataclasses.replace(t, reward=float("nan"))),
    ("prompt_id", lambda t: dataclasses.replace(t, prompt_id=99)),
  ],
)
def test_a_malformed_trajectory_is_refused_by_field(field, spoil):
  broker = make()
  leased(broker)
  good = answers(0, 0)
  with pytest.raises(ValueError, match=field):
    broker.put("a", [good[0], spoil(good[1])])
  assert broker.put("a", good) == "accepted"


def test_logprob_of_minus_infinity_is_accepted():
  broker = make()
  leased(broker)
  group = answers(0, 0)
  group[0].logprob[1] = -np.inf
  assert broker.put("a", group) == "accepted"


def test_groups_that_nobody_leased_are_refused():
  with pytest.raises(ValueError, match="never leased"):
    make().put("a", answers(0, 0))
  broker = make()
  broker.restore({"next_group": 3, "unfinished": [1]}, 0)
  with pytest.raises(ValueError, match="never leased"):
    broker.put("a", answers(1, 0))


def test_cursor_and_restore_lose_nothing_and_repeat_nothing():
  """Fails if a queued, leased or given-back group is missing from the cursor, or a taken one is in it."""
  clock = Clock()
  first = make(clock, max_staleness=3)
  assert leased(first, "a", 5) == [0, 1, 2, 3, 4]
  for group in (4, 1, 2):
    first.put("a", answers(group, 0))
  done = taken(first, 0)
  clock.now += 11
  assert leased(first, "b", 1) == [0]
  cursor = json.loads(json.dumps(first.cursor()))
  second = make(max_staleness=3)
  second.restore(cursor, 1)
  assert second.incarnation != first.incarnation
  assert second.cursor() == cursor
  for version in range(1, 4):
    second.announce(version)
    leased(second)
    for group in second.cursor()["unfinished"]:
      second.put("a", answers(group, version))
    done += taken(second, version)
  assert sorted(done) == list(range(8))
  with pytest.raises(ValueError, match="before the first lease"):
    second.restore(cursor, 1)


def test_finish_sends_every_sampler_home():
  clock = Clock()
  broker = make(clock)
  broker.join("a", 1)
  broker.join("b", 2)
  broker.finish()
  lease = broker.lease("a", 1, 0)
  assert lease.finished and not lease.groups
  assert broker.farewell(0) == ["b"]
  clock.now += 11
  assert broker.farewell(0) == []


def test_not_ready_says_who_is_waited_for():
  clock = Clock()
  broker = make(clock)
  leased(broker)
  broker.beat("a", "decoding", 0)
  broker.put("a", answers(1, 0))
  clock.now += 3
  with pytest.raises(NotReady, match=r"1 groups here, 2 needed; outstanding: 0 at a, 2 at a.*a decoding for 3 s"):
    broker.take(0, 0)


def test_acknowledged_versions_are_kept_in_order():
  broker = make()
  for version in (NO_VERSION, 0, 0, 2, 3):
    broker.hear("a", version, 0.0)
  broker.join("a", 7)
  broker.hear("a", 3, 0.0)
  assert broker.stats()["acknowledged"] == {"a": [0, 2, 3, 3]}


def test_leases_that_ran_out_are_taken_back_by_a_holder_that_returns():
  """Fails if a sampler is given groups that it already works on, which it would then sample twice."""
  clock = Clock()
  broker = make(clock, max_staleness=9)
  assert leased(broker, "a", 3) == [0, 1, 2]
  clock.now += 11
  assert leased(broker, "b", 1) == [0]  # ran out, and is somebody else's now
  again = broker.lease("a", 1, 0, holding=[0, 1, 2]).groups
  assert [group[0].group for group in again] == [3]
  assert broker.put("a", answers(1, 0)) == "accepted"


def test_no_group_is_leased_that_the_run_does_not_need():
  """Fails if samplers work on after the last batch, or the last batch cannot fill."""
  broker = make(last_version=2, max_staleness=9)
  assert leased(broker) == [0, 1, 2, 3]
  for group in range(4):
    broker.put("a", answers(group, 0))
  assert taken(broker, 0) == [0, 1]
  assert leased(broker) == []
  assert taken(broker, 1) == [2, 3]
  assert leased(broker) == []


def test_waits_add_up_over_the_processes_of_a_name():
  """Fails if a new process takes its predecessor's waits away, or calls that overtake each other count twice."""
  broker = make()
  for process in ((0.0, 2.0, 3.5, 3.0, 3.5), (0.0, 1.0, 0.5, 1.5), (9.0, 9.5)):
    broker.join("a", 1)
    for waited_s in process:
      broker.hear("a", 0, waited_s)
  assert broker.stats()["sampler_waited_s"] == 3.5 + 1.5 + 0.5


def test_an_overtaken_call_does_not_take_a_version_back():
  """Fails if a late call makes the sampler seem to hold old weights, or an acknowledgement is counted twice."""
  broker = make()
  for version in (NO_VERSION, 0, 2, 1, 2, 3):
    broker.hear("a", version, 0.0)
  assert broker.stats()["acknowledged"] == {"a": [0, 2, 3]}
  assert broker.stats()["samplers"]["a"]["version"] == 3


@pytest.mark.parametrize(
  "bad", [{"capacity": 1}, {"admission": "hope"}, {"max_staleness": -1}, {"groups_per_batch": 0}]
)
def test_settings_without_a_possible_batch_are_refused(bad):
  with pytest.raises(ValueError, match=next(iter(bad))):
    make(**bad)


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_wait_keeps_the_cap_and_never_deadlocks(data):
  """Random schedules of two samplers, losses and the learner. Fails on a trained token older than the cap, a group
  trained twice or never, a selection that finds no batch, or a schedule that gets stuck although every lease arrives.
  """
  size = data.draw(st.integers(1, 3))
  cap = data.draw(st.integers(0, 3))
  capacity = data.draw(st.integers(size, (cap + 2) * size))
  clock = Clock()
  broker = make(clock, groups_per_batch=size, max_staleness=cap, capacity=capacity)
  version, done, held = 0, [], {"a": {}, "b": {}}

  def lease(name: str) -> None:
    answer = broker.lease(name, data.draw(st.integers(1, 4)), 0)
    held[name].update({group[0].group: answer.version for group in answer.groups})

  def put(name: str, group: int) -> None:
    # The oldest weights that the contract allows: those of the lease.
    assert broker.put(name, answers(group, held[name].pop(group))) in ("accepted", "duplicate")

  def take() -> bool:
    nonlocal version
    try:
      batch = broker.take(version, 0)
    except NotReady:
      return False
    assert len(batch) == size
    assert all(version - int(t.version[t.mask].min()) <= cap for group in batch for t in group)
    done.extend(group[0].group for group in batch)
    version += 1
    if data.draw(st.booleans()):
      broker.announce(version)
    return True

  for _ in range(data.draw(st.integers(1, 40))):
    name = data.draw(st.sampled_from("ab"))
    step = data.draw(st.sampled_from(["lease", "lease", "put", "put", "put", "take", "lose"]))
    if step == "lease":
      lease(name)
    elif step == "put" and held[name]:
      put(name, data.draw(st.sampled_from(sorted(held[name]))))
    elif step == "take":
      take()
    elif step == "lose":
      clock.now += 11  # both samplers lose their leases, and may still hand in late

  for _ in range(3 * (cap + 2)):
    before = version
    for _ in range(4 * capacity):
      lease("a")
      for name in "ab":
        for group in sorted(held[name]):
          put(name, group)
      clock.now += 11
      if take():
        break
    assert version == before + 1, "stuck although every lease arrives"
  assert len(done) == len(set(done)) == version * size
  unfinished = broker.cursor()["unfinished"]
  assert sorted([*done, *unfinished]) == list(range(broker.cursor()["next_group"]))


def test_selection_refuses_a_broken_invariant():
  """Fails if more last-chance groups than a batch holds would be trained late in silence."""
  with pytest.raises(RuntimeError, match="pacing"):
    admission.select_batch({0: 0, 1: 0, 2: 0}, [0, 1, 2], version=1, groups_per_batch=2, max_staleness=1)
