"""The far ends of a network endpoint: who may be one, what waits for it, what is arriving.

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
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from ddiloco.network import frames
from ddiloco.network.frames import (
  CONTROL,
  SESSION_BYTES,
  Bulk,
  Control,
  Forget,
  FrameSocket,
  Greeting,
  Parcel,
)
from ddiloco.network.transport import open_frame
from ddiloco.protocol.messages import MalformedMessage

if TYPE_CHECKING:
  from ddiloco.network.endpoint import NetworkEndpoint

# --- Who may speak: what a role says of itself when it connects, and what a shard objects to

FUTURE_SECONDS = 86_400  # clocks are wrong by hours; further ahead none is let in, on either side
MAX_STREAMS = 64


@dataclasses.dataclass(frozen=True)
class RunIdentity:
  """What a transport must know of its run; every role of it says the same."""

  run_id: str
  plan_id: str  # of all that the roles of a run must have in common
  max_payload_bytes: int  # of one message
  queue_bytes: int  # of fragments waiting for, or from, one peer


def incarnation_at(unix_seconds: float) -> int:
  """The incarnation of a process that starts at this time: seconds since 2020."""
  return int(unix_seconds) - 1_577_836_800


def seconds_since_2020() -> int:
  """The incarnation of a process that starts now, unless a former life had a greater one."""
  return incarnation_at(time.time())


def ahead(incarnation: int) -> str:
  """Why an incarnation is not let in by this host's clock, "" if it is."""
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
  if not 1 <= greeting.streams <= MAX_STREAMS or len(greeting.session) != SESSION_BYTES:
    return f"{greeting.streams} streams (1 to {MAX_STREAMS}), or its session, are out of range"
  if owner == "":
    return f"the key of {address} is not listed here any more"
  if owner is not None and owner != address:
    return f"this key belongs to {owner}, not to {address}"
  if greeting.run_id != run.run_id:
    return f"this is run {run.run_id!r}, not {greeting.run_id!r}"
  if greeting.plan_id != run.plan_id:
    return (
      "this run was started with other settings of model, data, inner, sync, outer, seed or"
      f" run.total_tokens ({run.plan_id} here, {greeting.plan_id} there)"
    )
  return ahead(greeting.incarnation)


def doubt(incarnation: int, known: int) -> str:
  """Why a shard that was dialed is not believed, "" if it is; `known`: its newest incarnation."""
  if incarnation < known:
    return f"incarnation {incarnation} is an old one, {known} was here before"
  return ahead(incarnation)


# --- One far end, and its connections

MAX_WAITING_CONTROL = 1024  # messages for a peer; the oldest go first
MAX_QUEUED = 1024  # messages with payload for a peer
MAX_REASON = 300  # characters


class Channel(frames.Owner):
  """One of the connections to a peer, in all its lives, and what waits for it."""

  def __init__(self, peer: Peer, number: int):
    self.peer, self.number = peer, number
    self.wire: FrameSocket | None = None  # the connection at present
    self.dialing = False  # a thread tries to make one
    self.attempts = 0  # in a row, in vain
    self.next_at = 0.0  # the next attempt
    self.answer_until = 0.0  # or else it is made anew
    self.waiting: collections.deque[Parcel] = collections.deque()  # these two: the peer's lock
    self.leaving = False  # the first of them, until the kernel has all of it

  def attach(self, wire: FrameSocket) -> None:
    """From now on this is the connection; what was leaving leaves again from its beginning."""
    with self.peer.lock:
      old, self.wire, self.leaving = self.wire, wire, False
    wire.owner, wire.most_bytes = self, frames.MAX_FRAME_BYTES
    if self.number != CONTROL:
      wire.keep_pace()
    if old is not None:
      old.hang_up()

  def detach(self) -> FrameSocket | None:
    """There is no connection any more; returns the one that was."""
    old, self.wire = self.wire, None
    return old

  def hang_up(self) -> None:
    """Ends the connection."""
    if (old := self.detach()) is not None:
      old.hang_up()

  def wake(self) -> None:
    """There is something to send, or room."""
    if (wire := self.wire) is not None:
      wire.wake()

  # --- as the owner of its connection -------------------------------------------------------------

  def next(self, wire: FrameSocket) -> Parcel | None:
    with self.peer.lock:
      if self.wire is not wire:
        return None
      if self.leaving:
        self.waiting.popleft()
      self.leaving = bool(self.waiting) and self.peer.state == "up"
      return self.waiting[0] if self.leaving else None

  def room(self, wire: FrameSocket, frame: Bulk, size: int) -> memoryview | None:
    incoming = self.peer.incoming  # first: the next session's comes after this wire has gone
    if self.wire is not wire:
      raise Forget
    if self.number == CONTROL or incoming is None:
      raise MalformedMessage("a fragment on a connection that is not for fragments")
    return incoming.room(self.number, frame, size, wire)

  def arrived(self, wire: FrameSocket, frame: frames.Frame) -> None:
    peer, incoming = self.peer, self.peer.incoming  # first, as above
    if self.wire is not wire:
      return
    peer.heard_at = time.monotonic()
    if self.number == CONTROL:
      peer.caretaker.on_frame(peer, wire, frame)
    elif not isinstance(frame, Bulk) or incoming is None:
      self.malformed(wire, f"a {type(frame).__name__} on a connection for fragments")
    elif (message := incoming.arrived(self.number)) is not None:
      taken = functools.partial(incoming.taken, sum(map(len, message)))
      if not peer.caretaker.put(peer.address, *message, peer.incarnation, taken):
        taken()

  def malformed(self, wire: FrameSocket, reason: str) -> None:
    self.peer.caretaker.on_malformed(self.peer, reason)

  def lost(self, wire: FrameSocket, error: Exception) -> None:
    self.peer.caretaker.call(self.peer.caretaker.on_lost, self, wire, error)


