"""Bytes over links: as counted message by message, as really encoded, as measured on the wire."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.checkpoint import buddy as buddies
from ddiloco.config import SyncConfig
from ddiloco.core import codec, fragments
from ddiloco.core.delta import Deltas
from ddiloco.core.fragments import TensorSpec
from ddiloco.simulation import bandwidth

ROOT = Path(__file__).parent.parent.parent
SPECS = [
  TensorSpec("embedding", (300, 64), stacked=False, embedding=True),
  TensorSpec("layers/mlp", (6, 64, 96), stacked=True, embedding=False),
  TensorSpec("layers/norm", (6, 64), stacked=True, embedding=False),
]
names = st.sampled_from(codec.CODECS)


@st.composite
def worlds(draw):
  sizes = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=12))
  sync = SyncConfig(
    num_fragments=len(sizes),
    num_shards=draw(st.integers(1, len(sizes))),
    push_codec=draw(names),
    publish_codec=draw(names),
  )
  return sizes, sync, draw(st.integers(1, 6)), draw(st.booleans())


@given(worlds())
def test_links_carry_what_every_single_message_adds_up_to(world):
  sizes, sync, islands, apart = world
  places = islands + sync.num_shards if apart else islands
  sent, received = [0] * places, [0] * places

  def move(source: int, target: int, nbytes: int) -> None:
    if source != target:
      sent[source] += nbytes
      received[target] += nbytes

  def place(shard: int) -> int:
    return islands + shard if apart else shard % islands

  for p, size in enumerate(sizes):
    shard = fragments.shard_of(p, sync.num_shards)
    for learner in range(islands):
      move(learner, place(shard), codec.payload_bytes(size, sync.push_codec))
      move(place(shard), learner, codec.payload_bytes(size, sync.publish_codec))
    if sync.num_shards > 1:
      buddy = place(buddies.buddy_of(shard, sync.num_shards))
      move(place(shard), buddy, codec.payload_bytes(size, sync.publish_codec))
  assert bandwidth.flows(sizes, sync, islands, apart) == list(zip(sent, received))
  assert sum(sent) == sum(received), "what is sent is received"


def test_as_many_shards_as_islands_move_what_a_sharded_all_reduce_does():
  islands, sizes = 4, [1000] * 8
  sync = SyncConfig(num_fragments=8, num_shards=islands)
  for flow in bandwidth.flows(sizes, sync, islands, apart=False):
    ring = 2 * (islands - 1) / islands * 4 * sum(sizes)
    copies = 4 * sum(sizes) / islands  # for the buddy, there and here
    assert flow == (ring + copies, ring + copies)


@pytest.mark.parametrize("name", codec.CODECS)
def test_bytes_are_those_of_real_pushes_and_publishes(name):
  sync = SyncConfig(num_fragments=6, push_codec=name, publish_codec=name, fragmentation="balanced")
  plan = fragments.make_plan(SPECS, sync)
  random, deltas = np.random.default_rng(7), Deltas(sync)
  pushed = published = 0
  for fragment in plan.fragments:
    deltas.base[fragment.index] = np.zeros(fragment.size, np.float32)
    local = random.standard_normal(fragment.size, dtype=np.float32)
    pushed += deltas.push(fragment.index, local, 1.0).nbytes
    published += codec.encode(local, name).nbytes
  found = bandwidth.exchanged(plan.sizes, sync)
  assert (found.push_bytes, found.publish_bytes) == (pushed, published)
  assert found.per_step(sync) == (pushed + published) / sync.sync_period


@pytest.mark.slow
@pytest.mark.parametrize("name", ["f32", "int4"])
def test_bytes_agree_with_those_measured_on_the_wire(name):
  """Real learners and shards, all frames counted: headers and control are the small rest."""
  bench = runpy.run_path(str(ROOT / "scripts" / "bench_wire.py"))
  config = bench["make_config"](4, 2, name, True)
  plan = bench["initial"].make_plan(config)
  measured, _ = bench["measure"](config, plan)
  planned = bandwidth.exchanged(plan.sizes, config.sync).per_step(config.sync)
  assert 1 <= measured / planned < 1.03
