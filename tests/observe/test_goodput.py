"""The goodput ledger: scenarios with known answers, and no second lost or doubled."""

from __future__ import annotations

import math
import random

import pytest

from ddiloco.observe.goodput import CAUSES, Ledger
from ddiloco.protocol.events import Event
from tests.made_events import made

END = 100.0


class Log:
  """Writes the events of a run in which steps take a second, and keeps them in order."""

  def __init__(self, learners: int = 1, fragments: int = 2, shards: int = 1):
    self.events: list[Event] = []
    fields = {"num_learners": learners, "num_fragments": fragments, "num_shards": shards}
    self.add(0.0, "engine", "run_started", **fields)

  def add(self, time: float, role: str, kind: str, **fields) -> None:
    self.events.append(made(time, role, kind, **fields))

  def start(self, time: float, m: int = 0, devices: int = 1) -> None:
    self.add(time, f"learner-{m}", "started", devices=devices)
    self.add(time, f"learner-{m}", "joined")

  def steps(self, first: int, last: int, at: float, m: int = 0, **fields) -> float:
    """Steps `first` to `last`, from `at` on; returns when the last ended."""
    for number in range(first, last + 1):
      gap = fields.get("gap_seconds", 1.0)
      at += gap
      defaults = {"seconds": 1.0, "gap_seconds": gap, "blocked_seconds": 0.0}
      self.add(at, f"learner-{m}", "step", step=number, **{**defaults, **fields})
    return at

  def merge(self, time: float, p: int, round_id: int, base: int, steps: dict[int, int], bad=()):
    """Every learner of `steps` cuts so many steps; the round commits but for the `bad` ones."""
    for m, count in steps.items():
      self.add(time, f"learner-{m}", "copy_out", fragment=p, round=round_id, steps=count)
    good = {str(m): 1.0 for m in steps if m not in bad}
    fields = {"fragment": p, "round": round_id, "base_round": base, "weights": good}
    self.add(time, "syncer-0", "commit", **fields, rejected={str(m): "far" for m in bad})

  def report(self):
    ledger = Ledger()
    for event in sorted(self.events, key=lambda e: e.time):
      ledger.take(event)
    goodput = ledger.report()
    assert goodput.goodput + sum(goodput.causes.values()) == pytest.approx(1.0)
    assert min(goodput.causes.values()) >= 0 and set(goodput.causes) == set(CAUSES)
    return goodput


@pytest.fixture
def log() -> Log:
  """Of an island that is there from the beginning, with a model of one fragment."""
  log = Log(fragments=1)
  log.start(0.0)
  return log


def test_a_step_counts_for_each_fragment_that_merged_it():
  log = Log(fragments=2)
  log.start(0.0)
  end = log.steps(1, 10, 0.0)
  log.merge(end, 0, 7, -1, {0: 10})
  assert log.report().goodput == pytest.approx(0.5)
  log.merge(end, 1, 8, -1, {0: 4})  # an overwrite would have cut the rest of them
  goodput = log.report()
  assert goodput.goodput == pytest.approx(0.5 + 0.2)


def test_what_is_not_merged_is_pending_and_is_discarded_with_its_life(log):
  log.merge(log.steps(1, 4, 0.0), 0, 7, -1, {0: 4})
  end = log.steps(5, 10, 4.0)
  assert log.report().causes["pending"] == pytest.approx(0.6)
  log.add(end + 2, "engine", "exit", target="learner-0")
  log.add(end + 6, "engine", "restart", target="learner-0")
  log.start(end + 8)  # 2 s of imports
  log.steps(1, 2, end + 8)
  log.merge(end + 10, 0, 8, 7, {0: 2})
  goodput = log.report()
  share = {cause: round(20 * s, 6) for cause, s in goodput.causes.items() if s}
  # Six steps, and two seconds in the middle of one, went with the first life.
  assert share == {"discarded": 8, "down": 4, "rejoin": 2}
  assert goodput.goodput == pytest.approx(6 / 20)
  assert goodput.uptime == pytest.approx(12 / 20)
  assert goodput.learners[0].liveness == pytest.approx(12 / 20)


