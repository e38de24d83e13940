"""Hugging Face folders: the layout of every tensor, round trips, and one clear line for each broken folder."""

import dataclasses
import json
import tracemalloc

import jax
import numpy as np
import pytest
import safetensors.numpy
from model_cases import CONFIGS, LLAMA, QWEN3_MOE, make_params

from estr_jax.errors import UserError
from estr_jax.model import hf


def edit(folder, **changes):
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder, change):
  """Applies `change` to the dict of tensors of a single-file folder."""
  tensors = safetensors.numpy.load_file(folder / hf.SINGLE)
  change(tensors)
  safetensors.numpy.save_file(tensors, folder / hf.SINGLE)


@pytest.fixture
def folder(tmp_path):
  """An untied Qwen2 in one file."""
  hf.save(tmp_path / "model", CONFIGS["qwen2"], make_params(CONFIGS["qwen2"]))
  return tmp_path / "model"


def refusal(call, *arguments, **keywords):
  with pytest.raises(UserError) as caught:
    call(*arguments, **keywords)
  line = str(caught.value)
  assert "\n" not in line
  return line


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [2**31, 1500])
@pytest.mark.parametrize("kind", CONFIGS)
def test_round_trip_is_bit_equal(tmp_path, kind, shard_bytes, dtype):
  """Fails if a parameter is lost, cast on its way, or put under another name or into another shard than indexed."""
  config, params = CONFIGS[kind], make_params(CONFIGS[kind], dtype)
  hf.save(tmp_path / "model", config, params, shard_bytes=shard_bytes)
  assert (tmp_path / "model" / hf.INDEX).exists() == (shard_bytes < 2**31)
  loaded_config, loaded = hf.load(tmp_path / "model", dtype=dtype)
  assert loaded_config == config
  assert jax.tree.structure(loaded) == jax.tree.structure(params)
  for wanted, found in zip(jax.tree.leaves(params), jax.tree.leaves(loaded)):
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


def test_jax_arrays_are_written_as_numpy_arrays_are(tmp_path):
  """Fails if `save` needs NumPy leaves."""
  params = jax.tree.map(jax.numpy.asarray, make_params(LLAMA))
  hf.save(tmp_path / "model", LLAMA, params)
  jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "model")[1], params)


@pytest.mark.parametrize("kind", CONFIGS)
def test_tensors_lie_where_hugging_face_puts_them(tmp_path, kind):
  """Fails if heads and head dimensions trade places, a kernel is not transposed, or gate and up are swapped."""
  c, params = CONFIGS[kind], make_params(CONFIGS[kind])
  hf.save(tmp_path / "model", c, params)
  stored = safetensors.numpy.load_file(tmp_path / "model" / hf.SINGLE)
  layers, attention, mlp = params["layers"], params["layers"]["attention"], params["layers"]["mlp"]
  for i in range(c.layers):
    layer = f"model.layers.{i}"
    for name, heads in {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}.items():
      tensor = stored[f"{layer}.self_attn.{name}_proj.weight"]
      for h in range(heads):
        rows = slice(h * c.head_dim, (h + 1) * c.head_dim)
        np.testing.assert_array_equal(tensor[rows].T, attention[name]["kernel"][i, :, h])
        if c.qkv_bias:
          bias = stored[f"{layer}.self_attn.{name}_proj.bias"]
          np.testing.assert_array_equal(bias[rows], attention[name]["bias"][i, h])
    for h in range(c.heads):
      columns = slice(h * c.head_dim, (h + 1) * c.head_dim)
      o = stored[f"{layer}.self_attn.o_proj.weight"]
      np.testing.assert_array_equal(o[:, columns].T, attention["o"]["kernel"][i, h])
    if c.qk_norm:
      for name in ("q_norm", "k_norm"):
        np.testing.assert_array_equal(stored[f"{layer}.self_attn.{name}.weight"], attention[name]["scale"][i])
    for name in ("gate", "up", "down"):
      if not c.experts:
        np.testing.assert_array_equal(stored[f"{layer}.mlp.{name}_proj.weight"].T, mlp[name]["kernel"][i])
      for e in range(c.experts):
        np.testing.assert_array_equal(stored[f"{layer}.mlp.experts.{e}.{name}_proj.weight"].T, mlp[name][i, e])
    if c.experts:
      np.testing.assert_array_equal(stored[f"{layer}.mlp.gate.weight"].T, mlp["router"]["kernel"][i])
    np.testing.assert_array_equal(stored[f"{layer}.input_layernorm.weight"], layers["attention_norm"]["scale"][i])
    np.testing.assert_array_equal(stored[f"{layer}.post_attention_layernorm.weight"], layers["mlp_norm"]["scale"][i])
  np.testing.assert_array_equal(stored["model.embed_tokens.weight"], params["embed"]["embedding"])
  np.testing.assert_array_equal(stored["model.norm.weight"], params["final_norm"]["scale"])
  assert ("lm_head.weight" in stored) != c.tied_head
  if not c.tied_head:
    np.testing.assert_array_equal(stored["lm_head.weight"].T, params["head"]["kernel"])


