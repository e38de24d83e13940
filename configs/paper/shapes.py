"""The shapes of the paper's models, as their config.json has them, so that a plan needs no weights."""

from ml_collections import ConfigDict


def qwen2_5_7b(c: ConfigDict) -> None:
  m = c.model
  m.vocabulary = 152_064
  m.width, m.layers, m.heads, m.kv_heads, m.head_dim, m.mlp_width = 3584, 28, 28, 4, 128, 18_944
  m.rope_theta, m.norm_eps = 1e6, 1e-6
  m.qkv_bias, m.qk_norm, m.tied_head = True, False, False


def qwen3_30b_a3b(c: ConfigDict) -> None:
  m = c.model
  m.vocabulary = 151_936
  m.width, m.layers, m.heads, m.kv_heads, m.head_dim, m.mlp_width = 2048, 48, 32, 4, 128, 6144
  m.experts, m.experts_per_token, m.expert_mlp_width, m.norm_topk_prob = 128, 8, 768, True
  m.rope_theta, m.norm_eps = 1e6, 1e-6
  m.qkv_bias, m.qk_norm, m.tied_head = False, True, False
