"""The goodput ledger over random logs: every second has one cause, and old books may be closed."""

from __future__ import annotations

import math
import operator
import random

import pytest

from ddiloco.observe import goodput
from ddiloco.observe.goodput import CAUSES, Ledger, StepSums
from ddiloco.observe.history import MOST_GAPS
from ddiloco.protocol.events import Event
from tests.made_events import changed, made

ISLANDS, FRAGMENTS = 3, 2
by_time = operator.attrgetter("time")


def started(time=0.0, shards=1):
  counts = {"num_learners": ISLANDS, "num_fragments": FRAGMENTS, "num_shards": shards}
  return made(time, "engine", "run_started", **counts)


def typed(fields) -> Event:
  fields = dict(fields)
  return made(fields.pop("time"), fields.pop("role"), fields.pop("kind"), **fields)


class Story:
  """Random events about a few islands; what one says need not fit to what another said."""

  def __init__(self, seed: int, stops: bool):
    self.chance = random.Random(seed)
    self.told = bool(seed % 2)  # whether every island's first life says what chips it has
    self.chips = [self.chance.randint(1, 4) if self.told else 1 for _ in range(ISLANDS)]
    self.now, self.round, self.stops = 0.0, 0, stops
    self.numbers = dict.fromkeys(range(ISLANDS), 0)

  def event(self) -> Event:
    chance = self.chance
    self.now = max(0.0, self.now + chance.choice([0.0, 0.1, 1.0, 5.0, 40.0, -0.001, -20.0]))
    m, p = chance.randrange(ISLANDS), chance.randrange(FRAGMENTS)
    name, target = {"role": f"learner-{m}"}, {"role": "engine", "target": f"learner-{m}"}
    kinds = ("started", "compiled", "exit", "restart", "captured", "step", "step", "step", "step")
    kinds += ("copy_out", "resend", "apply", "commit", "owns", "run_started")
    kind = chance.choice(kinds + ("stopped", "run_finished") * self.stops)
    fields: dict = {"time": self.now, "incarnation": 0, "kind": kind, **name}
    long = chance.choice([0.0, 0.01, 1.0, 3.0, 60.0, 1e4, math.nan, math.inf, -5.0])
    if kind == "started":
      fields["devices"] = self.chips[m]
    elif kind in ("exit", "restart"):
      fields |= target
    elif kind == "compiled":
      fields |= {**target, "seconds": long}
    elif kind == "captured":
      fields["seconds"] = long
    elif kind == "step":
      self.numbers[m] = chance.choice([self.numbers[m] + 1, 1, chance.randint(0, 50)])
      lengths = {"seconds": long, "gap_seconds": chance.choice([long, 1.0, 7.0])}
      blocked = chance.choice([0.0, 2.0, 300.0])
      fields |= {"step": self.numbers[m], **lengths, "blocked_seconds": blocked}
    elif kind == "copy_out":
      fields |= {"fragment": p, "round": self.new_round(), "steps": chance.randint(0, 30)}
    elif kind == "resend":
      fields |= {"fragment": p, "round": self.new_round(), "old_round": self.old_round()}
    elif kind == "apply":
      fields |= {"fragment": p, "mode": chance.choice(["rebase", "overwrite"])}
    elif kind == "commit":
      taking = {str(m): 1.0 for m in range(ISLANDS) if chance.random() < 0.7}
      bad = {str(m): "far" for m in range(ISLANDS) if str(m) not in taking}
      fields |= {"role": "syncer-0", "fragment": p, "round": self.old_round()}
      fields |= {"base_round": self.old_round(), "weights": taking, "rejected": bad}
    elif kind == "owns":
      fields |= {"role": "syncer-0", "fragment": p, "round": self.old_round()}
    elif kind == "run_started":
      return started(self.now)
    return typed(fields)

  def new_round(self) -> int:
    self.round += self.chance.random() < 0.5
    return self.round

  def old_round(self) -> int:
    return self.chance.randint(max(-1, self.round - 4), self.round)


def check(ledger, chips, stops):
  """Every second in which an island has its chips has one cause; without `stops` that is always."""
  report = ledger.report()
  for m, island in ledger._islands.items():
    until = max(ledger._now, island.since) if island.phase else island.since
    account, useful = ledger._balance(m, ledger._now)
    assert min(useful, *account.values()) >= -1e-9 and set(account) == set(CAUSES)
    allocated = island.allocated_seconds + until - island.since
    assert allocated <= until + 1e-6 if stops else allocated == pytest.approx(until, abs=1e-6)
    assert useful + sum(account.values()) == pytest.approx(allocated * chips[m], abs=1e-6)
    alive = report.learners[m].liveness
    assert math.isnan(alive) or -1e-9 <= alive <= 1 + 1e-9
  shares = report.goodput + sum(report.causes.values())
  assert math.isnan(report.goodput) or shares == pytest.approx(1.0)
  assert math.isnan(report.uptime) or -1e-9 <= report.uptime <= 1 + 1e-9


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_one_counter_must_not_lie_every_second_of_an_island_has_one_cause(seed, stops):
  """Compiles, kills, stops and restarts overlap, events are missing, and clocks go back."""
  story, ledger, newest = Story(seed, stops), Ledger(), 0.0
  ledger.take(started())
  for m in range(ISLANDS if story.told else 0):
    fields = {"role": f"learner-{m}", "kind": "started", "devices": story.chips[m]}
    ledger.take(typed({"time": 0.0, **fields}))
  for _ in range(250):
    event = story.event()
    newest = max(newest, event.time)
    ledger.take(event)
    check(ledger, story.chips, stops)
  if not stops:
    ledger.take(
      typed({"time": newest + 50, "role": "engine", "kind": "run_finished", "reason": ""})
    )
    for m, each in ledger.report().learners.items():
      assert each.chip_seconds == pytest.approx((newest + 50) * story.chips[m])


