"""Fragments on their way between two endpoints: split into chunks, acknowledged, put together.

No sockets and no clocks here: time arrives as a value, so every loss can be tested. A sender has at
most `window_bytes` under way and sends again what stays unanswered while nothing else comes; a
receiver hands messages on whole and in the order they were sent.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from ddiloco.network.frames import Chunk
from ddiloco.protocol.actions import smooth
from ddiloco.protocol.wire import MalformedMessage

PATIENCE_FACTOR = 8.0  # over the usual time between two answers
MAX_BACKOFF = 4  # doublings of the patience
MAX_AHEAD = 1024  # messages of a peer from the next in order on; later ones come again
MAX_HEADER_BYTES = 16 << 20  # of one peer's messages that are not taken yet


@dataclasses.dataclass
class _Transfer:
  header: bytes
  payload: memoryview
  unsent: int = 0  # offset of the first byte never sent
  missing: int = 0  # chunks not acknowledged


class Outgoing:
  """What waits for and is under way to one peer.

  Args:
    window_bytes: under way at once.
    patience_seconds: least time without any answer until what is under way is sent again.
  """

  def __init__(self, window_bytes: int, patience_seconds: float):
    self._window_bytes = window_bytes
    self._patience_seconds = patience_seconds
    self._chunk_bytes = 1 << 20
    self._transfers: dict[int, _Transfer] = {}  # in order of their number
    self._fresh: collections.deque[int] = collections.deque()  # transfers with unsent bytes
    self._again: collections.deque[tuple[int, int]] = collections.deque()
    self._under_way: dict[tuple[int, int], int] = {}  # (transfer, offset) -> bytes
    self._under_way_bytes = 0
    self._progress_at = 0.0  # last answer, or last start of sending
    self._answer_seconds = patience_seconds  # smoothed
    self._resends = 0  # in a row without an answer

  def __len__(self) -> int:
    return len(self._transfers)

  def oldest(self, next_transfer: int) -> int:
    """The oldest transfer that is not over; `next_transfer` if all are."""
    return next(iter(self._transfers), next_transfer)

  def restart(self, chunk_bytes: int) -> None:
    """The peer is (newly) known: from here on chunks have this size, what was sent goes again."""
    if chunk_bytes != self._chunk_bytes:
      self._chunk_bytes = chunk_bytes
      for number, transfer in self._transfers.items():
        transfer.unsent, transfer.missing = 0, self._count(len(transfer.payload))
        if number not in self._fresh:
          self._fresh.append(number)
      self._fresh = collections.deque(sorted(self._fresh))
      self._again.clear()
    else:
      self._again.extend(self._under_way)
    self._under_way.clear()
    self._under_way_bytes = 0

  def add(self, number: int, header: bytes, payload: memoryview) -> None:
    """Queues a message; `number` is greater than all before it."""
    self._transfers[number] = _Transfer(header, payload, 0, self._count(len(payload)))
    self._fresh.append(number)

  def _count(self, total: int) -> int:
    return max(1, -(-total // self._chunk_bytes))

  def next(self, session: bytes, now: float) -> tuple[Chunk, memoryview] | None:
    """The next chunk to send, None if there is none or the window is full."""
    if self._under_way_bytes and self._under_way_bytes + self._chunk_bytes > self._window_bytes:
      return None
    place = self._take()
    if place is None:
      return None
    number, offset = place
    transfer = self._transfers[number]
    data = transfer.payload[offset : offset + self._chunk_bytes]
    if not self._under_way:
      self._progress_at = now
    self._under_way[place] = len(data)
    self._under_way_bytes += len(data)
    return Chunk(session, number, offset, len(transfer.payload), transfer.header), data

  def _take(self) -> tuple[int, int] | None:
    while self._again:
      place = self._again.popleft()
      if place[0] in self._transfers:
        return place
    if not self._fresh:
      return None
    number = self._fresh[0]
    transfer = self._transfers[number]
    offset = transfer.unsent
    transfer.unsent += self._chunk_bytes
    if transfer.unsent >= len(transfer.payload):
      self._fresh.popleft()
    return number, offset

  def put_back(self, chunk: Chunk) -> None:
    """This chunk could not be sent now."""
    self._under_way_bytes -= self._under_way.pop((chunk.transfer, chunk.offset))
    self._again.appendleft((chunk.transfer, chunk.offset))

  def acknowledge(self, number: int, offset: int, now: float) -> int:
    """This chunk has arrived; returns the payload's bytes if that was the last of its message."""
    size = self._under_way.pop((number, offset), None)
    if size is None:
      if (number, offset) not in self._again:
        return 0  # answered before
      self._again.remove((number, offset))
      size = 0
    self._under_way_bytes -= size
    self._answer_seconds = smooth(self._answer_seconds, now - self._progress_at)
    self._progress_at, self._resends = now, 0
    transfer = self._transfers[number]
    transfer.missing -= 1
    if transfer.missing:
      return 0
    del self._transfers[number]
    return len(transfer.payload)

  def want(self, number: int, offset: int, now: float) -> None:
    """The peer had no room for this chunk, and has now: it goes again at once."""
    size = self._under_way.pop((number, offset), None)
    if size is None:
      return
    self._under_way_bytes -= size
    self._again.append((number, offset))
    self._progress_at, self._resends = now, 0

  def patience(self) -> float:
    """Seconds without an answer after which what is under way is sent again."""
    usual = max(self._patience_seconds, PATIENCE_FACTOR * self._answer_seconds)
    return usual * 2 ** min(self._resends, MAX_BACKOFF)

  def resend_overdue(self, now: float) -> int:
    """If nothing was answered for too long, all that is under way goes again; returns how much."""
    if not self._under_way or now - self._progress_at <= self.patience():
      return 0
    count = len(self._under_way)
    self._again.extend(self._under_way)
    self._under_way.clear()
    self._under_way_bytes = 0
    self._progress_at = now
    self._resends += 1
    return count

  def excuse(self, seconds: float, now: float) -> None:
    """This side itself stood still for so long, and could not see an answer."""
    self._progress_at = min(now, self._progress_at + seconds)

  def drop_all(self) -> tuple[int, int]:
    """Gives up what is not wholly acknowledged; returns how many messages and payload bytes."""
    count, size = len(self._transfers), sum(len(t.payload) for t in self._transfers.values())
    self._transfers.clear()
    self._fresh.clear()
    self._again.clear()
    self._under_way.clear()
    self._under_way_bytes = 0
    return count, size


