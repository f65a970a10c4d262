"""The goodput ledger: where every chip-second of a run went, from its events alone. PURE.

Goodput is the share of allocated chip time that was spent on inner steps whose work is in the
global model. Fragments merge a step one by one: each of the P fragments that has merged the step
counts for 1/P of its seconds, whatever its push weighed in the merge. The global model is the chain
of rounds behind every fragment's newest value, so rounds that a restored shard has rolled back do
not count, unless they are regained. Without shards, a step counts until a later life of its island
does it again.

The ledger's size is bounded, however long a run is: steps and rounds that a restored role may still
go back to are kept one by one, older ones are summed up.

Every role has a clock of its own. An island's time is taken from its own events, and a push belongs
to the commit of its round, whichever of the two seems to be the earlier.

Every second that is not useful has one of these causes; with the useful seconds they add up to all
allocated time. The right column is the bucket of ml-goodput-measurement that a cause would be in.

| cause     | seconds in which an island                                    | bucket               |
|-----------|---------------------------------------------------------------|----------------------|
| start_up  | began its first life: imports, devices, waiting for the first | PROGRAM_STARTUP      |
|           | values                                                        |                      |
| compile   | compiled, or took a program from the cache; also in the       | PROGRAM_STARTUP      |
|           | middle of its work                                            |                      |
| down      | was dead and not yet started again                            | INFRASTRUCTURE_...   |
| rejoin    | began a later life: imports, restore, every fragment anew     | RECOVERY_FROM_...    |
| blocked   | waited for a shard (lock-step only)                           | CUSTOM_BADPUT_EVENTS |
| data      | waited for its next batch                                     | DATA_LOADING_SYNC    |
| stalled   | stood still in the middle of its work                         | OTHER                |
| discarded | made steps that never reached the global model: lost with a   | WASTED_PROGRESS_...  |
|           | life, or overwritten                                          |                      |
| rejected  | made steps of pushes that were rejected                       | WASTED_PROGRESS_...  |
| pending   | made steps that are not merged yet, or were not at the end    | (none)               |
| save      | copied its part of a snapshot                                 | CHECKPOINT_SAVE_TIME |
| other     | copied and applied fragments, ended                           | OTHER                |
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from array import array
from collections.abc import Mapping
from typing import Any

from ddiloco.observe.history import Idle
from ddiloco.observe.islands import STALL_SECONDS, STALL_STEPS
from ddiloco.observe.style import rounded
from ddiloco.protocol import events
from ddiloco.protocol.events import Event, parse_role
from ddiloco.protocol.messages import INITIAL

CAUSES = {  # each in words, which dashboard/page/goodput.js has as well
  "start_up": "start-up",
  "compile": "compiling",
  "down": "down",
  "rejoin": "rejoining",
  "blocked": "waiting for shards",
  "data": "waiting for data",
  "stalled": "standing still",
  "discarded": "work lost",
  "rejected": "work rejected",
  "pending": "work not merged yet",
  "save": "snapshots",
  "other": "between steps",
}
RECENT_STEPS = 33  # a step or pause longer than STALL_STEPS times the median of these is a stall
EXACT_STEPS = 2048  # steps of an island kept one by one: two snapshot intervals are 400
# Pushes without a commit, and commits without a push, of an island and fragment: usually one. Where
# clocks differ there are as many as rounds begin in that time.
MOST_PUSHED = 64
CHAIN_SUMS = 250_000  # sums (one a learner and round) of all fragments together ...
LEAST_ROUNDS = 128  # ... but at least so many rounds a fragment: two snapshot intervals are 17


@dataclasses.dataclass(frozen=True)
class Goodput:
  """The account so far. Shares are of `chip_seconds`, by cause; with `goodput` they add up to 1."""

  # Allocated: from the start of the run, or of its learner, to its end; not from there to the next.
  chip_seconds: float
  goodput: float
  goodput_training: float  # the same without `start_up` and `compile` of first lives
  causes: Mapping[str, float]
  uptime: float  # share of the time since the first step in which at least one island trained
  learners: Mapping[int, LearnerGoodput]

  def as_json(self) -> dict[str, Any]:
    """How chip time was spent, in shares; and each learner's liveness."""
    return {
      "chip_seconds": rounded(self.chip_seconds),
      "goodput": rounded(self.goodput),
      "goodput_training": rounded(self.goodput_training),
      "uptime": rounded(self.uptime),
      "lost_time": {cause: round(share, 6) for cause, share in self.causes.items()},
      "liveness": {str(m): rounded(each.liveness) for m, each in self.learners.items()},
    }


