"""The page's numbers, as Node computes them: a browser is not needed for these."""

import json
import math
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ddiloco.dashboard
from ddiloco.dashboard.status import status
from ddiloco.observe.goodput import CAUSES
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import bytes_text, clock_time, compact, loss_text, percent, rounded
from tests.made_events import made
from tests.observe.test_tracks_rejoins import PHASES

PAGE = Path(ddiloco.dashboard.__file__).parent / "page"
NODE = shutil.which("node")


def computed(tmp_path: Path, name: str, argument: str, file: str = "format.js") -> Any:
  """What a function of the page returns."""
  return evaluated(tmp_path, f"{name}({argument})", name, file)


def evaluated(tmp_path: Path, expression: str, names: str, file: str = "format.js") -> Any:
  """The value of an expression with functions of the page."""
  page = shutil.copytree(PAGE, tmp_path / "page")
  (page / "package.json").write_text('{"type": "module"}')
  said = f"console.log(JSON.stringify({expression}))"
  script = f'import {{ {names} }} from "{page / file}"; {said}'
  command = [str(NODE), "--input-type=module", "-e", script]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  return json.loads(done.stdout)


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
@pytest.mark.parametrize("values, middle", [([100, 1], 50.5), ([3, 1, 100], 3), ([7], 7)])
def test_the_median_of_an_even_count_is_between_the_middle_two(values, middle, tmp_path):
  assert computed(tmp_path, "median", json.dumps(values)) == middle


LOSSES = [
  *((5.5451774, "5.545"), (1234.5678, "1234.568"), (0.25, "0.250"), (0.1, "0.100")),
  *((0.04321, "0.0432"), (0.00030004, "0.000300"), (-2.0, "-2.000"), (0.0, "0.00")),
]


@pytest.mark.parametrize("loss, text", [*LOSSES, (3e-9, "3.00e-09"), (math.nan, "–")])
def test_no_loss_is_shown_as_zero_but_zero(loss, text):
  """A custom model's loss of 0.0003 was 0.000 everywhere, and 0.0 in summary.json below 5e-7."""
  assert loss_text(loss) == text
  assert rounded(loss) == (None if math.isnan(loss) else pytest.approx(loss, rel=1e-6))


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
@pytest.mark.parametrize("loss, text", [*LOSSES, (3e-9, "3.00e-9"), ("null", "–")])
def test_the_page_shows_losses_as_the_terminal_does(loss, text, tmp_path):
  assert computed(tmp_path, "loss", str(loss)) == text


SHARES = [
  *((0.997, 0, "99%"), (0.9949, 0, "99%"), (0.494, 0, "49%"), (0.0, 0, "0%"), (1.0, 0, "100%")),
  *((0.99996, 1, "99.9%"), (0.5, 1, "50.0%"), (1.0, 1, "100.0%"), (0.99999, 2, "99.99%")),
]


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
@pytest.mark.parametrize("share, digits, text", SHARES)
def test_only_all_of_it_is_a_hundred_percent(share, digits, text, tmp_path):
  """A run was merged, and an island in each commit, where 0.3 percent lacked."""
  assert computed(tmp_path, "percent", f"{share}, {digits}") == percent(share, digits) == text


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
@pytest.mark.parametrize("seconds", [0, 754, 3723, 86_399, 86_400, 90 * 86_400 + 3723, -1])
def test_the_page_shows_times_as_the_terminal_does(seconds, tmp_path):
  assert computed(tmp_path, "clockTime", str(seconds)) == clock_time(seconds)


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
def test_the_page_rounds_as_terminal_and_report_do(tmp_path):
  """1,250,000 tokens were 1.3M on the page and 1.2M elsewhere, 5 of 8 commits 63 % and 62 %."""
  chance = random.Random(0)
  halves = [n / 2**k for k in range(1, 15) for n in (1, 3, 5, 7, 9, 11, 13)]
  shares = [*(each for each in halves if each <= 1), *(chance.random() for _ in range(500))]
  counts = [round(each * 1e6) for each in (*halves, *shares)] + [1_250_000, 999_950, 62_500]
  losses = [*halves, *(20 * share for share in shares), *(0.1 * share for share in shares)]
  losses = [each for each in losses if each >= 1e-4]  # smaller ones have another exponent
  wanted = {
    "compact": [compact(each) for each in counts],
    "bytes": [bytes_text(each) for each in counts],
    "loss": [loss_text(each) for each in losses],
    "percent": [[percent(each, digits) for digits in (0, 1)] for each in shares],
  }
  said = f"compact: {counts}.map(compact), bytes: {counts}.map(bytes), loss: {losses}.map(loss)"
  said += f", percent: {shares}.map(each => [percent(each), percent(each, 1)])"
  assert evaluated(tmp_path, f"{{{said}}}", ", ".join(wanted)) == wanted


def heat(tmp_path, steps, now, spans=None) -> list:
  """What island 0 did in each cell after its first step: by its name, or for steps the ratio to the
  median."""
  run = RunState()
  for n, (time, gap, blocked, *data) in enumerate([(0.0, 0.0, 0.0), *steps]):
    fields = {"step": n + 1, "gap_seconds": gap, "blocked_seconds": blocked}
    fields |= {"data_seconds": sum(data)}
    run.add(made(time, "learner-0", "step", **fields))
  found = status(run, now)
  spans = [[0.0, now, "running"]] if spans is None else spans
  found |= {"seconds": now, "timeline": {"lanes": [{"role": "learner-0", "spans": spans}]}}
  cells = computed(tmp_path, "cells", f'{json.dumps(found)}, {{"number": 0}}', "heat.js")
  return [cell.get("state", cell.get("ratio")) for cell in cells]


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
def test_a_cell_of_the_heat_map_has_a_steps_length_or_what_else_the_island_did(tmp_path):
  steps = [(0.25 * n + 0.2, 0.25, 0.0) for n in range(8)]  # a cell each, the median
  steps += [(2.6, 0.5, 0.0)]  # twice as long: cells in which it was under way have it as well
  steps += [(2.75, 0.25, 0.2)]  # blocked
  spans = [[0.0, 2.9, "running"], [2.9, 3.3, "down"], [3.3, 4.0, "joining"]]
  found = heat(tmp_path, steps, 4.0, spans)
  assert found == [1] * 8 + [2] * 3 + ["waiting", "down"] + ["joining"] * 3


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
def test_a_cell_says_that_an_island_waits_for_its_data_if_that_is_most_of_its_steps(tmp_path):
  steps = [(0.25 * n + 0.2, 0.25, 0.0, data) for n, data in enumerate([0.0, 0.1, 0.2, 0.0])]
  assert heat(tmp_path, steps, 1.0) == [1, 1, "data", 1]


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
def test_what_is_not_known_yet_is_absent_from_the_heat_map(tmp_path):
  absent = ["not there"] * 3
  assert heat(tmp_path, [(0.2, 0.1, 0.0)], 1.0) == [1, *absent]


@pytest.mark.parametrize("file, names", [("goodput.js", CAUSES), ("rejoins.js", PHASES)])
def test_the_page_has_words_for_every_cause_and_phase(file, names):
  text = (PAGE / file).read_text()
  assert [name for name in names if f"\n  {name}: [" not in text] == []


def test_the_page_and_the_report_have_the_same_words_for_causes():
  text = (PAGE / "goodput.js").read_text()
  assert [name for name, words in CAUSES.items() if f'\n  {name}: ["{words}"' not in text] == []
