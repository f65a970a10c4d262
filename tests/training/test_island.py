"""Run as a script, this file is the stress program of `test_islands_step_concurrently`."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import pathlib
import subprocess
import sys
import threading
import types

import jax
import numpy as np
import pytest

from ddiloco import config as config_lib
from ddiloco.config import ConfigError
from ddiloco.core import fragments
from ddiloco.models.transformer import LanguageModel, language_model
from ddiloco.training import island as island_module
from ddiloco.training.devices import param_sharding
from ddiloco.training.island import Island, IslandPrograms, PieceKind
from ddiloco.training.step import METRICS
from tests.training.test_step_inner import bigram_loss

MODEL = {
  "vocab_size": 32,
  "num_layers": 2,
  "model_dim": 8,
  "num_heads": 2,
  "num_kv_heads": 2,
  "head_dim": 4,
  "mlp_dim": 16,
}
CUBE = {"devices": 8, "data": 2, "fsdp": 2, "tensor": 2}
REPOSITORY = pathlib.Path(__file__).parents[2]


def make(islands, model=(), sync=(), devices=None, learner=0):
  values = {
    "model": {**MODEL, **dict(model)},
    "data": {"sequence_length": 8},
    "inner": {"warmup_steps": 5, "learning_rate": 0.02, "weight_decay": 0.0},
    "islands": {"num_learners": 1, "batch_size": 8, **islands},
    "sync": {"num_shards": 1, "num_fragments": 3, **dict(sync)},
  }
  config = config_lib.from_dict(values)
  specs = [
    fragments.TensorSpec(name, leaf.shape, name.startswith("layers/"), name == "embedding")
    for name, leaf in language_model(config.model).shapes().items()
  ]
  plan = fragments.make_plan(specs, config.sync)
  if devices is None:
    devices = jax.devices()[: config.islands.devices]
  return Island(config, learner, devices, plan), plan, config


def initial(config, seed=0):
  """Matrices of a sensible size, norms near 1; the model's own init takes longer to compile."""
  generator = np.random.default_rng(seed)
  params = {}
  for name, leaf in language_model(config.model).shapes().items():
    values = 0.25 * generator.normal(size=leaf.shape).astype(np.float32)
    params[name] = 1 + 0.1 * values if name.endswith("scale") else values
  return params


def batch(seed=0, rows=8):
  return np.random.default_rng(seed).integers(0, 32, (rows, 9)).astype(np.int32)


@pytest.fixture(scope="module")
def single():
  island, plan, config = make({"devices": 1})
  assert island.compile() > 0
  return island, plan, config


@pytest.fixture(scope="module")
def cube():
  # Pieces of 10, 11 and 11 rows: tensor = 2 divides the first only.
  island, plan, config = make(CUBE, sync={"max_rows": 12})
  island.compile()
  return island, plan, config


@pytest.fixture(params=["single", "cube"])
def any_island(request):
  return request.getfixturevalue(request.param)


def test_describe(single, cube):
  how = {"attention": "einsum", "remat": "none", "loss_chunks": 1}
  both = {"batch_size": 8, "execution": how}
  both |= {"device_kind": "cpu", "peak_flops_per_second": 0.0}
  both["flops_per_token"] = language_model(single[2].model).flops_per_token(
    single[2].data.sequence_length
  )
  assert single[0].describe() == {"devices": 1, "mesh": [1, 1, 1], **both}
  assert cube[0].describe() == {"devices": 8, "mesh": [2, 2, 2], **both}


def test_the_cube_really_is_cut(cube):
  island, plan, config = cube
  island.load(initial(config))
  query = island._state["params/layers/attention/query"]
  assert query.shape == (2, 8, 2, 4)
  assert query.addressable_shards[0].data.shape == (2, 4, 1, 4)
  pieces = [piece for fragment in plan.fragments for piece in fragment.pieces]
  assert sorted(piece.shape[0] for piece in pieces if piece.name == "embedding") == [10, 11, 11]


