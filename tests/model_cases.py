"""Small decoders of every family, and parameters in which no number occurs twice."""

import dataclasses

import jax
import numpy as np

from estr_jax.model import decoder
from estr_jax.model.decoder import DecoderConfig

LLAMA = DecoderConfig(
  vocab_size=28,
  width=12,
  layers=3,
  heads=4,
  kv_heads=2,
  head_dim=6,
  mlp_width=10,
  rope_theta=5000.0,
  norm_eps=1e-5,
  qkv_bias=False,
  qk_norm=False,
  tied_head=True,
)
QWEN3_MOE = dataclasses.replace(
  LLAMA, qk_norm=True, tied_head=False, experts=4, experts_per_token=2, expert_mlp_width=8, norm_topk_prob=True
)
CONFIGS = {
  "llama": LLAMA,
  "qwen2": dataclasses.replace(LLAMA, qkv_bias=True, tied_head=False),
  "qwen3": dataclasses.replace(LLAMA, qk_norm=True),
  "qwen3_moe": QWEN3_MOE,
}


def make_params(config, dtype="float32"):
  """Distinct numbers everywhere, so that no transposition or swap goes unseen."""
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(dtype), decoder.abstract_params(config))
