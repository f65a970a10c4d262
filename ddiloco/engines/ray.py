"""The Ray engine: every island and shard is a Ray actor, on this machine or on a cluster.

Ray places the actors, reserves the `islands.resources`, watches the actors and restarts them
elsewhere; fragments travel on ddiloco's own transport. All else is as in the processes engine: each
actor holds the process of one role, and the supervisor decides when it runs.

On a cluster, ddiloco must be installed on every node, and workdir must be a directory that all
nodes share: it has the event logs and the keys (WORKDIR/keys, made here). A shard stays on its node
for good, since all roles have its address: when that node is lost, so is the run.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ddiloco.checks import refusal, require
from ddiloco.config import Config, ConfigError
from ddiloco.engines.children import MEETING, Child, Process, RoleActor, Spawn
from ddiloco.engines.processes import ProcessesEngine
from ddiloco.engines.role_spec import RoleSpec
from ddiloco.environment import LOST
from ddiloco.network import keys as key_files
from ddiloco.network.transport import learner_address, syncer_address
from ddiloco.observe.guards import warn
from ddiloco.protocol.events import parse_role
from ddiloco.roles.evaluator import Measure
from ddiloco.training import data
from ddiloco.workdir import run_name

OBJECT_STORE_BYTES = 128 << 20  # small: ddiloco stores nothing there
LOOPBACK = "127.0.0.1"
OWN_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # Ray's names for them
PLACE_SECONDS = 300.0  # for a cluster to start the shards' actors
END_SECONDS = 10.0  # for an actor to be ended


class RayEngine(ProcessesEngine):
  """One run. Joins or starts Ray on construction, and leaves it when closed.

  Args:
    config: the run's.
    workdir: event logs go to `workdir/events`, what the roles print to `workdir/logs`.
    corpus: opened training data; the roles open their own.
    measure: the held-out measures of a parameter tree, for the evaluator, which lives here.
    address: of a Ray cluster, "HOST:PORT" or "auto"; "": a Ray of this machine's own, for this run.
    cpu_only: learners use fake CPU devices.

  Raises:
    ConfigError: also if the cluster cannot be joined, or this machine lacks `islands.resources`.
  """

  def __init__(
    self,
    config: Config,
    workdir: Path,
    corpus: data.Source,
    measure: Measure | None,
    address: str = "",
    cpu_only: bool = False,
  ):
    self.cpu_only = cpu_only
    super().__init__(config, workdir.absolute(), corpus, measure)
    self._address, self._local = address, not address
    self._actors: dict[tuple[str, int], Any] = {}  # (role, host) -> its actor
    self._meetings: dict[str, Any] = {}  # learner -> Ray's promise of the url where its hosts meet
    self._connected = connect(address)
    try:
      there = ray.cluster_resources()
      if not cpu_only:
        check_asked(config, there)
      check_resources(config, there, self._local)
    except ConfigError:
      self.close()
      raise

  def close(self) -> None:
    """Ends all actors, and leaves Ray, if this engine joined or started it."""
    while self._actors:
      ray.kill(self._actors.popitem()[1])
    if self._connected:
      self._connected = False
      ray.shutdown()

  def _look(self) -> tuple[()]:
    """None: Ray gives each island what it asks for."""
    return ()

  def _check(self, learner: int) -> None:
    """What Ray gives an island that asks for resources is not known before it is there."""
    if self.cpu_only or not self.config.islands.island(learner).resources:
      super()._check(learner)

  def _place(self) -> RoleSpec:
    """Starts all actors; shards are spread over the nodes."""
    config = self.config
    nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: n["NodeManagerAddress"])
    homes = [nodes[s % len(nodes)] for s in range(config.sync.num_shards)]
    for shard, node in enumerate(homes):
      stay = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
      self._actor(syncer_address(shard), scheduling_strategy=stay)
    for m in range(config.num_islands()):
      for host in range(config.islands.island(m).hosts):
        self._actor(learner_address(m), host)
    if self._local:
      return super()._place()
    urls = [
      self._actor(syncer_address(shard)).free_url.remote(node["NodeManagerAddress"])
      for shard, node in enumerate(homes)
    ]
    try:
      syncers = tuple(ray.get(urls, timeout=PLACE_SECONDS))
    except RayError as error:
      rule = f"the cluster cannot run the syncer shards ({_line(error)})"
      fix = "install ddiloco on every node, with the Python and Ray versions of this one"
      raise refusal("--ray_address", self._address, rule, fix) from error
    keys = self.workdir / "keys"
    key_files.make_keys(keys, config.num_islands(), config.sync.num_shards)
    return RoleSpec(self.workdir, run_name(self.workdir), syncers, keys=keys)

  def _actor(self, name: str, host: int = 0, **options: Any) -> Any:
    """The actor of a role's host, which is started if there is none: a learner may join."""
    if (name, host) not in self._actors:
      kind, number = parse_role(name)
      resources = self.config.islands.island(number).resources if kind == "learner" else {}
      actor = ray.remote(RoleActor).options(
        max_restarts=-1,  # of the actor; the supervisor alone decides whether a role is restarted
        # Calls wait for a restarting actor. `run` and `signal` are never repeated by Ray: each is
        # of one life, and the supervisor decides about the next.
        max_task_retries=-1,
        **actor_options(resources),
        **options,
      )
      self._actors[name, host] = actor.remote()
    return self._actors[name, host]

  def _on_exit(self, child: Child, status: int) -> None:
    super()._on_exit(child, status)
    if self._state.roles[child.name].ended:  # others may have what its actors have reserved
      for key in [key for key in self._actors if key[0] == child.name]:
        ray.kill(self._actors.pop(key))

  def _spawn(self, name: str, host: int) -> Spawn:
    def spawn(command: list[str], log: Path) -> RemoteProcess:  # a learner may have left, and join
      return RemoteProcess(self._actor(name, host), command, log, self._meetings.get(name, ""))

    return spawn

  def _meeting(self, learner: int) -> str:
    """Ray knows the url once host 0 has a node, and tells the actors; nothing waits for it here."""
    name = learner_address(learner)
    own = LOOPBACK if self._local else ""
    self._meetings[name] = self._actor(name).free_url.remote(own)
    return MEETING


