"""One island: its devices and mesh, the compiled programs, and the state that lives on them.

Everything is compiled ahead of time, and the programs outlive a learner's incarnations. Only the
pieces of a pulled fragment leave the devices, and a snapshot's copies of the state. A published
fragment is staged beside the running step, and written into the parameters, in place, between two
steps. The moments that a donor sends to a joining learner leave and enter in the same two ways.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ddiloco import custom
from ddiloco.config import Config
from ddiloco.core.fragments import Fragment, Piece, Plan, split_flat
from ddiloco.models.model import Batch
from ddiloco.training.devices import PEAK_FLOPS, make_mesh, require_processes, without_copies
from ddiloco.training.step import METRICS, PARAMS, IslandStep, learning_rate

# --- Two compiled programs that move a piece between its leaf and an array of its own
# Pieces that differ only in their layer or first row share the two programs. So the number of
# programs depends on the model's kinds of tensors, not on the number of layers and fragments. The
# programs serve the parameters and everything that lies like them, such as the optimizer's moments.


@dataclasses.dataclass(frozen=True)
class PieceKind:
  """All that the programs of a piece depend on.

  Attributes:
    leaf: f32, with its sharding.
    piece: f32, with its sharding; without the leaf's first axis if it is in one layer of it.
    start: the piece's first row in the leaf; None if every call gives it. Where the rows are split
      over devices, the compiler must know which rows a piece has.
  """

  leaf: jax.ShapeDtypeStruct
  piece: jax.ShapeDtypeStruct
  start: int | None

  @classmethod
  def of(cls, piece: Piece, leaf: jax.ShapeDtypeStruct) -> PieceKind:
    """The kind of a piece of this leaf; `leaf` has a sharding."""
    layered, start = piece.layer is not None, piece.start
    spec, shape = list(leaf.sharding.spec)[layered:], leaf.shape[layered:]
    if piece.shape != shape:
      if not spec or spec[0] is None:
        start = None
      # A split that does not divide the rows: each device has all of them.
      elif piece.shape[0] % (shape[0] // leaf.sharding.shard_shape(leaf.shape)[layered]):
        spec[0] = None
    sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))
    shaped = jax.ShapeDtypeStruct(piece.shape, jnp.float32, sharding=sharding)
    return cls(leaf, shaped, start)


def piece_kinds(fragment: Fragment, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> list[PieceKind]:
  """The kind of each of the fragment's pieces, which are parts of these leaves."""
  return [PieceKind.of(piece, leaves[piece.name]) for piece in fragment.pieces]


def lower_piece(
  kind: PieceKind, replicated: NamedSharding
) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
  """Lowers `copy_out(leaf, at) -> piece`, and `apply(leaf, staged, keep, at) -> leaf`, in place.

  `at` is i32 [2]: the piece's layer and first row. `replicated` is the layout of scalars.
  """
  shape = kind.leaf.shape
  layers = len(shape) - len(kind.piece.shape)  # 1: the piece is in one layer of a stacked leaf
  size = (1,) * layers + kind.piece.shape

  def start(at: jax.Array) -> list[Any]:
    """The piece's first value in the leaf, by axis."""
    row = at[1] if kind.start is None else kind.start
    return [*[at[0]] * layers, row, *[0] * len(shape)][: len(shape)]

  def part(leaf: jax.Array, at: jax.Array) -> jax.Array:
    if size != shape:
      leaf = jax.lax.dynamic_slice(leaf, start(at), size)
    return leaf.reshape(kind.piece.shape)

  def copy_out(leaf: jax.Array, at: jax.Array) -> jax.Array:
    # An explicit copy, since the next step deletes the leaves and a piece may be a whole leaf. It
    # costs nothing: XLA makes a copy anyway (jax 0.10), but does not promise to.
    return jnp.copy(jax.lax.with_sharding_constraint(part(leaf, at), kind.piece.sharding))

  def apply(leaf: jax.Array, staged: jax.Array, keep: jax.Array, at: jax.Array) -> jax.Array:
    # `where`, since 0 * NaN is NaN and an overwrite must replace any value.
    new = jnp.where(keep == 0, staged, keep * part(leaf, at) + staged).reshape(size)
    return new if size == shape else jax.lax.dynamic_update_slice(leaf, new, start(at))

  keep = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
  where = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=replicated)
  once = without_copies(kind.piece.sharding, kind.piece.shape, kind.leaf.sharding)
  out = jax.jit(copy_out, out_shardings=once)
  into = jax.jit(apply, out_shardings=kind.leaf.sharding, donate_argnums=0)
  return out.lower(kind.leaf, where), into.lower(kind.leaf, kind.piece, keep, where)


