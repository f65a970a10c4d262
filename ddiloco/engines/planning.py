"""What `ddiloco plan` needs to know of a config's model, without touching a device."""

from __future__ import annotations

from ddiloco.config import Config
from ddiloco.models import arithmetic
from ddiloco.runtime import initial


def fragment_sizes(config: Config) -> tuple[int, ...]:
  """Values in every fragment of the run's real plan.

  Raises:
    ConfigError: the model cannot be cut so.
  """
  return initial.make_plan(config).sizes


def step_flops(config: Config) -> float:
  """FLOPs of one inner step of the first island."""
  per_token = arithmetic.flops_per_token(config.model, config.data.sequence_length)
  return per_token * config.tokens_per_step(0)
