"""The far ends of a network endpoint: who they are, what waits for them, what is arriving.

A peer has a connection for control and some for fragments; each carries its part of every payload,
so that several cores encrypt one fragment. What waits outlives a connection: the message that was
leaving when it broke leaves again over the next one. What the kernel had taken may be lost, and
comes again by the protocol.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ddiloco.network import frames
from ddiloco.network.frames import Bulk, Control, Greeting, RunIdentity, check_header
from ddiloco.network.io_thread import Forget, FrameSocket, Parcel
from ddiloco.protocol.messages import MalformedMessage

if TYPE_CHECKING:
  from ddiloco.network.endpoint import NetworkEndpoint

CONTROL = -1  # a channel's number; those for fragments count from 0
MAX_WAITING_CONTROL = 1024  # messages for a peer; the oldest go first
MAX_QUEUED = 1024  # messages with payload for a peer
MAX_UNTAKEN = 1024  # of a peer's, that arrive or are not taken yet
MAX_REASON = 300  # characters
LEAST_KEPT_BYTES = 1 << 20  # smaller memory is no cost
KEPT_SECONDS = 3.0  # the pushes of a round come together; between rounds memory is for others


class Channel:
  """One of the connections to a peer, in all its lives, and what waits for it."""

  def __init__(self, peer: Peer, number: int):
    self.peer, self.number = peer, number
    self.wire: FrameSocket | None = None  # the connection at present
    self.dialing = False  # a thread tries to make one
    self.attempts = 0  # in a row, in vain
    self.next_at = 0.0  # the next attempt
    self.answer_until = 0.0  # or else it is made anew
    self._waiting: collections.deque[Parcel] = collections.deque()  # these three: the peer's lock
    self._leaving: Parcel | None = None

  def __len__(self) -> int:
    return len(self._waiting) + (self._leaving is not None)

  def put(self, parcel: Parcel) -> None:
    """Queues it; with the peer's lock."""
    self._waiting.append(parcel)

  def drop_oldest(self) -> None:
    """Forgets what has waited longest; with the peer's lock."""
    self._waiting.popleft()

  def clear(self) -> int:
    """Forgets all that waits; with the peer's lock. Returns how much that was."""
    count = len(self)
    self._waiting.clear()
    self._leaving = None
    return count

  def attach(self, wire: FrameSocket) -> int:
    """From now on this is the connection; what was leaving leaves again from its beginning.

    Returns how many fragments that are: 0 or 1.
    """
    with self.peer.lock:
      old, self.wire = self.wire, wire
      again = self._leaving is not None and self._leaving.payload is not None
      if self._leaving is not None:
        self._waiting.appendleft(self._leaving)
        self._leaving = None
    wire.owner, wire.most_bytes = self, frames.MAX_FRAME_BYTES
    if self.number != CONTROL:
      wire.keep_pace()
    if old is not None:
      old.hang_up()
    return int(again)

  def detach(self) -> FrameSocket | None:
    """There is no connection any more; returns the one that was."""
    with self.peer.lock:
      old, self.wire = self.wire, None
    return old

  def hang_up(self) -> None:
    """Ends the connection."""
    old = self.detach()
    if old is not None:
      old.hang_up()

  def wake(self) -> None:
    """There is something to send, or room."""
    wire = self.wire
    if wire is not None:
      wire.wake()

  # --- as the owner of its connection -------------------------------------------------------------

  def next(self, wire: FrameSocket) -> Parcel | None:
    with self.peer.lock:
      if self.wire is not wire or not self._waiting or self.peer.state != "up":
        return None
      self._leaving = self._waiting.popleft()
      return self._leaving

  def sent(self, wire: FrameSocket) -> None:
    with self.peer.lock:
      if self.wire is wire and self._leaving is not None:
        self.peer.queued_bytes -= len(self._leaving.payload or b"")
        self._leaving = None

  def room(self, wire: FrameSocket, frame: Bulk, size: int) -> memoryview | None:
    incoming = self.peer.incoming
    if self.number == CONTROL or incoming is None:
      raise MalformedMessage("a fragment on a connection that is not for fragments")
    return incoming.room(self.number, frame, size, wire)

  def arrived(self, wire: FrameSocket, frame: frames.Frame) -> None:
    if self.wire is not wire:
      return
    self.peer.heard_at = time.monotonic()
    incoming = self.peer.incoming
    if self.number == CONTROL:
      self.peer.caretaker.on_frame(self, wire, frame)
    elif not isinstance(frame, Bulk) or incoming is None:
      self.malformed(wire, f"a {type(frame).__name__} on a connection for fragments")
    elif (message := incoming.arrived(self.number, frame.number)) is not None:
      self.peer.caretaker.on_message(self.peer, *message, incoming)

  def malformed(self, wire: FrameSocket, reason: str) -> None:
    self.peer.caretaker.on_malformed(self.peer, reason)

  def lost(self, wire: FrameSocket, error: Exception) -> None:
    self.peer.caretaker.on_lost(self, wire, error)


