"""The model's shapes, the plan that partitions it, and initial values: the same on every role.

Initial values are a pure function of the config's seed, or are read from `run.init_from`. Each
shard makes those of its fragments. Learners make the values of large fragments themselves; shards
send the small ones, and all that a learner's machine cannot make with the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ddiloco import custom
from ddiloco.checkpoint import weights
from ddiloco.config import Config, ConfigError, ModelConfig
from ddiloco.core import fragments
from ddiloco.observe.guards import warn

SOURCES = "sources"  # name in the metadata of a run's result: `sources`, as JSON


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
    ConfigError: the model cannot be partitioned so, or a custom model or optimizer does not fit.
  """
  custom.check(config)
  return fragments.make_plan(tensor_specs(config.model), config.sync)


def contract(config: Config, plan: fragments.Plan) -> str:
  """A short digest of all settings that the roles of a run must share.

  It is part of every greeting, so that a role with another model or protocol is refused.
  Settings that may differ between roles (islands, network, faults) are not in it.
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
  # Custom functions count by identity, not by the path where a machine has them.
  agreed |= sources(config)
  agreed["data.options"] = dict(config.data.options)
  for name in ("ModelConfig", "InnerConfig"):
    del agreed[name]["custom"]
  del agreed["SyncConfig"]["value_threads"]  # of one machine
  text = json.dumps(agreed, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def sources(config: Config) -> dict[str, list[str]]:
  """The identity of each custom part, by its field."""
  return {f"{name}.custom": custom.identity(getattr(config, name)) for name in custom.SECTIONS}


def said_of_result(config: Config, merged_tokens: int) -> dict[str, str]:
  """The metadata of a run's result: tokens that it has seen, sources of its custom parts."""
  said = {weights.MERGED_TOKENS: str(merged_tokens)}
  with contextlib.suppress(ConfigError, OSError):  # a source is gone: the result is saved without
    said[SOURCES] = json.dumps(sources(config))
  return said


def warn_of_changes(config: Config, result: Path) -> None:
  """Warns of each custom part whose source is another one than that of the run with this result."""
  then = json.loads(weights.metadata(result).get(SOURCES, "{}"))
  warn_of_other(config, then, f"that made {result}")


def warn_of_other(config: Config, sources: Mapping[str, Any], which: str) -> None:
  """Warns of each custom part whose source is another one than in `sources`, the ones `which`."""
  for name in custom.SECTIONS:
    field, part = f"{name}.custom", getattr(config, name)
    with contextlib.suppress(ConfigError, OSError):  # it is not here: who needs it is refused
      if field in sources and custom.identity(part) != sources[field]:
        text = f"{field} = {part.custom!r}: its source is not the one {which}"
        warn(f"{text}. Fix: bring that back, or name a copy of it (--config, --config.{field}).")


def checked_start(config: Config) -> Config:
  """Refuses a `run.init_from` that is missing or does not fit, before a device is used.

  Reads only the file's header: whether all values are finite is checked when they are loaded.

  Returns:
    The config with all its paths absolute, for processes in other directories.

  Raises:
    ConfigError: names what is wrong.
  """
  if config.run.init_from:
    weights.check(config.run.init_from, shapes(config.model), "run.init_from")
  return absolute_start(config)


def absolute_start(config: Config) -> Config:
  """The config with absolute paths of custom files, `run.init_from` and `checkpoint.path`."""
  config = custom.absolute(config)
  for section, name in (("run", "init_from"), ("checkpoint", "path")):
    values = getattr(config, section)
    if path := getattr(values, name):
      there = str(weights.absolute(path, f"{section}.{name}"))
      values = dataclasses.replace(values, **{name: there})
      config = dataclasses.replace(config, **{section: values})
  return config


def initial_params(config: Config) -> dict[str, np.ndarray]:
  """All initial parameters on the host, f32.

  Raises:
    ConfigError: `run.init_from` cannot be read, does not fit or is not finite.
  """
  return dict(_parameters(config, shapes(config.model)))


def initial_values(
  config: Config, plan: fragments.Plan, wanted: Collection[int] | None = None
) -> dict[int, np.ndarray]:
  """Flat initial values of these fragments, or of all, f32 [size]; needs memory for a few more
  parameters.

  Raises:
    ConfigError: as `initial_params`.
  """
  wanted = range(len(plan.fragments)) if wanted is None else wanted
  parts = plan.parts_by_name(wanted)
  flats = {p: np.empty(plan.fragments[p].size, np.float32) for p in wanted}
  for name, value in _parameters(config, parts):
    for part, piece in parts[name]:
      here = flats[part.index][piece.offset : piece.offset + piece.size]
      fragments.gather(part, {name: value}, out=here)
  return flats


GROUP_BYTES = 1 << 30  # of the parameters that one program draws
# Values that one program draws; from so many on it is optimized: a value takes 15 instead of 94 ns.
OPTIMIZED_FROM = 1 << 22


def _parameters(config: Config, wanted: Container[str]) -> Iterator[tuple[str, np.ndarray]]:
  """The initial value of each parameter that is `wanted`, in model order."""
  all_shapes = shapes(config.model)
  if config.run.init_from:
    yield from weights.start(config.run.init_from, all_shapes, "run.init_from", wanted)
    return
  # The groups do not depend on `wanted`: another program might round differently.
  for names in weights.groups(all_shapes, GROUP_BYTES):
    if not any(name in wanted for name in names):
      continue
    optimized = sum(math.prod(all_shapes[name]) for name in names) >= OPTIMIZED_FROM
    program = _program(custom.load_model(config.model).init, tuple(names), optimized)
    drawn = program(np.uint32(config.seed))
    for i, name in enumerate(names):
      if name in wanted:
        yield name, np.asarray(drawn[i])
      drawn[i] = None


@functools.lru_cache(maxsize=16)
def _program(
  init: Callable[..., Any], names: tuple[str, ...], optimized: bool
) -> jax.stages.Compiled:
  """Draws these parameters from a seed, on the CPU; `init` is a model's."""

  def draw(seed: jax.Array) -> list[jax.Array]:
    params = init(jax.random.key(seed))
    return [params[name] for name in names]

  traced = jax.jit(draw).trace(np.uint32(0))  # the model as `shapes` has traced it
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    lowered = traced.lower()
  # The program runs once. To optimize it takes 0.3 s, and further levels gain nothing.
  return lowered.compile(compiler_options={"xla_backend_optimization_level": int(optimized)})


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Shape of every parameter by name, in model order."""
  return {name: tuple(leaf.shape) for name, leaf in custom.load_model(model).shapes().items()}


class Assembled(Mapping[str, np.ndarray]):
  """The parameters [name -> array], assembled from the fragments' flat values.

  Each look-up assembles a new array, which is the caller's: a caller that takes them one after the
  other never has a second model in memory.
  """

  def __init__(self, plan: fragments.Plan, config: Config, values: Mapping[int, np.ndarray]):
    self.values_of = dict(values)
    self._shapes = shapes(config.model)
    self._parts = plan.parts_by_name(range(len(plan.fragments)))

  def __getitem__(self, name: str) -> np.ndarray:
    leaf = {name: np.empty(self._shapes[name], np.float32)}
    for part, piece in self._parts[name]:
      flat = self.values_of[part.index][piece.offset : piece.offset + piece.size]
      fragments.scatter(part, flat, leaf)
    return leaf[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._shapes)

  def __len__(self) -> int:
    return len(self._shapes)
