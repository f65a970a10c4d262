"""What survivors notice when a learner is killed (kill -9) again and again; how soon it is back.

One run of the processes engine on this machine. Its time is cut into windows of `--every` seconds;
at the beginning of every other window the last learner is killed. Each window with a kill is
compared with the calm windows before and after it, since this machine may be faster or slower a
minute later; a step lasts from the end of the one before, so pauses count. A returned learner
traces and compiles (from the run's cache), which on a machine of its own would cost others nothing:
so survivors get cores that the killed learner, the shards and the supervisor do not use (Linux).
With only two cores there is one survivor. Memory bandwidth stays shared.

  python scripts/bench_kill.py [--kills=6] [--every=20] [--learners=N] [--workdir=DIR]
    [--picture=docs/kill.png] [--quick]

With --workdir a finished run is not made again.

Last line: {"survivor_step_ratio": median step in windows with a kill / in the calm ones around it,
"survivor_max_gap_ratio": longest step / median step in windows with a kill,
"max_gap_ratio_without": the same of the calm ones, "rejoin_seconds": median from a kill to the
first merged push of the new incarnation, "step_ratio_in_restarts", "step_ratio_between": as
survivor_step_ratio, for the steps between a kill and that push and for the others, "kills",
"rejoined", "survivors", "step_ms", "cores"}.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

import common
from common import middle

from ddiloco import environment

environment.prepare(num_cpu_devices=1, cpu_only=True, supervises=True)

from ddiloco import workdir as workdirs
from ddiloco.config import Config, ConfigError
from ddiloco.engines import children
from ddiloco.engines.children import Spawn
from ddiloco.engines.processes import ProcessesEngine
from ddiloco.observe.eventlog import EventLog, read_events
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import GLOBAL_MODEL, PALETTE
from ddiloco.protocol.events import Commit, Event, Fault, Restart, Step
from ddiloco.training import data

WARM_UP_SECONDS, QUICK_WARM_UP_SECONDS = 10.0, 3.0  # from the first step to the first window
QUICK_PACE_SECONDS = 0.2  # of a step: leaves cores to a process that starts again
BACK_SECONDS = 0.5  # from a kill to the restart
REJOIN_SECONDS = 90.0  # limit for the rejoin after the last kill
Steps = list[tuple[float, float]]  # (when it ended, seconds since the one before ended)


def make_config(learners: int, kills: int, every: float, quick: bool) -> Config:
  width, warm_up = (16, QUICK_WARM_UP_SECONDS) if quick else (64, WARM_UP_SECONDS)
  pace = QUICK_PACE_SECONDS if quick else 0.0
  kill = {"action": "kill", "role": f"learner-{learners - 1}", "seconds": BACK_SECONDS}
  moments = (warm_up + (2 * i + 1) * every for i in range(kills))
  return common.small(
    *(2, width, 64),
    islands={"num_learners": learners, "batch_size": 8, "min_step_seconds": pace},
    sync={"num_shards": 2, "num_fragments": 4},
    run={"total_tokens": 1 << 40, "evaluations": 0, "sample_tokens": 0},
    chaos={"faults": [{**kill, "at_seconds": at} for at in moments]},
  )


class Pinned(ProcessesEngine):
  """Runs survivors on the cores `mine`; all other roles on this process's cores."""

  cpu_only = True
  mine: frozenset[int] = frozenset()

  def _spawn(self, name: str, host: int) -> Spawn:
    kind, _, number = name.partition("-")
    if kind != "learner" or int(number) == self.config.islands.num_learners - 1:
      return children.spawn_forked

    def pinned(command: list[str], log: Path) -> children.Forked:
      process = children.spawn_forked(command, log)
      os.sched_setaffinity(process.pid, self.mine)  # before it has threads, which inherit it
      return process

    return pinned


def run(config: Config, folder: Path, seconds: float, mine: frozenset[int]) -> None:
  """Makes the run in `folder`, unless it is there already; it ends when all are back."""
  if common.done_before(config, folder):
    return
  workdirs.claim(folder, config, overwrite=True)
  engine = Pinned(config, folder, data.open_corpus(config.data), lambda params: {"loss": 0.0})
  engine.mine = mine
  state, all_train_at = RunState(config), math.inf

  def listen(event: Event) -> None:
    nonlocal all_train_at
    state.read([event])
    if isinstance(event, Fault | Restart):
      print(f"{event.time:6.1f} s {event.target} {event.kind}", flush=True)
    if math.isinf(all_train_at) and all(each.steps for each in state.islands.values()):
      all_train_at = event.time
      print(f"{event.time:6.1f} s all train; goes on for {seconds:.0f} s", flush=True)
    lasted = event.time - all_train_at
    if lasted >= seconds and isinstance(event, Commit):
      waits = any(math.isinf(back) for _, back in restarts(state)[-1:])
      if not waits or lasted > seconds + REJOIN_SECONDS:
        engine.stop.set()

  outcome = engine.run([listen])
  if not engine.stop.is_set():
    raise SystemExit(f"the run {outcome.reason} too early; see {folder / 'logs'}")


# --- what the events say --------------------------------------------------------------------------


def restarts(run: RunState) -> list[tuple[float, float]]:
  """(kill, first merged push of the next incarnation) for each kill; inf: not until the next."""
  ways = (way for way in run.rejoins.found if way.planned)
  return [(way.died, way.ends.get("merge", math.inf)) for way in ways]


