"""The books of the goodput ledger: an account per island, a chain of rounds per fragment. PURE.

All of them are bounded, however long a run is. Steps and rounds that something may still go back to
are kept one by one; what is older is summed up.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
import statistics
from array import array
from collections.abc import Mapping
from typing import Any

from ddiloco.protocol.events import Step
from ddiloco.protocol.messages import INITIAL

STALL_STEPS = 10.0  # a step or pause of so many median steps, and of STALL_SECONDS, is a stall
STALL_SECONDS = 2.0
RECENT_STEPS = 33  # whose median is meant
EXACT_STEPS = 2048  # of an island, that a new life may go back to: two snapshots are 400
OLD_STEPS = 512  # before those, at equal distances
MOST_PUSHED = 8  # of an island and fragment, that may still be committed; one at a time is out
CHAIN_GAINS = 500_000  # of all fragments together, before the older half of them is summed up ...
LEAST_ROUNDS = 128  # ... but of a fragment at least so many rounds: two snapshots are 17
ROUND_GAINS = 8  # what a round costs beside its gains


@dataclasses.dataclass(frozen=True)
class PushedSteps:
  """What a push covers: some chip-seconds of steps up to `step`, of its learner's numbers."""

  step: int
  chip_seconds: float


class StepSums:
  """Chip-seconds of an island's steps, summed up: the newest one by one, older ones now and then.

  Asked for a step between two that are kept, it takes those between them as equally long.
  """

  def __init__(self, exact: int = EXACT_STEPS):
    self._exact = exact
    self._old: list[tuple[int, float]] = []  # (step, sum), at multiples of `_stride`
    self._stride = 1
    self._first = 0  # the step of the first in `_sums`
    self._sums = array("d", [0.0])

  @property
  def number(self) -> int:
    """Of the newest step."""
    return self._first + len(self._sums) - 1

  @property
  def last(self) -> float:
    """The sum of all steps."""
    return self._sums[-1]

  def add(self, chip_seconds: float) -> None:
    """One more step."""
    self._sums.append(self.last + chip_seconds)
    if len(self._sums) > 2 * self._exact:
      self._thin(self._exact)

  def at(self, step: int) -> float:
    """The sum up to this step, from none to the newest."""
    step = min(max(0, step), self.number)
    if step >= self._first:
      return self._sums[step - self._first]
    i = bisect.bisect_right(self._old, (step, math.inf))
    (a, low), (b, high) = self._old[i - 1], [*self._old[i : i + 1], (self._first, self._sums[0])][0]
    return low + (high - low) * (step - a) / (b - a)

  def go_to(self, step: int) -> None:
    """The newest step is this one: later ones are gone, and missing ones took no time."""
    step = max(0, step)
    missing = step - self.number
    if missing > self._exact:  # a log with a hole in it
      last = self.last
      self._thin(len(self._sums))
      self._first, self._sums = step, array("d", [last])
    elif missing > 0:
      self._sums.extend([self.last] * missing)
    elif step >= self._first:
      del self._sums[step - self._first + 1 :]
    else:
      self._first, self._sums = step, array("d", [self.at(step)])
      del self._old[bisect.bisect_left(self._old, (step, -math.inf)) :]

  def _thin(self, count: int) -> None:
    """Of the first `count` sums only some stay; of all of them, their last does."""
    steps = range(self._first, self._first + count)
    keep = [(n, self._sums[n - self._first]) for n in steps if n % self._stride == 0]
    if count == len(self._sums):
      keep.append((self.number, self.last))
    self._old += keep
    self._first += count
    del self._sums[:count]
    while len(self._old) > OLD_STEPS:
      self._stride *= 2
      self._old = [each for each in self._old if each[0] % self._stride == 0]


