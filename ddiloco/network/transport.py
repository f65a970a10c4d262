"""How messages travel: the rules that every transport keeps, and the in-process queues.

The rules (`tests/network/test_transport.py` tests them with every transport):
- `send` never blocks and never fails because of the peer; undeliverable messages are counted.
- Control messages never queue behind bulk (messages with a payload); each of the two keeps its
  order.
- Messages of one peer do not hold up those of another. Queues are bounded; messages beyond the
  bound are dropped and counted.
- A newer connection under the same address fences the older one.
- Malformed frames, and frames in another sender's name, are dropped and counted, without effect.
  The receiver says so: the sender need not be honest, or there.
- Payloads are passed on without a copy where possible; a sent payload is never written to.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from ddiloco.protocol import messages
from ddiloco.protocol.messages import EVALUATOR, Message

EVALUATOR_ADDRESS = "evaluator"
MAX_CONTROL = 256  # messages queued from one sender; beyond, new ones are dropped
MAX_CONTROL_BYTES = 2 << 20  # of these messages, as they come; decoded they may have ten times that
MAX_BULK = 1024  # messages queued from one sender
BULK_AFTER = 64  # control messages in a row while bulk waits
Spoil = Callable[[bytes], bytes]
Post = Callable[[bytes, messages.Payload], bool]  # queues a message; whether there is room


class Delivery(NamedTuple):
  """A message as its role receives it."""

  sender: str
  message: Message
  at: float  # time.monotonic() when it arrived here; it may have waited since
  size: int = 0  # in bytes on the wire


def learner_address(learner: int) -> str:
  """The address of a learner; learner -1 is the evaluator."""
  return EVALUATOR_ADDRESS if learner == EVALUATOR else f"learner-{learner}"


def syncer_address(shard: int) -> str:
  """The address of a syncer shard."""
  return f"syncer-{shard}"


def claimed_sender(message: Message) -> str:
  """The sender that a message names; a transport delivers it only if it comes from there."""
  if isinstance(message, messages.ToShard):
    return learner_address(message.learner)
  return syncer_address(message.shard)


@dataclasses.dataclass(frozen=True)
class RunIdentity:
  """What a transport must know of its run; the same on every role. Roles of another are refused."""

  run_id: str
  plan_id: str  # the contract: a digest of the settings that all roles must share
  max_payload_bytes: int  # of one message
  queue_bytes: int  # of fragments queued for, or from, one peer


def open_frame(
  sender: str,
  incarnation: int | None,
  header: bytes,
  payload: messages.Payload,
) -> Message:
  """The message in a frame that came from this incarnation of `sender` (None: any).

  Raises:
    MalformedMessage: it is no message, or in another sender's name.
  """
  message = messages.decode(header, payload)
  if claimed_sender(message) != sender:
    raise messages.MalformedMessage(f"{sender} speaks as {claimed_sender(message)}")
  if incarnation not in (None, message.incarnation):
    raise messages.MalformedMessage(
      f"{sender} has greeted as incarnation {incarnation} and speaks as {message.incarnation}"
    )
  return message


@dataclasses.dataclass
class Counters:
  """Traffic of an endpoint since it was opened; bytes are those of real frames."""

  sent_bytes: int = 0
  received_bytes: int = 0
  payload_bytes: int = 0  # the payloads' part of both together
  undelivered: int = 0  # no receiver there, or its queue was full
  malformed: int = 0  # no message, or in another sender's name
  overflowed: int = 0  # dropped because the same sender's queue was full
  refused: int = 0  # connections turned away: no listed key, another run, fenced, not our protocol


class _Queues(collections.OrderedDict[str, collections.deque[Delivery]]):
  """Waiting messages of one kind: a bounded queue for each sender, in the order of their turns."""

  def __init__(self, max_messages: int, max_bytes: int):
    super().__init__()
    self._max_messages, self._max_bytes = max_messages, max_bytes  # of one sender

  def put(self, new: Delivery) -> bool:
    """Appends a message to its sender's queue if there is room; whether there is."""
    before: Collection[Delivery] = self.get(new.sender, ())
    if isinstance(new.message, messages.Report):
      before = [each for each in before if not isinstance(each.message, messages.Report)]
    size = new.size + sum(each.size for each in before)
    if before and (len(before) >= self._max_messages or size > self._max_bytes):
      return False
    self[new.sender] = collections.deque([*before, new])
    return True

  def of(self, sender: str) -> tuple[int, int]:
    """(number, bytes) of the messages that wait from this sender."""
    queue = self.get(sender, ())
    return len(queue), sum(each.size for each in queue)

  def take(self) -> Delivery:
    """The oldest message of the sender whose turn it is; there must be one."""
    sender, queue = self.popitem(last=False)
    delivery = queue.popleft()
    if queue:
      self[sender] = queue
    return delivery


