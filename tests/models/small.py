"""Small models, and a mesh layout, that several tests of this package use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ddiloco.config import ModelConfig
from ddiloco.models import transformer
from ddiloco.models.model import PLAIN, Execution
from ddiloco.models.transformer import language_model

DENSE = ModelConfig(
  vocab_size=32,
  num_layers=5,  # deep enough for a loop, whose body compiles once
  model_dim=16,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=24,
)
MIXTURE = dataclasses.replace(DENSE, num_experts=4, experts_per_token=2)

RULES = {
  "vocab": ("tensor",),
  "embed": ("fsdp",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "mlp": ("tensor",),
  "experts": ("tensor",),
  "batch": ("data", "fsdp"),
  "copies": ("data",),
}


def num_params(model: ModelConfig) -> int:
  """All parameters by hand; the tied embedding counts once."""
  return _count(model, model.num_experts or 1)


def active_params(model: ModelConfig) -> int:
  """Parameters that one token meets: the router and `experts_per_token` experts of each layer."""
  return _count(model, model.experts_per_token if model.num_experts else 1)


def _count(model: ModelConfig, experts: int) -> int:
  """With this many experts counted in each layer (1 stands for a dense model's MLP)."""
  d = model.model_dim
  attention = 2 * d * model.head_dim * (model.num_heads + model.num_kv_heads)
  layer = attention + d * model.num_experts + experts * 3 * d * model.mlp_dim + 2 * d
  patches = 0
  if model.image_size:
    patches = d * (model.patch_size**2 * model.image_channels + model.num_patches)
  return model.vocab_size * d + model.num_layers * layer + d + patches


# Arrays are NumPy's: `jnp.asarray` compiles a program for every shape.


def random_tokens(model: ModelConfig, batch: int = 4, length: int = 8, seed: int = 1) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, model.vocab_size, (batch, length)).astype("i4")


def fresh(model: ModelConfig) -> dict[str, np.ndarray]:
  """Random parameters without compiling `init`; norm scales differ from 1, so that each shows."""
  rng, params = np.random.default_rng(0), {}
  for name, leaf in language_model(model).shapes().items():
    noise = rng.standard_normal(leaf.shape, np.float32)
    params[name] = 1 + 0.3 * noise if name.endswith("scale") else 0.25 * noise
  return params


def normal(seed: int, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal(shape, np.float32)


def filled(build: Callable[[], nnx.Module], seed: int = 0) -> nnx.Module:
  """The module that `build` makes, with random weights, and without compiling its initialisers."""
  graph, state = nnx.split(nnx.eval_shape(build))
  rng = np.random.default_rng(seed)
  values = jax.tree.map(lambda leaf: 0.25 * rng.standard_normal(leaf.shape, np.float32), state)
  return nnx.merge(graph, values)


def loss(model: ModelConfig, params: dict[str, jax.Array], tokens_BxT: jax.Array, execution=PLAIN):
  """(Next-token cross-entropy plus the weighted auxiliary loss, logits)."""
  logits, balance = transformer.from_params(model, params)(tokens_BxT, execution)
  log_p = jax.nn.log_softmax(logits[:, :-1])
  picked = jnp.take_along_axis(log_p, tokens_BxT[:, 1:, None], axis=-1)
  return -jnp.mean(picked) + model.load_balance_weight * balance, logits


# Compiled once for all tests that use the same model and shapes.
init_params = jax.jit(lambda model, key: language_model(model).init(key), static_argnums=0)
forward = jax.jit(
  lambda model, params, tokens_BxT, execution=PLAIN: transformer.from_params(model, params)(
    tokens_BxT, execution
  ),
  static_argnums=(0, 3),
)
gradient = jax.jit(jax.value_and_grad(loss, argnums=1, has_aux=True), static_argnums=(0, 3))


def mesh_of(*shape: int) -> Mesh:
  return jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def over(mesh: Mesh, loss_chunks: int = 1) -> Execution:
  return Execution(layout=lambda axes, shape: layout(mesh, shape, axes), loss_chunks=loss_chunks)


def layout(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> NamedSharding:
  """By `RULES`, in order; mesh axes that are taken or do not divide the dimension are left out."""
  taken, spec = set(), []
  for size, axis in zip(shape, axes, strict=True):
    names = []
    for name in RULES.get(axis, ()):
      if name not in taken and size % mesh.shape[name] == 0:
        names.append(name)
        size //= mesh.shape[name]
    taken.update(names)
    spec.append(tuple(names) or None)
  return NamedSharding(mesh, PartitionSpec(*spec))
