"""Tokenizers: what is encoded comes back, turns end where they should, and broken folders say so in one line."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from model_cases import TOOL_MESSAGES, TOOL_TEMPLATE, TOOLS

from estr_jax.errors import UserError
from estr_jax.model.tokenizers import CharTokenizer, FolderTokenizer

ALPHABET = "0123+=$"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {% if message['role'] == 'tool' %}
        {{ raise_exception('no tools here') }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


@pytest.fixture
def folder(tmp_path):
  """Byte-level tokens, one merge, and a template that counts on Hugging Face's treatment of blank lines."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocab = {token: i for i, token in enumerate([*alphabet, "ab"])}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("a", "b")]))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(list(SPECIALS))
  # As a fast tokenizer's file may be: with what has no place in a prompt.
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A <|endoftext|>", None, [(SPECIALS[0], 257)])
  tokenizer.enable_truncation(4)
  tokenizer.enable_padding(length=4)
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  write(tmp_path, "tokenizer_config.json", bos_token={"content": "<s>"}, eos_token="<|im_end|>")
  (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
  return tmp_path


def write(folder, name, **content):
  (folder / name).write_text(json.dumps(content))


def refusal(call, *arguments):
  with pytest.raises(UserError) as caught:
    call(*arguments)
  line = str(caught.value)
  assert "\n" not in line
  return line


@given(st.text(ALPHABET))
def test_characters_come_back(text):
  """Fails if two characters share an id, or a character has the padding's."""
  tokenizer = CharTokenizer(ALPHABET)
  ids = tokenizer.encode(text)
  assert len(ids) == len(text) and all(0 < i < tokenizer.vocab_size for i in ids)
  assert tokenizer.decode(ids) == text
  assert tokenizer.decode(np.asarray([*ids, tokenizer.pad_id, tokenizer.pad_id], np.int32)) == text


def test_character_ids_follow_the_alphabet():
  """Fails if the order, on which saved weights depend, or the end of a turn changes."""
  tokenizer = CharTokenizer(ALPHABET)
  assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 7, 8)
  assert tokenizer.encode("01$") == [1, 2, 7]
  assert [tokenizer.token_id(text) for text in ("=", "x", "01", "")] == [6, None, None, None]


def test_character_mistakes_are_one_line():
  """Fails if an unknown character becomes padding, a repeated one shifts the ids, or a turn cannot end."""
  assert "'x'" in refusal(CharTokenizer(ALPHABET).encode, "0x1")
  assert "chat" in refusal(CharTokenizer(ALPHABET).chat, [{"role": "user", "content": "1"}])
  assert "'0'" in refusal(CharTokenizer, "00$")
  assert "$" in refusal(CharTokenizer, "01")
  with pytest.raises(KeyError):
    CharTokenizer(ALPHABET).decode([-1])


def test_folder_encodes_text_and_nothing_else(folder):
  """Fails if the file's post-processor, truncation or padding reaches a prompt, or special tokens vanish on return."""
  tokenizer = FolderTokenizer(folder)
  text = "abba naïve 你好 <|im_end|>\n  ab"
  assert tokenizer.decode(tokenizer.encode(text)) == text
  assert len(tokenizer.encode("ccccccc")) == 7 and len(tokenizer.encode("c")) == 1
  assert tokenizer.vocab_size == 256 + 1 + len(SPECIALS)
  assert tokenizer.decode(np.asarray(tokenizer.encode("ab"), np.int32)) == "ab"
  assert tokenizer.token_id("ab") == 256 and tokenizer.token_id("ba") is None and tokenizer.token_id("") is None
  assert tokenizer.token_id("<|im_end|>") == tokenizer.eos_id == tokenizer.pad_id == 259


def test_chat_is_rendered_as_hugging_face_does(folder):
  """Fails without trim_blocks or lstrip_blocks, the special tokens, or the generation prompt."""
  tokenizer = FolderTokenizer(folder)
  ids = tokenizer.chat([{"role": "system", "content": "s"}, {"role": "user", "content": " ab "}])
  assert (
    tokenizer.decode(ids) == "<s><|im_start|>system\ns<|im_end|>\n<|im_start|>user\n ab <|im_end|>\n"
    "<|im_start|>assistant\n"
  )
  assert ids.count(259) == 2 and ids.count(258) == 3


def test_template_in_the_config_is_second_choice(folder):
  """Fails if chat_template.jinja does not go first, or a list of templates has no default."""
  config = {"eos_token": "<|im_end|>", "chat_template": "old"}
  write(folder, "tokenizer_config.json", **config)
  assert "old" not in FolderTokenizer(folder).decode(FolderTokenizer(folder).chat([]))
  (folder / "chat_template.jinja").unlink()
  assert FolderTokenizer(folder).decode(FolderTokenizer(folder).chat([])) == "old"
  config["chat_template"] = [{"name": "tools", "template": "tools"}, {"name": "default", "template": "named"}]
  write(folder, "tokenizer_config.json", **config)
  assert FolderTokenizer(folder).decode(FolderTokenizer(folder).chat([])) == "named"


