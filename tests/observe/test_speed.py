"""Tokens a second and chip, and MFU: by the formula where all is known, nowhere else."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from ddiloco.config import ModelConfig
from ddiloco.dashboard.status import exposition, status
from ddiloco.models.transformer import language_model
from ddiloco.observe.live import plain_line, render, scalars
from ddiloco.observe.report import key_numbers, numbers
from ddiloco.observe.run_state import RunState
from ddiloco.training.devices import PEAK_FLOPS

# Every step 1024 tokens in 0.5 s on 4 chips: 512 tokens a second and chip.
FLOPS, PEAK = 6e9, 12.8e12
MFU = 512 * FLOPS / PEAK


def events(make, flops=(FLOPS, FLOPS), peaks=(PEAK, PEAK), steps=4):
  """Two islands of four chips."""
  yield make.run_started(num_learners=2)
  for m, (flop, peak) in enumerate(zip(flops, peaks)):
    more = {"flops_per_token": flop, "peak_flops_per_second": peak}
    yield make.event(0.5, f"learner-{m}", "started", devices=4, **more)
  for n in range(1, steps + 1):
    for m in range(2):
      fields = {"tokens": 1024, "seconds": 0.4, "gap_seconds": 0.5}
      yield make.step(1 + 0.5 * n, m, n, **fields)


def test_an_islands_speed_now(make):
  run = RunState().read(events(make))
  speed = run.islands[0].speed
  assert speed.tokens_per_second == pytest.approx(2048)
  assert speed.per_chip == pytest.approx(512) and speed.mfu == pytest.approx(MFU)
  assert speed.text() == "2.0k tokens/s, 512 a chip, 24.0% MFU"
  assert run.speed(3.0).text() == "4.1k tokens/s, 512 a chip, 24.0% MFU"
  assert run.speed(60.0).text() == "", "all have been silent for long"
  step = max(e.step for e in events(make) if e.kind == "step" and e.role == "learner-0")
  slow = make.step(run.islands[0].alive_at + 1.0, 0, step + 1, tokens=1024)
  found = run.read([slow]).islands[0].speed.tokens_per_second
  assert found == pytest.approx(0.8 * 2048 + 0.2 * 1024), "one slow step is a fifth of it"


def test_a_restored_island_is_not_a_thousand_times_as_fast(make):
  """An accelerator's first step is logged when it has begun, after milliseconds. In a later life,
  which does not count its steps from 1, that was the island's speed for dozens of steps."""
  steps = [(10.001, 501, 1e-3), (12.0, 502, 2.0), (14.0, 503, 2.0), (16.0, 504, 2.0)]
  run = RunState().read([make.run_started(), make.event(5.0, "learner-0", "started", 1, devices=4)])
  for time, n, seconds in steps:
    run.add(make.step(time, 0, n, 1, tokens=1000, seconds=seconds, gap_seconds=seconds))
    island = run.islands[0]
    speeds = [island.tokens_per_second, 1000 * island.steps_per_second, island.usual_rate]
    assert all(each == pytest.approx(500, rel=1e-2) for each in speeds if math.isfinite(each))
  assert all(map(math.isfinite, speeds))
  assert {*run.curves.page.means("step 0")} == {None, 2.0}, "nor is it in the map of step times"


def test_the_present_seconds_of_a_step_are_without_waits_for_a_shard(make):
  def shown(*steps, more=()):
    run = RunState().read([make.run_started(), *steps, *more])
    return status(run, run.time)["islands"][0]

  waits = [make.step(n, 0, n, gap_seconds=1.0, blocked_seconds=0.5) for n in range(1, 12)]
  assert shown(*waits)["step_seconds"] == pytest.approx(0.5)
  slow = [
    make.step(11.0 + 2 * n, 0, 11 + n, gap_seconds=2.0, data_seconds=2.0) for n in range(1, 17)
  ]
  found = shown(*waits, *slow)
  assert found["step_seconds"] == pytest.approx(1 / (2 * 0.8**16 + 0.5 * (1 - 0.8**16)))
  assert found["starved"]
  again = [make.event(28.0, "learner-0", "started", 1), make.step(28.1, 0, 19, 1)]
  assert shown(*waits, more=again)["step_seconds"] is None, "on an accelerator it has only begun"
  again += [make.step(30.1, 0, 20, 1, gap_seconds=2.0)]
  assert shown(*waits, more=again)["step_seconds"] == pytest.approx(2.0), "of its present life"
  endless = make.step(3.0, 0, 2, seconds=math.inf)
  assert shown(waits[0], endless)["step_seconds"] is None
  over = make.event(50.0, "engine", "run_finished", reason="stopped")
  found = shown(*waits, *slow, more=[over])
  assert (found["step_seconds"], found["starved"]) == (None, False)


@pytest.mark.parametrize(
  "flops, peaks", [((FLOPS, FLOPS), (PEAK, 0.0)), ((FLOPS, 0.0), (PEAK, PEAK))]
)
def test_what_is_not_known_of_one_island_is_not_made_up_for_all(make, flops, peaks):
  run = RunState().read(events(make, flops, peaks))
  assert math.isnan(run.usual_speed.mfu) and run.usual_speed.per_chip == pytest.approx(512)
  assert run.islands[0].usual_speed.mfu == pytest.approx(MFU)
  assert math.isnan(run.islands[1].usual_speed.mfu)
  assert "MFU" not in run.speed(3.0).text() and "512 a chip" in run.speed(3.0).text()


