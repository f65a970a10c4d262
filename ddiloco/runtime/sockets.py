"""ZeroMQ sockets as the network transport needs them: two ports, priorities, bounds, keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from ddiloco.config import NetworkConfig
from ddiloco.runtime import frames
from ddiloco.runtime.keys import Keys, make_authenticator

CONTROL, BULK = 0, 1  # kinds of connections, each with its own port and I/O thread
ENCRYPTION_BYTES = 1024  # generous: what CURVE adds to a message counts against its limit
FAILED_HANDSHAKE = (
  zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
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
    for socket in pair:
      socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says when a peer is not there
      socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnected peer replaces its dead connection
      if self._keys is not None:
        self._keys.guard(socket)
    try:
      return (*pair, _bind(*pair, url))
    except BaseException:
      self.close()
      raise

  def dial(self, url: str, kind: int, route: bytes, server: str) -> zmq.Socket:
    """A connection to the shard `server` that listens at `url`, named `route` there."""
    socket = self._socket(zmq.DEALER, kind)
    socket.setsockopt(zmq.ROUTING_ID, route)
    if self._keys is not None:
      if server not in self._server_keys:  # read once: a file that is gone later stops nobody
        self._server_keys[server] = self._keys.server_key(server)
      socket.curve_serverkey = self._server_keys[server]
    socket.connect(next_port(url) if kind == BULK else url)
    return socket

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
    for option, value in {
      zmq.AFFINITY: 1 << kind,
      zmq.LINGER: 0,
      zmq.SNDHWM: 0,  # what is under way is bounded by the window ...
      zmq.RCVHWM: 0,  # ... of the other side
      zmq.IMMEDIATE: 1,  # nothing is queued for a connection that is not there
      zmq.MAXMSGSIZE: largest,
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
