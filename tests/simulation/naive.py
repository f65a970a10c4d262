"""A second simulator, deliberately naive: slices as sets, one event after the other, no NumPy.

It follows every slice, and so does three things that the real one leaves out because they hardly
ever matter: a slice that has recovered and waits cannot fail, a learner without any slice takes the
first recovered one in at once, and a pause that is announced takes in nobody before it begins.
"""

from __future__ import annotations

import heapq
import itertools

from ddiloco.simulation.chips import Fleet


class Learner:
  """One elastic data-parallel job."""

  def __init__(self, fleet: Fleet, failures: list[tuple[float, int]], slices: int):
    self.fleet, self.slices = fleet, slices
    self.present, self.repaired, self.waiting = set(range(slices)), set(), set()
    self.paused, self.doomed, self.now = "", set(), 0.0
    self.spent = dict.fromkeys(("useful", "downscale", "upscale", "absent"), 0.0)  # slice-seconds
    self.changes: list[tuple[float, bool]] = []  # (when, whether it trains from then on)
    self.order = itertools.count()
    self.queue: list[tuple[float, int, str, int]] = []
    for when, which in failures:
      self.later(when, "fails", which)

  def later(self, when: float, what: str, which: int = -1) -> None:
    heapq.heappush(self.queue, (when, next(self.order), what, which))

  def run(self) -> None:
    end = self.fleet.days * 86_400
    self.changes.append((0.0, True))
    while self.queue and self.queue[0][0] < end:
      when, _, what, which = heapq.heappop(self.queue)
      self.pass_time(when)
      getattr(self, what)(which)
      self.changes.append((when, self.trains()))
    self.pass_time(end)

  def trains(self) -> bool:
    return not self.paused and bool(self.present)

  def pass_time(self, when: float) -> None:
    self.spent[self.paused or "useful"] += (when - self.now) * len(self.present)
    self.spent["absent"] += (when - self.now) * (self.slices - len(self.present))
    self.now = when

  def fails(self, which: int) -> None:
    if which not in self.present or which in self.doomed:
      return
    self.later(self.now + self.fleet.recovery_seconds, "recovers", which)
    if self.paused:
      self.leave(which)
    else:
      if not self.doomed:
        self.later(self.now + self.fleet.notice_seconds, "shrinks")
      self.doomed.add(which)

  def leave(self, which: int) -> None:
    self.present.discard(which)
    self.repaired.add(which)

  def shrinks(self, _: int) -> None:
    for which in self.doomed:
      self.leave(which)
    self.doomed = set()
    self.pause("downscale", self.fleet.downscale_pause_seconds)

  def pause(self, kind: str, seconds: float) -> None:
    self.paused = kind
    self.later(self.now + seconds, "goes_on")

  def recovers(self, which: int) -> None:
    self.repaired.discard(which)
    self.waiting.add(which)
    self.later(self.now + self.fleet.rejoin_wait_seconds, "loses_patience", which)
    if not self.present and not self.paused:
      self.pause("upscale", self.fleet.upscale_pause_seconds)

  def loses_patience(self, which: int) -> None:
    if which in self.waiting and not self.paused and not self.doomed:
      self.pause("upscale", self.fleet.upscale_pause_seconds)

  def goes_on(self, _: int) -> None:
    self.present |= self.waiting
    self.waiting, self.paused = set(), ""


def decoupled(fleet: Fleet, times: list[float], places: list[float]) -> tuple[dict, float]:
  """(shares of chip time by what became of them, uptime) under the failures given.

  places: in [0, 1), where in the fleet; learners, then their slices, share it equally.
  """
  slices = fleet.slices_per_learner
  struck: list[list[tuple[float, int]]] = [[] for _ in range(fleet.learners)]
  for when, place in zip(times, places):
    learner, which = divmod(int(place * fleet.learners * slices), slices)
    struck[learner].append((when, which))
  learners = [Learner(fleet, failures, slices) for failures in struck]
  for learner in learners:
    learner.run()
  total = fleet.learners * slices * fleet.days * 86_400
  shares = {
    name: sum(learner.spent[name] for learner in learners) / total for name in learners[0].spent
  }
  return shares, uptime(learners, fleet.days * 86_400)


def uptime(learners: list[Learner], end: float) -> float:
  changes = [
    (when, number, trains)
    for number, learner in enumerate(learners)
    for when, trains in learner.changes
  ]
  changes.sort(key=lambda change: change[0])  # stable: a learner's own order stays
  training, last, up = set(), 0.0, 0.0
  for when, number, trains in changes:
    up += (when - last) * bool(training)
    last = when
    (training.add if trains else training.discard)(number)
  return (up + (end - last) * bool(training)) / end


def inelastic(fleet: Fleet, times: list[float]) -> float:
  """Goodput of one job that needs all chips."""
  useful, since, end = 0.0, 0.0, fleet.days * 86_400
  for when in times:
    if when <= since:
      continue  # in the pause, or while the step under way is finished
    stops = min(when + fleet.notice_seconds, end)
    useful += stops - since
    since = stops + fleet.inelastic_pause_seconds
  return (useful + max(0.0, end - since)) / end
