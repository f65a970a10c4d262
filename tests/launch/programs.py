"""Stand-ins for kubectl and gcloud on PATH: they keep a cloud in a folder, and what they are asked.

They answer in the words of the real ones (kubectl 1.32, Google Cloud SDK 528).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import yaml

KUBECTL = r"""
import json, pathlib, sys
cloud = pathlib.Path(CLOUD)
words = sys.argv[1:]
flags = dict(w[2:].partition("=")[::2] for w in words if w.startswith("--"))
plain = [w for w in words if not w.startswith("--")]
with (cloud / "asked.jsonl").open("a") as file: file.write(json.dumps(["kubectl", *words]) + "\n")
if plain[:2] == ["config", "get-contexts"]:
  for path in sorted(cloud.glob("cluster-?*")): print(path.name.partition("-")[2])
  sys.exit()
context = flags.get("context", "")
once = cloud / f"unreachable-once-{context}"
if (cloud / f"unreachable-{context}").exists() or once.exists():
  once.unlink(missing_ok=True)
  sys.exit("Unable to connect to the server: dial tcp 10.9.9.9:443: i/o timeout")
if (cloud / f"without-jobset-{context}").exists():
  sys.exit("error: the server doesn't have a resource type \"jobsets\"")
folder = cloud / f"cluster-{context}"
folder.mkdir(exist_ok=True)
groups = {"JobSet": "jobset.jobset.x-k8s.io"}
named = lambda d: f"{groups.get(d['kind'], d['kind'].lower())}/{d['metadata']['name']}"
if plain[0] == "apply":
  sys.path.append(PACKAGES)
  import yaml
  for document in yaml.safe_load_all(sys.stdin.read()):
    path = folder / named(document).replace("/", "@")
    document["metadata"]["uid"] = f"{context} {path.name}"
    old = json.loads(path.read_text()) if path.exists() else document
    what = f'The {document["kind"]} "{document["metadata"]["name"]}" is invalid'
    if document.get("stringData") != old.get("stringData") and old["immutable"]:
      sys.exit(f"{what}: data: Forbidden: field is immutable when `immutable` is set")
    if document["kind"] == "JobSet" and document["spec"] != old["spec"]:
      sys.exit(f'{what}: spec.replicatedJobs: Invalid value: "": field is immutable')
    if flags.get("dry-run") != "server": path.write_text(json.dumps(old | document))
    print(f"{named(document)} serverside-applied")
  sys.exit()
key, _, value = flags["selector"].partition("=")
kinds = [k.rstrip("s").replace("jobsets.", "jobset.") for k in plain[1].split(",")]
found = []
for path in sorted(folder.iterdir()):
  document = json.loads(path.read_text())
  kind = named(document).partition("/")[0]
  if kind in kinds and document["metadata"]["labels"][key] == value: found.append((path, document))
if plain[0] == "delete":
  for path, document in found:
    if (cloud / "stuck").exists() and document["metadata"]["name"] in (cloud / "stuck").read_text():
      sys.exit(f"error: timed out waiting for the condition on {named(document)}")
    path.unlink()
    print(f"{named(document).replace('/', ' ')} deleted")
elif flags["output"] == "name":
  for _, document in found: print(named(document))
else:
  print(json.dumps({"apiVersion": "v1", "kind": "List", "items": [d for _, d in found]}))
