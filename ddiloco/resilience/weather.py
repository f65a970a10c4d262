"""What planned faults do to the messages of one role: time and chance are given, nothing is sent.

The same for a thread, a process and a role in virtual time: who sends or receives asks for the
message's `fates`, one for every copy that arrives.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Sequence

from ddiloco.config import Fault


@dataclasses.dataclass(frozen=True)
class Fate:
  """One copy of a message arrives then, perhaps with flipped bits."""

  at: float  # seconds, of the clock that `fates` was given
  corrupt: bool = False


class Weather:
  """The message faults of one role that are going on. Any thread may begin them or ask for fates.

  Args:
    role: whose messages these are.
    seed: of chance; the same seed and the same messages have the same fates.
  """

  def __init__(self, role: str, seed: int = 0):
    self._random = random.Random(f"weather {seed} {role}")
    self._lock = threading.Lock()
    self._faults: tuple[tuple[Fault, float], ...] = ()  # (fault, until)
    self._free_at: dict[tuple, float] = {}  # when a throttled link has carried what it was given
    self._last_at: dict[tuple, float] = {}  # newest arrival, by link and kind: they keep an order

  @property
  def calm(self) -> bool:
    """Nothing is going on, and nothing that was held up is still on its way."""
    return not self._faults and not self._last_at

  def begin(self, fault: Fault, until: float) -> None:
    """A fault of `config.chaos.TO_MESSAGES` begins."""
    with self._lock:
      self._faults = (*self._faults, (fault, until))

  def fates(self, now: float, peer: str, incoming: bool, bulk: bool, size: int) -> Sequence[Fate]:
    """When the copies of a message arrive; none: it is lost.

    Args:
      now: seconds.
      peer: who is at the other end.
      incoming: it comes from there, else it goes there.
      bulk: it has a payload; control does not queue behind it.
      size: bytes.
    """
    if self.calm:
      return (Fate(now),)
    with self._lock:
      return self._fates(now, (peer, incoming, bulk), size)

  def _fates(self, now: float, way: tuple[str, bool, bool], size: int) -> Sequence[Fate]:
    if any(until <= now for _, until in self._faults):
      self._faults = tuple(each for each in self._faults if each[1] > now)
    self._last_at = {way: at for way, at in self._last_at.items() if at > now}
    faults = [each for each in self._faults if _concerns(each[0], way[0])]
    on = [fault for fault, _ in faults]
    if any(f.action == "cut" for f in on) or self._happens(on, "drop"):
      return ()
    at = now + sum(f.delay_seconds for f in on if f.action == "delay")
    throttles = [(f.bits_per_second, until) for f, until in faults if f.action == "throttle"]
    if throttles:
      at = self._free_at[way] = _carried(max(at, self._free_at.get(way, at)), 8 * size, throttles)
    at = max(at, self._last_at.get(way, at))
    if at > now:
      self._last_at[way] = at
    overtaken = max((f.delay_seconds for f in on if f.action == "reorder"), default=0.0)
    copies = 2 if self._happens(on, "duplicate") else 1
    fates = []
    for _ in range(copies):
      late = self._random.uniform(0, overtaken) if self._happens(on, "reorder") else 0.0
      fates.append(Fate(at + late, self._happens(on, "corrupt")))
    return fates

  def _happens(self, on: Sequence[Fault], action: str) -> bool:
    return any(f.action == action and self._random.random() < f.share for f in on)

  def spoil(self, header: bytes) -> bytes:
    """The header with a few bits flipped."""
    spoiled = bytearray(header)
    for _ in range(self._random.randint(1, 8)):
      spoiled[self._random.randrange(len(spoiled))] ^= 1 << self._random.randrange(8)
    return bytes(spoiled)


def _carried(at: float, bits: float, throttles: Sequence[tuple[float, float]]) -> float:
  """When a link that is free `at` has carried so many bits; `throttles` are (bits/s, until).

  What a throttle has not let through when it ends is through at once.
  """
  while bits > 0 and (active := [each for each in throttles if each[1] > at]):
    rate, end = min(active)[0], min(until for _, until in active)
    if at + bits / rate <= end:
      return at + bits / rate
    bits -= rate * (end - at)
    at = end
  return at


def _concerns(fault: Fault, peer: str) -> bool:
  if not fault.peers:
    return True
  named = [p for p in fault.peers if not p.startswith("!")]
  return peer in named or (not named and f"!{peer}" not in fault.peers)
