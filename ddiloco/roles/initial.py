"""The model's shapes, the plan that partitions it, and initial values: the same on every role.

Initial values are a pure function of the config's seed, or those that `run.init_from` names; either
way only shards need them, since no role ever hands weights to another except the shards that own
them. All roles must agree on what they start from, as on the seed.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ddiloco import custom
from ddiloco.checkpoint import weights
from ddiloco.config import Config, ConfigError, ModelConfig
from ddiloco.core import fragments
from ddiloco.models import arithmetic


def tensor_specs(model: ModelConfig) -> list[fragments.TensorSpec]:
  """One spec per parameter leaf, in model order."""
  axes = custom.load_model(model).logical_axes()
  return [
    fragments.TensorSpec(
      name=name,
      shape=shape,
      stacked=axes[name][:1] == ("layers",),
      embedding="vocab" in axes[name],
    )
    for name, shape in shapes(model).items()
  ]


def make_plan(config: Config) -> fragments.Plan:
  """How this run's model is partitioned into fragments.

  Raises:
    ConfigError: it cannot be partitioned so, or a custom model or optimizer does not fit.
  """
  custom.check(config)
  return fragments.make_plan(tensor_specs(config.model), config.sync)


def contract(config: Config, plan: fragments.Plan) -> str:
  """A short digest of all that every role of a run must agree on.

  Transports send it with every frame, so that a role with another model or protocol is refused.
  What each role may have its own way (islands, network, faults) is not in it.
  """
  agreed: dict[str, Any] = {
    "plan": plan.plan_id,
    "seed": config.seed,
    "total_tokens": config.run.total_tokens,
    "init_from": config.run.init_from,
    "sequence_length": config.data.sequence_length,
    "tokenizer": config.data.tokenizer,
  }
  for section in (config.model, config.inner, config.sync, config.outer):
    agreed[type(section).__name__] = dataclasses.asdict(section)
  # The same functions, whatever path a machine has them at.
  agreed |= {f"{name}.custom": custom.identity(getattr(config, name)) for name in custom.SECTIONS}
  agreed["data.options"] = dict(config.data.options)
  for name in ("ModelConfig", "InnerConfig"):
    del agreed[name]["custom"]
  del agreed["SyncConfig"]["value_threads"]  # of one machine
  text = json.dumps(agreed, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def checked_start(config: Config) -> Config:
  """Refuses a `run.init_from` that is missing or does not fit, before a device is touched.

  Reads its header only: whether all values are finite is seen when they are loaded.

  Returns:
    The config with all its paths absolute, for processes that live elsewhere.

  Raises:
    ConfigError: names what is odd.
  """
  if config.run.init_from:
    weights.check(config.run.init_from, shapes(config.model), "run.init_from")
  return absolute_start(config)


def absolute_start(config: Config) -> Config:
  """The config with `run.init_from` and custom files as processes elsewhere would name them."""
  config = custom.absolute(config)
  if not config.run.init_from:
    return config
  start = str(weights.absolute(config.run.init_from))
  return dataclasses.replace(config, run=dataclasses.replace(config.run, init_from=start))


def initial_params(config: Config) -> dict[str, np.ndarray]:
  """All initial parameters on the host, f32.

  Raises:
    ConfigError: `run.init_from` cannot be read, does not fit or is not finite.
  """
  if config.run.init_from:
    return weights.start(config.run.init_from, shapes(config.model), "run.init_from")
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    key = jax.random.key(config.seed)
    lowered = jax.jit(custom.load_model(config.model).init).lower(key)
    # Runs once: optimizing the random bits of every leaf takes longer than drawing them.
    init = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    made = init(key)
    return {name: np.asarray(made[name]) for name in shapes(config.model)}


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Shape of every parameter by name, in model order."""
  return {name: tuple(leaf.shape) for name, leaf in custom.load_model(model).shapes().items()}


class Assembled(Mapping[str, np.ndarray]):
  """The parameters [name -> array] of every fragment's flat value.

  A parameter is put together when it is asked for, and is the caller's: who takes one after the
  other never has a second model in memory.
  """

  def __init__(self, plan: fragments.Plan, config: Config, values: Mapping[int, np.ndarray]):
    self.values_of = dict(values)
    self._shapes = shapes(config.model)
    self._pieces = collections.defaultdict[str, list[tuple[int, fragments.Piece]]](list)
    for fragment in plan.fragments:
      for piece in fragment.pieces:
        self._pieces[piece.name].append((fragment.index, piece))

  def __getitem__(self, name: str) -> np.ndarray:
    leaf = {name: np.empty(self._shapes[name], np.float32)}
    for p, piece in self._pieces[name]:
      flat = self.values_of[p][piece.offset : piece.offset + piece.size]
      alone = fragments.Fragment(p, (dataclasses.replace(piece, offset=0),))
      fragments.scatter(alone, flat, leaf)
    return leaf[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._shapes)

  def __len__(self) -> int:
    return len(self._shapes)


# --- What `ddiloco plan` needs to know of a config's model, without touching a device


def fragment_sizes(config: Config) -> tuple[int, ...]:
  """Values in every fragment of the run's real plan.

  Raises:
    ConfigError: the model cannot be partitioned so.
  """
  return make_plan(config).sizes


def step_flops(config: Config) -> float:
  """FLOPs of one inner step of the first island.

  Raises:
    ConfigError: nothing is known of the user's own model.
  """
  if config.model.custom:
    raise ConfigError(
      f"model.custom = {config.model.custom!r}: the FLOPs of its step are not known."
      " Fix: give --step_seconds, what a step takes, instead of --chips."
    )
  per_token = arithmetic.flops_per_token(config.model, config.data.sequence_length)
  return per_token * config.tokens_per_step(0)
