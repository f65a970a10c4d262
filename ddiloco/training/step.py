"""The step of one island, as its mesh is given it: shapes, layouts and the program, no arrays.

The devices of the mesh may be ones that are only described: `ddiloco compile` has no TPU.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco import custom
from ddiloco.config import Config, ConfigError
from ddiloco.core.fragments import Fragment, Plan
from ddiloco.models import arithmetic
from ddiloco.training import inner
from ddiloco.training.devices import host_memory, make_execution, param_sharding
from ddiloco.training.programs import (
  PieceKind,
  PiecePrograms,
  StateLayout,
  at,
  lower_piece,
  placed,
  placed_inputs,
)


class IslandStep:
  """What an island holds, where it lies, and its programs.

  Attributes:
    mesh: with axes data, fsdp and tensor.
    execution: how the mesh computes the model.
    leaves: name -> every parameter's shape, dtype and sharding.
    layout: the whole state, of which the parameters are a part.
    inputs: the batch.
    replicated: the layout of scalars.
    host_memory: see `devices.host_memory`.
    transform: the inner optimizer.
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
    self.host_memory = host_memory(mesh.devices.flat[0])
    self.execution = make_execution(mesh, island, config.model.compute_dtype)
    self._model = custom.load_model(config.model)
    axes = self._model.logical_axes()
    self.transform = inner.optimizer(config.inner, axes)
    self.leaves = {
      name: placed(leaf, param_sharding(axes[name], leaf.shape, mesh))
      for name, leaf in self._model.shapes().items()
    }
    self.layout = StateLayout(self.transform, self.leaves, self.replicated)
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

  def lower_copy(self, memory: str | None = None) -> jax.stages.Lowered:
    """state -> a private copy of it, on the devices or in this kind of host memory."""

    def copy(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
      return {name: jnp.copy(leaf) for name, leaf in state.items()}

    there = self.layout.shardings
    if memory is not None:
      there = {name: each.with_memory_kind(memory) for name, each in there.items()}
    return jax.jit(copy, out_shardings=there).lower(self.layout.leaves)

  def piece_kinds(self, fragment: Fragment) -> list[PieceKind]:
    """Which programs each of the fragment's pieces needs, and where it lies out of its leaf."""
    return [PieceKind.of(piece, self.leaves[piece.name]) for piece in fragment.pieces]


class IslandPrograms:
  """All that an island runs, compiled ahead of time. It has no state, so equal islands share it.

  A state is a dict name -> array with the names of `StateLayout`.

  Args:
    parts: what the island holds, and where.
    plan: how the model is partitioned into fragments.

  Attributes:
    step: (state, batch, learning rate) -> (state, metrics).
    fresh: () -> state.
    copy: state -> state.
    capture: the same, into the host's memory where the devices copy to it directly.
    counts: count -> the part of a state that counts updates.
    kinds: by fragment, the kind of each piece.
    pieces: by kind, what copies a piece out and writes it back.
    moves: by fragment, of each piece its leaf's name, what moves it, and where it is in the leaf.
  """

  step: Any = None
  fresh: Any = None
  copy: Any = None
  capture: Any = None
  counts: Any = None

  def __init__(self, parts: IslandStep, plan: Plan):
    self.kinds = [parts.piece_kinds(fragment) for fragment in plan.fragments]
    self.pieces: dict[PieceKind, PiecePrograms] = {}
    self.moves: list[list[tuple[str, PiecePrograms, jax.Array]]] = []
    self._parts, self._plan = parts, plan
    self._compiling = threading.Lock()

  def compile(self) -> float:
    """Compiles all of it, or waits until another island has; returns the seconds (0 if done)."""
    if self.step is not None:
      return 0.0
    start = time.perf_counter()
    with self._compiling:
      if self.step is None:
        self._compile_state()
        self._compile_pieces()
        self.step = self._parts.lower().compile()
    return time.perf_counter() - start

  def _compile_state(self) -> None:
    layout, replicated = self._parts.layout, self._parts.replicated

    def fresh() -> dict[str, jax.Array]:
      leaves = self._parts.leaves.items()
      params = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves}
      return layout.flat(params, self._parts.transform.init(params))

    def counts(count: jax.Array) -> dict[str, jax.Array]:
      return {name: jnp.copy(count).astype(layout.leaves[name].dtype) for name in layout.counts}

    count = self._parts.scalar(jnp.int32)
    self.fresh = jax.jit(fresh, out_shardings=layout.shardings).lower().compile()
    self.copy = self.capture = self._parts.lower_copy().compile()
    if self._parts.host_memory is not None:
      self.capture = self._parts.lower_copy(self._parts.host_memory).compile()
    self.counts = jax.jit(counts, out_shardings=replicated).lower(count).compile()

  def _compile_pieces(self) -> None:
    replicated, platform = self._parts.replicated, self._parts.mesh.devices.flat[0].platform
    self.pieces = {
      kind: lower_piece(kind, replicated).compile(platform)
      for kind in dict.fromkeys(itertools.chain(*self.kinds))
    }
    self.moves = [
      [
        (p.name, self.pieces[kind], jax.device_put(at(p), replicated))
        for p, kind in zip(fragment.pieces, kinds)
      ]
      for fragment, kinds in zip(self._plan.fragments, self.kinds)
    ]
