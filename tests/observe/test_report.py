"""The report of a whole run, of a torn one, of next to nothing: always complete and readable."""

from __future__ import annotations

import html.parser
import json
import math
import os
import re
import struct
import subprocess
import sys

import numpy as np
import pytest

from ddiloco.config import Config, ModelConfig
from ddiloco.dashboard.status import status
from ddiloco.observe import plots
from ddiloco.observe.report import PICTURES, key_numbers, numbers, page, write_report
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import shard_colour


class _Page(html.parser.HTMLParser):
  """Collects what a page refers to, and checks that its tags are closed in order."""

  def __init__(self, text):
    super().__init__()
    self.links, self.open = [], []
    self.feed(text)
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.links += [value for name, value in attrs if name in ("src", "href")]
    if tag not in ("meta", "img"):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag


def _check(folder):
  """Every file is there, refers to nothing outside, and pictures have a size and content."""
  assert sorted(path.name for path in folder.iterdir()) == sorted(
    [*PICTURES, "index.html", "summary.json"]
  )
  text = (folder / "index.html").read_text()
  assert set(_Page(text).links) == {*PICTURES, "summary.json"}
  assert "http" not in text
  for name in PICTURES:
    data = (folder / name).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert 1400 <= width <= 1480 and 250 <= height <= 1200, (name, width, height)
    assert len(data) > 4000, name
  return json.loads((folder / "summary.json").read_text())


def test_a_whole_run(tmp_path, make, run_events):
  make.write_log(tmp_path, run_events)
  extra = {
    "loss_untrained": 5.545,
    "loss_merged": 1.553,
    "loss_best_island_alone": 1.92,
    "seconds": 75.0,
    "sample": "def <b>(x)",
    "odd": math.inf,
  }
  folder = write_report(tmp_path, extra)
  assert folder == tmp_path / "report"
  summary = _check(folder)
  assert summary["seconds"] == 75.0 and summary["commits"] == 87
  assert summary["odd"] == "inf"
  assert 1.0 <= summary["survivor_max_gap_ratio"] < 1.2
  for name in PICTURES:
    assert (folder / name).stat().st_size > 30_000, name
  text = (folder / "index.html").read_text()
  assert "def &lt;b&gt;(x)" in text
  for shown in ("1.553", "1.920", "5.545", "1:15", "× its median step"):
    assert shown in text


def test_an_empty_folder(tmp_path):
  summary = _check(write_report(tmp_path, {}))
  assert summary["seconds"] is None


def test_a_run_that_crashed_while_an_island_was_down(tmp_path, make, run_events):
  make.write_log(tmp_path, [event for event in run_events if event.time < 22.0])
  with (tmp_path / "events" / "learner-0.jsonl").open("a") as file:
    file.write('{"time": 22.0, "ro')
  summary = _check(write_report(tmp_path))
  assert summary["torn_lines"] == 1 and summary["finished"] is None
  assert "it did not end in good order" in (tmp_path / "report" / "index.html").read_text()


def test_one_learner_alone_without_a_syncer(tmp_path, make):
  start = make.run_started(num_learners=1, num_shards=0, num_fragments=0)
  steps = [make.step(k / 10, 0, k, loss=3.0 if k % 5 else math.nan) for k in range(1, 40)]
  make.write_log(tmp_path, [start, *steps])
  summary = _check(write_report(tmp_path, {"loss_best_island_alone": math.nan}))
  assert summary["commits"] == 0 and summary["participation"] == {"0": None}
  assert _check(write_report(tmp_path, summary)) == summary  # again, with what was read back


def test_the_page_is_utf8_in_any_locale(tmp_path, make):
  """Under Latin-1, which has no dash, a run was left without its report."""
  make.write_log(tmp_path, [make.run_started()])
  code = "import sys; from ddiloco.observe import report; report._draw = lambda *_: None;"
  code += "report.write_report(sys.argv[1])"
  ascii_alone = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
  command = [sys.executable, "-c", code, str(tmp_path)]
  subprocess.run(command, env=os.environ | ascii_alone, check=True)
  assert "<td>–</td>" in (tmp_path / "report" / "index.html").read_text("utf-8")


