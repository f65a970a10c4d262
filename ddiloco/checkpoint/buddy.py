"""Copies of committed fragments on another shard, so that a killed shard loses no round.

Shard s streams every commit to its buddy, shard (s + 1) mod S, and publishes the version only when
the buddy has the commit: no role hears of a version that only one process has. A restarted shard
asks its buddy for all its fragments; its request also goes to the shard before it, which sends the
copies again that were lost. A buddy that does not answer delays publishes only for a short while:
then versions go out without a copy, which is logged, until the buddy is back.

A copy is the data that learners get: the update in the wire codec, or the value where values go out
whole. The buddy adds an update to its copy of the published value, and computes the outer
optimizer's momentum from it (`core/outer.py`). Only the part that a lossy codec's rounding
withholds from the learners has no copy.

If a shard's copies are lost with it, its next incarnation takes values from learners: seals prove
that the values are its own.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import json
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ddiloco.config import Config
from ddiloco.core import codec, outer, passes
from ddiloco.core.codec import Encoded
from ddiloco.core.delta import Committed
from ddiloco.core.fragments import Plan
from ddiloco.network.transport import Endpoint, syncer_address
from ddiloco.observe.eventlog import Records
from ddiloco.protocol import events
from ddiloco.protocol.messages import NOTHING, Publish, Recover, Recovered, Replica, Replicated
from ddiloco.protocol.rules import smooth
from ddiloco.protocol.values import replace
from ddiloco.runtime import REAL_TIME, Job, Time

ASK_SECONDS = 0.5  # between two requests of a restarted shard, doubling up to ...
MOST_ASK_SECONDS = 8.0  # ... this, so that it asks for a lost copy again before it gives up
BEGINS_SECONDS = 5.0  # for the answer of a buddy that has asked for its own fragments
PATIENCE_FACTOR = 8.0  # over the usual time until a copy is confirmed
RESTARTS_FACTOR = 2.0  # over that patience, for a buddy that restarts again and again
WHOLE_BYTES = 5e7  # a second, at least, of a whole copy: packed, sent and unpacked in fresh memory


def buddy_of(shard: int, num_shards: int) -> int:
  """The shard that holds the copies of this shard's fragments; itself if it is the only one."""
  return (shard + 1) % num_shards


def neighbours(shard: int, num_shards: int) -> list[int]:
  """The shards that this one exchanges copies with: its buddy, and the one whose buddy it is."""
  return sorted({buddy_of(shard, num_shards), (shard - 1) % num_shards} - {shard})


