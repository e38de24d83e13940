"""From a config to manifests, and from manifests to processes that train."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from absl import flags
from ports import held_port

from estr_jax.errors import UserError
from estr_jax.runtime import jobset
from experiments import launch

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

SLICES = ["--config.slices.learner=v5p:2x2x2", "--config.mesh.fsdp=8", "--config.slices.sampler=v6e:2x2"]
SLICES += ["--config.sampling.mesh.tensor=4", "--config.slices.samplers=2"]
RUN = ["--config=configs/quickstart.py", "--render", "--image=registry/image:1", "--workdir=/shared/runs/quick"]


@pytest.fixture
def render(monkeypatch, capsys):
  """Runs the program in this process; returns what it printed."""
  before = set(flags.FLAGS)

  def forget():
    for name in set(flags.FLAGS) - before:
      delattr(flags.FLAGS, name)
    flags.FLAGS.unparse_flags()

  def run(*arguments: str) -> tuple[str, str]:
    forget()
    monkeypatch.setattr(sys, "argv", ["launch", *arguments])
    monkeypatch.chdir(ROOT)
    assert launch.program() == 0
    return capsys.readouterr()

  yield run
  forget()


def containers(text: str) -> dict[str, dict]:
  """JobSet name -> its only container."""
  found = {}
  for manifest in yaml.safe_load_all(text):
    if manifest["kind"] == "JobSet":
      (job,) = manifest["spec"]["replicatedJobs"]
      (found[manifest["metadata"]["name"]],) = job["template"]["spec"]["template"]["spec"]["containers"]
  return found


def test_a_config_becomes_manifests(render):
  """Fails if slices, image, folder or an override is not in what is printed, or it is not the same every time."""
  arguments = [*RUN, *SLICES, "--config.steps=7", "--config.loss.estr.tau=inf", "--config.learner.diagnostics=False"]
  text, note = render(*arguments)
  assert note == ""
  found = containers(text)
  assert sorted(found) == ["quick-learner", "quick-sampler-0", "quick-sampler-1"]
  for container in found.values():
    assert container["image"] == "registry/image:1"
    said = {"--config.steps=7", "--config.loss.estr.tau=inf", "--config.learner.diagnostics=False", *SLICES}
    assert said | {"--workdir=/shared/runs/quick", "--config=configs/quickstart.py"} <= set(container["command"])
    assert "--config.cache_dir=/shared/cache" in container["command"]
  assert list(yaml.safe_load_all(text)) == jobset.manifests(
    "quick",
    "registry/image:1",
    [*RUN[:1], *RUN[3:], "--config.cache_dir=/shared/cache", *arguments[len(RUN) :]],
    learner=jobset.pool_of("v5p", (2, 2, 2)),
    sampler=jobset.pool_of("v6e", (2, 2)),
    samplers=2,
  )
  assert "&id" not in text
  assert render(*arguments)[0] == text


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ([*RUN[:2], RUN[3], *SLICES], "--image"),
    ([*RUN[:3], *SLICES], "--workdir"),
    (RUN[1:], "--config"),
    ([RUN[0], *RUN[2:], *SLICES], "add --render"),
    ([*RUN, *SLICES[1:]], "slices.learner is empty"),
    ([*RUN, *SLICES[:2], *SLICES[3:]], "slices.sampler is empty"),
    ([*RUN, *SLICES, "--config.slices.learner=v5q:2x2x2"], "slices.learner=v5q:2x2x2: unknown chips"),
    ([*RUN, *SLICES, "--config.slices.sampler=2x2"], "slices.sampler='2x2' is no slice"),
    ([*RUN, *SLICES, "--config.slices.learner=v5p:2x4x1"], "slices.learner: v5p:2x4x1 is no slice of GKE"),
    ([*RUN, *SLICES, "--config.mesh.fsdp=4"], "slices.learner=v5p:2x2x2 has 8 chips and .*mesh.fsdp=4 .* is 4"),
    (
      [*RUN, *SLICES, "--config.sampling.mesh.tensor=2"],
      "slices.sampler=v6e:2x2 has 4 chips .*mesh.tensor=2 is 2",
    ),
    ([*RUN, *SLICES, "--config.mode=sync"], "mode=sync is one role"),
    ([*RUN[:3], "--workdir=/shared/runs/Quick_1", *SLICES], "'Quick_1' cannot name a run"),
    ([*RUN[:3], "--workdir=/tmp/quick", *SLICES], "on no volume that all hosts share"),
    ([*RUN[:3], "--workdir=/shared", *SLICES], "on no volume that all hosts share"),
    ([*RUN[:3], "--workdir=/shared/../etc/quick", *SLICES], "on no volume that all hosts share"),
    ([*RUN, *SLICES, "--config.transport.address=0.0.0.0:1"], "transport.address is set by the launch"),
    ([*RUN, *SLICES, "--config.steps=0"], "steps=0 must be above 0"),
    ([*RUN, *SLICES, "--config.stepz=1"], "unknown config key"),
  ],
)
def test_what_cannot_run_is_refused_in_one_line(render, arguments, words):
  """Fails if manifests are printed for a run that no cluster could start."""
  with pytest.raises(UserError, match=words) as caught:
    render(*arguments)
  assert "\n" not in str(caught.value)


def test_a_config_that_the_image_does_not_hold(render, tmp_path):
  """Fails if processes are told to read a file of this machine."""
  path = tmp_path / "mine.py"
  path.write_text((ROOT / "configs" / "quickstart.py").read_text())
  with pytest.raises(UserError, match="is not in configs/"):
    render(f"--config={path}", *RUN[1:], *SLICES)


def test_a_model_folder_need_not_be_here(render):
  """Fails if weights on the volume have to lie on the machine that renders, too."""
  folder = "--config.model.folder=/shared/models/some"
  text, _ = render("--config=configs/smollm2_sums.py", *RUN[1:], *SLICES, folder)
  assert all(folder in container["command"] for container in containers(text).values())


def test_a_refusal_is_one_line_and_a_status():
  """Fails if the program ends in a traceback, or a shell would go on after a refusal."""
  command = [sys.executable, "-m", "experiments.launch", *RUN, *SLICES[1:]]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
  assert done.returncode == 2 and done.stdout == ""
  assert done.stderr.startswith("error: slices.learner is empty") and len(done.stderr.splitlines()) == 1


def section() -> str:
  return README.partition("## On a TPU pod\n")[2].partition("\n## ")[0]


def commands() -> str:
  """The shell of the README's section, continued lines joined and its variables filled in."""
  text = "\n".join(re.findall(r"```\n(.*?)```", section(), re.S)).replace("\\\n", " ")
  for name, value in re.findall(r"(\w+)=([^\s;]+)", re.findall(r"^export (.*)$", text, re.M)[0]):
    text = text.replace(f"${name}", value)
  return text


