"""What a program needs by a formula, where no compiler is asked: to drop and to order candidates, and without libtpu.

A handful of terms each, within some tens of percent of what the TPU's compiler says of the paper's models. Bytes of one
device; `sizes` are those of the mesh's axes.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from estr_jax.model import decoder
from estr_jax.model.config import DecoderConfig
from estr_jax.planning.hlo import Memory

_FLOAT = 4  # of parameters, their gradient and each moment of the optimizer


def params(model: DecoderConfig) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(decoder.abstract_params(model)))


def _wide(model: DecoderConfig) -> int:
  """Numbers that the feed-forward layer holds of a token at once: gate, up and their product."""
  if not model.experts:
    return 3 * model.mlp_width
  return model.experts_per_token * (3 * model.expert_mlp_width + 2 * model.width)


def _kept(model: DecoderConfig, tensor: int) -> int:
  """Numbers that the backward pass finds of a token and layer: those of model.remat."""
  attended = model.heads * model.head_dim // tensor
  products = attended + (2 * model.kv_heads * model.head_dim + model.mlp_width * 2) // tensor + 2 * model.width
  more = {"full": 0, "attention": attended, "dots": attended + products}
  return model.width + more.get(model.remat, attended + products + _wide(model) // tensor + 4 * model.width)


def learner_memory(
  model: DecoderConfig, sizes: Mapping[str, int], rows: int, length: int, *, score_chunk: int, moments: int
) -> Memory:
  """Of the train step with `rows` rows of a microbatch on each device, and `moments` arrays in the optimizer."""
  shards = sizes["fsdp"] * sizes["expert"] * sizes["tensor"]
  size, tokens, half = params(model), rows * length, jnp.dtype(model.dtype).itemsize
  layer = size / model.layers / sizes["tensor"] / sizes["expert"]
  working = tokens * half * (10 * model.width + 2 * _wide(model) * max(1, sizes["expert"]) / sizes["tensor"])
  temporaries = (
    _FLOAT * size / shards
    + tokens * half * model.layers * _kept(model, sizes["tensor"])
    + working
    + 3 * half * layer
    + 3 * _FLOAT * tokens * score_chunk
    + 2 * half * model.vocab_size * model.width / sizes["tensor"]
  )
  return Memory((1 + moments) * _FLOAT * size / shards, 0, temporaries)


def learner_bytes(model: DecoderConfig, sizes: Mapping[str, int], rows: int, length: int, microbatches: int) -> float:
  """Read or written by a train step, weights gathered and read in three passes."""
  size, half = params(model), jnp.dtype(model.dtype).itemsize
  weights = 3 * 3 * half * size / sizes["tensor"] / sizes["expert"]
  a_token = 3 * half * model.layers * (20 * model.width + 3 * _wide(model) / sizes["tensor"])
  shards = sizes["fsdp"] * sizes["expert"] * sizes["tensor"]
  return microbatches * (weights + rows * length * a_token) + 7 * _FLOAT * size / shards


def learner_exchange(
  model: DecoderConfig, sizes: Mapping[str, int], rows: int, length: int, microbatches: int
) -> float:
  """Taken in from other devices by a train step: gathered weights, scattered gradients, summed activations."""
  half, tensor, expert = jnp.dtype(model.dtype).itemsize, sizes["tensor"], sizes["expert"]
  shards = sizes["fsdp"] * expert
  weights = 3 * half * params(model) / tensor / (expert if model.experts else 1) * (shards - 1) / shards
  a_token = 6 * half * model.layers * model.width
  moved = 2 * (tensor - 1) / tensor + (2 * (expert - 1) if model.experts else 0)
  return microbatches * (weights + rows * length * a_token * moved)


def sampler_memory(
  model: DecoderConfig, sizes: Mapping[str, int], slots: int, length: int, weight_bytes: int
) -> Memory:
  """Of the decode step with `slots` slots in all."""
  tensor, rows = sizes["tensor"], sizes["data"] * sizes["fsdp"] * sizes["expert"]
  weights = weight_bytes * params(model)
  cache = 2 * model.layers * slots * length * model.kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize
  gathered = 0 if sizes["fsdp"] * sizes["expert"] == 1 else 2 * weights / model.layers / tensor
  logits = 3 * _FLOAT * slots / rows * model.vocab_size / tensor
  scores = 3 * _FLOAT * slots / rows * model.heads / tensor * length
  held = weights / (sizes["fsdp"] * sizes["expert"] * tensor) + cache / rows / tensor
  return Memory(held, 0, gathered + logits + scores)
