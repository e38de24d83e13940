"""Asynchronous reinforcement learning of language models with entropy-scaled trust regions (ESTR).

    import estr_jax
    result = estr_jax.train({"mode": "sync", "steps": 20}, "runs/first")
    print(result.accuracy)

`train`, `evaluate`, `load`, `sample` and `compare_losses` stand in `estr_jax.run.api`; they are imported when they are
first used.
"""

from typing import TYPE_CHECKING, Any

from estr_jax.errors import UserError

if TYPE_CHECKING:
  from estr_jax.run.api import Decisions, Evaluation, Loaded, Result, compare_losses, evaluate, load, sample, train

__version__ = "0.1.0"

__all__ = [
  "Decisions",
  "Evaluation",
  "Loaded",
  "Result",
  "UserError",
  "compare_losses",
  "evaluate",
  "load",
  "sample",
  "train",
]


def __getattr__(name: str) -> Any:
  # Not at the top: who imports one room should not load all of them.
  if name not in __all__:
    raise AttributeError(f"module 'estr_jax' has no attribute {name!r}")
  from estr_jax.run import api

  return getattr(api, name)
