"""A Llama in llama.cpp's GGUF file as a Hugging Face style folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers

WEIGHTS = "model.safetensors"
_CONTROL = 3  # a control token, in GGUF's tokenizer.ggml.token_type

_TENSORS = {
  "token_embd": "model.embed_tokens",
  "output_norm": "model.norm",
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_SPECIALS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # Hugging Face's name: GGUF's

Say = Callable[[str], None]


def convert(gguf_path: Path, part: Path, say: Say) -> None:
  """Writes the folder's files from the GGUF."""
  import gguf  # an optional extra; its absence was reported before anything was fetched

  say("reading the GGUF")
  reader = gguf.GGUFReader(gguf_path)
  meta = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
  heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
  tensors = {}
  for number, tensor in enumerate(reader.tensors, start=1):
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    tensors[_tensor_name(tensor.name)] = _hugging_face_order(tensor.name, values, heads, kv_heads)
    if number % 68 == 0 or number == len(reader.tensors):
      say(f"dequantised {number} of {len(reader.tensors)} tensors")
  say("writing model.safetensors (0.54 GB)")
  safetensors.numpy.save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
  (part / WEIGHTS).chmod(0o644)  # the library makes it private; learner and sampler may be two users
  _write_json(part / "config.json", _model_settings(meta))
  _write_tokenizer(meta, part)


def _tensor_name(name: str) -> str:
  """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
  *block, key, suffix = name.split(".")
  prefix = f"model.layers.{block[1]}." if block else ""
  return f"{prefix}{_TENSORS[key]}.{suffix}"


def _hugging_face_order(name: str, values: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
  """Undoes llama.cpp's order of the query and key rows, in which the two that rotate together are neighbours."""
  counts = {"attn_q": heads, "attn_k": kv_heads}
  key = name.split(".")[-2]
  if key not in counts:
    return np.ascontiguousarray(values)
  rows, columns = values.shape
  pairs = values.reshape(counts[key], rows // counts[key] // 2, 2, columns)
  return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _model_settings(meta: dict[str, Any]) -> dict[str, Any]:
  heads = meta["llama.attention.head_count"]
  return {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": meta["llama.vocab_size"],
    "hidden_size": meta["llama.embedding_length"],
    "intermediate_size": meta["llama.feed_forward_length"],
    "num_hidden_layers": meta["llama.block_count"],
    "num_attention_heads": heads,
    "num_key_value_heads": meta["llama.attention.head_count_kv"],
    "head_dim": meta["llama.embedding_length"] // heads,
    "max_position_embeddings": meta["llama.context_length"],
    "rope_theta": meta["llama.rope.freq_base"],
    # The GGUF holds the float32 nearest to 1e-5.
    "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
    "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
    "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
  }


def _write_tokenizer(meta: dict[str, Any], part: Path) -> None:
  """Byte-level BPE; digits stand alone, then GPT-2's split."""
  tokens = meta["tokenizer.ggml.tokens"]
  merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
  controls = [token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"]) if kind == _CONTROL]
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [
      tokenizers.pre_tokenizers.Digits(individual_digits=True),
      tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in controls])
  tokenizer.save(str(part / "tokenizer.json"))
  special = {key: meta[f"tokenizer.ggml.{name}_token_id"] for key, name in _SPECIALS.items()}
  _write_json(
    part / "tokenizer_config.json",
    {
      **{f"{key}_token": tokens[i] for key, i in special.items()},
      "add_prefix_space": False,
      "clean_up_tokenization_spaces": False,
      "model_max_length": meta["llama.context_length"],
      "tokenizer_class": "PreTrainedTokenizerFast",
      "chat_template": meta["tokenizer.chat_template"],
    },
  )
  _write_json(part / "generation_config.json", {f"{k}_token_id": i for k, i in special.items() if k != "unk"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
