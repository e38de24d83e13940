"""Log-prob, entropy and Gini: one definition, after the temperature, of the whole vocabulary, in nats."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from processes import on_eight_devices

from estr_jax.objective.scoring import merge, moments, score, score_logits, score_vocabulary

scores = jax.jit(score_logits)
TEMPERATURES = (0.7, 1.3)
B, T, D, V = 2, 7, 5, 19
# What conftest.py turns off for the sake of time: a plan of memory is to be that of a program as it runs.
OPTIMISED = {
  "xla_backend_optimization_level": 3,
  "xla_llvm_disable_expensive_passes": False,
  "xla_cpu_use_fusion_emitters": True,
}


def some_logits(spread: float) -> tuple[np.ndarray, np.ndarray]:
  random = np.random.default_rng(0)
  return random.normal(size=(B, T, V)).astype(np.float32) * spread, random.integers(0, V, size=(B, T))


def hidden_states(B=B, T=T, D=D, V=V) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  random = np.random.default_rng(1)
  hidden_BTD = random.normal(size=(B, T, D)).astype(np.float32)
  return hidden_BTD, random.normal(size=(D, V)).astype(np.float32), random.integers(0, V, size=(B, T), dtype=np.int32)


def reference(logits_V, targets, temperature) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(log-prob, entropy, Gini impurity) in float64."""
  probability_V = np.exp(references.log_softmax(logits_V, temperature))
  return *references.score_logits(logits_V, targets, temperature), 1 - (probability_V**2).sum(axis=-1)


def entropy_gradient(logits_V, temperature):
  """dH / d logits by central differences in float64."""
  logits_V = np.asarray(logits_V, np.float64)
  none = np.zeros(logits_V.shape[:-1], int)
  step, gradient = 1e-5, np.zeros_like(logits_V)
  for i in range(logits_V.shape[-1]):
    moved = step * (np.arange(logits_V.shape[-1]) == i)
    up, down = (references.score_logits(logits_V + sign * moved, none, temperature)[1] for sign in (1, -1))
    gradient[..., i] = (up - down) / (2 * step)
  return gradient


def assert_scores(got, want, tolerance):
  for one, wanted in zip(got[:3], want):
    assert one.dtype == jnp.float32
    np.testing.assert_allclose(one, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_score_logits_agrees_with_float64(temperature, spread):
  """Kills: log2, unscaled logits (in any quantity), top-k entropy, a temperature that multiplies."""
  logits_V, targets = some_logits(spread)
  assert_scores(scores(logits_V, targets, temperature=temperature), reference(logits_V, targets, temperature), 2e-6)


@jax.jit
@jax.grad
def score_gradient(logits_V, targets, temperature, logprob_weight, entropy_weight, gini_weight=0.0):
  logprob, entropy, gini, _ = score_logits(logits_V, targets, temperature=temperature)
  return jnp.sum(logprob_weight * logprob + entropy_weight * entropy + gini_weight * gini)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_gradient_of_score_logits(temperature):
  """Kills: a gradient that misses 1 / temperature, an entropy without one, a Gini impurity with one."""
  logits_V, targets = some_logits(2.0)
  want = references.score_logits_gradient(logits_V, targets, temperature)
  np.testing.assert_allclose(score_gradient(logits_V, targets, temperature, 1.0, 0.0), want, rtol=1e-5, atol=1e-6)
  want = entropy_gradient(logits_V, temperature)
  np.testing.assert_allclose(score_gradient(logits_V, targets, temperature, 0.0, 1.0), want, rtol=1e-4, atol=1e-6)
  np.testing.assert_array_equal(score_gradient(logits_V, targets, temperature, 0.0, 0.0, 1.0), 0.0)


def test_uniform_logits_have_the_entropy_log_v_in_nats():
  """Kills: log2, top-k entropy."""
  logprob, entropy, gini, _ = scores(np.zeros((1, 1000), np.float32), np.array([3]), temperature=0.5)
  np.testing.assert_allclose([logprob[0], entropy[0], gini[0]], [-np.log(1000), np.log(1000), 0.999], rtol=1e-6)


@pytest.mark.parametrize("peak", [20.0, 80.0, 200.0, 1e30])
def test_peaked_logits(peak):
  """Kills: 0 * -inf in the entropy, a negative entropy, a log-prob above 0, a gradient that is not finite."""
  logits_V = np.zeros((2, 50), np.float32)
  logits_V[:, 7] = peak
  targets = np.array([7, 8])
  got = scores(logits_V, targets, temperature=1.0)
  for one, wanted in zip(got[:3], reference(logits_V, targets, 1.0)):
    np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=3e-7)
  assert (np.asarray(got.entropy) >= 0).all() and (np.asarray(got.logprob) <= 0).all()
  logprob_V = references.log_softmax(logits_V, 1.0)
  of_entropy = -np.exp(logprob_V) * (logprob_V + references.score_logits(logits_V, targets, 1.0)[1][:, None])
  gradient = score_gradient(logits_V, targets, 1.0, 1.0, 1.0)
  want = references.score_logits_gradient(logits_V, targets, 1.0) + of_entropy
  np.testing.assert_allclose(gradient, want, rtol=1e-6, atol=2e-7)


