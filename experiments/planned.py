"""From a checked configuration to the program that a plan compiles, and from that to the plan."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from estr_jax.model import sharding
from estr_jax.planning import flops, hlo, programs, report, roofline
from estr_jax.planning.chips import Slice
from experiments import assembly


@dataclasses.dataclass(frozen=True)
class Job:
  """A program with abstract arguments, and what a step of it is worth."""

  traced: jax.stages.Traced
  mesh: Mesh
  tokens: int  # a step
  model_flops: float
  what: str
  ideal_bytes: float | None = None

  def describe(self) -> str:
    sizes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items() if size > 1) or "one device"
    return f"{sizes}; {self.what}"


def job_of(config: ConfigDict, role: str, devices: Sequence[jax.Device]) -> Job:
  tokenizer = None if config.model.vocabulary or config.model.folder else assembly.tokenizer_of(config)
  model = assembly.model_of(config, tokenizer)
  mesh = sharding.make_mesh(config.mesh.to_dict(), devices)
  length = config.sampling.context
  if role == "sampler":
    slots, dtype = config.sampling.slots, config.transport.weights_dtype
    traced = programs.trace_decode(
      model,
      programs.abstract_weights(model, mesh, dtype),
      programs.abstract_slots(model, slots, length, mesh, record_routing=config.sampling.record_routing),
      mesh,
      temperature=config.sampling.temperature,
      steps=config.sampling.chunk,
    )
    ideal = roofline.decode_bytes(model, slots, length, jnp.dtype(dtype).itemsize)
    what = f"{slots} slots of {length} tokens; one token for each"
    return Job(traced, mesh, slots, roofline.decode_flops(model, slots, length), what, ideal)
  update = assembly.update_of(config, model, mesh)
  rows = config.batch.groups * config.batch.group_size
  vocabulary = model.vocab_size if config.sampling.record_vocabulary else None
  batch = programs.abstract_batch(
    rows,
    length,
    mesh,
    anchors=frozenset(update.learner.anchors),
    vocabulary=vocabulary,
    experts=(model.layers, model.experts_per_token) if config.sampling.record_routing else None,
  )
  traced = update.learner.train_step.trace(update.abstract, batch, update.learner.hyper)
  what = f"{rows} rows of {length} tokens in {config.batch.microbatches} microbatches, remat {config.model.remat}"
  return Job(traced, mesh, rows * length, roofline.train_flops(model, rows, length), what)


def make(job: Job, place: Slice) -> tuple[report.Plan | None, float]:
  """(the plan, bytes of HBM a device); no plan where the compiler gave up for want of memory."""
  try:
    compiled = job.traced.lower(lowering_platforms=("tpu",)).compile()
  except jax.errors.JaxRuntimeError as error:
    needed = report.exhausted(str(error))
    if needed is None:
      raise
    return None, needed
  memory = report.memory_of(compiled.memory_analysis())
  computed = flops.count(job.traced.jaxpr)
  traffic = hlo.traffic(compiled.as_text(), dict(job.mesh.shape))
  roof = roofline.roofline(computed, traffic, place, job.mesh)
  plan = report.Plan(place, memory, computed, job.model_flops, traffic, roof, job.tokens, job.ideal_bytes)
  return plan, memory.total


def advice(config: ConfigDict, role: str) -> str:
  """What to change where the memory of a device does not do, the cheapest first."""
  if role == "sampler":
    if config.transport.weights_dtype != "bfloat16":
      return "set transport.weights_dtype=bfloat16"
    return f"take fewer than sampling.slots={config.sampling.slots}, or more chips along mesh.tensor"
  shards = config.mesh.data * config.mesh.fsdp * config.mesh.expert
  rows = config.batch.groups * config.batch.group_size
  if rows > shards * config.batch.microbatches:
    return f"raise batch.microbatches from {config.batch.microbatches} to {rows // shards}, one row a device"
  if config.model.remat != "full":
    return f"set model.remat=full in place of {config.model.remat}"
  if config.mesh.data > 1:
    return f"move mesh.data={config.mesh.data} to mesh.fsdp, which shares out weights and optimizer"
  return "take more chips along mesh.tensor, which shares out a row's activations, or a larger slice along mesh.fsdp"
