"""Curves of a run that stay small however long it lasts. PURE: nothing here reads a clock."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from array import array
from collections import Counter, deque
from collections.abc import Collection
from typing import Any

from ddiloco.observe.island_state import role_name
from ddiloco.protocol import events
from ddiloco.protocol.events import parse_role

FIRST_WIDTH_SECONDS = 0.25
PAGE_VALUES = 4000  # of one kind of curve on the page, all islands together
LOSS_BINS = 480  # of a curve of the report ...
LOSS_VALUES = 40_000  # ... but no more than so many of all islands together
MOST_CURVES = 8  # lives of an island that are drawn as lines of their own
MOST_COMMITS = 1000  # that are drawn, of few islands ...
COMMIT_MEMBERS = 100_000  # ... or so many members of commits
MOST_POINTS = 500  # of one role's traffic, and evaluations
MOST_EVALUATIONS = 240  # that the page shows; of more, every other one is dropped
WEIGHT_BINS = 60


class Series:
  """Values over time by name, averaged in bins that all names share.

  When a time does not fit into `most` bins any more, all bins become twice as wide: memory and what
  is sent to a page are bounded, and curves on one time axis stay comparable.
  """

  def __init__(self, most: int = 240, width_seconds: float = FIRST_WIDTH_SECONDS):
    self.width_seconds = width_seconds
    self._most = most
    self._sums: dict[str, list[float]] = {}
    self._counts: dict[str, list[int]] = {}

  def add(self, name: str, time: float, value: float = 1.0) -> None:
    """One value at `time` (seconds, finite); what is not finite leaves a gap."""
    if not math.isfinite(value):
      return
    while (bin_ := int(max(0.0, time) / self.width_seconds)) >= self._most:
      self._widen()
    sums, counts = self._sums.setdefault(name, []), self._counts.setdefault(name, [])
    missing = bin_ + 1 - len(sums)
    sums.extend([0.0] * missing)
    counts.extend([0] * missing)
    sums[bin_] += value
    counts[bin_] += 1

  def means(self, name: str, digits: int = 4) -> list[float | None]:
    """By bin, the mean of its values, None where it has none; a bin's time is its middle."""
    pairs = zip(self._sums.get(name, ()), self._counts.get(name, ()))
    return [round(total / count, digits) if count else None for total, count in pairs]

  def sums(self, name: str) -> list[float]:
    """By bin, the sum of its values."""
    return list(self._sums.get(name, ()))

  def counts(self, name: str) -> list[int]:
    """By bin, how many values it has."""
    return list(self._counts.get(name, ()))

  def keep_at_most(self, most: int) -> None:
    """Fewer bins from now on: the more curves there are, the coarser each may be."""
    self._most = min(self._most, max(1, most))
    while any(len(counts) > self._most for counts in self._counts.values()):
      self._widen()

  def _widen(self) -> None:
    self.width_seconds *= 2
    self._sums = {name: _pairs(each) for name, each in self._sums.items()}
    self._counts = {name: _pairs(each) for name, each in self._counts.items()}


def _pairs(values: list) -> list:
  """The sums of neighbours, two by two."""
  return [sum(values[i : i + 2]) for i in range(0, len(values), 2)]


class Thinned:
  """Things in order, at most `most` of them: of more, every second one, every fourth, ..."""

  def __init__(self, most: int):
    self.count = 0  # of all that were added
    self.stride = 1  # every so many is kept
    self._most = most
    self._kept: list[Any] = []
    self._last: Any = None

  def add(self, item: Any) -> None:
    """One more."""
    if self.count % self.stride == 0:
      self._kept.append(item)
    self.count += 1
    self._last = item
    self.keep_at_most(self._most)

  def keep_at_most(self, most: int) -> None:
    """No more than so many from now on."""
    self._most = min(self._most, most)
    while len(self._kept) > self._most:
      self._kept = self._kept[::2]
      self.stride *= 2

  @property
  def items(self) -> list[Any]:
    """Those that were kept, and always the newest."""
    newest = self.count and (self.count - 1) % self.stride
    return [*self._kept, self._last] if newest else list(self._kept)


class Median:
  """The median of positive numbers: exact of a few, within a thousandth of many."""

  EXACT = 512
  PER_E_FOLD = 1000.0  # classes of equal ratio

  def __init__(self) -> None:
    self._few: array | None = array("d")
    self._classes: Counter[int] = Counter()

  def add(self, value: float) -> None:
    """One more; what is not finite or not positive is left out."""
    if not 0 < value < math.inf:
      return
    if self._few is None:
      self._classes[round(self.PER_E_FOLD * math.log(value))] += 1
      return
    self._few.append(value)
    if len(self._few) > self.EXACT:
      few, self._few = self._few, None
      for each in few:
        self.add(each)

  @property
  def value(self) -> float:
    """NaN of none."""
    if self._few is not None:
      return statistics.median(self._few) if self._few else math.nan
    classes = sorted(self._classes)
    counts = list(itertools.accumulate(self._classes[each] for each in classes))
    middle = classes[bisect.bisect_left(counts, counts[-1] / 2)]
    return math.exp(middle / self.PER_E_FOLD)


# --- What each role has sent and received, and how fast it does now

WINDOW_SECONDS = 10.0  # that the present rate is taken over


