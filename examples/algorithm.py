"""Decoupled DiLoCo in one file of NumPy, in virtual time: the whole algorithm, ten minutes to read.

  python examples/algorithm.py [--steps=400]

Four islands train copies of one small network and never wait for each other. Island 3 is three
times as slow as the others, and island 2 dies in the middle and comes back with nothing. A syncer
merges what they learn, one fragment of the parameters at a time. The script prints what was merged,
and the loss of the merged model beside that of an island that trains alone.

The package makes the same decisions: `tests/examples/test_algorithm.py` runs its roles on this
problem and compares every commit. What it adds is what a real run needs: shards, a network that
loses messages, killed syncers, snapshots, bad pushes, compression, devices; and three details of
the method: embeddings are averaged, the outer rate falls at the end of a run, and the work of a
long absence is given up.

Symbols as in the paper (arXiv 2604.21428): M learners, P fragments, H steps between two syncs of a
fragment, K the quorum, tau the steps that a sync may take. The slack is what is left of the time of
tau steps when the quorum has answered; gamma is the share of it that waiting for more learners may
use. Outer gradient or delta: base - local, where the base is the published value received last.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import math
import statistics
from collections.abc import Callable

import numpy as np

STEP_SECONDS = (1.0, 1.1013, 1.2507, 3.1019)  # of each island; M = 4
H, TAU, K, GAMMA = 24, 2, 1, 0.9
OUTER_RATE, MOMENTUM = 0.5, 0.8  # of the outer step, Nesterov
LATENCY = 0.05  # seconds that a message takes
SILENT_STEPS, SILENT_SECONDS = 10, 2.0  # a learner that is silent for so long counts as lost
BATCH = 8  # examples a step; the paper's tokens
# The problem at the end of the file adds P, the number of fragments, and FIRST, their first values.

Vector = np.ndarray  # f32, one fragment

# --- The arithmetic of one commit


def token_weights(steps: list[int], tokens: list[int]) -> list[float]:
  """Quantity times quality, c_tokens * (c_tokens / c_steps). A push of more than 3 H steps is
  stale: of k times 3 H steps only 3 H / k count. No learner has more than half."""
  counted = [min(s, (3 * H) ** 2 / s) for s in steps]
  weights = [(t * c / s) * (t / s) for s, t, c in zip(steps, tokens, counted)]
  weights = [w / sum(weights) for w in weights]
  most, rest = max(weights), sum(weights) - max(weights)
  if len(weights) == 1 or most <= 0.5:
    return weights
  return [0.5 if w == most else w * 0.5 / rest for w in weights]


def merge(deltas: list[Vector], weights: list[float]) -> Vector:
  """Radial-directional averaging. Deltas of different islands are nearly orthogonal, so a mean
  would be shorter the more islands there are: directions and lengths are averaged apart."""
  norms = [float(np.linalg.norm(delta)) for delta in deltas]
  moved = [(w, delta / n) for w, delta, n in zip(weights, deltas, norms) if n]
  direction = sum((w * unit for w, unit in moved), np.zeros_like(deltas[0]))
  agreed = float(np.linalg.norm(direction))
  if agreed <= 1e-3 * sum(w for w, _ in moved):
    return np.zeros_like(deltas[0])  # the directions cancel: what is left of them is rounding
  return sum(w * n for w, n in zip(weights, norms)) / agreed * direction


def outer_step(value: Vector, momentum: Vector, delta: Vector) -> tuple[Vector, Vector]:
  """SGD with Nesterov momentum; the merged delta is the gradient."""
  momentum = MOMENTUM * momentum + delta
  return value - OUTER_RATE * (delta + MOMENTUM * momentum), momentum


# --- A learner: it trains, and between two steps it answers pulls and takes new versions


@dataclasses.dataclass
class Publish:
  """A new version of a fragment, for all learners."""

  fragment: int
  version: int
  value: Vector
  round: int
  merged: tuple[int, ...]  # learners whose pushes it has
  global_step: int  # of the most advanced learner, as the syncer knows


class Learner:
  """One incarnation of a learner: a restarted learner is a new one, with nothing."""

  def __init__(self, world: World, number: int):
    self.world, self.number = world, number
    self.alive, self.step, self.batch = True, 0, 0
    self.global_step = 0  # goes on from that of the others
    self.local: list[Vector] = [np.empty(0)] * P  # what the island trains
    self.base: list[Vector] = [np.empty(0)] * P  # the published value received last
    self.version, self.newest = [-1] * P, [-1] * P  # applied, arrived
    self.since_sync = [0] * P  # steps
    self.unmerged = [0] * P  # steps that no version has yet
    self.pull: dict[int, int] = {}  # fragment -> the round that asks for it
    self.sent: dict[int, tuple[int, Vector, int, int]] = {}  # round, delta, its steps, at step
    self.arrived: list[Publish] = []
    self.staged: list[Publish] = []  # on their way to the devices, beside the running step

  def on_pull(self, fragment: int, round_id: int) -> None:
    self.pull[fragment] = round_id

  def on_publish(self, publish: Publish) -> None:
    p = publish.fragment
    if publish.version <= self.newest[p]:
      return  # a duplicate
    self.newest[p] = publish.version
    if min(self.version) >= 0:
      self.arrived.append(publish)
      return
    # It has just started: it begins with the newest versions.
    self.version[p], self.base[p] = publish.version, publish.value
    self.local[p] = publish.value.copy()
    self.global_step = max(self.global_step, publish.global_step)
    if min(self.version) >= 0:
      self.world.after(0, self.begin_step)

  def begin_step(self) -> None:
    self.staged, self.arrived = self.arrived, []
    self.batch = self.world.begun[self.number]  # no incarnation trains on a batch of an earlier one
    self.world.begun[self.number] += 1
    self.world.after(STEP_SECONDS[self.number], self.end_step)

  def end_step(self) -> None:
    if not self.alive:
      return
    inner_step(self.local, self.number, self.batch)
    self.step += 1
    self.global_step = max([self.global_step + 1, *(new.global_step for new in self.arrived)])
    self.since_sync = [n + 1 for n in self.since_sync]
    self.unmerged = [n + 1 for n in self.unmerged]
    # The boundary between two steps. Nothing here waits for another role.
    for publish in self.staged:
      self.apply(publish)
    # A pull may already be for the version that is on its way: its push has to wait for that.
    on_the_way = {publish.fragment for publish in self.arrived}
    for p in [p for p in self.pull if p not in on_the_way]:
      self.push(p, self.pull.pop(p))
    report = self.global_step, list(self.version), list(self.since_sync)
    self.world.after(LATENCY, self.world.syncer.on_report, self.number, *report)
    self.begin_step()

  def push(self, p: int, round_id: int) -> None:
    """The outer gradient: how far this island has moved the fragment away from the base."""
    if self.unmerged[p] == 0:
      return
    delta, steps = self.base[p] - self.local[p], self.unmerged[p]
    self.sent[p] = round_id, delta, steps, self.step
    self.world.after(
      LATENCY, self.world.syncer.on_push, p, round_id, self.number, delta, steps, steps * BATCH
    )

  def apply(self, publish: Publish) -> None:
    """Rebase: local <- local + (new - what the local value has of it already). So the steps since
    the push are kept. (The paper overwrites: local <- new.) Steps that missed their round are
    kept at half their length: the others have made the same progress meanwhile."""
    p, known = publish.fragment, self.base[publish.fragment]
    round_id, delta, steps, at_step = self.sent.pop(p, (0, known, 0, self.step))
    if round_id == publish.round and self.number in publish.merged:
      known = known - delta  # my push is in the new value
      self.unmerged[p] -= steps
      self.since_sync[p], keep = self.step - at_step, 1.0
    else:  # my push came too late: its steps go into the next one
      self.since_sync[p], keep = 0, 0.5
    self.local[p] = keep * self.local[p] + (publish.value - keep * known)
    self.base[p], self.version[p] = publish.value, publish.version


# --- The syncer: it asks, waits for a quorum and a moment longer, merges, and publishes


@dataclasses.dataclass
class Member:
  """What the syncer knows of a learner."""

  version: list[int]
  since_sync: list[int]
  step_seconds: float = 0.0
  lost_at: float = math.inf  # if it stays silent


@dataclasses.dataclass
class Round:
  """One sync of one fragment."""

  id: int
  began_at: float
  global_step: int  # when it began
  step_seconds: float  # of the middle learner
  pending: set[int]  # learners that were asked and have not answered
  pushes: dict[int, tuple[Vector, int, int]] = dataclasses.field(default_factory=dict)
  quorum_at: float = math.inf
  deadline: float | None = None  # it waits no longer for more pushes; None: a push has come


class Syncer:
  def __init__(self, world: World):
    self.world = world
    self.value = [first.copy() for first in FIRST]
    self.momentum = [np.zeros_like(first) for first in FIRST]
    self.version, self.made_by = [0] * P, [0] * P  # the newest, and the round that made it
    self.global_step, self.synced_at = 0, [0] * P  # now, and when the newest one's round began
    self.round: list[Round | None] = [None] * P
    self.rounds = itertools.count(1)
    self.members: dict[int, Member] = {}
    self.incarnations: dict[int, Learner] = {}  # of each learner the newest that said hello
    self.quorum_seconds = 0.0  # from a pull to the quorum, smoothed

  def on_hello(self, learner: Learner) -> None:
    """A learner has started: it gets all values."""
    number = learner.number
    self.forget(number)
    self.incarnations[number] = learner
    self.members[number] = Member(list(self.version), [0] * P)
    for p in range(P):
      self.publish(p, [number], ())
    self.world.after(0, self.decide)  # no round waits for its last incarnation

  def on_report(
    self, number: int, global_step: int, version: list[int], since_sync: list[int]
  ) -> None:
    """A few integers after every step: the control plane."""
    self.global_step = max(self.global_step, global_step)
    step_seconds = STEP_SECONDS[number]  # the learner measures it
    lost_at = self.world.now + max(SILENT_SECONDS, SILENT_STEPS * step_seconds)
    self.members[number] = Member(version, since_sync, step_seconds, lost_at)
    self.world.after(0, self.decide)  # when all that arrives now is taken in
    self.world.at(lost_at, self.decide)

  def on_push(
    self, p: int, round_id: int, number: int, delta: Vector, steps: int, tokens: int
  ) -> None:
    current = self.round[p]
    if current is None or current.id != round_id or number not in current.pending:
      return  # late; the learner pushes these steps again
    current.pushes[number] = delta, steps, tokens
    current.pending.remove(number)
    current.deadline = None
    if len(current.pushes) == K:
      current.quorum_at = self.world.now
      seconds, before = self.world.now - current.began_at, self.quorum_seconds
      self.quorum_seconds = before + 0.2 * (seconds - before) if before else seconds
    self.world.after(0, self.decide)

  def decide(self) -> None:
    now = self.world.now
    for number in [n for n, member in self.members.items() if member.lost_at <= now]:
      self.forget(number)
    for p, current in enumerate(self.round):
      if current is not None:
        if current.deadline is None:
          current.deadline = current.quorum_at + self.grace(current)
          self.world.at(current.deadline, self.decide)
        if len(current.pushes) + len(current.pending) < K:
          self.round[p] = None  # too few are left
        elif now >= current.deadline or not current.pending:
          self.commit(p, current)
    for p, current in enumerate(self.round):
      if current is None:
        self.begin_round(p)

  def begin_round(self, p: int) -> None:
    """A fragment is due H steps after its last sync; the first time earlier, so that fragments come
    one after the other. If its last round was late or early against that order, because all
    learners were away or one of them left, the next one is as much earlier or later."""
    due_after = place = math.ceil(H * (p + 1) / P)
    if self.version[p]:
      # A learner answers half a step after the pull, on average: two periods take 2 H + 1 steps.
      late = (self.synced_at[p] - place) % (2 * H + 1) % H
      due_after = H - (late if 2 * late <= H else late - H)
    available = {
      number: member
      for number, member in self.members.items()
      if member.version[p] == self.version[p] and member.since_sync[p] >= 1
    }
    if sum(member.since_sync[p] >= due_after for member in available.values()) < K:
      return
    step_seconds = statistics.median_low(member.step_seconds for member in available.values())
    current = Round(
      next(self.rounds), self.world.now, self.global_step, step_seconds, set(available)
    )
    self.round[p] = current
    for number in available:
      self.world.to(number, "on_pull", p, current.id)

  def grace(self, current: Round) -> float:
    """How long to wait for more learners once there is a quorum: a share of the slack that tau
    leaves. The paper also takes the way back to the learners off the slack; under rebase a late
    version costs no work, so it may be late."""
    slack = TAU * current.step_seconds - self.quorum_seconds
    return min(max(0.0, GAMMA * slack), current.step_seconds)

  def commit(self, p: int, current: Round) -> None:
    learners = tuple(sorted(current.pushes))
    deltas, steps, tokens = zip(*(current.pushes[number] for number in learners))
    delta = merge(deltas, token_weights(steps, tokens))
    self.value[p], self.momentum[p] = outer_step(self.value[p], self.momentum[p], delta)
    self.version[p] += 1
    self.made_by[p], self.synced_at[p] = current.id, current.global_step
    self.round[p] = None
    self.world.commits.append((p, self.version[p], learners, steps))
    self.publish(p, list(self.members), learners)

  def publish(self, p: int, to: list[int], merged: tuple[int, ...]) -> None:
    made = self.version[p], self.value[p], self.made_by[p]
    new = Publish(p, *made, merged, self.global_step)
    for number in to:
      self.world.to(number, "on_publish", new)

  def forget(self, number: int) -> None:
    """The learner is lost, or has started again: no round waits for it."""
    self.members.pop(number, None)
    for current in self.round:
      if current is not None:
        current.pending.discard(number)


# --- Virtual time: a heap of calls


class World:
  def __init__(self) -> None:
    self.now, self.calls, self.order = 0.0, [], itertools.count()
    self.begun = [0] * len(STEP_SECONDS)  # steps of each island, in all incarnations
    self.commits: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
    self.syncer, self.learners = Syncer(self), {}
    for number in range(len(STEP_SECONDS)):
      self.start(number)

  def at(self, time: float, call: Callable, *arguments) -> None:
    heapq.heappush(self.calls, (time, next(self.order), call, arguments))

  def after(self, seconds: float, call: Callable, *arguments) -> None:
    self.at(self.now + seconds, call, *arguments)

  def to(self, number: int, method: str, *arguments) -> None:
    """A message of the syncer to the incarnation of a learner that it knows, and to no other."""
    self.after(LATENCY, getattr(self.syncer.incarnations[number], method), *arguments)

  def start(self, number: int) -> None:
    self.learners[number] = Learner(self, number)
    self.after(LATENCY, self.syncer.on_hello, self.learners[number])

  def kill(self, number: int) -> None:
    self.learners[number].alive = False

  def run(self, until: float) -> None:
    while self.calls and self.calls[0][0] <= until:
      self.now, _, call, arguments = heapq.heappop(self.calls)
      call(*arguments)


# --- The problem: a small network learns from noisy answers of another one. Its tensors are the
# fragments, so P = 4.

INPUTS, HIDDEN, OUTPUTS = 8, 16, 4
INNER_RATE, NOISE = 0.1, 1.0


def network(seed: int) -> list[Vector]:
  random = np.random.default_rng(seed)
  shapes = (INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, OUTPUTS), (OUTPUTS,)
  return [(random.standard_normal(s) / math.sqrt(s[0])).astype(np.float32) for s in shapes]


def answers(params: list[Vector], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  hidden = np.tanh(x @ params[0] + params[1])
  return hidden, hidden @ params[2] + params[3]


TEACHER, FIRST = network(1), network(2)
P = len(FIRST)


def inner_step(params: list[Vector], island: int, step: int) -> None:
  """One step of SGD on this island's data, in place. Any optimizer will do."""
  random = np.random.default_rng([island, step])
  x = random.standard_normal((BATCH, INPUTS)).astype(np.float32)
  noise = NOISE * random.standard_normal((BATCH, OUTPUTS))
  hidden, y = answers(params, x)
  error = (y - answers(TEACHER, x)[1] - noise).astype(np.float32) / BATCH
  back = (error @ params[2].T) * (1 - hidden**2)
  for value, gradient in zip(params, (x.T @ back, back.sum(0), hidden.T @ error, error.sum(0))):
    value -= np.float32(INNER_RATE) * gradient


