"""What an island must remember: captured, restored onto other meshes, and sent to a peer."""

import contextlib
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.core import fragments
from ddiloco.models.transformer import LanguageModel
from ddiloco.training import step
from ddiloco.training.step import METRICS, StateLayout
from tests.training.test_island import CUBE, batch, initial, make, nothing_compiles, on_host

MOE = {"num_experts": 4, "experts_per_token": 2}
# Fewer devices and more, the axes exchanged.
CHAINS = {
  "dense": [
    CUBE,
    {"devices": 4, "fsdp": 4},
    {"devices": 2, "fsdp": 1, "tensor": 2},
    {"devices": 1},
  ],
  "mixture": [
    {"devices": 8, "fsdp": 4, "tensor": 2},
    {"devices": 4, "data": 2, "fsdp": 1, "tensor": 2},
    {"devices": 2, "fsdp": 2},
    {"devices": 8, "data": 8, "fsdp": 1},
  ],
}


def every_leaf_loss(model, params, tokens_BxT1, execution=None):
  """Stands in for the transformer, which takes seconds to compile; moves every parameter."""
  goal = jnp.mean(tokens_BxT1) / 32
  loss = sum(jnp.mean(jnp.square(leaf - goal)) for leaf in params.values())
  return loss, {"loss": loss, "load_balance": jnp.zeros(())}


@contextlib.contextmanager
def cheap_loss():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(LanguageModel, "loss", every_leaf_loss)
    yield


def cheap(islands, model=(), sync=()):
  """A compiled island of that mesh with the stand-in loss."""
  with cheap_loss():
    island, plan, config = make(islands, model, sync or {"num_fragments": 2, "max_rows": 12})
    island.compile()
  return island, plan, config


@pytest.fixture(scope="module")
def single():
  return cheap({"devices": 1})


@pytest.fixture(scope="module")
def cube():
  return cheap(CUBE)


@pytest.fixture(params=["single", "cube"])
def any_island(request):
  return request.getfixturevalue(request.param)


def trained(island, config, steps=3, seed=0):
  island.load(initial(config, seed))
  for global_step in range(steps):
    island.step(batch(global_step), global_step)
  return island


def assert_same_bits(left, right):
  assert left.keys() == right.keys()
  for name, value in left.items():
    a, b = np.asarray(value), np.asarray(right[name])
    assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes()), name


def assert_all_moved(before, after):
  for name, value in after.items():
    assert not np.array_equal(before[name], value), name


# --- capture and restore --------------------------------------------------------------------------


def test_the_state_has_a_name_for_everything(any_island):
  island, plan, config = any_island
  state = trained(island, config).capture()
  names = list(initial(config))
  assert state.keys() == {
    "inner/1/count",
    *(f"{prefix}{name}" for prefix in ("params/", "inner/1/mu/", "inner/1/nu/") for name in names),
  }
  assert {name: leaf.sharding for name, leaf in state.items()} == island.layout.shardings
  assert sum(leaf.size for leaf in state.values()) == 3 * sum(plan.sizes) + 1
  assert int(state["inner/1/count"]) == 3
  assert_same_bits({n: state["params/" + n] for n in names}, island.params_on_host())
  for name in names:
    assert np.asarray(state["inner/1/mu/" + name]).any(), name


def test_capturing_only_copies(cube):
  program = cube[0].programs.capture
  memory = program.memory_analysis()
  assert memory.alias_size_in_bytes == 0  # or the next step would take it away
  assert memory.temp_size_in_bytes == 0
  assert "all-" not in program.as_text()  # on the CPU it would have to be waited for
  assert "all-" in cube[0].programs.step.as_text()


