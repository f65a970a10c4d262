"""A run on Kubernetes, as documents: JobSets, their configs and keys, shards' addresses. PURE.

JobSet's API is jobset.x-k8s.io/v1alpha2. The failure of a pod counts towards the restarts, unless
the pod was taken away: it then has the condition DisruptionTarget, or its role's exit status says
that it was asked to end. (With the status 0 a role would count as done, and never come back.)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddiloco.checks import option, require
from ddiloco.environment import TERMINATED
from ddiloco.launch import placement
from ddiloco.launch.placement import FOLDER, PROBE_PORT, SHARD_PORT, WORK, PlacedIsland, Placement

Document = dict[str, Any]

RUN, ROLE = "ddiloco/run", "ddiloco/role"  # labels of all objects
JOBSETS = "jobsets.jobset.x-k8s.io"
KINDS = f"{JOBSETS},services,configmaps,secrets"  # of a run's objects
_GKE_CONTEXT = re.compile(r"gke_([^_]+)_([^_]+)_(.+)")
_POOL_NAME = 40  # characters of a node pool's name that GKE takes
_BESIDE_DRAIN_SECONDS = 10  # for a pod to end after draining: last log lines, a snapshot under way


@dataclasses.dataclass(frozen=True)
class GkeRun:
  """A run in clusters of GKE."""

  placement: Placement
  claim: str = option("", "ReadWriteMany volume claim, in every cluster: workdir is on it.")
  namespace: str = option("default", "Namespace in every cluster.")
  service_account: str = option("", "Account of pods, to write the bucket; else the namespace's.")
  cluster_domain: str = option("cluster.local", "Domain of names in a cluster.")
  shard_cpus: int = option(8, "CPUs of each shard, with a machine to itself, and evaluator.", 1)
  shard_memory: str = option("32Gi", "Memory of each shard (`ddiloco plan` says it).")
  evaluator_memory: str = option(
    "", "Memory of the evaluator, 8 bytes a parameter to save the result; else as a shard."
  )
  shard_addresses: tuple[str, ...] = option(
    (), "Reserved internal addresses of the shards, where there are two clusters."
  )
  delete_minutes: float = option(10.0, "The longest that delete waits.", 0.0)

  @property
  def name(self) -> str:
    return self.placement.name

  def check(self) -> None:
    """Refuses options (ConfigError) that are missing, or do not fit the run."""
    rule = "workdir (event logs, result) must outlive pods, on a volume that many can write"
    fix = "make a ReadWriteMany claim in every cluster (docs/launch.md) and give --claim=NAME"
    require(bool(self.claim), "--claim", self.claim, rule, fix)
    for name in ("namespace", "cluster_domain"):  # empty, no island would find a shard
      rule, fix = "is a part of the shards' names", "leave the flag out, or give what it is there"
      require(bool(getattr(self, name)), f"--{name}", "", rule, fix)
    spare = _POOL_NAME - max(len(f"-{island.role}") for island in self.placement.islands)
    rule = f"names node pools, which have at most {_POOL_NAME} characters, with NAME-learner-NUMBER"
    fix = f"use at most {spare}"
    require(len(self.name) <= spare, "--name", self.name, rule, fix)
    count, given = len(self.placement.shards), self.shard_addresses
    rule = f"islands of another cluster need an address of each of the {count} shards"
    create = f"gcloud compute addresses create {self.name}-shard-{{0..{count - 1}}}"
    fix = (
      f"reserve them ({create} --region=REGION --subnet=SUBNET) and give"
      " --shard_addresses=ADDRESS,..."
    )
    apart = len(self.contexts()) > 1
    require(len(given) == count or not (apart or given), "--shard_addresses", given, rule, fix)
    urls = [f"tcp://{host}:{SHARD_PORT}" for host in given]
    placement.require_urls(urls, "--shard_addresses", given)

  def contexts(self) -> list[str]:
    """kubectl's names of the clusters; shards and evaluator are in the first one."""
    return list(dict.fromkeys(island.where for island in self.placement.islands))

  def jobsets(self) -> dict[str, str]:
    """The names of the run's JobSets, and the cluster of each."""
    home = dict.fromkeys(("shards", "evaluator"), self.contexts()[0])
    roles = home | {island.role: island.where for island in self.placement.islands}
    return {f"{self.name}-{role}": context for role, context in roles.items()}

  def documents(
    self, public: Mapping[str, str], secrets: Mapping[str, str]
  ) -> dict[str, list[Document]]:
    """The documents of each cluster, by context.

    Args:
      public: the public keys by file name.
      secrets: the secret keys by file name; each goes to the cluster of its role alone.
    """
    home = self.contexts()[0]
    found: dict[str, list[Document]] = {}
    for context in self.contexts():
      islands = [island for island in self.placement.islands if island.where == context]
      roles = [island.role for island in islands]
      if context == home:
        roles += [f"syncer-{s}" for s in self.placement.shards] + ["evaluator"]
      found[context] = [
        self._object("ConfigMap", "config", data={"config.json": self.placement.config.to_json()}),
        self._object("ConfigMap", "public-keys", data=dict(public)),
        *(self._secret(role, secrets) for role in roles),
      ]
      if context == home:
        found[context] += [self._service(s, url) for s, url in enumerate(self.shard_addresses)]
        found[context] += [self._shards(), self._evaluator()]
      found[context] += [self._island(island, context == home) for island in islands]
    return found

  def node_pools(self) -> list[str]:
    """The commands that make the islands' node pools, one a slice, with their policies if any.

    The user runs them; clusters that make their own nodes (Autopilot) need none.
    """
    commands = []
    for island in self.placement.islands:
      match, shape = _GKE_CONTEXT.fullmatch(island.where), island.shape
      project, location, cluster = match.groups() if match else ("PROJECT", "LOCATION", "CLUSTER")
      pool = f"{self.name}-{island.role}"
      flags = {
        "project": project,
        "cluster": cluster,
        "location": location,
        "machine-type": shape.machine_type,
        "num-nodes": shape.hosts,
      }
      if shape.kind.gpu:
        kind = f"type={shape.kind.gke_accelerator},count={shape.chips}"
        flags["accelerator"] = f"{kind},gpu-driver-version=latest"
      if shape.hosts > 1 and shape.kind.by_policy:
        region = re.sub(r"-[a-z]$", "", location)  # of a zone
        where = f"--project={project} --region={region}"
        how = f"--type=HIGH_THROUGHPUT --accelerator-topology={shape.topology}"
        create = "gcloud compute resource-policies create workload-policy"
        commands.append(f"{create} {pool} {where} {how}")
        flags["placement-policy"] = pool
      elif shape.hosts > 1:
        flags["tpu-topology"] = shape.topology
      words = [f"--{name}={value}" for name, value in flags.items()]
      words += ["--spot"] if self.placement.spot else []
      commands.append(f"gcloud container node-pools create {pool} {' '.join(words)}")
    return commands

  # --- documents ---------------------------------------------------------------------------------

  def _object(self, kind: str, name: str, role: str = "", **fields: Any) -> Document:
    """A document of this run; `role`: the role that it belongs to."""
    labels = {RUN: self.name} | ({ROLE: role} if role else {})
    metadata = {"name": f"{self.name}-{name}", "namespace": self.namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **fields}

  def _secret(self, role: str, secrets: Mapping[str, str]) -> Document:
    file = f"{role}.key_secret"
    text = {file: secrets.get(file, "")}
    # Other keys would shut out all roles of a run that goes on: a cluster refuses them.
    fixed = {"type": "Opaque", "immutable": True}
    return self._object("Secret", f"{role}-key", role, stringData=text, **fixed)

  def _service(self, shard: int, address: str) -> Document:
    """An internal address of a shard, which all regions of the network reach."""
    role = f"syncer-{shard}"
    spec = {
      "type": "LoadBalancer",
      "loadBalancerIP": address,
      # A shard that waits for learners is not ready, but they must reach it.
      "publishNotReadyAddresses": True,
      "selector": {RUN: self.name, ROLE: role},
      "ports": [{"name": "ddiloco", "port": SHARD_PORT, "protocol": "TCP"}],
    }
    service = self._object("Service", role, role, spec=spec)
    service["metadata"]["annotations"] = {
      "networking.gke.io/load-balancer-type": "Internal",
      "networking.gke.io/internal-load-balancer-allow-global-access": "true",
    }
    return service

  def _island(self, island: PlacedIsland, at_home: bool) -> Document:
    """An island's JobSet: if one host fails, its Job ends, and the JobSet makes all hosts anew."""
    shape, jobset = island.shape, f"{self.name}-{island.role}"
    accelerator, spot = shape.kind.gke_accelerator, "cloud.google.com/gke-spot"
    nodes = {
      "cloud.google.com/gke-tpu-accelerator": accelerator,
      "cloud.google.com/gke-tpu-topology": shape.topology,
    }
    if shape.kind.gpu:
      nodes = {"cloud.google.com/gke-accelerator": accelerator}
    pod: Document = {"nodeSelector": nodes}
    if self.placement.spot:
      nodes[spot] = "true"
      toleration = {"key": spot, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
      pod["tolerations"] = [toleration]
    command = [
      *self._command(island.role, at_home),
      *placement.host_flags(shape, "$(JOB_COMPLETION_INDEX)", self._dns(jobset, "host")),
    ]
    chips = {"nvidia.com/gpu" if shape.kind.gpu else "google.com/tpu": shape.chips_per_host}
    job = self._job(island.role, command, chips, pod, shape.hosts)
    role = job["template"]["spec"]
    # Its container is not privileged and raises no limit on locked memory, as those of Google's
    # manifests of 2026 for v6e and TPU7x (GoogleCloudPlatform/kubernetes-engine-samples, ai-ml/:
    # llm-training-jax-tpu-gemma3, gke-tpu-dynamic-slicing). Autopilot refuses privileged ones.
    (container,) = role["containers"]
    variables = placement.environment_of(shape).items()
    container["env"] = [{"name": name, "value": value} for name, value in variables]
    if shape.kind.gpu:  # NCCL shares memory there, and a container has 64 MB by default
      role["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
      container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    document = self._restarted(island.role, "host", job)
    if shape.hosts > 1:  # all its pods on one slice, without pods of other islands
      exclusive = "alpha.jobset.sigs.k8s.io/exclusive-topology"
      document["metadata"]["annotations"] = {exclusive: "cloud.google.com/gke-nodepool"}
    return document

  def _evaluator(self) -> Document:
    """The evaluator, in a JobSet of its own: if it is given up, the shards go on."""
    resources = self._resources(self.evaluator_memory or self.shard_memory)
    job = self._job("evaluator", self._command("evaluator"), resources, {})
    return self._restarted("evaluator", "evaluator", job)

  def _restarted(self, role: str, job_name: str, job: Document) -> Document:
    """A JobSet of one Job, which is made anew as a whole whenever one of its pods fails."""
    job |= {"backoffLimit": 0, "podFailurePolicy": _when_taken_away("FailJob")}
    preempted = {
      "name": "preempted",
      "action": "RestartJobSetAndIgnoreMaxRestarts",
      "onJobFailureReasons": ["PodFailurePolicy"],
    }
    policy = {"maxRestarts": self.placement.max_restarts, "rules": [preempted]}
    return self._jobset(role, policy, {job_name: job})

  def _shards(self) -> Document:
    """The shards' JobSet: each shard's Job makes its failed pod anew, without the other shards."""
    apart = {
      "topologyKey": "kubernetes.io/hostname",  # each shard on another machine
      "labelSelector": {
        "matchExpressions": [
          {"key": RUN, "operator": "In", "values": [self.name]},
          {"key": ROLE, "operator": "In", "values": [f"syncer-{s}" for s in self.placement.shards]},
        ]
      },
    }
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    jobs = {}
    for shard in self.placement.shards:
      role = f"syncer-{shard}"
      resources, pod = self._resources(self.shard_memory), {"affinity": affinity}
      jobs[f"shard-{shard}"] = {
        **self._job(role, self._command(role), resources, pod),
        "backoffLimit": self.placement.max_restarts,
        "podReplacementPolicy": "Failed",  # never two pods of one shard
        "podFailurePolicy": _when_taken_away("Ignore"),
      }
    return self._jobset("shards", {"maxRestarts": 0}, jobs)

  def _jobset(self, name: str, policy: Document, jobs: Mapping[str, Document]) -> Document:
    replicated = [
      {"name": job, "replicas": 1, "template": {"spec": spec}} for job, spec in jobs.items()
    ]
    spec = {
      "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
      "failurePolicy": policy,
      "replicatedJobs": replicated,
    }
    jobset = self._object("JobSet", name, name, spec=spec)
    return {**jobset, "apiVersion": "jobset.x-k8s.io/v1alpha2"}

  def _job(
    self,
    role: str,
    command: Sequence[str],
    resources: Mapping[str, Any],
    pod: Document,
    hosts: int = 1,
  ) -> Document:
    """A role's Job: one pod a host, with the role's own key."""
    drain_seconds = self.placement.config.network.drain_seconds
    container: Document = {
      "name": "role",
      "image": self.placement.image,
      "command": list(command),
      "workingDir": WORK,  # relative paths in the config start here
      "ports": [{"containerPort": PROBE_PORT, "name": "probes", "protocol": "TCP"}],
      "resources": {"requests": dict(resources), "limits": dict(resources)},
      "volumeMounts": [
        {"name": "work", "mountPath": WORK},
        {"name": "config", "mountPath": f"{FOLDER}/config", "readOnly": True},
        {"name": "public-keys", "mountPath": f"{FOLDER}/keys/public", "readOnly": True},
        {"name": "secret-key", "mountPath": f"{FOLDER}/keys/secret", "readOnly": True},
      ],
      # Hosts of one island watch each other, but none waits for a host 0 that gives no orders.
      "livenessProbe": {
        "httpGet": {"path": "/livez", "port": PROBE_PORT},
        "initialDelaySeconds": 60,  # Python and JAX
        "periodSeconds": 10,
        "timeoutSeconds": 5,
        "failureThreshold": 6,  # in addition to the role's own limit for a step
      },
    }
    name = self.name
    volumes = [
      {"name": "work", "persistentVolumeClaim": {"claimName": self.claim}},
      {"name": "config", "configMap": {"name": f"{name}-config"}},
      {"name": "public-keys", "configMap": {"name": f"{name}-public-keys"}},
      {"name": "secret-key", "secret": {"secretName": f"{name}-{role}-key", "defaultMode": 0o400}},
    ]
    if self.service_account:
      pod = {"serviceAccountName": self.service_account, **pod}
    return {
      "parallelism": hosts,
      "completions": hosts,
      "completionMode": "Indexed",
      "template": {
        "metadata": {"labels": {RUN: name, ROLE: role}},
        "spec": {
          "restartPolicy": "Never",  # as podFailurePolicy demands
          "terminationGracePeriodSeconds": round(drain_seconds) + _BESIDE_DRAIN_SECONDS,
          "containers": [container],
          "volumes": volumes,
          **pod,
        },
      },
    }

  def _resources(self, memory: str) -> Document:
    return {"cpu": str(self.shard_cpus), "memory": memory}

  def _dns(self, jobset: str, job: str) -> str:
    """The name of a Job's first pod; a pod resolves its own full name without DNS."""
    return f"{jobset}-{job}-0-0.{jobset}.{self.namespace}.svc.{self.cluster_domain}"

  def _command(self, role: str, at_home: bool = True) -> list[str]:
    """A role's command; shards are reached by name in their own cluster, by address elsewhere."""
    jobset = f"{self.name}-shards"
    names = [self._dns(jobset, f"shard-{shard}") for shard in self.placement.shards]
    urls = [f"tcp://{host}:{SHARD_PORT}" for host in (names if at_home else self.shard_addresses)]
    return placement.role_command(self.placement, role, urls)


def _when_taken_away(action: str) -> Document:
  """A Job's policy for pods that were taken away or asked to end."""
  disrupted = [{"type": "DisruptionTarget", "status": "True"}]
  asked = {"containerName": "role", "operator": "In", "values": [TERMINATED]}
  rules: list[Document] = [{"onPodConditions": disrupted}, {"onExitCodes": asked}]
  return {"rules": [{"action": action, **rule} for rule in rules]}


def redacted(document: Document) -> Document:
  """The document to show: of secrets only their size."""
  if document["kind"] != "Secret":
    return document
  shown = {
    name: f"({len(text)} bytes, not shown)" if text else "(missing: ddiloco keys makes it)"
    for name, text in document["stringData"].items()
  }
  return {**document, "stringData": shown}


# --- The state of a run in a cluster

UNSEEN = -1  # instead of a JobSet's number of Jobs, where its cluster does not answer
_JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"  # a label of pods


@dataclasses.dataclass(frozen=True)
class JobSetState:
  """One JobSet's state, from its status."""

  name: str
  end: str = ""  # "Completed", "Failed", or "" while it goes on
  ready: int = 0  # Jobs whose pods all run, or have succeeded
  jobs: int = 0  # Jobs in all; 0: there is no such JobSet; or UNSEEN
  restarts: tuple[int, int] = (0, 0)  # in all, and those that count
  reason: str = ""  # why it failed, or one of its pods does not run yet

  def __str__(self) -> str:
    known = {0: "is not there", UNSEEN: "is not seen"}
    end = self.end or known.get(self.jobs, f"{self.ready} of {self.jobs} ready")
    all_restarts, counted = self.restarts
    again = f", {all_restarts} restarts, {counted} of them failures" if all_restarts else ""
    return f"{self.name}: {end}{again}{f' ({self.reason})' if self.reason else ''}"


def states(listed: Sequence[Mapping[str, Any]], names: Iterable[str]) -> list[JobSetState]:
  """The states of the JobSets `names`, and of others that are there too.

  Args:
    listed: JobSets and their pods, as `kubectl get -o json` prints them under "items".
  """
  found, waits = {name: JobSetState(name) for name in names}, dict[str, str]()
  for item in sorted(listed, key=lambda each: each["kind"], reverse=True):  # pods first
    metadata, status = item["metadata"], item.get("status", {})
    name, jobs = metadata["name"], status.get("replicatedJobsStatus", [])
    if item["kind"] == "Pod":
      jobset, why = metadata["labels"].get(_JOBSET_NAME, ""), _waits(status)
      waits[jobset] = waits.get(jobset) or (why and f"pod {name}: {why}")
      continue
    end = status.get("terminalState", "")
    failed = [c for c in status.get("conditions", []) if c["type"] == "Failed"]
    found[name] = JobSetState(
      name=name,
      end=end,
      ready=sum(each.get("ready", 0) + each.get("succeeded", 0) for each in jobs),
      jobs=len(item["spec"]["replicatedJobs"]),
      restarts=(status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)),
      reason=failed[0].get("message", "") if failed else waits.get(name, "" if end else "no pod"),
    )
  return list(found.values())


def _waits(pod: Mapping[str, Any]) -> str:
  """Why a pod of this status does not run yet: it has no node, or a container waits; else ""."""
  nodes = [c for c in pod.get("conditions", []) if c["type"] == "PodScheduled"]
  containers = (c.get("state", {}).get("waiting") for c in pod.get("containerStatuses", []))
  waits = *(c for c in nodes if c["status"] == "False"), *filter(None, containers)
  said = [f"{each.get('reason', '')}: {each.get('message', '')}" for each in waits]
  return " ".join(said[0].split()).strip(": ") if said else ""
