"""How messages travel: the contract every transport keeps, and the in-process queues.

The contract (`tests/network/test_transport.py` runs it over every transport):
- `send` never blocks and never fails because of the peer; what cannot be delivered is counted.
- Control never queues behind bulk (pushes and publishes); each of the two keeps its order.
- Messages of one peer do not hold up those of another. They wait within bounds; the excess is
  dropped and counted.
- A newer connection under the same address fences the older one.
- Malformed frames, and those in another sender's name, are dropped, counted, and change nothing.
- Payloads are passed on without a copy where possible; a sent payload is never written to.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from ddiloco.protocol import messages
from ddiloco.protocol.messages import EVALUATOR, Message

EVALUATOR_ADDRESS = "evaluator"
MAX_CONTROL = 256  # messages that wait from one sender, the newest ones
MAX_CONTROL_BYTES = 4 << 20  # of them
MAX_BULK = 1024  # messages that wait from one sender, the oldest ones
BULK_AFTER = 64  # messages of control in a row while bulk waits
Spoil = Callable[[bytes], bytes]


class Delivery(NamedTuple):
  """A message as its role receives it."""

  sender: str
  message: Message
  at: float  # time.monotonic() when it arrived here, however long it has waited since


def learner_address(learner: int) -> str:
  """Where a learner is reached; learner -1 is the evaluator."""
  return EVALUATOR_ADDRESS if learner == EVALUATOR else f"learner-{learner}"


def syncer_address(shard: int) -> str:
  """Where a syncer shard is reached."""
  return f"syncer-{shard}"


def claimed_sender(message: Message) -> str:
  """Whose message this says it is; a transport delivers only what comes from there."""
  if isinstance(message, messages.TO_SHARD):
    return learner_address(message.learner)
  return syncer_address(message.shard)


def open_frame(
  run: tuple[str, str],
  sender: str,
  incarnation: int | None,
  header: bytes,
  payload: messages.Payload,
) -> Message:
  """The message in a frame that came from this incarnation of `sender` (None: any).

  Raises:
    MalformedMessage: it is of another run (run id, plan id), or in another sender's name.
  """
  message = messages.decode(header, payload, *run)
  if claimed_sender(message) != sender:
    raise messages.MalformedMessage(f"{sender} speaks as {claimed_sender(message)}")
  if incarnation not in (None, message.incarnation):
    raise messages.MalformedMessage(
      f"{sender} has greeted as incarnation {incarnation} and speaks as {message.incarnation}"
    )
  return message


@dataclasses.dataclass
class Counters:
  """What went over an endpoint since it was opened; bytes are those of real frames."""

  sent_bytes: int = 0
  received_bytes: int = 0
  payload_bytes: int = 0  # of both together, what is fragments and not framing or control
  undelivered: int = 0  # no receiver there, or its queue was full
  malformed: int = 0  # not a frame of this run, or in another sender's name
  overflowed: int = 0  # arrived while too much of the same sender was waiting
  refused: int = 0  # connections turned away: no listed key, another run, fenced, not our protocol


class Endpoint(Protocol):
  """One role's connection."""

  counters: Counters

  def send(self, to: str, message: Message, spoil: Spoil | None = None) -> int:
    """Queues a message; returns its size in bytes on the wire. `spoil` damages its header, as some
    wires do."""
    ...

  def receive(self, timeout_seconds: float) -> Delivery | None:
    """The next message, control first; None after the time or a `wake`."""
    ...

  @property
  def waiting(self) -> int:
    """How many messages have arrived and are not received yet, about."""
    ...

  def unsent(self, peer: str) -> int:
    """Bytes of payloads for this peer that have not left yet: none of them is lost."""
    ...

  def wake(self) -> None:
    """Makes a waiting `receive` return None now."""
    ...

  def close(self) -> None:
    """Nothing is sent or received any more."""
    ...


