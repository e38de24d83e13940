"""A tiny model, batch and train step for the learner's tests."""

import functools

import jax
import numpy as np

from estr_jax.learner import optimizer, step
from estr_jax.learner.batching import assemble
from estr_jax.model import decoder
from estr_jax.model.config import DecoderConfig
from estr_jax.model.sharding import make_mesh
from estr_jax.objective.losses import LOSSES
from estr_jax.structs import NO_VERSION, Trajectory

MODEL = DecoderConfig(
  vocab_size=12,
  width=16,
  layers=2,
  heads=2,
  kv_heads=2,
  head_dim=8,
  mlp_width=32,
  rope_theta=1e4,
  norm_eps=1e-6,
  qkv_bias=True,
  qk_norm=True,
  tied_head=True,
)
ROWS, LENGTH = 8, 12
WIDE = {"rows": 12, "length": 24}  # room for padding on both sides, and for packing
OBJECTIVE = step.Objective(
  loss=functools.partial(LOSSES["estr"], edge="direct"),
  aggregation="token_mean",
  aggregation_tokens=LENGTH,
  entropy_bonus=False,
  kl=None,
  router_balance=False,
  ess_step=False,
)
HYPER = step.Hyper(
  loss={"tau": np.float32(1.0), "eps": np.float32(0.01), "clip_low": np.float32(0.2), "clip_high": np.float32(0.28)},
  kl_coefficient=np.float32(0),
  entropy_target=np.float32(-np.inf),
  entropy_step=np.float32(0),
  entropy_largest=np.float32(0),
  router_balance=np.float32(0),
)


def groups(seed: int = 0) -> list[list[Trajectory]]:
  """Four groups of two, of different lengths, with prompt and tool tokens and log-probs near the model's."""
  rng = np.random.default_rng(seed)
  made = []
  for prompt_id in range(8):
    size = int(rng.integers(5, LENGTH + 1))
    mask = np.arange(size) >= 2
    mask[size - 2] = False  # a tool's token
    made.append(
      Trajectory(
        tokens=rng.integers(1, MODEL.vocab_size, size).astype(np.int32),
        mask=mask,
        logprob=np.where(mask, rng.normal(-2.5, 0.6, size), 0).astype(np.float32),
        entropy=np.where(mask, rng.uniform(0, 2.4, size), 0).astype(np.float32),
        gini=np.where(mask, 0.4, 0).astype(np.float32),
        version=np.where(mask, 0, NO_VERSION).astype(np.int32),
        reward=float(prompt_id % 2),
        prompt_id=prompt_id,
        group=prompt_id // 2,
        task="t",
        finish="stop",
        turns=1,
        seconds=0.0,
      )
    )
  return [made[i : i + 2] for i in range(0, 8, 2)]


def batch(seed: int = 0, *, rows: int = ROWS, length: int = LENGTH, pack: bool = False):
  return assemble(groups(seed), 0, rows=rows, length=length, advantage="grpo", advantage_eps=1e-6, pack=pack)


@functools.cache
def rule():
  """SGD without momentum, so that an update shows its gradient in proportion; Adam would hide its scale."""
  return optimizer.make(
    optimizer="sgd",
    learning_rate=0.1,
    warmup_steps=0,
    decay="constant",
    total_steps=100,
    b1=0.0,
    b2=0.0,
    eps=0.0,
    weight_decay=0.0,
    clip_norm=float("inf"),
  )


@functools.cache
def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, expert: int = 1):
  return make_mesh({"data": data, "fsdp": fsdp, "tensor": tensor, "expert": expert})


@functools.cache
def initial_params():
  return jax.device_get(jax.jit(functools.partial(decoder.init, MODEL))(jax.random.key(1)))


def compiled_step(microbatches: int = 1, objective=OBJECTIVE, on=None, update=None):
  """Compiled programs are shared by the tests, however they ask; it is compiling that takes their time."""
  return _compiled_step(microbatches, objective, on, update)


@functools.cache
def _compiled_step(microbatches, objective, on, update):
  return step.make_train_step(
    MODEL,
    objective,
    rule() if update is None else update,
    mesh=mesh() if on is None else on,
    microbatches=microbatches,
    temperature=0.8,
    score_chunk=5,
    entropy=True,
    diagnostics=True,
  )


def train_step(microbatches: int = 1, objective=OBJECTIVE, on=None, update=None, hyper=HYPER):
  """(state, batch) -> (state, metrics)."""
  compiled = compiled_step(microbatches, objective, on, update)
  return lambda state, batch: compiled(state, batch, hyper)


@functools.cache
def _initial_state(on, update):
  state = step.init_state(MODEL, update, initial_params(), on, entropy_coefficient=0.0)
  return jax.device_get(state), jax.tree.map(lambda leaf: leaf.sharding, state)


def fresh_state(on=None, update=None):
  """The state before the first update, in buffers of its own."""
  state, places = _initial_state(mesh() if on is None else on, rule() if update is None else update)
  return jax.tree.map(lambda leaf, place: jax.device_put(np.array(leaf), place), state, places)


def flat(tree) -> np.ndarray:
  return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])