def test_forbidden_vocabulary_entries_count_as_probability_zero():
  """Kills: an entropy that is NaN where a logit is -inf (a padded vocabulary)."""
  logits_V, targets = some_logits(1.0)
  padded_V = np.concatenate([logits_V, np.full((B, T, 3), -np.inf, np.float32)], axis=-1)
  assert_scores(scores(padded_V, targets, temperature=1.3), reference(logits_V, targets, 1.3), 2e-6)
  # And where a whole part is forbidden, on either side of the merge.
  kind = {"temperature": 1.3, "entropy": True}
  whole, nothing = moments(padded_V, targets, **kind), moments(padded_V[..., V:], targets - V, **kind)
  for merged in (merge(whole, nothing, temperature=1.3), merge(nothing, whole, temperature=1.3)):
    jax.tree.map(np.testing.assert_array_equal, merged, whole)


def test_bfloat16_logits_are_scored_in_float32():
  """Kills: a softmax taken in the dtype of the logits (bfloat16 is wrong in the third digit)."""
  logits_V, targets = some_logits(3.0)
  narrow_V = jnp.asarray(logits_V, jnp.bfloat16)
  want = reference(np.asarray(narrow_V, np.float64), targets, 0.7)
  assert_scores(scores(narrow_V, targets, temperature=0.7), want, 2e-6)


def test_the_scores_of_a_whole_vocabulary_are_its_log_softmax():
  """Kills: a second definition that forgets the temperature or the shift."""
  logits_V, _ = some_logits(3.0)
  got = jax.jit(score_vocabulary)(logits_V, temperature=0.7)
  np.testing.assert_allclose(got, references.log_softmax(logits_V, 0.7), rtol=2e-6, atol=2e-6)


