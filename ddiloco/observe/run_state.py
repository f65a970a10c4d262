"""The state of a run, folded from its events; all views of a run read this state. PURE.

`RunState` takes events in order of time; each event carries its time. The live view, the
dashboard's page, the report and its summary are made from it. Its size depends on the number of
islands and fragments, not on how long the run is.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable

from ddiloco.config import Config
from ddiloco.observe.goodput import Ledger
from ddiloco.observe.guards import warn
from ddiloco.observe.history import Clocks, Curves, Rounds, TrafficTotals
from ddiloco.observe.islands import (
  DOWN,
  OUTER_GRADIENTS,
  RECENT_COMMITS,
  IslandState,
  LogEvent,
  MemberState,
  ShardState,
  Speed,
  finite_or,
  outer_gradients,
  role_name,
  speed,
)
from ddiloco.observe.style import rounded
from ddiloco.observe.tracks import Rejoins
from ddiloco.protocol import events
from ddiloco.protocol.events import Event, parse_role

RECENT_LOG_EVENTS = 100
MOST_MARKS = 200
NOTE_SECONDS = 5.0  # a text is noted once within so long: every shard reports the same member
LONE_SHARE = 0.9  # if this share of recent rounds has one island each, `solo` reports it
LONE_PERIODS = 3  # recent are so many rounds of each fragment, at most RECENT_COMMITS in all;
LEAST_ROUNDS = 4  # and at least so many in all
SHOWN_REASONS = SHOWN_ROLES = 4
PACE_SECONDS = 600.0  # after so long a pace is known, also if it is far less than a percent
NOTED_COMPILE_SECONDS = 0.5
_FREQUENT = {events.Step, events.CopyOut, events.Push, events.Stage, events.Apply, events.Commit}
_OWN = {"learner": "learner", "syncer": "shard"}  # kind of role: how handlers are called


class RunState:
  """The state of the whole run.

  Args:
    config: the run's, for what its events may not say (whether the model is an own one; without an
      engine, how many roles there should be); None: not known.
    noted: called with each log event when it is noted.
  """

  def __init__(
    self, config: Config | None = None, noted: Callable[[LogEvent], None] = lambda note: None
  ):
    self._noted = noted
    self.name = ""
    # An own model may measure its loss in any unit, and does not say in which.
    self.loss_unit = "" if config is not None and config.model.custom else "nats per token"
    self.time = self._before_this = 0.0  # of the newest event, and of the newest one before it
    self.num_events = 0
    self.torn_lines = 0  # lines that were no events
    self.odd_events = 0  # events that this version does not write so
    self.kinds: Counter[type[Event]] = Counter()
    self.num_fragments = self.num_shards = self.total_tokens = 0
    self.islands: dict[int, IslandState] = {}
    self.shards: dict[int, ShardState] = {}
    self.versions: dict[int, int] = {}  # of the global model, by fragment
    # By fragment, in its present value; without shards, by island, trained in its newest life.
    self.merged_tokens: dict[int, int] = {}
    self.commits = 0
    self.rejected = 0  # pushes
    self.solo_rounds = 0  # rounds of one island while `solo` holds
    self.blocked_seconds = 0.0
    self.heldout_loss = self.heldout_time = math.nan  # the newest, and when it was measured
    self.heldout_measures: dict[str, float] = {}  # of the newest evaluation, beside its loss
    # By recent commit, the only learner in it; -1: several.
    self.lone: deque[int] = deque(maxlen=RECENT_COMMITS)
    self._gradients = {name: deque[float](maxlen=RECENT_COMMITS) for name in OUTER_GRADIENTS}
    self.log_events: deque[LogEvent] = deque(maxlen=RECENT_LOG_EVENTS)
    self.first_step_time = math.nan  # since the run was started, or went on, the last time ...
    self._before: dict[int, int] = {}  # ... and the merged tokens until then
    self.finished = ""  # why the run ended
    self.ledger, self.rejoins, self.rounds = Ledger(), Rejoins(self.islands), Rounds()
    self.traffic, self.curves, self.clocks = TrafficTotals(), Curves(), Clocks()
    self._on_traffic = self.traffic.add
    self.marks: deque[LogEvent] = deque(maxlen=MOST_MARKS)  # those that a timeline shows
    self.mark_counts: Counter[str] = Counter()  # by their kind, of all that ever were
    # Roles that are still down, and whose death a mark of a kill or a crash tells already.
    self._killed: set[str] = set()
    if config is not None:
      self.total_tokens, self.num_shards = config.run.total_tokens, config.sync.num_shards
      for m in range(config.islands.num_learners):
        self._island(m, 0.0)

  def read(self, events: Iterable[Event]) -> RunState:
    """Takes all these events; an event with impossible numbers is counted as odd and skipped."""
    for event in events:
      try:
        self.add(event)
      except (ArithmeticError, ValueError) as error:
        self._count_odd(event.kind, str(error))
    self.torn_lines += getattr(events, "torn_lines", 0)
    return self

  def add(self, event: Event) -> None:
    """Takes one event. An `Odd` event, which this version cannot read, is counted."""
    self._before_this, self.time = self.time, max(self.time, event.time)
    self.num_events += 1
    self.kinds[type(event)] += 1
    self.rejoins.add(event)
    if said := note_of(event):
      self._note(event, *said)
    kind, (role, number) = event.kind, parse_role(event.role)
    if handler := getattr(self, f"_on_{kind}", None):
      handler(event)
    if number >= 0 and (handler := getattr(self, f"_{_OWN.get(role)}_{kind}", None)):
      handler(event, number)
    if role == "syncer" and (shard := self.shards.get(number)):
      if shard.state == "running":
        shard.turn(event.time, "running")  # an earlier silence is over
      shard.show_alive(event.time, self.time)
    self.ledger.take(event)
    self.rounds.add(event)
    self.clocks.add(event)

  # --- what follows from the state ----------------------------------------------------------------

  @property
  def tokens_done(self) -> float:
    """How far the run is: merged tokens, the mean over fragments; without shards, those of every
    island's newest life: it begins anew."""
    return self._mean(self.merged_tokens)

  @property
  def least_merged(self) -> int:
    """Merged tokens of the fragment with the fewest: the whole model has seen so many."""
    return min((self.merged_tokens.get(p, 0) for p in self.fragments), default=0)

  @property
  def fragments(self) -> range:
    """All fragments: without an engine no event says how many there are."""
    return range(max([self.num_fragments, *(p + 1 for p in self.versions)]))

  def _mean(self, tokens: dict[int, int]) -> float:
    """Of all fragments; without shards, the sum of all islands."""
    parts = max(1, self.num_fragments, len(self.merged_tokens)) if self.num_shards else 1
    return sum(tokens.values()) / parts

  @property
  def progress(self) -> float:
    """Share of the run that is done, 0 to 1; without shards, of what all islands are to train."""
    each = self.merged_tokens.values() if self.num_shards else [self.tokens_done]
    return merged_share(each, self.total_tokens, self.num_fragments)

  def participation(self, m: int) -> float | None:
    """The share of all commits that an island took part in; None without commits."""
    return rounded(self.islands[m].commits / self.commits) if self.commits else None

  @property
  def outer_gradients(self) -> dict[str, float]:
    """The means of `OUTER_GRADIENTS` over the recent commits; NaN where there are none."""
    return {
      name: statistics.fmean(each) if each else math.nan for name, each in self._gradients.items()
    }

  @property
  def solo(self) -> str:
    """Says that round after round merged one island alone, though there are others, and why; ""."""
    needed = min(RECENT_COMMITS, max(LEAST_ROUNDS, LONE_PERIODS * len(self.fragments)))
    recent = list(self.lone)[-needed:]
    count = sum(m >= 0 for m in recent)
    if self.finished or count < LONE_SHARE * needed or len(recent) < needed:
      return ""
    there = [m for m, island in self.islands.items() if island.state != "left"]
    if len(there) < 2:
      return ""
    alone = {m for m in recent if m >= 0}
    who = f"island {min(alone)} alone" if len(alone) == 1 else "only one island each"
    others = sorted(m for m in there if alone != {m} and self.islands[m].missed_reason)
    reasons = [f"island {m}: {self.islands[m].missed_reason}" for m in others[:SHOWN_REASONS]]
    why = f" Why: {'; '.join(reasons)}." if reasons else ""
    return (
      f"{count} of the last {needed} rounds merged {who}, of {len(there)}: what the"
      f" others do is not in the global model.{why} Fix: raise sync.min_quorum."
    )

  def speed(self, time: float) -> Speed:
    """The speed of all islands that train at that time, together."""
    islands = self.islands.values()
    return speed((i, i.tokens_per_second) for i in islands if i.state_at(time) == "running")

  @property
  def usual_speed(self) -> Speed:
    """The speed of all islands together, if each trains as usual."""
    return speed((each, each.usual_rate) for each in self.islands.values())

  def seconds_left(self, time: float) -> float:
    """Seconds to the end at the pace since the first step, of this start if the run was killed and
    goes on; NaN during its first ten minutes, or first percent."""
    left, elapsed = self.total_tokens * (1 - self.progress), time - self.first_step_time
    gained = self._mean({p: self.merged_tokens[p] - each for p, each in self._before.items()})
    enough = gained > (0.01 * self.total_tokens if elapsed < PACE_SECONDS else 0.0)
    known = enough and elapsed > 0 and self.total_tokens > 0
    return elapsed * left / gained if known else math.nan

  def members(self) -> dict[str, MemberState]:
    """All islands and shards, by role."""
    islands = {f"learner-{m}": island for m, island in self.islands.items()}
    return islands | {f"syncer-{s}": shard for s, shard in self.shards.items()}

  @property
  def restarts(self) -> int:
    """How often islands and shards were started again."""
    return sum(member.restarts for member in self.members().values())

  @property
  def absorbed(self) -> int:
    """How many short spans of roles are part of others on a timeline."""
    return sum(member.num_absorbed for member in self.members().values())

  def spans(self, now: float, seen: float) -> dict[str, list[list]]:
    """By role, [start, end, state] without gaps up to `now`; stalls are judged at time `seen`."""
    judged = {"learner": seen, "syncer": self.shards_at(seen)}
    found = {r: m.spans(now, judged[parse_role(r)[0]]) for r, m in self.members().items()}
    return {role: spans for role, spans in found.items() if spans}

  def shards_at(self, time: float) -> float:
    """The time at which silence of shards is judged: shards end when no island trains any more."""
    trains = any(island.state == "running" for island in self.islands.values())
    return time if trains else -math.inf

  # --- members ------------------------------------------------------------------------------------

  def _island(self, m: int, time: float) -> IslandState:
    """The island, which is known from `time` on."""
    if m not in self.islands:
      self.islands[m] = IslandState(since=time)
      self.curves.limit(len(self.islands))
    return self.islands[m]

  def _shard(self, s: int, time: float) -> ShardState:
    """The same for a shard: without an engine no event says how many there are."""
    if s not in self.shards:
      self.shards[s] = ShardState(since=time)
      if not self.num_shards:
        self.merged_tokens, self._before = {}, {}  # by fragment from now on
      self.num_shards = max(self.num_shards, s + 1)
    return self.shards[s]

  def _target_is(self, target: str, time: float, state: str) -> None:
    kind, number = parse_role(target)
    known = {"learner": self._island, "syncer": self._shard}
    if kind in known and number >= 0:
      member = known[kind](number, time)
      member.turn(time, state)
      member.halted = time

  def _note(
    self, event: Event, text: str, tone: str, mark: str = "", role: str = "", more: str = ""
  ) -> None:
    """`mark`: of what kind it is on the timeline of the role; "": it is not on it. `more`: a part
    of the text that each shard may say differently."""
    note, since = LogEvent(event.time, text + more, tone, mark, role), event.time - NOTE_SECONDS
    lately = [each.text for each in self.log_events if each.time > since]
    if not any(each.startswith(text) for each in lately):
      self.log_events.append(note)
      self._noted(note)
    if mark:
      self.marks.append(note)
      self.mark_counts[mark] += 1

  # --- events -------------------------------------------------------------------------------------
  # `_on_KIND` is called with an event of that kind; `_learner_KIND` and `_shard_KIND` with one that
  # a learner or a shard itself recorded, and its number.

  def _on_odd(self, event: events.Odd) -> None:
    self._count_odd(event.said, event.reason)

  def _count_odd(self, kind: str, reason: str) -> None:
    if not self.odd_events:
      warn(f"an event {kind!r} cannot be read and is left out: {reason}")
    self.odd_events += 1

  def _on_run_started(self, event: events.RunStarted) -> None:
    self.name, self.total_tokens = event.name, event.total_tokens
    self.num_fragments, self.num_shards = event.num_fragments, event.num_shards
    self._go_on(event)
    self.finished = ""  # also of a finished run that is resumed
    self.first_step_time, self._before = math.nan, {}
    for m in range(event.num_learners):
      self._island(m, event.time)
    for s in range(event.num_shards):
      self._shard(s, event.time)

  def _go_on(self, event: events.RunStarted) -> None:
    """A run that was killed, or is over, goes on: until now none of its roles was there."""
    self._killed.clear()
    for members, count in ((self.islands, event.num_learners), (self.shards, event.num_shards)):
      for number, member in members.items():
        if member.state != "starting":
          gone = member.state == "left" or self.finished or number >= count
          member.turn(self._before_this, "left" if gone else "lost")
          if number < count:
            member.turn(event.time, "restarting")

  def _on_run_finished(self, event: events.RunFinished) -> None:
    self.finished = event.reason or "finished"
    self._note(event, f"the run is over: {self.finished}", "plain")

  def _restarts(self, event: Event, member: MemberState) -> None:
    """Where no engine says that a role is started again, its next life says it itself."""
    if member.lives and event.incarnation > member.incarnation and member.state != "restarting":
      text = f"{role_name(event.role)} restarts"
      self._note(event, text, "plain", "restart", event.role)
      member.turn(event.time, "restarting")

  def _shard_started(self, event: events.Started, s: int) -> None:
    shard = self._shard(s, event.time)
    self._restarts(event, shard)
    if shard.live(event.incarnation):
      shard.live_on(event.time, "running")
      shard.fragments, shard.unheard = event.fragments, set()

  def _learner_launched(self, event: events.Launched, m: int) -> None:
    self._restarts(event, self._island(m, event.time))

  def _learner_started(self, event: events.Started, m: int) -> None:
    island = self._island(m, event.time)
    if island.live(event.incarnation):
      island.live_on(event.time, "joining")
      island.start(event)

  def _learner_joined(self, event: events.Joined, m: int) -> None:
    island = self._island(m, event.time)
    if island.live(event.incarnation):
      island.live_on(event.time, "running")
      island.global_step, island.alive_at = event.global_step, event.time

  def _on_owns(self, event: events.Owns | events.Regained) -> None:
    """The fragment's value is this one, which may be older than its newest commit."""
    self.versions[event.fragment] = event.version
    self.merged_tokens[event.fragment] = event.merged_tokens

  _on_regained = _on_owns

  def _learner_step(self, event: events.Step, m: int) -> None:
    island = self._island(m, event.time)
    newest = island.live(event.incarnation)
    island.steps += 1
    island.tokens += event.tokens
    island.data_seconds += event.data_seconds
    self.blocked_seconds += event.blocked_seconds
    self.curves.add_step(event, m, island)
    if newest:  # else a late step of an earlier incarnation
      self._step(event, m, island)

  def _step(self, event: events.Step, m: int, island: IslandState) -> None:
    first = not island.life_steps  # of its life; on an accelerator it is only begun by now
    passed = event.time - island.alive_at
    if not first:
      island.wait(event)
    if island.state not in ("quarantined", "left"):
      island.live_on(event.time, "running")
    took = passed if passed > 0 else max(1e-9, event.seconds)
    rate = math.nan if first else event.tokens / took
    smoothed = 0.8 * island.tokens_per_second + 0.2 * rate
    if math.isnan(self.first_step_time):
      self.first_step_time = event.time
    island.step, island.global_step = event.step, event.global_step
    island.life_steps += 1
    if event.loss is not None:
      if not math.isfinite(event.loss) and not island.diverged:
        self._note(event, f"island {m}: its loss is {event.loss}", "bad")
      island.loss, island.diverged = event.loss, not math.isfinite(event.loss)
    if island.note_data_wait(event):
      text, tone = "has its data in time again", "good"
      if island.starved:
        text, tone = "waits for its data most of the time", "bad"
      self._note(event, f"island {m} {text}", tone)
    if not first and 0 < event.gap_seconds < math.inf:
      island.gaps.append(event.gap_seconds)
      pace = 1 / max(1e-9, event.seconds, event.gap_seconds - event.blocked_seconds)
      island.steps_per_second = finite_or(0.8 * island.steps_per_second + 0.2 * pace, pace)
    if not self.num_shards:
      self.merged_tokens[m] = event.step * event.tokens
      self._before.setdefault(m, self.merged_tokens[m] - event.tokens)
    island.tokens_per_second = finite_or(smoothed, rate)
    island.step_seconds, island.step_tokens = event.seconds, event.tokens
    island.show_alive(event.time, self.time)

  def _learner_apply(self, event: events.Apply | events.CopyOut, m: int) -> None:
    self._island(m, event.time).versions[event.fragment] = event.version

  _learner_copy_out = _learner_apply  # that of a restored life names the version it builds on

  def _learner_rejected(self, event: events.Rejected, m: int) -> None:
    self._island(m, event.time).rejected += 1

  def _learner_stopped(self, event: events.Stopped, m: int) -> None:
    if self._island(m, event.time).live(event.incarnation):
      self.islands[m].turn(event.time, "left")

  def _shard_member(self, event: events.Member, s: int) -> None:
    shard = self._shard(s, event.time)
    shard.unheard.discard(event.learner)
    if event.state == "lost" and event.learner in self.islands:
      shard.unheard.add(event.learner)

  def _on_member(self, event: events.Member) -> None:
    m, state, time = event.learner, event.state, event.time
    if m >= 0 and event.reason == "heard again":  # of a cut its learner may know nothing
      self._note(event, f"the syncer hears island {m} again", "good")
    if m < 0 or state == "joined":  # the evaluator; a learner records its joining itself
      return
    island = self._island(m, time)
    before = island.state
    silent = before == "running" and island.state_at(time) != "running"
    if state == "quarantined" or (silent and state != "ahead"):
      island.turn(time, state)
    if state == "left":
      return  # which it says itself; it misses no round
    island.missed_time, island.missed_reason = time, event.reason or state
    if before in DOWN or before == "left":
      return  # already noted
    why = f": {event.reason}" if event.reason else ""
    self._note(event, f"the syncer counts island {m} as {state}", "bad", more=why)

  def _shard_commit(self, event: events.Commit, s: int) -> None:
    before, taking = self.solo, event.weights.keys()
    self._count_commit(event, s)
    for m in taking:
      self._island(m, event.time).commits += 1
    for m in self.rejoins.merge(event):
      self._note(event, f"island {m} is merged again", "good", "merged", f"learner-{m}")
    for m, why in {**event.missing, **event.rejected}.items():
      if m >= 0:
        island = self._island(m, event.time)
        island.missed_time, island.missed_reason = event.time, why
    there = [m for m, island in self.islands.items() if island.state != "left" or m in taking]
    for m in there:
      self.islands[m].took_part.append(m in taking)
    self._shard_abandoned(event, s)
    for m in event.opposing.keys() - event.rejected.keys():
      self._note(event, f"push of island {m} points against all others'", "bad")
    self.curves.add_commit(event, there)
    for name, value in outer_gradients(event).items():
      self._gradients[name].append(value)
    solo = self.solo
    self.solo_rounds += len(taking) == 1 and bool(solo)
    if bool(solo) != bool(before):
      text = solo or "rounds merge several islands again"
      self._note(event, text, "bad" if solo else "good")

  def _count_commit(self, event: events.Commit, s: int) -> None:
    self.commits += 1
    self._shard(s, event.time).commits += 1
    self.versions[event.fragment] = event.version
    self.merged_tokens[event.fragment] = event.merged_tokens
    self._before.setdefault(event.fragment, event.merged_tokens - sum(event.tokens))
    self.lone.append(min(event.weights) if len(event.weights) == 1 else -1)

  def _shard_round(self, event: Event, s: int) -> ShardState:
    """The shard works on a round: a planned stall of it is over."""
    shard = self._shard(s, event.time)
    if shard.state == "stalled":
      shard.live_on(event.time, "running")
    return shard

  def _shard_abandoned(self, event: events.Commit | events.Abandoned, s: int) -> None:
    """A round is over, with or without a commit."""
    shard = self._shard_round(event, s)
    shard.rejected, shard.last_reason = shard.rejected + len(event.rejected), event.reason
    self.rejected += len(event.rejected)
    for m, why in event.rejected.items():
      self._note(event, f"push of island {m} rejected: {why}", "bad")

  def _on_fault(self, event: events.Fault) -> None:
    if event.action == "kill":
      self._killed.add(event.target)
    if event.action in ("kill", "stall"):
      self._target_is(event.target, event.time, "lost" if event.action == "kill" else "stalled")

  def _on_exit(self, event: events.Exit) -> None:
    kind, number = parse_role(event.target)
    island = self.islands.get(number) if kind == "learner" else None
    if self.finished or (island is not None and island.state == "left"):
      return  # an exit in good order
    self._target_is(event.target, event.time, "lost")
    mark = "" if event.target in self._killed else "exit"
    text = f"{role_name(event.target)} is down: {event.reason}"
    self._note(event, text, "bad", mark, event.target)

  def _on_crash(self, event: events.Crash) -> None:
    """The end of a life that no engine may see; one that does says it once more."""
    member = self.members().get(event.role)
    if member is None or event.incarnation >= member.incarnation:
      self._target_is(event.role, event.time, "lost")
      self._killed.add(event.role)

  def _on_restart(self, event: events.Restart) -> None:
    self._killed.discard(event.target)
    self._target_is(event.target, event.time, "restarting")

  def _on_evaluation(self, event: events.Evaluation) -> None:
    self.heldout_loss, self.heldout_time = event.loss, event.time
    self.heldout_measures = event.measures
    if math.isfinite(event.loss):
      self.curves.evaluations.add(event)

  def _on_unsaved(self, event: events.Unsaved) -> None:
    """What keeps many roles out of a snapshot, such as a full disk, is noted of the first one."""
    what = f"is not in snapshot {event.snapshot}: "
    cause, _, _ = event.reason.partition(": ")  # before a path, which is the role's own
    if not any(what + cause in each.text for each in self.log_events):
      self._note(event, f"{role_name(event.role)} {what}{event.reason}", "bad")


