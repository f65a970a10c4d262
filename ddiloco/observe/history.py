"""The history of a run in bounded memory, however long it lasts. PURE: nothing here reads a clock.

Curves, bytes of links, and rounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from ddiloco.config import SyncConfig
from ddiloco.observe.islands import DOWN, IslandState, outer_gradients, role_name
from ddiloco.observe.style import rounded
from ddiloco.protocol import events, rules
from ddiloco.protocol.events import Event, parse_role

FIRST_WIDTH_SECONDS = 0.25
PAGE_BINS = 240
PAGE_VALUES = 6000  # of one kind of curve on the page, all islands together
LOSS_BINS = 480  # of a curve of the report ...
LOSS_VALUES = 40_000  # ... but at most so many values of all islands together
MOST_CURVES = 8  # lives of an island with a line of their own; the last line has all later lives
MOST_COMMITS = 1000  # that are drawn, of few islands ...
COMMIT_MEMBERS = 100_000  # ... or so many members of commits
MOST_POINTS = 500  # of one role's traffic
MOST_EVALUATIONS = 240


class Series:
  """Values over time by name, averaged in bins that all names share.

  When a time does not fit into `most` bins any more, all bins become twice as wide: memory and the
  data sent to a page are bounded, and curves on one time axis stay comparable.
  """

  def __init__(self, most: int = PAGE_BINS, width_seconds: float = FIRST_WIDTH_SECONDS):
    self.width_seconds = width_seconds
    self._most = most
    self._sums: dict[str, list[float]] = {}
    self._counts: dict[str, list[int]] = {}

  def add(self, name: str, time: float, value: float = 1.0) -> None:
    """Adds a value at `time` (seconds, finite); a value that is not finite leaves a gap."""
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

  def means(self, name: str) -> list[float | None]:
    """By bin, the mean of its values, None without values; a bin's time is its middle."""
    pairs = zip(self._sums.get(name, ()), self._counts.get(name, ()))
    return [rounded(total / count, 4) if count else None for total, count in pairs]

  def most(self, name: str, of: str) -> list[int]:
    """The bins in which a part of each value of `of` makes up more than half of it."""
    pairs = enumerate(zip(self._sums.get(name, ()), self._sums.get(of, ())))
    return [i for i, (part, whole) in pairs if part > whole / 2]

  def counts(self, name: str) -> list[int]:
    """By bin, how many values it has."""
    return list(self._counts.get(name, ()))

  def keep_at_most(self, most: int) -> None:
    """Limits the number of bins from now on: the more curves there are, the coarser each is."""
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
  """Keeps at most `most` items in order: of more, every second one, every fourth, ..."""

  def __init__(self, most: int):
    self.count = 0  # of all items that were added
    self.stride = 1  # one of so many items is kept
    self._most = most
    self._kept: list[Any] = []
    self._last: Any = None

  def add(self, item: Any) -> None:
    """Adds an item."""
    if self.count % self.stride == 0:
      self._kept.append(item)
    self.count += 1
    self._last = item
    self.keep_at_most(self._most)

  def keep_at_most(self, most: int) -> None:
    """Keeps at most so many from now on."""
    self._most = min(self._most, most)
    while len(self._kept) > self._most:
      self._kept = self._kept[::2]
      self.stride *= 2

  @property
  def items(self) -> list[Any]:
    """The items that are kept, and always the newest."""
    left_out = (self.count - 1) % self.stride
    return [*self._kept, self._last] if left_out else list(self._kept)


MOST_GAPS = 64  # times without any training that a step logged late may still fill


