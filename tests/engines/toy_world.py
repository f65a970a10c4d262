"""A run of toy roles as real processes, and whatever may happen to them.

One thread: roles are restarted and events are read while a test waits for something.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from proxy import Link

from ddiloco import workdir
from ddiloco.config import Config
from ddiloco.core.fragments import owned_by
from ddiloco.engines.children import Forked, spawn_forked
from ddiloco.engines.role_spec import free_urls
from ddiloco.observe.eventlog import Event, Follower
from tests.roles import toy
from tests.waits import PATIENCE_SECONDS, wait_for

LOOK_SECONDS = 0.02
RESTART_SECONDS = 1.0  # so the next incarnation is a greater number


@dataclasses.dataclass
class Role:
  """A role's process; `name` is its address, with something after it for a second process."""

  name: str
  command: list[str]
  log: Path
  process: Forked
  restart_at: float | None = None

  @property
  def status(self) -> int | None:
    """How it ended; None: it runs, or will again."""
    return None if self.restart_at is not None else self.process.poll()

  def said(self) -> str:
    return self.log.read_text(errors="replace")


class World:
  """Use it as a context: whatever happens, no process is left.

  Args:
    folder: an empty one; becomes the workdir.
    config: of `tests.roles.toy.config`.
    keys: a folder with everybody's.
    flags: of every role beside those that tell it its place.
  """

  def __init__(self, folder: Path, config: Config, keys: Path | None = None, *flags: str):
    self.config, self.keys, self._flags = config, keys, flags
    self._events: dict[str, list[Event]] = {}  # by kind
    self.roles: dict[str, Role] = {}
    self.may_fail: set[str] = set()  # roles whose exit status a test looks at itself
    self.longest_pause = 0.0  # seconds between two looks: what this machine does to a bystander
    self._folder = folder
    self._began = workdir.join(folder, config)
    self._follower = Follower(folder)
    self.urls = free_urls(config.sync.num_shards)
    self._links: dict[int, list[Link]] = {}
    self._fronts: dict[int, Link] = {}  # what stands before a shard for everybody
    self._exits = contextlib.ExitStack()
    (folder / "logs").mkdir()

  def __enter__(self) -> World:
    return self

  def __exit__(self, *_: object) -> None:
    for role in self.roles.values():
      role.process.send_signal(signal.SIGKILL)
    for role in self.roles.values():
      wait_for(lambda role=role: role.process.poll() is not None, role.name)
      role.process.stdin.close()
    for front in self._fronts.values():
      front.stop()
    self._exits.close()

  # --- what happens -------------------------------------------------------------------------------

  def begin(self) -> None:
    """Starts all shards and learners of the config."""
    for shard in range(self.config.sync.num_shards):
      self.start(f"syncer-{shard}", f"--bind={self.urls[shard]}")
    for learner in range(self.config.islands.num_learners):
      self.start(f"learner-{learner}")

  def start(self, address: str, *flags: str, after: str = "") -> Role:
    """Starts a role; `after` tells a second process of the same address from the first."""
    kind, _, number = address.partition("-")
    links = self._links.get(int(number), []) if kind == "learner" else []
    urls = [f"tcp://{link.host}:{link.port}" for link in links] or list(self.urls)
    for shard, front in self._fronts.items():
      urls[shard] = f"tcp://{front.host}:{front.port}"
    command = [
      *(sys.executable, "-m", "tests.engines.toy_role", kind, number or "0"),
      *(f"--dir={self._folder}", f"--syncers={','.join(urls)}"),
      *(f"--config={self.config.to_json()}", *([f"--keys={self.keys}"] if self.keys else [])),
      *(*self._flags, *flags),
    ]
    name = address + after
    log = self._folder / "logs" / f"{name}.log"
    role = self.roles[name] = Role(name, command, log, spawn_forked(command, log))
    return role

  def put_behind_links(self, learner: int) -> None:
    """The learner, not started yet, is to reach every shard over a link of its own."""
    for url in self.urls:
      parts = urlsplit(url)
      link = self._exits.enter_context(Link((parts.hostname, parts.port)))
      self._links.setdefault(learner, []).append(link)

  def put_front(self, shard: int, url: str = "") -> None:
    """Everybody reaches this shard at one address, from now on the one that listens at `url`."""
    parts = urlsplit(url or self.urls[shard])
    before = self._fronts.get(shard)
    if before is not None:
      before.stop()
    listen = (before.host, before.port) if before is not None else ("127.0.0.1", 0)
    self._fronts[shard] = Link((parts.hostname, parts.port), listen=listen).start()

  def cut(self, learner: int) -> None:
    for link in self._links[learner]:
      link.cut()

  def heal(self, learner: int) -> None:
    for link in self._links[learner]:
      link.heal()

  def send(self, number: signal.Signals, *names: str) -> float:
    """Sends a signal to roles at once; returns when, on the clock of the events.

    That is before the first is sent: what it leads to may happen before this process goes on.
    """
    now = time.time() - self._began
    for name in names:
      self.roles[name].process.send_signal(number)
    return now

  # --- what a test waits for ----------------------------------------------------------------------

  def wait(self, what: str, done: Callable[[], object]) -> None:
    """Until `done()`; fails if a role ends badly, or patience does."""
    looked = time.monotonic()
    deadline = looked + PATIENCE_SECONDS
    while not done():
      self._look()
      assert time.monotonic() < deadline, f"waited in vain for {what}{self._all_said()}"
      time.sleep(LOOK_SECONDS)
      now, before = time.monotonic(), looked
      looked, self.longest_pause = now, max(self.longest_pause, now - before)

  def wait_for(self, kind: str, role: str, after: float = -1.0, **fields: object) -> Event:
    """The first such event after a time; `role` is an address, "" any."""
    description = f"{kind} of {role} after {after:.2f} s with {fields}"
    self.wait(description, lambda: any(self.find(kind, role, after, **fields)))
    return next(self.find(kind, role, after, **fields))

  def wait_end(self, names: Iterable[str] = ()) -> dict[str, int]:
    """The exit status of these roles (of all), once they have ended.

    All end when an evaluator has the final model: it comes now, for that alone. What is left of
    the run, which is long enough for what a test waits for, is done in a hurry.
    """
    if not names:
      (self._folder / toy.HURRY).touch()
      self.start("evaluator")
    names = list(names) or list(self.roles)
    self.wait(f"the end of {names}", lambda: all(self.roles[n].status is not None for n in names))
    self._look()  # events are whole once a process has ended
    return {name: self.roles[name].status for name in names}

  def find(self, kind: str, role: str = "", after: float = -1.0, **fields: object) -> Iterator:
    """Events of a kind, in the order they were read."""
    for event in self._events.get(kind, ()):
      ours = event.role == (role or event.role)
      same = all(getattr(event, key, None) == value for key, value in fields.items())
      if ours and same and event.time > after:
        yield event

  def owned(self, shard: int) -> tuple[int, ...]:
    return owned_by(shard, self.config.sync.num_shards, self.config.sync.num_fragments)

  def _look(self) -> None:
    now = time.monotonic()
    for role in self.roles.values():
      status = role.status  # asked once, since it may change at any time
      if role.restart_at is not None and now >= role.restart_at:
        role.restart_at = None
        role.process.stdin.close()
        role.process = spawn_forked(role.command, role.log)
      elif status == -signal.SIGKILL:
        role.restart_at = now + RESTART_SECONDS
      else:
        bad = status not in (None, 0) and role.name not in self.may_fail
        assert not bad, f"{role.name} ended with status {status}{self._all_said()}"
    for event in self._follower.poll():
      self._events.setdefault(event.kind, []).append(event)

  def _all_said(self) -> str:
    return "".join(f"\n--- {r.name} ({r.status}):\n{r.said()}" for r in self.roles.values())
