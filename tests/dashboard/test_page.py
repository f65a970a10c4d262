"""The page in a real browser: what a reader sees of a run, during and after it."""

import contextlib
import itertools
import json
import re
import time

import pytest

from ddiloco.dashboard.server import Dashboard, RequestRefused, Where
from ddiloco.observe.eventlog import to_line
from ddiloco.observe.report import write_report
from ddiloco.workdir import FAULTS, STARTED
from tests.dashboard.browser import CHROMIUM, Browser
from tests.made_events import changed, made
from tests.observe.conftest import END, KILL, make_run, step_event, write_log
from tests.waits import wait_for

pytestmark = [
  pytest.mark.skipif(not CHROMIUM, reason="no chromium (or google-chrome) on the PATH"),
  pytest.mark.slow,
]
TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
  browser = Browser(tmp_path_factory.mktemp("profile"))
  yield browser
  browser.close()


@pytest.fixture(autouse=True)
def fresh(browser):
  """Every test begins wide, light, and with nothing kept."""
  browser.size(1200, 900)
  browser.scheme("light")
  browser.complaints.clear()
  yield
  browser.open("about:blank")


def run(workdir, until=1e9, **changes):
  """A run, or its beginning: four islands, number 2 killed on the way and back."""
  events = [event for event in make_run() if event.time <= until]
  events[0] = changed(events[0], **changes)
  write_log(workdir, events)
  if until < 1e9:
    (workdir / STARTED).write_text(f"{time.time() - until - 1}")
  return workdir


def show(browser, dashboard, phase):
  browser.open(dashboard.url)
  browser.until(f"document.body.dataset.phase === {json.dumps(phase)}")


@contextlib.contextmanager
def shown(browser, workdir, phase="over"):
  with Dashboard(workdir) as dashboard:
    show(browser, dashboard, phase)
    yield dashboard


def test_a_run_that_is_over(browser, tmp_path):
  with shown(browser, run(tmp_path)):
    assert browser.text("#name") == "quickstart" and browser.text("#phase") == "over"
    assert "The run is over: all tokens merged" in browser.text("#banner")
    assert browser.text("#over-time-says") == "1 kill and 1 restart"
    lanes = browser.ask("[...document.querySelectorAll('#chart .name')].map(n => n.textContent)")
    assert lanes[:6] == ["island 0", "island 1", "island 2", "island 3", "shard 0", "shard 1"]
    titles = browser.ask("[...document.querySelectorAll('#chart title')].map(n => n.textContent)")
    assert any(title == "island 2: down, 0:20 to 0:24" for title in titles)
    assert sum("kill" in title for title in titles) == 1
    assert browser.ask("document.querySelectorAll('#chart .curve[d^=M]').length") == 4
    assert browser.ask("document.querySelectorAll('#chart .heldout[d^=M]').length") == 1
    assert "killed on purpose" in browser.text("#legend") and "down" in browser.text("#legend")
    assert "in the global model" in browser.text("#goodput") and "down" in browser.text("#goodput")
    assert browser.ask("document.querySelectorAll('#versions tbody tr').length") == 4
    said = browser.text("#missed")
    assert re.search(r"island 3\tno answer within the grace window\t\d:\d\d\b", said), "when?"
    assert "\tbefore the end\n" in said
    assert "shard 1" in browser.text("#links") and "MB" in browser.text("#links")
    assert "the run is over" in browser.text("#log-events")
    assert browser.text("#waiting-says") == "No role waits: there is no run under way."
    assert browser.text("#fault-form") == ""
    assert browser.complaints == []


def test_what_struck_a_run_is_counted_from_its_start_and_restarts_by_whose_they_are(
  browser, tmp_path
):
  """Kills of a long run were those of the newest 200 marks; islands had shards' restarts too."""
  events = [*make_run(), made(30.0, "syncer-1", "started", 1)]
  for n in range(150):
    events.append(made(30.0 + 0.1 * n, "engine", "fault", target="learner-3", action="kill"))
    events.append(made(30.05 + 0.1 * n, "engine", "restart", target="learner-3"))
  write_log(tmp_path, sorted(events, key=lambda event: event.time))
  with shown(browser, tmp_path):
    assert browser.text("#over-time-says") == "151 kills and 152 restarts"
    assert "104 older marks left out" in browser.text("#legend")
    assert "Islands\n4\n1 restart, of shards 1" in browser.text("#figures")


def test_a_run_that_writes_no_more_says_how_old_its_figures_are(browser, tmp_path):
  """It sent bytes "now", days after it was killed, and a dead evaluator's loss had no age."""
  run(tmp_path, until=30.0)
  figures = lambda: browser.text("#figures").replace("\n", " ")
  with shown(browser, tmp_path, "running"):
    assert re.search(r"Held-out loss 1\.777 nats per token, \d:\d\d ago", figures())
    assert "B/s now" in figures()
  (tmp_path / STARTED).write_text(f"{time.time() - 90_000}")
  with shown(browser, tmp_path, "silent"):
    said = figures()
    assert browser.ask("document.title") == "silent quickstart · ddiloco"
    assert re.search(r"nats per token, 0:0\d before the end Islands", said) and "now" not in said
    assert re.search(r"Sent [\d.]+ MB \d+ commits$", said)


