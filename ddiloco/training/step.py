"""The step of one island, as its mesh is given it: shapes, layouts and the program, no arrays.

The devices of the mesh may be ones that are only described: `ddiloco compile` has no TPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco import custom
from ddiloco.config import Config, ConfigError
from ddiloco.core.fragments import Fragment
from ddiloco.models import arithmetic
from ddiloco.training import inner
from ddiloco.training.devices import make_execution, param_sharding
from ddiloco.training.programs import PieceKind, StateLayout, placed, placed_inputs


class IslandStep:
  """What an island holds, where it lies, and its programs.

  Attributes:
    mesh: with axes data, fsdp and tensor.
    execution: how the mesh computes the model.
    leaves: name -> every parameter's shape, dtype and sharding.
    layout: the whole state, of which the parameters are a part.
    inputs: the batch.
    replicated: the layout of scalars.
  """

  def __init__(self, config: Config, learner: int, mesh: Mesh):
    """Of the island that `config.islands.island(learner)` describes.

    Raises:
      ConfigError: the batch cannot be cut evenly over the mesh, or the mesh cannot compute it so.
    """
    self._config, self.mesh = config, mesh
    island = config.islands.island(learner)
    whole = island.data_shards(mesh.size) * config.inner.accumulation_steps
    if island.batch_size % whole:
      raise ConfigError(
        f"islands.batch_size = {island.batch_size}: must be a multiple of data x fsdp x"
        f" inner.accumulation_steps = {whole} (learner {learner} has {mesh.size} devices)."
        f" Fix: use {max(1, round(island.batch_size / whole)) * whole}."
      )
    self.replicated = NamedSharding(mesh, PartitionSpec())
    self.execution = make_execution(mesh, island, config.model.compute_dtype)
    self._model = custom.load_model(config.model)
    axes = self._model.logical_axes()
    self.leaves = {
      name: placed(leaf, param_sharding(axes[name], leaf.shape, mesh))
      for name, leaf in self._model.shapes().items()
    }
    self.layout = StateLayout(inner.optimizer(config.inner), self.leaves, self.replicated)
    inputs = self._model.inputs(island.batch_size, config.data.sequence_length)
    self.inputs = placed_inputs(inputs, mesh)

  def flops_per_token(self) -> float:
    """Training FLOPs of one token; 0.0 of a custom model that does not say (`models.model.Model`).

    See `models.arithmetic.flops_per_token`.
    """
    length = self._config.data.sequence_length
    if not self._config.model.custom:
      return arithmetic.flops_per_token(self._config.model, length)
    own = getattr(self._model, "flops_per_token", None)
    return float(own(length)) if own is not None else 0.0

  def scalar(self, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """A number that every device has."""
    return jax.ShapeDtypeStruct((), dtype, sharding=self.replicated)

  def lower(self) -> jax.stages.Lowered:
    """(state, batch, learning rate) -> (state, metrics), in place; to be compiled."""
    train_step = inner.make_train_step(self._model, self._config.inner, self.execution)

    def island_step(state, batch, rate):
      params, opt_state = self.layout.trees(state)
      params, opt_state, metrics = train_step(params, opt_state, batch, rate)
      # One small array instead of several: one copy to the host per step.
      small = jnp.stack([metrics[name] for name in inner.METRICS])
      return self.layout.flat(params, opt_state), small

    step = jax.jit(
      island_step, out_shardings=(self.layout.shardings, self.replicated), donate_argnums=0
    )
    return step.lower(self.layout.leaves, self.inputs, self.scalar())

  def piece_kinds(self, fragment: Fragment) -> list[PieceKind]:
    """Which programs each of the fragment's pieces needs, and where it lies out of its leaf."""
    return [PieceKind.of(piece, self.leaves[piece.name]) for piece in fragment.pieces]