class Idle:
  """The times in which no island trained, since the first step began."""

  def __init__(self) -> None:
    self.start = self.end = math.nan  # of the first step, and of the newest
    self._gaps: list[tuple[float, float]] = []  # the newest, in order
    self._seconds = self._longest = 0.0  # of all earlier ones

  def train(self, start: float, end: float) -> None:
    """An island trained from `start` to `end`; calls come in order of `end`."""
    if math.isnan(self.end):
      self.start = self.end = start
    count = len(self._gaps)  # of those that it leaves as they are: they end before it starts
    while count and self._gaps[count - 1][1] > start:
      count -= 1
    left = self._gaps[:count]
    for a, b in self._gaps[count:]:
      left += [(x, y) for x, y in ((a, min(b, start)), (max(a, end), b)) if x < y]
    if start > self.end:
      left.append((self.end, start))
    if len(left) > MOST_GAPS:
      (a, b), *left = left
      self._seconds, self._longest = self._seconds + b - a, max(self._longest, b - a)
    self._gaps, self.end = left, max(self.end, end)

  def skip(self, until: float) -> None:
    """From the end of the newest step until then there was no run, so this time does not count."""
    if until > self.end:
      self.start, self.end = self.start + until - self.end, until

  @property
  def seconds(self) -> float:
    """All of them together."""
    return self._seconds + sum(b - a for a, b in self._gaps)

  @property
  def longest(self) -> float:
    """The seconds of the longest."""
    return max([self._longest, *(b - a for a, b in self._gaps)])


# --- Bytes that each role has sent and received, and its present rates

WINDOW_SECONDS = 10.0  # over which the present rate is measured


class TrafficTotals:
  """Every role has one link; counters restart with each of its incarnations."""

  def __init__(self) -> None:
    # By role: its newest incarnation, and the bytes that all earlier ones have sent and received.
    self._lives: dict[str, tuple[int, int, int]] = {}
    self._recent: dict[str, deque[tuple[float, int, int]]] = {}  # time, sent, received; totals
    self.sent: dict[str, Thinned] = {}  # by role, (time, bytes sent so far)

  def add(self, event: events.Traffic) -> None:
    """Takes a role's counters; those of an incarnation that was replaced are ignored."""
    recent = self._recent.setdefault(event.role, deque())
    newest, sent, received = self._lives.get(event.role, (event.incarnation, 0, 0))
    if event.incarnation < newest:
      return
    if event.incarnation > newest:
      _, sent, received = recent[-1]
    self._lives[event.role] = event.incarnation, sent, received
    recent.append((event.time, sent + event.sent_bytes, received + event.received_bytes))
    self.sent.setdefault(event.role, Thinned(MOST_POINTS)).add(recent[-1][:2])
    while len(recent) > 2 and event.time - recent[1][0] >= WINDOW_SECONDS:
      recent.popleft()

  @property
  def by_role(self) -> dict[str, tuple[int, int]]:
    """(sent, received) bytes of all incarnations of each role."""
    return {role: recent[-1][1:] for role, recent in self._recent.items()}

  def as_json(self, now: float) -> list[dict[str, Any]]:
    """By role: bytes so far, and bytes per second lately (0 if the role has fallen silent)."""
    rows = []
    for role, recent in self._recent.items():
      (began, *before), (ended, *moved) = recent[0], recent[-1]
      seconds = ended - began
      moving = seconds > 0 and now - ended < WINDOW_SECONDS
      row = {"role": role, "name": role_name(role)}
      for way, a, b in zip(("sent", "received"), before, moved):
        row[f"{way}_bytes"] = b
        row[f"{way}_bytes_per_second"] = round((b - a) / seconds) if moving else 0
      rows.append(row)
    return sorted(rows, key=lambda row: parse_role(row["role"]))


# --- Clocks of roles on different machines

LEAST_APART_SECONDS = 0.1  # less distorts no view
MOST_ROUNDS = 500  # of which one side is known: of older ones nothing is proven


