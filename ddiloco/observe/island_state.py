"""What is known of one island or shard: values that `run_state.py` keeps up to date. PURE."""

from __future__ import annotations

import dataclasses
import math
from collections import deque

from ddiloco.protocol.events import parse_role

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