class Copies:
  """The copies that this shard holds: the newest commit of each of its neighbour's fragments.

  Args:
    shard: number of this shard.
    incarnation: of this shard.
    endpoint: of this shard.
    plan: how the model is partitioned.
    config: the run's.

  Attributes:
    lives: by owner, its newest incarnation.
  """

  def __init__(self, shard: int, incarnation: int, endpoint: Endpoint, plan: Plan, config: Config):
    self.shard, self.incarnation, self.endpoint = shard, incarnation, endpoint
    self.plan, self.config = plan, config
    # By owner and fragment: the owner's incarnation that made the copy, and the copy.
    self._held: dict[tuple[int, int], tuple[int, Committed]] = {}
    self.lives: dict[int, int] = {}
    # Owner -> its incarnation that was answered last, and the payloads of that answer.
    self._answers: dict[int, tuple[int, list[weakref.ref[Any]]]] = {}

  def on(self, message: Replica | Recover) -> Job:
    """Job: keeps a copy if it is the newest, or gives back all copies of the sender's fragments."""
    if message.incarnation < self.lives.get(message.shard, -1):
      return  # from a dead incarnation; the living one may have begun from another version
    self.lives[message.shard] = message.incarnation
    if isinstance(message, Recover):
      yield from self._give_back(message)
    elif message.owner == message.shard:
      kept = self._keep(message)
      yield None
      me = self.shard, self.incarnation
      done = Replicated(*me, message.state.index, message.state.last_round, kept)
      self.endpoint.send(syncer_address(message.shard), done)

  def _give_back(self, message: Recover) -> Job:
    """Sends the copies, unless they are on their way already, and then the list of fragments.

    A payload that has left has no reference any more. `Endpoint.unsent` would not tell: of two
    shards each is the buddy of the other, so it counts other payloads too.
    """
    owner = syncer_address(message.shard)
    mine = (key for key in sorted(self._held) if key[0] == message.shard)
    held = {key[1]: self._held[key] for key in mine}
    asked_by, payloads = self._answers.get(message.shard, (-1, []))
    if message.incarnation > asked_by or not any(payload() is not None for payload in payloads):
      payloads = []
      for life, copy in held.values():
        # What a life before has sent is not changed any more: it needs no memory of its own here.
        whole = _as_it_came(copy) if life < message.incarnation else None
        replica = pack(copy, self.shard, self.incarnation, message.shard, change=whole)
        payloads.append(weakref.ref(replica.payload))
        yield None
        self.endpoint.send(owner, replica)
      self._answers[message.shard] = message.incarnation, payloads
    listed = Recovered(
      self.shard,
      self.incarnation,
      asked_by=message.incarnation,
      fragments=tuple(held),
      rounds=tuple(copy.state.last_round for _, copy in held.values()),
    )
    self.endpoint.send(owner, listed)

  def _keep(self, message: Replica) -> bool:
    """Keeps a copy; returns whether it, or a newer one, is here now."""
    key = (message.owner, message.state.index)
    life, known = self._held.get(key, (NOTHING, None))
    # A newer incarnation of the owner counts, even if it had to begin at an older version. In one
    # incarnation rounds only grow, versions may not: a value that a learner gave back is of a later
    # round, and can have a smaller version.
    rank = (message.incarnation, message.state.last_round)
    if known is not None and rank <= (life, known.state.last_round):
      return True
    # No change continues a copy of the incarnation before, even if the value is the same: an owner
    # that got this value from a learner begins at an older momentum.
    base = known if life == message.incarnation else None
    committed = unpack(message, self.plan, self.config, base)
    if committed is not None:
      self._held[key] = message.incarnation, committed
    return committed is not None


def at_once(job: Job) -> None:
  """Runs the job in the calling thread."""
  for _ in job:
    pass