def test_what_happened_goes_back_for_hours_and_scrolls(browser, tmp_path):
  """It had eight lines: two restarts of one island."""
  restarts = [made(END + n, "engine", "restart", target="learner-3") for n in range(0, 600, 6)]
  write_log(tmp_path, [*make_run()[:-1], *restarts])
  began = int(time.time()) - 655
  (tmp_path / STARTED).write_text(f"{began}")
  with shown(browser, tmp_path, "running"):
    times = browser.ask("[...document.querySelectorAll('#log-events time')].map(n => n.innerText)")
    assert (len(times), times[0], times[-1]) == (100, "10:54", "1:00")
    local = "document.querySelector('#log-events time').title"
    assert browser.ask(f"Date.parse({local})") == 1000 * (began + 654), "a reader's own clock"
    assert browser.ask("document.querySelector('#log-events').parentNode.clientHeight") == 420


def test_bars_and_marks_stand_at_their_times(browser, tmp_path):
  """As wide as what they stand for, each in the row of its island or shard."""
  with shown(browser, run(tmp_path)):
    left, right = 176, browser.ask("document.querySelector('#chart').clientWidth") - 14
    at = lambda time: left + (right - left) * time / (END + 0.3)
    box = "(e => { const {x, y, width, height} = e.getBBox(); return [x, y, width, height] })"
    found = "[...document.querySelectorAll('#chart rect:has(> title)')]"
    spans = browser.ask(f"Object.fromEntries({found}.map(e => [e.textContent, {box}(e)]))")
    x, y, width, height = spans["island 2: down, 0:20 to 0:24"]
    assert (x, x + width) == (pytest.approx(at(KILL), abs=1), pytest.approx(at(24), abs=1))
    assert (y, height) == (2 * 34, 16)
    lanes = browser.ask(f"[...document.querySelectorAll('#chart rect.lane')].map({box})")
    assert [lane[:3] for lane in lanes[:4]] == [[left, 34 * m, right - left] for m in range(4)]
    names = browser.ask(
      "[...document.querySelectorAll('#chart text:has(.name)')].map(n => n.textContent)"
    )
    assert [name.split(" ", 2)[1][:1] for name in names[:6]] == list("012301")
    assert names[1].startswith("island 1left · 1.") and names[5] == "shard 143 rounds"
    kill = browser.ask("document.querySelector('#chart .strike').getAttribute('x1')")
    assert float(kill) == pytest.approx(at(KILL), abs=1)
    share = "(e => e.getBoundingClientRect().width / e.parentNode.getBoundingClientRect().width)"
    parts = browser.ask(f"[...document.querySelectorAll('#goodput .stack i')].map({share})")
    said = browser.ask("[...document.querySelectorAll('#goodput li b')].map(e => e.textContent)")
    assert sum(parts) == pytest.approx(1, abs=0.02)
    assert parts == pytest.approx([float(each[:-1]) / 100 for each in said], abs=0.01)
    meters = browser.ask(f"[...document.querySelectorAll('#participation .meter i')].map({share})")
    said = browser.text("#participation")
    assert meters == pytest.approx([1.0, 0.99, 0.85, 0.71], abs=0.02) and "99%" in said
    assert browser.text("#as-of").startswith("As of ")


def test_what_was_before_the_start_by_a_clock_that_is_behind_stays_in_the_chart(browser, tmp_path):
  """Bars lay over the names, and beyond the page."""
  write_log(tmp_path, [changed(event, time=event.time - 10) for event in make_run()])
  with shown(browser, tmp_path):
    left = "(e => e.getBoundingClientRect().x)"
    drawn = "[...document.querySelectorAll('#chart :is(rect, path, circle)')]"
    least = browser.ask(f"Math.min(...{drawn}.map({left})) - {left}(chart)")
    assert least >= 176 - 8, "half of a mark"


def test_tiny_losses_are_told_apart(browser, tmp_path):
  """Of a model of one's own: its curves were a line at 0.0, between -0.5 and 0.5."""
  tiny = [
    changed(event, loss=1e-4 * event.loss) if getattr(event, "loss", None) else event
    for event in make_run()
  ]
  write_log(tmp_path, tiny)
  with shown(browser, tmp_path):
    labels = browser.ask("[...document.querySelectorAll('#chart text')].map(n => n.textContent)")
    numbers = {label for label in labels if label.startswith("0.000")}
    assert {"0.0002", "0.0004"} <= numbers and len(numbers) > 3
    heights = browser.ask(
      "[...document.querySelectorAll('#chart .curve')].map(n => n.getBBox().height)"
    )
    assert min(heights) > 20
    assert browser.complaints == []


def test_the_flat_end_of_a_long_run_is_seen(browser, tmp_path):
  """Beside the loss at the beginning, days of training were a straight line; the report's axis was
  logarithmic."""
  steps = [step_event(20.0 * n, 0, n, loss=8.0 / 2**n) for n in range(4)]
  write_log(tmp_path, [changed(make_run()[0], num_learners=1), *steps])
  with shown(browser, tmp_path, "running"):
    curve = browser.ask("document.querySelector('#chart .curve').getAttribute('d')")
    heights = [float(point.split()[1]) for point in re.split("[ML]", curve)[1:]]
    falls = [b - a for a, b in itertools.pairwise(heights)]
    assert len(falls) == 3 and falls == pytest.approx([190 / 3] * 3, abs=0.2)
    labels = browser.ask("[...document.querySelectorAll('#chart text')].map(n => n.textContent)")
    assert [each for each in labels if each in ("1", "2", "4", "8")] == ["1", "2", "4", "8"]
    assert "Lossnats per token, log scale" in labels