def test_loading_holds_one_copy_of_the_model(tmp_path):
  """Fails if all tensors are read before they are stacked, or stacked and then cast as a whole."""
  config = dataclasses.replace(LLAMA, layers=40, width=64, mlp_width=256)
  hf.save(tmp_path / "model", config, make_params(config))
  tracemalloc.start()
  _, params = hf.load(tmp_path / "model", dtype="bfloat16")
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 1.4 * sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_compute_settings_of_the_caller_are_kept(folder):
  """Fails if `load` returns its own dtype and remat, or compares them with the folder."""
  wanted = dataclasses.replace(CONFIGS["qwen2"], dtype="bfloat16", remat="full")
  assert hf.load(folder, wanted)[0] == wanted


def test_other_config_is_refused(folder):
  """Fails if a caller's config is believed instead of the folder's."""
  line = refusal(hf.load, folder, dataclasses.replace(CONFIGS["qwen2"], rope_theta=1e6))
  assert "rope_theta" in line and "5000.0" in line and "1000000.0" in line


@pytest.mark.parametrize(
  "changes, word",
  [
    ({"model_type": "mistral"}, "mistral"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"use_sliding_window": True, "sliding_window": 8}, "sliding-window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
    ({"attention_bias": True}, "attention_bias"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"model_type": "qwen3_moe"}, "num_experts"),
  ],
)
def test_config_that_the_decoder_does_not_compute_is_refused(folder, changes, word):
  """Fails if a setting that changes the function is ignored."""
  edit(folder, **changes)
  line = refusal(hf.load, folder)
  assert word in line and "config.json" in line


@pytest.mark.parametrize(
  "changes",
  [
    {"rope_scaling": None},
    {"rope_scaling": {"rope_type": "default"}},
    {"use_sliding_window": False, "sliding_window": 131072},
    {"layer_types": ["full_attention"] * 3},
    {"attention_bias": False},
  ],
)
def test_settings_that_are_off_are_accepted(folder, changes):
  """Fails if the presence of a key is taken for its use: every Qwen2.5 names a window that it does not use."""
  edit(folder, **changes)
  assert hf.load(folder)[0] == CONFIGS["qwen2"]


def test_rotary_settings_of_newer_files_are_read(folder):
  """Fails if rope_parameters is ignored: theta would silently be the default."""
  settings = json.loads((folder / "config.json").read_text())
  del settings["rope_theta"]
  settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 777.0}
  (folder / "config.json").write_text(json.dumps(settings))
  assert hf.read_config(folder)["rope_theta"] == 777.0


def test_head_dim_and_kv_heads_follow_from_the_heads_where_absent(tmp_path):
  """Fails if absent keys of an old Llama file get another value than width / heads and heads."""
  settings = {
    "model_type": "llama",
    "vocab_size": 5,
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 7,
  }
  (tmp_path / "config.json").write_text(json.dumps(settings))
  read = hf.read_config(tmp_path)
  assert (read["head_dim"], read["kv_heads"], read["rope_theta"], read["tied_head"]) == (4, 3, 10000.0, False)
  edit(tmp_path, model_type="qwen3", num_key_value_heads=1)
  assert "head_dim" in refusal(hf.read_config, tmp_path)


def test_broken_folders_are_refused_in_one_line(folder):
  """Fails if a missing, surplus or misshapen tensor, or an unreadable file, gives a traceback or random weights."""
  k_bias = "model.layers.1.self_attn.k_proj.bias"

  def widen(tensors):
    tensors[k_bias] = np.zeros(99, np.float32)

  rewrite(folder, widen)
  line = refusal(hf.load, folder)
  assert k_bias in line and "(99,)" in line and "(12,)" in line and hf.SINGLE in line
  rewrite(folder, lambda tensors: tensors.pop(k_bias))
  line = refusal(hf.load, folder)
  assert k_bias in line and hf.SINGLE in line
  edit(folder, model_type="llama")
  assert "self_attn.k_proj.bias" in refusal(hf.load, folder)  # the biases that a Llama would ignore
  (folder / hf.SINGLE).write_bytes((folder / hf.SINGLE).read_bytes()[:-5])
  assert hf.SINGLE in refusal(hf.load, folder)
  (folder / hf.SINGLE).unlink()
  assert hf.SINGLE in refusal(hf.load, folder)
  (folder / "config.json").write_text("{")
  assert "config.json" in refusal(hf.load, folder)
  (folder / "config.json").unlink()
  assert "config.json" in refusal(hf.load, folder)


