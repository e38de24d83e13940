"""Tests run on the CPU, whatever accelerator is there: they compare with float64 references."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
