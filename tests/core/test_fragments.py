import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.config import ConfigError, SyncConfig
from ddiloco.core import fragments
from ddiloco.core.fragments import Piece, TensorSpec
from ddiloco.protocol.values import replace

POLICIES = ("balanced", "layer", "tensor", "strided")
MODEL = (
  TensorSpec("embedding", (5, 2), stacked=False, embedding=True),
  TensorSpec("layers/up", (2, 2, 3), stacked=True, embedding=False),
  TensorSpec("final/scale", (2,), stacked=False, embedding=False),
  TensorSpec("layers/scale", (2, 2), stacked=True, embedding=False),
)


def sync(policy="balanced", num_fragments=2, **fields):
  return SyncConfig(
    num_shards=1, fragmentation=policy, num_fragments=num_fragments, overlap_steps=0, **fields
  )


def names(plan):
  return [[(p.name, p.layer, p.start, p.stop) for p in f.pieces] for f in plan.fragments]


def values(specs, seed=0):
  rng = np.random.default_rng(seed)
  return {s.name: rng.standard_normal(s.shape).astype(np.float32) for s in specs}


@st.composite
def trees(draw):
  """Random specs: scalars, empty leaves, stacked and plain tensors, embeddings."""
  layers = draw(st.integers(1, 5))
  specs = []
  for index in range(draw(st.integers(1, 7))):
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    stacked = draw(st.booleans())
    shape = (layers, *shape) if stacked else shape
    specs.append(TensorSpec(f"leaf{index}", shape, stacked, draw(st.booleans())))
  return tuple(specs)


def plan_or_reason(specs, config):
  """The plan, or the ConfigError if there are too few tensors or layers."""
  try:
    return fragments.make_plan(specs, config), None
  except ConfigError as error:
    return None, str(error)


@settings(max_examples=150)
@given(trees(), st.sampled_from(POLICIES), st.integers(1, 5), st.integers(0, 4))
def test_every_element_in_exactly_one_fragment(specs, policy, num_fragments, max_rows):
  plan, reason = plan_or_reason(specs, sync(policy, num_fragments, max_rows=max_rows))
  if plan is None:
    assert f"sync.num_fragments = {num_fragments}" in reason
    return
  owners = {s.name: np.zeros(s.shape, np.int64) for s in specs}
  for fragment in plan.fragments:
    assert fragment.pieces and all(piece.size > 0 for piece in fragment.pieces)
    assert [p.offset for p in fragment.pieces] == [
      sum(q.size for q in fragment.pieces[:i]) for i in range(len(fragment.pieces))
    ]
    for piece in fragment.pieces:
      leaf = owners[piece.name]
      rows = leaf if piece.layer is None else leaf[piece.layer, ...]
      rows = rows[piece.start : piece.stop] if rows.ndim else rows
      assert rows.shape == piece.shape
      rows += 1
  assert all((count == 1).all() for count in owners.values())
  assert len(plan.fragments) == num_fragments
  assert sum(plan.sizes) == sum(math.prod(s.shape) for s in specs)


@settings(max_examples=100)
@given(trees(), st.sampled_from(POLICIES), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_split_then_join_is_the_identity(specs, policy, num_fragments, seed):
  plan, _ = plan_or_reason(specs, sync(policy, num_fragments, max_rows=2))
  if plan is None:
    return
  params = values(specs, seed)
  joined = {name: np.full_like(leaf, np.nan) for name, leaf in params.items()}
  for fragment in plan.fragments:
    flat = fragments.gather(fragment, params)
    assert flat.dtype == np.float32 and flat.shape == (fragment.size,)
    fragments.scatter(fragment, flat, joined)
  for name, leaf in params.items():
    np.testing.assert_array_equal(joined[name].view(np.uint32), leaf.view(np.uint32))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=3, max_size=8), st.integers(1, 3))
