"""The benchmarks run, and their last line is one JSON object with the promised names."""

import json
import math
import os
from importlib.util import find_spec

import in_process
import jax
import numpy as np
import pytest

from ddiloco.roles import initial
from ddiloco.training import step
from ddiloco.training.island import Island
from tests.scripts import commands

RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs ddiloco[ray]")
CODECS = {"f32", "bf16", "int8", "int4"}
PROMISED = {
  "bench_accelerator.py": {"two_islands", "100k", "attention", "overhead", "copies"},
  "bench_checkpoint.py": {
    *("step_ratio", "worst_step_ratio", "save_gbps", "restore_gbps", "copy_gbps"),
    *("rejoin", "resume_seconds"),
  },
  "bench_history.py": {"events_per_second", "peak_mb", "start_mb", "seconds", "bytes", "events"},
  "bench_hosts.py": {"ratio", "rounds_per_step", "calls"},
  "bench_kill.py": {"survivor_step_ratio", "survivor_max_gap_ratio", "rejoin_seconds", "kills"},
  "bench_overhead.py": {"ratio", "blocked_seconds"},
  "bench_shard.py": {
    *("together_merged", "after_pause_merged", "control_ms_while_merging", "commit_vs_copy"),
    *("sync_seconds", "bytes_per_parameter", "buddy_bytes_vs_publish", "extra_fragments"),
    *("int4_encode_gbps", "int4_decode_gbps"),
  },
  "bench_stale.py": {"regression", "text", "worst"},
  "bench_transport.py": {"gbps", "plain_vs_socket", "secured_gbps", "control_rtt_ms_under_load"},
  "bench_wire.py": {"bytes_per_step", "versus_data_parallel", "framing_overhead"},
}
# Their steps are few, and what they compile is a whole island's, in each of its processes.
FEW_STEPS = {f"bench_{name}.py" for name in ("accelerator", "checkpoint", "hosts", "kill")}
HISTORY = "bench_history.py"
LINES = [
  *(f"{name} --cpu" if "accelerator" in name else name for name in PROMISED if name != HISTORY),
  pytest.param("bench_overhead.py --engine=ray", marks=RAY),
]


def keeps_its_promise(script, result):
  assert PROMISED[script] <= result.keys()
  for name in PROMISED[script]:
    each = result[name]
    assert each if isinstance(each, dict) else math.isfinite(each)


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_quick_run_prints_the_promised_numbers(line):
  script = line.split()[0]
  result = commands.result(line, "--quick", optimized=script not in FEW_STEPS)
  keeps_its_promise(script, result)
  if script == "bench_overhead.py":
    assert result["blocked_seconds"] == 0 and result["rounds"] > 0
  if script == "bench_hosts.py":
    assert result["same_step"] and result["calls"] > 0 and 0 < result["rounds_per_step"] < 1.2
  if script == "bench_shard.py":
    assert result["together_merged"] == result["after_pause_merged"] == 1
    assert result["called_lost"] == 0 and result["buddy_bytes_vs_publish"] <= 1.1
  if script == "bench_stale.py":
    found = [each["kept"] for name in ("regression", "text") for each in result[name].values()]
    assert all(each["discarded"] > 0.9 and each["worst"] < 0.01 for each in found)
  if script == "bench_transport.py":
    assert set(result["gbps"]) == {
      *("socket", "in_process", "plain", "secured_1", "secured_2", "secured_4")
    }
    if os.geteuid() == 0:
      assert math.isfinite(result["control_rtt_ms_slow_link"])
  if script == "bench_wire.py":
    sizes = result["bytes_per_step"]
    assert set(sizes) == set(result["versus_data_parallel"]) == CODECS
    assert sizes["f32"] > sizes["bf16"] > sizes["int8"] > sizes["int4"] > 0


@pytest.fixture(scope="module")
def histories():
  """What every reader, in a process of its own, says of a short run and of a longer one."""
  found = {}
  for size in ("--quick", "--events=60000"):  # quick: 10,000
    for line in commands.said(HISTORY, size).splitlines():
      found.setdefault(json.loads(line)["reader"], []).append(json.loads(line))
  return found


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["report", "dashboard", "resume"])
def test_reading_a_longer_run_takes_no_more_memory(reader, histories):
  """Held in memory, the events that the longer run has more would be 50 MB."""
  short, long = histories[reader]
  keeps_its_promise(HISTORY, short)
  assert long["bytes"] > 5.8 * short["bytes"]
  assert long["peak_mb"] < short["peak_mb"] + 20


def test_every_benchmark_is_tested_here():
  assert {path.name for path in commands.SCRIPTS.glob("bench_*.py")} == set(PROMISED)


@pytest.mark.skipif(jax.__version_info__ < (0, 10, 2), reason="CPUs place nothing there")
def test_bare_steps_run_where_a_captured_state_lies_in_the_host_s_memory(script, monkeypatch):
  """As on accelerators, whose steps take no array from there."""
  bench = script("bench_overhead")
  monkeypatch.setattr(step, "host_memory", lambda device: "pinned_host")
  config = bench.make_config(quick=True)
  island = Island(config, 0, jax.devices()[:1], initial.make_plan(config))
  island.load(initial.initial_params(config))
  before = island.params_on_host()
  bench.bare_step(island)(in_process.batches(config)[0])
  after = island.params_on_host()
  assert all(np.array_equal(before[name], after[name]) for name in before), "it has a copy"
