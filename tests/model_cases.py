"""Small decoders of every family, and parameters in which no number occurs twice."""

import dataclasses

import jax
import numpy as np

from estr_jax.model import decoder
from estr_jax.model.config import DecoderConfig

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


# In the manner of Qwen: schemas in the system turn, calls and answers between tags, thinking that can be switched off.
TOOL_TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + (call.function.arguments | tojson(indent=1, sort_keys=true)) + call.function.name }}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- endgeneration %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""
TOOLS = [
  {
    "type": "function",
    "function": {
      "name": "calculate",
      "description": "The value of <expression> & no more; naïve",
      "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
  }
]
CALL = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": "2 < 3", "base": 10}}}
TOOL_MESSAGES = [
  {"role": "user", "content": "Is 2 < 3?"},
  {"role": "assistant", "content": "", "tool_calls": [CALL]},
  {"role": "tool", "content": "true"},
]


def make_params(config, dtype="float32"):
  """Distinct numbers everywhere, so that no transposition or swap goes unseen."""
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(dtype), decoder.abstract_params(config))
