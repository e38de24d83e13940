"""The shape of a decoder, as all that builds, reads or counts one takes it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """The shape of a decoder. Hashable, so that it can be a static argument."""

  vocab_size: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp_width: int
  rope_theta: float
  norm_eps: float
  qkv_bias: bool  # Qwen2.5
  qk_norm: bool  # Qwen3
  tied_head: bool
  experts: int = 0  # of every layer; 0: none, and the layers are dense
  experts_per_token: int = 0
  expert_mlp_width: int = 0
  norm_topk_prob: bool = False  # whether the weights of a token's experts sum to 1
  dtype: str = "float32"  # of the computation; parameters, softmax and scoring are float32
  remat: str = "none"  # a key of decoder.REMAT
