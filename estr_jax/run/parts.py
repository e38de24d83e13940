"""From checked settings to the parts of a run: model, tokenizer, prompts, sampler, evaluator, security.

The update has a file of its own, and so have the weights that a run starts from.
"""

import dataclasses
import hashlib
import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from estr_jax.errors import UserError
from estr_jax.model import hf, sharding
from estr_jax.model.config import DecoderConfig
from estr_jax.model.keys import MODEL
from estr_jax.model.tokenizers import CharTokenizer, FolderTokenizer, Tokenizer
from estr_jax.options import as_path
from estr_jax.run.options import Settings
from estr_jax.runtime.evaluation import Evaluator
from estr_jax.runtime.learner_loop import Schedule
from estr_jax.sampler.engine import Engine, Sampling
from estr_jax.structs import NO_EXPERT
from estr_jax.tasks.prompts import PromptStream
from estr_jax.wire.security import Tls

# Independent random streams of one seed.
INIT, SAMPLING, EVALUATION = range(3)

_RECORDED_VOCABULARY = 1024


def key(settings: Settings, stream: int) -> jax.Array:
  return jax.random.fold_in(jax.random.key(settings.config.seed), stream)


def cache_dir(settings: Settings) -> Path:
  return as_path("cache_dir", settings.config.cache_dir)


