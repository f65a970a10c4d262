"""`ddiloco simulate protocol`: a config's run in virtual time, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddiloco import cli
from ddiloco.engines import virtual
from ddiloco.observe.eventlog import read_events

SMALL = [
  *("simulate", "protocol", "--config=configs/quickstart.py", "--parameters=6000"),
  *("--config.run.total_tokens=120000", "--step_seconds=0.1"),
]


def test_json_is_one_object_and_the_same_again(capsys):
  found = []
  for _ in range(2):
    assert cli.main([*SMALL, "--json", "--seed=3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found.append(json.loads(out))
    found[-1].pop("wall_seconds")
  assert found[0] == found[1]
  assert found[0]["reason"] == "finished" and found[0]["merged_tokens"] >= 120_000
  assert found[0]["uptime"] == 1.0 and 0 < found[0]["goodput"] <= 1
  assert found[0]["learners"] == 4 and found[0]["blocked_seconds"] == 0


def test_the_text_says_what_the_json_says_and_why_rounds_committed(capsys):
  assert cli.main([*SMALL, "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert cli.main(SMALL) == 0
  out = capsys.readouterr().out
  said = {line[22:]: line[:20].strip() for line in out.splitlines()}
  assert said["steps"] == f"{found['steps']:,}" and said["commits"] == f"{found['commits']:,}"
  assert (
    said["participation"] == f"{found['participation']:.4f}".rstrip("0").rstrip(".")
    and said["lost rounds"] == "0"
  )
  assert sum(found["causes"].values()) + found["goodput"] == pytest.approx(1, abs=1e-4)
  assert sum(found["committed_because"].values()) == found["commits"]
  for why, count in found["committed_because"].items():
    assert said[f"  {why.replace('_', ' ')}"] == f"{count:,}"


def test_a_workdir_in_a_bucket_is_refused(tmp_path, monkeypatch, capsys):
  """It made a folder "gs:" here."""
  command = [*SMALL, f"--config={Path('configs/quickstart.py').absolute()}"]
  monkeypatch.chdir(tmp_path)
  assert cli.main([*command, "--workdir=gs://bucket/run"]) == 2
  assert "--workdir = 'gs://bucket/run': must be a folder of a file system" in (
    capsys.readouterr().err
  )
  assert not [*tmp_path.iterdir()]


def test_a_plan_file_strikes_and_a_workdir_gets_the_events(tmp_path, capsys):
  chaos = "--config.chaos=configs/chaos/scavenge.py"
  workdir = tmp_path / "run"
  more = ["--config.run.total_tokens=600000", chaos, f"--workdir={workdir}"]
  assert cli.main([*SMALL, *more, "--json", "--gbps=1,1,1,1,0.5,0.5,0.5"]) == 0
  found = json.loads(capsys.readouterr().out)
  events = read_events(workdir)
  assert found["faults"] == 3 == sum(e.kind == "fault" for e in events)
  assert {e.role for e in events} >= {"learner-4", "learner-5", "learner-6"}
  assert (workdir / "config.json").exists()


@pytest.mark.slow
def test_many_islands_with_stragglers_and_faults(capsys, monkeypatch):
  """As `configs/thousands.py` with its thousands does, until its last fault is over."""
  monkeypatch.setattr(virtual, "TELL_SECONDS", 0.0)
  arguments = [
    *("simulate", "protocol", "--config=configs/thousands.py:100", "--parameters=100000000"),
    *("--gbps=5", "--latency_ms=30", "--shard_gbps=500", "--merge_gbytes=20000", "--json"),
    "--config.run.total_tokens=1200000",
  ]
  assert cli.main(arguments) == 0
  out, err = capsys.readouterr()
  found = json.loads(out)
  assert found["reason"] == "finished" and found["learners"] == 100
  assert found["faults"] > 15 and found["lost_rounds"] == found["unplanned"] == 0
  assert found["uptime"] > 0.999 and found["longest_stall_seconds"] < 2.0
  lines = err.splitlines()
  assert len(lines) == found["commits"] and "s of virtual time" in lines[-1]


def test_a_run_that_fails_has_status_1(tmp_path, capsys):
  plan = tmp_path / "plan.py"
  plan.write_text(
    "from ddiloco import config\n\n\ndef get_config():\n  c = config.default().chaos\n"
    "  c.faults = ({'action': 'kill', 'role': 'syncer-0', 'at_step': 9, 'seconds': -1},)\n"
    "  return c\n"
  )
  assert cli.main([*SMALL, f"--config.chaos={plan}"]) == 1
  assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("arguments", "names"),
  [
    (["simulate", "protocol"], ["--config", "Fix"]),
    ([*SMALL, "--gbps=fast"], ["--gbps = 'fast'", "Fix"]),
    ([*SMALL, "--gbps=1,2"], ["simulate: --gbps=1,2: has 2 values for 4 learners"]),
    ([*SMALL, "--gbps=inf"], ["simulate: --gbps=inf: must be a finite number"]),
    ([*SMALL, "--latency_ms=-1"], ["simulate: --latency_ms=-1: must not be negative", "Fix"]),
    ([*SMALL, "--parameters=2"], ["--parameters = 2", "num_fragments"]),
    ([*SMALL, f"--parameters={10**30}"], [f"--parameters={10**30}: must lie between"]),
    ([*SMALL, "--gbps=1e200"], ["simulate: --gbps=1e200: must be a finite number", "Fix"]),
    ([*SMALL, "--config.sync.num_shards=0"], ["sync.num_shards", "Fix"]),
    ([*SMALL, "--step_seconds=0"], ["simulate: --step_seconds=0.0: must", "Fix"]),
    ([*SMALL, "--step_seconds=inf"], ["--step_seconds=inf", "Fix"]),
    ([*SMALL, "--jitter=inf"], ["--jitter=inf", "Fix"]),
    (["simulate", "weather"], ["chips, protocol"]),
  ],
  ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_errors_say_what_to_type(arguments, names, refused):
  err = refused(*arguments)
  assert all(name in err for name in names), err


def test_help_names_the_flags(capsys):
  assert cli.main(["simulate", "protocol", "--help"]) == 0
  out = capsys.readouterr().out
  assert all(f"--{name}" in out for name in ("gbps", "latency_ms", "workdir", "step_seconds"))
