"""What is in the report's pictures, read from their figures: nothing is drawn here."""

import itertools

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.colors import to_hex

from ddiloco.observe import plots
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import FAINT, GLOBAL_MODEL, island_colour
from tests.observe.conftest import KILL, RESTART


@pytest.fixture(autouse=True)
def style():
  with plots.styled():
    yield


def texts(of) -> list[str]:
  return [each.get_text() for each in of]


def ticks(axes) -> dict[tuple[int, str], list[float]]:
  """By row and colour, the times of the ticks in it; those that took part are taller."""
  found: dict[tuple[int, str], list[float]] = {}
  for drawn in axes.collections:
    if isinstance(drawn, LineCollection):
      for part, colour in zip(drawn.get_segments(), itertools.cycle(drawn.get_colors())):
        (time, low), (_, high) = part
        shade = to_hex(colour)
        assert high - low == pytest.approx(0.24 if shade == FAINT.lower() else 0.72)
        found.setdefault((round((low + high) / 2), shade), []).append(float(time))
  return found


def test_a_tick_for_each_commit_says_whether_the_island_took_part(make):
  run = RunState().read([make.run_started(num_learners=3, num_shards=1, num_fragments=1)])
  both, alone = {0: 0.5, 2: 0.5}, {0: 1.0}
  fields = ((1.0, both, {}), (2.0, alone, {2: "norm 9"}), (4.0, both, {7: "who is that"}))
  for n, (time, weights, rejected) in enumerate(fields):
    more = {"agreement": 0.5} if len(weights) > 1 else {}
    commit = make.commit(time, round=n, version=n + 1, weights=weights, rejected=rejected, **more)
    run.add(make.changed(commit, rho=0.25 if n else None))
  rows, cosines = plots.participation_figure(run).axes
  assert ticks(rows) == {
    (0, island_colour(0).lower()): [1.0, 2.0, 4.0],
    (1, FAINT.lower()): [1.0, 2.0, 4.0],
    (2, island_colour(2).lower()): [1.0, 4.0],
    (3, FAINT.lower()): [1.0, 2.0],
  }
  (crosses,) = [each for each in rows.collections if isinstance(each, PathCollection)]
  assert np.asarray(crosses.get_offsets()).tolist() == [[2.0, 2], [4.0, 3]]
  assert [*filter(None, texts(rows.texts))] == ["100%", "0%", "67%", "0%", "share of all commits"]
  bottom, top = rows.get_ylim()
  assert top < -0.5 and bottom > 3.5, "the first row is at the top, and no tick is cut"
  assert rows.get_xlim() == cosines.get_xlim() == (0, 4.0)
  lines = {line.get_label(): line.get_xydata().tolist() for line in cosines.get_lines()}
  assert lines["two islands' pushes"] == [[1.125, 0.5], [4.125, 0.5]]
  assert lines["a fragment's merge and the one before"] == [[2.125, 0.25], [4.125, 0.25]]
  assert cosines.get_legend() and not rows.get_legend()


def test_a_cosines_line_ends_where_the_run_ended_and_goes_on_with_it(make):
  times = (1.0, 2.0, 3.0, 60.0, 61.0)
  run = RunState().read([make.commit(time, round=int(time), agreement=0.5) for time in times])
  _, cosines = plots.participation_figure(run).axes
  drawn = cosines.get_lines()[0].get_ydata()
  assert np.isnan(drawn).tolist() == [False, False, False, True, False, False]


def test_the_rows_of_islands_and_shards_have_their_states_and_marks(run_events):
  run = RunState().read(run_events)
  figure = plots.timeline_figure(run)
  (axes,) = figure.axes
  assert texts(axes.get_yticklabels()) == [
    *("island 0", "island 1", "island 2", "island 3", "shard 0", "shard 1"),
  ]
  bottom, top = axes.get_ylim()
  assert top < -0.3 and bottom > 5.3, "the first row is at the top, and no row is cut"
  bars: dict[int, list[tuple[float, float]]] = {}
  for drawn in axes.collections:
    if isinstance(drawn, PolyCollection):
      for path in drawn.get_paths():
        (x0, y0), (x1, y1) = path.get_extents().get_points()
        assert y1 - y0 == pytest.approx(plots.BAR_HEIGHT)
        if x1 == axes.get_xlim()[1] or x1 == 60.0:  # the last of a row, which is running
          number = round((y0 + y1) / 2)
          shade = island_colour(number) if number < 4 else plots._SHARD_COLOUR
          assert to_hex(drawn.get_facecolor()[0]) == shade.lower()
        bars.setdefault(round((y0 + y1) / 2), []).append((x0, x1))
  spans = run.spans(run.time, run.time)
  assert {row: sorted(each) for row, each in bars.items()} == {
    row: [(start, end) for start, end, _ in spans[role]] for row, role in enumerate(spans)
  }
  marks = [d.get_offsets() for d in axes.collections if isinstance(d, PathCollection)]
  kill, restart, merged = (np.asarray(each).tolist() for each in marks)
  assert (kill, restart) == ([[KILL, 2]], [[RESTART, 2]])
  assert len(merged) == 1 and merged[0][1] == 2
  (legend,) = figure.legends
  assert texts(legend.get_texts()) == [
    *("joining", "running", "down"),
    *("fault: kill", "restart", "first merge after rejoining"),
  ]


