"""The house: rooms import only the rooms above them, and `estr_jax` imports no program and no config."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# The order in which data flows.
ROOMS = [
  "errors", "options", "structs", "hosts", "waiting", "objective", "model", "tasks", "sampler", "rollout_queue",
  "weights", "wire", "learner", "lab", "observe", "runtime", "run", "planning",
]  # fmt: skip


def imports(path: pathlib.Path) -> set[str]:
  """Dotted names of what a file imports, function bodies included."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
  return found


def room(dotted: str) -> str | None:
  parts = dotted.split(".")
  return parts[1] if parts[0] == "estr_jax" and len(parts) > 1 else None


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_only_rooms_above_it(name):
  """Fails if a lower room is imported from a higher one, or a program or config from the library."""
  base = ROOT / "estr_jax" / name
  files = sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")]
  assert files and all(file.exists() for file in files)
  for file in files:
    if file.name.endswith(("_pb2.py", "_pb2_grpc.py")):
      continue
    for dotted in imports(file):
      assert dotted.split(".")[0] not in ("experiments", "configs"), f"{file} imports {dotted}"
      if (other := room(dotted)) is not None:
        assert ROOMS.index(other) <= ROOMS.index(name), f"{file} imports {dotted}"


def test_the_list_of_rooms_is_complete():
  """Fails if a new room escapes the order."""
  there = {p.stem if p.is_file() else p.name for p in (ROOT / "estr_jax").iterdir() if p.suffix in ("", ".py")}
  assert there - {"__init__", "__pycache__"} == set(ROOMS)


@pytest.mark.parametrize(
  ("library", "home"),
  [
    ("grpc", "wire"),
    ("grpc_health", "wire"),
    ("google.protobuf", "wire"),
    ("orbax", "learner"),
    ("rich", "observe"),
  ],
)
def test_a_library_is_known_in_one_room(library, home):
  """Fails if gRPC, protobuf, Orbax or the terminal leaks into another room."""
  known = {
    file.relative_to(ROOT / "estr_jax").parts[0]
    for file in (ROOT / "estr_jax").rglob("*.py")
    if any(f"{name}.".startswith(f"{library}.") for name in imports(file))
  }
  assert known == {home}


def test_the_readme_names_only_files_that_exist():
  """Fails if a path in the README has moved."""
  text = (ROOT / "README.md").read_text()
  paths = re.findall(r"`((?:estr_jax|configs|docs|experiments|tests)/[\w/.]*\w)(?::\w+)?`", text)
  assert len(paths) > 8
  assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_make_target_of_the_readme_exists():
  """Fails if the README promises a command that is gone."""
  targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
  assert set(re.findall(r"\bmake ([a-z0-9-]+)", (ROOT / "README.md").read_text())) <= targets


@pytest.mark.parametrize("name", ["configs/default.py", "docs/config.md", "docs/methods.md"])
def test_a_written_page_is_that_of_the_code(name):
  """Fails if a key, a loss, a default or a recipe is changed and its page is not written anew."""
  from experiments.pages import PAGES

  assert (ROOT / name).read_text() == PAGES[name](), "run make pages"


def test_programs_parse_call_and_print():
  """Fails if the composition of a run grows back into a program, or a room into several."""
  lines = {path: path.read_text().count("\n") for path in (ROOT / "experiments").rglob("*.py")}
  assert {path.name: count for path, count in lines.items() if count >= 120} == {}
  assert sum(lines.values()) < 1200
  for folder in {path.parent for path in (ROOT / "estr_jax").rglob("*.py")}:
    written = [path for path in folder.glob("*.py") if "_pb2" not in path.name]
    assert sum(path.read_text().count("\n") for path in written) <= 2000, folder
