"""Threads that own TCP connections, and whole frames over one of them.

A connection belongs to one thread, which alone touches its socket; others ask for something by
`IoThread.call`. The kernel keeps order and holds back a sender that is too fast; OpenSSL encrypts.
Both work while Python's lock is free for others.
"""

from __future__ import annotations

import collections
import contextlib
import selectors
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ddiloco.network import frames
from ddiloco.protocol.messages import MalformedMessage

TURN_SECONDS = 0.2  # between two looks at the clock, when nothing happens
READS_A_TURN = 512  # of one connection; then it is another one's turn,
BYTES_A_TURN = 1 << 20  # and at most about so many bytes each way
CALL_BYTES = 1 << 18  # in one call: while it encrypts these, it does not hold Python's lock
UNSENT_BYTES = 1 << 19  # in the kernel and not under way yet: what waits longer waits here
STRANGER_FRAME_BYTES = 1 << 16  # no frame is longer until its sender is known
SCRATCH = memoryview(bytearray(1 << 16))  # unwanted payloads are read into this
KEEPALIVE_SECONDS = 20  # without data, until the kernel asks the far end for a sign of life
DEAD_SECONDS = 120  # without an acknowledgement, until the kernel ends a connection
NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Forget(Exception):
  """A payload that is not wanted any more: it is read, and dropped."""


class Parcel(NamedTuple):
  """What is to go out: a frame, and the payload after it."""

  frame: bytes
  payload: memoryview | None = None