def test_a_long_wait_for_a_shard_is_not_a_stall_as_well():
  ledger = Ledger()
  ledger.take(started(shards=1))
  base = {"role": "learner-0", "kind": "step", "seconds": 1.0, "blocked_seconds": 0.0}
  ledger.take(typed({"time": 0.0, "role": "learner-0", "kind": "started"}))
  for n in range(1, 11):
    ledger.take(typed({**base, "time": float(n), "step": n, "gap_seconds": 1.0}))
  waited = {"gap_seconds": 31.0, "blocked_seconds": 30.0}
  ledger.take(typed({**base, "time": 41.0, "step": 11, **waited}))
  account, _ = ledger._balance(0, 41.0)
  assert (account["blocked"], account["stalled"]) == (30.0, 0.0)
  assert sum(account.values()) == pytest.approx(41.0)


def run(seed: int, length: int, back: int):
  """A run of kills, rollbacks of at most so many rounds and steps, and long times without."""
  chance = random.Random(seed)
  yield started()
  now, step, rounds = 0.0, [0] * ISLANDS, {p: [-1] for p in range(FRAGMENTS)}
  merged = [[0] * FRAGMENTS for _ in range(ISLANDS)]
  for m in range(ISLANDS):
    yield typed({"time": 0.0, "role": f"learner-{m}", "kind": "started", "devices": m + 1})
  round_id = 0
  for _ in range(length):
    for m in range(ISLANDS):
      now, step[m] = now + chance.uniform(0.1, 0.4), step[m] + 1
      lengths = {"seconds": 0.1, "gap_seconds": 0.3, "blocked_seconds": 0.0}
      yield typed({"time": now, "role": f"learner-{m}", "kind": "step", "step": step[m], **lengths})
    p = chance.randrange(FRAGMENTS)
    if chance.random() < 0.5:
      round_id += 1
      taking = [m for m in range(ISLANDS) if chance.random() < 0.9]
      for m in taking:
        fields = {"fragment": p, "round": round_id, "steps": step[m] - merged[m][p]}
        yield typed({"time": now, "role": f"learner-{m}", "kind": "copy_out", **fields})
      bad = [m for m in taking if chance.random() < 0.05]
      fields = {"fragment": p, "round": round_id, "base_round": rounds[p][-1]}
      fields |= {"weights": {str(m): 1.0 for m in taking if m not in bad}}
      fields["rejected"] = {str(m): "far" for m in bad}
      yield typed({"time": now, "role": "syncer-0", "kind": "commit", **fields})
      rounds[p].append(round_id)
      for m in taking:
        merged[m][p] = step[m]
    if chance.random() < 0.05:  # a shard is back, with what it or somebody had a while ago
      old, kept = rounds[p][-1], rounds[p][-back:]
      to = -1 if chance.random() < 0.05 else chance.choice(kept)
      yield typed({"time": now, "role": "syncer-0", "kind": "owns", "fragment": p, "round": to})
      if chance.random() < 0.5:
        yield typed(
          {"time": now, "role": "syncer-0", "kind": "regained", "fragment": p, "round": old}
        )
      else:
        rounds[p] = [-1] if to == -1 else [r for r in rounds[p] if r <= to]
    if chance.random() < 0.05:
      m = chance.randrange(ISLANDS)
      yield typed({"time": now, "role": "engine", "kind": "exit", "target": f"learner-{m}"})
      yield typed({"time": now + 1, "role": "engine", "kind": "restart", "target": f"learner-{m}"})
      now += 2.0
      step[m] = max(0, step[m] - chance.randint(0, back))
      merged[m] = [min(each, step[m]) for each in merged[m]]
      yield typed({"time": now, "role": f"learner-{m}", "kind": "started", "devices": m + 1})


