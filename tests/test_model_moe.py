"""The mixture of experts: its products, its routers, and the mesh over which its experts are spread."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from model_cases import LLAMA, QWEN3_MOE, make_params
from processes import on_eight_devices

from estr_jax.model import decoder, moe

ROWS, LENGTH = 8, 10


@functools.cache
def tokens_and_segments():
  """Rows of two segments and some padding."""
  tokens_BT = np.random.default_rng(1).integers(0, QWEN3_MOE.vocab_size, (ROWS, LENGTH)).astype(np.int32)
  return tokens_BT, np.broadcast_to(np.repeat([1, 2, 0], [4, 4, 2]), (ROWS, LENGTH)).astype(np.int32)


def small_params(config):
  """Distinct numbers of a size at which four layers stay well conditioned."""
  return jax.tree.map(lambda leaf: 0.3 * leaf, make_params(config))


@functools.partial(jax.jit, static_argnames="config")
def forward(config, params, tokens_BT, segment_BT, routing=None):
  return decoder.forward_routed(config, params, tokens_BT, segment_BT, routing=routing)


def test_grouped_matmul_equals_a_loop_over_the_groups():
  """Fails if a group takes another's rows or matrix, an empty group shifts the rest, or rows of no group count."""
  rng = np.random.default_rng(0)
  sizes = np.array([3, 0, 5, 1], np.int32)
  x, w, cotangent = rng.normal(size=(12, 6)), rng.normal(size=(4, 6, 5)), rng.normal(size=(12, 5))
  x[9:] = np.nan  # rows of no group
  ends = np.cumsum(sizes)
  product, x_gradient, w_gradient = np.zeros((12, 5)), np.zeros((12, 6)), np.zeros((4, 6, 5))
  for e, (start, end) in enumerate(zip(ends - sizes, ends)):
    product[start:end] = x[start:end] @ w[e]
    x_gradient[start:end] = cotangent[start:end] @ w[e].T
    w_gradient[e] = x[start:end].T @ cotangent[start:end]

  @jax.jit
  def run(x, w, cotangent):
    value, pull = jax.vjp(lambda x, w: moe.grouped_matmul(x, w, jnp.asarray(sizes)), x, w)
    return value, *pull(cotangent)

  found = run(*(jnp.asarray(a, jnp.float32) for a in (x, w, cotangent)))
  for wanted, array in zip((product, x_gradient, w_gradient), found):
    np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-5)


def test_layer_equals_a_loop_over_tokens():
  """Fails if a token gets another's experts or weights, and if padding is computed or counted.

  The reference is written token by token in float64, with each token's experts in turn.
  """
  rng = np.random.default_rng(2)
  layer = moe.Mixture(QWEN3_MOE, nnx.Rngs(0))
  x, there = rng.normal(size=(2, 4, 12)).astype(np.float32), np.array([[1, 1, 1, 0], [1, 0, 1, 1]], bool)
  kernels = {name: rng.normal(size=getattr(layer, name).shape) for name in ("gate", "up", "down")}
  router = rng.normal(size=(12, 4))
  for name, kernel in kernels.items():
    getattr(layer, name)[...] = jnp.asarray(kernel, jnp.float32)
  layer.router.kernel[...] = jnp.asarray(router, jnp.float32)
  y, routed = nnx.jit(lambda layer, x, there: layer(x, there, None, None))(layer, x, there)

  wanted, assigned, probability, entropy = np.zeros(x.shape), np.zeros(4), np.zeros(4), 0.0
  for b, t in np.argwhere(there):
    token = x[b, t].astype(np.float64)
    p = np.exp(token @ router)
    p /= p.sum()
    chosen = np.argsort(-p)[:2]
    assert sorted(np.asarray(routed.experts[b, t])) == sorted(chosen)
    for e in chosen:
      gate = token @ kernels["gate"][e]
      hidden = gate / (1 + np.exp(-gate)) * (token @ kernels["up"][e])
      wanted[b, t] += p[e] / p[chosen].sum() * (hidden @ kernels["down"][e])
      assigned[e] += 1
    probability += p
    entropy -= p @ np.log(p)
  np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())
  np.testing.assert_array_equal(routed.load.assigned, assigned)
  np.testing.assert_allclose(routed.load.probability, probability, rtol=1e-5)
  np.testing.assert_allclose(routed.load.entropy, entropy, rtol=1e-5)
  assert routed.load.tokens == there.sum() and assigned.sum() == 2 * there.sum()
  balance = 4 * (assigned / assigned.sum()) @ (probability / there.sum())
  np.testing.assert_allclose(moe.load_balance(routed.load), balance, rtol=1e-5)


