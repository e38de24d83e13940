"""The manifests of a run, held against the schemas of JobSet and Kubernetes."""

import copy
import shutil
import subprocess

import grpc
import kubernetes_validate
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from estr_jax.errors import UserError
from estr_jax.rollout_queue.broker import Broker
from estr_jax.runtime import jobset
from estr_jax.weights.store import WeightStore
from estr_jax.wire import service
from estr_jax.wire.security import Tls

ARGUMENTS = ["--config=configs/default.py", "--workdir=/shared/runs/a"]
V5P, V6E = jobset.pool_of("v5p", (4, 4, 4)), jobset.pool_of("v6e", (2, 2))
KUBERNETES = "1.31"  # older than any that the README's cluster could have


def render(name="run", *, arguments=(), learner=V5P, sampler=V6E, samplers=2) -> list[dict]:
  return jobset.manifests(
    name, "registry/image:1", [*ARGUMENTS, *arguments], learner=learner, sampler=sampler, samplers=samplers
  )


def validate(manifest: dict) -> None:
  """Raises for what the schemas do not know or would not take, down to the containers."""
  if manifest["kind"] != "JobSet":
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    return
  # The models drop what they do not know, so that only a manifest without it comes back as it was.
  assert JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest
  for replicated in manifest["spec"]["replicatedJobs"]:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **replicated["template"]}
    kubernetes_validate.validate(job, KUBERNETES, strict=True)


def jobsets(manifests: list[dict]) -> dict[str, dict]:
  return {m["metadata"]["name"]: m for m in manifests if m["kind"] == "JobSet"}


def job_of(one: dict) -> dict:
  (replicated,) = one["spec"]["replicatedJobs"]
  return replicated["template"]["spec"]


def pod_of(one: dict) -> dict:
  return job_of(one)["template"]["spec"]


def options_of(one: dict) -> list[str]:
  (container,) = pod_of(one)["containers"]
  command = container["command"]
  return command[command.index("experiments.train") + 1 :]


@pytest.mark.parametrize("learner", [V5P, V6E])
@pytest.mark.parametrize("sampler", [V6E, jobset.pool_of("v6e", (4, 4))])
def test_every_manifest_is_one_of_its_kind(learner, sampler):
  """Fails if a field is misspelt, missing or of another type, in a JobSet or in a pod."""
  manifests = render(learner=learner, sampler=sampler)
  assert [m["kind"] for m in manifests] == ["NetworkPolicy", "JobSet", "JobSet", "JobSet"]
  for manifest in manifests:
    validate(manifest)


