"""The sampler's role, in mode async."""

import functools
import os
from pathlib import Path

from estr_jax import hosts
from estr_jax.model import sharding
from estr_jax.run import parts
from estr_jax.run.options import Settings
from estr_jax.runtime import launch
from estr_jax.runtime.sampler_loop import abstract_weights, sampler_loop
from estr_jax.weights.placement import wanted_by
from estr_jax.wire.client import Client
from estr_jax.wire.weight_host import weight_source


def run_sampler(settings: Settings, workdir: Path, name: str) -> None:
  """Samples for the learner of the same config until it says that the run is over.

  In a group of processes all of them sample, and the first speaks with the learner.

  Raises:
    UserError: the learner does not answer, or refuses this sampler.
  """
  c = settings.config
  parts.use_compilation_cache(settings)
  tokenizer = parts.tokenizer_of(settings)
  model = parts.model_of(settings, tokenizer)
  mesh = sharding.make_mesh(c.sampling.mesh.to_dict(), said="sampling.mesh")
  engine = parts.engine_of(settings, model, tokenizer, mesh)
  abstract = abstract_weights(model, c.transport.weights_dtype, mesh)
  patience_s = c.queue.deadline_s
  tls, token = parts.tls_of(settings), parts.token_of(settings)
  client = None
  if hosts.leads():
    address = launch.find_learner(workdir, c.transport.address)
    description = parts.description(settings, model, tokenizer)
    client = Client(address, name, description=description, patience_s=patience_s, tls=tls, token=token)
    print(f"{name} (process {os.getpid()}) samples for the learner at {address}", flush=True)
  source = functools.partial(weight_source, wanted=wanted_by(abstract), patience_s=patience_s, tls=tls, token=token)
  sampler_loop(engine, client, source, abstract, group_size=c.batch.group_size, deadline_s=patience_s)
  if hosts.leads():
    print(f"{name} is done after {engine.sampled_tokens} policy tokens", flush=True)
