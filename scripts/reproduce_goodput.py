"""The same kills, three ways to train: decoupled islands, elastic and inelastic data-parallel.

Islands are processes of this machine, each with a minimum step time, as if it had a device of its
own (configs/goodput.py). One seeded schedule of kill -9 strikes all three runs, one after the
other; a killed island's process is started again a second later. Data-parallel is spared costs that
only shared cores cause (see ddiloco/baselines/data_parallel.py). All figures come from the event
logs, by the goodput ledger.

  python scripts/reproduce_goodput.py [--minutes=5] [--kills_per_minute=12] [--seed=0]
    [--learners=8] [--workdir=DIR] [--plot=docs/goodput.png] [--quick]

With --workdir all files stay there, and a finished part is not run again.

Last line: {"goodput_decoupled", "goodput_elastic", "goodput_inelastic": useful share of the chip
time after each run's beginning, "uptime_decoupled", ..., "kills": performed in the decoupled run,
"with_start_up": the same goodputs of all chip time, "published", ...}.
"""

from __future__ import annotations

import argparse
import json
import math
import runpy
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

from ddiloco import environment

environment.prepare(num_cpu_devices=1, cpu_only=True, supervises=True)

from ddiloco import workdir as workdirs
from ddiloco.baselines.data_parallel import DataParallel
from ddiloco.config import Config, from_dict
from ddiloco.engines.processes import ProcessesEngine
from ddiloco.observe.eventlog import Event, EventLog, read_events
from ddiloco.observe.goodput import Goodput
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import GLOBAL_MODEL, island_colour
from ddiloco.protocol.events import Fault, Step, parse_role
from ddiloco.training import data

if TYPE_CHECKING:
  from matplotlib.axes import Axes

PARTS = ("decoupled", "elastic", "inelastic")
TITLES = {
  "decoupled": "Decoupled",
  "elastic": "Elastic data-parallel",
  "inelastic": "Data-parallel from checkpoints",
}
# "Decoupled DiLoCo" (arXiv 2604.21428), simulated: 1.2 M chips, a failure a year each, 8 learners.
PUBLISHED = {"decoupled": 0.88, "elastic": 0.58, "inelastic": 0.27}
SHORTEST_PAUSE_SECONDS = 0.25  # between two steps it takes milliseconds
QUICK = {"minutes": 20 / 60, "kills_per_minute": 5.0, "learners": 3, "seed": 53}  # two kills


def make_config(options: argparse.Namespace) -> Config:
  """The config of all three runs, which end by time and not by tokens."""
  given = options.seed, options.minutes, options.kills_per_minute, options.learners
  values = runpy.run_path(str(common.ROOT / "configs" / "goodput.py"))["get_config"](*given)
  values.run.total_tokens = 1 << 40
  return from_dict(values)


# --- the runs -------------------------------------------------------------------------------------


def decoupled(config: Config, folder: Path, over: Callable[[int, float], bool]) -> str:
  """Makes the decoupled run; returns why it ended."""
  workdirs.claim(folder, config, overwrite=True)
  corpus = data.open_corpus(config.data)
  engine = ProcessesEngine(config, folder, corpus, lambda params: {"loss": 0.0})
  engine.cpu_only = True  # also on a machine with accelerators: all runs use the same cores
  first = math.nan  # when the first step ended

  def listen(event: Event) -> None:
    nonlocal first
    if isinstance(event, Step):
      first = event.time if math.isnan(first) else first
      if over(event.global_step, event.time - first):
        engine.stop.set()

  reason = engine.run([listen]).reason
  return "finished" if engine.stop.is_set() else reason


def run(part: str, config: Config, folder: Path, seconds: float) -> EventLog:
  """The events of one run; a finished run in `folder` is not made again."""
  if common.done_before(config, folder):
    return read_events(folder)
  print(f"{part}: begins, and lasts {seconds:.0f} s", flush=True)
  shutil.rmtree(folder, ignore_errors=True)
  over = lambda global_step, lasted: lasted >= seconds
  if part == "decoupled":
    reason = decoupled(config, folder, over)
  else:
    reason = DataParallel(config, folder, part == "elastic").run(over)
  if reason != "finished":
    raise SystemExit(f"{part}: the run {reason}; see {folder / 'logs'}")
  return read_events(folder)


# --- what the events say --------------------------------------------------------------------------


def first_step(events: EventLog) -> float:
  return min(event.time - event.seconds for event in events.of(Step))


def kills(events: EventLog) -> list[tuple[float, str]]:
  """(seconds since the first step, role) of the kills, as performed."""
  start = first_step(events)
  return [(e.time - start, e.target) for e in events.of(Fault)]


def typical(events: EventLog) -> float:
  """The median of the steps' seconds, which shows whether the pace was kept."""
  return statistics.median(event.seconds for event in events.of(Step))


def pauses(events: EventLog) -> list[float]:
  """Seconds of every time in which no island was in a step, between the first step and the last."""
  found, until = [], math.inf
  steps = [(e.time - e.seconds, e.time) for e in events.of(Step)]
  for begin, end in sorted(steps):
    if begin - until > SHORTEST_PAUSE_SECONDS:
      found.append(begin - until)
    until = max(end, until) if math.isfinite(until) else end
  return found


