"""The far ends of a network endpoint: who they are, how they are reached, what is under way.

A peer is either dialed (a syncer shard: sockets of our own) or accepted (it dialed us: it is behind
our listening sockets). Only the endpoint's network thread touches a peer, except for
`queued_bytes`, which has the endpoint's lock.
"""

from __future__ import annotations

import collections
import functools
import time

import zmq

from ddiloco.config import NetworkConfig
from ddiloco.network import frames
from ddiloco.network.frames import Beat, Chunk, Control, Dropped, Greeting
from ddiloco.network.handshake import RunIdentity, check_header, control_route, stream_route
from ddiloco.network.sockets import BROKEN, BULK, CONTROL, Sockets, send
from ddiloco.network.transfers import MAX_AHEAD, Incoming, Outgoing
from ddiloco.protocol.wire import MalformedMessage

MAX_HELLO_DOUBLINGS = 4
MAX_WAITING_CONTROL = 1024  # messages for a peer that is not reached yet; the oldest go first
MAX_ANSWERS = 1 << 14  # chunks to acknowledge; those beyond come again
ANSWERS_A_FRAME = 512
CHUNKS_A_TURN = 4  # then somebody else may send
MAX_REASON = 300  # characters
STREAM_BEAT_SECONDS = 5.0  # connections for fragments show whose they are, also when idle


