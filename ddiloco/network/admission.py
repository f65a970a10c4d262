"""The listening side of a network endpoint: who comes in, who stays, who is cut off.

A peer is known by its greeting. With keys, every frame must come from a connection whose key
belongs to that peer, and the key must be listed for as long as the peer is here: removing it from
the folder ends the connection, not only the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from ddiloco.config import NetworkConfig
from ddiloco.network import frames
from ddiloco.network.frames import SESSION_BYTES, Greeting
from ddiloco.network.handshake import RunIdentity, control_route, objection, refusal, session_of
from ddiloco.network.keys import Arrivals, Keys
from ddiloco.network.peers import Accepted, Peer
from ddiloco.network.sockets import (
  LEAST_FREE,
  Connections,
  Sockets,
  cut,
  descriptor_of,
  key_of,
  open_descriptors,
  raise_limit,
  send,
  user_of,
)
from ddiloco.network.transport import Counters
from ddiloco.protocol.wire import MalformedMessage

LOOK_SECONDS = 1.0  # between two looks at keys and connections
KEYS_A_LOOK = 100  # each is a file to read
EVENTS_A_TURN = 1000  # of connections


class Admission:
  """Everybody who dialed us. Only the endpoint's network thread uses it.

  Args:
    run: the run it belongs to.
    settings: sizes and timeouts.
    counters: the endpoint's.
    keys: CURVE keys of this role; None: without.
    answer: the greeting for a peer, called as answer(peer, its session).
    give_up: forgets what waits for a peer that is gone.
  """

  def __init__(
    self,
    run: RunIdentity,
    settings: NetworkConfig,
    counters: Counters,
    keys: Keys | None,
    answer: Callable[[Peer, bytes], Greeting],
    give_up: Callable[[Peer], None],
  ):
    self.accepted: dict[str, Accepted] = {}
    self.sockets: tuple[zmq.Socket, ...] = ()  # control, bulk; none: we only dial
    self.monitors: dict[zmq.Socket, Arrivals] = {}
    self._run, self._settings, self._counters, self._keys = run, settings, counters, keys
    self._answer, self._give_up = answer, give_up
    self._by_session: dict[bytes, Accepted] = {}
    self._connections = Connections(0)
    self._ports: set[int] = set()
    self._look_at = 0.0
    self._looked_at = 0  # how many keys, in this round through all of them

  def open(self, sockets: Sockets, url: str) -> str:
    """Listens; returns the url with the real port. OSError: it cannot be listened at."""
    *pair, bound = sockets.listen(url, self.count_refused)
    self.sockets = tuple(pair)
    port = int(bound.rpartition(":")[2])
    self._ports = {port, port + 1}
    for socket in pair:
      self.monitors[socket.get_monitor_socket(Arrivals.EVENTS)] = Arrivals()
    limit = raise_limit()
    self._connections = Connections(limit - open_descriptors() - max(LEAST_FREE, limit // 4))
    return bound

  def close(self) -> None:
    for socket in self.sockets:
      socket.disable_monitor()
      socket.close(200)
    for monitor in self.monitors:
      monitor.close(0)

  def count_refused(self, _reason: str = "") -> None:
    """A connection was turned away."""
    self._counters.refused += 1

  # --- what comes in ------------------------------------------------------------------------------

  def sender(self, route: bytes, part: zmq.Frame) -> Accepted | None:
    """Whose frame this is; None: nobody's who was greeted.

    Args:
      route: the routing id of the connection.
      part: of the frame, as it was received.

    Raises:
      MalformedMessage: the connection has another key than who was greeted.
    """
    peer = self._by_session.get(session_of(route))
    if peer is None or route not in peer.routes:
      return None
    if self._keys is not None and (user_of(part) != peer.address or key_of(part) != peer.key):
      raise MalformedMessage("a frame in somebody else's session")
    self._connections.belongs(descriptor_of(part), peer.session)
    return peer

  def greeted(self, route: bytes, part: zmq.Frame, greeting: Greeting) -> None:
    """Somebody says who it is: is let in, or told why not.

    Raises:
      MalformedMessage: its connection has not the name that it says.
    """
    if len(greeting.session) != SESSION_BYTES or route != control_route(greeting.session):
      raise MalformedMessage("a connection that is not named after its session")
    known = self.accepted.get(greeting.address)
    owner, key = None, ""
    reason, fenced = "", False
    if self._keys is not None:
      key = key_of(part)
      owner = self._keys.owner(key.encode())
      reason = "" if owner else f"the key of {user_of(part)} is not listed here any more"
    if not reason:
      reason, fenced = objection(
        self._run, greeting, owner, known and (known.session, known.incarnation)
      )
    if reason:
      self.count_refused()
      send(self.sockets[0], route, refusal(greeting.session, reason, known if fenced else None))
    else:
      self._welcome(greeting, key)
      self._connections.belongs(descriptor_of(part), greeting.session)

  def unknown(self, route: bytes) -> None:
    """Tells a connection that its frame is nobody's here."""
    send(self.sockets[0], route, frames.encode(frames.Unknown()))

  def _welcome(self, greeting: Greeting, key: str) -> None:
    peer = self.accepted.get(greeting.address)
    if peer is None or peer.session != greeting.session:
      if peer is not None:
        newer = f"a newer incarnation of {peer.address} is here ({greeting.incarnation})"
        self._show_out(peer, newer, fenced=True)
      peer = Accepted(*self.sockets, greeting, self._settings, key)
      self.accepted[greeting.address] = self._by_session[greeting.session] = peer
    peer.meet(greeting, self._run, min(greeting.chunk_bytes, self._settings.chunk_bytes))
    peer.put(frames.encode(self._answer(peer, greeting.session)))

  def _show_out(self, peer: Accepted, reason: str, fenced: bool) -> None:
    peer.put(frames.encode(frames.GreetingRefused(peer.session, fenced, reason)))
    self._give_up(peer)
    del self._by_session[peer.session], self.accepted[peer.address]
    self._connections.forget(peer.session, time.monotonic())

  # --- from time to time --------------------------------------------------------------------------

  def on_monitor(self, monitor: zmq.Socket) -> None:
    """Connections have come or gone."""
    arrivals, now = self.monitors[monitor], time.monotonic()
    for _ in range(EVENTS_A_TURN):
      if not monitor.poll(0):
        break
      message = recv_monitor_message(monitor)
      event, value = int(message["event"]), int(message["value"])
      if event == zmq.EVENT_ACCEPTED:
        self._connections.came(value, now)
      elif event == zmq.EVENT_DISCONNECTED:
        self._connections.gone(value)
      if arrivals.see(event, value):
        self.count_refused()
    cut(self._connections.unwanted(now), self._ports)

  def look(self, now: float) -> None:
    """Once a second: cuts off whose key is not listed any more, and who has not said who it is."""
    if not self.sockets or now < self._look_at:
      return
    self._look_at = now + LOOK_SECONDS
    cut(self._connections.unwanted(now), self._ports)
    if self._keys is not None:
      self._look_at_keys(self._keys)

  def _look_at_keys(self, keys: Keys) -> None:
    here = list(self.accepted.values())
    for peer in here[self._looked_at : self._looked_at + KEYS_A_LOOK]:
      if keys.withdrawn(peer.address, peer.key.encode()):
        self.count_refused()
        self._show_out(peer, f"the key of {peer.address} is not listed here any more", fenced=False)
    looked_at = self._looked_at + KEYS_A_LOOK
    self._looked_at = looked_at if looked_at < len(here) else 0
