"""What a run keeps in memory does not grow with its length: it may last for months."""

from __future__ import annotations

import functools
import gc
import statistics
import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import pytest

from ddiloco.config import Fault
from ddiloco.observe import goodput, history, islands, run_state, tracks
from ddiloco.protocol.events import Event
from ddiloco.simulation import run as run_lib
from ddiloco.simulation.run import Account, VirtualRun
from tests.simulation.test_run import make, setting

LEARNERS, SHARDS, GUEST = 3, 2, ("learner", 3)
LOOKS, LOOK_SECONDS = 4, 0.37  # at the end of a span: messages under way come and go


class Kept(NamedTuple):
  """What the garbage collector knows: bytes of all objects, and items of the longest of them."""

  num_bytes: int
  longest: int


def kept_now() -> Kept:
  gc.collect()
  there = gc.get_objects()
  longest = max(len(each) for each in there if type(each) in (list, dict, set, deque))
  return Kept(sum(map(sys.getsizeof, there)), longest)


def run_of(emit: Callable[[Event], None]) -> VirtualRun:
  """A run that does not end by itself, of three learners and one that may join."""
  join = Fault("join", f"learner-{LEARNERS}", at_seconds=1e9)
  config = make(learners=LEARNERS, steps=10**6, faults=[join], snapshot_steps=20)
  return VirtualRun(config, setting(), emit)


def live(run: VirtualRun) -> Kept:
  """Every role is killed once, and a learner joins and leaves; what is kept then, at least."""
  run.start(GUEST)
  for role in [("learner", m) for m in range(LEARNERS)] + [("syncer", s) for s in range(SHARDS)]:
    run.run(run.now + 2.0)
    run.kill(role, for_seconds=0.5)
  run.actors[GUEST].drain()
  run.run(run.now + 5.0)
  assert GUEST not in run.working, "it has left"
  run.kill(GUEST)
  found = []
  for _ in range(LOOKS):
    run.run(run.now + LOOK_SECONDS)
    found.append(kept_now())
  return Kept(*map(min, zip(*found)))


@pytest.fixture(autouse=True)
def alone():
  """Objects of other tests in this process are not looked at."""
  gc.collect()
  gc.freeze()
  yield
  gc.unfreeze()


@pytest.fixture
def soon_full(monkeypatch):
  """Limits are reached in seconds instead of days."""
  monkeypatch.setattr(run_state, "Ledger", functools.partial(run_state.Ledger, 32, 64))
  monkeypatch.setattr(run_state, "Rejoins", functools.partial(run_state.Rejoins, most=4))
  for module, names in {
    goodput: ("LEAST_ROUNDS",),
    history: ("MOST_COMMITS", "MOST_POINTS", "LOSS_BINS", "MOST_CURVES"),
    islands: ("RECENT_GAPS", "MOST_SPANS"),
    run_lib: ("MOST_SYNCS",),
    run_state: ("MOST_MARKS",),
    tracks: ("SETTLED_ROUNDS",),
  }.items():
    for name in names:
      monkeypatch.setattr(module, name, 8)


def test_the_states_of_roles_do_not_grow():
  run = run_of(lambda event: None)
  first, *others = [live(run) for _ in range(5)]
  most = Kept(*map(max, zip(*others)))
  assert most.num_bytes < first.num_bytes + 10_000, (first, others)
  assert most.longest <= first.longest + 10, (first, others)
  assert len(run.storage._declined) <= 3, "of snapshots that are over"


def test_what_follows_from_events_does_not_grow(soon_full):
  run = run_of(Account().take)
  spans = [live(run) for _ in range(24)]
  # A span's bytes vary by 40 kB. The first ones are left out: containers fill up to their limits.
  before, after = (Kept(*map(statistics.median, zip(*some))) for some in (spans[4:12], spans[16:]))
  assert after.num_bytes < before.num_bytes + 30_000, spans
  assert after.longest <= max(before.longest, history.PAGE_BINS), spans
