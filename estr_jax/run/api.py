"""What a notebook or another program calls: train, evaluate, load, sample, compare_losses.

Mistakes are `UserError`, in one line; nothing here ends the interpreter.
"""

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from estr_jax.errors import UserError
from estr_jax.learner.batching import assemble
from estr_jax.learner.checkpoint import restore_params
from estr_jax.learner.step import score_tokens
from estr_jax.model import decoder, sharding
from estr_jax.model.config import DecoderConfig
from estr_jax.model.tokenizers import Tokenizer
from estr_jax.objective.losses import Loss, Method
from estr_jax.objective.triangle import MissingInput
from estr_jax.observe.writers import Row, read
from estr_jax.run import options, parts, workdir
from estr_jax.run.learner import run_learner
from estr_jax.run.local import run_processes
from estr_jax.run.options import Settings
from estr_jax.runtime.evaluation import accuracies
from estr_jax.sampler.engine import Engine, Sampling
from estr_jax.sampler.rollout import rollout
from estr_jax.structs import Batch, Params, Prompt, Scores, TokenLoss, Trajectory, Weights
from estr_jax.tasks.task import Example, Task


@dataclasses.dataclass(frozen=True)
class Result:
  """A run that has done its steps."""

  workdir: Path
  summary: dict[str, Any]  # as summary.json has it

  @property
  def accuracy(self) -> dict[str, dict[str, float]]:
    """{"sampled": {"before": ..., "after": ...}, "greedy": ...}: shares of the held-out prompts, 0 .. 1."""
    return self.summary["accuracy"]

  @property
  def report(self) -> Path:
    """The page that shows the run."""
    return self.workdir / workdir.REPORT


@dataclasses.dataclass(frozen=True)
class Loaded:
  """What a run left: a policy and its record."""

  settings: Settings
  model: DecoderConfig
  params: Params  # f32
  version: int  # optimizer updates that made `params`
  tokenizer: Tokenizer
  metrics: dict[str, np.ndarray]  # [rows], or [rows, bins] of a histogram; NaN where a row lacks it; f64

  def text(self, trajectory: Trajectory) -> str:
    """All of it, prompt included."""
    return self.tokenizer.decode(trajectory.tokens)

  def reply(self, trajectory: Trajectory) -> str:
    """What came after the prompt: the policy's turns, and the environment's between them."""
    return self.tokenizer.decode(trajectory.tokens[int(np.argmax(trajectory.mask)) :])


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """A policy on held-out prompts."""

  version: int
  prompts: int
  accuracy: dict[str, float]  # mean reward, 0 .. 1, of "sampled" (once at the run's temperature) and of "greedy"
  trajectories: dict[str, list[Trajectory]]  # by the same names, one a prompt
  tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class Decisions:
  """What some losses make of the same tokens, at the same weights. Host; every array is [B, T] NumPy.

  A row is a trajectory, in the order of prompt ids, which is that of `sample`; T is the run's sampling.context.
  """

  version: int  # of the weights pi
  batch: Batch  # what the sampler recorded of mu, and the advantages
  delta: np.ndarray  # f32; log pi - log mu, nats; 0 where not batch.mask
  losses: dict[str, TokenLoss]  # by the names that were given


def train(
  config: ConfigDict | Mapping[str, Any],
  folder: str | Path,
  *,
  task: Task | None = None,
  loss: Loss | Method | None = None,
  quiet: bool = False,
) -> Result:
  """Trains a policy, or goes on with the run in the folder from its last checkpoint.

  Modes sync and simulated run in this process; async starts a learner and a sampler process, which get `task` and
  `loss` too.

  Args:
    config: a whole ConfigDict, or what differs from the defaults, such as {"mode": "sync", "loss.name": "ppo"}.
    folder: where the run keeps its files; made where it is not.
    task: a task of one's own (`estr_jax.tasks.task`).
    loss: a loss of one's own (`estr_jax.objective.losses` has the contract); its keys are loss.NAME.*.
    quiet: print nothing while the run goes on.

  Returns:
    The run, whether this call or an earlier one did its steps.

  Raises:
    UserError: a key is unknown or impossible, the folder holds another run, a process of the run failed.
  """
  settings = options.make(config, task=task, loss=loss)
  path = workdir.make(folder)
  if workdir.finished(settings.config, path):
    return Result(path, workdir.read_summary(path))
  run = run_processes if settings.config.mode == "async" else run_learner
  return Result(path, run(settings, path, "python", quiet=quiet))


