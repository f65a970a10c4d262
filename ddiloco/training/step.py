"""The inner step of one island: its computation, its state, and its program on a mesh.

Shapes, layouts and pure functions, but no arrays: the mesh may have devices that are only described
(`ddiloco compile` has no TPU). All functions except the schedule are for jit.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, muon, scale_by_muon
from optax.microbatching import AccumulationType, microbatch

from ddiloco import custom
from ddiloco.checks import differences, require
from ddiloco.config import Config, InnerConfig
from ddiloco.models.model import Axes, Batch, Params, frozen
from ddiloco.training.devices import (
  cutting_axes,
  host_memory,
  make_execution,
  overlap_options,
  param_sharding,
)

# --- AdamW, Muon, or an optax transform of the user's own
# The learning rate follows the run's progress in tokens, not the island's own count of steps. So a
# learner that rejoins takes the rate of its peers, and the schedule ends when the run does, with
# any number of learners (`protocol.states.schedule_step`).

METRICS = ("loss", "load_balance", "grad_norm", "learning_rate")
Dims = tuple[tuple[int, ...], ...]  # of an array: a stack's, and the rows' and columns' of a matrix
MUON_RMS = 0.2  # of an update's values, as is usual for AdamW ("Muon is Scalable", 2502.16982)


def learning_rate(inner: InnerConfig, planned_steps: int, step: int) -> float:
  """Linear warm-up to `inner.learning_rate`, then a cosine to `final_share` of it.

  Computed on the host, so that the compiled step is the same for every schedule and length of a
  run. With `decay_steps = 0` the cosine ends at `planned_steps`. `step` counts the schedule's
  finished steps: step 0 has 1/warmup_steps of the peak, step warmup_steps has the peak, and after
  the end of the decay the rate stays at the floor.
  """
  end = inner.decay_steps or planned_steps
  warm = min(1.0, (step + 1) / max(1, inner.warmup_steps))
  progress = (step - inner.warmup_steps) / max(1, end - inner.warmup_steps)
  cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
  return inner.learning_rate * warm * (inner.final_share + (1 - inner.final_share) * cosine)


def decayed(axes: Mapping[str, Axes], params: Params) -> dict[str, bool]:
  """Where weight decay applies: matrices, in a stack of layers each layer's, and no biases."""
  stacked = {name: axes.get(name, ())[:1] == ("layers",) for name in params}
  return {
    name: leaf.ndim - stacked[name] > 1 and not name.endswith(("scale", "bias"))
    for name, leaf in params.items()
  }


def optimizer(
  inner: InnerConfig,
  axes: Mapping[str, Axes],
  layouts: Mapping[str, NamedSharding] | None = None,
) -> optax.GradientTransformation:
  """Clipping by the global norm, Adam in f32 or Muon, decoupled weight decay (arXiv 1711.05101).

  Updates are for learning rate 1: the caller adds `rate * update`. With `inner.custom` the
  transform is the user's own. `axes` are the model's logical axes: Muon is for hidden matrices, and
  all other parameters take Adam's steps. `layouts` say how a mesh of several devices cuts the
  parameters. The state's names and shapes do not depend on them.

  Raises:
    ConfigError: the config asks for Muon, and no parameter of the model is a hidden matrix.
  """
  if inner.custom:
    return custom.load_optimizer(inner)
  adam = optax.scale_by_adam(inner.b1, inner.b2, inner.epsilon, mu_dtype=jnp.float32)
  return optax.chain(
    optax.clip_by_global_norm(inner.clip_norm) if inner.clip_norm else optax.identity(),
    *([adam] if inner.optimizer == "adamw" else _muon(inner, axes, layouts)),
    optax.add_decayed_weights(inner.weight_decay, mask=functools.partial(decayed, axes))
    if inner.weight_decay
    else optax.identity(),
    optax.scale(-1.0),
  )


