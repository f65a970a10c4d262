"""The network transport: the interface of `network.transport` between processes, over TCP and TLS.

Syncer shards listen, all other roles dial them: one connection for control, some for fragments, so
that control never queues behind bulk. With keys each connection is TLS 1.3.

  endpoint.py    the role's interface: queues in and out; peers are dialed, accepted and monitored
  peers.py       one peer: its queue of messages, its connections and their threads, its payloads
  frames.py      frames, and how two ends find, greet and accept each other
  keys.py        the keys
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import secrets
import socket
import ssl
import threading
import time
import weakref
from typing import Any

import numpy as np

from ddiloco.config import NetworkConfig
from ddiloco.environment import raise_limit
from ddiloco.network import frames
from ddiloco.network.frames import CONTROL, Door, Greeting, GreetingRefused
from ddiloco.network.keys import Keys
from ddiloco.network.peers import Channel, FrameSocket, IoThread, Peer
from ddiloco.network.transport import Endpoint, Post, RunIdentity
from ddiloco.observe.guards import Guard, ended, warn
from ddiloco.protocol import messages
from ddiloco.protocol.values import replace

BEAT_SECONDS = 1.0
TEND_SECONDS = 0.1  # between two checks of all peers
STOOD_STILL_SECONDS = 1.0  # if two checks are so far apart, the process was stopped
LOOK_SECONDS = 1.0  # between two checks of keys
# A shard that is silent for so many beats, or this share of `silence_seconds`, is dialed again.
QUIET_BEATS, QUIET_SHARE = 3, 1 / 3
MAX_DOUBLINGS = 4  # of the pause between two attempts
LEAVE_SECONDS = 5.0  # for a far end to read why it is shown out
MOST_THREADS = 4  # for fragments; each may encrypt on a core of its own


class Refused(Exception):
  """The far end does not let us in, or is not who we look for."""


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
    super().__init__(address, run.queue_bytes)
    self.run, self.incarnation = run, incarnation
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
    if listener and (reason := frames.near_only(listener, self.bound)):
      warn(f"{address} listens at {reason}.")
    self.control_thread = IoThread(f"network-{address}", self._failed)
    count = min(MOST_THREADS, os.cpu_count() or 1)
    self._bulk = [IoThread(f"bulk-{address}", self._failed) for _ in range(count)]
    self._threads = [self.control_thread, *self._bulk]
    self.bulk_threads = itertools.cycle(self._bulk)  # each for the next channel of fragments
    self._tended_at = time.monotonic()
    self._stop_at: float | None = None
    self.control_thread.call(self._tick)
    for thread in self._threads:
      thread.start()
    self._door = None
    if listener:
      most = min(frames.MOST_STRANGERS, raise_limit() // 4)
      self._door = Door(listener, keys, self._meet, most, frames.STRANGER_SECONDS, self.counters)
    if keys is not None:
      follow = functools.partial(self._follow, keys)
      threading.Thread(target=follow, name=f"keys-{address}", daemon=True).start()

  # --- for the role, from any thread --------------------------------------------------------------

  def dial(self, address: str, url: str) -> None:
    """Connects to the shard `address` at `url`, and again whenever the connection breaks."""
    if address not in self._dialed:
      peer = self._dialed[address] = Peer(address, self._settings.streams, self, url)
      reach = functools.partial(self._reach, peer)
      threading.Thread(target=reach, name=f"dial-{address}", daemon=True).start()

  def _way(self, to: str) -> Post | None:
    peer = max(self._named(to), key=lambda p: (p.state == "up", p.incarnation), default=None)
    return None if peer is None else peer.post

  def unsent(self, peer: str) -> int:
    return sum(each.queued_bytes for each in self._named(peer))

  def close(self, linger_seconds: float = 1.0) -> None:
    """Sends the queued messages, for at most so long, and disconnects."""
    super().close()
    self._stop_at = self._stop_at or time.monotonic() + linger_seconds
    if self._door:
      self._door.close()
    self.control_thread.call(self._tend)
    for thread in self._threads:
      ended(thread, linger_seconds + 5.0)

  def links(self) -> dict[str, dict[str, Any]]:
    """For display: every peer's state, reason, and seconds since it was heard."""
    now = time.monotonic()
    return {
      peer.address: {
        "state": peer.state,
        "reason": peer.reason,
        "silent_seconds": round(now - peer.heard_at, 1),
        "queued_bytes": peer.queued_bytes,
      }
      for peer in self._peers()
    }

  def _peers(self) -> list[Peer]:
    return [*self._dialed.values(), *self._accepted.values()]

  # --- events of connections, in the connections' threads -----------------------------------------

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
        self.put(peer.address, header, None, peer.incarnation)
      case frames.Beat():
        pass
      case GreetingRefused(fenced, reason, after, silent_seconds) if peer.url:
        peer.state, peer.reason = "refused", f"{peer.url}: {reason}"
        if fenced:
          self.outnumbered, self.fenced = (after, silent_seconds), reason
          super().close()
      case _:
        self.on_malformed(peer.address, f"a {type(frame).__name__} that was not asked for")

  def on_lost(self, channel: Channel, wire: FrameSocket, reason: str) -> None:
    if channel.wire is wire:
      channel.detach()
      if channel.number == CONTROL and channel.peer.state == "up":  # who is at the url now?
        channel.peer.state, channel.peer.reason = "connecting", f"its connection broke ({reason})"

  def _failed(self, error: Exception) -> None:
    self.broken = self.broken or f"its network thread failed: {error!r}"
    super().close()  # the role must not go on without a network
    for thread in self._threads:  # all of them: the control thread, which ends them, may be gone
      thread.stop()

  # --- the thread for control ---------------------------------------------------------------------

  def _tick(self) -> None:
    self.control_thread.loop.call_later(TEND_SECONDS, self._tick)
    self._tend()

  def _tend(self) -> None:
    """Periodic work for all peers."""
    now = time.monotonic()
    still, self._tended_at = now - self._tended_at, now
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
      peer.hang_up()
      peer.drop_queue()
      peer.forget()
    wire = peer.control.wire
    if wire is not None:
      if wire.waits:  # the peer waits for us: it is not silent
        peer.heard_at = now
        wire.wake()
      # A peer that sends and does not read gets no more beats: they would pile up here.
      if now - peer.beat_at >= BEAT_SECONDS and not wire.behind:
        peer.beat_at = now
        wire.say(frames.Beat())

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
    alive = [p for p in self._peers() if now - p.heard_at <= QUIET_BEATS * BEAT_SECONDS]
    waits = [peer for peer in alive if self._leave(peer)]
    if not waits or now >= stop_at:
      for thread in self._threads:
        thread.stop()

  def _leave(self, peer: Peer) -> bool:
    """Ends the connections to a peer once all is sent; whether that is still under way."""
    if peer.state != "up":  # its connection may have just broken: it is dialed once more
      once = peer.state == "connecting" and peer.url and peer.attempts < 2
      return bool(once) and not peer.idle()
    if peer.idle():
      bulk = [channel for channel in peer.bulk if channel.wire is not None]
      for channel in bulk or [peer.control]:  # control comes last: it carries the beats
        if (wire := channel.wire) is not None:
          wire.leave()
    return peer.control.wire is not None

  # --- peers that dialed us -----------------------------------------------------------------------

  def _meet(self, connected: socket.socket) -> bool:
    """Greets the far end of a new connection; in a thread of its own."""
    greeting = frames.read_frame(connected)
    if not isinstance(greeting, Greeting):
      raise messages.MalformedMessage("no greeting")
    refusal = self.control_thread.ask(self.let_in, connected, greeting)
    if refusal is not None and greeting.stream == CONTROL:
      connected.sendall(frames.encode(refusal))
    return refusal is None

  def let_in(self, connected: socket.socket, greeting: Greeting) -> GreetingRefused | None:
    """Gives a connection to the peer that its first frame names; why it is refused, or None.

    With keys, that peer must be the owner of the connection's key, and the key must stay listed
    while the peer is connected: removing the key from the folder ends present connections too.
    """
    known, key = self._accepted.get(greeting.address), frames.certificate(connected)
    peer = known if known is not None and known.session == greeting.session else None
    owner = (self.keys.owner(key) or "") if self.keys else None
    reason = frames.objection(self.run, greeting, owner)
    if reason:
      return GreetingRefused(False, reason)
    if greeting.stream != CONTROL:
      if not peer or key != peer.key or greeting.stream >= len(peer.bulk):
        return GreetingRefused(False, "of no session that is here")
      peer.bulk[greeting.stream].attach(connected)
      return None
    if known is not None and known.outnumbers(greeting):
      reason = f"incarnation {known.incarnation} of {known.address} is here already"
      silent_seconds = int(time.monotonic() - known.heard_at)
      return GreetingRefused(True, reason, known.incarnation + 1, silent_seconds)
    if peer is None:
      if known is not None:
        newer = f"a newer incarnation of {known.address} is here ({greeting.incarnation})"
        self._show_out(known, newer, fenced=True)
      peer = Peer(greeting.address, greeting.streams, self, key=key)
      self._accepted[peer.address] = peer
    peer.control.attach(connected).say(self._greeting)
    peer.meet(greeting)
    return None

  def _show_out(self, peer: Peer, reason: str, fenced: bool) -> None:
    if (wire := peer.control.detach()) is not None:
      self.counters.refused += 1
      wire.say(GreetingRefused(fenced, reason))
      wire.leave()
      self.control_thread.loop.call_later(LEAVE_SECONDS, wire.hang_up)
    peer.hang_up()
    # The old one's memory is free now; a collection frees the peer, since its channels refer to it.
    peer.forget()
    peer.drop_queue()
    if self._accepted.get(peer.address) is peer:
      del self._accepted[peer.address]

  # --- peers that we dial -------------------------------------------------------------------------

  def _begin_anew(self, peer: Peer, reason: str) -> None:
    """Ends the peer's connections; if we dial it, another incarnation may answer the greeting."""
    peer.state, peer.reason = "connecting", reason
    peer.hang_up()

  def _reach(self, peer: Peer) -> None:
    """Makes the connections that are missing, control first, again and again; in a thread of its
    own, since names, keys and the far end may be slow."""
    while self.control_thread.is_alive() and not self.fenced:
      try:
        for channel in peer.channels:
          closing = self._stop_at is not None and peer.idle()  # dials only for queued messages
          if channel.wire is None and not closing:
            self._dial(channel)
        peer.attempts = 0
      except Exception as error:  # of any kind: the next attempt may succeed
        peer.attempts += 1
        if channel is peer.control:
          state = "refused" if isinstance(error, Refused) else "connecting"
          peer.state, peer.reason = state, str(error)
      pause_seconds = self._settings.hello_seconds * 2 ** min(peer.attempts, MAX_DOUBLINGS)
      self.control_thread.join(pause_seconds)  # shorter if this endpoint ends

  def _dial(self, channel: Channel) -> None:
    context, key = None, b""
    if self.keys is not None:
      key = self.keys.server_key(channel.peer.address)
      context = self.keys.context_to(key)
    connected = frames.connect(channel.peer.url, context, self._quiet_seconds)
    try:
      answer = self._greet(channel, connected)
      if not self.control_thread.ask(self._take, channel, key, connected, answer):
        raise ConnectionError("the connection for control broke, or another key is listed now")
    except BaseException:
      connected.close()
      raise

  def _greet(self, channel: Channel, connected: socket.socket) -> Greeting | None:
    """The answer to our greeting; none on a connection for fragments.

    Raises:
      Refused: says why.
    """
    peer = channel.peer
    try:
      connected.sendall(frames.encode(replace(self._greeting, stream=channel.number)))
      answer = frames.read_frame(connected) if channel.number == CONTROL else None
    except (OSError, messages.MalformedMessage) as error:
      # The far end checks our key after the handshake has ended on this side.
      if isinstance(error, ssl.SSLError) and "ALERT" in str(error.reason):
        raise Refused(f"{peer.url}: the key of {self.address} is not listed") from error
      late = isinstance(error, TimeoutError)
      why = ": it stands still, or is busy" if late else ", or one side has no keys"
      raise ConnectionError(f"{peer.url} answers no greeting{why} ({error})") from error
    if isinstance(answer, GreetingRefused):
      self.on_frame(peer, answer)
      raise Refused(f"{peer.url}: {answer.reason}")
    if isinstance(answer, Greeting):
      if answer.address != peer.address:
        raise Refused(f"{answer.address} answers at {peer.url}")
      if reason := frames.shard_objection(answer.incarnation, peer.incarnation):
        raise Refused(f"{peer.address} at {peer.url}: {reason}")
      return answer
    return None

  def _take(
    self, channel: Channel, key: bytes, connected: socket.socket, greeting: Greeting | None
  ) -> bool:
    """Takes a connection, unless the peer is down, or has another key by now."""
    peer = channel.peer
    if peer.key not in (b"", key) or not (greeting or peer.state == "up"):
      return False
    peer.key = key
    if greeting is None:
      channel.attach(connected)
      return True
    if peer.session and greeting.session != peer.session:  # the peer has restarted
      for each in peer.bulk:
        each.hang_up()
      peer.drop_queue(control=False)  # queued pushes were for its old incarnation
    channel.attach(connected)
    peer.meet(greeting)
    return True


# --- Memory for arriving payloads

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