@dataclasses.dataclass(frozen=True)
class LearnerGoodput:
  """One learner."""

  chip_seconds: float
  goodput: float
  liveness: float  # share of its allocated time in which it was training


class Ledger:
  """Takes a run's events in order of time; `report` at any moment.

  Its size depends on the islands and fragments, not on the length of the run.
  """

  def __init__(self, exact_steps: int = EXACT_STEPS, chain_sums: float = CHAIN_SUMS) -> None:
    """Limits of memory: steps of an island kept one by one, sums of all chains together."""
    self._exact_steps, self._chain_sums = exact_steps, chain_sums
    self._islands: dict[int, IslandAccount] = {}
    self.chains: dict[int, Chain] = collections.defaultdict(Chain)
    self._fragments = 0  # 0: there is no sync
    self._idle = Idle()
    self._now = 0.0
    self._ended = False

  def take(self, event: Event) -> None:
    """Enters one event. Kinds that say nothing about time or merges are ignored."""
    newest, self._now = self._now, max(self._now, event.time)
    match event:
      case events.Commit():
        self._commit(event)
      case events.Owns() | events.Regained():
        self._know(event.fragment)
        self.chains[event.fragment].head = event.round
      case events.RunStarted():
        self._begin(event, newest)
      case events.RunFinished():
        self._ended = True
        for island in self._islands.values():
          island.end(event.time)
      case _:
        self._take(event)

  def report(self, now: float | None = None) -> Goodput:
    """The account up to `now` (seconds since the run started), else up to the newest event."""
    now = self._now if now is None or self._ended else max(now, self._now)
    learners = {m: self._balance(m, now) for m in sorted(self._islands)}
    causes = {cause: sum(account[cause] for account, _ in learners.values()) for cause in CAUSES}
    useful = sum(good for _, good in learners.values())
    total = useful + sum(causes.values())
    first_start = sum(island.first_start_until(now) for island in self._islands.values())
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
    island = self._islands[m]
    account = dict.fromkeys(CAUSES, 0.0) | island.account
    if island.phase:
      cause = "other" if island.phase == "training" else island.phase
      account[cause] += island.seconds_under_way(now) * (island.chips or 1)
    if not self._fragments:
      merged, pending = island.sums.last, 0.0
    else:
      merged = sum(chain.merged_of(island.place) for chain in self.chains.values())
      merged, pending = merged / self._fragments, island.pending(self._fragments)
      account["rejected"] /= self._fragments
    # With events missing, merged seconds may exceed trained ones: each second counts once.
    useful = min(merged, island.trained)
    account["rejected"] = min(account["rejected"], island.trained - useful)
    left = island.trained - useful - account["rejected"]
    account["pending"] = min(max(0.0, pending), left)
    account["discarded"] += left - account["pending"]
    return account, useful

  def _of_learner(self, m: int, now: float, account: Mapping, useful: float) -> LearnerGoodput:
    island, total = self._islands[m], useful + sum(account.values())
    allocated = island.allocated_seconds + island.seconds_under_way(now)
    return LearnerGoodput(
      total,
      useful / total if total else math.nan,
      island.live_seconds / allocated if allocated else math.nan,
    )

  def _uptime(self, now: float) -> float:
    idle = self._idle
    if math.isnan(idle.end):
      return math.nan
    since = 0.0 if self._ended else max(0.0, now - idle.end)
    whole = idle.end + since - idle.start
    return 1.0 - (idle.seconds + since) / whole if whole > 0 else 1.0

  def _begin(self, event: events.RunStarted, newest: float) -> None:
    """The run begins, or goes on; if it was killed, islands were down since the newest event."""
    if self._ended:
      self._idle.skip(event.time)
    self._ended = False
    self._fragments = event.num_fragments if event.num_shards else 0
    for island in self._islands.values():
      island.end(newest, "discarded", "down")
    for m in range(event.num_learners):
      self._at(m).restart(event.time)
    for m, island in self._islands.items():
      if m >= event.num_learners:  # the run goes on without it, unless it joins
        island.phase = ""

  def _take(self, event: Event) -> None:
    """Enters an event of, or about, one role, if that is a learner."""
    role = getattr(event, "target", event.role)
    kind, m = parse_role(role)
    has_chips = m in self._islands and self._islands[m].phase
    # An island that joins later has its chips from its own first word on: an engine may have
    # compiled for it long before.
    if kind == "learner" and (has_chips or event.role == role):
      trained = self._at(m).take(event)
      if trained is not None:
        self._idle.train(*trained)

  def _at(self, m: int) -> IslandAccount:
    if m not in self._islands:
      self._islands[m] = IslandAccount(len(self._islands), self._exact_steps)
    return self._islands[m]

  def _commit(self, event: events.Commit) -> None:
    p, round_id = event.fragment, event.round
    self._know(p)
    chain = self.chains[p]
    rounds = self._chain_sums / (self._fragments * max(1, len(self._islands)))
    chain.commit(round_id, event.base_round, max(LEAST_ROUNDS, rounds))
    for m in event.weights:  # none of its own events may have been seen yet, by another clock
      self._at(m).answer(p, round_id, chain)
    for m in event.rejected:
      self._at(m).answer(p, round_id, None)

  def _know(self, fragment: int) -> None:
    """Raises the number of fragments: without an engine no event says how many there are."""
    self._fragments = max(self._fragments, fragment + 1)


