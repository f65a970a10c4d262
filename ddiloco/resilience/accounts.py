"""The books of the goodput ledger: an account per island, a chain of rounds per fragment. PURE."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from ddiloco.core.messages import INITIAL

STALL_STEPS = 10.0  # a step or pause of so many median steps, and of STALL_SECONDS, is a stall
STALL_SECONDS = 2.0
RECENT_STEPS = 33  # whose median is meant


@dataclasses.dataclass(frozen=True)
class Cut:
  """What a push covers: the steps after `since` up to `step`, of its learner's numbers."""

  since: int
  step: int
  chip_seconds: float


class IslandAccount:
  """One learner over all its lives. Times in seconds, accounts in chip-seconds."""

  def __init__(self, now: float):
    self.phase = "start_up"  # what it is doing since `since`; "" when its chips are given back
    self.since = now
    self.lives = 0
    self.chips = 0  # unknown until its first life says so
    self.seconds: dict[str, float] = collections.defaultdict(float)  # before that
    self.account: dict[str, float] = collections.defaultdict(float)
    self.first_start = 0.0  # of the account: what its first life took to begin
    self.trained = 0.0  # chip-seconds of all steps of all lives
    self.sums = [0.0]  # chip-seconds of the steps of this life and those it goes on from, summed
    self.settled: dict[int, int] = {}  # by fragment, up to which step all is merged or given up
    self.cuts: dict[tuple[int, int], Cut] = {}  # by fragment and round
    self.recent: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
    self.live_seconds = 0.0
    self.allocated_seconds = 0.0
    self.commits = 0
    self.capture_seconds = 0.0  # within the present gap between two steps

  def spend(self, until: float, cause: str) -> None:
    """Everything since the last entry until now was `cause`."""
    self._spend(max(0.0, until - self.since), cause)
    self.since = max(self.since, until)

  def _spend(self, seconds: float, cause: str) -> None:
    if not cause:  # nobody pays for its chips
      return
    self.allocated_seconds += seconds
    if not self.chips:
      self.seconds[cause] += seconds
      return
    self.account[cause] += seconds * self.chips
    if self.lives <= 1 and cause in ("start_up", "compile"):
      self.first_start += seconds * self.chips

  def begin(self, now: float, chips: int) -> None:
    """A life has its devices and says hello."""
    self.spend(now, "rejoin" if self.lives else "start_up")
    self.lives += 1
    self.chips = chips
    for cause, seconds in self.seconds.items():
      self.account[cause] += seconds * chips
      self.first_start += seconds * chips if cause in ("start_up", "compile") else 0.0
    self.seconds.clear()
    self.phase = "start_up" if self.lives == 1 else "rejoin"

  def step(self, event: Mapping[str, Any]) -> tuple[float, float]:
    """Accounts for one step and the time before it; returns the (start, end) it was training."""
    now, number = event["time"], event["step"]
    if self.phase != "training":
      self.spend(now - event["seconds"], self.phase or "other")
      self._go_on_from(number - 1)
      self.phase = "training"
    busy = min(event["seconds"], max(0.0, now - self.since))
    between = max(0.0, now - self.since - busy)
    stood = self._beyond(busy)
    stalled = stood + self._beyond(between)
    blocked = min(event.get("blocked_seconds", 0.0), between)
    save = min(self.capture_seconds, between - blocked)
    busy -= stood
    rest = max(0.0, now - self.since - busy - stalled - blocked - save)
    spent = {"blocked": blocked, "stalled": stalled, "save": save, "other": rest}
    for cause, seconds in spent.items():
      self._spend(seconds, cause)
    self.allocated_seconds += busy
    self.live_seconds += now - self.since - stalled
    self.trained += busy * self.chips
    self.sums.append(self.sums[-1] + busy * self.chips)
    self.recent.append(busy)
    self.since, self.capture_seconds = now, 0.0
    return now - busy - between + stalled, now

  def _beyond(self, seconds: float) -> float:
    """How much of it was standing still."""
    usual = statistics.median(self.recent) if self.recent else math.inf
    return seconds - usual if seconds > max(STALL_SECONDS, STALL_STEPS * usual) else 0.0

  def _go_on_from(self, number: int) -> None:
    """A new life whose last step is `number`: later ones of the lives before are lost."""
    del self.sums[number + 1 :]
    self.sums += [self.sums[-1]] * (number + 1 - len(self.sums))  # steps that the log lost
    self.settled = {p: min(step, number) for p, step in self.settled.items()}

  def cut(self, fragment: int, round_id: int, steps: int) -> None:
    now = len(self.sums) - 1
    since = max(0, now - steps)
    self.cuts[fragment, round_id] = Cut(since, now, self.sums[now] - self.sums[since])

  def settle(self, fragment: int, step: int) -> None:
    self.settled[fragment] = min(len(self.sums) - 1, max(step, self.settled.get(fragment, 0)))

  def pending(self, fragments: int) -> float:
    """Chip-seconds of the steps that may still be merged: also a dead island may come back."""
    last = self.sums[-1]
    return sum(last - self.sums[self.settled.get(p, 0)] for p in range(fragments)) / fragments


class Chain:
  """The rounds behind one fragment's newest value, and what each learner has in it."""

  def __init__(self) -> None:
    self.head = INITIAL
    self.rounds: dict[int, tuple[int, Mapping[int, float]]] = {}  # round -> (base, chip-seconds)
    self.merged: dict[int, float] = collections.defaultdict(float)  # by learner, up to `head`

  def commit(self, round_id: int, base: int, gains: Mapping[int, float]) -> None:
    self.rounds[round_id] = (base, gains)
    if base != self.head:
      self.go_to(base)
    self.head = round_id
    for learner, gain in gains.items():
      self.merged[learner] += gain

  def go_to(self, round_id: int) -> None:
    """The fragment's value is that of this round: rolled back, or recalled."""
    if round_id == self.head:
      return
    self.head = round_id
    self.merged.clear()
    while round_id in self.rounds:
      round_id, gains = self.rounds[round_id]
      for learner, gain in gains.items():
        self.merged[learner] += gain