def test_load_balance_is_one_where_even_and_grows_to_the_number_of_experts():
  """Fails if shares are not normalised by choices, or tokens of no layer divide by zero."""
  even = moe.Load(jnp.float32(8), jnp.full(4, 4.0), jnp.full(4, 2.0), *jnp.zeros(3))
  worst = moe.Load(jnp.float32(8), jnp.eye(4)[0] * 8, jnp.eye(4)[0] * 8, *jnp.zeros(3))
  assert moe.load_balance(even) == 1 and moe.load_balance(worst) == 4
  assert moe.load_balance(jax.tree.map(jnp.zeros_like, even)) == 0
  slope = jax.grad(lambda p: moe.load_balance(dataclasses.replace(worst, probability=p)))(worst.probability)
  assert slope[0] > 0 and not slope[1:].any()


def test_one_expert_is_the_dense_layer():
  """Fails if routing scales, drops or reorders anything where there is nothing to choose."""
  sparse = dataclasses.replace(QWEN3_MOE, experts=1, experts_per_token=1, expert_mlp_width=LLAMA.mlp_width)
  dense = dataclasses.replace(sparse, experts=0, experts_per_token=0, expert_mlp_width=0, norm_topk_prob=False)
  params = small_params(sparse)
  mlp = {name: {"kernel": params["layers"]["mlp"][name][:, 0]} for name in ("gate", "up", "down")}
  tokens_BT, segment_BT = tokens_and_segments()
  found, routed = forward(sparse, params, tokens_BT, segment_BT)
  wanted, nothing = forward(dense, params | {"layers": params["layers"] | {"mlp": mlp}}, tokens_BT, segment_BT)
  there = segment_BT > 0
  np.testing.assert_allclose(found[there], wanted[there], rtol=1e-5, atol=1e-5)
  assert nothing is None and not routed.experts.any()


def test_replayed_choices_are_the_same_bits_and_others_are_not():
  """Fails if a record is ignored, taken for another layer or order, or its weights are not the current router's."""
  params, (tokens_BT, segment_BT) = small_params(QWEN3_MOE), tokens_and_segments()
  hidden_BTD, routed = forward(QWEN3_MOE, params, tokens_BT, segment_BT)
  assert routed.experts.shape == (QWEN3_MOE.layers, ROWS, LENGTH, 2)
  again_BTD, replayed = forward(QWEN3_MOE, params, tokens_BT, segment_BT, routed.experts)
  np.testing.assert_array_equal(again_BTD, hidden_BTD)
  choices = 2 * (segment_BT > 0).sum()
  recorded = dataclasses.replace(routed.load, recorded=jnp.full(3, choices), agreed=jnp.full(3, choices))
  jax.tree.map(np.testing.assert_array_equal, replayed, dataclasses.replace(routed, load=recorded))
  free_BTD, _ = forward(QWEN3_MOE, params, tokens_BT, segment_BT, jnp.full_like(routed.experts, -1))
  np.testing.assert_array_equal(free_BTD, hidden_BTD)
  other_BTD, others = forward(QWEN3_MOE, params, tokens_BT, segment_BT, (routed.experts + 1) % 4)
  there = segment_BT > 0
  assert (np.abs(other_BTD - hidden_BTD).max(axis=-1)[there] > 1e-3).all()
  np.testing.assert_array_equal(others.experts, (routed.experts + 1) % 4)


def test_replay_gives_the_router_its_gradient():
  """Fails if recorded choices cut the router off from the loss."""
  params, (tokens_BT, segment_BT) = small_params(QWEN3_MOE), tokens_and_segments()
  routing = jnp.zeros((QWEN3_MOE.layers, ROWS, LENGTH, 2), jnp.int32).at[..., 1].set(3)

  def total(params):
    hidden_BTD = decoder.forward(QWEN3_MOE, params, tokens_BT, segment_BT, routing=routing)
    return jnp.where((segment_BT > 0)[..., None], hidden_BTD, 0)[..., 0].sum()

  router = jax.jit(jax.grad(total))(params)["layers"]["mlp"]["router"]["kernel"]
  assert np.isfinite(router).all()
  assert (np.abs(router[:, :, [0, 3]]).max(axis=(1, 2)) > 1e-4).all()
  # Of normalised weights the logits of the others have no part in the loss.
  np.testing.assert_allclose(router[:, :, [1, 2]], 0, atol=1e-6)


