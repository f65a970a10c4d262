"""Commands that make this process one role of a run: learner, syncer, evaluator."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ddiloco import environment
from ddiloco.cli.arguments import Flags
from ddiloco.config import ConfigError
from ddiloco.engines.role_spec import RoleSpec, end_with_parent
from ddiloco.environment import FINISHED

# --- The command that makes the roles' keys


def keys(arguments: list[str]) -> int:
  """Makes keys for every role, needed where a run leaves this machine.

  Prints what to copy where. With higher numbers it adds keys; it never replaces one.
  """
  given = Flags(arguments)
  given.add_text("keys", None, "Directory of the keys.")
  given.add_integer("learners", None, "How many learners.", least=0)
  given.add_integer("shards", None, "How many shards.", least=0)
  given.parse(keys.__doc__)
  folder = Path(given.needed("keys", "DIR, the directory of the keys"))
  learners, shards = given.needed("learners", "8"), given.needed("shards", "2")
  from ddiloco.network.keys import instructions, make_keys

  print(instructions(folder, make_keys(folder, learners, shards)))
  return FINISHED


def learner(arguments: list[str]) -> int:
  """Trains one island on this process' devices, until the run is over or SIGTERM.

  An island of several hosts is one such process on each: host 0 leads, and speaks with the shards.

  Joins a run at any time, under any number that no other learner has. Exit status 1: work was lost.
  """
  given = Flags(arguments)
  _add_role_flags(given)
  given.add_integer("learner", None, "Its number.", least=0)
  given.add_text(
    "hosts", "", "Where the hosts of an island meet (islands.hosts > 1): tcp://HOST:PORT of host 0."
  )
  given.add_integer("host", 0, "Which of them this is; 0 leads.", least=0)
  given.add_cpu()
  given.parse(learner.__doc__)
  config, place = given.final_config(), _place(given)
  place = dataclasses.replace(place, hosts=given.hosts, host=given.host)
  number = given.needed("learner", "3, its number")
  island = config.islands.island(number)
  environment.prepare(num_cpu_devices=island.devices // island.hosts or 1, cpu_only=given.cpu)
  from ddiloco.engines import single_roles

  return single_roles.run_learner(config, number, place)


def syncer(arguments: list[str]) -> int:
  """Serves one shard's fragments, until the run is over or SIGTERM. Needs no accelerator.

  --syncers names all shards, this one too: each keeps a copy of what another one commits. Exit
  status 1: fragments were lost.
  """
  given = Flags(arguments)
  _add_role_flags(given)
  given.add_integer("shard", None, "Its number.", least=0)
  given.add_text("bind", None, "Where it listens, tcp://HOST:PORT.")
  given.parse(syncer.__doc__)
  config = given.final_config()
  shard = given.needed("shard", "0, its number")
  place = _place(given, bind=given.needed("bind", "tcp://127.0.0.1:7000"))
  environment.prepare(num_cpu_devices=1, cpu_only=True)
  from ddiloco.engines.single_roles import run_syncer

  return run_syncer(config, shard, place)


def evaluator(arguments: list[str]) -> int:
  """Follows the global model, measures it, and leaves result and report in workdir.

  Trains nothing and delays no other role: a run goes on without it.
  """
  given = Flags(arguments)
  _add_role_flags(given)
  given.add_cpu()
  given.parse(evaluator.__doc__)
  config, place = given.final_config(), _place(given)
  devices = config.run.evaluator_devices
  environment.prepare(num_cpu_devices=devices or 1, cpu_only=given.cpu or not devices)
  from ddiloco.engines import single_roles

  return single_roles.run_evaluator(config, place)


def _add_role_flags(given: Flags) -> None:
  """What every single role is told."""
  given.add_config()
  given.add_workdir()
  given.add_list("syncers", "Urls of all syncer shards in order, tcp://HOST:PORT,...")
  given.add_text("run_id", "", "Name of the run, the same for all its roles; else workdir's.")
  given.add_text("keys", None, "Folder with this role's keys (ddiloco keys); not on loopback.")
  given.add_text("http", "", "HOST:PORT that answers readiness and liveness probes.")
  given.add_integer(
    "term_status",
    0,
    "Exit status of a role that SIGTERM has ended and that lost nothing. Kubernetes takes 0 to mean"
    " that the run is over: give it 143.",
    0,
    255,
  )
  given.add_switch("attached", "End at once when standard input is closed.")


def _place(given: Flags, bind: str = "") -> RoleSpec:
  workdir = Path(given.workdir)
  if not given.syncers:
    raise ConfigError(
      "--syncers: is needed. Fix: give the url of every shard, --syncers=tcp://HOST:PORT,..."
    )
  if given.attached:
    end_with_parent()
  return RoleSpec(
    workdir=workdir,
    run_id=given.run_id or workdir.absolute().name,
    syncers=tuple(given.syncers),
    bind=bind,
    keys=Path(given.keys) if given.keys else None,
    http=given.http,
    term_status=given.term_status,
  )
