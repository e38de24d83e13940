"""Tests run on the CPU, whatever accelerator is there: they compare with float64 references."""

import os

import hypothesis

# The time of the tests is that of compiling small programs, which then run for milliseconds: so LLVM is not asked to
# optimise, nor XLA to emit fusions by way of MLIR. Of two flags the later one holds, so XLA_FLAGS can say otherwise.
CHEAP = (
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
  "--xla_cpu_use_fusion_emitters=false",
)

# What takes more than some seconds of a processor, the longest first.
LONGEST = (
  "test_configs",
  "test_runtime_modes",
  "test_objective_calibration",
  "test_experiments_errors",
  "test_learner_step",
  "test_objective_losses",
  "test_model_moe",
  "test_runtime_async",
  "test_sampler_parity",
  "test_learner_routing",
  "test_planning_roofline",
  "test_objective_identities",
  "test_sampler_mesh",
)

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# The same examples on every machine and in every order, however slow the machine, and none of an earlier run.
hypothesis.settings.register_profile("tests", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("tests")


def pytest_configure(config):
  """Before JAX reads the flags, and for the processes that tests start; the whole runs of `-m slow` do optimise."""
  if config.option.markexpr != "slow":
    os.environ["XLA_FLAGS"] = " ".join((*CHEAP, os.environ.get("XLA_FLAGS", "")))
  config.option.loadscopereorder = False  # xdist would begin with the files of the most tests, which are the quick ones


def pytest_collection_modifyitems(items):
  """The long files first, so that the workers end together; the order within a file stays."""
  rank = {name: place for place, name in enumerate(LONGEST)}
  items.sort(key=lambda item: rank.get(item.path.stem, len(LONGEST)))
