"""The exchanges of a compiled program, read from texts of the forms that compilers write."""

from __future__ import annotations

import pytest

from ddiloco.training.aot import Collective, _devices, by_kind, find_collectives

LOOP = """HloModule step

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%scatter.1 (input: bf16[64,128]) -> bf16[16,128] {
  %all-reduce.1 = bf16[64,128]{1,0:T(8,128)(2,1)} all-reduce(%input), replica_groups={{0,1},{2,3}}
}

%condition (state: (s32[], bf16[64,128])) -> pred[] {
  %bound = s32[]{:T(128)} constant(12)
  %one = s32[] constant(1)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%body (state: (s32[], bf16[64,128])) -> (s32[], bf16[64,128]) {
  %gather = bf16[1,64,128]{2,1,0} all-gather(%w), replica_groups=mesh['a'=1,'b'=4] {'b'}
  %part = bf16[16,128] fusion(%gather), kind=kCustom, calls=%scatter.1
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %loop = (s32[], bf16[64,128]) while(%start), condition=%condition, body=%body
  %pair = (f32[8]{0}, f32[32]{0}) all-gather-start(%p), replica_groups=[1,4]<=[4], dimensions={0}
  %turn = (s32[10], s32[10], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
}
"""
TURN = "%turn = (s32[10], s32[10], u32[]) collective-permute-start("


def test_loops_and_calls():
  found = {each.kind: each for each in find_collectives(LOOP, 4) if each.times == 1}
  assert found["all-gather"].bytes == 32 * 4  # the result alone
  looped = {each.kind: each for each in find_collectives(LOOP, 4) if each.times == 12}
  assert looped["all-gather"].bytes == looped["all-reduce"].bytes == 12 * 64 * 128 * 2
  called = LOOP.replace("calls=", "called_in_another_way=")
  assert {each.times for each in find_collectives(called, 4) if each.kind == "all-reduce"} == {1}


@pytest.mark.parametrize(
  "branches",
  [
    "branch_computations={%other, %scatter.1}",
    "true_computation=%other, false_computation=%scatter.1",
    "true_computation=%scatter.1, false_computation=%other",
  ],
)
def test_a_branch_that_a_loop_takes_counts_at_each_pass(branches):
  fusion = "fusion(%gather), kind=kCustom, calls=%scatter.1"
  text = LOOP.replace(fusion, f"conditional(), {branches}")
  found = {each.kind: each for each in find_collectives(text, 4) if each.times == 12}
  assert found["all-reduce"].bytes == 12 * 64 * 128 * 2


def test_a_loop_whose_passes_the_compiler_has_counted():
  """On GPUs the condition is a fusion, and has no bound."""
  text = LOOP.replace("constant(", "parameter(")
  assert {each.times for each in find_collectives(text, 4)} == {1}, "nothing says how many"
  counted = 'body=%body, backend_config={"known_trip_count":{"n":"7"},"known_init_step":{}}'
  text = text.replace("body=%body", counted)
  assert {each.times for each in find_collectives(text, 4)} == {1, 7}


@pytest.mark.parametrize(
  ("groups", "devices"),
  [
    ("replica_groups={{0,1},{2,3}}", {0, 1, 2, 3}),
    ("replica_groups=mesh['a'=1,'b'=4] {'b'}", {0, 1, 2, 3}),
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}", set(range(8))),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={0}", set(range(8))),
    ("replica_groups=mesh['a'=1,'b'=4] {'a'}, dimensions={0}", set()),
    ("replica_groups=mesh['a'=1,'b'=4,'c'=1] {'a','c'}", set()),
    ("replica_groups=mesh['a'=8,'b'=8] {'a':(2)4,'b':(1)1}", set(range(64))),
    ("replica_groups=mesh['a'=8,'b'=8] {'a':(2)1}", set()),
    ("replica_groups=[1,4]<=[4], dimensions={0}", {0, 1, 2, 3}),
    ("replica_groups=[2,4]<=[4,2]T(1,0)", set(range(8))),
    ("replica_groups=[4,2]<=[8]", set(range(8))),
    ("source_target_pairs={{0,1},{1,0}}", {0, 1}),
    ("replica_groups={{0},{1}}", set()),
    ("replica_groups=[4,1]<=[4]", set()),
  ],
)
def test_every_form_of_groups(groups, devices):
  assert _devices(groups) == devices


def test_a_collective_beyond_the_island_is_refused():
  with pytest.raises(AssertionError, match=r"beyond its island: %all-reduce\.1"):
    list(find_collectives(LOOP, 3))


@pytest.mark.parametrize("kind", ["all-reduce-start", "all-reduce", "all-to-all"])
def test_several_arrays_of_one_exchange_count_whole(kind):
  """An all-reduce also when it starts."""
  both = f"%sums = (f32[8]{{0}}, f32[4]{{0}}, pred[8]) {kind}(%p, %q), replica_groups={{{{0,1}}}}"
  text = LOOP.replace(TURN, f"{both}\n  %turn = s32[] copy(")
  found = {each.kind: each for each in find_collectives(text, 4) if each.times == 1}
  assert found[kind.removesuffix("-start")].bytes == (8 + 4) * 4 + 8


def test_what_moves_most_comes_first():
  assert by_kind(list(find_collectives(LOOP, 4))) == (
    Collective("all-gather", 13, 12 * 64 * 128 * 2 + 128),
    Collective("all-reduce", 12, 12 * 64 * 128 * 2),
    Collective("collective-permute", 1, 40),
  )


def test_groups_of_one_device_move_nothing():
  text = LOOP.replace("replica_groups={{0,1},{2,3}}", "replica_groups={{0},{1},{2},{3}}")
  assert "all-reduce" not in {each.kind for each in find_collectives(text, 4)}


def test_what_goes_to_other_hosts_is_refused():
  text = LOOP.replace(TURN, "%far = (f32[4], u32[]) send(")
  with pytest.raises(ValueError, match="sends to another"):
    list(find_collectives(text, 4))
  here = text.replace("{{0,1},{1,0}}", "{{0,1},{1,0}}, is_host_transfer=true")
  assert len(list(find_collectives(here, 4))) == 3, "its own host"


def test_an_exchange_that_several_fusions_share_counts_once():
  """libtpu writes it in the first of them, in those that compute meanwhile, and in the last."""
  gather = '%g = bf16[64,128] all-gather(%w), replica_groups={{0,1}}, attributes={chain_id="0"}'
  roots = {"Start": "AsyncCollectiveStart", "Meanwhile": "a product", "Done": "AsyncCollectiveDone"}
  fusions, calls = "", ""
  for name, target in roots.items():
    root = f'ROOT %c = bf16[64,128] custom-call(%g), custom_call_target="{target}"'
    fusions += f"%{name} (w: bf16[32,128]) -> bf16[64,128] {{\n  {gather}\n  {root}\n}}\n\n"
    calls += f"  %of{name} = bf16[64,128] fusion(%w), kind=kCustom, calls=%{name}\n"
  text = LOOP.replace("\n\n", "\n\n" + fusions, 1).replace("  %part =", calls + "  %part =")
  before, found = (by_kind(list(find_collectives(each, 4)))[0] for each in (LOOP, text))
  assert found.times == before.times + 12
  assert found.bytes == before.bytes + 12 * 2 * 64 * 128
  with pytest.raises(AssertionError, match="beyond its island"):
    list(find_collectives(text.replace("{{0,1}}, att", "{{0,9}}, att"), 4))