def load(folder: str | Path, *, version: int | None = None, task: Task | None = None) -> Loaded:
  """A checkpoint of a run, with the metrics of all its steps.

  Args:
    folder: of the run.
    version: of the checkpoint, the newest where None. A run keeps its newest two; checkpoint.every is the number of
      updates between them.
    task: the task that was passed to `train`, where one was.

  Raises:
    UserError: there is no run, no checkpoint that can be read, or none of that version.
  """
  path = Path(folder).expanduser()
  settings = workdir.read_settings(path, task=task)
  tokenizer = parts.tokenizer_of(settings)
  model = parts.model_of(settings, tokenizer)
  found, params = restore_params(path / workdir.CHECKPOINTS, decoder.abstract_params(model), step=version)
  return Loaded(settings, model, params, found, tokenizer, as_arrays(read(path / workdir.METRICS)))


def as_arrays(rows: Sequence[Row]) -> dict[str, np.ndarray]:
  """The rows of a run by name: f64 [rows], or [rows, bins]; NaN where a row lacks a name or has null there."""
  found = {}
  for name in dict.fromkeys(name for row in rows for name in row):
    shape = next((np.shape(row[name]) for row in rows if row.get(name) is not None), ())
    values = [np.full(shape, np.nan) if row.get(name) is None else row[name] for row in rows]
    found[name] = np.array(values, np.float64)
  return found


def evaluate(folder: str | Path, *, prompts: int | None = None, task: Task | None = None) -> Evaluation:
  """The newest checkpoint of a run on held-out prompts, with the prompts and random keys of the run's evaluations.

  Args:
    folder: of the run.
    prompts: how many; by default as many as the run's own last evaluation had, whose result is then reproduced.
    task: the task that was passed to `train`, where one was.

  Raises:
    UserError: there is no run, no checkpoint that can be read, or there are fewer prompts.
  """
  path = Path(folder).expanduser()
  settings = workdir.read_settings(path, task=task)
  if prompts is not None:
    settings = options.make(settings.changed({"eval.prompts": prompts}).config, task=task)
  number = settings.config.eval.prompts
  parts.use_compilation_cache(settings)
  tokenizer = parts.tokenizer_of(settings)
  model = parts.model_of(settings, tokenizer)
  weights = Weights(*restore_params(path / workdir.CHECKPOINTS, decoder.abstract_params(model)))
  stream = parts.stream_of(settings, tokenizer)
  evaluator = parts.evaluator_of(settings, model, tokenizer, stream, one_device())
  rollouts = evaluator.rollouts(weights, number)
  accuracy = {kind: accuracies(rollouts)[f"eval/{kind}_accuracy"] for kind in rollouts}
  return Evaluation(weights.version, number, accuracy, rollouts, tokenizer)