@functools.cache
def score_and_gradients(chunk, vocabulary_axis=1, entropy=True):
  """(hidden, head [D, V], targets, weights of log-prob and entropy, temperature) -> scores, d hidden, d head [D, V]."""

  def total(hidden_BTD, head, targets_BT, of_logprob, of_entropy, temperature):
    got = score(
      hidden_BTD,
      head,
      targets_BT,
      temperature=temperature,
      chunk=chunk,
      entropy=entropy,
      vocabulary_axis=vocabulary_axis,
    )
    value = jnp.sum(of_logprob * got.logprob)
    return value + (jnp.sum(of_entropy * got.entropy) if entropy else 0.0), got

  gradient = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))

  def run(hidden_BTD, head_DV, *rest):
    turn = np.asarray if vocabulary_axis else np.transpose
    (_, got), (to_hidden, to_head) = gradient(hidden_BTD, turn(head_DV), *rest)
    return got, to_hidden, turn(to_head)

  return run


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
  ("chunk", "axis"),
  [(1, 1), (8, 1), (V - 1, 1), (V, 1), (V + 4, 1), (8, 0), (V, 0)],
  ids=["one", "rest", "rest-of-one", "whole", "beyond", "tied-rest", "tied-whole"],
)
def test_score_by_chunks_agrees_with_float64(temperature, chunk, axis):
  """Kills: a rest that is dropped or counted twice, a target looked for in the wrong chunk, a maximum of one chunk, an
  unscaled or sign-flipped gradient, a gradient written at the place of another chunk, a head taken for its transpose.
  """
  hidden_BTD, head_DV, targets_BT = hidden_states()
  of_logprob, of_entropy = np.random.default_rng(2).normal(size=(2, B, T)).astype(np.float32)
  run = score_and_gradients(chunk, axis)
  got, to_hidden, to_head = run(hidden_BTD, head_DV, targets_BT, of_logprob, of_entropy, temperature)
  logits_BTV = hidden_BTD.astype(np.float64) @ head_DV.astype(np.float64)
  assert got.logprob.shape == got.entropy.shape == got.gini.shape == (B, T)
  assert_scores(got, reference(logits_BTV, targets_BT, temperature), 1e-5)
  to_logits = of_logprob[..., None] * references.score_logits_gradient(logits_BTV, targets_BT, temperature)
  to_logits += of_entropy[..., None] * entropy_gradient(logits_BTV, temperature)
  np.testing.assert_allclose(to_hidden, to_logits @ head_DV.T, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(to_head, np.einsum("btd,btv->dv", hidden_BTD, to_logits), rtol=1e-4, atol=1e-5)


def test_one_token_without_entropy():
  """Kills: entropy computed, or its gradient added, where nobody asked for it."""
  data = hidden_states(B=1, T=1)
  weight = np.ones((1, 1), np.float32)
  without, *gradient = score_and_gradients(8, entropy=False)(*data, weight, weight, 0.7)
  with_entropy, *wanted = score_and_gradients(8)(*data, weight, 0 * weight, 0.7)
  assert without.entropy is None and without.gini is None
  np.testing.assert_array_equal(without.logprob, with_entropy.logprob)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), gradient, wanted)


@pytest.mark.parametrize("chunk", [8, V])
def test_nearly_deterministic_and_huge_logits(chunk):
  """Kills: H < 0, log p > 0, 0 * inf in the merge or in the gradient, a maximum taken after the temperature."""
  hidden_BTD, head_DV, targets_BT = hidden_states()
  one = np.ones((B, T), np.float32)
  for scale in (30.0, 1e4, 1e30):
    got, to_hidden, to_head = score_and_gradients(chunk)(
      hidden_BTD * np.float32(scale), head_DV, targets_BT, one, one, 0.7
    )
    assert all(np.isfinite(x).all() for x in (*got[:3], to_hidden, to_head))
    assert (np.asarray(got.entropy) >= 0).all() and (np.asarray(got.logprob) <= 0).all()
    assert (np.asarray(got.gini) >= 0).all() and (np.asarray(got.entropy) < 1e-3).any()


def test_bfloat16_states_give_float32_sums():
  """Kills: logits accumulated or rounded in bfloat16, which moves a log-prob by hundredths of a nat; a gradient of the
  head in another dtype than its own, or summed in bfloat16.
  """
  hidden_BTD, head_DV, targets_BT = hidden_states()
  narrow_BTD = jnp.asarray(hidden_BTD, jnp.bfloat16)
  one, none = np.ones((B, T), np.float32), np.zeros((B, T), np.float32)
  got, to_hidden, to_head = score_and_gradients(8)(narrow_BTD, head_DV, targets_BT, one, none, 1.0)
  rounded_DV = np.asarray(jnp.asarray(head_DV, jnp.bfloat16), np.float64)
  hidden_BTD = np.asarray(narrow_BTD, np.float64)
  assert_scores(got, reference(hidden_BTD @ rounded_DV, targets_BT, 1.0), 1e-4)
  assert to_hidden.dtype == jnp.bfloat16 and to_head.dtype == jnp.float32
  to_logits = references.score_logits_gradient(hidden_BTD @ rounded_DV, targets_BT, 1.0)
  np.testing.assert_allclose(to_head, np.einsum("btd,btv->dv", hidden_BTD, to_logits), rtol=2e-2, atol=2e-2)
  np.testing.assert_allclose(np.float32(to_hidden), to_logits @ rounded_DV.T, rtol=2e-2, atol=2e-2)


