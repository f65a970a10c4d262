"""How messages travel: the contract every transport keeps, and the in-process queues.

The contract (`tests/runtime/test_transport.py` runs it over every transport):
- `send` never blocks and never fails because of the peer; what cannot be delivered is counted.
- Control never queues behind bulk (pushes and publishes); each of the two keeps its order.
- A newer connection under the same address fences the older one.
- Malformed frames, and those in another sender's name, are dropped, counted, and change nothing.
- Payloads are passed on without a copy where possible; nobody writes into one that was sent.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ddiloco.core import messages, wire
from ddiloco.core.messages import EVALUATOR, Message

EVALUATOR_ADDRESS = "evaluator"
Spoil = Callable[[bytes], bytes]


def learner_address(learner: int) -> str:
  """Where a learner is reached; learner -1 is the evaluator."""
  return EVALUATOR_ADDRESS if learner == EVALUATOR else f"learner/{learner}"


def syncer_address(shard: int) -> str:
  """Where a syncer shard is reached."""
  return f"syncer/{shard}"


def claimed_sender(message: Message) -> str:
  """Whose message this says it is; a transport delivers only what comes from there."""
  if isinstance(message, messages.TO_SHARD):
    return learner_address(message.learner)
  return syncer_address(message.shard)


@dataclasses.dataclass
class Counters:
  """What went over an endpoint since it was opened; bytes are those of real frames."""

  sent_bytes: int = 0
  received_bytes: int = 0
  payload_bytes: int = 0  # of both together, what is fragments and not framing or control
  undelivered: int = 0  # nobody there, or its queue was full
  malformed: int = 0  # not a frame of this run, or in somebody else's name
  refused: int = 0  # connections turned away: no listed key, another run, fenced, not our protocol
  resent: int = 0  # chunks of fragments that had to be sent again


class Endpoint(Protocol):
  """One role's connection."""

  counters: Counters

  def send(self, to: str, message: Message, spoil: Spoil | None = None) -> int:
    """Queues a message; returns its size in bytes on the wire. `spoil` damages its header, as some
    wires do."""
    ...

  def receive(self, timeout_seconds: float) -> tuple[str, Message] | None:
    """The next (sender, message), control first; None after the time or a `wake`."""
    ...

  def wake(self) -> None:
    """Makes a waiting `receive` return None now."""
    ...

  def close(self) -> None:
    """Nothing is sent or received any more."""
    ...


class Inbox:
  """What has arrived at an endpoint and waits for its role: control first, each in its order.

  Args:
    run_id: of this run ...
    plan_id: ... and of what all its roles share; frames of others are malformed.
    counters: the endpoint's, counted when something is received.
    taken: called as taken(sender, bytes) when a message with payload is received.
  """

  def __init__(
    self,
    run_id: str,
    plan_id: str,
    counters: Counters,
    taken: Callable[[str, int], None] = lambda sender, size: None,
  ):
    self.bulk_bytes = 0
    self.closed = False
    self._run_id, self._plan_id = run_id, plan_id
    self._counters = counters
    self._taken = taken
    self._ready = threading.Condition()
    self._control: collections.deque = collections.deque()
    self._bulk: collections.deque = collections.deque()
    self._woken = False

  @property
  def waiting(self) -> int:
    """How many frames."""
    return len(self._control) + len(self._bulk)

  def put(self, sender: str, header: bytes, payload: messages.Payload, size: int) -> bool:
    """A frame from `sender`; False if the endpoint is closed."""
    with self._ready:
      if self.closed:
        return False
      if payload is None:
        self._control.append((sender, header, payload, size))
      else:
        self._bulk.append((sender, header, payload, size))
        self.bulk_bytes += size
      self._ready.notify()
    return True

  def receive(self, timeout_seconds: float) -> tuple[str, Message] | None:
    """As `Endpoint.receive`."""
    deadline = time.monotonic() + timeout_seconds
    while True:
      frame = self._next(deadline - time.monotonic())
      if frame is None:
        return None
      sender, header, payload, size = frame
      self._counters.received_bytes += size
      self._counters.payload_bytes += size - len(header)
      if payload is not None:
        self._taken(sender, size - len(header))
      try:
        message = wire.decode(header, payload, self._run_id, self._plan_id)
      except wire.MalformedMessage:
        self._counters.malformed += 1
        continue
      if sender == claimed_sender(message):
        return sender, message
      self._counters.malformed += 1  # speaks in somebody else's name

  def _next(self, timeout_seconds: float):
    with self._ready:
      if not (self._control or self._bulk or self._woken or self.closed) and timeout_seconds > 0:
        self._ready.wait(timeout_seconds)
      self._woken = False
      if self._control:
        return self._control.popleft()
      if self._bulk:
        frame = self._bulk.popleft()
        self.bulk_bytes -= frame[3]
        return frame
      return None

  def wake(self) -> None:
    """Makes a waiting `receive` return None now."""
    with self._ready:
      self._woken = True
      self._ready.notify_all()

  def close(self) -> None:
    """Forgets what waits; from now on nothing is received."""
    with self._ready:
      self.closed = True
      self._control.clear()
      self._bulk.clear()
      self.bulk_bytes = 0
      self._ready.notify_all()


