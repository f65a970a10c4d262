"""The listening side of a network endpoint: which peers come in, stay and are cut off.

A connection has no known peer until its first frame names one. With keys, that must be the owner of
its key, and the key must stay listed while the peer is connected: removing it from the folder ends
the connection, not only the next one.
"""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddiloco.network import frames
from ddiloco.network.frames import Attach, Bulk, Greeting, RunIdentity, objection, refusal
from ddiloco.network.io_thread import FrameSocket, IoThread, Parcel
from ddiloco.network.keys import Keys, host_and_port
from ddiloco.network.peers import Accepted
from ddiloco.network.transport import Counters
from ddiloco.protocol.messages import MalformedMessage

if TYPE_CHECKING:
  from ddiloco.network.endpoint import NetworkEndpoint

LOOK_SECONDS = 1.0  # between two looks at keys and connections
KEYS_A_LOOK = 100  # each is a file to read
COMERS_A_TURN = 64
BACKLOG = 1024  # many learners may come at once; the system has a limit of its own
# Each connection costs a descriptor; when there are none left, no file opens and no member comes
# in. So this process may have as many as the system allows, and strangers (connections without a
# known peer) a quarter of them. A stranger that takes too long, or is one too many, is cut off.
STRANGER_SECONDS = 60.0  # until a connection must have a known peer
MOST_STRANGERS = 1024
MOST_DESCRIPTORS = 10_240  # where the system names no limit, or one that it does not keep


