"""The learner takes the sampler's experts, and says what its own routers did."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import learner_cases
import numpy as np
from learner_cases import HYPER, LENGTH, MODEL, OBJECTIVE, ROWS, flat, groups, mesh, rule

from estr_jax.learner import step
from estr_jax.learner.batching import assemble
from estr_jax.model import decoder, moe
from estr_jax.objective.scoring import score_logits
from estr_jax.observe.glossary import GLOSSARY
from estr_jax.structs import NO_EXPERT

SPARSE = dataclasses.replace(MODEL, experts=4, experts_per_token=2, expert_mlp_width=8, norm_topk_prob=True)
_score = jax.jit(functools.partial(step.score_tokens, SPARSE, temperature=0.8, chunk=5, entropy=False))
_init = jax.jit(functools.partial(decoder.init, SPARSE))
_forward = jax.jit(functools.partial(decoder.forward_routed, SPARSE))


@functools.cache
def params(seed: int = 0):
  """Random ones, so large that experts matter."""
  return jax.tree.map(lambda leaf: leaf * (12.0 if leaf.ndim > 2 else 1.0), _init(jax.random.key(seed)))


@functools.cache
def recorded():
  """Trajectories with the log-probs and experts of `params()`, and the batch of them, packed."""
  made = [trajectory for group in groups() for trajectory in group]
  tokens, segment = np.zeros((2, ROWS, LENGTH), np.int32)
  for row, trajectory in enumerate(made):
    size = len(trajectory.tokens)
    tokens[row, :size], segment[row, :size] = trajectory.tokens, 1
  logprob = _score(params(), tokens, segment).logprob
  experts = np.moveaxis(np.asarray(_forward(params(), tokens, segment)[1].experts), 0, 2).astype(np.uint8)
  for row, trajectory in enumerate(made):
    size = len(trajectory.tokens)
    experts[row, size - 1] = NO_EXPERT
    stored = np.where(trajectory.mask, logprob[row, :size], 0)
    made[row] = dataclasses.replace(trajectory, logprob=stored, experts=experts[row, :size])
  how = dict(rows=ROWS, length=2 * LENGTH, advantage="dr_grpo", advantage_eps=1e-6, pack=True)
  batch = assemble([made[i : i + 2] for i in range(0, ROWS, 2)], 0, **how)
  assert batch.segment.max() > 1 and (batch.segment == 0).any()
  return made, batch


@functools.cache
def rerouted():
  """The same weights but for the routers, which are those of others."""
  layers = params()["layers"]
  mlp = layers["mlp"] | {"router": params(1)["layers"]["mlp"]["router"]}
  return params() | {"layers": layers | {"mlp": mlp}}


@functools.cache
def train_step():
  objective = dataclasses.replace(OBJECTIVE, router_balance=True)
  how = dict(temperature=0.8, score_chunk=5, entropy=False, diagnostics=False)
  return step.make_train_step(SPARSE, objective, rule(), mesh=mesh(), microbatches=2, **how)


def update(start, batch, coefficient=0.0):
  """(the new parameters, metrics)."""
  state = step.init_state(SPARSE, rule(), start, mesh(), entropy_coefficient=0.0)
  state, metrics = train_step()(state, batch, HYPER._replace(router_balance=np.float32(coefficient)))
  return state.params, metrics


def routing_of(batch) -> np.ndarray:
  """i32 [L, B, T, k], -1 where nothing was recorded."""
  return np.where(batch.experts == NO_EXPERT, -1, batch.experts.astype(np.int32)).transpose(2, 0, 1, 3)


def test_a_replayed_policy_is_the_one_with_the_recorded_experts():
  """Fails if the record is shifted by a token, given to another layer or a packed neighbour, or not taken at all."""
  made, batch = recorded()
  found = np.asarray(_score(rerouted(), batch.tokens, batch.segment, experts=batch.experts).logprob)
  free = np.asarray(_score(rerouted(), batch.tokens, batch.segment).logprob)
  tokens, segment = np.zeros((2, ROWS, LENGTH), np.int32)
  routing = np.full((SPARSE.layers, ROWS, LENGTH, 2), -1, np.int32)
  for row, trajectory in enumerate(made):
    size = len(trajectory.tokens)
    tokens[row, :size], segment[row, :size] = trajectory.tokens, 1
    for t, layer in np.ndindex(size - 1, SPARSE.layers):
      routing[layer, row, t] = trajectory.experts[t, layer]
  hidden = _forward(rerouted(), tokens, segment, routing=routing)[0] @ decoder.head_kernel(SPARSE, rerouted())
  wanted = score_logits(hidden[:, :-1], tokens[:, 1:], temperature=0.8).logprob
  for row, trajectory in enumerate(made):
    size, starts = len(trajectory.tokens), np.argwhere(batch.segment > 0)
    (place,) = [(r, t) for r, t in starts if np.array_equal(batch.tokens[r, t : t + size], trajectory.tokens)]
    np.testing.assert_allclose(found[place[0], place[1] + 1 : place[1] + size], wanted[row, : size - 1], atol=2e-5)
  assert np.abs(found - free)[batch.mask].max() > 0.01


def test_anchors_are_replayed_too():
  """Fails if log q, or a score that calibrates tau, is that of another choice than the update's."""
  _, batch = recorded()
  anchor = step.make_score_step(SPARSE, mesh=mesh(), microbatches=2, temperature=0.8, score_chunk=5)
  wanted = _score(rerouted(), batch.tokens, batch.segment, experts=batch.experts).logprob
  np.testing.assert_allclose(anchor(rerouted(), batch), wanted, atol=2e-5)


