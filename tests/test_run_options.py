"""Keys, settings, and what a user may bring along."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from configs import default, quickstart
from estr_jax.errors import UserError
from estr_jax.objective.losses import METHODS, composition
from estr_jax.options import POSITIVE, Key, Range, Word
from estr_jax.run import command_line, options, pages, workdir
from estr_jax.tasks import TASKS

ROOT = Path(__file__).parent.parent


def halved(policy, batch, *, edge: str, share: float = 0.5, clip_low: float, clip_high: float):
  """PPO on half of the objective.

  Args:
    share: of the objective.
  """
  token_loss = composition.clipped(policy, batch, edge=edge, clip_low=clip_low, clip_high=clip_high)
  return token_loss._replace(value=share * token_loss.value)


def without_keys(policy, batch, *, edge: str, clip_low: float, clip_high: float):
  """PPO."""
  return composition.clipped(policy, batch, edge=edge, clip_low=clip_low, clip_high=clip_high)


def test_every_key_says_what_it_means_and_takes_its_own_default():
  """Fails if a key has no meaning, or a default that its own bounds refuse."""
  for name, key in options.keys().items():
    assert key.meaning, name
    assert key.complaint(name, key.default) is None, name
  assert options.make({}).config.to_dict() == default.get_config().to_dict()


def test_overrides_may_be_flat_or_nested():
  """Fails if one of the two forms is lost, or leaves other keys than the defaults."""
  flat = options.make({"loss.estr.tau": 2.0, "steps": 3}).config
  nested = options.make({"loss": {"estr": {"tau": 2.0}}, "steps": 3}).config
  assert flat.to_dict() == nested.to_dict()
  assert (flat.loss.estr.tau, flat.steps, flat.batch.groups) == (2.0, 3, 16)


@pytest.mark.parametrize(
  ("config", "words"),
  [
    ({"loss.estr.taw": 2.0}, r"unknown config key loss\.estr\.taw; the nearest known one is loss\.estr\.tau"),
    ({"steps": "soon"}, "steps='soon' is of another type than its default, 100"),
    ({"steps": 2**70}, "steps=1180591620717411303424 must fit into 32 bits"),
    ({"cache_dir": None}, "cache_dir=None is of another type"),
    ({"transport.address": None}, r"transport\.address=None is of another type"),
    ({"steps": True}, "steps=True is of another type"),
    ({"model.qk_norm": 3}, "model.qk_norm=3 is of another type"),
    ({"loss": 3}, "unknown config key loss; the nearest known one is"),
    ({"staleness": {"maxx": 3}}, r"staleness\.maxx; the nearest known one is staleness\.max"),
    (
      {"loss.estr.tau": "calibrate:2"},
      "is neither a number above 0, or inf, nor calibrate:FRACTION with a fraction between 0",
    ),
    (
      {"loss.kpop.phi": 0.2},
      "loss.kpop.phi=0.2 has no effect while loss.name is not kpop; leave it at its default, 0.1",
    ),
    ({"seed": 2**32}, "seed=4294967296 must be at least 0, below 4,294,967,296"),
    ({"transport.address": "192.0.2.1:80"}, "beyond loopback: name transport.tls_certificate and transport.token_file"),
    ({"steps": float("nan")}, "steps=nan is of another type|must be a finite number"),
  ],
)
def test_a_wrong_override_is_one_line(config, words):
  """Fails if a notebook's typing error trains something else, or ends in another exception."""
  with pytest.raises(UserError, match=words) as caught:
    options.make(config)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", [None, 3, b"x", [], "a\0b", "\udcff", "~nosuchuser/x"])
def test_what_is_no_path_is_one_line(path):
  """Fails if a folder that cannot be one ends in another exception."""
  with pytest.raises(UserError, match=r"^workdir=.* is no path: "):
    workdir.make(path)


def test_a_whole_config_is_left_as_it_was():
  """Fails if settings share their config with the caller, who may go on and change it."""
  c = quickstart.get_config("smoke")
  settings = options.make(c)
  c.steps = 77
  assert settings.config.steps == 2
  settings.changed({"steps": 5})
  assert settings.config.steps == 2 and settings.changed({"steps": 5}).config.steps == 5


