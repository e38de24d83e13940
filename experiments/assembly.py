"""From a checked configuration to the objects that run it. Only programs see a ConfigDict."""

import dataclasses
import functools
import hashlib
import os
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from configs.default import get_config
from estr_jax.errors import UserError
from estr_jax.learner import batching, optimizer, step, warm_start
from estr_jax.model import decoder, hf, sharding
from estr_jax.model.decoder import DecoderConfig
from estr_jax.model.tokenizers import CharTokenizer, FolderTokenizer, Tokenizer
from estr_jax.objective.losses import LOSSES, SCORES, keywords
from estr_jax.observe.terminal import View
from estr_jax.runtime.evaluation import Evaluator
from estr_jax.runtime.learner_loop import Calibration, Learner, Schedule
from estr_jax.sampler.engine import Engine, Sampling
from estr_jax.structs import NO_EXPERT, Batch, Params, TrainState
from estr_jax.tasks import TASKS
from estr_jax.tasks.prompts import PromptStream
from estr_jax.tasks.task import Task
from estr_jax.transport.security import Tls
from experiments import settings

# Independent random streams of one seed.
_INIT, _SAMPLING, _EVALUATION = range(3)

_RECORDED_VOCABULARY = 1024


def key(config: ConfigDict, stream: int) -> jax.Array:
  return jax.random.fold_in(jax.random.key(config.seed), stream)


def cache_dir(config: ConfigDict) -> Path:
  return Path(config.cache_dir).expanduser()


