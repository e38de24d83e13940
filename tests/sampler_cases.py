"""A small multi-turn world for the sampler's tests: a random decoder says "x" now and then, and is answered."""

import dataclasses
import functools

import jax
import numpy as np

from estr_jax.model import decoder
from estr_jax.model.config import DecoderConfig
from estr_jax.model.tokenizers import CharTokenizer
from estr_jax.sampler.engine import Engine, Sampling
from estr_jax.structs import Prompt, Weights
from estr_jax.tasks.task import Task

TOKENIZER = CharTokenizer("abcdx$")
MODEL = DecoderConfig(
  vocab_size=TOKENIZER.vocab_size,
  width=16,
  layers=2,
  heads=4,
  kv_heads=2,
  head_dim=8,
  mlp_width=32,
  rope_theta=1e4,
  norm_eps=1e-6,
  qkv_bias=True,
  qk_norm=True,
  tied_head=False,
)
SPARSE = dataclasses.replace(MODEL, experts=4, experts_per_token=2, expert_mlp_width=8, norm_topk_prob=True)
KEY = jax.random.key(7)
CONTEXT = 24


def respond(question, turns):
  """Two answers, then the end."""
  return None if len(turns) > 2 else "abc"


TASK = Task(
  name="echo",
  alphabet="abcdx$",
  examples=lambda split: [],
  encode=lambda tokenizer, question: tokenizer.encode(question),
  stop=("x",),
  respond=respond,
  reward=lambda answer, turns: float(len(turns)),
  demonstrate=None,
)


@functools.cache
def _init(model):
  return jax.jit(functools.partial(decoder.init, model))


def weights(version: int, model=MODEL) -> Weights:
  """Random parameters, much larger than at initialisation, so that entropies differ from token to token."""
  params = _init(model)(jax.random.key(100 + version))
  return Weights(version, jax.tree.map(lambda leaf: leaf * (12.0 if leaf.ndim > 2 else 1.0), params))


def prompts(count: int) -> list[Prompt]:
  """Of different lengths."""
  texts = ["abcd", "a", "dcbadcbadc", "bb", "cab"]
  return [
    Prompt(i, i // 2, np.array(TOKENIZER.encode(texts[i % len(texts)]), np.int32), "", "echo") for i in range(count)
  ]


def engine(
  *,
  model=MODEL,
  slots=4,
  chunk=3,
  temperature=1.0,
  greedy=(),
  rebuild_cache=False,
  context=CONTEXT,
  record_vocabulary=False,
  record_routing=False,
) -> Engine:
  sampling = Sampling(slots, context, chunk, temperature, rebuild_cache, record_vocabulary, record_routing)
  return Engine(model, TASK, TOKENIZER, sampling, KEY, greedy=greedy)


def run(engine: Engine, prompts, weights_at) -> list:
  """Continuous batching; the weights of chunk k are weights_at(k)."""
  waiting, finished, chunk = list(prompts), [], 0
  while waiting or engine.free < engine.slots:
    engine.set_weights(weights_at(chunk))
    engine.admit([waiting.pop(0) for _ in range(min(engine.free, len(waiting)))])
    finished += engine.advance()
    chunk += 1
  return sorted(finished, key=lambda trajectory: trajectory.prompt_id)
