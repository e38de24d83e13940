"""Batches for the objective's tests: every kind of token that a loss must survive, and one way to run any loss."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from configs.default import get_config
from estr_jax.objective.losses import LOSSES, arguments
from estr_jax.objective.triangle import EDGES
from estr_jax.options import keys_of
from estr_jax.structs import Batch, Scores, TokenLoss

CONFIG = get_config().loss
VOCABULARY = 5
SHAPE = (3, 6)

POLICY_KINDS = ("policy", "certain", "far", "unsampled", "broken")
KINDS = (*POLICY_KINDS, "tool", "padding")


def words(name: str) -> list[dict[str, str]]:
  """Every combination of a loss's strings."""
  every = {"edge": EDGES} | {key: declared.choices for key, declared in keys_of(LOSSES[name]).items()}
  mine = {key: every[key] for key, value in hyper(name).items() if isinstance(value, str)}
  return [dict(zip(mine, values)) for values in itertools.product(*mine.values())]


def every_form() -> list[tuple[str, dict[str, str]]]:
  """(name, words) of every loss in each of its forms."""
  return [(name, form) for name in LOSSES for form in words(name)]


def label(value) -> str | None:
  """The name of a form in a test's id."""
  return "-".join(value.values()) if isinstance(value, dict) else None


def hyper(name: str, **changes) -> dict:
  """The hyper-parameters of a loss: the defaults of configs/default.py, with changes."""
  defaults = arguments(name, LOSSES[name], CONFIG)
  unknown = set(changes) - set(defaults)
  assert not unknown, f"{name} has no {unknown}"
  return defaults | changes


class Result(NamedTuple):
  """A TokenLoss as NumPy, and the gradient of the sum of its values in every field of the policy's scores."""

  value: np.ndarray  # [B, T]
  keep: np.ndarray
  clipped: np.ndarray
  gradient: np.ndarray
  entropy_gradient: np.ndarray
  gini_gradient: np.ndarray
  vocabulary_gradient: np.ndarray  # [B, T, V]


def run(name: str, policy: Scores, batch: Batch, **changes) -> Result:
  """One compilation for each loss, its words and the shape of the batch; the numbers are traced."""
  values = hyper(name, **changes)
  strings = tuple((key, value) for key, value in values.items() if isinstance(value, str))
  numbers = {key: np.float32(value) for key, value in values.items() if not isinstance(value, str)}
  gradient, token_loss = _compiled(name, strings)(policy, batch, numbers)
  return Result(*(np.asarray(x) for x in (*token_loss, *gradient)))


@functools.cache
def _compiled(name: str, strings: tuple[tuple[str, str], ...]):
  def total(policy, batch, numbers) -> tuple[jax.Array, TokenLoss]:
    token_loss = LOSSES[name](policy, batch, **dict(strings), **numbers)
    return jnp.sum(token_loss.value), token_loss

  # Compiled without optimisations: most of the time of these tests is compilation.
  return jax.jit(jax.grad(total, has_aux=True), compiler_options={"xla_backend_optimization_level": 0})


def build(seed: int, shape: tuple[int, int] = SHAPE, kinds=None) -> tuple[Scores, Batch]:
  """A random policy and batch; NumPy arrays. `kinds` fixes the kind of every token, row by row.

  policy: an ordinary sampled token. certain: H = 0. far: a log-ratio beyond +-20. unsampled: a stored log-prob of
  -inf. broken: a stored log-prob of NaN. tool: not of the policy, and all that is stored about it is rubbish.
  padding: behind the segments of a row.

  How far the policies are apart, how many tokens are odd, how the rows are packed, which groups have equal rewards
  (and so no advantage): all differ from seed to seed.
  """
  random = np.random.default_rng(seed)
  segment, group, reward, advantage = _sequences(random, shape)
  if kinds is None:
    odd = random.choice([0.0, 0.03, 0.2])
    kinds = random.choice(KINDS[:-1], size=shape, p=[1 - 4.5 * odd, 1.5 * odd, *[0.5 * odd] * 2, 0.5 * odd, 1.5 * odd])
  kinds = np.where(segment == 0, "padding", np.array(kinds).reshape(shape))
  mask = np.isin(kinds, POLICY_KINDS)

  scales = [[0.0, 0.003, 0.03], [0.003, 0.1, 0.4], [0.1, 0.4, 2.0]][random.integers(3)]
  stored = -(10.0 ** random.uniform(-7, 1.0, size=shape))
  step = random.normal(size=(2, *shape)) * random.choice(scales, size=(2, *shape))
  logprob, proximal = np.where(stored + step > 0, stored - np.abs(step), stored + step)
  far = kinds == "far"
  lower = random.random(shape) < 0.5
  logprob = np.where(far, np.where(lower, -25.0, -0.5), logprob)
  stored = np.where(far, np.where(lower, -0.5, -25.0), stored)
  tokens = random.integers(VOCABULARY, size=shape)
  rest = random.normal(size=(*shape, VOCABULARY)) * 1.5
  moved = rest + random.normal(size=rest.shape) * random.choice(scales, size=shape)[..., None]
  unseen = (random.random(rest.shape) < 0.1) & (np.cumsum(np.ones(rest.shape), -1) < VOCABULARY)
  stored = np.where(kinds == "unsampled", -np.inf, stored)
  log_mu = _vocabulary(stored, tokens, np.where(unseen, -np.inf, rest))
  log_pi = _vocabulary(logprob, tokens, moved)
  stored = np.where(kinds == "broken", np.nan, stored)
  log_mu[kinds == "broken"] = np.nan

  entropy, learner_entropy = 10.0 ** random.uniform(-3, 0.8, size=(2, *shape))
  entropy[kinds == "certain"] = 0.0
  gini = random.uniform(size=shape)
  gini[kinds == "certain"] = 0.0
  arrays = {
    "logprob": stored,
    "entropy": entropy,
    "gini": gini,
    "reward": reward,
    "advantage": advantage,
    "proximal": proximal,
    "reference": proximal - 0.1,
    "vocabulary": log_mu,
  }
  learner_gini = 1 - np.square(np.exp(log_pi)).sum(-1)
  scores = {"logprob": logprob, "entropy": learner_entropy, "gini": learner_gini, "vocabulary": log_pi}
  batch = Batch(
    tokens=tokens.astype(np.int32),
    mask=mask,
    staleness=random.integers(6, size=shape).astype(np.int32),
    segment=segment,
    group=group,
    **{name: array.astype(np.float32) for name, array in arrays.items()},
  )
  policy = Scores(**{name: array.astype(np.float32) for name, array in scores.items()})
  return spoilt(policy, batch, random.choice([0.0, np.nan, np.inf, -np.inf, 1e30], size=shape))


