"""Measures what the code promises about memory and time, and says where it falls short.

    python -m experiments.benchmark scoring

One line a check: what, measured, limit. The exit status is 1 where a limit is exceeded. Times are ratios of processor
seconds of programs that take turns in one process, so they hold on a busy machine too; the two numbers behind a ratio
are its quartiles.
"""

import dataclasses
import functools
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from estr_jax.errors import UserError
from estr_jax.learner import optimizer, step
from estr_jax.model import decoder
from estr_jax.model.decoder import DecoderConfig
from estr_jax.model.sharding import make_mesh
from estr_jax.objective.losses import LOSSES
from estr_jax.objective.scoring import logits, score, score_logits
from estr_jax.structs import Batch
from experiments import settings

TPU = "v5p:2x2x1"  # compiled for, where libtpu is installed


@dataclasses.dataclass(frozen=True)
class Check:
  """A measured number, which should not exceed its limit; NaN does."""

  what: str
  measured: float
  limit: float
  detail: str = ""

  @property
  def ok(self) -> bool:
    return self.measured <= self.limit

  def line(self) -> str:
    verdict = "ok   " if self.ok else "short"
    return f"{verdict}  {self.what}: {self.measured:.3g}, limit {self.limit:.3g}{self.detail and f' ({self.detail})'}"


@dataclasses.dataclass(frozen=True)
class Size:
  """Of a scoring problem."""

  rows: int
  length: int
  width: int
  vocabulary: int
  chunk: int


LARGE = Size(16, 1024, 3584, 151_936, 2048)  # Qwen2.5-7B; compiled only
MEDIUM = Size(8, 128, 256, 10_752, 2048)  # the same vocabulary for its width; runs in seconds


def scoring_loss(size: Size, entropy: bool, full: bool) -> Callable[..., jax.Array]:
  """(hidden, head, targets, weight) -> a scalar that reads every log-prob, and with `entropy` every entropy."""

  def loss(hidden_BTD, head_DV, targets_BT, weight_BT):
    if full:
      scores = score_logits(logits(hidden_BTD, head_DV), targets_BT, temperature=0.9)
    else:
      scores = score(hidden_BTD, head_DV, targets_BT, temperature=0.9, chunk=size.chunk, entropy=entropy)
    value = jnp.sum(weight_BT * scores.logprob)
    return value + 0.01 * jnp.sum(weight_BT * scores.entropy) if entropy else value

  return loss


def scoring_inputs(size: Size) -> tuple[np.ndarray, ...]:
  random = np.random.default_rng(0)
  return (
    random.normal(size=(size.rows, size.length, size.width)).astype(np.float32),
    (random.normal(size=(size.width, size.vocabulary)) / np.sqrt(size.width)).astype(np.float32),
    random.integers(0, size.vocabulary, (size.rows, size.length)).astype(np.int32),
    random.normal(size=(size.rows, size.length)).astype(np.float32),
  )


def _temporary_bytes(loss: Callable[..., jax.Array], size: Size, device: jax.Device) -> int:
  """Of value and gradient, with bfloat16 hidden states and a float32 head; arguments and results are not counted."""
  grid, place = (size.rows, size.length), SingleDeviceSharding(device)
  shapes = {
    "hidden": ((*grid, size.width), jnp.bfloat16),
    "head": ((size.width, size.vocabulary), jnp.float32),
    "targets": (grid, jnp.int32),
    "weight": (grid, jnp.float32),
  }
  abstract = [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes.values()]
  compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*abstract).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def memory(size: Size = LARGE) -> Iterator[Check]:
  """Temporary memory of value and gradient against that of the full logits."""
  devices = {"CPU": jax.devices("cpu")[0]}
  if importlib.util.find_spec("libtpu"):
    devices[f"TPU {TPU}"] = topologies.get_topology_desc(TPU, "tpu").devices[0]
  else:
    print("       no libtpu here: memory is checked for the CPU alone (pip install 'jax[tpu]' brings it)")
  for name, device in devices.items():
    for entropy in (False, True):
      parts = _temporary_bytes(scoring_loss(size, entropy, full=False), size, device)
      whole = _temporary_bytes(scoring_loss(size, entropy, full=True), size, device)
      what = f"{name}, V = {size.vocabulary:,}, entropy {'differentiated' if entropy else 'off'}"
      detail = f"{parts / 2**30:.2f} of {whole / 2**30:.2f} GiB; temporary, without arguments and gradients"
      yield Check(f"memory over that of full logits, {what}", parts / whole, 1 / 20, detail)