LOOKS = ("running", "joining", "stalled", "quarantined", "down")


def test_a_mark_before_the_run_by_a_clock_that_is_behind_is_no_mark_on_a_name(make, run_events):
  earlier = (make.changed(event, time=event.time - KILL - 5) for event in run_events)
  (axes,) = plots.timeline_figure(RunState().read(earlier)).axes
  marks = [each for each in axes.collections if isinstance(each, PathCollection)]
  assert min(each.get_offsets()[0][0] for each in marks) == 0.0


def test_no_two_states_look_alike():
  looks = [plots._bar_style(state, "#0072B2") for state in LOOKS]
  assert all(a != b for a, b in itertools.combinations(looks, 2))


@pytest.mark.parametrize(
  ("end", "unit", "last"),
  [(80.0, "seconds", "80"), (10_000.0, "seconds", "10000"), (30 * 3600.0, "hours", "30")]
  + [(14 * 86400.0, "days", "14"), (0.0, "seconds", "0.001")],
)
def test_the_time_of_a_long_run_is_in_hours_or_days(end, unit, last):
  """Two weeks were 1.2, with a small 1e6 in the corner."""
  _, (axes,) = plots.new_figure(2.0)
  plots._time_axis(axes, end)
  assert axes.get_xlabel() == f"{unit} since the run started"
  seconds = {"seconds": 1, "hours": 3600, "days": 86400}[unit]
  said = texts(axes.get_xticklabels())
  assert said[0] == "0" and said[-1] == last and len(said) <= 11
  np.testing.assert_allclose(axes.get_xticks(), [float(each) * seconds for each in said])
  assert axes.get_xlim() == (0, max(end, 1e-3))


def test_where_nothing_can_be_compared_the_ticks_have_their_times_all_the_same(make):
  run = RunState().read([make.run_started(), make.commit(5.0)])
  _, below = plots.participation_figure(run).axes
  assert texts(below.texts) == ["no commit had two pushes that could be compared"]
  assert below.axison and below.get_xlabel() == "seconds since the run started"


def test_curves_of_losses_stand_at_their_tokens(make):
  run = RunState().read([make.run_started(num_learners=2, num_shards=1, total_tokens=10_000)])
  for n in range(1, 41):
    run.add(make.step(float(n), 0, n, loss=4.0, tokens=100))
    life = int(n > 20)
    run.add(make.step(n + 0.5, 1, n, incarnation=life, loss=2.0 + life, tokens=100))
  run.add(make.event(9.0, "evaluator", "evaluation", merged_tokens=5000, loss=3.5))
  (axes,) = plots.loss_figure(run, 2.5).axes
  lines = {line.get_label(): line for line in axes.get_lines()}
  other = next(line for label, line in lines.items() if label.startswith("_"))  # its second life
  curves = [lines["island 0"], lines["island 1"], other]
  for line, loss, (first, last) in zip(curves, (4, 2, 3), ((0, 8000), (100, 4000), (4000, 8000))):
    x, y = line.get_data()
    np.testing.assert_allclose(y, loss)
    assert first <= x[0] < first + 300 and last - 300 < x[-1] <= last + 100
  assert [line.get_color() for line in curves] == [island_colour(m) for m in (0, 1, 1)]
  ((x,), (y,)) = lines["global model, held-out"].get_data()
  assert (x, y) == (5000, 3.5)
  alone = lines["best island alone, held-out (2.500)"]
  assert (set(alone.get_ydata()), alone.get_color()) == ({2.5}, GLOBAL_MODEL)
  low, high = axes.get_ylim()
  assert low < 2 and high > 4 and axes.get_xlim()[1] > 8000