class Endpoint:
  """One role's connection: counters, and the queues of arrived messages.

  Every sender has a bounded queue of its own, and the queues take turns: a sender that never stops
  fills its own queue and costs each of the others one turn. Control goes before bulk, but after
  `BULK_AFTER` control messages one bulk message has its turn: a flood of control must not hold up
  pushes forever. Of a learner's reports only the newest is kept; it has all that earlier ones had.

  Args:
    address: of this role.
    queue_bytes: of the bulk messages queued from one sender; a single one is let in whatever its
      size.

  Attributes:
    drops: sender -> how many of its messages were dropped here, and why the newest one.
  """

  def __init__(self, address: str, queue_bytes: int):
    self.address = address
    self.counters, self.drops = Counters(), dict[str, tuple[int, str]]()
    self._ready = threading.Condition()
    self._waiting_control = _Queues(MAX_CONTROL, MAX_CONTROL_BYTES)
    self._waiting_bulk = _Queues(MAX_BULK, queue_bytes)
    self._in_a_row = 0  # of control, while bulk waited
    self._woken = self._closed = False

  def send(self, to: str, message: Message, spoil: Spoil | None = None) -> int:
    """Queues a message; returns its size in bytes on the wire. `spoil` damages its header, for a
    planned fault."""
    header, payload = messages.encode(message)
    header = header if spoil is None else spoil(header)
    size = messages.frame_bytes(header, payload)
    if not self._closed:
      self.counters.sent_bytes += size
      self.counters.payload_bytes += size - len(header)
      post = self._way(to)
      # Before the count is read: other threads may change it during the call.
      posted = post is not None and post(header, payload)
      self.counters.undelivered += not posted
    return size

  def _way(self, to: str) -> Post | None:
    """What takes messages for this address; None: they are dropped."""
    raise NotImplementedError

  def unsent(self, peer: str) -> int:
    """Bytes of payloads for this peer that are still queued here, and so cannot be lost."""
    return 0

  def _dropped(self, sender: str, reason: str) -> None:
    """A message of this sender was dropped here."""
    with self._ready:
      self.drops[sender] = self.drops.get(sender, (0, ""))[0] + 1, reason

  def on_malformed(self, sender: str, reason: str) -> None:
    """Data of this sender was dropped here: no message, or one in another sender's name."""
    self.counters.malformed += 1
    self._dropped(sender, reason)

  def _taken(self, sender: str) -> None:
    """The role has taken a message with payload of this sender: there is room for more."""

  def put(
    self,
    sender: str,
    header: bytes,
    payload: messages.Payload,
    incarnation: int | None = None,
  ) -> bool:
    """Queues the message in a frame from this incarnation of `sender` (None: any); drops it if it
    is malformed or there is no room. Returns whether there was room."""
    size = messages.frame_bytes(header, payload)
    self.counters.received_bytes += size
    try:
      message = open_frame(sender, incarnation, header, payload)
    except messages.MalformedMessage as error:
      self.on_malformed(sender, str(error))
      return True
    with self._ready:
      if self._closed:
        return False
      line = self._waiting_control if payload is None else self._waiting_bulk
      has_room = line.put(Delivery(sender, message, time.monotonic(), size))
      self.counters.overflowed += not has_room
      self._ready.notify()
    if not has_room:
      self._dropped(sender, "too many of its messages wait here")
    return has_room

  def crowded(self, sender: str) -> bool:
    """Whether so much control of this sender is queued that the sender should be held back."""
    with self._ready:
      count, size = self._waiting_control.of(sender)
    return 2 * count >= MAX_CONTROL or 2 * size >= MAX_CONTROL_BYTES

  def waiting_bulk(self, sender: str) -> tuple[int, int]:
    """(number, bytes) of the messages with payload that wait here from this sender."""
    with self._ready:
      return self._waiting_bulk.of(sender)

  def receive(self, timeout_seconds: float) -> Delivery | None:
    """The next message, control first; None after the timeout or a `wake`."""
    with self._ready:
      control, bulk = self._waiting_control, self._waiting_bulk
      if not (control or bulk or self._woken or self._closed):
        self._ready.wait(max(0.0, timeout_seconds))
      self._woken = False
      if control and not (bulk and self._in_a_row >= BULK_AFTER):
        self._in_a_row += bool(bulk)
        return control.take()
      self._in_a_row = 0
      if not bulk:
        return None
      taken = bulk.take()
    self.counters.payload_bytes += memoryview(taken.message.payload).nbytes
    self._taken(taken.sender)
    return taken

  @property
  def waiting(self) -> int:
    """About how many messages have arrived and are not received yet."""
    with self._ready:
      lines = self._waiting_control, self._waiting_bulk
      return sum(len(queue) for line in lines for queue in line.values())

  def wake(self) -> None:
    """Makes a waiting `receive` return None now."""
    with self._ready:
      self._woken = True
      self._ready.notify_all()

  def close(self) -> None:
    """Ends sending and receiving; what is queued here is dropped."""
    with self._ready:
      self._closed = True
      self._waiting_control.clear()
      self._waiting_bulk.clear()
      self._ready.notify_all()


class Hub:
  """In-process queues between the roles of one process: real frames, payloads by reference.

  Args:
    max_bulk_bytes: queued from one sender at one receiver.
  """

  def __init__(self, max_bulk_bytes: int = 4 << 30):
    self.max_bulk_bytes = max_bulk_bytes
    self.endpoints: dict[str, QueueEndpoint] = {}  # the newest of each address; it may be closed
    self._lock = threading.Lock()

  def connect(self, address: str) -> QueueEndpoint:
    """Opens `address`; closes the endpoint that had it before."""
    endpoint = QueueEndpoint(self, address)
    with self._lock:
      old, self.endpoints[address] = self.endpoints.get(address), endpoint
    if old is not None:
      old.close()
    return endpoint


class QueueEndpoint(Endpoint):
  """One role's end of a `Hub`."""

  def __init__(self, hub: Hub, address: str):
    super().__init__(address, hub.max_bulk_bytes)
    self._hub = hub

  def _way(self, to: str) -> Post | None:
    peer = self._hub.endpoints.get(to)
    return None if peer is None else functools.partial(peer.put, self.address)
