"""What each role had heard of each other when a snapshot was taken. PURE.

Pushes and publishes, the messages that move the model, carry a count of the sender's own: pushes of
a learner, commits of a shard. A role keeps the greatest count it has heard from each sender. A set
of recorded states is a consistent cut if no role has heard more of another than that one had done
when it recorded its state (Mattern 1989). A sender counts for itself only, so a learner that lies
can spoil its own part and no other. Counts contain the incarnation, so that they grow over restarts
as round numbers do.
"""

from __future__ import annotations

from collections.abc import Mapping

Seen = Mapping[int, int]  # who -> count; a learner is its number, a shard see `shard_key`


def shard_key(shard: int) -> int:
  """The key of a shard; learners have their numbers, the evaluator is -1."""
  return -2 - shard


def count(incarnation: int, events: int) -> int:
  """The `events`-th push or commit of an incarnation, greater than any of an earlier one."""
  return (incarnation << 24) + events


def join(seen: Seen, other: Seen) -> Seen:
  """What is known after hearing of `other`: the greater count of each."""
  news = {who: count for who, count in other.items() if count > seen.get(who, 0)}
  return {**seen, **news} if news else seen


def violations(cut: Mapping[int, Seen]) -> list[tuple[int, int]]:
  """(who, whom): `who` had heard of something that `whom` did only after recording its state.

  `cut` has what each participant had heard, by key. Empty: the cut is consistent.
  """
  return [
    (who, whom)
    for who, seen in sorted(cut.items())
    for whom, known in sorted(seen.items())
    if whom in cut and whom != who and known > cut[whom].get(whom, 0)
  ]
