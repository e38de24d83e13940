"""The hyper-parameters that each loss declares in its signature and docstring."""

import inspect
import math
import re

import numpy as np
import objective_batches
import pytest

from estr_jax.objective.losses import LOSSES
from estr_jax.options import keys_of

KEYS = {name: keys_of(loss) for name, loss in LOSSES.items()}
NUMBERS = {
  (name, key): declared
  for name, keys in KEYS.items()
  for key, declared in keys.items()
  if not isinstance(declared.default, str)
}


def accepting(value: float) -> set[tuple[str, str]]:
  """The numbers, as (loss, key), that may have a value."""
  return {(name, key) for (name, key), declared in NUMBERS.items() if declared.complaint(key, value) is None}


@pytest.mark.parametrize("name", LOSSES)
def test_docstrings_explain_the_keys_and_nothing_else(name):
  """Fails if a docstring explains a key that is gone or shared, or an entry is empty or cut off."""
  explained = re.findall(r"^  (\w+): ", inspect.getdoc(LOSSES[name]).partition("\nArgs:\n")[2], re.MULTILINE)
  assert explained == list(KEYS[name])
  assert all(declared.meaning.endswith(".") for declared in KEYS[name].values())


def test_words_declare_their_choices():
  """Fails if a word has no choices, loses them on the way, or has a default that is none of them."""
  for name, keys in KEYS.items():
    for key, it in keys.items():
      assert (name, key) in NUMBERS or it.default in it.choices, f"{name}.{key}"


def test_numbers_are_above_zero():
  """Fails if a number has no range, or one that takes 0, a negative number or NaN, or refuses its default."""
  assert accepting(0.0) == accepting(-1.0) == accepting(math.nan) == set()
  for (name, key), declared in NUMBERS.items():
    assert declared.complaint(key, declared.default) is None, f"{name}.{key}"


@pytest.mark.parametrize(("name", "key"), sorted(accepting(math.inf)))
def test_infinity_is_no_bound(name, key):
  """Fails if inf is a value of what is no bound, and makes a loss or its gradient NaN."""
  for seed in range(4):
    policy, batch = objective_batches.build(seed)
    found = objective_batches.run(name, policy, batch, **{key: math.inf})
    assert np.isfinite(found.value).all() and np.isfinite(found.gradient).all()


def test_fractions_and_ratios_end_at_one():
  """Fails if a fraction may be 1 or more, or a dual clip may cut ratios of 1."""
  named = {key: {number for number in NUMBERS if number[1] == key} for key in ("quantile", "share", "dual")}
  assert all(named.values())
  fractions = named["quantile"] | named["share"]
  assert fractions <= accepting(0.999) and not fractions & accepting(1.0)
  assert named["dual"] <= accepting(1.001) and not named["dual"] & accepting(1.0)


def test_a_key_without_a_meaning_is_refused():
  """Fails if a docstring may leave out a hyper-parameter that has a default."""

  def half_explained(policy, batch, *, edge: str, tau: float = 1.0, eps: float = 0.01):
    """A loss.

    Args:
      tau: the largest S that is kept.
    """

  with pytest.raises(ValueError, match=r"half_explained.* eps"):
    keys_of(half_explained)