def test_dense_layers_among_sparse_ones_are_refused(tmp_path):
  """Fails if a layer without experts is looked for, or a newer file's name of the number of experts is not known."""
  folder = tmp_path / "model"
  hf.save(folder, QWEN3_MOE, make_params(QWEN3_MOE))
  settings = json.loads((folder / "config.json").read_text())
  settings["num_local_experts"] = QWEN3_MOE.experts
  del settings["num_experts"]
  (folder / "config.json").write_text(json.dumps(settings))
  assert hf.load(folder)[0] == QWEN3_MOE
  edit(folder, decoder_sparse_step=2)
  assert "decoder_sparse_step" in refusal(hf.load, folder)
  edit(folder, decoder_sparse_step=1, mlp_only_layers=[0])
  assert "mlp_only_layers" in refusal(hf.load, folder)


def test_weights_of_another_dtype_are_refused(folder):
  """Fails if quantised numbers are read without their scales."""

  def quantise(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)

  rewrite(folder, quantise)
  line = refusal(hf.load, folder)
  assert "model.norm.weight" in line and "I8" in line and "BF16" in line


def test_untied_model_without_a_head_is_refused(folder):
  """Fails if a missing head is replaced by the embedding although the config says that they differ."""
  rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
  line = refusal(hf.load, folder)
  assert "lm_head.weight" in line and "tie_word_embeddings" in line


def test_repeated_head_of_a_tied_model_is_ignored(folder):
  """Fails if a file that stores a tied head twice is refused, or its head is returned beside the embedding."""
  edit(folder, tie_word_embeddings=True)
  assert "head" not in hf.load(folder)[1]


def test_broken_shards_are_refused_in_one_line(tmp_path):
  """Fails if a shard that is missing, or does not hold what the index says, gives a traceback."""
  folder = tmp_path / "model"
  hf.save(folder, LLAMA, make_params(LLAMA), shard_bytes=1500)
  index = json.loads((folder / hf.INDEX).read_text())
  first, last = (index["weight_map"][t] for t in ("model.embed_tokens.weight", "model.norm.weight"))
  assert first != last
  index["weight_map"]["model.norm.weight"] = first
  (folder / hf.INDEX).write_text(json.dumps(index))
  line = refusal(hf.load, folder)
  assert "model.norm.weight" in line and first in line
  (folder / first).unlink()
  assert first in refusal(hf.load, folder)


def test_source_lends_its_tokenizer_and_settings(folder, tmp_path):
  """Fails if a saved policy cannot be used where its source could, or keeps the dtype of the source."""
  (folder / "tokenizer.json").write_text("{}")
  (folder / "chat_template.jinja").write_text("hello")
  (folder / hf.TEMPLATES).mkdir()
  (folder / hf.TEMPLATES / "tool_use.jinja").write_text("tools")
  edit(folder, max_position_embeddings=77, dtype="float32")
  out = tmp_path / "out"
  hf.save(out, CONFIGS["qwen2"], make_params(CONFIGS["qwen2"], "bfloat16"), source=folder)
  settings = json.loads((out / "config.json").read_text())
  assert settings["max_position_embeddings"] == 77 and settings["torch_dtype"] == "bfloat16" and "dtype" not in settings
  assert (out / "tokenizer.json").read_text() == "{}" and (out / "chat_template.jinja").read_text() == "hello"
  assert (out / hf.TEMPLATES / "tool_use.jinja").read_text() == "tools"
  other = dataclasses.replace(CONFIGS["qwen2"], rope_theta=1.0)
  assert "rope_theta" in refusal(hf.save, tmp_path / "other", other, make_params(other), source=folder)


def test_save_overwrites_nothing_and_leaves_no_half(folder, tmp_path):
  """Fails if an existing folder is written into, or a failure leaves a folder or a scratch file behind."""
  before = (folder / hf.SINGLE).read_bytes()
  assert str(folder) in refusal(hf.save, folder, LLAMA, make_params(LLAMA))
  assert (folder / hf.SINGLE).read_bytes() == before
  params = make_params(LLAMA)
  del params["final_norm"]
  with pytest.raises(KeyError):
    hf.save(tmp_path / "half", LLAMA, params)
  assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_shape_without_an_architecture_is_refused(tmp_path):
  """Fails if a decoder with both biases and qk-norm is written as a model that drops one of them."""
  both = dataclasses.replace(LLAMA, qkv_bias=True, qk_norm=True)
  assert "qk_norm" in refusal(hf.save, tmp_path / "model", both, make_params(both))
  plain = dataclasses.replace(QWEN3_MOE, qk_norm=False)
  assert "experts" in refusal(hf.save, tmp_path / "model", plain, make_params(plain))