@dataclasses.dataclass
class _Assembly:
  header: bytes
  payload: np.ndarray  # uint8 [total]
  arrived: set[int]  # offsets
  missing: int  # bytes


class Incoming:
  """What is arriving from one peer.

  Args:
    chunk_bytes: as agreed with the peer.
    expected: the first transfer that may come.
    max_payload_bytes: no payload is larger than that.
    max_bytes: of all payloads that are not taken yet; while none waits to be taken, the next
      message in order is always let in.
    check: raises `MalformedMessage` if a header may not come from this peer.
  """

  def __init__(
    self,
    chunk_bytes: int,
    expected: int,
    max_payload_bytes: int,
    max_bytes: int,
    check: Callable[[bytes], object],
  ):
    self.bytes = 0  # of payloads, allocated and not taken yet
    self.delivered = 0  # messages that are not taken yet
    self.expected = expected
    self._chunk_bytes = chunk_bytes
    self._max_payload_bytes = max_payload_bytes
    self._max_bytes = max_bytes
    self._check = check
    self._header_bytes = 0
    self._assemblies: dict[int, _Assembly] = {}
    self._complete: dict[int, tuple[bytes, np.ndarray] | None] = {}  # None: nobody wants it

  def accept(self, chunk: Chunk, data: memoryview) -> bool:
    """Takes one chunk; returns whether to acknowledge it (no room now: it comes again).

    Raises:
      MalformedMessage: it does not fit what was agreed; its transfer is dropped.
    """
    number = chunk.transfer
    if number < self.expected or number in self._complete:
      return True  # a duplicate
    if number - self.expected >= MAX_AHEAD:
      return False  # each costs memory, also one that is empty or refused
    if number not in self._assemblies and not self._begin(chunk):
      return False
    assembly = self._assemblies[number]
    size = min(self._chunk_bytes, chunk.total - chunk.offset)
    if (
      chunk.total != len(assembly.payload)
      or chunk.offset % self._chunk_bytes
      or size < 0
      or len(data) != size
    ):
      self._drop(number)
      raise MalformedMessage(
        f"{len(data)} bytes at {chunk.offset} of {chunk.total} are no chunk of {self._chunk_bytes}"
      )
    if chunk.offset in assembly.arrived:
      return True
    assembly.payload[chunk.offset : chunk.offset + size] = np.frombuffer(data, np.uint8)
    assembly.arrived.add(chunk.offset)
    assembly.missing -= size
    if not assembly.missing:
      del self._assemblies[number]
      self._complete[number] = (assembly.header, assembly.payload)
    return True

  def _begin(self, chunk: Chunk) -> bool:
    try:
      if chunk.total > self._max_payload_bytes:
        raise MalformedMessage(
          f"a payload of {chunk.total} bytes exceeds {self._max_payload_bytes}, this run's largest"
        )
      self._check(chunk.header)
    except MalformedMessage:
      self._complete[chunk.transfer] = None  # or what comes after it would wait for ever
      raise
    # What was delivered makes room when it is taken; what is ahead of its turn never does.
    if not self._room(chunk) and (self.delivered or chunk.transfer != self.expected):
      return False
    self.bytes += chunk.total
    self._header_bytes += len(chunk.header)
    empty = np.empty(chunk.total, np.uint8)
    self._assemblies[chunk.transfer] = _Assembly(chunk.header, empty, set(), chunk.total)
    return True

  def _room(self, chunk: Chunk) -> bool:
    return (
      self.delivered < MAX_AHEAD
      and self.bytes + chunk.total <= self._max_bytes
      and self._header_bytes + len(chunk.header) <= MAX_HEADER_BYTES
    )

  def _drop(self, number: int) -> None:
    assembly = self._assemblies.pop(number)
    self._forget(len(assembly.payload), len(assembly.header))
    self._complete[number] = None

  def _forget(self, payload_bytes: int, header_bytes: int) -> None:
    self.bytes -= payload_bytes
    self._header_bytes -= header_bytes

  def deliver(self) -> list[tuple[bytes, np.ndarray]]:
    """What has arrived whole and is next in order, as (header, payload)."""
    ready = []
    while self.expected in self._complete:
      message = self._complete.pop(self.expected)
      self.expected += 1
      if message is not None:
        ready.append(message)
    self.delivered += len(ready)
    return ready

  def skip_to(self, oldest: int) -> None:
    """The peer sends nothing of the transfers before `oldest` any more."""
    for number in [n for n in self._assemblies if n < oldest]:
      self._drop(number)
    for number in [n for n in self._complete if n < oldest]:
      message = self._complete.pop(number)
      if message is not None:
        self._forget(len(message[1]), len(message[0]))
    self.expected = max(self.expected, oldest)

  def taken(self, payload_bytes: int, header_bytes: int = 0) -> None:
    """The role has taken a message of this size."""
    self._forget(payload_bytes, header_bytes)
    self.delivered -= 1