def test_decoding_records_what_a_whole_sequence_does():
  """Fails if the choices of cached decoding belong to other tokens than those of `forward`."""
  params, (tokens_BT, _) = small_params(QWEN3_MOE), tokens_and_segments()
  hidden_BTD, routed = forward(QWEN3_MOE, params, tokens_BT, jnp.ones_like(tokens_BT))
  extend = jax.jit(functools.partial(decoder.extend_routed, QWEN3_MOE))
  cache, rows = decoder.empty_cache(QWEN3_MOE, ROWS, LENGTH), jnp.arange(ROWS)
  position = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
  found, cache, record = extend(params, tokens_BT[:, :5], position[:, :5], rows, cache)
  outputs, records = [found], [record.experts]
  for t in range(5, LENGTH):
    found, cache, record = extend(params, tokens_BT[:, t : t + 1], position[:, t : t + 1], rows, cache)
    outputs.append(found)
    records.append(record.experts)
  np.testing.assert_allclose(np.concatenate(outputs, axis=1), hidden_BTD, rtol=1e-4, atol=1e-4)
  np.testing.assert_array_equal(np.concatenate(records, axis=2), routed.experts)


SPREAD = dataclasses.replace(QWEN3_MOE, layers=4)


def loss(config, mesh, params, tokens_BT, segment_BT):
  hidden_BTD, routed = decoder.forward_routed(config, params, tokens_BT, segment_BT, mesh=mesh)
  log_probs = jax.nn.log_softmax(hidden_BTD @ decoder.head_kernel(config, params))
  chosen_BT = jnp.take_along_axis(log_probs, jnp.roll(tokens_BT, -1, axis=1)[..., None], axis=-1)[..., 0]
  there_BT = segment_BT > 0
  mean = jnp.where(there_BT, chosen_BT, 0).sum() / there_BT.sum()
  return mean + moe.load_balance(routed.load).mean(), (jnp.where(there_BT[..., None], hidden_BTD, 0), routed)


@functools.cache
def on_one_device(remat):
  step = jax.value_and_grad(functools.partial(loss, dataclasses.replace(SPREAD, remat=remat), None), has_aux=True)
  return jax.jit(step)(small_params(SPREAD), *tokens_and_segments())


_EIGHT = """
import functools, json, re, sys
import jax, numpy as np
from test_model_moe import SPREAD, loss, small_params, tokens_and_segments
from estr_jax.errors import UserError
from estr_jax.model import decoder
from estr_jax.model.sharding import BATCH_SPEC, make_mesh, shardings

mesh = make_mesh({"data": 1, "fsdp": 2, "tensor": 2, "expert": 2})
params = small_params(SPREAD)
places, rows = shardings(params, mesh), jax.NamedSharding(mesh, BATCH_SPEC)
inputs = jax.device_put(params, places), *jax.device_put(tokens_and_segments(), rows)
step = jax.jit(jax.value_and_grad(functools.partial(loss, SPREAD, mesh), has_aux=True)).lower(*inputs).compile()
leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(step(*inputs))]
np.savez(sys.argv[1], *leaves)
whole = re.compile(r"= f32[[]4,(12,8|8,12)[]]\\S* all-gather")  # the kernels of all experts on one device
try:
  jax.eval_shape(functools.partial(decoder.forward, SPREAD, mesh=mesh), params, *np.ones((2, 3, 5), np.int32))
except UserError as error:
  refusal = str(error)
print(json.dumps([len(whole.findall(step.as_text())), refusal]))
"""


def test_one_device_equals_eight(tmp_path):
  """Fails if a token's experts on another device are lost or counted twice, or all experts meet on one device."""
  whole, refusal = json.loads(on_eight_devices(_EIGHT, tmp_path / "found.npz"))
  assert whole == 0
  assert refusal == "3 rows of tokens do not divide over mesh.data x mesh.fsdp x mesh.expert = 4: change one of them"
  wanted = jax.tree_util.tree_leaves_with_path(on_one_device("none"))
  with np.load(tmp_path / "found.npz") as file:
    found = [file[f"arr_{i}"] for i in range(len(wanted))]
  for (path, one), eight in zip(wanted, found):
    scale = max(1e-2, float(np.abs(one).max()))
    np.testing.assert_allclose(eight, one, rtol=0, atol=1e-4 * scale, err_msg=jax.tree_util.keystr(path))


def test_what_the_backward_pass_keeps_does_not_change_it():
  """Fails if recomputing chooses otherwise than the forward pass did."""
  (_, kept), (_, recomputed) = on_one_device("none"), on_one_device("full")
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), recomputed, kept)
