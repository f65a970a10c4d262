"""The algorithms side by side, at equal tokens: held-out loss relative to data-parallel's.

    python scripts/compare.py [--workdir=runs/compare] [--sizes=33k;115k] [--only=ROW;...]
      [--seeds=3] [--accelerator] [--table] [--picture=FILE] [--quick]

All train one language model on bytes of this Python's standard library, on equally many tokens, and
are judged on the same 65,536 held-out tokens. Runs with an exchange are in virtual time
(virtual_training.py): a run is a pure function of its config and seed. Islands are equally fast (a
step varies by up to a tenth) unless a row says otherwise, and links take no time. The sizes 1m and
10m are for an accelerator.

Every tuned method has the same budget of seven runs with seed 0, one coordinate after the other,
each from the best point so far: the inner learning rate (4e-3 to 32e-3; others where
`compared.SIZES` says so), the sequences of all islands together in a step (16, 8), and the outer
learning rate times 0.7 and 1.4; a method without an outer step has its inner rate times these.
For larger models and longer runs the tuning begins at the point of a smaller one, and tries the
four inner rates. Learning rates decay over exactly the run's steps, however many there are. The
best point is then run with other seeds too: of data, initial values and paces. Rows that are not
tuned are variants of a tuned row, at its point. outer_gradients.py says what the last columns mean.

Every run that has ended is a line of WORKDIR/runs.jsonl and is not run again. With --table or
--picture nothing is run: the results so far are printed, or drawn. Else the last line is
{"relative": {SIZE: {ROW: x}}}, in % of data-parallel's loss.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from common import spread
from compared import BATCHES, METHODS, QUICK, QUICK_ROWS, SIZES, Comparison, Runs
from outer_gradients import PARTS

from ddiloco import environment
from ddiloco.observe.style import MUTED, PALETTE
from ddiloco.training.devices import kept_in

if TYPE_CHECKING:
  from matplotlib.axes import Axes

# --- The tables


def table(comparisons: Iterable[Comparison]) -> Iterator[str]:
  """Lines of Markdown."""
  head = (
    *("row", "rate, batch, factor", "loss", "against data-parallel, %"),
    *("against its tuned row, %", "seeds"),
    *("merged %", "cosine", "length", "rho"),
  )
  for comparison in comparisons:
    size = SIZES.get(comparison.size, QUICK)
    rows = {row: comparison.row(row) for row in METHODS}
    commits = sorted({each["commit"] for found in rows.values() for each in found})
    if not commits:
      continue
    machines = sorted({each["machine"] for found in rows.values() for each in found})
    yield (
      f"`python scripts/compare.py --sizes='{comparison.size}'`: {comparison.size.split(',')[0]}"
      f" parameters ({size.layers} layers, width {size.width}),"
      f" {size.tokens:,} tokens of the standard library's source as bytes."
      f" Machine: {', '.join(machines)}; sources: {', '.join(commits)}."
    )
    yield ""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row, found in rows.items():
      if found:
        yield line(comparison, row, found)
    yield ""
    yield from by_batch(comparison)


def by_batch(comparison: Comparison) -> Iterator[str]:
  """Signal over noise of islands' updates, at the batches that the tuning has tried.

  With cosine c, a share c of an update's squared length is common to all updates (the signal), and
  a share 1 - c is not.
  """
  lines = []
  for row, method in METHODS.items():
    point = comparison.point(row)
    if point is None or method.how != "exchange" or method.of:
      continue
    ratios: dict[int, float] = {}
    for batch in BATCHES:
      found = comparison.run(row, dataclasses.replace(point, batch=batch, factor=1.0), 0)
      late = [c for c in found["course"]["cosine"][PARTS // 2 :] if c is not None] if found else []
      if late:
        cosine = statistics.mean(late)
        ratios[batch // method.learners] = cosine / (1 - cosine)
    if len(ratios) == 2:
      (few, less), (many, more) = sorted(ratios.items())
      lines.append(f"| {row} | {few}: {less:.2f} | {many}: {more:.2f} | {more / less:.2f} |")
  if lines:
    yield "Signal over noise of updates in the second half of runs, by an island's batch (seed 0):"
    yield ""
    yield "| row | sequences: signal over noise | with twice as many | times |"
    yield "|---|---|---|---|"
    yield from lines
    yield ""


def line(comparison: Comparison, row: str, found: list[dict[str, Any]]) -> str:
  """One row of Markdown."""
  point = comparison.point(row)
  assert point is not None
  relative, of = comparison.relative(found, to=METHODS[row].beside), METHODS[row].of
  own = comparison.relative(found, to=of) if of.startswith("default") else []
  cells = [
    row,
    f"{point.rate:g}, {point.batch}, {point.factor:g}" if not of else "",
    spread([each["loss"] for each in found], 3),
    spread(relative, 2, "+") if relative and row != METHODS[row].beside else "",
    spread(own, 2, "+") if own else "",
    str(len(found)),
  ]
  for name, digits in (("merged", 1), ("cosine", 2), ("length", 2), ("rho", 2)):
    known = [each[name] for each in found if each.get(name) is not None]
    scale = 100 if digits == 1 else 1
    cells.append(f"{scale * statistics.mean(known):.{digits}f}" if known else "")
  return f"| {' | '.join(cells)} |"


# --- The picture

# Relative loss in % by M of DiLoCo against data-parallel, both tuned, 35M parameters (2503.09799).
PUBLISHED = {4: 2.0, 8: 3.9}
BY_ISLANDS = {
  "default": {m: f"default, M = {m}" for m in (1, 2, 4, 8, 16)},
  "DiLoCo": {m: f"DiLoCo, M = {m}" for m in (1, 4)},
}
BY_PERIOD = {
  "default": {6: "H = 6", 12: "H = 12", 24: "default, M = 4", 48: "H = 48"},
  "DiLoCo": {24: "DiLoCo, M = 4"},
}


def draw(comparisons: list[Comparison], path: Path) -> None:
  """Loss over M, size and H, and the outer gradients' cosines during a run."""
  first = comparisons[0]
  with common.picture(path, 14.0, rows=4) as (_, (islands, sizes, periods, course)):
    islands.set_title("Loss against tuned data-parallel by islands")
    _draw_rows(islands, comparisons, BY_ISLANDS, "islands")
    islands.plot(list(PUBLISHED), list(PUBLISHED.values()), "--", color=MUTED, label=CITED)
    islands.legend(ncols=2, fontsize="small")
    _draw_sizes(sizes, comparisons)
    periods.set_title(f"Loss against tuned data-parallel by H, M = 4, {first.size} parameters")
    _draw_rows(periods, [first], BY_PERIOD, "H, the steps between two syncs of a fragment")
    periods.legend()
    _draw_course(course, first)