def merged_share(tokens: Collection[float], total_tokens: int, fragments: int = 0) -> float:
  """Share of a run that is merged, 0 to 1: the mean over fragments. What one has beyond the run's
  end does not count for others, which the run waits for.

  Args:
    tokens: merged tokens of each fragment.
    total_tokens: the run's; 0: not known.
    fragments: how many there are; those beyond `tokens` have none.
  """
  whole = total_tokens * max(1, fragments, len(tokens))
  return sum(min(each, total_tokens) for each in tokens) / whole if whole else 0.0


def note_of(event: Event) -> tuple[str, ...]:
  """What is noted of an event whatever the state of the run, its tone, and for a timeline what kind
  of mark it is, and of whom; of most events nothing."""
  if type(event) in _FREQUENT:
    return ()
  who = role_name(getattr(event, "target", event.role))
  match event:
    case events.Joined() if event.role.startswith("learner"):
      return f"{who} joined at global step {event.global_step} after {event.seconds:.1f} s", "good"
    case events.Stopped() if event.role.startswith("learner"):
      return f"{who} stopped: {event.reason}", "plain"
    case events.Compiled(program=""):
      return f"{who} is compiled after {event.seconds:.0f} s", "plain"
    case events.Compiled() if event.seconds >= NOTED_COMPILE_SECONDS:
      when = f"in the middle of its work: {event.seconds:.1f} s"
      return f"{who} compiled {event.program} {when}", "bad"
    case events.Crash():
      lines = event.trace.strip().split("\n")
      while lines[-2:-1] == ["-" * 20]:  # a note of JAX or Grain on the frames that it hides
        del lines[-2:]
      return f"{who} crashed: {lines[-1]}", "bad", "exit", event.role
    case events.Restored():
      return f"{who} has its part of snapshot {event.snapshot}", "good"
    case events.Snapshot() if event.lacks:
      return f"snapshot {event.snapshot} is committed without {_names(event.lacks)}", "bad"
    case events.Uncommitted():
      reason = event.reason or f"it lacks {_names(event.missing)}"
      return f"snapshot {event.snapshot} is given up: {reason}", "bad"
    case events.Regained():
      given = f"fragment {event.fragment} at version {event.version}"
      return f"{who} got {given} back from island {event.learner}", "good"
    case events.Fault():
      detail = f" ({event.detail})" if event.detail else ""
      mark = "kill" if event.action == "kill" else "fault"
      return f"{who}: planned {event.action}{detail}", "bad", mark, event.target
    case events.Restart():
      return f"{who} restarts", "plain", "restart", event.target
    case events.Hung():
      usual = f" (a step takes {event.usual_seconds:.2g} s)" if event.usual_seconds else ""
      text = f"{who} hangs: silent for {event.seconds:.0f} s{usual}; its log has all stacks"
      return text, "bad", "hang", event.target
    case events.Dropped() if event.peer == event.role:
      return f"{who}: {event.count:,} events of its log are lost: {event.reason}", "bad"
    case events.Profiled():
      return f"{event.steps} steps of {who} are traced: {event.path}", "plain"
    case events.Unprofiled():
      return f"{who} could not be traced: {event.reason}", "bad"
    case events.Unevaluated():
      at = f"at {event.merged_tokens:,} merged tokens"
      return f"the held-out loss {at} is missing: {event.reason}", "bad"
    case events.Evaluation() if not math.isfinite(event.loss):
      return f"the held-out loss is {event.loss}", "bad"
  return ()


def _names(roles: Iterable[str]) -> str:
  """The names of a few roles, and how many more there are."""
  names = list(map(role_name, sorted(roles, key=parse_role)))
  if (more := len(names) - SHOWN_ROLES) > 0:
    names[SHOWN_ROLES:] = [f"{more} more"]
  return ", ".join(names)