def test_a_page_of_the_users_own_is_not_overwritten(tmp_path):
  folder = tmp_path / "report"
  folder.mkdir()
  for name in ("index.html", "loss.png"):
    (folder / name).write_text("<title>my thesis</title>")
    with pytest.raises(FileExistsError, match=r"report: .*not of ddiloco"):
      write_report(tmp_path)
    assert [path.read_text() for path in folder.iterdir()] == ["<title>my thesis</title>"]
    (folder / name).unlink()
  write_report(tmp_path)
  (folder / "index.html").write_text("")  # as a full disk leaves it
  write_report(tmp_path)  # its own it replaces
  assert (folder / "index.html").stat().st_size


def test_key_numbers_leave_out_what_is_unknown():
  assert dict(key_numbers({})) == {
    "faults and restarts": "0 and 0",
    "how the run ended": "it did not end in good order",
  }
  assert dict(key_numbers({"loss_merged": "nan", "blocked_seconds": 0.0})).keys() == {
    "faults and restarts",
    "how the run ended",
    "time learners were blocked",
  }


def test_causes_of_lost_time_are_in_words():
  lost = {"data": 0.25, "start_up": 0.3, "save": 1e-3}
  said = dict(key_numbers({"lost_time": lost}))["where the rest of the chip time went"]
  assert said == "start-up 30.0%, waiting for data 25.0%"


def test_each_known_number_has_its_row():
  known = {
    **{"loss_untrained": 5.5, "heldout_loss_last": 1.5, "loss_best_island_alone": 1.9},
    **{"heldout_seconds_last": 7000.0, "began": "2026-11-29 22:36 UTC", "seconds": 7384.0},
    **{"num_shards": 2, "merged_tokens": 1.5e6, "total_tokens": 2e6},
    **{"rejected_pushes": 3, "faults": 4, "restarts": 2, "survivor_max_gap_ratio": 1.234},
    **{"goodput": 0.5, "goodput_training": 0.75, "uptime": 0.99, "mfu": 0.4, "num_hangs": 1},
    **{"tokens_per_second_per_chip": 1234.0, "blocked_seconds": 0.0, "data_seconds": 2.0},
    **{"bytes_sent": 5e9, "torn_lines": 1, "odd_events": 2, "under_way": True},
    **{"outer_gradients": {"agreement": 0.125, "rho": None}, "heldout_measures_last": {"a_b": 2}},
  }
  said = dict(key_numbers(known))
  assert list(said.values()) == [
    *("5.500", "1.500, measured at 1:56:40 (h:min:s)", "2.000", "1.900"),
    *("2026-11-29 22:36 UTC", "2:03:04", "1.5M of 2.0M", "0.125", "3", "4 and 2"),
    *("1.23 × its median step", "1", "50.0%", "75.0%", "99.0%", "1.2k", "40.0%", "0 s", "2 s"),
    *("5.0 GB", "3", "it goes on: this is its report so far"),
  ]
  assert said["time (h:min:s)"] == "2:03:04" and said["held-out a b, merged model"] == "2.000"
  assert dict(key_numbers({**known, "seconds": 184.0}))["time (min:s)"] == "3:04"
  best = key_numbers({**known, "result_of_learner": 0, "loss_merged": 1.25, "merged_tokens": None})
  assert dict(best)["held-out loss, best island"] == "1.250"