@pytest.mark.parametrize(
  ("axes", "shape", "layer", "rows", "spec"),
  [
    (("layers", "embed", "mlp"), (2, 16, 32), 1, 16, ("fsdp", "tensor")),
    (("vocab", "embed"), (10, 16), None, 10, ("tensor", "fsdp")),
    (("vocab", "embed"), (10, 16), None, 4, ("tensor", "fsdp")),
    (("vocab", "embed"), (10, 16), None, 3, (None, "fsdp")),  # 2 does not divide 3
  ],
)
def test_a_piece_lies_as_its_leaf(cube, axes, shape, layer, rows, spec):
  sharding = param_sharding(axes, shape, cube[0].mesh)
  leaf = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
  piece = fragments.Piece("any", layer, 0, rows, (rows, shape[-1]), 0, average=False)
  kind = PieceKind.of(piece, leaf)
  assert kind.piece.sharding.spec == jax.sharding.PartitionSpec(*spec)
  assert kind.start == 0


def test_programs_grow_with_the_kinds_of_tensors_only():
  found = set()
  for layers, parts in ((2, 1), (2, 6), (8, 6), (8, 24)):
    model = {"num_layers": layers}
    island, plan, _ = make({"devices": 1}, sync={"num_fragments": parts}, model=model)
    assert len(plan.fragments) == parts
    found.add(len(set().union(*island.programs.kinds)))
  # embedding, its norm; norms, query with key and value, output, gate and up, down of a layer
  assert found == {7}


def test_a_cut_mesh_steps_like_one_device(single, cube):
  after, metrics = {}, {}
  for name, (island, _, config) in {"single": single, "cube": cube}.items():
    island.load(initial(config))
    metrics[name] = [island.step(batch(seed), seed) for seed in range(3)]
    after[name] = island.params_on_host()
  for one, many in zip(metrics["single"], metrics["cube"]):
    assert tuple(one) == METRICS
    for name in METRICS:
      assert isinstance(one[name], float)
      assert many[name] == pytest.approx(one[name], rel=1e-4), name
  start = initial(single[2])
  for name, leaf in after["single"].items():
    assert np.abs(leaf - start[name]).max() > 1e-4, name
    np.testing.assert_allclose(after["cube"][name], leaf, atol=2e-4, err_msg=name)


def test_learning_rate_follows_the_schedule(single):
  island, _, config = single
  island.load(initial(config))
  rates = [island.step(batch(), step)["learning_rate"] for step in (2, 0, 4)]
  assert rates == pytest.approx([0.012, 0.004, 0.02], rel=1e-6)


def test_loss_decreases_on_a_tiny_corpus(single):
  island, _, config = single
  island.load(initial(config))
  tokens = ((np.arange(9) * 3 + np.arange(8)[:, None]) % 32).astype(np.int32)
  losses = [island.step(tokens, global_step)["loss"] for global_step in range(60)]
  assert losses[0] > 3.0
  assert losses[-1] < 0.5 * losses[0]


@pytest.fixture(params=[None, "pinned_host"])
def host_memory(request, monkeypatch, any_island):
  """As a CPU copies to the host, and as an accelerator does."""
  assert any_island[0]._parts.host_memory is None
  monkeypatch.setattr(any_island[0]._parts, "host_memory", request.param)
  return request.param


def test_cut_is_the_fragment_bitwise(any_island, host_memory):
  island, plan, config = any_island
  island.load(initial(config))
  island.step(batch(), 0)
  params = island.params_on_host()
  for fragment in plan.fragments:
    flat = island.to_host(island.copy_out(fragment.index), fragment.index)
    assert flat.dtype == np.float32
    np.testing.assert_array_equal(flat, fragments.gather(fragment, params))


def test_a_cut_survives_later_donated_steps(any_island, host_memory):
  island, plan, config = any_island
  island.load(initial(config))
  before = island.params_on_host()
  copies = [island.copy_out(fragment.index) for fragment in plan.fragments]
  assert {piece.sharding.memory_kind for each in copies for piece in each} <= {
    host_memory or "device"
  }
  for global_step in range(3):
    island.step(batch(global_step), global_step)
    island.apply(0, island.stage(0, np.zeros(plan.sizes[0], np.float32)), 0.5)
  for fragment, pieces in zip(plan.fragments, copies):
    flat = island.to_host(pieces, fragment.index)
    np.testing.assert_array_equal(flat, fragments.gather(fragment, before))
    assert not np.array_equal(flat, fragments.gather(fragment, island.params_on_host()))


def test_each_value_of_a_fragment_leaves_the_devices_once(cube):
  """With copies of the parameters each device sent its own: `data` times as much."""
  island, plan, config = cube
  island.load(initial(config))
  for fragment in plan.fragments:
    for piece in island.copy_out(fragment.index):
      given = sum(shard.data.size for shard in piece.addressable_shards)
      # 11 rows of a leaf whose rows are split in two: both devices need to have them.
      assert given == piece.size * (2 if piece.shape[:1] == (11,) else 1)


