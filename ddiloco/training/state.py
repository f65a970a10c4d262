"""The names of an island's state: everything it must remember, as one flat dict of arrays.

"params/<name>" are the parameters, "inner/<path>" the leaves of the inner optimizer's state, of
which nothing else is assumed: Adam's are "inner/1/mu/<name>", "inner/1/nu/<name>" and
"inner/1/count".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from ddiloco.training.programs import placed

PARAMS = "params/"


class StateLayout:
  """Which arrays the state consists of, and where each of them lies.

  Attributes:
    leaves: name -> shape, dtype and sharding, in a fixed order.
    moments: prefixes of the optimizer's subtrees that are shaped like the parameters, in order:
      prefix + parameter name is a name of the state.
    counts: names of the optimizer's integer scalars: how many updates it has seen.
  """

  def __init__(
    self,
    transform: optax.GradientTransformation,
    params: Mapping[str, jax.ShapeDtypeStruct],
    replicated: NamedSharding,
  ):
    """`params` have shardings; what of the optimizer lies like none of them is `replicated`."""
    opt_state = jax.eval_shape(transform.init, dict(params))
    trees = {"params": dict(params), "inner": opt_state}
    found, self._structure = jax.tree_util.tree_flatten_with_path(trees)
    self.leaves: dict[str, jax.ShapeDtypeStruct] = {}
    for path, leaf in found:
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      like = params.get(getattr(path[-1], "key", ""), leaf)
      alike = like.sharding is not None and like.shape == leaf.shape
      self.leaves[name] = placed(leaf, like.sharding if alike else replicated)
    if len(self.leaves) != len(found):
      raise ValueError(f"two leaves of the optimizer's state have one name: {sorted(self.leaves)}")
    inner = {name: leaf for name, leaf in self.leaves.items() if name.startswith("inner/")}
    first = "/" + next(iter(params))
    prefixes = [name.removesuffix(first) + "/" for name in inner if name.endswith(first)]
    self.moments = tuple(
      prefix
      for prefix in prefixes
      if all(self.leaves.get(prefix + name) == leaf for name, leaf in params.items())
    )
    self.counts = tuple(
      name
      for name, leaf in inner.items()
      if not leaf.shape and jnp.issubdtype(leaf.dtype, jnp.integer)
    )

  @property
  def shardings(self) -> dict[str, NamedSharding]:
    """Where each array lies."""
    return {name: leaf.sharding for name, leaf in self.leaves.items()}

  def flat(self, params: Any, opt_state: Any) -> dict[str, jax.Array]:
    """The two trees as one flat dict."""
    trees = {"params": params, "inner": opt_state}
    return dict(zip(self.leaves, jax.tree.leaves(trees)))

  def trees(self, state: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
    """(parameters, optimizer state): `flat`'s inverse."""
    trees = jax.tree.unflatten(self._structure, [state[name] for name in self.leaves])
    return trees["params"], trees["inner"]

  def check(self, arrays: Mapping[str, jax.Array | np.ndarray]) -> None:
    """Refuses arrays that are not exactly this state's.

    Raises:
      ValueError: names, shapes or dtypes differ; it says which.
    """
    odd = sorted(arrays.keys() ^ self.leaves.keys())
    if odd:
      raise ValueError(
        f"state: names that only one side has: {odd[:8]} ({len(odd)} in all). Fix: restore into"
        " the model and optimizer that were saved."
      )
    for name, leaf in self.leaves.items():
      array = arrays[name]
      if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
        raise ValueError(
          f"state: {name} has shape {array.shape} and dtype {array.dtype}, this island's is"
          f" {leaf.shape} and {leaf.dtype}. Fix: restore into the model and optimizer that were"
          " saved."
        )
