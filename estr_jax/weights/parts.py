"""What a stream of weights consists of: a manifest, then the chunks of its blocks."""

from collections.abc import Mapping
from typing import NamedTuple

from estr_jax.weights.regions import Region


class Manifest(NamedTuple):
  """What a host is about to send."""

  version: int
  dtypes: Mapping[
    str, str
  ]  # by name the wanted parameters of which the host holds a piece; numpy's or ml_dtypes' names
  blocks: tuple[Region, ...]  # where its pieces and the wanted regions meet


class Chunk(NamedTuple):
  """Consecutive numbers of a block in C order: whole rows along one of its axes."""

  block: int  # index into the manifest
  offset: int  # bytes
  data: bytes  # little-endian
  crc32: int  # of data


Part = Manifest | Chunk
