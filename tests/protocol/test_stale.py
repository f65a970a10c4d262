"""What becomes of work that was made while the global model went on without it."""

from __future__ import annotations

import dataclasses

import pytest

from ddiloco.config import SyncConfig
from ddiloco.protocol import events, learner
from ddiloco.protocol.actions import Received, Staged, StepDone
from ddiloco.protocol.learner import STALE_PERIODS
from tests import says

SYNC = SyncConfig(num_shards=1, num_fragments=1, sync_period=3, overlap_steps=1)
OLD = 100
MOST = STALE_PERIODS * SYNC.sync_period  # steps that are still taken over


def version(number: int, merged_rounds: tuple[int, ...] = ()):
  return says.publish(0, 0, 0, 0, number - 1, number, -1, 0, 0, merged_rounds, "")


def come_back(
  steps: int,
  pushed: bool,
  merged: bool,
  newest: int = OLD + STALE_PERIODS + 1,
  sync: SyncConfig = SYNC,
):
  """After so many steps on an old version a learner gets another; its state, how it is applied."""
  one = learner.init(7, 0, (0,), target_tokens=10_000)
  applied = []

  def feed(event) -> None:
    nonlocal one
    one, actions = learner.learner_on(one, event, sync)
    applied.extend(action for action in actions if isinstance(action, events.Apply))

  feed(Received(says.welcome(0, 0, 0, 0, (0,)), 0.0))
  feed(Received(version(OLD), 0.0))
  feed(Staged(0, 0.0))
  for _ in range(steps):
    feed(StepDone(1.0, 10, 1.0))
  if pushed:
    feed(Received(says.pull(0, 0, 0, 0, newest - 1, OLD), 1.0))
  feed(Received(version(newest, (7, newest - 1) if merged else ()), 1.0))
  feed(Staged(0, 1.0))
  return one.fragments[0], applied[-1].mode


@pytest.mark.parametrize("pushed", [False, True])
def test_what_is_as_old_as_that_is_taken_over_at_half_its_length(pushed):
  f, mode = come_back(MOST, pushed, merged=False)
  assert (mode, f.steps, f.tokens, f.discarded_tokens) == ("halve", MOST, 10 * MOST, 0)


@pytest.mark.parametrize("pushed", [False, True])
def test_older_work_is_discarded_and_booked(pushed):
  f, mode = come_back(MOST + 1, pushed, merged=False)
  assert (mode, f.steps, f.tokens, f.steps_since_sync) == ("overwrite", 0, 0, 0)
  assert f.discarded_tokens == 10 * (MOST + 1)


def test_work_of_which_the_others_have_done_little_is_taken_over():
  """It trained while they still started, or while the shard was away."""
  f, mode = come_back(10 * MOST, pushed=False, merged=False, newest=OLD + STALE_PERIODS)
  assert (mode, f.steps) == ("halve", 10 * MOST)


@pytest.mark.parametrize("apply, mode", [("mix", "mix"), ("overwrite", "overwrite")])
def test_only_rebase_takes_missed_work_over_at_half_its_length(apply, mode):
  sync = dataclasses.replace(SYNC, apply=apply)
  assert come_back(2, pushed=True, merged=False, sync=sync)[1] == mode


def test_what_is_merged_is_not_stale():
  f, mode = come_back(10 * MOST, pushed=True, merged=True)
  assert (mode, f.steps, f.acknowledged_tokens) == ("rebase", 0, 100 * MOST)