def test_a_curve_of_long_steps_is_a_line_and_has_a_gap_where_there_was_no_run(browser, tmp_path):
  """Of steps that were longer than two seconds the first thirty drew nothing."""
  times = [20.0 * n + 80.0 * (n > 12) for n in range(1, 20)]
  steps = [step_event(time, 0, n, loss=5.0 - 0.1 * n) for n, time in enumerate(times, 1)]
  write_log(tmp_path, [changed(make_run()[0], num_learners=1), *steps])
  with shown(browser, tmp_path, "running"):
    curve = browser.ask("document.querySelector('#chart .curve').getAttribute('d')")
    assert re.sub(r"[\d. ]", "", curve) == "M" + 11 * "L" + "M" + 6 * "L"


def test_step_times_by_island_and_time(browser, tmp_path):
  """A canvas: what it shows is looked at by colour, and read at the cursor."""
  with shown(browser, run(tmp_path)):
    assert browser.text("#heat-title") == "Step times"
    assert "as usual" in browser.text("#heat-legend") and "down" in browser.text("#heat-legend")
    assert "waiting for a shard" not in browser.text("#heat-legend"), "nobody did"
    canvas = browser.ask("(c => [c.width, c.height])(document.querySelector('#heat-canvas'))")
    assert canvas == [browser.ask("document.querySelector('#heat').clientWidth"), 4 * 18 + 20]

    def colour(seconds, island):
      at = f"176 + {seconds} / {END + 0.3} * (c.width - 176 - 14), {18 * island + 8}"
      return browser.ask(
        "(c => [...c.getContext('2d').getImageData("
        f"{at}, 1, 1).data].join())(document.querySelector('#heat-canvas'))"
      )

    usual, down, joining = colour(10, 0), colour(KILL + 2, 2), colour(KILL + 5.5, 2)
    assert usual == colour(10, 2) == colour(50, 2) and len({usual, down, joining}) == 3
    browser.ask("document.querySelector('#heat').focus()")
    for key in ("Home", *["ArrowDown"] * 2, "End", *["ArrowLeft"] * 3):
      browser.press(key)
    said = browser.text("#heat-readout")
    assert said.startswith("island 2 · 0:59") and "its median" in said and "ms" in said
    browser.press("Escape")
    assert browser.text("#heat-readout").startswith("Point at the map")
    browser.scheme("dark")
    browser.ask("document.querySelector('#theme').click()")
    browser.ask("document.querySelector('#theme').click()")
    assert colour(10, 0) != usual, "a canvas knows no style sheet: it is drawn again"
    browser.ask("document.querySelector('#theme').click()")
    assert browser.complaints == []


@pytest.mark.parametrize("slow", [20, 300])
def test_an_island_that_is_slow_now_is_named_also_after_days(browser, tmp_path, slow):
  """It was named when eight cells of the map were slow, hours later; and not after 256 such steps:
  from then on they were its median."""
  gaps = [60.0] * 4000, [60.0] * (4000 - 3 * slow) + [180.0] * slow
  events = [changed(make_run()[0], num_learners=2)]
  for m in range(2):
    for n, (at, gap) in enumerate(zip(itertools.accumulate(gaps[m]), gaps[m]), 1):
      events.append(step_event(at, m, n, seconds=gap, gap_seconds=gap))
  events.sort(key=lambda event: event.time)
  write_log(tmp_path, events)
  (tmp_path / STARTED).write_text(f"{time.time() - events[-1].time - 1}")
  with shown(browser, tmp_path, "running"):
    said = browser.text("#heat-says")
    assert re.fullmatch(r"slower than usual now: island 1 \((2\.9|3\.0)×\)", said), said
    assert browser.complaints == []


def test_a_rejoin_in_phases(browser, tmp_path):
  with shown(browser, run(tmp_path)):
    assert "from death to merge: 8." in browser.text("#rejoins-says")
    found = browser.ask("[...document.querySelectorAll('#rejoins .phases i')].map(n => n.title)")
    assert found[0].startswith("noticed: 0.1 s") and found[1].startswith("pause: 4.0 s (until")
    assert [each.split(":")[0] for each in found[2:]] == [
      *("restore", "receive", "first step", "merge"),
    ]
    assert browser.complaints == []


def test_a_run_under_way_with_an_island_down(browser, tmp_path):
  with shown(browser, run(tmp_path, until=KILL + 3), "running"):
    assert "down: 2" in browser.text("#over-time-says")
    assert browser.ask("document.querySelectorAll('#chart rect.down').length") == 1
    assert "left" in browser.text("#elapsed") and browser.text("#banner") == ""
    assert browser.ask("document.querySelector('.track').ariaValueNow") not in ("0", "100", None)
    first = browser.text("#elapsed")
    browser.until(f"document.querySelector('#elapsed').innerText !== {json.dumps(first)}")
    assert browser.complaints == []


def test_an_island_that_has_left_counts_in_no_figure(browser, tmp_path):
  """Of a run that went on with fewer islands the page said that every other commit lacked one."""
  events = [event for event in make_run() if event.time <= KILL - 1]
  last = events[-1].time
  events.append(made(last, "learner-1", "stopped", reason="left, and everything it had is merged"))
  write_log(tmp_path, events)
  (tmp_path / STARTED).write_text(f"{time.time() - last - 1}")
  with shown(browser, tmp_path, "running"):
    assert "Islands up\n3 of 3" in browser.text("#figures")


