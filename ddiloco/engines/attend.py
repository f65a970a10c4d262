"""What a process needs around its one role: signals, probes, events, progress, a connection."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ddiloco.config import Config, ConfigError
from ddiloco.config.chaos import INSIDE
from ddiloco.core.fragments import Plan
from ddiloco.engines import workdir
from ddiloco.engines.asked import Asked
from ddiloco.engines.place import Place
from ddiloco.observe.events import Event, Recorder
from ddiloco.observe.style import clock_time
from ddiloco.observe.view import RunView, fold
from ddiloco.resilience.chaos import Faults
from ddiloco.runtime import initial, network
from ddiloco.runtime.disturbed import Disturbed
from ddiloco.runtime.health import Health
from ddiloco.runtime.keys import Keys, require_keys
from ddiloco.runtime.rejoin import open_storage
from ddiloco.runtime.saver import Saver
from ddiloco.runtime.transport import syncer_address

LOOK_SECONDS = 0.5  # between two looks at the role
PROGRESS_SECONDS = 10.0
FINISHED, LOST, INTERRUPTED = 0, 1, 130  # exit statuses


class Ended(Exception):
  """The role cannot go on. The text says why, what is lost, and what to do."""


def load_keys(place: Place, address: str) -> Keys | None:
  """The role's keys; None on loopback, which needs none.

  Raises:
    ConfigError: keys are needed and not given, or not right; or a url is not.
  """
  keys = Keys.load(place.keys, address) if place.keys else None
  for url in place.syncers:
    require_keys(url, keys, "--syncers")
  if place.bind:
    require_keys(place.bind, keys, "--bind")
  return keys


def connect(
  config: Config, plan: Plan, place: Place, address: str, incarnation: int, keys: Keys | None = None
) -> network.NetworkEndpoint:
  """A role's endpoint; it dials nobody yet."""
  run = network.Run(
    run_id=place.run_id,
    plan_id=initial.contract(config, plan),
    max_payload_bytes=12 * max(plan.sizes),  # a copy: value, view and momentum, f32
    queue_bytes=config.network.queue_bytes or 12 * sum(plan.sizes),
  )
  return network.NetworkEndpoint(
    address,
    incarnation,
    run,
    config.network,
    bind=place.bind or None,
    keys=keys,
  )


