"""Vector clocks: what everybody knew of everybody when a snapshot was taken. PURE.

Pushes and publishes, the messages that move the model, carry the sender's clock: how many pushes of
each learner and how many commits of each shard its state may depend on. A set of recorded states is
a consistent cut if nobody knows more of another than that one had recorded itself (Mattern 1989).
Counts contain the incarnation, so that they grow over restarts as round numbers do.
"""

from __future__ import annotations

from collections.abc import Mapping

Seen = Mapping[int, int]  # who -> count; a learner is its number, a shard see `shard_key`


def shard_key(shard: int) -> int:
  """The name of a shard in a clock; learners have their numbers, the evaluator is -1."""
  return -2 - shard


def count(incarnation: int, events: int) -> int:
  """The `events`-th push or commit of an incarnation, greater than any of an earlier one."""
  return (incarnation << 24) + events


def join(seen: Seen, other: Seen) -> Seen:
  """What is known after hearing of `other`: the greater count of each."""
  news = {who: count for who, count in other.items() if count > seen.get(who, 0)}
  return {**seen, **news} if news else seen


def told(seen: Seen, snapshot: int) -> Seen:
  """What a message says of the sender's clock: nothing before its first recorded snapshot.

  What was sent before that comes from before every cut, and clocks are as long as members are many.
  """
  return seen if snapshot else {}


def violations(cut: Mapping[int, Seen]) -> list[tuple[int, int]]:
  """(who, whom): `who` had heard of something that `whom` did only after recording its state.

  `cut` has the clock of every participant, by name. Empty: the cut is consistent.
  """
  return [
    (who, whom)
    for who, seen in sorted(cut.items())
    for whom, known in sorted(seen.items())
    if whom in cut and whom != who and known > cut[whom].get(whom, 0)
  ]