class TrafficTotals:
  """Every role has one link; counters restart with each of its incarnations."""

  def __init__(self) -> None:
    self._before: dict[str, tuple[int, int]] = {}  # by role, what its earlier incarnations moved
    self._newest: dict[str, tuple[int, int, int]] = {}  # incarnation, sent, received
    self._recent: dict[str, deque[tuple[float, int, int]]] = {}  # time, sent, received; totals

  def add(self, event: events.Traffic) -> None:
    """The counters of a role so far; those of an incarnation that was replaced are ignored."""
    role, incarnation = event.role, event.incarnation
    sent, received = event.sent_bytes, event.received_bytes
    old, old_sent, old_received = self._newest.get(role, (incarnation, 0, 0))
    if incarnation < old:
      return
    before = self._before.get(role, (0, 0))
    if incarnation > old:
      before = (before[0] + old_sent, before[1] + old_received)
      self._before[role] = before
    self._newest[role] = (incarnation, sent, received)
    recent = self._recent.setdefault(role, deque())
    recent.append((event.time, before[0] + sent, before[1] + received))
    while len(recent) > 2 and event.time - recent[1][0] >= WINDOW_SECONDS:
      recent.popleft()

  def sent(self, role: str) -> int:
    """Bytes that all incarnations of a role have sent."""
    return self._recent[role][-1][1]

  def totals(self) -> tuple[int, int]:
    """(sent, received) bytes of all roles."""
    newest = [recent[-1] for recent in self._recent.values()]
    return sum(sent for _, sent, _ in newest), sum(received for _, _, received in newest)

  def as_json(self, now: float) -> list[dict[str, Any]]:
    """By role: bytes so far, and bytes per second lately (0 for one that has fallen silent)."""
    rows = []
    for role, recent in self._recent.items():
      (began, sent, received), (ended, all_sent, all_received) = recent[0], recent[-1]
      seconds = ended - began
      moving = seconds > 0 and now - ended < WINDOW_SECONDS
      rows.append(
        {
          "role": role,
          "name": role_name(role),
          "sent_bytes": all_sent,
          "received_bytes": all_received,
          "sent_bytes_per_second": round((all_sent - sent) / seconds) if moving else 0,
          "received_bytes_per_second": round((all_received - received) / seconds) if moving else 0,
        }
      )
    return sorted(rows, key=lambda row: parse_role(row["role"]))


# --- Everything of a run that is drawn


class Curves:
  """What the page draws over time, and the report over tokens and time."""

  def __init__(self) -> None:
    self.page = Series()  # over time: "loss M", "participation M", "commits S", "agreement"
    self.heldout: list[tuple[float, float]] = []  # (time, loss)
    self.loss = Series(LOSS_BINS, 1.0)  # over the tokens of all islands, by learner and life
    self.evaluations = Thinned(MOST_POINTS)  # (tokens merged, loss)
    self.commits = Thinned(MOST_COMMITS)  # {"time", "participants", "rejected"}
    self.commit_times: dict[str, Thinned] = {}  # by role
    self.weights = Series(WEIGHT_BINS)  # in the merge, by learner
    self.sent: dict[str, Thinned] = {}  # by role, (time, bytes so far)
    self._tokens = 0

  def limit(self, islands: int) -> None:
    """The more islands there are, the coarser each may be."""
    self.page.keep_at_most(max(40, PAGE_VALUES // max(1, islands)))
    self.loss.keep_at_most(max(40, LOSS_VALUES // max(1, islands)))
    self.commits.keep_at_most(max(50, COMMIT_MEMBERS // max(1, islands)))

  def add_step(self, event: events.Step, m: int, life: int) -> None:
    """A step of an island in one of its lives."""
    self._tokens += event.tokens
    if event.loss is not None:
      self.page.add(f"loss {m}", event.time, event.loss)
      self.loss.add(f"{m} {min(life, MOST_CURVES)}", self._tokens, event.loss)

  def add_commit(self, event: events.Commit, islands: Collection[int]) -> None:
    """A commit of a run with these islands."""
    time, taking = event.time, event.participants
    self.page.add(f"commits {parse_role(event.role)[1]}", time)
    if event.agreement is not None:
      self.page.add("agreement", time, event.agreement)
    for m in islands:
      self.page.add(f"participation {m}", time, float(m in taking))
    kept = {"time": time, "participants": set(taking), "rejected": set(event.rejected)}
    self.commits.add(kept)
    self.commit_times.setdefault(event.role, Thinned(MOST_COMMITS)).add(time)
    total = sum(taking.values()) or 1.0
    for m, weight in taking.items():
      self.weights.add(str(m), time, weight / total)

  def add_evaluation(self, event: events.Evaluation) -> None:
    """A held-out loss; one that is not finite is not drawn."""
    if not math.isfinite(event.loss):
      return
    self.evaluations.add((event.merged_tokens, event.loss))
    self.heldout.append((round(event.time, 2), round(event.loss, 4)))
    if len(self.heldout) > MOST_EVALUATIONS:
      del self.heldout[1:-1:2]

  def add_sent(self, role: str, time: float, sent_bytes: int) -> None:
    """What all incarnations of a role have sent so far."""
    self.sent.setdefault(role, Thinned(MOST_POINTS)).add((time, sent_bytes))
