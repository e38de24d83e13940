"""Batches for the objective's tests: every kind of token that a loss must survive, away from every threshold."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import references
from hypothesis import strategies as st

from estr_jax.objective.losses import LOSSES
from estr_jax.structs import NO_VERSION, Batch, TokenLoss

# Hyper-parameters of every loss; a loss takes those in HYPER_OF.
HYPER_OF = {
  "estr": ("tau", "eps", "clip_low", "clip_high"),
  "ppo": ("clip_low", "clip_high"),
  "icepop": ("low", "high", "clip_low", "clip_high"),
  "kpop": ("phi", "clip_low", "clip_high"),
}
DEFAULTS = {"tau": 1.0, "eps": 0.01, "low": 0.5, "high": 5.0, "phi": 0.5, "clip_low": 0.2, "clip_high": 0.28}

POLICY_KINDS = ("policy", "certain", "flat", "unsampled", "broken")
KINDS = ("policy", "policy", "policy", "certain", "flat", "unsampled", "broken", "tool", "padding")
SHAPES = ((1, 1), (3, 6))


def hyper(name: str, values: dict = DEFAULTS) -> dict:
  return {key: values[key] for key in HYPER_OF[name]}


def run(name: str, edge: str, logprob_BT, batch: Batch, values: dict = DEFAULTS) -> tuple[TokenLoss, np.ndarray]:
  """(token loss, d sum(value) / d log pi) as NumPy. One compilation for each loss, edge and shape."""
  token_loss, gradient = _compiled(name, edge)(logprob_BT, batch, hyper(name, values))
  return TokenLoss(*(np.asarray(x) for x in token_loss)), np.asarray(gradient)


@functools.cache
def _compiled(name: str, edge: str):
  def total(logprob_BT, batch, values):
    token_loss = LOSSES[name](logprob_BT, batch, edge=edge, **values)
    return jnp.sum(token_loss.value), token_loss

  def both(logprob_BT, batch, values):
    gradient, token_loss = jax.grad(total, has_aux=True)(logprob_BT, batch, values)
    return token_loss, gradient

  return jax.jit(both)


def build(kinds, shape, seed: int, values: dict = DEFAULTS) -> tuple[np.ndarray, Batch]:
  """(log pi [B, T], batch) with one kind of token at each place, row by row.

  policy: an ordinary sampled token. certain: H = 0. flat: advantage 0. unsampled: a stored log-prob of -inf.
  broken: a stored log-prob of NaN. tool: not of the policy, and everything stored about it is rubbish.
  padding: zeros. A token within 0.1% of any threshold of `values` is made on-policy, where no rounding matters.
  """
  random = np.random.default_rng(seed)
  kinds = np.array(kinds).reshape(shape)
  mask = np.isin(kinds, POLICY_KINDS)

  def move(log_p):
    moved = log_p + random.normal(size=shape) * random.choice([1e-3, 0.1, 0.4, 2.0], size=shape)
    return np.minimum(moved, 0.0).astype(np.float32)

  stored = (-(10.0 ** random.uniform(-7, 1.2, size=shape))).astype(np.float32)
  proximal, logprob = move(stored), move(stored)
  entropy = (10.0 ** random.uniform(-3, 0.8, size=shape)).astype(np.float32)
  entropy[kinds == "certain"] = 0.0
  advantage = random.normal(size=shape).astype(np.float32)
  advantage[kinds == "flat"] = 0.0
  draft = Batch(
    tokens=np.ones(shape, np.int32),
    mask=mask,
    logprob=stored,
    entropy=entropy,
    version=np.where(mask, 3, NO_VERSION).astype(np.int32),
    segment=(kinds != "padding").astype(np.int32),
    advantage=advantage,
    proximal=proximal,
  )
  near = near_a_threshold(logprob, draft, values)
  logprob, proximal = np.where(near, stored, logprob), np.where(near, stored, proximal)
  rubbish = {"unsampled": -np.inf, "broken": np.nan, "tool": -np.inf, "padding": 0.0}
  for kind, bad in rubbish.items():
    stored = np.where(kinds == kind, np.float32(bad), stored)
  for array in (entropy, advantage, proximal, logprob):
    array[kinds == "padding"] = 0.0
    array[kinds == "tool"] = np.nan
  return logprob, dataclasses.replace(draft, logprob=stored, entropy=entropy, advantage=advantage, proximal=proximal)


def near_a_threshold(logprob_BT, batch: Batch, values: dict) -> np.ndarray:
  """bool [B, T]: float32 may fall on the other side of a threshold of some loss than float64."""

  def near(quantity, threshold):
    return np.abs(quantity - threshold) <= 1e-3 * threshold

  direct, proximal, behaviour = (
    np.exp(references.log_edge(logprob_BT, batch, edge)) for edge in ("direct", "proximal", "behaviour")
  )
  result = near(references.estr_score(logprob_BT, batch, values["eps"]), values["tau"])
  for kl in (
    references.bernoulli_kl(logprob_BT, batch.logprob),
    references.bernoulli_kl(batch.logprob, logprob_BT),
  ):
    result |= near(kl, values["phi"])
  for ratio in (direct, behaviour):
    result |= near(ratio, values["low"]) | near(ratio, values["high"])
  for ratio in (direct, proximal):
    result |= near(ratio, 1 - values["clip_low"]) | near(ratio, 1 + values["clip_high"])
  return result


@st.composite
def cases(draw) -> tuple[np.ndarray, Batch, dict]:
  """(log pi, batch, hyper-parameters of every loss)."""
  shape = draw(st.sampled_from(SHAPES))
  size = shape[0] * shape[1]
  kinds = draw(st.lists(st.sampled_from(KINDS), min_size=size, max_size=size))
  low, high = draw(st.sampled_from([(0.5, 5.0), (0.2, 2.0), (0.9, 1.1)]))
  clip_low, clip_high = draw(st.sampled_from([(0.2, 0.28), (0.2, 0.2), (0.05, 0.6)]))
  values = {
    "tau": draw(st.sampled_from([0.25, 1.0, 4.0])),
    "eps": draw(st.sampled_from([0.01, 0.3])),
    "phi": draw(st.sampled_from([0.02, 0.5, 2.0])),
    "low": low,
    "high": high,
    "clip_low": clip_low,
    "clip_high": clip_high,
  }
  return (*build(kinds, shape, draw(st.integers(0, 2**32 - 1)), values), values)


def tokens(log_pi, log_mu, *, entropy=1.0, advantage=1.0, log_q=None, mask=True) -> tuple[np.ndarray, Batch]:
  """(log pi [1, T], batch) of hand-made policy tokens; a scalar stands for every token."""
  shape = np.broadcast_shapes(*(np.shape(x) for x in (log_pi, log_mu, entropy, advantage, mask)))
  shape = (1, *(shape or (1,)))

  def full(value, dtype=np.float32):
    return np.broadcast_to(np.asarray(value, dtype), shape)

  batch = Batch(
    tokens=full(1, np.int32),
    mask=full(mask, bool),
    logprob=full(log_mu),
    entropy=full(entropy),
    version=full(0, np.int32),
    segment=full(1, np.int32),
    advantage=full(advantage),
    proximal=None if log_q is None else full(log_q),
  )
  return full(log_pi), batch
