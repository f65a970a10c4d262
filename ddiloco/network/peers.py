"""The peers of a network endpoint: their queues, their connections, and arriving payloads.

A peer has a connection for control and some for fragments; each of the latter carries its part of
every payload, so that several cores encrypt one fragment. Queued messages outlive a connection: a
message that was being sent when the connection broke is sent again over the next one. Messages that
the kernel had taken may be lost; the protocol sends them again.

A connection belongs to an `IoThread`, with others, and only that thread uses its socket. The kernel
keeps order and holds back a sender that is too fast; OpenSSL encrypts. Both work without the GIL.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ddiloco.network import frames
from ddiloco.network.frames import (
  CONTROL,
  FRAME_OPTIONS,
  MAX_FRAME_BYTES,
  PREFIX,
  SCRATCH,
  Bulk,
  Control,
  Frame,
  Greeting,
)
from ddiloco.network.transport import MAX_BULK, open_frame
from ddiloco.protocol.messages import Payload
from ddiloco.protocol.values import MalformedMessage

if TYPE_CHECKING:
  from ddiloco.network.endpoint import NetworkEndpoint

T = TypeVar("T")

# --- One connection, and the thread that it belongs to

BYTES_A_TURN = 1 << 20  # about, each way; then it is another connection's turn
READ_COSTS_BYTES = 1 << 11  # of a turn, at least: a turn of small frames is at most 512 reads
CALL_BYTES = 1 << 20  # in one call, without the GIL; smaller calls cost a third of the rate
ANSWER_SECONDS = 10.0  # for a thread that never blocks
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
    thread: to which it belongs; the first `wake` begins to serve it.
    paced: whether its rate is limited on a slow link: it is for fragments.
  """

  def __init__(
    self, connected: socket.socket, owner: Channel, thread: IoThread, paced: bool = False
  ):
    connected.setblocking(False)
    frames.set_options(connected, FRAME_OPTIONS)
    self.owner, self.thread = owner, thread
    self.watched = False, False  # what its thread's loop waits for: to read, to write
    self._socket = connected
    self._tls = connected if isinstance(connected, ssl.SSLSocket) else None
    self._pace = frames.pace(connected) if paced else itertools.repeat(0.0)
    self._leaves = False
    self._sending: collections.deque[memoryview] = collections.deque()  # bytes being sent now
    self._parcel: Parcel | None = None  # of the owner, the newest among them
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
      self._sending.append(memoryview(frames.encode(frame)))
      self.wake()

  @property
  def behind(self) -> bool:
    """Whether bytes still wait until the kernel takes them."""
    return bool(self._sending)

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
    self._parser, self._wanted, self._parcel = iter(()), None, None
    self._sending.clear()

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
        frame = frames.decode(bytes(data))
        while (target := self.owner.room(self, frame, payload_bytes)) is None:
          yield None
      except (MalformedMessage, Forget) as error:
        if isinstance(error, MalformedMessage):
          self.owner.peer.endpoint.on_malformed(self.owner.peer.address, str(error))
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
    if call_after := next(self._pace):
      self.thread.loop.call_later(call_after, self.turn, False)
    while left > 0 and self._refill():
      count = self._socket.send(self._sending[0][:CALL_BYTES])
      left -= count
      self._sending[0] = self._sending[0][count:]

  def _refill(self) -> bool:
    """Takes the owner's next parcel if there is nothing to send; whether there is something now."""
    while self._sending and not self._sending[0]:
      self._sending.popleft()
    if not self._sending:
      self._parcel = self.owner.next(self, self._parcel)
      self._sending += self._parcel or ()
    if not self._sending and self._leaves:
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
    self._over = concurrent.futures.Future[Any]()  # done when this thread calls nothing any more

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
    either = [answer, self._over]
    concurrent.futures.wait(either, ANSWER_SECONDS, concurrent.futures.FIRST_COMPLETED)
    if answer.cancel():
      raise TimeoutError("the network's thread has ended, or has no time")
    return answer.result()

  def watch(self, wire: FrameSocket, reads: bool, writes: bool) -> None:
    """Sets what a connection waits for; from now on it ends with this thread."""
    self._wires.add(wire)
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
    self._over.set_result(None)


# --- One peer, and its connections

MAX_QUEUED = 1024  # messages of a kind; beyond, new ones are dropped


