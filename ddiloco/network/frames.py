"""Frames between two endpoints, and the connections that carry them.

On a connection, frame follows frame: `PREFIX` has the length of the frame and the number of raw
payload bytes after it; the frame itself is one msgpack list. `decode` accepts only exactly
well-formed frames and raises `MalformedMessage` on everything else, like
`protocol.messages.decode`.

Two ends that do not know each other yet shake hands and greet in a thread for this connection
alone, which may block. From then on a connection belongs to an `IoThread`, with others, and only
that thread uses its socket. The kernel keeps order and holds back a sender that is too fast;
OpenSSL encrypts. Both work without the GIL.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
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
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from msgspec import Meta, msgpack

from ddiloco.network.keys import host_and_port
from ddiloco.protocol.messages import (
  MAX_HEADER_BYTES,
  WIRE_FORMAT,
  Count,
  CountOrNone,
  MalformedMessage,
  OnWire,
  Text,
  exactly,
)

if TYPE_CHECKING:
  from ddiloco.network.peers import Channel

T = TypeVar("T")

PREFIX = struct.Struct(">IQ")
MAX_FRAME_BYTES = MAX_HEADER_BYTES + 4096
STRANGER_FRAME_BYTES = 1 << 16  # longest frame from a sender that is not known yet
MAX_STREAMS = 64
SESSION_BYTES = 8
CONTROL = -1  # number of the control connection; the streams, for fragments, begin at 0
Session = Annotated[bytes, Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
Streams = Annotated[int, Meta(ge=1, le=MAX_STREAMS)]
Header = Annotated[bytes, Meta(max_length=MAX_HEADER_BYTES)]


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

  header: Header


class Bulk(OnWire):
  """A message with payload. Every stream carries its part of the payload after such a frame."""

  number: Count  # grows from message to message of one session, also over reconnections
  total: Count  # bytes of the whole payload
  header: Header


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
ANSWER_SECONDS = 10.0  # for a thread that never blocks
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
    why = f"{url} has another key than the one listed here, or one side has no keys ({error})"
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


# --- One connection, and the thread that it belongs to

BYTES_A_TURN = 1 << 20  # about, each way; then it is another connection's turn
READ_COSTS_BYTES = 1 << 11  # of a turn, at least: a turn of small frames is at most 512 reads
CALL_BYTES = 1 << 20  # in one call, without the GIL; smaller calls cost a third of the rate
NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Forget(Exception):
  """A payload that is no longer wanted: the connection reads and drops it."""


Parcel = tuple[memoryview, ...]  # bytes to send: a frame, and the payload after it if any


class FrameSocket:
  """A connection that sends and receives whole frames, and never blocks.

  Only its thread calls its methods, except those that are marked for any thread.

  Args:
    connected: the socket, after its handshake.
    owner: the channel whose connection this is.
    thread: to which it belongs; `IoThread.add` begins to serve it.
    paced: whether its rate is limited on a slow link: it is for fragments.
  """

  def __init__(
    self, connected: socket.socket, owner: Channel, thread: IoThread, paced: bool = False
  ):
    connected.setblocking(False)
    set_options(connected, FRAME_OPTIONS)
    self.owner, self.thread = owner, thread
    self.watched = False, False  # what its thread's loop waits for: to read, to write
    self._socket = connected
    self._tls = connected if isinstance(connected, ssl.SSLSocket) else None
    self._pace = pace(connected) if paced else itertools.repeat(None)
    self._leaves = False
    self._leaving: collections.deque[memoryview] = collections.deque()  # bytes being sent now
    self._parser: Iterator[memoryview | None] = self._parse()
    # Memory to fill; None: no room now, and the kernel holds the far end back.
    self._wanted: memoryview | None = next(self._parser)

  def fileno(self) -> int:
    return self._socket.fileno()

  def wake(self) -> None:
    """Checks again for bytes to send, and for room; from any thread."""
    self.thread.call(self.turn)

  def hang_up(self) -> None:
    """Ends the connection, soon; from any thread."""
    self.thread.call(self.close)

  def say(self, frame: Frame) -> None:
    """Sends a frame of the connection itself, before the owner's. Not after `leave`: that would
    break a connection whose far end has not seen its end yet."""
    if not self._leaves:
      self._leaving.append(memoryview(encode(frame)))
      self.wake()

  @property
  def behind(self) -> bool:
    """Whether bytes still wait until the kernel takes them."""
    return bool(self._leaving)

  def leave(self) -> None:
    """Ends the connection when all is sent. Data that comes until then is read and dropped: closing
    a socket with unread data would reset the connection and lose what was sent."""
    self._leaves = True
    self.wake()

  def close(self) -> None:
    """Ends the connection now, without a call of the owner's `lost`."""
    self.thread.forget(self)
    self._socket.close()
    # The parser refers to this object, a cycle that would keep payloads until a collection.
    self._parser, self._wanted = iter(()), None
    self._leaving.clear()

  def turn(self, reads: bool = True, writes: bool = True) -> None:
    """Reads and writes as much as is possible now."""
    if self.fileno() < 0:  # closed
      return
    try:
      if reads:
        self._read()
      if writes:
        self._write()
    except NOT_NOW:
      pass
    except (OSError, MalformedMessage) as error:
      self.close()
      self.owner.lost(self, str(error))
      return
    self.thread.watch(self, self._listens(), self.behind)

  @property
  def waits(self) -> bool:
    """Whether a frame waits for room."""
    return self._wanted is None

  def _listens(self) -> bool:
    return self._leaves or not self.waits

  def _read(self) -> None:
    """Reads the data that is there, for one turn."""
    left = BYTES_A_TURN
    if self._wanted is None:
      self._wanted = next(self._parser)
    # OpenSSL may hold bytes that the kernel does not report as readable.
    while self._listens() and (left > 0 or (self._tls and self._tls.pending())):
      wanted = SCRATCH if self._leaves else self._wanted
      try:
        count = self._socket.recv_into(wanted[:CALL_BYTES])
      except NOT_NOW:
        return
      if not count:
        raise ConnectionResetError("the far end has closed the connection")
      left -= max(count, READ_COSTS_BYTES)
      if not self._leaves:
        self._wanted = wanted[count:] or next(self._parser)
      if count < min(len(wanted), CALL_BYTES) and not self._tls:
        return  # the kernel has no more data

  def _parse(self) -> Iterator[memoryview | None]:
    """Yields the memory to fill next, never empty; None while there is no room."""
    prefix = memoryview(bytearray(PREFIX.size))
    while True:
      yield prefix
      size, payload_bytes = PREFIX.unpack(prefix)
      if not 0 < size <= MAX_FRAME_BYTES:
        raise MalformedMessage(f"begins with {bytes(prefix).hex()}, which no frame of ours does")
      data = bytearray(size)
      yield memoryview(data)
      try:
        frame = decode(bytes(data))
        while (target := self.owner.room(self, frame, payload_bytes)) is None:
          yield None
      except (MalformedMessage, Forget) as error:
        if isinstance(error, MalformedMessage):
          self.owner.peer.caretaker.on_malformed(self.owner.peer.address, str(error))
        for left in range(payload_bytes, 0, -len(SCRATCH)):
          yield SCRATCH[:left]
        continue
      if target:
        yield target
      target = None  # else this reference would keep the payload's memory until the next one
      self.owner.arrived(self, frame)

  def _write(self) -> None:
    """Sends for one turn, or until the kernel has enough."""
    left = BYTES_A_TURN
    while left > 0 and self._refill():
      next(self._pace)
      count = self._socket.send(self._leaving[0][:CALL_BYTES])
      left -= count
      self._leaving[0] = self._leaving[0][count:]

  def _refill(self) -> bool:
    """Takes the owner's next parcel if there is nothing to send; whether there is something now."""
    while self._leaving and not self._leaving[0]:
      self._leaving.popleft()
    if not self._leaving and (parcel := self.owner.next(self)) is not None:
      self._leaving += parcel
    elif not self._leaving and self._leaves:
      with contextlib.suppress(OSError):  # the far end has closed already
        self._socket.shutdown(socket.SHUT_WR)
    return self.behind