def test_seconds_of_a_run_of_days_are_no_powers_of_ten(make):
  """Thirty islands wait for three hours in all: "1.23e+04 s"."""
  said = dict(key_numbers({"blocked_seconds": 12_345.6, "data_seconds": 999.4}))
  assert said["time learners were blocked"] == "3:25:45 (h:min:s)"
  assert said["time learners waited for data"] == "999 s"
  step = {"gap_seconds": 61.0, "data_seconds": 12_345.6}
  run = RunState().read(make.step(100.0 + n, 0, n, **step) for n in (1, 2))
  assert "<td>61 s</td><td>6:51:31 (h:min:s)</td>" in page(numbers(run))


def test_the_page_says_what_took_part(make):
  """A reader who never saw the project found no word of shards and fragments, and no unit."""
  said = "Each island (4) trains a copy of one model"
  with_shards = page(numbers(RunState().read([make.run_started()])))
  assert f"<p>{said}; syncer shards (2) merge what the islands have learned" in with_shards
  assert "the model's fragments (4) at a time. Losses are in nats per token.</p>" in with_shards
  alone = make.run_started(num_shards=0, num_fragments=0)
  assert f"<p>{said}. Losses" in page(numbers(RunState().read([alone])))


def test_a_loss_of_an_own_model_has_no_unit(make):
  """That of images, or a mean square, was in nats per token in the report, its picture and the
  page; only the terminal knew better."""
  own = Config(model=ModelConfig(custom="own.py:model"))
  for config, unit in ((None, "nats per token"), (Config(), "nats per token"), (own, "")):
    run = RunState(config).read([make.run_started(), make.step(1.0, 0, 1), make.step(2.0, 0, 2)])
    assert status(run, 2.0)["loss_unit"] == unit
    assert ("nats per token" in page(numbers(run))) == bool(unit)
    (axes,) = plots.loss_figure(run).axes
    assert axes.get_ylabel() == f"loss ({', '.join(filter(None, (unit, 'log scale')))})"


def test_the_page_says_of_which_steps_speeds_are(make):
  """In a run of days they were of the last minutes, and nothing said so."""
  steps = [make.step(float(n), 0, n, gap_seconds=9.0 if n < 600 else 1.0) for n in range(1, 1200)]
  found = numbers(RunState().read([make.run_started(num_learners=1), *steps]))
  assert found["learners"]["0"]["median_step_gap_seconds"] == 1.0
  assert "MFU are of each island's last 511 steps at most, on its present chips." in page(found)


def test_the_table_of_islands_has_all_that_is_known(make):
  run = RunState().read([make.run_started(num_learners=1)])
  run.add(make.event(1.0, "learner-0", "started", devices=4, device_kind="TPU v5p"))
  run.add(make.event(1.5, "learner-0", "started", 1, devices=8, device_kind="TPU v6e"))
  fields = {"incarnation": 1, "loss": 2.0, "data_seconds": 0.25, "tokens": 4000}
  run.read([make.step(2.0 + n, 0, n, gap_seconds=0.5, **fields) for n in (1, 2)])
  run.add(make.commit(5.0, weights={0: 1.0}))
  text = page({**numbers(run), "liveness": {"0": 0.75}})
  (cells,) = re.findall("<tr><td>0</td>(.*?)</tr>", text)
  assert re.findall("<td>(.*?)</td>", cells) == [
    *("TPU v5p, then TPU v6e", "2", "2", "8.0k", "2.000", "75.0%", "100.0%", "500 ms", "0.5 s"),
    *("1.0k", "–"),
  ]
  (names,) = re.findall("<tr><th>island</th>(.*?)</tr>", text)
  assert names.count("<th>") == cells.count("<td>") and "<th>commits joined</th>" in names


def test_what_is_not_known_of_an_island_is_a_dash(make):
  text = page(numbers(RunState().read([make.run_started(num_learners=1)])))
  assert "nan" not in text and text.count("<td>–</td>") >= 5


def test_names_are_escaped():
  text = page({"name": "<script>alert(1)</script>"})
  assert "<script" not in text
  _Page(text)