class Channel:
  """One of the connections to a peer, made again whenever it breaks, and its queue.

  All its connections belong to one thread. So each ends before the next one begins, and writes
  into no payload that the next one has made whole.
  """

  def __init__(self, peer: Peer, number: int, thread: IoThread):
    self.peer, self.number, self.thread = peer, number, thread
    self.wire: FrameSocket | None = None  # the connection at present
    self.waiting: collections.deque[Parcel] = collections.deque()  # the peer's lock guards it

  def attach(self, connected: socket.socket) -> FrameSocket:
    """Takes a new connection; a message that was being sent starts again from its beginning."""
    wire = FrameSocket(connected, self, self.thread, paced=self.number != CONTROL)
    self.hang_up()
    self.wire = wire
    wire.wake()
    return wire

  def detach(self) -> FrameSocket | None:
    """Gives up the connection, and returns it."""
    old, self.wire = self.wire, None
    return old

  def hang_up(self) -> None:
    """Ends the connection, soon."""
    if (old := self.detach()) is not None:
      old.hang_up()

  def wake(self) -> None:
    """Wakes the connection's thread: there is something to send, or room for a payload."""
    if (wire := self.wire) is not None:
      wire.wake()

  # --- as the owner of its connection, in that connection's thread --------------------------------

  def next(self, wire: FrameSocket, sent: Parcel | None) -> Parcel | None:
    """The next bytes to send; the kernel has all bytes of the parcel that was `sent` before."""
    with self.peer.lock:
      if self.wire is not wire:
        return None
      if self.waiting and self.waiting[0] is sent:
        self.waiting.popleft()
      return self.waiting[0] if self.waiting else None

  def room(self, wire: FrameSocket, frame: Frame, size: int) -> memoryview | None:
    """Memory for a frame's payload of so many bytes, mostly none; None: no room until `wake`.

    Raises:
      MalformedMessage, Forget: the connection drops the frame, and reads and drops its payload.
    """
    # Read before the check: a new session's `incoming` is set only after this wire is detached.
    incoming = self.peer.incoming
    if self.wire is not wire:
      raise Forget
    bulk = isinstance(frame, Bulk)
    if bulk == (self.number == CONTROL) or (size and not bulk):
      raise MalformedMessage(f"a {type(frame).__name__} with {size} bytes of payload")
    if bulk:
      return incoming.room(self.number, frame, size)
    if isinstance(frame, Control) and self.peer.endpoint.crowded(self.peer.address):
      return None  # it is read no faster than the role takes its messages
    return SCRATCH[:0]

  def arrived(self, wire: FrameSocket, frame: Frame) -> None:
    """A frame has arrived, and its payload is in the memory that `room` gave."""
    peer, incoming = self.peer, self.peer.incoming  # before the check of the wire, as in `room`
    if self.wire is not wire:
      return
    if isinstance(frame, Bulk):
      incoming.arrived(self.number, frame.number)
    else:  # fragments may have another path: they are no sign that control comes through
      peer.heard_at = time.monotonic()
      peer.endpoint.on_frame(peer, frame)

  def lost(self, wire: FrameSocket, reason: str) -> None:
    """The connection has broken, or the far end has closed it."""
    self.peer.endpoint.control_thread.call(self.peer.endpoint.on_lost, self, wire, reason)


class Peer:
  """One peer. `state` is connecting, up or refused; `reason` says why in plain words.

  Args:
    address: of the peer.
    streams: connections for fragments.
    endpoint: to which it belongs.
    url: where we dial it; "": it has dialed us.
    key: of its connections; b"": not known yet, or the run has no keys.
  """

  def __init__(
    self,
    address: str,
    streams: int,
    endpoint: NetworkEndpoint,
    url: str = "",
    key: bytes = b"",
  ):
    self.address, self.endpoint = address, endpoint
    self.url, self.key = url, key
    self.incarnation, self.session = -1, b""
    self.state, self.reason = "connecting", "not reached yet"
    self.heard_at = time.monotonic()  # at first, when this peer was created
    self.beat_at = 0.0
    self.attempts = 0  # to dial, without success, in a row
    self.lock = threading.RLock()
    self.control = Channel(self, CONTROL, endpoint.control_thread)
    self.bulk = [Channel(self, number, next(endpoint.bulk_threads)) for number in range(streams)]
    self.channels = [self.control, *self.bulk]
    self.forget()

  @property
  def queued_bytes(self) -> int:
    """Bytes of payloads that the kernel has not taken yet."""
    with self.lock:
      return sum(len(part) for channel in self.bulk for _, part in channel.waiting)

  def post(self, header: bytes, payload: Payload) -> bool:
    """Queues a message; False if there is no room."""
    channels = [self.control] if payload is None else self.bulk
    with self.lock:
      if max(len(channel.waiting) for channel in channels) >= MAX_QUEUED:
        return False
      if payload is None:
        self.control.waiting.append((memoryview(frames.encode(Control(header))),))
      else:
        data, queued = memoryview(payload).cast("B"), self.queued_bytes
        if queued and queued + len(data) > self.endpoint.run.queue_bytes:
          return False
        frame = Bulk(next(self.endpoint.numbers), len(data), header)
        for channel in self.bulk:
          part = data[frames.part(channel.number, len(self.bulk), len(data))]
          channel.waiting.append((memoryview(frames.encode(frame, len(part))), part))
    for channel in channels:
      channel.wake()
    return True

  def wake_bulk(self) -> None:
    """There is a fragment to send, or room for one."""
    for channel in self.bulk:
      channel.wake()

  def drop_queue(self, control: bool = True) -> None:
    """Drops and counts queued fragments for this peer, and queued control unless told otherwise."""
    with self.lock:
      count = max(len(channel.waiting) for channel in self.bulk)
      count += len(self.control.waiting) if control else 0
      self.endpoint.counters.undelivered += count
      for channel in self.channels if control else self.bulk:
        channel.waiting.clear()

  def idle(self) -> bool:
    """Whether no message is queued for the peer."""
    return not any(channel.waiting for channel in self.channels)

  def outnumbers(self, greeting: Greeting) -> bool:
    """Whether the greeting is from another process of this role that is not newer."""
    return self.session != greeting.session and self.incarnation >= greeting.incarnation

  def meet(self, greeting: Greeting) -> None:
    """Takes over the incarnation and session of a greeting: the peer is up."""
    known, self.incarnation, self.session = self.session, greeting.incarnation, greeting.session
    if known != self.session:
      self.forget()
    self.state, self.reason, self.heard_at = "up", "", time.monotonic()

  def forget(self) -> None:
    """Drops all messages that are arriving; they may be sent again."""
    self.incoming = Incoming(self)

  def hang_up(self) -> None:
    """Ends all connections to the peer."""
    for channel in self.channels:
      channel.hang_up()