def test_a_revived_learner_may_still_merge_the_steps_of_the_life_it_goes_on_from(log):
  log.steps(1, 10, 0.0)
  log.add(10.0, "engine", "exit", target="learner-0")
  log.add(10.0, "engine", "restart", target="learner-0")
  log.start(10.0)
  end = log.steps(7, 8, 10.0)  # its part was recorded after step 6
  log.merge(end, 0, 7, -1, {0: 8})
  goodput = log.report()
  assert goodput.goodput == pytest.approx(8 / 12)
  assert goodput.causes["discarded"] == pytest.approx(4 / 12)


def test_a_step_that_is_made_again_after_its_merge_may_be_merged_again(log):
  log.merge(log.steps(1, 10, 0.0), 0, 7, -1, {0: 10})
  log.add(10.0, "engine", "exit", target="learner-0")
  log.add(10.0, "engine", "restart", target="learner-0")
  log.start(10.0)
  log.steps(6, 8, 10.0)  # its part was recorded after step 5
  assert log.report().causes["pending"] == pytest.approx(3 / 13)


def test_a_push_that_is_sent_again_for_another_round_is_merged_by_that(log):
  at = log.steps(1, 10, 0.0)
  log.add(at, "learner-0", "copy_out", fragment=0, round=7, steps=10)
  log.add(at, "learner-0", "resend", fragment=0, old_round=7, round=8)
  log.add(at, "syncer-0", "commit", fragment=0, round=8, base_round=-1, weights={"0": 1.0})
  assert log.report().goodput == pytest.approx(1.0)


def test_an_island_that_steps_is_not_down_whatever_its_log_lacks(log):
  log.steps(1, 10, 0.0)
  log.add(10.0, "engine", "exit", target="learner-0")
  log.steps(11, 14, 12.0)
  log.steps(15, 15, 17.0)  # a second between two steps
  seconds = {cause: 18 * share for cause, share in log.report().causes.items() if share}
  assert seconds == pytest.approx({"pending": 15.0, "down": 2.0, "other": 1.0})


def test_a_push_of_a_life_before_settles_no_step_of_this_one(log):
  log.steps(1, 12, 0.0)
  log.add(10.0, "learner-0", "copy_out", fragment=0, round=7, steps=10)
  log.add(12.0, "engine", "exit", target="learner-0")
  log.add(12.0, "engine", "restart", target="learner-0")
  log.start(12.0)
  log.steps(6, 6, 12.0)  # its part was recorded after step 5
  log.add(13.0, "syncer-0", "commit", fragment=0, round=7, base_round=-1, weights={"0": 1.0})
  log.merge(log.steps(7, 8, 13.0), 0, 8, 7, {0: 3})
  log.steps(9, 10, 15.0)
  found = log.report()
  assert 17 * found.goodput == pytest.approx(13)
  assert 17 * found.causes["pending"] == 17 * found.causes["discarded"] == pytest.approx(2)


def test_an_island_without_which_a_killed_run_goes_on_has_no_time_any_more():
  log = Log(learners=2, fragments=1)
  for m in range(2):
    log.start(0.0, m)
    log.steps(1, 10, 0.0, m)
  log.add(30.0, "engine", "run_started", num_learners=1, num_fragments=1, num_shards=1)
  log.start(30.0)
  log.steps(11, 20, 30.0)
  found = log.report().learners
  assert [found[m].chip_seconds for m in range(2)] == pytest.approx([40.0, 10.0])
  assert [found[m].liveness for m in range(2)] == pytest.approx([0.5, 1.0])


def test_a_step_that_is_told_after_its_islands_end_does_not_bring_it_back(log):
  """Killed for good, it was said to spend the rest of the run with copies and applies."""
  log.steps(1, 9, 0.0)
  log.add(10.0, "engine", "exit", target="learner-0")
  log.steps(10, 10, 9.0)  # another host's log, which came late
  log.add(20.0, "engine", "run_finished", reason="finished")
  seconds = {cause: 20 * share for cause, share in log.report().causes.items() if share}
  assert seconds == pytest.approx({"pending": 9.0, "discarded": 1.0, "down": 10.0})


def test_an_overwrite_gives_up_what_it_covers(log):
  log.steps(1, 6, 0.0)
  log.add(6.0, "learner-0", "apply", fragment=0, mode="halve")
  assert log.report().causes["pending"] == pytest.approx(1.0)
  log.add(6.0, "learner-0", "apply", fragment=0, mode="overwrite")
  assert log.report().causes["discarded"] == pytest.approx(1.0)
  log.merge(log.steps(7, 10, 6.0), 0, 7, -1, {0: 4})
  goodput = log.report()
  assert goodput.goodput == pytest.approx(0.4) and goodput.causes["discarded"] == pytest.approx(0.6)


