"""What `import ddiloco` offers: load a config, train, plan, simulate, and read what a run left."""

from __future__ import annotations

import contextlib
import math
import os
import re
import runpy
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_collections

from ddiloco import custom, environment
from ddiloco.checks import refusal, require, require_one_of
from ddiloco.config import Config, ConfigError, changeable, from_dict
from ddiloco.workdir import (
  ISLANDS,
  outcome,
  read_config,
  require_local,
  saved_config,
  started,
)

if TYPE_CHECKING:
  import numpy as np

  from ddiloco.models.model import Model

Settings: TypeAlias = Config | Mapping[str, Any] | ml_collections.ConfigDict


# --- Configs


def load(source: str | Path) -> ml_collections.ConfigDict:
  """The config of an experiment file, of a run's workdir, or of a config.json; you may change it.

  >>> config = load("configs/dense.py:1m")  # FILE:PRESET passes the preset to get_config
  >>> config.islands.num_learners
  4

  Raises:
    ConfigError: `source` holds no config. A field or value that breaks its rule is refused here or
      when the config is used.
  """
  return experiment(str(source), "config")


def experiment(path: str, flag: str) -> ml_collections.ConfigDict:
  """What `get_config` of an experiment file returns; FILE:PRESET passes it the preset.

  A file named .json holds the values themselves; a run leaves it in its workdir.

  Args:
    path: of the file, or of a workdir.
    flag: of the command line that named it, for errors.

  Raises:
    ConfigError: there is no such file, it fails, or get_config returns no ConfigDict.
  """
  path = os.path.expanduser(path)  # no shell reads the "~" of --config=~/mine.py
  saved = Path(path, "config.json") if os.path.isdir(path) else Path(path)
  if saved.suffix == ".json":
    return changeable(read_config(saved, f"--{flag}={path}"))
  file, _, preset = path.partition(":")
  like = "configs/chaos/region.py" if flag == "config.chaos" else "configs/quickstart.py"
  fix = f"name a Python file whose get_config() returns a config, such as {like}"
  try:
    get_config = runpy.run_path(file)["get_config"]
    if preset:
      fix = "give after the colon what its get_config() takes"
    values = get_config(*([preset] if preset else []))
  except ConfigError as error:
    raise ConfigError(f"--{flag}={path}: {error}") from error
  except (Exception, SystemExit) as error:  # a user's program: it may raise anything
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    line = f"line {frames[-1].lineno}: " if frames else ""
    what = "has no get_config()" if error.args == ("get_config",) else str(error)
    if isinstance(error, ImportError):
      fix = "install it; for a file of your own, set PYTHONPATH to its folder"
    close = re.search(r'Did you mean "(\w+)" instead of "(\w+)"', what)
    if unknown := close or re.search(r'Key "(\w+)" does not exist', what):
      what = f"there is no field {unknown[unknown.lastindex]!r}"  # the text also has all others
      fix = f"did you mean {close[1]!r}" if close else "ddiloco/config/schema.py has all fields"
    what, _, own = what.partition(" Fix: ")  # some bring their fix
    said = f"{line}{type(error).__name__}: {what.rstrip('.')}"
    raise refusal(f"--{flag}", path, said, own.rstrip(".") or fix) from error
  rule = f"get_config() returned {values!r}, must return a ConfigDict"
  fix = "start from ddiloco.config.default(), change lines, and return it"
  require(isinstance(values, ml_collections.ConfigDict), f"--{flag}", path, rule, fix)
  return values


def _checked(config: Settings) -> Config:
  return custom.renew(custom.absolute(config if isinstance(config, Config) else from_dict(config)))


def _folder(workdir: str | Path) -> Path:
  """A run's workdir, absolute: the program may change its own directory."""
  require_local("workdir", os.fspath(workdir))
  return Path(workdir).expanduser().absolute()


# --- Train, plan or simulate what a config describes


class RunFailed(RuntimeError):
  """A run has ended before its end, though not as asked. The text says why, and what to do."""


