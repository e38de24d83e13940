"""Loading onto devices: every part lands where its sharding says, and the host holds little more than its devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from model_cases import CONFIGS, make_params
from processes import on_eight_devices

from estr_jax.errors import UserError
from estr_jax.model import decoder, hf
from estr_jax.model.config import DecoderConfig

TESTS = Path(__file__).parent
ENV = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}

_EIGHT = """
import sys
import jax, numpy as np
from model_cases import CONFIGS, make_params
from estr_jax.errors import UserError
from estr_jax.model import decoder, hf
from estr_jax.model.sharding import make_mesh, shardings

mesh = make_mesh({"data": 1, "fsdp": 2, "tensor": 2, "expert": 2})
for kind, config in CONFIGS.items():
  places = shardings(decoder.abstract_params(config), mesh)
  for dtype in ("float32", "bfloat16"):
    _, loaded = hf.load(f"{sys.argv[1]}/{kind}", config, dtype, places=places)
    for wanted, place, found in zip(*map(jax.tree.leaves, (make_params(config), places, loaded))):
      assert found.sharding == place and found.dtype == dtype
      np.testing.assert_array_equal(np.asarray(found), wanted.astype(dtype))
gate = loaded["layers"]["mlp"]["gate"]
assert gate.addressable_shards[0].data.size * 8 == gate.size
hf.save(f"{sys.argv[1]}/again", config, hf.load(f"{sys.argv[1]}/{kind}", places=places)[1])
for axes, word in (((1, 1, 8, 1), "vocabulary 28"), ((2, 1, 4, 1), "kv_heads 2"), ((1, 1, 1, 8), "width 12")):
  try:
    shardings(decoder.abstract_params(config), make_mesh(dict(zip(("data", "fsdp", "tensor", "expert"), axes))))
  except UserError as error:
    assert word in str(error) and "mesh." in str(error), error
  else:
    raise AssertionError(word)
"""


def test_parts_land_on_eight_devices_as_their_sharding_says(tmp_path):
  """Fails if a slice of heads, experts or inputs is cut from the wrong rows of a tensor, or a bad mesh let through."""
  for kind, config in CONFIGS.items():
    hf.save(tmp_path / kind, config, make_params(config), shard_bytes=5000)
  on_eight_devices(_EIGHT, tmp_path)
  _, again = hf.load(tmp_path / "again")
  jax.tree.map(np.testing.assert_array_equal, again, make_params(CONFIGS[list(CONFIGS)[-1]]))


def test_splits_inside_a_head_are_refused():
  """Fails if a part of every head is taken for a run of rows."""
  (entry,) = [e for e in hf._entries(CONFIGS["llama"]) if e.path == ("layers", "attention", "q", "kernel")]
  half = (slice(None), slice(0, 2), slice(None))
  assert entry.stored_slices(half) == (slice(0, 12), slice(0, 12))
  with pytest.raises(UserError, match="attention/q/kernel"):
    entry.stored_slices((slice(None), slice(None), slice(0, 3)))


_PEAK = r"""
import json, re, sys
import jax, jax.numpy as jnp
from estr_jax.model import decoder, hf
from estr_jax.model.config import DecoderConfig
from estr_jax.model.sharding import make_mesh, shardings

def peak():  # not ru_maxrss, which a process inherits from the one that started it
  return int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read()).group(1)) * 1024

config = DecoderConfig(**hf.read_config(sys.argv[1]))
places = shardings(decoder.abstract_params(config), make_mesh(dict.fromkeys(("data", "fsdp", "tensor", "expert"), 1)))
jax.jit(jnp.sin)(jnp.ones(8)).block_until_ready()
before = peak()
_, params = hf.load(sys.argv[1], config, places=places)
print(json.dumps([peak() - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params))]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak where Linux shows it")
def test_a_model_of_two_gigabytes_is_held_once(tmp_path):
  """Fails if the file stays in memory once read, or a parameter is put together on the host and then copied."""
  config = DecoderConfig(
    vocab_size=32_000,
    width=1024,
    layers=8,
    heads=16,
    kv_heads=8,
    head_dim=64,
    mlp_width=4096,
    rope_theta=1e6,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
    tied_head=True,
    experts=16,
    experts_per_token=2,
    expert_mlp_width=1152,
    norm_topk_prob=True,
  )
  rng = np.random.default_rng(0)
  random = lambda leaf: rng.standard_normal(leaf.shape, np.float32)  # noqa: E731
  hf.save(tmp_path / "model", config, jax.tree.map(random, decoder.abstract_params(config)))
  command = [sys.executable, "-c", _PEAK, tmp_path / "model"]
  done = subprocess.run(command, env=os.environ | ENV, capture_output=True, text=True, timeout=280)
  assert done.returncode == 0, done.stderr
  growth, size = json.loads(done.stdout)
  print(f"{size / 2**30:.2f} GiB of parameters, peak memory grew by {growth / 2**30:.2f} GiB: {growth / size:.3f}")
  assert size > 2e9 and growth < 1.2 * size
