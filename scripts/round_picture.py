"""A picture of one round of one fragment: the learners' steps, pulls, pushes, and the grace window.

    python scripts/round_picture.py [--picture=docs/round.png] [--islands=4]

The roles' own loops in virtual time (`ddiloco simulate protocol`): islands of one second a step,
the last one a fifth slower, links of 80 ms that carry a push in a third of a second, one shard. The
round is the first in the run's second half that merged all islands and had a grace window of over
0.3 s. Last line: {"fragment", "round", "seconds"} from its beginning to the last apply.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import common

from ddiloco.config import Config, from_dict
from ddiloco.observe.style import FAINT, GLOBAL_MODEL, MUTED, island_colour
from ddiloco.protocol import events
from ddiloco.protocol.events import Event, parse_role
from ddiloco.simulation.run import Speeds, VirtualRun

if TYPE_CHECKING:
  from matplotlib.axes import Axes

SIZES = (2_000_000,) * 4  # values of the fragments
PERIOD, OVERLAP, STEPS = 12, 3, 100
SLOWER, LATENCY, GBPS = 1.2, 0.08, 0.2
PUSH_SECONDS = 32 * SIZES[0] / (GBPS * 1e9)
LIGHT = "#C7C7C7"
E = TypeVar("E", bound=Event)


def make_config(islands: int) -> Config:
  """The defaults with four fragments, of which one is due in every third step."""
  slow = {str(islands - 1): {"min_step_seconds": SLOWER}}
  return from_dict(
    {
      "islands": {"num_learners": islands, "batch_size": 1, "overrides": slow},
      "data": {"sequence_length": 64},
      "sync": {
        **{"num_shards": 1, "num_fragments": len(SIZES), "sync_period": PERIOD},
        **{"overlap_steps": OVERLAP, "snapshot_steps": 0},
      },
      "run": {"total_tokens": islands * STEPS * 64, "evaluations": 0},
    }
  )


def play(islands: int) -> list[Event]:
  """All events of the run."""
  found: list[Event] = []
  speeds = Speeds(
    SIZES, gbps=(GBPS,), latency_seconds=(LATENCY,), shard_gbps=0.8, late_seconds=1.0, seed=1
  )
  VirtualRun(make_config(islands), speeds, found.append).finish()
  return found


def chosen(run: Sequence[Event], islands: int) -> events.Commit:
  """The commit of the round that is drawn."""
  commits = of(run, events.Commit)
  for commit in commits[len(commits) // 2 :]:
    if len(commit.learners) == islands and commit.grace_seconds > 0.3:
      return commit
  raise SystemExit("no round waited for all. Fix: fewer islands")


def of(run: Sequence[Event], kind: type[E], commit: events.Commit | None = None) -> list[E]:
  """The events of a kind; only of the commit's round, if a commit is given."""
  found: list[Any] = [event for event in run if isinstance(event, kind)]
  if commit is None:
    return found
  return [e for e in found if (e.fragment, e.round) == (commit.fragment, commit.round)]


def draw(axes: Axes, run: Sequence[Event], commit: events.Commit, islands: int) -> float:
  """Islands above, the shard below; returns the seconds until the last apply."""
  (begun,) = of(run, events.Round, commit)
  began = begun.time
  applies = of(run, events.Apply, commit)
  end = max(event.time for event in applies) - began
  shard = islands
  for step in of(run, events.Step):
    start, stop = step.time - step.seconds - began, step.time - began
    if step.role.startswith("learner-") and start < end + 1 and stop > -1.2:
      row = parse_role(step.role)[1]
      axes.barh(row, stop - start, left=start, height=0.5, color=FAINT, edgecolor="white", lw=2)
  decided = commit.quorum_seconds + commit.grace_seconds
  for left, width, color, text, side in (
    (0.0, commit.quorum_seconds, MUTED, "until a quorum", "right"),
    (commit.quorum_seconds, commit.grace_seconds, LIGHT, "grace", "left"),
  ):
    axes.barh(shard, width, left=left, height=0.5, color=color)
    place = commit.quorum_seconds + (0.03 if side == "left" else -0.03)
    axes.text(place, shard + 0.45, text, ha=side, va="center", size=10)
  axes.plot([decided, decided], [shard - 0.25, shard + 0.25], color=GLOBAL_MODEL, lw=3)
  axes.text(decided + 0.06, shard + 0.12, "commit", va="center", size=10)
  pushed = {push.role: push.time - began for push in of(run, events.Push, commit)}
  for event in of(run, events.CopyOut, commit):
    row, at = parse_role(event.role)[1], event.time - began
    axes.annotate(
      "",
      (pushed[event.role] + LATENCY + PUSH_SECONDS, shard - 0.25),
      (at, row),
      arrowprops={"arrowstyle": "->", "color": island_colour(row), "lw": 1.6},
    )
    axes.plot(at, row, "o", color=island_colour(row), ms=9)
  for stage in of(run, events.Stage, commit):
    row, at = parse_role(stage.role)[1], stage.time - began
    axes.annotate(
      "",
      (at, row),
      (decided, shard - 0.25),
      arrowprops={"arrowstyle": "-", "color": island_colour(row), "lw": 1.2, "ls": ":"},
    )
    axes.plot(at, row, "D", mfc="white", mec=island_colour(row), mew=1.8, ms=8)
  for apply in applies:
    row, at = parse_role(apply.role)[1], apply.time - began
    axes.plot(at, row, "D", color=island_colour(row), ms=9)
  return end


def legend(axes: Axes) -> None:
  marks: tuple[tuple[str, str, str], ...] = (
    ("o", GLOBAL_MODEL, "at the end of a step the fragment is copied out, and pushed"),
    ("D", "white", "the new version is there, and goes to the devices"),
    ("D", GLOBAL_MODEL, "it is applied between two steps"),
  )
  for marker, fill, text in marks:
    axes.plot([], [], marker, mfc=fill, mec=GLOBAL_MODEL, ms=8, ls="", label=text)
  axes.legend(loc="lower right", frameon=False, fontsize=10)


def main() -> None:
  parser = common.parser(__doc__, quick="")
  parser.add_argument("--picture", type=Path, default=Path("docs/round.png"))
  parser.add_argument("--islands", type=int, default=4)
  options = parser.parse_args()
  run = play(options.islands)
  commit = chosen(run, options.islands)
  with common.picture(options.picture, 5.6) as (_, (axes,)):
    seconds = draw(axes, run, commit, options.islands)
    names = [*(f"island {m}" for m in range(options.islands)), "shard"]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.1, -0.6)
    axes.set_xlim(-1.2, seconds + 1.0)
    axes.grid(False)
    axes.set_xlabel("seconds since the shard began the round; every grey bar is an inner step")
    axes.set_title("One round of one fragment, while all islands go on")
    legend(axes)
  said = {"fragment": commit.fragment, "round": commit.round, "seconds": round(seconds, 3)}
  print(json.dumps(said))


if __name__ == "__main__":
  common.run_script(main)
