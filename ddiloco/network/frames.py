"""Frames between two endpoints, and how two ends find, greet and accept each other.

On a connection, frame follows frame: `PREFIX` has the length of the frame and the number of raw
payload bytes after it; the frame itself is one msgpack list. `decode` accepts only exactly
well-formed frames and raises `MalformedMessage` on everything else, like
`protocol.messages.decode`.

Two ends that do not know each other yet shake hands and greet in a thread for this connection
alone, which may block. From then on the connection is a peer's (`network/peers.py`).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import socket
import ssl
import struct
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, NamedTuple

from msgspec import Meta, msgpack

from ddiloco.config.schema import MAX_STREAMS
from ddiloco.network.keys import Keys, host_and_port, is_loopback
from ddiloco.network.transport import Counters, RunIdentity
from ddiloco.protocol.messages import (
  MAX_HEADER_BYTES,
  WIRE_FORMAT,
  Count,
  CountOrNone,
  Text,
)
from ddiloco.protocol.values import MalformedMessage, OnWire, exactly

PREFIX = struct.Struct(">IQ")
MAX_FRAME_BYTES = MAX_HEADER_BYTES + 4096
STRANGER_FRAME_BYTES = 1 << 16  # longest frame from a sender that is not known yet
SESSION_BYTES = 8
CONTROL = -1  # number of the control connection; the streams, for fragments, begin at 0
Session = Annotated[bytes, Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
Streams = Annotated[int, Meta(ge=1, le=MAX_STREAMS)]


class Greeting(OnWire):
  """I am `address`: the first frame of a connection. On the control connection also the answer."""

  run_id: Text
  plan_id: Text
  address: Text
  incarnation: Count
  session: Session  # random, of this endpoint
  streams: Streams  # connections for fragments that the dialing side makes
  stream: CountOrNone = CONTROL  # the number of this connection
  format: Count = WIRE_FORMAT  # of messages


class GreetingRefused(OnWire):
  """Your connection is refused, and why."""

  fenced: bool  # for good: a newer incarnation has your address
  reason: Text
  after: Count = 0  # least incarnation that may have it once the newer one is dead; 0: none
  silent_seconds: Count = 0  # since the newer one was heard


class Beat(OnWire):
  """I am still here."""


class Control(OnWire):
  """A message of the protocol without payload: its header."""

  header: bytes


class Bulk(OnWire):
  """A message with payload. Every stream carries its part of the payload after such a frame."""

  number: Count  # grows from message to message of one session, also over reconnections
  total: Count  # bytes of the whole payload
  header: bytes


Frame = Greeting | GreetingRefused | Beat | Control | Bulk
# The frame in the bytes after a prefix; raises MalformedMessage if they are none.
decode: Callable[[bytes], Frame] = exactly(typing.get_args(Frame), "frame")


def encode(frame: Frame, payload_bytes: int = 0) -> bytes:
  """The bytes of a frame that so many bytes of payload follow."""
  data = msgpack.encode(frame)
  return PREFIX.pack(len(data), payload_bytes) + data


def part(stream: int, streams: int, total: int) -> slice:
  """The slice of a payload that this stream, of so many, carries."""
  size = -(-total // streams)
  return slice(min(total, stream * size), min(total, (stream + 1) * size))


# --- Sockets, until both ends know each other

SCRATCH = memoryview(bytearray(1 << 16))  # unwanted bytes are read into this
UNSENT_BYTES = 1 << 19  # most unsent bytes in the kernel; the others wait in this process
KEEPALIVE_SECONDS = 5  # without data, until the kernel asks the far end for a sign of life
DEAD_SECONDS = 120  # without an acknowledgement, until the kernel ends a connection
# Options of sockets, set where the system has them. If a path is gone without notice (a firewall
# forgot it, a host lost its power), a connection without data ends after `DEAD_SECONDS` ...
ALIVE_OPTIONS = (
  (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
  (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
  (socket.IPPROTO_TCP, "TCP_KEEPIDLE", KEEPALIVE_SECONDS),
  (socket.IPPROTO_TCP, "TCP_KEEPINTVL", KEEPALIVE_SECONDS),
  (socket.IPPROTO_TCP, "TCP_KEEPCNT", DEAD_SECONDS // KEEPALIVE_SECONDS - 1),
)
# ... and with these options also one whose data would count as under way for a quarter of an hour.
FRAME_OPTIONS = (
  *ALIVE_OPTIONS,
  (socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", UNSENT_BYTES),
  (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 1000 * DEAD_SECONDS),
)
BACKLOG = 1024  # many learners may connect at once; the system has a limit of its own


def bind(url: str) -> tuple[socket.socket, str]:
  """(a socket that listens there, the url with its real port).

  Raises:
    OSError: the port is taken, or the address is not this machine's.
  """
  host, port = host_and_port(url)
  both = host == "*" and socket.has_dualstack_ipv6()
  family, address = socket.AF_INET6 if both else socket.AF_INET, ("", port)
  if host != "*":
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
  listener = socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)
  return listener, f"{url.rpartition(':')[0]}:{listener.getsockname()[1]}"


def near_only(listener: socket.socket, url: str) -> str:
  """Why no other machine reaches a listener of this url, though its host looks so; "": it may be.

  On some systems the machine's own name means 127.0.1.1.
  """
  (host, _), at = host_and_port(url), listener.getsockname()[0]
  if is_loopback(host) or not is_loopback(at):
    return ""
  fix = "listen at an address that other machines know, or at tcp://0.0.0.0:PORT, which is all"
  return f"{url}: no other machine reaches it, since {host} is {at} here. Fix: {fix}"


def connect(url: str, context: ssl.SSLContext | None, timeout_seconds: float) -> socket.socket:
  """Connects, with a TLS handshake if there is a context.

  Raises:
    ConnectionError: says why not.
  """
  try:
    connected = socket.create_connection(host_and_port(url), timeout_seconds)
  except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
    raise ConnectionError(f"nothing answers at {url} ({error})") from error
  try:
    return connected if context is None else context.wrap_socket(connected)
  except OSError as error:  # as ssl.SSLError is
    connected.close()
    why = (
      f"{url} has another key than the one listed here: that of another shard (urls have an order),"
      f" or a new one; or one side has no keys ({error})"
    )
    late = isinstance(error, TimeoutError)
    raise ConnectionError(f"nothing answers at {url}" if late else why) from error


def set_options(connected: socket.socket, options: Iterable[tuple[int, str, int]]) -> None:
  """Sets those options that this system has."""
  for level, name, value in options:
    if hasattr(socket, name):
      connected.setsockopt(level, getattr(socket, name), value)


def certificate(connected: socket.socket) -> bytes:
  """The certificate of the far end, DER; b"" without TLS."""
  return (isinstance(connected, ssl.SSLSocket) and connected.getpeercert(True)) or b""


def fill(connected: socket.socket, view: memoryview) -> None:
  """Reads as many bytes as `view` has into it; blocks."""
  while view:
    count = connected.recv_into(view)
    if not count:
      raise ConnectionError("the connection was closed")
    view = view[count:]


def read_frame(connected: socket.socket) -> Frame:
  """The first frame of a connection; blocks.

  Raises:
    MalformedMessage: it is no short frame without payload.
    OSError: it does not come.
  """
  prefix = bytearray(PREFIX.size)
  fill(connected, memoryview(prefix))
  size, payload_bytes = PREFIX.unpack(prefix)
  if not 0 < size <= STRANGER_FRAME_BYTES or payload_bytes:
    raise MalformedMessage(f"begins with {bytes(prefix).hex()}, which no greeting does")
  data = bytearray(size)
  fill(connected, memoryview(data))
  return decode(bytes(data))


# --- Which roles are accepted: objections to a greeting

FUTURE_SECONDS = 86_400  # clocks may be wrong by hours; incarnations further ahead are refused


def incarnation_at(unix_seconds: float) -> int:
  """The incarnation of a process that starts at this time: seconds since 2020."""
  return int(unix_seconds) - 1_577_836_800


def seconds_since_2020() -> int:
  """The incarnation of a process that starts now, unless an earlier one had a greater number."""
  return incarnation_at(time.time())


def ahead(incarnation: int) -> str:
  """Why an incarnation is refused by this host's clock, "" if it is not."""
  seconds = incarnation - seconds_since_2020()
  if seconds <= FUTURE_SECONDS:
    return ""
  return (
    f"incarnation {incarnation} is {seconds / 3600:.0f} h ahead of the other side's clock."
    " Fix: set the clock that is wrong, there or here"
  )