def test_what_stays_the_same_is_not_drawn_again(browser, tmp_path):
  """Each second all of it was: nothing could be selected, and hundreds of islands took a core."""
  with shown(browser, run(tmp_path, until=KILL + 3), "running"):
    places = ["#participation tbody tr:last-child th", "#links td.number", "#missed", "#legend li"]
    nodes = [f"document.querySelector({json.dumps(place)})" for place in places]
    # A screen reader reads these when they change: it said each second how a cursor is moved.
    said = "#readout", "#heat-readout"
    nodes += [f"document.querySelector('{name}').firstChild" for name in said]
    for node in nodes:
      browser.ask(f"void ({node}.mine = true)")
    first = browser.text("#elapsed")
    browser.until(f"document.querySelector('#elapsed').innerText !== {json.dumps(first)}")
    for node in nodes:
      assert browser.ask(f"{node}.mine"), node
    assert browser.complaints == []


def test_a_page_that_takes_long_to_draw_is_drawn_less_often(browser, tmp_path):
  """Of hundreds of islands with many kills it would take a core of whoever looks."""
  slow = "let ms = 0; performance.now = () => (ms += 300); window.delays = [];"
  slow += "const later = setTimeout; setTimeout = (f, ms) => later(f, void delays.push(ms))"
  script = browser.send("Page.addScriptToEvaluateOnNewDocument", source=slow)
  with shown(browser, run(tmp_path, until=KILL + 3), "running"):
    assert browser.until("delays.find(ms => ms > 1000)") == 3000
  browser.send("Page.removeScriptToEvaluateOnNewDocument", **script)


def test_a_page_that_nobody_sees_is_drawn_when_it_is_seen_again(browser, tmp_path):
  hidden = "Object.defineProperty(document, 'hidden', {configurable: true, value: %s});"
  hidden += " document.dispatchEvent(new Event('visibilitychange'))"
  with shown(browser, run(tmp_path)) as dashboard:
    browser.ask("void (document.querySelector('#chart svg').mine = true)")
    browser.ask(hidden % "false")
    assert browser.ask("document.querySelector('#chart svg').mine"), "nothing has changed"
    width = "document.querySelector('#heat-canvas').clientWidth"
    assert browser.ask(width) > 800
    browser.size(500, 900)
    browser.ask(hidden % "false")
    browser.until(f"{width} < 500")  # a canvas does not follow the page by itself
    script = browser.send("Page.addScriptToEvaluateOnNewDocument", source=hidden % "true")
    show(browser, dashboard, "over")
    assert browser.ask("document.title") == "95% quickstart · ddiloco"
    assert browser.ask("document.querySelector('#chart svg')") is None
    browser.ask(hidden % "false")
    assert "island 2" in browser.ask("document.querySelector('#chart').textContent")
    browser.send("Page.removeScriptToEvaluateOnNewDocument", **script)


def test_nothing_is_known_yet_and_then_a_run_begins(browser, tmp_path):
  with shown(browser, tmp_path, "empty"):
    assert "Nothing is known yet" in browser.text("#banner") and browser.text("main") == ""
    run(tmp_path, until=0.0)
    browser.until("document.body.dataset.phase === 'starting'")
    assert "all 4 islands: joining" in browser.text("#over-time-says")
    assert "not known yet" in browser.ask("document.querySelector('#chart').textContent")


def test_a_status_that_it_cannot_draw_does_not_end_its_polling(browser, tmp_path, monkeypatch):
  """Of a newer server, say: the page stood still, and did not say so."""
  with Dashboard(run(tmp_path)) as dashboard:
    status = dashboard._run.status
    with monkeypatch.context() as patched:
      patched.setattr(dashboard._run, "status", lambda: status() | {"links": None})
      show(browser, dashboard, "over")
    browser.until("document.querySelector('#links').textContent.includes('shard 1')")
    assert browser.complaints, "of the first status"


def test_a_shard_that_is_silent_is_named_beside_the_islands(browser, tmp_path):
  """Of one that no engine starts only the stripes of its lane tell, far below those of islands."""
  events = [e for e in make_run() if e.time <= 18.0 and not (e.role == "syncer-1" and e.time > 5)]
  write_log(tmp_path, events)
  (tmp_path / STARTED).write_text(f"{time.time() - 19.0}")
  with shown(browser, tmp_path, "running"):
    assert browser.text("#over-time-says").endswith(" · shard 1: stalled")
    names = browser.ask("document.querySelector('#chart').textContent")
    assert re.search(r"shard 1stalled · \d+ rounds", names)


def test_logs_that_cannot_be_read_are_named_at_the_top(browser, tmp_path, monkeypatch):
  with Dashboard(run(tmp_path, until=30.0)) as dashboard:
    status, logs = dashboard._run.status, [f"learner-{m}.jsonl (denied)" for m in range(5)]
    monkeypatch.setattr(dashboard._run, "status", lambda: status() | {"unread": logs})
    show(browser, dashboard, "running")
    said = browser.text("#banner")
    assert said.endswith("learner-1.jsonl (denied), learner-2.jsonl (denied) and 2 more.")
    assert browser.ask("document.querySelector('#banner').dataset.tone") == "warn"