def test_an_answer_to_an_older_push_brings_back_nothing_that_is_settled(log):
  log.steps(1, 4, 0.0)
  log.add(4.0, "learner-0", "copy_out", fragment=0, round=7, steps=4)
  log.steps(5, 8, 4.0)
  log.add(8.0, "learner-0", "apply", fragment=0, mode="overwrite")
  log.steps(9, 10, 8.0)
  log.add(10.0, "syncer-0", "commit", fragment=0, round=7, base_round=-1, weights={"0": 1.0})
  found = log.report()
  seconds = [10 * share for share in (found.goodput, found.causes["discarded"])]
  assert [*seconds, 10 * found.causes["pending"]] == pytest.approx([4, 4, 2])


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_rejected_update_is_no_goodput(fragments):
  log = Log(learners=2, fragments=fragments)
  for m in range(2):
    log.start(0.0, m)
    log.steps(1, 10, 0.0, m)
  for p in range(fragments):
    log.merge(10.0, p, 7, -1, {0: 10, 1: 10}, bad=(1,) if p == 0 else ())
  for m in range(2):
    log.steps(11, 15, 10.0, m)
  goodput, lost = log.report(), 10 / fragments
  assert [15 * goodput.learners[m].goodput for m in range(2)] == pytest.approx([10, 10 - lost])
  seconds = {cause: 30 * share for cause, share in goodput.causes.items() if share}
  assert seconds == pytest.approx({"rejected": lost, "pending": 10})


def test_what_a_restored_shard_rolled_back_counts_again_only_when_it_is_regained(log):
  log.merge(log.steps(1, 5, 0.0), 0, 7, -1, {0: 5})
  log.merge(log.steps(6, 10, 5.0), 0, 8, 7, {0: 5})
  assert log.report().goodput == pytest.approx(1.0)
  log.add(10.0, "syncer-0", "owns", fragment=0, round=7)
  goodput = log.report()
  assert goodput.goodput == pytest.approx(0.5) and goodput.causes["discarded"] == pytest.approx(0.5)
  log.add(10.0, "syncer-0", "regained", fragment=0, round=8)
  assert log.report().goodput == pytest.approx(1.0)


def test_chips_are_the_weights():
  log = Log(learners=2, fragments=1)
  log.start(0.0, 0, devices=3)
  log.start(0.0, 1)
  for m in range(2):
    log.steps(1, 10, 0.0, m)
  log.merge(10.0, 0, 7, -1, {0: 10})
  assert log.report().goodput == pytest.approx(0.75)


def test_the_beginning_is_split_into_start_up_and_compile():
  log = Log(fragments=1)
  log.add(9.0, "learner-0", "compiled", target="learner-0", seconds=4.0)
  log.start(10.0, devices=2)
  log.merge(log.steps(1, 10, 10.0), 0, 7, -1, {0: 10})
  goodput = log.report()
  assert goodput.causes["start_up"] == pytest.approx(6 / 20)
  assert goodput.causes["compile"] == pytest.approx(4 / 20)
  assert goodput.goodput_training == pytest.approx(1.0) and goodput.uptime == 1.0


def test_a_program_that_is_compiled_in_the_middle_of_training_is_named(log):
  log.steps(1, 4, 0.0)
  log.add(6.0, "learner-0", "compiled", target="learner-0", seconds=1.5, program="jit(own)")
  log.steps(5, 5, 4.0, gap_seconds=3.0)  # of its two seconds beside the step
  log.steps(6, 6, 7.0)
  log.merge(8.0, 0, 7, -1, {0: 6})
  goodput = log.report()
  seconds = {cause: round(8 * share, 6) for cause, share in goodput.causes.items() if share}
  assert seconds == {"compile": 1.5, "other": 0.5}
  assert goodput.goodput_training == pytest.approx(6 / 8), "it is no first life's start"


