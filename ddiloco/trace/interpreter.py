"""Performs a trace: which state each operation changes, and what must hold before it. PURE.

An algebra represents the values: in `trace/check.py` as sets of inner steps, in `trace/replay.py`
as arrays, computed as the run did. Rounds, versions and tokens are followed here, for both. A
violation becomes a problem of the `Proof`, and the trace is performed to its end anyway.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddiloco.protocol import events
from ddiloco.protocol.events import parse_role
from ddiloco.protocol.values import Frozen, replace
from ddiloco.trace import operations as ops
from ddiloco.trace.operations import INITIAL, Entry, Key, Trace, round_name

# --- Values that move between roles ---------------------------------------------------------------


class Pushed(Frozen):
  """A learner's push for a round: its steps since a base."""

  learner: int
  incarnation: int
  round: int
  base_round: int
  steps: int
  tokens: int
  content: Any  # the algebra's


class Version(Frozen):
  """A fragment's value: its base and the pushes that were merged into it."""

  fragment: int
  round: int
  version: int
  base_round: int | None = None
  merged_tokens: int = 0
  pushes: frozenset[tuple[int, int]] = frozenset()  # learner, incarnation
  content: Any = None  # the algebra's


class Proof:
  """Shared by all roles: the problems, and all versions by round, each with its base's round."""

  def __init__(self) -> None:
    self.problems: list[str] = []
    self.versions: dict[tuple[int, int], Version] = {}  # fragment, round; without content

  def say(self, entry: Entry, text: str) -> None:
    """Adds a problem that this operation shows."""
    self.problems.append(entry.problem(text))

  def add(self, version: Version) -> Version:
    """Notes a new version; returns it."""
    self.versions[version.fragment, version.round] = replace(version, content=None)
    return version

  def ancestor(self, version: Version, round_id: int) -> Version | None:
    """The version, or that of its direct and indirect bases, that this round made, if any."""
    at: Version | None = version
    while at is not None and at.round > round_id:
      base = at.base_round
      at = None if base is None or base >= at.round else self.versions.get((at.fragment, base))
    return at if at is not None and at.round == round_id else None


class LearnerAlgebra:
  """A learner's parameters, optimizer and exchange. What a subclass leaves out has no effect."""

  def begin(self, started: events.Started | None) -> None:
    """An incarnation starts, with nothing; None: it does not say how."""

  def step(self, entry: Entry) -> None:
    """One inner step."""

  def copy_out(self, op: events.CopyOut) -> tuple[int, int, Any]:
    """(steps, tokens, content) of a push of all unmerged steps."""
    return op.steps, op.tokens, None

  def stage(self, op: events.Stage, version: Version | None, included: Pushed | None) -> Any:
    """The input of `apply`. `version` None: back to the base; `included`: the push in it."""

  def apply(self, fragment: int, staged: Any, mode: str) -> None:
    """Applies a staged value to the parameters."""

  def capture(self, entry: Entry, fragments: Mapping[int, Held]) -> Any:
    """The input of a later `restore`."""

  def restore(self, state: Any) -> None:
    """Takes over a captured state."""

  def donate(self, fragment: int) -> Any:
    """A copy of the inner optimizer's moments."""

  def inherit(self, fragment: int, moments: Any) -> None:
    """Takes over donated moments."""


class ShardAlgebra:
  """A shard's values and outer optimizer. What a subclass leaves out has no effect."""

  def own(self, op: events.Owns, version: Version, momentum: Version | None) -> Any:
    """The content of a fragment with the value of `version` and the momentum of `momentum`."""

  def commit(self, entry: Entry, base: Version, new: Version, pushes: Sequence[Pushed]) -> Any:
    """The content of `new`: the outer step on `base` with these pushes."""

  def capture(self, entry: Entry, owned: Mapping[int, Version]) -> None:
    """The shard's part of a snapshot."""


# --- Roles ----------------------------------------------------------------------------------------

Say = Callable[[str], None]


