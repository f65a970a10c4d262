"""The network transport: the contract of `network.transport` between processes, over ZeroMQ.

Syncer shards listen, everybody dials them. A listening endpoint has two ports: control, and right
after it fragments, each with its own connections, so that control never queues behind bulk.

  network.py     what a role sees: queues in, queues out
  io_thread.py     the thread that owns all sockets: greetings, control, chunks, signs of life
  door.py        who dialed us: let in, looked at again, cut off; connections.py: which connections
  peers.py       one far end each: who it is, how it is reached
  transfers.py   fragments split into chunks, acknowledged, sent again, put together
  greetings.py   who may speak, and why not
  frames.py      what the two ends say to each other
  sockets.py     ZeroMQ and its options; keys.py: who may speak
"""

from __future__ import annotations

import threading
import time
from typing import Any

from ddiloco.config import NetworkConfig
from ddiloco.network.handshake import RunIdentity
from ddiloco.network.io_thread import IoThread
from ddiloco.network.keys import Keys
from ddiloco.network.transport import Counters, Delivery, Inbox, Spoil
from ddiloco.observe.guards import ended
from ddiloco.protocol import wire
from ddiloco.protocol.messages import Message


class NetworkEndpoint:
  """One role's connection to the others.

  Args:
    address: who this is, e.g. "learner-3".
    incarnation: of this role; a greater one fences a smaller one.
    run: the run it belongs to.
    settings: sizes and timeouts.
    bind: where a shard listens, "tcp://HOST:PORT"; port 0 picks a free one. Fragments use the next
      port.
    keys: CURVE keys of this role; None speaks plainly, for loopback.

  Raises:
    OSError: the ports are taken, or the address is not this machine's.
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
    self._run = run
    self._inbox = Inbox(run.run_id, run.plan_id, self.counters, dropped=self._dropped)
    self._io_thread = IoThread(
      address, incarnation, run, settings, self._inbox, self.counters, keys
    )
    self.bound = self._io_thread.listen(bind) if bind is not None else ""
    self._thread = threading.Thread(
      target=self._io_thread.work, name=f"network-{address}", daemon=True
    )
    self._thread.start()

  def dial(self, address: str, url: str) -> None:
    """Connects to the shard `address` at `url`; a second time: it is somewhere else now."""
    self._io_thread.dial(address, url)

  def send(self, to: str, message: Message, spoil: Spoil | None = None) -> int:
    header, payload = wire.encode(message, self._run.run_id, self._run.plan_id)
    header = header if spoil is None else spoil(header)
    size = wire.frame_bytes(header, payload)
    if not self._inbox.closed:
      self.counters.sent_bytes += size
      self.counters.payload_bytes += size - len(header)
      view = None if payload is None else memoryview(payload).cast("B")
      if not self._io_thread.post(to, header, view):
        self.counters.undelivered += 1
    return size

  def receive(self, timeout_seconds: float) -> Delivery | None:
    return self._inbox.receive(timeout_seconds)

  @property
  def waiting(self) -> int:
    return self._inbox.waiting

  def _dropped(self, sender: str, reason: str) -> None:
    self._io_thread.dropped(sender, reason)

  def wake(self) -> None:
    self._inbox.wake()

  def close(self, linger_seconds: float = 1.0) -> None:
    """Sends what is queued, for at most so long, and disconnects."""
    self._inbox.close()
    self._io_thread.stop(linger_seconds)
    ended(self._thread, linger_seconds + 5.0)

  @property
  def fenced(self) -> str:
    """Why this endpoint may not speak any more (a newer incarnation is here); "" if it may."""
    return self._io_thread.fenced

  @property
  def outnumbered(self) -> tuple[int, int]:
    """(least incarnation that may come after the newer one, seconds since that was heard).

    (0, 0) if this endpoint is not fenced, or for good.
    """
    return self._io_thread.outnumbered

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
      for peer in self._io_thread.peers()
    }