# --- Arriving payloads


@dataclasses.dataclass
class _Assembly:
  header: bytes
  payload: np.ndarray  # uint8 [total]
  missing: set[int]  # streams whose part has not arrived

  @property
  def size(self) -> int:
    return len(self.header) + len(self.payload)


class Incoming:
  """Arriving messages of one peer, in one session: payloads are assembled from their parts.

  Parts arrive in order over each stream. So messages are complete in order. A message that lacks
  the part of a stream that has gone on to a later message can never be complete: it is dropped.

  Messages that are arriving and messages that wait for the role are bounded together: `MAX_BULK`
  of them, and `queue_bytes`. One is let in whatever its size if there is no other.
  """

  def __init__(self, peer: Peer):
    self._peer, self._incarnation = peer, peer.incarnation
    self._lock = threading.Lock()
    self._assemblies: dict[int, _Assembly] = {}  # by the message's number
    self._begun = -1  # number of the newest message that got room, or was refused
    self._streams = len(peer.bulk)

  def room(self, stream: int, frame: Bulk, size: int) -> memoryview | None:
    """Memory for this stream's part, `size` bytes; None: there is no room now, and the connection
    is woken when there may be some.

    Raises:
      MalformedMessage: the part does not fit, or the message's header is wrong.
      Forget: a part of a message that is complete, lost or refused.
    """
    place = frames.part(stream, self._streams, frame.total)
    if size != place.stop - place.start:
      raise MalformedMessage(f"{size} bytes are no part {stream} of {frame.total}")
    with self._lock:
      # Messages before this one whose part of this stream was lost with a connection.
      lost = [n for n, e in self._assemblies.items() if n < frame.number and stream in e.missing]
      for number in lost:
        del self._assemblies[number]
      if lost:
        self._peer.wake_bulk()
      assembly = self._assemblies.get(frame.number)
      if assembly is None:
        if frame.number <= self._begun:
          raise Forget
        if not self._has_room(frame):
          return None
        assembly = self._begin(frame)
      elif frame.total != len(assembly.payload):
        raise MalformedMessage(f"{frame.total} bytes in all, or {len(assembly.payload)}?")
      return memoryview(assembly.payload)[place]

  def _begin(self, frame: Bulk) -> _Assembly:
    """Allocates a message; raises MalformedMessage if it is too large or not from this peer."""
    self._begun, most = frame.number, self._peer.endpoint.run.max_payload_bytes
    if frame.total > most:
      raise MalformedMessage(f"a payload of {frame.total} bytes exceeds {most}, this run's largest")
    self._check(frame.header)
    payload = self._peer.endpoint.buffers.take(frame.total)
    assembly = _Assembly(frame.header, payload, set(range(self._streams)))
    self._assemblies[frame.number] = assembly
    return assembly

  def _check(self, header: bytes) -> None:
    open_frame(self._peer.address, self._incarnation, header, b"")

  def _has_room(self, frame: Bulk) -> bool:
    count, size = self._peer.endpoint.waiting_bulk(self._peer.address)
    count += len(self._assemblies)
    size += sum(each.size for each in self._assemblies.values())
    size += len(frame.header) + frame.total
    return not count or (count < MAX_BULK and size <= self._peer.endpoint.run.queue_bytes)

  def arrived(self, stream: int, number: int) -> None:
    """This stream's part of a message has arrived. With its last part a message goes to the role's
    queue."""
    with self._lock:
      assembly = self._assemblies.get(number)
      if assembly is None:
        return  # another stream has lost its part
      assembly.missing.discard(stream)
      if not assembly.missing:
        message = assembly.header, assembly.payload
        self._peer.endpoint.put(self._peer.address, *message, self._incarnation)
        del self._assemblies[number]  # not before: each message counts all the time