class _Frame(NamedTuple):
  """What has arrived and waits."""

  header: bytes
  payload: messages.Payload
  size: int
  at: float  # when it arrived
  incarnation: int | None  # of its sender, as in its greeting
  taken: Callable[[], None]
  is_report: bool


class _Line(collections.OrderedDict[str, collections.deque[_Frame]]):
  """What waits of one kind, by sender in the order of their turns: a bounded queue for each."""

  def __init__(self, max_frames: int, max_bytes: float, drop_oldest: bool):
    super().__init__()
    self._max_frames, self._max_bytes = max_frames, max_bytes  # of one sender
    self._drop_oldest = drop_oldest

  def put(self, sender: str, frame: _Frame) -> int:
    """A frame at the end of its sender's queue; returns how many that are too much were dropped:
    the oldest, or this one."""
    queue = self.setdefault(sender, collections.deque())
    if frame.is_report and (older := [each for each in queue if each.is_report]):
      queue.remove(older[0])
    dropped, most = 0, self._max_bytes - frame.size
    while queue and (len(queue) >= self._max_frames or _bytes(queue) > most):
      dropped += 1
      if not self._drop_oldest:
        return dropped
      queue.popleft()
    queue.append(frame)
    return dropped

  def crowded(self, sender: str) -> bool:
    """Whether half of a sender's room is taken."""
    queue = self.get(sender, ())
    return 2 * len(queue) >= self._max_frames or 2 * _bytes(queue) >= self._max_bytes

  def take(self) -> tuple[str, _Frame]:
    """The oldest frame of the sender whose turn it is; there must be one."""
    sender, queue = self.popitem(last=False)
    frame = queue.popleft()
    if queue:
      self[sender] = queue
    return sender, frame


def _bytes(frames: Iterable[_Frame]) -> int:
  return sum(frame.size for frame in frames)


