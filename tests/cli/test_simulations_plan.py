"""`ddiloco plan`: readable, fast without a model, and clear about what was typed wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ddiloco import cli
from ddiloco.config import from_dict
from ddiloco.engines import session
from ddiloco.roles import initial

ROOT = Path(__file__).parent.parent.parent
CONFIG = f"--config={ROOT / 'configs' / 'wan.py'}"
LINK = ["--gbps=0.2", "--latency_ms=60", "--step_seconds=0.3"]
SIZE = ["plan", "--parameters=12e9", "--islands=4", "--codec=int4"]


def planned(capsys, *arguments: str) -> dict:
  assert cli.main(["plan", *arguments, "--json"]) == 0
  out, err = capsys.readouterr()
  assert err == ""
  return json.loads(out)


def test_a_configs_plan_is_of_its_real_fragments(capsys):
  found = planned(capsys, CONFIG, *LINK)
  values = cli_config()
  sizes = initial.make_plan(values).sizes
  assert found["parameters"] == sum(sizes) and found["hidden"] is True
  assert found["bytes_per_step"] == 2 * 4 * sum(sizes) / values.sync.sync_period
  assert found["findings"] == []


def cli_config():
  import runpy

  return from_dict(runpy.run_path(str(ROOT / "configs" / "wan.py"))["get_config"]())


def test_the_dry_run_says_the_same_traffic(capsys):
  found = planned(capsys, CONFIG, *LINK)
  assert f"traffic: about {found['bytes_per_step']:,.0f} bytes per step" in session.describe(
    cli_config()
  )


def test_text_names_what_does_not_fit(capsys):
  assert cli.main([*SIZE, "--gbps=0.5", "--latency_ms=30", "--step_seconds=4"]) == 0
  out, err = capsys.readouterr()
  assert err == "" and all(len(line) <= 100 for line in out.splitlines())
  for part in (
    "12,000,000,000  parameters",
    "tau = 2",
    "Fix: ",
    "sync.sync_period",
    "join seconds",
  ):
    assert part in out
  assert "Everything fits." not in out
  fields = ["--config.sync.num_fragments=96", "--config.sync.overlap_steps=3"]
  shards = ["--config.sync.num_shards=4", "--shard_gbps=50"]
  assert cli.main([*SIZE, "--gbps=2", "--step_seconds=4", *fields, *shards]) == 0
  assert capsys.readouterr().out.endswith("Everything fits.\n")


def test_what_no_bandwidth_reaches_is_null(capsys):
  found = planned(capsys, CONFIG, *LINK, "--latency_ms=500")
  assert found["peak_gbps"] is None and not found["hidden"] and found["findings"]


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--gbps=2", "--step_seconds=1"], "--config"),
    ([CONFIG, "--step_seconds=1"], "--gbps"),
    ([CONFIG, "--gbps=2"], "--step_seconds"),
    ([CONFIG, "--gbps=0", "--step_seconds=1"], "plan: --gbps=0.0: must be greater than 0. Fix:"),
    ([CONFIG, "--gbps=nan", "--step_seconds=1"], "--gbps=nan"),
    ([CONFIG, "--gbps=2", "--step_seconds=-1"], "plan: --step_seconds=-1.0: must"),
    ([CONFIG, *LINK, "--latency_ms=-3"], "plan: --latency_ms=-3.0: must not be negative. Fix:"),
    ([CONFIG, *LINK, "--merge_gbytes=0"], "plan: --merge_gbytes=0.0: must"),
    ([CONFIG, *LINK, "--codec=int3"], "plan: --codec=int3: must be one of f32, bf16"),
    ([CONFIG, *LINK, "--config.sync.push_codec=int3"], "plan: sync.push_codec = 'int3': must"),
    ([CONFIG, *LINK, "--islands=0"], "plan: --islands=0: must be greater than 0"),
    ([CONFIG, *LINK, "--config.sync.num_shards=0"], "sync.num_shards = 0"),
    ([CONFIG, *LINK, "--config.sync.num_fragmens=3"], "num_fragments"),
    ([CONFIG, *LINK, "--parameters=inf"], "--parameters=inf"),
    ([CONFIG, *LINK, "--parameters=3"], "--parameters = 3: must be at least"),
    ([CONFIG, *LINK, "--parameters=-1"], "--parameters=-1"),
    ([CONFIG, *LINK, "--parameters=1e99"], "plan: --parameters=1e+99: must lie between -2**53"),
    ([CONFIG, *LINK, "--parameters=1e300"], "plan: --parameters=1e+300: must be a finite number"),
    ([CONFIG, *LINK, "--gbps=1e-300"], "plan: --gbps=1e-300: must be at least 1e-100"),
    ([CONFIG, *LINK, "--step_seconds=1e10"], "plan: --step_seconds=10000000000.0: must be at most"),
    ([CONFIG, *LINK, "--config.sync.num_fragments=999999"], "sync.num_fragments = 999999: must"),
  ],
)
def test_what_is_typed_wrong_is_named(arguments, said, refused):
  err = refused("plan", *arguments)
  assert said in err and "Fix: " in err


def test_the_machines_own_rate_is_measured_and_used(capsys, monkeypatch):
  from ddiloco.engines import virtual

  monkeypatch.setattr(virtual, "VALUES", 1 << 21)
  monkeypatch.setattr(virtual, "REPEATS", 1)
  assert cli.main([*SIZE, "--gbps=5", "--step_seconds=4", "--measure"]) == 0
  out = capsys.readouterr().out
  [rate] = re.findall(r"This machine merges ([\d.]+) GB/s of f32 \(--merge_gbytes=\1\)", out)
  assert float(rate) > 0
