"""The network transport: the contract of `network.transport` between processes, over TCP and TLS.

Syncer shards listen, all other roles dial them: one connection for control, some for fragments, so
that control never queues behind bulk. With keys each of them is TLS 1.3.

  endpoint.py    what a role sees: queues in, queues out; reachable peers, and signs of life
  admission.py   peers that dialed us: let in, checked again, cut off
  peers.py       one far end each: what waits for it, and what arrives
  io_thread.py   threads that own connections, and whole frames over one
  frames.py      what the two ends say to each other, and who may speak; keys.py: the keys
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ddiloco.checks import ConfigError
from ddiloco.config import NetworkConfig
from ddiloco.network import frames
from ddiloco.network.admission import Admission
from ddiloco.network.frames import (
  SESSION_BYTES,
  Attach,
  Greeting,
  GreetingRefused,
  RunIdentity,
  doubt,
)
from ddiloco.network.io_thread import FrameSocket, IoThread
from ddiloco.network.keys import Keys, host_and_port
from ddiloco.network.peers import CONTROL, BufferPool, Channel, Dialed, Incoming, Peer
from ddiloco.network.transport import Counters, Delivery, Inbox, Spoil
from ddiloco.observe.guards import ended
from ddiloco.protocol import messages
from ddiloco.protocol.messages import Message

BEAT_SECONDS = 1.0
TEND_SECONDS = 0.1  # between two looks at all peers
STOOD_STILL_SECONDS = 1.0  # a turn that took so long did not: the process was stopped
KEYS_SECONDS = 5.0  # between two looks whether a shard has another key now
QUIET_BEATS, QUIET_SHARE = 3, 1 / 3  # of `silence_seconds`: then a shard is dialed again
MAX_DOUBLINGS = 4  # of the pause between two attempts
MOST_THREADS = 4  # for fragments; each has a core to encrypt on


class NetworkEndpoint:
  """One role's connection to the others.

  Args:
    address: of this role, e.g. "learner-3".
    incarnation: of this role; a greater one fences a smaller one.
    run: the run it belongs to.
    settings: sizes and timeouts.
    bind: where a shard listens, "tcp://HOST:PORT"; port 0 picks a free one.
    keys: of this role; None speaks plainly, for loopback.

  Raises:
    OSError: the port is taken, or the address is not this machine's.
  """

  def __init__(
    self,
    address: str,
    incarnation: int,
    run: RunIdentity,
    settings: NetworkConfig,
    bind: str | None = None,
    keys: Keys | None = None,
  ):
    self.address, self.incarnation = address, incarnation
    self.counters = Counters()
    self.buffers = BufferPool()
    self.fenced = ""  # why this endpoint may not speak any more; "" if it may
    self.broken = ""  # why it cannot, whoever else there is; "" if it can
    # (least incarnation that may come after the newer one, seconds since that was heard);
    # (0, 0) if this endpoint is not fenced, or for good.
    self.outnumbered = (0, 0)
    self._run, self._settings, self._keys = run, settings, keys
    self._quiet_seconds = max(QUIET_BEATS * BEAT_SECONDS, QUIET_SHARE * settings.silence_seconds)
    self._inbox = Inbox(run.run_id, run.plan_id, self.counters, dropped=self._dropped)
    who = (run.run_id, run.plan_id, address, incarnation, secrets.token_bytes(SESSION_BYTES))
    self._greeting = Greeting(*who, settings.streams)
    self._dialed: dict[str, Dialed] = {}
    self._control = IoThread(f"network-{address}", self._tick, self._failed)
    count = min(MOST_THREADS, os.cpu_count() or 1)
    self._bulk = [IoThread(f"bulk-{address}", failed=self._failed) for _ in range(count)]
    self._turn = 0  # of the threads for bulk
    self._admission = Admission(
      *(run, self.counters, keys, self, lambda: self._greeting, self._place, self._drop_queue)
    )
    self._tended_at = self._tend_at = time.monotonic()
    self._keys_at = 0.0
    self._stop_at: float | None = None
    try:
      self.bound = self._admission.open(bind, self._control) if bind is not None else ""
    except BaseException:
      for thread in self._threads:
        thread.start(over=True)
      raise
    for thread in self._threads:
      thread.start()

  @property
  def _threads(self) -> list[IoThread]:
    return [self._control, *self._bulk]

  # --- for the role, from any thread --------------------------------------------------------------

  def dial(self, address: str, url: str) -> None:
    """Connects to the shard `address` at `url`; a second time: it is somewhere else now."""
    if address not in self._dialed:
      peer = Dialed(address, url, self._run, self._settings.streams, self)
      self._dialed = {**self._dialed, address: peer}
    self._control.call(self._redial, self._dialed[address], url)

  def send(self, to: str, message: Message, spoil: Spoil | None = None) -> int:
    header, payload = messages.encode(message, self._run.run_id, self._run.plan_id)
    header = header if spoil is None else spoil(header)
    size = messages.frame_bytes(header, payload)
    if not self._inbox.closed:
      self.counters.sent_bytes += size
      self.counters.payload_bytes += size - len(header)
      peer = self._find(to)
      if peer is None or self.fenced or self.broken:
        self.counters.undelivered += 1
      elif payload is None:
        self.counters.undelivered += peer.post_control(header)
      elif not peer.post_bulk(header, memoryview(payload).cast("B")):
        self.counters.undelivered += 1
    return size

  def _find(self, to: str) -> Peer | None:
    dialed, accepted = self._dialed.get(to), self._admission.accepted.get(to)
    if dialed and accepted and (dialed.state != "up" or accepted.incarnation > dialed.incarnation):
      return accepted  # what we dialed is out of reach, or was its life before
    return dialed or accepted

  def receive(self, timeout_seconds: float) -> Delivery | None:
    return self._inbox.receive(timeout_seconds)

  @property
  def waiting(self) -> int:
    return self._inbox.waiting

  def unsent(self, peer: str) -> int:
    found = self._find(peer)
    return 0 if found is None else found.queued_bytes

  def wake(self) -> None:
    self._inbox.wake()

  def close(self, linger_seconds: float = 1.0) -> None:
    """Sends what is queued, for at most so long, and disconnects."""
    self._inbox.close()
    self._stop_at = self._stop_at or time.monotonic() + linger_seconds
    self._control.call(self._tick, float("inf"))
    for thread in self._threads:
      ended(thread.thread, linger_seconds + 5.0)

  def links(self) -> dict[str, dict[str, Any]]:
    """For people: every far end's state, reason, seconds since it was heard, and how many messages
    of ours it has dropped and why."""
    now = time.monotonic()
    return {
      peer.address: {
        "state": peer.state,
        "reason": peer.reason,
        "silent_seconds": round(now - peer.heard_at, 1),
        "queued_bytes": peer.queued_bytes,
        "drops": peer.drops,
      }
      for peer in self._peers()
    }

  def _peers(self) -> list[Peer]:
    return [*self._dialed.values(), *self._admission.accepted.copy().values()]

  # --- what connections say, in their threads -----------------------------------------------------

  def on_message(self, peer: Peer, header: bytes, payload: np.ndarray, incoming: Incoming) -> None:
    size = len(header) + payload.nbytes
    taken = functools.partial(incoming.taken, size)
    if not self._inbox.put(peer.address, header, payload, size, peer.incarnation, taken):
      taken()

  def on_malformed(self, peer: Peer, reason: str) -> None:
    self._control.call(self._count_malformed, peer, reason)

  def _count_malformed(self, peer: Peer, reason: str) -> None:
    self.counters.malformed += 1
    peer.count_dropped(reason)

  def _dropped(self, sender: str, reason: str) -> None:
    for peer in (self._dialed.get(sender), self._admission.accepted.get(sender)):
      if peer is not None:
        peer.count_dropped(reason)

  def on_frame(self, channel: Channel, wire: FrameSocket, frame: frames.Frame) -> None:
    peer = channel.peer
    match frame:
      case frames.Control(header):
        if peer.state == "up":
          self._inbox.put(peer.address, header, None, len(header), peer.incarnation)
          if self._inbox.crowded(peer.address):
            # Until the next look: a flood is not taken in faster than the role does.
            wire.rest(True)
      case frames.Dropped(count, reason):
        peer.drops = (peer.drops[0] + count, reason)
      case frames.Beat():
        pass
      case Greeting() if isinstance(peer, Dialed):
        self._on_answer(peer, frame)
      case GreetingRefused(fenced, reason, after, silent_seconds) if isinstance(peer, Dialed):
        peer.state, peer.reason = "refused", f"{peer.url}: {reason}"
        if fenced:
          self.outnumbered, self.fenced = (after, silent_seconds), reason
          self._inbox.close()
      case _:
        self._count_malformed(peer, f"a {type(frame).__name__} that was not asked for")

  def on_lost(self, channel: Channel, wire: FrameSocket, error: Exception) -> None:
    self._control.call(self._lost, channel, wire, error)

  def _lost(self, channel: Channel, wire: FrameSocket, error: Exception) -> None:
    if channel.wire is not wire:
      return
    self._tend_at, peer = 0.0, channel.peer
    channel.detach()
    if channel.number == CONTROL and peer.state == "up":
      peer.down("its connection broke")  # another peer may be at the url now
    elif channel.number == CONTROL and peer.state == "connecting" and isinstance(peer, Dialed):
      refused = isinstance(error, ssl.SSLError) and "ALERT" in str(error.reason)
      if refused:  # the far end looks at our key when the handshake is over for us
        peer.state, peer.reason = "refused", f"{peer.url}: the key of {self.address} is not listed"
      else:
        peer.reason = f"{peer.url} answers no greeting, or one side has no keys ({error})"

  def _failed(self, error: Exception) -> None:
    self.broken = self.broken or f"its network thread failed: {error!r}"
    self._inbox.close()  # the role must not go on unheard

  # --- the thread for control ---------------------------------------------------------------------

  def _tick(self, now: float) -> None:
    if now < self._tend_at:
      return
    now = time.monotonic()
    still, self._tended_at = now - self._tended_at, now
    self._tend_at = now + TEND_SECONDS
    self._admission.look(now)
    if now >= self._keys_at:
      self._keys_at = now + KEYS_SECONDS
      self._look_at_keys()
    self.buffers.release(now)
    for peer in self._peers():
      if still > STOOD_STILL_SECONDS:  # what came meanwhile is still on its way through the kernel
        peer.heard_at = min(now, peer.heard_at + still)
      self._tend(peer, now)
    if self._stop_at is not None:
      self._finish(now, self._stop_at)

  def _tend(self, peer: Peer, now: float) -> None:
    """What a peer needs from time to time."""
    silent, patience = now - peer.heard_at, self._settings.silence_seconds
    if silent > patience:
      if peer.state == "up":
        peer.down(f"silent for {silent:.0f} s")
        peer.hang_up()
      self._drop_queue(peer)
      if peer.incoming is not None:
        peer.incoming.forget()
    elif isinstance(peer, Dialed) and peer.state == "up" and silent > self._quiet_seconds:
      peer.down(f"quiet for {silent:.0f} s")  # a connection may be dead without a sign
      peer.hang_up()
    if peer.control.wire and self._inbox.crowded(peer.address):
      peer.heard_at = now  # it waits for us
    elif peer.control.wire:
      peer.control.wire.rest(False)
    if peer.state == "up" and now - peer.beat_at >= BEAT_SECONDS and peer.control.wire:
      peer.beat_at = now
      peer.control.wire.say(frames.Beat())
      count, reason = peer.take_untold()
      if count:
        peer.control.wire.say(frames.Dropped(count, reason))
    if isinstance(peer, Dialed) and not (self.fenced or self.broken):
      for channel in peer.channels if peer.state == "up" else [peer.control]:
        self._reach(peer, channel, now)

  def _drop_queue(self, peer: Peer, control: bool = True) -> None:
    self.counters.undelivered += peer.drop_queue(control)

  def _finish(self, now: float, stop_at: float) -> None:
    """Ends when all is sent and the far ends that live have seen the end, or the time is over."""
    self._admission.close()
    waits = False
    for peer in self._peers():
      if peer.state != "up" or now - peer.heard_at > QUIET_BEATS * BEAT_SECONDS:
        continue
      waits |= peer.control.wire is not None
      fragments = [channel.wire for channel in peer.bulk if channel.wire is not None]
      for wire in fragments or [peer.control.wire]:  # meanwhile control says that it lives
        if wire is not None and peer.idle():
          wire.leave()
    if not waits or now >= stop_at:
      for thread in self._threads:
        thread.stop()

  def _place(self) -> IoThread:
    """A thread for one more connection for fragments."""
    self._turn += 1
    return self._bulk[self._turn % len(self._bulk)]

  # --- dialing ------------------------------------------------------------------------------------

  def _redial(self, peer: Dialed, url: str) -> None:
    if url != peer.url:
      peer.url = url
      self._forget(peer, f"has moved to {url}")

  def _forget(self, peer: Dialed, reason: str) -> None:
    """Another peer may answer the next greeting."""
    peer.down(reason)
    peer.hang_up()
    for channel in peer.channels:
      channel.attempts, channel.next_at = 0, 0.0

  def _look_at_keys(self) -> None:
    """A shard whose key was replaced is dialed with the new one: the old one may be stolen."""
    for peer in self._dialed.values():
      if self._keys is not None and peer.key:
        try:
          key = self._keys.server_key(peer.address)
        except ConfigError:
          continue  # a file that is gone or cannot be read changes nothing
        if key != peer.key:
          peer.key = key
          self._drop_queue(peer, control=False)
          self._forget(peer, f"its key was replaced in {self._keys.folder}")

  def _reach(self, peer: Dialed, channel: Channel, now: float) -> None:
    """Makes a connection that is not there, or waits in vain for an answer."""
    if channel.wire is not None:
      if peer.state == "up" or now < channel.answer_until:
        return
      channel.hang_up()
      if peer.state == "connecting":
        peer.reason = f"nothing answers at {peer.url}"
    if channel.dialing or now < channel.next_at:
      return
    pause = self._settings.hello_seconds * 2 ** min(channel.attempts, MAX_DOUBLINGS)
    channel.attempts, channel.next_at = channel.attempts + 1, now + pause
    channel.dialing = True
    context = None
    try:
      if self._keys is not None:
        peer.key = peer.key or self._keys.server_key(peer.address)
        context = self._keys.context_to(peer.key)
    except (ConfigError, OSError) as error:  # its files are away
      self._connected(channel, (peer.url, peer.key), None, str(error))
      return
    report = functools.partial(self._control.call, self._connected, channel, (peer.url, peer.key))
    arguments = (peer.url, context, self._quiet_seconds, report)
    name = f"dial-{peer.address}"
    try:
      threading.Thread(target=connect, args=arguments, name=name, daemon=True).start()
    except RuntimeError as error:  # no more threads now
      report(None, str(error))

  def _connected(
    self, channel: Channel, place: tuple[str, bytes], connected: socket.socket | None, why: str
  ) -> None:
    """An attempt is over, of which `place` is url and key."""
    channel.dialing = False
    peer, bulk = channel.peer, channel.number != CONTROL
    elsewhere = not isinstance(peer, Dialed) or place != (peer.url, peer.key)
    if connected is None or elsewhere or (bulk and peer.state != "up"):
      if connected is not None:
        connected.close()
      elif not bulk:
        peer.down(why)
      return
    wire = FrameSocket(connected, channel)
    channel.answer_until = time.monotonic() + self._quiet_seconds
    wire.say(Attach(self._greeting.session, channel.number) if bulk else self._greeting)
    self.counters.resent += channel.attach(wire)
    thread = self._place() if bulk else self._control
    thread.call(thread.add, wire)

  def _on_answer(self, peer: Dialed, greeting: Greeting) -> None:
    reason = doubt(greeting.incarnation, peer.incarnation)
    if greeting.address != peer.address:
      reason = f"{greeting.address} answers at {peer.url}"
    if reason:
      peer.state, peer.reason = "refused", f"{peer.address} at {peer.url}: {reason}"
      peer.control.hang_up()
      return
    if peer.session and greeting.session != peer.session:  # it has restarted
      for channel in peer.bulk:
        channel.hang_up()
      self._drop_queue(peer, control=False)  # pushes were meant for the incarnation before
    peer.meet(greeting)
    for channel in peer.channels:
      channel.attempts = 0
    for channel in peer.bulk:
      channel.next_at = 0.0
    peer.control.next_at = time.monotonic() + self._settings.hello_seconds  # should it break now
    self._tend_at = 0.0


def connect(
  url: str,
  context: ssl.SSLContext | None,
  timeout_seconds: float,
  report: Callable[[socket.socket | None, str], None],
) -> None:
  """Connects, and shows and asks for keys; in a thread of its own, since names and far ends may
  take their time. Reports (the connection or None, why there is none)."""
  try:
    connected = socket.create_connection(host_and_port(url), timeout_seconds)
  except (OSError, UnicodeError) as error:  # the latter: a name that cannot be one
    report(None, f"nothing answers at {url} ({error})")
    return
  try:
    report(context.wrap_socket(connected) if context is not None else connected, "")
  except TimeoutError:
    connected.close()
    report(None, f"nothing answers at {url}")
  except OSError as error:  # as ssl.SSLError is
    connected.close()
    other = f"{url} has another key than the one listed here, or one side has no keys"
    report(None, f"{other} ({error})")
