"""Utilisation follows from bytes and overlap: properties, hand-made values, a naive event loop."""

from __future__ import annotations

import dataclasses
import math

import pytest
import utilisation as bandwidth
from hypothesis import given
from hypothesis import strategies as st
from utilisation import Method, Workload

from ddiloco.core import codec

WORK = Workload(parameters=10e9, step_seconds=0.8)
DATA_PARALLEL = Method("data-parallel")
DECOUPLED = Method("decoupled", 16, 24, 24, 2, waits=False)

shares = st.floats(0.05, 0.995)
speeds = st.floats(0.01, 1e4)
works = st.builds(
  Workload,
  parameters=st.floats(1e6, 1e12),
  step_seconds=st.floats(0.01, 20),
  sites=st.integers(2, 64),
  layers=st.integers(16, 100),
  backward_share=st.floats(0, 1),
)
waiting = st.builds(
  Method,
  name=st.just("any"),
  bits_per_value=st.floats(1, 32),
  period_steps=st.integers(1, 200),
  fragments=st.integers(1, 16),
  overlap_steps=st.integers(0, 4),
)


@given(works, waiting, speeds, st.floats(1.001, 100))
def test_more_bandwidth_is_never_worse_and_more_bytes_never_better(work, method, gbps, factor):
  here = bandwidth.utilisation(work, method, gbps)
  assert 0 < here <= 1
  assert bandwidth.utilisation(work, method, gbps * factor) >= here - 1e-12
  heavier = dataclasses.replace(method, bits_per_value=method.bits_per_value * factor)
  assert bandwidth.utilisation(work, heavier, gbps) <= here + 1e-12
  # Bytes and bandwidth only matter as a ratio.
  same = bandwidth.utilisation(work, heavier, gbps * factor)
  assert same == pytest.approx(here, rel=1e-9)


@given(works, waiting, speeds)
def test_overlap_and_rarer_syncs_never_hurt(work, method, gbps):
  here = bandwidth.utilisation(work, method, gbps)
  longer = dataclasses.replace(method, overlap_steps=method.overlap_steps + 1)
  rarer = dataclasses.replace(method, period_steps=method.period_steps + 1)
  assert bandwidth.utilisation(work, longer, gbps) >= here - 1e-12
  assert bandwidth.utilisation(work, rarer, gbps) >= here - 1e-12
  latency = dataclasses.replace(work, latency_seconds=0.5)
  assert bandwidth.utilisation(latency, method, gbps) <= here + 1e-12


@given(works, waiting, shares)
def test_required_bandwidth_inverts_utilisation(work, method, share):
  gbps = bandwidth.required_gbps(work, method, share)
  assert bandwidth.utilisation(work, method, gbps) >= share
  assert bandwidth.utilisation(work, method, gbps * 0.999) < share
  least = share * bandwidth.average_gbps(work, method)
  assert gbps >= least * (1 - 1e-9), "less than its bytes need"


@given(works, shares)
def test_decoupled_computes_at_any_bandwidth_and_syncs_as_often_as_it_can(work, share):
  gbps = bandwidth.required_gbps(work, DECOUPLED, share)
  assert bandwidth.utilisation(work, DECOUPLED, 1e-6) == 1
  assert gbps == pytest.approx(share * bandwidth.average_gbps(work, DECOUPLED))


def test_hand_made_values():
  # 160 Gbit a step between two sites; a layer's backward pass takes 0.8 * 2/3 / 48 s.
  assert bandwidth.sent_bits(WORK, DATA_PARALLEL) == 160e9
  assert bandwidth.average_gbps(WORK, DATA_PARALLEL) == pytest.approx(200)
  layer = 0.8 * 2 / 3 / 48
  exposed = 1.6 - 47 * layer  # at 100 Gbit/s the link is busy from the first layer on
  assert bandwidth.utilisation(WORK, DATA_PARALLEL, 100) == pytest.approx(0.8 / (0.8 + exposed))
  exposed = 0.16 / 48  # at 1000 Gbit/s only the last layer is late
  assert bandwidth.utilisation(WORK, DATA_PARALLEL, 1000) == pytest.approx(0.8 / (0.8 + exposed))
  eight = dataclasses.replace(WORK, sites=8)
  assert bandwidth.average_gbps(eight, DATA_PARALLEL) == pytest.approx(350)
  assert bandwidth.average_gbps(WORK, DECOUPLED) == pytest.approx(200 / 24)


def test_latency_that_nothing_hides_makes_a_share_impossible():
  far = dataclasses.replace(WORK, latency_seconds=1.0)
  assert bandwidth.required_gbps(far, DATA_PARALLEL, 0.5) == math.inf
  hidden = Method("streaming", period_steps=100, fragments=16, overlap_steps=2)
  assert bandwidth.required_gbps(far, hidden, 0.99) < 10


@given(
  st.integers(1, 24),
  st.integers(1, 12),
  st.integers(1, 20),
  st.integers(0, 2),
  st.floats(0.05, 5),
  st.floats(0.0, 1.0),
)
def test_a_naive_simulation_agrees(layers, fragments, period, overlap, whole, backward):
  """Layer by layer over one link, fragments far enough apart that none meets another."""
  fragments = min(fragments, layers)
  period *= 64 * fragments
  work = Workload(1e9, 1.0, 2, layers, backward)
  method = Method("any", 1.0, period, fragments, overlap)
  late = 0.0
  for fragment in range(fragments):
    link = 0.0
    for layer in reversed(range(fragment, layers, fragments)):
      ready = backward * (layers - layer) / layers
      link = max(link, ready) + whole / layers
    late += max(0.0, link - backward - overlap)
  naive = period / (period + late)
  assert bandwidth.utilisation(work, method, 1 / whole) == pytest.approx(naive, rel=1e-9)


def test_codecs_are_ordered_and_their_bits_are_those_of_real_payloads():
  bits = [bandwidth.bits_per_value(name) for name in ("int4", "int8", "bf16", "f32")]
  assert bits == sorted(bits) and bits[2:] == [16, 32]
  assert bits[:2] == pytest.approx([4 + 32 / codec.BLOCK, 8 + 32 / codec.BLOCK])
  needed = [bandwidth.required_gbps(WORK, Method("", b, 24, 24, waits=False), 0.99) for b in bits]
  assert needed == sorted(needed) and len(set(needed)) == 4
