"""config.json in the Hugging Face layout: which decoder it asks for, and what to write for one of ours."""

import json
from pathlib import Path
from typing import Any

from estr_jax.errors import UserError
from estr_jax.model.config import DecoderConfig

# What must be there. Qwen3 gives no default for head_dim that follows from the others.
SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
REQUIRED = {
  "llama": SHAPE,
  "qwen2": (*SHAPE, "num_key_value_heads"),
  "qwen3": (*SHAPE, "num_key_value_heads", "head_dim"),
  "qwen3_moe": (*SHAPE, "num_key_value_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
}
# What the architectures assume where config.json is silent.
ABSENT: dict[str, Any] = {
  "hidden_act": "silu",
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0,
  "tie_word_embeddings": False,
  "norm_topk_prob": False,
  "decoder_sparse_step": 1,
}
ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "qwen3_moe": "Qwen3MoeForCausalLM",
}


def read_config(folder: str | Path) -> dict[str, Any]:
  """The keyword arguments of DecoderConfig (all but dtype and remat) that config.json asks for.

  Raises:
    UserError: no config.json, or it asks for something that the decoder does not compute.
  """
  path = Path(folder) / "config.json"
  c = ABSENT | read_json(path, "point to a Hugging Face style folder")
  kind = c.get("model_type")
  if kind not in ARCHITECTURES:
    raise UserError(f"{path}: model_type {kind!r} is not supported: take one of {', '.join(ARCHITECTURES)}")
  if "num_local_experts" in c:  # the newer name
    c.setdefault("num_experts", c["num_local_experts"])
  for key in REQUIRED[kind]:
    if key not in c:
      raise UserError(f"{path} lacks {key!r}: take the config.json that belongs to the weights")

  # Newer files keep the rotary settings together, older ones have rope_theta and rope_scaling.
  rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
  layer_types = set(c.get("layer_types") or ())
  refused = {
    f"hidden_act {c['hidden_act']!r} (only silu)": c["hidden_act"] != "silu",
    f"scaled rotary positions {rope!r}": rope.get("rope_type", rope.get("type", "default")) != "default",
    "partial_rotary_factor": (rope | c).get("partial_rotary_factor", 1.0) != 1.0,
    "sliding-window attention": c.get("use_sliding_window") or bool(layer_types - {"full_attention"}),
    "attention_bias": c.get("attention_bias"),  # it would put a bias on the output projection as well
    "mlp_bias": c.get("mlp_bias"),
    "quantised weights (quantization_config)": c.get("quantization_config"),
    "dense layers among sparse ones (decoder_sparse_step, mlp_only_layers)": kind == "qwen3_moe"
    and (c["decoder_sparse_step"] != 1 or c.get("mlp_only_layers")),
  }
  for what, asked in refused.items():
    if asked:
      raise UserError(f"{path} asks for {what}, which the decoder does not compute: take other weights")

  heads = c["num_attention_heads"]
  sparse = kind == "qwen3_moe"
  return {
    "vocab_size": c["vocab_size"],
    "width": c["hidden_size"],
    "layers": c["num_hidden_layers"],
    "heads": heads,
    "kv_heads": c.get("num_key_value_heads") or heads,
    "head_dim": c.get("head_dim") or c["hidden_size"] // heads,
    "mlp_width": c["intermediate_size"],
    "rope_theta": float(rope.get("rope_theta", c["rope_theta"])),
    "norm_eps": float(c["rms_norm_eps"]),
    "qkv_bias": kind == "qwen2",
    "qk_norm": kind in ("qwen3", "qwen3_moe"),
    "tied_head": c["tie_word_embeddings"],
    "experts": c["num_experts"] if sparse else 0,
    "experts_per_token": c["num_experts_per_tok"] if sparse else 0,
    "expert_mlp_width": c["moe_intermediate_size"] if sparse else 0,
    "norm_topk_prob": c["norm_topk_prob"] if sparse else False,
  }


def check_same(folder: Path, held: dict[str, Any], config: DecoderConfig) -> None:
  """Raises UserError naming the first field in which `config` differs from what the folder holds (`read_config`)."""
  for field, value in held.items():
    wanted = getattr(config, field)
    if wanted != value:
      raise UserError(f"{folder / 'config.json'} says {field} {value!r}, but {wanted!r} was asked for: make them agree")


def settings(config: DecoderConfig) -> dict[str, Any]:
  """config.json for a decoder that came from no folder."""
  c = config
  if c.qkv_bias and c.qk_norm:
    raise UserError("no Hugging Face architecture has both qkv_bias and qk_norm: switch one off to write such a folder")
  if c.experts and not c.qk_norm:
    raise UserError("no Hugging Face architecture has experts without qk_norm: switch it on to write such a folder")
  kind = "qwen3_moe" if c.experts else "qwen2" if c.qkv_bias else "qwen3" if c.qk_norm else "llama"
  sparse = {
    "num_experts": c.experts,
    "num_experts_per_tok": c.experts_per_token,
    "moe_intermediate_size": c.expert_mlp_width,
    "norm_topk_prob": c.norm_topk_prob,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
  }
  return {
    "architectures": [ARCHITECTURES[kind]],
    "model_type": kind,
    "vocab_size": c.vocab_size,
    "hidden_size": c.width,
    "num_hidden_layers": c.layers,
    "num_attention_heads": c.heads,
    "num_key_value_heads": c.kv_heads,
    "head_dim": c.head_dim,
    "intermediate_size": c.mlp_width,
    "rope_theta": c.rope_theta,
    "rms_norm_eps": c.norm_eps,
    "hidden_act": "silu",
    "tie_word_embeddings": c.tied_head,
    **(sparse if c.experts else {}),
  }


def source_settings(source: Path, config: DecoderConfig) -> dict[str, Any]:
  """config.json of a folder of the same shape; it may say more than a DecoderConfig can."""
  check_same(source, read_config(source), config)
  return read_json(source / "config.json", "point to a Hugging Face style folder")


def read_json(path: Path, advice: str) -> dict[str, Any]:
  """The object in a file that has to be there; `advice` is what to do where it is not."""
  if not path.is_file():
    raise UserError(f"{path} does not exist: {advice}")
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as e:
    raise UserError(f"{path} is not JSON ({e}): fetch the file again") from e
  if not isinstance(value, dict):
    raise UserError(f"{path} holds no JSON object: fetch the file again")
  return value