class Hub:
  """In-process queues between the roles of one process: real frames, payloads by reference."""

  def __init__(self, run_id: str, plan_id: str, max_bulk_bytes: int = 4 << 30):
    self.run_id = run_id
    self.plan_id = plan_id
    self.max_bulk_bytes = max_bulk_bytes  # per receiver
    self._endpoints: dict[str, QueueEndpoint] = {}
    self._lock = threading.Lock()

  def connect(self, address: str) -> QueueEndpoint:
    """Opens `address`; whoever had it before is cut off."""
    endpoint = QueueEndpoint(self, address)
    with self._lock:
      old = self._endpoints.get(address)
      self._endpoints[address] = endpoint
    if old is not None:
      old.close()
    return endpoint

  def find(self, address: str) -> QueueEndpoint | None:
    """The open endpoint of an address, if any."""
    with self._lock:
      return self._endpoints.get(address)

  def remove(self, endpoint: QueueEndpoint) -> None:
    """Forgets an endpoint, unless a newer one has taken its address."""
    with self._lock:
      if self._endpoints.get(endpoint.address) is endpoint:
        del self._endpoints[endpoint.address]


class QueueEndpoint:
  """One role's end of a `Hub`."""

  def __init__(self, hub: Hub, address: str):
    self.address = address
    self.counters = Counters()
    self._hub = hub
    self._inbox = Inbox(hub.run_id, hub.plan_id, self.counters)

  def send(self, to: str, message: Message, spoil: Spoil | None = None) -> int:
    header, payload = wire.encode(message, self._hub.run_id, self._hub.plan_id)
    header = header if spoil is None else spoil(header)
    size = wire.frame_bytes(header, payload)
    if self._inbox.closed:
      return size
    self.counters.sent_bytes += size
    self.counters.payload_bytes += size - len(header)
    peer = self._hub.find(to)
    if peer is None or not peer._deliver(self.address, header, payload, size):
      self.counters.undelivered += 1
    return size

  def _deliver(self, sender: str, header: bytes, payload: messages.Payload, size: int) -> bool:
    waiting = self._inbox.bulk_bytes
    if payload is not None and waiting and waiting + size > self._hub.max_bulk_bytes:
      return False
    return self._inbox.put(sender, header, payload, size)

  def receive(self, timeout_seconds: float) -> tuple[str, Message] | None:
    return self._inbox.receive(timeout_seconds)

  def wake(self) -> None:
    self._inbox.wake()

  def close(self) -> None:
    self._inbox.close()
    self._hub.remove(self)