class Replication:
  """The owner's side: sends commits to the buddy, and holds publishes back until it has them.

  Args:
    copies: those that this shard holds for its neighbour; their endpoint has dialed the buddy.
    patience_seconds: least time until the buddy is taken to be away.
    recorder: event log.
    time: real or virtual time.

  Attributes:
    background: runs jobs on values, one after the other.
    held: by fragment, since when actions wait for the buddy, and these: one or more for each
      member.
  """

  def __init__(
    self,
    copies: Copies,
    patience_seconds: float,
    recorder: Records,
    time: Time = REAL_TIME,
  ):
    self.background: Callable[[Job], None] = at_once
    self._copies, self._recorder, self._now = copies, recorder, time.now
    self._buddy = buddy_of(copies.shard, copies.config.sync.num_shards)
    self._patience_seconds = patience_seconds
    self._copy_seconds = 0.0  # from sending a copy to its confirmation, smoothed
    self._newest: dict[int, Committed] = {}  # fragment -> the commit that the buddy should have
    # Fragment -> the round whose value this buddy was sent last; without one it goes out whole.
    self._sent: dict[int, int] = {}
    self._sent_at: dict[int, float] = {}  # fragment -> when its unconfirmed copy was sent
    self._whole: set[int] = set()  # fragments whose newest copies go whole
    self._changing: set[int] = set()  # fragments whose next commit is being made
    self.held: dict[int, tuple[float, list[Callable[[], None]]]] = {}
    self._buddy_incarnation = -1
    self._away = False

  def begin(self, found: Iterable[Committed]) -> None:
    """This incarnation begins with these fragments: the buddy, if it restarted too, needs them."""
    # A buddy that began together with this shard has asked before, and goes on asking.
    self._buddy_incarnation = self._copies.lives.get(self._buddy, -1)
    self._newest |= {committed.state.index: committed for committed in found}
    self._send_anew(list(self._newest))

  def _send_anew(self, fragments: Iterable[int]) -> None:
    """The buddy lacks the newest commits of these fragments. They go out whole, each when the one
    before is confirmed: together they may be a whole model. Those that publishes wait for come
    first."""
    for p in fragments:
      self._sent.pop(p, None)
      self._sent_at[p] = self._now()
      self._whole.add(p)
    lacking = [p for p in self._newest if p not in self._sent and p not in self._changing]
    if lacking:
      self._send(min(lacking, key=lambda p: p not in self.held))

  def changes(self, fragment: int) -> None:
    """The fragment's vectors change from now until `committed`: they cannot be sent meanwhile."""
    self._changing.add(fragment)

  def committed(self, committed: Committed, change: Encoded | None = None) -> None:
    """Sends a copy of a fragment that was just committed.

    Args:
      committed: the fragment.
      change: the update that learners get; None: the value goes out whole.
    """
    p = committed.state.index
    self._newest[p] = committed
    self._changing.discard(p)
    self._send(p, change)

  def _send(self, fragment: int, change: Encoded | None = None) -> None:
    """Sends `change`, made to the value that this buddy was sent last. Without a change, or if it
    was sent none, the whole fragment."""
    committed, copies = self._newest[fragment], self._copies
    base_round = self._sent.get(fragment)
    self._sent_at[fragment] = self._now()
    self._sent[fragment] = committed.state.last_round
    if change is None or base_round is None:  # the loop must not wait while gigabytes are copied
      self._whole.add(fragment)
      return self.background(self._send_whole(committed))
    self._whole.discard(fragment)
    me = copies.shard, copies.incarnation, copies.shard
    replica = pack(committed, *me, base_round, change)
    copies.endpoint.send(syncer_address(self._buddy), replica)

  def _send_whole(self, committed: Committed) -> Job:
    copies = self._copies
    replica = pack(committed, copies.shard, copies.incarnation, copies.shard)
    yield None
    copies.endpoint.send(syncer_address(self._buddy), replica)

  def when_safe(self, fragment: int, do: Callable[[], None]) -> None:
    """Calls `do` as soon as the buddy has the fragment's newest commit; at once if it is away."""
    if fragment in self._sent_at and not self._away:
      self.held.setdefault(fragment, (self._now(), []))[1].append(do)
    else:
      do()

  def on(self, message: Replica | Replicated | Recover | Recovered) -> None:
    """Takes a message of another shard: of the neighbour about its copies here, or of the buddy
    about this shard's copies there."""
    match message:
      case Replica() | Recover():
        self.background(self._copies.on(message))  # before copies of mine: it waits for the answer
        # The buddy says in this way that it has restarted: copies that went to its former life are
        # lost, and would never be confirmed. If it has confirmed none yet, which life got them is
        # not known: one too many is sent.
        first = isinstance(message, Recover) and self._buddy_incarnation < 0
        if message.shard == self._buddy and (first or self._is_new(message.incarnation)):
          self._met(message.incarnation, lacks=list(self._newest))
      case Replicated():
        self._confirmed(message)

  def _is_new(self, incarnation: int) -> bool:
    """Whether the buddy has restarted, and so has no copies."""
    return incarnation > self._buddy_incarnation >= 0

  def _confirmed(self, message: Replicated) -> None:
    if message.shard != self._buddy or message.incarnation < self._buddy_incarnation:
      return
    p, newest = message.fragment, self._newest.get(message.fragment)
    # Only the round says which copy this is about: after a value that a learner gave back, the next
    # commit may have the version number of a copy that is still on its way.
    if newest is not None and message.kept and message.round == newest.state.last_round:
      sent_at = self._sent_at.pop(p, None)
      if sent_at is not None:  # after more than the patience a shard stood still, or was cut off
        took = min(self._now() - sent_at, self._usual_patience)
        self._copy_seconds = smooth(self._copy_seconds, took)
    if self._is_new(message.incarnation):
      self._met(message.incarnation, [f for f in self._newest if f != p or f in self._sent_at])
    elif self._away:  # one that only was slow or cut off still has all that it ever confirmed
      self._met(message.incarnation, list(self._sent_at))
    else:
      self._buddy_incarnation = message.incarnation
      self._send_anew([p] if newest is not None and not message.kept else [])
    self._release()

  def _met(self, incarnation: int, lacks: list[int]) -> None:
    """The buddy is here again, without the newest copies of these fragments: it gets them."""
    if self._away or self._is_new(incarnation):
      self._recorder.record(events.Replicated(buddy=self._buddy))
    self._away, self._buddy_incarnation = False, incarnation
    self._send_anew(lacks)

  @property
  def _usual_patience(self) -> float:
    """Seconds until a buddy is taken to be away, without those for the bytes of a whole copy."""
    return max(self._patience_seconds, PATIENCE_FACTOR * self._copy_seconds)

  def tick(self) -> float:
    """Gives up waiting for a buddy that is away; returns when to look again."""
    now, usual = self._now(), self._usual_patience
    if not self.held:
      return now + usual

    def given_up_at(p: int, since: float) -> float:
      whole = 2 * self._newest[p].published_value.nbytes if p in self._whole else 0
      patience = usual + whole / WHOLE_BYTES
      return min(self._sent_at[p] + patience, since + RESTARTS_FACTOR * patience)

    # Only copies that something waits for: others may be far back in the row of whole copies, and
    # one that was lost on the way does not make the buddy silent. A buddy that restarts gets them
    # anew; if no life of it is long enough to confirm them, they must not wait for ever.
    until = min(given_up_at(p, since) for p, (since, _) in self.held.items())
    if now >= until:
      self._away = True
      self._recorder.record(
        events.Unreplicated(buddy=self._buddy, fragments=tuple(sorted(self._sent_at)))
      )
      self._release()
    return until

  def _release(self) -> None:
    for fragment in [p for p in self.held if p not in self._sent_at or self._away]:
      for do in self.held.pop(fragment)[1]:
        do()

  def missing(self) -> list[int]:
    """Fragments whose newest commit the buddy has not confirmed."""
    return sorted(self._sent_at)


