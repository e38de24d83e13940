"""The first notebook: it stores no output, names what exists, and runs from top to bottom."""

import ast
import importlib
import json
import pathlib
import re
import sys

import nbformat
import pytest
from nbclient import NotebookClient

import estr_jax
from estr_jax.objective.losses import LOSSES
from estr_jax.observe.glossary import GLOSSARY
from estr_jax.run import options

ROOT = pathlib.Path(__file__).parent.parent
PATH = ROOT / "docs" / "first_steps.ipynb"
LIBRARIES = {"estr_jax", "matplotlib", "numpy", "jax", "IPython"}  # what `pip install '.[notebook]'` brings

# What the cells leave, as one line of JSON; the last line of the notebook's last output.
LEFT = """
import json, sys
print(json.dumps({
  "python": sys.executable,
  "versions": [older.version, newest.version],
  "counts": {name: [int(n) for n in numbers] for name, numbers in counts.items()},
  "kept": {name: int(kept.sum()) for name, kept in keep.items()},
  "differ": int((keep["ESTR"] != keep["fixed width"]).sum()),
  "policy tokens": int(policy_token.sum()),
  "masked": int(masked.sum()),
  "scores above tau": int((score[policy_token] > tau).sum()),
  "reward": list(newest.metrics["rollout/reward"][1:]),
}))
"""


def notebook():
  return nbformat.read(PATH, as_version=nbformat.NO_CONVERT)


def code() -> list[str]:
  return [cell.source for cell in notebook().cells if cell.cell_type == "code"]


def tree() -> ast.Module:
  return ast.parse("\n\n".join(code()))


def test_the_notebook_is_valid_and_stores_no_output():
  """Fails if a number in it can be stale, or a program must repair it before it opens."""
  found = notebook()
  nbformat.validate(found)
  assert (found.nbformat, found.nbformat_minor) == (4, 5)
  assert all(not cell.outputs and cell.execution_count is None for cell in found.cells if cell.cell_type == "code")


def test_the_notebook_imports_only_what_pip_installs():
  """Fails if it imports configs, experiments or a library that nobody asked for, or says what Python does not."""
  modules = set()
  for node in ast.walk(tree()):
    if isinstance(node, ast.Import):
      modules |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0 and node.module is not None
      modules.add(node.module)
  assert "estr_jax" in modules
  assert {module.split(".")[0] for module in modules} - LIBRARIES <= set(sys.stdlib_module_names)


def test_every_name_of_the_package_in_the_notebook_exists():
  """Fails if a function, a metric or a loss that it uses is renamed, or its config is refused."""
  nodes = list(ast.walk(tree()))
  used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and name_of(node.value) == "estr_jax"}
  assert {"train", "load", "sample", "compare_losses"} <= used <= set(estr_jax.__all__)
  for node in nodes:
    if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "estr_jax":
      module = importlib.import_module(node.module)
      assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
  losses = {node.slice.value for node in nodes if isinstance(node, ast.Subscript) and name_of(node.value) == "LOSSES"}
  assert {"estr", "ppo"} <= losses <= set(LOSSES)
  words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
  metrics = {word for word in words if re.fullmatch("[a-z]+/[a-z_]+", word)} - {"runs/first_steps"}
  assert len(metrics) == 3 and metrics <= set(GLOSSARY)
  (config,) = [node.value for node in nodes if isinstance(node, ast.Assign) and name_of(node.targets[0]) == "config"]
  options.make(ast.literal_eval(config))


def name_of(node: ast.expr) -> str | None:
  return node.id if isinstance(node, ast.Name) else None


def test_the_files_that_the_notebook_names_exist():
  """Fails if a page that it points to has moved."""
  text = "\n".join(cell.source for cell in notebook().cells if cell.cell_type == "markdown")
  paths = re.findall(r"(?:docs|estr_jax)/[\w/]+\.\w+", text)
  assert len(paths) >= 4 and [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_notebook_runs(tmp_path, monkeypatch):
  """Fails if a cell raises, the policy learns nothing, or the losses are not of one batch or do not differ."""
  (tmp_path / "home").mkdir()
  monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where the default cache_dir is, and what Jupyter keeps
  ran = notebook()
  ran.cells.append(nbformat.v4.new_code_cell(LEFT))
  resources = {"metadata": {"path": str(tmp_path)}}
  NotebookClient(ran, timeout=3000, kernel_name="python3", resources=resources).execute()

  outputs = {cell.id: cell.outputs for cell in ran.cells if cell.cell_type == "code"}
  types = {name: {mime for output in found for mime in output.get("data", {})} for name, found in outputs.items()}
  assert [name for name in types if "image/png" in types[name]] == ["plot", "boundary"]
  assert [name for name in types if "text/markdown" in types[name]] == ["compare", "disagree"]
  shown = outputs["show"][-1]["data"]["text/html"]
  assert shown.count("<span") > 40 and "S = " in shown and "H = " in shown and "delta = " in shown
  assert (tmp_path / "runs" / "first_steps" / "report.html").exists() and (tmp_path / "home" / ".cache").is_dir()

  left = json.loads(outputs[ran.cells[-1].id][0]["text"])
  assert left["python"] == sys.executable
  assert left["versions"] == [45, 60]
  assert list(left["counts"]) == ["ESTR", "IcePop", "fixed width", "PPO"]
  assert {sum(numbers) for numbers in left["counts"].values()} == {left["policy tokens"]}
  assert {name: unclipped + clipped for name, (unclipped, clipped, _) in left["counts"].items()} == left["kept"]
  assert left["kept"]["PPO"] == left["policy tokens"] > left["kept"]["ESTR"] > 0
  assert left["masked"] == left["scores above tau"] == left["counts"]["ESTR"][2]
  assert left["differ"] > 0
  assert sum(left["reward"][-10:]) / 10 > 0.2 + sum(left["reward"][:10]) / 10
