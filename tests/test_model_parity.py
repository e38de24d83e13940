"""Our decoder and tokenizer against the `transformers` implementation; needs the extra `parity`."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from model_cases import TOOL_MESSAGES, TOOL_TEMPLATE, TOOLS

from estr_jax.model import decoder, hf
from estr_jax.model.tokenizers import FolderTokenizer

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

SHAPE = {
  "vocab_size": 97,
  "hidden_size": 48,
  "intermediate_size": 80,
  "num_hidden_layers": 3,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "rope_theta": 20000.0,
  "rms_norm_eps": 1e-5,
  "max_position_embeddings": 128,
}
EXPERTS = {
  "head_dim": 16,
  "num_experts": 8,
  "num_experts_per_tok": 3,
  "moe_intermediate_size": 24,
  "norm_topk_prob": True,
}
KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")
QUESTIONS = (
  "What is 3+4?",
  "Why is the sky blue?",
  "Write a line of Python that adds 12345 and 678.",
  "Où est la bibliothèque ?",
  "Tell me a joke about  two   spaces.\nAnd a new line!",
)


def our_logits(config, params, tokens_BT):
  hidden_BTD = decoder.forward(config, params, jnp.asarray(tokens_BT), jnp.ones(tokens_BT.shape, jnp.int32))
  return np.asarray(hidden_BTD @ decoder.head_kernel(config, params))


def their_logits(model, tokens_BT):
  with torch.no_grad():
    return model(torch.asarray(tokens_BT)).logits.float().numpy()


def difference(ours, theirs):
  return float(np.abs(ours - theirs).max())


def make_reference(kind, tied, **changes):
  """A random model in which biases and norm scales, which start as 0 and 1, count as well."""
  torch.manual_seed(0)
  model_class, config_class, extra = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {"head_dim": 16}),
    "qwen3_moe": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig, EXPERTS),
  }[kind]
  model = model_class(config_class(**SHAPE | extra | changes, tie_word_embeddings=tied)).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.2 * torch.randn_like(parameter))
  return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_reference(tmp_path, kind, tied):
  """Fails on interleaved rotation, a wrong theta or eps, norms after the rotation, or heads in other groups."""
  model = make_reference(kind, tied)
  model.save_pretrained(tmp_path)
  config, params = hf.load(tmp_path)
  assert (config.rope_theta, config.norm_eps, config.tied_head) == (20000.0, 1e-5, tied)
  tokens_BT = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, 40))
  ours, theirs = our_logits(config, params, tokens_BT), their_logits(model, tokens_BT)
  print(f"{kind} tied={tied}: max |difference| {difference(ours, theirs):.1e} of {np.abs(theirs).max():.1f}")
  assert difference(ours, theirs) < 1e-4


def log_probs(logits, tokens):
  """Of each token after the first, given those before it; of either library's logits."""
  log_softmax = torch.log_softmax if isinstance(logits, torch.Tensor) else jax.nn.log_softmax
  return log_softmax(logits[0, :-1], -1)[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_the_reference(tmp_path, kind):
  """Fails if a gradient is lost or doubled: through shared embeddings, repeated keys, or the router's weights."""
  model = make_reference(kind, tied=True)
  model.save_pretrained(tmp_path / "model")
  config, params = hf.load(tmp_path / "model")
  tokens_BT = np.random.default_rng(2).integers(0, SHAPE["vocab_size"], (1, 24))

  def total(params):
    hidden_BTD = decoder.forward(config, params, jnp.asarray(tokens_BT), jnp.ones(tokens_BT.shape, jnp.int32))
    return log_probs(hidden_BTD @ decoder.head_kernel(config, params), tokens_BT[0]).sum()

  ours = jax.jit(jax.grad(total))(params)
  log_probs(model(torch.asarray(tokens_BT)).logits, tokens_BT[0]).sum().backward()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.copy_(parameter.grad)
  model.save_pretrained(tmp_path / "gradient")
  theirs = hf.load(tmp_path / "gradient")[1]
  for (path, wanted), found in zip(jax.tree_util.tree_leaves_with_path(theirs), jax.tree.leaves(ours)):
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error < 1e-4, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_the_reference(tmp_path, kind):
  """Fails if a token that is written into the cache is seen, or routed, otherwise than in a whole sequence."""
  model = make_reference(kind, tied=False)
  model.save_pretrained(tmp_path)
  config, params = hf.load(tmp_path)
  prompt_BT = np.random.default_rng(3).integers(0, SHAPE["vocab_size"], (1, 7))
  generated = model.generate(
    torch.asarray(prompt_BT), max_new_tokens=64, min_new_tokens=64, do_sample=False, use_cache=True, pad_token_id=0
  )
  cache = decoder.empty_cache(config, 1, 80)

  @jax.jit
  def step(tokens, position, cache):
    hidden, cache = decoder.extend(config, params, tokens, position, jnp.arange(1), cache)
    return jnp.argmax(hidden[:, -1] @ decoder.head_kernel(config, params), axis=-1)[:, None], cache

  token, cache = step(jnp.asarray(prompt_BT), jnp.arange(7)[None], cache)
  found = [token.item()]
  for position in range(7, 70):
    token, cache = step(token, jnp.full((1, 1), position), cache)
    found.append(token.item())
  assert found == generated[0, 7:].tolist() and len(set(found)) > 8


def test_weights_that_are_not_normalised_equal_the_reference(tmp_path):
  """Fails if norm_topk_prob is ignored."""
  model = make_reference("qwen3_moe", tied=False, norm_topk_prob=False)
  model.save_pretrained(tmp_path)
  config, params = hf.load(tmp_path)
  tokens_BT = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, 40))
  assert difference(our_logits(config, params, tokens_BT), their_logits(model, tokens_BT)) < 1e-4


