"""What surrounds the one role of a process: signals, probes, events, progress, a connection."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddiloco import workdir
from ddiloco.chaos import Faults, FaultyEndpoint, fault_requests
from ddiloco.checkpoint.buddy import neighbours
from ddiloco.checkpoint.restore import open_storage
from ddiloco.checkpoint.saver import Saver
from ddiloco.checks import lasts
from ddiloco.config import Config
from ddiloco.config.schema import INSIDE
from ddiloco.core.fragments import Plan, owned_by
from ddiloco.engines import role_spec
from ddiloco.engines.profiler import Profiler
from ddiloco.engines.role_spec import Outnumbered, RoleSpec, another_life, beside, terminates
from ddiloco.environment import FINISHED, INTERRUPTED, LOST
from ddiloco.network import frames
from ddiloco.network.endpoint import NetworkEndpoint, RunIdentity
from ddiloco.network.host_links import HostsApart
from ddiloco.network.keys import Keys, require_keys
from ddiloco.network.transport import syncer_address
from ddiloco.network.webserver import Health
from ddiloco.observe.eventlog import Recorder
from ddiloco.observe.guards import FIRST_STEP_SECONDS, Guard, HangWatch, ended, say
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import clock_time
from ddiloco.protocol import events
from ddiloco.protocol.events import parse_role
from ddiloco.protocol.supervisor import after_exit
from ddiloco.roles import initial
from ddiloco.roles.learner import Quarantined

if TYPE_CHECKING:  # its module imports Orbax and JAX, which not every role needs
  from ddiloco.checkpoint.snapshots import Storage

WATCHED = ("learner", "syncer")  # kinds of roles whose loops hang if they stand still
LOOK_SECONDS = 0.5  # between two looks at the role
PROGRESS_SECONDS = 10.0
CLOSE_SECONDS = 10.0  # for the runner's thread to end; its terminal may be stuck
EARLY_SECONDS = 1.0  # for a role that has not begun yet to end by itself
GOODBYE_SECONDS = 1.0  # at least, for what is still queued when a role ends
# Vectors of a fragment in one message: a copy has value and momentum, a donation the optimizer's
# moments. Adam has two, Adan four, and one more where gradients are accumulated.
COPIED, MOST_MOMENTS = 2, 8


def load_keys(place: RoleSpec, address: str) -> Keys | None:
  """The role's keys; None on loopback, which needs none.

  Raises:
    ConfigError: keys are needed and not given, or invalid; or a url is invalid.
  """
  keys = Keys.load(place.keys, address) if place.keys else None
  for url in place.syncers:
    require_keys(url, keys, "--syncers")
  if place.bind:
    require_keys(place.bind, keys, "--bind")
  return keys


def connect(
  config: Config, plan: Plan, place: RoleSpec, address: str, incarnation: int, keys: Keys | None
) -> NetworkEndpoint:
  """A role's endpoint: it dials every shard, a shard those with which it exchanges copies."""
  shards = range(config.sync.num_shards)
  vectors = MOST_MOMENTS if config.checkpoint.rejoin == "peer" else COPIED
  owned = [sum(plan.sizes[p] for p in owned_by(s, len(shards), len(plan.sizes))) for s in shards]
  run = RunIdentity(
    run_id=place.run_id,
    plan_id=initial.contract(config, plan),
    max_payload_bytes=4 * vectors * max(plan.sizes),
    queue_bytes=config.network.queue_bytes or 12 * max(owned),
  )
  endpoint = NetworkEndpoint(address, incarnation, run, config.network, place.bind or None, keys)
  (kind, number), count = parse_role(address), len(place.syncers)
  for shard in neighbours(number, count) if kind == "syncer" else range(count):
    endpoint.dial(syncer_address(shard), place.syncers[shard])
  return endpoint


class Ended(Exception):
  """The role cannot go on. The text says why, what is lost, and what to do."""