class Peer:
  """One far end. `state` is connecting, up or refused; `reason` says why in plain words."""

  def __init__(self, address: str, settings: NetworkConfig):
    self.address = address
    self.incarnation = -1
    self.session = b""
    self.state, self.reason = "connecting", "not reached yet"
    self.heard_at = time.monotonic()  # or when we first wanted to hear it
    self.beat_at = 0.0
    self.queued_bytes = 0  # payloads from `send` until wholly acknowledged; under the lock
    self.next_transfer = 0
    self.outgoing = Outgoing(settings.window_bytes, settings.patience_seconds)
    self.incoming: Incoming | None = None
    self.waiting: collections.deque[bytes] = collections.deque()  # control headers
    self.answers: list[tuple[int, int]] = []  # chunks to acknowledge: transfer and offset
    self._refused: dict[int, set[int]] = {}  # chunks without room here: transfer to offsets
    self.streams: list = []  # connections for chunks: sockets, or routing ids behind our own
    self.drops = (0, "")  # messages of ours that the peer says it has dropped, and why
    self._untold = (0, "")  # messages of the peer that we have dropped and not said so yet
    self._turn = 0  # the stream used last

  # --- sending, on the network thread -------------------------------------------------------------

  def put(self, data: bytes) -> bool:
    """Sends one control frame now; False if there is no connection."""
    raise NotImplementedError

  def put_chunk(self, header: bytes, data: memoryview) -> bool:
    """Sends one chunk now over any of the streams, in turn; False if none is connected."""
    for _ in self.streams:
      self._turn = (self._turn + 1) % len(self.streams)
      if self.put_on(self._turn, header, data):
        return True
    return False

  def put_on(self, stream: int, header: bytes, data: memoryview) -> bool:
    """Sends one chunk now over this stream; False if it is not connected."""
    raise NotImplementedError

  def send_control(self, header: bytes) -> int:
    """Sends a message, or keeps it until there is a connection; returns how many were dropped."""
    self.waiting.append(header)
    self.flush_control()
    if len(self.waiting) <= MAX_WAITING_CONTROL:
      return 0
    self.waiting.popleft()
    return 1

  def flush_control(self) -> None:
    """Sends what waits, in order, as far as it goes."""
    while self.state == "up" and self.waiting:
      if not self.put(frames.encode(Control(self.waiting[0]))):
        return
      self.waiting.popleft()

  def send_bulk(self, header: bytes, payload: memoryview) -> None:
    """Queues a message with payload."""
    self.outgoing.add(self.next_transfer, header, payload)
    self.next_transfer += 1

  def pump_chunks(self, session: bytes, now: float) -> bool:
    """Sends chunks as the window allows; returns whether there may be more at once."""
    if self.state != "up":
      return False
    for _ in range(CHUNKS_A_TURN):
      item = self.outgoing.next(session, now)
      if item is None:
        return False
      chunk, data = item
      if not self.put_chunk(frames.encode(chunk), data):
        self.outgoing.put_back(chunk)
        return False
    return True

  def beat(self, now: float, seconds: float) -> None:
    """A sign of life if it is time for one, and what of the peer's was dropped."""
    if self.state != "up" or now - self.beat_at < seconds:
      return
    self.beat_at = now
    self.put(frames.encode(Beat()))
    if self._untold[0] and self.put(frames.encode(Dropped(*self._untold))):
      self._untold = (0, "")

  def count_dropped(self, reason: str) -> None:
    """A message of this peer was dropped here, and it is to hear of it."""
    self._untold = (self._untold[0] + 1, reason[:MAX_REASON])

  def excuse(self, seconds: float, now: float) -> None:
    """This process itself stood still for so long: that is no silence of the peer's."""
    self.heard_at = min(now, self.heard_at + seconds)
    self.outgoing.excuse(seconds, now)

  def drop_queue(self, control: bool) -> tuple[int, int]:
    """Gives up the fragments for this peer, and control if asked to.

    Returns how many messages that were, and the bytes of their payloads.
    """
    count, size = self.outgoing.drop_all()
    if control:
      count += len(self.waiting)
      self.waiting.clear()
    return count, size

  # --- receiving ----------------------------------------------------------------------------------

  def meet(self, greeting: Greeting, run: RunIdentity, chunk_bytes: int) -> None:
    """From now on this is who the peer is; what was under way to it goes again if need be."""
    if self.incoming is None or self.session != greeting.session:
      check = functools.partial(check_header, run, self.address, greeting.incarnation)
      self.incoming = Incoming(
        chunk_bytes, greeting.oldest, run.max_payload_bytes, run.queue_bytes, check
      )
      self.answers.clear()
      self._refused.clear()
    else:
      self.incoming.skip_to(greeting.oldest)
    self.incarnation, self.session = greeting.incarnation, greeting.session
    self.state, self.reason, self.heard_at = "up", "", time.monotonic()
    self.outgoing.restart(chunk_bytes)

  def accept_chunk(self, chunk: Chunk, data: memoryview) -> list:
    """Takes a chunk; returns the messages that are whole now, as (header, payload).

    Raises:
      MalformedMessage: it does not fit; it is answered all the same, or it would come again.
    """
    if self.incoming is None or chunk.session != self.session:
      return []  # of a session that is over
    try:
      accepted = self.incoming.accept(chunk, data)
    except MalformedMessage as error:
      if len(self.answers) < MAX_ANSWERS:
        self.answers.append((chunk.transfer, chunk.offset))
      self.count_dropped(str(error))
      raise
    if not accepted:
      self._refuse(chunk)
    elif len(self.answers) < MAX_ANSWERS:
      self.answers.append((chunk.transfer, chunk.offset))
    return self.incoming.deliver()

  def _refuse(self, chunk: Chunk) -> None:
    """It is asked for as soon as there is room; what is forgotten here comes again later."""
    if chunk.transfer in self._refused or len(self._refused) < MAX_AHEAD:
      offsets = self._refused.setdefault(chunk.transfer, set())
      if len(offsets) < MAX_ANSWERS:
        offsets.add(chunk.offset)

  def taken(self, incoming: Incoming, payload_bytes: int, header_bytes: int) -> None:
    """The role has taken one of the peer's messages: the next that had no room may come."""
    incoming.taken(payload_bytes, header_bytes)
    if incoming is not self.incoming:
      return  # of a session that is over
    self._refused = {n: each for n, each in self._refused.items() if n >= incoming.expected}
    if self._refused:
      number = min(self._refused)
      chunks = [(number, offset) for offset in sorted(self._refused.pop(number))]
      self.put(frames.encode(frames.Wanted(tuple(chunks))))

  def flush_answers(self) -> None:
    """Acknowledges what has arrived."""
    while self.answers:
      if not self.put(frames.encode(frames.Acknowledged(tuple(self.answers[:ANSWERS_A_FRAME])))):
        return  # as soon as there is room, or a connection
      del self.answers[:ANSWERS_A_FRAME]