def test_an_input_pipeline_that_starves_its_island_is_no_stall(log):
  log.steps(1, 5, 0.0)
  log.steps(6, 10, 5.0, gap_seconds=31.0, data_seconds=30.0)
  log.merge(160.0, 0, 7, -1, {0: 10})
  goodput = log.report()
  assert goodput.causes["data"] == pytest.approx(150 / 160)
  assert goodput.goodput == pytest.approx(10 / 160) and goodput.learners[0].liveness == 1.0


def test_waiting_saving_and_standing_still_have_names(log):
  log.steps(1, 20, 0.0)
  log.steps(21, 21, 20.0, gap_seconds=3.0, blocked_seconds=1.5, data_seconds=0.5)
  log.add(23.0, "learner-0", "captured", seconds=0.5)
  log.steps(22, 22, 23.0, gap_seconds=2.0)  # half of its second was no copying
  log.steps(23, 23, 25.0, gap_seconds=31.0)  # stopped between two steps
  log.steps(24, 24, 56.0, gap_seconds=31.0, seconds=31.0)  # and in the middle of one
  log.merge(87.0, 0, 7, -1, {0: 24})
  goodput = log.report()
  seconds = {cause: round(87 * share, 6) for cause, share in goodput.causes.items() if share}
  assert seconds == {"blocked": 1.5, "data": 0.5, "save": 0.5, "stalled": 59, "other": 1.5}
  assert goodput.goodput == pytest.approx(24 / 87)


def test_long_steps_of_an_accelerator_are_no_stall(log):
  """The first one is logged when it has begun. Beside its milliseconds every later one stood still,
  to the end of the run: its goodput and uptime were zero."""
  at = log.steps(1, 1, 0.0, seconds=0.01, gap_seconds=0.01)
  at = log.steps(2, 21, at, seconds=6.0, gap_seconds=6.0)
  log.merge(at, 0, 7, -1, {0: 21})
  goodput = log.report()
  assert not goodput.causes["stalled"]
  assert goodput.goodput == goodput.uptime == pytest.approx(1.0)


def test_an_island_that_becomes_slow_for_good_does_not_stand_still_for_ever(log):
  at = log.steps(1, 20, 0.0)
  log.steps(21, 120, at, seconds=30.0, gap_seconds=30.0)
  assert 0.1 < log.report().causes["stalled"] < 0.2


def test_a_pause_of_a_second_is_no_stall_however_short_steps_are(log):
  at = log.steps(1, 20, 0.0, seconds=0.05, gap_seconds=0.05)
  log.steps(21, 21, at, seconds=0.05, gap_seconds=1.05)
  causes = log.report().causes
  assert causes["other"] == pytest.approx(1.0 / 2.05) and not causes["stalled"]


def test_where_nobody_syncs_a_step_counts_until_it_is_done_again():
  log = Log(shards=0, fragments=0)
  log.start(0.0)
  log.steps(1, 10, 0.0)
  log.add(10.0, "engine", "exit", target="learner-0")
  log.add(10.0, "engine", "restart", target="learner-0")
  log.start(10.0)
  log.steps(5, 14, 10.0)
  goodput = log.report()
  assert goodput.goodput == pytest.approx(14 / 20)
  assert goodput.causes["discarded"] == pytest.approx(6 / 20)


def test_a_whole_run_that_was_killed_was_down(log):
  log.merge(log.steps(1, 10, 0.0), 0, 7, -1, {0: 10})
  log.add(10.5, "syncer-0", "traffic")  # in the middle of a step, the last that is heard of the run
  log.add(15.0, "engine", "run_started", num_learners=1, num_fragments=1, num_shards=1)
  log.start(16.0)
  log.steps(1, 4, 16.0)
  log.merge(20.0, 0, 8, 7, {0: 4})
  found = log.report()
  seconds = {cause: 20 * share for cause, share in found.causes.items() if share}
  assert seconds == pytest.approx({"discarded": 0.5, "down": 4.5, "rejoin": 1.0})
  assert found.uptime == pytest.approx(14 / 20)