def objection(run: RunIdentity, greeting: Greeting, owner: str | None) -> str:
  """Why a greeting is not accepted, "" if it is.

  Args:
    run: this side's.
    greeting: what the far end says.
    owner: the role that the key of its connection belongs to, "": no listed one; None: no keys.
  """
  address = greeting.address
  if owner == "":
    return f"the key of {address} is not listed here any more"
  if owner is not None and owner != address:
    return f"this key belongs to {owner}, not to {address}"
  if greeting.format != WIRE_FORMAT:
    return (
      f"it speaks wire format {greeting.format}, this side {WIRE_FORMAT}."
      " Fix: install the same version of ddiloco on both sides"
    )
  if greeting.run_id != run.run_id:
    return (
      f"this is run {run.run_id!r}, not {greeting.run_id!r}."
      " Fix: give all roles the same --run_id, or workdirs of the same name"
    )
  if greeting.plan_id != run.plan_id:
    return (
      "this run was started with other settings of model, data, inner, sync, outer, seed,"
      f" run.total_tokens or run.init_from ({run.plan_id}, not {greeting.plan_id})."
      " Fix: give all roles the same --config"
    )
  return ahead(greeting.incarnation)


def shard_objection(incarnation: int, known: int) -> str:
  """Why the greeting of a dialed shard is refused, or ""; `known`: its newest incarnation."""
  if incarnation < known:
    return f"incarnation {incarnation} is an old one, {known} was here before"
  return ahead(incarnation)