def loss(params: list[Vector]) -> float:
  """Mean squared distance from the teacher, on inputs that no island trains on."""
  x = np.random.default_rng(3).standard_normal((4096, INPUTS)).astype(np.float32)
  return float(np.mean((answers(params, x)[1] - answers(TEACHER, x)[1]) ** 2))


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=400, help="of the fastest island")
  steps = parser.parse_args().steps
  if steps < 1:
    parser.error(f"--steps={steps}: must be positive. Fix: use 400.")
  end = steps * STEP_SECONDS[0]
  world = World()
  world.at(end / 3, world.kill, 2)
  world.at(end / 2, world.start, 2)
  print("seconds  loss of the merged model   commits")
  for tenth in range(11):
    world.run(end * tenth / 10)
    print(f"{world.now:7.0f}  {loss(world.syncer.value):12.4f}  {len(world.commits):18}")
  print("\nisland  a step takes  steps  share of the commits")
  for number, seconds in enumerate(STEP_SECONDS):
    share = sum(number in learners for _, _, learners, _ in world.commits)
    share /= max(1, len(world.commits))
    print(f"{number:6}  {seconds:10.2f} s  {world.begun[number]:5}  {share:21.0%}")
  alone = [first.copy() for first in FIRST]
  for step in range(steps):
    inner_step(alone, 0, step)
  print(f"\nloss of island 0 alone {loss(alone):.4f}, merged {loss(world.syncer.value):.4f}")


if __name__ == "__main__":
  main()
