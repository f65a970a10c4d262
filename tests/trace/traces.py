"""A trace made by hand: two learners and a shard, one fragment, a kill, a snapshot, a restore."""

from __future__ import annotations

import itertools
import json

from ddiloco.protocol.events import Event, decode
from tests.made_events import nothing

STEP_TOKENS = 10
Logs = dict[str, list[dict]]


class Log:
  """One role's events; `on` says whose incarnation writes."""

  def __init__(self, role: str):
    self.role, self.events, self._incarnation, self._time = role, [], 0, itertools.count()
    self._step = self._global_step = 0

  def on(self, incarnation: int, global_step: int = 0, **restored: int) -> Log:
    self._incarnation, self._step, self._global_step = incarnation, 0, global_step
    if restored:
      self.add("restored", **restored)
    return self.add("started")

  def add(self, kind: str, **fields) -> Log:
    head = {"time": float(next(self._time)), "role": self.role, "incarnation": self._incarnation}
    self.events.append({**head, "kind": kind, **nothing(kind), **fields})
    return self

  def steps(self, count: int) -> Log:
    for _ in range(count):
      self._step, self._global_step = self._step + 1, self._global_step + 1
      position = self._global_step - 1
      numbers = {"step": self._step, "global_step": self._global_step, "position": position}
      self.add("step", **numbers, tokens=STEP_TOKENS, loss=1.0)
    return self

  def copy_out(self, round: int, version: int, base_round: int, steps: int) -> Log:
    fields = {"round": round, "version": version, "base_round": base_round, "steps": steps}
    return self.add("copy_out", fragment=0, **fields, tokens=STEP_TOKENS * steps)

  def apply(self, round: int, version: int, mode: str = "rebase", included: bool = False) -> Log:
    fields = {"round": round, "version": version, "mode": mode, "included": included}
    return self.add("stage", fragment=0, **fields).add("apply", fragment=0, **fields)

  def commit(self, round: int, version: int, base_round: int, of: dict, steps: list, merged: int):
    """`of`: learner -> incarnation; `steps`: of each of them."""
    fields = {"round": round, "version": version, "base_round": base_round}
    who = {"learners": list(of), "incarnations": list(of.values())}
    who["step_tokens"] = [STEP_TOKENS] * len(of)
    tokens = {"tokens": [STEP_TOKENS * n for n in steps], "merged_tokens": STEP_TOKENS * merged}
    return self.add("commit", fragment=0, **fields, **who, steps=steps, **tokens)


def good() -> Logs:
  """Nothing is wrong with it.

  Round 0 merges both learners. Learner 1 makes three more steps, of which a push for round 1 is
  never merged, records snapshot 1, goes on, and is killed. Restored, it still has those steps (its
  push for round 3 holds three of incarnation 0 and two of incarnation 1), and learner 0's moments.
  """
  shard, one, two = Log("syncer-0"), Log("learner-0"), Log("learner-1")
  shard.on(0).add("owns", fragment=0, version=0, round=-1, momentum_round=-1)
  one.on(0).apply(-1, 0, "overwrite").steps(2).copy_out(0, 0, -1, steps=2).steps(1)
  two.on(0).apply(-1, 0, "overwrite").steps(3).copy_out(0, 0, -1, steps=3)
  shard.commit(0, 1, -1, {0: 0, 1: 0}, steps=[2, 3], merged=5).add("captured", snapshot=1)
  one.apply(0, 1, included=True).steps(1).copy_out(1, 1, 0, steps=2)
  two.apply(0, 1, included=True).steps(2).copy_out(1, 1, 0, steps=2).steps(1)
  two.add("captured", snapshot=1).add("saved", snapshot=1, arrays={"params/a": 7}).steps(2)
  shard.commit(1, 2, 0, {0: 0}, steps=[2], merged=7)
  one.apply(1, 2, included=True).steps(1).copy_out(2, 2, 1, steps=1)
  one.add("donated", fragment=0, donation=1)
  shard.commit(2, 3, 1, {0: 0}, steps=[1], merged=8)
  two.on(1, global_step=9, snapshot=1, of_incarnation=0)
  moments = {"learner": 0, "incarnation_of_donor": 0, "donation": 1}
  two.apply(1, 2).add("inherited", fragment=0, **moments)
  two.apply(2, 3).steps(2).copy_out(3, 3, 2, steps=5)
  shard.commit(3, 4, 2, {1: 1}, steps=[5], merged=13)
  two.apply(3, 4, included=True).steps(1).add("stopped", reason="the end")
  return {log.role: log.events for log in (shard, one, two)}


def find(logs: Logs, role: str, kind: str, **fields) -> dict:
  """The first event like this."""
  return next(
    e
    for e in logs[role]
    if e["kind"] == kind and all(e.get(name) == value for name, value in fields.items())
  )


def typed(logs: Logs) -> dict[str, list[Event | None]]:
  """The events as whoever reads their lines gets them; None is a line that is torn."""
  return {
    role: [e and decode(json.dumps(e).encode()) for e in events] for role, events in logs.items()
  }