class Attendant:
  """Looks after one role of this process. Use it as a context, in the main thread.

  The role calls `stopped()` again and again, which is its sign of life, its news of a signal, and
  raises `Ended` when there is no point in going on. A thread of the attendant's own answers probes
  and prints what matters, and a line of progress every ten seconds.

  Args:
    address: the role's, "learner/3".
    config: the run's.
    place: where it runs.
  """

  def __init__(self, address: str, config: Config, place: Place):
    self.address = address
    self.config = config
    self.place = place
    self.keys = load_keys(place, address)
    self.plan = initial.make_plan(config)
    self.incarnation = network.seconds_since_2020()
    self.started = workdir.join(place.workdir, config)
    self.recorder = self._record()
    self.endpoint: Disturbed | None = None
    self.ready: Callable[[], str] = lambda: "starting"  # "": ready; else what it waits for
    self.progress: Callable[[], str] = lambda: ""
    self.interrupted = False
    self._stop = threading.Event()
    self._closing = threading.Event()
    self._failure = ""
    self._hurry = False
    self._view = RunView()
    self.usual_seconds: Callable[[], float] = lambda: 0.0  # of one step, for the liveness probe
    self._health = Health(self._status)
    self.faults = Faults((), 0.0, role=address)
    self._asked = Asked(place.workdir)
    self._reached_at = time.monotonic()
    self._handlers: dict[int, object] = {}
    self._thread = threading.Thread(target=self._look, name=f"attend {address}", daemon=True)

  def __enter__(self) -> Attendant:
    where = f", probes at {self._health.serve(self.place.http)}" if self.place.http else ""
    for number in (signal.SIGTERM, signal.SIGINT):
      self._handlers[number] = signal.signal(number, self._on_signal)
    self.say(f"starts in run {self.place.run_id!r}, incarnation {self.incarnation}{where}")
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._closing.set()
    self._thread.join()
    self.disconnect()
    self.recorder.close()
    self._health.close()
    for number, handler in self._handlers.items():
      signal.signal(number, handler)  # type: ignore[arg-type]
    # The role has ended in its own way; a SIGTERM that comes late must not change that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

  # --- for the role -------------------------------------------------------------------------------

  def run(self, role: Callable[[], int]) -> int:
    """The exit status of the process: `role`'s own, or why it could not go on."""
    try:
      status = role()
    except ConfigError:
      raise  # bad usage; the command line says what and how
    except KeyboardInterrupt:
      self._hurry = True
      self.say("ends at once, as asked")
      return INTERRUPTED
    except Ended as error:
      self.say(str(error))
      return LOST
    except Exception as error:  # whatever it is: said, logged, and the status tells
      self.recorder.event("crash", trace=traceback.format_exc())
      traceback.print_exc()
      self.say(f"crashed: {type(error).__name__}: {error}")
      return LOST
    return INTERRUPTED if self.interrupted and status == FINISHED else status

  def connect(self) -> Disturbed:
    """A new connection of the present incarnation, instead of the one before."""
    self.disconnect()
    endpoint = connect(
      self.config, self.plan, self.place, self.address, self.incarnation, self.keys
    )
    self.endpoint = Disturbed(endpoint, self.faults.weather)
    self._reached_at = time.monotonic()
    return self.endpoint

  def dial(self) -> Disturbed:
    """`connect`, and on to every shard."""
    endpoint = self.connect()
    for shard, url in enumerate(self.place.syncers):
      endpoint.dial(syncer_address(shard), url)
    return endpoint

  def listen(self, shard: int) -> Disturbed:
    """`connect` as a shard, and on to the shards it shares copies with.

    Raises:
      Ended: somebody else has the port.
    """
    try:
      endpoint = self.connect()
    except OSError as error:
      raise Ended(
        f"cannot listen at {self.place.bind} or the port after it ({error})."
        " Fix: end who has them, or choose another --bind (and --syncers everywhere)."
      ) from error
    count = len(self.place.syncers)
    buddy = (shard + 1) % count
    if buddy != shard:
      endpoint.dial(syncer_address(buddy), self.place.syncers[buddy])
    return endpoint

  def saver(self) -> Saver | None:
    """Writes the role's parts of snapshots, if the run makes any."""
    storage = open_storage(self.config, self.plan, self.place.workdir)
    if storage is None:
      return None
    role, disk = self.recorder.role, self.faults.disk
    return Saver(storage, role, self.incarnation, self.recorder, disk)

  def disconnect(self) -> None:
    """Closes the connection, after what is queued has had its time to go out."""
    endpoint, self.endpoint = self.endpoint, None
    if endpoint is not None:
      at_once = self._failure or self._hurry
      endpoint.close(0.0 if at_once else self.config.network.drain_seconds)

  def reborn(self) -> None:
    """The role starts again in this process, as a new incarnation."""
    self.recorder.close()
    self.incarnation = max(self.incarnation + 1, network.seconds_since_2020())
    self.recorder = self._record()

  def stopped(self) -> bool:
    """Whether a signal asked the role to end.

    Raises:
      Ended: fenced, or nobody can be reached: nothing it does can reach the run any more.
    """
    self._health.beat()
    if self._failure:
      raise Ended(self._failure)
    return self._stop.is_set()

  def pause(self, seconds: float) -> bool:
    """Waits; True if a signal ended the wait."""
    return self._stop.wait(seconds)

  def say(self, text: str) -> None:
    """One line for whoever watches this process."""
    now = clock_time(time.time() - self.started)
    print(f"[{now}] {self.address}: {text}", flush=True)

  # --- beside it ----------------------------------------------------------------------------------

  def _record(self) -> Recorder:
    name = self.address.replace("/", "-")
    return Recorder(
      self.place.workdir, name, self.incarnation, self.started, time.time, [self._listen]
    )

  def _listen(self, event: Event) -> None:
    """Says what the live view would note: joined, refused, stopped, a member lost, ..."""
    known = self._view.num_notes
    self._view = fold(self._view, event)
    if self._view.num_notes > known:  # one event makes one note at most
      self.say(self._view.notes[-1].text)

  def _on_signal(self, number: int, _frame: object) -> None:
    if number == signal.SIGINT and self.interrupted:
      raise KeyboardInterrupt
    self.interrupted = self.interrupted or number == signal.SIGINT
    self._stop.set()

  def _look(self) -> None:
    next_line = time.monotonic() + PROGRESS_SECONDS
    said_stop = False
    while not self._closing.wait(LOOK_SECONDS):
      waits_for = self.ready()
      self._probe(waits_for)
      self._check_links()
      self._suffer()
      if self._stop.is_set() and not said_stop:
        said_stop = True
        self.say("was asked to end; brings out what it has (a second Ctrl-C ends it at once)")
      if time.monotonic() >= next_line:
        next_line += PROGRESS_SECONDS
        self.say(f"waits: {waits_for}" if waits_for else self.progress())

  def _probe(self, waits_for: str) -> None:
    self._health.allow_seconds = self.usual_seconds()
    if waits_for or self._failure:
      self._health.not_ready(self._failure or waits_for)
    else:
      self._health.ready()

  def _status(self) -> dict[str, Any]:
    endpoint, waits_for = self.endpoint, self._failure or self.ready()
    return {
      "role": self.address,
      "run": self.place.run_id,
      "incarnation": self.incarnation,
      "waits_for": waits_for,
      "progress": "" if waits_for else self.progress(),
      "links": endpoint.links() if endpoint else {},
    }

  def _check_links(self) -> None:
    endpoint = self.endpoint
    if endpoint is None:
      return
    if endpoint.fenced:
      self._fail(
        f"may not speak any more: {endpoint.fenced}. Another process runs as {self.address}."
        " Fix: end one of them, or give it another number."
      )
      return
    links = endpoint.links()
    now = time.monotonic()
    if any(link["state"] == "up" for link in links.values()) or self.place.bind:
      self._reached_at = now
    patience = self.config.network.give_up_seconds
    if now - self._reached_at > patience:
      self._fail(
        f"has reached no shard for {patience:g} s: {unreached(links)}. Fix: check --syncers and"
        " --keys and that the shards run, or raise network.give_up_seconds."
      )

  def _suffer(self) -> None:
    """Faults inside this role that somebody asked for begin, or go on if they still last."""
    for when, fault in self._asked.poll():
      left = when + fault.seconds - time.time()
      if fault.role == self.address and fault.action in INSIDE and left > 0:
        self.faults.begin(fault, left)

  def _fail(self, text: str) -> None:
    self._failure = self._failure or text
    if self.endpoint is not None:
      self.endpoint.wake()


def unreached(links: dict) -> str:
  """Which peers do not answer and why, in words; "" if all do."""
  return "; ".join(
    f"{peer} is {link['state']}" + (f" ({link['reason']})" if link.get("reason") else "")
    for peer, link in sorted(links.items())
    if link["state"] != "up"
  )