def compiled_bytes(V: int, chunk: int) -> int:
  """Temporary memory of value and gradient, as the compiler plans it."""

  def total(hidden_BTD, head_DV, targets_BT):
    got = score(hidden_BTD, head_DV, targets_BT, temperature=0.7, chunk=chunk, entropy=True)
    return jnp.sum(got.logprob + got.entropy)

  abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in hidden_states(4, 64, 8, V)]
  compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(*abstract).compile(OPTIMISED)
  return compiled.memory_analysis().temp_size_in_bytes


def test_memory_follows_the_chunk_and_not_the_vocabulary():
  """Kills: [B, T, V] held in the forward pass, in the backward pass or between them; a copy of the head."""
  small, large = compiled_bytes(4 * 512 + 100, 512), compiled_bytes(16 * 512 + 100, 512)
  assert large < small + 12 * 512 * 8  # bytes; a copy of the larger head would be four times that
  assert large < 4 * 64 * 512 * 4 * 5  # some chunks of float32 logits


def test_one_program_serves_all_temperatures():
  """Kills: a temperature that is static, so that every new one compiles."""
  run = jax.jit(functools.partial(score, chunk=8, entropy=True))
  data = hidden_states()
  for temperature in TEMPERATURES:
    run(*data, temperature=temperature)
  assert run._cache_size() == 1


_EIGHT = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from test_objective_scoring import hidden_states
from estr_jax.model.sharding import BATCH_SPEC, make_mesh, shardings
from estr_jax.objective.scoring import score
mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2, "expert": 1})
B, T, D, V, chunk = 8, 6, 12, 76, 16
hidden, head, targets = hidden_states(B, T, D, V)
rows = NamedSharding(mesh, P(*BATCH_SPEC, None))
saved, report = [], []
for axis, name in ((1, "head/kernel"), (0, "embed/embedding")):
  stored = head if axis else head.T
  tree = {name.split("/")[0]: {name.split("/")[1]: stored}}
  place = jax.tree.leaves(shardings(tree, mesh))[0]
  def total(hidden, head, targets):
    got = score(hidden, head, targets, temperature=0.7, chunk=chunk, entropy=True, vocabulary_axis=axis,
                head_place=place)
    return jnp.sum(jnp.sin(jnp.arange(B * T)).reshape(B, T) * (got.logprob + 0.5 * got.entropy)), got
  step = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True),
                 in_shardings=(rows, place, NamedSharding(mesh, BATCH_SPEC)))
  (_, got), (to_hidden, to_head) = step(hidden, stored, targets)
  text = step.lower(hidden, stored, targets).compile().as_text()
  shapes = re.findall(r"= \\w+\\[([0-9,]+)\\][^=]* all-gather\\(", text)
  gathered = [[int(n) for n in shape.split(",")] for shape in shapes]
  report.append([gathered, to_head.sharding.is_equivalent_to(place, 2)])
  saved += [*got[:3], to_hidden, to_head if axis else to_head.T]
np.savez(sys.argv[1], *[np.asarray(x) for x in saved])
print(json.dumps(report))
"""


def test_eight_devices_equal_one_and_gather_no_head(tmp_path):
  """Kills: a head gathered over the mesh, a part of the vocabulary counted twice or not merged, targets looked for in
  the numbering of a part, a gradient that is not summed over the rows or over the vocabulary.
  """
  printed = on_eight_devices(_EIGHT, tmp_path / "eight.npz")
  hidden_BTD, head_DV, targets_BT = hidden_states(8, 6, 12, 76)
  weight_BT = np.sin(np.arange(48, dtype=np.float32)).reshape(8, 6)
  got, *gradients = score_and_gradients(16)(hidden_BTD, head_DV, targets_BT, weight_BT, 0.5 * weight_BT, 0.7)
  eight = list(np.load(tmp_path / "eight.npz").values())
  for of_layout in (eight[:5], eight[5:]):
    for one, wanted in zip(of_layout, (*got[:3], *gradients), strict=True):
      np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-5)
  for gathered, placed in json.loads(printed):
    assert gathered, "the width of the head is sharded, so its chunks have to be gathered"
    assert max(np.prod(shape) for shape in gathered) == 12 * 16  # the width of one chunk
    assert placed