CITED = "published: DiLoCo, 35M"
ABOVE = "% above data-parallel"
STYLES = ("o-", "s--")  # by method; sizes have colours


def _draw_rows(
  axes: Axes, comparisons: list[Comparison], lines: dict[str, dict[int, str]], name: str
) -> None:
  places = sorted({x for rows in lines.values() for x in rows})
  for style, (label, rows) in zip(STYLES, lines.items(), strict=True):
    for colour, comparison in zip(PALETTE, comparisons):
      found = {x: comparison.relative(comparison.row(row)) for x, row in rows.items()}
      known = {x: each for x, each in found.items() if each}
      _errorbars(axes, known, f"{label}, {comparison.size}", colour, style)
  axes.set_xscale("log", base=2)
  axes.set_xticks(places, [str(x) for x in places])
  axes.set_xlabel(name)
  axes.set_ylabel(ABOVE)


def _draw_sizes(axes: Axes, comparisons: list[Comparison]) -> None:
  axes.set_title("Loss against tuned data-parallel by parameters and length, M = 4")
  for colour, (label, rows) in zip(PALETTE, BY_ISLANDS.items()):
    found = {i: c.relative(c.row(rows[4])) for i, c in enumerate(comparisons)}
    _errorbars(axes, {i: each for i, each in found.items() if each}, label, colour, "o")
  axes.axhline(PUBLISHED[4], ls="--", color=MUTED, label=CITED)
  axes.set_xticks(range(len(comparisons)), [c.size for c in comparisons])
  axes.set_xlabel("parameters, and length of the run")
  axes.set_ylabel(ABOVE)
  axes.legend()


def _errorbars(
  axes: Axes, found: dict[int, list[float]], label: str, colour: str, style: str
) -> None:
  if found:
    means = [statistics.mean(each) for each in found.values()]
    spreads = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in found.values()]
    axes.errorbar(list(found), means, spreads, fmt=style, capsize=4, color=colour, label=label)


def _draw_course(axes: Axes, comparison: Comparison) -> None:
  size = comparison.size
  axes.set_title(f"Outer gradients from a run's beginning to its end, M = 4, {size}, seed 0")
  for colour, row in zip(PALETTE, ("default, M = 4", "H = 6", "DiLoCo, M = 4")):
    for found in comparison.row(row)[:1]:
      for style, name in (("-", "cosine"), ("--", "length"), (":", "rho")):
        parts = [(i + 0.5, v) for i, v in enumerate(found["course"][name]) if v is not None]
        if parts:
          axes.plot(*zip(*parts), style, color=colour, label=f"{name}, {row.partition(',')[0]}")
  axes.set_xlabel("tenth of the run")
  axes.set_ylim(0, 1.6)  # room for the legend above the lines
  axes.legend(ncols=3, loc="upper right")


def main() -> None:
  sizes, rows = (common.names_of(names, ";") for names in (SIZES, METHODS))
  options = common.options(
    __doc__,
    {"seeds": 1},
    workdir=common.ROOT / "runs" / "compare",
    sizes={"type": sizes, "default": "33k;115k"},
    only={"type": rows, "default": "", "help": "these rows alone"},
    seeds=3,
    accelerator=(False, "on this machine's, not its CPU"),
    table=False,
    picture=common.OUTPUT,
  )
  environment.prepare(1, cpu_only=not options.accelerator)
  workdir, seeds = options.workdir.absolute(), options.seeds

  def comparisons(trains: bool) -> list[Comparison]:
    runs = Runs(workdir, trains)
    if options.quick:
      return [Comparison("quick", runs, seeds, tunes=False)]
    found: dict[str, Comparison] = {}
    for name, size in SIZES.items():
      found[name] = Comparison(name, runs, seeds, smaller=found.get(size.after))
    return [found[size] for size in options.sizes]

  if not (options.table or options.picture):
    with kept_in(workdir / "programs"):
      for each in comparisons(trains=True):
        here = [r for r, m in METHODS.items() if each.size in m.sizes]
        for row in options.only or here or QUICK_ROWS:
          each.row(row)
  known = comparisons(trains=False)  # includes the runs of other processes
  if options.picture:
    draw(known, options.picture)
  if options.table:
    print("\n".join(table(known)))
  if options.table or options.picture:
    return
  relative: dict[str, dict[str, float]] = {}
  for comparison in known:
    found = {row: comparison.relative(comparison.row(row), METHODS[row].beside) for row in METHODS}
    relative[comparison.size] = {r: round(statistics.mean(f), 3) for r, f in found.items() if f}
  print(json.dumps({"relative": relative}))


if __name__ == "__main__":
  common.run_script(main)
