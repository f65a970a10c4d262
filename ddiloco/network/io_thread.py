"""The thread behind a network endpoint: it alone touches the sockets.

Each turn: control first, then a few chunks, then whatever can be sent. A peer is known by its
greeting, which says its run, address, incarnation and session; who dialed us is at the `Door`. What
is refused is counted and changes nothing, and who sent it hears of it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import secrets
import socket as wakeups
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from ddiloco.checks import ConfigError
from ddiloco.config import NetworkConfig
from ddiloco.network import frames
from ddiloco.network.admission import Admission
from ddiloco.network.frames import SESSION_BYTES, Greeting
from ddiloco.network.handshake import RunIdentity, doubt
from ddiloco.network.keys import Keys
from ddiloco.network.peers import Dialed, Peer
from ddiloco.network.sockets import Sockets, receive
from ddiloco.network.transport import Counters, Inbox
from ddiloco.protocol.wire import MalformedMessage

BEAT_SECONDS = 1.0
POLL_SECONDS = 0.2
STOOD_STILL_SECONDS = 1.0  # a turn that took so long did not: the process was stopped
KEYS_SECONDS = 5.0  # between two looks whether a shard has another key now
BUSY_POLL_SECONDS = 0.02  # while something waits for a connection
FRAMES_A_TURN = 256  # of control; then fragments may come in
MAX_QUEUED = 1024  # messages with payload that are not wholly acknowledged by a peer
CHUNKS_A_TURN = 8  # of one socket; control may come in between


class IoThread:
  """See `network.endpoint.NetworkEndpoint`, whose hands this is."""

  def __init__(
    self,
    address: str,
    incarnation: int,
    run: RunIdentity,
    settings: NetworkConfig,
    inbox: Inbox,
    counters: Counters,
    keys: Keys | None,
  ):
    self.fenced, self.outnumbered = "", (0, 0)  # the latter: `after`, `silent_seconds` of `Refused`
    self._address, self._incarnation, self._run = address, incarnation, run
    self._settings, self._inbox, self._counters, self._keys = settings, inbox, counters, keys
    self._session = secrets.token_bytes(SESSION_BYTES)
    self._sockets = Sockets(settings, keys)
    self._lock = threading.Lock()
    self._outbox: collections.deque = collections.deque()  # (peer, header, payload)
    self._calls: collections.deque = collections.deque()  # what else this thread is to do
    self._dialed: dict[str, Dialed] = {}
    self._admission = Admission(run, settings, counters, keys, self._greeting, self._drop_queue)
    self._dialed_by: dict[zmq.Socket, Dialed] = {}
    self._monitors: dict[zmq.Socket, Dialed] = {}
    self._stop_at: float | None = None
    self._tended_at = time.monotonic()
    self._keys_at = 0.0
    self._wake_in, self._wake_out = wakeups.socketpair()
    self._poller = zmq.Poller()
    for end in (self._wake_in, self._wake_out):
      end.setblocking(False)
    self._poller.register(self._wake_out.fileno(), zmq.POLLIN)

  # --- called from the role's threads -------------------------------------------------------------

  def listen(self, url: str) -> str:
    """Listens at `url`, before the thread runs; returns it with the real port."""
    bound = self._admission.open(self._sockets, url)
    for socket in [*self._admission.sockets, *self._admission.monitors]:
      self._poller.register(socket, zmq.POLLIN)
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
      if len(peer.outgoing) >= MAX_QUEUED:
        return False
      with self._lock:
        if peer.queued_bytes and peer.queued_bytes + len(payload) > self._run.queue_bytes:
          return False
        peer.queued_bytes += len(payload)
    self._outbox.append((peer, header, payload))
    self._wake()
    return True

  def dropped(self, sender: str, reason: str) -> None:
    """A message of this peer's was dropped; it is to hear of it."""
    for peer in (self._dialed.get(sender), self._admission.accepted.get(sender)):
      if peer is not None:
        peer.count_dropped(reason)

  def stop(self, linger_seconds: float) -> None:
    """Ends the thread as soon as everything is sent, at the latest after this time."""
    if self._stop_at is None:
      self._stop_at = time.monotonic() + linger_seconds
      self._wake()

  def peers(self) -> list[Peer]:
    """All far ends."""
    return [*self._dialed.values(), *self._admission.accepted.values()]

  def _find(self, to: str) -> Peer | None:
    dialed, accepted = self._dialed.get(to), self._admission.accepted.get(to)
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
      self._admission.close()
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
    for socket in [*self._admission.sockets[1:], *(s for p in dialed for s in p.streams)]:
      if socket in ready:
        self._receive_chunks(socket)
    for monitor in [m for m in self._monitors if m in ready]:
      self._on_monitor(monitor)
    for monitor in [m for m in self._admission.monitors if m in ready]:
      self._admission.on_monitor(monitor)
    self._move_control()
    self._tend_all(time.monotonic())

  def _move_control(self) -> None:
    """Lets control in and out; fragments that are to go out are only queued."""
    for socket in [*self._admission.sockets[:1], *(p.control for p in [*self._dialed.values()])]:
      if socket is not None:
        self._receive_control(socket)
    while self._outbox:
      peer, header, payload = self._outbox.popleft()
      if payload is None:
        self._counters.undelivered += peer.send_control(header)
      else:
        peer.send_bulk(header, payload)

  def _tend_all(self, now: float) -> None:
    still = now - self._tended_at
    self._tended_at = now
    self._admission.look(now)
    if now >= self._keys_at:
      self._keys_at = now + KEYS_SECONDS
      self._look_at_keys()
    for peer in self.peers():
      if still > STOOD_STILL_SECONDS:  # what came meanwhile is still on its way through the sockets
        peer.excuse(still, now)
      self._tend(peer, now)

  def _tend(self, peer: Peer, now: float) -> None:
    """What a peer needs from time to time, and whatever can be sent to it."""
    silent = now - peer.heard_at
    if silent > self._settings.silence_seconds:
      if peer.state == "up":
        peer.state, peer.reason = "connecting", f"silent for {silent:.0f} s"
      self._drop_queue(peer)
    if isinstance(peer, Dialed):
      self._greet(peer, now)
      peer.beat_streams(now)
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
    try:
      peer.open(self._sockets, self._session, self._settings.streams)
    except (
      zmq.ZMQError,
      ConfigError,
    ) as error:  # a later attempt may find one
      peer.close()
      peer.reason = f"cannot open a connection to {url} ({error})"
      return
    self._dialed_by |= dict.fromkeys([peer.control, *peer.streams], peer)
    for socket in [peer.control, *peer.streams]:
      self._poller.register(socket, zmq.POLLIN)
    self._monitors[peer.monitor] = peer
    self._poller.register(peer.monitor, zmq.POLLIN)

  def _look_at_keys(self) -> None:
    """A shard whose key was replaced is dialed with the new one: the old one may be stolen."""
    for peer in [*self._dialed.values()]:
      if self._sockets.other_key(peer.address):
        peer.forget(f"its key was replaced in {self._keys.folder}")
        self._drop_queue(peer, control=False)
        self._redial(peer.address, peer.url)

  def _on_monitor(self, monitor: zmq.Socket) -> None:
    event, peer = recv_monitor_message(monitor)["event"], self._monitors[monitor]
    if event == zmq.EVENT_DISCONNECTED:
      peer.greet_if_up("its connection broke")  # whoever is at the url now may be another one
    elif peer.state != "up" and event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
      peer.state, peer.reason = "refused", f"{peer.url} does not list this role's key"
    elif peer.state != "up":
      peer.reason = f"{peer.url} has another key than the one listed here, or one side has no keys"

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
      case frames.GreetingRefused(session=session, fenced=fenced, reason=reason):
        if session == self._session:
          peer.state, peer.reason = "refused", f"{peer.url}: {reason}"
          if fenced:
            self.outnumbered, self.fenced = (frame.after, frame.silent_seconds), reason
            self._inbox.close()
      case frames.Unknown():
        if peer.state == "up":
          peer.greet_again("it does not know this role any more")
      case _ if peer.state != "refused":
        self._on_frame(peer, frame)

  def _on_answer(self, peer: Dialed, greeting: Greeting) -> None:
    if greeting.answers != self._session or greeting.address != peer.address:
      raise MalformedMessage(f"{greeting.address} answers at {peer.url}, expected {peer.address}")
    if reason := doubt(greeting.incarnation, peer.incarnation):
      peer.state, peer.reason = "refused", f"{peer.address} at {peer.url}: {reason}"
      return
    if peer.session and greeting.session != peer.session:
      peer.incarnation = greeting.incarnation  # it may speak before it has answered again
      self._drop_queue(peer, control=False)  # pushes were meant for the incarnation before
      peer.forget("it has restarted")  # greeted again, it does not wait for what was dropped
      return
    peer.meet(greeting, self._run, min(greeting.chunk_bytes, self._settings.chunk_bytes))
    peer.attempts = 0

  # --- both ---------------------------------------------------------------------------------------

  def _receive_control(self, socket: zmq.Socket) -> None:
    for _ in range(FRAMES_A_TURN):
      parts = receive(socket)
      if parts is None:
        return
      try:
        if socket in self._admission.sockets:
          self._on_listening(parts.pop(0).bytes, parts)
        else:
          self._on_dialed(self._dialed_by[socket], _only(parts))
      except MalformedMessage:
        self._counters.malformed += 1

  def _on_listening(self, route: bytes, parts: list[zmq.Frame]) -> None:
    frame = _only(parts)
    if isinstance(frame, Greeting):
      self._admission.greeted(route, parts[0], frame)
    elif (peer := self._admission.sender(route, parts[0])) is None:
      self._admission.unknown(route)
    else:
      self._on_frame(peer, frame)

  def _on_frame(self, peer: Peer, frame: frames.Frame) -> None:
    now = peer.heard_at = time.monotonic()
    match frame:
      case frames.Control(header):
        self._inbox.put(peer.address, header, None, len(header), peer.incarnation)
      case frames.Dropped(count, reason):
        peer.drops = (peer.drops[0] + count, reason)
      case frames.Wanted(chunks):
        for number, offset in chunks:
          peer.outgoing.want(number, offset, now)
      case frames.Acknowledged(chunks):
        freed = 0
        for number, offset in chunks:
          freed += peer.outgoing.acknowledge(number, offset, now)
        if freed:
          with self._lock:
            peer.queued_bytes -= freed

  def _receive_chunks(self, socket: zmq.Socket) -> None:
    for _ in range(CHUNKS_A_TURN):
      parts = receive(socket)
      if parts is None:
        return
      try:
        peer: Peer | None = self._dialed_by.get(socket)
        if socket in self._admission.sockets:
          peer = self._admission.sender(parts.pop(0).bytes, parts[0])
        if peer is not None:  # its greeting comes first; what was sent too early comes again
          self._on_chunk(peer, parts)
      except MalformedMessage:
        self._counters.malformed += 1
      self._move_control()

  def _on_chunk(self, peer: Peer, parts: list[zmq.Frame]) -> None:
    chunk = frames.decode(parts[0].bytes)
    peer.heard_at = time.monotonic()
    if isinstance(chunk, frames.Beat) and len(parts) == 1:
      return
    if not isinstance(chunk, frames.Chunk) or len(parts) != 2:
      raise MalformedMessage(f"{type(chunk).__name__} in {len(parts)} parts is not a chunk")
    for header, payload in peer.accept_chunk(chunk, parts[1].buffer):
      taken = functools.partial(peer.taken, peer.incoming, payload.nbytes, len(header))
      size = len(header) + payload.nbytes
      later = functools.partial(self._call, taken)
      if not self._inbox.put(peer.address, header, payload, size, peer.incarnation, later):
        taken()


def _only(parts: list[zmq.Frame]) -> frames.Frame:
  """The frame of control in a message."""
  if len(parts) != 1:
    raise MalformedMessage(f"a control frame in {len(parts)} parts")
  return frames.decode(parts[0].bytes)