class Clocks:
  """How far the clocks of two roles are apart at least, by what the log proves.

  A push is copied out before the commit that has it, and a version is staged after its commit. By
  their own clocks it may be the other way round.
  """

  def __init__(self) -> None:
    self._worst = LEAST_APART_SECONDS, "", ""  # by so much the first role is ahead of the second
    # By role and fragment, its newest copy-out: (incarnation, time).
    self._copied: dict[tuple[str, int], tuple[int, float]] = {}
    # By fragment and round, (time, role) of the last copy-out, the commit and the first stage.
    self._rounds: dict[tuple[int, int], tuple[tuple[float, str], ...]] = {}

  def add(self, event: Event) -> None:
    """Takes one event; events come in order of time."""
    if isinstance(event, events.CopyOut):
      self._copied[event.role, event.fragment] = event.incarnation, event.time
    if not isinstance(event, events.Stage | events.Commit):
      return
    key = event.fragment, event.round
    nothing = (-math.inf, ""), (math.nan, ""), (math.inf, "")
    copied, commit, staged = self._rounds.get(key, nothing)
    if isinstance(event, events.Commit):
      commit = event.time, event.role
    else:
      incarnation, time = self._copied.get((event.role, event.fragment), (-1, 0.0))
      if event.included and incarnation == event.incarnation:
        copied = max(copied, (time, event.role))
      staged = min(staged, (event.time, event.role))
    self._rounds[key] = copied, commit, staged
    if len(self._rounds) > MOST_ROUNDS:
      del self._rounds[next(iter(self._rounds))]
    for (first, ahead), (then, behind) in (copied, commit), (commit, staged):
      self._worst = max(self._worst, (first - then, ahead, behind))

  @property
  def apart(self) -> float:
    """By how many seconds two clocks differ at least; 0 if nothing is proven."""
    seconds, ahead, _ = self._worst
    return seconds if ahead else 0.0

  def text(self) -> str:
    """Whose clocks are the farthest apart; "" if nothing is proven."""
    _, ahead, behind = self._worst
    whose = f"the clock of {role_name(ahead)}", f"that of {role_name(behind)}"
    return f"{whose[0]} is at least {self.apart:.1f} s ahead of {whose[1]}" if ahead else ""


# --- All curves of a run