def test_rows_leave_and_enter_without_an_exchange_where_each_device_has_them():
  """The compiler gathered the whole leaf on all devices, so that each could give its rows."""
  mesh = {"devices": 8, "data": 2, "fsdp": 4}
  island, plan, _ = make(mesh, sync={"max_rows": 8})
  assert {piece.start for f in plan.fragments for piece in f.pieces} == {0, 8, 16, 24}
  kinds = itertools.chain(*island.programs.kinds)
  assert len({kind for kind in kinds if kind.leaf.shape == (32, 8)}) == 1, "for any rows"
  island.programs._compile_pieces()
  texts = [each.as_text() for pair in island.programs.pieces.values() for each in pair]
  assert not any("all-" in text or "collective-" in text for text in texts)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.5, 1.0])
def test_apply(any_island, keep):
  island, plan, config = any_island
  island.load(initial(config))
  for fragment in plan.fragments:
    expected = island.params_on_host()
    staged = np.random.default_rng(7).normal(size=fragment.size).astype(np.float32)
    value = np.float32(keep) * fragments.gather(fragment, expected) + staged
    fragments.scatter(fragment, value, expected)
    island.apply(fragment.index, island.stage(fragment.index, staged), keep)
    for name, leaf in island.params_on_host().items():  # the other leaves and layers included
      if keep == 0.3:  # a fused multiply-add rounds once less
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-6, atol=1e-7, err_msg=name)
      else:
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


def test_overwriting_heals_nan_and_mixing_does_not(any_island):
  island, plan, config = any_island
  broken = {name: np.full_like(leaf, np.nan) for name, leaf in initial(config).items()}
  good = initial(config, seed=1)
  island.load(broken)
  for fragment in plan.fragments:
    island.apply(
      fragment.index, island.stage(fragment.index, fragments.gather(fragment, good)), 0.0
    )
  for name, leaf in island.params_on_host().items():
    np.testing.assert_array_equal(leaf, good[name], err_msg=name)
  island.load(broken)
  island.apply(0, island.stage(0, np.zeros(plan.sizes[0], np.float32)), 1.0)
  assert np.isnan(island.to_host(island.copy_out(0), 0)).all()


def test_reset_and_every_fragment_is_a_fresh_start(any_island):
  island, plan, config = any_island
  params = initial(config)
  island.load(params)
  expected = [island.step(batch(seed), seed) for seed in range(2)]
  island.reset()
  assert all(not leaf.any() for leaf in island.params_on_host().values())
  for fragment in plan.fragments:
    flat = fragments.gather(fragment, params)
    island.apply(fragment.index, island.stage(fragment.index, flat), 0.0)
  assert [island.step(batch(seed), seed) for seed in range(2)] == expected


NEW_FACTORS = itertools.count(1.2345)


@contextlib.contextmanager
def nothing_compiles():
  """Fails if its block has compiled anything."""
  compiled = []

  def listen(event, duration, **_):
    if "compile" in event:
      compiled.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    jax.jit(lambda x: x * next(NEW_FACTORS))(np.float32(1))
    assert compiled, "the listener works"
    compiled.clear()
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert compiled == []


def test_nothing_compiles_after_compile(any_island):
  island, plan, config = any_island
  params = initial(config)
  with nothing_compiles():
    assert island.compile() == 0.0
    island.reset()
    island.load(params)
    for global_step in range(3):
      island.step(batch(global_step), global_step)
      for index, size in enumerate(plan.sizes):
        island.to_host(island.copy_out(index), index)
        staged = island.stage(index, np.zeros(size, np.float32))
        island.apply(index, staged, 0.5 * global_step)
    island.params_on_host()


def test_pieces_are_compiled_again_if_that_failed(monkeypatch):
  """A learner that is a thread begins again with the programs of its island as far as they came."""
  island, plan, _ = make({"devices": 1})
  programs, lower, calls = island.programs, island_module.lower_piece, []

  def lower_with_a_failure(*arguments):
    calls.append(arguments)
    if len(calls) > len(set(programs.kinds[0])) and calls.count(arguments) == 1:
      raise RuntimeError("no memory")
    return lower(*arguments)

  monkeypatch.setattr(island_module, "lower_piece", lower_with_a_failure)
  monkeypatch.setattr(programs._parts, "lower", lambda: jax.jit(lambda x: x).lower(1))  # no step
  while programs.step is None:
    with contextlib.suppress(RuntimeError):
      island.compile()
  assert len(calls) > len(programs.pieces), "it did fail"
  names = [[piece.name for piece in fragment.pieces] for fragment in plan.fragments]
  assert [[name for name, _, _ in moves] for moves in programs.moves] == names