class Dialed(Peer):
  """A shard that we connect to: one socket for control, several for fragments."""

  def __init__(self, address: str, url: str, settings: NetworkConfig):
    super().__init__(address, settings)
    self.url = url
    self.attempts = 0  # greetings in a row that nobody answered
    self.next_hello_at = 0.0
    self._renewed = 0  # attempts when the sockets were opened
    self.give_up_at = self.heard_at + settings.hello_seconds  # waiting for the connection itself
    self.control: zmq.Socket | None = None
    self.monitor: zmq.Socket | None = None
    self._streams_beat_at = 0.0

  def sockets(self) -> list[zmq.Socket]:
    return [*([self.control] if self.control else []), *self.streams]

  def close(self, linger_ms: int = 0) -> None:
    if self.control is not None and self.monitor is not None:
      self.control.disable_monitor()
      self.monitor.close(0)
    for socket in self.sockets():
      socket.close(linger_ms)
    self.control, self.monitor, self.streams = None, None, []

  def open(self, sockets: Sockets, session: bytes, streams: int) -> None:
    """Connects; does not wait for it.

    Raises:
      zmq.ZMQError: there are no descriptors left; `close` gives back those that were taken.
      ConfigError: the shard's key cannot be read now.
    """
    self.control = sockets.dial(self.url, CONTROL, control_route(session), self.address)
    self.monitor = self.control.get_monitor_socket(BROKEN)
    for k in range(streams):
      self.streams.append(sockets.dial(self.url, BULK, stream_route(session, k), self.address))

  def put(self, data: bytes) -> bool:
    return self.control is not None and send(self.control, data)

  def put_on(self, stream: int, header: bytes, data: memoryview) -> bool:
    return send(self.streams[stream], header, data)

  def beat_streams(self, now: float) -> None:
    """A sign of life over connections for fragments, idle or not: it shows there whose they are."""
    if self.state == "up" and now - self._streams_beat_at >= STREAM_BEAT_SECONDS:
      self._streams_beat_at = now
      for socket in self.streams:
        send(socket, frames.encode(Beat()))

  def greet_again(self, reason: str) -> None:
    """It is greeted at once; until it has answered nothing goes there."""
    self.state, self.reason = "connecting", reason
    self.attempts, self.next_hello_at = 0, 0.0

  def greet_if_up(self, reason: str) -> None:
    """As `greet_again`, if it was up."""
    if self.state == "up":
      self.greet_again(reason)

  def forget(self, reason: str) -> None:
    """Its life before is over: who answers the next greeting is new."""
    self.session, self.incoming = b"", None
    self.greet_again(reason)

  def needs_new_sockets(self) -> bool:
    """Before every other attempt, once: a connection may be dead without a sign."""
    due = self.attempts > 0 and self.attempts % 2 == 0 and self.attempts != self._renewed
    self._renewed = self.attempts
    return due

  def count_attempt(self, now: float, settings: NetworkConfig) -> None:
    """Counts a greeting; the next one is due after a pause that grows."""
    pause = settings.hello_seconds * 2 ** min(self.attempts, MAX_HELLO_DOUBLINGS)
    self.attempts += 1
    self.next_hello_at = now + pause
    self.give_up_at = now + 2 * pause


class Accepted(Peer):
  """A peer that dialed us: it is known by the routing ids of its connections."""

  def __init__(
    self,
    control: zmq.Socket,
    bulk: zmq.Socket,
    greeting: Greeting,
    settings: NetworkConfig,
    key: str,
  ):
    super().__init__(greeting.address, settings)
    self.key = key  # of its connections, Z85
    self._control, self._bulk = control, bulk
    self._route = control_route(greeting.session)
    self.streams = [stream_route(greeting.session, k) for k in range(greeting.streams)]
    self.routes = {self._route, *self.streams}

  def put(self, data: bytes) -> bool:
    return send(self._control, self._route, data)

  def put_on(self, stream: int, header: bytes, data: memoryview) -> bool:
    return send(self._bulk, self.streams[stream], header, data)