def test_the_server_is_gone_and_comes_back(browser, tmp_path, monkeypatch):
  with shown(browser, run(tmp_path, until=30.0), "running") as dashboard:
    status = dashboard._run.status

    def gone():
      raise RequestRefused(503, "gone")

    monkeypatch.setattr(dashboard._run, "status", gone)
    browser.until("document.body.dataset.phase === 'gone'")
    assert browser.text("#phase") == "server gone"
    assert browser.ask("document.title") == "server gone quickstart · ddiloco", "seen behind others"
    assert "The server does not answer since" in browser.text("#banner")
    assert "may well go on" in browser.text("#banner")
    assert "island 2" in browser.ask("document.querySelector('#chart').textContent"), "it stays"
    monkeypatch.setattr(dashboard._run, "status", status)
    browser.until("document.body.dataset.phase !== 'gone'")
    assert browser.text("#banner") == ""


def test_the_token_is_asked_for_kept_and_not_left_in_the_url(browser, tmp_path):
  with Dashboard(run(tmp_path), Where(token=TOKEN)) as dashboard:
    browser.open(dashboard.url)
    browser.until("document.activeElement.id === 'token'")
    assert browser.text("main") == ""
    browser.ask("document.querySelector('#token').value = 'a wrong one \u2013 \u20ac'")
    browser.press("Enter")
    browser.until("document.querySelector('#token-wrong').checkVisibility()")
    browser.ask(f"document.querySelector('#token').value = {TOKEN!r}")
    browser.press("Enter")
    browser.until("document.body.dataset.phase === 'over'")
    browser.open("about:blank")
  with Dashboard(tmp_path, Where(token=TOKEN)) as dashboard:
    browser.open(f"{dashboard.url}?token={TOKEN}")
    browser.until("document.body.dataset.phase === 'over'")
    assert browser.ask("location.href") == dashboard.url
    browser.open(dashboard.url)
    browser.until("document.body.dataset.phase === 'over'")


def test_a_fault_is_injected_by_keyboard(browser, tmp_path):
  where = Where(token=TOKEN, allow_faults=True)
  with Dashboard(run(tmp_path, until=30.0), where) as dashboard:
    browser.open(f"{dashboard.url}?token={TOKEN}")
    browser.until("document.querySelector('#fault-form').checkVisibility()")
    browser.ask("document.querySelector('#fault-role').value = 'learner-3'")
    browser.ask("document.querySelector('#fault-seconds').focus()")
    browser.press("Enter")
    browser.until("document.querySelector('#fault-says').innerText.startsWith('Asked for')")
    fault = json.loads((tmp_path / FAULTS).read_text())
    assert (fault["action"], fault["role"], fault["seconds"]) == ("kill", "learner-3", 5)


def test_the_chart_has_a_cursor_for_the_keyboard(browser, tmp_path):
  with shown(browser, run(tmp_path)):
    browser.ask("document.querySelector('#chart').focus()")
    browser.press("Home")
    assert browser.text("#readout").startswith("0:00")
    for _ in range(35):
      browser.press("ArrowRight")
    assert "island 2 down" in browser.text("#readout") and "held-out" in browser.text("#readout")
    there = []
    for key in ("End", "ArrowLeft", "PageUp", "PageDown", "ArrowRight", "Home"):
      browser.press(key)
      there.append(browser.text("#readout").split(" · ")[0])
    assert there == ["1:00", "0:59", "0:53", "0:59", "1:00", "0:00"]
    browser.press("End")
    browser.press("PageUp")
    said = ""
    for _ in range(3):
      said += browser.text("#readout")
      browser.press("ArrowLeft")
    assert re.match(r"0:54 · island 0 running, loss 1\.\d{3} · island 1 running, loss 1\.", said)
    assert re.search(r"island 0 running, loss 1\.\d{3}, in 100% of commits · island 1", said)
    browser.press("Escape")
    assert browser.text("#readout").startswith("Point at the chart")


def test_everything_can_be_reached_with_tab(browser, tmp_path):
  with shown(browser, run(tmp_path)):
    seen = []
    for _ in range(12):
      browser.press("Tab")
      seen.append(browser.ask("document.activeElement.id || document.activeElement.className"
                              " || document.activeElement.tagName"))  # fmt: skip
    order = ["skip", "theme", "chart", "heat", "versions"]
    places = [seen.index(name) for name in order]
    assert places == sorted(places), seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 800, 390])
def test_it_is_readable_wide_and_narrow_light_and_dark(browser, tmp_path, scheme, width):
  browser.size(width, 900)
  browser.scheme(scheme)
  with shown(browser, run(tmp_path)):
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.ask(overflow) <= 0, "nothing sticks out at the side"
    missed = "document.querySelector('#missed')"
    assert browser.ask(f"{missed}.scrollWidth <= {missed}.clientWidth"), "a time was cut"
    page, ink = browser.ask(
      "['backgroundColor', 'color'].map(name => getComputedStyle(document.body)[name])"
    )
    brightness = [sum(map(int, c[c.index("(") + 1 : -1].split(",")[:3])) for c in (page, ink)]
    assert (brightness[0] > brightness[1] + 500) == (scheme == "light")
    assert (brightness[1] > brightness[0] + 500) == (scheme == "dark")
    small = browser.ask(
      "[...document.querySelectorAll('main *')]"
      ".filter(e => e.innerText?.trim() && !e.children.length"
      " && getComputedStyle(e).fontSize.replace('px', '') < 12).length"
    )
    assert small == 0
    browser.screenshot(tmp_path / f"{scheme}-{width}.png")
    assert (tmp_path / f"{scheme}-{width}.png").stat().st_size > 10_000


