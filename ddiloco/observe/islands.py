"""The state of one island or shard, which `run_state.py` keeps up to date. PURE, and bounded."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Iterable

from ddiloco.observe.style import compact, percent, rounded
from ddiloco.protocol import events
from ddiloco.protocol.events import Started, Step, parse_role

RECENT_COMMITS = 32  # over which the shown participation counts
RECENT_GAPS = 511  # between steps; their median is what is usual
MOST_SPANS = 200  # of one role; of more, the shortest are drawn as part of their neighbours
OUTER_GRADIENTS = {  # fields of a commit, and what they mean
  "agreement": "mean cosine of two islands' pushes",
  "rho": "mean cosine of a fragment's merged outer gradient with the one before",
  "length": "length of the merged outer gradient over a push's",
  "staleness": "most inner steps in one push",
}


def outer_gradients(commit: events.Commit) -> dict[str, float]:
  """The values of `OUTER_GRADIENTS` that this commit has, those that are finite."""
  found = {name: getattr(commit, name) for name in OUTER_GRADIENTS}
  return {n: value for n, value in found.items() if value is not None and math.isfinite(value)}


STALL_STEPS = 10.0  # stalled: silent for so many of its step times, at least for STALL_SECONDS
STALL_SECONDS = 2.0
WAIT_FADES = 0.995  # a step: after a sync period of a hundred its last wait still counts for half
SHARD_STALL_SECONDS = 10.0  # a shard writes something at least once a second
FIRST_STEP_SECONDS = 900.0  # a first step may take so long: what is usual is not known yet
# Starved: for some 20 steps over half of the time went into waiting for batches, until less than a
# quarter does.
STARVED_SHARE, FED_SHARE, STARVED_STEPS = 0.5, 0.25, 20
DOWN = ("lost", "restarting")


@dataclasses.dataclass
class MemberState:
  """A learner or a shard: its state, and those it was in before."""

  since: float = 0.0  # when its state, as a timeline shows it, began
  state: str = "starting"  # joining, running, stalled, lost, left, quarantined, restarting
  incarnation: int = -1  # the newest that was seen
  lives: int = 0  # incarnations that were seen
  halted: float = -math.inf  # when the newest of them was last said to be dead or stalled
  alive_at: float = math.nan  # when an island's last step ended, or a shard last wrote
  behind: float = 0.0  # seconds that this came after newer events: its clock is behind
  num_absorbed: int = 0  # spans that are drawn as part of their neighbours
  _spans: list[list] = dataclasses.field(default_factory=list)  # those before `since`

  def live(self, incarnation: int) -> bool:
    """Whether this is the newest incarnation; counts it as a new life if it is new."""
    if incarnation > self.incarnation:
      self.incarnation, self.lives, self.halted = incarnation, self.lives + 1, -math.inf
    return incarnation == self.incarnation

  def live_on(self, time: float, state: str) -> None:
    """Its newest incarnation was in this state then; too late if it has died or stalled since."""
    if time > self.halted:
      self.turn(time, state)

  @property
  def restarts(self) -> int:
    """Its lives after the first one, also those of a run that went on."""
    return max(0, self.lives - 1)

  def show_alive(self, time: float, newest: float) -> None:
    """It showed then that it is alive; `newest`: the time of the newest event of all roles."""
    late = newest - time
    self.alive_at, self.behind = time, late if late > STALL_SECONDS else 0.0

  @property
  def patience(self) -> float:
    """Seconds of silence that are no stall yet."""
    return SHARD_STALL_SECONDS

  def state_at(self, time: float) -> str:
    """`state`, or "stalled" if it should be running and has been silent for too long."""
    silent = time - self.behind - finite_or(self.alive_at, time) > self.patience
    return "stalled" if self.state == "running" and silent else self.state

  def turn(self, time: float, state: str) -> None:
    """It is in this state from `time` on; spans follow each other also where clocks differ."""
    time = max(time, self.since)
    if phase(state) != phase(self.state) or self._stalls(time):
      self._spans = self.spans(time, time)
      self.since = time
      while len(self._spans) > MOST_SPANS:
        _absorb_shortest(self._spans)
        self.num_absorbed += 1
    self.state = state

  def spans(self, now: float, seen: float) -> list[list]:
    """[start, end, state] without gaps up to `now`; a stall is judged at time `seen`.

    If it fell silent before the end of a span, the silent part is a stall.
    """
    silent_since = max(self.since, self.alive_at) if self._stalls(seen) else now
    pieces = (self.since, silent_since, phase(self.state)), (silent_since, now, "stalled")
    shown = [[round(a, 2), round(b, 2), each] for a, b, each in pieces if each and a < b]
    return self._spans + shown

  def _stalls(self, time: float) -> bool:
    return self.state == "running" and self.state_at(time) == "stalled"


def _absorb_shortest(spans: list[list]) -> None:
  """Drops a span; the one before it takes over its time, and that of a gap between the two, as
  little as possible."""
  i = min(range(1, len(spans)), key=lambda i: spans[i][1] - spans[i - 1][1])
  spans[i - 1][1] = spans[i][1]
  del spans[i]


@dataclasses.dataclass
class ShardState(MemberState):
  """One syncer shard."""

  fragments: tuple[int, ...] = ()
  commits: int = 0
  rejected: int = 0
  last_reason: str = ""  # why its last round ended when it did
  unheard: set[int] = dataclasses.field(default_factory=set)  # learners that it counts as lost


@dataclasses.dataclass
class IslandState(MemberState):
  """One learner. `tokens` and `steps` are of all its incarnations, `step` is of the newest."""

  chips: int = 0  # its devices; 0: not known yet
  chip_kind: str = ""
  chip_kinds: dict[str, None] = dataclasses.field(default_factory=dict)  # of all lives, in order
  flops_per_token: float = 0.0
  peak_flops_per_second: float = 0.0  # of a chip
  step: int = 0
  global_step: int = 0
  steps: int = 0
  life_steps: int = 0  # of the newest incarnation
  loss: float = math.nan  # also before the first
  diverged: bool = False  # its last loss is not finite
  tokens: int = 0
  tokens_per_second: float = math.nan
  step_seconds: float = math.nan
  steps_per_second: float = math.nan  # lately, without waits for a shard
  longest_wait: float = 0.0  # seconds that a step waited for a shard or its batch; fades
  step_tokens: int = 0  # of its last step
  data_seconds: float = 0.0  # of all incarnations: steps waited so long for their batches
  data_share: float = 0.0  # of the time lately
  starved: bool = False  # it waits for its data most of the time
  # Times between the ends of its latest steps on its present chips; the first of a life compiles.
  gaps: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=RECENT_GAPS))
  commits: int = 0  # that it took part in
  # In the last commits, oldest first.
  took_part: deque[bool] = dataclasses.field(default_factory=lambda: deque(maxlen=RECENT_COMMITS))
  rejected: int = 0  # pushes
  missed_time: float = math.nan
  missed_reason: str = ""  # why it missed the last commit that it missed
  versions: dict[int, int] = dataclasses.field(default_factory=dict)  # its version of each fragment

  def start(self, event: Started) -> None:
    """A new incarnation starts, on these devices; no version of a fragment is known of it yet."""
    self.step, self.life_steps, self.alive_at, self.versions = 0, 0, math.nan, {}
    self.tokens_per_second = self.steps_per_second = math.nan
    if (event.devices, event.device_kind) != (self.chips, self.chip_kind):
      self.gaps.clear()
    self.chip_kind = event.device_kind
    self.chips, self.flops_per_token = event.devices, event.flops_per_token
    self.chip_kinds |= {event.device_kind: None} if event.device_kind else {}
    self.peak_flops_per_second = event.peak_flops_per_second

  def wait(self, step: Step) -> None:
    """Takes how long this step waited for a shard or its batch: such a silence is no stall."""
    waited = min(step.blocked_seconds + step.data_seconds, step.gap_seconds)
    self.longest_wait = max(waited, WAIT_FADES * self.longest_wait)

  def note_data_wait(self, step: Step) -> bool:
    """Takes the wait for this step's batch, and returns whether `starved` has changed. An island's
    first steps do not count, as they fill the buffers that are read ahead."""
    if step.gap_seconds > 0 and self.gaps:
      waited = max(0.0, min(1.0, step.data_seconds / step.gap_seconds))
      self.data_share += (waited - self.data_share) / STARVED_STEPS
    before = self.starved
    self.starved = self.data_share > (FED_SHARE if before else STARVED_SHARE)
    return self.starved != before

  @property
  def speed(self) -> Speed:
    """The speed of this island now."""
    return speed([(self, self.tokens_per_second)])

  @property
  def usual_gap(self) -> float:
    """The median time from step to step, on its present chips; NaN before the second step."""
    return statistics.median(self.gaps) if self.gaps else math.nan

  @property
  def usual_rate(self) -> float:
    """Its usual tokens a second on its present chips."""
    return self.step_tokens / self.usual_gap

  @property
  def usual_speed(self) -> Speed:
    """Its usual speed on its present chips."""
    return speed([(self, self.usual_rate)])

  @property
  def participation(self) -> float:
    """Share of the recent commits it took part in; NaN before the first."""
    return sum(self.took_part) / len(self.took_part) if self.took_part else math.nan

  @property
  def patience(self) -> float:
    """Seconds of silence that are no stall yet."""
    steps = STALL_STEPS * finite_or(self.step_seconds, 0.0)
    patience = max(STALL_SECONDS, steps, 2 * self.longest_wait)
    # On an accelerator the first step is only begun when it is logged; the next one waits for it.
    return patience if self.life_steps > 1 else FIRST_STEP_SECONDS


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
      f"{percent(self.mfu, 1)} MFU" if self.mfu > 0 else "",
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
  mark: str = ""  # on a timeline: kill, fault, exit, restart, hang or merged
  role: str = ""  # whose


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
