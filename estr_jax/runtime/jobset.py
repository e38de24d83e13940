"""A run as Kubernetes manifests for GKE: one JobSet for the learner and one for each group of sampler hosts.

A JobSet restarts as a whole, because the processes of a jax.distributed group live and die together; whatever is in
another JobSet goes on. So the learner and every sampler group have one of their own, each with its own count of
restarts, and each can be deleted or applied alone.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from estr_jax.errors import UserError

Manifest = dict[str, Any]

# The claim of the volume that all hosts mount, and where. Locks, renames and appended rows need a file system (NFS),
# which a mounted bucket is not.
CLAIM, VOLUME = "estr-jax", "/shared"
PORT = 50051  # of every learner host
RESTARTS = 10  # of one JobSet, for failures of its own; those of the nodes beneath it do not count
RUN_LABEL, ROLE_LABEL = "estr-jax/run", "estr-jax/role"

_JOB = "slice"  # the one job of a JobSet
_SECRETS = "/etc/estr-jax"
_CERTIFICATE, _KEY, _TOKEN = "tls.crt", "tls.key", "token"  # keys of the run's secret, and files in _SECRETS
_GOODBYE_S = 120  # from SIGTERM to SIGKILL, for a checkpoint that is being written
_LONGEST_NAME = 63  # of a pod, RFC 1123


@dataclasses.dataclass(frozen=True)
class Pool:
  """The nodes that make up one slice."""

  accelerator: str  # as the label of the nodes has it
  topology: str
  machine: str
  hosts: int
  chips: int  # of one host


# accelerator, machine type without its number of chips, and the most chips of a slice that is one host; a host of a
# larger slice has 4. From cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus.
_FAMILIES = {
  "v4": ("tpu-v4-podslice", "ct4p-hightpu", 4),
  "v5e": ("tpu-v5-lite-podslice", "ct5lp-hightpu", 8),
  "v5p": ("tpu-v5p-slice", "ct5p-hightpu", 4),
  "v6e": ("tpu-v6e-slice", "ct6e-standard", 8),
}
_HOST_CHIPS = 4
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")  # above them, every side is a multiple of 4


def pool_of(family: str, sides: Sequence[int]) -> Pool:
  """The nodes of a slice such as ("v5p", (4, 4, 4)). Raises UserError where GKE has no such slice."""
  accelerator, machine, one_host = _FAMILIES[family]
  topology = "x".join(map(str, sides))
  flat = len(sides) == 2
  cubes = not flat and list(sides) == sorted(sides) and all(side % 4 == 0 for side in sides)
  if not cubes and topology not in (_FLAT if flat else _SMALL_CUBES):
    offered = ", ".join(_FLAT) if flat else f"{', '.join(_SMALL_CUBES)}, and rising multiples of 4"
    raise UserError(f"{family}:{topology} is no slice of GKE, whose sides are {offered}")
  chips = math.prod(sides)
  on_host = chips if chips <= one_host else _HOST_CHIPS
  return Pool(accelerator, topology, f"{machine}-{on_host}t", chips // on_host, on_host)


def manifests(
  name: str, image: str, arguments: Sequence[str], *, learner: Pool, sampler: Pool, samplers: int
) -> list[Manifest]:
  """Everything that a run needs beside its volume and its secret.

  Args:
    name: of the run, and of the secret that holds its certificate, key and token.
    arguments: of experiments.train, the same for all processes.
    sampler: the slice of each of the `samplers` groups.

  Raises:
    UserError: the name, or one that is made of it, is none that Kubernetes takes.
  """
  _check_name(name, learner, sampler, samplers)
  # Kubernetes expands $(NAME) in a command, and takes $$ for a dollar.
  arguments = [argument.replace("$", "$$") for argument in arguments]
  groups = [_learner(name, image, arguments, learner)]
  groups += [_sampler(name, image, arguments, sampler, number) for number in range(samplers)]
  return [_policy(name), *groups]


def learner_host(name: str, namespace: str, host: int = 0) -> str:
  """The DNS name of a host of the learner."""
  return f"{name}-learner-{_JOB}-0-{host}.{name}-learner.{namespace}.svc.cluster.local"


def certificate_names(name: str, namespace: str) -> list[str]:
  """What the run's certificate has to be valid for: every host of the learner, under its full and its short name."""
  return [f"*.{name}-learner.{namespace}.svc.cluster.local", f"*.{name}-learner"]


def _check_name(name: str, learner: Pool, sampler: Pool, samplers: int) -> None:
  if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
    raise UserError(f"{name!r} cannot name a run on Kubernetes; take lower-case letters, digits and hyphens")
  # A pod's name ends in five letters that Kubernetes picks.
  pods = (f"-learner-{_JOB}-0-{learner.hosts - 1}-abcde", f"-sampler-{samplers - 1}-{_JOB}-0-{sampler.hosts - 1}-abcde")
  longest = _LONGEST_NAME - max(map(len, pods))
  if len(name) > longest:
    raise UserError(f"{name!r} is too long to name a run on Kubernetes; take at most {longest} characters")