def test_a_long_name_widens_neither_the_page_nor_the_report_on_a_phone(browser, tmp_path):
  """Nor does why it ended, which may have a path in it."""
  browser.size(390, 900)
  overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
  name = "sweep_rate=0.02_batch=8_seed=0_optimizer=muon_quorum=2"
  run(tmp_path, name=name)
  ended = made(END + 1, "engine", "run_finished", reason=f"no room in /runs/{name}/{name}")
  with (tmp_path / "events" / "engine.jsonl").open("ab") as file:
    file.write(to_line(ended))
  with shown(browser, tmp_path):
    assert browser.ask(overflow) <= 0
  browser.open((write_report(tmp_path) / "index.html").as_uri())
  assert browser.ask(overflow) <= 0


def test_colours_that_say_something_stay_where_a_system_forces_its_own(browser, tmp_path):
  """With high contrast the map of step times was blank, and so were bars, meters and legends."""
  browser.send(
    "Emulation.setEmulatedMedia", features=[{"name": "forced-colors", "value": "active"}]
  )
  with shown(browser, run(tmp_path)):
    colours = "[...new Set([...document.querySelectorAll('%s')].map(e =>"
    colours += " getComputedStyle(e).backgroundColor))].length"
    for places, least in (("#heat-legend .heat", 8), (".stack i", 3), (".swatch", 4)):
      assert browser.ask(colours % places) >= least, places


def test_the_days_of_a_long_run_are_told_apart_on_a_narrow_screen(browser, tmp_path):
  """Each was "4 d 0:00:00", a third of the axis."""
  steps = [step_event(1e5 * n, 0, n) for n in range(1, 13)]
  write_log(tmp_path, [changed(make_run()[0], num_learners=1), *steps])
  browser.size(390, 900)
  with shown(browser, tmp_path, "running"):
    texts, y = "[...document.querySelectorAll('#chart text')]", "(e => +e.getAttribute('y'))"
    times = f"{texts}.filter(e => {y}(e) === Math.max(...{texts}.map({y})))"
    assert browser.ask(f"{times}.map(e => e.textContent)") == ["0", "4", "8", "days"]
    ends = browser.ask(f"{times}.map(e => [e.getBBox().x, e.getBBox().x + e.getBBox().width])")
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ends))


def test_no_table_is_cut_on_a_laptop(browser, tmp_path):
  """The last columns of Participation were out of sight."""
  chip = {"device_kind": "NVIDIA H100 80GB HBM3", "flops_per_token": 1e9}
  chip |= {"devices": 64, "peak_flops_per_second": 1e15}
  events = [event for event in make_run() if event.time <= KILL + 3]
  events = [changed(event, **chip) if event.kind == "started" else event for event in events]
  write_log(tmp_path, events)
  (tmp_path / STARTED).write_text(f"{time.time() - KILL - 4}")
  browser.size(1366, 768)
  with shown(browser, tmp_path, "running"):
    assert "MFU" in browser.text("#participation") and "H100" in browser.text("#participation")
    cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
    assert browser.ask(f"{cut}.map(e => e.id)") == []