def use_compilation_cache(settings: Settings) -> None:
  """Compiled programs are kept, so that the second run of a config starts at once."""
  jax.config.update("jax_compilation_cache_dir", os.fspath(cache_dir(settings) / "compiled"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def mesh_of(settings: Settings) -> Mesh:
  """The learner's, over all devices."""
  return sharding.make_mesh(settings.config.mesh.to_dict())


def folder_of(settings: Settings) -> Path | None:
  """The model's folder, where it has one."""
  folder = settings.config.model.folder
  return as_path("model.folder", folder) if folder else None


def tokenizer_of(settings: Settings) -> Tokenizer:
  folder, task = folder_of(settings), settings.task
  if folder is not None:
    return FolderTokenizer(folder)
  if task.alphabet is None:
    raise RuntimeError(f"task {task.name} has no alphabet, which tasks.keys.rules refuses")
  return CharTokenizer(task.alphabet)


def model_of(settings: Settings, tokenizer: Tokenizer | None) -> DecoderConfig:
  """The folder's shape, or that of the config; computation as the config says.

  Without a tokenizer, a plan's, the folder or model.vocabulary has to say how many tokens there are.

  Raises:
    UserError: the config says another shape than the folder, or asks for what this model cannot do.
  """
  m, folder = settings.config.model, folder_of(settings)
  shape = _shape_of_config(settings, tokenizer) if folder is None else _shape_of_folder(settings, folder)
  model = DecoderConfig(**shape, dtype=m.dtype, remat=m.remat)
  _check_fit(settings, model)
  return model


_SHAPE = {field.name for field in dataclasses.fields(DecoderConfig)} - {"vocab_size", "dtype", "remat"}


def _shape_of_folder(settings: Settings, folder: Path) -> dict:
  m, shape = settings.config.model, hf.read_config(folder)
  held = {**shape, "vocabulary": shape["vocab_size"]}
  for name in sorted({*_SHAPE, "vocabulary"}):
    there, default = held.get(name, 0), MODEL[f"model.{name}"].default  # a dense folder says nothing of experts
    if m[name] not in (default, there):
      raise UserError(f"model.{name}={m[name]}, but the model in {m.folder} has {there}; leave it at {default}")
  return shape


def _shape_of_config(settings: Settings, tokenizer: Tokenizer | None) -> dict:
  m = settings.config.model
  if tokenizer is not None and m.vocabulary not in (0, tokenizer.vocab_size):
    raise UserError(
      f"model.vocabulary={m.vocabulary}, but the tokenizer has {tokenizer.vocab_size} tokens; leave it at 0"
    )
  vocabulary = m.vocabulary if tokenizer is None else tokenizer.vocab_size
  return {"vocab_size": vocabulary, **{name: m[name] for name in _SHAPE}}


def _check_fit(settings: Settings, model: DecoderConfig) -> None:
  c = settings.config
  if c.sampling.record_vocabulary and model.vocab_size > _RECORDED_VOCABULARY:
    raise UserError(
      f"sampling.record_vocabulary=True records {model.vocab_size} numbers a token of this model; it is meant for "
      f"vocabularies of at most {_RECORDED_VOCABULARY}"
    )
  if c.sampling.record_routing and not 0 < model.experts <= NO_EXPERT:
    raise UserError(
      f"sampling.record_routing=True needs a model with 1 to {NO_EXPERT} experts and this one has {model.experts}; "
      "set it to False"
    )
  if c.loss.router_balance and not model.experts:
    raise UserError(
      f"loss.router_balance={c.loss.router_balance} needs a model with experts and this one has none; set it to 0"
    )


def description(settings: Settings, model: DecoderConfig, tokenizer: Tokenizer) -> dict[str, str]:
  """What learner and sampler must agree on, flat."""
  s = settings.config.sampling
  vocabulary = hashlib.sha256(repr([tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]).encode())
  return {
    **{f"model.{name}": str(value) for name, value in dataclasses.asdict(model).items() if name != "remat"},
    "tokenizer": vocabulary.hexdigest()[:16],
    "task.name": settings.task.name,
    "sampling.temperature": str(s.temperature),
    "sampling.context": str(s.context),
    "sampling.record_vocabulary": str(s.record_vocabulary),
    "sampling.record_routing": str(s.record_routing),
  }


def stream_of(settings: Settings, tokenizer: Tokenizer) -> PromptStream:
  c = settings.config
  return PromptStream(
    settings.task,
    tokenizer,
    data_dir=cache_dir(settings) / "prompts",
    seed=c.seed,
    group_size=c.batch.group_size,
    max_prompt_tokens=c.sampling.context - 1,
  )


def sampling_of(settings: Settings, slots: int) -> Sampling:
  """As the config says, with another number of slots."""
  s = settings.config.sampling
  return Sampling(
    slots=slots,
    context=s.context,
    chunk=s.chunk,
    temperature=s.temperature,
    rebuild_cache=s.rebuild_cache,
    record_vocabulary=s.record_vocabulary,
    record_routing=s.record_routing,
  )


def engine_of(settings: Settings, model: DecoderConfig, tokenizer: Tokenizer, mesh: Mesh) -> Engine:
  sampling = sampling_of(settings, settings.config.sampling.slots)
  return Engine(model, settings.task, tokenizer, sampling, key(settings, SAMPLING), mesh=mesh)


def evaluator_of(
  settings: Settings, model: DecoderConfig, tokenizer: Tokenizer, stream: PromptStream, mesh: Mesh
) -> Evaluator:
  e = settings.config.eval
  # Under one version of the weights, and nobody reads what is recorded.
  plain = dict(rebuild_cache=False, record_vocabulary=False, record_routing=False)
  sampling = dataclasses.replace(sampling_of(settings, e.slots), **plain)
  prompts = stream.heldout(max(e.prompts, e.every_prompts))
  return Evaluator(model, settings.task, tokenizer, prompts, sampling, key(settings, EVALUATION), mesh)


def schedule_of(settings: Settings) -> Schedule:
  c = settings.config
  return Schedule(
    steps=c.steps,
    checkpoint_every=c.checkpoint.every,
    eval_every=c.eval.every,
    eval_prompts=c.eval.prompts,
    eval_every_prompts=c.eval.every_prompts,
  )


def tls_of(settings: Settings) -> Tls | None:
  t = settings.config.transport
  if not t.tls_certificate:
    return None
  key_file = os.fspath(as_path("transport.tls_key", t.tls_key)) if t.tls_key else None
  return Tls(os.fspath(as_path("transport.tls_certificate", t.tls_certificate)), key_file)


def token_of(settings: Settings) -> str | None:
  """The shared secret of learner and samplers."""
  path = settings.config.transport.token_file
  if not path:
    return None
  try:
    return as_path("transport.token_file", path).read_text(encoding="utf-8").strip()
  except (OSError, UnicodeDecodeError) as error:
    line = f"transport.token_file={path} cannot be read ({error}); name a file that holds a token"
    raise UserError(line) from error
