"""Whole runs in virtual time under random fault plans: the real roles, links, disks and restarts.

Each ends with its tokens merged; the ledger of single steps and the trace's check judge it.
"""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Callable

from ddiloco.chaos import KINDS as ACTIONS
from ddiloco.chaos import random_faults
from ddiloco.config import (
  ChaosConfig,
  CheckpointConfig,
  Config,
  DataConfig,
  Fault,
  IslandsConfig,
  NetworkConfig,
  RunConfig,
  SyncConfig,
)
from ddiloco.observe import goodput
from ddiloco.observe.tracks import Aftermath
from ddiloco.protocol import events
from ddiloco.protocol.events import Event
from ddiloco.simulation.run import Speeds, VirtualRun
from ddiloco.trace.check import check as check_trace
from ddiloco.trace.operations import read_logs
from tests.protocol.ledger import Ledger
from tests.protocol.virtual import STEP_TOKENS, Ghosts
from tests.worlds import swarm

KINDS = (*ACTIONS, "join", "join_and_leave", "cut_region", "kill_for_good")
STEP_SECONDS = 0.4
JITTER = 0.1
COPY_SECONDS = 0.004
MOST_GAP_SECONDS = STEP_SECONDS * (1 + JITTER) + 10 * COPY_SECONDS  # of a learner, between steps
REGION_SECONDS = 1.234  # a cut of so long is one of a region
MOST_SECONDS = 600.0


class JudgedRun(Ghosts, VirtualRun):
  """A run whose vectors are ghosts, judged by the strict ledger of the tests of the protocol."""

  def __init__(self, config: Config, setting: Speeds, emit: Callable[[Event], None]):
    self.ledger = Ledger(config.sync, config.data.sequence_length * config.islands.batch_size)
    super().__init__(config, setting, emit)
    self.measure = lambda push: {"norm": push.steps * push.payload.content.factor}


def random_config(seed: int) -> Config:
  """Any small mix of settings, and a plan of faults of this world's kinds."""
  rng, kinds = random.Random(f"faulted {seed}"), swarm(seed, KINDS)
  learners, shards = rng.choice((2, 2, 3, 4)), rng.choice((1, 1, 2, 3))
  period, steps = rng.randint(2, 5), rng.randint(8, 16)
  faults = _plan(rng, seed, kinds, steps * STEP_SECONDS, learners, shards)
  lost = any(fault.seconds < 0 and fault.action == "kill" for fault in faults)
  return Config(
    islands=IslandsConfig(num_learners=learners, batch_size=1),
    data=DataConfig(sequence_length=STEP_TOKENS),
    sync=SyncConfig(
      num_shards=shards,
      num_fragments=rng.randint(shards, 4),
      sync_period=period,
      overlap_steps=rng.randint(0, period - 1),
      min_quorum=rng.randint(1, max(1, learners // 2) if not lost else 1),
      apply=rng.choice(("rebase", "rebase", "overwrite", "mix")),
      grace_safety=rng.choice((0.0, 0.9)),
      publish_codec=rng.choice(("f32", "int8")),
      snapshot_steps=rng.choice((0, 3, 6)),
      liveness_seconds=1.0,
    ),
    network=NetworkConfig(drain_seconds=30.0),
    checkpoint=CheckpointConfig(keep=1 << 20, rejoin=rng.choice(("own", "peer", "fresh"))),
    chaos=ChaosConfig(faults, {"far": ("learner-0", "learner-1")}),
    run=RunConfig(
      total_tokens=learners * steps * STEP_TOKENS, restart_seconds=0.2, max_restarts=1000
    ),
  )


def _plan(
  rng: random.Random, seed: int, kinds: frozenset[str], span: float, learners: int, shards: int
) -> tuple[Fault, ...]:
  actions = [action for action in ACTIONS if action in kinds]
  count = rng.randint(1, 8) if actions else 0
  faults = list(random_faults(seed, count, span, learners, shards, actions))
  more = {
    "join": ("join", f"learner-{learners}", -1),
    "join_and_leave": ("join", f"learner-{learners + ('join' in kinds)}", 2.0),
    "cut_region": ("cut", "region-far", REGION_SECONDS),
    "kill_for_good": ("kill", f"learner-{learners - 1}", -1),
  }
  for kind, (action, role, seconds) in more.items():
    if kind in kinds:
      faults.append(Fault(action, role, at_seconds=rng.uniform(0, span), seconds=seconds))
  return tuple(faults)


def check(seed: int) -> collections.Counter[str]:
  """Runs a plan, judges, and counts what happened."""
  config, said = random_config(seed), list[Event]()
  sizes = (1000,) * config.sync.num_fragments
  setting = Speeds(sizes, STEP_SECONDS, JITTER, copy_seconds=COPY_SECONDS, seed=seed)
  run = JudgedRun(config, setting, said.append)
  assert run.finish(MOST_SECONDS) == "finished"
  _check_ends(run)
  _check_events(config, said)
  by_kind = collections.defaultdict[str, list](list)
  for event in said:
    by_kind[event.kind].append(event)
  return collections.Counter(map(_kind_of, by_kind["fault"])) + collections.Counter(
    commits=len(by_kind["commit"]),
    snapshots=len(by_kind["snapshot"]),
    restored=len(by_kind["restored"]),
    quarantined=sum("quarantined" in exit.reason for exit in by_kind["exit"]),
  )


def _kind_of(fault: events.Fault) -> str:
  match fault.action, fault.seconds:
    case "kill", seconds if seconds < 0:
      return "kill_for_good"
    case "join", seconds if seconds >= 0:
      return "join_and_leave"
    case "cut", seconds if seconds == REGION_SECONDS:
      return "cut_region"
  return fault.action


def _check_ends(run: JudgedRun) -> None:
  """Enough is merged, every step is accounted for, and all end with the same versions."""
  ended = {p: f.version for p, f in run.store.items()}
  for p, f in run.store.items():
    merged = STEP_TOKENS * len(run.ledger.contents[p, f.last_round])
    assert f.merged_tokens == merged >= run.config.run.total_tokens
  for actor in run.learners():
    versions = {p: f.version for p, f in enumerate(actor.state.fragments)}
    assert actor.asked_to_end or versions == ended, f"{actor.role} ends at {versions}, not {ended}"


def _check_events(config: Config, said: list[Event]) -> None:
  """No round is lost, no role dies of another's fault, none waits; time and trace add up."""
  aftermath = Aftermath().read(said)
  assert not aftermath.lost_rounds() and not aftermath.unplanned()
  struck = {fault.role for fault in config.chaos.of_roles()}
  account, logs = goodput.Ledger(), collections.defaultdict[str, list[Event]](list)
  for event in said:
    account.take(event)
    logs[event.role].append(event)
    if isinstance(event, events.Step):
      assert not event.blocked_seconds, f"{event.role} waited"
      assert event.role in struck or event.gap_seconds < MOST_GAP_SECONDS, f"{event.role} paused"
  found = account.report()
  assert math.isclose(found.goodput + sum(found.causes.values()), 1.0, abs_tol=1e-6)
  checked = check_trace(read_logs(logs))
  assert not checked.problems, checked.problems[:3]
