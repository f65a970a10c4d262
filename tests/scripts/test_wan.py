"""`scripts/wan.sh`: islands in network namespaces, where the kernel and our rights allow them."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from common import processes_of

from ddiloco import config
from ddiloco.observe.eventlog import Recorder
from ddiloco.protocol import events
from tests.made_events import made
from tests.models.small import num_params

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "wan.sh"
SKIPPED = 77
HERE = {**os.environ, "WAN_PYTHON": sys.executable}  # ddiloco is installed here: not once more
SMALL = """
from ddiloco import config


def get_config():
  c = config.default()
  c.model.num_layers = 1
  c.model.model_dim = 32
  c.model.num_heads = c.model.num_kv_heads = 2
  c.model.mlp_dim = 64
  c.data.source = "synthetic"
  c.data.sequence_length = 32
  c.data.heldout_sequences = 4
  c.islands.num_learners = 2
  c.islands.batch_size = 2
  c.sync.num_fragments = 4
  c.sync.sync_period = 12
  c.run.total_tokens = 2 * 200 * 2 * 32
  c.run.evaluations = 1
  c.run.sample_tokens = 0
  return c
"""


def command(tmp_path: Path, *options: str) -> list[str]:
  config = tmp_path / "small.py"
  config.write_text(SMALL)
  given = (f"--config={config}", f"--workdir={tmp_path / 'run'}", *options)
  return ["bash", str(SCRIPT), *given]


def skip_if_told(status: int | None, errors: str) -> None:
  if status == SKIPPED:
    pytest.skip(errors.strip())


@pytest.mark.slow
def test_a_run_over_long_links(tmp_path):
  slow = ("--config.islands.min_step_seconds=0.4", "--config.sync.overlap_steps=6")
  steps = f"--config.run.total_tokens={2 * 60 * 2 * 32}"
  done = subprocess.run(
    command(tmp_path, "--mbit=100", "--delay-ms=20", *slow, steps),
    capture_output=True,
    text=True,
    env=HERE,
  )
  skip_if_told(done.returncode, done.stderr)
  assert done.returncode == 0, done.stdout + done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  assert (result["mbit"], result["delay_ms"]) == (100, 20)
  for name in ("utilisation", "blocked_seconds", "bytes", "steps", "step_seconds"):
    assert set(result[name]) == {"0", "1"}
  assert all(0 < share <= 1 for share in result["utilisation"].values())
  assert result["blocked_seconds"] == {"0": 0, "1": 0}
  assert all(moved > 10_000 for moved in result["bytes"].values())
  assert result["loss"] > 0
  for who in ("planned", "virtual", *range(len(result["real"]))):
    said = result["real"][who] if isinstance(who, int) else result[who]
    assert said["sync_seconds"] > 2 * 0.4 and 0.5 <= said["participation"] <= 1
  assert len(result["real"]) == 1
  for who in ("planned", "virtual"):  # the machine may be busy; 10 % is for a calm one
    assert abs(result["error_percent"][who]["sync_seconds"]) < 35
  assert (tmp_path / "run" / "report" / "index.html").exists()
  assert not processes_of(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(tmp_path, how):
  process = subprocess.Popen(
    command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=HERE
  )
  try:
    while not (tmp_path / "run/logs/learner-1.log").exists() and process.poll() is None:
      time.sleep(0.05)
    if process.poll() is None:
      assert processes_of(tmp_path / "run")
    process.send_signal(how)
    _, errors = process.communicate()
  finally:
    process.kill()
  skip_if_told(process.returncode, errors)
  ended = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
  assert process.returncode == ended[how], errors
  while left := processes_of(tmp_path / "run"):  # a kill -9 travels on through the kernel
    time.sleep(0.05)
  assert not left


def test_overwriting_leaves_nothing_of_the_run_before(tmp_path):
  """Its snapshots stayed, and the new run went on from them."""
  run = tmp_path / "run"
  for folder in ("checkpoints", "events", "keys"):
    (run / folder).mkdir(parents=True)
  (run / "config.json").write_text("{}")
  wrong = command(tmp_path, "--overwrite", "--config.sync.num_shards=99")
  done = subprocess.run(wrong, capture_output=True, text=True, env=HERE)
  skip_if_told(done.returncode, done.stderr)
  assert "sync.num_shards = 99" in done.stderr
  assert sorted(path.name for path in run.iterdir()) == ["keys", "logs"]


@pytest.mark.slow
def test_a_role_that_fails_is_shown_and_ends_the_run(tmp_path):
  wrong = command(tmp_path, "--config.data.source=text", "--config.data.path=/nowhere/*.txt")
  done = subprocess.run(wrong, capture_output=True, text=True, env=HERE)
  skip_if_told(done.returncode, done.stderr)
  assert done.returncode == 1
  assert "ended with status" in done.stderr and "/nowhere" in done.stderr
  assert not processes_of(tmp_path / "run")


def test_without_the_right_to_make_namespaces_it_is_skipped_and_says_so(tmp_path):
  """The same where a tool is missing: here all that is on the path is bash's own company."""
  for tool in ("bash", "sed", "realpath", "dirname", "id"):
    found = shutil.which(tool)
    assert found
    (tmp_path / tool).symlink_to(found)
  done = subprocess.run(
    command(tmp_path), capture_output=True, text=True, env={"PATH": str(tmp_path)}
  )
  assert done.returncode == SKIPPED
  assert "skipped: there is no unshare here" in done.stderr


