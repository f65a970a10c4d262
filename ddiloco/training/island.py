"""One island: its devices and mesh, the compiled programs, and the state that lives on them.

Everything is compiled ahead of time and the programs outlive a learner's incarnations. Only the
pieces of a pulled fragment ever leave the devices; a published one comes in beside the running step
and is written into the parameters, in place, between two steps.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ddiloco.config import Config, ConfigError
from ddiloco.core.fragments import Fragment, Piece, Plan, split_flat
from ddiloco.models import transformer
from ddiloco.training import inner
from ddiloco.training.devices import make_mesh, param_sharding, piece_sharding

_COLLECTIVE = re.compile(r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute")


@dataclasses.dataclass(frozen=True)
class _FragmentPrograms:
  """What moves one fragment between the parameters and its pieces."""

  names: tuple[str, ...]  # of the touched leaves
  cut: Callable[[list[jax.Array]], list[jax.Array]]
  apply: Callable[[list[jax.Array], list[jax.Array], np.float32], list[jax.Array]]
  waits: bool  # block after dispatch


class Island:
  """Trains one copy of the model on its own devices; the sections say which thread calls what."""

  def __init__(
    self,
    config: Config,
    learner: int,
    devices: Sequence[jax.Device],
    plan: Plan,
  ):
    """Touches no device memory yet: `compile()` and then `reset()` (or `load()`) do.

    Args:
      config: the run's; the island's part is `config.islands.island(learner)`.
      learner: whose island this is.
      devices: all of them, in order.
      plan: how the model is cut into fragments.

    Raises:
      ConfigError: the batch cannot be cut evenly over these devices, or the mesh does not fit them.
    """
    self._island = config.islands.island(learner)
    self._config, self._plan = config, plan
    self._cpu = devices[0].platform == "cpu"
    # One step stays in flight, so that Python never holds up the devices. Not so on the CPU: fake
    # devices share one thread pool, in which the collectives of several islands could wait for each
    # other, so there every step is waited for.
    self._pipelined = not self._cpu
    self.mesh = make_mesh(devices, self._island)
    whole = self._island.data_shards(len(devices)) * config.inner.accumulation_steps
    if self._island.batch_size % whole:
      raise ConfigError(
        f"islands.batch_size = {self._island.batch_size}: must be a multiple of data x fsdp x"
        f" inner.accumulation_steps = {whole} (learner {learner} has {len(devices)} devices)."
        f" Fix: use {max(1, round(self._island.batch_size / whole)) * whole}."
      )
    axes, self._shapes = transformer.logical_axes(config.model), transformer.shapes(config.model)
    self._shardings = {
      name: param_sharding(axes[name], leaf.shape, self.mesh) for name, leaf in self._shapes.items()
    }
    self._replicated = NamedSharding(self.mesh, PartitionSpec())
    self._tokens = jax.ShapeDtypeStruct(
      (self._island.batch_size, config.data.sequence_length + 1),
      jnp.int32,
      sharding=param_sharding(
        ("batch", None), (self._island.batch_size, config.data.sequence_length + 1), self.mesh
      ),
    )
    self._piece_shardings = [
      [self._piece_sharding(piece) for piece in fragment.pieces] for fragment in plan.fragments
    ]
    self._step: Any = None  # compiled: (params, opt_state, tokens, clock) -> (.., .., metrics)
    self._fresh: Any = None  # compiled: () -> (params, opt_state)
    self._programs: list[_FragmentPrograms] = []
    self._params: dict[str, jax.Array] = {}
    self._opt_state: Any = None
    self._in_flight: jax.Array | None = None

  def describe(self) -> dict[str, Any]:
    """For the events: number of devices, mesh [data, fsdp, tensor] and batch size."""
    mesh = [int(n) for n in self.mesh.devices.shape]
    return {"devices": self.mesh.size, "mesh": mesh, "batch_size": self._island.batch_size}

  # --- programs ---------------------------------------------------------------------------------

  def compile(self) -> float:
    """Compiles everything this island will ever run; returns the seconds it took (0 if done)."""
    if self._step is not None:
      return 0.0
    start = time.perf_counter()
    transform = inner.optimizer(self._config.inner)

    def fresh() -> tuple[dict[str, jax.Array], Any]:
      params = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in self._shapes.items()}
      return params, transform.init(params)

    state = jax.eval_shape(fresh)
    shardings = jax.tree_util.tree_map_with_path(self._state_sharding, state)
    state = jax.tree.map(_placed, state, shardings)
    self._fresh = jax.jit(fresh, out_shardings=shardings).lower().compile()
    self._programs = [self._compile_fragment(fragment) for fragment in self._plan.fragments]
    clock = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._replicated)
    step = jax.jit(
      self._traced_step(), out_shardings=(*shardings, self._replicated), donate_argnums=(0, 1)
    )
    self._step = step.lower(*state, self._tokens, clock).compile()
    return time.perf_counter() - start

  def _traced_step(self) -> Callable[..., Any]:
    config, mesh = self._config, self.mesh

    def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
      return jax.lax.with_sharding_constraint(x, param_sharding(axes, x.shape, mesh))

    train_step = inner.make_train_step(
      config.model, config.inner, config.planned_steps(), constrain if mesh.size > 1 else None
    )

    def island_step(params, opt_state, tokens_BxT1, clock):
      params, opt_state, metrics = train_step(params, opt_state, tokens_BxT1, clock)
      # One small array instead of several: one copy to the host per step.
      return params, opt_state, jnp.stack([metrics[name] for name in inner.METRICS])

    return island_step

  def _state_sharding(self, path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    """Parameters and their moments lie alike; anything else (step counts) is small: replicated."""
    name = str(getattr(path[-1], "key", ""))
    return self._shardings.get(name, self._replicated)

  def _piece_sharding(self, piece: Piece) -> NamedSharding:
    shape = self._shapes[piece.name].shape[0 if piece.layer is None else 1 :]
    whole = piece.shape[:1] == shape[:1]
    return piece_sharding(self._shardings[piece.name], piece.layer, piece.stop - piece.start, whole)

  def _compile_fragment(self, fragment: Fragment) -> _FragmentPrograms:
    pieces = fragment.pieces
    names = tuple(dict.fromkeys(piece.name for piece in pieces))
    slots = [names.index(piece.name) for piece in pieces]

    def cut(leaves: list[jax.Array]) -> list[jax.Array]:
      # An explicit copy, since the next step deletes the leaves and a piece may be a whole leaf. It
      # costs nothing: XLA makes one anyway (jax 0.10), but nothing promises that it always will.
      return [jnp.copy(_rows(piece, leaves[slot])) for piece, slot in zip(pieces, slots)]

    def apply(leaves: list[jax.Array], staged: list[jax.Array], keep: jax.Array):
      leaves = list(leaves)
      for piece, slot, value in zip(pieces, slots, staged):
        # `where`, since 0 * NaN is NaN and an overwrite must heal whatever was there.
        new = jnp.where(keep == 0, value, keep * _rows(piece, leaves[slot]) + value)
        leaves[slot] = _put_rows(piece, leaves[slot], new)
      return leaves

    leaves = [_placed(self._shapes[name], self._shardings[name]) for name in names]
    leaf_shardings = [self._shardings[name] for name in names]
    shardings = self._piece_shardings[fragment.index]
    staged = [
      jax.ShapeDtypeStruct(piece.shape, jnp.float32, sharding=sharding)
      for piece, sharding in zip(pieces, shardings)
    ]
    keep = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._replicated)
    cut = jax.jit(cut, out_shardings=shardings).lower(leaves).compile()
    apply = jax.jit(apply, out_shardings=leaf_shardings, donate_argnums=0)
    apply = apply.lower(leaves, staged, keep).compile()
    # Only rows of a tensor-cut embedding need collectives; see `_pipelined` for why they then wait.
    waits = self._cpu and any(_COLLECTIVE.search(p.as_text() or "") for p in (cut, apply))
    return _FragmentPrograms(names, cut, apply, waits)

  # --- state ------------------------------------------------------------------------------------

  def reset(self) -> None:
    """Fresh optimizer state, and zeros for parameters: the syncer's arrive through `apply`."""
    self.compile()
    self._params, self._opt_state, self._in_flight = {}, None, None  # free the memory first
    self._params, self._opt_state = jax.block_until_ready(self._fresh())

  def load(self, params: Mapping[str, np.ndarray]) -> None:
    """`reset`, and then these parameters (name -> array): for islands that train alone."""
    if params.keys() != self._shapes.keys():
      odd = sorted(params.keys() ^ self._shapes.keys())
      raise ValueError(
        f"params: names differ from the model's: {odd}. Fix: give exactly its leaves."
      )
    self.reset()
    # A private copy: the CPU backend may use host memory as it is, and steps write in place.
    mine = {name: np.array(params[name], np.float32) for name in self._shapes}
    self._params = jax.block_until_ready(jax.device_put(mine, self._shardings))

  def params_on_host(self) -> dict[str, np.ndarray]:
    """All parameters as NumPy copies (step thread only)."""
    return {name: np.array(leaf) for name, leaf in self._params.items()}

  # --- step thread ------------------------------------------------------------------------------

  def step(self, tokens: np.ndarray, clock: int) -> dict[str, float] | None:
    """One inner step on `tokens` [B, T+1] int32 (not to change any more) at the run's step `clock`.

    Returns:
      {"loss", "load_balance", "grad_norm", "learning_rate"} of this step; if pipelined, those of
      the step before, None on the first.

    Raises:
      ValueError: tokens have the wrong shape.
      RuntimeError: there are no parameters yet.
    """
    if tokens.shape != self._tokens.shape:
      raise ValueError(f"tokens have shape {tokens.shape}, this island takes {self._tokens.shape}")
    if not self._params:
      raise RuntimeError("the island has no state yet. Fix: call reset() or load() before step()")
    # The compiled call shards host values itself; a device_put of our own costs 0.3 ms more.
    self._params, self._opt_state, metrics = self._step(
      self._params, self._opt_state, tokens, np.int32(clock)
    )
    if not self._pipelined:
      # On every device, not only on the one the values are read from.
      return _as_floats(jax.block_until_ready(metrics))
    metrics.copy_to_host_async()
    before, self._in_flight = self._in_flight, metrics
    return None if before is None else _as_floats(before)

  def finish(self) -> dict[str, float] | None:
    """Waits for the step in flight and returns its metrics; None if there is none."""
    before, self._in_flight = self._in_flight, None
    return None if before is None else _as_floats(jax.block_until_ready(before))

  def cut(self, fragment_index: int) -> list[jax.Array]:
    """Copies the fragment's pieces, on the devices, and starts their way to the host; no wait."""
    programs = self._programs[fragment_index]
    pieces = programs.cut([self._params[name] for name in programs.names])
    if programs.waits:
      jax.block_until_ready(pieces)
    for piece in pieces:
      piece.copy_to_host_async()
    return pieces

  def apply(self, fragment_index: int, staged: Sequence[jax.Array], keep: float) -> None:
    """piece <- staged if keep is 0, else keep * piece + staged; in place, only this fragment.

    Overwrite is keep = 0; Streaming DiLoCo's mix (2501.18512) keep = alpha with
    staged = (1 - alpha) * global; rebase keep = 1 with staged = the shift. Does not wait.
    """
    programs = self._programs[fragment_index]
    leaves = [self._params[name] for name in programs.names]
    leaves = programs.apply(leaves, list(staged), np.float32(keep))
    self._params.update(zip(programs.names, leaves))
    if programs.waits:
      jax.block_until_ready(leaves)

  # --- background thread ------------------------------------------------------------------------

  def to_host(self, pieces: Sequence[jax.Array], fragment_index: int) -> np.ndarray:
    """What `cut` returned, as the fragment's flat f32 vector; waits until it has arrived."""
    fragment = self._plan.fragments[fragment_index]
    flat = np.empty(fragment.size, np.float32)
    for view, piece in zip(split_flat(fragment, flat), pieces):
      for shard in piece.addressable_shards:
        if shard.replica_id == 0:
          view[shard.index] = shard.data
    return flat

  def stage(self, fragment_index: int, flat: np.ndarray) -> list[jax.Array]:
    """Brings a flat f32 vector onto the devices for `apply`; `flat` must not change afterwards."""
    views = split_flat(self._plan.fragments[fragment_index], flat)
    # Waiting here, beside the step, means that `apply` never waits for a transfer.
    return jax.block_until_ready(jax.device_put(views, self._piece_shardings[fragment_index]))


def _as_floats(metrics: jax.Array) -> dict[str, float]:
  return dict(zip(inner.METRICS, np.asarray(metrics).tolist()))


def _placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _rows(piece: Piece, leaf: jax.Array) -> jax.Array:
  """The piece's part of its leaf."""
  if piece.layer is not None:
    leaf = jax.lax.index_in_dim(leaf, piece.layer, keepdims=False)
  return jax.lax.slice_in_dim(leaf, piece.start, piece.stop) if leaf.ndim else leaf


def _put_rows(piece: Piece, leaf: jax.Array, value: jax.Array) -> jax.Array:
  """The leaf with the piece's part replaced; in place where the leaf's buffer may be reused."""
  if value.shape == leaf.shape:
    return value
  start = [] if piece.layer is None else [piece.layer]
  value = value if piece.layer is None else value[None]
  start += [piece.start, *[0] * leaf.ndim][: leaf.ndim - len(start)]
  return jax.lax.dynamic_update_slice(leaf, value, start)
