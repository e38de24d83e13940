"""The weights of version 0: a folder's, or random ones, and then the supervised warm start, if there is one."""

import dataclasses

import jax
import numpy as np

from estr_jax.learner import warm_start
from estr_jax.model import decoder, hf
from estr_jax.model.config import DecoderConfig
from estr_jax.model.tokenizers import Tokenizer
from estr_jax.observe.terminal import View
from estr_jax.run import parts
from estr_jax.run.options import Settings
from estr_jax.structs import Params
from estr_jax.tasks.prompts import PromptStream


def initial_params(
  settings: Settings, model: DecoderConfig, tokenizer: Tokenizer, stream: PromptStream, abstract: Params, view: View
) -> Params:
  """The weights that a run begins with; `abstract` says where they are to lie."""
  params = _untrained(settings, model, abstract, view)
  if not settings.config.warm_start.steps:
    return params
  return _warmed_up(settings, model, tokenizer, stream, abstract, params, view)


def _untrained(settings: Settings, model: DecoderConfig, abstract: Params, view: View) -> Params:
  places, folder = _places(abstract), parts.folder_of(settings)
  if folder is not None:
    view.phase("loading weights", detail=settings.config.model.folder)
    _, params = hf.load(folder, model, places=places)
    return params
  random_key = np.asarray(jax.random.key_data(parts.key(settings, parts.INIT)))  # of no device, since it goes to all
  init = jax.jit(lambda data: decoder.init(model, jax.random.wrap_key_data(data)), out_shardings=places)
  return init(random_key)


def _warmed_up(
  settings: Settings,
  model: DecoderConfig,
  tokenizer: Tokenizer,
  stream: PromptStream,
  abstract: Params,
  params: Params,
  view: View,
) -> Params:
  """`params` after supervised updates on the task's demonstrations; kept for other runs with the same recipe."""
  c, w, folder = settings.config, settings.config.warm_start, parts.folder_of(settings)
  view.phase("encoding demonstrations", detail=f"{w.demonstrations} of task {settings.task.name}")
  rng = np.random.default_rng(c.seed)
  pool = warm_start.encode_demonstrations(
    settings.task, tokenizer, stream.examples(w.demonstrations), rng, length=c.sampling.context
  )
  files = sorted(folder.glob("*.safetensors")) if folder is not None else []
  recipe = {
    "model": dataclasses.asdict(model),
    "folder": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files],
    "seed": c.seed,
    "warm_start": w.to_dict(),
    "demonstrations": warm_start.digest(pool),
  }

  def progress(done: int, loss: float) -> None:
    view.phase("supervised warm start", done, w.steps, f"cross-entropy {loss:.3f} nats per token")

  def make() -> Params:
    view.phase("supervised warm start", 0, w.steps, "compiling")
    batches = warm_start.sample_batches(pool, batch=w.batch, rng=rng)
    mesh = _places(abstract)["final_norm"]["scale"].mesh
    return warm_start.supervised(
      model, params, batches, mesh=mesh, steps=w.steps, learning_rate=w.learning_rate, on_progress=progress
    )

  return warm_start.cached(parts.cache_dir(settings) / "warm_starts", recipe, abstract, make)


def _places(abstract: Params) -> Params:
  return jax.tree.map(lambda leaf: leaf.sharding, abstract)