class RoleRunner:
  """Looks after one role of this process. Use it as a context, in the main thread.

  The role has a thread of its own, so that the main thread can always handle signals. The role
  calls `stopped()` again and again: the call is the role's sign of life, returns whether a signal
  has come, and raises `Ended` when the role cannot go on. Another thread answers probes, and prints
  the important events and a line of progress every ten seconds.

  Args:
    address: the role's, "learner-3".
    config: the run's.
    place: where the role runs.

  Attributes:
    stop: set by a signal; the role is asked to end.
    ready: what the role waits for, "": it works.
    progress: how far it is, in words.
    usual_seconds: of one step, None before it is known; 0 of a role without steps.
    health: what probes hear.
    began: the role checks for signals itself; before that it has no work to lose.
  """

  def __init__(self, address: str, config: Config, place: RoleSpec):
    self.address, self.config, self.place = address, config, place
    self._kind, self._number = parse_role(address)
    self.keys = load_keys(place, address)
    self.plan = initial.make_plan(config)
    self.started = workdir.join(place.workdir, config)
    self._lives = workdir.live_in(place.workdir)
    now = frames.seconds_since_2020()
    self._former = role_spec.newest(place.workdir, now, address)
    # A shard has its port to itself, so none of its former lives can still run. Any other role
    # learns from the shards whether a former life still runs.
    self.incarnation = max(now, self._former + 1) if place.bind else max(now, 0)
    self.ready: Callable[[], str] = lambda: "starting"
    self.progress: Callable[[], str] = lambda: ""
    self.usual_seconds: Callable[[], float | None] = lambda: 0.0
    self._profiler = Profiler(place.workdir, lambda: self.recorder)
    self._hangs = HangWatch(config.run.hang_seconds, lambda: self.recorder)
    # Prints the events that the live view would show: joined, rejected, stopped, ...
    self._seen = RunState(noted=lambda note: self.say(note.text))
    self.recorder = self._record()
    self.endpoint: FaultyEndpoint | None = None
    self._signals = contextlib.ExitStack()
    self._heard: list[int] = []  # the signals that have come
    self.stop = threading.Event()
    self._closing = threading.Event()
    self._asked_at = math.inf  # when a signal was first seen to ask it to end
    self._over: Ended | Outnumbered | None = None  # why this life cannot go on
    self.began = False
    self._waited = False  # whether the role has waited for a newer life to fall silent
    self._end_at = math.inf  # when the process ends if the role has not begun by then
    self.health = Health(self._status)
    self.faults = Faults((), 0.0, role=address)
    self._asked = fault_requests(place.workdir)
    self._reached_at = time.monotonic()
    self._drops_said: dict[str, tuple[int, float]] = {}  # sender -> (drops reported, quiet until)
    self._thread = threading.Thread(target=self._look, name=f"attend {address}", daemon=True)

  def __enter__(self) -> RoleRunner:
    where = f", probes at {self.health.serve(self.place.http)}" if self.place.http else ""
    self._heard = self._signals.enter_context(terminates(self.stop))
    self.say(f"starts in run {self.place.run_id!r}, incarnation {self.incarnation}{where}")
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._closing.set()
    ended(self._thread, CLOSE_SECONDS)
    self._profiler.close()
    self.disconnect()
    self.recorder.close()
    self.health.close()
    if self._lives is not None:
      self._lives.close()
    self._signals.close()
    # The role has ended; a late SIGTERM must not change the exit status.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

  # --- for the role -------------------------------------------------------------------------------

  def run(self, role: Callable[[], int]) -> int:
    """Runs the role, as one incarnation after another; returns the exit status of the process."""
    try:
      status = beside(lambda: self.lives(lambda afresh: role()), self._hear)
    except KeyboardInterrupt:
      self._over = Ended("ends at once, as asked")
      self.say(str(self._over))
      return INTERRUPTED
    except (Ended, HostsApart) as error:
      self.say(str(error))
      return LOST
    except Exception as error:  # any error is logged, and the exit status tells of it
      if lasts(error):
        raise  # bad usage; the command line prints the text
      trace = traceback.format_exc()
      self.recorder.record(events.Crash(trace=trace))
      say(trace, sys.stderr)  # a full disk must not keep the process from its end
      self.say(f"crashed: {type(error).__name__}: {error}")
      return LOST
    asked = status == FINISHED and self.stop.is_set()
    return self.place.asked_status(self._heard) if asked else status

  def lives(self, life: Callable[[bool], int]) -> int:
    """Runs `life(afresh)` for one incarnation after another; returns the exit status of the last.

    A life that was refused for its number begins anew. After a quarantine the next lives begin
    `afresh`, with nothing: the state was bad.

    Raises:
      Ended: the role was quarantined once too often in a row.
    """
    deaths, afresh, after = 0, False, 0
    while True:
      began = time.monotonic()
      try:
        return life(afresh)
      except Outnumbered as refusal:
        why, pause, after = f"{refusal}; begins anew", refusal.wait_seconds, refusal.after
      except Quarantined as error:
        deaths, pause = after_exit(deaths, time.monotonic() - began, self.config.run)
        if pause is None:
          raise Ended(
            f"was quarantined ({error}) for the {deaths}th time in a row; run.max_restarts allows"
            " no more"
          ) from error
        why, afresh = f"was quarantined ({error}); starts afresh", True
      self.say(f"{why} in {pause:g} s")
      self.disconnect()
      self._over = None
      if self.stop.wait(pause):
        return FINISHED  # the life had done nothing, or its work was rejected: nothing is lost
      self.reborn(after)

  def connect(self) -> FaultyEndpoint:
    """Makes the connection of the present incarnation.

    Raises:
      Ended: another process has the port.
    """
    who = self.address, self.incarnation, self.keys
    try:
      endpoint = connect(self.config, self.plan, self.place, *who)
    except OSError as error:
      if not self.place.bind:
        raise
      raise Ended(
        f"cannot listen at {self.place.bind} ({error})."
        " Fix: end the process that has it, or choose another --bind (and --syncers everywhere);"
        " tcp://0.0.0.0:PORT is all addresses of this machine."
      ) from error
    self.endpoint = FaultyEndpoint(endpoint, self.faults.messages)
    self._drops_said = {}
    self._reached_at = time.monotonic()
    return self.endpoint

  @functools.cached_property
  def storage(self) -> Storage | None:
    """The run's snapshots; None if it makes none."""
    return open_storage(self.config, self.plan, self.place.workdir, self.place.run_id)

  def saver(self) -> Saver | None:
    """The saver of the role's parts of snapshots; None if the run makes none."""
    life = self.address, self.incarnation, self.recorder, self.faults.disk
    return None if self.storage is None else Saver(self.storage, *life)

  def time_left(self) -> float:
    """Seconds to bring out what the role has: `network.drain_seconds` in all, once it was asked to
    end; soon after it is killed."""
    drain_seconds = self.config.network.drain_seconds
    ago = max(0.0, time.monotonic() - self._asked_at)
    return max(drain_seconds - ago, min(GOODBYE_SECONDS, drain_seconds))

  def disconnect(self) -> None:
    """Closes the connection; queued messages have `time_left` to go out."""
    self._hangs.end(self.address)  # the loop is over; the time until the next loop is no step
    endpoint, self.endpoint = self.endpoint, None
    if endpoint is not None:
      # What this life has set may hold a copy of the whole model.
      usual_seconds = self.usual_seconds()
      self.usual_seconds = lambda: usual_seconds
      self.ready, self.progress = lambda: "its next incarnation, or its end", lambda: ""
      endpoint.close(0.0 if self._over else self.time_left())

  def reborn(self, after: int = 0) -> None:
    """The role starts again in this process, as a new incarnation: `after` or later."""
    self.recorder.close()
    self.incarnation = max(self.incarnation + 1, after, frames.seconds_since_2020())
    self.recorder = self._record()

  def come_after(self, incarnation: int) -> None:
    """To be called when something of a former life of this role is found.

    Raises:
      Outnumbered: the former life's number is not smaller than this life's.
    """
    if incarnation >= self.incarnation:
      raise Outnumbered(f"finds what incarnation {incarnation} has left", incarnation + 1)

  def stopped(self) -> bool:
    """Whether a signal asked the role to end.

    Raises:
      Ended: the role is fenced, its network is broken, or it reaches no shard: its work cannot
        reach the run any more.
      Outnumbered: this life cannot go on, but the role may begin anew.
    """
    self.began = True
    self.health.beat()
    if self._kind in WATCHED:
      self._hangs.beat(self.address, self.usual_seconds())
    if self._over is not None:
      raise self._over
    return self.stop.is_set()

  def busy(self, what: str) -> None:
    """The role begins long work: until the next call of `stopped` it may take as long as it may
    take to start. It says so until another `ready` is set."""
    self._hangs.end(self.address)
    self.ready = lambda: what
    self.health.busy(what)

  def end_early(self) -> None:
    """Ends the process of a role that was asked to end before it had begun."""
    why = "was asked to end before it had begun; nothing is lost"
    self._end_now(why, self.place.asked_status(self._heard))

  def _end_now(self, why: str, status: int) -> None:
    """Ends the process while the role's thread is at work, or hangs."""
    self.say(why)
    self.recorder.close()
    os._exit(status)

  def say(self, text: str) -> None:
    """Prints one line, if the process has a terminal. Parts of the text may come from a peer, so
    unprintable characters are replaced."""
    text = "".join(c if c.isprintable() else " " for c in text)
    say(f"[{clock_time(time.time() - self.started)}] {self.address}: {text}")

  def speed(self) -> str:
    """How fast a learner trains, in words; "" before it is known."""
    island = self._seen.islands.get(self._number)
    return island.speed.text() if island is not None else ""

  # --- beside the role ----------------------------------------------------------------------------

  def _record(self) -> Recorder:
    who = self.address, self.incarnation
    listeners = [self._seen.add, self._profiler]
    return Recorder(self.place.workdir, *who, self.started, time.time, listeners)

  def _look(self) -> None:
    """Looks after the role until it ends; a duty that fails does not stop the others."""
    guard = Guard(f"what looks after {self.address}")
    next_line = time.monotonic() + PROGRESS_SECONDS
    while not self._closing.wait(LOOK_SECONDS):
      guard(self._check_links)
      guard(self._suffer)
      guard(self._watch)
      waits_for = guard(self.ready, instead="cannot tell what it waits for")
      guard(self._probe, waits_for)
      if time.monotonic() >= next_line:
        next_line = time.monotonic() + PROGRESS_SECONDS
        self.say(f"waits: {waits_for}" if waits_for else guard(self._goes_on, instead="goes on"))

  def _goes_on(self) -> str:
    """How far the role is, and which shards do not answer it: it goes on without them, but what it
    does for their fragments is not merged meanwhile."""
    endpoint, kind = self.endpoint, "syncer-"
    links = endpoint.links() if endpoint else {}
    away = unreached({peer: link for peer, link in links.items() if peer.startswith(kind)})
    return f"{self.progress()}; {away}" if away else self.progress()

  def _watch(self) -> None:
    """Ends a role whose loop hangs, so that it is started again: a shard at once, since other roles
    wait for its fragments. A learner holds up no other, and its step may still go on."""
    silent = self._hangs.look().get(self.address, 0.0)
    patience = self.config.network.give_up_seconds if self.usual_seconds() else math.inf
    if silent > (0.0 if self._kind == "syncer" else patience):
      self._end_now(f"hangs for {silent:.0f} s, and ends to be started again", LOST)

  def _hear(self) -> None:
    """Prints that a signal came, and ends a role that has not begun: while it compiles, or restores
    its fragments, it cannot check for signals."""
    if self._heard and not self.began:
      self._end_at = min(self._end_at, time.monotonic() + EARLY_SECONDS)
      if time.monotonic() >= self._end_at:
        self.end_early()
    elif self.stop.is_set() and self._asked_at == math.inf:
      self._asked_at = time.monotonic()
      self.say("was asked to end; brings out what it has (a second Ctrl-C ends it at once)")

  def _probe(self, waits_for: str) -> None:
    first = FIRST_STEP_SECONDS if self._kind == "learner" else 0.0
    self.health.allow_seconds = self.usual_seconds() or first
    self.health.waits_for = str(self._over or waits_for)

  def _status(self) -> dict[str, Any]:
    endpoint, waits_for = self.endpoint, str(self._over or self.ready())
    return {
      "role": self.address,
      "run": self.place.run_id,
      "incarnation": self.incarnation,
      "waits_for": waits_for,
      "progress": "" if waits_for else self.progress(),
      "links": endpoint.links() if endpoint else {},
    }

  def _check_links(self) -> None:
    """Has `stopped` raise soon if this life cannot go on."""
    if (endpoint := self.endpoint) is None:
      return
    links = endpoint.links()
    for sender, (count, reason) in [*endpoint.drops.items()]:
      self._say_drops(sender, count, reason)
    self._over = self._over or self._verdict(endpoint, links)
    if self._over is not None:
      endpoint.wake()

  def _verdict(self, endpoint: FaultyEndpoint, links: dict) -> Ended | Outnumbered | None:
    """Why this life cannot go on; None: it can."""
    settings, now = self.config.network, time.monotonic()
    if endpoint.broken:
      return Ended(
        f"cannot speak any more: {endpoint.broken}. What it had not sent is lost. Fix: start it"
        " again; if that repeats, report it with the trace that stands above."
      )
    if endpoint.fenced:  # if the newer life is dead, this host's clock has stepped back
      heard = *endpoint.outnumbered, settings.silence_seconds, self._waited
      self._waited = True
      other = ", or give it another number" if self._kind == "learner" else ""
      return another_life(endpoint.fenced, *heard) or Ended(
        f"may not speak any more: {endpoint.fenced}. Another process runs as {self.address}."
        f" Fix: end one of them{other}."
      )
    up = any(link["state"] == "up" for link in links.values())
    if up and self._former >= self.incarnation:  # before this host's clock stepped back
      reason = f"was here as incarnation {self._former} before, and is let in"
      return Outnumbered(reason, self._former + 1)
    if up or self.place.bind:
      self._reached_at = now
    patience = settings.give_up_seconds
    if now - self._reached_at <= patience:
      return None
    return Ended(
      f"has reached no shard for {patience:g} s: {unreached(links)}. Fix: what that says,"
      " else check --syncers, their order, and --keys, and that the shards run, or raise"
      " network.give_up_seconds."
    )

  def _say_drops(self, sender: str, count: int, reason: str) -> None:
    """Reports messages of another role that were dropped: a line now and then, and an event."""
    known, quiet_until = self._drops_said.get(sender, (0, 0.0))
    if count > known and time.monotonic() >= quiet_until:
      self._drops_said[sender] = count, time.monotonic() + PROGRESS_SECONDS
      self.recorder.record(events.Dropped(peer=sender, count=count - known, reason=reason))
      self.say(f"has dropped {count - known} messages of {sender}: {reason}")

  def _suffer(self) -> None:
    """Begins requested faults inside this role, or goes on with them if they still last."""
    for age_seconds, fault in self._asked.poll():
      left = fault.seconds - age_seconds
      if fault.role == self.address and fault.action in INSIDE and left > 0:
        self.faults.begin(fault, left)


def unreached(links: dict) -> str:
  """Which peers do not answer and why, in words; "" if all do."""
  return "; ".join(
    f"{peer} is {link['state']}" + (f" ({link['reason']})" if link.get("reason") else "")
    for peer, link in sorted(links.items())
    if link["state"] != "up"
  )
