"""Writes the pages that are made from the code: docs/methods.md, docs/config.md and configs/default.py.

python -m experiments.pages
"""

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path

from configs.recipes import RECIPES
from estr_jax.errors import UserError
from estr_jax.objective import losses
from estr_jax.objective.advantages import ESTIMATORS
from estr_jax.objective.aggregation import AGGREGATIONS
from estr_jax.objective.penalties import KL_ESTIMATORS
from estr_jax.options import keys_of
from estr_jax.run import command_line, pages

ROOT = Path(__file__).parent.parent

_HEAD = """# Methods

Written by `make pages`; a test fails where this file and the code differ. The contract stands
in `estr_jax/objective/losses/__init__.py`.

Three policies score a token: mu sampled it, q is the learner before the update, pi is being updated. The edges of the
policy triangle are E = pi / mu ("direct"), U = pi / q ("proximal") and B = q / mu; "E|U" is where `loss.edge` chooses,
"E or B" where it does so for a mask or weight. A method of fixed edge that takes `edge` all the same clips there.
Masks and weights are detached; shapers are differentiated. A loss of scope token or sequence does not depend on how a
batch is split into microbatches; one of scope group or batch takes its statistics from the microbatch that it sees.
Hyper-parameters without a default of their own take `loss.clip_low`, `loss.clip_high` and `loss.edge`.
"""


def methods_page() -> str:
  """docs/methods.md."""
  methods = []
  for name, method in losses.METHODS.items():
    own = keys_of(method.loss)
    hyper = ", ".join(f"{key} {own[key].default}" if key in own else key for key in losses.keywords(method.loss))
    methods.append((f"`{name}`", method.edge, method.operator, method.scope, hyper or "none", method.source))
  recipes = [(f"`{name}`", ", ".join(f"`{key}={value}`" for key, value in r.items())) for name, r in RECIPES.items()]
  parts = [
    _HEAD,
    "## Losses (`loss.name`)\n",
    _table(("method", "edge", "operator", "scope", "hyper-parameters", "source"), methods),
    "## Advantages (`advantage.name`)\n",
    _table(("estimator", "definition"), _described(ESTIMATORS)),
    "## Aggregation (`loss.aggregation`)\n",
    _table(("name", "weight of a policy token"), _described(AGGREGATIONS)),
    "## KL penalties (`loss.kl.estimator`, against `loss.kl.anchor`)\n",
    _table(("estimator", "definition"), _described(KL_ESTIMATORS)),
    "## Recipes (`configs/recipes.py:NAME`)\n",
    _table(("recipe", "keys"), recipes),
  ]
  return "\n".join(parts)


def _described(functions: dict) -> list[tuple[str, str]]:
  """The first paragraph of every docstring."""
  paragraphs = {name: inspect.getdoc(function).split("\n\n")[0] for name, function in functions.items()}
  return [(f"`{name}`", " ".join(text.split())) for name, text in paragraphs.items()]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
  lines = [head, ("---",) * len(head), *rows]
  return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
  "configs/default.py": pages.default_config,
  "docs/config.md": pages.table,
  "docs/methods.md": methods_page,
}


def program() -> int:
  argparse.ArgumentParser(
    prog="python -m experiments.pages", description="Writes the pages that are made from the code."
  ).parse_args()
  for name, text in PAGES.items():
    try:
      (ROOT / name).write_text(text(), encoding="utf-8")
    except OSError as error:
      raise UserError(f"{name} cannot be written: {error.strerror}") from error
    print(name)
  return 0


if __name__ == "__main__":
  command_line.main(program)