class Peer:
  """One far end. `state` is connecting, up or refused; `reason` says why in plain words.

  Args:
    address: whose.
    run: the run it belongs to.
    streams: connections for fragments.
    caretaker: looks after it.
  """

  def __init__(self, address: str, run: RunIdentity, streams: int, caretaker: NetworkEndpoint):
    self.address, self.run, self.caretaker = address, run, caretaker
    self.incarnation = -1
    self.session = b""
    self.state, self.reason = "connecting", "not reached yet"
    self.heard_at = time.monotonic()  # or when we first wanted to hear it
    self.beat_at = 0.0
    self.lock = threading.Lock()
    self.queued_bytes = 0  # of payloads, until the kernel has them
    self.incoming: Incoming | None = None
    self.control = Channel(self, CONTROL)
    self.bulk = [Channel(self, number) for number in range(streams)]
    self.drops = (0, "")  # messages of ours that the peer says it has dropped, and why
    self._untold = (0, "")  # messages of the peer that we have dropped and not said so yet
    self._numbers = 0  # messages with payload so far

  @property
  def channels(self) -> list[Channel]:
    """All of them, control first."""
    return [self.control, *self.bulk]

  def post_control(self, header: bytes) -> int:
    """Queues a message; returns how many older ones had to go for it."""
    with self.lock:
      full = len(self.control) >= MAX_WAITING_CONTROL
      if full:
        self.control.drop_oldest()
      self.control.put(Parcel(frames.encode(Control(header))))
    self.control.wake()
    return int(full)

  def post_bulk(self, header: bytes, payload: memoryview) -> bool:
    """Queues a message with payload; False if there is no room."""
    with self.lock:
      full = self.queued_bytes and self.queued_bytes + len(payload) > self.run.queue_bytes
      if full or max(map(len, self.bulk)) >= MAX_QUEUED:
        return False
      self.queued_bytes += len(payload)
      frame = Bulk(self._numbers, len(payload), header)
      self._numbers += 1
      for channel in self.bulk:
        part = payload[frames.part(channel.number, len(self.bulk), len(payload))]
        channel.put(Parcel(frames.encode(frame, len(part)), part))
    for channel in self.bulk:
      channel.wake()
    return True

  def drop_queue(self, control: bool) -> int:
    """Gives up the fragments for this peer, and control if asked to; returns how many messages."""
    with self.lock:
      count = max(channel.clear() for channel in self.bulk)
      self.queued_bytes = 0
      return count + (self.control.clear() if control else 0)

  def idle(self) -> bool:
    """Whether nothing waits for it."""
    return not any(map(len, self.channels))

  def meet(self, greeting: Greeting) -> None:
    """From now on this is who the peer is."""
    if self.incoming is None or self.session != greeting.session:
      check = functools.partial(check_header, self.run, self.address, greeting.incarnation)
      self.incoming = Incoming(len(self.bulk), self.run, self.caretaker.buffers, check)
    self.incarnation, self.session = greeting.incarnation, greeting.session
    self.state, self.reason, self.heard_at = "up", "", time.monotonic()
    for channel in self.channels:
      channel.wake()

  def down(self, reason: str) -> None:
    """It is out of reach for now."""
    self.state, self.reason = "connecting", reason

  def hang_up(self) -> None:
    """Ends all its connections."""
    for channel in self.channels:
      channel.hang_up()

  def count_dropped(self, reason: str) -> None:
    """A message of this peer was dropped here, and it is to hear of it."""
    with self.lock:
      self._untold = (self._untold[0] + 1, reason[:MAX_REASON])

  def take_untold(self) -> tuple[int, str]:
    """How many messages of this peer were dropped since the last call, and why the last one."""
    with self.lock:
      untold, self._untold = self._untold, (0, "")
      return untold


