"""Commands for a run in a cloud: they print its cost, then create, status, watch or delete."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import shlex
from pathlib import Path

from ddiloco.checks import require
from ddiloco.cli.arguments import Flags
from ddiloco.config import Config
from ddiloco.environment import FINISHED, LOST
from ddiloco.launch import gke, tpu_vms
from ddiloco.launch.cloud import Clusters, LaunchError, Slices, as_yaml, say
from ddiloco.launch.placement import (
  Placement,
  cost_lines,
  paid_for,
  place,
  prices_of,
  require_prices,
)
from ddiloco.network.keys import public_file, read, secret_file
from ddiloco.workdir import differences, fixed

ACTIONS = ("create", "status", "watch", "delete")


def launch(arguments: list[str]) -> int:
  """Brings a run to a cloud: each island to a slice of its own; on GKE shards and evaluator too.

    ddiloco launch gke     [create|status|watch|delete] --config=FILE --name=RUN ...   JobSets
    ddiloco launch tpu-vms [create|status|watch|delete] --config=FILE --name=RUN ...   TPU VMs

  The default action is create. It prints the roles' places and the cost, and makes nothing without
  --yes. --dry_run prints what an action would make or do, and needs no cloud. Every action may be
  repeated: create goes on where it stopped. All actions need the flags that identify the run. The
  slices are those of islands.topology. docs/launch.md leads through a run over two regions.
  """
  words = list(itertools.takewhile(lambda a: not a.startswith("-"), arguments[1:3]))
  wanted = [a for a in arguments if a in ("-h", "--help", "-help")]
  target, action = (*words, "create")[:2] if words else ("gke" if wanted else "", "create")
  fix = f"for example `ddiloco launch gke --help`; there are {', '.join(TARGETS)}"
  require(target in TARGETS, "ddiloco launch", target, "must name where", fix)
  require(action in ACTIONS, "ddiloco launch", action, f"must be one of {', '.join(ACTIONS)}", fix)
  run_class, perform = TARGETS[target]
  given = Flags([arguments[0], *arguments[1 + len(words) :]], "config")
  _add_flags(given, run_class)
  given.parse(launch.__doc__)
  names = ("name", "place", "bucket", "image", "spot", "max_restarts")
  placement = place(given.final_config(), *(getattr(given, name) for name in names))
  run = run_class(placement, **given.fields(run_class))
  run.check()
  if action == "create":
    from ddiloco.training.data import check_here

    check_here(placement.config)
  stays = f"What was made stays, and costs, until `ddiloco launch {target} delete`, with its flags."
  try:
    status = perform(given, run, action)
  except LaunchError as error:
    say(str(error))
    status = LOST
  except KeyboardInterrupt:
    say(stays)
    raise
  if action in ("create", "watch") and not given.dry_run:
    say(stays)  # also when the run is over, or only a part of it was made
  return status


def _add_flags(given: Flags, run_class: type) -> None:
  given.add("name", "", "Name of the run; the names of all that is made begin with it.")
  given.add("image", "", "Container image with ddiloco[tpu,gcs,tokenizers].")
  given.add("bucket", "", "gs://BUCKET/FOLDER of the snapshots.")
  given.add("keys", "keys", "Folder that `ddiloco keys` made.")
  given.add(
    "place",
    [],
    "WHERE=0,2-3: these islands are in this cluster (a kubectl context) or zone. Once for each;"
    " on GKE shards and evaluator are where learner 0 is",  # absl goes on after this text
  )
  given.add("spot", False, "Islands on machines that may be taken away.")
  given.add("max_restarts", 10, "Failures of an island or shard, after which it is given up.", 0)
  given.add("prices", (), "Dollars an hour of a chip and a shard's machine: v5p=4.2,shard=1.1.")
  given.add("hours", 0.0, "How long you mean to keep it, for its cost.", 0.0)
  given.add("watch_hours", 24.0, "The longest that watch watches.", 0.0)
  given.add("poll_seconds", 20.0, "Seconds between two looks at the cloud.", 0.0)
  given.add("dry_run", False, "Print what would be done, and do nothing.")
  given.add("yes", False, "Do what costs money.")
  given.add_fields(run_class)


def _keys(
  given: Flags, placement: Placement, may_lack: bool
) -> tuple[dict[str, str], dict[str, str]]:
  """(public keys, secret keys), by file name.

  Raises:
    ConfigError: a key is damaged, or missing and may not be.
  """
  folder, found, missing = Path(given.keys), ({}, {}), list[str]()
  islands = [island.role for island in placement.islands]
  for role in (*islands, *(f"syncer-{s}" for s in placement.shards), "evaluator"):
    for keys, path in zip(found, (public_file(folder, role), secret_file(folder, role))):
      if path.is_file():
        read(path)  # its role would end, on a machine that costs
        keys[path.name] = path.read_text()
      else:
        missing.append(str(path))
  fix = f"make them with `ddiloco keys --keys={folder} --learners=... --shards=...`"
  require(may_lack or not missing, "--keys", str(folder), f"lacks {missing[:3]}", fix)
  return found


def _afford(given: Flags, placement: Placement, machines: int) -> list[str]:
  """The lines with the cost; but for a dry run prints them, and requires --yes.

  Raises:
    ConfigError: --yes, --hours or a price is missing.
  """
  counts, prices, hours = paid_for(placement, machines), prices_of(given.prices), given.hours
  where = {i.where for i in placement.islands}
  lines = [f"{placement.name}: islands: {len(placement.islands)}, places: {len(where)}"]
  for island in placement.islands:
    shape = island.shape
    size = f"hosts: {shape.hosts}, chips of each: {shape.chips_per_host}"
    text = f"{shape.name} {shape.topology}, {size}"
    lines.append(f"  {island.role} in {island.where or 'the current cluster'}: {text}")
  lines += cost_lines(counts, prices, hours)
  if given.dry_run:
    return lines
  for line in lines:
    say(line)
  require_prices(counts, prices, hours)
  rule = "was not given, nothing was made"
  require(given.yes, "--yes", False, rule, "add it to spend this money")
  return lines


def _comments(lines: list[str]) -> str:
  return "\n".join(f"# {line}" for line in lines)


# --- GKE


def _on_gke(given: Flags, run: gke.GkeRun, action: str) -> int:
  if action == "create":
    return _create_in_clusters(given, run)
  if given.dry_run:
    print(_comments([f"{action} asks the clusters {run.contexts()} and makes nothing."]))
    return FINISHED
  clusters = Clusters(run)
  if action == "status":
    states = clusters.status()
    print("\n".join(map(str, states)))
    return LOST if any(each.jobs == gke.UNSEEN for each in states) else FINISHED
  if action == "watch":
    completed = clusters.watch(3600 * given.watch_hours, given.poll_seconds)
    return FINISHED if completed else LOST
  left = clusters.delete(60 * run.delete_minutes)
  addresses = "".join(f", address {each}" for each in run.shard_addresses)
  stays = f"node pools, {run.placement.config.checkpoint.path}, the claim {run.claim}{addresses}"
  stays = f"Left alone, and paid for: {stays}. docs/launch.md ends with what deletes them."
  print("\n".join([*left, stays]))
  return LOST if left else FINISHED


def _create_in_clusters(given: Flags, run: gke.GkeRun) -> int:
  lines = _afford(given, run.placement, machines=len(run.placement.shards) + 1)
  found = run.documents(*_keys(given, run.placement, may_lack=given.dry_run))
  if not given.dry_run:
    clusters = Clusters(run)
    for saved in clusters.configs():
      _require_same(run, saved)
    clusters.create(found)
    say("Now: `ddiloco launch gke watch` with the same flags.")
    return FINISHED
  pools = [
    "The slices need these node pools, unless clusters make their own nodes (Autopilot). In a",
    "cluster of several zones add --node-locations=ZONE, or every zone gets a slice, and costs:",
  ]
  print(_comments([*lines, *pools, *run.node_pools()]))
  for context, documents in found.items():
    print(f"# {'-' * 20} kubectl --context={context or 'CURRENT'} apply --server-side -f -\n---")
    print(as_yaml([gke.redacted(document) for document in documents]), end="")
  return FINISHED


def _require_same(run: gke.GkeRun, saved: Config) -> None:
  """Refuses (ConfigError) a config with which the run's roles could not go on when they start
  again."""
  mine = run.placement.config
  where = "checkpoint.path", mine.checkpoint.path, saved.checkpoint.path
  for name, ours, theirs in (*differences(mine, saved), where):
    rule = f"the run {run.name} is there already, with {theirs!r}"
    fix = "give the flags that it was made with, or `ddiloco launch gke delete` first"
    require(ours == theirs, name, ours, rule, fix)


# --- TPU VMs


def _on_tpu_vms(given: Flags, run: tpu_vms.TpuVmRun, action: str) -> int:
  placement = run.placement
  spends = action in ("create", "watch")
  lines = _afford(given, placement, machines=0) if spends else []
  public, secrets = _keys(given, placement, may_lack=given.dry_run or not spends)
  run = dataclasses.replace(run, identity=_identity(given, placement.config, public))
  if given.dry_run:
    print("\n".join([*([_comments(lines)] if lines else []), *_commands(run, action)]))
    return FINISHED
  files = {f"keys/public/{name}": text for name, text in public.items()}
  files["config/config.json"] = placement.config.to_json()
  slices = Slices(run, files, secrets, 3600 * given.watch_hours, given.poll_seconds)
  if action == "create":
    slices.create()
    say("Now: `ddiloco launch tpu-vms watch` with the same flags.")
  elif action == "watch":
    slices.watch()
  elif action == "status":
    print("\n".join(slices.status()))
  else:
    left = slices.delete()
    print("\n".join(left) or f"No slice of {placement.name} is left.")
    return LOST if left else FINISHED
  return FINISHED


def _identity(given: Flags, config: Config, public: dict[str, str]) -> str:
  """A digest of what makes it this run: the first shard's key, and what all roles share; "" where
  the keys are not here."""
  key = public.get(public_file(Path(given.keys), "syncer-0").name, "")
  return key and hashlib.sha256(f"{key}{fixed(config)}".encode()).hexdigest()[:16]


def _commands(run: tpu_vms.TpuVmRun, action: str) -> list[str]:
  """The commands of the action, island by island; those of `create` if nothing exists yet."""
  found = []
  if action in ("status", "delete"):
    then = "shown" if action == "status" else "deleted"
    found = [f"# Lists all slices and requests; those of the run are then {then}, each as here:"]
    found += [shlex.join(run.list_all(group)) for group in tpu_vms.GROUPS]
  for island in run.placement.islands:
    each, start = run.slice(island), run.start_script(island, leader="ADDRESS-OF-HOST-0")
    steps = {
      "create": [
        run.create(island),
        run.describe(each),
        run.copy(each, tpu_vms.STAGED),
        run.on_hosts(each, start),
      ],
      "delete": [
        run.describe(each),
        run.on_hosts(each, run.stop_script()),
        run.delete(each, run.group),
      ],
    }
    look = [run.describe(each), run.on_hosts(each, run.look_script())]
    found.append(f"# {island.role}")
    found += [shlex.join(command) for command in steps.get(action, look)]
  return found


TARGETS = {"gke": (gke.GkeRun, _on_gke), "tpu-vms": (tpu_vms.TpuVmRun, _on_tpu_vms)}