class IslandPrograms:
  """All programs of an island, compiled ahead of time; without state, so equal islands share them.

  A state is a dict name -> array with the names of `StateLayout`.

  Args:
    parts: the island's arrays and their layouts.
    plan: how the model is partitioned into fragments.

  Attributes:
    step: (state, batch, learning rate, frozen) -> (state, metrics).
    frozen: the model's frozen arrays.
    fresh: () -> state.
    capture: state -> state; into the host's memory where the devices copy to it directly.
    counts: count -> the part of a state that counts updates.
    latest: that part -> its greatest count.
    kinds: by fragment, the kind of each piece.
    pieces: by kind, the programs of `lower_piece`.
    moves: by fragment, for each piece: its leaf's name, its programs, and its place in the leaf.
  """

  step: Any = None  # last of all: then the others are there

  def __init__(self, parts: IslandStep, plan: Plan):
    self.kinds = [piece_kinds(fragment, parts.leaves) for fragment in plan.fragments]
    self.pieces: dict[PieceKind, tuple[jax.stages.Compiled, ...]] = {}
    self._parts, self._plan = parts, plan
    self._compiling = threading.Lock()

  def compile(self) -> float:
    """Compiles, or waits until another island has; returns the seconds (0.0 if compiled before)."""
    if self.step is not None:
      return 0.0
    start = time.perf_counter()
    with self._compiling:
      if self.step is None:
        self._compile_state()
        self._compile_pieces()
        self.frozen = self._parts.place_frozen()
        self.step = self._parts.lower().compile()
    return time.perf_counter() - start

  def _compile_state(self) -> None:
    parts, layout = self._parts, self._parts.layout

    def fresh() -> dict[str, jax.Array]:
      leaves = parts.leaves.items()
      params = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves}
      return layout.flat(params, parts.transform.init(params))

    def counts(count: jax.Array) -> dict[str, jax.Array]:
      return {name: jnp.copy(count).astype(layout.leaves[name].dtype) for name in layout.counts}

    def latest(counts: dict[str, jax.Array]) -> jax.Array:
      each = (count.astype(jnp.int32) for count in counts.values())
      return jnp.max(jnp.stack([jnp.int32(0), *each]))

    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=parts.replicated)
    self.fresh = jax.jit(fresh, out_shardings=layout.shardings).lower().compile()
    self.capture = parts.lower_copy(parts.host_memory).compile()
    self.counts = jax.jit(counts, out_shardings=parts.replicated).lower(count).compile()
    kept = {name: layout.leaves[name] for name in layout.counts}
    self.latest = jax.jit(latest, out_shardings=parts.replicated).lower(kept).compile()

  def _compile_pieces(self) -> None:
    self.moves = []
    for fragment, kinds in zip(self._plan.fragments, self.kinds):
      moves = []
      for piece, kind in zip(fragment.pieces, kinds):
        if kind not in self.pieces:
          lowered = lower_piece(kind, self._parts.replicated)
          self.pieces[kind] = tuple(each.compile() for each in lowered)
        place = np.array([piece.layer or 0, piece.start], np.int32)
        at = jax.device_put(place, self._parts.replicated)
        moves.append((piece.name, self.pieces[kind], at))
      self.moves.append(moves)


# --- The island itself


