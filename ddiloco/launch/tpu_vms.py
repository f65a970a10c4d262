"""Islands on TPU VMs of Compute Engine: the commands, and what each island needs next. PURE.

A slice is made, watched and deleted by `gcloud compute tpus tpu-vm`, or, in the older way, asked
for with `queued-resources`. Its hosts run the role in a container, which Docker restarts when it
fails. Shards run elsewhere, at urls that the islands reach.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddiloco.checks import option, require
from ddiloco.launch import placement
from ddiloco.launch.placement import FOLDER, WORK, PlacedIsland, Placement

STAGED = "ddiloco"  # on a host, under the user's home
GROUPS = ("tpu-vm", "queued-resources")  # gcloud's names of slices, and of requests for them
_LABEL, _IDENTITY = "ddiloco-run", "ddiloco-identity"  # of every slice: the run's name, and that
_ROLE = "role: "  # begins the line that `look_script` prints on a host
_WORKER = (
  "http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number"
)


class Slice(NamedTuple):
  """A slice, by which the cloud knows it."""

  name: str
  zone: str


@dataclasses.dataclass(frozen=True)
class TpuVmRun:
  """Islands of a run on TPU VMs."""

  placement: Placement
  syncers: tuple[str, ...] = option((), "Urls of all shards, as the slices reach them.")
  project: str = option("", "Project of the cloud; else gcloud's own.")
  queued: bool = option(False, "Ask by queued resources, the older way.")
  host_folder: str = option(
    "/var/lib/ddiloco", "Folder of a host's workdirs; it ends with the slice, unless it is shared."
  )
  runtime_version: str = option("", "Image of the VMs; else the topology's own.")
  slice_minutes: float = option(60.0, "The longest wait for a slice.", 0.0)
  recreations: int = option(20, "How often a slice that was taken away is made again.", 0)
  identity: str = ""  # a digest: another run of this name has another one; "": not known

  @property
  def name(self) -> str:
    return self.placement.name

  def check(self) -> None:
    """Refuses options (ConfigError) that are missing, or do not fit the run."""
    rule = (
      f"must name the {len(self.placement.shards)} shards of sync.num_shards, which run elsewhere"
    )
    fix = "start them first (docs/launch.md) and give --syncers=tcp://ADDRESS:7000,..."
    right = len(self.syncers) == len(self.placement.shards)
    require(right, "--syncers", ",".join(self.syncers), rule, fix)
    placement.require_urls(self.syncers, "--syncers", self.syncers)
    rule = "is where hosts keep their workdirs: must begin with / and have no colon"
    folder, fix = self.host_folder, "leave the flag out, or give a folder of the hosts"
    good = folder.startswith("/") and ":" not in folder  # else Docker refuses it, or makes a volume
    require(good, "--host_folder", folder, rule, fix)
    for island in self.placement.islands:
      rule = f"the TPU API, which makes TPU VMs, has no {island.shape.name}"
      topology, fix = f"{island.shape.name}:{island.shape.topology}", "use `ddiloco launch gke`"
      require(bool(island.shape.kind.runtime), "islands.topology", topology, rule, fix)
      fix = "give --place=us-east5-b=0,1, once for each zone"
      require(bool(island.where), "--place", "", f"{island.role} needs a zone", fix)

  # --- commands ----------------------------------------------------------------------------------

  def _tpu(self, what: str, zone: str, *words: str) -> list[str]:
    project = [f"--project={self.project}"] if self.project else []
    command = ["gcloud", "compute", "tpus", *what.split(), *words]
    return [*command, f"--zone={zone}", *project, "--quiet"]

  @property
  def group(self) -> str:
    """gcloud's name for what is made: slices, or requests for them."""
    return GROUPS[self.queued]

  def slice(self, island: PlacedIsland) -> Slice:
    return Slice(f"{self.name}-{island.role}", island.where)

  def create(self, island: PlacedIsland) -> list[str]:
    """Makes the slice and waits for it; with queued resources only asks for it."""
    name, zone = self.slice(island)
    runtime = self.runtime_version or island.shape.kind.runtime
    flags = [f"--accelerator-type={island.shape.accelerator_type}"]
    labels = f"{_LABEL}={self.name}" + (f",{_IDENTITY}={self.identity}" if self.identity else "")
    flags += [f"--labels={labels}", *(["--spot"] if self.placement.spot else [])]
    if self.queued:
      flags += [f"--runtime-version={runtime}", f"--node-id={name}"]
    else:
      flags += [f"--version={runtime}"]
    return self._tpu(f"{self.group} create", zone, name, *flags)

  def foreign(self, seen: Seen) -> bool:
    """Whether a slice, as its labels say, is of another run."""
    known = bool(self.identity and seen.identity)
    return seen.run != self.name or (known and seen.identity != self.identity)

  def describe(self, each: Slice, group: str = "tpu-vm") -> list[str]:
    return self._tpu(f"{group} describe", each.zone, each.name, "--format=json")

  def list_all(self, group: str) -> list[str]:
    """All slices of the project in all zones, or requests for them; `listed` finds the run's."""
    return self._tpu(f"{group} list", "-", "--format=json")

  def delete(self, each: Slice, group: str) -> list[str]:
    """Deletes the slice, or the request for it together with the slice."""
    force = ["--force"] if group == "queued-resources" else []
    return self._tpu(f"{group} delete", each.zone, each.name, *force)

  def copy(self, each: Slice, folder: str) -> list[str]:
    """Copies the local `folder`, whose name is STAGED, to the home of every host."""
    words = folder, f"{each.name}:.", "--recurse", "--worker=all"
    return self._tpu("tpu-vm scp", each.zone, *words)

  def on_hosts(self, each: Slice, script: str) -> list[str]:
    """Runs `script` in a shell on every host."""
    return self._tpu("tpu-vm ssh", each.zone, each.name, "--worker=all", f"--command={script}")

  def start_script(self, island: PlacedIsland, leader: str) -> str:
    """Starts the role on a host, replacing a container there; `leader`: address of host 0."""
    role = placement.role_command(self.placement, island.role, self.syncers)
    hosts = placement.host_flags(island.shape, '"$host"', leader)
    command = " ".join([*map(shlex.quote, role), *hosts])
    most = self.placement.max_restarts
    flags = [
      f"--name={self.name}",
      f"--restart={f'on-failure:{most}' if most else 'no'}",  # on-failure:0 is without a limit
      "--privileged",  # the chips are devices of the host
      "--net=host",
      *(f"--env={name}={value}" for name, value in placement.environment_of(island.shape).items()),
      f'--volume="$HOME/{STAGED}:{FOLDER}:ro"',
      f"--volume={shlex.quote(self.host_folder)}:{WORK}",
      f"--workdir={WORK}",
    ]
    registry = self.placement.image.partition("/")[0]
    login = f"sudo gcloud auth configure-docker {shlex.quote(registry)} --quiet && "
    known = registry.endswith((".pkg.dev", "gcr.io"))
    return (
      f"sudo docker rm --force {self.name} >/dev/null 2>&1; "
      f"chmod 700 ~/{STAGED}/keys/secret && chmod 600 ~/{STAGED}/keys/secret/* && "
      f"{login if known else ''}"
      f"host=$(curl -sf -H 'Metadata-Flavor: Google' {_WORKER}) && "
      f"sudo docker run --detach {' '.join(flags)} {shlex.quote(self.placement.image)} {command}"
    )

  def look_script(self) -> str:
    """Prints the role's state on a host in one line."""
    inspect = "sudo docker inspect --format='{{.State.Status}} {{.State.ExitCode}}'"
    return f'state=$({inspect} {self.name} 2>/dev/null) || state=none; echo "{_ROLE}$state"'

  @property
  def stop_seconds(self) -> int:
    """The longest that a role takes to stop."""
    return round(self.placement.config.network.drain_seconds) + 10

  def stop_script(self) -> str:
    """Stops the role, which drains first."""
    return f"sudo docker stop --time={self.stop_seconds} {self.name} || true"