class Dialed(Peer):
  """A shard that we connect to."""

  def __init__(
    self, address: str, url: str, run: RunIdentity, streams: int, caretaker: NetworkEndpoint
  ):
    super().__init__(address, run, streams, caretaker)
    self.url = url
    self.key = b""  # that it was dialed with


class Accepted(Peer):
  """A peer that dialed us."""

  def __init__(self, greeting: Greeting, run: RunIdentity, caretaker: NetworkEndpoint, key: bytes):
    super().__init__(greeting.address, run, greeting.streams, caretaker)
    self.key = key  # of its connections; b"": without keys


class BufferPool:
  """Memory that payloads arrive in. Memory without a reference left is used again: the first touch
  of fresh memory may take longer than receiving what goes there."""

  def __init__(self) -> None:
    self._free: collections.deque[tuple[float, np.ndarray]] = collections.deque()  # since when

  def take(self, size: int) -> np.ndarray:
    """A uint8 [size], of any content; it is given back when it and all its views are gone."""
    if size < LEAST_KEPT_BYTES:
      return np.empty(size, np.uint8)
    block = self._fitting(size)
    lease = (ctypes.c_uint8 * len(block)).from_buffer(block)  # all views hold it
    weakref.finalize(lease, self._give_back, block).atexit = False
    return np.frombuffer(lease, np.uint8)[:size]

  def _fitting(self, size: int) -> np.ndarray:
    for _ in range(len(self._free)):
      try:
        since, block = self._free.popleft()
      except IndexError:  # another thread was quicker
        break
      if size <= len(block) <= 2 * size:
        return block
      self._free.append((since, block))
    return np.empty(size, np.uint8)

  def _give_back(self, block: np.ndarray) -> None:
    self._free.append((time.monotonic(), block))  # in any thread, at any moment: no locks

  def release(self, now: float) -> None:
    """Frees what was not used for a while."""
    for _ in range(len(self._free)):
      try:
        since, block = self._free.popleft()
      except IndexError:
        break
      if now - since < KEPT_SECONDS:
        self._free.append((since, block))


@dataclasses.dataclass
class _Assembly:
  header: bytes
  payload: np.ndarray | None  # uint8 [total]; None: it is not wanted
  missing: set[int]  # streams whose part has not come

  @property
  def size(self) -> int:
    return 0 if self.payload is None else len(self.header) + len(self.payload)


