"""The arguments of the product's programs without their arrays, placed on a mesh: enough to compile, not to run."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from estr_jax.model.config import DecoderConfig
from estr_jax.model.sharding import BATCH_SPEC
from estr_jax.sampler import decode
from estr_jax.structs import Batch, Params

STOP_IDS = 8  # tokens that end a turn; their number hardly matters


def abstract_batch(
  rows: int,
  length: int,
  mesh: Mesh,
  *,
  anchors: frozenset[str] = frozenset(),
  vocabulary: int | None = None,
  experts: tuple[int, int] | None = None,
) -> Batch:
  """A batch [rows, length] placed on a mesh, without its arrays.

  Args:
    anchors: which of "proximal" and "reference" are there.
    vocabulary: its size, where the whole distribution is recorded.
    experts: (layers, experts a token), where the routing is recorded.
  """
  place, grid = NamedSharding(mesh, BATCH_SPEC), (rows, length)

  def of(dtype: str, *more: int) -> Any:
    """What stands for a jax.Array."""
    return jax.ShapeDtypeStruct((*grid, *more), dtype, sharding=place)

  return Batch(
    tokens=of("int32"),
    mask=of("bool"),
    logprob=of("float32"),
    entropy=of("float32"),
    gini=of("float32"),
    staleness=of("int32"),
    segment=of("int32"),
    group=of("int32"),
    reward=of("float32"),
    advantage=of("float32"),
    proximal=of("float32") if "proximal" in anchors else None,
    reference=of("float32") if "reference" in anchors else None,
    vocabulary=of("float32", vocabulary) if vocabulary else None,
    experts=of("uint8", *experts) if experts else None,
  )


def abstract_slots(model: DecoderConfig, slots: int, context: int, mesh: Mesh, *, record_routing: bool) -> decode.Slots:
  """What `decode.empty` makes, as it lies."""
  recorded = {"record_vocabulary": False, "record_routing": record_routing}
  state = jax.eval_shape(lambda: decode.empty(model, slots, context, **recorded))
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state, decode.places(state, mesh)
  )


def trace_decode(
  model: DecoderConfig, weights: Params, slots: decode.Slots, mesh: Mesh, *, temperature: float, steps: int
) -> jax.stages.Traced:
  """The sampler's decode loop; weights and slots say where they lie."""
  everywhere = NamedSharding(mesh, P())

  def scalar(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

  key = jax.eval_shape(lambda: jax.random.key(0))
  return decode.decode.trace(
    model,
    weights,
    scalar(jnp.int32),
    slots,
    scalar(key.dtype),
    scalar(jnp.int32, STOP_IDS),
    scalar(jnp.int32),
    temperature=temperature,
    steps=steps,
    mesh=mesh,
  )
