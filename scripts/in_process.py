"""Real roles in threads of this process, for the benchmarks beside this file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ddiloco import environment
from ddiloco.chaos import Faults
from ddiloco.checkpoint.restore import ResumeState, new_learner, new_syncer
from ddiloco.checkpoint.saver import Saver
from ddiloco.config import Config
from ddiloco.core.delta import new_fragment
from ddiloco.core.fragments import Plan, gather
from ddiloco.network.transport import Endpoint
from ddiloco.observe.eventlog import Records
from ddiloco.protocol.events import Event
from ddiloco.roles import initial
from ddiloco.roles.learner import Learner
from ddiloco.roles.syncer import Syncer
from ddiloco.runtime import Runtime

BATCHES = 8  # different batches, which repeat


def prepare(devices: int = 1) -> None:
  """Makes this process compute on fake CPU devices, each on one core: others have the rest."""
  one = "--xla_cpu_multi_thread_eigen=false"
  os.environ["XLA_FLAGS"] = f"{one} {os.environ.get('XLA_FLAGS', '')}"
  environment.prepare(devices, cpu_only=True)


def batches(config: Config) -> list[np.ndarray]:
  """Batches of arbitrary tokens."""
  random = np.random.default_rng(0)
  shape = (config.islands.batch_size, config.data.sequence_length + 1)
  return [random.integers(0, config.model.vocab_size, shape, np.int32) for _ in range(BATCHES)]


class Silent:
  """Records nothing, see `Records`."""

  def record(self, event: Event) -> None:
    """Forgets the event."""

  def flush(self) -> None:
    """Has nothing to wait for."""


class Shard:
  """A syncer in a thread of its own, which starts at once, with the config's initial values."""

  def __init__(
    self,
    config: Config,
    plan: Plan,
    endpoint: Endpoint,
    number: int = 0,
    recorder: Records | None = None,
    saver: Saver | None = None,
  ):
    params = initial.initial_params(config)
    store = {f.index: new_fragment(f, gather(f, params)) for f in plan.fragments}
    runtime = Runtime(config, plan, endpoint, recorder or Silent(), saver)
    self.role = Syncer(new_syncer(config, number, 0, store), store, runtime)
    self._stop = threading.Event()
    serve = Faults((), time.monotonic()), self._stop.is_set
    self._thread = threading.Thread(target=self.role.run, args=serve, daemon=True)
    self._thread.start()

  def end(self) -> int:
    """Stops it; returns how many rounds it has committed."""
    self._stop.set()
    self._thread.join(10)
    self.role.close()
    return sum(f.version for f in self.role.state.fragments)


def train(
  config: Config,
  plan: Plan,
  endpoint: Endpoint,
  island: Any,
  read: Callable[[int], Any],
  stop: Callable[[], bool],
  number: int = 0,
  recorder: Records | None = None,
  saver: Saver | None = None,
) -> None:
  """Runs a learner until all is merged or `stop()`; `read` makes batches from a position on."""
  beginning = ResumeState(new_learner(config, plan, number, 0))
  runtime = Runtime(config, plan, endpoint, recorder or Silent(), saver)
  role = Learner(beginning, island, read, runtime)
  role.run(Faults((), time.monotonic()), stop)