def test_balanced_peak_is_within_four_thirds_of_the_optimum(sizes, num_fragments):
  specs = [TensorSpec(f"t{i}", (n,), False, False) for i, n in enumerate(sizes)]
  plan = fragments.make_plan(specs, sync("balanced", num_fragments))
  ways = np.array(list(itertools.product(range(num_fragments), repeat=len(sizes))))
  loads = np.stack([(ways == f) @ np.array(sizes) for f in range(num_fragments)])
  assert 3 * max(plan.sizes) <= 4 * loads.max(axis=0).min()


def test_golden_plans():
  # Model order: embedding 10, up/0 6, scale/0 2, up/1 6, scale/1 2, final 2.
  emb, final = ("embedding", None, 0, 5), ("final/scale", None, 0, 2)
  up = [("layers/up", layer, 0, 2) for layer in range(2)]
  scale = [("layers/scale", layer, 0, 2) for layer in range(2)]
  golden = {
    # 10 -> 0; 6, 6 -> 1; scale/0 -> 0 (10 < 12); scale/1 -> 0 (12, 12: tie); final -> 1 (12 < 14)
    "balanced": [[emb, scale[0], scale[1]], [up[0], up[1], final]],
    "layer": [[emb, up[0], scale[0]], [up[1], scale[1], final]],
    "tensor": [[emb, scale[0], scale[1]], [up[0], up[1], final]],
    # layers 8, 8; embedding 10 -> 0 (tie); final -> 1
    "strided": [[emb, up[0], scale[0]], [up[1], scale[1], final]],
  }
  for policy, expected in golden.items():
    assert names(fragments.make_plan(MODEL, sync(policy))) == expected, policy
  plan = fragments.make_plan(MODEL, sync())
  assert plan.sizes == (14, 14)
  assert plan.fragments[0].pieces == (
    Piece("embedding", None, 0, 5, (5, 2), 0, True),
    Piece("layers/scale", 0, 0, 2, (2,), 10, False),
    Piece("layers/scale", 1, 0, 2, (2,), 12, False),
  )


def test_stacked_leaves_stand_layer_by_layer_at_the_place_of_the_first_one():
  scalars = [TensorSpec(name, (), False, False) for name in "abc"]
  up, down = (TensorSpec(name, (2,), True, False) for name in ("up", "down"))
  plan = fragments.make_plan([*scalars[:2], up, scalars[2], down], sync("tensor", 1))
  order = [(p.name, p.layer) for p in plan.fragments[0].pieces]
  layers = [("up", 0), ("down", 0), ("up", 1), ("down", 1)]
  assert order == [("a", None), ("b", None), *layers, ("c", None)]


def test_layer_groups_are_as_even_as_possible_and_strided_layers_alternate():
  specs = [TensorSpec("w", (7, 3), True, False)]
  groups = names(fragments.make_plan(specs, sync("layer", 3)))
  assert [[p[1] for p in group] for group in groups] == [[0, 1, 2], [3, 4], [5, 6]]
  groups = names(fragments.make_plan(specs, sync("strided", 3)))
  assert [[p[1] for p in group] for group in groups] == [[0, 3, 6], [1, 4], [2, 5]]
  specs = [TensorSpec(name, (3, n), True, False) for name, n in (("up", 6), ("scale", 2))]
  specs.append(TensorSpec("last", (7,), False, False))
  groups = names(fragments.make_plan(specs, sync("strided")))
  assert [[p[1] for p in group] for group in groups] == [[0, 0, 2, 2], [1, 1, None]], "on top"


def test_tensors_are_dealt_in_model_order_whatever_their_size():
  specs = [TensorSpec(name, (n,), False, False) for name, n in (("a", 1), ("b", 5), ("c", 4))]
  for policy, expected in (("tensor", [["a", "c"], ["b"]]), ("balanced", [["b"], ["a", "c"]])):
    groups = names(fragments.make_plan(specs, sync(policy)))
    assert [[name for name, *_ in group] for group in groups] == expected, policy