# --- The ledger's parts: an account for each island, a chain of rounds for each fragment


class StepSums:
  """Cumulative chip-seconds of an island's steps, one by one for recent ones.

  All steps before these are taken for equally long.
  """

  def __init__(self, exact: int = EXACT_STEPS):
    self._exact = exact
    self._first = 0  # the number of the first step that is kept
    self._sums = array("d", [0.0])  # up to and with it, and each that follows

  @property
  def number(self) -> int:
    """The number of the newest step."""
    return self._first + len(self._sums) - 1

  @property
  def last(self) -> float:
    """The sum of all steps."""
    return self._sums[-1]

  def add(self, chip_seconds: float) -> None:
    """Adds a step."""
    self._sums.append(self.last + chip_seconds)
    if len(self._sums) > 2 * self._exact:
      self._first += self._exact
      del self._sums[: self._exact]

  def at(self, step: int) -> float:
    """The sum up to and with this step; 0 is before the first."""
    step = max(0, step)
    if step >= self._first:
      return self._sums[min(step - self._first, len(self._sums) - 1)]
    return self._sums[0] * step / self._first

  def go_to(self, step: int) -> None:
    """Makes `step` the newest: later steps are dropped, missing ones took no time."""
    step = max(0, step)
    if not self._first <= step <= self.number + self._exact:
      self._first, self._sums = step, array("d", [self.at(step)])
    del self._sums[step - self._first + 1 :]
    while self.number < step:
      self.add(0.0)