def train(
  config: Settings,
  workdir: str | Path,
  *,
  engine: str = "threads",
  overwrite: bool = False,
  cpu: bool = False,
  **options: Any,
) -> Run:
  """Trains as the config says, to the end, and returns the run; a run already in workdir goes on.

  It may be called again and again. The number of fake CPU devices is set where this process first
  uses JAX: before that, train a run whose islands have several of them.

  Args:
    config: the run's; what `load` or `default` gave, or a checked `Config`.
    workdir: directory of the run; it is the run's identity.
    engine: threads, processes or ray.
    overwrite: replace the run that is in workdir.
    cpu: use fake CPU devices even where JAX finds accelerators.
    **options: further arguments of the engine, such as `address` of Ray.

  Returns:
    The run, which is finished.

  Raises:
    ConfigError: names the field, the value, the rule and the fix.
    RunFailed: too few learners are left for a quorum, or a shard is gone for good; what is merged
      is saved. Or the end of the run could not be saved.
    KeyboardInterrupt: it was asked to end (Ctrl-C, a notebook's interrupt, SIGTERM). All work is
      merged and saved first, after a second one what is merged by then. The same call goes on.
  """
  config, run, asked = _checked(config), _folder(workdir), threading.Event()
  if engine == "ray":
    options.setdefault("cpu_only", cpu)
  with environment.of_one_run():
    ready(config, cpu, engine)
    from ddiloco.engines import session

    session.train(config, run, overwrite, engine, options, asked=asked)
  end = outcome(run)  # a program that is asked to end begins no further run
  interrupted = asked.is_set() or "interrupted" in end.get("left_out", {}).values()
  if interrupted or end.get("reason") == "stopped":
    raise KeyboardInterrupt(f"the run in {run} is {end.get('reason', 'not saved')}")
  if end.get("reason") != "finished":
    why = end.get("why", "its end is not saved, as its output says")
    fix = "the same call goes on with it and starts all roles; sync.min_quorum may be lower then"
    raise RunFailed(f"the run in {run} has failed: {why}. Fix: {fix}.")
  return Run(run)


def ready(config: Config, cpu: bool, engine: str = "threads") -> None:
  """Has JAX make devices for all islands and for the evaluator, if it has not made any yet.

  Raises:
    ConfigError: the engine has processes, and JAX cannot open the devices that it divides.
  """
  supervises, own = engine != "threads", list[int]()
  counts = [config.islands.island(m).devices or 1 for m in range(config.num_islands())]
  asked = config.run.evaluator_devices
  if engine == "processes" and asked and not cpu:  # it lives in this process
    from ddiloco.engines.children import accelerators

    own = [each.number for each in accelerators()[-asked:] if each.platform == "gpu"]
  count = sum(counts) + (asked or 1)  # the evaluator's devices belong to no island
  with contextlib.suppress(RuntimeError):  # made already: who needs more of them is refused later
    environment.prepare(num_cpu_devices=count, cpu_only=cpu, supervises=supervises, gpus=own)


def plan(
  config: Settings,
  *,
  gbps: float,
  step_seconds: float,
  latency_seconds: float = 0.0,
  shard_gbps: float = 0.0,
) -> dict[str, Any]:
  """What a run needs of its links and shards; touches no device. `ddiloco plan` says more.

  >>> needs = plan(load("configs/quickstart.py"), gbps=1.0, step_seconds=0.1)
  >>> needs["hidden"], needs["findings"]
  (True, [])

  Args:
    config: the run's.
    gbps: Gbit/s of every island's link, in each direction.
    step_seconds: how long an inner step takes.
    latency_seconds: one way, between any two places.
    shard_gbps: of shards that stand on their own; 0: they stand beside the islands.

  Returns:
    Plain values; among them "bytes_per_step" of an island, "link_load" (1 is full), "sync_seconds",
    "hidden" (whether steps hide a sync) and "findings": what to change, in sentences.

  Raises:
    ConfigError: something in the config or the arguments cannot be.
  """
  from ddiloco.roles import initial
  from ddiloco.simulation import planner

  config = _checked(config)
  setting = planner.Setting.of(
    config,
    initial.make_plan(config).sizes,
    step_seconds=step_seconds,
    gbps=gbps,
    latency_seconds=latency_seconds,
    shard_gbps=shard_gbps,
  )
  return planner.as_json(setting, planner.make(setting))


def simulate(
  config: Settings,
  *,
  step_seconds: float = 1.0,
  gbps: float = 0.0,
  latency_seconds: float = 0.001,
  workdir: str | Path | None = None,
  overwrite: bool = False,
  most_seconds: float = math.inf,
) -> dict[str, Any]:
  """The run's protocol, islands and fault plan in virtual time, without arrays or devices.

  >>> config = load("configs/quickstart.py")
  >>> config.run.total_tokens //= 20
  >>> simulate(config, step_seconds=0.1)["reason"]
  'finished'

  Args:
    config: the run's.
    step_seconds: of an inner step, on islands without islands.min_step_seconds.
    gbps: Gbit/s of every island's link; 0: no limit.
    latency_seconds: one way.
    workdir: gets the events, for dashboard and report; None: nothing is written.
    overwrite: replace the run that is in workdir.
    most_seconds: of virtual time, after which the simulation stops.

  Returns:
    Plain values: the "reason" of its end, "goodput", "uptime", "commits", "recovered" faults, ...

  Raises:
    ConfigError: a value in config or arguments is invalid, or the workdir is another run's.
  """
  from ddiloco.engines import virtual
  from ddiloco.roles import initial
  from ddiloco.simulation.run import Speeds

  config = _checked(config)
  setting = Speeds(
    sizes=initial.make_plan(config).sizes,
    step_seconds=step_seconds,
    gbps=(gbps,),
    latency_seconds=(latency_seconds,),
  )
  place = None if workdir is None else _folder(workdir)
  return virtual.simulate(config, setting, place, overwrite, most_seconds)