@pytest.mark.skipif(jax.__version_info__ < (0, 10, 2), reason="CPUs place nothing there")
@pytest.mark.parametrize("mesh", [{"devices": 1}, CUBE])
def test_a_state_is_captured_in_the_hosts_memory_where_devices_copy_to_it(mesh, monkeypatch):
  monkeypatch.setattr(step, "host_memory", lambda device: "pinned_host")
  island, _, config = cheap(mesh)
  captured, before = trained(island, config).capture(), island.params_on_host()
  assert {leaf.sharding.memory_kind for leaf in captured.values()} == {"pinned_host"}
  island.step(batch(3), 3)  # in place
  saved = on_host(captured)
  assert_same_bits({name: saved["params/" + name] for name in before}, before)
  island.restore(captured)
  assert {name: leaf.sharding for name, leaf in island._state.items()} == island.layout.shardings
  assert_same_bits(island.capture(), saved)


def test_the_state_before_is_freed_before_another_is_restored(any_island, monkeypatch):
  island, _, config = any_island
  saved = on_host(trained(island, config).capture())
  name, place, there = next(iter(saved)), island.place, []
  before = weakref.ref(island._state[name])

  def placed(*array):
    there.append(before())
    return place(*array)

  monkeypatch.setattr(island, "place", placed)
  island.restore(saved)
  assert {*there} == {None}


def test_what_is_placed_takes_the_room_of_what_was_there(any_island):
  """A learner that was restarted in its process placed its state beside that of its last life."""
  island, _, config = any_island
  saved = on_host(trained(island, config).capture())
  before = {name: weakref.ref(array) for name, array in island._state.items()}
  placed = {}
  for name, value in saved.items():
    assert before[name]() is not None
    placed[name] = island.place(name, value)
    assert before[name]() is None
  island.restore(placed)
  assert_same_bits(island.capture(), saved)


def test_a_placed_state_becomes_the_islands_own_without_a_second_one(any_island):
  island, _, config = any_island
  saved = on_host(trained(island, config).capture())
  placed = {name: island.place(name, value) for name, value in saved.items()}
  island.restore(placed)
  assert all(island._state[name] is value for name, value in placed.items())


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_restored_island_goes_on_as_if_nothing_had_happened(any_island, pipelined, monkeypatch):
  island, _, config = any_island
  monkeypatch.setattr(island, "_pipelined", pipelined)
  trained(island, config)
  captured = island.capture()
  undisturbed = [island.step(batch(global_step), global_step) for global_step in range(3, 7)]
  undisturbed.append(island.finish())
  final = on_host(island.capture())
  saved = on_host(captured)  # only now: four donated steps later
  assert_all_moved(saved, final)
  island.reset()
  island.restore(saved)
  assert_same_bits(island.capture(), saved)
  again = [island.step(batch(global_step), global_step) for global_step in range(3, 7)]
  again.append(island.finish())
  # The step in flight at the capture is of the first life only.
  assert again[pipelined:] == undisturbed[pipelined:]
  assert again[0] is None if pipelined else again[0] == undisturbed[0]
  assert_same_bits(island.capture(), final)


@pytest.mark.parametrize("model", ["dense", pytest.param("mixture", marks=pytest.mark.slow)])
def test_every_mesh_restores_the_bits_of_the_one_before(model):
  saved = None
  for global_step, mesh in enumerate(CHAINS[model]):
    island, _, config = cheap(mesh, MOE if model == "mixture" else {}, {"num_fragments": 1})
    if saved is None:
      trained(island, config, steps=2)
    else:
      island.restore(jax.device_put(saved, island.layout.shardings) if global_step % 2 else saved)
      assert_same_bits(island.capture(), saved)
      assert {n: leaf.sharding for n, leaf in island._state.items()} == island.layout.shardings
    before = on_host(island.capture())
    assert np.isfinite(island.step(batch(global_step), global_step)["loss"])
    saved = on_host(island.capture())
    assert_all_moved(before, saved)
  assert int(saved["inner/1/count"]) == 2 + len(CHAINS[model])


