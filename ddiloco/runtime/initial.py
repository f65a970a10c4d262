"""The model's shapes, the plan that cuts it, and initial values: the same on every role.

Initial values are a pure function of the config's seed, so no role ever hands weights to another
except the shards that own them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import jax
import numpy as np

from ddiloco.config import Config, ModelConfig
from ddiloco.core import fragments
from ddiloco.models import transformer


def tensor_specs(model: ModelConfig) -> list[fragments.TensorSpec]:
  """One spec per parameter leaf, in model order."""
  axes = transformer.logical_axes(model)
  return [
    fragments.TensorSpec(
      name=name,
      shape=tuple(leaf.shape),
      stacked=axes[name][:1] == ("layers",),
      embedding="vocab" in axes[name],
    )
    for name, leaf in transformer.shapes(model).items()
  ]


def make_plan(config: Config) -> fragments.Plan:
  """How this run's model is cut into fragments."""
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
    "sequence_length": config.data.sequence_length,
    "tokenizer": config.data.tokenizer,
  }
  for section in (config.model, config.inner, config.sync, config.outer):
    agreed[type(section).__name__] = dataclasses.asdict(section)
  text = json.dumps(agreed, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def initial_params(config: Config) -> dict[str, np.ndarray]:
  """All initial parameters on the host, f32."""
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    key = jax.random.key(config.seed)
    lowered = jax.jit(lambda key: transformer.init(config.model, key)).lower(key)
    # Runs once: optimizing the random bits of every leaf takes longer than drawing them.
    init = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    return {name: np.asarray(value) for name, value in init(key).items()}


def assemble(
  plan: fragments.Plan, config: Config, values: dict[int, np.ndarray]
) -> dict[str, np.ndarray]:
  """The parameters [name -> array] from every fragment's flat value."""
  params = {
    name: np.zeros(leaf.shape, np.float32)
    for name, leaf in transformer.shapes(config.model).items()
  }
  for fragment in plan.fragments:
    fragments.scatter(fragment, values[fragment.index], params)
  return params