@pytest.mark.parametrize(
  "option", ["--mbit=0", "--delay-ms=-1", "--islands=0", "--repeats=0", "--speed=1"]
)
def test_wrong_options_are_named_with_their_fix(tmp_path, option):
  done = subprocess.run(command(tmp_path, option), capture_output=True, text=True)
  assert done.returncode == 2
  assert option in done.stderr and "Fix: " in done.stderr


def test_no_two_nodes_have_the_same_address():
  """Island 90 had that of shard 0."""
  functions = "".join(
    line for line in SCRIPT.read_text().splitlines(True) if "_address() {" in line
  )
  loop = "for i in {0..98}; do island_address $i; shard_address $i; done"
  done = subprocess.run(
    ["bash", "-c", functions + loop], capture_output=True, text=True, check=True
  )
  assert len({"10.0.0.1", *done.stdout.split()}) == 1 + 2 * 99


def test_more_islands_in_the_config_than_there_are_addresses_are_refused(tmp_path):
  many = command(tmp_path, "--config.islands.num_learners=100")
  done = subprocess.run(many, capture_output=True, text=True, env=HERE)
  skip_if_told(done.returncode, done.stderr)
  assert done.returncode == 2
  assert "--islands=100: must be 1 to 99, also in the config. Fix: " in done.stderr


def test_help_says_which_delay_is_meant():
  done = subprocess.run(["bash", str(SCRIPT), "--help"], capture_output=True, text=True)
  assert done.returncode == 0
  assert "ONE WAY" in done.stdout and "#" not in done.stdout


def test_the_summary_counts_time_in_steps_and_every_life_of_a_role(tmp_path):
  now = 0.0

  def clock() -> float:
    return now

  for life in (1, 2):
    with Recorder(tmp_path, "learner-0", life, 0.0, clock) as recorder:
      for _ in range(3):
        now += 1.0
        recorder.record(made(0.0, "", "step", seconds=0.6, blocked_seconds=0.25))
      for sent in (10, 20):
        recorder.record(events.Traffic(sent_bytes=sent, received_bytes=5))
  arguments = [f"--workdir={tmp_path}", "--mbit=200", "--delay_ms=60"]
  program = [sys.executable, str(ROOT / "scripts" / "wan_summary.py"), *arguments]
  done = subprocess.run(program, capture_output=True, text=True, env={**os.environ})
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout.splitlines()[-1]) == {
    "utilisation": {"0": 0.6},
    "blocked_seconds": {"0": 1.25},
    "bytes": {"0": 50},
    "steps": {"0": 6},
    "step_seconds": {"0": 0.6},
    "loss": None,
    "mbit": 200,
    "delay_ms": 60,
  }


def test_the_presets_train_one_model_in_two_ways():
  get_config = runpy.run_path(str(ROOT / "configs" / "wan.py"))["get_config"]
  apart, together = (config.from_dict(get_config(*preset)) for preset in ((), ("data_parallel",)))
  assert apart.model == together.model
  assert num_params(apart.model) == 1_820_352  # as the comment there says
  assert not apart.sync.blocking and together.sync.blocking
  assert (together.sync.sync_period, together.sync.min_quorum) == (1, 2)
  with pytest.raises(config.ConfigError, match=r"'ring'.*decoupled, data_parallel"):
    get_config("ring")
