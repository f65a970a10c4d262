"""Which role may go on, whatever values are made of; what an algebra is asked, in which order."""

from __future__ import annotations

import collections
import weakref

from ddiloco.trace.interpreter import (
  LearnerAlgebra,
  LearnerRole,
  Proof,
  Schedule,
  ShardAlgebra,
  ShardRole,
  Version,
)
from ddiloco.trace.operations import INITIAL, Key, makes, needs, read_logs
from tests.trace.traces import find, good, typed

INITIAL_VALUE = Key("value", INITIAL, 0)


def schedule(logs, made=None) -> tuple[Schedule, Proof]:
  proof = Proof()
  made = {INITIAL_VALUE: proof.add(Version(0, INITIAL, 0))} if made is None else made
  return Schedule(read_logs(typed(logs)), made, proof), proof


class Nothing:
  """Performs operations and makes what they make, out of nothing."""

  def perform(self, entry, given):
    op = entry.operation
    assert len(given) == len(needs(op))
    return {key: f"{key} of {op.role}" for key in makes(op)}


def test_a_role_goes_on_when_all_it_needs_is_made():
  found, _ = schedule(good())
  operations = found.left
  entry, given = found.next("syncer-0")
  assert (entry.line, entry.operation.kind, given) == (1, "started", [])
  while found.may_go("syncer-0"):
    found.put(Nothing().perform(*found.next("syncer-0")))
  assert found.left == operations - 2, "it starts and owns; its first commit needs pushes"
  found.perform_all(collections.defaultdict(Nothing))
  assert found.left == 0


def test_roles_are_performed_in_turn():
  """So a step that one island has begun goes on beside those of others."""
  turns, told = [], []

  class Notes(Nothing):
    def perform(self, entry, given):
      turns.append(entry.operation.role)
      return super().perform(entry, given)

  found, _ = schedule(good())
  of = found.left
  found.perform_all(collections.defaultdict(Notes), lambda *progress: told.append(progress))
  both = ["learner-0", "learner-1"]
  assert turns[:8] == [*both, "syncer-0"] * 2 + both, "the shard waits for pushes"
  assert told == sorted(told) and told[0] == (3, of) and told[-1] == (of, of)


def test_what_is_taken_for_the_last_time_is_forgotten():
  found, _ = schedule(good(), {INITIAL_VALUE: "initial", Key("value", 12345, 0): "unused"})
  assert not found.wanted(Key("value", 12345, 0))
  taken = 0
  while found.wanted(INITIAL_VALUE):
    role = next(role for role in good() if found.may_go(role))
    entry, given = found.next(role)
    taken += given == ["initial"]
    found.put(Nothing().perform(entry, given))
  assert taken == 3, "by the shard and two learners"
  found.perform_all(collections.defaultdict(Nothing))
  assert found._made == {}


def test_a_restored_state_is_forgotten():
  """It is as large as the island's own."""
  captured = []

  class State:
    pass

  class Captures(LearnerAlgebra):
    def capture(self, entry, fragments):
      state = State()
      captured.append(weakref.ref(state))
      return state

  found, proof = schedule(good())
  learners = {role: LearnerRole(proof, Captures()) for role in ("learner-0", "learner-1")}
  found.perform_all({**learners, "syncer-0": ShardRole(proof, ShardAlgebra())})
  assert proof.problems == [] and [state() for state in captured] == [None]


def test_what_was_never_made_is_said_and_left_out():
  logs = good()
  logs["learner-0"].remove(find(logs, "learner-0", "donated"))
  found, proof = schedule(logs)
  found.perform_all(collections.defaultdict(Nothing))
  (problem,) = proof.problems
  assert "needs donation 1 of fragment 0 by learner-0 (incarnation 0), which was never" in problem


def test_an_algebra_is_asked_in_the_order_of_the_trace():
  """One that only listens: what it is told of pushes, of versions and of going back."""
  told = []

  class Listens(LearnerAlgebra):
    def copy_out(self, op):
      told.append(f"copy_out {op.round}")
      return op.steps, op.tokens, f"push {op.round}"

    def stage(self, op, version, included):
      told.append(f"stage {version and version.round}, {included and included.content}")
      return f"staged {op.round}"

    def apply(self, fragment, staged, mode):
      told.append(f"apply {staged}, {mode}")

  class Adds(ShardAlgebra):
    def commit(self, entry, base, new, pushes):
      return f"{base.round} + {[push.content for push in pushes]}"

  logs = {role: events for role, events in good().items() if role != "learner-1"}
  shard, learner = logs["syncer-0"], logs["learner-0"]
  find(logs, "syncer-0", "commit", round=0).update(learners=[0], incarnations=[0])
  for event in shard:
    event.update({k: v - 30 for k, v in event.items() if k == "merged_tokens"})
  find(logs, "syncer-0", "commit", round=0).update(steps=[2], tokens=[20], step_tokens=[10])
  shard.remove(find(logs, "syncer-0", "commit", round=3))
  back = {"round": 1, "version": 2, "mode": "reset", "included": False}
  place = learner.index(find(logs, "learner-0", "copy_out", round=2)) + 1
  event = {**find(logs, "learner-0", "stage", round=1), **back}
  learner[place:place] = [event, {**event, "kind": "apply"}]
  shard.remove(find(logs, "syncer-0", "commit", round=2))
  found, proof = schedule(logs)
  roles = {"learner-0": LearnerRole(proof, Listens()), "syncer-0": ShardRole(proof, Adds())}
  found.perform_all(roles)
  assert proof.problems == []
  assert told == [
    "stage -1, None", "apply staged -1, overwrite", "copy_out 0",
    "stage 0, push 0", "apply staged 0, rebase", "copy_out 1",
    "stage 1, push 1", "apply staged 1, rebase", "copy_out 2",
    "stage None, None", "apply staged 1, reset",
  ]  # fmt: skip
