"""A sampler on eight devices draws what it draws on one."""

import json

from processes import on_eight_devices

_EIGHT = """
import dataclasses, json
import jax, numpy as np
from sampler_cases import CONTEXT, KEY, MODEL, TASK, prompts, run
from estr_jax.model import decoder
from estr_jax.model.sharding import make_mesh, shardings
from estr_jax.model.tokenizers import CharTokenizer
from estr_jax.sampler.engine import Engine, Sampling
from estr_jax.structs import Weights

tokenizer = CharTokenizer("abcdx$y")  # one more than there, for an even vocabulary
model = dataclasses.replace(MODEL, layers=1, vocab_size=8, experts=4, experts_per_token=2, expert_mlp_width=8)
short = [prompt for prompt in prompts(20) if len(prompt.tokens) < 8]
mesh = make_mesh({"data": 1, "fsdp": 2, "tensor": 2, "expert": 2})

def weights(version):
  params = decoder.init(model, jax.random.key(100 + version))
  return Weights(version, jax.tree.map(lambda leaf: leaf * (12.0 if leaf.ndim > 2 else 1.0), params))

versions = [weights(v) for v in range(2)]
places = shardings(versions[0].params, mesh)
sharded = [Weights(w.version, jax.device_put(w.params, places)) for w in versions]
found = {}
for name, mesh_or_none, source in (("one", None, versions), ("eight", mesh, sharded)):
  sampling = Sampling(4, CONTEXT, 3, 1.0, True, False, True)
  engine = Engine(model, TASK, tokenizer, sampling, KEY, mesh=mesh_or_none)
  found[name] = run(engine, short, lambda chunk: source[int(chunk > 2)])
far = max(float(np.abs(a.logprob - b.logprob).max()) for a, b in zip(found["one"], found["eight"]))
names = ("tokens", "version", "experts")
same = [all(np.array_equal(getattr(a, n), getattr(b, n)) for n in names) for a, b in zip(*found.values())]
print(json.dumps([len(same), all(same), far, len({t.version[t.mask].max() for t in found["one"]})]))
"""


def test_one_device_equals_eight():
  """Fails if a slot's keys or experts go to another device's slot, or new weights do not reach every device."""
  trajectories, same, far, versions = json.loads(on_eight_devices(_EIGHT))
  assert trajectories == 16 and same and far < 1e-4 and versions == 2