def test_equal_islands_on_the_same_device_compile_once(single, monkeypatch):
  """The second one takes the first one's programs; who differs in config or devices does not."""
  _, plan, config = single
  overrides = {"2": {"batch_size": 4}}
  islands = dataclasses.replace(config.islands, num_learners=4, overrides=overrides)
  config = dataclasses.replace(config, islands=islands)
  first, second = jax.devices()[:2]
  shared, both = {}, threading.Barrier(2)

  class Late(IslandPrograms):  # two threads have seen that there is no such island yet
    def __init__(self, *arguments):
      super().__init__(*arguments)
      both.wait(10)

  def make_island(m, device):
    return Island(config, m, [device], plan, shared)

  with monkeypatch.context() as at_once, concurrent.futures.ThreadPoolExecutor(2) as pool:
    at_once.setattr(island_module, "IslandPrograms", Late)
    raced = list(pool.map(lambda m: make_island(m, first), (0, 1)))
  assert raced[0].programs is raced[1].programs
  made = [make_island(m, d) for m, d in enumerate((first, first, first, second))]
  lower, lowered = made[0].programs._parts.lower, []
  monkeypatch.setattr(made[0].programs._parts, "lower", lambda: lowered.append(1) or lower())
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    list(pool.map(Island.compile, [made[1], made[0]]))  # in any order, also at once
  assert len(lowered) == 1
  assert made[0].programs is made[1].programs
  assert len({id(island.programs) for island in made}) == 3
  losses = []
  for m in (0, 1):
    made[m].load(initial(config))
  for global_step in range(3):  # in turn: neither sees what the other does
    losses.append([made[m].step(batch(global_step), global_step) for m in (0, 1)])
  assert all(mine == other for mine, other in losses) and losses[0] != losses[2]


def test_the_whole_state_moves_to_another_mesh_and_back(single, cube):
  """What is cheap to try with the transformer itself; test_island_state.py has the rest."""
  island, _, config = cube
  island.load(initial(config))
  island.step(batch(), 0)
  saved = on_host(island.capture())
  expected = island.step(batch(1), 1)
  single[0].restore(saved)
  metrics = single[0].step(batch(1), 1)
  for name in METRICS:
    assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name
  island.restore(saved)
  for name, leaf in island.capture().items():
    np.testing.assert_array_equal(leaf, saved[name], err_msg=name)
  assert island.step(batch(1), 1) == expected


def test_state_is_updated_in_place(single):
  island, plan, _ = single
  for kind, programs in island.programs.pieces.items():
    memory = programs[1].memory_analysis()
    assert memory.alias_size_in_bytes == 4 * kind.leaf.size, kind
  state = 3 * sum(plan.sizes) * 4  # parameters and two moments
  assert island.programs.step.memory_analysis().alias_size_in_bytes >= state


def test_pipelined_steps_return_the_metrics_before(single, monkeypatch):
  island, _, config = single
  island.load(initial(config))
  expected = [island.step(batch(seed), seed) for seed in range(3)]
  monkeypatch.setattr(island, "_pipelined", True)
  island.load(initial(config))
  assert [island.step(batch(seed), seed) for seed in range(3)] == [None, *expected[:2]]
  assert island.finish() == expected[2]
  assert island.finish() is None and not island.busy
  island.step(batch(), 0)
  jax.block_until_ready(island._in_flight)
  assert not island.busy
  monkeypatch.setattr(island, "_in_flight", types.SimpleNamespace(is_ready=lambda: False))
  assert island.busy
  island.reset()  # what was in flight belongs to the incarnation before
  assert island.finish() is None


@pytest.mark.slow
def test_a_mixture_of_experts_trains():
  island, plan, config = make(
    {"devices": 4, "fsdp": 2, "tensor": 2},
    {"num_experts": 4, "experts_per_token": 2},
    {"num_fragments": 2},
  )
  island.compile()
  island.load(initial(config))
  before, saved = island.params_on_host(), on_host(island.capture())
  metrics = [island.step(batch(), global_step) for global_step in (5, 6)]
  assert metrics[1]["loss"] < metrics[0]["loss"]
  island.restore(saved)
  assert [island.step(batch(), global_step) for global_step in (5, 6)] == metrics
  for name, leaf in island.params_on_host().items():
    assert not np.array_equal(leaf, before[name]), name
  flat = island.to_host(island.copy_out(1), 1)
  np.testing.assert_array_equal(flat, fragments.gather(plan.fragments[1], island.params_on_host()))