def test_on_policy_replay_changes_nothing():
  """Fails if replay itself moves a log-prob, or if an agreement is reported of nothing."""
  _, batch = recorded()
  replayed, free = (update(params(), b)[1] for b in (batch, dataclasses.replace(batch, experts=None)))
  assert replayed["router/agreement"].value() == 1 and "router/agreement" not in free
  for name in free.keys() - {"loss/objective"}:
    np.testing.assert_allclose(replayed[name].value(), free[name].value(), atol=2e-5, err_msg=name)
  assert replayed["policy/max_abs_delta"].value() < 1e-4


def test_router_metrics_are_those_of_the_whole_batch():
  """Fails on a mean of means over microbatches, on padding that counts, and on an agreement that counts tokens of which
  nothing is known or in which the replayed choice stands for the router's own."""
  _, batch = recorded()
  routing, there = routing_of(batch), batch.segment > 0
  assert len({there[m::2].sum() for m in range(2)}) == 2
  metrics = {name: float(mean.value()) for name, mean in update(rerouted(), batch)[1].items()}

  routed = _forward(rerouted(), batch.tokens, batch.segment, routing=routing)[1]
  chosen = np.asarray(routed.experts)[:, there]
  assigned = np.stack([np.bincount(layer.ravel(), minlength=SPARSE.experts) for layer in chosen])
  share, probability = assigned / assigned.sum(axis=1, keepdims=True), np.asarray(routed.load.probability) / there.sum()
  balance = SPARSE.experts * (share * probability).sum(axis=1)
  agreed = []
  for layer in range(SPARSE.layers):
    before = np.where(np.arange(SPARSE.layers)[:, None, None, None] < layer, routing, -1)
    own = np.asarray(_forward(rerouted(), batch.tokens, batch.segment, routing=before)[1].experts[layer])
    known = there & (routing[layer, ..., 0] >= 0)
    agreed += [one in mine for row, mine in zip(routing[layer][known], own[known]) for one in row]
  assert 0.1 < np.mean(agreed) < 0.9
  wanted = {
    "router/balance": balance.mean(),
    "router/balance_max": balance.max(),
    "router/largest_share": share.max(),
    "router/entropy": np.asarray(routed.load.entropy).sum() / (SPARSE.layers * there.sum()),
    "router/dead_experts": (assigned == 0).mean(),
    "router/agreement": np.mean(agreed),
  }
  assert wanted.keys() == {name for name in metrics if name.startswith("router/")} <= GLOSSARY.keys()
  for name, value in wanted.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)


def test_dead_experts_are_counted():
  """Fails if an expert that one layer uses counts as alive in all."""
  assigned = jnp.array([[4.0, 0, 0, 4], [2, 2, 0, 4]])
  load = moe.Load(jnp.full(2, 4.0), assigned, assigned / 2, *jnp.zeros((3, 2)))
  metrics = {name: float(mean.value()) for name, mean in moe.load_metrics(load, replayed=False).items()}
  assert metrics["router/dead_experts"] == 3 / 8 and metrics["router/largest_share"] == 0.5
  assert metrics["router/balance_max"] == 2.0 and metrics["router/balance"] == (2.0 + 1.5) / 2


def test_the_balance_is_penalised_by_the_microbatches_tokens():
  """Fails if the coefficient is applied twice or never, to a sum over layers, or to microbatches as if they were of one
  size."""
  _, batch = recorded()
  batch = dataclasses.replace(batch, experts=None)

  @jax.jit
  @jax.value_and_grad
  def reference(params):
    total = 0.0
    for m in range(2):
      part = np.s_[m::2]
      _, routed = decoder.forward_routed(SPARSE, params, batch.tokens[part], batch.segment[part])
      share = (batch.segment[part] > 0).sum() / (batch.segment > 0).sum()
      total += share * moe.load_balance(routed.load).mean()
    return total

  value, gradient = reference(rerouted())
  wanted = -0.1 * 0.5 * flat(gradient)
  (without, _), (with_it, metrics) = update(rerouted(), batch), update(rerouted(), batch, 0.5)
  assert np.abs(wanted).max() > 1e-3
  np.testing.assert_allclose(flat(with_it) - flat(without), wanted, atol=1e-5 + 1e-4 * np.abs(wanted).max())
  np.testing.assert_allclose(metrics["loss/penalty"].value(), 0.5 * value, rtol=1e-5)


def test_a_dense_model_has_no_router():
  """Fails if a dense run shows metrics of routers."""
  state, data = step.abstract_state(MODEL, rule(), mesh()), learner_cases.batch()
  _, metrics = jax.eval_shape(learner_cases.compiled_step(), state, data, HYPER)
  assert not any(name.startswith("router/") for name in metrics)
