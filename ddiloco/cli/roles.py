"""Commands that make this process one role of a run: learner, syncer, evaluator."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from absl import flags

from ddiloco import environment
from ddiloco.cli.arguments import config_flag, cpu_flag, final_config, needed, parse, workdir_flag
from ddiloco.config import ConfigError
from ddiloco.engines.role_spec import RoleSpec, end_with_parent

# --- The command that makes the roles' keys


def keys(arguments: list[str]) -> int:
  """Makes keys for every role, needed where a run leaves this machine.

  Prints what to copy where. With higher numbers it adds keys; it never replaces one.
  """
  values = flags.FlagValues()
  flags.DEFINE_string("keys", None, "Directory of the keys.", flag_values=values)
  flags.DEFINE_integer("learners", None, "How many learners.", lower_bound=0, flag_values=values)
  flags.DEFINE_integer("shards", None, "How many shards.", lower_bound=0, flag_values=values)
  if not parse(values, arguments, keys.__doc__):
    return 0
  folder = Path(needed(values, "keys", "DIR, the directory of the keys"))
  learners, shards = needed(values, "learners", "8"), needed(values, "shards", "2")
  from ddiloco.network.keys import instructions, make_keys

  print(instructions(folder, make_keys(folder, learners, shards)))
  return 0


def learner(arguments: list[str]) -> int:
  """Trains one island on this process' devices, until the run is over or SIGTERM.

  An island of several hosts is one such process on each: host 0 leads, and speaks with the shards.

  Joins a run at any time, under any number that no other learner has. Exit status 1: work was lost.
  """
  values = flags.FlagValues()
  path, arguments = _role_flags(values, arguments)
  flags.DEFINE_integer("learner", None, "Its number.", lower_bound=0, flag_values=values)
  flags.DEFINE_string(
    "hosts",
    "",
    "Where the hosts of an island meet (islands.hosts > 1): tcp://HOST:PORT of host 0.",
    flag_values=values,
  )
  flags.DEFINE_integer(
    "host", 0, "Which of them this is; 0 leads.", lower_bound=0, flag_values=values
  )
  cpu_flag(values)
  if not parse(values, arguments, learner.__doc__):
    return 0
  config, place = final_config(values, path), _place(values)
  place = dataclasses.replace(place, hosts=values["hosts"].value, host=values["host"].value)
  number = needed(values, "learner", "3, its number")
  island = config.islands.island(number)
  environment.prepare(
    num_cpu_devices=island.devices // island.hosts or 1, cpu_only=values["cpu"].value
  )
  from ddiloco.engines import learner_process

  return learner_process.run_learner(config, number, place)


def syncer(arguments: list[str]) -> int:
  """Serves one shard's fragments, until the run is over or SIGTERM. Needs no accelerator.

  --syncers names all shards, this one too: each keeps a copy of what another one commits. Exit
  status 1: fragments were lost.
  """
  values = flags.FlagValues()
  path, arguments = _role_flags(values, arguments)
  flags.DEFINE_integer("shard", None, "Its number.", lower_bound=0, flag_values=values)
  flags.DEFINE_string(
    "bind",
    None,
    "Where it listens, tcp://HOST:PORT.",
    flag_values=values,
  )
  if not parse(values, arguments, syncer.__doc__):
    return 0
  config = final_config(values, path)
  shard = needed(values, "shard", "0, its number")
  place = _place(values, bind=needed(values, "bind", "tcp://127.0.0.1:7000"))
  environment.prepare(num_cpu_devices=1, cpu_only=True)
  from ddiloco.engines.syncer_process import run_syncer

  return run_syncer(config, shard, place)


def evaluator(arguments: list[str]) -> int:
  """Follows the global model, measures it, and leaves result and report in workdir.

  Trains nothing and delays no other role: a run goes on without it.
  """
  values = flags.FlagValues()
  path, arguments = _role_flags(values, arguments)
  cpu_flag(values)
  if not parse(values, arguments, evaluator.__doc__):
    return 0
  config, place = final_config(values, path), _place(values)
  devices = config.run.evaluator_devices
  environment.prepare(num_cpu_devices=devices or 1, cpu_only=values["cpu"].value or not devices)
  from ddiloco.engines import learner_process

  return learner_process.run_evaluator(config, place)


def _role_flags(values: flags.FlagValues, arguments: list[str]) -> tuple[str, list[str]]:
  """What every single role is told; returns as `_config_flag` does."""
  path, arguments = config_flag(values, arguments)
  workdir_flag(values)
  flags.DEFINE_list(
    "syncers", [], "Urls of all syncer shards in order, tcp://HOST:PORT,...", flag_values=values
  )
  flags.DEFINE_string(
    "run_id", "", "Name of the run, the same for all its roles; else workdir's.", flag_values=values
  )
  flags.DEFINE_string(
    "keys",
    None,
    "Folder with this role's keys (ddiloco keys); not on loopback.",
    flag_values=values,
  )
  flags.DEFINE_string(
    "http", "", "HOST:PORT that answers readiness and liveness probes.", flag_values=values
  )
  flags.DEFINE_integer(
    "term_status",
    0,
    "Exit status of a role that SIGTERM has ended and that lost nothing. Kubernetes takes 0 to mean"
    " that the run is over: give it 143.",
    0,
    255,
    flag_values=values,
  )
  flags.DEFINE_bool(
    "attached", False, "End at once when standard input is closed.", flag_values=values
  )
  return path, arguments


def _place(values: flags.FlagValues, bind: str = "") -> RoleSpec:
  workdir = Path(values["workdir"].value)
  if not values["syncers"].value:
    raise ConfigError(
      "--syncers: is needed. Fix: give the url of every shard, --syncers=tcp://HOST:PORT,..."
    )
  if values["attached"].value:
    end_with_parent()
  return RoleSpec(
    workdir=workdir,
    run_id=values["run_id"].value or workdir.absolute().name,
    syncers=tuple(values["syncers"].value),
    bind=bind,
    keys=Path(values["keys"].value) if values["keys"].value else None,
    http=values["http"].value,
    term_status=values["term_status"].value,
  )