class FrameSocket:
  """A connection that takes and gives whole frames, and never blocks.

  Its owner is asked, in the connection's thread: `next(wire)` for what is to go out (a parcel or
  None), `sent(wire)` when the kernel has all of that, `room(wire, bulk, size)` for memory where so
  many bytes of payload go (None: not now, until `wake`; `MalformedMessage` or `Forget`: they are
  read and forgotten), `arrived(wire, frame)` with a frame whose payload is there,
  `malformed(wire, reason)` with what is dropped, and `lost(wire, error)` when the connection has
  broken or the far end has closed it. Only its thread calls what is not said to be for any thread.

  Args:
    connected: the socket.
    owner: whom it is for, at first.
    context: shows and asks for keys, as the accepting side; None: that has been done, or there are
      no keys.
  """

  def __init__(self, connected: socket.socket, owner: Any, context: ssl.SSLContext | None = None):
    connected.setblocking(False)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
      connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    # A path that has gone without a word (a firewall forgot it) ends the connection within minutes;
    # else what was given to it would count as under way for a quarter of an hour.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
      connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
      connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
      connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_SECONDS)
    if context is not None:
      connected = context.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
    self.owner = owner
    self.thread: IoThread | None = None
    self.most_bytes = STRANGER_FRAME_BYTES  # of a frame
    self.mask = 0  # what the thread waits for
    self._socket = connected
    self._pace: Pacer | None = None
    self._shaking_hands = context is not None
    self._closed = self._doomed = self._leaves = self._rests = False
    self._error: Exception | None = None  # why it leaves
    self._own: collections.deque[bytes] = collections.deque()  # frames of the connection itself
    self._leaving: collections.deque[memoryview] = collections.deque()  # of one parcel,
    self._owned = False  # which is the owner's
    self._parser = self._parse()
    self._wanted: memoryview | None = next(self._parser)  # memory to fill; None: no room now

  def fileno(self) -> int:
    return self._socket.fileno()

  def key(self) -> bytes:
    """The certificate of the far end, DER; b"": it has shown none."""
    shown = self._socket.getpeercert(True) if isinstance(self._socket, ssl.SSLSocket) else None
    return shown or b""

  def keep_pace(self) -> None:
    """It is for fragments: a slow link is not to be flooded."""
    self._pace = Pacer(self._socket)

  def wake(self) -> None:
    """Looks again what there is to send, and whether there is room; from any thread."""
    thread = self.thread
    if thread is not None:  # else it does so when it joins one
      thread.call(self._in, thread)

  def _in(self, thread: IoThread) -> None:
    if self.thread is thread:
      self.turn(selectors.EVENT_READ | selectors.EVENT_WRITE)

  def rest(self, rests: bool) -> None:
    """Whether nothing is read for now, so that the kernel holds the far end back."""
    if self._rests != rests:
      self._rests = rests
      self.wake()

  def hang_up(self) -> None:
    """Ends the connection, soon; from any thread."""
    self._doomed = True
    self.wake()

  def say(self, frame: frames.Frame) -> None:
    """Sends a frame of the connection itself, before what the owner has."""
    self._own.append(frames.encode(frame))
    self.wake()

  def leave(self) -> None:
    """Ends the connection when all is sent. What comes until then is read and forgotten: closing
    a socket with something unread would take back what was sent."""
    self._leaves = True
    self.wake()

  def close(self) -> None:
    """Ends the connection now, without a word to the owner."""
    if not self._closed:
      self._closed = True
      if self.thread is not None:
        self.thread.forget(self)
      self._socket.close()

  def turn(self, ready: int) -> None:
    """Whatever can be done now."""
    again, thread = False, self.thread
    if self._doomed:
      self.close()
    try:
      if self._shaking_hands and not self._closed:
        self._shake_hands()
      if ready & selectors.EVENT_READ and not self._closed:
        again = self._read()
      if ready & selectors.EVENT_WRITE and not self._closed:
        self._write()
    except NOT_NOW:
      pass
    except (OSError, MalformedMessage) as error:
      self.close()
      self.owner.lost(self, self._error or error)
    if not self._closed and thread is not None:
      reads = self._leaves or (self._wanted is not None and not self._rests)
      thread.watch(
        self, reads * selectors.EVENT_READ | (selectors.EVENT_WRITE if self._leaving else 0), again
      )

  def _shake_hands(self) -> None:
    assert isinstance(self._socket, ssl.SSLSocket)
    try:
      self._socket.do_handshake()
    except NOT_NOW:
      raise
    except OSError as error:
      self._error, self._leaves = error, True  # OpenSSL has told the far end
    self._shaking_hands = False
    self._write()

  # --- in -----------------------------------------------------------------------------------------

  def _read(self) -> bool:
    """Takes in what is there, for one turn; returns whether there may be more."""
    left = BYTES_A_TURN
    if self._wanted is None:
      self._wanted = next(self._parser)
    for _ in range(READS_A_TURN):
      wanted = SCRATCH if self._leaves else self._wanted
      if wanted is None or self._closed or (self._rests and not self._leaves):
        return False
      if left <= 0:
        return True
      try:
        count = self._socket.recv_into(wanted[:CALL_BYTES])
      except NOT_NOW:
        return False
      if not count:
        raise ConnectionResetError("the far end has closed the connection")
      left -= count
      if not self._leaves:
        self._wanted = wanted[count:] or next(self._parser)
    return True

  def _parse(self) -> Iterator[memoryview | None]:
    """Yields the memory that is to be filled next, never empty; None while there is no room."""
    prefix = memoryview(bytearray(frames.PREFIX.size))
    while True:
      yield prefix
      size, payload_bytes = frames.PREFIX.unpack(prefix)
      if not 0 < size <= self.most_bytes:
        raise MalformedMessage(f"begins with {bytes(prefix).hex()}, which no frame of ours does")
      data = bytearray(size)
      yield memoryview(data)
      target: memoryview | None = SCRATCH[:0]
      try:
        frame = frames.decode(bytes(data))
        if isinstance(frame, frames.Bulk):
          while (target := self.owner.room(self, frame, payload_bytes)) is None:
            yield None
        elif payload_bytes:
          raise MalformedMessage(f"a {type(frame).__name__} with {payload_bytes} bytes of payload")
      except (MalformedMessage, Forget) as error:
        if isinstance(error, MalformedMessage):
          self.owner.malformed(self, str(error))
        for left in range(payload_bytes, 0, -len(SCRATCH)):
          yield SCRATCH[:left]
        continue
      if target:
        yield target
      target = None  # else the payload's memory is held until the next one comes
      self.owner.arrived(self, frame)

  # --- out ----------------------------------------------------------------------------------------

  def _write(self) -> None:
    """Sends for one turn, or until the kernel has enough."""
    left = BYTES_A_TURN
    if self._leaving and self._pace is not None:
      self._pace.look(time.monotonic())
    while left > 0 and self._refill():
      try:
        count = self._socket.send(self._leaving[0][:CALL_BYTES])
      except NOT_NOW:
        return
      left -= count
      self._leaving[0] = self._leaving[0][count:]

  def _refill(self) -> bool:
    """Whether there is something to send."""
    while self._leaving and not self._leaving[0]:
      self._leaving.popleft()
    if self._leaving:
      return True
    if self._owned:
      self._owned = False
      self.owner.sent(self)
    if self._own:
      self._leaving.append(memoryview(self._own.popleft()))
    elif (parcel := self.owner.next(self)) is not None:
      self._owned = True
      self._leaving.append(memoryview(parcel.frame))
      if parcel.payload:
        self._leaving.append(parcel.payload)
    elif self._leaves:
      with contextlib.suppress(OSError):  # the far end was quicker
        self._socket.shutdown(socket.SHUT_WR)
    return bool(self._leaving)


