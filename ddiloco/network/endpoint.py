"""The network transport: the interface of `network.transport` between processes, over TCP and TLS.

Syncer shards listen, all other roles dial them: one connection for control, some for fragments, so
that control never queues behind bulk. With keys each connection is TLS 1.3.

  endpoint.py    the role's interface: queues in and out; peers are dialed, accepted and monitored
  peers.py       one peer: whether it is accepted, its queue of messages, and arriving payloads
  frames.py      the frames between two endpoints, the connections, and their threads
  keys.py        the keys
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import resource
import secrets
import socket
import ssl
import threading
import time
from typing import Any

from ddiloco.config import NetworkConfig
from ddiloco.network import frames, peers
from ddiloco.network.frames import CONTROL, FrameSocket, Greeting, GreetingRefused, IoThread
from ddiloco.network.keys import Keys
from ddiloco.network.peers import BufferPool, Channel, Peer
from ddiloco.network.transport import Endpoint, RunIdentity
from ddiloco.observe.guards import Guard, ended
from ddiloco.protocol import messages

BEAT_SECONDS = 1.0
TEND_SECONDS = 0.1  # between two checks of all peers
STOOD_STILL_SECONDS = 1.0  # if two checks are so far apart, the process was stopped
LOOK_SECONDS = 1.0  # between two checks of keys
# A shard that is silent for so many beats, or this share of `silence_seconds`, is dialed again.
QUIET_BEATS, QUIET_SHARE = 3, 1 / 3
MAX_DOUBLINGS = 4  # of the pause between two attempts
MOST_THREADS = 4  # for fragments; each may encrypt on a core of its own


class NetworkEndpoint(Endpoint):
  """One role's connection to the others.

  Args:
    address: of this role, e.g. "learner-3".
    incarnation: of this role; a greater one fences a smaller one.
    run: the run it belongs to.
    settings: sizes and timeouts.
    bind: where a shard listens, "tcp://HOST:PORT"; port 0 picks a free one.
    keys: of this role; None: without TLS, for loopback.

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
    super().__init__(address, run)
    self.incarnation = incarnation
    self.buffers = BufferPool()
    self.numbers = itertools.count()  # of messages with payload, to all peers
    self.fenced = ""  # why this endpoint may send no more, "": it may
    self.broken = ""  # why this endpoint has failed, "": it works
    # If fenced: (least incarnation that may follow the newer one once that is dead, seconds since
    # the newer one was heard). (0, 0): not fenced, or for good.
    self.outnumbered = (0, 0)
    self.keys, self._settings = keys, settings
    self._quiet_seconds = max(QUIET_BEATS * BEAT_SECONDS, QUIET_SHARE * settings.silence_seconds)
    who = (run.run_id, run.plan_id, address, incarnation, secrets.token_bytes(frames.SESSION_BYTES))
    self._greeting = Greeting(*who, settings.streams)
    # Changed in one thread each; others read an item, or make a list of all, in one step.
    self._dialed: dict[str, Peer] = {}
    self._accepted: dict[str, Peer] = {}
    listener, self.bound = frames.bind(bind) if bind is not None else (None, "")
    self.control_thread = IoThread(f"network-{address}", self._failed)
    self._door = Door(listener, self) if listener else None
    count = min(MOST_THREADS, os.cpu_count() or 1)
    self._bulk = [IoThread(f"bulk-{address}", self._failed) for _ in range(count)]
    self._threads = [self.control_thread, *self._bulk]
    self._places = itertools.cycle(self._bulk)  # the thread for the next fragment connection
    self._tended_at = time.monotonic()
    self._stop_at: float | None = None
    self._timer: asyncio.Handle = self.control_thread.loop.call_soon(self._tick)
    for thread in self._threads:
      thread.start()
    if keys is not None:
      follow = functools.partial(self._follow, keys)
      threading.Thread(target=follow, name=f"keys-{address}", daemon=True).start()

  # --- for the role, from any thread --------------------------------------------------------------

  def dial(self, address: str, url: str) -> None:
    """Connects to the shard `address` at `url`; a later call may give another url."""
    if address not in self._dialed:
      self._dialed[address] = Peer(address, self._settings.streams, self, url)
    self.control_thread.call(self._redial, self._dialed[address], url)

  def _post(self, to: str, header: bytes, payload: messages.Payload) -> int:
    peer = self._find(to)
    if peer is None or self.fenced or self.broken:
      return 1
    if payload is None:
      return peer.post_control(header)
    return int(not peer.post_bulk(header, memoryview(payload).cast("B")))

  def _find(self, to: str) -> Peer | None:
    return max(self._named(to), key=lambda p: (p.state == "up", p.incarnation), default=None)

  def unsent(self, peer: str) -> int:
    return sum(each.queued_bytes for each in self._named(peer))

  def close(self, linger_seconds: float = 1.0) -> None:
    """Sends the queued messages, for at most so long, and disconnects."""
    super().close()
    self._stop_at = self._stop_at or time.monotonic() + linger_seconds
    self.control_thread.call(self._tick_soon)
    for thread in self._threads:
      ended(thread, linger_seconds + 5.0)
    if self._door and not self.control_thread.is_alive():
      self._door.close()  # a control thread that has failed has not done so

  def links(self) -> dict[str, dict[str, Any]]:
    """For display: every peer's state, reason, seconds since it was heard, and how many messages of
    ours it has dropped and why."""
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
    return [*self._dialed.values(), *self._accepted.values()]

  # --- events of connections, in the connections' threads -----------------------------------------

  def on_malformed(self, peer: Peer, reason: str) -> None:
    self.counters.malformed += 1
    peer.count_dropped(reason)

  def _dropped(self, sender: str, reason: str) -> None:
    for peer in self._named(sender):
      peer.count_dropped(reason)

  def _taken(self, sender: str) -> None:
    for peer in self._named(sender):
      peer.wake_bulk()

  def _named(self, address: str) -> list[Peer]:
    """The peers of this address: two shards that dial each other have both kinds."""
    both = self._dialed.get(address), self._accepted.get(address)
    return [peer for peer in both if peer is not None]

  def on_frame(self, peer: Peer, frame: frames.Frame) -> None:
    match frame:
      case frames.Control(header):
        if peer.state == "up":
          self.put(peer.address, header, None, peer.incarnation)
      case frames.Beat(count, reason):
        if count:
          peer.drops = (peer.drops[0] + count, reason)
      case Greeting() if peer.url:
        self._on_answer(peer, frame)
      case GreetingRefused(fenced, reason, after, silent_seconds) if peer.url:
        peer.state, peer.reason = "refused", f"{peer.url}: {reason}"
        if fenced:
          self.outnumbered, self.fenced = (after, silent_seconds), reason
          super().close()
      case _:
        self.on_malformed(peer, f"a {type(frame).__name__} that was not asked for")

  def on_lost(self, channel: Channel, wire: FrameSocket, error: Exception) -> None:
    if channel.wire is not wire:
      return
    peer = channel.peer
    channel.detach()
    if channel.number == CONTROL and peer.state == "up":
      peer.down("its connection broke")  # another peer may be at the url now
    elif channel.number == CONTROL and peer.state == "connecting" and peer.url:
      refused = isinstance(error, ssl.SSLError) and "ALERT" in str(error.reason)
      if refused:  # the far end checks our key after the handshake has ended on this side
        peer.state, peer.reason = "refused", f"{peer.url}: the key of {self.address} is not listed"
      else:
        peer.reason = f"{peer.url} answers no greeting, or one side has no keys ({error})"
    self._tick_soon()

  def _failed(self, error: Exception) -> None:
    self.broken = self.broken or f"its network thread failed: {error!r}"
    super().close()  # the role must not go on without a network
    for thread in self._threads:  # all of them: the control thread, which ends them, may be gone
      thread.stop()

  # --- the thread for control ---------------------------------------------------------------------

  def _tick_soon(self) -> None:
    self._timer.cancel()
    self._timer = self.control_thread.loop.call_soon(self._tick)

  def _tick(self) -> None:
    """Periodic work for all peers."""
    self._timer = self.control_thread.loop.call_later(TEND_SECONDS, self._tick)
    now = time.monotonic()
    still, self._tended_at = now - self._tended_at, now
    if self._door:
      self._door.cut_off(now)
    self.buffers.release(now)
    for peer in self._peers():
      if still > STOOD_STILL_SECONDS:  # messages that came meanwhile are still in the kernel
        peer.heard_at = min(now, peer.heard_at + still)
      self._look_after(peer, now)
    if self._stop_at is not None:
      self._finish(now, self._stop_at)

  def _look_after(self, peer: Peer, now: float) -> None:
    silent, patience = now - peer.heard_at, self._settings.silence_seconds
    # Peers that we can dial are dialed again earlier: a connection may be dead without a sign.
    if peer.state == "up" and silent > min(patience, self._quiet_seconds if peer.url else patience):
      self._begin_anew(peer, f"silent for {silent:.0f} s")
    if silent > patience:
      peer.drop_queue()
      peer.incoming.forget()
    wire = peer.control.wire
    if wire is not None:
      if wire.waits:  # the peer waits for us: it is not silent
        peer.heard_at = now
        wire.wake()
      # A peer that sends and does not read gets no more beats: they would pile up here.
      if peer.state == "up" and now - peer.beat_at >= BEAT_SECONDS and not wire.behind:
        peer.beat_at = now
        wire.say(frames.Beat(*peer.take_untold()))
    if peer.url and not (self.fenced or self.broken):
      for channel in peer.channels if peer.state == "up" else [peer.control]:
        if self._stop_at is None or not peer.idle():  # when closing, only for queued messages
          self._reach(channel, now)

  def _follow(self, keys: Keys) -> None:
    """Reads the keys again and again; in a thread of its own, since the disk may be slow."""
    guard = Guard(f"the keys of {self.address}")
    while self.control_thread.is_alive():
      guard(keys.refresh)
      self.control_thread.call(self._check_keys, keys)
      self.control_thread.join(LOOK_SECONDS)

  def _check_keys(self, keys: Keys) -> None:
    """Disconnects peers whose key is no longer listed: it may be stolen."""
    for peer in self._peers():
      listed = keys.listed(peer.address)
      if peer.key in (b"", listed):
        continue
      reason = f"the key of {peer.address} is not listed here any more"
      if not peer.url:
        self._show_out(peer, reason, fenced=False)
      else:  # dialed again with the key that is listed now
        peer.key = listed
        peer.drop_queue(control=False)
        self._begin_anew(peer, reason)

  def _finish(self, now: float, stop_at: float) -> None:
    """Ends the threads when all is sent and all live peers have seen the end, or time is over."""
    if self._door:
      self._door.close()
    alive = [p for p in self._peers() if now - p.heard_at <= QUIET_BEATS * BEAT_SECONDS]
    waits = [peer for peer in alive if self._leave(peer)]
    if not waits or now >= stop_at:
      for thread in self._threads:
        thread.stop()

  def _leave(self, peer: Peer) -> bool:
    """Ends the connections to a peer once all is sent; whether that is still under way."""
    if peer.state != "up":  # its connection may have just broken: it is dialed once more
      once = peer.state == "connecting" and peer.url and peer.control.attempts < 2
      return bool(once) and not peer.idle()
    if peer.idle():
      bulk = [channel for channel in peer.bulk if channel.wire is not None]
      for channel in bulk or [peer.control]:  # control comes last: it carries the beats
        if (wire := channel.wire) is not None:
          wire.leave()
    return peer.control.wire is not None

  # --- peers that dialed us -----------------------------------------------------------------------

  def let_in(self, wire: FrameSocket, greeting: Greeting) -> GreetingRefused | None:
    """Gives a connection to the peer that its first frame names.

    With keys, that peer must be the owner of the connection's key, and the key must stay listed
    while the peer is connected: removing the key from the folder ends present connections too.

    Returns the answer for a connection that no peer gets; None: without an answer.
    """
    known = self._accepted.get(greeting.address)
    peer = known if known is not None and known.session == greeting.session else None
    owner = (self.keys.owner(wire.key()) or "") if self.keys else None
    reason = peers.objection(self.run, greeting, owner)
    if greeting.stream != CONTROL:
      if peer and not reason and wire.key() == peer.key and greeting.stream < len(peer.bulk):
        peer.bulk[greeting.stream].attach(wire)
        self.control_thread.call(self.control_thread.hand_over, wire, next(self._places))
      return None
    if reason:
      return GreetingRefused(False, reason)
    if known is not None and known.outnumbers(greeting):
      reason = f"incarnation {known.incarnation} of {known.address} is here already"
      silent_seconds = int(time.monotonic() - known.heard_at)
      return GreetingRefused(True, reason, known.incarnation + 1, silent_seconds)
    if peer is None:
      if known is not None:
        newer = f"a newer incarnation of {known.address} is here ({greeting.incarnation})"
        self._show_out(known, newer, fenced=True)
      peer = Peer(greeting.address, greeting.streams, self, key=wire.key())
      self._accepted[peer.address] = peer
    peer.control.attach(wire)
    wire.say(self._greeting)
    peer.meet(greeting)
    return None

  def _show_out(self, peer: Peer, reason: str, fenced: bool) -> None:
    wire = peer.control.detach()
    if wire is not None and self._door:
      self._door.send_off(wire, GreetingRefused(fenced, reason))
    peer.hang_up()
    # The old one's memory is free now; a collection frees the peer, since its channels refer to it.
    peer.incoming = peers.Incoming(peer, peer.incarnation)
    peer.drop_queue()
    if self._accepted.get(peer.address) is peer:
      del self._accepted[peer.address]

  # --- peers that we dial -------------------------------------------------------------------------

  def _redial(self, peer: Peer, url: str) -> None:
    if url != peer.url:
      peer.url = url
      self._begin_anew(peer, f"has moved to {url}")

  def _begin_anew(self, peer: Peer, reason: str) -> None:
    """Ends the peer's connections and dials again; another incarnation may answer the greeting."""
    peer.down(reason)
    peer.hang_up()
    peer.dial_soon()

  def _reach(self, channel: Channel, now: float) -> None:
    """Dials if there is no connection, or if the present one has waited too long for an answer."""
    peer = channel.peer
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
    dial = functools.partial(self._dial, channel, peer.url, peer.key)
    try:
      threading.Thread(target=dial, name=f"dial-{peer.address}", daemon=True).start()
    except RuntimeError as error:  # no more threads are possible
      self._connected(channel, peer.url, peer.key, error)

  def _dial(self, channel: Channel, url: str, key: bytes) -> None:
    """Runs in a thread of its own: name resolution, the far end and the disk may be slow."""
    try:
      context = None
      if self.keys is not None:
        key = key or self.keys.server_key(channel.peer.address)
        context = self.keys.context_to(key)
      connected = frames.connect(url, context, self._quiet_seconds)
    except Exception as error:  # of any kind: without an answer the peer is never dialed again
      connected = error
    self.control_thread.call(self._connected, channel, url, key, connected)

  def _connected(
    self, channel: Channel, url: str, key: bytes, connected: socket.socket | Exception
  ) -> None:
    """Ends an attempt to connect with this url and key."""
    channel.dialing = False
    peer, bulk = channel.peer, channel.number != CONTROL
    if isinstance(connected, Exception):
      if not bulk:
        peer.down(str(connected))
      return
    if url != peer.url or peer.key not in (b"", key) or (bulk and peer.state != "up"):
      connected.close()
      return
    peer.key = key
    wire = FrameSocket(connected, channel)
    channel.answer_until = time.monotonic() + self._quiet_seconds
    wire.say(dataclasses.replace(self._greeting, stream=channel.number))
    channel.attach(wire)
    thread = next(self._places) if bulk else self.control_thread
    thread.call(thread.add, wire)

  def _on_answer(self, peer: Peer, greeting: Greeting) -> None:
    reason = peers.doubt(greeting.incarnation, peer.incarnation)
    if greeting.address != peer.address:
      reason = f"{greeting.address} answers at {peer.url}"
    if reason:
      peer.state, peer.reason = "refused", f"{peer.address} at {peer.url}: {reason}"
      peer.control.hang_up()
      return
    if peer.session and greeting.session != peer.session:  # the peer has restarted
      for channel in peer.bulk:
        channel.hang_up()
      peer.drop_queue(control=False)  # queued pushes were for its old incarnation
    peer.meet(greeting)
    peer.dial_soon()
    peer.control.next_at = time.monotonic() + self._settings.hello_seconds  # if it breaks at once
    self._tick_soon()