class Island:
  """Trains one copy of the model on its devices; each section below names the thread that calls.

  Attributes:
    mesh: the devices.
    programs: may be shared with equal islands.
    layout: the names of the state's arrays, and where each lies on this mesh.
    num_moments: f32 values that the inner optimizer keeps for every parameter: Adam's mu and nu are
      2.
  """

  def __init__(
    self,
    config: Config,
    learner: int,
    devices: Sequence[jax.Device],
    plan: Plan,
    shared: dict[tuple[Any, ...], IslandPrograms] | None = None,
  ):
    """Touches no device memory yet; `compile()`, `reset()`, `load()` and `restore()` do.

    Args:
      config: the run's; the island's part is `config.islands.island(learner)`.
      learner: number of the learner.
      devices: all of them, in order.
      plan: how the model is partitioned into fragments.
      shared: the programs of other islands of this run and plan; equal islands on the same devices
        share theirs. Islands may be made in several threads.

    Raises:
      ConfigError: the batch cannot be split evenly over these devices, the mesh does not fit them,
        or JAX joins other processes than the island's.
    """
    self._island = config.islands.island(learner)
    require_processes(self._island.hosts)
    self._config, self._plan = config, plan
    self._planned_steps = config.planned_steps()
    self.mesh = make_mesh(devices, self._island)
    self._parts = IslandStep(config, learner, self.mesh)
    # One step stays in flight, so that the devices never wait for Python. On the CPU every program
    # is waited for: fake devices share one thread pool, in which the collectives of several islands
    # could wait for each other.
    self._pipelined = not self._parts.on_cpu
    self.layout = self._parts.layout
    self.num_moments = len(self.layout.moments)
    # Configs may differ in `inner`'s schedule, which only a user's own optimizer may read.
    kind = repr((self._island, config.inner if config.inner.custom else None)), *devices
    programs = {} if shared is None else shared
    self.programs = programs.setdefault(kind, IslandPrograms(self._parts, plan))
    # Names -> arrays, those of `StateLayout`.
    self._state: dict[str, jax.Array] = {}
    self._in_flight: jax.Array | None = None
    self._count = itertools.count(1)  # of steps of this process, for traces

  def describe(self) -> dict[str, Any]:
    """For the events: devices, mesh [data, fsdp, tensor], batch size, how programs compute, which
    a replay repeats, and the FLOPs that the MFU follows from."""
    kind, how = self.mesh.devices.flat[0].device_kind, self._parts.execution
    return {
      "devices": self.mesh.size,
      "device_kind": kind,
      "mesh": [int(n) for n in self.mesh.devices.shape],
      "batch_size": self._island.batch_size,
      "execution": {name: getattr(how, name) for name in ("attention", "remat", "loss_chunks")},
      "flops_per_token": custom.flops_per_token(self._config),
      "peak_flops_per_second": PEAK_FLOPS.get(kind, 0.0),
    }

  @property
  def rows(self) -> np.ndarray:
    """Of a batch the rows that the devices of this process take; all, if it is the only one."""
    [leaf, *_] = jax.tree.leaves(self._parts.inputs)
    taken = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    return np.unique([np.arange(leaf.shape[0])[rows] for rows, *_ in taken])

  # --- programs -----------------------------------------------------------------------------------

  def compile(self) -> float:
    """Compiles everything this island will ever run; returns the seconds (0.0 if done before)."""
    return self.programs.compile()

  # --- state --------------------------------------------------------------------------------------

  def reset(self) -> None:
    """Fresh optimizer state, and zeros for parameters: the syncer's arrive through `apply`."""
    self.compile()
    self._state, self._in_flight = {}, None  # free the memory first
    self._state = jax.block_until_ready(self.programs.fresh())

  def load(self, params: Mapping[str, np.ndarray]) -> None:
    """`reset`, and then these parameters (name -> array): for islands that train alone."""
    mine = {PARAMS + name: np.asarray(value, np.float32) for name, value in params.items()}
    rest = {n: leaf for n, leaf in self.layout.leaves.items() if not n.startswith(PARAMS)}
    self.layout.check(rest | mine)
    self.reset()
    self._state |= {name: self.place(name, value) for name, value in mine.items()}

  def piece_leaves(self, fragment_index: int, moments: bool = False) -> list[jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of the arrays that `stage` returns and `apply` takes."""
    pieces = [kind.piece for kind in self.programs.kinds[fragment_index]]
    return pieces * (self.num_moments if moments else 1)

  def place(self, name: str, value: np.ndarray) -> jax.Array | np.ndarray:
    """An array of a saved state as `restore` wants it: on the devices, in this mesh's layout.

    An array that does not fit is returned as it is; in a state, `restore` refuses it.
    """
    if not self.layout.fits(name, value):
      return value
    # On the CPU a private copy: it may use host memory as it is, and steps write in place.
    mine = np.array(value) if self._parts.on_cpu else value
    return jax.block_until_ready(jax.device_put(mine, self.room_for(name).sharding))

  def room_for(self, name: str) -> jax.ShapeDtypeStruct:
    """The array of a saved state that comes next. The present state loses its own of this name: the
    devices may have no room for both."""
    self._state.pop(name, None)
    return self.layout.leaves[name]

  def restore(self, arrays: Mapping[str, jax.Array | np.ndarray]) -> None:
    """Takes over a captured state of any mesh, bit by bit; instead of `reset`.

    Args:
      arrays: exactly the names of `layout`. Those that lie on the devices as `layout` says, as
        `place` makes them, become the state itself, since two states may have no room there: steps
        delete them. Of others the state gets copies, through the host.

    Raises:
      ValueError: names, shapes or dtypes are not this island's; nothing has changed.
    """
    self.layout.check(arrays)
    self.compile()
    self._state, self._in_flight = {}, None  # free the memory first
    state = {}
    for name, sharding in self.layout.shardings.items():
      array = arrays[name]
      here = isinstance(array, jax.Array) and array.sharding == sharding
      # Not `device_put` from one mesh to another: it might compile, and communicate.
      state[name] = array if here else self.place(name, np.asarray(array))
    self._state = state

  def params_on_host(self) -> dict[str, np.ndarray]:
    """All parameters as NumPy copies (step thread only)."""
    return {name: np.array(self._state[PARAMS + name]) for name in self._parts.leaves}

  # --- step thread --------------------------------------------------------------------------------

  @property
  def busy(self) -> bool:
    """Whether the newest step is in flight and not done yet."""
    return self._in_flight is not None and not self._in_flight.is_ready()

  def step(
    self, batch: Batch, schedule_step: int, rate_scale: float = 1.0
  ) -> dict[str, float] | None:
    """One inner step on a batch of the model's inputs: host arrays, which must not change any more.

    `schedule_step` is the position in the schedule of learning rates. `rate_scale` multiplies the
    rate: below 1 while fresh moments warm up.

    Returns:
      {"loss", "load_balance", "grad_norm", "learning_rate"} of this step; if pipelined, those of
      the step before, and None on the first step.

    Raises:
      TypeError: the model does not take this batch, or there is no state yet.
    """
    rate = learning_rate(self._config.inner, self._planned_steps, schedule_step)
    # The compiled call shards host values itself; a device_put of our own costs 0.3 ms more.
    with jax.profiler.StepTraceAnnotation("step", step_num=next(self._count)):
      rated = batch, np.float32(rate_scale * rate), self.programs.frozen
      self._state, metrics = self.programs.step(self._state, *rated)
      if not self._pipelined:
        # Waits for every device, not only for the one that the values are read from.
        return _as_floats(jax.block_until_ready(metrics))
      metrics.copy_to_host_async()
      before, self._in_flight = self._in_flight, metrics
      return None if before is None else _as_floats(before)

  def finish(self) -> dict[str, float] | None:
    """Waits for the step in flight and returns its metrics; None if there is none."""
    before, self._in_flight = self._in_flight, None
    return None if before is None else _as_floats(jax.block_until_ready(before))

  def capture(self) -> dict[str, jax.Array]:
    """A copy of the whole state, taken between two steps; does not wait, but the next step does.

    Until the caller drops the copy, it takes as much memory as the state itself, parameters and
    moments. It lies in the host's memory where devices copy to that directly (see
    `devices.host_memory`), so that they never hold a second state. (One CPU device makes the copy
    in the calling thread; that is how XLA runs cheap programs.)

    Returns:
      "params/<name>" and "inner/<path>" -> private array, cut as `layout` says.
    """
    with named("capture"):
      return self.programs.capture(self._state)

  def copy_out(self, fragment_index: int, moments: bool = False) -> list[jax.Array]:
    """Copies pieces on the devices, and starts the copy to the host; no wait but on the CPU.

    The pieces are the fragment's, of the parameters or of every moment in turn. With moments the
    caller also takes `count()`.
    """
    pieces = []
    with named("copy_out", fragment=fragment_index):
      for name, (copy_out, _), at in self._moves(fragment_index, moments):
        pieces.append(self._settled(copy_out(self._state[name], at)))
      if self._parts.host_memory is None:
        for out in pieces:
          out.copy_to_host_async()
        return pieces
      return _moved(pieces, self._parts.host_memory)  # beside the step

  def apply(
    self, fragment_index: int, staged: Sequence[jax.Array], keep: float, moments: bool = False
  ) -> None:
    """piece <- staged if keep is 0, else keep * piece + staged; in place, only these pieces.

    Overwrite is keep = 0; Streaming DiLoCo's mix (2501.18512) keep = alpha with
    staged = (1 - alpha) * global; rebase keep = 1, or 1/2 for a missed round, with staged = the
    shift. Does not wait but on the CPU.
    """
    share, state = np.float32(keep), self._state
    with named("apply", fragment=fragment_index):
      moves = self._moves(fragment_index, moments)
      for (name, (_, apply), at), value in zip(moves, staged, strict=True):
        state[name] = self._settled(apply(state[name], value, share, at))

  def _settled(self, array: jax.Array) -> jax.Array:
    return array if self._pipelined else jax.block_until_ready(array)

  def count(self) -> jax.Array:
    """How many updates the optimizer has seen; does not wait: call `int()` in the background.

    The greatest where several are counted: some begin again, such as those of micro-steps. 0 for
    an optimizer that does not count.
    """
    count = self.programs.latest({name: self._state[name] for name in self.layout.counts})
    count.copy_to_host_async()
    return count

  def set_count(self, count: int) -> None:
    """Sets all that `count()` reads, for moments that came with this count; does not wait."""
    self._state |= self.programs.counts(np.int32(count))

  def _moves(self, fragment_index: int, moments: bool) -> Iterator[tuple[str, Any, jax.Array]]:
    """For each piece: its array's name in the state, its programs, and its place in the array."""
    for tree in self.layout.moments if moments else (PARAMS,):
      for name, programs, at in self.programs.moves[fragment_index]:
        yield tree + name, programs, at

  # --- background thread --------------------------------------------------------------------------

  def to_host(self, pieces: Sequence[jax.Array], fragment_index: int) -> np.ndarray:
    """The result of `copy_out` as a flat f32 vector; waits until it has arrived.

    Returns:
      [size] of a fragment's parameters, [num_moments * size] of its moments.
    """
    flat = np.empty(sum(piece.size for piece in pieces), np.float32)
    views = split_rows(self._plan.fragments[fragment_index], flat)
    with named("to_host", fragment=fragment_index):
      for view, piece in zip(views, pieces, strict=True):
        for shard in own_shards(piece):
          view[shard.index] = shard.data
    return flat

  def stage(self, fragment_index: int, flat: np.ndarray, moments: bool = False) -> list[jax.Array]:
    """Brings a vector as of `to_host` onto the devices for `apply`; it must not change afterwards.

    Raises:
      ValueError: it has another size.
    """
    views = split_rows(self._plan.fragments[fragment_index], flat)
    # The wait is here, beside the step, so that `apply` never waits for a transfer.
    shardings = [leaf.sharding for leaf in self.piece_leaves(fragment_index, moments)]
    with named("stage", fragment=fragment_index):
      return jax.block_until_ready(jax.device_put(views, shardings))


