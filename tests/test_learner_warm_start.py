"""The supervised warm start and the optimizer, on a task of one rule."""

import jax
import numpy as np
import pytest
from learner_cases import MODEL, flat, initial_params
from test_learner_checkpoint import ADAM, abstract_params, equal

from estr_jax.errors import UserError
from estr_jax.learner import optimizer, warm_start
from estr_jax.model.tokenizers import CharTokenizer
from estr_jax.tasks.calculator import TASK


def test_demonstrations_mask_what_the_policy_wrote():
  """Fails if the prompt, the environment's text or padding is imitated."""
  tokenizer = CharTokenizer(TASK.alphabet)
  examples = [{"question": "7*8+46=", "answer": "102"}] * 40
  tokens, mask = warm_start.encode_demonstrations(TASK, tokenizer, examples, np.random.default_rng(0), length=40)
  written = {
    "".join(tokenizer.decode([t]) if m else "_" for t, m in zip(*row)).rstrip("_") for row in zip(tokens, mask)
  }
  assert "_______<7*8>____<56+46>_____#102$" in written or "_______<8*7>____<46+56>_____#102$" in written
  assert all(text.startswith("_______") and text[7] in "<#" for text in written)
  with pytest.raises(UserError, match=r"more than the 20 of the context; raise sampling\.context"):
    warm_start.encode_demonstrations(TASK, tokenizer, examples, np.random.default_rng(0), length=20)


def test_it_learns_the_masked_tokens_only():
  """Fails if unmasked tokens are imitated too, or if the wrong token is the target: the rule is next = last + 1."""
  rng = np.random.default_rng(0)
  start = rng.integers(1, 6, (256, 1))
  tokens = (start + np.arange(6)).astype(np.int32)
  mask = np.broadcast_to(np.arange(6) > 0, tokens.shape).copy()
  tokens[:, 3] = rng.integers(1, 12, 256)  # noise, unmasked; the token after it follows the one before
  mask[:, 3] = False
  before, losses = initial_params(), []
  batches = warm_start.sample_batches((tokens, mask), batch=32, rng=rng)
  params = warm_start.supervised(
    MODEL,
    before,
    batches,
    mesh=None,
    steps=95,
    learning_rate=2e-2,
    on_progress=lambda step, loss: losses.append((step, loss)),
  )
  assert [step for step, _ in losses] == [*range(10, 95, 10), 95]
  assert losses[0][1] > 1.0 and losses[-1][1] < 0.15
  assert np.isfinite(flat(params)).all() and not equal(params, before)


def test_too_few_demonstrations_are_an_error():
  """Fails if a finite iterator ends the warm start early without a word."""
  with pytest.raises(ValueError, match="the demonstrations ended after 0 of 5 steps"):
    warm_start.supervised(MODEL, initial_params(), iter([]), mesh=None, steps=5, learning_rate=1e-3, on_progress=print)


def test_the_cache_makes_each_recipe_once(tmp_path):
  """Fails if a changed recipe reads old weights, or if the same recipe is made again."""
  made = []

  def make():
    made.append(1)
    return jax.tree.map(lambda leaf: leaf + len(made), initial_params())

  first = warm_start.cached(tmp_path, {"steps": 1, "seed": 0}, abstract_params(), make)
  again = warm_start.cached(tmp_path, {"seed": 0, "steps": 1}, abstract_params(), make)
  other = warm_start.cached(tmp_path, {"steps": 2, "seed": 0}, abstract_params(), make)
  assert len(made) == 2 and equal(first, again) and not equal(first, other)


def test_digest_tells_pools_apart():
  """Fails if the mask does not enter the recipe."""
  tokens, mask = np.ones((2, 3), np.int32), np.ones((2, 3), bool)
  assert warm_start.digest((tokens, mask)) == warm_start.digest((tokens.copy(), mask.copy()))
  assert warm_start.digest((tokens, mask)) != warm_start.digest((tokens, ~mask))


def test_weight_decay_leaves_norms_and_biases():
  """Fails if the decay mask is by rank, which stacked norms [L, D] would slip through."""
  wanted = optimizer.decayed(initial_params())
  paths = {jax.tree_util.keystr(path, simple=True, separator="/"): flag for path, flag in _leaves(wanted)}
  assert {path for path, flag in paths.items() if not flag} == {p for p in paths if p.endswith(("scale", "bias"))}
  assert paths["embed/embedding"] and paths["layers/mlp/up/kernel"] and not paths["layers/mlp_norm/scale"]
  zero = jax.tree.map(np.zeros_like, initial_params())
  state = ADAM.init(initial_params())
  updates, state = ADAM.update(zero, state, initial_params())
  for (path, update), (_, flag) in zip(_leaves(updates), _leaves(wanted)):
    assert bool(np.any(update)) == (flag and "bias" not in str(path))


def _leaves(tree):
  return jax.tree_util.tree_leaves_with_path(tree)


def test_the_learning_rate_of_each_step():
  """Fails if the first step has rate 0, if the peak is never reached, or if the metric lags by a step."""
  rate = optimizer.schedule(0.4, warmup_steps=4, decay="linear", total_steps=8)
  np.testing.assert_allclose([rate(t) for t in range(9)], [0.1, 0.2, 0.3, 0.4, 0.4, 0.3, 0.2, 0.1, 0.0], atol=1e-7)
  assert optimizer.schedule(0.4, warmup_steps=0, decay="constant", total_steps=1)(0) == 0.4
  params = {"w": {"kernel": np.ones(2, np.float32)}}
  state = ADAM.init(params)
  for expected in (0.005, 0.01, 0.01):
    _, state = ADAM.update(params, state, params)
    np.testing.assert_allclose(optimizer.learning_rate(state), expected, rtol=1e-6)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"optimizer": "lion"}, "optimizer.name='lion' is unknown; choose one of adamw, sgd"),
    ({"decay": "step"}, "optimizer.decay='step' is unknown; choose one of constant, cosine, linear"),
    ({"warmup_steps": 9, "decay": "cosine"}, "optimizer.warmup_steps=9 leaves none of the 9 steps"),
    ({"clip_norm": 0.0}, "optimizer.clip_norm=0.0 must be positive"),
  ],
)
def test_bad_optimizer_settings_are_one_clear_line(change, message):
  """Fails if a misspelt name becomes a KeyError, or a schedule a division by zero."""
  settings = {"optimizer": "adamw", "learning_rate": 1e-3, "warmup_steps": 0, "decay": "constant", "total_steps": 9}
  settings |= {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "clip_norm": 1.0}
  with pytest.raises(UserError, match=message.replace(".", r"\.")):
    optimizer.make(**(settings | change))
