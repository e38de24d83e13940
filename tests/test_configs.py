"""Every config runs: its smoke form, end to end in one process."""

import io
import json

import jax
import pytest
import tokenizers

from configs import default, quickstart, recipes, smollm2_sums
from configs.paper import browsecomp_plus, dapo_math, gsm8k_multiturn
from estr_jax.model import decoder, hf
from estr_jax.model.config import DecoderConfig
from estr_jax.observe.terminal import View
from estr_jax.observe.writers import read
from estr_jax.run import learner, options

TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
  """A random two-layer Llama with a byte-level tokenizer and a chat template, as Hugging Face lays it out."""
  folder = tmp_path_factory.mktemp("model") / "llama"
  vocab = {token: i for i, token in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
  model = DecoderConfig(
    vocab_size=tokenizer.get_vocab_size(),
    width=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_width=32,
    rope_theta=1e4,
    norm_eps=1e-5,
    qkv_bias=False,
    qk_norm=False,
    tied_head=True,
  )
  hf.save(folder, model, decoder.init(model, jax.random.key(0)))
  tokenizer.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
  return folder


def train(c, cache, workdir) -> list[dict]:
  c.mode = "sync"
  c.cache_dir = str(cache)
  with View("test", c.steps, file=io.StringIO()) as view:
    learner.train(options.make(c), workdir, view)
  return read(workdir / "metrics.jsonl")


def test_quickstart_smoke(cache, tmp_path):
  """Fails if the warm start, the task or a key of the quickstart is broken."""
  rows = train(quickstart.get_config("smoke"), cache, tmp_path)
  assert [row["step"] for row in rows] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_recipes_smoke(cache, tmp_path, name):
  """Fails if a recipe names a loss, a penalty or a record that does not reach the step."""
  rows = train(recipes.get_config(f"{name},smoke"), cache, tmp_path)
  assert [row["step"] for row in rows] == [0, 1, 2]


def test_smollm2_sums_smoke(cache, chat_folder, tmp_path):
  """Fails if a Hugging Face folder cannot be trained by the program that trains the quickstart."""
  c = smollm2_sums.get_config("smoke")
  c.model.folder = str(chat_folder)
  c.sampling.context = 120  # the tokens of this folder are bytes
  rows = train(c, cache, tmp_path)
  assert [row["step"] for row in rows] == [0, 1, 2]


@pytest.mark.parametrize("config", [gsm8k_multiturn, dapo_math, browsecomp_plus])
def test_the_papers_smoke(cache, tmp_path, config):
  """Fails if the small form of a paper config cannot be trained, or is of another family or recipe than the large."""
  c, large = config.get_config("smoke"), config.get_config()
  assert c.mode == large.mode == "async"
  assert bool(c.model.experts) == bool(large.model.experts)
  for key in ("loss", "advantage", "optimizer"):
    assert c[key] == large[key]
  for key in ("qkv_bias", "qk_norm", "tied_head", "norm_topk_prob", "remat"):
    assert c.model[key] == large.model[key]
  options.make(c)
  c.steps = 1
  assert [row["step"] for row in train(c, cache, tmp_path)] == [0, 1]


def test_default_one_step(cache, tmp_path):
  """Fails if the defaults alone cannot run."""
  c = default.get_config()
  c.steps = 1
  c.batch.groups = 2
  c.eval.prompts = c.eval.every_prompts = 4
  assert [row["step"] for row in train(c, cache, tmp_path)] == [0, 1]


@pytest.mark.parametrize("config", [quickstart, recipes, smollm2_sums, gsm8k_multiturn, dapo_math, browsecomp_plus])
def test_an_unknown_argument_is_refused(config):
  """Fails if a misspelt :smoke trains the whole thing."""
  with pytest.raises(ValueError, match="unknown"):
    config.get_config("smok")