def test_errors_are_named(single):
  island, plan, config = single
  fresh, _, _ = make({"devices": 1})
  fresh.compile()
  staged = fresh.stage(0, np.zeros(plan.sizes[0], np.float32))
  for call in (
    lambda: fresh.step(batch(), 0),
    lambda: fresh.copy_out(0),
    lambda: fresh.apply(0, staged, 0.0),
    lambda: fresh.count(),
    lambda: fresh.capture(),
  ):
    with pytest.raises((KeyError, TypeError), match=r"params/|count|pytree"):
      call()  # it has no state
  island.load(initial(config))
  with pytest.raises(TypeError, match=r"int32\[8,9\].*int32\[4,9\]"):
    island.step(batch(rows=4), 0)
  with pytest.raises(ValueError, match=r"params/embedding is missing, not float32 \(32, 8\)"):
    island.load({name: leaf for name, leaf in initial(config).items() if name != "embedding"})
  before = island.params_on_host()
  with pytest.raises(ValueError, match=r"params/final_norm/scale is float32 \(3,\), not "):
    island.load(initial(config) | {"final_norm/scale": np.zeros(3, np.float32)})
  assert all(np.array_equal(leaf, before[n]) for n, leaf in island.params_on_host().items())
  for size in (0, plan.sizes[0] + 1, 2 * plan.sizes[0]):
    with pytest.raises(ValueError):
      island.stage(0, np.zeros(size, np.float32))
  with pytest.raises(ConfigError, match=r"^islands\.batch_size = 6: .* = 4 .*Fix: use 8\.$"):
    make({"devices": 0, "batch_size": 6}, devices=jax.devices()[:4])


@pytest.mark.slow
def test_islands_step_concurrently():
  """In a process of its own, since what goes wrong there aborts or hangs."""
  done = subprocess.run(
    [sys.executable, __file__],
    cwd=REPOSITORY,
    env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.split()[-1] == "finite"


def on_host(state):
  return {name: np.array(leaf) for name, leaf in state.items()}


def stress(num_islands=4, num_steps=300):
  """Islands of two devices step in a thread each; a second thread of each moves fragments.

  Now and then an island captures its state, which nothing waits for.
  """

  def run(learner):
    devices = jax.devices()[2 * learner : 2 * learner + 2]
    mesh = {"data": 2, "fsdp": 1} if learner % 2 else {"tensor": 2, "fsdp": 1}
    island, plan, config = make(
      {"devices": 2, **mesh}, sync={"max_rows": 12, "num_fragments": 2}, devices=devices
    )
    island.compile()
    assert "all-reduce" in island.programs.step.as_text()
    island.load(initial(config))
    with concurrent.futures.ThreadPoolExecutor(1) as background:
      moving, saving = None, []
      for global_step in range(num_steps):
        if global_step % 10 == 0:
          saving.append((background.submit(on_host, island.capture()), island.params_on_host()))
        metrics = island.step(batch(global_step), global_step)
        index = global_step // 2 % len(plan.fragments)
        if global_step % 2 == 0:
          pieces = island.copy_out(index)
          moving = background.submit(
            lambda p, i: island.stage(i, island.to_host(p, i)), pieces, index
          )
        else:
          island.apply(index, moving.result(), 0.0 if global_step % 3 else 0.001)
      for saved, params in saving:
        for name, leaf in params.items():
          np.testing.assert_array_equal(saved.result()["params/" + name], leaf, err_msg=name)
    return metrics["loss"]

  LanguageModel.loss = bigram_loss  # compiles in a tenth of the time, and has collectives too
  with concurrent.futures.ThreadPoolExecutor(num_islands) as pool:
    losses = list(pool.map(run, range(num_islands)))
  print(losses, "finite" if np.isfinite(losses).all() else "broken")


if __name__ == "__main__":
  from ddiloco import environment

  environment.prepare(num_cpu_devices=8, cpu_only=True)
  jax.config.update("jax_disable_most_optimizations", True)
  stress()