class InboxEndpoint:
  """What all endpoints do alike: they count what is sent, and what arrives waits for the role.

  Every sender has a bounded queue of its own, and they take turns: a sender that never stops
  fills its own queue and costs each of the others one turn. Control goes before bulk, but one bulk
  message after `BULK_AFTER` of control: a flood of control must not hold up pushes for ever.
  Of a learner's reports only the newest waits; it says all that those before it said.

  Args:
    address: of this role.
    run_id: of this run ...
    plan_id: ... and of what all its roles share; frames of others are malformed.
    max_bulk_bytes: of bulk that waits from one sender; one message is let in always.
  """

  def __init__(self, address: str, run_id: str, plan_id: str, max_bulk_bytes: float = math.inf):
    self.address = address
    self.counters = Counters()
    self._ids = run_id, plan_id
    self._report = messages.report_start(run_id, plan_id)
    self._ready = threading.Condition()
    self._waiting_control = _Line(MAX_CONTROL, MAX_CONTROL_BYTES, drop_oldest=True)
    self._waiting_bulk = _Line(MAX_BULK, max_bulk_bytes, drop_oldest=False)
    self._in_a_row = 0  # of control, while bulk waited
    self._woken = self._closed = False

  def send(self, to: str, message: Message, spoil: Spoil | None = None) -> int:
    header, payload = messages.encode(message, *self._ids)
    header = header if spoil is None else spoil(header)
    size = messages.frame_bytes(header, payload)
    if not self._closed:
      self.counters.sent_bytes += size
      self.counters.payload_bytes += size - len(header)
      self.counters.undelivered += self._post(to, header, payload)
    return size

  def _post(self, to: str, header: bytes, payload: messages.Payload) -> int:
    """Brings a message on its way; returns how many could not be, or had to go for it."""
    raise NotImplementedError

  def _dropped(self, sender: str, reason: str) -> None:
    """A message of this sender was dropped here."""

  def put(
    self,
    sender: str,
    header: bytes,
    payload: messages.Payload,
    incarnation: int | None = None,
    taken: Callable[[], None] = lambda: None,
  ) -> bool:
    """A frame from this incarnation of `sender`, None: any; False if it was not let in.

    Of control that is too much the oldest goes, and of bulk what comes last: its sender waits.
    `taken` is called when the role takes a message with payload, from the role's thread.
    """
    size, at = messages.frame_bytes(header, payload), time.monotonic()
    is_report = payload is None and header.startswith(self._report)
    frame = _Frame(header, payload, size, at, incarnation, taken, is_report)
    with self._ready:
      if self._closed:
        return False
      self.counters.received_bytes += size
      line = self._waiting_control if payload is None else self._waiting_bulk
      dropped = line.put(sender, frame)
      self.counters.overflowed += dropped
      self._ready.notify()
    if dropped:
      self._dropped(sender, "too many of its messages wait here")
    return payload is None or not dropped

  def _crowded(self, sender: str) -> bool:
    """Whether so much control of this sender waits that it should be held back."""
    with self._ready:
      return self._waiting_control.crowded(sender)

  def receive(self, timeout_seconds: float) -> Delivery | None:
    deadline = time.monotonic() + timeout_seconds
    for _ in range(MAX_BULK):  # a flood of what is no message must not keep the role for ever
      taken = self._next(deadline - time.monotonic())
      if taken is None:
        return None
      sender, frame = taken
      if frame.payload is not None:
        self.counters.payload_bytes += frame.size - len(frame.header)
        frame.taken()
      try:
        message = open_frame(self._ids, sender, frame.incarnation, frame.header, frame.payload)
      except messages.MalformedMessage as error:
        self.counters.malformed += 1
        self._dropped(sender, str(error))
        continue
      return Delivery(sender, message, frame.at)
    return None

  def _next(self, timeout_seconds: float) -> tuple[str, _Frame] | None:
    with self._ready:
      control, bulk = self._waiting_control, self._waiting_bulk
      if not (control or bulk or self._woken or self._closed):
        self._ready.wait(max(0.0, timeout_seconds))
      self._woken = False
      if control and not (bulk and self._in_a_row >= BULK_AFTER):
        self._in_a_row += bool(bulk)
        return control.take()
      self._in_a_row = 0
      return bulk.take() if bulk else None

  @property
  def waiting(self) -> int:
    with self._ready:
      lines = self._waiting_control, self._waiting_bulk
      return sum(len(queue) for line in lines for queue in line.values())

  def wake(self) -> None:
    with self._ready:
      self._woken = True
      self._ready.notify_all()

  def _shut(self) -> None:
    """Forgets what waits; from now on nothing is sent and nothing is received."""
    with self._ready:
      self._closed = True
      self._waiting_control.clear()
      self._waiting_bulk.clear()
      self._ready.notify_all()


class Hub:
  """In-process queues between the roles of one process: real frames, payloads by reference."""

  def __init__(self, run_id: str, plan_id: str, max_bulk_bytes: int = 4 << 30):
    self.run_id = run_id
    self.plan_id = plan_id
    self.max_bulk_bytes = max_bulk_bytes  # per sender and receiver
    self._endpoints: dict[str, QueueEndpoint] = {}
    self._lock = threading.Lock()

  def connect(self, address: str) -> QueueEndpoint:
    """Opens `address`; an endpoint that had it before is cut off."""
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


class QueueEndpoint(InboxEndpoint):
  """One role's end of a `Hub`."""

  def __init__(self, hub: Hub, address: str):
    super().__init__(address, hub.run_id, hub.plan_id, hub.max_bulk_bytes)
    self._hub = hub

  def _post(self, to: str, header: bytes, payload: messages.Payload) -> int:
    peer = self._hub.find(to)
    return int(peer is None or not peer.put(self.address, header, payload))

  def unsent(self, peer: str) -> int:
    return 0

  def close(self) -> None:
    self._shut()
    self._hub.remove(self)
