"""What the hyper-parameters of the losses may be: annotations for the signatures, read by `estr_jax.options`."""

from typing import Annotated

from estr_jax.options import BOUND, FRACTION, POSITIVE, Range

Positive = Annotated[float, POSITIVE]
Fraction = Annotated[float, FRACTION]
Nats = Annotated[float, Range(above=0, unit="nats")]
Bound = Annotated[float, BOUND]
NatsBound = Annotated[float, Range(above=0, infinite=True, unit="nats")]
RatioBound = Annotated[float, Range(above=1, infinite=True)]  # never cuts a ratio of 1