def test_the_usual_speed_is_that_on_the_chips_an_island_has_now(make):
  """8 chips at a second a step, then 4 at two: 128 tokens a second and chip on both, not 256."""
  log, at = [], 0.0
  for life, (chips, seconds, steps) in enumerate(((8, 1.0, 90), (4, 2.0, 10))):
    more = {"devices": chips, "flops_per_token": FLOPS, "peak_flops_per_second": PEAK}
    more["device_kind"] = "TPU v5p"
    log.append(make.event(at + 0.5, "learner-0", "started", life, **more))
    for n in range(steps):
      at += seconds
      fields = {"tokens": 1024, "seconds": seconds, "gap_seconds": seconds}
      log.append(make.step(at + 0.5, 0, 90 * life + n + 1, incarnation=life, **fields))
  found = numbers(RunState().read(log))
  assert found["tokens_per_second_per_chip"] == pytest.approx(128)
  assert found["learners"]["0"]["mfu"] == pytest.approx(128 * FLOPS / PEAK)
  again = make.event(at + 1.0, "learner-0", "started", 2, **more)
  assert numbers(RunState().read([*log, again]))["tokens_per_second_per_chip"] == pytest.approx(128)


def test_an_island_of_a_log_that_begins_late_has_no_chips(make):
  run = RunState().read([make.step(1.0 + n, 0, n) for n in range(3)])
  assert math.isnan(run.islands[0].speed.per_chip) and run.islands[0].speed.tokens_per_second > 0
  beside = [each for each in events(make) if each.role == "learner-1"]
  assert math.isnan(run.read(beside).usual_speed.per_chip), "nor is it divided by another's alone"


def test_it_is_in_every_place_that_lists_speeds(make):
  run = RunState().read(events(make))
  screen = io.StringIO()
  Console(file=screen, width=100).print(render(run, 3.0, 100))
  assert screen.getvalue().count("24.0%") == 3 and "MFU" in screen.getvalue()  # all, and each
  assert "4.1k tokens/s, 512 a chip, 24.0% MFU" in plain_line(run, 3.0)
  summary = numbers(run)
  assert summary["mfu"] == summary["learners"]["1"]["mfu"] == pytest.approx(MFU)
  assert summary["tokens_per_second_per_chip"] == pytest.approx(512)
  assert dict(key_numbers(summary))["MFU"] == "24.0%"
  said = status(run, 3.0)
  assert said["mfu"] == said["islands"][0]["mfu"] == pytest.approx(MFU)
  assert said["islands"][1]["tokens_per_second_per_chip"] == 512
  metrics = exposition(said)
  assert "ddiloco_run_mfu_ratio 0.24\n" in metrics
  assert 'ddiloco_island_mfu_ratio{island="1"} 0.24\n' in metrics
  assert 'ddiloco_island_tokens_per_second_per_chip{island="0"} 512.0\n' in metrics


def test_an_island_that_came_back_on_other_devices_names_both(make):
  started = [
    make.event(0.1 + n, "learner-0", "started", incarnation=n, devices=n + 1, device_kind=kind)
    for n, kind in enumerate(("TPU v5p", "NVIDIA H100 80GB HBM3"))
  ]
  run = RunState().read([make.run_started(num_learners=1), *started])
  kinds = ["TPU v5p", "NVIDIA H100 80GB HBM3"]
  (island,) = status(run, 2.0)["islands"]
  assert (island["chips"], island["chip_kinds"]) == (2, kinds)
  summary = numbers(run)["learners"]["0"]
  assert (summary["chips"], summary["chip_kinds"]) == (2, kinds)


def test_where_the_peak_is_unknown_no_place_has_an_mfu(make):
  run = RunState().read(events(make, peaks=(0.0, 0.0)))
  screen = io.StringIO()
  Console(file=screen, width=100).print(render(run, 3.0, 100))
  assert "MFU" not in screen.getvalue() and "512 a chip" in screen.getvalue()
  assert "MFU" not in dict(key_numbers(numbers(run)))
  assert "mfu_ratio" not in exposition(status(run, 3.0))


def test_tensorboard_has_it_for_the_incarnation_that_started(make):
  started, *_, step = list(events(make))[1:]
  _, values = scalars(step, started)
  assert values["train/tokens_per_second_per_chip"] == pytest.approx(1024 / 0.4 / 4)
  assert values["train/mfu"] == pytest.approx(1024 / 0.4 / 4 * FLOPS / PEAK)
  assert "train/mfu" not in scalars(step)[1]
  assert scalars(started)[1] == {}


def test_a_dense_model_on_a_known_chip():
  """6 x parameters that are multiplied + 6 x L x H x Q x T, against the chip's peak."""
  model = ModelConfig(
    num_layers=2, model_dim=8, num_heads=2, num_kv_heads=2, head_dim=4, mlp_dim=16
  )
  weights = 2 * (4 * 8 * 8 + 3 * 8 * 16) + 8 * model.vocab_size
  assert language_model(model).flops_per_token(10) == 6 * weights + 6 * 2 * 2 * 4 * 10
  assert PEAK_FLOPS["TPU v6 lite"] == 918e12 and "cpu" not in PEAK_FLOPS
