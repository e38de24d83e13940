"""The keys of the connection between learner and samplers."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from estr_jax.model.keys import DTYPES
from estr_jax.options import Key, Keys, under
from estr_jax.wire.security import is_loopback

TRANSPORT: Keys = under(
  "transport",
  {
    "address": Key("127.0.0.1:0", "HOST:PORT of the learner; port 0 picks a free one"),
    "weights_dtype": Key("float32", "of the weights on the wire and in the sampler", choices=DTYPES),
    "tls_certificate": Key("", "PEM file; beyond loopback needed, with the token"),
    "tls_key": Key("", "PEM file; learner only"),
    "token_file": Key("", "file with the secret that learner and samplers share"),
  },
)


def rules(c: ConfigDict) -> Iterator[str]:
  """What is wrong between keys. Raises UserError where the address is no HOST:PORT."""
  t = c.transport
  if not is_loopback(t.address) and not (t.tls_certificate and t.token_file):
    yield (
      f"transport.address={t.address} is beyond loopback: name transport.tls_certificate and transport.token_file too, "
      "or take 127.0.0.1"
    )