def test_while_it_runs_time_goes_on_and_afterwards_it_does_not(log):
  log.merge(log.steps(1, 10, 0.0), 0, 7, -1, {0: 10})
  ledger = Ledger()
  for event in log.events:
    ledger.take(event)
  assert ledger.report(20.0).goodput == ledger.report(20.0).uptime == pytest.approx(0.5)
  ledger.take(made(12.0, "engine", "run_finished", reason="finished"))
  assert ledger.report(20.0).goodput == pytest.approx(10 / 12)
  assert ledger.report(20.0).uptime == 1.0, "up to the last step"
  ledger.take(made(12.5, "learner-0", "traffic"))
  assert ledger.report(20.0).chip_seconds == pytest.approx(12.0)
  # The last line of an island whose clock is ahead brings its time back, but no more than that.
  ledger.take(made(13.0, "learner-0", "step", step=11, seconds=1.0, gap_seconds=1.0))
  assert ledger.report(20.0).chip_seconds == ledger.report().chip_seconds == pytest.approx(13.0)


def test_roles_that_nobody_supervises_have_a_ledger_too():
  log = Log(fragments=2)
  log.events.clear()  # no engine says that a run has started
  for p in range(2):
    log.add(0.0, "syncer-0", "owns", fragment=p, round=-1)
  log.start(1.0)
  log.merge(log.steps(1, 10, 1.0), 0, 7, -1, {0: 10})
  goodput = log.report()
  assert goodput.goodput == pytest.approx(0.5) and goodput.chip_seconds == pytest.approx(10.0)
  ledger = Ledger()
  for event in log.events:
    ledger.take(event)
  assert ledger.report(15.0).chip_seconds == pytest.approx(14.0), "nobody says that it is over"


def test_nothing_is_known_of_an_empty_run():
  assert math.isnan(Ledger().report().goodput) and math.isnan(Ledger().report().uptime)


@pytest.mark.parametrize("seed", range(20))
def test_all_chip_time_is_accounted_for_whatever_happens(seed):
  """Random lives of three islands: the accounts add up to the time there was, to the second."""
  rng = random.Random(seed)
  log, chips, last, rounds = Log(learners=3), [rng.randint(1, 4) for _ in range(3)], {}, {}
  for m in range(3):
    now, step = rng.uniform(0, 3), 0
    while now < END - 10:
      log.start(now, m, devices=chips[m])
      step = rng.randint(0, step)
      for _ in range(rng.randint(0, 20)):
        now, step = log.steps(step + 1, step + 1, now, m, gap_seconds=rng.uniform(1, 2)), step + 1
        if rng.random() < 0.3:
          p, covers = rng.randrange(2), rng.randint(1, 3)
          base = rounds.get(p, -1)
          rounds[p] = len(log.events)
          log.merge(now, p, rounds[p], base, {m: covers}, bad=(m,) if rng.random() < 0.1 else ())
      log.add(now := now + rng.random(), "engine", "exit", target=f"learner-{m}")
      log.add(now := now + rng.random(), "engine", "restart", target=f"learner-{m}")
    last[m] = now
  log.add(END + 50, "engine", "run_finished", reason="finished")
  goodput = log.report()
  assert goodput.chip_seconds == pytest.approx((END + 50) * sum(chips))
  for m in range(3):
    assert goodput.learners[m].chip_seconds == pytest.approx((END + 50) * chips[m])


@pytest.mark.parametrize("back", ["the whole run", "its island"])
def test_the_time_between_a_good_end_and_the_next_start_is_nobodys(back):
  """Its chips were given back: a run that is stopped for a night has not spent it."""
  log = Log(fragments=1)
  log.start(1.0)
  log.steps(1, 9, 1.0)
  log.add(10.0, "learner-0", "stopped")
  if back == "the whole run":
    log.add(11.0, "engine", "run_finished", reason="stopped")
    log.add(1000.0, "engine", "run_started", num_learners=1, num_fragments=1, num_shards=1)
  else:  # started by hand: its first event says that it has compiled
    log.add(1003.0, "learner-0", "compiled", target="learner-0", seconds=3.0)
  log.start(1003.0)
  log.steps(10, 19, 1003.0)
  found = log.report()
  assert found.chip_seconds == pytest.approx(10.0 + 13.0)
  shares = {"start_up": 1.0, "pending": 19.0}
  shares |= {"rejoin" if back == "the whole run" else "compile": 3.0}
  assert {c: s * 23.0 for c, s in found.causes.items() if s} == pytest.approx(shares)
  assert found.learners[0].liveness == pytest.approx(19 / 23)
  if back == "the whole run":
    # The beginning anew counts, as it does after a kill.
    assert found.uptime == pytest.approx(19 / 22)