def test_heavy_libraries_are_not_imported_by_importing():
  code = (
    "import sys, ddiloco.observe.eventlog, ddiloco.observe.live, ddiloco.observe.report\n"
    "print({'matplotlib', 'tensorboardX', 'jax'} & sys.modules.keys())"
  )
  assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def test_an_event_that_cannot_be_read_is_counted_and_the_rest_is_shown(tmp_path, make, run_events):
  make.write_log(tmp_path, run_events)
  for role, odd in (("syncer-0", '"kind":"commit"'), ("engine", '"kind":"exit","target":7')):
    with (tmp_path / "events" / f"{role}.jsonl").open("a") as file:
      file.write(f'{{{odd},"time":30.0,"role":"{role}"}}\n')
  summary = _check(write_report(tmp_path))
  assert (summary["odd_events"], summary["finished"]) == (2, "all tokens merged")
  text = (tmp_path / "report" / "index.html").read_text()
  assert "lines of the log that cannot be read</th><td>2" in text


def test_what_pictures_of_a_long_run_leave_out_is_counted_and_said(make, monkeypatch):
  run = RunState()
  run.add(make.run_started(num_learners=1, num_shards=1))
  for n in range(1, 3000):
    run.add(make.step(float(n), 0, n))
    run.add(make.commit(n + 0.5, round=n, weights={"0": 1.0}))
    run.add(make.event(n + 0.7, "syncer-0", "traffic", sent_bytes=n, received_bytes=n))
    if n % 10 == 0:
      run.add(make.event(n + 0.8, "engine", "fault", target="learner-0", action="kill"))
      run.add(make.event(n + 0.9, "learner-0", "started", n))
  said = []
  monkeypatch.setattr(plots, "say_left_out", lambda axes, *texts: said.append(texts))
  with plots.styled():
    for figure in (plots.timeline_figure, plots.participation_figure, plots.loss_figure):
      figure(run)
  (marks, spans), (commits,) = said[0], said[1]
  assert marks == f"the newest 200 of {run.mark_counts.total():,} marks"
  assert commits == "of 2,999 commits 1 in 4" and not any(said[2])
  assert "short spans are part of others" in spans
  found = numbers(run)
  assert len(found["kills"]) == 200 and found["rejoins_left_out"] == 99
  assert found["commits"] == 2999 and found["learners"]["0"]["steps"] == 2999


def test_the_picture_of_traffic_tells_roles_apart_and_goes_to_the_end(make):
  """The evaluator does not look like shard 0."""
  run = RunState()
  run.add(make.run_started(num_learners=1, num_shards=1))
  for role in ("learner-0", "syncer-0", "evaluator"):
    for t in range(1, 5):
      sent = 1_000_000 * max(0, t - 3)  # all in the fourth second
      run.add(make.event(float(t), role, "traffic", sent_bytes=sent, received_bytes=0))
  with plots.styled():
    (total,) = plots.traffic_figure(run).axes
  looks = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in total.get_lines()}
  dashes = {line.get_label(): line._dash_pattern for line in total.get_lines()}
  assert looks.keys() == {"island 0", "shard 0", "evaluator"}
  assert (looks["shard 0"], dashes["shard 0"]) != (looks["evaluator"], dashes["evaluator"])
  assert {line.get_ydata()[-1] for line in total.get_lines()} == {1_000_000}
  assert total.yaxis.get_major_formatter()(1_000_000) == "1 MB"
  greys = [shard_colour(shard, 16) for shard in range(16)]
  assert greys == sorted({*greys}) and all(re.fullmatch("#[0-9a-f]{6}", each) for each in greys)
  assert shard_colour(0, 0) == shard_colour(0, 1)