class IslandAccount:
  """One learner over all its lives. Times in seconds, accounts in chip-seconds."""

  def __init__(self, place: int, exact_steps: int = EXACT_STEPS):
    self.place = place  # its index, in the order in which islands appeared
    self.phase = ""  # its activity since `since`; "" without chips: before its start, after its end
    self.since = -math.inf  # only grows: while a clock that was set back catches up, no time passes
    self.lives = 0
    self.chips = 0  # 0 until its first life says it: until then the account is of one chip
    self.account: dict[str, float] = collections.defaultdict(float)
    self.first_start = 0.0  # chip-seconds of the account in which its first life started
    self.trained = 0.0  # chip-seconds of all steps of all lives
    self.sums = StepSums(exact_steps)  # of this life's steps and of the earlier ones it builds on
    self.live_seconds = 0.0
    self.allocated_seconds = 0.0
    # By fragment: the step up to which all is merged or given up, and the sum up to this step.
    self._settled: dict[int, tuple[int, float]] = {}
    # By fragment and round: the last step in a push, and the chip-seconds of all its steps.
    self._pushed: dict[int, dict[int, tuple[int, float]]] = collections.defaultdict(dict)
    # By fragment and round: what takes a push in that is not there yet (None: it was rejected).
    self._awaited: dict[int, dict[int, Chain | None]] = collections.defaultdict(dict)
    self._recent: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
    self._known = {"save": 0.0, "compile": 0.0}  # since the last step, beside it

  def take(self, event: Event) -> tuple[float, float] | None:
    """Enters one event; for a step returns the (start, end) in which the island trained."""
    now = event.time
    if not self.phase:
      self._come_back(event)
    if self.phase in ("training", "down") and isinstance(event, events.Launched | events.Started):
      self.restart(now)  # no engine has said so
    match event:
      case events.Step():
        return self._step(event)
      case events.CopyOut():
        covered = self.sums.last - self.sums.at(self.sums.number - max(0, event.steps))
        self._keep(event.fragment, event.round, (self.sums.number, covered))
      case events.Resend():
        pushed = self._pushed[event.fragment].get(event.old_round)
        if pushed is not None:
          self._keep(event.fragment, event.round, pushed)
      case events.Apply():
        if event.mode not in events.KEEPS_WORK:  # local progress of the fragment is gone
          self._settle(event.fragment, self.sums.number)
      case events.Captured():
        self._known["save"] += positive(event.seconds)
      case events.Compiled():
        self._compile(now, positive(event.seconds))
      case events.Started():
        self._start(now, max(1, event.devices))
      case events.Exit():
        self.end(now, "discarded", "down")  # a step under way is lost with the life
      case events.Restart():
        self.restart(now)
      case events.Stopped():
        self.end(now)
    return None

  def restart(self, now: float) -> None:
    """Another life begins."""
    if self.phase:
      self.phase = "down"
      self._spend_until(now, self.phase)
    self.since, self.phase = max(self.since, now), self._beginning

  @property
  def _beginning(self) -> str:
    """The activity in which its next life begins."""
    return "rejoin" if self.lives else "start_up"

  def _come_back(self, event: Event) -> None:
    """An island has chips, or has them again: the time between is not charged."""
    if isinstance(event, events.Launched | events.Compiled | events.Started | events.Step):
      passed = getattr(event, "gap_seconds", getattr(event, "seconds", 0.0))  # of a compilation
      self.since, self.phase = max(self.since, event.time - positive(passed)), self._beginning

  def seconds_under_way(self, now: float) -> float:
    """Seconds of its present activity, which are not in the account yet."""
    return max(0.0, now - self.since) if self.phase else 0.0

  def first_start_until(self, now: float) -> float:
    """`first_start`, with what is not in the account yet."""
    under_way = self.seconds_under_way(now) if self.phase == "start_up" else 0.0
    return self.first_start + under_way * (self.chips or 1)

  def end(self, now: float, under_way: str = "other", phase: str = "") -> None:
    """A life is over, or the run; `under_way`: the cause of the time since the last step."""
    if self.phase:
      self._spend_until(now, under_way if self.phase == "training" else self.phase)
      self.phase = phase

  def _spend_until(self, until: float, cause: str) -> None:
    """Books the time from the last entry to `until` as `cause`."""
    self._spend(max(0.0, until - self.since), cause)
    self.since = max(self.since, until)

  def _spend(self, seconds: float, cause: str) -> None:
    self.allocated_seconds += seconds
    self.account[cause] += seconds * (self.chips or 1)
    if self.phase == "start_up":
      self.first_start += seconds * (self.chips or 1)

  def _start(self, now: float, chips: int) -> None:
    """A life has its devices."""
    self.phase = self._beginning
    self._spend_until(now, self.phase)
    if not self.chips:
      self.first_start *= chips
      for cause in self.account:
        self.account[cause] *= chips
    self.lives += 1
    self.chips = chips

  def _compile(self, now: float, seconds: float) -> None:
    if self.phase == "training":  # a program compiled in the middle of its work
      self._known["compile"] += seconds
    else:
      self._spend_until(now - seconds, self.phase)
      self._spend_until(now, "compile")

  def _step(self, event: events.Step) -> tuple[float, float]:
    """Accounts for one step and the time before it.

    Of the time since the last entry, the step gets its `seconds`. The rest goes to known causes, in
    this order: waiting for a shard, waiting for data, copying for a snapshot, compiling, standing
    still.
    """
    self.chips = self.chips or 1
    now, seconds = max(event.time, self.since), positive(event.seconds)
    late = self.phase == "down" and event.time <= self.since  # its log came after word of its end
    if self.phase != "training":
      self._spend_until(now - seconds, self.phase)
      self.sums.go_to(event.step - 1)  # later steps of earlier lives are lost
      newest = self.sums.number, self.sums.last
      self._settled = {p: min(each, newest) for p, each in self._settled.items()}
      self.phase = "down" if late else "training"
    passed = now - self.since
    busy = min(seconds, passed)
    stood, left = self._beyond(busy), passed - busy
    waits = {"blocked": positive(event.blocked_seconds), "data": positive(event.data_seconds)}
    for cause, known in (waits | self._known).items():
      self._spend(min(known, left), cause)
      left -= min(known, left)
    stalled = self._beyond(left)
    self._spend(left - stalled, "other")
    stalled += stood
    self._spend(stalled, "stalled")
    busy -= stood
    self.allocated_seconds += busy
    self.live_seconds += passed - stalled
    self.trained += busy * self.chips
    self.sums.add(busy * self.chips)
    self._recent.append(busy + stood)  # or what became ten times as slow would always stand still
    self.since, self._known = now, dict.fromkeys(self._known, 0.0)
    return now - (passed - stalled), now

  def _beyond(self, seconds: float) -> float:
    """How many of these seconds were a stall."""
    if seconds <= STALL_SECONDS:
      return 0.0
    # Of the very first step an accelerator says when it has begun: it is no measure of the second.
    usual = statistics.median(self._recent) if len(self._recent) > 1 else math.inf
    return seconds - usual if seconds > STALL_STEPS * usual else 0.0

  def _keep(self, fragment: int, round_id: int, pushed: tuple[int, float]) -> None:
    _add(self._pushed[fragment], round_id, pushed)
    if round_id in self._awaited[fragment]:
      self.answer(fragment, round_id, self._awaited[fragment].pop(round_id))

  def answer(self, fragment: int, round_id: int, chain: Chain | None) -> None:
    """The round has merged its push into this chain, or has rejected it (None)."""
    if round_id not in self._pushed[fragment]:
      return _add(self._awaited[fragment], round_id, chain)
    step, chip_seconds = self._pushed[fragment].pop(round_id)
    self._settle(fragment, step)
    if chain is not None:
      chain.add(round_id, self.place, chip_seconds)
    else:
      self.account["rejected"] += chip_seconds

  def _settle(self, fragment: int, step: int) -> None:
    """Of the fragment, no step up to this one is pending any more."""
    step = min(self.sums.number, step)
    settled = self._settled.get(fragment, (0, 0.0))
    self._settled[fragment] = max(settled, (step, self.sums.at(step)))

  def pending(self, fragments: int) -> float:
    """Chip-seconds of steps that may still be merged, also of a dead island: it may come back."""
    settled = sum(value for p, (_, value) in self._settled.items() if p < fragments)
    return self.sums.last - settled / fragments


