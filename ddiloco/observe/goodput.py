"""The goodput ledger: where every chip-second of a run went, from its events alone. PURE.

Goodput is the share of allocated chip time that was spent on inner steps whose work is in the
global model. A step's work is in it fragment by fragment: of P fragments, each that merged the step
counts for 1/P of its seconds. The global model is the chain of rounds behind every fragment's
newest value, so what a restored shard has rolled back counts no longer, and counts again if it is
recalled. Without shards, a step counts until a later life of its island does it
again.

Every other second has one of these causes; they and the useful ones add up to all allocated time.
The right column is the bucket of ml-goodput-measurement that a cause would be in.

| cause     | seconds in which an island                                    | bucket               |
|-----------|---------------------------------------------------------------|----------------------|
| start_up  | began its first life: imports, devices, waiting for the first | PROGRAM_STARTUP      |
|           | values                                                        |                      |
| compile   | compiled, or took a program from the cache; also in the       | PROGRAM_STARTUP      |
|           | middle of its work                                            |                      |
| down      | was dead and not yet started again                            | INFRASTRUCTURE_...   |
| rejoin    | began a later life: imports, restore, every fragment anew     | RECOVERY_FROM_...    |
| blocked   | waited for a shard (lock-step only)                           | CUSTOM_BADPUT_EVENTS |
| stalled   | stood still in the middle of its work                         | OTHER                |
| discarded | made steps that never reached the global model: lost with a   | WASTED_PROGRESS_...  |
|           | life, or overwritten                                          |                      |
| rejected  | made steps that the screen refused                            | WASTED_PROGRESS_...  |
| pending   | made steps that are not merged yet, or were not at the end    | (none)               |
| save      | copied its part of a snapshot                                 | CHECKPOINT_SAVE_TIME |
| other     | read data, copied and applied fragments, ended                | OTHER                |
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from ddiloco.observe.goodput_ledger import CHAIN_GAINS, EXACT_STEPS, Chain, IslandAccount, positive
from ddiloco.protocol import events
from ddiloco.protocol.events import Event, parse_role

CAUSES = (
  *("start_up", "compile", "down", "rejoin", "blocked", "stalled"),
  *("discarded", "rejected", "pending", "save", "other"),
)
MOST_GAPS = 64  # without any training, that a step told late may still fill


@dataclasses.dataclass(frozen=True)
class Goodput:
  """The account so far. Shares are of `chip_seconds`, by cause; with `goodput` they add up to 1."""

  chip_seconds: float  # allocated: from the start of the run, or of its learner, to its end
  goodput: float
  goodput_training: float  # the same without `start_up` and `compile` of first lives
  causes: Mapping[str, float]
  uptime: float  # share of the time since the first step in which at least one island trained
  learners: Mapping[int, LearnerGoodput]


@dataclasses.dataclass(frozen=True)
class LearnerGoodput:
  """One learner: alive and taking part are different things, so both are here."""

  chip_seconds: float
  goodput: float
  liveness: float  # share of its allocated time in which it was training
  participation: float  # share of all commits that it took part in; NaN before the first


class Ledger:
  """Takes a run's events in order of time; `report` at any moment.

  Its size depends on the islands and fragments, not on the length of the run (`goodput_ledger.py`).
  """

  def __init__(self, exact_steps: int = EXACT_STEPS, chain_gains: int = CHAIN_GAINS) -> None:
    """Both say how much is kept one by one: steps of an island, gains of all chains together."""
    self._exact_steps, self._chain_gains = exact_steps, chain_gains
    self._islands: dict[int, IslandAccount] = {}
    self.chains: dict[int, Chain] = collections.defaultdict(Chain)
    self._fragments = 0  # 0: there is no sync
    self._commits = 0
    self._gaps: list[tuple[float, float]] = []  # the newest times without any training ...
    self._idle = 0.0  # ... and the seconds of all before them, since the first step
    self._first = math.nan  # when the first step began
    self._covered = math.nan  # up to here an island trained, but for the gaps
    self._now = 0.0
    self._ended = False

  def take(self, event: Event) -> None:
    """Enters one event. Kinds that say nothing about time or merges are ignored."""
    self._now = max(self._now, event.time)
    handler = _HANDLERS.get(type(event))
    if handler is not None:
      handler(self, event)

  def report(self, now: float | None = None) -> Goodput:
    """The account up to `now` (seconds since the run started), else up to the newest event."""
    now = self._now if now is None or self._ended else max(now, self._now)
    learners = {m: self._balance(m, now) for m in sorted(self._islands)}
    causes: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
    total = useful = first_start = 0.0
    for m, (account, good) in learners.items():
      for cause, seconds in account.items():
        causes[cause] += seconds
      useful += good
      total += good + sum(account.values())
      first_start += self._islands[m].first_start
    return Goodput(
      total,
      useful / total if total else math.nan,
      useful / (total - first_start) if total > first_start else math.nan,
      {cause: seconds / total if total else 0.0 for cause, seconds in causes.items()},
      self._uptime(now),
      {m: self._of_learner(m, now, *balance) for m, balance in learners.items()},
    )

  def _balance(self, m: int, now: float) -> tuple[dict[str, float], float]:
    """(chip-seconds by cause, useful chip-seconds) of one learner."""
    island, chips = self._islands[m], self._islands[m].chips or 1
    account = dict.fromkeys(CAUSES, 0.0) | island.account
    for cause, seconds in island.seconds.items():  # its chips are not known yet: as if one
      account[cause] += seconds
    if island.phase:
      cause = "other" if island.phase == "training" else island.phase
      account[cause] += max(0.0, now - island.since) * chips
    if not self._fragments:
      merged, pending = island.sums.last, 0.0
    else:
      merged = sum(chain.merged.get(m, 0.0) for chain in self.chains.values())
      pending = island.pending(self._fragments)
    # A log with holes may say more of a step than there was of it: each second counts once.
    useful = min(merged, island.trained)
    account["rejected"] = min(account["rejected"], island.trained - useful)
    left = island.trained - useful - account["rejected"]
    account["pending"] = min(max(0.0, pending), left)
    account["discarded"] += left - account["pending"]
    return account, useful

  def _of_learner(self, m: int, now: float, account: Mapping, useful: float) -> LearnerGoodput:
    island, total = self._islands[m], useful + sum(account.values())
    allocated = island.allocated_seconds + (max(0.0, now - island.since) if island.phase else 0.0)
    return LearnerGoodput(
      total,
      useful / total if total else math.nan,
      island.live_seconds / allocated if allocated else math.nan,
      island.commits / self._commits if self._commits else math.nan,
    )

  def _uptime(self, now: float) -> float:
    if math.isnan(self._covered):
      return math.nan
    end = max(self._covered, now) if not self._ended else self._covered
    start = self._first
    idle = self._idle + sum(b - a for a, b in self._gaps) + (end - self._covered)
    return 1.0 - idle / (end - start) if end > start else 1.0

  def _trained(self, start: float, end: float) -> None:
    """An island trained from `start` to `end`, times that only grow at their ends."""
    if math.isnan(self._covered):
      self._first = self._covered = start
    left = []
    for a, b in self._gaps:
      left += [(x, y) for x, y in ((a, min(b, start)), (max(a, end), b)) if x < y]
    if start > self._covered:
      left.append((self._covered, start))
    if len(left) > MOST_GAPS:
      first, *left = left
      self._idle += first[1] - first[0]
    self._gaps, self._covered = left, max(self._covered, end)

  # --- events -------------------------------------------------------------------------------------

  def _on_run_started(self, event: events.RunStarted) -> None:
    self._ended = False
    self._fragments = event.num_fragments if event.num_shards else 0
    for m in range(event.num_learners):
      island = self._at(m, event.time)
      if island.lives:  # the whole run was killed, and goes on: its death was not logged
        island.spend(event.time, "down")
        island.phase = "rejoin"

  def _on_compiled(self, event: events.Compiled) -> None:
    begun = event.time - positive(event.seconds)
    island = self._island(event.target, begun)
    if island is None:
      return
    if island.phase == "training":  # a program that was not planned for
      island.compile_seconds += positive(event.seconds)
      return
    island.spend(begun, island.phase or "other")
    island.spend(event.time, "compile")

  def _on_started(self, event: events.Started) -> None:
    island = self._island(event.role, event.time)
    if island is not None:
      if island.phase == "training":  # its death was not logged
        island.spend(event.time, "down")
      island.begin(event.time, max(1, event.devices))

  def _on_step(self, event: events.Step) -> None:
    island = self._island(event.role, event.time - positive(event.gap_seconds))
    if island is not None:
      island.chips = island.chips or 1
      self._trained(*island.step(event))

  def _on_captured(self, event: events.Captured) -> None:
    island = self._island(event.role, event.time)
    if island is not None:
      island.capture_seconds += positive(event.seconds)

  def _on_copy_out(self, event: events.CopyOut) -> None:
    island = self._island(event.role, event.time)
    if island is not None:
      island.copy_out(event.fragment, event.round, event.steps)

  def _on_resend(self, event: events.Resend) -> None:
    island = self._island(event.role, event.time)
    if island is not None:
      island.resend(event.fragment, event.round, event.old_round)

  def _on_apply(self, event: events.Apply) -> None:
    island = self._island(event.role, event.time)
    if island is not None and event.mode != "rebase":
      island.overwritten(event.fragment)

  def _on_commit(self, event: events.Commit) -> None:
    p, round_id = event.fragment, event.round
    self._know(p)
    self._commits += 1
    gains = {}
    for island, m in self._known(event.participants):
      island.commits += 1
      gains[m] = island.answered(p, round_id) / self._fragments
    chain = self.chains[p]
    most = self._chain_gains / self._fragments
    chain.commit(round_id, event.base_round, gains, most)
    for island, _ in self._known(event.rejected):
      island.account["rejected"] += island.answered(p, round_id) / self._fragments

  def _known(self, learners: Mapping[int, Any]) -> list[tuple[IslandAccount, int]]:
    return [(self._islands[m], m) for m in learners if m in self._islands]

  def _know(self, fragment: int) -> None:
    """Roles that were started one by one have no engine that says how many fragments there are."""
    self._fragments = max(self._fragments, fragment + 1)

  def _on_owns(self, event: events.Owns | events.Recalled) -> None:
    self._know(event.fragment)
    self.chains[event.fragment].go_to(event.round)

  def _on_exit(self, event: events.Exit) -> None:
    island = self._island(event.target, event.time)
    if island is not None and island.phase:
      self._dies(island, event.time)

  def _on_restart(self, event: events.Restart) -> None:
    island = self._island(event.target, event.time)
    if island is not None:
      island.spend(event.time, "down")
      island.phase = "rejoin"

  def _on_stopped(self, event: events.Stopped) -> None:
    island = self._island(event.role, event.time)
    if island is not None and island.phase:
      island.spend(event.time, "other")
      island.phase = ""

  def _on_run_finished(self, event: events.RunFinished) -> None:
    for island in self._islands.values():
      if island.phase:
        island.spend(event.time, "other" if island.phase == "training" else island.phase)
        island.phase = ""
    self._ended = True

  def _dies(self, island: IslandAccount, now: float) -> None:
    """What it was in the middle of is lost with it."""
    island.spend(now, "discarded" if island.phase == "training" else island.phase)
    island.phase = "down"

  def _island(self, name: str, now: float) -> IslandAccount | None:
    kind, number = parse_role(name)
    return self._at(number, now) if kind == "learner" else None

  def _at(self, m: int, now: float) -> IslandAccount:
    if m not in self._islands:
      self._islands[m] = IslandAccount(now, self._exact_steps)
    return self._islands[m]


_HANDLERS: Mapping[type[Event], Callable[[Ledger, Any], None]] = {
  events.RunStarted: Ledger._on_run_started,
  events.Compiled: Ledger._on_compiled,
  events.Started: Ledger._on_started,
  events.Step: Ledger._on_step,
  events.Captured: Ledger._on_captured,
  events.CopyOut: Ledger._on_copy_out,
  events.Resend: Ledger._on_resend,
  events.Apply: Ledger._on_apply,
  events.Commit: Ledger._on_commit,
  events.Owns: Ledger._on_owns,
  events.Recalled: Ledger._on_owns,
  events.Exit: Ledger._on_exit,
  events.Restart: Ledger._on_restart,
  events.Stopped: Ledger._on_stopped,
  events.RunFinished: Ledger._on_run_finished,
}
