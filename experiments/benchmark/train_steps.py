"""A whole train step: ESTR's against PPO's, and one with all diagnostics against one without."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from estr_jax.learner import optimizer, step
from estr_jax.model import decoder
from estr_jax.model.config import DecoderConfig
from estr_jax.model.sharding import make_mesh
from estr_jax.objective.losses import LOSSES
from estr_jax.structs import Batch
from experiments.benchmark.checks import Check, compare

# Wide enough that matrix products make most of a step, as in a real model; one pass over its logits is not free.
SMALL_MODEL = DecoderConfig(
  vocab_size=8192,
  width=512,
  layers=4,
  heads=8,
  kv_heads=2,
  head_dim=64,
  mlp_width=1536,
  rope_theta=1e4,
  norm_eps=1e-6,
  qkv_bias=False,
  qk_norm=True,
  tied_head=True,
)


def _batch(rows: int, length: int, vocabulary: int) -> Batch:
  """Policy tokens near a new model's uniform distribution, in groups of four rows."""
  random, grid = np.random.default_rng(0), (rows, length)
  full = functools.partial(np.full, grid)
  by_row = np.broadcast_to(np.arange(rows)[:, None], grid)
  reward = (by_row % 2).astype(np.float32)
  return Batch(
    tokens=random.integers(0, vocabulary, grid).astype(np.int32),
    mask=np.broadcast_to(np.arange(length) >= 8, grid),
    logprob=(random.normal(size=grid) * 0.1 - np.log(vocabulary)).astype(np.float32),
    entropy=random.uniform(0, 3, grid).astype(np.float32),
    gini=random.uniform(0, 1, grid).astype(np.float32),
    staleness=random.integers(0, 4, grid).astype(np.int32),
    segment=full(1).astype(np.int32),
    group=(1 + by_row // 4).astype(np.int32),
    reward=reward,
    advantage=2 * reward - 1,
  )


def train_steps(
  model: DecoderConfig = SMALL_MODEL, rows: int = 16, length: int = 64, pairs: int = 12
) -> Iterator[Check]:
  """ESTR's update against PPO's, and the update with all diagnostics against that without."""
  mesh = make_mesh({"data": jax.device_count(), "fsdp": 1, "tensor": 1, "expert": 1})
  rule = optimizer.make(
    optimizer="adamw",
    learning_rate=1e-6,
    warmup_steps=0,
    decay="constant",
    total_steps=1000,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.0,
    clip_norm=1.0,
  )
  params = jax.jit(functools.partial(decoder.init, model))(jax.random.key(0))
  batch = jax.device_put(_batch(rows, length, model.vocab_size))

  def update(loss: str, numbers: dict[str, float], diagnostics: bool) -> Callable[[], Any]:
    objective = step.Objective(
      loss=functools.partial(LOSSES[loss], edge="direct"),
      aggregation="token_mean",
      aggregation_tokens=length,
      entropy_bonus=False,
      kl=None,
      router_balance=False,
      ess_step=False,
    )
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    scalars = {name: np.float32(value) for name, value in (numbers | clips).items()}
    hyper = step.Hyper(scalars, *map(np.float32, (0, -np.inf, 0, 0, 0)))
    run = step.make_train_step(
      model,
      objective,
      rule,
      mesh=mesh,
      microbatches=1,
      temperature=1.0,
      score_chunk=2048,
      entropy=diagnostics or objective.reads("entropy", hyper),
      diagnostics=diagnostics,
    )
    state = step.init_state(model, rule, params, mesh, entropy_coefficient=0.0)

    def once():
      nonlocal state
      state, metrics = run(state, batch, hyper)
      return state.step, metrics

    return once

  bound = {"tau": 1.0, "eps": 0.01}
  ppo, estr, diagnosed = update("ppo", {}, False), update("estr", bound, False), update("estr", bound, True)
  yield compare("a train step, estr over ppo", 1.02, estr, ppo, pairs)
  yield compare("a train step, all diagnostics over none", 1.05, diagnosed, estr, pairs)
