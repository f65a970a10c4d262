"""The same plan in virtual time and on threads: the same happens, and is told in the same words."""

from __future__ import annotations

import collections
import math

import msgspec
import pytest

from ddiloco.observe.tracks import Aftermath
from ddiloco.simulation.run import Speeds, VirtualRun
from ddiloco.training import data
from tests.engines.test_threads import STEP_SECONDS, Ran, fault, make_config

FAULTS = [
  fault("kill", "learner-1", 60, seconds=0.6),
  fault("kill", "syncer-0", 100, seconds=0.3),
  fault("stall", "learner-2", 150, seconds=0.4),
  fault("slow", "learner-0", 170, seconds=0.3, factor=3.0),
  fault("cut", "learner-2", 200, seconds=0.3),
  fault("duplicate", "learner-0", 220, seconds=0.3),
  fault("join", "learner-3", 120, seconds=-1),
]
ONLY_REAL = {  # what a virtual run has no part in
  "commit": {"agreement", "length", "rho"},
  "saved": {"arrays", "bytes"},
  "step": {"loss", "grad_norm", "learning_rate", "rate_scale"},
}


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[list[dict], list[dict]]:
  config = make_config(steps=350, chaos={"faults": FAULTS})
  corpus = data.open_corpus(config.data)
  threads = Ran(config, corpus, tmp_path_factory.mktemp("threads"))
  assert threads.outcome.reason == "finished"
  events: list[dict] = []
  sizes = (1000,) * config.sync.num_fragments
  assert VirtualRun(config, Speeds(sizes, step_seconds=STEP_SECONDS), events.append).finish() == (
    "finished"
  )
  return list(threads.events), events


def test_the_same_faults_strike_and_all_are_over(both):
  def told(events: list[dict]) -> dict:
    found: dict[str, list] = {"fault": [], "exit": [], "restart": []}
    for e in events:
      if e.kind in found:
        found[e.kind].append((e.target, getattr(e, "action", ""), getattr(e, "seconds", 0.0)))
    return {kind: sorted(each) for kind, each in found.items()}

  threads, virtual = both
  assert told(threads) == told(virtual) and len(told(virtual)["fault"]) == len(FAULTS)
  reasons = [[e.reason for e in events if e.kind == "exit"] for events in both]
  assert reasons[0] == reasons[1]
  for events in both:
    aftermath = Aftermath().read(events)
    assert all(math.isfinite(each.seconds) for each in aftermath.recoveries)
    assert not aftermath.lost_rounds() and not aftermath.unplanned()
    assert sum(e.blocked_seconds for e in events if e.kind == "step") == 0


def test_events_have_the_fields_of_a_real_run(both):
  fields = []
  for events in both:
    found: dict[str, set] = collections.defaultdict(set)
    for event in events:
      found[event.kind] |= msgspec.to_builtins(event).keys() - {"format", "incarnation"}
    fields.append(found)
  threads, virtual = fields
  assert virtual.keys() >= {"run_started", "started", "owns", "joined", "step", "copy_out", "push"}
  assert virtual.keys() >= {"stage", "apply", "round", "commit", "member", "fault", "run_finished"}
  shared = threads.keys() & virtual.keys()
  assert len(shared) >= 17
  for kind in shared - {"traffic", "ignored", "snapshot"}:  # where chance fills some fields
    missing = threads[kind] - virtual[kind] - ONLY_REAL.get(kind, set())
    assert not missing, f"{kind} lacks {missing}"
    assert virtual[kind] <= threads[kind], f"{kind}: {virtual[kind] - threads[kind]}"