class Incoming:
  """What is arriving from one peer, in one session: payloads are put together from their parts.

  Parts come in order over each stream. So messages are whole in order, and a message is lost that
  lacks the part of a stream which is past it.

  Args:
    streams: connections over which parts come.
    run: says how large a payload may be, and all of them that are not taken yet; the next message
      is let in whatever its size if there is no other.
    buffers: for payloads.
    check: raises `MalformedMessage` if a header may not come from this peer.
  """

  def __init__(
    self, streams: int, run: RunIdentity, buffers: BufferPool, check: Callable[[bytes], object]
  ):
    self.bytes = 0  # of all that has begun to arrive and is not taken
    self._streams, self._run, self._buffers, self._check = streams, run, buffers, check
    self._lock = threading.Lock()
    self._untaken = 0  # messages that are whole
    self._assemblies: dict[int, _Assembly] = {}  # by number
    self._full: set[FrameSocket] = set()  # connections that wait for room

  def room(self, stream: int, frame: Bulk, size: int, wire: FrameSocket) -> memoryview | None:
    """Where this stream's part goes, of so many bytes; None: `wire` is resumed when there is room.

    Raises:
      MalformedMessage: it does not fit, or its header is wrong.
      Forget: a part of a message that is not wanted.
    """
    place = frames.part(stream, self._streams, frame.total)
    if size != place.stop - place.start:
      raise MalformedMessage(f"{size} bytes are no part {stream} of {frame.total}")
    with self._lock:
      self._drop_lost(stream, frame.number)
      assembly = self._assemblies.get(frame.number)
      if assembly is None:
        if not self._has_room(frame):
          self._full.add(wire)
          return None
        assembly = _Assembly(frame.header, None, set(range(self._streams)))
        self._assemblies[frame.number] = assembly
        try:
          assembly.payload = self._let_in(frame)
        except MalformedMessage:
          self._passed(stream, frame.number, assembly)
          raise
        self.bytes += assembly.size
      elif assembly.payload is not None and frame.total != len(assembly.payload):
        raise MalformedMessage(f"{frame.total} bytes in all, or {len(assembly.payload)}?")
      if assembly.payload is None:
        self._passed(stream, frame.number, assembly)
        raise Forget
      return memoryview(assembly.payload)[place]

  def _let_in(self, frame: Bulk) -> np.ndarray:
    """For a whole payload; MalformedMessage if it may not come."""
    most = self._run.max_payload_bytes
    if frame.total > most:
      raise MalformedMessage(f"a payload of {frame.total} bytes exceeds {most}, this run's largest")
    self._check(frame.header)
    return self._buffers.take(frame.total)

  def _has_room(self, frame: Bulk) -> bool:
    if self._untaken + len(self._assemblies) >= MAX_UNTAKEN:
      return False
    size = len(frame.header) + frame.total
    return not self.bytes or self.bytes + size <= self._run.queue_bytes

  def _drop_lost(self, stream: int, number: int) -> None:
    """Messages before this one whose part of this stream was lost with a connection."""
    lost = [n for n, each in self._assemblies.items() if n < number and stream in each.missing]
    for each in lost:
      self.bytes -= self._assemblies.pop(each).size
    if lost:
      self._wake()

  def forget(self) -> None:
    """What has begun to arrive does not go on: its memory is for others."""
    with self._lock:
      self.bytes -= sum(each.size for each in self._assemblies.values())
      self._assemblies.clear()
      self._wake()

  def _passed(self, stream: int, number: int, assembly: _Assembly) -> bool:
    """This stream's part has come; whether all have."""
    assembly.missing.discard(stream)
    if not assembly.missing:
      self._assemblies.pop(number, None)
    return not assembly.missing

  def arrived(self, stream: int, number: int) -> tuple[bytes, np.ndarray] | None:
    """This stream's part is here; the (header, payload) of the message if it is whole now."""
    with self._lock:
      assembly = self._assemblies.get(number)
      if assembly is None or assembly.payload is None:
        return None
      if not self._passed(stream, number, assembly):
        return None
      self._untaken += 1
      return assembly.header, assembly.payload

  def taken(self, size: int) -> None:
    """The role has taken a message of so many bytes, header and payload."""
    with self._lock:
      self.bytes -= size
      self._untaken -= 1
      self._wake()

  def _wake(self) -> None:
    full, self._full = self._full, set()
    for wire in full:
      wire.wake()
