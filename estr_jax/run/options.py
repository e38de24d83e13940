"""From a config to checked settings: every key of every room put together, with what the config names.

A config is an ml-collections ConfigDict. Each room declares the keys that it obeys, and the rules between them, in its
own keys.py; here they are put together and checked.
"""

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict, FieldReference

from estr_jax.errors import UserError
from estr_jax.lab import keys as lab
from estr_jax.learner import keys as learner
from estr_jax.model import keys as model
from estr_jax.objective import keys as objective
from estr_jax.objective.losses import METHODS, Loss, Method, arguments, keywords, own_values
from estr_jax.options import Key, Keys, keys_of, nearest
from estr_jax.rollout_queue import keys as rollout_queue
from estr_jax.run import keys as run
from estr_jax.runtime import keys as runtime
from estr_jax.sampler import keys as sampler
from estr_jax.tasks import TASKS
from estr_jax.tasks import keys as tasks
from estr_jax.tasks.task import Task
from estr_jax.wire import keys as wire

Methods = Mapping[str, Method]
Tasks = Mapping[str, Task]


def keys(methods: Methods = METHODS, known_tasks: Tasks = TASKS) -> Keys:
  """Every key by its dotted name, in the order in which a person reads them."""
  return {
    **run.RUN,
    **tasks.keys(known_tasks),
    **model.MODEL,
    **learner.WARM_START,
    **objective.keys(methods),
    **learner.BATCH,
    **learner.OPTIMIZER,
    **sampler.SAMPLING,
    **lab.STALENESS,
    **rollout_queue.STALENESS,
    **rollout_queue.QUEUE,
    **wire.TRANSPORT,
    **model.mesh("mesh"),
    **runtime.SLICES,
    **learner.LEARNER,
    **run.CHECKPOINT,
    **run.EVAL,
  }


def defaults(known: Mapping[str, Key] | None = None) -> ConfigDict:
  """A config in which every key has its default."""
  config = ConfigDict()
  for name, key in (keys() if known is None else known).items():
    group = config
    *path, leaf = name.split(".")
    for part in path:
      if part not in group:
        group[part] = ConfigDict()
      group = group[part]
    # A key that takes numbers and words is of no one type.
    group[leaf] = key.default if key.word is None else FieldReference(key.default, field_type=object)
  return config


def flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
  """("a.b", value) of every leaf."""
  for key, value in tree.items():
    if isinstance(value, Mapping | ConfigDict):
      yield from flat(value, f"{path}{key}.")
    else:
      yield f"{path}{key}", value


def unknown(name: str, known: Mapping[str, Key]) -> UserError:
  """What to say of a key that is none."""
  return UserError(f"unknown config key {name}; the nearest known one is {nearest(name, known)}")


@dataclasses.dataclass(frozen=True)
class Settings:
  """A checked config, and what it names."""

  config: ConfigDict
  task: Task
  method: Method

  @property
  def loss_arguments(self) -> dict[str, Any]:
    """The keyword arguments of the loss. A tau that is to be calibrated is infinite until it is."""
    return _loss_arguments(self.config, self.method)

  @property
  def edge(self) -> str | None:
    """The edge that the config chooses for its loss; None where the loss has a fixed one, or none."""
    return self.config.loss.edge if "edge" in keywords(self.method.loss) else None

  @property
  def calibrated_fraction(self) -> float | None:
    """The share of tokens that the loss's tau is to mask, where it is to be calibrated."""
    return objective.calibrated_fraction(self.config)

  def changed(self, values: Mapping[str, Any]) -> "Settings":
    """The same with other values for some keys, by dotted name; not checked anew."""
    config = self.config.copy_and_resolve_references()
    for name, value in values.items():
      _set(config, name, value)
    return dataclasses.replace(self, config=config)


def _loss_arguments(config: ConfigDict, method: Method) -> dict[str, Any]:
  given = arguments(config.loss.name, method.loss, config.loss)
  return given if objective.calibrated_fraction(config) is None else given | {"tau": math.inf}


def make(
  config: ConfigDict | Mapping[str, Any], *, task: Task | None = None, loss: Loss | Method | None = None
) -> Settings:
  """Checked settings.

  Args:
    config: a whole one, or what differs from the defaults: {"steps": 3, "loss.name": "ppo"}, nested or with dots.
    task: one that the package does not have; the config's task.name becomes its name.
    loss: one that the package does not have; loss.name becomes its name, and loss.NAME.* the keys that it declares.

  Raises:
    UserError: a key is unknown, impossible, or contradicts another.
  """
  method = as_method(loss) if loss is not None else None
  methods = dict(METHODS) if method is None else {**METHODS, method.loss.__name__: method}
  all_tasks = dict(TASKS) if task is None else {**TASKS, task.name: task}
  known = keys(methods, all_tasks)
  chosen = {} if task is None else {"task.name": task.name}
  chosen |= {} if method is None else {"loss.name": method.loss.__name__}
  made = _whole(config, known, method) if isinstance(config, ConfigDict) else _overridden(config, known, chosen)
  for name, value in chosen.items():
    _set(made, name, value)
  _check_keys(made, known)
  _read_infinity(made, known)
  _check_values(made, known)
  chosen_task, chosen_method = all_tasks[made.task.name], methods[made.loss.name]
  for line in _rules(made, chosen_task, methods, chosen_method):
    raise UserError(line)
  return Settings(made, chosen_task, chosen_method)