# --- Who dials this side
# Each connection costs a descriptor; when none is left, the process can open no file and accept no
# member. So this process raises its limit as far as the system allows, and strangers (connections
# without a known peer) get at most a quarter of it.
STRANGER_SECONDS = 60.0  # without a word
MOST_STRANGERS = 1024
PAUSE_SECONDS = 0.1  # where the system has no descriptor left


class Door:
  """Accepts connections. A thread for each meets the stranger at the far end, until it is let in.

  Each connection costs a descriptor and a thread. Of too many strangers the oldest is cut off.

  Args:
    listener: the socket where they come.
    keys: of this role; None: without TLS.
    meet: called in the stranger's thread, with the connection after the handshake. Returns whether
      the connection is let in; else it is closed, once the far end has read what was said.
    most: strangers at once.
    seconds: a stranger may say nothing for so long.
    counters: counts connections that are not let in.
  """

  def __init__(
    self,
    listener: socket.socket,
    keys: Keys | None,
    meet: Callable[[socket.socket], bool],
    most: int,
    seconds: float,
    counters: Counters,
  ):
    self._listener, self._keys, self._meet = listener, keys, meet
    self._most, self._seconds, self._counters = most, seconds, counters
    self._strangers: list[socket.socket] = []  # the oldest first
    self._closed = threading.Event()
    threading.Thread(target=self._listen, name="door", daemon=True).start()

  def close(self) -> None:
    """Accepts no more connections."""
    self._closed.set()
    cut_off(self._listener)
    self._listener.close()

  def _listen(self) -> None:
    while not self._closed.is_set():
      try:
        connected, _ = self._listener.accept()
      except OSError:  # no descriptor just now; or we are closed
        self._closed.wait(PAUSE_SECONDS)
        continue
      try:
        if self._keys is not None:
          how = {"server_side": True, "do_handshake_on_connect": False}
          connected = self._keys.context().wrap_socket(connected, **how)
        threading.Thread(target=self._admit, args=(connected,), daemon=True).start()
      except (OSError, RuntimeError):  # it has gone already; or no key or thread just now
        connected.close()

  def _admit(self, connected: socket.socket) -> None:
    self._strangers.append(connected)
    if len(self._strangers) > self._most:
      cut_off(self._strangers.pop(0))
    taken = False
    try:
      connected.settimeout(self._seconds)
      if isinstance(connected, ssl.SSLSocket):
        connected.do_handshake()
      taken = self._meet(connected)
    except MalformedMessage:
      self._counters.malformed += 1
    except OSError:  # it has gone, says nothing, or has no key that is listed
      pass
    finally:
      if not taken:
        self._send_off(connected)
      with contextlib.suppress(ValueError):  # it was cut off
        self._strangers.remove(connected)

  def _send_off(self, connected: socket.socket) -> None:
    """Closes a connection once the far end has read what was said to it, OpenSSL's alert included:
    closing a socket with unread data would reset the connection and lose what was sent."""
    self._counters.refused += 1
    with contextlib.suppress(OSError):
      socket.socket.shutdown(connected, socket.SHUT_WR)  # from now on without TLS
      while socket.socket.recv_into(connected, SCRATCH):
        pass
    connected.close()


def cut_off(connected: socket.socket) -> None:
  """Shuts a socket down, which wakes its thread; not by TLS, which only that thread may use."""
  with contextlib.suppress(OSError):
    socket.socket.shutdown(connected, socket.SHUT_RDWR)


# --- Keeps the queue of a slow link short, so that control need not wait there behind fragments
# The kernel fills the buffer of the narrowest link, in this host or far away, and control messages
# of another connection wait in the same queue. So a connection for fragments sends without a limit
# for a moment, which measures the link's rate, and then at nine tenths of this rate for a while, so
# that the queue drains. It is measured again at a rate that is somewhat greater: without a limit
# Cubic fills a slow link's buffer in that moment, for longer than the limit takes to drain it. What
# the link carries without a queue is no measure of it: the limit grows until the queue does.
# A fast link has no limit: its queue is short in time. Nor has one whose far end had no room: the
# rate would be that of the reader, not that of the link. Nothing is measured during an outage and
# while the kernel makes up for it: the rate would be too low, and be kept to. A rate that was found
# too low must not last either. So the greatest of the newest rates counts, and a limit grows by
# itself, not with the next data to send, which may wait behind it for minutes.

