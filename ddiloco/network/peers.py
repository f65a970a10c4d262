"""The peers of a network endpoint: which are accepted, their queues, and arriving payloads.

A peer has a connection for control and some for fragments; each of the latter carries its part of
every payload, so that several cores encrypt one fragment. Queued messages outlive a connection: a
message that was being sent when the connection broke is sent again over the next one. Messages that
the kernel had taken may be lost; the protocol sends them again.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING

import numpy as np

from ddiloco.network import frames
from ddiloco.network.frames import (
  CONTROL,
  Bulk,
  Control,
  Forget,
  FrameSocket,
  Greeting,
  IoThread,
  Parcel,
)
from ddiloco.network.transport import MAX_BULK, RunIdentity, open_frame
from ddiloco.protocol.messages import WIRE_FORMAT, MalformedMessage, Payload

if TYPE_CHECKING:
  from ddiloco.network.endpoint import NetworkEndpoint

# --- Which roles are accepted: the identity of a run, and objections to a greeting

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
    return f"this is run {run.run_id!r}, not {greeting.run_id!r}"
  if greeting.plan_id != run.plan_id:
    return (
      "this run was started with other settings of model, data, inner, sync, outer, seed or"
      f" run.total_tokens ({run.plan_id} here, {greeting.plan_id} there)"
    )
  return ahead(greeting.incarnation)


def shard_objection(incarnation: int, known: int) -> str:
  """Why the greeting of a dialed shard is refused, or ""; `known`: its newest incarnation."""
  if incarnation < known:
    return f"incarnation {incarnation} is an old one, {known} was here before"
  return ahead(incarnation)


# --- One peer, and its connections

MAX_QUEUED = 1024  # messages of a kind; beyond, new ones are dropped


class Channel:
  """One of the connections to a peer, made again whenever it breaks, and its queue."""

  def __init__(self, peer: Peer, number: int):
    self.peer, self.number = peer, number
    self.wire: FrameSocket | None = None  # the connection at present
    self.ending: list[FrameSocket] = []  # those before it, until their threads close them
    # The peer's lock guards these two.
    self.waiting: collections.deque[Parcel] = collections.deque()
    self.leaving = False  # the first of `waiting` is being sent; the kernel has not all of it yet

  def attach(self, connected: socket.socket, thread: IoThread) -> FrameSocket:
    """Takes a new connection; a message that was being sent starts again from its beginning."""
    wire = FrameSocket(connected, self, thread, paced=self.number != CONTROL)
    self.hang_up()
    with self.peer.lock:
      self.wire, self.leaving = wire, False
    thread.call(thread.add, wire)
    return wire

  def detach(self) -> FrameSocket | None:
    """Gives up the connection, and returns it."""
    old, self.wire = self.wire, None
    return old

  def hang_up(self) -> None:
    """Ends the connection, soon; the next one then has room."""
    self.ending = [each for each in self.ending if each.fileno() >= 0]
    if (old := self.detach()) is not None:
      self.ending.append(old)
      old.hang_up()
      old.thread.call(self.wake)

  def wake(self) -> None:
    """Wakes the connection's thread: there is something to send, or room for a payload."""
    if (wire := self.wire) is not None:
      wire.wake()

  # --- as the owner of its connection, in that connection's thread --------------------------------

  def next(self, wire: FrameSocket) -> Parcel | None:
    """The next bytes to send; the kernel has all bytes of the parcel before."""
    with self.peer.lock:
      if self.wire is not wire:
        return None
      if self.leaving:
        self.waiting.popleft()
      self.leaving = bool(self.waiting) and self.peer.state == "up"
      return self.waiting[0] if self.leaving else None

  def room(self, wire: FrameSocket, frame: frames.Frame, size: int) -> memoryview | None:
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
      if any(each.fileno() >= 0 for each in self.ending):
        return None  # it may still write into a payload, which must not change once it is whole
      return incoming.room(self.number, frame, size)
    if isinstance(frame, Control) and self.peer.caretaker.crowded(self.peer.address):
      return None  # it is read no faster than the role takes its messages
    return frames.SCRATCH[:0]

  def arrived(self, wire: FrameSocket, frame: frames.Frame) -> None:
    """A frame has arrived, and its payload is in the memory that `room` gave."""
    peer, incoming = self.peer, self.peer.incoming  # before the check of the wire, as in `room`
    if self.wire is not wire:
      return
    peer.heard_at = time.monotonic()
    if isinstance(frame, Bulk):
      incoming.arrived(self.number, frame.number)
    else:
      peer.caretaker.on_frame(peer, frame)

  def lost(self, wire: FrameSocket, reason: str) -> None:
    """The connection has broken, or the far end has closed it."""
    self.peer.caretaker.control_thread.call(self.peer.caretaker.on_lost, self, wire, reason)


