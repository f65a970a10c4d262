"""What a run of Decoupled DiLoCo moves over its links. Pure arithmetic.

Every learner pushes each fragment to the shard that owns it, and gets the new version from there,
once in H steps. Shard s stands beside island s mod M and shares its link; what stays at one place
does not cross it. With as many shards as islands that is what a sharded all-reduce moves. Shards
with a link of their own stand at places M, M + 1, ...

With two shards or more, each also sends every commit to its buddy, as learners get it.

Not counted: headers and control (under 1 % of real fragments, `scripts/bench_wire.py`), and what
a joining island gets (the whole model once, in f32).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ddiloco.config import SyncConfig
from ddiloco.core import codec, fragments

F32_BYTES = 4
PUSH_VECTORS = 4  # that making a push touches: local and base, the delta, what of it arrives
STAGE_VECTORS = 3  # that taking up a version touches: payload, base, what is added
# What an Ethernet frame of 1,514 bytes carries of a fragment: without its headers (14 bytes and 52
# of IP and TCP), and TLS's 22 for 16,384.
PAYLOAD_SHARE = 1448 / 1514 * 16384 / (16384 + 22)


def payload_bytes_per_second(gbps: float) -> float:
  """Of fragments, over a link of so many Gbit/s."""
  return PAYLOAD_SHARE * gbps * 1e9 / 8


@dataclasses.dataclass(frozen=True)
class Exchanged:
  """Bytes of one learner in one period: all fragments once."""

  push_bytes: int  # to the shards
  publish_bytes: int  # back

  def per_step(self, sync: SyncConfig) -> float:
    """Bytes per inner step, both ways together."""
    return (self.push_bytes + self.publish_bytes) / sync.sync_period


@dataclasses.dataclass(frozen=True)
class LinkTraffic:
  """Bytes over one place's link in one period, each way."""

  sent_bytes: int
  received_bytes: int
  copy_bytes: int  # of both, those of copies for buddies

  @property
  def busier_bytes(self) -> int:
    """Of the direction that carries more: links are full duplex."""
    return max(self.sent_bytes, self.received_bytes)


def exchanged(sizes: Sequence[int], sync: SyncConfig) -> Exchanged:
  """What one learner pushes and receives while every fragment is synced once.

  Args:
    sizes: values of every fragment.
    sync: its codecs.
  """
  return Exchanged(
    sum(codec.payload_bytes(size, sync.push_codec) for size in sizes),
    sum(codec.payload_bytes(size, sync.publish_codec) for size in sizes),
  )


def state_vectors(sync: SyncConfig, momentum: bool) -> int:
  """f32 vectors a shard keeps of each fragment: value, published value, momentum."""
  return 1 + (sync.publish_codec != "f32") + momentum


def commit_vectors(sync: SyncConfig, momentum: bool, pushes: int) -> int:
  """f32 vectors that a commit touches: a push each, twice, and the state in and out."""
  return 2 * pushes + 2 * state_vectors(sync, momentum)


def owned_sizes(sizes: Sequence[int], shard: int, num_shards: int) -> list[int]:
  """Values of the fragments that this shard owns."""
  return [sizes[p] for p in fragments.owned_by(shard, num_shards, len(sizes))]


def flows(
  sizes: Sequence[int], sync: SyncConfig, islands: int, apart: bool, listeners: int = 0
) -> list[LinkTraffic]:
  """What crosses every place's link in one period: islands first, then shards that stand apart.

  Args:
    sizes: values of every fragment.
    sync: codecs and `num_shards`.
    islands: M, each with one learner.
    apart: shards have links of their own, instead of standing beside islands.
    listeners: members somewhere else that get every version and push nothing: the evaluator.
  """
  count = sync.num_shards
  at = [islands + s if apart else s % islands for s in range(count)]
  places = islands + count if apart else islands
  owned = [exchanged(owned_sizes(sizes, s, count), sync) for s in range(count)]
  push_bytes, publish_bytes = [0] * places, [0] * places  # of the shards there, per learner
  copies_sent, copies_received = [0] * places, [0] * places
  for s, (place, mine) in enumerate(zip(at, owned)):
    push_bytes[place] += mine.push_bytes
    publish_bytes[place] += mine.publish_bytes
    buddy = at[(s + 1) % count]
    if buddy != place:
      copies_sent[place] += mine.publish_bytes
      copies_received[buddy] += mine.publish_bytes
  found = []
  for place in range(places):
    here = int(place < islands)  # learners at this place
    away = islands - here
    to_shards = here * (sum(push_bytes) - push_bytes[place])
    from_shards = here * (sum(publish_bytes) - publish_bytes[place])
    found.append(
      LinkTraffic(
        sent_bytes=to_shards + (away + listeners) * publish_bytes[place] + copies_sent[place],
        received_bytes=from_shards + away * push_bytes[place] + copies_received[place],
        copy_bytes=copies_sent[place] + copies_received[place],
      )
    )
  return found
