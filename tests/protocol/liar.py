"""A virtual world with one member that lies: it has a valid key, and says whatever it likes.

Its messages are well-formed and in its own name; everything else about them is chance, or close to
the truth, which is worse. `check` runs a world from its seed and judges what the others have of it.
"""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Mapping
from typing import Any

from ddiloco.chaos import Faults
from ddiloco.config import SyncConfig
from ddiloco.core import outer
from ddiloco.protocol import messages, rules
from ddiloco.protocol.events import Commit, Event
from ddiloco.protocol.messages import (
  FragmentState,
  Goodbye,
  Message,
  Moments,
  Publish,
  Pull,
  Push,
  Report,
  RequestMoments,
  RequestValue,
  Value,
  Welcome,
)
from ddiloco.protocol.rules import MAX_PATIENCE_SECONDS
from ddiloco.protocol.values import replace
from ddiloco.simulation.stand_ins import Sized
from ddiloco.simulation.world import Actor, Role
from tests import says
from tests.protocol.ledger import Delta, Ledger
from tests.protocol.virtual import STEP_TOKENS, Pace, Weather, World
from tests.worlds import swarm

OFTEN = {"report": 3, "push": 1, "value": 1, "other": 1}  # how often it says what
LIES = tuple(OFTEN)
KINDS = (*LIES, "drop", "lose_shard")
GREETINGS = 1 / 7  # of all that it says, since it is not heard without
SECONDS = 6.0  # of lies
PATIENCE_SECONDS = 1.0  # of a snapshot, with a member that never saves its part
QUIET_SECONDS = 5.0  # for the others to go on in, with the liar still at it
TARGET_TOKENS = 100_000
EXTREMES = (0, 1, 2, 7, 23, 24, 1 << 24, (1 << 24) - 1, (1 << 25) + 3, 1 << 39, (1 << 62) - 1)
FORGED = Sized(8, "forged")
SECONDS_SAID = (0.0, 1e-9, 0.1, 1.0, 1e6, 1e300)


