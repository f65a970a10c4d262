"""A plan fits or it does not, says so in plain words, and its fixes are fixes."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ddiloco.config import ConfigError, SyncConfig
from ddiloco.core import codec
from ddiloco.simulation import bandwidth, planner
from ddiloco.simulation.bandwidth import PAYLOAD_SHARE
from ddiloco.simulation.planner import Setting

# Four regions, a 12B model in 96 fragments, int4, one shard in each region.
SYNC = SyncConfig(
  num_shards=4,
  num_fragments=96,
  sync_period=24,
  overlap_steps=4,
  push_codec="int4",
  publish_codec="int4",
)
REGIONS = Setting((125_000_000,) * 96, SYNC, 4, step_seconds=4, gbps=5, latency_seconds=0.03)


def changed(setting: Setting, **fields) -> Setting:
  """The setting with other fields, of its own or of its sync."""
  own = {f.name for f in dataclasses.fields(Setting)}
  sync = dataclasses.replace(setting.sync, **{k: v for k, v in fields.items() if k not in own})
  return dataclasses.replace(setting, sync=sync, **{k: v for k, v in fields.items() if k in own})


@st.composite
def any_setting(draw):
  sizes = tuple(draw(st.lists(st.integers(1, 10**9), min_size=1, max_size=8)))
  sync = SyncConfig(
    num_fragments=len(sizes),
    num_shards=draw(st.integers(1, len(sizes))),
    sync_period=draw(st.integers(5, 100)),
    overlap_steps=draw(st.integers(0, 4)),
    blocking=draw(st.booleans()),
    push_codec=draw(st.sampled_from(codec.CODECS)),
    publish_codec=draw(st.sampled_from(codec.CODECS)),
  )
  return Setting(
    sizes,
    sync,
    islands=draw(st.integers(1, 9)),
    step_seconds=draw(st.floats(0.01, 20)),
    gbps=draw(st.floats(0.01, 1000)),
    latency_seconds=draw(st.floats(0, 0.3)),
    momentum=draw(st.booleans()),
    shard_gbps=draw(st.sampled_from([0.0, 1.0, 100.0])),
  )


def test_hand_made_values():
  sync = SyncConfig(num_shards=2, num_fragments=2, sync_period=10, overlap_steps=3)
  setting = Setting((1000, 500), sync, 2, 0.1, gbps=1e-3, latency_seconds=0.01, merge_gbytes=1e-3)
  plan = planner.make(setting)
  # Island 0 pushes fragment 1 (2000 bytes), publishes fragment 0 (4000) and copies it (4000).
  # Of a link of 125 kB/s, headers leave less.
  rate = 125_000 * PAYLOAD_SHARE
  assert plan.average_gbps == pytest.approx(8 * 10_000 / PAYLOAD_SHARE / 1e9)
  assert plan.link_load == pytest.approx(10_000 / rate)
  assert plan.exchanged.per_step(sync) == 2 * 6000 / 10
  # Fragment 0: 4000 bytes to the shard, to its buddy and back. One learner copies out in the middle
  # of a step; whose report began the round, 10 ms there and back before the end of one. The host
  # touches 4 vectors at 4 GB/s, and 3 at the end; taking in the last push touches a vector and the
  # commit 6 (2 pushes twice, the value in and out), at 1 MB/s. Two hops of 10 ms for
  # learners, two for the buddy.
  way = 4000 / rate
  seconds = (0.03, 4e-6, way, 0.028, way, way, 3e-6, 0.04)
  assert dataclasses.astuple(plan.sync) == pytest.approx(seconds)
  # 90 ms away: the pull comes when most of the reporter's second step is over.
  assert planner.make(changed(setting, latency_seconds=0.09)).sync.copy_outs == pytest.approx(0.03)
  peak = 1e-3 * 3 * way / (0.3 - 0.068 - 0.03 - 7e-6)
  assert plan.overlap_steps == 2 and plan.peak_gbps == pytest.approx(peak)
  assert plan.core_load == pytest.approx(4000 * (2 + 6) / 1e6 / 1.0)
  assert plan.host_load == pytest.approx(7 * 6000 / 4e9 / 1.0)
  # Asked a moment after it is due, who was not the one to report copies out in half a step or so.
  assert 10.2 < plan.period_steps < 10.8 and plan.utilisation == 1
  assert 2.7 < plan.applied_steps < 3.1 and 0.85 < plan.participation < 1
  # In lock-step all copy out together, and tau hides the sync, but not the way to the shard and
  # back until the pull is here. Three hops are after the commit; the rest is a mean over the two
  # fragments.
  lock_step = planner.make(changed(setting, blocking=True))
  assert (lock_step.applied_steps, lock_step.utilisation) == (3, pytest.approx(1 / 1.04))
  assert lock_step.round_seconds == pytest.approx(0.75 * (4e-6 + way + 0.028) + 0.01)
  assert lock_step.delivery_seconds == pytest.approx(0.75 * 2 * way + 0.03)
  # State, copies of the neighbour's values, and a round: two pushes and the result.
  assert plan.memory_bytes == 4000 + 2000 + (2 * 4000 + 4000)
  lossy = changed(setting, publish_codec="int8", momentum=True)
  # Value, published value, momentum, 1000 codes and 4 scales; of the neighbour's, the last three.
  rounds = 2 * 4000 + 3 * 4000
  assert planner.make(lossy).memory_bytes == 3 * 4000 + 1016 + 2 * 2000 + rounds
  alone = planner.make(changed(setting, num_shards=1, merge_gbytes=1e-5))  # 4 s: both are under way
  assert alone.sync.total > 0.5 and alone.memory_bytes == 2 * 6000 + 2 * 2 * 4000
  # One of two is under way, but a snapshot may still have the values that both had before.
  one = changed(setting, num_shards=1)
  assert planner.make(one).memory_bytes == 2 * 6000 + 2 * 4000
  assert planner.make(changed(one, snapshot_steps=0)).memory_bytes == 6000 + 4000 + 2 * 4000
  assert plan.join_seconds == pytest.approx(6000 / rate + 0.01)
  narrow = planner.make(changed(setting, shard_gbps=5e-4))  # the larger fragment is one shard's
  assert narrow.join_seconds == pytest.approx(4000 / (rate / 2) + 0.01)
  assert narrow.link_load == pytest.approx(3 * 4000 / (rate / 2)), "two learners and the buddy"
  assert plan.least_shards == 1 and planner.findings(setting, plan) == []


def test_what_is_missing_stretches_the_period_or_makes_lock_step_wait():
  sync = SyncConfig(num_shards=1, num_fragments=2, sync_period=10, overlap_steps=1)
  # An island sends 1 MB in a period of 1 s over 4 Mbit/s; the shard's own link is no limit.
  setting = Setting((125_000, 125_000), sync, 2, 0.1, gbps=0.004, shard_gbps=8.0, merge_gbytes=1e6)
  plan = planner.make(setting)
  assert plan.link_load == pytest.approx(2 / PAYLOAD_SHARE)
  assert plan.sync.total == pytest.approx(2 / PAYLOAD_SHARE + 0.05, rel=1e-3)
  assert plan.applied_steps > 21 and plan.utilisation == 1  # and asked at once again
  assert plan.applied_steps < plan.period_steps < plan.applied_steps + 1
  # A push or publish of 0.5 MB takes 1 s: two syncs of 2 s less 0.1 s that tau hides, beside 1 s.
  plan = planner.make(changed(setting, blocking=True))
  assert plan.sync.total == pytest.approx(2 / PAYLOAD_SHARE, rel=1e-3)
  share = 1 / (1 + 2 * (2 / PAYLOAD_SHARE - 0.1))
  assert (plan.period_steps, plan.utilisation) == (10, pytest.approx(share, rel=1e-3))
  # In small fragments tau hides every sync, and still there are not enough bytes in a second.
  small = {"sizes": (12_500,) * 20, "num_fragments": 20, "overlap_steps": 9, "blocking": True}
  plan = planner.make(changed(setting, **small))
  assert plan.sync.total < 0.9 and plan.utilisation == pytest.approx(0.5 * PAYLOAD_SHARE)
  # As little helps where a learner's host takes longer for its vectors than the period has.
  slow = {**small, "blocking": False, "gbps": 8.0, "host_gbytes": 2e-3}
  plan = planner.make(changed(setting, **slow))
  assert plan.period_steps == pytest.approx(10 * plan.host_load) and plan.host_load > 3
  # Faster links, but so far away that one sync takes longer than the period: two hops until all
  # are asked, two for push and publish, two ends of steps.
  far = dataclasses.replace(setting, gbps=8.0, latency_seconds=1.0)
  plan = planner.make(far)
  assert plan.link_load < 1 and plan.period_steps == pytest.approx(42, abs=1)
  # Smaller fragments are back sooner, and what counts is the link.
  plan = planner.make(changed(setting, sizes=(12_500,) * 20, num_fragments=20))
  assert plan.period_steps == pytest.approx(20 / PAYLOAD_SHARE)


@given(any_setting(), st.floats(1.01, 50))
def test_more_bandwidth_is_never_worse(setting, factor):
  slow = planner.make(setting)
  wide = dataclasses.replace(
    setting, gbps=setting.gbps * factor, shard_gbps=setting.shard_gbps * factor
  )
  fast = planner.make(wide)
  assert fast.link_load == pytest.approx(slow.link_load / factor)
  assert fast.sync.total <= slow.sync.total
  assert fast.utilisation >= slow.utilisation
  assert fast.exchanged == slow.exchanged and fast.core_load == slow.core_load


@given(any_setting())
def test_the_peak_is_the_bandwidth_at_which_tau_just_hides_a_sync(setting):
  plan = planner.make(setting)
  assume(math.isfinite(plan.peak_gbps) and plan.peak_gbps > 0)
  factor = plan.peak_gbps / setting.gbps
  there = dataclasses.replace(setting, gbps=plan.peak_gbps, shard_gbps=setting.shard_gbps * factor)
  total = planner.make(there).sync.total
  assert total == pytest.approx(setting.overlap_seconds, rel=1e-6, abs=1e-9)


@given(any_setting())
def test_utilisation_falls_only_where_learners_wait_and_words_follow_numbers(setting):
  plan = planner.make(setting)
  assert 0 < plan.utilisation <= 1
  if not setting.sync.blocking:
    assert plan.utilisation == 1
  loads = plan.link_load, plan.core_load, plan.host_load
  fits = max(loads) <= 1 and plan.overlap_steps <= setting.sync.overlap_steps
  assert fits == (planner.findings(setting, plan) == [])
  if plan.least_shards is not None:
    enough = planner.make(changed(setting, num_shards=plan.least_shards))
    assert enough.link_load <= 1 and enough.core_load <= 1


@given(any_setting())
def test_its_fixes_are_fixes(setting):
  plan = planner.make(setting)
  for finding in planner.findings(setting, plan):
    for name, value in re.findall(r"sync\.(\w+) (?:=|to) (\d+)", finding):
      better = planner.make(changed(setting, **{name: int(value)}))
      if name == "overlap_steps":
        assert better.sync.total <= setting.step_seconds * int(value) * (1 + 1e-9)
      elif finding.startswith("The busiest link"):
        assert better.link_load <= 1 + 1e-9
      elif finding.startswith("A shard"):
        assert better.core_load <= 1 + 1e-9
      elif finding.startswith("A learner's host"):
        assert better.host_load <= 1 + 1e-9


def test_more_shards_are_a_fix_of_merging_where_no_number_is_enough_for_the_links():
  setting = changed(REGIONS, gbps=0.1, num_shards=1)
  plan = planner.make(setting)
  assert plan.least_shards is None and plan.link_load > 1
  (merging,) = (f for f in planner.findings(setting, plan) if f.startswith("A shard"))
  assert "sync.num_shards = " in merging


def test_one_shard_is_a_fix_where_the_copies_for_buddies_are_what_is_too_much():
  sync = SyncConfig(num_shards=2, num_fragments=2, sync_period=10, overlap_steps=9)
  setting = Setting((1000, 1000), sync, 2, 0.1, gbps=8e-5)  # of 12 kB, of which 4 kB are copies
  link = planner.findings(setting, planner.make(setting))[0]
  assert "busy 126% of the time" in link and "sync.num_shards = 1" in link


def test_int4_is_a_fix_for_the_links_where_it_is_not_set_and_more_shards_where_they_help():
  for name, gbps in (("int4", 0.1), ("int8", 0.1), ("int4", 1.0)):
    setting = changed(REGIONS, gbps=gbps, num_shards=1, push_codec=name)
    (link,) = (f for f in planner.findings(setting, planner.make(setting)) if "link" in f[:20])
    assert ("int4" in link) == (name == "int8") and ("num_shards" in link) == (gbps == 1.0)


def test_one_island_beside_its_shard_needs_no_link():
  alone = bandwidth.sync_time(changed(REGIONS, islands=1), 1_000_000)
  assert alone.push == alone.copy == alone.publish == alone.latency == 0.0 < alone.merge


def test_smaller_codecs_move_less():
  needed = [
    planner.make(changed(REGIONS, push_codec=name, publish_codec=name, num_shards=1)).average_gbps
    for name in ("int4", "int8", "bf16", "f32")
  ]
  assert needed == sorted(needed) and needed[-1] / needed[0] == pytest.approx(32 / 4.125, rel=1e-3)


def test_twelve_billion_over_four_regions():
  """Fits 5 Gbit/s at 4 s a step, and 2 as well: a copy for a buddy is one publish more."""
  plan = planner.make(REGIONS)
  assert planner.findings(REGIONS, plan) == []
  bare = planner.make(changed(REGIONS, num_shards=4, shard_gbps=50.0, gbps=2.0))
  assert bare.average_gbps == pytest.approx(12e9 * 4.125 / 24 / 4 / 1e9 / PAYLOAD_SHARE, rel=1e-3)
  narrow = planner.make(changed(REGIONS, gbps=2.0))
  assert narrow.link_load < 0.5


def test_what_tau_does_not_hide_is_said_in_plain_words():
  setting = changed(REGIONS, gbps=2.0, shard_gbps=20.0, overlap_steps=0)
  text = " ".join(planner.findings(setting, planner.make(setting)))
  assert re.search(r"tau = 0 steps hide 0 s of a sync's [\d.]+ s\.", text)
  assert re.search(r"No learner waits, but a version is [23](\.\d)? steps old", text)
  assert "discards" not in text
  assert "raise sync.overlap_steps to 2" in text
  for apply in ("overwrite", "mix"):
    discarding = changed(setting, apply=apply)
    text = " ".join(planner.findings(discarding, planner.make(discarding)))
    assert f"{apply} discards work of those steps" in text
  blocking = changed(setting, blocking=True)
  text = " ".join(planner.findings(blocking, planner.make(blocking)))
  assert "All islands wait: they compute" in text


def test_a_window_smaller_than_the_link_is_said():
  setting = changed(REGIONS, latency_seconds=0.5, window_bytes=1 << 20)
  (text,) = planner.findings(setting, planner.make(setting))
  assert "more than the 1.0 MB that" in text and "network.streams" not in text, "64 are too few"
  near = changed(setting, latency_seconds=0.05)
  (text,) = planner.findings(near, planner.make(near))
  assert f"network.streams = {math.ceil(PAYLOAD_SHARE * 5e8 / 8 / (4 << 20))}, or raise" in text
  narrow = changed(near, shard_gbps=0.01)  # Mbit/s: 125 kB are under way
  assert "until an answer is back" not in " ".join(planner.findings(narrow, planner.make(narrow)))


@pytest.mark.parametrize(
  ("fields", "said"),
  [
    ({"gbps": 0.0}, "plan.gbps = 0.0"),
    ({"islands": 0}, "plan.islands = 0"),
    ({"latency_seconds": -1.0}, "plan.latency_seconds = -1.0"),
    ({"step_seconds": math.nan}, "plan.step_seconds = nan"),
    ({"merge_gbytes": 0.0}, "plan.merge_gbytes = 0.0"),
    ({"sizes": (1, 2)}, "plan.sizes = (1, 2)"),
    ({"num_shards": 0}, "sync.num_shards = 0"),
  ],
)
def test_nonsense_is_refused_by_name(fields, said):
  with pytest.raises(ConfigError) as caught:
    changed(REGIONS, **fields)
  assert said in str(caught.value) and "Fix: " in str(caught.value)
