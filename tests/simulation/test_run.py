"""Runs in virtual time: they repeat exactly, add up, overlap as on a WAN, and end as real ones."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest

from ddiloco import config as config_lib
from ddiloco.chaos import random_faults
from ddiloco.config import ConfigError, Fault
from ddiloco.core import delta
from ddiloco.observe.goodput import Ledger
from ddiloco.observe.tracks import Aftermath
from ddiloco.roles.learner import Quarantined
from ddiloco.simulation.bandwidth import PAYLOAD_SHARE, PUSH_VECTORS, STAGE_VECTORS
from ddiloco.simulation.run import Account, Speeds, VirtualRun
from ddiloco.simulation.stand_ins import VirtualIsland
from ddiloco.simulation.virtual_time import HEADER_BYTES
from tests.simulation.faulted import JudgedRun

STEP_SECONDS = 0.1
TOKENS = 4 * 16  # of a step


def make(learners: int = 3, steps: int = 60, faults=(), regions=None, **sync) -> config_lib.Config:
  c = config_lib.default()
  c.islands.update(num_learners=learners, batch_size=4)
  c.data.sequence_length = 16
  c.sync.update(num_shards=2, num_fragments=4, sync_period=8, liveness_seconds=1.0)
  c.sync.update(**sync)
  c.run.update(total_tokens=learners * steps * TOKENS, restart_seconds=0.2, max_restarts=50)
  c.chaos.faults = tuple(dataclasses.asdict(fault) for fault in faults)
  c.chaos.regions.update(regions or {})
  return config_lib.from_dict(c)


def setting(**changes) -> Speeds:
  return Speeds(**{"sizes": (1000,) * 4, "step_seconds": STEP_SECONDS, **changes})


def play(config, **changes) -> tuple[VirtualRun, list[dict]]:
  events: list[dict] = []
  run = VirtualRun(config, setting(**changes), events.append)
  assert run.finish(3600.0) == "finished"
  return run, events


def of(events: list[dict], kind: str) -> list[dict]:
  return [event for event in events if event.kind == kind]


def account(events: list[dict]):
  ledger = Ledger()
  for event in events:
    ledger.take(event)
  return ledger.report()


# --- without faults -------------------------------------------------------------------------------


def test_an_island_whose_devices_are_not_known_has_at_least_those_of_its_mesh():
  """`ddiloco simulate protocol --config=configs/moe.py:3.8b` was refused: 1 device, tensor = 4."""
  c = make(learners=2, steps=10)
  islands = dataclasses.replace(c.islands, devices=0, tensor=4)
  _, events = play(dataclasses.replace(c, islands=islands))
  started = {(each.devices, *each.mesh) for each in of(events, "started") if each.devices}
  assert started == {(4, 1, 1, 4)}


@pytest.mark.parametrize("pipelined", [False, True])
def test_no_learner_is_lost_while_it_makes_its_first_step(pipelined, monkeypatch):
  """Steps take longer than `liveness_seconds`, and before the first one ends no report comes.

  On accelerators the first one is only dispatched, and the second takes its time.
  """
  step = VirtualIsland.step

  def dispatch(island, *arguments):
    if island._updates:
      return step(island, *arguments)
    island._updates = 1
    island._world.spend(0.01)

  if pipelined:
    monkeypatch.setattr(VirtualIsland, "step", dispatch)
  kill = Fault("kill", "learner-1", at_step=20, seconds=70.0)
  config = make(faults=[kill], liveness_seconds=2.0, snapshot_steps=0)
  _, events = play(config, step_seconds=6.0)
  lost = [(e.learner, e.state) for e in of(events, "member") if e.state in ("lost", "joined")]
  shards = [(m, "joined") for m in (0, 1, 2) for _ in range(2)]
  assert sorted(lost) == sorted([*shards, *2 * [(1, "lost"), (1, "joined")]])


@pytest.mark.parametrize("quorum", [1, 2])
def test_an_island_eight_times_as_fast_as_the_others_has_its_part_to_the_end(quorum):
  """Most of the run's steps are its own; shards once believed four times, then asked it no more."""
  config = make(learners=3, steps=150, min_quorum=quorum, sync_period=24)
  paces = {str(m): {"min_step_seconds": 0.1 if m == 0 else 0.8} for m in range(3)}
  islands = dataclasses.replace(config.islands, overrides=paces)
  _, events = play(dataclasses.replace(config, islands=islands), step_seconds=0.01)
  commits = of(events, "commit")
  late = commits[len(commits) // 2 :]
  assert sum(0 in e.learners for e in late) >= 0.9 * len(late)


@pytest.mark.parametrize("made", [True, False])
def test_initial_values_are_made_or_sent_about_once(made, monkeypatch):
  """12B parameters over 2 Gbit/s: while anything gets through, the rest is not sent again."""
  monkeypatch.setattr(delta, "MADE_FROM", delta.MADE_FROM if made else 10**9)
  sync = {"num_fragments": 24, "sync_period": 24, "push_codec": "int4", "publish_codec": "int4"}
  config = make(learners=4, steps=72, liveness_seconds=2.0, **sync)
  speed = {"step_seconds": 6.0, "gbps": (2.0,), "latency_seconds": (0.03,), "shard_gbps": 100.0}
  run, events = play(config, sizes=(500_000_000,) * 24, merge_gbytes=400.0, **speed)
  whole = 4 * 24 * 500_000_000
  updates = sum(e.version > 0 for e in of(events, "commit")) * whole / 24 / 8
  for m in range(4):
    received = run.actors["learner", m].counters.received_bytes
    if made:
      assert updates <= received < 1.1 * updates
    else:
      assert whole + updates <= received < 2 * whole + updates
  assert statistics.mean(len(e.learners) for e in of(events, "commit")) > 3


def test_all_that_a_learner_in_lock_step_waits_is_booked_as_blocked():
  config = make(learners=2, steps=40, blocking=True, apply="overwrite", min_quorum=2)
  overrides = {"1": {"min_step_seconds": 0.7}}
  islands = dataclasses.replace(config.islands, overrides=overrides)
  _, events = play(dataclasses.replace(config, islands=islands), latency_seconds=(0.03,))
  for m in range(2):
    steps = [e for e in of(events, "step") if e.role == f"learner-{m}"]
    waits = [e.gap_seconds - e.seconds for e in steps]
    assert [e.blocked_seconds for e in steps] == pytest.approx(waits, abs=1e-5)
    assert (max(waits) > 1.0) == (m == 0), "the faster one waits for several signs of life"


def test_the_same_seed_is_the_same_run_to_the_last_event():
  plan = random_faults(3, 30, 5.0, 3, 2)
  first, second = (play(make(faults=plan), seed=5)[1] for _ in range(2))
  assert len(first) > 500 and first == second
  assert play(make(faults=plan), seed=6)[1] != first


def test_an_undisturbed_run_ends_with_the_tokens_merged_and_nobody_waits():
  run, events = play(make())
  assert all(f.merged_tokens >= run.config.run.total_tokens for f in run.store.values())
  assert not any(event.blocked_seconds for event in of(events, "step"))
  assert [event.time for event in events] == sorted(event.time for event in events)
  aftermath = Aftermath().read(events)
  assert aftermath.longest_stall_seconds == 0 and not aftermath.lost_rounds()
  found = account(events)
  assert found.uptime == 1.0 and found.goodput > 0.85
  assert found.goodput + sum(found.causes.values()) == pytest.approx(1.0)
  total = sum(sum(e.steps) for e in of(events, "commit"))
  sent = sum(e.steps for e in of(events, "copy_out"))
  made = 4 * len(of(events, "step"))  # each step is in four fragments
  assert total <= sent <= made and total * TOKENS == sum(
    sum(e.tokens) for e in of(events, "commit")
  )


def test_lock_step_waits_for_the_slowest():
  config = make(min_quorum=3, blocking=True)
  slow = dataclasses.replace(
    config.islands, overrides={"2": {"min_step_seconds": 2 * STEP_SECONDS}}
  )
  _, events = play(dataclasses.replace(config, islands=slow))
  blocked = {m: 0.0 for m in range(3)}
  for event in of(events, "step"):
    blocked[int(event.role[-1])] += event.blocked_seconds
  assert min(blocked[0], blocked[1]) > 0.4 * 60 * STEP_SECONDS
  assert blocked[2] < 0.1 * blocked[0]


# --- links ----------------------------------------------------------------------------------------


def sync_seconds(events: list[dict]) -> list[float]:
  cut_at, found = {}, []
  for event in events:
    if event.kind == "copy_out":
      cut_at[event.role, event.fragment, event.round] = event.time
    if event.kind == "apply" and event.included:
      key = event.role, event.fragment, event.round
      found.append(event.time - cut_at[key])
  return sorted(found)


def test_a_push_takes_its_bytes_over_the_link_and_the_latency():
  """One island, a shard at a place of its own: copy-out, up, merge, down, stage, by hand."""
  sizes, gbps, latency = (250_000,), 0.1, 0.03
  config = make(learners=1, num_shards=1, num_fragments=1, grace_safety=0.0)
  links = {"gbps": (gbps,), "latency_seconds": (latency,), "shard_gbps": 1.0}
  _, events = play(config, sizes=sizes, jitter=0.0, host_gbytes=0.02, **links)
  first = next(e for e in of(events, "push"))
  assert first.bytes == 1_000_000 + HEADER_BYTES
  cut = next(e for e in of(events, "copy_out"))
  vector, hosts = 1e6 / 4e9, 1e6 / 2e7  # seconds in which shard and learner's host touch one
  assert first.time - cut.time == pytest.approx(0.004 + PUSH_VECTORS * hosts, abs=1e-5)
  commit = next(e for e in of(events, "commit"))
  way = 8e6 / (PAYLOAD_SHARE * gbps * 1e9) + latency  # the island's link is slower, both ways
  work = vector + (2 + 4) * vector  # taken in; push twice, value and momentum in and out
  assert commit.time - first.time == pytest.approx(way + work, abs=1e-5)
  arrives = commit.time + way
  [joined] = of(events, "joined")

  def boundary(time: float) -> float:
    """The first end of a step from then on: learners look at nothing in between."""
    return joined.time + STEP_SECONDS * math.ceil((time - joined.time) / STEP_SECONDS - 1e-6)

  applied = next(e for e in of(events, "apply") if e.included)
  assert applied.time == pytest.approx(
    boundary(boundary(arrives) + 0.004 + STAGE_VECTORS * hosts), abs=1e-5
  )


def test_slow_links_make_syncs_longer_but_never_a_step():
  common = {"sizes": (100_000,) * 4, "jitter": 0.0, "shard_gbps": 100.0}
  fast = play(make(), **common)[1]
  slow = play(make(), **common, gbps=(0.01,), latency_seconds=(0.05,))[1]
  middle = [statistics.median(sync_seconds(events)) for events in (fast, slow)]
  assert middle[1] > 2 * middle[0], middle
  steps = {round(e.seconds, 6) for e in of(slow, "step")}
  assert steps == {STEP_SECONDS} and not any(e.blocked_seconds for e in of(slow, "step"))


def test_traffic_is_what_was_pushed_and_published():
  run, events = play(make())
  pushed = sum(e.bytes for e in of(events, "push"))
  counted = [run.actors["learner", m].counters.sent_bytes for m in range(3)]
  reports = 64 * 2 * len(of(events, "step"))
  assert pushed + reports <= sum(counted) <= pushed + 1.5 * reports
  assert (sum(counted) - pushed) % HEADER_BYTES == 0
  found = Account()
  for event in events:
    found.take(event)
  assert found.summary()["bytes_sent_per_learner"] == pytest.approx(statistics.mean(counted))
  last = {e.role: e.sent_bytes for e in of(events, "traffic")}
  assert last["learner-1"] == counted[1]


# --- faults ---------------------------------------------------------------------------------------

EVERY = [
  Fault("kill", "learner-1", at_seconds=2.0, seconds=1.0),
  Fault("kill", "learner-1", at_step=20, seconds=-1),
  Fault("kill", "syncer-0", at_seconds=2.0, seconds=1.0),
  Fault("stall", "learner-1", at_seconds=2.0, seconds=1.5),
  Fault("stall", "syncer-1", at_step=15, seconds=1.5),
  Fault("slow", "learner-1", at_seconds=2.0, seconds=2.0, factor=3.0),
  Fault("slow", "syncer-1", at_seconds=2.0, seconds=2.0, factor=3.0),
  Fault("join", "learner-3", at_seconds=1.0, seconds=3.0),
  Fault("join", "learner-3", at_step=10, seconds=-1),
  Fault("cut", "learner-1", at_seconds=2.0, seconds=2.0),
  Fault("cut", "region-far", at_seconds=2.0, seconds=2.0),
  Fault("drop", "syncer-0", at_seconds=2.0, seconds=2.0, share=0.7),
  Fault("delay", "learner-1", at_seconds=2.0, seconds=2.0, delay_seconds=0.4),
  Fault("duplicate", "learner-1", at_seconds=2.0, seconds=2.0),
  Fault("reorder", "learner-1", at_seconds=2.0, seconds=2.0, delay_seconds=0.3),
  Fault("corrupt", "learner-1", at_seconds=2.0, seconds=2.0, share=0.5),
  Fault("throttle", "learner-1", at_seconds=2.0, seconds=2.0, bits_per_second=1e5),
  Fault("disk", "learner-1", at_seconds=1.0, seconds=3.0),
  Fault("poison", "learner-1", at_seconds=2.0, seconds=2.0, factor=1e30),
]


@pytest.mark.parametrize("fault", EVERY, ids=lambda f: f"{f.action} {f.role} {f.at_step}")
def test_every_kind_strikes_and_the_run_goes_on(fault):
  config = make(faults=[fault], regions={"far": ("learner-1", "learner-2")}, snapshot_steps=10)
  _, events = play(config)
  struck = of(events, "fault")
  assert len(struck) == len(config.chaos.of_roles())
  assert {e.target for e in struck} == {f.role for f in config.chaos.of_roles()}
  if fault.at_seconds >= 0:
    assert all(0 <= e.time - fault.at_seconds <= 2 * STEP_SECONDS for e in struck)
  aftermath = Aftermath().read(events)
  assert not aftermath.lost_rounds() and not aftermath.unplanned()
  others = [e for e in of(events, "step") if e.role == "learner-0"]
  assert not any(e.blocked_seconds or e.gap_seconds > 0.12 for e in others)
  good = fault.action == "join" or fault.seconds >= 0
  assert all(math.isfinite(r.seconds) for r in aftermath.recoveries) == good
  _leaves_its_trace(fault, events)


def _leaves_its_trace(fault: Fault, events: list[dict]) -> None:
  mine = [e for e in of(events, "step") if e.role == fault.role]
  match fault.action, fault.role.partition("-")[0]:
    case "kill", _:
      [gone] = of(events, "exit")
      back = of(events, "restart")
      assert gone.target == fault.role and len(back) == (fault.seconds >= 0)
      assert not back or back[0].time - gone.time == pytest.approx(fault.seconds, abs=1e-5)
    case "stall", "learner":
      assert max(e.gap_seconds for e in mine) > fault.seconds
    case "slow", "learner":
      assert max(e.seconds for e in mine) >= fault.factor * STEP_SECONDS
    case "join", _:
      assert mine and (fault.seconds < 0 or mine[-1].time < 4.5)
      assert fault.seconds < 0 or any("merged" in e.reason for e in of(events, "stopped"))
    case "cut", "region":
      inside = [e for e in of(events, "commit") if 2.5 < e.time < 4.0]
      assert inside and all(set(e.weights) == {0} for e in inside)
    case (("cut" | "drop" | "corrupt" | "delay" | "throttle" | "reorder"), "learner"):
      during = [e for e in of(events, "commit") if 2.2 < e.time < 4.0]
      assert any(1 not in e.weights for e in during)
    case "disk", _:
      assert {e.role for e in of(events, "unsaved")} == {"learner-1"}
    case "poison", _:
      assert any("1" in {str(m) for m in e.rejected} for e in of(events, "commit"))


def test_a_killed_learner_comes_back_with_its_part_of_the_newest_snapshot():
  kill = Fault("kill", "learner-1", at_step=40, seconds=0.5)
  _, events = play(make(faults=[kill], snapshot_steps=10))
  [restored] = of(events, "restored")
  assert restored.role == "learner-1" and restored.snapshot >= 2
  assert restored.snapshot in [e.snapshot for e in of(events, "snapshot")]


@pytest.mark.parametrize("rejoin", ["peer", "own", "fresh"])
def test_who_comes_into_a_run_begins_as_the_config_says(rejoin):
  faults = [
    Fault("kill", "learner-1", at_step=30, seconds=0.5),
    Fault("join", "learner-3", at_step=20, seconds=-1),
  ]
  config = make(faults=faults, snapshot_steps=10)
  checkpoint = dataclasses.replace(config.checkpoint, rejoin=rejoin)
  _, events = play(dataclasses.replace(config, checkpoint=checkpoint))
  assert len(of(events, "joined")) == 5
  assert len(of(events, "restored")) == (rejoin != "fresh")
  moments = [e.role for e in of(events, "inherited")]
  assert sorted(set(moments)) == (["learner-1", "learner-3"] if rejoin == "peer" else [])
  assert len(moments) == (8 if rejoin == "peer" else 0), "of every fragment, for both"


def test_a_run_whose_tokens_are_merged_ends_without_who_is_down_by_plan():
  _, events = play(make(faults=[Fault("kill", "learner-1", at_step=40, seconds=3600.0)]))
  assert events[-1].time < 100 and not of(events, "restart")


def test_a_run_of_a_single_token_syncs_every_fragment():
  """In lock-step; shards believed no step of it, and the learner waited for ever."""
  config = make(learners=1, blocking=True, num_fragments=6, sync_period=4, overlap_steps=1)
  config = dataclasses.replace(config, run=dataclasses.replace(config.run, total_tokens=1))
  _, events = play(config, sizes=(1000,) * 6)
  assert len(of(events, "commit")) >= 6


def test_an_island_of_small_batches_that_is_left_alone_ends_the_run():
  """Shards believed so many steps as larger batches need, then asked it no more: for ever."""
  config = make(learners=2, steps=8, faults=[Fault("kill", "learner-1", at_step=3, seconds=-1)])
  batches = {"1": {"batch_size": 128}}
  config = dataclasses.replace(
    config,
    islands=dataclasses.replace(config.islands, overrides=batches),
    run=dataclasses.replace(config.run, total_tokens=8 * 132 * 16),
  )
  _, events = play(config)
  assert of(events, "step")[-1].global_step > 16 * 8


def test_a_learner_that_joins_with_a_larger_batch_than_all_others_is_merged():
  config = make(learners=2, faults=[Fault("join", "learner-2", at_step=5, seconds=-1)])
  batches = {str(m): {"batch_size": 1} for m in range(2)}
  islands = dataclasses.replace(config.islands, overrides=batches)
  _, events = play(dataclasses.replace(config, islands=islands))
  assert not of(events, "rejected")
  assert any(2 in event.learners for event in of(events, "commit"))


def test_a_run_whose_quorum_has_left_has_failed():
  faults = [
    Fault("join", "learner-2", at_seconds=1.0, seconds=2.0),
    Fault("kill", "learner-1", at_seconds=2.0, seconds=-1),
  ]
  events: list[dict] = []
  config = make(learners=2, steps=10**6, min_quorum=2, faults=faults)
  assert VirtualRun(config, setting(), events.append).finish(3600.0) == "failed"
  assert events[-1].time < 100


def test_a_run_that_takes_longer_than_it_may_is_stopped():
  assert VirtualRun(make(steps=10**6), setting(), lambda event: None).finish(10.0) == "stopped"


def test_a_learner_that_has_left_joins_again():
  joins = [Fault("join", "learner-3", at_seconds=at, seconds=2.0) for at in (1.0, 6.0)]
  _, events = play(make(steps=120, faults=joins, snapshot_steps=10))
  assert [e.time for e in of(events, "fault")] == pytest.approx([1.0, 6.0], abs=0.2)
  first, second = [e for e in of(events, "joined") if e.role == "learner-3"]
  assert second.incarnation > first.incarnation and not of(events, "exit")
  assert any(e.time > second.time and 3 in e.weights for e in of(events, "commit"))


def test_an_island_that_is_quarantined_now_and_then_is_not_given_up():
  config = make(steps=1000)
  config = dataclasses.replace(config, run=dataclasses.replace(config.run, max_restarts=1))
  run = VirtualRun(config, setting(step_seconds=50.0), lambda event: None)
  for _ in range(3):
    run.run(run.now + 200.0)  # healthy work
    run.ended(run.actors["learner", 1], Quarantined("three bad pushes"))
  run.run(run.now + 200.0)
  assert ("learner", 1) in run.actors


def test_a_shard_that_is_gone_for_good_fails_the_run():
  events: list[dict] = []
  kill = Fault("kill", "syncer-1", at_step=10, seconds=-1)
  assert VirtualRun(make(faults=[kill]), setting(), events.append).finish(100.0) == "failed"
  assert events[-1].kind == "run_finished" and events[-1].reason == "failed"


# --- what a ledger of single steps says -----------------------------------------------------------


@pytest.mark.parametrize("apply", ["rebase", "overwrite"])
def test_under_random_faults_no_step_is_merged_twice_and_none_vanishes(apply):
  kinds = ("kill", "stall", "slow", "cut", "drop", "delay", "duplicate", "reorder")
  plan = random_faults(11, 25, 8.0, 3, 2, kinds)
  config = make(steps=100, faults=plan, apply=apply, snapshot_steps=12)
  events: list[dict] = []
  run = JudgedRun(config, setting(), events.append)
  assert run.finish(3600.0) == "finished"
  assert len(of(events, "fault")) >= 20 and len(run.ledger.contents) > 50
  for p, f in run.store.items():
    assert f.merged_tokens == TOKENS * len(run.ledger.contents[p, f.last_round])


def test_what_cannot_be_simulated_says_so():
  with pytest.raises(ConfigError, match=r"sync\.num_shards"):
    VirtualRun(make(num_shards=0), setting(), print)
  with pytest.raises(ConfigError, match=r"simulate\.jitter = inf: must be a finite number"):
    setting(jitter=math.inf)  # its first step would never end
  with pytest.raises(ConfigError, match=r"gbps.*has 2 values for 3 learners"):
    VirtualRun(make(), setting(gbps=(1.0, 2.0)), print)