@pytest.mark.parametrize(
  ("path", "old", "new"),
  [
    (["spec", "network"], "enableDNSHostnames", "enableDnsHostnames"),
    (["spec", "failurePolicy"], "maxRestarts", "maxRestart"),
    (["spec", "failurePolicy", "rules", 0], "onJobFailureReasons", "onJobFailureReason"),
    (["spec", "replicatedJobs", 0], "replicas", "replica"),
    (["spec", "replicatedJobs", 0, "template", "spec"], "backoffLimit", "backofLimit"),
    (["spec", "replicatedJobs", 0, "template", "spec", "template", "spec"], "nodeSelector", "nodeSelectors"),
    (["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "volumes", 1, "secret"], "items", "item"),
    (
      ["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "readinessProbe"],
      "tcpSocket",
      "tcp",
    ),
  ],
)
def test_the_schemas_refuse_a_misspelt_field(path, old, new):
  """Fails if the validation above lets through what a cluster would not."""
  broken = copy.deepcopy(jobsets(render())["run-learner"])
  node = broken
  for part in path:
    node = node[part]
  node[new] = node.pop(old)
  with pytest.raises((AssertionError, ValueError, kubernetes_validate.ValidationError)):
    validate(broken)


def test_the_schemas_refuse_a_misspelt_field_of_another_kind():
  """Fails if only JobSets are held against a schema."""
  policy = render()[0]
  policy["spec"]["podSelectors"] = policy["spec"].pop("podSelector")
  with pytest.raises(kubernetes_validate.ValidationError):
    validate(policy)


def test_learner_and_sampler_groups_fail_alone():
  """Fails if one JobSet holds two groups, so that the end of one restarts the other, or if a restart has no bound."""
  found = jobsets(render(samplers=3))
  assert sorted(found) == ["run-learner", "run-sampler-0", "run-sampler-1", "run-sampler-2"]
  for one in found.values():
    assert [replicated["replicas"] for replicated in one["spec"]["replicatedJobs"]] == [1]
    assert one["spec"]["failurePolicy"]["maxRestarts"] == jobset.RESTARTS
    assert job_of(one)["backoffLimit"] == 0  # a host does not come back into a group that lost it


def test_a_group_has_its_slice_to_itself():
  """Fails if hosts, chips or node labels are not those of the slice, or a slice of one host asks for a whole pool."""
  found = jobsets(render(sampler=jobset.pool_of("v6e", (4, 8))))
  for name, hosts, family, topology in (
    ("run-learner", 16, "tpu-v5p-slice", "4x4x4"),
    ("run-sampler-1", 8, "tpu-v6e-slice", "4x8"),
  ):
    one = found[name]
    assert job_of(one)["parallelism"] == job_of(one)["completions"] == hosts
    assert job_of(one)["completionMode"] == "Indexed"  # GKE numbers the TPU workers by it
    assert pod_of(one)["nodeSelector"] == {
      "cloud.google.com/gke-tpu-accelerator": family,
      "cloud.google.com/gke-tpu-topology": topology,
    }
    assert pod_of(one)["containers"][0]["resources"] == {"limits": {"google.com/tpu": "4"}}
    assert list(one["metadata"]["annotations"].values()) == ["cloud.google.com/gke-nodepool"]
    assert "--coordinator=auto" in options_of(one)
  single = jobsets(render())["run-sampler-0"]
  assert "annotations" not in single["metadata"]
  assert "--coordinator=auto" not in options_of(single)


def test_processes_find_each_other():
  """Fails if samplers go where the learner is not, share a name, or an override does not reach a process."""
  found = jobsets(render(arguments=["--config.steps=7", "--config.task.name=a$(NAMESPACE)"]))
  learner = found["run-learner"]
  assert options_of(learner)[:2] == ARGUMENTS
  assert "--config.transport.address=0.0.0.0:50051" in options_of(learner)
  # Pods are named JOBSET-JOB-0-INDEX below a headless service, which is in the JobSet's own namespace.
  host = f"{learner['metadata']['name']}-{learner['spec']['replicatedJobs'][0]['name']}-0-0"
  address = f"{host}.{learner['spec']['network']['subdomain']}.$(NAMESPACE).svc.cluster.local:50051"
  for number in range(2):
    one = found[f"run-sampler-{number}"]
    assert f"--config.transport.address={address}" in options_of(one)
    assert f"--sampler_name=sampler-{number}" in options_of(one)
    assert [entry["name"] for entry in pod_of(one)["containers"][0]["env"]] == ["NAMESPACE"]
  for one in found.values():
    assert "--config.steps=7" in options_of(one)
    assert "--config.task.name=a$$(NAMESPACE)" in options_of(one)  # which Kubernetes turns into what was written


def test_secrets_are_mounted_and_the_key_stays_with_the_learner():
  """Fails if a sampler can read the key, an option names no mounted file, or something is put into a variable."""
  for name, one in jobsets(render()).items():
    (secret,) = [volume["secret"] for volume in pod_of(one)["volumes"] if "secret" in volume]
    assert secret["secretName"] == "run"
    (container,) = pod_of(one)["containers"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "secrets"]
    files = {f"{mount['mountPath']}/{item['path']}" for item in secret["items"]}
    credentials = ("transport.tls_certificate=", "transport.tls_key=", "transport.token_file=")
    named = [option for option in options_of(one) if any(word in option for word in credentials)]
    assert {option.partition("=")[2] for option in named} == files
    assert len(files) == (3 if name == "run-learner" else 2)
    assert any(file.endswith("tls.key") for file in files) == (name == "run-learner")


def test_nothing_is_reachable_from_outside():
  """Fails if a port is opened on a node or a balancer, or other pods reach the run's."""
  policy, *groups = render()
  assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]
  for one in groups:
    labels = job_of(one)["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert "hostNetwork" not in pod_of(one)
    assert all("hostPort" not in port for port in pod_of(one)["containers"][0].get("ports", []))


@pytest.mark.parametrize(
  ("family", "sides", "machine", "hosts", "chips"),
  [
    ("v5p", (2, 2, 1), "ct5p-hightpu-4t", 1, 4),
    ("v5p", (2, 2, 2), "ct5p-hightpu-4t", 2, 4),
    ("v5p", (4, 4, 8), "ct5p-hightpu-4t", 32, 4),
    ("v4", (4, 4, 4), "ct4p-hightpu-4t", 16, 4),
    ("v6e", (1, 1), "ct6e-standard-1t", 1, 1),
    ("v6e", (2, 2), "ct6e-standard-4t", 1, 4),
    ("v6e", (2, 4), "ct6e-standard-8t", 1, 8),
    ("v6e", (4, 4), "ct6e-standard-4t", 4, 4),
    ("v6e", (16, 16), "ct6e-standard-4t", 64, 4),
    ("v5e", (8, 8), "ct5lp-hightpu-4t", 16, 4),
  ],
)
def test_the_nodes_of_a_slice(family, sides, machine, hosts, chips):
  """Fails if a slice is spread over other machines than GKE has for it."""
  pool = jobset.pool_of(family, sides)
  assert (pool.machine, pool.hosts, pool.chips) == (machine, hosts, chips)


@pytest.mark.parametrize(
  ("family", "sides"), [("v6e", (4, 2)), ("v6e", (2, 3)), ("v5p", (1, 1, 1)), ("v5p", (8, 4, 4))]
)
def test_slices_that_gke_does_not_have(family, sides):
  """Fails if pods are made that no node could ever take."""
  with pytest.raises(UserError, match="is no slice of GKE"):
    jobset.pool_of(family, sides)


def test_names_that_kubernetes_does_not_take():
  """Fails if the cluster refuses what was rendered: a pod's name ends in five letters and has at most 63."""
  for name in ("Run", "run_1", "1run", "-run", "run-", "", "a.b"):
    with pytest.raises(UserError, match="cannot name a run"):
      render(name)
  large = jobset.pool_of("v5p", (16, 16, 16))
  for learner, samplers, longest_pod in (
    (V6E, 10, "-sampler-9-slice-0-0-abcde"),
    (V6E, 11, "-sampler-10-slice-0-0-abcde"),
    (large, 1, "-learner-slice-0-1023-abcde"),
  ):
    longest = 63 - len(longest_pod)
    render("a" * longest, samplers=samplers, learner=learner)
    with pytest.raises(UserError, match=f"at most {longest} characters"):
      render("a" * (longest + 1), samplers=samplers, learner=learner)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
@pytest.mark.parametrize("short", [False, True])
def test_the_certificate_names_hold_for_every_learner_host(tmp_path, short):
  """Fails if a sampler would refuse the certificate of a host, under its full name or as others call it."""
  certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
  names = ",".join(f"DNS:{name}" for name in jobset.certificate_names("run", "default"))
  command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=run"
  command += f" -addext subjectAltName={names} -keyout {key} -out {certificate}"
  subprocess.run(command.split(), check=True, capture_output=True)
  broker = Broker(
    lambda group: [], last_version=1, groups_per_batch=1, max_staleness=0, admission="wait", capacity=1,
    lease_timeout_s=100.0,
  )  # fmt: skip
  tls = Tls(str(certificate), str(key))
  server = service.serve("127.0.0.1:0", broker, WeightStore(), description={}, tls=tls, token="secret")
  try:
    host = jobset.learner_host("run", "default", 15)
    host = ".".join(host.split(".")[:2]) if short else host
    assert check_health(server.address, certificate.read_bytes(), host) == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError):
      check_health(server.address, certificate.read_bytes(), jobset.learner_host("other", "default"))
  finally:
    server.stop()


def check_health(address: str, certificate: bytes, host: str) -> int:
  credentials = grpc.ssl_channel_credentials(root_certificates=certificate)
  with grpc.secure_channel(address, credentials, options=[("grpc.ssl_target_name_override", host)]) as channel:
    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60).status