class IslandAccount:
  """One learner over all its lives. Times in seconds, accounts in chip-seconds."""

  def __init__(self, now: float, exact_steps: int = EXACT_STEPS):
    self.phase = "start_up"  # what it is doing since `since`; "" when its chips are given back
    self.since = now  # only grows: while a clock that was set back catches up, no time passes
    self.lives = 0
    self.chips = 0  # unknown until its first life says so
    self.seconds: dict[str, float] = collections.defaultdict(float)  # before that
    self.account: dict[str, float] = collections.defaultdict(float)
    self.first_start = 0.0  # of the account: what its first life took to begin
    self.trained = 0.0  # chip-seconds of all steps of all lives
    self.sums = StepSums(exact_steps)  # of the steps of this life and those it goes on from
    # By fragment, up to which step all is merged or given up, and the sum of these.
    self.settled: dict[int, tuple[int, float]] = {}
    self._pushed: dict[int, dict[int, PushedSteps]] = {}  # by fragment and round
    self.recent: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
    self.live_seconds = 0.0
    self.allocated_seconds = 0.0
    self.commits = 0
    self.capture_seconds = 0.0  # within the present gap between two steps
    self.compile_seconds = 0.0  # the same

  def spend(self, until: float, cause: str) -> None:
    """Everything since the last entry until now was `cause`."""
    self._spend(max(0.0, until - self.since), cause)
    self.since = max(self.since, until)

  def _spend(self, seconds: float, cause: str) -> None:
    if not cause:  # its chips are not allocated
      return
    self.allocated_seconds += seconds
    if not self.chips:
      self.seconds[cause] += seconds
      return
    self.account[cause] += seconds * self.chips
    begins = self.lives <= 1 and self.phase != "training"
    if begins and cause in ("start_up", "compile"):
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

  def step(self, event: Step) -> tuple[float, float]:
    """Accounts for one step and the time before it; returns the (start, end) it was training.

    Of the time since the last entry the step has its `seconds`, and of what is left causes that
    are known come first: waiting for a shard, copying for a snapshot, compiling, standing still.
    """
    now, seconds = max(event.time, self.since), positive(event.seconds)
    if self.phase != "training":
      self.spend(now - seconds, self.phase or "other")
      self._go_on_from(event.step - 1)
      self.phase = "training"
    passed = now - self.since
    busy = min(seconds, passed)
    stood = self._beyond(busy)
    left = passed - busy
    blocked = min(positive(event.blocked_seconds), left)
    save = min(self.capture_seconds, left - blocked)
    compiled = min(self.compile_seconds, left - blocked - save)
    idle = left - blocked - save - compiled
    stalled = self._beyond(idle)
    spent = {"blocked": blocked, "save": save, "compile": compiled}
    spent |= {"stalled": stood + stalled, "other": idle - stalled}
    for cause, each in spent.items():
      self._spend(each, cause)
    busy -= stood
    self.allocated_seconds += busy
    self.live_seconds += passed - stood - stalled
    self.trained += busy * self.chips
    self.sums.add(busy * self.chips)
    self.recent.append(busy)
    self.since, self.capture_seconds, self.compile_seconds = now, 0.0, 0.0
    return now - (passed - stood - stalled), now

  def _beyond(self, seconds: float) -> float:
    """How much of it was standing still."""
    if seconds <= STALL_SECONDS:
      return 0.0
    usual = statistics.median(self.recent) if self.recent else math.inf
    return seconds - usual if seconds > STALL_STEPS * usual else 0.0

  def _go_on_from(self, number: int) -> None:
    """A new life whose last step is `number`: later ones of the lives before are lost."""
    self.sums.go_to(number)
    number, last = self.sums.number, self.sums.last
    self.settled = {p: min(each, (number, last)) for p, each in self.settled.items()}

  def copy_out(self, fragment: int, round_id: int, steps: int) -> None:
    """A push of so many steps."""
    now = self.sums.number
    pushed = PushedSteps(now, self.sums.last - self.sums.at(now - max(0, steps)))
    self._keep(fragment, round_id, pushed)

  def resend(self, fragment: int, round_id: int, old_round: int) -> None:
    """The push for another round is sent for this one."""
    pushed = self._pushed.get(fragment, {}).get(old_round)
    if pushed is not None:
      self._keep(fragment, round_id, pushed)

  def _keep(self, fragment: int, round_id: int, pushed: PushedSteps) -> None:
    by_round = self._pushed.setdefault(fragment, {})
    by_round[round_id] = pushed
    if len(by_round) > MOST_PUSHED:
      del by_round[min(by_round)]

  def overwritten(self, fragment: int) -> None:
    """Local progress of the fragment is gone."""
    self.settle(fragment, self.sums.number)
    self._pushed.pop(fragment, None)

  def answered(self, fragment: int, round_id: int) -> float:
    """The chip-seconds of the push that this round merged or refused; 0.0 if none is known."""
    pushed = self._pushed.get(fragment, {}).pop(round_id, None)
    if pushed is None:
      return 0.0
    self.settle(fragment, pushed.step)
    return pushed.chip_seconds

  def settle(self, fragment: int, step: int) -> None:
    """Up to this step nothing of the fragment is pending any more."""
    step = min(self.sums.number, max(0, step))
    self.settled[fragment] = max(self.settled.get(fragment, (0, 0.0)), (step, self.sums.at(step)))

  def pending(self, fragments: int) -> float:
    """Chip-seconds of the steps that may still be merged: also a dead island may come back."""
    settled = sum(value for p, (_, value) in self.settled.items() if p < fragments)
    return self.sums.last - settled / fragments