class IoThread:
  """A thread that waits for its connections and serves whichever are ready, in turn.

  Args:
    name: of the thread.
    tick: called with the time, every turn and at least every `TURN_SECONDS`.
    failed: called with what ended the thread.
  """

  def __init__(
    self,
    name: str,
    tick: Callable[[float], None] = lambda now: None,
    failed: Callable[[Exception], None] = lambda error: None,
  ):
    self._selector = selectors.DefaultSelector()
    self._tick, self._failed = tick, failed
    self._calls: collections.deque[tuple] = collections.deque()
    self._again: dict[FrameSocket, None] = {}  # those that had more than one turn's
    self._wake_in, self._wake_out = socket.socketpair()
    self._wires: set[FrameSocket] = set()
    self._over = False
    for end in (self._wake_in, self._wake_out):
      end.setblocking(False)
    self._selector.register(self._wake_out, selectors.EVENT_READ, None)
    self.thread = threading.Thread(target=self._work, name=name, daemon=True)

  def start(self, over: bool = False) -> None:
    """Begins; `over`: to end at once."""
    self._over = over
    self.thread.start()

  def call(self, function: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function in this thread, soon; from any thread."""
    self._calls.append((function, arguments))
    with contextlib.suppress(OSError):  # full: it wakes anyway; closed: it is over
      self._wake_in.send(b"!")

  def listen(self, listener: socket.socket, accept: Callable[[], None] | None) -> None:
    """Calls `accept` at each new connection; None: not any more."""
    if accept is not None:
      self._selector.register(listener, selectors.EVENT_READ, accept)
    else:
      self._selector.unregister(listener)

  def add(self, wire: FrameSocket) -> None:
    """From now on the connection belongs to this thread; called in it."""
    self._wires.add(wire)
    wire.thread = self
    wire.turn(selectors.EVENT_READ | selectors.EVENT_WRITE)

  def watch(self, wire: FrameSocket, mask: int, again: bool) -> None:
    """What the connection waits for, and whether it has something left to read."""
    if again:
      self._again[wire] = None
    if mask != wire.mask:
      if not wire.mask:
        self._selector.register(wire, mask, wire)
      elif mask:
        self._selector.modify(wire, mask, wire)
      else:
        self._selector.unregister(wire)
      wire.mask = mask

  def forget(self, wire: FrameSocket) -> None:
    """The connection is closed, or goes to another thread."""
    self._again.pop(wire, None)
    self._wires.discard(wire)
    if wire.mask:
      self._selector.unregister(wire)
      wire.mask = 0
    wire.thread = None

  def hand_over(self, wire: FrameSocket, thread: IoThread) -> None:
    """The connection belongs to another thread from now on; called in this one, not in its turn."""
    if wire.thread is self:
      self.forget(wire)
      thread.call(thread.add, wire)

  def stop(self) -> None:
    """Ends the thread and its connections."""
    self._over = True
    self.call(lambda: None)

  def _work(self) -> None:
    try:
      while not self._over:
        self._turn()
    except Exception as error:
      self._failed(error)
      raise
    finally:
      for wire in [*self._wires]:
        wire.close()
      self._selector.close()
      self._wake_in.close()
      self._wake_out.close()

  def _turn(self) -> None:
    pause = 0.0 if self._calls or self._again else TURN_SECONDS
    ready = self._selector.select(pause)
    again, self._again = self._again, {}
    while self._calls:
      function, arguments = self._calls.popleft()
      function(*arguments)
    for key, mask in ready:
      if key.data is None:
        with contextlib.suppress(BlockingIOError):
          self._wake_out.recv(4096)
      elif isinstance(key.data, FrameSocket):
        again.pop(key.data, None)
        if key.data.thread is self:  # and has not gone to another one just now
          key.data.turn(mask)
      else:
        key.data()
    for wire in again:
      if wire.thread is self:
        wire.turn(selectors.EVENT_READ)
    self._tick(time.monotonic())


# --- Keeps the queue of a slow link short, so that control need not wait there behind fragments
# The kernel fills the buffer of the narrowest link, in this host or far away, and control over
# another connection stands in the same queue. So a connection for fragments is let go for a moment,
# which shows how much the link carries, and keeps to nine tenths of that for a while: then the
# queue drains. A link that carries a lot is left alone: its queue is short in time.

FREE_SECONDS = 0.5  # of sending without a limit, to see what the link carries
LIMITED_SECONDS = 4.5
SHARE = 0.9  # of what it carried
QUEUE_SECONDS = 0.005  # a queue that is worth it
FAST_BYTES = 125e6  # a second: a link that is left alone
_SO_MAX_PACING_RATE = 47  # Linux; Python has no name for it
_NO_LIMIT = (1 << 32) - 1
# Places in Linux's struct tcp_info: round trip (us), bytes acknowledged, the least round trip (us),
# and for how long there was something to send (us).
_RTT, _ACKED, _MIN_RTT, _BUSY, _BYTES = 68, 120, 148, 168, 176


class Pacer:
  """How fast one connection may send.

  Args:
    connection: the socket.
  """

  def __init__(self, connection: socket.socket):
    self._socket = connection
    self._until = 0.0 if sys.platform == "linux" else float("inf")  # the present phase lasts
    self._free = False
    self._began = (0, 0)  # bytes acknowledged and microseconds of sending until the free phase

  def look(self, now: float) -> None:
    """Every now and then while it sends."""
    if now < self._until:
      return
    info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
    if len(info) < _BYTES:
      self._until = float("inf")  # a kernel that does not say so much
      return
    acked, busy = (struct.unpack_from("=Q", info, place)[0] for place in (_ACKED, _BUSY))
    rtt, least = (struct.unpack_from("=I", info, place)[0] / 1e6 for place in (_RTT, _MIN_RTT))
    busy_seconds = (busy - self._began[1]) / 1e6
    self._until = now + FREE_SECONDS
    if not self._free:
      self._free, self._began = True, (acked, busy)
      self._limit(_NO_LIMIT)
    elif busy_seconds >= FREE_SECONDS / 2:
      rate = (acked - self._began[0]) / busy_seconds
      self._began = acked, busy
      if rtt - least > QUEUE_SECONDS and 0 < rate < FAST_BYTES:
        self._free, self._until = False, now + LIMITED_SECONDS
        self._limit(int(SHARE * rate))

  def _limit(self, rate: int) -> None:
    self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", rate))