class Peer:
  """One far end. `state` is connecting, up or refused; `reason` says why in plain words.

  Args:
    address: whose.
    run: the run it belongs to.
    streams: connections for fragments.
    caretaker: looks after it.
    url: where it was dialed; "": it has dialed us.
    key: of its connections; b"": none is known yet, or there are none.
  """

  def __init__(
    self,
    address: str,
    run: RunIdentity,
    streams: int,
    caretaker: NetworkEndpoint,
    url: str = "",
    key: bytes = b"",
  ):
    self.address, self.run, self.caretaker = address, run, caretaker
    self.url, self.key = url, key
    self.incarnation = -1
    self.session = b""
    self.state, self.reason = "connecting", "not reached yet"
    self.heard_at = time.monotonic()  # or when we first wanted to hear it
    self.beat_at = 0.0
    self.lock = threading.RLock()
    self.incoming: Incoming | None = None
    self.control = Channel(self, CONTROL)
    self.bulk = [Channel(self, number) for number in range(streams)]
    self.channels = [self.control, *self.bulk]
    self.drops = (0, "")  # messages of ours that the peer says it has dropped, and why
    self._untold = (0, "")  # messages of the peer that we have dropped and not said so yet

  @property
  def queued_bytes(self) -> int:
    """Of payloads, until the kernel has them."""
    with self.lock:
      return sum(len(part) for channel in self.bulk for _, part in channel.waiting)

  def post_control(self, header: bytes) -> int:
    """Queues a message; returns how many older ones had to go for it."""
    with self.lock:
      waiting = self.control.waiting
      full = len(waiting) >= MAX_WAITING_CONTROL
      if full:
        del waiting[self.control.leaving]  # the oldest that has not begun to leave
      waiting.append((memoryview(frames.encode(Control(header))),))
    self.control.wake()
    return int(full)

  def post_bulk(self, header: bytes, payload: memoryview) -> bool:
    """Queues a message with payload; False if there is no room."""
    with self.lock:
      queued = self.queued_bytes
      full = queued and queued + len(payload) > self.run.queue_bytes
      if full or max(len(channel.waiting) for channel in self.bulk) >= MAX_QUEUED:
        return False
      frame = Bulk(next(self.caretaker.numbers), len(payload), header)
      for channel in self.bulk:
        part = payload[frames.part(channel.number, len(self.bulk), len(payload))]
        channel.waiting.append((memoryview(frames.encode(frame, len(part))), part))
    for channel in self.bulk:
      channel.wake()
    return True

  def drop_queue(self, control: bool) -> int:
    """Gives up the fragments for this peer, and control if asked to; returns how many messages."""
    with self.lock:
      count = max(len(channel.waiting) for channel in self.bulk)
      count += len(self.control.waiting) if control else 0
      for channel in self.channels if control else self.bulk:
        channel.waiting.clear()
        channel.leaving = False
      return count

  def idle(self) -> bool:
    """Whether nothing waits for it."""
    return not any(channel.waiting for channel in self.channels)

  def outnumbers(self, greeting: Greeting) -> bool:
    """Whether it is another life of this role, and no newer one, that greets."""
    return self.session != greeting.session and self.incarnation >= greeting.incarnation

  def meet(self, greeting: Greeting) -> None:
    """From now on this is who the peer is."""
    if self.incoming is None or self.session != greeting.session:
      who = (self.run.run_id, self.run.plan_id), self.address, greeting.incarnation
      check = functools.partial(open_frame, *who, payload=b"")  # before a payload is let in
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


# --- What is arriving

MAX_UNTAKEN = 1024  # of a peer's, that arrive or are not taken yet
LEAST_KEPT_BYTES = 1 << 20  # smaller memory is no cost
KEPT_SECONDS = 3.0  # the pushes of a round come together; between rounds memory is for others


@dataclasses.dataclass
class _Block:
  memory: np.ndarray
  holder: Callable[[], object]  # None when it and all its views are gone
  used_at: float  # when that was not so


