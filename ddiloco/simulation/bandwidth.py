"""How much of their time islands compute, given the bandwidth between them. Pure arithmetic.

One formula for every way to train that waits for its exchange. The model's layers are alike and
split into fragments by stride; fragment f is layers f, f + P, f + 2P, ... A fragment is due once in
`period_steps`. What is sent leaves layer by layer, as soon as the backward pass has made it, one
layer after the other over one link; then all islands wait, unless `overlap_steps` further steps are
over later:

  exposed = max(0, arrival of its last layer - end of the backward pass - overlap_steps * step)
  utilisation = H step / max(H step + sum of exposed, all transfers)

Data-parallel is one fragment and H = 1, DiLoCo one fragment and H = 100, Streaming DiLoCo several.
Sums are made by a ring: each of M sites sends, and receives, 2 (M - 1) / M of every value. Shards
that stand beside the islands, as many as islands, move the same bytes.

Decoupled DiLoCo never waits: its islands compute all the time whatever the bandwidth, and what is
missing shows as syncs that come later. So `required_gbps` answers another question for it: what it
takes that a share u of the planned syncs takes place.

Sources: "Streaming DiLoCo" (arXiv 2501.18512) simulates the same as a graph of layers; the overlap
of every method's sums with the backward pass is from there. The rest is bytes over bandwidth.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ddiloco.checks import not_negative, positive, require
from ddiloco.config import SyncConfig
from ddiloco.core import codec, fragments

_VALUES = 1 << 24  # enough that the last block of a codec does not count


@dataclasses.dataclass(frozen=True)
class Workload:
  """What is trained and where."""

  parameters: float
  step_seconds: float  # of pure computation, on every site
  sites: int = 2  # M
  layers: int = 48  # of equal size; all parameters are in them
  backward_share: float = 2 / 3  # of a step: the backward pass costs twice the forward pass
  latency_seconds: float = 0.0  # until the first byte is there; once per exchange

  def __post_init__(self):
    positive("workload", self, "parameters", "step_seconds", "layers")
    not_negative("workload", self, "latency_seconds")
    require(self.sites >= 2, "workload.sites", self.sites, "one site has no link", "use 2 or more")
    require(
      0 <= self.backward_share <= 1,
      "workload.backward_share",
      self.backward_share,
      "must lie in [0, 1]",
      "use 2 / 3",
    )


@dataclasses.dataclass(frozen=True)
class Method:
  """One way to keep the sites together."""

  name: str
  bits_per_value: float = 16.0  # bf16
  period_steps: int = 1  # H: steps between two syncs of the same fragment
  fragments: int = 1  # P, of layers by stride
  overlap_steps: int = 0  # tau: steps that go on while a fragment is under way
  waits: bool = True  # False: Decoupled

  def __post_init__(self):
    positive("method", self, "bits_per_value", "period_steps", "fragments")
    not_negative("method", self, "overlap_steps")


def bits_per_value(name: str) -> float:
  """Bits that a codec of `core.codec` sends for one value, its share of the scales included."""
  return 8 * codec.payload_bytes(_VALUES, name) / _VALUES


def sent_bits(workload: Workload, method: Method) -> float:
  """Bits that every site sends, and receives, in one period: the whole model once."""
  ring = 2 * (workload.sites - 1) / workload.sites
  return ring * workload.parameters * method.bits_per_value


def average_gbps(workload: Workload, method: Method) -> float:
  """Gbit/s per site and direction that carry the planned syncs and no more."""
  seconds = method.period_steps * workload.step_seconds
  return sent_bits(workload, method) / seconds / 1e9


def utilisation(workload: Workload, method: Method, gbps: float) -> float:
  """Share of the time that the sites compute, in [0, 1].

  Args:
    workload: what is trained.
    method: how.
    gbps: Gbit/s of every site's link, in each direction.

  Raises:
    ConfigError: more fragments than layers, or no bandwidth.
  """
  require(gbps > 0, "gbps", gbps, "must be greater than 0", "use 2")
  if not method.waits:
    return 1.0
  require(
    method.fragments <= workload.layers,
    "method.fragments",
    method.fragments,
    f"must not exceed workload.layers ({workload.layers}), or a fragment would be empty",
    f"use at most {workload.layers}",
  )
  transfer_seconds = sent_bits(workload, method) / (gbps * 1e9)
  exposed = (
    _exposed_seconds(workload, method, transfer_seconds, f) for f in range(method.fragments)
  )
  compute_seconds = method.period_steps * workload.step_seconds
  return compute_seconds / max(compute_seconds + sum(exposed), transfer_seconds)


def kept_syncs(workload: Workload, method: Method, gbps: float) -> float:
  """Share of the planned syncs that Decoupled makes, in [0, 1]: the rest would not fit the link.

  The effective sync period is `period_steps` divided by it.
  """
  require(gbps > 0, "gbps", gbps, "must be greater than 0", "use 2")
  return min(1.0, gbps / average_gbps(workload, method))


def required_gbps(workload: Workload, method: Method, share: float) -> float:
  """The least Gbit/s per site and direction for this share; infinite if latency forbids it.

  The share is of computing time (`utilisation`), for Decoupled of planned syncs (`kept_syncs`).

  Raises:
    ConfigError: the share is not in (0, 1), or there are more fragments than layers.
  """
  require(0 < share < 1, "share", share, "must lie in (0, 1)", "use 0.95")
  if not method.waits:
    return share * average_gbps(workload, method)
  low, high = 1e-9, 1e12  # Gbit/s
  if utilisation(workload, method, high) < share:
    return math.inf
  while high / low > 1 + 1e-12:
    middle = math.sqrt(low * high)
    if utilisation(workload, method, middle) < share:
      low = middle
    else:
      high = middle
  return high


def _exposed_seconds(
  workload: Workload, method: Method, transfer_seconds: float, fragment: int
) -> float:
  """How long all wait for one sync of a fragment; `transfer_seconds` is the whole model's."""
  layer_seconds = workload.backward_share * workload.step_seconds / workload.layers
  each = transfer_seconds / workload.layers
  count = len(range(fragment, workload.layers, method.fragments))
  last = fragment + (count - 1) * method.fragments  # the backward pass comes by here first
  # Layer l is ready (L - l) layers into the backward pass. Gaps are equal, so that either the
  # transfers follow each other without one from the first on, or only the last one matters.
  began, ended = ((workload.layers - layer) * layer_seconds for layer in (last, fragment))
  arrival = max(began + count * each, ended + each) + workload.latency_seconds
  allowed = workload.layers * layer_seconds + method.overlap_steps * workload.step_seconds
  return max(0.0, arrival - allowed)


# --- What a run of Decoupled DiLoCo moves over its links. Pure arithmetic
# Every learner pushes each fragment to the shard that owns it, and gets the new version from there,
# once in H steps. Shard s stands beside island s mod M and shares its link; what stays at one place
# does not cross it. With as many shards as islands that is what a sharded all-reduce moves. Shards
# with a link of their own stand at places M, M + 1, ...
#
# With two shards or more, each also sends every commit to its buddy, as learners get it.
#
# Not counted: headers and control (under 1 % of real fragments, `scripts/bench_wire.py`), and what
# a joining island gets (the whole model once, in f32).

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