# --- The state of an island, and its next need


@dataclasses.dataclass(frozen=True)
class Seen:
  """The state of a slice and of the role on its hosts."""

  # Its state in the TPU API's own words; "ABSENT": there is none, "FOREIGN": one of another run.
  slice: str
  # By host, as `look_script` prints them: "running 0", "exited 1", "none".
  roles: tuple[str, ...] = ()
  leader: str = ""  # address of host 0
  error: str = ""  # why a request has failed, or a query
  run: str = ""  # by its label
  identity: str = ""  # likewise

  def __str__(self) -> str:
    why = f": {self.error}" if self.error else ""
    return f"{self.slice.lower()}{why}, hosts {', '.join(sorted(set(self.roles))) or 'not seen'}"


class Need(enum.Enum):
  """What an island needs."""

  CREATE = "ask for the slice"
  WAIT = "wait for the slice"
  DELETE = "delete the slice, which was taken away"
  START = "start the role on its hosts"
  RUN = "it runs"
  DONE = "it is done"
  FAILED = "it has failed"


# By gcloud's texts and Google's codes: no permission, also where there is no such zone; no such
# slice in it; a quota of 0. What is used up now, chips or a quota, may be had later.
_FOR_GOOD = re.compile(r"PERMISSION_DENIED|INVALID_ARGUMENT|\bcode\W+[37]\b|Limit:? 0\b")