class IoThread(threading.Thread):
  """A thread with an event loop, which serves its connections in turn as they become ready.

  Args:
    name: of the thread.
    failed: called with the error that ends the thread.
  """

  def __init__(self, name: str, failed: Callable[[Exception], None]):
    super().__init__(name=name, daemon=True)
    self.loop = asyncio.SelectorEventLoop()
    self.loop.set_exception_handler(self._on_exception)
    self._failed = failed
    self._wires: set[FrameSocket] = set()

  def call(self, function: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function in this thread, soon; from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop has ended
      self.loop.call_soon_threadsafe(function, *arguments)

  def ask(self, function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function in this thread, and waits for its result or error; from any other thread.

    Raises:
      TimeoutError: the thread has ended, or has no time; the function is not called any more.
    """
    answer = concurrent.futures.Future[T]()

    def work() -> None:
      if answer.set_running_or_notify_cancel():
        try:
          answer.set_result(function(*arguments))
        except Exception as error:  # of this caller, and no reason to end the thread
          answer.set_exception(error)

    self.call(work)
    try:
      return answer.result(ANSWER_SECONDS)
    except TimeoutError:
      if answer.cancel():
        raise
    return answer.result()

  def add(self, wire: FrameSocket) -> None:
    """Begins to serve a connection; called in this thread."""
    self._wires.add(wire)
    wire.turn()

  def watch(self, wire: FrameSocket, reads: bool, writes: bool) -> None:
    """Sets what the connection waits for."""
    loop, (read, written) = self.loop, wire.watched
    if reads != read:
      loop.add_reader(wire, wire.turn, True, False) if reads else loop.remove_reader(wire)
    if writes != written:
      loop.add_writer(wire, wire.turn, False, True) if writes else loop.remove_writer(wire)
    wire.watched = reads, writes

  def forget(self, wire: FrameSocket) -> None:
    """Removes a connection, which is closed."""
    self.watch(wire, False, False)
    self._wires.discard(wire)

  def stop(self) -> None:
    """Ends the thread and its connections."""
    self.call(self.loop.stop)

  def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    loop.default_exception_handler(context)  # prints the trace
    self._failed(context.get("exception") or RuntimeError(context["message"]))
    loop.stop()

  def run(self) -> None:
    self.loop.run_forever()
    for wire in [*self._wires]:
      wire.close()
    self.loop.close()


# --- Keeps the queue of a slow link short, so that control need not wait there behind fragments
# The kernel fills the buffer of the narrowest link, in this host or far away, and control messages
# of another connection wait in the same queue. So a connection for fragments sends without a limit
# for a moment, which measures the link's rate, and then at nine tenths of this rate for a while, so
# that the queue drains. A fast link has no limit: its queue is short in time. Nor has one whose far
# end had no room: the rate would be that of the reader, not that of the link. Nothing is measured
# during an outage and while the kernel makes up for it: the rate would be too low, and be kept to.

FREE_SECONDS = 0.5  # of sending without a limit, to measure the link's rate
LIMITED_SECONDS = 4.5
SHARE = 0.9  # of the measured rate
QUEUE_SECONDS = 0.005  # a shorter queue needs no limit
FAST_BYTES = 125e6  # a second: a faster link has no limit
FULL_SHARE = 0.1  # of the time, without room at the far end: then the link is not measured
_SO_MAX_PACING_RATE = 47  # Linux; Python has no name for it
_NO_LIMIT = (1 << 32) - 1
_TCP_INFO = struct.Struct("=xB22xI28xI8xI48xQ16xII16xQQ")
_LOSS = 4  # a `TcpInfo.state`: a timeout has struck, and what was lost is sent again


class TcpInfo(NamedTuple):
  """What Linux tells of a connection, from its `struct tcp_info`; zeros where it is too old."""

  state: int = 0  # of congestion control
  unacked: int = 0  # packets under way
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


def pace(connection: socket.socket) -> Iterator[None]:
  """Limits the rate at which a connection sends; `next` is to be called while it sends."""
  while sys.platform == "linux":
    _limit(connection, _NO_LIMIT)
    before, rate = TcpInfo.of(connection), 0.0
    while not rate:
      yield from _pause(FREE_SECONDS)
      now = TcpInfo.of(connection)
      busy = (now.busy_us - before.busy_us) / 1e6
      overdue = now.unacked and 1000 * now.last_ack_ms > now.rtt_us  # not where nothing was sent
      if overdue or _LOSS in (before.state, now.state):
        before = now
      elif busy >= FREE_SECONDS / 2:
        acked, full = now.acked_bytes - before.acked_bytes, (now.full_us - before.full_us) / 1e6
        queues = now.rtt_us - now.least_rtt_us > 1e6 * QUEUE_SECONDS and full < FULL_SHARE * busy
        rate = acked / busy if queues and acked < FAST_BYTES * busy else 0.0
        before = now
    _limit(connection, int(SHARE * rate))
    yield from _pause(LIMITED_SECONDS)
  yield from itertools.repeat(None)


def _limit(connection: socket.socket, rate: int) -> None:
  packed = struct.pack("=I", rate)
  connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, packed)


def _pause(seconds: float) -> Iterator[None]:
  until = time.monotonic() + seconds
  while time.monotonic() < until:
    yield
