"""What islands train, and how devices compute it: `Model`, `Execution`, and NNX modules as models.

A model is a set of pure functions over a flat dict of named f32 arrays. The transformer of this
package is one model; `model.custom` names any other (`ddiloco/custom.py`). `examples/own_model.py`
is a complete example.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_policies as policies
from jax.sharding import NamedSharding

from ddiloco.checks import differences

Params = Mapping[str, jax.Array]
Batch = Any  # a tree (an array, a dict, ...) of arrays whose first axis counts examples
Axes = tuple[str | None, ...]
Layout = Callable[[Axes, tuple[int, ...]], NamedSharding]


# --- The model


@runtime_checkable
class Model(Protocol):
  """What an island, the shards and the evaluator need of a model. All functions are pure.

  A model that also has `logits(params, tokens_BxT) -> (B, T, V)` makes text (`ddiloco generate`).
  A model with `flops_per_token(sequence_length) -> float`, forward and backward, is shown with its
  MFU where the chips' peak is known.

  A model with `frozen() -> {name: array}` has arrays that are never trained, exchanged or saved,
  such as the weights under an adapter: `loss`, `evaluate` and `logits` find them among `params`. It
  must give the same ones in every process: like data, they are not compared. They are of any dtype,
  best mapped from a file, since every role asks for their shapes; `logical_axes` may name them too.
  """

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype (f32) of every parameter by its flat name, in a fixed order."""

  def logical_axes(self) -> dict[str, Axes]:
    """A name or None for every axis of every parameter; names say where the mesh may split it.

    Meshes know "embed", "vocab", "heads", "kv_heads", "mlp" and "experts"
    (`training.devices.RULES`). A parameter whose first axis is "layers" is a stack, one layer a
    row, whose layers are exchanged one by one; a parameter with an axis "vocab" is an embedding.
    """

  def init(self, key: jax.Array) -> dict[str, jax.Array]:
    """Fresh parameters, a pure function of `key`; traced by jit."""

  def inputs(self, batch_size: int, sequence_length: int) -> Batch:
    """A `jax.ShapeDtypeStruct` for every array of a batch; the first axis is `batch_size`."""

  def loss(
    self, params: Params, batch: Batch, execution: Execution | None = None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(What is minimised, {"loss": what is reported}): f32 scalars, means over the batch.

    A mixture of experts also reports "load_balance". `execution(array, axes)` may pin where an
    activation lies, by the names of its axes (the first axis is "batch"). `execution` also says
    what the config wants recomputed (`Execution`); None is one device, and everything stored.
    """

  def evaluate(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    """f32 scalars, means over a held-out batch: "loss", and whatever else is worth knowing."""


class NnxModel:
  """The half of `Model` that any NNX module has: `shapes`, `logical_axes` and `init`.

  A subclass adds `inputs`, `loss` and `evaluate`, which work on `self.module(params)`:

    class Regression(NnxModel):
      def __init__(self):
        super().__init__(lambda rngs: nnx.Linear(3, 1, rngs=rngs))

      def inputs(self, batch_size, sequence_length):
        f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        return {"x": f32(batch_size, 3), "y": f32(batch_size, 1)}

      def loss(self, params, batch, execution=None):
        loss = jnp.mean((self.module(params)(batch["x"]) - batch["y"]) ** 2)
        return loss, {"loss": loss}

      def evaluate(self, params, batch):
        return self.loss(params, batch)[1]

  Names are the paths of the module's variables, such as "conv/kernel". Logical axes are NNX
  sharding metadata (`nnx.Param(value, out_sharding=axes)`, `nnx.with_partitioning(init, axes)`);
  without metadata, every device of the island has the whole parameter. Dropout needs a key: in a
  loss `self.module(params, batch_key(batch))`.

  Args:
    build: makes the module from `nnx.Rngs`.
    trained: an NNX filter of the variables that are trained, such as `nnx.LoRAParam`. All others,
      and arrays that are no variables, are `frozen`. A run never changes batch statistics: let loss
      and evaluation normalise by the batch, and pass data through `module(run.params())` before its
      first `eval()`. None: all must be `nnx.Param`, but for the keys and counts of random numbers.
  """

  def __init__(self, build: Callable[[nnx.Rngs], nnx.Module], trained: Any = None):
    def make(key: jax.Array) -> tuple[nnx.GraphDef, nnx.State]:
      with nnx.use_eager_sharding(False):  # axes are names, which no mesh has yet
        module = build(nnx.Rngs(key))
      # An array that is an attribute is data to flax, but not while it is traced (flax 0.12).
      for _, each in nnx.iter_modules(module):
        for name in [name for name, value in vars(each).items() if isinstance(value, jax.Array)]:
          setattr(each, name, nnx.data(getattr(each, name)))
      return nnx.split(module)

    self._made = jax.jit(make, inline=True)  # traced once, for shapes and for values
    self._trained = trained

  @functools.cached_property
  def _abstract(self) -> tuple[nnx.GraphDef, dict[str, tuple[Any, nnx.Variable]]]:
    """(The module's structure, flat name -> (path, variable without a value))."""
    graph, state = jax.eval_shape(self._made, jax.eval_shape(lambda: jax.random.key(0)))
    return graph, {"/".join(map(str, path)): (path, x) for path, x in nnx.to_flat_state(state)}

  @functools.cached_property
  def _variables(self) -> tuple[dict[str, nnx.Variable], dict[str, nnx.Variable]]:
    """The trained and the frozen variables, by name, without values."""
    is_trained = nnx.filterlib.to_predicate(nnx.Param if self._trained is None else self._trained)
    trained, frozen = dict[str, nnx.Variable](), dict[str, nnx.Variable]()
    for name, (path, leaf) in self._abstract[1].items():
      if not isinstance(leaf, nnx.RngState):
        (trained if is_trained(path, leaf) else frozen)[name] = leaf
    if frozen and self._trained is None:
      raise ValueError(
        f"the module's {sorted(frozen)[:4]} ({len(frozen)} in all) are no nnx.Param: a merged model"
        " has parameters alone. Fix: normalise by LayerNorm or GroupNorm, or keep them as they are:"
        " NnxModel(build, trained=nnx.Param)."
      )
    return trained, frozen

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter, without making any."""
    leaves = self._variables[0].items()
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves}

  def logical_axes(self) -> dict[str, Axes]:
    """Logical axis names of every variable, one a dimension; stacks begin with "layers"."""
    trained, frozen = self._variables
    return {
      name: tuple(getattr(leaf, "out_sharding", None) or (None,) * len(leaf.shape))
      for name, leaf in (trained | frozen).items()
    }

  def init(self, key: jax.Array) -> dict[str, jax.Array]:
    """Fresh parameters, a pure function of `key`; under jit, XLA drops the unused ones."""
    return self._values(key, self._variables[0])

  def frozen(self) -> Mapping[str, Any]:
    """Values of the variables that are not trained: those that `build` makes of key 0.

    A subclass may read them from a file.
    """
    frozen = self._variables[1]
    return jax.jit(lambda: self._values(jax.random.key(0), frozen))() if frozen else {}

  def _values(self, key: jax.Array, wanted: Container[str]) -> dict[str, jax.Array]:
    made = (
      ("/".join(map(str, path)), leaf) for path, leaf in nnx.to_flat_state(self._made(key)[1])
    )
    return {name: leaf[...] for name, leaf in made if name in wanted}

  def module(self, params: Params, key: jax.Array | None = None) -> Any:
    """The NNX module that holds these parameters.

    Args:
      params: by name; frozen ones that it lacks are those of `frozen`.
      key: its random numbers follow from this. None: it drops nothing out (`deterministic`).

    Raises:
      ValueError: a name is missing or unknown, or a shape is not the model's.
    """
    (graph, variables), (trained, frozen) = self._abstract, self._variables
    if not frozen.keys() <= params.keys():
      params = {**self.frozen(), **params}
    wanted = {name: tuple(leaf.shape) for name, leaf in (trained | frozen).items()}
    given = {name: tuple(value.shape) for name, value in params.items()}
    if odd := differences(given, wanted):
      fix = "use the model config these parameters were trained with"
      raise ValueError(f"params: {odd}. Fix: {fix}.")
    random = jax.random.key(0) if key is None else key
    flat = {}
    for number, (name, (path, leaf)) in enumerate(variables.items()):
      if name in params:
        value = params[name]
      elif isinstance(leaf, nnx.RngKey):
        value = jax.random.split(jax.random.fold_in(random, number), leaf.shape)
      else:
        value = jnp.zeros(leaf.shape, leaf.dtype)  # a count of numbers drawn
      flat[path] = leaf.replace(value) if isinstance(leaf, nnx.Variable) else value
    module = nnx.merge(graph, nnx.from_flat_state(flat))
    module.set_attributes(deterministic=key is None, raise_if_not_found=False)
    return module


def frozen(model: Model) -> Mapping[str, Any]:
  """The arrays of a model that are never trained; most models have none."""
  return getattr(model, "frozen", dict)()


def batch_key(batch: Batch) -> jax.Array:
  """A key that follows from the values of a batch: for dropout, noise and whatever a loss draws.

  So a step is a function of parameters and batch alone, and a replay draws the same numbers, on any
  mesh. Each micro-batch has a key of its own.

  >>> one, other = (jax.random.key_data(batch_key(np.array(x))) for x in ([1, 2], [2, 1]))
  >>> bool(jnp.all(one == other))
  False
  """
  key = jax.random.key(0)
  for leaf in map(jnp.asarray, jax.tree.leaves(batch)):
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      leaf = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    places = jnp.arange(leaf.size, dtype=jnp.uint32).reshape(leaf.shape)
    mixed = leaf.astype(jnp.uint32) + places * np.uint32(0x9E3779B9)
    for shift in (16, 13):  # every bit of a value counts in others
      mixed = (mixed ^ (mixed >> shift)) * np.uint32(0x85EBCA6B)
    # Integers wrap around: the sum is the same however a mesh cuts the batch.
    key = jax.random.fold_in(key, jnp.sum(mixed))
  return key


# --- How the devices of one island compute a model: where arrays lie, which kernels, what is stored
# The execution changes a step's speed and memory, not its result. Islands of one run may differ
# in it.

ATTENTION_OUTPUT = "attention"  # remat's name for attention's output and its softmax's norm

# What a layer keeps for its backward pass, from the least memory to the most; the rest is computed
# again. With "full" a layer keeps its input alone.
REMAT: dict[str, Callable[..., Any] | None] = {
  "full": policies.nothing_saveable,
  "attention": policies.save_only_these_names(ATTENTION_OUTPUT),
  "products": policies.save_from_both_policies(
    policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(ATTENTION_OUTPUT)
  ),
  "none": None,
}


@dataclasses.dataclass(frozen=True)
class Execution:
  """How devices compute a model; `execution(array, axes)` is the array, pinned to its layout.

  Attributes:
    layout: where an array with these logical axes and this shape lies; None on one device.
    attention: the path of `models.layers.attend`: einsum, splash or cudnn.
    remat: what a layer keeps for its backward pass: a name in `REMAT`.
    loss_chunks: parts of the vocabulary; the logits of one part exist at a time. 1: all logits.
  """

  layout: Layout | None = None
  attention: str = "einsum"
  remat: str = "none"
  loss_chunks: int = 1

  def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
    if self.layout is None:
      return x
    return jax.lax.with_sharding_constraint(x, self.layout(axes, x.shape))

  def gathered(self, weight: jax.Array, axes: Axes) -> jax.Array:
    """The weight with its "embed" axis whole on every device; its gradient is cut again.

    A step calls this for one layer's weights at a time. So the compiler can neither gather several
    layers at once nor move activations instead of weights.
    """
    if self.layout is None:
      return weight
    whole = tuple(None if axis == "embed" else axis for axis in axes)
    there, here = self.layout(whole, weight.shape), self.layout(axes, weight.shape)
    return weight if there.spec == here.spec else _move(there, here, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(there: NamedSharding, back: NamedSharding, x: jax.Array) -> jax.Array:
  """`x` with the layout `there`; its gradient gets the layout `back`, by one reduce-scatter."""
  del back
  return jax.lax.with_sharding_constraint(x, there)


_move.defvjp(
  lambda there, back, x: (_move(there, back, x), None),
  lambda there, back, nothing, grad: (jax.lax.with_sharding_constraint(grad, back),),
)

PLAIN = Execution()  # one device, the reference path, everything stored
