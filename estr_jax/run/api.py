"""What a notebook or another program calls: train, evaluate, load, sample, compare_losses.

Mistakes are `UserError`, in one line; nothing here ends the interpreter.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from estr_jax.errors import UserError
from estr_jax.learner.checkpoint import restore_params
from estr_jax.model import decoder
from estr_jax.model.tokenizers import Tokenizer
from estr_jax.objective.losses import Loss, Method
from estr_jax.observe.writers import REPORT
from estr_jax.options import as_path
from estr_jax.run import options, parts, workdir
from estr_jax.run.compare import Decisions, compare_losses
from estr_jax.run.learner import run_learner
from estr_jax.run.loaded import Loaded, load, one_device
from estr_jax.run.local import run_processes
from estr_jax.runtime.evaluation import accuracies
from estr_jax.sampler.engine import Engine
from estr_jax.sampler.rollout import rollout
from estr_jax.structs import Prompt, Trajectory, Weights
from estr_jax.tasks.task import Example, Task

__all__ = ["Decisions", "Evaluation", "Loaded", "Result", "compare_losses", "evaluate", "load", "sample", "train"]


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
    return self.workdir / REPORT


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """A policy on held-out prompts."""

  version: int
  prompts: int
  accuracy: dict[str, float]  # mean reward, 0 .. 1, of "sampled" (once at the run's temperature) and of "greedy"
  trajectories: dict[str, list[Trajectory]]  # by the same names, one a prompt
  tokenizer: Tokenizer


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


def evaluate(folder: str | Path, *, prompts: int | None = None, task: Task | None = None) -> Evaluation:
  """The newest checkpoint of a run on held-out prompts, with the prompts and random keys of the run's evaluations.

  Args:
    folder: of the run.
    prompts: how many; by default as many as the run's own last evaluation had, whose result is then reproduced.
    task: the task that was passed to `train`, where one was.

  Raises:
    UserError: there is no run, no checkpoint that can be read, or there are fewer prompts.
  """
  path = as_path("folder", folder)
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
  how = parts.sampling_of(settings, min(settings.config.sampling.slots, len(asked)))
  ids = range(len(asked) if greedy else 0)
  engine = Engine(loaded.model, settings.task, tokenizer, how, jax.random.key(seed), greedy=ids, mesh=one_device())
  weights = Weights(loaded.version, loaded.params)
  done = rollout(engine, asked, lambda _: weights, segments=1, segment_tokens=1)
  done = [one if "answer" in examples[one.group] else dataclasses.replace(one, reward=np.nan) for one in done]
  return [done[first : first + samples] for first in range(0, len(done), samples)]