def on_policy(seed: int) -> tuple[Scores, Batch]:
  """(policy, batch) with mu = q = pi at every policy token, and staleness 0."""
  policy, batch = build(seed, kinds=["policy"] * (SHAPE[0] * SHAPE[1]))
  same = {name: policy.logprob for name in ("logprob", "proximal", "reference")}
  staleness = np.zeros_like(batch.staleness)
  return policy, dataclasses.replace(batch, **same, vocabulary=policy.vocabulary, staleness=staleness)


def spoilt(policy: Scores, batch: Batch, bad) -> tuple[Scores, Batch]:
  """The same policy tokens with `bad` in every float array outside the mask."""

  def spoil(array):
    if array is None or array.dtype != np.float32:
      return array
    here = np.asarray(batch.mask).reshape(batch.mask.shape + (1,) * (array.ndim - 2))
    rubbish = np.broadcast_to(np.asarray(bad, np.float32), batch.mask.shape).reshape(here.shape)
    return np.where(here, array, rubbish)

  return jax.tree.map(spoil, policy), jax.tree.map(spoil, batch)


def _sequences(random, shape):
  """(segment, group, reward, advantage) [B, T]: 0 to 3 sequences a row, of up to 3 prompts in the batch."""
  rows, length = shape
  segment, group = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
  reward, advantage = np.zeros(shape), np.zeros(shape)
  equal = random.random(4) < 0.2
  kind = random.integers(3)  # rewards of 0 and 1, of anything, or below 0
  for row in range(rows):
    cuts = np.sort(random.integers(1, length + 1, size=random.integers(1, 4)))
    start = 0
    for index, end in enumerate(np.unique(cuts), 1):
      prompt = random.integers(1, 4)
      of_sequence = [float(random.random() < 0.5), random.normal(), -random.random()][kind]
      here = (row, slice(start, end))
      segment[here], group[here] = index, prompt
      reward[here] = 1.0 if equal[prompt] else of_sequence
      advantage[here] = 0.0 if equal[prompt] else random.normal()
      start = end
  return segment, group, reward, advantage


def _vocabulary(log_p, tokens, rest):
  """log-probs [B, T, V] with `log_p` at the token and the other mass spread by the logits `rest`."""
  onehot = np.arange(VOCABULARY) == tokens[..., None]
  with np.errstate(divide="ignore", invalid="ignore"):
    others = np.where(onehot, -np.inf, rest)
    others = others - np.log(np.exp(others).sum(-1, keepdims=True)) + np.log(-np.expm1(log_p))[..., None]
  return np.where(onehot, log_p[..., None], others)


def tokens(log_pi, log_mu, *, log_q=None, entropy=1.0, advantage=1.0, mask=True, **others) -> tuple[Scores, Batch]:
  """(policy, batch) [1, T] of hand-made tokens of one sequence; a scalar stands for every token.

  `others`: any further field of the batch; vocabulary, and policy_vocabulary, [T, V].
  """
  given = (log_pi, log_mu, entropy, advantage, mask, others.get("segment", 1), others.get("staleness", 0))
  shape = np.broadcast_shapes(*(np.shape(x) for x in given))
  shape = (1, *(shape or (1,)))

  def full(value, dtype=np.float32):
    return None if value is None else np.broadcast_to(np.asarray(value, dtype), shape)

  def whole(value):
    return None if value is None else np.broadcast_to(np.asarray(value, np.float32), (*shape, np.shape(value)[-1]))

  policy_vocabulary = whole(others.pop("policy_vocabulary", None))
  vocabulary = whole(others.pop("vocabulary", None))
  integers = {"tokens": 0, "staleness": 0, "segment": 1, "group": 1}
  floats = {"gini": 0.5, "reward": 0.0, "reference": None}
  assert not set(others) - set(integers) - set(floats), others
  batch = Batch(
    mask=full(mask, bool),
    logprob=full(log_mu),
    entropy=full(entropy),
    advantage=full(advantage),
    proximal=full(log_q),
    vocabulary=vocabulary,
    **{name: full(others.get(name, value), np.int32) for name, value in integers.items()},
    **{name: full(others.get(name, value)) for name, value in floats.items()},
  )
  return Scores(full(log_pi), full(entropy), full(0.5), policy_vocabulary), batch
