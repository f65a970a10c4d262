"""The thread behind a network endpoint: it alone touches the sockets.

Each turn: control first, then a few chunks, then whatever can be sent. A peer is known by its
greeting, which says its run, address, incarnation and session. With keys, every frame must come
from a connection whose key belongs to that address. What is refused is counted and changes nothing.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
import socket as wakeups
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from ddiloco.config import NetworkConfig
from ddiloco.core.wire import MalformedMessage
from ddiloco.runtime import frames
from ddiloco.runtime.frames import SESSION_BYTES, Greeting
from ddiloco.runtime.greetings import Run, control_route, objection, session_of
from ddiloco.runtime.keys import Arrivals, Keys
from ddiloco.runtime.peers import Accepted, Dialed, Peer
from ddiloco.runtime.sockets import FAILED_HANDSHAKE, Sockets, receive, send, user_of
from ddiloco.runtime.transport import Counters, Inbox

BEAT_SECONDS = 1.0
POLL_SECONDS = 0.2
BUSY_POLL_SECONDS = 0.02  # while something waits for a connection
FRAMES_A_TURN = 256  # of control; then fragments may come in
CHUNKS_A_TURN = 8  # of one socket; control may come in between


class Courier:
  """See `runtime.network.NetworkEndpoint`, whose hands this is."""

  def __init__(
    self,
    address: str,
    incarnation: int,
    run: Run,
    settings: NetworkConfig,
    inbox: Inbox,
    counters: Counters,
    keys: Keys | None,
  ):
    self.fenced = ""
    self._address, self._incarnation, self._run = address, incarnation, run
    self._settings, self._inbox, self._counters, self._keys = settings, inbox, counters, keys
    self._session = secrets.token_bytes(SESSION_BYTES)
    self._sockets = Sockets(settings, keys)
    self._lock = threading.Lock()
    self._outbox: collections.deque = collections.deque()  # (peer, header, payload)
    self._calls: collections.deque = collections.deque()  # what else this thread is to do
    self._dialed: dict[str, Dialed] = {}
    self._accepted: dict[str, Accepted] = {}
    self._by_session: dict[bytes, Accepted] = {}
    self._dialed_by: dict[zmq.Socket, Dialed] = {}
    self._listening: tuple[zmq.Socket, ...] = ()  # control, bulk
    self._monitors: dict[zmq.Socket, Dialed | Arrivals] = {}
    self._stop_at: float | None = None
    self._wake_in, self._wake_out = wakeups.socketpair()
    self._poller = zmq.Poller()
    for end in (self._wake_in, self._wake_out):
      end.setblocking(False)
    self._poller.register(self._wake_out.fileno(), zmq.POLLIN)

  # --- called from the role's threads -------------------------------------------------------------

  def listen(self, url: str) -> str:
    """Listens at `url`, before the thread runs; returns it with the real port."""
    *pair, bound = self._sockets.listen(url, self._count_refused)
    self._listening = tuple(pair)
    for socket in pair:
      self._poller.register(socket, zmq.POLLIN)
      self._watch(socket, None)
    return bound

  def dial(self, address: str, url: str) -> None:
    """Connects to a shard; a second time: it is somewhere else now."""
    if address not in self._dialed:
      self._dialed[address] = Dialed(address, url, self._settings)
    self._call(self._redial, address, url)

  def post(self, to: str, header: bytes, payload: memoryview | None) -> bool:
    """Queues a message; False if nobody is there, or too much waits for that peer already."""
    peer = self._find(to)
    if peer is None or self.fenced:
      return False
    if payload is not None:
      with self._lock:
        if peer.queued_bytes and peer.queued_bytes + len(payload) > self._run.queue_bytes:
          return False
        peer.queued_bytes += len(payload)
    self._outbox.append((peer, header, payload))
    self._wake()
    return True

  def taken(self, sender: str, size: int) -> None:
    """The role has received a payload: there is room for others."""
    self._call(self._make_room, sender, size)

  def stop(self, linger_seconds: float) -> None:
    """Ends the thread as soon as everything is sent, at the latest after this time."""
    if self._stop_at is None:
      self._stop_at = time.monotonic() + linger_seconds
      self._wake()

  def peers(self) -> list[Peer]:
    """All far ends."""
    return [*self._dialed.values(), *self._accepted.values()]

  def _find(self, to: str) -> Peer | None:
    dialed, accepted = self._dialed.get(to), self._accepted.get(to)
    if dialed and accepted and (dialed.state != "up" or accepted.incarnation > dialed.incarnation):
      return accepted  # what we dialed is out of reach, or was its life before
    return dialed or accepted

  def _call(self, function, *arguments) -> None:
    self._calls.append((function, *arguments))
    self._wake()

  def _wake(self) -> None:
    with contextlib.suppress(BlockingIOError, OSError):  # full: it wakes anyway; closed: it is over
      self._wake_in.send(b"!")

  # --- the thread ---------------------------------------------------------------------------------

  def work(self) -> None:
    """The thread's whole life."""
    try:
      while not self._finished():
        self._turn(dict(self._poller.poll(self._pause_ms())))
    except Exception as error:
      self.fenced = f"its network thread failed: {error!r}"  # the role must not go on unheard
      raise
    finally:
      self._inbox.close()
      for peer in self._dialed.values():
        peer.close(linger_ms=200)
      for socket in self._listening:
        socket.disable_monitor()
        socket.close(200)
      self._sockets.close()
      self._wake_in.close()
      self._wake_out.close()

  def _finished(self) -> bool:
    if self._stop_at is None:
      return False
    waits = any(
      p.state == "up" and (p.waiting or len(p.outgoing) or p.answers) for p in self.peers()
    )
    return not (self._outbox or waits) or time.monotonic() >= self._stop_at

  def _pause_ms(self) -> int:
    if self._outbox or self._calls:
      return 0
    waits = any(p.waiting or len(p.outgoing) or p.state != "up" for p in self.peers())
    return int(1000 * (BUSY_POLL_SECONDS if waits else POLL_SECONDS))

  def _turn(self, ready: dict) -> None:
    if self._wake_out.fileno() in ready:
      with contextlib.suppress(BlockingIOError):
        self._wake_out.recv(4096)
    while self._calls:
      function, *arguments = self._calls.popleft()
      function(*arguments)
    self._move_control()
    dialed = [*self._dialed.values()]  # others may dial meanwhile
    for socket in [*self._listening[1:], *(s for p in dialed for s in p.streams)]:
      if socket in ready:
        self._receive_chunks(socket)
    for monitor in [m for m in self._monitors if m in ready]:
      self._on_monitor(monitor)
    self._move_control()
    now = time.monotonic()
    for peer in self.peers():
      self._tend(peer, now)

  def _move_control(self) -> None:
    """Lets control in and out; fragments that are to go out are only queued."""
    for socket in [*self._listening[:1], *(p.control for p in [*self._dialed.values()])]:
      if socket is not None:
        self._receive_control(socket)
    while self._outbox:
      peer, header, payload = self._outbox.popleft()
      if payload is None:
        self._counters.undelivered += peer.send_control(header)
      else:
        peer.send_bulk(header, payload)

  def _tend(self, peer: Peer, now: float) -> None:
    """What a peer needs from time to time, and whatever can be sent to it."""
    silent = now - peer.heard_at
    if silent > self._settings.silence_seconds:
      if peer.state == "up":
        peer.state, peer.reason = "connecting", f"silent for {silent:.0f} s"
      self._drop_queue(peer)
    if isinstance(peer, Dialed):
      self._greet(peer, now)
    peer.flush_answers()
    peer.beat(now, BEAT_SECONDS)
    peer.flush_control()
    self._counters.resent += peer.outgoing.resend_overdue(now)
    if peer.pump_chunks(self._session, now):
      self._wake()

  def _drop_queue(self, peer: Peer, control: bool = True) -> None:
    dropped, size = peer.drop_queue(control)
    self._counters.undelivered += dropped
    if size:
      with self._lock:
        peer.queued_bytes -= size

  def _make_room(self, sender: str, size: int) -> None:
    for peer in (self._dialed.get(sender), self._accepted.get(sender)):
      if peer is not None and peer.incoming is not None:
        peer.incoming.taken(size)

  # --- dialing ------------------------------------------------------------------------------------

  def _redial(self, address: str, url: str) -> None:
    """(Re)opens the sockets to a shard; what is under way goes on over the new ones."""
    peer = self._dialed[address]
    for socket in peer.sockets():
      self._poller.unregister(socket)
      self._dialed_by.pop(socket, None)
    if self._monitors.pop(peer.monitor, None) is not None:
      self._poller.unregister(peer.monitor)
    peer.close()
    if url != peer.url:
      peer.url, peer.attempts, peer.next_hello_at = url, 0, 0.0
    peer.open(self._sockets, self._session, self._settings.streams)
    self._dialed_by |= dict.fromkeys([peer.control, *peer.streams], peer)
    for socket in [peer.control, *peer.streams]:
      self._poller.register(socket, zmq.POLLIN)
    peer.monitor = self._watch(peer.control, peer)

  def _watch(self, socket: zmq.Socket, peer: Dialed | None) -> zmq.Socket:
    monitor = socket.get_monitor_socket(Arrivals.EVENTS if peer is None else FAILED_HANDSHAKE)
    self._monitors[monitor] = Arrivals() if peer is None else peer
    self._poller.register(monitor, zmq.POLLIN)
    return monitor

  def _on_monitor(self, monitor: zmq.Socket) -> None:
    message, peer = recv_monitor_message(monitor), self._monitors[monitor]
    event = message["event"]
    if isinstance(peer, Arrivals):
      if peer.see(int(event), int(message["value"])):
        self._count_refused()
    elif peer.state != "up" and event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
      peer.state, peer.reason = "refused", f"{peer.url} does not list this role's key"
    elif peer.state != "up":
      peer.reason = f"{peer.url} has another key than the one listed here, or one side has no keys"

  def _count_refused(self, _reason: str = "") -> None:
    self._counters.refused += 1

  def _greet(self, peer: Dialed, now: float) -> None:
    quiet = now - peer.heard_at > 3 * BEAT_SECONDS
    if self.fenced or now < peer.next_hello_at or (peer.state == "up" and not quiet):
      return
    if peer.needs_new_sockets():
      self._redial(peer.address, peer.url)
    if peer.attempts and peer.state == "connecting" and not peer.session:
      peer.reason = f"nobody answers at {peer.url}"
    if peer.put(frames.encode(self._greeting(peer, answers=b""))) or now >= peer.give_up_at:
      peer.count_attempt(now, self._settings)

  def _greeting(self, peer: Peer, answers: bytes) -> Greeting:
    run, settings = self._run, self._settings
    who = (run.run_id, run.plan_id, self._address, self._incarnation, self._session)
    oldest = peer.outgoing.oldest(peer.next_transfer)
    return Greeting(*who, answers, oldest, settings.chunk_bytes, settings.streams)

  def _on_dialed(self, peer: Dialed, frame: frames.Frame) -> None:
    match frame:
      case Greeting():
        self._on_answer(peer, frame)
      case frames.Refused(session=session, fenced=fenced, reason=reason):
        if session == self._session:
          peer.state, peer.reason = "refused", f"{peer.url}: {reason}"
          if fenced:
            self.fenced = reason
            self._inbox.close()
      case frames.Unknown():
        if peer.state == "up":
          peer.greet_again("it does not know this role any more")
      case _:
        self._on_frame(peer, frame)

  def _on_answer(self, peer: Dialed, greeting: Greeting) -> None:
    if greeting.answers != self._session or greeting.address != peer.address:
      raise MalformedMessage(f"{greeting.address} answers at {peer.url}, expected {peer.address}")
    if greeting.incarnation < peer.incarnation:
      peer.reason = f"{peer.url} is an old incarnation of {peer.address}"
      return
    if peer.session and greeting.session != peer.session:
      self._drop_queue(peer, control=False)  # pushes were meant for the incarnation before
      peer.forget("it has restarted")  # greeted again, it does not wait for what was dropped
      return
    peer.meet(greeting, self._run, min(greeting.chunk_bytes, self._settings.chunk_bytes))
    peer.attempts = 0

  # --- listening ----------------------------------------------------------------------------------

  def _on_listening(self, route: bytes, user: str | None, frame: frames.Frame) -> None:
    peer = self._by_session.get(session_of(route))
    if isinstance(frame, Greeting):
      if len(frame.session) != SESSION_BYTES or route != control_route(frame.session):
        raise MalformedMessage("a connection that is not named after its session")
      known = self._accepted.get(frame.address)
      reason, fenced = objection(
        self._run, frame, user if self._keys else None, known and (known.session, known.incarnation)
      )
      if not reason:
        self._welcome(frame)
        return
      self._count_refused()
      send(self._listening[0], route, frames.encode(frames.Refused(frame.session, fenced, reason)))
    elif peer is None or (self._keys is not None and user != peer.address):
      send(self._listening[0], route, frames.encode(frames.Unknown()))
    else:
      self._on_frame(peer, frame)

  def _welcome(self, greeting: Greeting) -> None:
    peer = self._accepted.get(greeting.address)
    if peer is None or peer.session != greeting.session:
      if peer is not None:
        newer = f"a newer incarnation of {peer.address} is here ({greeting.incarnation})"
        peer.put(frames.encode(frames.Refused(peer.session, True, newer)))
        self._drop_queue(peer)
        del self._by_session[peer.session]
      peer = Accepted(*self._listening, greeting, self._settings)
      self._accepted[greeting.address] = self._by_session[greeting.session] = peer
    peer.meet(greeting, self._run, min(greeting.chunk_bytes, self._settings.chunk_bytes))
    peer.put(frames.encode(self._greeting(peer, answers=greeting.session)))

  # --- both ---------------------------------------------------------------------------------------

  def _receive_control(self, socket: zmq.Socket) -> None:
    for _ in range(FRAMES_A_TURN):
      parts = receive(socket)
      if parts is None:
        return
      route = parts.pop(0).bytes if socket in self._listening else b""
      try:
        if len(parts) != 1:
          raise MalformedMessage(f"a control frame in {len(parts)} parts")
        frame = frames.decode(parts[0].bytes)
        if route:
          self._on_listening(route, user_of(parts[0]), frame)
        else:
          self._on_dialed(self._dialed_by[socket], frame)
      except MalformedMessage:
        self._counters.malformed += 1

  def _on_frame(self, peer: Peer, frame: frames.Frame) -> None:
    now = peer.heard_at = time.monotonic()
    match frame:
      case frames.Control(header):
        self._inbox.put(peer.address, header, None, len(header))
      case frames.Acknowledged(chunks):
        freed = 0
        for number, offset in zip(chunks[::2], chunks[1::2]):
          freed += peer.outgoing.acknowledge(number, offset, now)
        if freed:
          with self._lock:
            peer.queued_bytes -= freed

  def _receive_chunks(self, socket: zmq.Socket) -> None:
    for _ in range(CHUNKS_A_TURN):
      parts = receive(socket)
      if parts is None:
        return
      peer: Peer | None = self._dialed_by.get(socket)
      if socket in self._listening:
        peer = self._by_session.get(session_of(parts.pop(0).bytes))
      try:
        if peer is not None:  # its greeting comes first; what was sent too early comes again
          self._on_chunk(socket, peer, parts)
      except MalformedMessage:
        self._counters.malformed += 1
      self._move_control()

  def _on_chunk(self, socket: zmq.Socket, peer: Peer, parts: list[zmq.Frame]) -> None:
    if len(parts) != 2:
      raise MalformedMessage(f"a chunk in {len(parts)} parts")
    if socket in self._listening and self._keys and user_of(parts[0]) != peer.address:
      raise MalformedMessage("a chunk in somebody else's session")
    chunk = frames.decode(parts[0].bytes)
    if not isinstance(chunk, frames.Chunk):
      raise MalformedMessage(f"{type(chunk).__name__} is not a chunk")
    peer.heard_at = time.monotonic()
    for header, payload in peer.accept_chunk(chunk, parts[1].buffer):
      self._inbox.put(peer.address, header, payload, len(header) + payload.nbytes)