def many(count, seconds):
  """A run of so many islands that is under way."""
  yield changed(make_run()[0], num_learners=count)
  for m in range(count):
    yield made(0.8, f"learner-{m}", "started", devices=1)
    yield made(2.0, f"learner-{m}", "joined")
  for n in range(1, int(seconds / 0.5)):
    for m in range(count):
      yield step_event(2.0 + 0.5 * n + 1e-3 * m, m, n, gap_seconds=0.5, seconds=0.5)
    weights = {str(m): 1 / count for m in range(count) if (m + n) % 10}
    missing = {
      str(m): "no answer within the grace window" for m in range(count) if not (m + n) % 10
    }
    fields = {"fragment": n % 4, "round": n, "version": n // 4 + 1, "weights": weights}
    yield made(2.4 + 0.5 * n, "syncer-0", "commit", missing=missing, **fields)
    if n == 10:
      for m in range(0, count, 9):
        yield made(7.9, "engine", "fault", target=f"learner-{m}", action="slow", seconds=5.0)


def test_islands_that_came_and_went_a_thousand_times_are_few_shapes(browser, tmp_path):
  """Two hundred islands with many kills were 75,000 elements, which took seconds to draw."""
  count, lives = 20, 60
  events = [changed(make_run()[0], num_learners=count, num_shards=0)]
  for m, life in itertools.product(range(count), range(lives)):
    about, role = {"target": f"learner-{m}"}, f"learner-{m}"
    events += [
      made(5.0 * life + 1.0, role, "started", life),
      made(5.0 * life + 2.0, role, "joined", life),
      step_event(5.0 * life + 3.0, m, 1, life),
      made(5.0 * life + 4.0, "engine", "fault", action="kill", **about),
      made(5.0 * life + 5.0, "engine", "restart", **about),
    ]
  events += [made(5.0 * lives, "engine", "run_finished", reason="finished")]
  write_log(tmp_path, sorted(events, key=lambda event: event.time))
  with shown(browser, tmp_path):
    assert (
      browser.ask("document.querySelectorAll('#chart g.island:has(.lane) *').length") < 7 * count
    )
    left, right = 92, browser.ask("document.querySelector('#chart').clientWidth") - 14
    d = browser.ask("document.querySelector('#chart .down').getAttribute('d')")
    bars = re.findall(r"M([\d.]+) 0h([\d.]+)v8h-\2z", d)
    assert len(bars) == lives and d.count("M") == lives
    second = (right - left) / (5.0 * lives)
    found = [float(number) for number in bars[10]]
    assert found == pytest.approx([left + 54.0 * second, second], abs=0.02)


def test_each_of_twenty_islands_shows_its_part_in_commits_over_time(browser, tmp_path):
  """Beyond twelve islands nothing did: one that trained, and was in no commit, looked like all."""
  events = sorted(many(20, 20.0), key=lambda event: event.time)
  events = [
    changed(e, weights={m: 0.1 for m in e.weights if m != 7}) if e.kind == "commit" else e
    for e in events
  ]
  write_log(tmp_path, events)
  (tmp_path / STARTED).write_text(f"{time.time() - events[-1].time - 1}")
  with shown(browser, tmp_path, "running"):
    strips = "(m => [...document.querySelectorAll('#chart g.island:has(.lane)')][m]"
    strips += ".querySelectorAll('.strip'))"
    darkest = f"(m => Math.max(...[...{strips}(m)].map(e => e.getAttribute('opacity'))))"
    assert [browser.ask(f"{darkest}({m})") for m in (6, 7)] == [pytest.approx(1, abs=0.1), 0.12]
    box = browser.ask(f"(({{y, height}}) => [y, height])({strips}(7)[0].getBBox())")
    assert box == [7 * 14 + 9, 3], "below its bar, above the next island"
    assert "share of commits" in browser.text("#legend")
    browser.ask("document.querySelector('#chart').focus()")
    browser.press("End")
    said = "20 islands running · in 8.% of commits, on average"  # before it was last heard of them
    look = lambda: browser.press("ArrowLeft") or browser.text("#readout")
    wait_for(lambda: re.search(said, look()), look)


def test_no_part_in_commits_is_shown_of_times_without_a_run(browser, tmp_path):
  """Where a run went on after hours, its strips began before it, and went on after its end."""
  again = [changed(e, time=e.time + 240, incarnation=e.incarnation + 2) for e in make_run()]
  write_log(tmp_path, [*make_run(), *again])
  with shown(browser, tmp_path):
    strips = "[...document.querySelectorAll('#chart .strip')].map(e => e.getAttribute('d'))"
    bars = re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", " ".join(browser.ask(strips)))
    left, right = 176, browser.ask("document.querySelector('#chart').clientWidth") - 14
    at = lambda time: left + (right - left) * time / (240 + END + 0.3)
    places = [(float(x), float(x) + float(width)) for x, width in bars]
    inside = [at(3) < x < to < at(63) or at(243) < x < to < at(303) for x, to in places]
    assert len(places) > 40 and all(inside)


def test_stalled_and_quarantined_islands_look_different(browser, tmp_path):
  """The same stripes stood for both, on the lanes and twice in the legend."""
  events = [event for event in make_run() if event.time <= 18.0]
  events += [made(18.0, "engine", "fault", target="learner-0", action="stall")]
  events += [made(18.0, "syncer-0", "member", learner=1, state="quarantined", reason="3 bad")]
  write_log(tmp_path, events)
  (tmp_path / STARTED).write_text(f"{time.time() - 60.0}")
  with shown(browser, tmp_path, "running"):
    picture = "(what => [...document.querySelectorAll('#legend li')]"
    picture += ".find(e => e.innerText === what).querySelector('svg').innerHTML)"
    assert browser.ask(f"{picture}('stalled')") != browser.ask(f"{picture}('quarantined')")
    outline = "(what => getComputedStyle(document.querySelector('#chart .' + what)).stroke)"
    assert browser.ask(f"{outline}('stalled')") == "none"
    assert browser.ask(f"{outline}('quarantined')") != "none"


@pytest.mark.parametrize("count", [1, 200])
def test_one_island_and_two_hundred_are_readable_and_quick(browser, tmp_path, count):
  """Each table of two hundred rows has a place of its own size; the page is no hundred screens."""
  events = sorted(many(count, 30.0), key=lambda event: event.time)
  write_log(tmp_path, events)
  (tmp_path / STARTED).write_text(f"{time.time() - events[-1].time - 1}")
  browser.size(1366, 768)
  with shown(browser, tmp_path, "running"):
    assert browser.ask("document.querySelectorAll('#participation tbody tr').length") == count
    browser.ask("document.querySelector('#chart').focus()")
    browser.press("Home")
    who = "200 islands joining" if count > 1 else "island 0 joining"
    assert browser.text("#readout") == f"0:00 · {who}"
    assert browser.ask("document.documentElement.scrollHeight") < 768 * 8
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.ask(overflow) <= 0
    assert browser.complaints == []


def test_the_theme_can_be_chosen_and_is_kept(browser, tmp_path):
  with shown(browser, run(tmp_path)) as dashboard:
    browser.ask("document.querySelector('#theme').click()")
    browser.ask("document.querySelector('#theme').click()")
    assert browser.text("#theme") == "Theme: dark"
    show(browser, dashboard, "over")
    assert browser.ask("document.documentElement.dataset.theme") == "dark"
    assert "14" in browser.ask("getComputedStyle(document.body).backgroundColor")
    browser.ask("document.querySelector('#theme').click()")


HEAT_PIXEL = """((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(canvas.width - 40, 4, 1, 1);
  return data.slice(0, 3).join(", ");
})(document.querySelector("#heat-canvas"))"""
AS_USUAL = "getComputedStyle(document.querySelector('#heat-legend .heat-1')).backgroundColor"


def test_the_map_of_step_times_follows_the_page_and_its_colours(browser, tmp_path):
  """It stayed as narrow, or as dark, as when the run was polled last; without a server for ever."""
  with shown(browser, run(tmp_path)):
    browser.ask("window.setTimeout = () => {}")  # nothing is polled any more
    for width, scheme in ((600, "dark"), (1200, "light")):
      browser.size(width, 900)
      browser.scheme(scheme)
      fills = "document.querySelector('#heat-canvas').clientWidth === heat.clientWidth"
      assert browser.until(fills), f"the map does not fill {width} pixels"
      assert browser.until(f"`rgb(${{{HEAT_PIXEL}}})` === {AS_USUAL}"), f"not {scheme}"


def test_it_can_be_printed(browser, tmp_path):
  """From the dark theme it was pale on white, colours were left out, and tables were cut off."""
  slow = {"target": "learner-3", "action": "slow"}
  events = [made(30.0, "engine", "fault", **slow, detail=f"number {n}") for n in range(50)]
  write_log(tmp_path, sorted([*make_run(), *events], key=lambda event: event.time))
  with shown(browser, tmp_path):
    for _ in range(2):
      browser.ask("document.querySelector('#theme').click()")
    assert browser.text("#theme") == "Theme: dark"
    browser.size(700, 900)
    browser.send("Emulation.setEmulatedMedia", media="print")
    browser.until(f"`rgb(${{{HEAT_PIXEL}}})` === {AS_USUAL}")
    body = "getComputedStyle(document.body)"
    assert browser.ask(f"[{body}.backgroundColor, {body}.color, {body}.printColorAdjust]") == [
      *("rgb(255, 255, 255)", "rgb(21, 25, 30)", "exact")
    ]
    cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollHeight > e.clientHeight)"
    assert browser.ask(f"{cut}.length") == 0
    browser.send("Emulation.setEmulatedMedia", media="")
    browser.ask("document.querySelector('#theme').click()")
  browser.open((write_report(tmp_path) / "index.html").as_uri())
  browser.send("Emulation.setEmulatedMedia", media="print")
  wide = "(e => e.scrollWidth - e.clientWidth)(document.querySelector('.wide'))"
  assert browser.ask(wide) == 0
  browser.send("Emulation.setEmulatedMedia", media="")


