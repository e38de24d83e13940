"""Tokenizers: text to token ids and back, and messages to a prompt.

`CharTokenizer` serves the character-level tasks; `FolderTokenizer` reads the files that lie beside
Hugging Face weights.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from estr_jax.errors import UserError

CHAR_EOS = "$"
# {"role": ..., "content": ...}; an assistant's may have "tool_calls" too, a list of {"type": "function", "function":
# {"name": ..., "arguments": {...}}}, and a tool's answer has the role "tool".
Message = Mapping[str, Any]
Tool = Mapping[
  str, Any
]  # {"type": "function", "function": {"name": ..., "description": ..., "parameters": a JSON schema}}


class Tokenizer(Protocol):
  """What the other rooms need to know of a tokenizer."""

  vocab_size: int
  eos_id: int  # ends a turn of the policy
  pad_id: int  # may equal eos_id

  def encode(self, text: str) -> list[int]:
    """Token ids of `text`; nothing is added before or after."""

  def decode(self, ids: Iterable[int]) -> str:
    """The text of `ids`, special tokens spelled out."""

  def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = (), **settings: Any) -> list[int]:
    """Token ids of a conversation, up to where the assistant is to speak.

    Args:
      messages: so far.
      tools: that the assistant may call.
      settings: what else the model's template asks for, such as enable_thinking.
    """

  def token_id(self, text: str) -> int | None:
    """The id of the one token that stands for `text`; None where it takes several or cannot be written."""


class CharTokenizer:
  """One token a character: id 0 pads and decodes to nothing, ids 1.. follow `alphabet`, and "$" ends a turn."""

  def __init__(self, alphabet: str):
    if CHAR_EOS not in alphabet:
      raise UserError(f'the alphabet {alphabet!r} lacks "{CHAR_EOS}", which ends a turn: add it')
    if len(set(alphabet)) != len(alphabet):
      twice = next(c for c in alphabet if alphabet.count(c) > 1)
      raise UserError(f"the alphabet {alphabet!r} holds {twice!r} twice: name each character once")
    self._id = {character: i for i, character in enumerate(alphabet, start=1)}
    self._text = dict(enumerate(["", *alphabet]))  # not a list, where id -1 would find a character
    self.vocab_size = len(self._text)
    self.pad_id = 0
    self.eos_id = self._id[CHAR_EOS]

  def encode(self, text: str) -> list[int]:
    """Raises UserError for a character that is not in the alphabet."""
    for character in text:
      if character not in self._id:
        alphabet = "".join(self._id)
        raise UserError(f"{character!r} in {text!r} is not in the tokenizer's alphabet {alphabet!r}: add it there")
    return [self._id[character] for character in text]

  def decode(self, ids: Iterable[int]) -> str:
    return "".join(self._text[i] for i in ids)

  def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = (), **settings: Any) -> NoReturn:
    """Raises UserError: characters know no roles."""
    raise UserError("a character tokenizer has no chat template: take a model with one, or a task without chat")

  def token_id(self, text: str) -> int | None:
    return self._id.get(text)


class FolderTokenizer:
  """Reads tokenizer.json and, where they are, tokenizer_config.json, generation_config.json and chat_template.jinja.

  Raises:
    UserError: no readable tokenizer.json in the folder, or no token is named that ends a turn.
  """

  def __init__(self, folder: str | Path):
    self._folder = Path(folder)
    path = self._folder / "tokenizer.json"
    if not path.is_file():
      raise UserError(f"{self._folder} has no tokenizer.json: point to a Hugging Face style folder that has one")
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises a bare Exception for a malformed file
      raise UserError(f"{path} is no tokenizer that can be read ({_one_line(e)}): fetch the file again") from e
    # A file may ask for cut or padded output; a prompt must stay whole.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    config = _read_json(self._folder / "tokenizer_config.json")
    self._specials = {key: _content(config[key]) for key in ("bos_token", "eos_token", "pad_token") if config.get(key)}
    sources = _template_sources(self._folder, config)
    try:
      self._templates = {name: _environment().from_string(source) for name, source in sources.items()}
    except jinja2.TemplateError as e:
      raise UserError(f"the chat template of {self._folder} cannot be read: {_one_line(e)}") from e
    self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
    self.eos_id = self._end_of_turn()
    self.pad_id = self._special_id("pad_token") if "pad_token" in self._specials else self.eos_id

  def encode(self, text: str) -> list[int]:
    """A byte for which the vocabulary has no token is dropped, as Hugging Face does."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Iterable[int]) -> str:
    return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

  def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = (), **settings: Any) -> list[int]:
    """Raises UserError where the folder has no chat template, or its template refuses the messages."""
    return self.encode(self._render(messages, add_generation_prompt=True, tools=tools, **settings))

  def token_id(self, text: str) -> int | None:
    ids = self.encode(text)
    return ids[0] if len(ids) == 1 and self.decode(ids) == text else None

  def _render(
    self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[Tool] = (), **settings: Any
  ) -> str:
    template = self._templates.get("tool_use" if tools and "tool_use" in self._templates else "default")
    if template is None:
      raise UserError(
        f"{self._folder} has no chat template: add chat_template.jinja, or take a model that was trained to chat"
      )
    variables = {
      **self._specials,
      "messages": list(messages),
      "tools": list(tools) or None,
      "documents": None,
      "add_generation_prompt": add_generation_prompt,
      **settings,
    }
    try:
      return template.render(variables)
    except jinja2.TemplateError as e:
      raise UserError(f"the chat template of {self._folder} refuses the messages: {_one_line(e)}") from e

  def _special_id(self, key: str) -> int:
    token = self._specials[key]
    token_id = self._tokenizer.token_to_id(token)
    if token_id is None:
      raise UserError(f"tokenizer_config.json of {self._folder} names {key} {token!r}, which tokenizer.json lacks")
    return token_id

  def _end_of_turn(self) -> int:
    """Of the tokens that end a generation, the one that the chat template puts after an assistant's words.

    A model may name several (end of text, end of turn), in either order.
    """
    ends = _read_json(self._folder / "generation_config.json").get("eos_token_id")
    if ends is None and "eos_token" in self._specials:
      ends = self._special_id("eos_token")
    if ends is None:
      raise UserError(
        f"{self._folder} names no token that ends a turn: "
        "add eos_token_id to generation_config.json or eos_token to tokenizer_config.json"
      )
    ends = list(ends) if isinstance(ends, list) else [ends]
    if len(ends) == 1 or "default" not in self._templates:
      return ends[0]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    written = [i for i in self.encode(self._render(turns, add_generation_prompt=False)) if i in ends]
    return written[-1] if written else ends[0]


