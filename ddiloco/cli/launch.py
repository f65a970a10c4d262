"""Commands that bring a run to a cloud: what it costs first, then create, status, watch, delete."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any, TypeVar

from absl import flags

from ddiloco.checks import require
from ddiloco.cli.arguments import config_flag, final_config, parse
from ddiloco.config import ConfigError
from ddiloco.launch import clusters, costs, gke, slices, tpu_vms
from ddiloco.launch.calls import LaunchError, say
from ddiloco.launch.placement import Placement, place
from ddiloco.network.keys import public_file, secret_file

ACTIONS = ("create", "status", "watch", "delete")
FINISHED, LOST = 0, 1
_Run = TypeVar("_Run", gke.GkeRun, tpu_vms.TpuVmRun)


def launch(arguments: list[str]) -> int:
  """Brings a run to a cloud: every island its own, shards and evaluator beside one of them.

    ddiloco launch gke     [create|status|watch|delete] --config=FILE --name=RUN ...   JobSets
    ddiloco launch tpu-vms [create|status|watch|delete] --config=FILE --name=RUN ...   TPU VMs

  create is meant if no action is named. It prints what runs where and what that costs, and makes
  nothing without --yes; --dry_run prints all that would be made, or done, and needs no cloud.
  Every action may be repeated: create goes on where it stopped. Give all of them the same flags.
  The slices are those of islands.topology. docs/launch.md leads through a run over two regions.
  """
  targets = {"gke": _gke, "tpu-vms": _tpu_vms}
  words = [a for a in arguments[1:3] if not a.startswith("-")]
  wanted = [a for a in arguments if a in ("-h", "--help", "-help")]
  target, action = (*words, "create")[:2] if words else ("gke" if wanted else "", "create")
  fix = f"for example `ddiloco launch gke --help`; there are {', '.join(targets)}"
  require(target in targets, "ddiloco launch", target, "must name where", fix)
  require(action in ACTIONS, "ddiloco launch", action, f"must be one of {', '.join(ACTIONS)}", fix)
  rest = [arguments[0], *arguments[1 + len(words) :]]
  try:
    return targets[target](rest, action)
  except LaunchError as error:
    say(str(error))
    return LOST


def _common_flags(values: flags.FlagValues) -> None:
  define: dict[str, Any] = {"flag_values": values}
  flags.DEFINE_string("name", "", "Of the run; all that is made begins with it.", **define)
  flags.DEFINE_string("image", "", "Container image with ddiloco[tpu,gcs].", **define)
  flags.DEFINE_string("bucket", "", "gs://BUCKET/FOLDER of the snapshots.", **define)
  flags.DEFINE_string("keys", "keys", "Folder that `ddiloco keys` made.", **define)
  flags.DEFINE_multi_string(
    "place",
    [],
    "WHERE=0,2-3: these islands are in this cluster (a kubectl context) or zone. Once for each;"
    " shards are where learner 0 is.",
    **define,
  )
  flags.DEFINE_bool("spot", False, "Islands on machines that may be taken away.", **define)
  flags.DEFINE_integer(
    "max_restarts", 10, "Failures of an island or shard, after which it is given up.", 0, **define
  )
  flags.DEFINE_list(
    "prices", [], "Dollars an hour of a chip and a shard's machine: v5p=4.2,shard=1.1.", **define
  )
  flags.DEFINE_float("hours", 0.0, "How long you mean to keep it, for its cost.", 0.0, **define)
  flags.DEFINE_float("watch_hours", 24.0, "The longest that watch watches.", 0.0, **define)
  flags.DEFINE_float("poll_seconds", 20.0, "Between two looks.", 0.0, **define)
  flags.DEFINE_bool("dry_run", False, "Print what would be done, and do nothing.", **define)
  flags.DEFINE_bool("yes", False, "Do what costs money.", **define)


def _run(cls: type[_Run], values: flags.FlagValues, path: str) -> _Run:
  """The run that the flags describe, checked; a field of it is a flag of the same name."""
  names = ("name", "place", "bucket", "image", "spot", "max_restarts")
  placement = place(final_config(values, path), *(values[name].value for name in names))
  given = {f.name: values[f.name].value for f in dataclasses.fields(cls) if f.name in values}
  lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
  run = cls(placement, **given | lists)
  run.check()
  return run


def _keys(folder: Path, roles: list[str], dry_run: bool) -> tuple[dict[str, str], dict[str, str]]:
  """(public keys, secret keys), by the roles' addresses.

  Raises:
    ConfigError: one is missing, and this is no dry run.
  """
  paths = [public_file(folder, role) for role in roles], [secret_file(folder, r) for r in roles]
  missing = [str(path) for path in (*paths[0], *paths[1]) if not path.is_file()]
  fix = f"make them with `ddiloco keys --keys={folder} --learners=... --shards=...`"
  require(dry_run or not missing, "--keys", str(folder), f"lacks {missing[:3]}", fix)
  found = [
    {role: path.read_text() for role, path in zip(roles, each) if path.is_file()} for each in paths
  ]
  return found[0], found[1]


def _roles(placement: Placement) -> list[str]:
  islands = [island.role for island in placement.islands]
  return [*islands, *(f"syncer-{s}" for s in placement.shards), "evaluator"]


def _afford(values: flags.FlagValues, placement: Placement, machines: int) -> list[str]:
  """What it costs, in lines; said, and agreed to, before anything is made.

  Raises:
    ConfigError: without --yes, or without prices.
  """
  found = costs.costs(placement, costs.prices_of(values["prices"].value), machines)
  hours = values["hours"].value
  where = {i.where for i in placement.islands}
  lines = [f"{placement.name}: {len(placement.islands)} islands in {len(where)} places"]
  for island in placement.islands:
    shape = island.shape
    text = f"{shape.kind} {shape.topology}, {shape.hosts} hosts of {shape.chips_per_host} chips"
    lines.append(f"  {island.role} in {island.where or 'the current cluster'}: {text}")
  lines += costs.in_words(found, hours)
  if values["dry_run"].value:
    return lines
  for line in lines:
    say(line)
  costs.require_known(found, hours)
  if not values["yes"].value:
    raise ConfigError("--yes: was not given, nothing was made. Fix: add it to spend this money.")
  return lines


def _comments(lines: list[str]) -> str:
  return "\n".join(f"# {line}" for line in lines)


# --- GKE


def _gke(arguments: list[str], action: str) -> int:
  values = flags.FlagValues()
  path, arguments = config_flag(values, arguments)
  _common_flags(values)
  define: dict[str, Any] = {"flag_values": values}
  flags.DEFINE_string("claim", "", "ReadWriteMany volume claim for workdir.", **define)
  flags.DEFINE_string("namespace", "default", "In every cluster.", **define)
  flags.DEFINE_string("service_account", "", "Of the pods: may write the bucket.", **define)
  flags.DEFINE_string("cluster_domain", "cluster.local", "Of names in a cluster.", **define)
  flags.DEFINE_list(
    "shard_addresses", [], "Reserved internal addresses, where there are two clusters.", **define
  )
  flags.DEFINE_integer("shard_cpus", 8, "Of each shard, and the evaluator.", 1, **define)
  flags.DEFINE_string("shard_memory", "32Gi", "Of each shard (`ddiloco plan` says it).", **define)
  flags.DEFINE_string(
    "evaluator_memory",
    "",
    "Of the evaluator, which takes 12 bytes a parameter to save the result; else as a shard.",
    **define,
  )
  flags.DEFINE_float("delete_minutes", 10.0, "The longest that delete waits.", 0.0, **define)
  if not parse(values, arguments, launch.__doc__, needs_workdir=False):
    return FINISHED
  run = _run(gke.GkeRun, values, path)
  if action == "create":
    return _create_in_clusters(values, run)
  if values["dry_run"].value:
    print(_comments([f"{action} asks the clusters {run.contexts()} and makes nothing."]))
    return FINISHED
  if action == "status":
    print("\n".join(map(str, clusters.status(run))) or "nothing is there")
    return FINISHED
  if action == "watch":
    limit_seconds = 3600 * values["watch_hours"].value
    return clusters.watch(run, limit_seconds, values["poll_seconds"].value)
  left = clusters.delete(run, 60 * values["delete_minutes"].value)
  print("\n".join([*left, *_stays(run)]))
  return LOST if left else FINISHED


def _create_in_clusters(values: flags.FlagValues, run: gke.GkeRun) -> int:
  dry_run = values["dry_run"].value
  placement = run.placement
  lines = _afford(values, placement, machines=len(placement.shards) + 1)
  public, secrets = _keys(Path(values["keys"].value), _roles(placement), dry_run)
  found = run.documents(
    {f"{role}.key": text for role, text in public.items()},
    {f"{role}.key_secret": text for role, text in secrets.items()},
  )
  if not dry_run:
    clusters.create(found)
    say("Now: `ddiloco launch gke watch` with the same flags; `... delete` ends what it costs.")
    return FINISHED
  pools = ["The slices need these node pools, unless clusters make their own nodes (Autopilot):"]
  print(_comments([*lines, *pools, *run.node_pools()]))
  for context, documents in found.items():
    print(f"# {'-' * 20} kubectl --context={context or 'CURRENT'} apply --server-side -f -\n---")
    print(clusters.as_yaml([gke.redacted(document) for document in documents]), end="")
  return FINISHED


def _stays(run: gke.GkeRun) -> list[str]:
  """What `delete` leaves alone, since it was not made by `create`."""
  addresses = f", {len(run.shard_addresses)} addresses" if run.shard_addresses else ""
  bucket = run.placement.config.checkpoint.path
  return [
    f"Left alone, and paid for: node pools, {bucket}, the claim {run.claim}{addresses}."
    " docs/launch.md ends with the commands that delete them."
  ]


# --- TPU VMs


def _tpu_vms(arguments: list[str], action: str) -> int:
  values = flags.FlagValues()
  path, arguments = config_flag(values, arguments)
  _common_flags(values)
  define: dict[str, Any] = {"flag_values": values}
  flags.DEFINE_list("syncers", [], "Urls of all shards, as the slices reach them.", **define)
  flags.DEFINE_string("project", "", "Of the cloud; else gcloud's own.", **define)
  flags.DEFINE_bool("queued", False, "Ask by queued resources, the older way.", **define)
  flags.DEFINE_string("host_folder", "/var/lib/ddiloco", "Of a host: its workdirs.", **define)
  flags.DEFINE_string("runtime_version", "", "Of the VMs; else the topology's own.", **define)
  flags.DEFINE_float("slice_minutes", 60.0, "The longest wait for a slice.", 0.0, **define)
  flags.DEFINE_integer("recreations", 20, "Of a slice that was taken away.", 0, **define)
  if not parse(values, arguments, launch.__doc__, needs_workdir=False):
    return FINISHED
  run = _run(tpu_vms.TpuVmRun, values, path)
  placement = run.placement
  spends = action in ("create", "watch")
  lines = _afford(values, placement, machines=0) if spends else []
  if values["dry_run"].value:
    print("\n".join([*([_comments(lines)] if lines else []), *_commands(run, action)]))
    return FINISHED
  public, secrets = _keys(Path(values["keys"].value), _roles(placement), dry_run=not spends)
  files = {f"keys/public/{role}.key": text for role, text in public.items()}
  files["config/config.json"] = placement.config.to_json()
  limits = slices.Limits(
    slice_seconds=60 * values["slice_minutes"].value,
    recreations=values["recreations"].value,
    watch_seconds=3600 * values["watch_hours"].value,
    poll_seconds=values["poll_seconds"].value,
  )
  all_slices = slices.Slices(run, files, secrets, limits)
  if action == "create":
    all_slices.create()
    say("Now: `ddiloco launch tpu-vms watch` with the same flags; `... delete` ends what it costs.")
  elif action == "watch":
    all_slices.watch()
  elif action == "status":
    print("\n".join(all_slices.status()))
  else:
    left = all_slices.delete()
    print("\n".join(left) or f"No slice of {placement.name} is left.")
    return LOST if left else FINISHED
  return FINISHED


def _commands(run: tpu_vms.TpuVmRun, action: str) -> list[str]:
  """What the action runs, island by island; create as if nothing were there yet."""
  found = []
  for island in run.placement.islands:
    start = run.start_script(island, leader="ADDRESS-OF-HOST-0")
    steps = {
      "create": [
        run.create(island),
        run.describe(island),
        run.copy(island, tpu_vms.STAGED),
        run.on_hosts(island, start),
      ],
      "delete": [
        run.on_hosts(island, run.stop_script()),
        run.delete(island),
      ],
    }
    look = [run.describe(island), run.on_hosts(island, run.look_script())]
    found.append(f"# {island.role}")
    found += [shlex.join(command) for command in steps.get(action, look)]
  return found
