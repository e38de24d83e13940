"""Whole runs, small enough for a test: the quickstart's smoke form with a policy that moves."""

import io

import jax
import numpy as np
from ml_collections import ConfigDict

from configs import quickstart
from estr_jax.learner.checkpoint import Checkpoints
from estr_jax.observe.terminal import View
from estr_jax.observe.writers import read
from estr_jax.run import learner, options, parts
from estr_jax.run.update import update_of


def config(cache, mode: str, **changes) -> ConfigDict:
  """`changes` are keys such as staleness__intra=2. Checked."""
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
  options.make(c)
  return c


def train(c: ConfigDict, workdir) -> tuple[dict, list[dict]]:
  """(summary, rows)."""
  with View("test", c.steps, file=io.StringIO()) as view:
    summary = learner.train(options.make(c), workdir, view)
  return summary, read(workdir / "metrics.jsonl")


def abstract_state(c: ConfigDict):
  settings = options.make(c)
  model = parts.model_of(settings, parts.tokenizer_of(settings))
  return update_of(settings, model, parts.mesh_of(settings)).abstract


def final_params(c: ConfigDict, workdir):
  """The parameters of the last checkpoint, as numpy."""
  checkpoints = Checkpoints(workdir / "checkpoints")
  state, _ = checkpoints.restore(abstract_state(c), checkpoints.latest())
  checkpoints.close()
  return jax.tree.map(np.asarray, state.params)


def assert_trees_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)
