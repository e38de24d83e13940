"""What is written from the declared keys: configs/default.py, docs/config.md, and the help of a group."""

import textwrap
from collections.abc import Iterator

from estr_jax.errors import UserError
from estr_jax.options import Key, nearest
from estr_jax.run.options import keys

_WIDTH = 120

_DEFAULT_HEAD = '''"""Every key of a configuration, with its default; the other configs change what they need.

    python -m experiments.train --config=configs/default.py --workdir=DIR

trains the character-level `calculator` with the defaults below. An unknown key is an error. Written by `make pages`
from the rooms' declarations (estr_jax/*/keys.py, and each loss for itself); a test fails where they differ.
"""

from ml_collections import ConfigDict, FieldReference


def _number_or_word(value: float) -> FieldReference:
  """A key that takes numbers and strings."""
  return FieldReference(value, field_type=object)


def get_config() -> ConfigDict:
  c = ConfigDict()
'''

_TABLE_HEAD = """# Config keys

Written by `make pages` from the declarations (`estr_jax/*/keys.py`; the keys of a loss from its signature and
docstring); a test fails where they differ. `--config.KEY=VALUE` sets a key; `--help=GROUP` lists a group. Where the
last column says that a key has no effect, another value than its default is refused.

Of the losses: mu is the policy that sampled a token, pi the one that is updated, q the learner's before the update.
r is pi / mu, or pi / q on the proximal edge; delta = log pi - log mu; H is the entropy of mu, and
S = delta^2 / (H + eps). A is the advantage, W the product of a sequence's ratios. "Ours" is a default of this package;
"the paper's" is ESTR's (arXiv 2607.22186), "BRACE's" is that of a sibling paper of the same group.
"""


_COLUMNS = ("| key | default | unit | allowed | meaning | no effect |", "|---|---|---|---|---|---|")


def groups() -> list[str]:
  """The first parts of the keys' names, in order."""
  return list(dict.fromkeys(name.partition(".")[0] for name in keys() if "." in name))


def _allowed(key: Key) -> str:
  """What a value may be, in words; empty for whatever the type allows."""
  word = f"or {key.word.said}" if key.word is not None else ""
  return "; ".join(part for part in (", ".join(key.choices), key.range.said(), word) if part)


def _comment(key: Key) -> str:
  """What the key means, and in brackets its unit and what it may be."""
  choices = "one of " * bool(key.choices)
  facts = "; ".join(part for part in (key.range.unit, choices + _allowed(key)) if part)
  return f"{key.meaning} [{facts}]" if facts else key.meaning


def default_config() -> str:
  """configs/default.py."""
  return _DEFAULT_HEAD + "".join(f"{line}\n" if line else "\n" for line in _assignments()) + "  return c\n"


def _assignments() -> Iterator[str]:
  made: set[str] = set()
  for name, key in keys().items():
    path = name.split(".")[:-1]
    for depth in range(1, len(path) + 1):
      group = ".".join(path[:depth])
      if group not in made:
        made.add(group)
        if depth == 1:
          yield ""
        yield f"  c.{group} = ConfigDict()"
    value = f"_number_or_word({key.default!r})" if key.word is not None else _literal(key.default)
    line = f"  c.{name} = {value}"
    comment = _comment(key)
    if len(line) + len(comment) + 4 <= _WIDTH:
      yield f"{line}  # {comment}"
    else:
      yield from textwrap.wrap(comment, _WIDTH, initial_indent="  # ", subsequent_indent="  # ")
      yield line


def _literal(value: bool | int | float | str) -> str:
  return f'"{value}"' if isinstance(value, str) else repr(value)


def table() -> str:
  """docs/config.md."""
  lines = [_TABLE_HEAD]
  last = None
  for name, key in keys().items():
    group = name.partition(".")[0] if "." in name else "the run"
    if group != last:
      last = group
      lines += [f"\n## {group}\n", *_COLUMNS]
    idle = "; ".join(idle.because for idle in key.idle)
    cells = (f"`{name}`", f"`{_literal(key.default)}`", key.range.unit, _allowed(key), key.meaning.rstrip("."), idle)
    lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
  return "\n".join(lines) + "\n"


def help_of(group: str) -> str:
  """The keys of a group, or those below a key's name. Raises UserError where there are none."""
  found = {name: key for name, key in keys().items() if name == group or name.startswith(f"{group}.")}
  if not found:
    raise UserError(f"--help={group} names no group of keys; the nearest is {nearest(group, groups())}")
  lines = []
  for name, key in found.items():
    lines.append(f"--config.{name}={key.default}")
    lines += textwrap.wrap(_comment(key), 100, initial_indent="    ", subsequent_indent="    ")
    for idle in key.idle:
      lines.append(f"    no effect {idle.because}")
  return "\n".join(lines)