def steps_of(events: EventLog, learner: int) -> Steps:
  """Every step but the first."""
  times = [e.time for e in events.of(Step, f"learner-{learner}")]
  return [(after, after - before) for before, after in itertools.pairwise(times)]


def between(steps: Steps, start: float, end: float) -> Steps:
  return steps[bisect.bisect_left(steps, (start, 0.0)) : bisect.bisect_left(steps, (end, 0.0))]


def measure(folder: Path, survivors: int, every: float) -> dict[str, Any]:
  """The numbers of the run, from its event logs."""
  events = read_events(folder)
  spans = restarts(RunState().read(events))
  ratios: dict[str, list[float]] = {"all": [], "in": [], "between": []}
  longest: dict[str, list[float]] = {"with": [], "without": []}
  medians = []
  for learner in range(survivors):
    steps = steps_of(events, learner)
    for killed, back in spans:
      struck = between(steps, killed, killed + every)
      calm = [
        between(steps, killed - every, killed),
        between(steps, killed + every, killed + 2 * every),
      ]
      if not struck or not all(calm):
        raise SystemExit(f"learner {learner} made no step. Fix: a longer --every")
      usual = statistics.mean(statistics.median(g for _, g in window) for window in calm)
      medians.append(usual)
      parts = {
        "all": [gap for _, gap in struck],
        "in": [gap for ended, gap in struck if ended <= back],
        "between": [gap for ended, gap in struck if ended > back],
      }
      for part, gaps in parts.items():
        ratios[part] += [statistics.median(gaps) / usual] if gaps else []
      longest["with"].append(max(parts["all"]) / usual)
      longest["without"] += [max(gap for _, gap in window) / usual for window in calm]
  away = [back - killed for killed, back in spans if math.isfinite(back)]
  return {
    "survivor_step_ratio": middle(ratios["all"]),
    "survivor_max_gap_ratio": round(max(longest["with"]), 2),
    "max_gap_ratio_without": round(max(longest["without"]), 2),
    "rejoin_seconds": middle(away, 2),
    "step_ratio_in_restarts": middle(ratios["in"]),
    "step_ratio_between": middle(ratios["between"]),
    "kills": len(spans),
    "rejoined": len(away),
    "survivors": survivors,
    "step_ms": round(1e3 * statistics.median(medians), 2),
  }


def draw(path: Path, folder: Path, survivors: int, every: float, result: dict[str, Any]) -> None:
  """Every step of the survivors around every kill, all kills on one axis, and their median."""
  events = read_events(folder)
  around = [
    (ended - killed, 1e3 * gap)
    for learner in range(survivors)
    for killed, _ in restarts(RunState().read(events))
    for ended, gap in between(steps_of(events, learner), killed - every, killed + every)
  ]
  with common.picture(path, 4.2) as (_, (axes,)):
    axes.plot(*zip(*around), ".", color=PALETTE[0], alpha=0.15, ms=3)
    axes.plot([], [], ".", color=PALETTE[0], ms=6, label="a step of a surviving learner")
    width = every / 20
    medians = []
    for i in range(-20, 20):
      inside = [ms for at, ms in around if i * width <= at < (i + 1) * width]
      if inside:
        medians.append(((i + 0.5) * width, statistics.median(inside)))
    axes.plot(*zip(*medians), color=PALETTE[1], lw=2, label=f"their median in each {width:.2g} s")
    axes.axvline(0, color=GLOBAL_MODEL, lw=1.5, label="kill -9 of another learner")
    if result["rejoin_seconds"] is not None:
      axes.axvline(result["rejoin_seconds"], color=GLOBAL_MODEL, lw=1.5, ls=":",
                   label="the first push of its successor is merged")  # fmt: skip
    ratio = result["survivor_step_ratio"]
    axes.set_title(f"Survivors around a kill: their median step takes {ratio:.2f} of its calm time")
    axes.set_ylim(0, 3 * result["step_ms"])
    axes.set_xlabel("seconds since the kill")
    axes.set_ylabel("ms from step to step")
    axes.legend(loc="upper left", ncols=2, frameon=True, framealpha=0.9, edgecolor="none")


def main() -> None:
  cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
  args = common.options(
    __doc__,
    {"kills": 1, "every": 4.0, "learners": 2},
    kills=6,
    every=20.0,
    learners=max(2, min(4, len(cores))),
    workdir=(Path, "keeps the run; default: a temporary folder"),
    picture=common.OUTPUT,
  )
  if len(cores) < 2 or args.learners < 2:
    raise ConfigError("needs Linux, two cores, so that survivors have their own, and --learners=2")
  warm_up = QUICK_WARM_UP_SECONDS if args.quick else WARM_UP_SECONDS
  mine, rest = frozenset(cores[:-1]), cores[-1:]
  os.sched_setaffinity(0, rest)  # child processes inherit it
  with common.folder(args.workdir) as kept:
    folder = kept / "run"
    config = make_config(args.learners, args.kills, args.every, args.quick)
    run(config, folder, warm_up + (2 * args.kills + 1) * args.every, mine)
    result = measure(folder, args.learners - 1, args.every)
    if args.picture:
      draw(args.picture, folder, args.learners - 1, args.every, result)
  print(json.dumps({**result, "cores": len(cores)}))


if __name__ == "__main__":
  common.run_script(main)
