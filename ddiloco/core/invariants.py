"""Checks a tape: performs it with symbols that know which inner steps are in which value. PURE.

What must hold: a value's version is its base's plus one; pushes were cut on the value they were
merged into; no step is merged twice on the way to any value; counts of steps and tokens are those
of the steps themselves; rounds only grow; clocks never go back within an incarnation; nothing is
used that was never made. The end of a life may be missing: that is how a kill leaves it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ddiloco.core.progress import History, Ledger, Push, Version
from ddiloco.core.tape import (
  INITIAL,
  Apply,
  Commit,
  Cut,
  Donated,
  Entry,
  Inherited,
  Key,
  Life,
  Momentum,
  Owns,
  Problem,
  Pushed,
  Recorded,
  Resend,
  Restored,
  Saved,
  Stage,
  Started,
  State,
  Step,
  Tape,
  Value,
  makes,
  perform_all,
  round_name,
)
from ddiloco.core.values import replace


@dataclasses.dataclass(frozen=True)
class Checked:
  """The result: what was found wrong, and how much was looked at."""

  problems: tuple[Problem, ...]
  counts: Mapping[str, int]  # learners, incarnations, steps, cuts, merged, commits, applies, ...

  @property
  def summary(self) -> tuple[str, ...]:
    """What was checked, a line for each invariant."""
    c: Mapping[str, int] = collections.defaultdict(int, self.counts)
    return (
      f"{c['steps']:,} steps of {c['learners']:,} learners in {c['incarnations']:,} incarnations:"
      " consecutive, clocks never go back, no batch twice in an incarnation",
      f"{c['cuts']:,} pushes: each holds exactly the steps and tokens that it says",
      f"{c['commits']:,} commits of {c['merged']:,} pushes on the values these were cut from:"
      " versions grow by one, rounds grow, tokens add up",
      f"{c['stretches']:,} stretches of steps merged, none twice on the way to any value",
      f"{c['applies']:,} versions applied: each exists, and contains the pushes that it must",
      f"{c['snapshots']:,} states recorded, {c['restores']:,} restored,"
      f" {c['inherited']:,} optimizer states inherited",
    )


def check(tape: Tape) -> Checked:
  """Performs the tape with symbols; never raises for what is in it."""
  ledger = Ledger()
  made: dict[Key, Any] = {Value(p, INITIAL): ledger.initial(p) for p in tape.fragments()}
  actors: dict[str, _Learner | _Shard] = {}
  for role in tape.roles:
    cls = _Shard if role.startswith("syncer") else _Learner
    actors[role] = cls(role, ledger)

  def missing(entry: Entry, key: Key) -> None:
    ledger.say(entry, f"needs {key}, which nobody made")

  perform_all(tape, actors, made, missing)
  for lives in tape.roles.values():
    for life in lives:
      _check_start(life, ledger)
  learners = [lives for role, lives in tape.roles.items() if role.startswith("learner")]
  ledger.counts["learners"] = len(learners)
  ledger.counts["incarnations"] = sum(map(len, learners))
  return Checked((*tape.problems, *ledger.problems), dict(ledger.counts))


def _check_start(life: Life, ledger: Ledger) -> None:
  """Once, though what it restores it has before; one that is killed at once says nothing."""
  starts = [e for e in life.entries if isinstance(e.operation, Started)]
  others = [e for e in life.entries if not isinstance(e.operation, Started | Restored)]
  if life.number >= 0 and (len(starts) > 1 or (others and not starts)):
    where = (starts or others)[-1]
    ledger.say(where, f"this incarnation says {len(starts)} times that it started")


@dataclasses.dataclass
class _Mine:
  """One fragment, as a learner has it."""

  round: int
  version: int
  begin: int  # place in its history: what comes after is not merged
  cut: Push | None = None  # the newest, until a value answers it
  staged: tuple[tuple[Stage, Push | None], ...] = ()  # values on their way, with the cut in them


class _Learner:
  """A learner, or the evaluator: of arrays it knows only whose steps are in them."""

  def __init__(self, role: str, ledger: Ledger):
    self.role, self.ledger = role, ledger

  def begin(self, life: Life) -> None:
    self.fragments: dict[int, _Mine] = {}
    self.history = History()
    self.step = self.clock = self.position = -1
    self.cut_rounds: dict[int, int] = {}
    self.snapshots: set[int] = set()

  def perform(self, entry: Entry, given: Mapping[Any, Any]) -> Mapping[Any, Any]:
    say = self._sayer(entry)
    match entry.operation:
      case Restored() as op:
        self._restore(given.get(State(entry.role, op.of_incarnation, op.snapshot)))
      case Step() as op:
        self._step(op, entry, say)
      case Cut() as op:
        return {makes(entry)[0]: self._cut(op, entry, say)}
      case Resend() as op:
        return {makes(entry)[0]: self._resend(op, entry, say)}
      case Stage() as op:
        self._stage(op, given.get(Value(op.fragment, op.round)), say)
      case Apply() as op:
        self._apply(op, say)
      case Recorded(snapshot):
        self.snapshots.add(snapshot)
        self.ledger.counts["snapshots"] += 1
        fragments = {p: replace(f) for p, f in self.fragments.items()}
        return {makes(entry)[0]: (self.history.until(len(self.history)), fragments)}
      case Saved(snapshot):
        if snapshot not in self.snapshots:
          say(f"snapshot {snapshot} was saved, but never recorded")
      case Inherited():
        self.ledger.counts["inherited"] += 1
    return dict.fromkeys(makes(entry))

  def _sayer(self, entry: Entry) -> Callable[[str], None]:
    return lambda text: self.ledger.say(entry, text)

  def _restore(self, state: tuple[History, dict[int, _Mine]] | None) -> None:
    self.ledger.counts["restores"] += 1
    if state is not None:
      history, fragments = state
      self.history = history.until(len(history))
      self.fragments = {p: replace(f) for p, f in fragments.items()}

  def _step(self, op: Step, entry: Entry, say: Callable[[str], None]) -> None:
    if self.step >= 0 and op.step != self.step + 1:
      say(f"step {op.step} follows step {self.step}")
    if op.clock <= self.clock:
      say(f"the clock went back from {self.clock} to {op.clock}")
    if op.position <= self.position:
      say(f"batch {op.position} follows batch {self.position}")
    if op.tokens < 1:
      say(f"a step of {op.tokens} tokens")
    self.step, self.clock, self.position = op.step, op.clock, op.position
    self.history.add(entry.incarnation, op.step, op.tokens)
    self.ledger.counts["steps"] += 1

  def _cut(self, op: Cut, entry: Entry, say: Callable[[str], None]) -> Push:
    self.ledger.counts["cuts"] += 1
    mine = self.fragments.get(op.fragment)
    if mine is None or mine.staged:
      say(f"cuts fragment {op.fragment}, while it has none or a newer one is on its way")
    if mine is None:
      mine = self.fragments[op.fragment] = _Mine(op.base_round, op.version, len(self.history))
    end = len(self.history)
    push = Push(
      learner=entry.number,
      incarnation=entry.incarnation,
      round=op.round,
      base_round=op.base_round,
      stretches=self.history.stretches(mine.begin, end),
      steps=end - mine.begin,
      tokens=self.history.tokens(mine.begin, end),
      end=end,
    )
    if (op.base_round, op.version) != (mine.round, mine.version):
      base = f"version {mine.version} of {round_name(mine.round)}"
      say(f"cut on version {op.version} of {round_name(op.base_round)}, but its base is {base}")
    if (op.steps, op.tokens) != (push.steps, push.tokens):
      text = f"{push.steps} steps and {push.tokens} tokens are not merged"
      say(f"cut says {op.steps} steps and {op.tokens} tokens, but {text}")
    self._next_round(op.fragment, op.round, say)
    mine.cut = push
    return push

  def _resend(self, op: Resend, entry: Entry, say: Callable[[str], None]) -> Push | None:
    mine = self.fragments.get(op.fragment)
    if mine is None or mine.cut is None or mine.cut.round != op.old_round:
      say(f"sends the push for {round_name(op.old_round)} again, which is not its newest")
      return None
    self._next_round(op.fragment, op.round, say)
    mine.cut = replace(mine.cut, incarnation=entry.incarnation, round=op.round)
    return mine.cut

  def _next_round(self, fragment: int, round_id: int, say: Callable[[str], None]) -> None:
    before = self.cut_rounds.get(fragment, INITIAL)
    if round_id <= before:
      say(f"answers {round_name(round_id)} after {round_name(before)}")
    self.cut_rounds[fragment] = round_id

  def _stage(self, op: Stage, value: Version | None, say: Callable[[str], None]) -> None:
    nothing = _Mine(INITIAL - 1, -1, len(self.history))
    mine = self.fragments.setdefault(op.fragment, nothing)
    if value is not None and op.version != value.version:
      say(f"has {round_name(op.round)} as version {op.version}, it is {value.version}")
    newest = mine.staged[-1][0].round if mine.staged else mine.round
    if op.round < newest or (op.round == newest and op.mode != "overwrite"):
      say(f"takes {round_name(op.round)} after {round_name(newest)}")
    if op.included and mine.cut is None:
      say("takes a version that is said to include its push, but it has none")
    if mine.cut is not None and value is not None:
      self._agree(op, value, mine.cut, say)
    if op.mode != "overwrite" and newest < INITIAL:
      say(f"takes {round_name(op.round)} by {op.mode}, but has nothing of fragment {op.fragment}")
    mine.staged += ((op, mine.cut if op.included else None),)
    mine.cut = None

  def _apply(self, op: Apply, say: Callable[[str], None]) -> None:
    self.ledger.counts["applies"] += 1
    mine = self.fragments.get(op.fragment)
    if mine is None or not mine.staged:
      say(f"applies {round_name(op.round)} of fragment {op.fragment}, which was not staged")
      return
    (staged, cut), *rest = mine.staged
    if dataclasses.astuple(op) != dataclasses.astuple(staged):
      say(f"applies another value than was staged: {op}, not {staged}")
    if staged.mode != "rebase":
      mine.begin = len(self.history)
    elif cut is not None:
      mine.begin = cut.end
    mine.round, mine.version, mine.staged = staged.round, staged.version, tuple(rest)

  def _agree(self, op: Stage, value: Version, cut: Push, say: Callable[[str], None]) -> None:
    """Rebase keeps what is not included and gives up what is: both must be true."""
    at = self.ledger.ancestor(value, cut.round)
    merged = at is not None and (cut.learner, cut.incarnation) in at.pushes
    push = f"its push for {round_name(cut.round)}"
    if op.included and not merged:
      say(f"{round_name(op.round)} does not include {push}, but is said to")
    if merged and not op.included and op.mode == "rebase":
      say(
        f"{round_name(op.round)} includes {push}, but is said not to: its steps would count twice"
      )


class _Shard:
  """A shard: of arrays it knows only what was merged into them."""

  def __init__(self, role: str, ledger: Ledger):
    self.role, self.ledger = role, ledger
    self.newest: dict[int, int] = {}  # round, of all incarnations

  def begin(self, life: Life) -> None:
    self.owned: dict[int, Version] = {}
    self.snapshots: set[int] = set()

  def perform(self, entry: Entry, given: Mapping[Any, Any]) -> Mapping[Any, Any]:
    match entry.operation:
      case Owns() as op:
        self._own(op, given, entry)
      case Commit() as op:
        value = self._commit(op, given, entry)
        return {Value(op.fragment, op.round): value, Momentum(op.fragment, op.round): value}
      case Recorded(snapshot):
        self.snapshots.add(snapshot)
        self.ledger.counts["snapshots"] += 1
      case Saved(snapshot):
        if snapshot not in self.snapshots:
          self.ledger.say(entry, f"snapshot {snapshot} was saved, but never recorded")
      case Started() | Donated():
        pass
    return dict.fromkeys(makes(entry))

  def _own(self, op: Owns, given: Mapping[Any, Any], entry: Entry) -> None:
    value = given.get(Value(op.fragment, op.round))
    if value is None:  # said already
      value = Version(op.fragment, op.round, op.version, None, 0)
    before = self.owned.get(op.fragment)
    if op.version != value.version:
      text = f"owns {round_name(op.round)} as version {op.version}, it is {value.version}"
      self.ledger.say(entry, text)
    if op.momentum_round > op.round:
      self.ledger.say(entry, f"has the momentum of a later round than {round_name(op.round)}")
    if before is not None and op.version < before.version:
      self.ledger.say(entry, f"version {op.version} follows {before.version} in the same life")
    self.owned[op.fragment] = value

  def _commit(self, op: Commit, given: Mapping[Any, Any], entry: Entry) -> Version:
    say = self.ledger.say
    self.ledger.counts["commits"] += 1
    base = self.owned.get(op.fragment)
    if base is None:
      say(entry, f"commits fragment {op.fragment}, which it does not own")
      base = Version(op.fragment, op.base_round, op.version - 1, None, 0)
    elif op.base_round != base.round:
      text = f"but has {round_name(base.round)}"
      say(entry, f"commits on {round_name(op.base_round)}, {text}")
    if op.version != base.version + 1:
      say(entry, f"version {op.version} follows {base.version}")
    if op.round <= max(base.round, self.newest.get(op.fragment, INITIAL)):
      say(entry, f"{round_name(op.round)} of fragment {op.fragment} comes after a later one")
    if (op.fragment, op.round) in self.ledger.values:
      say(entry, f"{round_name(op.round)} of fragment {op.fragment} was committed twice")
    who = frozenset(zip(op.learners, op.incarnations))
    found = [given.get(Pushed(m, i, op.fragment, op.round)) for m, i in sorted(who)]
    pushes = [push for push in found if push is not None]
    tokens = base.merged_tokens + sum(push.tokens for push in pushes)
    value = Version(op.fragment, op.round, op.version, base.round, tokens, who)
    self._count(op, pushes, value, entry)
    self.ledger.values[op.fragment, op.round] = self.owned[op.fragment] = value
    self.newest[op.fragment] = max(op.round, self.newest.get(op.fragment, INITIAL))
    return value

  def _count(self, op: Commit, pushes: list[Push], value: Version, entry: Entry) -> None:
    say = self.ledger.say
    for push in pushes:
      if push.base_round != value.base_round:
        text = f"learner {push.learner} cut its push on {round_name(push.base_round)}"
        say(entry, f"commits on {round_name(op.base_round)}, but {text}")
      self.ledger.merge(entry, value, push)
    self.ledger.counts["merged"] += len(pushes)
    if len(pushes) < len(op.learners):
      return  # a push is missing: said already
    told = (op.steps, op.tokens, op.merged_tokens)
    summed = sum(p.steps for p in pushes), sum(p.tokens for p in pushes), value.merged_tokens
    for name, said, true in zip(("steps", "tokens", "merged_tokens"), told, summed):
      if said != true:
        say(entry, f"commit says {said} {name}, the pushes make it {true}")