@pytest.mark.parametrize("with_source", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_reference_reads_what_we_save(tmp_path, kind, with_source):
  """Fails if a folder that `save` wrote, in shards, is another model to transformers."""
  model = make_reference(kind, tied=False)
  model.save_pretrained(tmp_path / "theirs")
  config, params = hf.load(tmp_path / "theirs")
  source = tmp_path / "theirs" if with_source else None
  hf.save(tmp_path / "ours", config, params, source=source, shard_bytes=50_000)
  again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
  assert {p.dtype for p in again.parameters()} == {torch.float32}
  assert all(torch.equal(wanted, found) for wanted, found in zip(model.parameters(), again.parameters(), strict=True))
  tokens_BT = np.random.default_rng(1).integers(0, SHAPE["vocab_size"], (1, 20))
  np.testing.assert_array_equal(their_logits(again, tokens_BT), their_logits(model, tokens_BT))


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("settings", [{}, {"enable_thinking": False}])
def test_tool_prompts_equal_the_reference(tmp_path, tools, settings):
  """Fails if a conversation with tools is rendered in another way."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  model = tokenizers.models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[])
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TOOL_TEMPLATE
  ).save_pretrained(tmp_path)
  ours, theirs = FolderTokenizer(tmp_path), transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  rendered = theirs.apply_chat_template(
    TOOL_MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True, **settings
  )
  ids = ours.chat(TOOL_MESSAGES, tools or (), **settings)
  assert ours.decode(ids) == rendered and ids == theirs(rendered, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def smollm2():
  """The folder that `make smollm2` wrote."""
  if "ESTR_JAX_SMOLLM2" not in os.environ:
    pytest.skip("set ESTR_JAX_SMOLLM2 to the folder that experiments.fetch_smollm2 wrote")
  return Path(os.environ["ESTR_JAX_SMOLLM2"])


def test_smollm2_tokens(smollm2):
  """Fails if text, digits, special tokens or the chat template are split or rendered in another way."""
  ours, theirs = FolderTokenizer(smollm2), transformers.AutoTokenizer.from_pretrained(smollm2)
  for question in QUESTIONS:
    ids = theirs(question, add_special_tokens=False)["input_ids"]
    assert ours.encode(question) == ids
    assert ours.decode(ids) == question == theirs.decode(ids)
    for messages in (
      [{"role": "user", "content": question}],
      [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}],
      [{"role": r, "content": question} for r in ("user", "assistant", "user")],
    ):
      rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
      chat = theirs(rendered, add_special_tokens=False)["input_ids"]
      assert ours.chat(messages) == chat
      assert ours.decode(chat) == rendered
  assert (ours.eos_id, ours.pad_id, ours.vocab_size) == (theirs.eos_token_id, theirs.pad_token_id, len(theirs))


def test_smollm2_logits(smollm2):
  """Fails if the decoder departs from the reference on real weights (both read the converted folder)."""
  tokenizer = FolderTokenizer(smollm2)
  config, params = hf.load(smollm2)
  model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
  for question in QUESTIONS:
    tokens_BT = np.asarray([tokenizer.chat([{"role": "user", "content": question}])])
    ours, theirs = our_logits(config, params, tokens_BT), their_logits(model, tokens_BT)
    print(f"{question!r}: {tokens_BT.shape[1]} tokens, max |difference| {difference(ours, theirs):.1e}")
    assert difference(ours, theirs) < 1e-3