# --- The listening side

# Each connection costs a descriptor; when none is left, the process can open no file and accept no
# member. So this process raises its limit as far as the system allows, and strangers (connections
# without a known peer) get at most a quarter of it. A stranger that takes too long is cut off; of
# too many strangers, the oldest are.
STRANGER_SECONDS = 60.0  # until a connection must have a known peer
MOST_STRANGERS = 1024
MOST_DESCRIPTORS = 10_240  # where the system names no limit, or one that it does not grant


def raise_limit() -> int:
  """Raises this process's limit of descriptors as far as the system allows; returns the limit."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  for limit in (hard, MOST_DESCRIPTORS):  # a system may grant less than its hard limit
    with contextlib.suppress(ValueError, OSError):
      if limit == resource.RLIM_INFINITY or limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
      break
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return soft if soft != resource.RLIM_INFINITY else MOST_DESCRIPTORS


class Door(frames.Owner):
  """Accepts connections; owns each until its first frame names a peer, and refused ones to the end.

  Only the endpoint's control thread uses it.
  """

  def __init__(self, listener: socket.socket, endpoint: NetworkEndpoint):
    self._listener, self._endpoint = listener, endpoint
    self._loop, self._counters = endpoint.control_thread.loop, endpoint.counters
    self._strangers: dict[FrameSocket, float] = {}  # since when, oldest first
    self._sent_off: set[FrameSocket] = set()  # strangers that are refused, and counted already
    self._most = min(MOST_STRANGERS, raise_limit() // 4)
    with contextlib.suppress(OSError):  # our key cannot be read now: the first comer asks again
      if endpoint.keys is not None:
        endpoint.keys.context()  # now, since it takes long with many keys
    self._listen()

  def _listen(self) -> None:
    if self._listener.fileno() >= 0:
      self._loop.add_reader(self._listener, self._on_comer)

  def close(self) -> None:
    """Accepts no more connections."""
    if self._listener.fileno() >= 0:
      self._loop.remove_reader(self._listener)
      self._listener.close()

  def _on_comer(self) -> None:
    try:
      connected, _ = self._listener.accept()
    except OSError:  # no descriptor is left: a waiting connection would wake us again and again
      self._loop.remove_reader(self._listener)
      self._loop.call_later(TEND_SECONDS, self._listen)
      return
    try:
      keys = self._endpoint.keys
      wire = FrameSocket(connected, self, keys.context() if keys else None)
    except OSError:  # our key cannot be read now, or the far end has gone
      connected.close()
      return
    now = self._strangers[wire] = time.monotonic()
    self._endpoint.control_thread.add(wire)
    self.cut_off(now)

  def cut_off(self, now: float) -> None:
    """Ends strangers' connections that are too old, and of too many the oldest."""
    too_many = len(self._strangers) - self._most
    for number, (wire, since) in enumerate([*self._strangers.items()]):
      if number >= too_many and now - since <= STRANGER_SECONDS:
        break
      wire.close()
      self.lost(wire)

  def send_off(self, wire: FrameSocket, answer: GreetingRefused | None = None) -> None:
    """Refuses a connection; the far end has `STRANGER_SECONDS` to read the answer, if any."""
    wire.owner = self
    self._strangers.pop(wire, None)
    self._strangers[wire] = time.monotonic()  # the newest one
    if wire not in self._sent_off:
      self._sent_off.add(wire)
      self._counters.refused += 1
    if answer is not None:
      wire.say(answer)
    wire.leave()

  # --- as the owner of a connection ---------------------------------------------------------------

  def malformed(self, wire: FrameSocket, reason: str) -> None:
    self._counters.malformed += 1
    self.send_off(wire)

  def lost(self, wire: FrameSocket, error: Exception | None = None) -> None:
    self._strangers.pop(wire, None)
    self._counters.refused += wire not in self._sent_off
    self._sent_off.discard(wire)

  def arrived(self, wire: FrameSocket, frame: frames.Frame) -> None:
    if not isinstance(frame, Greeting):
      self.malformed(wire, "no greeting")
      return
    answer = self._endpoint.let_in(wire, frame)
    if wire.owner is self:
      self.send_off(wire, answer)
    else:
      self._strangers.pop(wire)
