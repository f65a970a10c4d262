"""Connections between the hosts of one island: the host that leads listens, the others dial it.

Host 0 and each other host have three connections, so that no message waits behind another kind:
orders, values (arrays), and signs of life. On each side one thread serves a connection and may
block on it, since OpenSSL allows only one. With keys each connection is TLS 1.3 between two owners
of the island's own key.
"""

from __future__ import annotations

import functools
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from ddiloco import __version__
from ddiloco.network.frames import (
  ALIVE_OPTIONS,
  KEEPALIVE_SECONDS,
  Door,
  TcpInfo,
  bind,
  certificate,
  connect,
  cut_off,
  fill,
  set_options,
)
from ddiloco.network.keys import Keys
from ddiloco.network.transport import Counters
from ddiloco.protocol.values import MalformedMessage

HELLO_BYTES = 1 << 12  # longest hello of a stranger
HELLO_SECONDS = 5.0  # for handshake and hello of a new connection
MOST_CALLERS = 64  # new connections at once
PAUSE_SECONDS = 0.2  # between two attempts to reach the leader
MESSAGE_BYTES = 1 << 24
_LENGTH = struct.Struct("<I")


class HostsApart(Exception):
  """The hosts of an island did not all connect. The text says which are missing, or why."""


class HostLink:
  """One connection. Every call blocks, and raises OSError when the far end is gone."""

  def __init__(self, connected: socket.socket):
    set_options(connected, ALIVE_OPTIONS)  # some of the connections carry data rarely
    self._socket = connected

  def send(self, message: bytes) -> None:
    """A message, for the far end's `receive`."""
    self._socket.sendall(_LENGTH.pack(len(message)) + message)

  def write(self, data: memoryview) -> None:
    """Bytes, for the far end's `fill`."""
    self._socket.sendall(data)

  def receive(self, most_bytes: int = MESSAGE_BYTES) -> bytes:
    """The next message."""
    prefix = bytearray(_LENGTH.size)
    fill(self._socket, memoryview(prefix))
    (length,) = _LENGTH.unpack(prefix)
    if length > most_bytes:
      raise ConnectionError(f"a message of {length} bytes, at most {most_bytes} are allowed")
    found = bytearray(length)
    fill(self._socket, memoryview(found))
    return bytes(found)

  def fill(self, view: memoryview) -> None:
    """Reads as many bytes as `view` has into it."""
    fill(self._socket, view)

  def deaf(self, seconds: float) -> bool:
    """Whether the far end's kernel has acknowledged nothing for so long. It is asked every
    `KEEPALIVE_SECONDS` while a connection is idle, and rarely while it has no room for more."""
    try:
      info = TcpInfo.of(self._socket)
    except OSError:
      return False
    asked = info.unacked or not info.unsent_bytes
    return bool(asked) and info.last_ack_ms > 1e3 * max(seconds, 3 * KEEPALIVE_SECONDS)

  def gone(self, silent_seconds: float) -> bool:
    """Whether the far end has closed the connection, or has not been heard for so long; for a
    connection on which it sends nothing."""
    if self.deaf(silent_seconds):
      return True
    try:
      return not socket.socket.recv(self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
      return False
    except OSError:
      return True

  def close(self) -> None:
    """Closes the connection, and wakes a thread that waits on it; from any thread."""
    cut_off(self._socket)
    self._socket.close()


class HostLinks(NamedTuple):
  """The connections between the host that leads and another one of its island."""

  orders: HostLink
  values: HostLink
  lives: HostLink  # signs of life


KINDS = HostLinks._fields


class IslandIdentity(msgspec.Struct, frozen=True):
  """The values that all hosts of an island must share."""

  run_id: str
  config: str  # digest of the whole config
  learner: int
  hosts: int
  data: str = ""  # digest of the corpus; "": the data are the user's own
  custom: str = ""  # digest of the sources of the user's own parts; "": there are none
  jax: str = ""  # its version


class HostHello(msgspec.Struct, frozen=True):
  """The first message of a connection: which host it is from, and the kind of connection."""

  island: IslandIdentity
  host: int
  kind: str
  version: str = __version__  # other code has other messages, and may make other programs


class HostWelcome(msgspec.Struct, frozen=True):
  """The leader's answer; a host of any version reads why it is refused."""

  refused: str = ""  # why the connection is refused; "": it is accepted
  coordinator: str = ""  # HOST:PORT where the hosts' JAX processes meet


# Made once: msgspec (0.22) may crash where two threads decode a class for the first time.
_HELLO = msgspec.msgpack.Decoder(HostHello)


class Meeting:
  """The leader's side: accepts the connections of all other hosts, and no others.

  Args:
    url: where it listens, tcp://HOST:PORT.
    island: the identity that hosts must have.
    keys: of the island's role; None: loopback only.
    silent_seconds: a host that is silent for so long has ended, and may come again.

  Attributes:
    at: the address at which it listens. Some machines take their own name for one of loopback,
      which no other machine reaches.
    coordinator: HOST:PORT for the hosts' JAX processes, on this host and free now.

  Raises:
    HostsApart: the port is taken, or the address is not this machine's.
  """

  def __init__(self, url: str, island: IslandIdentity, keys: Keys | None, silent_seconds: float):
    self._island, self._keys, self._silent_seconds = island, keys, silent_seconds
    self._links: dict[int, dict[str, HostLink]] = {h: {} for h in range(1, island.hosts)}
    self._changed, self._closed = threading.Condition(), False
    try:
      listener, _ = bind(url)
      probe, free = bind(f"{url.rpartition(':')[0]}:0")
    except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
      raise HostsApart(
        f"--hosts={url}: host 0 cannot listen there ({error})."
        " Fix: end what has the port, or give an address of this machine."
      ) from error
    probe.close()
    host, port, *_ = listener.getsockname()
    self.at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    self.coordinator = free.removeprefix("tcp://")
    self._door = Door(listener, keys, self._hear, MOST_CALLERS, HELLO_SECONDS, Counters())

  @property
  def missing(self) -> list[int]:
    """Hosts that have not made all their connections yet, or have ended since."""
    with self._changed:
      self._forget_gone()
      return [host for host, links in self._links.items() if len(links) < len(KINDS)]

  def _forget_gone(self) -> None:
    """Forgets hosts that have ended: they may start again and come once more."""
    for links in self._links.values():
      gone = "orders" in links and links["orders"].gone(self._silent_seconds)
      if gone and not self._closed:
        for link in links.values():
          link.close()
        links.clear()

  def wait(self, seconds: float) -> dict[int, HostLinks]:
    """Host -> its connections, when all are made; no other is accepted after that.

    Raises:
      HostsApart: some hosts are missing after so long; it names them.
    """
    with self._changed:
      complete = self._changed.wait_for(lambda: not self.missing, seconds)
      self.close()
    if not complete:
      raise HostsApart(
        f"hosts {self.missing} of {self._island.hosts} have not come to {self.at} within"
        f" {seconds:g} s. Fix: start them with the same --hosts and --config, give an address that"
        " they reach, or raise network.give_up_seconds."
      )
    return {host: HostLinks(**links) for host, links in self._links.items()}

  def close(self) -> None:
    """Stops listening."""
    self._closed = True
    self._door.close()

  def _hear(self, connected: socket.socket) -> bool:
    """Reads a hello, and accepts the connection or answers why it is refused; blocks."""
    link = HostLink(connected)
    data = link.receive(HELLO_BYTES)
    try:
      version = msgspec.msgpack.decode(data, type=dict).get("version", "unknown")
      hello = _HELLO.decode(data) if version == __version__ else None
    except msgspec.MsgspecError as error:
      raise MalformedMessage(str(error)) from error
    with self._changed:
      reason = self._objection(hello, version, certificate(connected))
      link.send(msgspec.msgpack.encode(HostWelcome(reason, "" if reason else self.coordinator)))
      if hello and not reason:
        connected.settimeout(None)
        self._links[hello.host][hello.kind] = link
        self._changed.notify_all()
    return not reason

  def _objection(self, hello: HostHello | None, version: Any, key: bytes) -> str:
    if self._keys is not None and key != self._keys.public:
      return "the key is another role's"
    if hello is None:
      return (
        f"its ddiloco is of version {version}, that of host 0 is {__version__}."
        " Fix: install the same version on all hosts of the island."
      )
    mine, theirs = msgspec.structs.asdict(self._island), msgspec.structs.asdict(hello.island)
    for name, value in mine.items():
      if theirs[name] != value:
        return (
          f"its {name} is {theirs[name]!r}, that of host 0 is {value!r}."
          " Fix: give all hosts of the island the same flags, files and data, and install the same"
          " JAX."
        )
    if hello.host not in self._links or hello.kind not in KINDS:
      return f"there is no host {hello.host} of {self._island.hosts}, or no kind {hello.kind!r}"
    self._forget_gone()
    if hello.kind in self._links[hello.host]:
      return f"host {hello.host} is here already"
    return ""


def join(
  url: str, island: IslandIdentity, host: int, keys: Keys | None, seconds: float
) -> tuple[HostLinks, str]:
  """(connections to the leader, where the JAX processes meet); tries until the leader answers.

  Raises:
    HostsApart: the leader is out of reach for so long, or refuses this host.
  """
  until, links = time.monotonic() + seconds, dict[str, HostLink]()
  answer = HostWelcome()
  while len(links) < len(KINDS):
    kind = KINDS[len(links)]
    try:
      links[kind], answer = _introduce(url, HostHello(island, host, kind), keys)
    except (OSError, msgspec.MsgspecError) as error:
      while links:  # host 0 may have ended: another one in its place needs all connections
        links.popitem()[1].close()
      if time.monotonic() > until:
        raise HostsApart(
          f"--hosts={url}: host 0 is not reached: {error}. Fix: start it there, with these keys,"
          " or raise network.give_up_seconds."
        ) from error
      time.sleep(PAUSE_SECONDS)
    if answer.refused:
      raise HostsApart(f"--hosts={url}: host 0 refuses host {host}: {answer.refused}")
  return HostLinks(**links), answer.coordinator


def _introduce(url: str, hello: HostHello, keys: Keys | None) -> tuple[HostLink, HostWelcome]:
  context = keys.context_to(keys.public) if keys is not None else None
  connected = connect(url, context, HELLO_SECONDS)
  try:
    link = HostLink(connected)
    link.send(msgspec.msgpack.encode(hello))
    answer = msgspec.msgpack.decode(link.receive(HELLO_BYTES), type=HostWelcome)
  except BaseException:
    connected.close()
    raise
  connected.settimeout(None)
  return link, answer


# --- Signs of life: which host is lost, and which one the others wait for


class HostProgress(msgspec.Struct):
  """A host's sign of life: its own progress, written by the threads that work."""

  done: int = 0  # orders given, or carried out
  moved_bytes: int = 0  # of values
  doing: str = "begins"
  asked_to_end: bool = False
  reading_since: float = 0.0  # by its own clock it waits for its next batch since; 0: it does not


BEAT_SECONDS = 0.5


class HostWatch:
  """Watches the other hosts of the island, and reports the first fault, once.

  A host is lost when it is silent for too long, or a connection to it ends or is cut. The leader
  also reports when orders are not carried out for too long: which hosts are behind, and what they
  are doing.

  Args:
    links: host -> its connections; host 0 is among them where this host follows.
    mine: this host's progress; on the leader `done` counts the orders given.
    silent_seconds: how long a host may be silent.
    order_seconds: how long an order may take without any progress; called at each check with
      whether hosts that are behind wait for data.
    lost: called with `(host or None, reason)`, on a thread of this watch.
    asked: called when another host was asked to end.
  """

  def __init__(
    self,
    links: Mapping[int, HostLinks],
    mine: HostProgress,
    silent_seconds: float,
    order_seconds: Callable[[bool], float],
    lost: Callable[[int | None, str], None],
    asked: Callable[[], None] = lambda: None,
  ):
    self._links, self._mine = links, mine
    self._silent_seconds, self._order_seconds = silent_seconds, order_seconds
    self._lost, self._asked = lost, asked
    self._over, self._telling = threading.Event(), threading.Lock()
    now = time.monotonic()
    # Host 0 gives no sign of life before all hosts have come: it is silent once it was heard.
    self._heard = {host: now for host in links if host}
    self._beats: dict[int, HostProgress] = {}
    self._moved: tuple[object, float] = (None, now)  # the progress of all, and since when
    for host, each in links.items():
      talk = functools.partial(self._talk, host, each.lives)
      threading.Thread(target=talk, name=f"host {host}", daemon=True).start()
    threading.Thread(target=self._look, name="hosts", daemon=True).start()

  def end(self) -> None:
    """Reports nothing from now on."""
    with self._telling:
      self._over.set()

  def _talk(self, host: int, link: HostLink) -> None:
    """Exchanges signs of life with a host: host 0 begins, and the other one answers."""
    try:
      while not self._over.wait(BEAT_SECONDS if host else 0.0):
        if host:
          link.send(msgspec.msgpack.encode(self._mine))
        beat = msgspec.msgpack.decode(link.receive(), type=HostProgress)
        self._heard[host], self._beats[host] = time.monotonic(), beat
        if beat.asked_to_end:
          self._asked()
        if not host:
          link.send(msgspec.msgpack.encode(self._mine))
    except (OSError, msgspec.MsgspecError) as error:
      self._tell(host, f"its connection has ended ({error})")

  def _look(self) -> None:
    last = time.monotonic()
    while not self._over.wait(BEAT_SECONDS):
      now = time.monotonic()
      if now - last > 4 * BEAT_SECONDS:  # this host itself stood still
        self._heard, self._moved = dict.fromkeys(self._heard, now), (None, now)
      else:
        self._check_links()
      last = now
      for host, heard in [*self._heard.items()]:
        if now - heard > self._silent_seconds:
          self._tell(host, f"it was not heard for {now - heard:.0f} s")
      self._check_progress(now)

  def _check_links(self) -> None:
    for host, links in self._links.items():
      for kind, link in zip(KINDS, links):
        if link.deaf(self._silent_seconds):
          self._tell(host, f"nothing has come through its connection for {kind} for long")

  def _check_progress(self, now: float) -> None:
    given, beats = self._mine.done, dict(self._beats)  # a copy: other threads add first beats
    behind = {h: b.doing for h, b in beats.items() if b.done < given}
    limit = self._order_seconds(any(beats[h].reading_since for h in behind))
    state = given, self._mine.moved_bytes, beats
    if not behind or state != self._moved[0]:
      self._moved = state, now
    elif now - self._moved[1] > limit:
      what = ", ".join(f"host {h}: {doing}" for h, doing in sorted(behind.items()))
      host = next(iter(behind)) if len(behind) == 1 else None
      self._tell(host, f"nothing has moved for {limit:.0f} s; host 0: {self._mine.doing}, {what}")

  def _tell(self, host: int | None, reason: str) -> None:
    with self._telling:  # several threads may find a fault at once
      first = not self._over.is_set()
      self._over.set()
    if first:
      self._lost(host, reason)
