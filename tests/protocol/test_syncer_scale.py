"""What a message costs a shard hardly grows with its members: there may be thousands."""

from __future__ import annotations

import sys

import pytest

from ddiloco.config import SyncConfig
from ddiloco.protocol import syncer
from ddiloco.protocol.messages import FragmentState
from ddiloco.protocol.states import SyncerState
from tests import says

FRAGMENTS, PERIOD = 4, 1000
SYNC = SyncConfig(num_shards=1, num_fragments=FRAGMENTS, sync_period=PERIOD, min_quorum=3)
VERSIONS = (0,) * FRAGMENTS


def cost(state: SyncerState, message, **measured) -> int:
  """Bytecodes that taking it in executes: unlike seconds, the same every time."""
  count, before = 0, sys.gettrace()

  def trace(frame, event, argument):
    nonlocal count
    frame.f_trace_opcodes = True
    count += event == "opcode"
    return trace

  sys._getframe().f_trace_opcodes = True  # else Python 3.12.1 counts none in the first trace
  sys.settrace(trace)
  try:
    on(state, message, **measured)
  finally:
    sys.settrace(before)
  return count


def on(state: SyncerState, message, **measured) -> SyncerState:
  return says.shard_on(state, says.event_of(message, 1.0, **measured))[0]


def report(learner: int, steps_since_sync: int):
  return says.report(learner, 0, steps_since_sync, 0.1, VERSIONS, (steps_since_sync,) * FRAGMENTS)


def shard_of(members: int) -> SyncerState:
  """All have everything, and have made a step."""
  fragments = tuple(FragmentState(p) for p in range(FRAGMENTS))
  state = syncer.init(0, 0, fragments, SYNC, 1 << 60)
  for m in range(members):
    state = on(on(state, says.hello(m, 0)), report(m, 1))
  return state


@pytest.fixture(scope="module")
def small() -> SyncerState:
  return shard_of(10)


@pytest.fixture(scope="module")
def large() -> SyncerState:
  return shard_of(1000)


def test_a_report_costs_the_same(small, large):
  costs = [cost(state, report(5, 2)) for state in (small, large)]
  assert 0 < costs[1] < 1.1 * costs[0], costs


def test_a_report_costs_the_same_while_rounds_are_open(small, large):
  costs = []
  for state in (small, large):
    for m in range(3):
      state = on(state, report(m, PERIOD))
    assert len(state.under_way) == len(state.fragments)
    costs.append(cost(state, report(5, 2)))
  assert costs[1] < 1.1 * costs[0], costs


def test_a_push_costs_the_same(small, large):
  costs = []
  for state in (small, large):
    for m in range(3):
      state = on(state, report(m, PERIOD))
    push = says.push(5, 0, 0, state.under_way[0].id, 0, 1, 10, "")
    costs.append(cost(state, push, norm=1.0))
  assert 0 < costs[1] < 1.1 * costs[0], costs