def test_a_browser_that_blocks_its_storage_shows_the_run(browser, tmp_path):
  """The page said "connecting" for ever: it could not read which theme was chosen."""
  blocked = "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window,"
  blocked += " name, {get() { throw new DOMException('blocked', 'SecurityError') }})"
  script = browser.send("Page.addScriptToEvaluateOnNewDocument", source=blocked)
  with Dashboard(run(tmp_path), Where(token=TOKEN)) as dashboard:
    browser.open(f"{dashboard.url}?token={TOKEN}")
    browser.until("document.body.dataset.phase === 'over'")
    browser.ask("document.querySelector('#theme').click()")
    assert browser.text("#theme") == "Theme: light"
    browser.open(dashboard.url)
    browser.until("document.activeElement.id === 'token'")
    assert browser.text("#token-wrong") == ""
    browser.ask(f"document.querySelector('#token').value = {TOKEN!r}")
    browser.press("Enter")
    browser.until("document.body.dataset.phase === 'over'")
  browser.send("Page.removeScriptToEvaluateOnNewDocument", **script)


def test_what_is_in_a_log_stays_text(browser, tmp_path):
  evil = "<img src=x onerror=alert(1)>"
  run(tmp_path, name=evil)
  with (tmp_path / "events" / "engine.jsonl").open("a") as file:
    more = {"time": 60.2, "role": "engine", "incarnation": 0, "kind": "exit"}
    file.write(json.dumps(more | {"target": "learner-1", "reason": evil}) + "\n")
  with shown(browser, tmp_path):
    assert browser.text("#name") == evil
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert browser.complaints == []


def alone(event):
  """A commit of island 0 alone, instead of what it was."""
  late = dict.fromkeys((1, 2, 3), "no answer within the grace window")
  return changed(event, weights={0: 1.0}, rejected={}, missing=late)


def test_rounds_of_one_that_repeat_are_said_at_the_top(browser, tmp_path):
  """A minimum quorum of 1 must not silently become solo runs."""
  events = [event for event in make_run() if event.time <= 18.0]
  events = [alone(e) if e.kind == "commit" and e.time > 6 else e for e in events]
  write_log(tmp_path, events)
  (tmp_path / STARTED).write_text(f"{time.time() - 19.0}")
  with shown(browser, tmp_path, "running"):
    said = browser.until("document.querySelector('#banner').innerText.includes('alone')") and (
      browser.text("#banner")
    )
    assert "rounds merged island 0 alone, of 4" in said and "sync.min_quorum" in said
    browser.screenshot(tmp_path / "alone.png")