def refused_for_good(said: str) -> bool:
  """Whether the cloud, which said this, would say it again however often it is asked."""
  return _FOR_GOOD.search(said) is not None


_TAKEN = ("PREEMPTED", "TERMINATED", "STOPPED", "HIDDEN", "FAILED", "SUSPENDED")


def next_need(seen: Seen) -> Need:
  """The next need of one island, from its state."""
  if seen.slice == "ABSENT":
    return Need.CREATE
  if seen.slice in _TAKEN:
    return Need.DELETE
  if seen.slice != "READY":
    return Need.WAIT
  roles = set(seen.roles)
  if not roles or any(role.startswith(("none", "created")) for role in roles):
    return Need.START  # "created 127": Docker has made the container, and could not start it
  if roles == {"exited 0"}:
    return Need.DONE
  if any(role.startswith(("exited", "dead")) and role != "exited 0" for role in roles):
    return Need.FAILED
  return Need.RUN


def seen_slice(node: Mapping[str, Any]) -> Seen:
  """The state in the JSON of a TPU VM, without its roles, or of a queued resource: if that is
  "ACTIVE", see the TPU VM."""
  state: Any = node.get("state", {})
  nodes = [node, *(spec["node"] for spec in node.get("tpu", {}).get("nodeSpec", []))]
  labels = {key: text for each in nodes for key, text in each.get("labels", {}).items()}
  whose = {"run": labels.get(_LABEL, ""), "identity": labels.get(_IDENTITY, "")}
  endpoints: Sequence[dict[str, str]] = node.get("networkEndpoints") or [{}]
  if isinstance(state, str):
    return Seen(state, leader=endpoints[0].get("ipAddress", ""), **whose)
  error = state.get("failedData", {}).get("error", {})
  why = f"code {error.get('code')}: {error.get('message')}" if error else ""
  return Seen(state.get("state", "STATE_UNSPECIFIED"), error=why, **whose)


def listed(nodes: Sequence[Mapping[str, Any]], run: str) -> dict[Slice, Seen]:
  """Of the JSON that `TpuVmRun.list_all` prints, all slices with the label of the run."""
  found = {}
  for node in (each for each in nodes if seen_slice(each).run == run):
    _, _, _, zone, _, name = node["name"].split("/")  # projects/P/locations/ZONE/nodes/NAME
    found[Slice(name, zone)] = seen_slice(node)
  return found


def seen_roles(said: str) -> tuple[str, ...]:
  """The roles' states in the output of `look_script` on all hosts; other lines are ignored."""
  lines = [line for line in said.splitlines() if line.startswith(_ROLE)]
  return tuple(line.removeprefix(_ROLE).strip() for line in lines)