def test_a_state_of_another_mesh_comes_through_the_host(single, cube):
  captured = trained(cube[0], cube[2]).capture()
  single[0].restore(captured)  # eight devices' arrays, as they are
  assert_same_bits(single[0].capture(), captured)
  single[0].step(batch(), 3)
  cube[0].restore(single[0].capture())
  assert_same_bits(cube[0].capture(), single[0].capture())


def test_another_compute_dtype_takes_the_same_bits(single):
  saved = on_host(trained(single[0], single[2]).capture())
  # The transformer itself; its stand-in computes in f32 whatever the config says.
  other, _, _ = make({"devices": 2}, {"compute_dtype": "bfloat16"}, {"num_fragments": 1})
  other.restore(saved)
  assert_same_bits(other.capture(), saved)
  assert np.isfinite(other.step(batch(3), 3)["loss"])
  assert_all_moved(saved, on_host(other.capture()))


def test_a_restored_island_shares_no_memory_of_the_host(any_island):
  island, _, config = any_island
  saved = on_host(trained(island, config).capture())
  given = {name: value.copy() for name, value in saved.items()}
  island.restore(given)
  for value in given.values():
    value[...] = -7
  assert_same_bits(island.capture(), saved)
  island.step(batch(), 3)
  assert all((value == -7).all() for value in given.values())


def test_a_saved_array_is_placed_as_the_mesh_has_it_and_never_rounded(cube):
  island, _, config = cube
  saved = on_host(trained(island, config).capture())
  placed = {name: island.place(name, value) for name, value in saved.items()}
  assert {name: leaf.sharding for name, leaf in placed.items()} == island.layout.shardings
  assert_same_bits(placed, saved)
  other = np.ones(3)
  assert island.place("delta/0", other) is other
  for wrong in (np.asarray(2**40), np.zeros(3, np.int32)):
    assert island.place("inner/1/count", wrong) is wrong
    with pytest.raises(ValueError, match="inner/1/count is "):
      island.restore(placed | {"inner/1/count": wrong})


def test_a_saved_array_goes_to_an_accelerator_without_a_copy_on_the_host(cube, monkeypatch):
  """The largest array of a model of 12 billion parameters has 11 GB."""
  island, _, config = cube
  saved, moved = on_host(trained(island, config).capture()), []
  monkeypatch.setattr(island._parts, "on_cpu", False)
  monkeypatch.setattr(jax, "device_put", lambda value, sharding: moved.append(value))
  for name, value in saved.items():
    island.place(name, value)
  assert all(each is value for each, value in zip(moved, saved.values(), strict=True))


def test_a_foreign_state_is_refused_and_nothing_changes(any_island):
  island, _, config = any_island
  held = on_host(trained(island, config).capture())
  name, count = "inner/1/nu/embedding", "inner/1/count"
  less = {n: value for n, value in held.items() if n != name}
  for odd, message in [
    (less, rf"{name} is missing, not float32 \(32, 8\) \(1 in all\)\. Fix"),
    ({**held, "inner/2/mu": held[count]}, r"inner/2/mu is int32 \(\), not known \(1 in all\)"),
    ({**held, name: held[name][:-1]}, rf"{name} is float32 \(31, 8\), not float32 \(32, 8\)"),
    ({**held, name: held[name].astype(np.float64)}, rf"{name} is float64 .*, not float32"),
    ({**held, count: held[count].astype(np.int64)}, rf"{count} is int64 .*, not int32"),
    ({}, r"\(\d+ in all\)"),
  ]:
    with pytest.raises(ValueError, match=message):
      island.restore(odd)
    assert_same_bits(island.capture(), held)


def test_the_layout_is_known_before_an_island_is_compiled(single):
  fresh, _, _ = make({"devices": 1})
  assert fresh.layout.shardings == single[0].layout.shardings


# --- moments --------------------------------------------------------------------------------------