def recover(
  copies: Copies, keep_on: Callable[[float], bool], time: Time = REAL_TIME
) -> dict[int, Committed]:
  """Asks the buddy for this shard's fragments until it has answered or `keep_on` says no.

  `keep_on` is called with the seconds since the newest copy came, or since the start, less those
  that a listed copy may take: gigabytes take long. Returns what the buddy had, by fragment.
  Meanwhile the neighbour's requests are served, from `copies`. The request goes to the neighbour as
  well, which must send its copies again.

  A buddy that asks too has begun as well. It answers at once, or not while it makes initial values
  or reads a snapshot, which may take minutes: so the wait ends after `BEGINS_SECONDS`.
  """
  shard, incarnation, endpoint = copies.shard, copies.incarnation, copies.endpoint
  num_shards = copies.config.sync.num_shards
  buddy = buddy_of(shard, num_shards)
  found: dict[int, Committed] = {}
  # Fragment -> the round of the buddy's copy. This list overtakes the copies, which are bulk. A
  # copy of an earlier round is from an answer to an earlier life: it does not end the wait.
  listed: dict[int, int] | None = None
  copy_seconds = 0.0  # that the largest of the listed may take
  came: collections.Counter[int] = collections.Counter()  # fragment -> how often its copy came
  heard_at, ask_at, pause, until = time.now(), 0.0, ASK_SECONDS, math.inf
  quiet = lambda: max(0.0, now - heard_at - copy_seconds)
  while (now := time.now()) < until and keep_on(quiet()) and not _complete(found, listed):
    if now >= ask_at:  # again if copies are missing: some went to the former incarnation
      ask_at, pause = now + pause, min(2 * pause, MOST_ASK_SECONDS)
      for each in neighbours(shard, num_shards):
        endpoint.send(syncer_address(each), Recover(shard, incarnation))
    arrived = endpoint.receive(ASK_SECONDS)
    message = arrived.message if arrived else None
    match message:
      case Replica(owner=owner) if owner == shard and message.shard == buddy:
        copy, p = unpack(message, copies.plan), message.state.index
        if copy is not None:
          # An answer to an earlier incarnation may come late: the copy of the later round counts.
          if p not in found or copy.state.last_round >= found[p].state.last_round:
            found[p] = copy
          came[p] += 1
          # If a copy was lost, all copies come a second time. A third time is no progress.
          if came[p] <= 2:
            heard_at, until = time.now(), math.inf
          ask_at = time.now() + pause  # the other copies are on their way
      case Recovered(shard=sender, asked_by=asked_by) if (sender, asked_by) == (buddy, incarnation):
        listed, until = dict(zip(message.fragments, message.rounds)), math.inf
        largest = max((copies.plan.fragments[p].size for p in listed), default=0)
        copy_seconds = 8 * largest / WHOLE_BYTES
      case Replica() | Recover():
        if isinstance(message, Recover) and message.shard == buddy and listed is None:
          until = time.now() + BEGINS_SECONDS
        at_once(copies.on(message))
  return found