def _muon(
  inner: InnerConfig, axes: Mapping[str, Axes], layouts: Mapping[str, NamedSharding] | None
) -> list[optax.GradientTransformation]:
  """Orthogonalized momentum, with steps as long as Adam's, so that the same learning rates fit."""
  matrices = {name: hidden_matrix(each) for name, each in axes.items()}
  rule = "is for hidden matrices (`hidden_matrix`), and the model's logical_axes() name none"
  fix = "name the axes of stacked layers (ddiloco.Model), or use optax.contrib.muon as inner.custom"
  require(any(matrices.values()), "inner.optimizer", inner.optimizer, rule, fix)
  whole = functools.partial(
    muon,
    learning_rate=-1.0,  # keeps the gradient's sign, as `scale_by_adam` does
    adam_b1=inner.b1,
    adam_b2=inner.b2,
    eps=inner.epsilon,
    consistent_rms=MUON_RMS,
    muon_weight_dimension_numbers=matrices,
  )
  if layouts is None:
    return [whole()]
  # Without iterations, and with the one scaling that belongs to the first of them, Muon gives the
  # momentum alone.
  momentum = whole(ns_steps=0, preconditioning="aol")
  cut = {name: (sides, layouts[name]) for name, sides in matrices.items() if sides}
  return [momentum, optax.stateless(lambda updates, _: _orthogonalized(inner, cut, updates))]


def hidden_matrix(axes: Axes) -> MuonDimensionNumbers | None:
  """Which axes of a parameter are its matrix's inputs and outputs; None: it is no hidden matrix.

  Hidden matrices are parameters of stacked layers that lead from "embed" to other named axes, or
  back. Each layer and each expert has a matrix of its own. A router is no hidden matrix: its
  output axis has no name.

  >>> hidden_matrix(("layers", "heads", "head_dim", "embed"))
  MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=(3,))
  >>> hidden_matrix(("vocab", "embed")), hidden_matrix(("layers", "embed"))
  (None, None)
  """
  own = tuple(i for i, axis in enumerate(axes) if axis not in ("layers", "experts"))
  embed = tuple(i for i in own if axes[i] == "embed")
  others = tuple(i for i in own if axes[i] != "embed")
  if axes[:1] != ("layers",) or len(embed) != 1 or not others or None in axes:
    return None
  inward, outward = (embed, others) if embed < others else (others, embed)
  return MuonDimensionNumbers(inward, outward)


# --- Muon on a mesh
# A Newton-Schulz iteration multiplies whole matrices. Left to the compiler, devices gather parts of
# the matrices of all layers before every product. But layers need nothing of each other: so each
# device gets whole matrices of some layers by an all-to-all, and another one brings back the
# results (layer sharding, essential.ai/blog/infra). No device has more values than before.


def _orthogonalized(
  inner: InnerConfig,
  cut: Mapping[str, tuple[MuonDimensionNumbers, NamedSharding]],
  updates: Params,
) -> Params:
  """`updates`, with the matrices named in `cut` as Muon has them.

  Matrices of one shape that lie alike are spread over the mesh together, so that devices have about
  equally many: 38 layers are too few for 64 devices, their 114 matrices of MLPs are not.
  """
  iterate = scale_by_muon(beta=0.0, eps=inner.epsilon, nesterov=False)  # of the update itself

  def turn(matrix: jax.Array) -> jax.Array:
    turned, _ = iterate.update(matrix, iterate.init(matrix))
    return turned * (MUON_RMS * math.sqrt(max(matrix.shape)))

  alike: dict[Any, dict[str, Dims]] = {}
  for name, (sides, layout) in cut.items():
    shape = updates[name].shape
    # The short side first, as Muon itself has it.
    rows, columns = sorted(sides, key=lambda side: math.prod(shape[i] for i in side))
    dims = tuple(i for i in range(len(shape)) if i not in (*rows, *columns)), rows, columns
    split = cutting_axes(layout, len(shape))
    over = tuple(tuple(itertools.chain(*(split[i] for i in each))) for each in dims)
    size = tuple(math.prod(shape[i] for i in side) for side in (rows, columns))
    alike.setdefault((size, over, layout.mesh), {})[name] = dims
  turned = dict(updates)
  for (_, over, mesh), dims in alike.items():
    specs = {name: cut[name][1].spec for name in dims}
    local = functools.partial(_turn_parts, turn, mesh, over, dims)
    there = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    turned |= there({name: updates[name] for name in dims})
  return turned