def test_the_readme_makes_what_the_manifests_ask_for(render):
  """Fails if a name, machine, topology, size or certificate of the README's commands is not what a run needs."""
  text = commands()
  line = next(line for line in text.splitlines() if "experiments.launch" in line)
  arguments = line.partition("experiments.launch")[2].partition(">")[0].split()
  manifests = list(yaml.safe_load_all(render(*arguments)[0]))
  name = manifests[0]["metadata"]["name"]

  pools = [line for line in text.splitlines() if "node-pools create" in line]
  asked = {option.partition("=")[0]: option.partition("=")[2] for option in arguments}
  config = flags.FLAGS.config
  wanted = [(launch.pool_of(config, "learner"), 1), (launch.pool_of(config, "sampler"), config.slices.samplers)]
  assert len(pools) == len(wanted)
  for line, (pool, groups) in zip(pools, wanted, strict=True):
    options = dict(re.findall(r"--([\w-]+)=(\S+)", line))
    assert options["machine-type"] == pool.machine and options["tpu-topology"] == pool.topology
    assert int(options["num-nodes"]) == pool.hosts * (1 if pool.hosts > 1 else groups)

  (claim,) = [m for m in documents(text) if m["kind"] == "PersistentVolumeClaim"]
  assert claim["metadata"]["name"] == jobset.CLAIM and claim["spec"]["accessModes"] == ["ReadWriteMany"]
  (files,) = [m for m in documents(text) if m["kind"] == "Pod"]
  assert files["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == jobset.CLAIM
  assert files["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] == jobset.VOLUME

  assert set(re.search(r'subjectAltName=([^\s"]+)', text)[1].split(",")) == {
    f"DNS:{san}" for san in jobset.certificate_names(name, "default")
  }
  created = re.search(r"create secret generic (\S+) (.*)", text)
  keys = {key.partition("=")[2] for key in created[2].split() if key.startswith("--from-file")}
  (secret,) = [
    volume["secret"]
    for volume in manifests[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["volumes"]
    if "secret" in volume
  ]
  assert created[1] == secret["secretName"] and keys == {item["key"] for item in secret["items"]}
  assert asked["--image"] and f"-t {asked['--image']}" in text
  assert f"{jobset.ROLE_LABEL}=learner" in text and f"{jobset.RUN_LABEL}={name}" in text


def documents(text: str) -> list[dict]:
  return [document for found in re.findall(r"<<EOF\n(.*?)\nEOF", text, re.S) for document in yaml.safe_load_all(found)]


def test_the_image_holds_what_a_process_imports():
  """Fails if a folder is missing from the image, or one is named that is gone."""
  copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
  names = {name for line in copied for name in line.split()}
  assert {"requirements.txt", "configs", "estr_jax", "experiments"} == names
  assert all((ROOT / name).exists() for name in names)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_the_rendered_processes_train(render, tmp_path):
  """Fails if learner and sampler do not understand what was rendered for them, or do not let each other in."""
  text, _ = render(
    "--config=configs/quickstart.py:smoke",
    *RUN[1:],
    *("--config.slices.learner=v6e:1x1", "--config.slices.sampler=v6e:1x1"),
    *("--config.warm_start.steps=2", "--config.checkpoint.every=1"),
  )
  found = containers(text)
  secrets = tmp_path / "secrets"
  secrets.mkdir()
  make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
  make += f" -addext subjectAltName=DNS:localhost -keyout {secrets / 'tls.key'} -out {secrets / 'tls.crt'}"
  subprocess.run(make.split(), check=True, capture_output=True)
  (secrets / "token").write_text("secret\n")
  with held_port() as port:
    here = {
      "/shared": str(tmp_path / "shared"),
      "/etc/estr-jax": str(secrets),
      jobset.learner_host("quick", "$(NAMESPACE)"): "localhost",
      f":{jobset.PORT}": f":{port}",
    }
    run_all(found, here)
  assert (tmp_path / "shared" / "runs" / "quick" / "summary.json").exists()


def run_all(found: dict[str, dict], here: dict[str, str]) -> None:
  """The processes of the containers on this machine, with what is `here` in place of what is there, until they end."""
  processes = {}
  for name, container in found.items():
    command = container["command"]
    command = command[command.index("python") + 1 :]
    for there, place in here.items():
      command = [argument.replace(there, place) for argument in command]
    processes[name] = subprocess.Popen(
      [sys.executable, *command],
      cwd=ROOT,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
  try:
    for name, process in processes.items():
      output, _ = process.communicate(timeout=1200)
      assert process.returncode == 0, f"{name}: {output}"
  finally:
    for process in processes.values():
      process.kill()
