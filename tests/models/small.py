"""Small models, and a mesh layout, that several tests of this room use."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ddiloco.config import ModelConfig
from ddiloco.models import transformer

DENSE = ModelConfig(
  vocab_size=32,
  num_layers=3,
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
}


def random_tokens(model: ModelConfig, batch: int, length: int, seed: int = 1) -> jax.Array:
  return jax.random.randint(jax.random.key(seed), (batch, length), 0, model.vocab_size)


def fresh(model: ModelConfig, seed: int = 0) -> dict[str, jax.Array]:
  """Parameters whose norms are not all ones, so that a forgotten scale shows."""
  params = jax.jit(transformer.init, static_argnums=0)(model, jax.random.key(seed))
  for i, name in enumerate(sorted(params)):
    if name.endswith("scale"):
      noise = jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), params[name].shape)
      params[name] = params[name] + 0.3 * noise
  return params


def loss(model: ModelConfig, params: dict[str, jax.Array], tokens_BxT: jax.Array, constrain=None):
  """Next-token cross-entropy plus the weighted auxiliary loss."""
  logits, balance = transformer.apply(model, params, tokens_BxT, constrain)
  log_p = jax.nn.log_softmax(logits[:, :-1])
  picked = jnp.take_along_axis(log_p, tokens_BxT[:, 1:, None], axis=-1)
  return -jnp.mean(picked) + model.load_balance_weight * balance


def layout(mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> NamedSharding:
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
