"""The hyper-parameters that each loss declares in its signature and docstring."""

import inspect
import math
import re

import pytest

from estr_jax.objective.losses import LOSSES, choices
from estr_jax.options import keys_of

KEYS = {name: keys_of(loss) for name, loss in LOSSES.items()}
NUMBERS = {
  (name, key): declared
  for name, keys in KEYS.items()
  for key, declared in keys.items()
  if not isinstance(declared.default, str)
}

# Where inf is a value: "no bound".
BOUNDS = {
  ("estr", "tau"),
  ("estr_learner_entropy", "tau"),
  ("estr_gini", "tau"),
  ("estr_power", "tau"),
  ("estr_one_sided", "tau"),
  ("estr_soft", "tau"),
  ("fixed_width", "width"),
  ("dual_clip", "dual"),
  ("gspo", "clip_low"),
  ("gspo", "clip_high"),
  ("gmpo", "band"),
  ("sat", "clip_low"),
  ("sat", "clip_high"),
  ("bandpo", "radius"),
  ("clip_cov", "high"),
  ("icepop", "high"),
  ("kpop", "phi"),
  ("ipo", "bound"),
  ("dppo_tv", "bound"),
  ("dppo_tv", "cap"),
  ("dppo_kl", "bound"),
  ("dppo_kl", "cap"),
  ("m2po", "bound"),
  ("trm", "bound"),
  ("opsm", "bound"),
  ("tis", "cap"),
  ("mis", "high"),
  ("cispo", "clip_low"),
  ("cispo", "clip_high"),
  ("gipo", "width"),
  ("vcpo", "cap"),
  ("stare", "dual"),
  ("score_centering", "high"),
}
FRACTIONS = {("sat", "quantile"), ("clip_cov", "share"), ("kl_cov", "share"), ("stare", "share")}
ABOVE_ONE = {("dual_clip", "dual"), ("stare", "dual")}


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
  declared = {name: {key: it.choices for key, it in keys.items() if it.choices} for name, keys in KEYS.items()}
  assert declared == {name: choices(loss) for name, loss in LOSSES.items()}
  for name, keys in KEYS.items():
    for key, it in keys.items():
      assert (name, key) in NUMBERS or it.default in it.choices, f"{name}.{key}"


def test_numbers_are_above_zero():
  """Fails if a number has no range, or one that takes 0, a negative number or NaN, or refuses its default."""
  assert accepting(0.0) == accepting(-1.0) == accepting(math.nan) == set()
  for (name, key), declared in NUMBERS.items():
    assert declared.complaint(key, declared.default) is None, f"{name}.{key}"


def test_infinity_is_no_bound():
  """Fails if a bound cannot be lifted, or what is no bound may be infinite."""
  assert accepting(math.inf) == BOUNDS


def test_fractions_and_ratios_end_at_one():
  """Fails if a fraction may be 1 or more, a dual clip may cut ratios of 1, or anything else stops at 1."""
  assert accepting(0.999) == NUMBERS.keys() - ABOVE_ONE
  assert accepting(1.0) == NUMBERS.keys() - ABOVE_ONE - FRACTIONS
  assert accepting(1.001) == accepting(1e6) == NUMBERS.keys() - FRACTIONS


def test_a_key_without_a_meaning_is_refused():
  """Fails if a docstring may leave out a hyper-parameter that has a default."""

  def half_explained(policy, batch, *, edge: str, tau: float = 1.0, eps: float = 0.01):
    """A loss.

    Args:
      tau: the largest S that is kept.
    """

  with pytest.raises(ValueError, match=r"half_explained.* eps"):
    keys_of(half_explained)