class BufferPool:
  """Memory that payloads arrive in. Memory without a reference left is used again: the first touch
  of fresh memory may take longer than receiving what goes there."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._blocks: list[_Block] = []

  def free(self) -> list[_Block]:
    """Blocks without a reference left."""
    return [block for block in self._blocks if block.holder() is None]

  def take(self, size: int) -> np.ndarray:
    """A uint8 [size], of any content; its memory is free when it and all its views are gone."""
    if size < LEAST_KEPT_BYTES:
      return np.empty(size, np.uint8)
    with self._lock:
      fitting = [block for block in self.free() if size <= len(block.memory) <= 2 * size]
      memory = fitting[0].memory if fitting else np.empty(size, np.uint8)
      holder = (ctypes.c_uint8 * len(memory)).from_buffer(memory)  # all views hold it
      block = _Block(memory, weakref.ref(holder), time.monotonic())
      self._blocks = [block, *(each for each in self._blocks if each.memory is not memory)]
    return np.frombuffer(holder, np.uint8)[:size]

  def release(self, now: float) -> None:
    """Frees what was not used for a while."""
    with self._lock:
      for block in self._blocks:
        block.used_at = now if block.holder() is not None else block.used_at
      self._blocks = [block for block in self._blocks if now - block.used_at < KEPT_SECONDS]


@dataclasses.dataclass
class _Assembly:
  header: bytes
  payload: np.ndarray  # uint8 [total]
  missing: set[int]  # streams whose part has not come

  @property
  def size(self) -> int:
    return len(self.header) + len(self.payload)


class Incoming:
  """What is arriving from one peer, in one session: payloads are put together from their parts.

  Parts come in order over each stream. So messages are whole in order, and a message is lost that
  lacks the part of a stream which is past it: it takes no room from those that can be whole.

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
    self._whole = -1  # number of the newest of them
    self._assemblies: dict[int, _Assembly] = {}  # by number
    self._newest = [-1] * streams  # number that each was given room for, or that was refused
    self._under_way: list[_Assembly | None] = [None] * streams  # of which a part is arriving
    self._full: set[FrameSocket] = set()  # connections that wait for room

  def room(self, stream: int, frame: Bulk, size: int, wire: FrameSocket) -> memoryview | None:
    """Where this stream's part goes, of so many bytes; None: `wire` is resumed when there is room.

    Raises:
      MalformedMessage: it does not fit, or its header is wrong.
      Forget: a part of a message that is whole, lost or refused.
    """
    place = frames.part(stream, self._streams, frame.total)
    if size != place.stop - place.start:
      raise MalformedMessage(f"{size} bytes are no part {stream} of {frame.total}")
    with self._lock:
      # Messages before this one whose part of this stream was lost with a connection.
      self._drop(n for n, e in self._assemblies.items() if n < frame.number and stream in e.missing)
      assembly = self._assemblies.get(frame.number)
      if assembly is None:
        if frame.number <= max(self._newest):
          raise Forget
        if not self._has_room(frame):
          self._full.add(wire)
          return None
      elif frame.total != len(assembly.payload):
        raise MalformedMessage(f"{frame.total} bytes in all, or {len(assembly.payload)}?")
      self._newest[stream] = frame.number
      self._under_way[stream] = assembly = assembly or self._begin(frame)
      return memoryview(assembly.payload)[place]

  def _begin(self, frame: Bulk) -> _Assembly:
    """Memory for a message; MalformedMessage if it may not come."""
    most = self._run.max_payload_bytes
    if frame.total > most:
      raise MalformedMessage(f"a payload of {frame.total} bytes exceeds {most}, this run's largest")
    self._check(frame.header)
    payload, missing = self._buffers.take(frame.total), set(range(self._streams))
    assembly = self._assemblies[frame.number] = _Assembly(frame.header, payload, missing)
    self.bytes += assembly.size
    return assembly

  def _has_room(self, frame: Bulk) -> bool:
    if self._untaken + len(self._assemblies) >= MAX_UNTAKEN:
      return False
    size = len(frame.header) + frame.total
    return not self.bytes or self.bytes + size <= self._run.queue_bytes

  def _drop(self, numbers: Iterable[int]) -> None:
    """These do not go on: their memory is for others."""
    if dropped := [self._assemblies.pop(number) for number in [*numbers]]:
      self.bytes -= sum(each.size for each in dropped)
      self._wake()

  def forget(self) -> None:
    """What has begun to arrive does not go on; it may come again."""
    with self._lock:
      self._drop(self._assemblies)
      self._newest = [self._whole] * self._streams
      self._under_way = [None] * self._streams

  def arrived(self, stream: int) -> tuple[bytes, np.ndarray] | None:
    """This stream's part is here; the (header, payload) of the message if it is whole now."""
    with self._lock:
      assembly, self._under_way[stream] = self._under_way[stream], None
      if assembly is None:
        return None
      assembly.missing.discard(stream)
      if assembly.missing:
        return None
      self._whole = self._newest[stream]
      del self._assemblies[self._whole]
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