def as_method(loss: Loss | Method) -> Method:
  """A loss of a user's own with its place in the field.

  Of a mere function nobody knows how much of the batch one token's loss reads, so it is taken for one that compares the
  samples of a group, and is refused more than one microbatch.
  """
  method = loss if isinstance(loss, Method) else Method(loss, "its own", "its own", "group", "a user's own")
  _check_loss(method.loss)
  return method


def _check_loss(loss: Loss) -> None:
  name = getattr(loss, "__name__", "")
  if not name.isidentifier():
    raise UserError(f"loss={loss!r} has no name; give a function, `def NAME(policy, batch, *, ...)`")
  shared = {key for key, _ in flat(defaults().loss)}
  if name in METHODS or name in defaults().loss:
    raise UserError(
      f"loss {name} is a name of the package's own (docs/methods.md, docs/config.md); call yours otherwise"
    )
  try:
    own = keys_of(loss)
  except (ValueError, NameError) as error:
    raise UserError(f"loss {error}") from error
  positional = [p.name for p in inspect.signature(loss).parameters.values() if p.kind is not p.KEYWORD_ONLY]
  if len(positional) != 2:
    raise UserError(
      f"loss {name} takes {', '.join(positional)} by position, not policy and batch alone; put what else it takes "
      "behind *, as keys"
    )
  for key in keywords(loss):
    if key not in own and key not in shared:
      raise UserError(f"loss {name} takes {key}, which has no default and is no key that losses share; give it one")


def _whole(config: ConfigDict, known: Keys, method: Method | None) -> ConfigDict:
  """A copy of a whole config, with the keys of a loss of the user's own, where it has none of them yet."""
  made = ConfigDict(config.copy_and_resolve_references().to_dict())
  if method is not None and method.loss.__name__ not in made.loss:
    made.loss[method.loss.__name__] = own_values(method.loss.__name__, defaults(known).loss)
  return made


def _overridden(overrides: Mapping[str, Any], known: Keys, chosen: Mapping[str, str]) -> ConfigDict:
  made = defaults(known)
  for name, value in flat(overrides):
    if name not in known:
      raise unknown(name, known)
    if name in chosen and value != chosen[name]:
      raise UserError(f"{name}={value} is not the one that was passed, {chosen[name]}; leave {name} out")
    value = value.item() if isinstance(value, np.generic) else value
    try:
      _set(made, name, value)
    except TypeError as error:
      raise UserError(known[name].complaint(name, value) or f"{name}={value!r}: {error}") from error
  return made


def _read_infinity(config: ConfigDict, known: Keys) -> None:
  """A key that takes words takes "inf" too: the command line gives its numbers as they are, but that one as a word."""
  for name, key in known.items():
    if key.word is not None and _get(config, name) == "inf":
      with config.ignore_type():
        _set(config, name, math.inf)


def _get(config: ConfigDict, name: str) -> Any:
  found: Any = config
  for part in name.split("."):
    found = found[part]
  return found


def _set(config: ConfigDict, name: str, value: Any) -> None:
  *path, leaf = name.split(".")
  for part in path:
    config = config[part]
  config[leaf] = value


def _check_keys(config: ConfigDict, known: Keys) -> None:
  given = dict(flat(config.to_dict()))
  for name in given:
    if name not in known:
      raise unknown(name, known)
  missing = [name for name in known if name not in given]
  if missing:
    raise UserError(f"config key {missing[0]} is missing; start from configs/default.py")


def _check_values(config: ConfigDict, known: Keys) -> None:
  """Each key for itself, then whether it has an effect."""
  values = dict(flat(config.to_dict()))
  for name, key in known.items():
    if (line := key.complaint(name, values[name])) is not None:
      raise UserError(line)
  for name, key in known.items():
    if values[name] == key.default:
      continue
    for idle in key.idle:
      if idle.when(config):
        raise UserError(f"{name}={values[name]} has no effect {idle.because}; leave it at its default, {key.default!r}")


def _rules(config: ConfigDict, task: Task, methods: Methods, method: Method) -> Iterator[str]:
  yield from wire.rules(config)
  yield from model.rules(config)
  yield from objective.rules(config, methods, _loss_arguments(config, method))
  yield from sampler.rules(config)
  yield from lab.rules(config)
  yield from learner.rules(config)
  yield from run.rules(config)
  yield from rollout_queue.rules(config)
  yield from tasks.rules(config, task)
