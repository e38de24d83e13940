"""Whole runs, small enough for a test: the quickstart's smoke form with a policy that moves."""

import io

import jax
import numpy as np

from configs import quickstart
from estr_jax.learner.checkpoint import Checkpoints
from estr_jax.observe.terminal import View
from estr_jax.observe.writers import read
from experiments import assembly, roles, settings


def config(cache, mode: str, **changes):
  """`changes` are keys such as staleness__intra=2."""
  c = quickstart.get_config("smoke")
  c.mode = mode
  c.cache_dir = str(cache)
  c.warm_start.steps = 0
  c.eval.every = 0
  c.eval.prompts = 2
  c.eval.every_prompts = 2
  c.checkpoint.every = 1
  c.optimizer.learning_rate = 3e-3
  c.optimizer.decay = "constant"
  for name, value in changes.items():
    *groups, leaf = name.split("__")
    node = c
    for group in groups:
      node = node[group]
    node[leaf] = value
  settings.check(c)
  return c


def train(c, workdir) -> tuple[dict, list[dict]]:
  """(summary, rows)."""
  with View("test", c.steps, file=io.StringIO()) as view:
    summary = roles.train(c, workdir, view)
  return summary, read(workdir / "metrics.jsonl")


def final_params(c, workdir):
  """The parameters of the last checkpoint, as numpy."""
  tokenizer = assembly.tokenizer_of(c)
  update = assembly.update_of(c, assembly.model_of(c, tokenizer), assembly.mesh_of(c))
  checkpoints = Checkpoints(workdir / "checkpoints")
  state, _ = checkpoints.restore(update.abstract, checkpoints.latest())
  checkpoints.close()
  return jax.tree.map(np.asarray, state.params)


def assert_trees_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)