def send_moments(donor, joiner, plan):
  """As a donor's and a joiner's threads do it; returns what was sent."""
  sent = []
  for p in range(len(plan.fragments)):
    copies, count = donor.copy_out(p, moments=True), donor.count()
    donor.step(batch(), 5)  # what was copied out stays as it was
    sent.append((donor.to_host(copies, p), int(count)))
    flat, count = sent[-1]
    joiner.apply(p, joiner.stage(p, flat.copy(), moments=True), 0.0, moments=True)
    joiner.set_count(count)
  return sent


def test_moments_reach_a_joiner_bit_by_bit_on_another_mesh(single, cube):
  for donor, joiner in ((single, cube), (cube, single)):
    plan, config = donor[1], donor[2]
    trained(donor[0], config)
    expected = []  # per fragment: what the donor holds when its turn comes
    joiner[0].load(initial(config, seed=9))
    others = on_host(joiner[0].capture())
    shadow = on_host(donor[0].capture())
    sent = send_moments(donor[0], joiner[0], plan)
    donor[0].restore(shadow)
    for fragment in plan.fragments:
      state = on_host(donor[0].capture())
      mu, nu = (
        fragments.gather(fragment, {n: state[prefix + n] for n in initial(config)})
        for prefix in ("inner/1/mu/", "inner/1/nu/")
      )
      expected.append((np.concatenate([mu, nu]), int(state["inner/1/count"])))
      donor[0].step(batch(), 5)
    assert donor[0].num_moments == 2
    after = on_host(joiner[0].capture())
    for fragment, (flat, count), (value, steps) in zip(plan.fragments, sent, expected):
      assert flat.dtype == np.float32 and flat.any()
      assert (flat.tobytes(), count) == (value.tobytes(), steps)
      mine = [
        fragments.gather(fragment, {n: after[prefix + n] for n in initial(config)})
        for prefix in ("inner/1/mu/", "inner/1/nu/")
      ]
      assert np.concatenate(mine).tobytes() == flat.tobytes(), fragment.index
    assert after["inner/1/count"] == int(joiner[0].count()) == 3 + len(plan.fragments) - 1
    assert_same_bits(*({n: s[n] for n in s if n.startswith("params/")} for s in (after, others)))


def test_one_fragment_of_moments_leaves_the_others_alone(any_island):
  island, plan, config = any_island
  before = on_host(trained(island, config).capture())
  size = plan.sizes[1]
  flat = np.random.default_rng(5).normal(size=2 * size).astype(np.float32)
  island.apply(1, island.stage(1, flat, moments=True), 0.0, moments=True)
  island.set_count(41)
  for k, prefix in enumerate(("inner/1/mu/", "inner/1/nu/")):
    params = {name: before[prefix + name] for name in initial(config)}
    fragments.scatter(plan.fragments[1], flat[k * size : (k + 1) * size], params)
  before["inner/1/count"][...] = 41
  assert_same_bits(island.capture(), before)
  metrics = island.step(batch(), 3)
  assert np.isfinite(metrics["loss"]) and int(island.count()) == 42


def test_moments_of_another_size_are_refused(single):
  island, plan, config = single
  before = on_host(trained(island, config).capture())
  for size in (0, plan.sizes[0], 2 * plan.sizes[0] + 1, 3 * plan.sizes[0]):
    with pytest.raises(ValueError):
      island.stage(0, np.zeros(size, np.float32), moments=True)
  assert_same_bits(island.capture(), before)