def _turn_parts(
  turn: Callable[[jax.Array], jax.Array],
  mesh: Mesh,
  over: tuple[tuple[str, ...], ...],
  dims: Mapping[str, Dims],
  parts: Params,
) -> Params:
  """One device's parts of stacks of matrices -> the same parts of `turn(matrix)`; in `shard_map`.

  `over`: the mesh axes that cut the stack, the rows and the columns of all these arrays.
  """
  _, rows, columns = over
  copied = tuple(name for name in mesh.axis_names if name not in itertools.chain(*over))
  copies = math.prod(mesh.shape[name] for name in copied)
  others = math.prod(mesh.shape[name] for name in (*rows, *columns))
  ordered, stacks = {}, []
  for name, part in parts.items():
    ordered[name] = part.transpose(tuple(itertools.chain(*dims[name])))
    sizes = (math.prod(part.shape[i] for i in each) for each in dims[name])
    stacks.append(ordered[name].reshape(*sizes))
  stack = jnp.concatenate(stacks)
  share = math.ceil(len(stack) / (copies * others)) * others  # of one of several copies
  stack = jnp.pad(stack, ((0, share * copies - len(stack)), (0, 0), (0, 0)))
  stack = jax.lax.dynamic_slice_in_dim(stack, jax.lax.axis_index(copied) * share, share)
  exchanges = [(names, i) for i, names in ((1, rows), (2, columns)) if names]
  for names, i in exchanges:
    stack = jax.lax.all_to_all(stack, names, 0, i, tiled=True)
  stack = jax.lax.map(turn, stack)  # one by one: each takes several times its memory
  for names, i in reversed(exchanges):
    stack = jax.lax.all_to_all(stack, names, i, 0, tiled=True)
  stack = jax.lax.all_gather(stack, copied, tiled=True)
  turned, end = {}, 0
  for name, part in ordered.items():
    start, end = end, end + part.size // math.prod(stack.shape[1:])
    back = np.argsort(tuple(itertools.chain(*dims[name])))
    turned[name] = stack[start:end].reshape(part.shape).transpose(back)
  return turned


# --- The names of an island's state: everything it must remember, as one flat dict of arrays
# "params/<name>" are the parameters, "inner/<path>" the leaves of the inner optimizer's state.
# Adam's are "inner/1/mu/<name>", "inner/1/nu/<name>" and "inner/1/count"; an optimizer may have any
# others, or one array alone, "inner".

PARAMS = "params/"