class Chain:
  """The values of one fragment, each with the chip-seconds of every island that are merged in it.

  Values are kept as long as a restored shard may go back to them: it has at least the value of the
  oldest snapshot that is kept, or begins anew. An older value, restored by hand, would count as one
  in which nothing is merged.
  """

  def __init__(self) -> None:
    self.head = INITIAL  # the newest value's round; a restore or a regained value may change it
    # By round: that of its base, and chip-seconds by an island's place; the newest rounds.
    self._rounds: dict[int, tuple[int, array]] = {}

  def merged(self, round_id: int) -> array:
    """Chip-seconds in the value of a round, by an island's place."""
    return self._rounds[round_id][1] if round_id in self._rounds else array("d")

  def merged_of(self, place: int) -> float:
    """Chip-seconds of one island in the newest value."""
    merged = self.merged(self.head)
    return merged[place] if place < len(merged) else 0.0

  def commit(self, round_id: int, base: int, most_rounds: float) -> None:
    """Adds a round to the value `base`."""
    merged = self.merged(base)[:]
    self._rounds.pop(round_id, None)
    self._rounds[round_id] = base, merged
    self.head = round_id
    while len(self._rounds) > most_rounds:
      del self._rounds[next(iter(self._rounds))]

  def add(self, round_id: int, place: int, chip_seconds: float) -> None:
    """Adds an island's part to a round, and to the rounds on top of it if it is not the newest."""
    within = {round_id}
    newest = self._rounds and round_id == next(reversed(self._rounds))
    for each in [round_id] if newest else list(self._rounds):
      base, merged = self._rounds[each]
      if each in within or base in within:
        within.add(each)
        merged.extend([0.0] * (place + 1 - len(merged)))
        merged[place] += chip_seconds


def _add(rounds: dict[int, Any], round_id: int, value: Any) -> None:
  """Adds a round's value; of more than `MOST_PUSHED` rounds the first is left out."""
  rounds[round_id] = value
  if len(rounds) > MOST_PUSHED:
    del rounds[min(rounds)]


def positive(seconds: float) -> float:
  """An event's number of seconds; 0.0 if it is negative or not finite."""
  return float(seconds) if 0 <= seconds < math.inf else 0.0