def _learner(name: str, image: str, arguments: Sequence[str], pool: Pool) -> Manifest:
  command = [*arguments, "--role=learner", *_coordinator(pool), f"--config.transport.address=0.0.0.0:{PORT}"]
  command += _credentials(key=True)
  container = {
    "command": _program(command),
    "ports": [{"name": "grpc", "containerPort": PORT, "protocol": "TCP"}],
    # Kubernetes' own gRPC probe speaks no TLS. There is no liveness probe: a socket cannot tell a hung learner from one
    # that compiles, and in the program every wait has a deadline, after which the process ends.
    "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 10},
  }
  return _jobset(name, f"{name}-learner", "learner", image, container, pool, [_CERTIFICATE, _KEY, _TOKEN])


def _sampler(name: str, image: str, arguments: Sequence[str], pool: Pool, number: int) -> Manifest:
  command = [*arguments, "--role=sampler", f"--sampler_name=sampler-{number}", *_coordinator(pool)]
  command += [f"--config.transport.address={learner_host(name, '$(NAMESPACE)')}:{PORT}", *_credentials(key=False)]
  container = {
    "command": _program(command),
    "env": [{"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
  }
  return _jobset(name, f"{name}-sampler-{number}", "sampler", image, container, pool, [_CERTIFICATE, _TOKEN])


def _program(arguments: Sequence[str]) -> list[str]:
  # A TPU's driver locks more memory than a container may by default; SYS_RESOURCE lets it raise the limit (KiB).
  return ["sh", "-c", 'ulimit -l 68719476736; exec "$0" "$@"', "python", "-m", "experiments.train", *arguments]


def _coordinator(pool: Pool) -> list[str]:
  return ["--coordinator=auto"] if pool.hosts > 1 else []


def _credentials(*, key: bool) -> list[str]:
  files = {"tls_certificate": _CERTIFICATE, **({"tls_key": _KEY} if key else {}), "token_file": _TOKEN}
  return [f"--config.transport.{option}={_SECRETS}/{file}" for option, file in files.items()]


def _jobset(
  run: str, name: str, role: str, image: str, container: Manifest, pool: Pool, secrets: Sequence[str]
) -> Manifest:
  """One group of hosts: `pool.hosts` pods, one a node, of which none goes on without the others."""
  labels = {RUN_LABEL: run, ROLE_LABEL: role}
  # A slice of several hosts is a node pool of its own, and must not be shared by two groups; slices of one host are the
  # nodes of one pool, each taken whole by its chips.
  exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
  pod = {
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": _GOODBYE_S,
    "automountServiceAccountToken": False,
    "shareProcessNamespace": True,  # else the program is process 1, which does not hear SIGTERM
    "nodeSelector": {
      "cloud.google.com/gke-tpu-accelerator": pool.accelerator,
      "cloud.google.com/gke-tpu-topology": pool.topology,
    },
    "containers": [
      {
        "name": role,
        "image": image,
        **container,
        "securityContext": {"capabilities": {"add": ["SYS_RESOURCE"]}},
        "resources": {"limits": {"google.com/tpu": str(pool.chips)}},
        "volumeMounts": [
          {"name": "shared", "mountPath": VOLUME},
          {"name": "secrets", "mountPath": _SECRETS, "readOnly": True},
        ],
      }
    ],
    "volumes": [
      {"name": "shared", "persistentVolumeClaim": {"claimName": CLAIM}},
      {
        "name": "secrets",
        "secret": {"secretName": run, "defaultMode": 0o400, "items": [{"key": key, "path": key} for key in secrets]},
      },
    ],
  }
  job = {
    "completionMode": "Indexed",
    "parallelism": pool.hosts,
    "completions": pool.hosts,
    "backoffLimit": 0,
    # A node that goes away, for maintenance or to somebody with a better claim to it, gives the job's end a reason.
    "podFailurePolicy": {
      "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    },
    "template": {"metadata": {"labels": labels}, "spec": pod},
  }
  return {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": name, "labels": labels, **({"annotations": exclusive} if pool.hosts > 1 else {})},
    "spec": {
      # A headless service, made by the JobSet's controller. Hosts look for each other before they are ready.
      "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
      "failurePolicy": {
        "maxRestarts": RESTARTS,
        "rules": [
          {
            "name": "nodeWentAway",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
          }
        ],
      },
      "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": job}}],
    },
  }


def _policy(name: str) -> Manifest:
  """Only pods of the run reach its pods: the ports of jax.distributed and of the TPU runtime have no password."""
  pods = {"matchLabels": {RUN_LABEL: name}}
  return {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": name, "labels": {RUN_LABEL: name}},
    "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]},
  }
