"""The state of one island or shard, which `run_state.py` keeps up to date. PURE.

And how islands that died came back, in named phases.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import statistics
from array import array
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from ddiloco.observe.style import compact, rounded
from ddiloco.protocol import events
from ddiloco.protocol.events import Event, Started, parse_role

RECENT_COMMITS = 32  # over which the shown participation counts
OUTER_GRADIENTS = {  # fields of a commit, and what they mean
  "agreement": "mean cosine of two islands' updates",
  "rho": "mean cosine of a fragment's update with the one before",
  "length": "length of the merged update over an island's",
  "staleness": "most inner steps that an update is from its base",
}


def outer_gradients(commit: events.Commit) -> dict[str, float]:
  """The values of `OUTER_GRADIENTS` that this commit has."""
  found = {name: getattr(commit, name) for name in OUTER_GRADIENTS}
  return {name: value for name, value in found.items() if value is not None}


class Median:
  """The median of positive numbers: exact for few numbers, within a thousandth for many."""

  EXACT = 512
  PER_E_FOLD = 1000.0  # classes of equal ratio

  def __init__(self) -> None:
    self._few: array | None = array("d")
    self._classes: Counter[int] = Counter()

  def add(self, value: float) -> None:
    """Adds a number; a number that is not finite or not positive is left out."""
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
    """The median; NaN without numbers."""
    if self._few is not None:
      return statistics.median(self._few) if self._few else math.nan
    classes = sorted(self._classes)
    counts = list(itertools.accumulate(self._classes[each] for each in classes))
    middle = classes[bisect.bisect_left(counts, counts[-1] / 2)]
    return math.exp(middle / self.PER_E_FOLD)


class UsualRate:
  """Of an island on its present chips: tokens a step over its median step-to-step time."""

  def __init__(self) -> None:
    self._steps = self._tokens = 0
    self._gaps = Median()

  def add(self, event: events.Step) -> None:
    """Takes a step; the first step of an island, which compiles, has no say in its time."""
    self._steps, self._tokens = self._steps + 1, self._tokens + event.tokens
    if event.step > 1:
      self._gaps.add(event.gap_seconds)

  @property
  def tokens_per_second(self) -> float:
    """NaN before the second step."""
    usual = self._gaps.value
    return self._tokens / self._steps / usual if self._steps and usual > 0 else math.nan


STALL_STEPS = 10.0  # stalled: silent for so many of its step times, at least for STALL_SECONDS
STALL_SECONDS = 2.0
FIRST_STEP_SECONDS = 60.0  # the first step compiles
DOWN = ("lost", "restarting")


@dataclasses.dataclass
class MemberState:
  """A learner or a shard."""

  state: str = "starting"  # joining, running, stalled, lost, left, quarantined, restarting
  incarnation: int = -1  # the newest that was seen
  step_time: float = math.nan  # when the last step of an island ended

  def state_at(self, time: float) -> str:
    """Its state, judged at this time."""
    return self.state


@dataclasses.dataclass
class ShardState(MemberState):
  """One syncer shard."""

  fragments: tuple[int, ...] = ()
  commits: int = 0
  rejected: int = 0
  last_reason: str = ""  # why the last round was committed when it was


@dataclasses.dataclass
class IslandState(MemberState):
  """One learner. `tokens` and `steps` are of all its incarnations, `step` is of the newest."""

  chips: int = 0  # its devices; 0: not known yet
  chip_kind: str = ""
  chip_kinds: dict[str, None] = dataclasses.field(default_factory=dict)  # of all lives, in order
  flops_per_token: float = 0.0
  peak_flops_per_second: float = 0.0  # of a chip
  lives: int = 0  # incarnations that were seen
  step: int = 0
  global_step: int = 0
  steps: int = 0
  loss: float = math.nan  # also before the first
  diverged: bool = False  # its last loss is not finite
  tokens: int = 0
  life_tokens: int = 0  # of the newest incarnation and those it goes on from
  tokens_per_second: float = math.nan
  step_seconds: float = math.nan
  commits: int = 0  # that it took part in
  # In the last commits, oldest first.
  took_part: deque[bool] = dataclasses.field(default_factory=lambda: deque(maxlen=RECENT_COMMITS))
  rejected: int = 0  # pushes
  missed_time: float = math.nan
  missed_reason: str = ""  # why it missed the last commit that it missed
  died: float = -math.inf  # when it was last known to be dead
  returning: bool = False  # was down and has not been merged since
  versions: dict[int, int] = dataclasses.field(default_factory=dict)  # its version of each fragment
  usual: UsualRate = dataclasses.field(default_factory=UsualRate)

  def live(self, incarnation: int) -> bool:
    """Whether this is the newest incarnation; counts it as a new life if it is new."""
    if incarnation > self.incarnation:
      self.incarnation, self.lives = incarnation, self.lives + 1
    return incarnation == self.incarnation

  def start(self, event: Started) -> None:
    """A new incarnation starts, on these devices; no version of a fragment is known of it yet."""
    self.live(event.incarnation)
    self.step, self.tokens_per_second, self.step_time, self.versions = 0, math.nan, math.nan, {}
    if (event.devices, event.device_kind) != (self.chips, self.chip_kind):
      self.usual = UsualRate()
    self.chip_kind = event.device_kind
    self.chips, self.flops_per_token = event.devices, event.flops_per_token
    self.chip_kinds |= {event.device_kind: None} if event.device_kind else {}
    self.peak_flops_per_second = event.peak_flops_per_second

  @property
  def speed(self) -> Speed:
    """The speed of this island now."""
    return speed([(self, self.tokens_per_second)])

  @property
  def usual_speed(self) -> Speed:
    """Its usual speed on the chips that it had last."""
    return speed([(self, self.usual.tokens_per_second)])

  @property
  def participation(self) -> float:
    """Share of the recent commits it took part in; NaN before the first."""
    return sum(self.took_part) / len(self.took_part) if self.took_part else math.nan

  def state_at(self, time: float) -> str:
    """`state`, or "stalled" if it should be running and has been silent for too long."""
    patience = max(STALL_SECONDS, STALL_STEPS * finite_or(self.step_seconds, 0.0))
    if not self.step:
      patience = FIRST_STEP_SECONDS
    silent = time - finite_or(self.step_time, time) > patience
    return "stalled" if self.state == "running" and silent else self.state


@dataclasses.dataclass(frozen=True)
class Speed:
  """How fast islands train, together; NaN: not known."""

  tokens_per_second: float
  per_chip: float  # tokens a second
  mfu: float  # model FLOPs utilisation, 0 to 1; needs every island's FLOPs and its chips' peak

  def as_json(self) -> dict[str, float | None]:
    """Tokens a second a chip, and MFU."""
    return {"tokens_per_second_per_chip": rounded(self.per_chip), "mfu": rounded(self.mfu)}

  def text(self) -> str:
    """The known values in words: 12.3k tokens/s, 1.5k a chip, 41.2% MFU."""
    parts = [
      f"{compact(self.tokens_per_second)} tokens/s" if self.tokens_per_second > 0 else "",
      f"{compact(self.per_chip)} a chip" if self.per_chip > 0 else "",
      f"{self.mfu:.1%} MFU" if self.mfu > 0 else "",
    ]
    return ", ".join(part for part in parts if part)


UNKNOWN = Speed(math.nan, math.nan, math.nan)


def speed(islands: Iterable[tuple[IslandState, float]]) -> Speed:
  """The speed of (island, tokens a second) together; an island with a rate not finite is left out.

  MFU is tokens a second x FLOPs a token over what the chips could do at their peak
  (`docs/accelerators.md`).
  """
  pairs = [(island, rate) for island, rate in islands if math.isfinite(rate)]
  rate, chips = sum(rate for _, rate in pairs), sum(island.chips for island, _ in pairs)
  done = [rate * island.flops_per_token for island, rate in pairs]
  peaks = [island.chips * island.peak_flops_per_second for island, _ in pairs]
  counted = bool(pairs) and all(island.chips for island, _ in pairs)
  return Speed(
    rate if pairs else math.nan,
    rate / chips if counted else math.nan,
    sum(done) / sum(peaks) if counted and all(done) and all(peaks) else math.nan,
  )


@dataclasses.dataclass(frozen=True)
class LogEvent:
  """An entry of the list of log events: `tone` is "bad", "good" or "plain"."""

  time: float
  text: str
  tone: str


def finite_or(value: float, otherwise: float) -> float:
  """`value`, unless it is not finite."""
  return value if math.isfinite(value) else otherwise


def role_name(role: str) -> str:
  """The name to show: "island 2" for "learner-2", "shard 0" for "syncer-0"."""
  kind, number = parse_role(role)
  name = {"learner": "island", "syncer": "shard"}.get(kind, kind)
  return f"{name} {number}" if number >= 0 else name


def phase(state: str) -> str:
  """A role's state as a timeline shows it: joining, running, stalled, down, ...; "": absent."""
  known = {"lost": "down", "restarting": "joining", "starting": "joining", "left": ""}
  return known.get(state, state)


