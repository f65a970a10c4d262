"""Stand-ins for kubectl and gcloud: they keep a cloud in a folder, and what they are asked.

They answer in the words of the real ones (kubectl 1.32, Google Cloud SDK 528). A call comes to them
in the test's own process, since there are hundreds; `test_cloud_calls.py` has those of processes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ddiloco.launch import cloud as calls

GROUPS = {"JobSet": "jobset.jobset.x-k8s.io"}


def named(document: dict[str, Any]) -> str:
  kind = document["kind"]
  return f"{GROUPS.get(kind, kind.lower())}/{document['metadata']['name']}"


class Program:
  """One call: `answer` gives the lines of its output, and SystemExit its error."""

  def __init__(self, cloud: Path, words: list[str], stdin: str):
    self.cloud, self.stdin = cloud, stdin
    self.flags = dict(w[2:].partition("=")[::2] for w in words if w.startswith("--"))
    self.plain = [w for w in words[1:] if not w.startswith("--")]

  def has(self, name: str) -> bool:
    return (self.cloud / name).exists()


class Kubectl(Program):
  def answer(self) -> Iterator[str]:
    if self.plain[:2] == ["config", "get-contexts"]:
      return (path.name.partition("-")[2] for path in sorted(self.cloud.glob("cluster-?*")))
    self.context = self.flags.get("context", "")
    once = f"unreachable-once-{self.context}"
    if self.has(f"unreachable-{self.context}") or self.has(once):
      (self.cloud / once).unlink(missing_ok=True)
      raise SystemExit("Unable to connect to the server: dial tcp 10.9.9.9:443: i/o timeout")
    if self.has(f"without-jobset-{self.context}"):
      raise SystemExit('error: the server doesn\'t have a resource type "jobsets"')
    self.folder = self.cloud / f"cluster-{self.context}"
    self.folder.mkdir(exist_ok=True)
    return getattr(self, self.plain[0])()

  def apply(self) -> Iterator[str]:
    for document in yaml.load_all(self.stdin, yaml.CSafeLoader):
      path = self.folder / named(document).replace("/", "@")
      document["metadata"]["uid"] = f"{self.context} {path.name}"
      old = json.loads(path.read_text()) if path.exists() else document
      what = f'The {document["kind"]} "{document["metadata"]["name"]}" is invalid'
      if document.get("stringData") != old.get("stringData") and old["immutable"]:
        raise SystemExit(f"{what}: data: Forbidden: field is immutable when `immutable` is set")
      if document["kind"] == "JobSet" and document["spec"] != old["spec"]:
        raise SystemExit(f'{what}: spec.replicatedJobs: Invalid value: "": field is immutable')
      if self.flags.get("dry-run") != "server":
        path.write_text(json.dumps(old | document))
      yield f"{named(document)} serverside-applied"

  def found(self) -> list[tuple[Path, dict[str, Any]]]:
    key, _, value = self.flags["selector"].partition("=")
    kinds = [k.rstrip("s").replace("jobsets.", "jobset.") for k in self.plain[1].split(",")]
    found = []
    for path in sorted(self.folder.iterdir()):
      document = json.loads(path.read_text())
      kind = named(document).partition("/")[0]
      if kind in kinds and document["metadata"]["labels"][key] == value:
        found.append((path, document))
    return found

  def delete(self) -> Iterator[str]:
    stuck = (self.cloud / "stuck").read_text() if self.has("stuck") else ""
    for path, document in self.found():
      if document["metadata"]["name"] in stuck.split():
        raise SystemExit(f"error: timed out waiting for the condition on {named(document)}")
      path.unlink()
      yield f"{named(document).replace('/', ' ')} deleted"

  def get(self) -> Iterator[str]:
    documents = [document for _, document in self.found()]
    if self.flags["output"] == "name":
      yield from map(named, documents)
    else:
      yield json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})


NO_ZONE = "PERMISSION_DENIED: Permission denied on 'locations/z' (or it may not exist)."
REFUSALS = {  # in the words of the TPU API
  "full": '{"code": 8, "message": "There is no more capacity in the zone"}',
  "used-up": "RESOURCE_EXHAUSTED: Quota limit 'TPUV6E' has been exceeded. Limit: 10 in zone z.",
  "no-quota": "RESOURCE_EXHAUSTED: Quota limit 'TPUV6E' has been exceeded. Limit: 0 in zone z.",
  "no-zone": NO_ZONE + " reason: LOCATION_POLICY_VIOLATED" * 40,
  "no-type": "INVALID_ARGUMENT: Cloud TPU received a bad request. the accelerator was not found",
}
FAILURES = {  # of queued resources
  "failed": {"code": 8, "message": "Quota 'TPUS' exceeded"},
  "denied": {"code": 7, "message": "this service account may not"},
}


def labels_of(node: dict[str, Any]) -> dict[str, str]:
  return dict(each.split("=") for each in node["flags"].get("labels", "").split(",") if each)


class Gcloud(Program):
  """A slice: {"state", "roles": [of each host]}; its plan is what happens at each look at it."""

  def answer(self) -> Iterator[str]:
    _, _, self.group, verb, *self.rest = self.plain
    self.name = self.rest[-1].partition(":")[0] if self.rest else "none"
    self.path = self.cloud / f"slice-{self.name}"
    self.node = json.loads(self.path.read_text()) if self.path.exists() else None
    self.failed = f"ERROR: (gcloud.compute.tpus.{self.group}.{verb})"
    self.missing = SystemExit(f"{self.failed} NOT_FOUND: Resource '{self.name}' was not found")
    if self.has(f"silent-{self.flags['zone']}"):
      raise SystemExit("ERROR: UNAVAILABLE: The service is currently unavailable.")
    return getattr(self, verb)()

  def happens(self) -> str:
    """The next thing of the plan."""
    plan = self.cloud / f"plan-{self.name}"
    planned = plan.read_text().split() if plan.exists() else []
    if planned:
      plan.write_text(" ".join(planned[1:]))
    return planned[0] if planned else ""

  def save(self) -> None:
    self.path.write_text(json.dumps(self.node))

  def create(self) -> Iterator[str]:
    event = self.happens()
    if event in REFUSALS:
      raise SystemExit(f"{self.failed} {REFUSALS[event]}")
    if self.node is not None:
      raise SystemExit("ERROR: ALREADY_EXISTS: Resource already exists")
    queue = {"queue": "WAITING_FOR_RESOURCES"} if self.group == "queued-resources" else {}
    self.node = {"state": "READY", "roles": [], "flags": self.flags, **queue}
    self.save()
    yield from ()

  def describe(self) -> Iterator[str]:
    if self.has(f"hidden-{self.name}"):
      raise SystemExit(f"{self.failed} {NO_ZONE}")
    if self.node is None:
      raise self.missing
    event = self.happens()
    unmade = self.group == "tpu-vm" and self.has(f"unmade-{self.name}")
    if unmade or event == "deleted":
      (self.cloud / f"unmade-{self.name}" if unmade else self.path).unlink()
      raise self.missing
    if event == "active":
      self.node |= {"queue": "ACTIVE"} if "queue" in self.node else {}
    elif event in FAILURES:
      self.node |= {"queue": "FAILED", "why": FAILURES[event]}
    elif event and event != "same":
      self.node["state"] = event
    self.save()
    yield json.dumps(self.described())

  def described(self) -> dict[str, Any]:
    node, labels = self.node, labels_of(self.node)
    if self.group == "queued-resources":
      more = {"failedData": {"error": node["why"]}} if node["queue"] == "FAILED" else {}
      specs = {"nodeSpec": [{"nodeId": self.name, "node": {"labels": labels}}]}
      return {"name": self.name, "state": {"state": node["queue"], **more}, "tpu": specs}
    ends = [{"ipAddress": "10.1.0.1", "port": 8470}, {"ipAddress": "10.1.0.2", "port": 8470}]
    state = {"state": node["state"], "labels": labels, "networkEndpoints": ends}
    return {"name": self.name, **state}

  def list(self) -> Iterator[str]:
    if self.has("unlisted"):
      raise SystemExit("ERROR: UNAVAILABLE: no answer")
    found = []
    for path in sorted(self.cloud.glob("slice-*")):
      node = json.loads(path.read_text())
      zone, name = node["flags"]["zone"], path.name.removeprefix("slice-")
      here = f"projects/p/locations/{zone}"
      if self.has(f"silent-{zone}") or self.flags["zone"] not in ("-", zone):
        continue  # nor is that said
      if self.group == "tpu-vm" and node.get("queue", "ACTIVE") == "ACTIVE":  # it is there already
        each = {"name": f"{here}/nodes/{name}", "state": node["state"], "labels": labels_of(node)}
      elif self.group == "queued-resources" and "queue" in node:
        specs = [{"nodeId": name, "node": {"labels": labels_of(node)}}]
        each = {"name": f"{here}/queuedResources/{name}", "tpu": {"nodeSpec": specs}}
        each["state"] = {"state": node["queue"]}
      else:
        continue
      found.append(each)
    yield json.dumps(found)

  def delete(self) -> Iterator[str]:
    if self.node is None or self.flags["zone"] != self.node["flags"]["zone"]:
      raise self.missing
    if self.group == "queued-resources" and "force" not in self.flags:
      raise SystemExit(f"ERROR: FAILED_PRECONDITION: {self.name} is in the state ACTIVE")
    if self.has(f"stays-{self.name}"):
      raise SystemExit("ERROR: INTERNAL: try again")
    self.path.unlink()
    yield from ()

  def scp(self) -> Iterator[str]:
    home = self.cloud / f"home-{self.name}"
    shutil.copytree(self.rest[0], home / Path(self.rest[0]).name, dirs_exist_ok=True)
    yield from ()

  def ssh(self) -> Iterator[str]:
    script, fails = self.flags["command"], self.cloud / f"fails-ssh-{self.name}"
    if fails.exists() and fails.read_text() in script:
      fails.unlink()
      raise SystemExit("ERROR: ssh exited with [255]")
    hosts = int((self.cloud / "hosts").read_text())
    if "docker run" in script:
      self.node["roles"] = ["running 0"] * hosts
    if "docker stop" in script:
      self.node["roles"] = ["exited 143"] * hosts
    if "docker inspect" in script:
      event = self.happens()
      if event not in ("", "same"):
        self.node["roles"] = [event.replace("-", " ")] * hosts
      yield "Using ssh batch size of 1."
      yield from (f"role: {role}" for role in self.node["roles"] or ["none"] * hosts)
    self.save()


class Cloud:
  """The folder that the stand-ins keep."""

  def __init__(self, folder: Path):
    self.folder = folder

  def asked(self, program: str = "") -> list[list[str]]:
    path = self.folder / "asked.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return [words for words in found if not program or words[0] == program]

  def forget(self) -> None:
    (self.folder / "asked.jsonl").unlink(missing_ok=True)

  def has(self, name: str, text: str = "") -> None:
    (self.folder / name).write_text(text)

  def slices(self) -> dict[str, dict]:
    return {
      path.name.removeprefix("slice-"): json.loads(path.read_text())
      for path in sorted(self.folder.glob("slice-*"))
    }

  def set_status(self, context: str, name: str, status: dict) -> None:
    path = self.folder / f"cluster-{context}" / f"jobset.jobset.x-k8s.io@{name}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": status}))


def install(folder: Path, monkeypatch) -> Cloud:
  """Both programs, as all that `ddiloco.launch.cloud` can call."""
  cloud = Cloud(folder / "cloud")
  cloud.folder.mkdir(parents=True)

  class Call:
    """In the place of a process."""

    def __init__(self, command: list[str], **_: object):
      self.command, self.returncode = command, 0

    def communicate(self, stdin: str, timeout: float) -> tuple[str, str]:
      assert timeout > 0
      with (cloud.folder / "asked.jsonl").open("a") as file:
        file.write(json.dumps(self.command) + "\n")
      program = {"kubectl": Kubectl, "gcloud": Gcloud}[self.command[0]]
      try:
        lines = program(cloud.folder, self.command, stdin).answer()
        return "".join(f"{line}\n" for line in lines), ""
      except SystemExit as error:
        self.returncode = 1
        return "", str(error)

  called = types.SimpleNamespace(**vars(subprocess) | {"Popen": Call})
  monkeypatch.setattr(calls, "subprocess", called)
  return cloud