class RemoteProcess(Process):
  """The process of one life of a role, in the role's actor.

  Args:
    actor: of the role.
    command: of the process.
    log: its output is appended to this file, on the actor's machine.
    meeting: the url where the hosts of its island meet, or Ray's promise of the url.
  """

  stdin: IO[bytes] | None = None  # the actor holds the process' standard input

  def __init__(self, actor: Any, command: list[str], log: Path, meeting: Any = ""):
    self._actor, self._log = actor, log
    self._run = command, str(log), meeting
    # Ray's promise that the actor is there. Until then a call of `run` might fail, while Ray looks
    # whether a node is lost, and each time count as a death of the role.
    self._placed = actor.__ray_ready__.remote()
    self._end: Any = None  # Ray's promise of the exit status, once the actor is there
    self._status: int | None = None

  def poll(self) -> int | None:
    """The exit status, negative for a signal; None while it runs."""
    if self._status is None and self._end is None and ray.wait([self._placed], timeout=0)[0]:
      self._end = self._actor.run.options(max_task_retries=0).remote(*self._run)
    if self._status is None and self._end is not None and ray.wait([self._end], timeout=0)[0]:
      self._status = self._result()
    return self._status

  def send_signal(self, number: int) -> None:
    """Sends a signal; for SIGKILL the actor is killed with its process, and Ray restarts it.

    Where the actor is not there yet nothing runs: a signal that ends a process ends this.
    """
    if self._end is None:
      if number in (signal.SIGTERM, signal.SIGKILL):
        self._status = -number
    elif number == signal.SIGKILL:
      ray.kill(self._actor, no_restart=False)
    else:
      self._actor.signal.options(max_task_retries=0).remote(int(number))

  def _result(self) -> int:
    """The exit status that `run` returned; LOST if the actor died."""
    try:
      return ray.get(self._end, timeout=END_SECONDS)
    except RayError as error:  # the log gets its reason, as the role's last words
      with contextlib.suppress(OSError), self._log.open("a") as log:
        log.write(f"Ray: {_line(error)}\n")
      return LOST


def connect(address: str) -> bool:
  """Joins the cluster at `address`, "": a new one of this machine; False if joined already.

  Raises:
    ConfigError: the cluster cannot be joined.
  """
  if ray.is_initialized():
    return False
  quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
  if not address:
    quiet |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
  with warnings.catch_warnings():
    # JAX warns of every fork, but Ray's forks become another program at once.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    try:
      ray.init(address=address or "local", **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
      fix = (
        "give HOST:PORT of a running head node, as `ray start --head` prints it, and set"
        " RAY_AUTH_MODE=token if it says that token authentication is enabled"
      )
      rule = f"cannot be joined ({_line(error)})"
      raise refusal("--ray_address", address, rule, fix) from error
  return True


def actor_options(resources: Mapping[str, Any]) -> dict[str, Any]:
  """The options of an actor that is given `resources`; no CPUs unless it asks for them."""
  custom = {name: count for name, count in resources.items() if name not in OWN_OPTIONS}
  own = {OWN_OPTIONS[name]: count for name, count in resources.items() if name in OWN_OPTIONS}
  return {"num_cpus": 0, **own, "resources": custom}


def check_asked(config: Config, available: Mapping[str, float]) -> None:
  """Refuses islands that ask for nothing where there are accelerators: islands of one machine would
  all take its first."""
  kinds = [kind for kind in ("GPU", "TPU") if available.get(kind)]
  for m in range(config.num_islands()) if kinds else ():
    island = config.islands.island(m)
    rule = f"learner {m} asks Ray for nothing, and would take what other islands have"
    fix = f"ask for {{{kinds[0]!r}: {island.devices // island.hosts or 1}}}, or add --cpu"
    require(bool(island.resources), "islands.resources", island.resources, rule, fix)


def check_resources(config: Config, available: Mapping[str, float], alone: bool = True) -> None:
  """Refuses islands that together ask for more than is available: they would wait for ever. Warns
  where this machine is not `alone`: a cluster may grow."""
  asked: collections.Counter[str] = collections.Counter()
  for m in range(config.islands.num_learners):
    island = config.islands.island(m)
    asked.update({name: island.hosts * n for name, n in island.resources.items()})
  fix = "ask for less, or join a cluster with --ray_address"
  for name, count in asked.items():
    here = available.get(name, 0)
    where = "this machine" if alone else "the cluster"
    rule = f"the islands together ask for {count:g} {name}, {where} has {here:g}"
    require(count <= here or not alone, "islands.resources", config.islands.resources, rule, fix)
    if count > here:
      warn(f"{rule}. Until it has more, some of them wait.")


def _line(error: Exception) -> str:
  return " ".join(str(error).split())