def test_a_run_that_was_killed_before_it_trained_was_down_too():
  log = Log(fragments=1)
  log.add(4.0, "learner-0", "compiled", target="learner-0", seconds=3.0)
  log.add(100.0, "engine", "run_started", num_learners=1, num_fragments=1, num_shards=1)
  log.start(102.0)
  log.merge(log.steps(1, 8, 102.0), 0, 7, -1, {0: 8})
  found = log.report()
  seconds = {cause: 110 * share for cause, share in found.causes.items() if share}
  assert seconds == pytest.approx({"start_up": 3.0, "compile": 3.0, "down": 96.0})
  assert found.goodput_training == pytest.approx(8 / (8 + 96))


def test_only_the_start_of_a_first_life_is_left_out_of_the_training_goodput():
  """A later life's programs are compiled, or loaded, before it has its devices."""
  log = Log(fragments=1)
  log.start(2.0)
  log.merge(log.steps(1, 8, 2.0), 0, 7, -1, {0: 8})
  log.add(10.0, "engine", "exit", target="learner-0")
  log.add(11.0, "engine", "restart", target="learner-0")
  log.add(15.0, "learner-0", "compiled", target="learner-0", seconds=3.0)
  log.start(16.0)
  log.merge(log.steps(9, 12, 16.0), 0, 8, 7, {0: 4})
  found = log.report()
  seconds = {cause: 20 * share for cause, share in found.causes.items() if share}
  assert seconds == pytest.approx({"start_up": 2.0, "down": 1.0, "rejoin": 2.0, "compile": 3.0})
  assert found.goodput_training == pytest.approx(12 / 18)


def test_a_first_start_counts_for_all_chips_before_and_after_they_are_known():
  log = Log(fragments=1)
  log.add(2.0, "learner-0", "started", devices=4)
  log.merge(log.steps(1, 6, 4.0), 0, 7, -1, {0: 6})
  found = log.report()
  assert found.causes["start_up"] == pytest.approx(4 / 10)
  assert found.goodput_training == pytest.approx(1.0)


def test_a_first_start_that_is_under_way_is_left_out_of_the_training_goodput_too():
  log = Log(learners=2, fragments=1)
  log.start(0.0)
  log.merge(log.steps(1, 10, 0.0), 0, 7, -1, {0: 10})
  found = log.report()
  assert found.causes["start_up"] == pytest.approx(0.5)
  assert found.goodput_training == pytest.approx(1.0)
  log.add(20.0, "learner-1", "started", devices=3)  # its first step compiles
  log.steps(11, 15, 20.0)
  found = log.report()
  assert found.causes["start_up"] == pytest.approx(3 * 25 / (4 * 25))
  assert found.goodput_training == pytest.approx(10 / 25)


@pytest.mark.parametrize("said", [True, False])
def test_a_learner_that_no_engine_starts_again_is_down_until_its_process_is_there(said, log):
  log.merge(log.steps(1, 10, 0.0), 0, 7, -1, {0: 10})
  if said:
    log.add(10.0, "engine", "exit", target="learner-0", reason="killed")
  log.add(40.0, "learner-0", "launched")
  log.add(46.0, "learner-0", "compiled", target="learner-0", seconds=4.0)
  log.start(47.0)
  log.merge(log.steps(11, 13, 47.0), 0, 8, 7, {0: 3})
  seconds = {cause: 50 * share for cause, share in log.report().causes.items() if share}
  assert seconds == pytest.approx({"down": 30.0, "rejoin": 3.0, "compile": 4.0})


def test_an_island_that_joins_later_has_its_chips_from_its_own_first_word_on():
  """The threads engine compiles for all islands before the first one trains."""
  log = Log(fragments=1)
  log.add(5.0, "engine", "compiled", target="learner-1", seconds=4.0)
  log.start(6.0)
  log.steps(1, 64, 6.0)
  log.add(60.0, "learner-1", "launched")
  log.start(62.0, 1)
  log.steps(1, 8, 62.0, 1)
  assert log.report().learners[1].chip_seconds == pytest.approx(10.0)
  log.add(70.0, "engine", "run_finished", reason="stopped")
  log.add(80.0, "engine", "run_started", num_learners=1, num_fragments=1, num_shards=1)
  log.add(85.0, "engine", "compiled", target="learner-1", seconds=4.0)
  log.start(90.0)
  assert log.report().learners[1].chip_seconds == pytest.approx(10.0)
