"""The keys of staleness that is set exactly."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from estr_jax.options import Key, Keys, Range, under

STALENESS: Keys = under(
  "staleness",
  {
    "intra": Key(0, "simulated: versions crossed inside one trajectory", Range("versions", least=0)),
    "inter": Key(0, "simulated: versions between its end and the update", Range("versions", least=0)),
    "segment_tokens": Key(8, "simulated: policy tokens under one version", Range("tokens", above=0)),
  },
)


def rules(c: ConfigDict) -> Iterator[str]:
  """What is wrong between keys."""
  s = c.staleness
  if (s.intra or s.inter) and c.mode != "simulated":
    yield (
      f"staleness.intra={s.intra} and staleness.inter={s.inter} are set exactly in mode=simulated only, and mode is "
      f"{c.mode}; choose that mode, or bound it with staleness.max in mode=async"
    )
