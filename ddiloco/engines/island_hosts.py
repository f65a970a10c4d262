"""An island of several processes, one on each of its hosts: how they meet, and what ends them.

Host 0 is the learner of the run. The other hosts make the same calls (`training/hosts.py`), have no
event log and talk to no shard. When one host is lost or stands still, the process of every host
ends, and logs which host it was. The engine starts all of them again, and no other island waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ddiloco import environment
from ddiloco.checks import lasts, require
from ddiloco.config import Config
from ddiloco.engines.role_process import PROGRESS_SECONDS, RoleRunner, load_keys
from ddiloco.engines.role_spec import RoleSpec, beside, terminates
from ddiloco.environment import BAD_USAGE, FINISHED, INTERRUPTED, LOST
from ddiloco.network import host_links
from ddiloco.network.keys import require_keys
from ddiloco.network.transport import learner_address
from ddiloco.network.webserver import START_SECONDS, Health
from ddiloco.observe.guards import exited, say
from ddiloco.protocol import events
from ddiloco.roles import initial
from ddiloco.workdir import COMPILED

SLOW_STEPS = 10  # an island that takes as long as so many usual steps does not stand still
LEAST_HEARTBEAT_SECONDS = 100.0  # least value of JAX's own limit
MOST_HEARTBEAT_SECONDS = float((1 << 31) - 1)  # JAX counts them in 32 bits
READY = b"ready"
COMPILED_ORDERS = 1  # orders that a host has carried out once it has compiled


def check_hosts(config: Config, number: int, place: RoleSpec) -> None:
  """Refuses a host number that the island does not have.

  Raises:
    ConfigError: the island has several hosts and is not told where they meet, or the reverse.
  """
  hosts = config.islands.island(number).hosts
  rule = f"must be given if, and only if, an island has several hosts (islands.hosts = {hosts})"
  fix = "give tcp://HOST:PORT of host 0 to all of them, or set islands.hosts in the experiment file"
  require(bool(place.hosts) == (hosts > 1), "--hosts", place.hosts, rule, fix)
  rule = f"must be below islands.hosts = {hosts} (learner {number})"
  require(place.host < hosts, "--host", place.host, rule, "count hosts from 0")
  if place.hosts:
    one = not place.hosts.startswith(("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"))
    rule = "stands for all addresses of a machine, so other hosts cannot reach it"
    require(one, "--hosts", place.hosts, rule, fix)
    require_keys(place.hosts, load_keys(place, learner_address(number)), "--hosts")


def _agreed(
  config: Config, number: int, place: RoleSpec, data_digest: str
) -> host_links.IslandIdentity:
  """Each host reads its own rows of a batch and compiles its own programs, so they must have the
  same data, the same custom parts and the same JAX too."""
  import jax

  digest = lambda text: hashlib.sha256(text.encode()).hexdigest()[:16]
  parts = initial.sources(config)
  return host_links.IslandIdentity(
    run_id=place.run_id,
    config=digest(config.to_json()),
    learner=number,
    hosts=config.islands.island(number).hosts,
    data=data_digest,
    custom=digest(json.dumps(parts)) if any(parts.values()) else "",
    jax=jax.__version__,
  )


def _join(coordinator: str, config: Config, island: host_links.IslandIdentity, host: int) -> None:
  network = config.network
  # `HostWatch` must strike first. It sees that a whole island stood still and goes on, where its
  # machines slept or a fault was planned; JAX would abort all of its processes then.
  limits = LEAST_HEARTBEAT_SECONDS, 3 * network.silence_seconds, network.give_up_seconds
  seconds = network.give_up_seconds, min(max(limits), MOST_HEARTBEAT_SECONDS)
  environment.join_hosts(coordinator, island.hosts, host, *seconds)


def name_lost_host() -> None:
  """Waits so that `HostWatch` can name the lost host and end this process: a program may fail
  before the watch notices that a host is gone."""
  time.sleep(2 * host_links.BEAT_SECONDS)


# --- host 0 ---------------------------------------------------------------------------------------


class Hosts:
  """The other hosts of this island, joined; for the process that leads.

  Args:
    runner: of this process.
    number: the learner's.
    data_digest: see `training.data.digest`.

  Raises:
    HostsApart: some hosts have not come.
  """

  def __init__(self, runner: RoleRunner, number: int, data_digest: str):
    config, place = runner.config, runner.place
    self._runner, self.progress = runner, host_links.HostProgress()
    island = _agreed(config, number, place, data_digest)
    meeting = host_links.Meeting(place.hosts, island, runner.keys, config.network.silence_seconds)
    runner.ready = lambda: (
      f"hosts {meeting.missing} of its island, which have not come to {meeting.at}"
    )
    self.links = meeting.wait(config.network.give_up_seconds)
    runner.ready = lambda: "starting"
    limits = config.network.silence_seconds, self._order_seconds
    ends = self._lost, runner.stop.set
    self._watch = host_links.HostWatch(self.links, self.progress, *limits, *ends)
    _join(meeting.coordinator, config, island, 0)

  def wait_until_compiled(self) -> None:
    """Waits until all hosts have compiled their programs, which is their first order."""
    self.progress.done, self.progress.doing = COMPILED_ORDERS, "has compiled"
    for host, each in self.links.items():
      self._runner.ready = lambda host=host: f"host {host} of its island, which still compiles"
      each.values.receive()

  def part(self, end: Callable[[bool], None]) -> None:
    """Tells the other hosts by `end` that the work is over, and waits until they have ended: JAX
    would end one that has not when this process is gone, which serves their group."""
    self._watch.end()  # first: a host that has heard it is gone at once, and not lost
    with contextlib.suppress(OSError):  # one that is gone already
      end(self._runner.stop.is_set())
    seconds = self._runner.config.network.silence_seconds
    for host, each in self.links.items():
      gone = lambda each=each: FINISHED if each.orders.gone(seconds) else None
      exited(gone, seconds, f"host {host} of this island")

  def _order_seconds(self, reading: bool) -> float:
    """How long an order may take; before the usual step is known, programs are loaded.

    Data may come late, from a large file or another machine. Meanwhile neither the host that waits
    for them hangs nor this one, of which a probe must hear.
    """
    if reading:
      self._runner.health.beat()
    network, usual_seconds = self._runner.config.network, self._runner.usual_seconds()
    if self.progress.done <= COMPILED_ORDERS:
      return START_SECONDS
    patient = reading or not usual_seconds
    least_seconds = network.give_up_seconds if patient else network.silence_seconds
    return max(least_seconds, SLOW_STEPS * (usual_seconds or 0.0))

  def _lost(self, host: int | None, reason: str) -> None:
    """Ends the whole process, since its main thread may wait inside a program for ever."""
    runner = self._runner
    if runner.stop.is_set() and not runner.began:
      runner.end_early()  # all hosts were asked to end, and one was quicker
    who = "this island" if host is None else f"host {host} of this island"
    text = f"{who} is lost: {reason}. All its hosts end, to start again together"
    runner.recorder.record(events.Crash(trace=text))
    runner.recorder.close()
    runner.say(text)
    os._exit(LOST)


# --- the others -----------------------------------------------------------------------------------


class FollowingHost:
  """A host that follows host 0 of its island, until host 0 says that the work is over.

  A signal is passed on to host 0, which pushes the island's work and then ends all hosts.
  """

  def __init__(self, config: Config, number: int, place: RoleSpec):
    self._config, self._number, self._place = config, number, place
    self._address = f"{learner_address(number)} host {place.host}"
    self.progress = host_links.HostProgress()
    self.asked = threading.Event()  # to end
    self._heard: list[int] = []  # the signals that have asked
    self.joined = threading.Event()  # with the others, as one JAX
    self._began = False  # to train
    # Probes find a process that hangs as a whole; what its work waits for, host 0 finds.
    self._health = Health(self._status)
    self._told = 0.0  # since when it waited for the batch that it has reported as late
    self._next_line = time.monotonic() + PROGRESS_SECONDS

  def run(self) -> int:
    """Returns the exit status: 1 if host 0 is gone or has refused this host."""
    began = time.time()
    if self._place.http:
      self._say(f"probes at {self._health.serve(self._place.http)}")
    with terminates(self.asked) as self._heard:
      try:
        beside(self._follow, self._hear)
      except host_links.HostsApart as error:
        self._say(str(error))
        return LOST
      except KeyboardInterrupt:
        self._say("ends at once, as asked")
        os._exit(INTERRUPTED)
      except Exception as error:  # JAX would wait for the other hosts before it lets a process end
        name_lost_host()
        self._fail(error, BAD_USAGE if lasts(error) else LOST)
    self._health.close()
    self._say(f"ends after {time.time() - began:.0f} s with its island")
    return self._place.asked_status(self._heard) if self.asked.is_set() else FINISHED

  def _say(self, text: str) -> None:
    say(f"[{time.strftime('%H:%M:%S')}] {self._address}: {text}")

  def _status(self) -> dict[str, Any]:
    who = {"role": self._address, "run": self._place.run_id}
    return who | msgspec.structs.asdict(self.progress)

  def _hear(self) -> None:
    """Ends a host that was asked to: host 0 does not hear it before all hosts have come."""
    self._health.beat()
    compiled = self.progress.done >= COMPILED_ORDERS
    self._health.waits_for = "" if compiled else self.progress.doing
    self.progress.asked_to_end = self.asked.is_set()
    self._tell_late_batch(self.progress.reading_since)
    if (now := time.monotonic()) >= self._next_line:
      self._next_line = now + PROGRESS_SECONDS
      self._say(f"{self.progress.doing}; {self.progress.done} orders of host 0 carried out")
    if self.asked.is_set() and not self.joined.is_set():
      self._end_early()

  def _end_early(self) -> None:
    self._say("was asked to end before its island had begun; nothing is lost")
    os._exit(self._place.asked_status(self._heard))

  def _tell_late_batch(self, since: float) -> None:
    network = self._config.network
    if since not in (0.0, self._told) and time.monotonic() - since > network.silence_seconds:
      self._told = since
      self._say(
        f"has waited {network.silence_seconds:g} s for its next batch, and its island with it. They"
        f" end after {network.give_up_seconds:g} s. Fix: bring the data nearer, or raise"
        " network.give_up_seconds."
      )

  def _lost(self, host: int | None, reason: str) -> None:
    if self.asked.is_set() and not self._began:
      self._end_early()  # host 0 was asked to end as well, and was quicker
    self._say(f"host 0 is lost: {reason}; it ends, to start again with it")
    os._exit(LOST)

  def _fail(self, error: Exception, status: int = LOST) -> None:
    say("".join(traceback.format_exception(error)), sys.stderr)  # its disk may be full, too
    self._say(f"{type(error).__name__}: {error}")
    os._exit(status)

  def _follow(self) -> None:
    config, number, place = self._config, self._number, self._place
    keys = load_keys(place, learner_address(number))
    from ddiloco.training import data

    plan = initial.make_plan(config)  # executes custom parts, which host 0 compares
    source, patience = data.open_data(config.data), config.network.give_up_seconds
    island = _agreed(config, number, place, data.digest(source))
    self.progress.doing = f"looks for host 0 at {place.hosts}"
    self._say(self.progress.doing)
    links, coordinator = host_links.join(place.hosts, island, place.host, keys, patience)
    # Only host 0 gives orders; it may still compile when this host is done with that.
    limits = config.network.silence_seconds, lambda _: math.inf
    watch = host_links.HostWatch({0: links}, self.progress, *limits, self._lost)
    _join(coordinator, config, island, place.host)
    self.joined.set()
    from ddiloco.training import hosts
    from ddiloco.training.devices import island_devices, kept_in, usable
    from ddiloco.training.island import Island

    with kept_in(place.workdir / COMPILED):
      devices = island_devices(config.islands.island(number), usable(), number, place.host)
      trained = Island(config, number, devices, plan)
      stream = data.Stream(source, config, number, trained.rows)
      self.progress.doing = "compiles"
      self._say(f"compiled in {trained.compile():.1f} s; follows host 0")
      self.progress.done = COMPILED_ORDERS

    def failed(error: Exception) -> None:
      if isinstance(error, OSError):
        self._lost(0, f"its connection for values has ended ({error})")
      self._fail(error)

    def read(position: int) -> Iterator[Any]:
      self._began = True
      return stream.iterate(position)

    links.values.send(READY)
    if hosts.follow(trained, links, read, self.progress, failed):
      self.asked.set()
    watch.end()