def test_the_three_lines_of_the_readme_are_the_quickstarts_smoke_form():
  """Fails if the README's first program trains something else than it says."""
  text = (ROOT / "README.md").read_text(encoding="utf-8")
  (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  assert len(ast.parse(code).body) == 3
  given = {}
  exec(code.partition("print(")[0].replace("import estr_jax", ""), given)
  wanted = quickstart.get_config("smoke")
  wanted.mode = "sync"
  assert options.make(given["small"]).config.to_dict() == wanted.to_dict()


def test_a_loss_of_ones_own_declares_its_keys():
  """Fails if a loss that is passed is not the one that trains, or its keys cannot be set."""
  settings = options.make({"loss.halved.share": 0.25}, loss=halved)
  assert settings.method.loss is halved and settings.config.loss.name == "halved"
  assert settings.loss_arguments == {"edge": "direct", "share": 0.25, "clip_low": 0.2, "clip_high": 0.28}
  whole = options.make(default.get_config(), loss=halved)
  assert whole.loss_arguments["share"] == 0.5
  assert "halved" not in METHODS  # passed, not registered
  assert options.make({}, loss=without_keys).loss_arguments.keys() == {"edge", "clip_low", "clip_high"}


@pytest.mark.parametrize(
  ("config", "loss", "words"),
  [
    ({"batch.microbatches": 2}, halved, "compares the samples of a prompt"),
    ({"loss.name": "ppo"}, halved, "loss.name=ppo is not the one that was passed, halved"),
    ({}, METHODS["ppo"].loss, "ppo is a name of the package's own"),
    ({}, lambda policy, batch: None, "has no name"),
    ({}, lambda policy, batch, *, width=1.0: None, "has no name"),
    ({}, 3, "has no name"),
  ],
)
def test_a_loss_that_cannot_be_is_refused(config, loss, words):
  """Fails if a function of unknown scope is torn apart by microbatches, or another loss trains in silence."""
  with pytest.raises(UserError, match=words):
    options.make(config, loss=loss)


def test_a_method_says_its_scope():
  """Fails if a loss whose scope is known is still refused microbatches."""
  method = dataclasses.replace(METHODS["ppo"], loss=halved)
  assert options.make({"batch.microbatches": 2}, loss=method).method is method


def test_an_undocumented_key_of_a_loss_is_refused():
  """Fails if a loss of one's own may have keys that nobody can look up."""

  def bare(policy, batch, *, width: float = 1.0):
    """No more."""

  def hungry(policy, batch, *, width: float):
    """No more."""

  with pytest.raises(UserError, match='bare: the docstring says nothing of width under "Args:"'):
    options.make({}, loss=bare)
  with pytest.raises(UserError, match="hungry takes width, which has no default"):
    options.make({}, loss=hungry)


def test_a_task_of_ones_own():
  """Fails if a task that is passed is not the one that is learnt."""
  task = dataclasses.replace(TASKS["calculator"], name="mine")
  settings = options.make({}, task=task)
  assert settings.task is task and settings.config.task.name == "mine"
  with pytest.raises(UserError, match=r"task\.name='mine' is unknown"):
    options.make({"task.name": "mine"})
  with pytest.raises(UserError, match=r"warm_start\.steps=3, but task mine brings no demonstrations"):
    options.make({"warm_start.steps": 3}, task=dataclasses.replace(task, demonstrate=None))


def test_ranges_in_words():
  """Fails if a bound is lost on its way to a reader, or holds at its edge although it says otherwise."""
  one = Range(unit="tokens", above=0, below=1, infinite=True)
  assert one.said() == "above 0, below 1, or inf"
  assert one.complaint(0) == one.complaint(1) == "must be above 0, below 1, or inf"
  assert one.complaint(0.5) is None and one.complaint(float("inf")) is None
  edges = Range(least=0, most=1)
  assert edges.complaint(0) is None and edges.complaint(1) is None and edges.complaint(1.1) is not None


def test_a_number_with_a_word():
  """Fails if the word is refused, or anything else passes as one."""
  key = Key(1.0, "a bound", POSITIVE, word=Word("none", lambda value: value == "none"))
  assert key.complaint("k", "none") is None and key.complaint("k", 2.0) is None
  assert key.complaint("k", "nine") == "k='nine' is neither a number above 0, nor none"
  assert key.complaint("k", True) is not None


def test_the_help_of_a_group():
  """Fails if a group's keys cannot be looked up from the command line."""
  text = pages.help_of("staleness")
  assert "--config.staleness.max=4\n" in text and "[versions; at least 0]" in text
  assert pages.help_of("loss.estr").count("--config.") == 2
  with pytest.raises(UserError, match="--help=los names no group of keys; the nearest is loss"):
    pages.help_of("los")


@pytest.mark.parametrize("program", ["train", "plan", "launch"])
def test_help_of_the_programs(program, capsys, monkeypatch):
  """Fails if --help is an unknown flag, or does not say usage, flags, where the keys are, and three examples."""
  import importlib

  from absl import flags

  module = importlib.import_module(f"experiments.{program}")
  monkeypatch.setattr(flags, "FLAGS", known := flags.FlagValues())
  monkeypatch.setattr(module, "FLAGS", known)
  for name in ("DEFINE_string", "DEFINE_enum", "DEFINE_integer", "DEFINE_bool", "DEFINE_float"):
    define = getattr(flags, name)
    monkeypatch.setattr(flags, name, lambda *a, define=define, **k: define(*a, flag_values=known, **k))
  from ml_collections import config_flags

  define = config_flags.DEFINE_config_file
  monkeypatch.setattr(config_flags, "DEFINE_config_file", lambda *a: define(*a, flag_values=known))
  with pytest.raises(SystemExit) as end:
    command_line.parse([program, "--help"], module.define_flags, module.__doc__)
  assert end.value.code == 0
  text = capsys.readouterr().out
  assert text.count(f"python -m experiments.{program} ") >= 3
  assert "--config.KEY=VALUE" in text and "docs/config.md" in text and "--help=GROUP" in text
  for flag in known:
    if flag not in ("help", "helpfull", "helpshort", "helpxml") and not flag.startswith("config."):
      assert f"--{flag}" in text


def test_a_config_of_other_keys_is_refused():
  """Fails if a key that is gone, or missing, passes."""
  c = default.get_config()
  c.queue = ConfigDict({"capacity": 64})
  with pytest.raises(UserError, match=r"config key queue\.lease_timeout_s is missing"):
    options.make(c)
