"""`ddiloco trace` prints all operations in order and what does not fit; `replay` refuses that."""

import collections
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddiloco import cli, environment
from ddiloco.config import Config
from ddiloco.protocol.events import LOG_FORMAT
from ddiloco.trace import text
from ddiloco.trace.check import check
from ddiloco.trace.operations import INITIAL, Trace, makes, needs
from tests.trace.traces import Logs, find, good, typed


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
  """These calls share the tests' process, whose devices are made already."""
  monkeypatch.setattr(environment, "prepare", lambda **settings: pytest.fail("no device is needed"))


def write(workdir: Path, logs: Logs) -> Path:
  (workdir / "events").mkdir(parents=True)
  (workdir / "config.json").write_text(Config().to_json())
  for role, events in logs.items():
    events = [{"format": LOG_FORMAT, **event} for event in events]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (workdir / "events" / f"{role}.jsonl").write_text(lines)
  return workdir


def run(capsys, *arguments: object) -> tuple[int, list[str]]:
  status = cli.main([str(a) for a in arguments])
  out, err = capsys.readouterr()
  assert err == ""
  return status, out.splitlines()


def test_a_good_trace_is_printed_in_order_and_its_invariants_hold(tmp_path, capsys):
  logs = good()
  status, lines = run(capsys, "trace", f"--workdir={write(tmp_path, logs)}")
  assert status == 0
  end = lines.index("Invariants: all hold")
  printed = [line for line in lines[:end] if line]
  moved = [e for events in logs.values() for e in events if e["kind"] != "stopped"]
  assert len(printed) == len(moved)
  times = [float(line.split(" s ")[0]) for line in printed]
  assert times == sorted(times)
  assert any(
    re.search(r"learner-1\.1 +copy_out +fragment 0, round 3, .*steps 5, tokens 50", x)
    for x in printed
  )
  assert any("restored  snapshot 1, of_incarnation 0" in line for line in printed)
  assert any("16 steps of 2 learners in 3 incarnations" in line for line in lines[end:])


def test_one_role_is_printed_in_its_own_order_and_all_are_checked(tmp_path, capsys):
  logs = good()
  logs["learner-1"][3]["time"] = 0.0  # another host's clock
  find(logs, "syncer-0", "commit", round=2)["version"] = 7
  status, lines = run(capsys, "trace", f"--workdir={write(tmp_path, logs)}", "--role=learner-1")
  printed = lines[: lines.index("Invariants: VIOLATED") - 1]
  assert status == 1 and all(" learner-1." in line for line in printed)
  steps = [int(found[1]) for line in printed if (found := re.search(r" step +step (\d+),", line))]
  assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
  violated = [line for line in lines if line.startswith("violated: ")]
  assert violated[0].startswith("violated: syncer-0, incarnation 0, line 6: version 7 follows 2")


def test_a_broken_trace_is_not_replayed(tmp_path, capsys):
  logs = good()
  logs["learner-1"].remove(find(logs, "learner-1", "copy_out", round=3))
  status, lines = run(capsys, "replay", f"--workdir={write(tmp_path, logs)}", "--cpu")
  assert status == 1
  assert any("needs push 3 of fragment 0 by learner-1 (incarnation 1)" in line for line in lines)


def test_a_torn_end_is_no_problem(tmp_path, capsys):
  workdir = write(tmp_path, good())
  with (workdir / "events" / "learner-1.jsonl").open("a") as log:
    log.write('{"time": 99.0, "role": "learner-1", "incar')
  assert run(capsys, "trace", f"--workdir={workdir}")[0] == 0


def written(logs: Logs, rng: random.Random) -> list[str]:
  """In which order the roles may have written their lines: each after what it needs."""
  left = {role: collections.deque(events) for role, events in typed(logs).items()}
  made, order = set(), []
  while able := [
    role
    for role, events in left.items()
    if events and all(key in made or key.number == INITIAL for key in needs(events[0]))
  ]:
    order.append(rng.choice(able))
    made.update(makes(left[order[-1]].popleft()))
  assert not any(left.values())
  return order


class Growing:
  """Logs that grow while they are looked at, in this order of lines; `sizes` is `text._sizes`."""

  def __init__(self, workdir: Path, order: list[str], rng: random.Random):
    self.lines = {path: path.read_bytes().splitlines(True) for path in text.logs_in(workdir)}
    self.order, self.rng, self.now = order, rng, rng.randrange(len(order))
    self.first: dict[str, int] = {}  # lines of each role that were there at the first look

  def sizes(self, workdir: Path) -> dict[Path, int]:
    """Between two files some lines come; the last one may be half written."""
    found = {}
    for path, lines in self.lines.items():
      self.now = min(len(self.order), self.now + self.rng.randrange(6))
      whole = self.order[: self.now].count(path.stem)
      self.first.setdefault(path.stem, whole)
      part = self.rng.randrange(len(lines[whole])) if whole < len(lines) else 0
      found[path] = sum(map(len, lines[:whole])) + part
    return found


