"""The keys of the TPU slices that a run is launched on, and planned for."""

from estr_jax.options import POSITIVE, Key, Keys, under

SLICES: Keys = under(
  "slices",
  {
    "learner": Key("", "TPU slice of the learner, such as v5p:4x4x4"),
    "sampler": Key("", "TPU slice of one group of sampler hosts"),
    "samplers": Key(1, "groups of sampler hosts", POSITIVE),
  },
)