FREE_SECONDS = 0.5  # of sending faster, or without a limit, to measure the link's rate
LIMITED_SECONDS = 4.5
SHARE = 0.9  # of the measured rate, less what drains the queue meanwhile
PROBE = 1.3  # times the measured rate, to measure again; again and again where the link carries it
NEWEST = 3  # measured rates, of which the greatest counts
QUEUE_SECONDS = 0.005  # a shorter queue needs no limit
FAST_BYTES = 125e6  # a second: a faster link has no limit
LEAST_BYTES = 16e3  # a second, of a limit
FULL_SHARE = 0.1  # of the time, without room at the far end: then the link is not measured
_SO_MAX_PACING_RATE = 47  # Linux; Python has no name for it
_NO_LIMIT = (1 << 32) - 1
_TCP_INFO = struct.Struct("=xB14xI4xII24xI8xI48xQ16xII16xQQ")
_LOSS = 4  # a `TcpInfo.state`: a timeout has struck, and what was lost is sent again


class TcpInfo(NamedTuple):
  """What Linux tells of a connection, from its `struct tcp_info`; zeros where it is too old."""

  state: int = 0  # of congestion control
  packet_bytes: int = 0
  unacked: int = 0  # packets under way
  beyond: int = 0  # of these, packets that the far end has, behind one that was lost
  last_ack_ms: int = 0  # since an acknowledgement came
  rtt_us: int = 0
  acked_bytes: int = 0  # since the beginning, as the last two
  unsent_bytes: int = 0
  least_rtt_us: int = 0
  busy_us: int = 0  # there was something to send
  full_us: int = 0  # of these, the far end had no room

  @classmethod
  def of(cls, connection: socket.socket) -> TcpInfo:
    """Raises OSError where the connection is closed or is not one of TCP."""
    if sys.platform != "linux":
      return cls()
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    return cls(*_TCP_INFO.unpack(info.ljust(_TCP_INFO.size, b"\0")))

  @property
  def arrived_bytes(self) -> int:
    """Since the beginning; a packet that was lost does not hide those behind it."""
    return self.acked_bytes + self.beyond * self.packet_bytes


def pace(connection: socket.socket) -> Iterator[float]:
  """Limits the rate at which a connection sends; `next` is to be called while it sends.

  Yields the seconds after which `next` is to be called at any rate; 0: there is no need.
  """
  rates, most = collections.deque[float](maxlen=NEWEST), float(_NO_LIMIT)
  while sys.platform == "linux":
    before = now = TcpInfo.of(connection)
    rate = 0.0
    while not rate:
      yield from _pause(FREE_SECONDS, bool(now.unacked or now.unsent_bytes))
      now = TcpInfo.of(connection)
      busy = (now.busy_us - before.busy_us) / 1e6
      overdue = now.unacked and 1000 * now.last_ack_ms > now.rtt_us  # not where nothing was sent
      if overdue or _LOSS in (before.state, now.state):
        before = now
      elif busy >= FREE_SECONDS / 2:
        arrived = now.arrived_bytes - before.arrived_bytes
        full = (now.full_us - before.full_us) / 1e6
        queues = now.rtt_us - now.least_rtt_us > 1e6 * QUEUE_SECONDS and full < FULL_SHARE * busy
        rate = arrived / busy if queues and arrived < min(FAST_BYTES, SHARE * most) * busy else 0.0
        before = now
        if not rate and most < _NO_LIMIT:
          most = PROBE * most if most < FAST_BYTES else _NO_LIMIT
          _limit(connection, most)
    rates.append(rate)
    queue_seconds = (now.rtt_us - now.least_rtt_us) / 1e6
    _limit(connection, (SHARE - queue_seconds / LIMITED_SECONDS) * max(rates))
    yield from _pause(LIMITED_SECONDS, True)
    most = PROBE * max(rates)
    _limit(connection, most)
  yield from itertools.repeat(0.0)


def _limit(connection: socket.socket, rate: float) -> None:
  packed = struct.pack("=I", int(max(rate, LEAST_BYTES)))
  connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, packed)


def _pause(seconds: float, call: bool) -> Iterator[float]:
  until = time.monotonic() + seconds
  yield seconds if call else 0.0
  while time.monotonic() < until:
    yield 0.0