def looked_at(workdir: Path, order: list[str], seed: int, monkeypatch) -> tuple[Trace, dict]:
  """The trace of a run that goes on meanwhile, and how many lines each role had at first."""
  growing = Growing(workdir, order, random.Random(seed))
  monkeypatch.setattr(text, "_sizes", growing.sizes)
  return text.read_trace(workdir), growing.first


def test_a_run_under_way_violates_nothing(tmp_path, monkeypatch):
  """Its newest lines need what came after another log had been read."""
  left_out, logs, workdir = 0, good(), write(tmp_path, good())
  for seed in range(200):
    trace, first = looked_at(workdir, written(logs, random.Random(seed)), seed, monkeypatch)
    assert check(trace).problems == (), seed
    for role, lines in first.items():
      there = [event["kind"] for event in logs[role][:lines] if event["kind"] != "stopped"]
      kept = [entry.operation.kind for entry in trace.roles.get(role, ())]
      assert kept[: len(there)] == there, "what was there at first is checked"
    left_out += trace.left_out > 0
  assert left_out > 10


def test_what_is_lost_is_violated_also_while_the_run_goes_on(tmp_path, monkeypatch):
  logs, found = good(), 0
  lost = logs["learner-1"].index(find(logs, "learner-1", "copy_out", round=0))
  commit = logs["syncer-0"].index(find(logs, "syncer-0", "commit", round=0))
  orders = [written(logs, random.Random(seed)) for seed in range(50)]
  del logs["learner-1"][lost]
  workdir = write(tmp_path, logs)
  for seed, order in enumerate(orders):
    del order[[i for i, role in enumerate(order) if role == "learner-1"][lost]]
    trace, first = looked_at(workdir, order, seed, monkeypatch)
    if first["syncer-0"] > commit:
      assert "needs push 0 of fragment 0 by learner-1" in "".join(check(trace).problems)
      found += 1
  assert found > 10


def test_what_is_not_known_yet_is_said(tmp_path, capsys, monkeypatch):
  workdir, logs = write(tmp_path, good()), good()
  sizes = text._sizes(workdir)
  shard, learner = (workdir / "events" / f"{role}.jsonl" for role in ("syncer-0", "learner-1"))
  commit = logs["syncer-0"].index(find(logs, "syncer-0", "commit", round=3))
  without = {shard: sum(map(len, shard.read_bytes().splitlines(True)[:commit]))}
  looks = iter([sizes | without | {learner: 0}, sizes | without])
  monkeypatch.setattr(text, "_sizes", lambda workdir: next(looks))
  status, lines = run(capsys, "trace", f"--workdir={workdir}")
  assert status == 0 and "Invariants: all hold" in lines
  assert lines[-1].startswith("not known yet, and left out: the newest 3 operations")


@pytest.mark.parametrize("command", ["trace", "replay"])
def test_what_is_no_run_is_said(command, tmp_path, refused):
  assert "holds no run" in refused(command, f"--workdir={tmp_path}")
  (tmp_path / "config.json").write_text(Config().to_json())
  assert "its run has no events" in refused(command, f"--workdir={tmp_path}")


@pytest.mark.parametrize("command", ["trace", "replay"])
def test_a_log_that_may_not_be_read_is_said(command, tmp_path, refused, monkeypatch):
  """Of another user, for example; it was a traceback."""
  workdir = write(tmp_path, good())

  def denied(path, *_):
    raise PermissionError(13, "Permission denied", str(path))

  monkeypatch.setattr(text, "lines_of", denied)
  said = refused(command, f"--workdir={workdir}")
  for part in ("Permission denied", "learner-0.jsonl", "Fix: make it readable"):
    assert part in said


def test_an_unknown_role_is_said(tmp_path, refused):
  write(tmp_path, good())
  said = refused("trace", f"--workdir={tmp_path}", "--role=learner-9")
  assert "Fix: use one of learner-0, learner-1, syncer-0" in said


def test_a_reader_that_has_enough_may_go(tmp_path):
  """`ddiloco trace | head`: no traceback, and no JAX was needed for it."""
  logs = good()
  tail = [{**logs["learner-1"][-2], "step": 3 + i, "global_step": 13 + i} for i in range(1, 3000)]
  logs["learner-1"] += [{**e, "position": e["global_step"]} for e in tail]
  code = (
    "import sys; from ddiloco import cli; status = cli.main(); assert 'jax' not in sys.modules;"
  )
  command = [sys.executable, "-c", f"{code} sys.exit(status)", "trace"]
  with subprocess.Popen(
    [*command, f"--workdir={write(tmp_path, logs)}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
  ) as process:
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0