class TraceRole:
  """One role over all its incarnations."""

  def __init__(self, proof: Proof, algebra: Any):
    self.proof, self.algebra = proof, algebra
    self._incarnation: int | None = None

  def perform(self, entry: Entry, given: Sequence[Any]) -> dict[Key, Any]:
    """Performs an operation with what it `needs` (None: missing); returns what it `makes`."""
    op, say = entry.operation, functools.partial(self.proof.say, entry)
    if op.incarnation != self._incarnation:
      self._incarnation, self._begun = op.incarnation, False
      self._restored: Any = None  # what it starts with
      self._snapshots: set[int] = set()
    match op:
      case events.Restored():
        self._restored = given[0]
        return {}
      case events.Started():
        if self._begun:
          say("this incarnation says again that it started")
        self.begin(op)
      case _ if not self._begun:
        if parse_role(op.role)[1] >= 0:  # the evaluator does not say it
          say("this incarnation does not say that it started")
        self.begin(None)
      case events.Captured():
        self._snapshots.add(op.snapshot)
      case events.Saved() if op.snapshot not in self._snapshots:
        say(f"snapshot {op.snapshot} was saved, but never captured")
    self._begun = True
    return dict(zip(ops.makes(op), self._perform(entry, given, say)))

  def begin(self, started: events.Started | None) -> None:
    """Begins an incarnation, with what it has restored."""
    raise NotImplementedError

  def _perform(self, entry: Entry, given: Sequence[Any], say: Say) -> Sequence[Any]:
    raise NotImplementedError


class Held(Frozen):
  """A learner's state of one fragment."""

  round: int = INITIAL - 1  # nothing yet
  version: int = -1
  push: Pushed | None = None  # the newest, until a value that came after it is staged
  staged: tuple[tuple[events.Stage, Any], ...] = ()  # values not applied yet, and their contents

  @property
  def newest(self) -> int:
    """Round of the newest value, also if it is staged but not applied."""
    return self.staged[-1][0].round if self.staged else self.round


class LearnerRole(TraceRole):
  """A learner, or the evaluator, which only receives; `algebra` is a `LearnerAlgebra`."""

  def begin(self, started: events.Started | None) -> None:
    self.algebra.begin(started)
    self._fragments: dict[int, Held] = {}
    if self._restored is not None:
      (state, fragments), self._restored = self._restored, None  # as large as the island's memory
      self._fragments = dict(fragments)
      self.algebra.restore(state)
    self._newest_step: events.Step | None = None
    self._answered: dict[int, int] = {}  # fragment -> the last round it has pushed for

  def _perform(self, entry: Entry, given: Sequence[Any], say: Say) -> Sequence[Any]:
    match entry.operation:
      case events.Step() as op:
        self._step(op, say)
        self.algebra.step(entry)
      case events.CopyOut() as op:
        return (self._copy_out(op, say),)
      case events.Resend() as op:
        return (self._resend(op, say),)
      case events.Stage() as op:
        self._stage(op, given[0], say)
      case events.Apply() as op:
        self._apply(op, say)
      case events.Captured():
        return ((self.algebra.capture(entry, self._fragments), dict(self._fragments)),)
      case events.Donated(fragment=fragment):
        return (self.algebra.donate(fragment),)
      case events.Inherited(fragment=fragment):
        self.algebra.inherit(fragment, given[0])
    return ()

  def _step(self, op: events.Step, say: Say) -> None:
    before, self._newest_step = self._newest_step, op
    if op.tokens < 1:
      say(f"a step of {op.tokens} tokens")
    if before is None:
      return
    if op.step != before.step + 1:
      say(f"step {op.step} follows step {before.step}")
    if op.global_step <= before.global_step:
      say(f"the global step went back from {before.global_step} to {op.global_step}")
    if op.position <= before.position:
      say(f"batch {op.position} follows batch {before.position}")

  def _copy_out(self, op: events.CopyOut, say: Say) -> Pushed:
    held = self._fragments.get(op.fragment)
    if held is None or held.staged:
      say(f"copies out fragment {op.fragment}, while it has none or a newer one is on its way")
    held = held or Held(op.base_round, op.version)
    steps, tokens, content = self.algebra.copy_out(op)
    learner = parse_role(op.role)[1]
    push = Pushed(learner, op.incarnation, op.round, op.base_round, steps, tokens, content)
    if (op.base_round, op.version) != (held.round, held.version):
      base = f"version {held.version} of {round_name(held.round)}"
      say(
        f"copied out on version {op.version} of {round_name(op.base_round)}, but its base is {base}"
      )
    if (op.steps, op.tokens) != (steps, tokens):
      text = f"{steps} steps and {tokens} tokens are not merged"
      say(f"copy-out says {op.steps} steps and {op.tokens} tokens, but {text}")
    return self._answer(op.fragment, held, push, say)

  def _resend(self, op: events.Resend, say: Say) -> Pushed | None:
    held = self._fragments.get(op.fragment)
    if held is None or held.push is None or held.push.round != op.old_round:
      say(f"sends the push for {round_name(op.old_round)} again, which is not its newest")
      return None
    push = replace(held.push, incarnation=op.incarnation, round=op.round)
    return self._answer(op.fragment, held, push, say)

  def _answer(self, fragment: int, held: Held, push: Pushed, say: Say) -> Pushed:
    before = self._answered.get(fragment, INITIAL)
    if push.round <= before:
      say(f"answers {round_name(push.round)} after {round_name(before)}")
    self._answered[fragment] = push.round
    self._fragments[fragment] = replace(held, push=push)
    return push

  def _stage(self, op: events.Stage, version: Version | None, say: Say) -> None:
    held = self._fragments.get(op.fragment, Held())
    if version is not None and op.version != version.version:
      say(f"has {round_name(op.round)} as version {op.version}, it is {version.version}")
    if op.round < held.newest or (op.round == held.newest and op.mode != "reset"):
      say(f"takes {round_name(op.round)} after {round_name(held.newest)}")
    if op.included and held.push is None:
      say("takes a version that is said to include its push, but it has none")
    if held.push is not None and version is not None:
      self._agree(op, version, held.push, say)
    if op.mode != "overwrite" and held.newest < INITIAL:
      say(f"takes {round_name(op.round)} by {op.mode}, but has nothing of fragment {op.fragment}")
    rejected = op.round == held.newest  # its push was rejected: it goes back to its base
    included = held.push if op.included else None
    staged = op, self.algebra.stage(op, None if rejected else version, included)
    self._fragments[op.fragment] = replace(held, push=None, staged=(*held.staged, staged))

  def _agree(self, op: events.Stage, version: Version, push: Pushed, say: Say) -> None:
    """Checks `op.included`: if it is set, a mode that keeps work drops the push's steps."""
    at = self.proof.ancestor(version, push.round)
    merged = at is not None and (push.learner, push.incarnation) in at.pushes
    what = f"its push for {round_name(push.round)}"
    if op.included and not merged:
      say(f"{round_name(op.round)} does not include {what}, but is said to")
    if merged and not op.included and op.mode in events.KEEPS_WORK:
      say(
        f"{round_name(op.round)} includes {what}, but is said not to: its steps would count twice"
      )

  def _apply(self, op: events.Apply, say: Say) -> None:
    held = self._fragments.get(op.fragment)
    if held is None or not held.staged:
      say(f"applies {round_name(op.round)} of fragment {op.fragment}, which was not staged")
      return
    (staged, content), *rest = held.staged
    if _taken(op) != _taken(staged):
      say(f"applies another value than was staged: {op}, not {staged}")
    self.algebra.apply(op.fragment, content, staged.mode)
    self._fragments[op.fragment] = replace(
      held, round=staged.round, version=staged.version, staged=tuple(rest)
    )