def _complete(found: dict[int, Committed], listed: dict[int, int] | None) -> bool:
  """Whether the buddy has said what it holds, and all of that, or newer, is found."""
  return listed is not None and all(
    p in found and found[p].state.last_round >= r for p, r in listed.items()
  )


# --- The message


def pack(
  committed: Committed,
  shard: int,
  incarnation: int,
  owner: int,
  base_round: int = NOTHING,
  change: Encoded | None = None,
) -> Replica:
  """A commit of this owner as a message: whole, or as `change` to the value of `base_round`."""
  if change is None:
    vectors = [v for v in (committed.published_value, committed.momentum) if v is not None]
    change = Encoded("f32", np.concatenate(vectors).view(np.uint8))
  said = committed.state, committed.momentum_round, base_round
  return Replica(shard, incarnation, owner, *said, change.codec, change.payload)


def _as_it_came(copy: Committed) -> Encoded | None:
  """A copy that came whole, as it was packed, in its own memory; None: its vectors are apart."""
  rows = copy.published_value.base
  if rows is None or len(rows) != 1 + (copy.momentum is not None):
    return None
  return Encoded("f32", rows.reshape(-1).view(np.uint8))


def unpack(
  replica: Replica, plan: Plan, config: Config | None = None, base: Committed | None = None
) -> Committed | None:
  """The fragment that a message brings, made from `base` if it is a change; None if it is invalid.

  Its value is the published value: with it its shard begins again. A change is applied in the
  vectors of `base`, which must not be used any more.
  """
  state = replica.state
  if state.index >= len(plan.fragments):
    return None
  data, size = np.frombuffer(replica.payload, np.uint8), plan.fragments[state.index].size
  if replica.base_round == NOTHING:
    if data.nbytes not in (4 * size, 8 * size) or replica.codec != "f32":
      return None
    value, *rest = data.view(np.float32).reshape(-1, size).copy()
    return Committed(state, value, value, rest[0] if rest else None, replica.momentum_round)
  if base is None or config is None or base.state.last_round != replica.base_round:
    return None
  optimizer = outer.at(config.outer, state.merged_tokens / config.run.total_tokens)
  value, momentum = base.published_value, base.momentum
  momentum = outer.init(size, optimizer) if momentum is None else momentum
  try:
    change = codec.checked(data, size, replica.codec)
  except codec.CodecError:
    return None
  passes.follow(value, momentum, change, optimizer)
  return Committed(state, value, value, momentum, replica.momentum_round)


# --- Seals: a shard's proof that a value which a learner returns is the shard's own
# A shard that dies with its copies takes its newest values from learners (`RequestValue`, `Value`).
# A learner could send other weights instead. So every publish carries a seal: an HMAC, under a key
# that only the shard has, over the value as learners then have it and over the value's header. The
# learner returns the seal with the value. Without keys, on loopback, everything is trusted and
# nothing is sealed.


class Sealer:
  """Seals the values of one shard.

  Args:
    secret: of the shard, the same in all its incarnations.
    run_id: of the run ...
    plan_id: ... and the contract of its roles: no value of another run fits.
  """

  def __init__(self, secret: bytes, run_id: str, plan_id: str):
    self._secret, self._run = secret, (run_id, plan_id)
    self._newest: dict[int, tuple[int, str]] = {}  # fragment -> its newest round, that digest

  def sealed(self, publish: Publish, value: np.ndarray) -> Publish:
    """The publish of this value f32 [size] with its seal; the newest value is read only once."""
    if self._newest.get(publish.fragment, (None, ""))[0] != publish.round:
      self._newest[publish.fragment] = publish.round, codec.digest(value).hex()
    seal = self.seal(publish, self._newest[publish.fragment][1])
    return replace(publish, seal=seal)

  def seal(self, of: Publish, digest: str) -> str:
    """The seal of the fragment's value that has this `codec.digest` and is described by `of`."""
    said = (of.fragment, of.round, of.version, of.merged_tokens, of.merged_rounds)
    text = json.dumps([*self._run, *said, digest], sort_keys=True)
    return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

  def fits(self, of: Publish, value: np.ndarray) -> bool:
    """Whether this shard, in any incarnation, has published exactly this value."""
    return hmac.compare_digest(of.seal, self.seal(of, codec.digest(value).hex()))
