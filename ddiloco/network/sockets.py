"""ZeroMQ sockets as the network transport needs them: two ports, priorities, bounds, keys."""

from __future__ import annotations

import collections
import errno
import os
import resource
import socket
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from ddiloco.checks import ConfigError
from ddiloco.config import NetworkConfig
from ddiloco.network import frames
from ddiloco.network.keys import KEY_PROPERTY, Keys, make_authenticator

# --- The TCP connections that a listening endpoint has let in, and which of them it ends
# ZeroMQ accepts whoever connects, and each connection costs a descriptor; when there are none left,
# no file opens and no member comes in. So this process may have as many as the system allows, some
# are kept for files, and who has not shown to be somebody after a while, or is one too many of
# those, is cut off. Connections of members never are.

HANDSHAKE_SECONDS = 30.0  # until a connection must speak ZeroMQ, and with keys have shown its own
STRANGER_SECONDS = 60.0  # until it must belong to somebody who was greeted
LEAST_STRANGERS = 8  # that may be at the door at once, however many members there are
MOST_STRANGERS = 1024
MOST_DESCRIPTORS = 10_240  # where the system names no limit, or one that it does not keep
LEAST_FREE = 64  # descriptors that are for files and for what this process dials


def raise_limit() -> int:
  """Lets this process have as many descriptors as the system allows it; returns how many."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  for limit in (hard, MOST_DESCRIPTORS):  # a system may allow less than it says
    if limit == soft or 0 <= limit < soft:
      break
    try:
      resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (ValueError, OSError):
      continue
    soft = limit
    break
  return soft if soft != resource.RLIM_INFINITY else MOST_DESCRIPTORS


def open_descriptors() -> int:
  """How many this process has now; a guess where the system does not say."""
  try:
    return len(os.listdir("/proc/self/fd"))
  except OSError:
    return LEAST_FREE


class Connections:
  """Who is connected, by descriptor.

  Args:
    most: connections that there is room for.
  """

  def __init__(self, most: int):
    self._most = most
    self._strangers: collections.OrderedDict[int, float] = collections.OrderedDict()  # since when
    self._sessions: dict[int, bytes] = {}  # of members

  def came(self, descriptor: int, now: float) -> None:
    """A new connection, of nobody we know. ZeroMQ does not always tell that one has ended, so the
    descriptor may be one that was used before."""
    self._sessions.pop(descriptor, None)
    self._strangers[descriptor] = now
    self._strangers.move_to_end(descriptor)

  def gone(self, descriptor: int) -> None:
    """It has ended."""
    self._sessions.pop(descriptor, None)
    self._strangers.pop(descriptor, None)

  def belongs(self, descriptor: int, session: bytes) -> None:
    """It is a member's."""
    if self._strangers.pop(descriptor, None) is not None:
      self._sessions[descriptor] = session

  def forget(self, session: bytes, now: float) -> None:
    """Whose session this was is no member any more."""
    for descriptor in [d for d, s in self._sessions.items() if s == session]:
      self.came(descriptor, now)

  def unwanted(self, now: float) -> list[int]:
    """The descriptors to cut off now, oldest first; they are forgotten here."""
    room = min(MOST_STRANGERS, (self._most - len(self._sessions)) // 2)
    too_many = len(self._strangers) - max(LEAST_STRANGERS, room)
    found = []
    for number, (descriptor, since) in enumerate(self._strangers.items()):
      if number >= too_many and now - since <= STRANGER_SECONDS:
        break
      found.append(descriptor)
    for descriptor in found:
      del self._strangers[descriptor]
    return found


def cut(descriptors: Iterable[int], ports: set[int]) -> None:
  """Ends connections that ZeroMQ holds: it finds them closed, and closes its end.

  Only those to `ports`: one may have ended meanwhile, and its number be another file's.
  """
  for descriptor in descriptors:
    try:
      borrowed = socket.socket(fileno=descriptor)  # no copy: there may be no descriptor left for it
    except OSError:
      continue
    try:
      if borrowed.getsockname()[1] in ports:
        borrowed.shutdown(socket.SHUT_RDWR)
    except (OSError, IndexError):
      pass
    finally:
      borrowed.detach()


CONTROL, BULK = 0, 1  # kinds of connections, each with its own port and I/O thread
LEAST_WAITING = 256  # messages in ZeroMQ's own queues, of each connection and direction
ENCRYPTION_BYTES = 1024  # generous: what CURVE adds to a message counts against its limit
BROKEN = (  # what may become of a connection that was dialed
  zmq.EVENT_DISCONNECTED
  | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
  | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
  | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Sockets:
  """Makes the sockets of one endpoint; all live in one ZeroMQ context with an I/O thread per kind.

  Args:
    settings: sizes and timeouts.
    keys: CURVE keys of this role; None: no encryption.
  """

  def __init__(self, settings: NetworkConfig, keys: Keys | None):
    self.context = zmq.Context(io_threads=2)
    self.context.set(zmq.BLOCKY, 0)
    self._settings, self._keys = settings, keys
    self._server_keys: dict[str, bytes] = {}
    self._authenticator: Any = None

  def listen(
    self, url: str, on_refused: Callable[[str], None]
  ) -> tuple[zmq.Socket, zmq.Socket, str]:
    """(control, bulk, url) listening on the url's port and the next one; port 0: any free two.

    `on_refused` is called for every connection that has no listed key.

    Raises:
      OSError: the ports are taken, or the address is not this machine's.
    """
    if self._keys is not None:
      self._authenticator = make_authenticator(self.context, self._keys, on_refused)
      self._authenticator.start()
    pair = (self._socket(zmq.ROUTER, CONTROL), self._socket(zmq.ROUTER, BULK))
    for each in pair:
      each.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says when a peer is not there
      each.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnected peer replaces its dead connection
      if self._keys is not None:
        self._keys.guard(each)
    try:
      return (*pair, _bind(*pair, url))
    except zmq.ZMQBaseError as error:  # no OSError, though most of them are one
      self.close()
      raise OSError(getattr(error, "errno", None) or errno.EADDRINUSE, str(error)) from error
    except BaseException:
      self.close()
      raise

  def dial(self, url: str, kind: int, route: bytes, server: str) -> zmq.Socket:
    """A connection to the shard `server` that listens at `url`, named `route` there."""
    socket = self._socket(zmq.DEALER, kind)
    socket.setsockopt(zmq.ROUTING_ID, route)
    if self._keys is not None:
      socket.curve_serverkey = self._server_key(server, self._keys)
    socket.connect(next_port(url) if kind == BULK else url)
    return socket

  def _server_key(self, server: str, keys: Keys) -> bytes:
    if server not in self._server_keys:
      self._server_keys[server] = keys.server_key(server)
    return self._server_keys[server]

  def other_key(self, server: str) -> bool:
    """Whether a shard has got another key than the one it was dialed with; dialed again, it is
    dialed with that. A file that is gone or cannot be read changes nothing."""
    old = self._server_keys.get(server)
    if self._keys is None or old is None:
      return False
    try:
      self._server_keys[server] = self._keys.server_key(server)
    except ConfigError:
      return False
    return self._server_keys[server] != old

  def close(self) -> None:
    """Closes whatever is left; what was sent has a moment to leave."""
    if self._authenticator is not None:
      self._authenticator.stop()
    self.context.destroy(200)

  def _socket(self, pattern: int, kind: int) -> zmq.Socket:
    socket = self.context.socket(pattern)
    silence_ms = int(1000 * self._settings.silence_seconds)
    largest = max(frames.MAX_FRAME_BYTES, self._settings.chunk_bytes if kind == BULK else 0)
    largest += ENCRYPTION_BYTES
    window = -(-self._settings.window_bytes // self._settings.chunk_bytes)
    waiting = max(LEAST_WAITING, 2 * window if kind == BULK else 0)
    for option, value in {
      zmq.AFFINITY: 1 << kind,
      zmq.LINGER: 0,
      zmq.SNDHWM: waiting,  # to one peer; what does not fit waits in ours, which are bounded
      zmq.RCVHWM: waiting,  # from one peer; then its connection is not read until there is room
      zmq.IMMEDIATE: 1,  # nothing is queued for a connection that is not there
      zmq.MAXMSGSIZE: largest,
      zmq.HANDSHAKE_IVL: int(1000 * HANDSHAKE_SECONDS),
      zmq.BACKLOG: 1024,  # many learners may come at once; the system has a limit of its own
      zmq.HEARTBEAT_IVL: silence_ms // 3,
      zmq.HEARTBEAT_TIMEOUT: silence_ms,
      zmq.RECONNECT_IVL: 100,
      zmq.RECONNECT_IVL_MAX: 2000,
      zmq.IPV6: 1,
    }.items():
      socket.setsockopt(option, value)
    if self._keys is not None:
      socket.curve_secretkey, socket.curve_publickey = self._keys.secret, self._keys.public
    return socket


def next_port(url: str) -> str:
  """Where fragments go: the port after the one for control."""
  host, _, port = url.rpartition(":")
  return f"{host}:{int(port) + 1}"


def user_of(frame: zmq.Frame) -> str | None:
  """Whom the key of a frame's connection belongs to; None without keys."""
  try:
    return frame.get("User-Id")
  except zmq.ZMQError:
    return None


def key_of(frame: zmq.Frame) -> str:
  """The key of a frame's connection, Z85; "" without keys."""
  try:
    return frame.get(KEY_PROPERTY)
  except zmq.ZMQError:
    return ""


def descriptor_of(frame: zmq.Frame) -> int:
  """Of the connection that a frame came over; -1 if ZeroMQ does not say."""
  try:
    return frame.get(zmq.SRCFD)
  except zmq.ZMQError:
    return -1


def receive(socket: zmq.Socket) -> list[zmq.Frame] | None:
  """The parts of the next message, without a copy; None if there is none now."""
  try:
    return socket.recv_multipart(zmq.DONTWAIT, copy=False)
  except zmq.Again:
    return None


def send(socket: zmq.Socket, *parts: bytes | memoryview) -> bool:
  """Sends the parts as one message, the last one without a copy; False: not connected now."""
  try:
    for part in parts[:-1]:
      socket.send(part, zmq.DONTWAIT | zmq.SNDMORE)
    socket.send(parts[-1], zmq.DONTWAIT, copy=False)
  except zmq.ZMQError as error:
    if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
      return False
    raise
  return True


def _bind(control: zmq.Socket, bulk: zmq.Socket, url: str) -> str:
  if not url.endswith(":0"):
    control.bind(url)
    bulk.bind(next_port(url))
    return url
  host = url.rpartition(":")[0]
  for _ in range(100):
    free = f"{host}:{control.bind_to_random_port(host)}"
    try:
      bulk.bind(next_port(free))
      return free
    except zmq.ZMQError:
      control.unbind(free)
  raise OSError(f"{url}: found no two free ports in a row")