def _taken(op: events.Stage | events.Apply) -> tuple[Any, ...]:
  return op.fragment, op.version, op.round, op.mode, op.included


class ShardRole(TraceRole):
  """A shard: the fragments it owns, and the outer steps it takes on them."""

  def __init__(self, proof: Proof, algebra: ShardAlgebra):
    super().__init__(proof, algebra)
    self._last_round: dict[int, int] = {}  # of all incarnations

  def begin(self, started: events.Started | None) -> None:
    self._owned: dict[int, Version] = {}

  def _perform(self, entry: Entry, given: Sequence[Any], say: Say) -> Sequence[Any]:
    match entry.operation:
      case events.Owns() as op:
        self._own(op, *given, say=say)
      case events.Commit() as op:
        version = self._commit(op, entry, given, say)
        return version, version  # its value and its momentum
      case events.Captured():
        self.algebra.capture(entry, self._owned)
        return (None,)
    return ()

  def _own(
    self, op: events.Owns, version: Version | None, momentum: Version | None = None, *, say: Say
  ) -> None:
    version = version or Version(op.fragment, op.round, op.version)  # missing: reported already
    before = self._owned.get(op.fragment)
    if op.version != version.version:
      say(f"owns {round_name(op.round)} as version {op.version}, it is {version.version}")
    if op.momentum_round > op.round:
      say(f"has the momentum of a later round than {round_name(op.round)}")
    if before is not None and op.round < before.round:
      say(f"{round_name(op.round)} follows {round_name(before.round)} in the same incarnation")
    content = self.algebra.own(op, version, momentum)
    self._owned[op.fragment] = replace(version, content=content)

  def _commit(self, op: events.Commit, entry: Entry, given: Sequence[Any], say: Say) -> Version:
    base = self._owned.get(op.fragment)
    if base is None:
      say(f"commits fragment {op.fragment}, which it does not own")
      base = Version(op.fragment, op.base_round, op.version - 1)
    elif op.base_round != base.round:
      say(f"commits on {round_name(op.base_round)}, but has {round_name(base.round)}")
    if op.version != base.version + 1:
      say(f"version {op.version} follows {base.version}")
    last = max(base.round, self._last_round.get(op.fragment, INITIAL))
    if op.round <= last:
      say(f"{round_name(op.round)} of fragment {op.fragment} comes after a later one")
    if (op.fragment, op.round) in self.proof.versions:
      say(f"{round_name(op.round)} of fragment {op.fragment} was committed twice")
    pushes = [push for push in given if push is not None]
    tokens = base.merged_tokens + sum(push.tokens for push in pushes)
    who = frozenset(zip(op.learners, op.incarnations))
    new = Version(op.fragment, op.round, op.version, base.round, tokens, who)
    self._compare(op, base, new, pushes, say)
    new = replace(new, content=self.algebra.commit(entry, base, new, pushes))
    self._last_round[op.fragment] = max(op.round, last)
    self._owned[op.fragment] = new
    return self.proof.add(new)

  def _compare(
    self, op: events.Commit, base: Version, new: Version, pushes: list[Pushed], say: Say
  ) -> None:
    """Compares what the commit says of its pushes with the pushes themselves."""
    for push in pushes:
      if push.base_round != base.round:
        text = f"learner {push.learner} copied its push out on {round_name(push.base_round)}"
        say(f"commits on {round_name(op.base_round)}, but {text}")
    if len(pushes) < len(op.learners):
      return  # a push is missing: reported already
    said = {"steps": op.steps, "tokens": op.tokens, "merged_tokens": op.merged_tokens}
    steps, tokens = zip(*((push.steps, push.tokens) for push in pushes))
    true = steps, tokens, new.merged_tokens
    for (name, logged), made in zip(said.items(), true):
      if logged != made:
        say(f"commit says {logged} {name}, the pushes make it {made}")