"""

# A slice: {"state", "roles": [of each host], "plan": [what happens to it at each look at it]}
GCLOUD = r"""
import json, os, pathlib, sys, time
cloud = pathlib.Path(CLOUD)
words = sys.argv[1:]
line = json.dumps(["gcloud", *words]) + "\n"
log = os.open(cloud / "asked.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(log, line.encode())
flags = dict(w[2:].partition("=")[::2] for w in words if w.startswith("--"))
_, _, group, verb, *rest = [w for w in words if not w.startswith("--")]
name = rest[-1].partition(":")[0] if rest else "none"
path = cloud / f"slice-{name}"
plan = cloud / f"plan-{name}"
node = json.loads(path.read_text()) if path.exists() else None
missing = f"ERROR: (gcloud.compute.tpus.{group}.{verb}) NOT_FOUND: Resource '{name}' was not found"
if (cloud / "slow").exists(): time.sleep(60)
silent = lambda zone: (cloud / f"silent-{zone}").exists()
if silent(flags["zone"]): sys.exit("ERROR: UNAVAILABLE: The service is currently unavailable.")

def happens():  # the next thing of the plan
  planned = plan.read_text().split() if plan.exists() else []
  if planned: plan.write_text(" ".join(planned[1:]))
  return planned[0] if planned else ""

def happens_here(verb):  # a planned failure of this verb, now and once
  path = cloud / f"fails-{verb}-{name}"
  if path.exists() and path.read_text() in flags["command"]:
    path.unlink()
    return True
  return False

def save(): path.write_text(json.dumps(node))

def labels_of(node):
  return dict(each.split("=") for each in node["flags"].get("labels", "").split(",") if each)

no_zone = "PERMISSION_DENIED: Permission denied on 'locations/z' (or it may not exist)."
refusals = {  # in the words of the TPU API
  "full": '{"code": 8, "message": "There is no more capacity in the zone"}',
  "used-up": "RESOURCE_EXHAUSTED: Quota limit 'TPUV6E' has been exceeded. Limit: 10 in zone z.",
  "no-quota": "RESOURCE_EXHAUSTED: Quota limit 'TPUV6E' has been exceeded. Limit: 0 in zone z.",
  "no-zone": no_zone + " reason: LOCATION_POLICY_VIOLATED" * 40,
  "no-type": "INVALID_ARGUMENT: Cloud TPU received a bad request. the accelerator was not found",
}
failures = {  # of queued resources
  "failed": {"code": 8, "message": "Quota 'TPUS' exceeded"},
  "denied": {"code": 7, "message": "this service account may not"},
}

if verb == "create":
  event = happens()
  if event in refusals: sys.exit(f"ERROR: (gcloud.compute.tpus.{group}.create) {refusals[event]}")
  if node is not None: sys.exit("ERROR: ALREADY_EXISTS: Resource already exists")
  queued = group == "queued-resources"
  state = {"queue": "WAITING_FOR_RESOURCES"} if queued else {}
  node = {"state": "READY", "roles": [], "flags": flags, **state}
  save()
elif verb == "describe":
  if (cloud / f"hidden-{name}").exists():
    sys.exit(f"ERROR: (gcloud.compute.tpus.{group}.describe) {no_zone}")
  if node is None: sys.exit(missing)
  event = happens()
  labels = labels_of(node)
  unmade = cloud / f"unmade-{name}"
  if group == "tpu-vm" and unmade.exists():
    unmade.unlink()
    sys.exit(missing)
  if event == "deleted":
    path.unlink()
    sys.exit(missing)
  if event == "active": node |= {"queue": "ACTIVE"} if "queue" in node else {}
  elif event in failures: node["queue"], node["why"] = "FAILED", failures[event]
  elif event and event != "same": node["state"] = event
  save()
  if group == "queued-resources":
    more = {"failedData": {"error": node["why"]}} if node["queue"] == "FAILED" else {}
    specs = {"nodeSpec": [{"nodeId": name, "node": {"labels": labels}}]}
    print(json.dumps({"name": name, "state": {"state": node["queue"], **more}, "tpu": specs}))
  else:
    ends = [{"ipAddress": "10.1.0.1", "port": 8470}, {"ipAddress": "10.1.0.2", "port": 8470}]
    each = {"name": name, "state": node["state"], "labels": labels, "networkEndpoints": ends}
    print(json.dumps(each))
elif verb == "list":
  if (cloud / "unlisted").exists(): sys.exit("ERROR: UNAVAILABLE: no answer")
  found = []
  for path in sorted(cloud.glob("slice-*")):
    node = json.loads(path.read_text())
    here = f"projects/p/locations/{node['flags']['zone']}"
    name = path.name.removeprefix("slice-")
    if silent(node["flags"]["zone"]): continue  # nor is that said
    if group == "tpu-vm" and node.get("queue", "ACTIVE") != "ACTIVE": continue  # is not there yet
    if group == "queued-resources" and "queue" not in node: continue
    if group == "tpu-vm":
      each = {"name": f"{here}/nodes/{name}", "state": node["state"], "labels": labels_of(node)}
    else:
      specs = [{"nodeId": name, "node": {"labels": labels_of(node)}}]
      each = {"name": f"{here}/queuedResources/{name}", "tpu": {"nodeSpec": specs}}
      each["state"] = {"state": node["queue"]}
    if flags["zone"] in ("-", node["flags"]["zone"]): found.append(each)
  print(json.dumps(found))
elif verb == "delete":
  if node is None: sys.exit(missing)
  if flags["zone"] != node["flags"]["zone"]: sys.exit(missing)
  if group == "queued-resources" and "force" not in flags:
    sys.exit(f"ERROR: FAILED_PRECONDITION: {name} is in the state ACTIVE")
  if (cloud / f"stays-{name}").exists(): sys.exit("ERROR: INTERNAL: try again")
  path.unlink()
elif verb == "scp":
  import shutil
  shutil.copytree(rest[0], cloud / f"home-{name}" / pathlib.Path(rest[0]).name, dirs_exist_ok=True)
elif verb == "ssh":
  if happens_here("ssh"): sys.exit("ERROR: ssh exited with [255]")
  script, hosts = flags["command"], int((cloud / "hosts").read_text())
  if "docker run" in script: node["roles"] = ["running 0"] * hosts
  if "docker stop" in script: node["roles"] = ["exited 143"] * hosts
  if "docker inspect" in script:
    event = happens()
    if event not in ("", "same"): node["roles"] = [event.replace("-", " ")] * hosts
    print("Using ssh batch size of 1.")
    print("\n".join(f"role: {role}" for role in node["roles"] or ["none"] * hosts))
  save()
"""


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
  """Both programs, in front of PATH."""
  programs, cloud = folder / "bin", folder / "cloud"
  programs.mkdir(parents=True)
  cloud.mkdir()
  packages = str(Path(yaml.__file__).parent.parent)
  for name, text in (("kubectl", KUBECTL), ("gcloud", GCLOUD)):
    path, where = programs / name, f"CLOUD, PACKAGES = {str(cloud)!r}, {packages!r}"
    path.write_text(f"#!{sys.executable} -S\n{where}\n{text}")
    path.chmod(0o755)
  monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
  return Cloud(cloud)