def test_tools_are_offered_called_and_answered(folder):
  """Fails if schemas, calls, answers or a template's own settings do not reach it, or JSON is escaped for HTML."""
  (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
  tokenizer = FolderTokenizer(folder)
  text = tokenizer.decode(tokenizer.chat(TOOL_MESSAGES, TOOLS, enable_thinking=False))
  assert text == (
    "<|im_start|>system\n<tools>\n" + json.dumps(TOOLS[0], ensure_ascii=False) + "\n</tools><|im_end|>\n"
    "<|im_start|>user\nIs 2 < 3?<|im_end|>\n"
    '<|im_start|>assistant\n<tool_call>{\n "base": 10,\n "expression": "2 < 3"\n}calculate</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>true</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n<think></think>"
  )
  plain = tokenizer.decode(tokenizer.chat(TOOL_MESSAGES))
  assert "<tools>" not in plain and plain.endswith("assistant\n")


def test_a_template_for_tools_is_taken_where_there_are_tools(folder):
  """Fails if the template named tool_use is not known, or taken without tools."""
  templates = {"tool_use": "with {{ tools[0].function.name }}", "default": "without {{ tools is none }}"}
  (folder / "chat_template.jinja").unlink()
  listed = [{"name": name, "template": template} for name, template in templates.items()]
  write(folder, "tokenizer_config.json", eos_token="<|im_end|>", chat_template=listed)
  in_config = FolderTokenizer(folder)
  (folder / "additional_chat_templates").mkdir()
  (folder / "additional_chat_templates" / "tool_use.jinja").write_text(templates["tool_use"])
  (folder / "chat_template.jinja").write_text(templates["default"])
  for tokenizer in (in_config, FolderTokenizer(folder)):
    assert tokenizer.decode(tokenizer.chat([], TOOLS)) == "with calculate"
    assert tokenizer.decode(tokenizer.chat([])) == "without True"


@pytest.mark.parametrize("ends", [[257, 259], [259, 257]])
def test_turn_ends_where_the_template_ends_it(folder, ends):
  """Fails if the first of several ends is taken: the policy's turns would run past <|im_end|>."""
  write(folder, "generation_config.json", eos_token_id=ends)
  assert FolderTokenizer(folder).eos_id == 259
  (folder / "chat_template.jinja").unlink()
  assert FolderTokenizer(folder).eos_id == ends[0]


def test_generation_config_goes_before_the_tokenizers(folder):
  """Fails if eos_token of a base model's tokenizer ends an instruct model's turns, or padding ignores pad_token."""
  write(folder, "tokenizer_config.json", eos_token="<|endoftext|>", pad_token="<|endoftext|>")
  assert FolderTokenizer(folder).eos_id == 257
  write(folder, "generation_config.json", eos_token_id=259)
  assert FolderTokenizer(folder).eos_id == 259 and FolderTokenizer(folder).pad_id == 257


def test_folder_mistakes_are_one_line(folder, tmp_path_factory):
  """Fails if a missing or broken file, or a refusing template, gives a traceback."""
  messages = [{"role": "user", "content": "hi"}]
  assert "no tools here" in refusal(FolderTokenizer(folder).chat, [{"role": "tool", "content": ""}])
  (folder / "chat_template.jinja").write_text("{{ messages.append(1) }}")  # the sandbox
  assert str(folder) in refusal(FolderTokenizer(folder).chat, messages)
  (folder / "chat_template.jinja").write_text("{% for %}")
  assert "template" in refusal(FolderTokenizer, folder)
  (folder / "chat_template.jinja").unlink()
  assert "chat_template.jinja" in refusal(FolderTokenizer(folder).chat, messages)
  write(folder, "tokenizer_config.json", eos_token="<nowhere>")
  assert "<nowhere>" in refusal(FolderTokenizer, folder)
  write(folder, "tokenizer_config.json")
  assert "eos_token" in refusal(FolderTokenizer, folder)
  (folder / "tokenizer_config.json").write_text("{")
  assert "tokenizer_config.json" in refusal(FolderTokenizer, folder)
  (folder / "tokenizer.json").write_text('{"version": "1.0"}')
  assert "tokenizer.json" in refusal(FolderTokenizer, folder)
  assert "tokenizer.json" in refusal(FolderTokenizer, tmp_path_factory.mktemp("empty"))
