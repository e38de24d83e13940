"""What a learner host holds of the weights, and when it fetches that from its devices."""

import re

import numpy as np
import pytest
from weights_cases import whole

from estr_jax.weights.store import Piece, Snapshot, VersionGone, WeightStore


class Lazy:
  """Numbers whose way to the host is counted."""

  dtype = np.dtype(np.int64)

  def __init__(self):
    self.fetched = 0

  def __array__(self, dtype=None, copy=None):
    self.fetched += 1
    return np.arange(3)


def test_a_piece_is_fetched_when_it_is_streamed_and_once():
  """Fails if a version is fetched when it is published or named, or again at every request, or unasked."""
  lazy, unasked, region = Lazy(), Lazy(), whole("w", np.arange(3))
  snapshot = Snapshot(4, [Piece(region, lazy), Piece(whole("u", np.arange(3)), unasked)])
  for _ in range(2):
    parts = snapshot.stream([region])
    next(parts)
    assert lazy.fetched <= 1
    (chunk,) = parts
    assert chunk.data == np.arange(3).tobytes()
  assert (lazy.fetched, unasked.fetched) == (1, 0)


def test_the_store_holds_the_newest_and_the_one_before_that_was_named():
  """Fails if an older version is let in, or a named one is gone too soon, or one that nobody can ask for is kept."""
  store = WeightStore()
  assert store.newer(-1, 0) is None and store.exactly(4, 0) is None
  store.publish(4, [])
  assert store.newer(4, 0) is None and store.exactly(5, 0) is None
  assert store.newer(3, 0).version == 4
  with pytest.raises(ValueError, match="below 4"):
    store.publish(3, [])
  store.publish(5, [])
  assert store.newer(3, 0).version == 5
  assert store.exactly(4, 0).version == 4
  store.publish(6, [])
  store.publish(7, [])
  for gone, held in ((5, "[7]"), (6, "[7]")):  # nobody was told of 6
    with pytest.raises(VersionGone, match=re.escape(f"version {gone} of the weights is gone; this host holds {held}")):
      store.exactly(gone, 0)


def test_a_store_that_does_not_name_versions_keeps_two():
  """Fails if a host drops a version of which the first host may just have told a sampler."""
  store = WeightStore(leads=False)
  for version in (4, 5, 6):
    store.publish(version, [])
  assert [store.exactly(version, 0).version for version in (5, 6)] == [5, 6]
  with pytest.raises(VersionGone, match=r"holds \[5, 6\]"):
    store.exactly(4, 0)