def raise_limit() -> int:
  """Lets this process have as many descriptors as the system allows it; returns how many."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  for limit in (hard, MOST_DESCRIPTORS):  # a system may allow less than it says
    if limit == soft or 0 <= limit < soft:
      break
    try:
      resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (ValueError, OSError):
      continue
    soft = limit
    break
  return soft if soft != resource.RLIM_INFINITY else MOST_DESCRIPTORS


def bind(url: str) -> tuple[socket.socket, str]:
  """(a socket that listens there, the url with its real port).

  Raises:
    OSError: the port is taken, or the address is not this machine's.
  """
  host, port = host_and_port(url)
  if host == "*":
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listener = socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
  else:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
  listener.setblocking(False)
  return listener, f"{url.rpartition(':')[0]}:{listener.getsockname()[1]}"


class Admission:
  """The peers that dialed us, and the owner of connections whose peer is not known yet.

  Only the endpoint's thread for control uses it.

  Args:
    run: the run it belongs to.
    counters: the endpoint's.
    keys: of this role; None: without.
    caretaker: looks after the peers.
    answer: our own greeting.
    place: finds a thread for a connection for fragments.
    give_up: forgets what waits for a peer that is gone.
  """

  def __init__(
    self,
    run: RunIdentity,
    counters: Counters,
    keys: Keys | None,
    caretaker: NetworkEndpoint,
    answer: Callable[[], Greeting],
    place: Callable[[], IoThread],
    give_up: Callable[[Accepted], None],
  ):
    self.accepted: dict[str, Accepted] = {}
    self._run, self._counters, self._keys, self._caretaker = run, counters, keys, caretaker
    self._answer, self._place, self._give_up = answer, place, give_up
    self._by_session: dict[bytes, Accepted] = {}
    self._strangers: dict[FrameSocket, float] = {}  # since when, oldest first
    self._sent_off: set[FrameSocket] = set()  # of these, those that are counted already
    self._most = 0  # of them
    self._listener: socket.socket | None = None
    self._thread: IoThread | None = None
    self._look_at = 0.0
    self._looked_at = 0  # how many keys, in this round through all of them

  def open(self, url: str, thread: IoThread) -> str:
    """Listens; returns the url with the real port. OSError: it cannot be listened at."""
    self._listener, bound = bind(url)
    self._thread = thread
    self._most = min(MOST_STRANGERS, raise_limit() // 4)
    thread.listen(self._listener, self._on_comers)
    return bound

  def close(self) -> None:
    """Accepts no more connections."""
    if self._listener is not None and self._thread is not None:
      self._thread.listen(self._listener, None)
      self._listener.close()
      self._listener = None

  def _on_comers(self) -> None:
    now = time.monotonic()
    for _ in range(COMERS_A_TURN if self._listener and self._thread else 0):
      try:
        connected, _ = self._listener.accept()
      except OSError:  # no more are there, or no descriptor is left
        break
      try:
        wire = FrameSocket(connected, self, self._keys.context() if self._keys else None)
      except OSError:  # our key cannot be read now, or the far end has gone
        connected.close()
        continue
      self._strangers[wire] = now
      self._thread.add(wire)
    self._cut_off(now)

  def _cut_off(self, now: float) -> None:
    """Ends strangers' connections that are too old, and the oldest that are too many."""
    too_many = len(self._strangers) - self._most
    for number, (wire, since) in enumerate([*self._strangers.items()]):
      if number >= too_many and now - since <= STRANGER_SECONDS:
        break
      wire.close()
      self._came_to_nothing(wire)

  def _came_to_nothing(self, wire: FrameSocket) -> None:
    self._strangers.pop(wire, None)
    self._counters.refused += wire not in self._sent_off
    self._sent_off.discard(wire)

  # --- as the owner of a connection ---------------------------------------------------------------

  def next(self, wire: FrameSocket) -> Parcel | None:
    return None

  def sent(self, wire: FrameSocket) -> None:
    return None

  def room(self, wire: FrameSocket, frame: Bulk, size: int) -> memoryview | None:
    raise MalformedMessage("a fragment that no shard has")

  def malformed(self, wire: FrameSocket, reason: str) -> None:
    self._counters.malformed += 1
    self._send_off(wire)

  def lost(self, wire: FrameSocket, error: Exception) -> None:
    self._came_to_nothing(wire)

  def arrived(self, wire: FrameSocket, frame: frames.Frame) -> None:
    match frame:
      case Greeting():
        self._on_greeting(wire, frame)
      case Attach():
        self._on_attach(wire, frame)
      case _:
        self.malformed(wire, "no greeting")

  def _send_off(self, wire: FrameSocket, answer: frames.GreetingRefused | None = None) -> None:
    """Ends a connection, with an answer; it has a stranger's time to hear that."""
    wire.owner = self
    self._strangers.pop(wire, None)
    self._strangers[wire] = time.monotonic()  # the newest one
    if wire not in self._sent_off:
      self._sent_off.add(wire)
      self._counters.refused += 1
    if answer is not None:
      wire.say(answer)
    wire.leave()

  def _on_greeting(self, wire: FrameSocket, greeting: Greeting) -> None:
    known = self.accepted.get(greeting.address)
    owner, reason, fenced = None, "", False
    if self._keys is not None:
      owner = self._keys.owner(wire.key())
      reason = "" if owner else f"the key of {greeting.address} is not listed here any more"
    if not reason:
      reason, fenced = objection(
        self._run, greeting, owner, known and (known.session, known.incarnation)
      )
    if reason:
      self._send_off(wire, refusal(reason, known if fenced else None))
      return
    if known is not None and known.session != greeting.session:
      newer = f"a newer incarnation of {known.address} is here ({greeting.incarnation})"
      self._show_out(known, newer, fenced=True)
      known = None
    if known is None:
      known = Accepted(greeting, self._run, self._caretaker, wire.key())
      self.accepted[greeting.address] = self._by_session[greeting.session] = known
    self._strangers.pop(wire, None)
    known.control.attach(wire)
    wire.say(self._answer())
    known.meet(greeting)

  def _on_attach(self, wire: FrameSocket, frame: Attach) -> None:
    peer = self._by_session.get(frame.session)
    if peer is None or frame.stream >= len(peer.bulk) or wire.key() != peer.key:
      self._send_off(wire)
      return
    assert self._thread is not None
    self._strangers.pop(wire, None)
    self._counters.resent += peer.bulk[frame.stream].attach(wire)
    self._thread.call(self._thread.hand_over, wire, self._place())

  def _show_out(self, peer: Accepted, reason: str, fenced: bool) -> None:
    wire = peer.control.detach()
    if wire is not None:
      self._send_off(wire, frames.GreetingRefused(fenced, reason))
    peer.hang_up()
    self._give_up(peer)
    del self._by_session[peer.session], self.accepted[peer.address]

  # --- from time to time --------------------------------------------------------------------------

  def look(self, now: float) -> None:
    """Once a second: cuts off peers whose key is not listed any more, and late strangers."""
    if self._listener is None or now < self._look_at:
      return
    self._look_at = now + LOOK_SECONDS
    self._cut_off(now)
    if self._keys is not None:
      self._look_at_keys(self._keys)

  def _look_at_keys(self, keys: Keys) -> None:
    here = list(self.accepted.values())
    for peer in here[self._looked_at : self._looked_at + KEYS_A_LOOK]:
      if keys.withdrawn(peer.address, peer.key):
        self._show_out(peer, f"the key of {peer.address} is not listed here any more", fenced=False)
    looked_at = self._looked_at + KEYS_A_LOOK
    self._looked_at = looked_at if looked_at < len(here) else 0
