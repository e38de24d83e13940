"""The keys of the model and of the meshes that hold it."""

import math
from collections.abc import Iterator, Sequence

from ml_collections import ConfigDict

from estr_jax.model.decoder import REMAT
from estr_jax.model.sharding import BATCH_AXES
from estr_jax.options import NOT_NEGATIVE, POSITIVE, Idle, Key, Keys, Range, as_path, under

DTYPES = ("float32", "bfloat16")

MODEL: Keys = under(
  "model",
  {
    "folder": Key(
      "",
      "a Hugging Face style folder (config.json, safetensors, tokenizer.json); empty: a random model of the shape "
      "below, with the task's own alphabet",
    ),
    "vocabulary": Key(
      0,
      "size of the vocabulary; 0: the tokenizer's; a plan without model.folder needs it",
      Range("tokens", least=0),
    ),
    "width": Key(64, "width of the residual stream", POSITIVE),
    "layers": Key(2, "decoder layers", POSITIVE),
    "heads": Key(4, "query heads", POSITIVE),
    "kv_heads": Key(2, "key and value heads", POSITIVE),
    "head_dim": Key(16, "width of a head", POSITIVE),
    "mlp_width": Key(192, "width inside the MLP of a dense layer", POSITIVE),
    "rope_theta": Key(10_000.0, "base of the rotary positions (RoPE)", POSITIVE),
    "norm_eps": Key(1e-6, "added to the mean square in a norm", POSITIVE),
    "qkv_bias": Key(False, "whether queries, keys and values have a bias"),
    "qk_norm": Key(True, "whether queries and keys are normed"),
    "tied_head": Key(True, "whether the head is the embedding"),
    "experts": Key(0, "experts of every layer; 0: dense layers of mlp_width", NOT_NEGATIVE),
    "experts_per_token": Key(0, "experts that a token goes through", NOT_NEGATIVE),
    "expert_mlp_width": Key(0, "width inside the MLP of an expert", NOT_NEGATIVE),
    "norm_topk_prob": Key(False, "whether the weights of a token's experts sum to 1"),
    "dtype": Key("float32", "type of the computation; parameters and scoring are float32", choices=DTYPES),
    "remat": Key(
      "none", "what the backward pass keeps of each layer, the rest being recomputed", choices=sorted(REMAT)
    ),
  },
)


def mesh(group: str, idle: tuple[Idle, ...] = ()) -> Keys:
  """The keys of a mesh: devices along each axis of `sharding`."""
  axes = {
    "data": "devices with a copy of the weights each",
    "fsdp": "devices that share out rows and weights",
    "tensor": "devices that share out heads and widths",
    "expert": "devices that share out experts",
  }
  return under(group, {axis: Key(1, meaning, POSITIVE, idle=idle) for axis, meaning in axes.items()})


def undivided(c: ConfigDict, what: str, rows: int, mesh: str, more: Sequence[str] = ()) -> Iterator[str]:
  """The complaint where rows, or slots, do not divide by the axes of a mesh over which they lie, and by other keys."""
  keys = [*more, *(f"{mesh}.{axis}" for axis in BATCH_AXES)]
  parts = math.prod(_value(c, key) for key in keys)
  if rows % parts:
    yield f"{what} = {rows} does not divide by {' x '.join(keys)} = {parts}; change one of them"


def _value(c: ConfigDict, key: str) -> int:
  for part in key.split("."):
    c = c[part]
  return c


def rules(c: ConfigDict) -> Iterator[str]:
  """What is wrong between keys."""
  m = c.model
  if m.heads % m.kv_heads:
    yield f"model.heads={m.heads} is no multiple of model.kv_heads={m.kv_heads}"
  if m.head_dim % 2:
    yield f"model.head_dim={m.head_dim} is odd; rotary positions turn pairs"
  dense = m.experts == m.experts_per_token == m.expert_mlp_width == 0
  if not dense and not (1 <= m.experts_per_token <= m.experts and m.expert_mlp_width > 0):
    yield (
      f"model.experts={m.experts} with model.experts_per_token={m.experts_per_token} and model.expert_mlp_width="
      f"{m.expert_mlp_width}: set all three, with no more experts a token than there are, or leave all at 0"
    )
  if m.folder and not as_path("model.folder", m.folder).is_dir():
    yield f"model.folder={m.folder} does not exist; name a Hugging Face style folder (`make smollm2` makes one)"
