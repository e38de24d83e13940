"""From checked settings to the program that a plan compiles, and from that to the plan."""

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
from estr_jax.model.config import DecoderConfig
from estr_jax.planning import compiler, estimates, flops, hlo, programs, report, roofline
from estr_jax.planning.chips import Slice
from estr_jax.planning.hlo import Memory
from estr_jax.run import options, parts
from estr_jax.run.options import Settings
from estr_jax.run.update import update_of
from estr_jax.runtime.sampler_loop import abstract_weights
from estr_jax.tasks import TASKS


def has_libtpu() -> bool:
  return importlib.util.find_spec("libtpu") is not None


def settings_of(config: ConfigDict) -> Settings:
  """`options.make`, with another task where the config's is not there yet: a program on arrays depends on none."""
  made = config.copy_and_resolve_references()
  if made.task.name not in TASKS:
    made.task.name = "calculator"
  return options.make(made)


def mesh_of(settings: Settings, role: str) -> ConfigDict:
  c = settings.config
  return c.sampling.mesh if role == "sampler" else c.mesh


def check_chips(config: ConfigDict, role: str, place: Slice, said: str) -> None:
  """Raises UserError unless a role's mesh has as many devices as its slice has chips; `said` names the slice."""
  name, mesh = ("sampling.mesh", config.sampling.mesh) if role == "sampler" else ("mesh", config.mesh)
  devices = math.prod(mesh.values())
  if devices != place.chips:
    sizes = " x ".join(f"{name}.{axis}={size}" for axis, size in mesh.items())
    raise UserError(f"{said} has {place.chips} chips and {sizes} is {devices}; change one")


def model_of(settings: Settings) -> DecoderConfig:
  c = settings.config
  tokenizer = None if c.model.vocabulary or c.model.folder else parts.tokenizer_of(settings)
  return parts.model_of(settings, tokenizer)


@dataclasses.dataclass(frozen=True)
class Job:
  """A program with abstract arguments, and what a step of it is worth."""

  traced: jax.stages.Traced
  mesh: Mesh
  tokens: int  # a step
  model_flops: float
  what: str
  ideal_bytes: float | None = None


def job_of(settings: Settings, role: str, devices: Sequence[jax.Device]) -> Job:
  c = settings.config
  model = model_of(settings)
  try:
    mesh = sharding.make_mesh(mesh_of(settings, role).to_dict(), devices)
  except NotImplementedError as error:  # a torus is not cut inside of a side
    raise UserError(
      "each axis of the mesh has to be a product of sides of the slice, each side in one axis: change the mesh"
    ) from error
  length = c.sampling.context
  if role == "sampler":
    slots, dtype = c.sampling.slots, c.transport.weights_dtype
    traced = programs.trace_decode(
      model,
      abstract_weights(model, dtype, mesh),
      programs.abstract_slots(model, slots, length, mesh, record_routing=c.sampling.record_routing),
      mesh,
      temperature=c.sampling.temperature,
      steps=c.sampling.chunk,
    )
    ideal = roofline.decode_bytes(model, slots, length, jnp.dtype(dtype).itemsize)
    what = f"{slots} slots of {length} tokens; one token for each"
    return Job(traced, mesh, slots, roofline.decode_flops(model, slots, length), what, ideal)
  update = update_of(settings, model, mesh)
  rows = c.batch.groups * c.batch.group_size
  vocabulary = model.vocab_size if c.sampling.record_vocabulary else None
  batch = programs.abstract_batch(
    rows,
    length,
    mesh,
    anchors=frozenset(update.learner.anchors),
    vocabulary=vocabulary,
    experts=(model.layers, model.experts_per_token) if c.sampling.record_routing else None,
  )
  traced = update.learner.train_step.trace(update.abstract, batch, update.learner.hyper)
  what = f"{rows} rows of {length} tokens in {c.batch.microbatches} microbatches, remat {c.model.remat}"
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


def _prepare(settings: Settings, role: str, place: Slice, on_tpu: bool) -> compiler.Job:
  """Runs in the compiler's process."""
  job = job_of(settings, role, devices_of(place) if on_tpu else stand_ins(place.chips))
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


def plan_of(settings: Settings, role: str, place: Slice, *, machine_code: bool = False) -> report.Plan:
  """Compiles the program of a role.

  Raises:
    compiler.Exhausted: the compiler gave up for want of memory.
  """
  on_tpu = has_libtpu()
  made = compiler.compile_apart(functools.partial(_prepare, settings, role, place, on_tpu), machine_code=machine_code)
  facts = made.facts
  traffic = hlo.traffic(made.text, facts.layout.sizes)
  if made.memory is not None:
    memory = dataclasses.replace(made.memory, beside=_beside(settings, role))
  else:
    memory = memory_estimate(settings, role)
    traffic = dataclasses.replace(traffic, hbm_bytes=_bytes_estimate(settings, facts))
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


def rows_of(settings: Settings) -> int:
  """Rows of a microbatch on each device."""
  c = settings.config
  return c.batch.groups * c.batch.group_size // (c.batch.microbatches * shards_of(c.mesh))


def memory_estimate(settings: Settings, role: str) -> Memory:
  c = settings.config
  model, sizes, length = model_of(settings), mesh_of(settings, role).to_dict(), c.sampling.context
  if role == "sampler":
    width = jnp.dtype(c.transport.weights_dtype).itemsize
    memory = estimates.sampler_memory(model, sizes, c.sampling.slots, length, width)
  else:
    moments = 2 if c.optimizer.name == "adamw" else 1
    chunk = c.learner.score_chunk
    memory = estimates.learner_memory(model, sizes, rows_of(settings), length, score_chunk=chunk, moments=moments)
  return dataclasses.replace(memory, beside=_beside(settings, role))


def _beside(settings: Settings, role: str) -> float:
  """Bytes a device of weights that lie beside those of the program.

  A sampler goes on with one version while the next arrives. The learner keeps a float32 copy, which evaluations read,
  and the two newest versions as they are served.
  """
  sizes = mesh_of(settings, role).to_dict()
  params = decoder.abstract_params(model_of(settings))
  places = sharding.shardings(params, AbstractMesh(tuple(sizes.values()), tuple(sizes)))
  held = jax.tree.map(lambda leaf, place: math.prod(place.shard_shape(leaf.shape)), params, places)
  served = jnp.dtype(settings.config.transport.weights_dtype).itemsize
  return sum(jax.tree.leaves(held)) * (served if role == "sampler" else 4 + 2 * served)


def _bytes_estimate(settings: Settings, facts: Facts) -> float:
  c = settings.config
  if facts.ideal_bytes is not None:  # of a sampler
    return facts.ideal_bytes / facts.layout.coordinates[..., 0].size
  model, length = model_of(settings), c.sampling.context
  return estimates.learner_bytes(model, facts.layout.sizes, rows_of(settings), length, c.batch.microbatches)
