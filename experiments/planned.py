"""From a checked configuration to the program that a plan compiles, and from that to the plan."""

import dataclasses
import functools
import importlib.util
import math
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from estr_jax.errors import UserError
from estr_jax.model import decoder, sharding
from estr_jax.model.decoder import DecoderConfig
from estr_jax.planning import compiler, estimates, flops, hlo, programs, report, roofline
from estr_jax.planning.chips import Slice
from estr_jax.planning.hlo import Memory
from estr_jax.runtime.sampler_loop import abstract_weights
from experiments import assembly


def has_libtpu() -> bool:
  return importlib.util.find_spec("libtpu") is not None


def mesh_of(config: ConfigDict, role: str) -> ConfigDict:
  return config.sampling.mesh if role == "sampler" else config.mesh


def model_of(config: ConfigDict) -> DecoderConfig:
  tokenizer = None if config.model.vocabulary or config.model.folder else assembly.tokenizer_of(config)
  return assembly.model_of(config, tokenizer)


@dataclasses.dataclass(frozen=True)
class Job:
  """A program with abstract arguments, and what a step of it is worth."""

  traced: jax.stages.Traced
  mesh: Mesh
  tokens: int  # a step
  model_flops: float
  what: str
  ideal_bytes: float | None = None


def job_of(config: ConfigDict, role: str, devices: Sequence[jax.Device]) -> Job:
  model = model_of(config)
  try:
    mesh = sharding.make_mesh(mesh_of(config, role).to_dict(), devices)
  except NotImplementedError as error:  # a torus is not cut inside of a side
    raise UserError(
      "each axis of the mesh has to be a product of sides of the slice, each side in one axis: change the mesh"
    ) from error
  length = config.sampling.context
  if role == "sampler":
    slots, dtype = config.sampling.slots, config.transport.weights_dtype
    traced = programs.trace_decode(
      model,
      abstract_weights(model, dtype, mesh),
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


@dataclasses.dataclass(frozen=True)
class Facts:
  """Of a job, what its plan needs and can be sent from one process to another."""

  layout: roofline.Layout
  flops: float
  model_flops: float
  tokens: int
  what: str
  ideal_bytes: float | None


def _prepare(config: ConfigDict, role: str, place: Slice, on_tpu: bool) -> compiler.Job:
  """Runs in the compiler's process."""
  job = job_of(config, role, devices_of(place) if on_tpu else stand_ins(place.chips))
  facts = Facts(
    roofline.layout_of(job.mesh, place),
    flops.count(job.traced.jaxpr),
    job.model_flops,
    job.tokens,
    job.what,
    job.ideal_bytes,
  )
  return compiler.Job(job.traced, "tpu" if on_tpu else "cpu", facts)


def devices_of(place: Slice) -> list[jax.Device]:
  """The chips of a slice as devices that libtpu can compile for."""
  # There is no TPU whose metadata could be asked for, or that two plans could take from each other.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  from jax.experimental import topologies

  try:
    devices = list(topologies.get_topology_desc(place.name, "tpu").devices)
  except Exception as error:
    line = " ".join(str(error).split())[:200]
    raise UserError(f"--topology={place.name} is no slice that libtpu knows: {line}") from error
  if len(devices) != place.chips:
    raise UserError(f"{place.name} has {place.chips} chips but a program sees {len(devices)} devices; take v5p or v6e")
  return devices


def stand_ins(count: int) -> list[jax.Device]:
  """As many CPU devices; of a process that has not looked for devices before."""
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
  jax.config.update("jax_platforms", "cpu")
  return jax.devices("cpu")


def plan_of(config: ConfigDict, role: str, place: Slice, *, machine_code: bool = False) -> report.Plan:
  """Compiles the program of a role.

  Raises:
    compiler.Exhausted: the compiler gave up for want of memory.
  """
  on_tpu = has_libtpu()
  made = compiler.compile_apart(functools.partial(_prepare, config, role, place, on_tpu), machine_code=machine_code)
  facts, memory = made.facts, made.memory
  traffic = hlo.traffic(made.text, facts.layout.sizes)
  if on_tpu:
    memory = dataclasses.replace(memory, beside=_beside(config, role))
  else:
    memory = memory_estimate(config, role)
    traffic = dataclasses.replace(traffic, hbm_bytes=_bytes_estimate(config, role, facts))
  roof = roofline.roofline(facts.flops, traffic, place, facts.layout)
  return report.Plan(
    place,
    f"{roofline.describe(facts.layout.sizes)}; {facts.what}",
    memory,
    facts.flops,
    facts.model_flops,
    traffic,
    roof,
    facts.tokens,
    facts.ideal_bytes,
    estimated=not on_tpu,
  )


def shards_of(mesh: ConfigDict) -> int:
  """Into how many parts the rows of a batch, or slots, are split."""
  return math.prod(mesh[axis] for axis in sharding.BATCH_AXES)


def rows_of(config: ConfigDict) -> int:
  """Rows of a microbatch on each device."""
  return config.batch.groups * config.batch.group_size // (config.batch.microbatches * shards_of(config.mesh))


def memory_estimate(config: ConfigDict, role: str) -> Memory:
  model, sizes, length = model_of(config), mesh_of(config, role).to_dict(), config.sampling.context
  if role == "sampler":
    width = jnp.dtype(config.transport.weights_dtype).itemsize
    memory = estimates.sampler_memory(model, sizes, config.sampling.slots, length, width)
  else:
    moments = 2 if config.optimizer.name == "adamw" else 1
    chunk = config.learner.score_chunk
    memory = estimates.learner_memory(model, sizes, rows_of(config), length, score_chunk=chunk, moments=moments)
  return dataclasses.replace(memory, beside=_beside(config, role))


def _beside(config: ConfigDict, role: str) -> float:
  """Bytes a device of weights that lie beside those of the program.

  A sampler goes on with one version while the next arrives. The learner keeps a float32 copy, which evaluations read,
  and the two newest versions as they are served.
  """
  sizes = mesh_of(config, role).to_dict()
  params = decoder.abstract_params(model_of(config))
  places = sharding.shardings(params, AbstractMesh(tuple(sizes.values()), tuple(sizes)))
  held = jax.tree.map(lambda leaf, place: math.prod(place.shard_shape(leaf.shape)), params, places)
  served = jnp.dtype(config.transport.weights_dtype).itemsize
  return sum(jax.tree.leaves(held)) * (served if role == "sampler" else 4 + 2 * served)


def _bytes_estimate(config: ConfigDict, role: str, facts: Facts) -> float:
  if role == "sampler":
    return facts.ideal_bytes / facts.layout.coordinates[..., 0].size
  model, length = model_of(config), config.sampling.context
  return estimates.learner_bytes(model, facts.layout.sizes, rows_of(config), length, config.batch.microbatches)
