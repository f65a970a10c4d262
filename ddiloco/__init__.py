"""Decoupled DiLoCo in JAX: one large model trained across islands, far apart and failing.

This is the stable interface; all the rest of the package may change at any time.

  config = ddiloco.load("configs/quickstart.py")       # or ddiloco.default(), or a run's workdir
  config.sync.min_quorum = 2
  run = ddiloco.train(config, "runs/mine", cpu=True)   # goes on from a snapshot, if there is one
  run.params(), run.summary(), run.status(), run.evaluate(), run.events("evaluation")

Importing it is cheap: nothing else, neither JAX nor NumPy, is imported before a name is used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an editor follows no `__getattr__`
  from ddiloco.api import Run, RunFailed, load, plan, simulate, train  # noqa: F401
  from ddiloco.config import Config, ConfigError, default  # noqa: F401
  from ddiloco.models.model import Model, NnxModel, batch_key  # noqa: F401
  from ddiloco.training.data import Source  # noqa: F401

__version__ = "0.2.0"

# Where each name lives. It is imported when it is first used.
_HOMES = {
  "Config": "ddiloco.config",
  "ConfigError": "ddiloco.config",
  "Model": "ddiloco.models.model",
  "NnxModel": "ddiloco.models.model",
  "Run": "ddiloco.api",
  "RunFailed": "ddiloco.api",
  "Source": "ddiloco.training.data",
  "batch_key": "ddiloco.models.model",
  "default": "ddiloco.config",
  "load": "ddiloco.api",
  "plan": "ddiloco.api",
  "simulate": "ddiloco.api",
  "train": "ddiloco.api",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
  if name not in _HOMES:
    raise AttributeError(f"module 'ddiloco' has no attribute {name!r}")
  value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