def sample(
  loaded: Loaded,
  prompts: Sequence[str | Example],
  *,
  samples: int = 1,
  greedy: bool = False,
  seed: int = 0,
) -> list[list[Trajectory]]:
  """What a policy says, over all turns of its task, at the run's temperature.

  Args:
    loaded: the policy.
    prompts: questions, as the task's examples have them; {"question": ..., "answer": ...} for a reward.
    samples: trajectories of each question.
    greedy: take the most probable token always.
    seed: of the draws.

  Returns:
    For each prompt its trajectories; `loaded.text` reads them. The reward of a question without an answer is NaN.

  Raises:
    UserError: a question is longer than the run's context, or has characters that its tokenizer lacks.
  """
  settings, tokenizer = loaded.settings, loaded.tokenizer
  if isinstance(prompts, str):
    raise UserError(f"prompts is one string, {prompts!r}; give a list of questions")
  examples = [{"question": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
  for number, example in enumerate(examples):
    if not isinstance(example, Mapping) or not isinstance(example.get("question"), str):
      raise UserError(f'prompt {number} is {example!r}; give a question, or {{"question": ..., "answer": ...}}')
  asked = []
  for group, example in enumerate(examples):
    tokens = np.asarray(settings.task.encode(tokenizer, example["question"]), np.int32)
    ids = range(group * samples, (group + 1) * samples)
    asked += [Prompt(id, group, tokens, example.get("answer", ""), settings.task.name) for id in ids]
  if not asked:
    raise UserError("nothing to sample: give at least one prompt, and at least one sample of each")
  s = settings.config.sampling
  slots, recorded = min(s.slots, len(asked)), (s.record_vocabulary, s.record_routing)
  how = Sampling(slots, s.context, s.chunk, s.temperature, s.rebuild_cache, *recorded)
  ids = range(len(asked) if greedy else 0)
  engine = Engine(loaded.model, settings.task, tokenizer, how, jax.random.key(seed), greedy=ids, mesh=one_device())
  weights = Weights(loaded.version, loaded.params)
  done = rollout(engine, asked, lambda _: weights, segments=1, segment_tokens=1)
  done = [one if "answer" in examples[one.group] else dataclasses.replace(one, reward=np.nan) for one in done]
  return [done[first : first + samples] for first in range(0, len(done), samples)]


def compare_losses(loaded: Loaded, groups: Sequence[Sequence[Trajectory]], losses: Mapping[str, Loss]) -> Decisions:
  """What each loss would do with each token, were the policy to be updated on these trajectories now.

  It tells what is kept, masked and clipped, not which loss trains better.

  Args:
    loaded: the policy pi.
    groups: the trajectories of each prompt, as `sample` returns them; mu is whatever sampled them, so take an older
      checkpoint for a stale batch. Advantages are those of the run's config, on one device and in one microbatch.
    losses: functions of `estr_jax.objective.losses.LOSSES` or of one's own, by any name. `functools.partial` sets
      hyper-parameters; those that stay unset have the function's defaults, and the run's where it has none (edge,
      clip_low, clip_high).

  Raises:
    UserError: a trajectory has no reward, comes twice, is too long, or was sampled by newer weights than the policy's;
      a loss asks for what neither the run nor the record has.
  """
  c = loaded.settings.config
  batch = _one_batch(loaded, groups)
  score = functools.partial(
    score_tokens,
    loaded.model,
    temperature=c.sampling.temperature,
    chunk=c.learner.score_chunk,
    entropy=True,
    vocabulary=batch.vocabulary is not None,
  )
  policy = jax.jit(score)(loaded.params, batch.tokens, batch.segment, experts=batch.experts)
  batch = dataclasses.replace(batch, proximal=policy.logprob)  # q, as it is before an update of this policy
  # One by one: of a dict, device_get would sort the names.
  decided = {name: jax.device_get(_decide(name, loss, policy, batch, c.loss)) for name, loss in losses.items()}
  batch, logprob_BT = jax.device_get((batch, policy.logprob))
  delta_BT = np.where(batch.mask, logprob_BT - batch.logprob, np.float32(0))
  return Decisions(loaded.version, batch, delta_BT, decided)


def _one_batch(loaded: Loaded, groups: Sequence[Sequence[Trajectory]]) -> Batch:
  """The trajectories as the learner would lay them out, one a row."""
  c = loaded.settings.config
  trajectories = [trajectory for group in groups for trajectory in group]
  if not trajectories:
    raise UserError("no trajectories; give the groups that `sample` returns")
  if any(np.isnan(trajectory.reward) for trajectory in trajectories):
    raise UserError(
      'a trajectory without a reward has no advantage; sample from {"question": ..., "answer": ...} rather than from '
      "a question alone"
    )
  newest = max(int(trajectory.version.max(initial=0)) for trajectory in trajectories)
  if newest > loaded.version:
    raise UserError(
      f"a trajectory was sampled by version {newest}, newer than the policy's {loaded.version}; load a newer checkpoint"
    )
  try:
    batch = assemble(
      groups,
      loaded.version,
      rows=len(trajectories),
      length=c.sampling.context,
      advantage=c.advantage.name,
      advantage_eps=c.advantage.eps,
      pack=False,
    )
  except ValueError as error:
    raise UserError(f"these trajectories make no batch: {error}") from error
  return jax.tree.map(jax.numpy.asarray, batch)


def _decide(name: str, loss: Loss, policy: Scores, batch: Batch, keys: ConfigDict) -> TokenLoss:
  """A loss on the batch; `keys` are the loss keys of a config."""
  unset = [
    p.name for p in inspect.signature(loss).parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty
  ]
  unknown = [key for key in unset if key not in keys]
  if unknown:
    raise UserError(f"loss {name} needs {unknown[0]}, which no config has; set it with functools.partial")
  try:
    return loss(policy, batch, **{key: keys[key] for key in unset})
  except MissingInput as error:
    raise UserError(f"loss {name}: {error}") from error


def one_device() -> Mesh:
  """Whatever mesh a policy was trained on, one device serves to look at it."""
  return sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