@pytest.mark.parametrize("losses", [[-2.0] * 3, [0.0] * 3])
def test_a_loss_that_is_not_positive_is_in_the_picture(make, losses):
  run = RunState()
  run.add(make.run_started(num_learners=1, total_tokens=1000))
  for n, loss in enumerate(losses, 1):
    run.add(make.step(float(n), 0, n, loss=loss, tokens=100))
  with plots.styled():
    (axes,) = plots.loss_figure(run).axes
  low, high = axes.get_ylim()
  assert low < min(losses) and max(losses) < high and axes.get_yscale() == "linear"
  assert "log" not in axes.get_ylabel()


def test_the_held_out_loss_begins_again_where_a_run_went_back_to_a_snapshot(make):
  """A line led from the end of the first start back to the snapshot, across the picture."""
  run = RunState()
  run.add(make.run_started(num_learners=1, total_tokens=1000))
  for n, (tokens, loss) in enumerate([(0, 5.0), (400, 3.0), (200, 4.0), (600, 2.0)]):
    fields = {"merged_tokens": tokens, "loss": loss}
    run.add(make.event(float(n), "evaluator", "evaluation", **fields))
  with plots.styled():
    (axes,) = plots.loss_figure(run).axes
  ((line,), texts) = axes.get_lines(), [text.get_text() for text in axes.texts]
  np.testing.assert_equal(line.get_xdata(), [0, 400, math.nan, 200, 600])
  np.testing.assert_equal(line.get_ydata(), [5.0, 3.0, math.nan, 4.0, 2.0])
  assert "2.000" in texts


@pytest.mark.parametrize("losses", [[5.4, 3.0, 2.2], [1.6, 1.58, 1.55], [20.0, 0.003]])
def test_the_axis_of_losses_has_numbers(make, losses):
  """Also where no power of ten is between the losses."""
  run = RunState()
  run.add(make.run_started(num_learners=1, total_tokens=1000))
  for n, loss in enumerate(losses, 1):
    run.add(make.step(float(n), 0, n, loss=loss, tokens=100))
  with plots.styled():
    figure = plots.loss_figure(run)
    figure.draw_without_rendering()
  (axes,) = figure.axes
  low, high = axes.get_ylim()
  ticks = [each for each in axes.get_yticks() if low <= each <= high]
  texts = [label.get_text() for label in axes.get_yticklabels()]
  assert len(ticks) >= 3 and all(texts) and len(texts) == len(axes.get_yticklabels(which="both"))


def test_rows_of_thousands_of_islands_fit_into_a_picture():
  """Two thousand of the usual height have 121,000 pixels: 0.7 GB, which few programs can show."""
  assert plots._rows(8, plots.ROW_INCHES) == (pytest.approx(3.36), 1)
  assert plots._rows(2000, plots.ROW_INCHES) == (40.0, 10)


def test_pictures_of_many_islands_name_as_many_as_have_room(make, monkeypatch):
  monkeypatch.setattr(plots, "TALLEST_INCHES", 4.0)
  run, count = RunState(), 50
  run.add(make.run_started(num_learners=count, num_shards=1))
  for m in range(count):
    run.add(make.step(1.0, m, 1, loss=2.0))
    run.add(make.event(5.0, f"learner-{m}", "traffic", sent_bytes=1000, received_bytes=0))
  run.add(make.commit(2.0, weights={str(m): 1.0 for m in range(count)}))
  said = []
  monkeypatch.setattr(plots, "say_left_out", lambda axes, *texts: said.extend(filter(None, texts)))
  with plots.styled():
    rows = [plots.timeline_figure(run), plots.participation_figure(run)]
    lines = [plots.loss_figure(run), plots.traffic_figure(run)]
  for figure in rows:
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names[:2] == ["island 0", "island 3"] and figure.get_figheight() < 8
    drawn = [*figure.axes[0].collections, *figure.axes[0].patches]
    assert 0 < len(drawn) < 24, "what looks alike is drawn together: 1,200 islands took a minute"
  assert not any(figure.axes[0].get_legend() for figure in lines)
  assert said == ["50 lines without their names"] * 2