# --- A learner that comes back: how the seconds from its death to its merge were spent

PHASES = (
  *("detect", "pause", "away", "process", "devices", "compile", "restore", "receive"),
  *("first_step", "merge"),
)
MOST_REJOINS = 200  # the newest are kept


@dataclasses.dataclass
class WayBack:
  """The return of one learner. `merged`: when a commit had its push again; NaN until then."""

  learner: int
  died: float
  phases: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds, in their order
  merged: float = math.nan
  reached: float = 0.0  # when its last phase ended

  @property
  def seconds(self) -> float:
    """From its death to its merge."""
    return self.merged - self.died

  def end(self, phase: str, time: float) -> None:
    """The phase ends. If several events end it, the first counts; time does not go back."""
    if phase not in self.phases:
      self.phases[phase] = max(0.0, time - self.reached)
      self.reached = max(self.reached, time)


class Rejoins:
  """Returns of learners in named phases. Takes a run's events in order of time.

  A phase lasts from the end of the one before it to the event that ends it:

  | phase      | ends when                                          | event                        |
  |------------|----------------------------------------------------|------------------------------|
  | detect     | its supervisor has noticed that it is dead         | `exit`, after a planned kill |
  | pause      | its next incarnation is started                    | `restart`                    |
  | away       | (instead of both, where no engine starts it) it    | `launched` or `started`      |
  |            | runs again                                         |                              |
  | process    | its process runs and has its imports               | `launched`                   |
  | devices    | JAX has its devices, and data are open             | `compiled`, less its seconds |
  | compile    | its programs are compiled, or were in the cache    | `compiled`                   |
  | restore    | its part of a snapshot is on the devices           | `started`                    |
  | receive    | every fragment has arrived                         | `joined`                     |
  | first_step | its first step has ended                           | `step`                       |
  | merge      | a commit has its push                              | `commit`                     |

  A phase that an engine does not have is left out: a thread has no `process`.
  """

  def __init__(self, most: int = MOST_REJOINS):
    self.found: deque[WayBack] = deque(maxlen=most)
    self.left_out = 0  # returns before these
    # By role.
    self._open: dict[str, WayBack] = {}
    self._seen: dict[str, tuple[int, float]] = {}  # incarnation and time of its own last event

  def add(self, event: Event) -> None:
    """Takes one event; any event of a learner's own shows that it lives."""
    match event:
      case events.RunStarted():
        self._open, self._seen = {}, {}  # the whole run starts or resumes: no learner rejoins
      case events.Fault(action="kill"):
        self._dies(event.target, event.time)
      case events.Exit():
        self._exit(event)
      case events.Restart():
        self._end(event.target, "pause", event.time)
      case events.Compiled(program=""):
        if event.role == event.target:
          self._hear(event)
        self._end(event.target, "devices", event.time - max(0.0, event.seconds))
        self._end(event.target, "compile", event.time)
      case events.Commit():
        for role in self._open.keys() & {f"learner-{m}" for m in event.weights}:
          self._merged(role, event.time)
      case _:
        self._hear(event)

  def as_json(self, most: int = MOST_REJOINS) -> list[dict[str, Any]]:
    """The newest `most` returns, oldest first; `seconds` is None for a learner not merged yet."""
    return [
      {
        "learner": each.learner,
        "time": round(each.died, 3),
        "seconds": rounded(each.seconds, 3),
        "phases": {phase: round(seconds, 3) for phase, seconds in each.phases.items()},
      }
      for each in list(self.found)[-most:]
    ]

  def _dies(self, role: str, time: float) -> None:
    if role in self._seen:  # a learner that never ran does not come back
      self.left_out += len(self.found) == self.found.maxlen
      self._open[role] = WayBack(parse_role(role)[1], time, reached=time)
      self.found.append(self._open[role])

  def _exit(self, event: events.Exit) -> None:
    """Ends `detect`, which began at a planned kill if there was one, or else at its last event."""
    open_ = self._open.get(event.target)
    if open_ is None or open_.phases:
      _, last = self._seen.get(event.target, (0, event.time))
      self._dies(event.target, min(event.time, last))
    self._end(event.target, "detect", event.time)

  def _hear(self, event: Event) -> None:
    """Takes an event that a learner itself recorded."""
    role = event.role
    incarnation, last = self._seen.get(role, (event.incarnation, event.time))
    if event.incarnation < incarnation or not role.startswith("learner-"):
      return  # a late event of an earlier incarnation, or no learner's
    if event.incarnation > incarnation and role not in self._open:
      self._dies(role, last)
    self._seen[role] = event.incarnation, max(last, event.time)
    open_ = self._open.get(role)
    if open_ is None or event.time < open_.died:
      return
    match event:
      case events.Launched() | events.Started() if not open_.phases:
        open_.end("away", event.time)
      case events.Launched():
        open_.end("process", event.time)
      case events.Started():
        open_.end("restore", event.time)
      case events.Joined():
        open_.end("receive", event.time)
      case events.Step() if "receive" in open_.phases:
        open_.end("first_step", event.time)

  def _end(self, role: str, phase: str, time: float) -> None:
    if role in self._open:
      self._open[role].end(phase, time)

  def _merged(self, role: str, time: float) -> None:
    open_ = self._open[role]
    if "first_step" in open_.phases:
      open_.end("merge", time)
      open_.merged = time
      del self._open[role]