class Chain:
  """The rounds behind one fragment's newest value, and what each learner has in it.

  Rounds are kept while something may go back to them: a shard that comes back has at least the
  value of the oldest snapshot that is kept, and else begins anew. Older ones are summed up in
  `_floor`; a value from before it, put in by hand, would count as one without a past.
  """

  def __init__(self) -> None:
    self.head = INITIAL
    self.merged: dict[int, float] = collections.defaultdict(float)  # by learner, up to `head`
    self._rounds: dict[int, tuple[int, array]] = {}  # base, and (learner, chip-seconds) in turns
    self._size = 0  # of the rounds, in gains
    self._floor: tuple[int, dict[int, float]] = (INITIAL, {})  # a round, and its `merged`

  def commit(
    self, round_id: int, base: int, gains: Mapping[int, float], most_gains: float = math.inf
  ) -> None:
    """A round on a value; rounds are summed up so that about `most_gains` are kept."""
    flat = array("d", [each for pair in gains.items() for each in pair])
    self._rounds[round_id] = (min(base, round_id - 1), flat)  # rounds only grow: no circles
    self._size += len(gains) + ROUND_GAINS
    if base != self.head:
      self.go_to(base)
    self.head = round_id
    for learner, gain in gains.items():
      self.merged[learner] += gain
    if self._size > max(most_gains, LEAST_ROUNDS * (len(gains) + ROUND_GAINS)):
      self._sum_up()

  def go_to(self, round_id: int) -> None:
    """The fragment's value is that of this round: rolled back, or recalled."""
    if round_id == self.head:
      return
    self.head = round_id
    self.merged.clear()
    self._add_up(self.merged, round_id)

  def _add_up(self, merged: dict[int, float], round_id: int) -> None:
    while round_id in self._rounds:
      round_id, flat = self._rounds[round_id]
      for learner, gain in zip(flat[::2], flat[1::2]):
        merged[int(learner)] += gain
    floor, before = self._floor
    for learner, gain in before.items() if round_id == floor else ():
      merged[learner] += gain

  def _sum_up(self) -> None:
    """The older half of the rounds is no longer kept."""
    middle = sorted(self._rounds)[len(self._rounds) // 2]
    floor = self.head
    while floor > middle and floor in self._rounds:
      floor = self._rounds[floor][0]
    merged: dict[int, float] = collections.defaultdict(float)
    self._add_up(merged, floor)
    self._floor = floor, dict(merged)
    self._rounds = {r: each for r, each in self._rounds.items() if r > middle}
    self._size = sum(len(flat) // 2 + ROUND_GAINS for _, flat in self._rounds.values())


def positive(seconds: Any) -> float:
  """A length of time from an event; 0.0 if it is none."""
  return float(seconds) if 0 <= seconds < math.inf else 0.0