# --- A run and its results


class Run:
  """A run in its workdir: finished, stopped, or still going on in another process.

  Args:
    workdir: directory of the run.
    config: the run's, where its own model, data or optimizer are in another folder by now.

  Raises:
    ConfigError: the directory holds no run, or one with another config.
  """

  def __init__(self, workdir: str | Path, config: Settings | None = None):
    self.workdir = _folder(workdir)
    mine = None if config is None else _checked(config)
    self.config: Config = custom.renew(saved_config(self.workdir, mine))

  def __repr__(self) -> str:
    end = outcome(self.workdir)
    said = [f"{name}={end[name]!r}" for name in ("reason", "loss_merged") if name in end]
    return f"<{' '.join(['ddiloco.Run', str(self.workdir), *said])}>"

  @property
  def model(self) -> Model:
    """The model: `run.model.evaluate(run.params(), batch)` measures it on data of your own.

    `model.inputs(batch_size, sequence_length)` says how a batch looks. A model that makes text has
    `logits(params, tokens_BxT)` too.
    """
    return custom.load_model(self.config.model)

  def params(self, learner: int | None = None) -> dict[str, np.ndarray]:
    """The result: parameter name -> f32 array.

    Args:
      learner: number of an island, only for a run without shards, whose islands trained alone;
        None: the result, which in such a run is the best island's.

    Raises:
      ConfigError: the run has no result, or the result is damaged.
    """
    from ddiloco.checkpoint import weights
    from ddiloco.engines import session

    if learner is None:
      return session.load_result(self.workdir, self.config)
    rule, fix = "is for runs without shards, whose islands train alone", "leave it out"
    require(not self.config.sync.num_shards, "learner", learner, rule, fix)
    return weights.load(self.workdir / ISLANDS / f"learner-{learner}", "learner")

  def summary(self) -> dict[str, Any]:
    """The numbers of report/summary.json: losses, participation, faults, goodput, ...

    For a run that is not over they cover the events so far.
    """
    from ddiloco.observe.eventlog import EventStream
    from ddiloco.observe.report import summarise

    return summarise(EventStream(self.workdir), self.config) | outcome(self.workdir)

  def status(self) -> dict[str, Any]:
    """How the run stands now: "phase", "progress", its islands, shards and rounds, ..."""
    from ddiloco.dashboard.status import status
    from ddiloco.observe.eventlog import EventStream
    from ddiloco.observe.run_state import RunState

    run = RunState(self.config).read(EventStream(self.workdir))
    began = started(self.workdir)  # written a moment after the config
    now = 0.0 if began is None else time.time() - began
    return status(run, now, self.config.sync, outcome(self.workdir).get("reason", ""))

  def events(self, kind: str) -> list[dict[str, Any]]:
    """What the run has logged of one kind, in order of time: for `pandas.DataFrame`, or a plot.

    "step" has an island's loss, "evaluation" the held-out loss of the merged model, "commit" a
    merge. Kinds and fields are those of `ddiloco/protocol/events.py`; `time` is in seconds.

    Raises:
      ConfigError: there is no such kind.
    """
    from msgspec.structs import asdict

    from ddiloco.observe.eventlog import EventStream
    from ddiloco.protocol.events import KINDS

    require_one_of("kind", kind, KINDS)
    return [asdict(each) for each in EventStream(self.workdir) if each.kind == kind]

  def evaluate(self) -> dict[str, float]:
    """The held-out measures of the result: "loss", and what else the model measures.

    Raises:
      ConfigError: there is no result.
    """
    ready(self.config, cpu=False)
    from ddiloco.engines import session

    return session.measure(self.workdir, self.config)

  def generate(
    self, prompt: str, tokens: int = 200, temperature: float = 0.7, seed: int = 0
  ) -> str:
    """The prompt and what the result writes after it.

    Raises:
      ConfigError: the model makes no text, or there is no result.
    """
    ready(self.config, cpu=False)
    from ddiloco.engines import session

    return session.sample(self.workdir, self.config, prompt, tokens, temperature, seed)