def table(reports: dict[str, Goodput], logs: dict[str, EventLog]) -> dict[str, dict[str, Any]]:
  """Goodput in % and what shows that the runs were alike, a row for each run."""
  return {
    part: {
      "goodput": 100 * report.goodput_training,
      "published": 100 * PUBLISHED[part],
      "uptime": 100 * report.uptime,
      "with start-up": 100 * report.goodput,
      "kills": len(kills(logs[part])),
      "pauses of all": len(pauses(logs[part])),
      "median s": common.middle(pauses(logs[part]), 2),
      "step s": typical(logs[part]),
    }
    for part, report in reports.items()
  }


# --- the picture ----------------------------------------------------------------------------------


def draw(
  path: Path, reports: dict[str, Goodput], logs: dict[str, EventLog], seconds: float
) -> None:
  """The times when each island trained, for the three runs below each other on one time axis."""
  learners = len(next(iter(reports.values())).learners)
  height = 2.0 + 0.57 * learners
  with common.picture(path, height, rows=len(PARTS), sharex=True) as (figure, panels):
    numbers = ", ".join(f"{100 * reports[p].goodput_training:.0f} %" for p in PARTS)
    figure.suptitle(
      f"The same {len(kills(logs['decoupled']))} kills, three ways to train: goodput {numbers}",
      x=0.01, ha="left", weight="bold", fontsize=13,
    )  # fmt: skip
    for axes, part in zip(panels, PARTS):
      lanes(axes, logs[part], learners, redone=part != "decoupled")
      report = reports[part]
      good, published = 100 * report.goodput_training, 100 * PUBLISHED[part]
      axes.set_title(
        f"{TITLES[part]}: {good:.0f} % goodput, {100 * report.uptime:.0f} % uptime"
        f"   (published, simulated: {published:.0f} % goodput)",
        fontsize=10.5,
      )
      axes.set_xlim(0, seconds)
    panels[-1].set_xlabel(
      "seconds since the first step     (coloured: trains; pale: steps that are lost; x: kill -9)"
    )


def lanes(axes: Axes, events: EventLog, learners: int, redone: bool) -> None:
  """A row for each island; `redone`: a step that is done again later was lost."""
  start = first_step(events)
  for m in range(learners):
    steps = events.of(Step, f"learner-{m}")
    lowest, kept = math.inf, []
    for event in reversed(steps):
      kept.append(not redone or event.step < lowest)
      lowest = min(lowest, event.step)
    for good, alpha in ((True, 1.0), (False, 0.3)):
      # A step and the moment before it, so that a calm row is one bar.
      bars = [
        (e.time - start - wide, 1.02 * wide)
        for e, keep in zip(steps, reversed(kept))
        if keep == good and (wide := min(e.gap_seconds, 1.2 * e.seconds))
      ]
      axes.broken_barh(bars, (m - 0.38, 0.76), color=island_colour(m), alpha=alpha, lw=0)
  marks = [(at, parse_role(whom)[1]) for at, whom in kills(events)]
  if marks:
    times, islands = zip(*marks)
    axes.scatter(times, islands, marker="x", s=26, lw=1.4, color=GLOBAL_MODEL, zorder=5)
  axes.set_yticks([0, learners - 1], ["island 0", f"island {learners - 1}"])
  axes.set_ylim(learners - 0.4, -0.6)
  axes.grid(False, axis="y")
  axes.tick_params(axis="y", length=0)


def result(
  reports: dict[str, Goodput], logs: dict[str, EventLog], options: argparse.Namespace
) -> dict[str, Any]:
  return {
    **{f"goodput_{part}": round(r.goodput_training, 4) for part, r in reports.items()},
    **{f"uptime_{part}": round(r.uptime, 4) for part, r in reports.items()},
    "kills": len(kills(logs["decoupled"])),
    "kills_of": {part: len(kills(log)) for part, log in logs.items()},
    "with_start_up": {part: round(r.goodput, 4) for part, r in reports.items()},
    "causes": {
      part: {cause: round(share, 4) for cause, share in r.causes.items()}
      for part, r in reports.items()
    },
    "pauses": {part: len(pauses(log)) for part, log in logs.items()},
    "step_seconds": {part: round(typical(log), 4) for part, log in logs.items()},
    "published": PUBLISHED,
    "minutes": options.minutes,
    "learners": options.learners,
    "seed": options.seed,
  }


def whole(options: argparse.Namespace, folder: Path) -> None:
  seconds = 60 * options.minutes
  config = make_config(options)
  print(
    f"seed {options.seed}: {len(config.chaos.faults)} kills in {seconds:.0f} s among"
    f" {options.learners} islands, in {folder}",
    flush=True,
  )
  logs = {part: run(part, config, folder / part, seconds) for part in PARTS}
  reports = {part: RunState().read(log).ledger.report() for part, log in logs.items()}
  common.show(table(reports, logs))
  if options.plot is not None:
    draw(options.plot, reports, logs, seconds)
  print(json.dumps(result(reports, logs, options)))


def main() -> None:
  options = common.options(
    __doc__,
    QUICK,
    minutes=(5.0, "of each run, after its start"),
    kills_per_minute=(12.0, "of all islands together"),
    seed=0,
    learners=8,
    workdir=Path,
    plot=(common.OUTPUT, "draws the picture there"),
  )
  with common.folder(options.workdir) as folder:
    whole(options, folder)


if __name__ == "__main__":
  common.run_script(main)