def test_max_rows_splits_embeddings_only_and_evenly():
  head = TensorSpec("head", (5, 2), stacked=False, embedding=False)
  plan = fragments.make_plan([*MODEL, head], sync("tensor", 1, max_rows=2))
  rows = [(p.name, p.start, p.stop) for p in plan.fragments[0].pieces if p.layer is None]
  assert rows == [
    ("embedding", 0, 1),
    ("embedding", 1, 3),
    ("embedding", 3, 5),
    ("final/scale", 0, 2),
    ("head", 0, 5),
  ]
  pieces = fragments.make_plan(MODEL, sync("balanced", 8, max_rows=2)).fragments
  assert len(pieces) == 8  # the three embedding pieces travel on their own


def test_average_flag_follows_the_config():
  def averaged(**fields):
    pieces = fragments.make_plan(MODEL, sync(num_fragments=1, **fields)).fragments[0].pieces
    return {p.name for p in pieces if p.average}

  assert averaged() == {"embedding"}
  assert averaged(average_embeddings=False) == set()
  assert averaged(merge="average", average_embeddings=False) == {s.name for s in MODEL}


@pytest.mark.parametrize("policy", POLICIES)
def test_too_many_fragments_are_refused_with_the_fix(policy):
  limit = 6 if policy in ("balanced", "tensor") else 2
  fragments.make_plan(MODEL, sync(policy, limit))
  with pytest.raises(ConfigError) as error:
    fragments.make_plan(MODEL, sync(policy, limit + 1))
  text = str(error.value)
  assert f"sync.num_fragments = {limit + 1}" in text
  assert f"use at most {limit}" in text and f"the {limit} " in text


def test_layer_policy_without_layers_is_refused():
  with pytest.raises(ConfigError, match=r"0 layers.*'balanced' needs no layers"):
    fragments.make_plan(MODEL[:1], sync("layer", 1))


def test_plan_id_is_stable_and_covers_the_content():
  plan = fragments.make_plan(MODEL, sync())
  again = fragments.make_plan(
    [replace(s, shape=tuple(np.int64(n) for n in s.shape)) for s in MODEL], sync()
  )
  assert plan.plan_id == again.plan_id == "bf368da7c6cee1ed"
  others = [
    fragments.make_plan(MODEL, config)
    for config in (sync("layer"), sync(max_rows=2), sync(merge="average"), sync(num_fragments=3))
  ]
  assert len({plan.plan_id, *(other.plan_id for other in others)}) == 5


def test_split_flat_gives_views_and_refuses_other_sizes():
  fragment = fragments.make_plan(MODEL, sync()).fragments[0]
  flat = np.arange(14, dtype=np.float32)
  views = fragments.split_flat(fragment, flat)
  assert [v.shape for v in views] == [(5, 2), (2,), (2,)]
  assert all(np.shares_memory(v, flat) for v in views)
  with pytest.raises(ValueError, match=r"fragment 0: .*\(13,\).*\(14,\)"):
    fragments.split_flat(fragment, flat[1:])
  with pytest.raises(ValueError, match="fragment 0"):
    fragments.scatter(fragment, flat[1:], values(MODEL))


@pytest.mark.parametrize("indices", [(0, 1), (1,), ()])
def test_the_pieces_of_a_tensor_are_found_by_its_name(indices):
  plan, params = fragments.make_plan(MODEL, sync(max_rows=2)), values(MODEL)
  found = plan.parts_by_name(indices)
  pieces = [(p, piece) for p in indices for piece in plan.fragments[p].pieces]
  assert [(alone.index, piece) for name in found for alone, piece in found[name]] == sorted(
    pieces, key=lambda each: [*found].index(each[1].name)
  )
  for name, parts in found.items():
    for alone, piece in parts:
      whole = fragments.gather(plan.fragments[alone.index], params)
      mine = fragments.gather(alone, {name: params[name]})
      np.testing.assert_array_equal(mine, whole[piece.offset : piece.offset + piece.size])


@given(st.integers(1, 9), st.integers(1, 40))
def test_every_fragment_has_exactly_one_owner(num_shards, num_fragments):
  owned = [fragments.owned_by(s, num_shards, num_fragments) for s in range(num_shards)]
  assert sorted(i for mine in owned for i in mine) == list(range(num_fragments))
  assert all(fragments.shard_of(i, num_shards) == s for s, mine in enumerate(owned) for i in mine)