@pytest.mark.parametrize(
  ("transform", "moments", "counts"),
  [
    (optax.sgd(1.0), 0, 0),
    (optax.sgd(1.0, momentum=0.9), 1, 0),
    (optax.lion(1e-3), 1, 1),
    (optax.amsgrad(1e-3), 3, 1),
    (optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda _: 1.0)), 2, 2),
    # No moments that a donor passes on: with its count a joiner's Adam made steps of several times
    # the learning rate, since it did not correct its own new ones.
    (optax.adafactor(1e-3, min_dim_size_to_factor=4), 0, 0),
    (optax.masked(optax.adam(1e-3), lambda params: {n: n == "scale" for n in params}), 0, 0),
  ],
  ids=["sgd", "momentum", "lion", "amsgrad", "scheduled", "adafactor", "masked"],
)
def test_any_optimizer_has_names_and_moments(transform, moments, counts):
  mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
  split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
  params = {
    "a/scale": jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=split),
    "b/a/scale": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split),
    "scale": jax.ShapeDtypeStruct((), jnp.float32, sharding=whole),
  }
  layout = StateLayout(transform, params, whole)
  assert len(layout.moments) == moments and len(layout.counts) == counts
  for prefix in layout.moments:
    for name, leaf in params.items():
      assert layout.leaves[prefix + name] == leaf
  assert all(s in (split, whole) for s in layout.shardings.values())
  zeros = {name: jnp.zeros(leaf.shape) for name, leaf in params.items()}
  state = layout.flat(zeros, transform.init(zeros))
  assert list(state) == list(layout.leaves)
  layout.check(state)
  assert jax.tree.structure(layout.trees(state)) == jax.tree.structure(
    (zeros, transform.init(zeros))
  )


@pytest.mark.parametrize(("momentum", "kept"), [(None, 0), (0.9, 1)])
def test_an_island_with_another_optimizer(monkeypatch, momentum, kept):
  monkeypatch.setattr(step, "optimizer", lambda *_: optax.sgd(0.1, momentum))
  island, plan, config = cheap({"devices": 1}, sync={"num_fragments": 1})
  saved = on_host(trained(island, config).capture())
  assert island.num_moments == kept and int(island.count()) == 0
  flat = island.to_host(island.copy_out(0, moments=True), 0)
  assert flat.shape == (kept * plan.sizes[0],) and flat.any() == bool(kept)
  island.apply(0, island.stage(0, flat, moments=True), 0.0, moments=True)
  island.set_count(3)
  assert_same_bits(island.capture(), saved)


# --- the rate of fresh moments, and what must hold of everything ----------------------------------


def test_the_rate_can_be_scaled(any_island):
  island, _, config = any_island
  saved = on_host(trained(island, config).capture())
  after, rates = {}, {}
  for scale in (None, 1.0, 0.5, 0.0):
    island.restore(saved)
    metrics = island.step(batch(), 3, *([] if scale is None else [scale]))
    after[scale], rates[scale] = on_host(island.capture()), metrics["learning_rate"]
    assert tuple(metrics) == METRICS
  assert_same_bits(after[None], after[1.0])
  rate = step.learning_rate(config.inner, config.planned_steps(), 3)
  assert rates == pytest.approx({None: rate, 1.0: rate, 0.5: rate / 2, 0.0: 0.0}, rel=1e-6)
  for name, value in after[0.0].items():
    if name.startswith("params/"):
      np.testing.assert_array_equal(value, saved[name], err_msg=name)
      half = (after[1.0][name] + saved[name]) / 2
      np.testing.assert_allclose(after[0.5][name], half, atol=1e-6, err_msg=name)
    else:  # the moments learn from the gradient whatever the rate is
      assert not np.array_equal(value, saved[name]), name
      np.testing.assert_array_equal(value, after[1.0][name], err_msg=name)


def test_nothing_compiles_for_states_and_moments(any_island):
  island, plan, config = any_island
  saved = on_host(trained(island, config).capture())
  placed = jax.device_put(saved, island.layout.shardings)
  other = jax.device_put(saved, jax.devices()[5])
  with nothing_compiles():
    for state in (saved, placed, other, island.capture()):
      island.restore(state)
      island.step(batch(), 3, 0.25)
      for p in range(len(plan.fragments)):
        flat = island.to_host(island.copy_out(p, moments=True), p)
        island.apply(p, island.stage(p, flat, moments=True), 0.0, moments=True)
        count = int(island.count())
        island.set_count(count + 1)
        assert int(island.count()) == count + 1
