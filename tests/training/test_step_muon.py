"""Muon on a mesh: each device has whole matrices of some layers; the numbers are one device's."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from ddiloco.config import from_dict
from ddiloco.training.aot import by_kind, find_collectives
from ddiloco.training.devices import make_mesh
from ddiloco.training.step import IslandStep

LAYERS = 3  # matrices of a kind do not divide evenly over the mesh


def parts_on(devices: int, experts: int = 0, **mesh: int) -> IslandStep:
  model = {"num_layers": LAYERS, "num_experts": experts, "vocab_size": 64, "model_dim": 16}
  config = from_dict(
    {
      "model": {**model, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "mlp_dim": 24},
      "data": {"sequence_length": 4},
      "inner": {"optimizer": "muon"},
      "islands": {"devices": devices, "batch_size": 8, **mesh},
    }
  )
  return IslandStep(config, 0, make_mesh(jax.devices()[:devices], config.islands.island(0)))


def layouts_of(parts: IslandStep):
  """Where its parameters are, and its optimizer's state."""
  return jax.tree.map(lambda leaf: leaf.sharding, parts.layout.trees(parts.layout.leaves))


@functools.cache
def steps_of_one_device(experts: int):
  """(The island's step, its parameters, and of two steps the gradients, updates and state)."""
  one, draw = parts_on(1, experts), np.random.default_rng(3).normal
  params = {name: draw(size=leaf.shape).astype("f4") for name, leaf in one.leaves.items()}
  state, steps = one.transform.init(params), []
  for _ in range(2):  # the second one has momentum
    grads = {name: draw(size=each.shape).astype("f4") for name, each in params.items()}
    updates, state = jax.jit(one.transform.update)(grads, state, params)
    steps.append((grads, updates, state))
  return one, params, steps


@pytest.mark.parametrize(
  ("experts", "mesh"),
  [
    (0, {"fsdp": 8}),
    (0, {"fsdp": 4, "tensor": 2}),
    (4, {"data": 2, "fsdp": 2, "tensor": 2}),
    (0, {"data": 8, "fsdp": 1}),
  ],
  ids=["fsdp", "tensor", "mixture", "copies"],
)
def test_updates_on_a_mesh_are_those_of_one_device(experts, mesh):
  one, params, steps = steps_of_one_device(experts)
  cut = parts_on(8, experts, **mesh)
  shapes = [{n: (x.shape, x.dtype) for n, x in p.layout.leaves.items()} for p in (one, cut)]
  assert shapes[0] == shapes[1], "a state of one mesh fits every other"
  layouts, inner = there = layouts_of(cut)
  state = jax.device_get(cut.transform.init(params))
  compute = jax.jit(cut.transform.update, out_shardings=there)
  for grads, updates, states in steps:
    found, state = compute(*jax.device_put((grads, state, params), (layouts, inner, layouts)))
    for name, update in updates.items():
      np.testing.assert_allclose(found[name], update, rtol=0, atol=2e-5, err_msg=name)
    for mine, theirs in zip(*map(jax.tree.leaves, (states, state)), strict=True):
      np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}], ids=["fsdp", "tensor"])
def test_matrices_are_exchanged_and_never_gathered(mesh):
  parts = parts_on(8, **mesh)
  params, state = parts.layout.trees(parts.layout.leaves)
  compute = jax.jit(parts.transform.update, out_shardings=layouts_of(parts))
  update = compute.lower(params, state, params)
  found = {x.kind: x.bytes for x in by_kind(list(find_collectives(update.compile().as_text(), 8)))}
  assert found.keys() == {"all-to-all", "all-reduce"}
  assert found["all-reduce"] < 100, "norms"
  own = sum(4 * leaf.size // 8 for leaf in params.values() if leaf.ndim > 2)  # bytes on a device
  steps = 2 * sum(size > 1 for size in mesh.values())  # there and back
  assert own * steps <= found["all-to-all"] <= 3 * own * steps, "the rest fills odd stacks"