def use_compilation_cache(config: ConfigDict) -> None:
  """Compiled programs are kept, so that the second run of a config starts at once."""
  jax.config.update("jax_compilation_cache_dir", os.fspath(cache_dir(config) / "compiled"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def mesh_of(config: ConfigDict) -> Mesh:
  """The learner's, over all devices."""
  return sharding.make_mesh(config.mesh.to_dict())


def task_of(config: ConfigDict) -> Task:
  return TASKS[config.task.name]


def tokenizer_of(config: ConfigDict) -> Tokenizer:
  if config.model.folder:
    return FolderTokenizer(Path(config.model.folder).expanduser())
  return CharTokenizer(task_of(config).alphabet)


def model_of(config: ConfigDict, tokenizer: Tokenizer | None) -> DecoderConfig:
  """The folder's shape, or that of the config; computation as the config says.

  Without a tokenizer, a plan's, the folder or model.vocabulary has to say how many tokens there are.
  """
  m = config.model
  keys = {field.name for field in dataclasses.fields(DecoderConfig)} - {"vocab_size", "dtype", "remat"}
  if m.folder:
    shape = hf.read_config(Path(m.folder).expanduser())
    default, held = get_config().model, {**shape, "vocabulary": shape["vocab_size"]}
    for name in sorted({*keys, "vocabulary"}):
      there = held.get(name, 0)  # a dense folder says nothing of experts
      if m[name] not in (default[name], there):
        raise UserError(f"model.{name}={m[name]}, but the model in {m.folder} has {there}; leave it at {default[name]}")
  else:
    if tokenizer is not None and m.vocabulary not in (0, tokenizer.vocab_size):
      raise UserError(
        f"model.vocabulary={m.vocabulary}, but the tokenizer has {tokenizer.vocab_size} tokens; leave it at 0"
      )
    shape = {"vocab_size": m.vocabulary or tokenizer.vocab_size, **{name: m[name] for name in keys}}
  model = DecoderConfig(**shape, dtype=m.dtype, remat=m.remat)
  if config.sampling.record_vocabulary and model.vocab_size > _RECORDED_VOCABULARY:
    raise UserError(
      f"sampling.record_vocabulary=True records {model.vocab_size} numbers a token of this model; it is meant for "
      f"vocabularies of at most {_RECORDED_VOCABULARY}"
    )
  if config.sampling.record_routing and not 0 < model.experts <= NO_EXPERT:
    raise UserError(
      f"sampling.record_routing=True needs a model with 1 to {NO_EXPERT} experts and this one has {model.experts}; "
      "set it to False"
    )
  if config.loss.router_balance and not model.experts:
    raise UserError(
      f"loss.router_balance={config.loss.router_balance} needs a model with experts and this one has none; set it to 0"
    )
  return model


def description(config: ConfigDict, model: DecoderConfig, tokenizer: Tokenizer) -> dict[str, str]:
  """What learner and sampler must agree on, flat."""
  vocabulary = hashlib.sha256(repr([tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]).encode())
  return {
    **{f"model.{name}": str(value) for name, value in dataclasses.asdict(model).items() if name != "remat"},
    "tokenizer": vocabulary.hexdigest()[:16],
    "task.name": config.task.name,
    "sampling.temperature": str(config.sampling.temperature),
    "sampling.context": str(config.sampling.context),
    "sampling.record_vocabulary": str(config.sampling.record_vocabulary),
    "sampling.record_routing": str(config.sampling.record_routing),
  }


def stream_of(config: ConfigDict, tokenizer: Tokenizer) -> PromptStream:
  return PromptStream(
    task_of(config),
    tokenizer,
    data_dir=cache_dir(config) / "prompts",
    seed=config.seed,
    group_size=config.batch.group_size,
    max_prompt_tokens=config.sampling.context - 1,
  )


def engine_of(config: ConfigDict, model: DecoderConfig, tokenizer: Tokenizer, mesh: Mesh) -> Engine:
  s = config.sampling
  recorded = s.record_vocabulary, s.record_routing
  sampling = Sampling(s.slots, s.context, s.chunk, s.temperature, s.rebuild_cache, *recorded)
  return Engine(model, task_of(config), tokenizer, sampling, key(config, _SAMPLING), mesh=mesh)


def evaluator_of(
  config: ConfigDict, model: DecoderConfig, tokenizer: Tokenizer, stream: PromptStream, mesh: Mesh
) -> Evaluator:
  s = config.sampling
  return Evaluator(
    model,
    task_of(config),
    tokenizer,
    stream.heldout(max(config.eval.prompts, config.eval.every_prompts)),
    Sampling(
      config.eval.slots,
      s.context,
      s.chunk,
      s.temperature,
      rebuild_cache=False,
      record_vocabulary=False,
      record_routing=False,
    ),
    key(config, _EVALUATION),
    mesh,
  )


def _weight_files(config: ConfigDict) -> list[Path]:
  return sorted(Path(config.model.folder).expanduser().glob("*.safetensors")) if config.model.folder else []


def initial_params(
  config: ConfigDict, model: DecoderConfig, tokenizer: Tokenizer, stream: PromptStream, abstract: Params, view: View
) -> Params:
  """The folder's weights, or random ones; then the supervised warm start, if there is one.

  `abstract` says where they are to lie.
  """
  places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
  if config.model.folder:
    view.phase("loading weights", detail=config.model.folder)
    _, params = hf.load(Path(config.model.folder).expanduser(), model, places=places)
  else:
    random_key = np.asarray(jax.random.key_data(key(config, _INIT)))  # of no device, since it goes to all
    init = jax.jit(lambda data: decoder.init(model, jax.random.wrap_key_data(data)), out_shardings=places)
    params = init(random_key)
  w = config.warm_start
  if not w.steps:
    return params
  view.phase("encoding demonstrations", detail=f"{w.demonstrations} of task {config.task.name}")
  rng = np.random.default_rng(config.seed)
  pool = warm_start.encode_demonstrations(
    task_of(config), tokenizer, stream.examples(w.demonstrations), rng, length=config.sampling.context
  )
  recipe = {
    "model": dataclasses.asdict(model),
    "folder": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _weight_files(config)],
    "seed": config.seed,
    "warm_start": w.to_dict(),
    "demonstrations": warm_start.digest(pool),
  }

  def progress(done: int, loss: float) -> None:
    view.phase("supervised warm start", done, w.steps, f"cross-entropy {loss:.3f} nats per token")

  def make() -> Params:
    view.phase("supervised warm start", 0, w.steps, "compiling")
    batches = warm_start.sample_batches(pool, batch=w.batch, rng=rng)
    mesh = places["final_norm"]["scale"].mesh
    return warm_start.supervised(
      model, params, batches, mesh=mesh, steps=w.steps, learning_rate=w.learning_rate, on_progress=progress
    )

  return warm_start.cached(cache_dir(config) / "warm_starts", recipe, abstract, make)


@dataclasses.dataclass(frozen=True)
class Update:
  """The update of a config, and the shape of the state that it moves."""

  learner: Learner
  abstract: TrainState
  init: "functools.partial[TrainState]"  # params -> state


def objective_of(config: ConfigDict) -> tuple[step.Objective, step.Hyper]:
  """What the update minimises: its static half, and its numbers."""
  loss, bonus = config.loss, config.loss.entropy
  hyper = settings.loss_arguments(config)
  numbers = {name: np.float32(value) for name, value in hyper.items() if not isinstance(value, str)}
  words = {name: value for name, value in hyper.items() if isinstance(value, str)}
  adaptive = bonus.target > 0
  objective = step.Objective(
    loss=functools.partial(LOSSES[loss.name], **words),
    aggregation=loss.aggregation,
    aggregation_tokens=config.sampling.context,
    entropy_bonus=adaptive or bonus.coefficient > 0,
    kl=(loss.kl.estimator, loss.kl.anchor) if loss.kl.coefficient > 0 else None,
    router_balance=loss.router_balance > 0,
    ess_step=config.optimizer.ess_step,
  )
  target = bonus.target if adaptive else -np.inf
  scalars = (loss.kl.coefficient, target, bonus.step, bonus.largest, loss.router_balance)
  return objective, step.Hyper(numbers, *map(np.float32, scalars))


def update_of(config: ConfigDict, model: DecoderConfig, mesh: Mesh) -> Update:
  """The update on the learner's mesh."""
  o = config.optimizer
  objective, hyper = objective_of(config)
  rule = optimizer.make(
    optimizer=o.name,
    learning_rate=o.learning_rate,
    warmup_steps=o.warmup_steps,
    decay=o.decay,
    total_steps=config.steps,
    b1=o.b1,
    b2=o.b2,
    eps=o.eps,
    weight_decay=o.weight_decay,
    clip_norm=o.clip_norm,
  )
  shared = dict(
    mesh=mesh,
    microbatches=config.batch.microbatches,
    temperature=config.sampling.temperature,
    score_chunk=config.learner.score_chunk,
  )
  diagnostics = config.learner.diagnostics
  entropy = diagnostics or objective.reads("entropy", hyper)
  train_step = step.make_train_step(model, objective, rule, entropy=entropy, diagnostics=diagnostics, **shared)
  assemble = functools.partial(
    batching.assemble,
    rows=config.batch.groups * config.batch.group_size,
    length=config.sampling.context,
    advantage=config.advantage.name,
    advantage_eps=config.advantage.eps,
    pack=False,
  )
  rows = NamedSharding(mesh, sharding.BATCH_SPEC)

  def place(batch: Batch) -> Batch:
    """Every process has the whole batch, and takes the rows of its devices."""
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(rows, leaf, leaf.shape), batch)

  anchors = tuple(name for name in ("proximal", "reference") if objective.reads(name, hyper))
  score_step = step.make_score_step(model, **shared) if anchors else None
  calibration, fraction = None, settings.calibrated_fraction(config)
  if fraction is not None:
    score = SCORES[config.loss.name]
    score = functools.partial(score, **{name: hyper.loss[name] for name in keywords(score)})
    calibration = Calibration(
      step.make_score_step(model, **shared, entropy=objective.reads("entropy", hyper), read=score),
      fraction=fraction,
      first_version=settings.first_calibration(config),
      stale_share=0.5 if config.mode == "async" else 0.0,
    )
  return Update(
    learner=Learner(assemble, place, train_step, hyper, score_step, anchors, calibration),
    abstract=step.abstract_state(model, rule, mesh),
    init=functools.partial(
      step.init_state, model, rule, mesh=mesh, entropy_coefficient=config.loss.entropy.coefficient
    ),
  )


def schedule_of(config: ConfigDict) -> Schedule:
  return Schedule(
    steps=config.steps,
    checkpoint_every=config.checkpoint.every,
    eval_every=config.eval.every,
    eval_prompts=config.eval.prompts,
    eval_every_prompts=config.eval.every_prompts,
  )


def tls_of(config: ConfigDict) -> Tls | None:
  t = config.transport
  return Tls(t.tls_certificate, t.tls_key or None) if t.tls_certificate else None


def token_of(config: ConfigDict) -> str | None:
  """The shared secret of learner and samplers."""
  path = config.transport.token_file
  if not path:
    return None
  try:
    return Path(path).expanduser().read_text().strip()
  except OSError as error:
    line = f"transport.token_file={path} cannot be read: {error.strerror}; name a file that holds a token"
    raise UserError(line) from error
