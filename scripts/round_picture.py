"""A picture of one round of one fragment: the learners' steps, pulls, pushes, and the grace window.

    python scripts/round_picture.py [--picture=docs/round.png] [--islands=4]

The roles' own loops in virtual time (`ddiloco simulate protocol`): islands of one second a step,
the last one a fifth slower, links of 80 ms that carry a push in a third of a second, one shard. The
round is the first in the run's second half that merged all islands and had a grace window of over
0.3 s. Last line: {"fragment", "round", "seconds"} from its beginning to the last apply.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

from ddiloco.config import Config, from_dict
from ddiloco.observe.eventlog import EventLog
from ddiloco.observe.style import FAINT, GLOBAL_MODEL, MUTED, island_colour
from ddiloco.protocol import events
from ddiloco.protocol.events import parse_role
from ddiloco.simulation.run import Speeds, VirtualRun

if TYPE_CHECKING:
  from matplotlib.axes import Axes

SIZES = (2_000_000,) * 4  # values of the fragments
PERIOD, OVERLAP, STEPS = 12, 3, 100
SLOWER, LATENCY, GBPS = 1.2, 0.08, 0.2
PUSH_SECONDS = 32 * SIZES[0] / (GBPS * 1e9)
LIGHT = "#C7C7C7"


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


def play(islands: int) -> EventLog:
  """All events of the run."""
  found = EventLog()
  speeds = Speeds(
    SIZES, gbps=(GBPS,), latency_seconds=(LATENCY,), shard_gbps=0.8, late_seconds=1.0, seed=1
  )
  VirtualRun(make_config(islands), speeds, found.append).finish()
  return found


def chosen(run: EventLog, islands: int) -> events.Commit:
  """The commit of the round that is drawn."""
  commits = run.of(events.Commit)
  for commit in commits[len(commits) // 2 :]:
    if len(commit.learners) == islands and commit.grace_seconds > 0.3:
      return commit
  raise SystemExit("no round waited for all. Fix: fewer islands")


def draw(axes: Axes, run: EventLog, commit: events.Commit, islands: int) -> float:
  """Islands above, the shard below; returns the seconds until the last apply."""

  def of(kind: type) -> list[Any]:
    """The events of the commit's round."""
    found: list[Any] = run.of(kind)
    return [e for e in found if (e.fragment, e.round) == (commit.fragment, commit.round)]

  (begun,) = of(events.Round)
  began = begun.time
  applies = of(events.Apply)
  end = max(event.time for event in applies) - began
  shard = islands
  for step in run.of(events.Step, "learner-"):
    start, stop = step.time - step.seconds - began, step.time - began
    if start < end + 1 and stop > -1.2:
      row = parse_role(step.role)[1]
      axes.barh(row, stop - start, left=start, height=0.5, color=FAINT, edgecolor="white", lw=2)
  decided = commit.quorum_seconds + commit.grace_seconds
  quorum = commit.quorum_seconds
  axes.barh(shard, quorum, height=0.5, color=MUTED)
  axes.barh(shard, commit.grace_seconds, left=quorum, height=0.5, color=LIGHT)
  axes.text(quorum - 0.03, shard + 0.45, "until a quorum", ha="right", va="center", size=10)
  axes.text(quorum + 0.03, shard + 0.45, "grace", ha="left", va="center", size=10)
  axes.plot([decided, decided], [shard - 0.25, shard + 0.25], color=GLOBAL_MODEL, lw=3)
  axes.text(decided + 0.06, shard - 0.12, "commit", va="center", size=10)
  pushed = {push.role: push.time - began for push in of(events.Push)}
  for event in of(events.CopyOut):
    row, at = parse_role(event.role)[1], event.time - began
    axes.annotate(
      "",
      (pushed[event.role] + LATENCY + PUSH_SECONDS, shard - 0.25),
      (at, row),
      arrowprops={"arrowstyle": "->", "color": island_colour(row), "lw": 1.6},
    )
    axes.plot(at, row, "o", color=island_colour(row), ms=9)
  for stage in of(events.Stage):
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
  for marker, fill, text in (
    ("o", GLOBAL_MODEL, "at the end of a step the fragment is copied out, and pushed"),
    ("D", "white", "the new version is there, and goes to the devices"),
    ("D", GLOBAL_MODEL, "it is applied between two steps"),
  ):
    axes.plot([], [], marker, mfc=fill, mec=GLOBAL_MODEL, ms=8, ls="", label=text)
  axes.legend(loc="lower right", frameon=False, fontsize=10)


def main() -> None:
  options = common.options(
    __doc__, picture={**common.OUTPUT, "default": Path("docs/round.png")}, islands=4
  )
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
