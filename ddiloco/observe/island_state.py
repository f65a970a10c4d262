"""What is known of one island or shard: values that `run_state.py` keeps up to date. PURE."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable

from ddiloco.observe.style import compact
from ddiloco.protocol.events import Started, parse_role

RECENT_COMMITS = 32  # over which the shown participation counts
STALL_STEPS = 10.0  # silent for so many of its own steps, and at least STALL_SECONDS: stalled
STALL_SECONDS = 2.0
FIRST_STEP_SECONDS = 60.0  # the first step compiles
DOWN = ("lost", "restarting")


@dataclasses.dataclass
class IslandState:
  """One learner: `tokens` and `steps` of all its incarnations, `step` and more of the newest."""

  state: str = "starting"  # joining, running, stalled, lost, left, quarantined, restarting
  incarnation: int = -1  # the newest that was seen
  chips: int = 0  # its devices; 0: not known yet, as the next three
  chip_kinds: dict[str, None] = dataclasses.field(default_factory=dict)  # of all lives, in order
  flops_per_token: float = 0.0
  peak_flops_per_second: float = 0.0  # of a chip
  lives: int = 0  # incarnations that were seen
  step: int = 0
  global_step: int = 0
  steps: int = 0
  loss: float = math.nan
  tokens: int = 0
  tokens_per_second: float = math.nan
  step_seconds: float = math.nan
  step_time: float = math.nan  # when its last step ended
  commits: int = 0  # that it took part in
  took_part: deque[bool] = dataclasses.field(
    default_factory=lambda: deque(maxlen=RECENT_COMMITS)
  )  # in the last commits, oldest first
  refused: int = 0  # pushes
  missed_time: float = math.nan
  missed_reason: str = ""  # why it was not in the last commit it missed
  returning: bool = False  # was down and has not been merged since
  versions: dict[int, int] = dataclasses.field(default_factory=dict)  # that it has, by fragment

  def start(self, event: Started) -> None:
    """A life of it says what it has."""
    self.chips, self.flops_per_token = event.devices, event.flops_per_token
    self.chip_kinds |= {event.device_kind: None} if event.device_kind else {}
    self.peak_flops_per_second = event.peak_flops_per_second

  @property
  def speed(self) -> Speed:
    """Its own, now."""
    return speed([(self, self.tokens_per_second)])

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
  """How fast islands train, together; NaN is not known."""

  tokens_per_second: float
  per_chip: float  # tokens a second
  mfu: float  # model FLOPs utilisation, 0 to 1; needs every island's FLOPs and its chips' peak

  def text(self) -> str:
    """In words, without what is not known: 12.3k tokens/s, 1.5k a chip, 41.2% MFU."""
    parts = [
      f"{compact(self.tokens_per_second)} tokens/s" if self.tokens_per_second > 0 else "",
      f"{compact(self.per_chip)} a chip" if self.per_chip > 0 else "",
      f"{self.mfu:.1%} MFU" if self.mfu > 0 else "",
    ]
    return ", ".join(part for part in parts if part)


def speed(islands: Iterable[tuple[IslandState, float]]) -> Speed:
  """Of islands that train so many tokens a second each; those that are not finite do not train.

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


@dataclasses.dataclass
class ShardState:
  """One syncer shard."""

  state: str = "starting"  # running, lost, restarting
  incarnation: int = -1
  fragments: tuple[int, ...] = ()
  commits: int = 0
  rejected: int = 0
  last_reason: str = ""  # why the last round was committed when it was


@dataclasses.dataclass(frozen=True)
class LogEvent:
  """Something worth a line: tone is "bad", "good" or "plain"."""

  time: float
  text: str
  tone: str


def finite_or(value: float, otherwise: float) -> float:
  """`value`, unless it is not finite."""
  return value if math.isfinite(value) else otherwise


def role_name(role: str) -> str:
  """ "learner-2" as people say it: "island 2"; "syncer-0": "shard 0"."""
  kind, number = parse_role(role)
  name = {"learner": "island", "syncer": "shard"}.get(kind, kind)
  return f"{name} {number}" if number >= 0 else name


def phase(state: str) -> str:
  """A role's state as a timeline shows it: joining, running, stalled, down, ...; "": not there."""
  known = {"lost": "down", "restarting": "joining", "starting": "joining", "left": ""}
  return known.get(state, state)