class Peer:
  """One peer. `state` is connecting, up or refused; `reason` says why in plain words.

  Args:
    address: of the peer.
    streams: connections for fragments.
    caretaker: the endpoint that it belongs to.
    url: where we dial it; "": it has dialed us.
    key: of its connections; b"": not known yet, or the run has no keys.
  """

  def __init__(
    self,
    address: str,
    streams: int,
    caretaker: NetworkEndpoint,
    url: str = "",
    key: bytes = b"",
  ):
    self.address, self.caretaker = address, caretaker
    self.url, self.key = url, key
    self.incarnation, self.session = -1, b""
    self.state, self.reason = "connecting", "not reached yet"
    self.heard_at = time.monotonic()  # at first, when this peer was created
    self.beat_at = 0.0
    self.attempts = 0  # to dial, without success, in a row
    self.lock = threading.RLock()
    self.control = Channel(self, CONTROL)
    self.bulk = [Channel(self, number) for number in range(streams)]
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
        if queued and queued + len(data) > self.caretaker.run.queue_bytes:
          return False
        frame = Bulk(next(self.caretaker.numbers), len(data), header)
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
      self.caretaker.counters.undelivered += count
      for channel in self.channels if control else self.bulk:
        channel.waiting.clear()
        channel.leaving = False

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
    self.control.wake()
    self.wake_bulk()

  def forget(self) -> None:
    """Drops all messages that are arriving; they may be sent again."""
    self.incoming = Incoming(self, self.incarnation)

  def hang_up(self) -> None:
    """Ends all connections to the peer."""
    for channel in self.channels:
      channel.hang_up()


# --- Arriving payloads

LEAST_KEPT_BYTES = 1 << 20  # smaller blocks are allocated fresh
KEPT_SECONDS = 3.0  # pushes of a round come together; between rounds the memory is given back


class BufferPool:
  """Memory for arriving payloads. Blocks without a reference left are used again: the first touch
  of fresh memory may take longer than receiving the payload.

  Attributes:
    free: (since when, memory) of blocks without a reference left.
  """

  def __init__(self) -> None:
    self.free: list[tuple[float, np.ndarray]] = []
    self._lock = threading.Lock()

  def take(self, size: int) -> np.ndarray:
    """A uint8 [size], of any content; its memory is free again when no view of it is left."""
    if size < LEAST_KEPT_BYTES:
      return np.empty(size, np.uint8)
    with self._lock:
      fits = [n for n, (_, each) in enumerate(self.free) if size <= len(each) <= 2 * size]
      # The newest: the processor's caches may still have it, and the others' time runs out.
      memory = self.free.pop(fits[-1])[1] if fits else np.empty(size, np.uint8)
    holder = (ctypes.c_uint8 * len(memory)).from_buffer(memory)  # all views hold it
    weakref.finalize(holder, self._give_back, memory).atexit = False
    return np.frombuffer(holder, np.uint8)[:size]

  def _give_back(self, memory: np.ndarray) -> None:
    """Takes no lock: the last view may go at any moment, also while this thread has the lock."""
    self.free.append((time.monotonic(), memory))

  def release(self, now: float) -> None:
    """Gives blocks that were not used for a while back to the system."""
    with self._lock:
      self.free = [each for each in self.free if now - each[0] < KEPT_SECONDS]


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

  def __init__(self, peer: Peer, incarnation: int):
    self._peer, self._incarnation = peer, incarnation
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
    self._begun, most = frame.number, self._peer.caretaker.run.max_payload_bytes
    if frame.total > most:
      raise MalformedMessage(f"a payload of {frame.total} bytes exceeds {most}, this run's largest")
    self._check(frame.header)
    payload = self._peer.caretaker.buffers.take(frame.total)
    assembly = _Assembly(frame.header, payload, set(range(self._streams)))
    self._assemblies[frame.number] = assembly
    return assembly

  def _check(self, header: bytes) -> None:
    open_frame(self._peer.address, self._incarnation, header, b"")

  def _has_room(self, frame: Bulk) -> bool:
    count, size = self._peer.caretaker.waiting_bulk(self._peer.address)
    count += len(self._assemblies)
    size += sum(each.size for each in self._assemblies.values())
    size += len(frame.header) + frame.total
    return not count or (count < MAX_BULK and size <= self._peer.caretaker.run.queue_bytes)

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
        self._peer.caretaker.put(self._peer.address, *message, self._incarnation)
        del self._assemblies[number]  # not before: each message counts all the time
