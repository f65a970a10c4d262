"""What each role had heard of each other when a snapshot was taken. PURE.

Pushes and publishes, the messages that move the model, carry a count of the sender's own: pushes of
a learner, commits of a shard. A role keeps the greatest count it has heard from each sender. A set
of captured states is a consistent snapshot if no role has heard more of another than that one had
done when its state was captured (Mattern 1989). A sender counts for itself only, so a learner that
lies can spoil its own part and no other. Counts contain the incarnation, so that they grow over
restarts as round numbers do.
"""

from __future__ import annotations

from collections.abc import Mapping

VectorClock = Mapping[int, int]  # who -> count; a learner is its number, a shard see `shard_key`


def shard_key(shard: int) -> int:
  """The key of a shard; learners have their numbers, the evaluator is -1."""
  return -2 - shard


def count(incarnation: int, events: int) -> int:
  """The `events`-th push or commit of an incarnation, greater than any of an earlier one."""
  return (incarnation << 24) + events


def join(vector_clock: VectorClock, other: VectorClock) -> VectorClock:
  """The vector clock after hearing of `other`: the greater count of each."""
  news = {who: count for who, count in other.items() if count > vector_clock.get(who, 0)}
  return {**vector_clock, **news} if news else vector_clock


def violations(snapshot: Mapping[int, VectorClock]) -> list[tuple[int, int]]:
  """(who, whom): `who` had heard of an act of `whom` from after `whom`'s capture.

  `snapshot` has what each participant had heard, by key. Empty: the snapshot is consistent.
  """
  return [
    (who, whom)
    for who, vector_clock in sorted(snapshot.items())
    for whom, known in sorted(vector_clock.items())
    if whom in snapshot and whom != who and known > snapshot[whom].get(whom, 0)
  ]