@pytest.mark.parametrize("seed", range(20))
def test_a_ledger_of_bounded_size_says_what_one_that_keeps_everything_says(seed, monkeypatch):
  monkeypatch.setattr(goodput, "LEAST_ROUNDS", 24)
  small, whole = Ledger(exact_steps=64, chain_sums=0), Ledger(10**9, 1e99)
  for i, event in enumerate(run(seed, 1500, back=5)):
    small.take(event)
    whole.take(event)
    if i % 50 == 0:
      mine, all_of_it = small.report(), whole.report()
      assert mine.goodput == pytest.approx(all_of_it.goodput, nan_ok=True)
      assert mine.causes == pytest.approx(all_of_it.causes, abs=1e-9)
      assert mine.uptime == pytest.approx(all_of_it.uptime, nan_ok=True)
  rounds = [len(chain._rounds) for chain in small.chains.values()]
  assert max(rounds) <= 24 and max(len(c._rounds) for c in whole.chains.values()) > 200
  assert all(len(island.sums._sums) <= 129 for island in small._islands.values())


@pytest.mark.parametrize("apart", [0.5, 20.0])
@pytest.mark.parametrize("seed", range(10))
def test_clocks_that_differ_move_no_seconds_from_cause_to_cause(seed, apart):
  """A commit that seemed to be earlier than its pushes merged nothing, whatever it said."""
  chance, one, several = random.Random(seed), Ledger(), Ledger()
  events = [e for e in run(seed, 400, back=5) if e.role != "engine"]  # roles that nobody supervises
  ahead = {role: chance.uniform(-apart, apart) for role in {e.role for e in events}}
  for event in events:
    one.take(event)
  for event in sorted((changed(e, time=e.time + ahead[e.role]) for e in events), key=by_time):
    several.take(event)
  for m in range(ISLANDS):
    (true, useful), (account, merged) = one._balance(m, 0.0), several._balance(m, -1e9)
    assert merged == pytest.approx(useful) and useful > 0
    for each in (account, true):  # whether steps that a life redid may still be merged is a guess
      each["discarded"] += each.pop("pending")
    assert account == pytest.approx(true)


def test_a_value_that_nobody_remembers_begins_a_new_past():
  """Put in by hand from an old snapshot: what was before it counts as discarded."""
  ledger = Ledger(chain_sums=0)
  for event in run(1, 3000, back=2):
    ledger.take(event)
  before = ledger.report(1e5)
  ledger.take(typed({"time": 0.0, "role": "syncer-0", "kind": "owns", "fragment": 0, "round": 3}))
  after = ledger.report(1e5)
  assert after.causes["discarded"] > before.causes["discarded"]
  assert after.goodput + sum(after.causes.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(10))
def test_sums_of_steps_are_exact_where_it_matters_and_close_elsewhere(seed):
  chance, sums, true = random.Random(seed), StepSums(exact=50), [0.0]
  for _ in range(20_000):
    true.append(true[-1] + chance.uniform(0.9, 1.1))
    sums.add(true[-1] - true[-2])
    if chance.random() < 1e-3 and sums.number % 100 > 60:
      to = max(0, len(true) - 1 + chance.randint(-40, 10))
      sums.go_to(to)
      true = true[: to + 1] + [true[-1]] * (to + 1 - len(true))
  assert sums.number == len(true) - 1
  newest = range(len(true) - 50, len(true))
  assert [sums.at(step) for step in newest] == pytest.approx([true[step] for step in newest])
  for step in range(0, len(true), 97):
    assert sums.at(step) == pytest.approx(true[step], rel=2e-3, abs=25)
  sums.go_to(1000)  # a state from long ago
  assert (sums.number, sums.last) == (1000, pytest.approx(true[1000], rel=0.02))
  sums.add(1.0)
  assert sums.at(1001) == sums.last == pytest.approx(sums.at(1000) + 1)


def test_sums_stay_exact_where_steps_are_missing():
  """Of a learner that died when its disk was full."""
  sums = StepSums()
  for seconds in [1.0] * 100 + [0.1] * 100:
    sums.add(seconds)
  sums.go_to(203)
  assert sums.number == 203 and sums.at(201) == sums.last == pytest.approx(110.0)
  assert (sums.at(50), sums.at(150)) == pytest.approx((50.0, 105.0))


def test_a_step_number_out_of_nowhere_costs_no_memory():
  sums = StepSums(exact=50)
  for _ in range(1000):
    sums.add(1.0)
  sums.go_to(10**15)
  assert (sums.number, sums.last) == (10**15, 1000.0)
  assert len(sums._sums) < 1200
  sums.go_to(0)
  assert (sums.number, sums.last) == (0, 0.0)


def test_uptime_of_thousands_of_pauses_is_exact_and_small():
  ledger, now = Ledger(), 0.0
  ledger.take(started())
  ledger.take(typed({"time": 0.0, "role": "learner-0", "kind": "started"}))
  for n in range(1, 4000):
    paused = 30.0 if n % 5 == 0 else 0.0
    now += 1.0 + paused
    fields = {"step": n, "seconds": 1.0, "gap_seconds": 1.0 + paused}
    ledger.take(typed({"time": now, "role": "learner-0", "kind": "step", **fields}))
  assert len(ledger._idle._gaps) <= MOST_GAPS
  away = 29.0  # of each pause, but for the length of a usual step
  assert ledger.report().uptime == pytest.approx(1 - 799 * away / now)