named = jax.profiler.TraceAnnotation  # names work in a trace; without a trace it costs 1 us


def split_rows(fragment: Fragment, flat: np.ndarray) -> list[np.ndarray]:
  """Views of the fragment's pieces in a vector [n * size], n times: `split_flat` of each part."""
  return [view for row in flat.reshape(-1, fragment.size) for view in split_flat(fragment, row)]


def _moved(arrays: Sequence[jax.Array], memory: str) -> list[jax.Array]:
  """The arrays in this kind of memory, in one transfer, which goes device by device: JAX moves an
  array on the devices of several processes by a program, which it would compile now."""
  parts = [[shard.data for shard in array.addressable_shards] for array in arrays]
  there = jax.tree.map(lambda part: part.sharding.with_memory_kind(memory), parts)
  pairs = zip(arrays, jax.device_put(parts, there))
  return [
    jax.make_array_from_single_device_arrays(
      array.shape, array.sharding.with_memory_kind(memory), moved
    )
    for array, moved in pairs
  ]


def own_shards(array: jax.Array) -> list[Any]:
  """The parts of an array that this process collects: each part once over all processes."""
  return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _as_floats(metrics: jax.Array) -> dict[str, float]:
  return dict(zip(METRICS, np.asarray(metrics).tolist()))
