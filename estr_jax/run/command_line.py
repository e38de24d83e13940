"""The command line of the programs: --help, --config with its keys, and a user's mistake as one line."""

import os
import sys
import textwrap
from collections.abc import Callable, Sequence

import jax
from absl import flags
from ml_collections import config_flags

from estr_jax.errors import UserError
from estr_jax.run import pages
from estr_jax.run.options import keys, unknown
from estr_jax.runtime.launch import launched

_HELP = ("--help", "-help", "-h")


def define_config() -> None:
  """Defines --config, with --config.KEY=VALUE for each of its keys."""
  config_flags.DEFINE_config_file("config", None, "A file of configs/, as FILE.py or FILE.py:ARGUMENT.")


def config_name() -> str:
  """The config file as the command line named it, argument included."""
  return config_flags.get_config_filename(flags.FLAGS["config"])


def parse(argv: Sequence[str], define: Callable[[], None], program: str) -> None:
  """Parses the flags that `define` defines; where --help is among them, prints it and exits.

  Args:
    program: the docstring of the program: its usage, with examples.

  Raises:
    UserError: in one line, for whatever the command line or a config file has wrong.
  """
  known_before = set(flags.FLAGS)
  define()
  asked = next((argument for argument in argv[1:] if argument.partition("=")[0] in _HELP), None)
  if asked is not None:
    print(_help(program, sorted(set(flags.FLAGS) - known_before), group=asked.partition("=")[2]))
    sys.exit(0)
  try:
    rest = flags.FLAGS(list(argv))
    if flags.FLAGS.config is not None:
      flags.FLAGS.config.to_dict()  # a file that cannot be read is reported at its first use
  except flags.Error as error:
    # What a config file raised comes as a whole traceback; its last line is what the file said.
    raise UserError(str(error).strip().splitlines()[-1]) from error
  except (OSError, ImportError) as error:
    raise UserError(f"the config file cannot be read: {_one_line(error)}") from error
  except (AttributeError, KeyError) as error:
    raise _unknown_key(argv) or UserError(f"the config file names an unknown key: {_one_line(error)}") from error
  except (TypeError, ValueError) as error:
    raise UserError(f"the configuration is wrong: {_one_line(error)}") from error
  if len(rest) > 1:
    raise UserError(f"unknown argument {rest[1]!r}; flags look like --workdir=DIR and --config.steps=10")


def _unknown_key(argv: Sequence[str]) -> UserError | None:
  """The first --config.KEY of the command line that is no key."""
  known = keys()
  for argument in argv[1:]:
    flag = argument.partition("=")[0].lstrip("-")
    if flag.startswith("config.") and flag.removeprefix("config.") not in known:
      return unknown(flag.removeprefix("config."), known)
  return None


def _help(program: str, names: Sequence[str], group: str) -> str:
  """Usage and flags; with a group, or a key, of the config what its keys mean."""
  if group:
    return pages.help_of(group)
  lines = [program.strip(), "", "Flags:"]
  for name in names:
    flag = flags.FLAGS[name]
    default = "" if flag.default in (None, False) else f" [{flag.default}]"
    lines += textwrap.wrap(f"--{name}: {flag.help}{default}", 100, initial_indent="  ", subsequent_indent="      ")
  if "config" in names:
    lines += [
      "  --config.KEY=VALUE: another value for a key of the config.",
      "",
      "Keys stand in configs/default.py and docs/config.md. --help=GROUP lists those of one group:",
      f"{', '.join(pages.groups())}.",
    ]
  return "\n".join(lines)


def main(program: Callable[[], int], interrupted: str = "interrupted") -> None:
  """Runs a program; a user's mistake is one line on standard error and exit status 2.

  Args:
    interrupted: what is said at Ctrl-C.
  """
  try:
    sys.exit(program())
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    if jax.distributed.is_initialized():  # an interpreter waits at its end for the other processes, and they for it
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(error.status)
    sys.exit(error.status)
  except KeyboardInterrupt:
    if not launched():  # else the launcher says it
      print(interrupted, file=sys.stderr)
    # Everything has been unwound, but threads of XLA or Orbax may be at work, with which an interpreter cannot end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


def _one_line(error: Exception) -> str:
  text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
  return " ".join(text.split())