class _Generation(jinja2.ext.Extension):
  """{% generation %} marks an assistant's words for other libraries; the text between is rendered as it stands."""

  tags = {"generation"}  # noqa: RUF012

  def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
  """Chat templates come with the weights, so they run in a sandbox; set up as Hugging Face does.

  There is no clock (`strftime_now`): a prompt must not depend on the day; templates have a fixed date to fall back on.
  """
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
  )

  def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

  def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
  ) -> str:
    # Unlike jinja2's own, without HTML escapes.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

  environment.globals["raise_exception"] = raise_exception
  environment.filters["tojson"] = tojson
  return environment


def _template_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
  """Chat templates by name, of which "default" and "tool_use" are used.

  They stand in files, or else in tokenizer_config.json, one or a list with names.
  """
  template = config.get("chat_template") or []
  listed = template if isinstance(template, list) else [{"name": "default", "template": template}]
  paths = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
  if (folder / "chat_template.jinja").is_file():
    paths["default"] = folder / "chat_template.jinja"
  if paths:
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
  return {entry["name"]: entry["template"] for entry in listed}


def _read_json(path: Path) -> dict[str, Any]:
  """The object in the file; empty where there is no such file, for these files are optional."""
  if not path.is_file():
    return {}
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except ValueError as e:
    raise UserError(f"{path} is not JSON ({_one_line(e)}): fetch the file again") from e


def _content(token: str | dict[str, Any]) -> str:
  return token if isinstance(token, str) else token["content"]


def _one_line(error: Exception) -> str:
  return " ".join(str(error).split())