class StateLayout:
  """The arrays of the state, and the layout of each.

  Attributes:
    leaves: name -> shape, dtype and sharding, in a fixed order.
    shardings: name -> the sharding alone.
    moments: prefixes of the optimizer's subtrees that are shaped like the parameters, in order:
      prefix + parameter name is a name of the state.
    counts: names of the optimizer's integer scalars, how many updates it has seen, but for those
      beside arrays none of which are in `moments`.
  """

  def __init__(
    self,
    transform: optax.GradientTransformation,
    params: Mapping[str, jax.ShapeDtypeStruct],
    replicated: NamedSharding,
  ):
    """`params` have shardings; optimizer arrays that are shaped like no parameter: `replicated`."""
    opt_state = jax.eval_shape(transform.init, dict(params))
    trees = {"params": dict(params), "inner": opt_state}
    found, self._structure = jax.tree_util.tree_flatten_with_path(trees)
    self.leaves: dict[str, jax.ShapeDtypeStruct] = {}
    for path, leaf in found:
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      like = params.get(getattr(path[-1], "key", ""), leaf)
      alike = like.sharding is not None and like.shape == leaf.shape
      sharding = like.sharding if alike else replicated
      self.leaves[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    leaves, first = self.leaves.items(), "/" + next(iter(params))
    self.shardings = {name: leaf.sharding for name, leaf in leaves}
    prefixes = [name.removesuffix(first) + "/" for name in self.leaves if name.endswith(first)]
    whole = {p for p in prefixes if all(self.leaves.get(p + n) == x for n, x in params.items())}
    self.moments = tuple(prefix for prefix in prefixes if prefix in whole - {PARAMS})
    integers = {name for name, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.integer)}
    counts = [name for name, leaf in leaves if name in integers and not leaf.shape]
    self.counts = tuple(name for name in counts if self._goes_with_moments(name, counts))

  def _goes_with_moments(self, count: str, counts: Sequence[str]) -> bool:
    """Whether moments beside this count are passed on with it, or nothing is beside it: it corrects
    these moments, so a learner that has none of them begins with its own count."""
    beside = [n for n in self.leaves if n.startswith(count.rpartition("/")[0] + "/")]
    rest = [name for name in beside if name not in counts]
    return not rest or any(name.startswith(self.moments) for name in rest)

  def flat(self, params: Any, opt_state: Any) -> dict[str, jax.Array]:
    """The two trees as one flat dict."""
    trees = {"params": params, "inner": opt_state}
    return dict(zip(self.leaves, jax.tree.leaves(trees)))

  def trees(self, state: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
    """(parameters, optimizer state); the inverse of `flat`."""
    trees = jax.tree.unflatten(self._structure, [state[name] for name in self.leaves])
    return trees["params"], trees["inner"]

  def check(self, arrays: Mapping[str, jax.Array | np.ndarray]) -> None:
    """Refuses arrays that are not exactly this state's.

    Raises:
      ValueError: names, shapes or dtypes differ; the text says which.
    """
    both = ({n: f"{x.dtype} {x.shape}" for n, x in t.items()} for t in (arrays, self.leaves))
    if odd := differences(*both):
      fix = "restore into the model and optimizer that were saved"
      raise ValueError(f"state: {odd}. Fix: {fix}.")

  def fits(self, name: str, array: jax.Array | np.ndarray) -> bool:
    """Whether the state has an array of this name, shape and dtype."""
    leaf = self.leaves.get(name)
    return leaf is not None and (leaf.shape, leaf.dtype) == (array.shape, array.dtype)


# --- The step on one mesh


class IslandStep:
  """The arrays of an island, their layouts, and the programs.

  Attributes:
    mesh: with axes data, fsdp and tensor.
    execution: how the mesh computes the model.
    leaves: name -> every parameter's shape, dtype and sharding.
    frozen: the same of the model's frozen arrays.
    layout: the whole state, of which the parameters are a part.
    inputs: the batch.
    replicated: the layout of scalars.
    on_cpu: whether the devices are CPUs.
    host_memory: see `devices.host_memory`.
    transform: the inner optimizer.
  """

  def __init__(self, config: Config, learner: int, mesh: Mesh):
    """For the island that `config.islands.island(learner)` describes.

    Raises:
      ConfigError: the batch cannot be split evenly over the mesh, or the mesh's platform does not
        run the configured path of attention.
    """
    island, steps = config.islands.island(learner), config.inner.accumulation_steps
    island.require_even_batch(mesh.size, steps, learner)
    self.mesh, self._micro_batch = mesh, island.batch_size // steps if steps > 1 else None
    self.replicated = NamedSharding(mesh, PartitionSpec())
    self.on_cpu = mesh.devices.flat[0].platform == "cpu"
    self.host_memory = host_memory(mesh.devices.flat[0])
    self.execution = make_execution(mesh, island, config.model)
    self._model = custom.load_model(config.model)
    axes, shapes = self._model.logical_axes(), self._model.shapes()
    self.leaves = {name: self._placed(leaf, axes[name]) for name, leaf in shapes.items()}
    layouts = {name: leaf.sharding for name, leaf in self.leaves.items()}
    self.transform = optimizer(
      config.inner,
      {name: axes[name] for name in shapes},
      layouts if mesh.size > 1 else None,
    )
    self.frozen = {
      name: self._placed(leaf, axes.get(name))
      for name, leaf in custom.frozen_shapes(config.model).items()
    }
    self.layout = StateLayout(self.transform, self.leaves, self.replicated)
    self.inputs = jax.tree.map(
      lambda leaf: self._placed(leaf, ("batch", *[None] * (len(leaf.shape) - 1))),
      self._model.inputs(island.batch_size, config.data.sequence_length),
    )

  def place_frozen(self) -> dict[str, jax.Array]:
    """The model's frozen arrays on the mesh; every process places the parts of its devices."""
    values = frozen(self._model) if self.frozen else {}
    return {
      name: jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index, value=values[name]: np.asarray(value)[index]
      )
      for name, leaf in self.frozen.items()
    }

  def _placed(self, leaf: jax.ShapeDtypeStruct, axes: Axes | None) -> jax.ShapeDtypeStruct:
    sharding = param_sharding(axes, leaf.shape, self.mesh)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  def lower(self) -> jax.stages.Lowered:
    """Lowers the step: (state, batch, learning rate, frozen) -> (state, metrics), in place.

    Metrics are one array of f32, in the order of `METRICS`: "loss" (of the model: nats per token,
    ...), "load_balance" (0 where the model reports none), "grad_norm" (before clipping) and
    "learning_rate". The gradient is the mean over `inner.accumulation_steps` micro-batches, which
    for a dense model is the gradient of the full batch (a mixture's load-balance loss is taken per
    micro-batch).
    """
    layout, replicated = self.layout, self.replicated

    def step(state: dict[str, jax.Array], batch: Batch, rate: jax.Array, still: Params):
      def loss(params: Params, batch: Batch):
        return self._model.loss({**params, **still}, batch, self.execution)

      def value_and_grad(params: Params, batch: Batch):
        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return grads, metrics

      # Every n-th example forms a micro-batch, so that each device keeps the rows it already has.
      accumulated = microbatch(value_and_grad, 1, self._micro_batch, AccumulationType.MEAN)
      params, opt_state = layout.trees(state)
      grads, metrics = accumulated(params, batch)
      updates, opt_state = self.transform.update(grads, opt_state, params)
      params = {name: value + rate * updates[name] for name, value in params.items()}
      metrics = {"load_balance": jnp.zeros(()), **metrics}
      metrics |= {"grad_norm": optax.tree.norm(grads), "learning_rate": rate}
      # One small array instead of several: one copy to the host per step.
      small = jnp.stack([metrics[name] for name in METRICS])
      return layout.flat(params, opt_state), small

    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
    jitted = jax.jit(
      step,
      out_shardings=(layout.shardings, replicated),
      donate_argnums=0,
      compiler_options=overlap_options(self.mesh),
    )
    return jitted.lower(layout.leaves, self.inputs, rate, self.frozen)

  def lower_copy(self, memory: str | None = None) -> jax.stages.Lowered:
    """Lowers state -> a private copy, on the devices or in this kind of host memory."""

    def copy(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
      return {name: jnp.copy(leaf) for name, leaf in state.items()}

    there = self.layout.shardings
    if memory is not None:
      there = {name: each.with_memory_kind(memory) for name, each in there.items()}
    return jax.jit(copy, out_shardings=there).lower(self.layout.leaves)