# --- All roles ------------------------------------------------------------------------------------


class Schedule:
  """Says which roles may go on: a role waits while its next operation needs a value not made yet.

  It does not wait for a value that no operation makes. A value is forgotten after its last use, so
  that a replay needs hardly more memory than its run had.

  Args:
    trace: of a run.
    made: values that exist already: the initial ones.
    proof: told of needed values that are missing.
  """

  def __init__(self, trace: Trace, made: Mapping[Key, Any], proof: Proof):
    self._uses = collections.Counter(key for op in trace.operations() for key in ops.needs(op))
    self._ever = {key for op in trace.operations() for key in ops.makes(op)}
    self._made: dict[Key, Any] = {}
    self._proof = proof
    self._left = {role: collections.deque(entries) for role, entries in trace.roles.items()}
    self.put(made)

  @property
  def left(self) -> int:
    """The number of operations left of all roles."""
    return sum(map(len, self._left.values()))

  def may_go(self, role: str) -> bool:
    """Whether the role has a next operation and need not wait."""
    left = self._left[role]
    return bool(left) and not any(
      key in self._ever and key not in self._made for key in ops.needs(left[0].operation)
    )

  def next(self, role: str) -> tuple[Entry, list[Any]]:
    """The role's next operation, and the values that it needs."""
    entry, given = self._left[role].popleft(), []
    for key in ops.needs(entry.operation):
      if key not in self._made:
        self._proof.say(entry, f"needs {key}, which was never made")
      given.append(self._made.get(key))
      self._uses[key] -= 1
      if not self.wanted(key):
        self._made.pop(key, None)
    return entry, given

  def wanted(self, key: Key) -> bool:
    """Whether an operation will still need it."""
    return self._uses[key] > 0

  def put(self, made: Mapping[Key, Any]) -> None:
    """Adds values that were made."""
    self._made |= {key: thing for key, thing in made.items() if self.wanted(key)}

  def perform_all(
    self,
    roles: Mapping[str, TraceRole],
    progress: Callable[[int, int], None] = lambda done, of: None,
  ) -> None:
    """Performs all operations, in turn one of each role that need not wait: a step that an island
    has begun on its devices goes on there beside those of others.

    `progress` is called after each turn of all roles, with the operations done, and of all.
    """
    of = self.left
    while waiting := [role for role, left in self._left.items() if left]:
      able = [role for role in waiting if self.may_go(role)]
      for role in able or waiting[:1]:  # if all wait for each other, the trace is of no run
        self.put(roles[role].perform(*self.next(role)))
      progress(of - self.left, of)
