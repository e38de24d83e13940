"""Scoring in chunks of the vocabulary against scoring from full logits: memory, numbers, seconds."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from estr_jax.objective.scoring import logits, score, score_logits
from experiments.benchmark.checks import Check, compare

TPU = "v5p:2x2x1"  # compiled for, where libtpu is installed


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


def seconds(size: Size = MEDIUM, pairs: int = 12) -> Iterator[Check]:
  """Value and gradient against the full logits."""
  inputs = [jnp.asarray(x) for x in scoring_inputs(size)]
  for entropy in (False, True):
    parts, whole = (
      functools.partial(jax.jit(jax.value_and_grad(scoring_loss(size, entropy, full), argnums=(0, 1))), *inputs)
      for full in (False, True)
    )
    what = f"chunks over full logits, entropy {'differentiated' if entropy else 'off'}"
    yield compare(what, 1.15, parts, whole, pairs)
