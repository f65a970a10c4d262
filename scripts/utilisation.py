"""The share of time that islands compute, given their bandwidth, for the scripts beside this file.

One formula for every method that waits for its exchange. The model's layers are equal and split
into fragments by stride; fragment f is layers f, f + P, f + 2P, ... A fragment is due once in
`period_steps`. Each layer is sent as soon as the backward pass has made it, one layer after the
other over one link. Then all islands wait for the part of the exchange that lasts longer than
`overlap_steps` further steps:

  exposed = max(0, arrival of its last layer - end of the backward pass - overlap_steps * step)
  utilisation = H step / max(H step + sum of exposed, all transfers)

Data-parallel is one fragment and H = 1, DiLoCo one fragment and H = 100, Streaming DiLoCo several.
Sums are made by a ring: each of M sites sends, and receives, 2 (M - 1) / M of every value. M shards
at the sites of the islands would move the same bytes.

Decoupled DiLoCo never waits: its islands compute all the time whatever the bandwidth, and with too
little of it syncs come later. So for Decoupled `required_gbps` answers another question: which
bandwidth carries a share u of the planned syncs?

Sources: "Streaming DiLoCo" (arXiv 2501.18512) simulates the same as a graph of layers; the overlap
of every method's sums with the backward pass is from there. The rest is bytes over bandwidth.
"""

from __future__ import annotations

import dataclasses
import math

from ddiloco.core import codec

_VALUES = 1 << 24  # so many that a codec's last, partial block does not matter


@dataclasses.dataclass(frozen=True)
class Workload:
  """The model and the sites."""

  parameters: float
  step_seconds: float  # of pure computation, on every site
  sites: int = 2  # M
  layers: int = 48  # of equal size; all parameters are in them
  backward_share: float = 2 / 3  # of a step: the backward pass costs twice the forward pass
  latency_seconds: float = 0.0  # until the first byte is there; once per exchange


@dataclasses.dataclass(frozen=True)
class Method:
  """One method of syncing the sites."""

  name: str
  bits_per_value: float = 16.0  # bf16
  period_steps: int = 1  # H: steps between two syncs of the same fragment
  fragments: int = 1  # P, of layers by stride; at most as many as layers
  overlap_steps: int = 0  # tau: steps that go on while a fragment is under way
  waits: bool = True  # False: Decoupled


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
    workload: the model and the sites.
    method: how the sites sync.
    gbps: Gbit/s of every site's link, in each direction.
  """
  if not method.waits:
    return 1.0
  transfer_seconds = sent_bits(workload, method) / (gbps * 1e9)
  exposed = (
    _exposed_seconds(workload, method, transfer_seconds, f) for f in range(method.fragments)
  )
  compute_seconds = method.period_steps * workload.step_seconds
  return compute_seconds / max(compute_seconds + sum(exposed), transfer_seconds)


def required_gbps(workload: Workload, method: Method, share: float) -> float:
  """The least Gbit/s per site and direction for this share; infinite if latency forbids it.

  The share is of computing time (`utilisation`), for Decoupled of planned syncs: the rest would not
  fit the link.
  """
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
  last = fragment + (count - 1) * method.fragments  # the first layer that the backward pass makes
  # Layer l is ready (L - l) layers into the backward pass. The times between layers are equal, so
  # either all transfers follow each other without a gap, or only the last transfer matters.
  began, ended = ((workload.layers - layer) * layer_seconds for layer in (last, fragment))
  arrival = max(began + count * each, ended + each) + workload.latency_seconds
  allowed = workload.layers * layer_seconds + method.overlap_steps * workload.step_seconds
  return max(0.0, arrival - allowed)