def equality(size: Size = MEDIUM) -> Iterator[Check]:
  """Value and gradients against those of the full logits; the largest difference over the largest entry."""
  inputs = scoring_inputs(size)
  parts, whole = (
    jax.tree.leaves(jax.jit(jax.value_and_grad(scoring_loss(size, True, full), argnums=(0, 1)))(*inputs))
    for full in (False, True)
  )
  for name, one, wanted in zip(("value", "gradient of hidden states", "gradient of the head"), parts, whole):
    difference = float(jnp.max(jnp.abs(one - wanted)) / jnp.max(jnp.abs(wanted)))
    yield Check(f"{name} against full logits, relative", difference, 1e-5)


def ratios(run: Callable[[], Any], base: Callable[[], Any], pairs: int) -> list[float]:
  """Processor seconds of `run` over those of `base`, all threads, side by side; which goes first alternates."""
  measured = []
  for pair in range(-1, pairs):  # the first warms up
    seconds = {}
    for one in (run, base) if pair % 2 else (base, run):
      start = time.process_time()
      jax.block_until_ready(one())
      seconds[one] = time.process_time() - start
    if pair >= 0:
      measured.append(seconds[run] / seconds[base])
  return measured


def _time(what: str, limit: float, run: Callable[[], Any], base: Callable[[], Any], pairs: int) -> Check:
  measured = ratios(run, base, pairs)
  low, _, high = statistics.quantiles(measured, n=4)
  return Check(f"time of {what}", statistics.median(measured), limit, f"{low:.3f} .. {high:.3f}, {pairs} pairs")


def seconds(size: Size = MEDIUM, pairs: int = 12) -> Iterator[Check]:
  """Value and gradient against the full logits."""
  inputs = [jnp.asarray(x) for x in scoring_inputs(size)]
  for entropy in (False, True):
    parts, whole = (
      functools.partial(jax.jit(jax.value_and_grad(scoring_loss(size, entropy, full), argnums=(0, 1))), *inputs)
      for full in (False, True)
    )
    what = f"chunks over full logits, entropy {'differentiated' if entropy else 'off'}"
    yield _time(what, 1.15, parts, whole, pairs)


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
      score_chunk=LARGE.chunk,
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
  yield _time("a train step, estr over ppo", 1.02, estr, ppo, pairs)
  yield _time("a train step, all diagnostics over none", 1.05, diagnosed, estr, pairs)


BENCHMARKS: dict[str, Sequence[Callable[[], Iterator[Check]]]] = {
  "scoring": (memory, equality, seconds, train_steps),
  "memory": (memory,),
  "equality": (equality,),
  "seconds": (seconds,),
  "train_steps": (train_steps,),
}


def parse(arguments: Sequence[str]) -> Sequence[Callable[[], Iterator[Check]]]:
  """The checks of the benchmark that the command line names."""
  names = ", ".join(BENCHMARKS)
  if len(arguments) != 1:
    raise UserError(f"name one benchmark: {names}")
  if arguments[0] not in BENCHMARKS:
    raise UserError(f"unknown benchmark {arguments[0]!r}; it is one of {names}")
  return BENCHMARKS[arguments[0]]


def program() -> int:
  short = 0
  for measure in parse(sys.argv[1:]):
    for check in measure():
      print(check.line(), flush=True)
      short += not check.ok
  print(f"{short} of the limits exceeded" if short else "every limit kept")
  return 1 if short else 0


if __name__ == "__main__":
  settings.main(program)
