"""An island trains a user's own model with a user's own optimizer, on one device and on many."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ddiloco import custom
from ddiloco.checkpoint.restore import begin_learner, new_learner
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.config import from_dict
from ddiloco.models.model import NnxModel, batch_key
from ddiloco.protocol.states import learner_part
from ddiloco.roles import initial
from ddiloco.training.evaluate import HeldoutLoss
from ddiloco.training.island import Island
from ddiloco.training.step import METRICS
from tests.roles.toy import ListRecorder

NAME = "own_parts_of_test_island_custom"
CUBE = {"devices": 8, "data": 2, "fsdp": 2, "tensor": 2}


class Net(nnx.Module):
  """One matrix with named axes, one parameter without."""

  def __init__(self, rngs: nnx.Rngs):
    table = jax.random.normal(rngs(), (4, 6))
    self.table = nnx.Param(table, out_sharding=("embed", "mlp"))
    self.bias = nnx.Param(jnp.zeros(6))


class Regression(NnxModel):
  """Two arrays a batch; activations are pinned by name."""

  def __init__(self):
    super().__init__(Net)

  def inputs(self, batch_size, sequence_length):
    f32 = jnp.float32
    x, y = jax.ShapeDtypeStruct((batch_size, 4), f32), jax.ShapeDtypeStruct((batch_size, 6), f32)
    return {"x": x, "y": y}

  def loss(self, params, batch, execution=None):
    net = self.module(params)
    out = batch["x"] @ net.table[...] + net.bias[...]
    out = execution(out, ("batch", "mlp")) if execution else out
    loss = jnp.mean((out - batch["y"]) ** 2)
    return loss, {"loss": loss}

  def evaluate(self, params, batch):
    loss = self.loss(params, batch)[0]
    return {"loss": loss, "root": jnp.sqrt(loss)}


class Adapted(nnx.Module):
  """A matrix that stays, the two of an adapter, dropout, and statistics."""

  def __init__(self, rngs: nnx.Rngs):
    table = jax.random.normal(rngs(), (4, 6), jnp.bfloat16)
    self.table = nnx.Param(table, out_sharding=("embed", "mlp"))
    self.adapter = nnx.LoRA(4, 2, 6, rngs=rngs)
    self.norm = nnx.BatchNorm(6, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.norm(x @ self.table[...] + self.dropout(self.adapter(x)))


class Tuned(Regression):
  """Trains the adapter alone."""

  def __init__(self):
    NnxModel.__init__(self, Adapted, trained=nnx.LoRAParam)

  def loss(self, params, batch, execution=None):
    loss = jnp.mean((self.module(params, batch_key(batch))(batch["x"]) - batch["y"]) ** 2)
    return loss, {"loss": loss}

  def evaluate(self, params, batch):
    return {"loss": jnp.mean((self.module(params)(batch["x"]) - batch["y"]) ** 2)}


@pytest.fixture(autouse=True)
def parts(monkeypatch):
  module = types.ModuleType(NAME)
  module.model = lambda config: Regression()
  module.tuned = lambda config: Tuned()
  module.inner = lambda config: optax.sgd(1.0, momentum=0.9)
  monkeypatch.setitem(sys.modules, NAME, module)


def make(islands, accumulation_steps: int = 1, model: str = "model"):
  config = from_dict(
    {
      "model": {"custom": f"{NAME}:{model}"},
      "inner": {
        "custom": f"{NAME}:inner",
        "warmup_steps": 0,
        "learning_rate": 0.1,
        "accumulation_steps": accumulation_steps,
      },
      "data": {"sequence_length": 1},
      "islands": {"num_learners": 1, "batch_size": 8, **islands},
      "sync": {"num_shards": 1, "num_fragments": 2},
    }
  )
  plan = initial.make_plan(config)
  return Island(config, 0, jax.devices()[: config.islands.devices], plan), config


def batch(seed: int) -> dict[str, np.ndarray]:
  random = np.random.default_rng(seed)
  return {
    "x": random.normal(size=(8, 4)).astype("f4"),
    "y": random.normal(size=(8, 6)).astype("f4"),
  }


def trained(islands, *how) -> tuple[Island, list[dict]]:
  island, config = make(islands, *how)
  island.load(initial.initial_params(config))
  return island, [island.step(batch(n), n) for n in range(4)]


def test_steps_are_the_optimizers_own_by_hand():
  island, metrics = trained({"devices": 1})
  assert all(tuple(each) == METRICS and each["load_balance"] == 0 for each in metrics)
  params = {n: jnp.asarray(v) for n, v in initial.initial_params(make({"devices": 1})[1]).items()}
  trace = jax.tree.map(jnp.zeros_like, params)
  for n in range(4):
    loss, grads = jax.value_and_grad(lambda p, n=n: Regression().loss(p, batch(n))[0])(params)
    trace = {name: 0.9 * trace[name] + grads[name] for name in params}
    rate = np.float32(metrics[n]["learning_rate"])
    params = {name: params[name] - rate * trace[name] for name in params}
    assert metrics[n]["loss"] == pytest.approx(float(loss), rel=1e-5)
  for name, value in island.params_on_host().items():
    np.testing.assert_allclose(value, params[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_mesh_and_micro_batches_compute_the_same(accumulation_steps):
  island, metrics = trained(CUBE, accumulation_steps)
  plain, wanted = trained({"devices": 1})
  assert island.layout.shardings["params/table"].spec == jax.sharding.PartitionSpec(
    "fsdp", "tensor"
  )
  np.testing.assert_allclose([m["loss"] for m in metrics], [m["loss"] for m in wanted], rtol=1e-5)
  # Its state goes to another mesh bit by bit, the optimizer's too.
  arrays = {name: np.asarray(value) for name, value in island.capture().items()}
  assert island.num_moments == 1 and any("trace/table" in name for name in arrays)
  plain.restore(arrays)
  for name, value in plain.capture().items():
    np.testing.assert_array_equal(np.asarray(value), arrays[name], err_msg=name)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_what_is_frozen_is_on_the_mesh_and_nowhere_else(accumulation_steps):
  (one, alone), (cube, spread) = (
    trained(islands, accumulation_steps, "tuned") for islands in ({"devices": 1}, CUBE)
  )
  frozen = Tuned().frozen()
  assert sorted(frozen) == ["norm/bias", "norm/mean", "norm/scale", "norm/var", "table"]
  names = {name for name in cube.layout.leaves if name.startswith("params/")}
  assert names == {"params/adapter/lora_a", "params/adapter/lora_b"}
  assert "frozen" not in str(cube.capture().keys()) and cube.programs.frozen.keys() == frozen.keys()
  table = cube.programs.frozen["table"]
  assert table.dtype == jnp.bfloat16 and table.sharding.shard_shape(table.shape) == (2, 3)
  for name, value in cube.programs.frozen.items():
    np.testing.assert_array_equal(np.asarray(value), np.asarray(frozen[name]))
  assert one.params_on_host()["adapter/lora_b"].any(), "it has learned"
  for name, value in one.params_on_host().items():
    np.testing.assert_allclose(cube.params_on_host()[name], value, rtol=2e-5, atol=1e-6)
  assert [each["loss"] for each in spread] == pytest.approx([each["loss"] for each in alone], 1e-5)
  measured = HeldoutLoss(
    make({"devices": 1}, 1, "tuned")[1].model, [batch(0), batch(1)], jax.devices()[:2]
  ).measure(params := one.params_on_host())
  expected = [Tuned().evaluate({**params, **frozen}, batch(n))["loss"] for n in range(2)]
  assert measured["loss"] == pytest.approx(float(np.mean(expected)), rel=1e-5)


def test_the_evaluator_takes_frozen_arrays_whose_axes_have_no_names(monkeypatch):
  named = Tuned.logical_axes
  trained_alone = lambda self: {name: named(self)[name] for name in self.shapes()}
  monkeypatch.setattr(Tuned, "logical_axes", trained_alone)
  config, model = make({"devices": 1}, 1, "tuned")[1], Tuned()
  params = initial.initial_params(config)
  measured = HeldoutLoss(config.model, [batch(0)], jax.devices()[:2]).measure(params)
  expected = model.evaluate({**params, **model.frozen()}, batch(0))["loss"]
  assert measured["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_everything_that_the_model_measures_is_told():
  config = make({"devices": 1})[1]
  params = initial.initial_params(config)
  evaluator = HeldoutLoss(config.model, [batch(0), batch(1)], jax.devices()[1:2])
  each = [Regression().evaluate(params, batch(n)) for n in (0, 1)]
  measured = evaluator.measure(params)
  assert measured == {
    name: pytest.approx(float(np.mean([e[name] for e in each])), rel=1e-5) for name in each[0]
  }
  assert evaluator.loss(params) == measured["loss"]
  with pytest.raises(ValueError, match="must have the same shape"):
    HeldoutLoss(config.model, [batch(0), {"x": batch(1)["x"]}], jax.devices()[1:2])


def test_a_donor_tells_the_greatest_of_its_counts():
  """Micro-steps begin again; with their count a joining Adam would correct its moments anew."""
  sys.modules[NAME].inner = lambda config: optax.MultiSteps(optax.adam(1.0), 2)
  island, config = make({"devices": 1})
  island.load(initial.initial_params(config))
  for n in range(7):
    island.step(batch(n), n)
  state = island.capture()
  assert (int(state["inner/mini_step"]), int(state["inner/gradient_step"])) == (1, 3)
  assert int(island.count()) == 3


def test_an_optimizer_whose_state_is_one_array_comes_back_with_it(tmp_path):
  """It was left out of what the island got back, which refused the rest."""

  def update(grads, count, params=None):
    return jax.tree.map(lambda g: -g / (1 + count), grads), count + 1

  sys.modules[NAME].inner = lambda config: optax.GradientTransformation(
    lambda params: jnp.zeros((), jnp.int32), update
  )
  island, config = make({"devices": 1})
  island.load(initial.initial_params(config))
  for n in range(3):
    island.step(batch(n), n)
  storage = Storage(tmp_path, "plan", pytest.fail)
  before = {name: np.asarray(value) for name, value in island.capture().items()}
  state = new_learner(config, initial.make_plan(config), 0, 1)
  storage.save(1, "learner-0", 1, learner_part(state, 3), dict(before))
  storage.commit(1, ["learner-0"])
  assert not begin_learner(state, config, island, storage, ListRecorder([])).fresh
  assert before["inner"] == 3
  for name, value in island.capture().items():
    np.testing.assert_array_equal(np.asarray(value), before[name], err_msg=name)


def test_frozen_weights_are_read_once_for_their_shapes_and_once_for_all_equal_islands(monkeypatch):
  reads, read = [], Tuned.frozen
  monkeypatch.setattr(Tuned, "frozen", lambda self: reads.append(1) or read(self))
  custom.frozen_shapes.cache_clear()
  config, shared = make({"devices": 1}, 1, "tuned")[1], {}
  plan = initial.make_plan(config)
  for learner in range(3):
    Island(config, learner, jax.devices()[:1], plan, shared).compile()
  assert len(reads) == 2
