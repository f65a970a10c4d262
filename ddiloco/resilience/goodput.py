"""The goodput ledger: where every chip-second of a run went, from its events alone. PURE.

Goodput is the share of allocated chip time that was spent on inner steps whose work is in the
global model. A step's work is in it fragment by fragment: of P fragments, each that merged the step
counts for 1/P of its seconds. The global model is the chain of rounds behind every fragment's
newest value, so what a restored shard has rolled back counts no longer, and counts again if it is
recalled. Where nobody syncs (no shards), a step counts until a later life of its island does it
again.

Every other second has one of these causes; they and the useful ones add up to all allocated time.
The right column is the bucket of ml-goodput-measurement that a cause would be in.

| cause     | seconds in which an island                                    | bucket               |
|-----------|---------------------------------------------------------------|----------------------|
| start_up  | began its first life: imports, devices, waiting for the first | PROGRAM_STARTUP      |
|           | values                                                        |                      |
| compile   | compiled, or took a program from the cache                    | PROGRAM_STARTUP      |
| down      | was dead and not yet started again                            | INFRASTRUCTURE_...   |
| rejoin    | began a later life: imports, restore, every fragment anew     | RECOVERY_FROM_...    |
| blocked   | waited for a shard (lock-step only)                           | CUSTOM_BADPUT_EVENTS |
| stalled   | stood still in the middle of its work                         | OTHER                |
| discarded | made steps that never reached the global model: lost with a   | WASTED_PROGRESS_...  |
|           | life, or overwritten                                          |                      |
| rejected  | made steps that the screen refused                            | WASTED_PROGRESS_...  |
| pending   | made steps that are not merged yet, or were not at the end    | (none)               |
| save      | copied its part of a snapshot                                 | CHECKPOINT_SAVE_TIME |
| other     | read data, cut and applied fragments, ended                   | OTHER                |
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ddiloco.resilience.accounts import Chain, IslandAccount

CAUSES = (
  *("start_up", "compile", "down", "rejoin", "blocked", "stalled"),
  *("discarded", "rejected", "pending", "save", "other"),
)


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
  """Takes a run's events in order of time; `report` at any moment."""

  def __init__(self) -> None:
    self._islands: dict[int, IslandAccount] = {}
    self.chains: dict[int, Chain] = collections.defaultdict(Chain)
    self._fragments = 0  # 0: nobody syncs
    self._commits = 0
    self._gaps: list[tuple[float, float]] = []  # times without any training, since the first step
    self._first = math.nan  # when the first step began
    self._covered = math.nan  # up to here somebody trained, but for the gaps
    self._now = 0.0
    self._ended = False

  def take(self, event: Mapping[str, Any]) -> None:
    """Enters one event. Kinds that say nothing about time or merges are ignored."""
    self._now = max(self._now, event["time"])
    handler = getattr(self, f"_on_{event['kind']}", None)
    if handler is not None:
      handler(event)

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
      useful, rejected, pending = island.sums[-1], 0.0, 0.0
    else:
      useful = sum(chain.merged.get(m, 0.0) for chain in self.chains.values())
      rejected, pending = account["rejected"], island.pending(self._fragments)
    account["pending"] = min(pending, max(0.0, island.trained - useful - rejected))
    account["discarded"] += max(0.0, island.trained - useful - rejected - account["pending"])
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
    idle = sum(b - a for a, b in self._gaps) + (end - self._covered)
    return 1.0 - idle / (end - start) if end > start else 1.0

  def _trained(self, start: float, end: float) -> None:
    """Somebody trained from `start` to `end`, times that only grow at their ends."""
    if math.isnan(self._covered):
      self._first = self._covered = start
    left = []
    for a, b in self._gaps:
      left += [(x, y) for x, y in ((a, min(b, start)), (max(a, end), b)) if x < y]
    if start > self._covered:
      left.append((self._covered, start))
    self._gaps, self._covered = left, max(self._covered, end)

  # --- events -------------------------------------------------------------------------------------

  def _on_run_started(self, event: Mapping[str, Any]) -> None:
    self._ended = False
    self._fragments = event["num_fragments"] if event["num_shards"] else 0
    for m in range(event["num_learners"]):
      island = self._islands.setdefault(m, IslandAccount(event["time"]))
      if island.lives:  # the run was killed as a whole, and goes on: nobody saw when it died
        island.spend(event["time"], "down")
        island.phase = "rejoin"

  def _on_compiled(self, event: Mapping[str, Any]) -> None:
    island = self._island(event["target"], event["time"] - event["seconds"])
    if island is not None and island.phase != "training":
      island.spend(event["time"] - event["seconds"], island.phase or "other")
      island.spend(event["time"], "compile")

  def _on_started(self, event: Mapping[str, Any]) -> None:
    island = self._island(event["role"], event["time"])
    if island is not None:
      if island.phase == "training":  # nobody saw it die
        island.spend(event["time"], "down")
      island.begin(event["time"], event.get("devices", 1))

  def _on_step(self, event: Mapping[str, Any]) -> None:
    island = self._island(event["role"], event["time"] - event["gap_seconds"])
    island.chips = island.chips or 1
    self._trained(*island.step(event))

  def _on_recorded(self, event: Mapping[str, Any]) -> None:
    island = self._island(event["role"], event["time"])
    if island is not None:
      island.capture_seconds += event.get("seconds", 0.0)

  def _on_cut(self, event: Mapping[str, Any]) -> None:
    island = self._island(event["role"], event["time"])
    island.cut(event["fragment"], event["round"], event["steps"])

  def _on_resend(self, event: Mapping[str, Any]) -> None:
    island, p = self._island(event["role"], event["time"]), event["fragment"]
    if (p, event["old_round"]) in island.cuts:
      island.cuts[p, event["round"]] = island.cuts[p, event["old_round"]]

  def _on_apply(self, event: Mapping[str, Any]) -> None:
    island = self._island(event["role"], event["time"])
    if island is not None and event["mode"] != "rebase":
      island.settle(event["fragment"], len(island.sums) - 1)  # local progress is gone
      island.cuts = {key: cut for key, cut in island.cuts.items() if key[0] != event["fragment"]}

  def _on_commit(self, event: Mapping[str, Any]) -> None:
    self._know(event["fragment"])
    self._commits += 1
    p, gains = event["fragment"], {}
    for m in (int(m) for m in event["participants"]):
      island = self._islands.get(m)
      if island is None:
        continue
      island.commits += 1
      cut = island.cuts.pop((p, event["round"]), None)
      if cut is not None:
        gains[m] = cut.chip_seconds / self._fragments
        island.settle(p, cut.step)
    self.chains[p].commit(event["round"], event.get("base_round", self.chains[p].head), gains)
    for m in (int(m) for m in event["rejected"]):
      cut = self._islands[m].cuts.get((p, event["round"])) if m in self._islands else None
      if cut is not None:
        self._islands[m].account["rejected"] += cut.chip_seconds / self._fragments
        self._islands[m].settle(p, cut.step)

  def _know(self, fragment: int) -> None:
    """Roles that were started one by one have no engine that says how many fragments there are."""
    self._fragments = max(self._fragments, fragment + 1)

  def _on_owns(self, event: Mapping[str, Any]) -> None:
    self._know(event["fragment"])
    self.chains[event["fragment"]].go_to(event["round"])

  _on_recalled = _on_owns

  def _on_exit(self, event: Mapping[str, Any]) -> None:
    island = self._island(event["target"], event["time"])
    if island is not None and island.phase:
      self._dies(island, event["time"])

  def _on_restart(self, event: Mapping[str, Any]) -> None:
    island = self._island(event["target"], event["time"])
    if island is not None:
      island.spend(event["time"], "down")
      island.phase = "rejoin"

  def _on_stopped(self, event: Mapping[str, Any]) -> None:
    island = self._island(event["role"], event["time"])
    if island is not None and island.phase:
      island.spend(event["time"], "other")
      island.phase = ""

  def _on_run_finished(self, event: Mapping[str, Any]) -> None:
    for island in self._islands.values():
      if island.phase:
        island.spend(event["time"], "other" if island.phase == "training" else island.phase)
        island.phase = ""
    self._ended = True

  def _dies(self, island: IslandAccount, now: float) -> None:
    """What it was in the middle of is lost with it."""
    island.spend(now, "discarded" if island.phase == "training" else island.phase)
    island.phase = "down"

  def _island(self, name: str, now: float) -> IslandAccount | None:
    kind, _, number = name.replace("/", "-").partition("-")
    return self._islands.setdefault(int(number), IslandAccount(now)) if kind == "learner" else None