class Liar(Actor):
  """Speaks to all shards at random moments, and answers them at once."""

  def __init__(self, world: LiarWorld, number: int, seed: int):
    super().__init__(world, ("learner", number), 0, Faults((), 0.0))
    self.random = random.Random(f"liar {seed}")
    # One that says it is far ahead is not even asked for a push.
    self._boasts = self.random.random() < 0.25
    self.heard: dict[type, list[Message]] = {}
    self.sent: collections.Counter[str] = collections.Counter()  # by what it is
    self._lies = [lie for lie in LIES for _ in range(OFTEN[lie]) if lie in swarm(seed, KINDS)]

  def deliver(self, message: Message, size: int) -> None:
    self.heard.setdefault(type(message), []).append(message)
    self.heard[type(message)] = self.heard[type(message)][-8:]
    rng = self.random
    if isinstance(message, Pull) and "push" in self._lies and rng.random() < 0.8:
      self.say(message.shard, "push", message)
    elif isinstance(message, RequestValue) and "value" in self._lies and rng.random() < 0.8:
      self.say(message.shard, "value", message)

  def talk(self) -> None:
    """A burst of messages now, and another one later."""
    rng, sync = self.random, self.world.sync
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
      greets = rng.random() < GREETINGS or not self._lies
      self.say(rng.randrange(sync.num_shards), "hello" if greets else rng.choice(self._lies))
    self.world.at(self.world.now + rng.expovariate(8.0), self.talk)

  def say(self, shard: int, lie: str, *asked: Message) -> None:
    message = getattr(self, lie)(*asked)
    if self.sent.total() % 16 == 0:  # well-formed, or a transport would have dropped it
      header, payload = messages.encode(message)
      messages.decode(header, b"" if payload is not None else None)
    self.sent[lie] += 1
    self.world.send(self, ("syncer", shard), message)

  # --- what it says -------------------------------------------------------------------------------

  def near(self, *truths: int, least: int = 0, most: int = (1 << 62) - 1) -> int:
    """Close to something true, extreme, or anything."""
    rng = self.random
    close = [n + rng.choice((-2, -1, 0, 0, 0, 1, 2, 50)) for n in truths]
    found = rng.choice([*close, *close, *EXTREMES, rng.randrange(1 << 40)])
    return min(max(found, least), most)

  def several(self, *truths: int, least: int = 0) -> tuple[int, ...]:
    """One for each fragment of a shard, as a rule."""
    sync, rng = self.world.sync, self.random
    count = rng.choice((sync.num_fragments, sync.num_fragments // sync.num_shards, 0, 9))
    return tuple(self.near(*truths, least=least) for _ in range(count))

  def report(self) -> Report:
    shard = self._shard()
    owned = shard.state.fragments if shard else ()
    rng, honest = self.random, self.random.random() < 0.6
    rounds = tuple(f.last_round for f in owned) if honest else self.several(
      *(f.last_round for f in owned), least=-2
    )  # fmt: skip
    versions = tuple(f.version for f in owned) if honest else self.several(
      *(f.version for f in owned), least=-1
    )  # fmt: skip
    steps_since_sync = (
      tuple(rng.choice((1, 24, 1 << 50)) for _ in owned) if honest else self.several(1)
    )
    most = (1 << 40) - 1 if self._boasts else self.world.step
    global_step = self.near(self.world.step, most=most)
    seconds, leaving = rng.choice(SECONDS_SAID), rng.random() < 0.1
    snapshot = self.near(self._snapshot(), 0, 0)
    more = {"joins": rng.random() < 0.3, "whole": rng.random() < 0.1}
    who = (self.number, self.incarnation, global_step, seconds)
    return Report(*who, versions, rounds, steps_since_sync, leaving, snapshot, **more)

  def hello(self) -> Report:
    if self.random.random() < 0.3:
      self.incarnation += self.random.choice((0, 1, 1, 5))
    rounds = self.several(least=-2)
    none, steps = (-1,) * len(rounds), (0,) * len(rounds)
    who = (self.number, self.incarnation, 0, 0.0)
    return Report(*who, none, rounds, steps, leaving=False, snapshot=0, joins=True)

  def push(self, pull: Pull | None = None) -> Push:
    asked = pull or self._any(Pull)
    p = asked.fragment if asked else 0
    round_id, base = (asked.round, asked.base_version) if asked else (0, 0)
    rng = self.random
    if pull is None or rng.random() < 0.2:
      round_id, base = self.near(round_id), self.near(base, least=-1)
    steps, tokens = self.near(3), self.near(3 * STEP_TOKENS)
    if rng.random() < 0.5:
      steps = rng.choice((1, 5, 20, 60))
      tokens = steps * rng.choice((1, STEP_TOKENS))
    return Push(
      self.number, self.incarnation, p, round_id, base, steps, tokens,
      self.near(self._snapshot(), 0, 0), self.near(1), "f32", Sized(8, Delta((), -3)),
    )  # fmt: skip

  def value(self, request: RequestValue | None = None) -> Value:
    p = request.fragment if request else self.random.randrange(self.world.sync.num_fragments)
    published = [m for m in self.heard.get(Publish, ()) if m.fragment == p]
    who = self.number, self.incarnation
    if published and self.random.random() < 0.4:  # a true one, perhaps an old one
      m = self.random.choice(published)
      return Value(*who, replace(m, payload=None), m.snapshot, 0, Sized(8, m.round))
    what = (p, self.near(3), self.near(5), self.near(100), {0: self.near(3)})
    made_up = says.value(*who, *what, "ab", FORGED)
    return replace(made_up, snapshot=self.near(self._snapshot(), 0), count=self.near(1))

  def other(self) -> Message:
    who, rng = (self.number, self.incarnation), self.random
    match rng.randrange(4):
      case 0:
        return RequestMoments(*who, self.several(least=-1))
      case 1:
        return Moments(*who, self.near(0, least=-1), self.near(0), self.near(1), FORGED)
      case 2 if rng.random() < 0.2:
        return Goodbye(*who)
    return self.hello()

  def _any(self, kind: type) -> Any:
    heard = self.heard.get(kind)
    return self.random.choice(heard) if heard else None

  def _shard(self) -> Any:
    return self.world.actors.get(("syncer", self.random.randrange(self.world.sync.num_shards)))

  def _snapshot(self) -> int:
    return max((m.snapshot for m in self.heard.get(Welcome, ())), default=0)


class LiarLedger(Ledger):
  """Follows the honest steps; of the liar's, how many tokens were merged."""

  def __init__(self, sync: SyncConfig, liar: int):
    super().__init__(sync, STEP_TOKENS)
    self.liar = liar
    self.lied: dict[tuple[int, int], int] = {(p, -1): 0 for p in range(sync.num_fragments)}

  def commit(self, commit: Commit) -> None:
    p, base = commit.fragment, self.held[commit.fragment]
    work = list(zip(commit.learners, commit.steps, commit.tokens))
    tokens = sum(t for m, _, t in work if m == self.liar)
    self.lied[p, commit.round] = self.lied[p, base] + tokens
    self.merge(commit, [each for each in work if each[0] != self.liar])

  def hold(self, state: FragmentState) -> None:
    key = state.index, state.last_round
    assert key in self.versions, "a value that no work has made"
    assert state.version == self.versions[key]
    honest = len(self.contents[key]) * STEP_TOKENS
    assert state.merged_tokens == honest + self.lied[key], "tokens are counted wrongly"
    self.held[state.index] = state.last_round

  def is_true(self, value: Value) -> bool:
    """Whether the value is one that a shard has made: what its seal proves."""
    given = value.publish
    key = given.fragment, given.round
    if value.payload.content != given.round or key not in self.versions:
      return False
    honest = len(self.contents[key]) * STEP_TOKENS
    return (given.version, given.merged_tokens) == (self.versions[key], honest + self.lied[key])


class LiarWorld(World):
  """Two to four honest learners, and one that is not."""

  def __init__(self, seed: int):
    rng, kinds = random.Random(f"liar world {seed}"), swarm(seed, KINDS)
    self.honest = rng.randint(2, 4)
    period, shards = rng.randint(2, 6), rng.randint(1, 2)
    sync = SyncConfig(
      num_shards=shards,
      num_fragments=rng.randint(shards, 4),
      sync_period=period,
      overlap_steps=rng.randint(1, period - 1),
      min_quorum=rng.randint(1, self.honest - 1),
      apply=rng.choice(("rebase", "rebase", "overwrite")),
      grace_safety=rng.choice((0.0, 0.9)),
      liveness_seconds=0.5,
      snapshot_steps=rng.choice((0, 6, 12)),
    )
    steps = tuple(rng.uniform(0.06, 0.2) for _ in range(self.honest))
    pace = Pace(steps, 0.3, *(rng.choice([0.002, 0.05]) for _ in range(3)))
    weather = Weather(delay_seconds=(0.001, rng.choice([0.01, 0.1])), drop=0.1 * ("drop" in kinds))
    ledger = LiarLedger(sync, self.honest)
    super().__init__(
      sync, pace, seed, weather, TARGET_TOKENS, ledger, patience_seconds=PATIENCE_SECONDS
    )
    self.value_fault = lambda value: "" if ledger.is_true(value) else "its seal does not fit"
    self.measure = self._measured
    self.liar = Liar(self, self.honest, seed)
    self.actors[self.liar.role] = self.liar
    self.at(rng.uniform(0.0, 1.0), self.liar.talk)
    self.steady = self.honest > 2 and not weather.drop
    if "lose_shard" in kinds:
      self.steady = False
      self.at(rng.uniform(2.0, 4.0), self._lose, ("syncer", rng.randrange(shards)))
    self._norms = random.Random(f"norms {seed}")

  def learners(self) -> list:
    return [a for a in super().learners() if a is not self.liar]

  def _lose(self, role: Role) -> None:
    """A shard dies with its copies, and takes back what learners have."""
    self.struck["lose_shard"] += 1
    self.restore(role, None, 1.0)

  def _measured(self, push: Push) -> Mapping[str, Any]:
    """Honest updates agree a little; the liar's is anything, or one of theirs with its sign
    flipped."""
    length = math.sqrt(push.steps)  # of an honest one: steps are nearly independent of each other
    others = {m: 0.4 * length for m in range(self.honest) if m != push.learner}
    if push.learner != self.honest:
      return {"norm": length, "products": {**others, push.learner: length * length}}
    norm = self._norms.choice((1.0, 5.0, 0.0, math.inf, math.nan, 1e300))
    if not math.isfinite(norm):
      return {"norm": norm}
    flipped = {m: -0.4 * norm for m in others}
    return {"norm": norm, "products": {**flipped, push.learner: norm * norm}}


def check(seed: int) -> collections.Counter[str]:
  """Runs a world, and judges it; counts what happened.

  Raises:
    AssertionError: the liar got something that it must not have.
  """
  world = LiarWorld(seed)
  world.run(1.5)
  clocks = {role: (world.now, actor.state.global_step) for role, actor in _honest(world)}
  world.at(SECONDS, setattr, world, "weather", Weather())
  while world.now < SECONDS + QUIET_SECONDS:
    world.run(world.now + 0.5)
    for role, actor in _honest(world):
      since, before = clocks.get(role, (0.0, 0))
      _check_global_step(world, actor, since, before)
      _check_state(world, actor)
  # A pull that was lost comes again after a patience that grows with every loss.
  while _late(world) and world.now < SECONDS + MAX_PATIENCE_SECONDS:
    world.run(world.now + 1.0)
  _check_progress(world)
  commits = [c for _, c in world.commits()]
  _check_commits(world, commits)
  _check_honest(world)
  return (
    world.struck
    + world.liar.sent
    + collections.Counter(
      merged=sum(world.honest in c.learners for c in commits),
      adopted=len(_notes(world, "regained")),
      rejected=sum(bool(f.rejected) for f in _notes(world, "commit")),
      snapshots=len(world.snapshots),
    )
  )


def _honest(world: LiarWorld) -> list:
  return [(role, actor) for role, actor in world.actors.items() if actor is not world.liar]


def _check_global_step(world: LiarWorld, actor: Actor, since: float, before: int) -> None:
  """No clock runs ahead of what the run can have made.

  Where at least two honest learners are always members, a liar alone makes it at most `LEAD` times
  faster than they are; where they come and go, there are times with nobody to compare it with.
  """
  sync = world.sync
  fastest = min(world.pace.step_seconds)
  most = rules.WASTE * TARGET_TOKENS / STEP_TOKENS + 2 * rules.step_tolerance(sync)
  assert actor.state.global_step <= most, f"{actor.role}: global step {actor.state.global_step}"
  if world.steady and actor.role[0] == "syncer" and not actor.state.shard:
    ahead = rules.LEAD * (world.now - since + 2) / fastest + 3 * rules.step_tolerance(sync)
    assert actor.state.global_step <= before + ahead, (
      f"{actor.role}: {before} to {actor.state.global_step}"
    )


def _check_state(world: LiarWorld, actor: Actor) -> None:
  """What a shard keeps is bounded by members and fragments."""
  if actor.role[0] != "syncer":
    return
  state, members = actor.state, world.honest + 1
  assert len(state.members) <= members and len(state.opposed) <= members
  assert len(state.vector_clock) <= members + world.sync.num_shards
  assert len(state.value_requests) <= members * len(state.fragments)
  assert len(state.asking) <= members and len(state.beliefs.claims) <= 2
  assert all(len(ps) <= len(state.fragments) for ps in state.asking.values())
  reached = state.global_step + 2 * world.sync.sync_period
  assert state.snapshot <= reached and state.snapshot % (world.sync.snapshot_steps or 1) == 0
  assert all(len(current.pushes) <= members for current in state.under_way.values())


def _late(world: LiarWorld) -> list[int]:
  """The fragments that were not committed since the weather is good, and are not complete."""
  since = {c.fragment for t, c in world.commits() if t > SECONDS + 1.0}
  left = (p for p in range(world.sync.num_fragments) if p not in since)
  return [p for p in left if world.store[p].merged_tokens < TARGET_TOKENS]


def _check_progress(world: LiarWorld) -> None:
  """Commits and snapshots go on while the liar goes on."""
  late = _late(world)
  assert not late, f"fragments that commit no more: {late}"
  if world.sync.snapshot_steps:
    numbers = [n for n in world.snapshots]
    assert numbers and max(numbers) >= 12, f"snapshots {numbers}"


def _check_commits(world: LiarWorld, commits: list[Commit]) -> None:
  """The liar's share is bounded, and so are the tokens it can claim."""
  for c in commits:
    if world.honest not in c.learners or len(c.learners) < 2:
      continue
    steps = [rules.worth_steps(s, world.sync) for s in c.steps]
    tokens = [t * k / s for t, s, k in zip(c.tokens, c.steps, steps)]
    weights = outer.token_weights(steps, tokens)
    shares = outer.bounded_shares(weights, [STEP_TOKENS] * len(steps))
    assert shares[c.learners.index(world.honest)] <= 0.5 + 1e-9
  clocks = [a.state.global_step for _, a in _honest(world) if a.role[0] == "syncer"]
  slack = rules.step_tolerance(world.sync)
  for (p, _), tokens in world.ledger.lied.items():
    rounds = sum(c.fragment == p and world.honest in c.learners for c in commits)
    assert tokens <= STEP_TOKENS * (max(clocks) + slack * (rounds + 1)), f"fragment {p}: {tokens}"


def _check_honest(world: LiarWorld) -> None:
  """No honest learner waits, is refused or sent away."""
  for actor in world.learners():
    assert actor.idle_seconds == 0, f"{actor.role} waited {actor.idle_seconds} s"
    assert actor.incarnation == 0, f"{actor.role} was sent away"
  for fields in _notes(world, "commit"):
    assert set(fields.rejected) <= {world.honest}, fields.rejected


def _notes(world: World, kind: str) -> list[Event]:
  return [event for _, _, event in world.history if event.kind == kind]