class Curves:
  """The curves that the page draws over time, and the report over tokens and time."""

  def __init__(self) -> None:
    # Over time: "loss M", "step M" (with "data M", the wait for its batch), "wait M" (for a shard),
    # "participation M", "commits S", OUTER_GRADIENTS.
    self.page = Series()
    self.loss = Series(LOSS_BINS, 1.0)  # over the tokens of all islands, by learner and life
    self.evaluations = Thinned(MOST_EVALUATIONS)  # those with a finite held-out loss
    self.commits = Thinned(MOST_COMMITS)
    self._tokens = 0

  def limit(self, islands: int) -> None:
    """Limits the size of curves: the more islands there are, the coarser each curve is."""
    self.page.keep_at_most(max(40, PAGE_VALUES // islands))
    self.loss.keep_at_most(max(40, LOSS_VALUES // islands))
    self.commits.keep_at_most(max(50, COMMIT_MEMBERS // islands))

  def add_step(self, event: events.Step, m: int, island: IslandState) -> None:
    """A step of an island, which has not counted it yet."""
    self._tokens += event.tokens
    waited = min(event.blocked_seconds, event.gap_seconds)
    # The first step of a life loads programs; of one on an accelerator only its beginning is known.
    if island.life_steps and 0 <= event.gap_seconds - waited < math.inf:
      self.page.add(f"step {m}", event.time, event.gap_seconds - waited)
      self.page.add(f"wait {m}", event.time, waited)
      self.page.add(f"data {m}", event.time, event.data_seconds)
    if event.loss is not None:
      self.page.add(f"loss {m}", event.time, event.loss)
      self.loss.add(f"{m} {min(island.lives, MOST_CURVES)}", self._tokens, event.loss)

  def add_commit(self, event: events.Commit, islands: Collection[int]) -> None:
    """A commit of a run with these islands."""
    time, taking = event.time, event.weights
    self.page.add(f"commits {parse_role(event.role)[1]}", time)
    for name, value in outer_gradients(event).items():
      self.page.add(name, time, value)
    for m in islands:
      self.page.add(f"participation {m}", time, float(m in taking))
    self.commits.add(event)


# --- The syncer's open rounds


@dataclasses.dataclass
class _Open:
  fragment: int
  round: int
  role: str  # its shard
  since: float  # when it began
  asked: tuple[int, ...]
  quorum: int
  pushed: set[int] = dataclasses.field(default_factory=set)
  pushed_at: float = 0.0  # time of the newest push


class Rounds:
  """Follows every round from its beginning to its end."""

  def __init__(self) -> None:
    self._open: dict[int, _Open] = {}  # by fragment; two shards may give a round the same number
    self._grace: dict[int, float] = {}  # by fragment, of its last round
    self._closed_at = -math.inf  # when a round has ended
    self._ahead: dict[str, str] = {}  # by shard, without which island no round begins, and why

  def add(self, event: Event) -> None:
    """Takes one event; kinds that are not about rounds are ignored."""
    match event:
      case events.Push() | events.Resend():
        if (open_ := self._known(event)) is not None:
          open_.pushed.add(parse_role(event.role)[1])
          open_.pushed_at = max(open_.pushed_at, event.time)
      case events.Round():
        if (open_ := self._known(event)) is not None:  # it asks more learners
          open_.asked = event.asked
        else:
          begun = event.role, event.time, event.asked, event.quorum
          self._open[event.fragment] = _Open(event.fragment, event.round, *begun)
        self._ahead.pop(event.role, None)
      case events.Commit() | events.Abandoned():
        if isinstance(event, events.Commit):
          self._grace[event.fragment] = event.grace_seconds
        if self._known(event) is not None:
          del self._open[event.fragment]
        self._closed_at = max(self._closed_at, event.time)
      case events.Exit() | events.Fault(action="kill"):
        self._drop(event.target)
      case events.Started():
        self._drop(event.role)
      case events.Member(state="ahead"):
        self._ahead[event.role] = f"island {event.learner}: {event.reason}"
      case events.RunStarted():
        self._open = {}

  def waiting(self, islands: Mapping[int, IslandState], now: float, sync: SyncConfig) -> str:
    """Why the syncer waits, in plain words, as far as the log says by `now`."""
    if not self._open and self._ahead:
      return f"No round begins. Why: {next(iter(self._ahead.values()))}."
    if not self._open and math.isinf(self._closed_at):
      ready = sum(island.state == "running" for island in islands.values())
      need = f"{ready} of the {sync.min_quorum} it needs are up"
      return f"The first round begins when enough islands have made a step: {need}."
    if not self._open:
      due = f"a fragment falls due about {sync.sync_period} steps after its last sync"
      ago = f"the last round ended {max(0.0, now - self._closed_at):.1f} s ago"
      return f"No round is open: {due}; {ago}."
    first = min(self._open.values(), key=lambda each: each.since)
    since = max(0.0, now - first.since)
    more = f" and {len(self._open) - 1} more" if len(self._open) > 1 else ""
    why = self._reason(first, islands, now)
    return f"Collecting fragment {first.fragment}{more} for {since:.1f} s; {why}."

  def _reason(self, round_: _Open, islands: Mapping[int, IslandState], now: float) -> str:
    gone = {m for m, island in islands.items() if island.state in (*DOWN, "left")}
    pending = sorted(set(round_.asked) - round_.pushed - gone)
    grace = self._grace.get(round_.fragment, 0.0)
    count = len(round_.pushed)
    at = round_.pushed_at if count >= round_.quorum else None
    decision = rules.decide(now, count, pending, at, grace, round_.quorum)
    return f"about to end, {decision.reason}" if decision.over else decision.reason

  def _known(
    self, event: events.Round | events.Push | events.Resend | events.Commit | events.Abandoned
  ) -> _Open | None:
    """The open round that an event is about, if it is known."""
    open_ = self._open.get(event.fragment)
    return open_ if open_ is not None and open_.round == event.round else None

  def _drop(self, role: str) -> None:
    """A shard's rounds end with its life."""
    self._ahead.pop(role, None)
    self._open = {p: each for p, each in self._open.items() if each.role != role}
