"""The rows of scripts/compare.py: their settings, their runs, and the choice of their points."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import jax
import outer_gradients
from ideas import ForgetfulTrainer, Recent, TriedMerger, mean_values
from outer_gradients import Observer, Seen
from virtual_training import STEP_SECONDS, Text, Valued

from ddiloco.chaos import random_faults
from ddiloco.config import Config, Fault

# --- Sizes and rows

BATCH = 16  # sequences of all islands together in a step
RATES, BATCHES, FACTORS = (4e-3, 8e-3, 16e-3, 32e-3), (16, 8), (0.7, 1.4)
HELDOUT = 65_536  # tokens
SNAPSHOT_STEPS, OUTLIVED = 50, 50  # of runs with faults; quarantines and crashes of a role


@dataclasses.dataclass(frozen=True)
class Size:
  """A model, and the length of its training.

  Attributes:
    layers: of the model.
    width: of the model.
    tokens: of a run.
    after: the size whose points its own tuning begins at; empty: it has the whole grid.
    sequence: tokens.
    batch: sequences of all islands together in a step; 0: as tuned.
    rates: inner learning rates that are tried.
  """

  layers: int
  width: int
  tokens: int
  after: str = ""
  sequence: int = 64
  batch: int = 0
  rates: tuple[float, ...] = RATES

  @property
  def fields(self) -> dict[str, Any]:
    """Fields of the config: four heads, and a hidden layer of three widths."""
    return {
      "model.num_layers": self.layers,
      "model.model_dim": self.width,
      "model.head_dim": self.width // 4,
      "model.mlp_dim": 3 * self.width,
      "data.sequence_length": self.sequence,
      "data.heldout_sequences": HELDOUT // self.sequence,
    }


# By parameters.
SIZES: dict[str, Size] = {
  "33k": Size(2, 32, 638_976),
  "33k, long": Size(2, 32, 2_555_904, after="33k", rates=(2e-3, *RATES)),
  "115k": Size(2, 64, 983_040, after="33k"),
  "115k, long": Size(2, 64, 3_932_160, after="115k", rates=(1e-3, 2e-3, 4e-3, 8e-3, 16e-3)),
  # As many layers as the default has fragments.
  "123k, deep": Size(8, 32, 983_040, after="33k"),
  "250k, long": Size(2, 96, 8_257_536, after="115k, long", rates=(1e-3, 2e-3, 4e-3)),
  # For an accelerator: their steps have enough tokens to keep it busy.
  "1m": Size(5, 128, 10_240_000, "33k", 128, 32, (1e-3, 2e-3, 4e-3, 8e-3)),
  "10m": Size(12, 256, 49_152_000, "33k", 256, 64, (5e-4, 1e-3, 2e-3, 4e-3)),
}
QUICK = Size(2, 32, 32_768)


@dataclasses.dataclass(frozen=True)
class Method:
  """One row.

  Attributes:
    base: of the config.
    fields: of the config, changed; after tuning.
    learners: M.
    of: the row whose tuned point it takes; empty: it is tuned itself.
    how: exchange; together: data-parallel, one island with the batch of all; alone: one island
      with its own share of the tokens.
    slowness: of the islands.
    faults: how many, and of which kinds: arguments of `random_faults`, spread over the whole run.
    presence: by learner, the shares of the run between which it takes part; others always do.
    sizes: the sizes at which it is run.
    beside: the row of data-parallel that it is compared with.
    ideas: of ideas.py, with their numbers.
  """

  base: str = "default"
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  learners: int = 4
  of: str = ""
  how: str = "exchange"
  slowness: tuple[float, ...] = ()
  faults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  presence: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
  sizes: tuple[str, ...] = ("33k",)
  beside: str = "data-parallel"
  ideas: Mapping[str, float] = dataclasses.field(default_factory=dict)


def outer(rate: float, momentum: float) -> dict[str, Any]:
  """Outer Nesterov SGD."""
  return {"outer.learning_rate": rate, "outer.momentum": momentum}


def variant(fields: Mapping[str, Any] | None = None, learners: int = 4, **more: Any) -> Method:
  """A variant of the default, at its point."""
  return Method("default", fields or {}, learners, f"default, M = {learners}", **more)


def idea(**ideas: float) -> Method:
  """The default with ideas of ideas.py."""
  return variant(sizes=("33k, long",), ideas=ideas)


def both_ways(codec: str) -> Method:
  """The default with this codec for pushes and for publishes."""
  return variant({"sync.push_codec": codec, "sync.publish_codec": codec}, sizes=LONG)


def twice_the_rate(learners: int) -> Method:
  """Merges by average with twice the outer rate, so that outer steps are about as long as RDA's."""
  return variant(AVERAGE | {"outer.learning_rate": 1.0}, learners, sizes=("33k, long",))


def cut(policy: str) -> Method:
  """The default with fragments by this policy."""
  return variant({"sync.fragmentation": policy}, sizes=(DEEP,))


def kills(rejoin: str) -> Method:
  """The default, with an island killed every hundred steps; `rejoin`: the state it returns with."""
  return variant({"checkpoint.rejoin": rejoin}, faults={"count": 12, "kinds": ["kill"]})


ALL, DEEP = tuple(SIZES), "123k, deep"
LONG = ("33k", "33k, long")
SLOW = (1.0, 1.0, 1.2, 1.2)
# Two islands stay, and two others are exchanged for new ones at every quarter of the run.
COME_AND_GO = {f"learner-{2 + m}": (m // 2 / 4, m // 2 / 4 + 1 / 4) for m in range(8)}
PLAIN = {"outer.learning_rate": 1.0, "outer.momentum": 0.0, "outer.decay_share": 0.0}
AVERAGE = {"sync.merge": "average"}
MOE = {"model.num_experts": 4, "model.mlp_dim": 48}  # two for each token: as much arithmetic
MUON, TWELVE = {"inner.optimizer": "muon"}, {"sync.num_fragments": 12}
SCANS: dict[str, Any] = {"image_size": 8, "patch_size": 2, "image_channels": 1}
IMAGES = {  # half of the rows are an image and its caption
  **{f"model.{name}": value for name, value in SCANS.items()},
  "data.custom": "ddiloco.training.captions:digits",
  "data.options": {**SCANS, "image_share": 0.5},
  "data.sequence_length": 96,  # 16 patches and the longest caption; divides a run's tokens
  "data.heldout_sequences": 512,
}
ASYNCHRONOUS = {  # as the default: eight fragments, each of which may take two steps
  "sync.blocking": False,
  "sync.num_shards": 2,
  "sync.num_fragments": 8,
  "sync.overlap_steps": 2,
  "sync.min_quorum": 1,
}
TEXT_AND_IMAGES = "data-parallel, text and images"  # other data: no loss to compare with text's
METHODS: dict[str, Method] = {
  "data-parallel": Method("data_parallel", how="together", sizes=ALL),
  "data-parallel, Muon": Method(
    "data_parallel", MUON, how="together", sizes=(*LONG, "115k", "115k, long")
  ),
  "data-parallel, MoE": Method("data_parallel", MOE, how="together", sizes=LONG),
  TEXT_AND_IMAGES: Method(
    "data_parallel", IMAGES, how="together", sizes=LONG, beside=TEXT_AND_IMAGES
  ),
  "one island alone": Method(
    "data_parallel", how="alone", of="data-parallel", sizes=("33k", "115k, long", "250k, long")
  ),
  "DiLoCo, M = 1": Method("diloco", learners=1, sizes=LONG),
  "DiLoCo, M = 4": Method("diloco", sizes=ALL),
  "DiLoCo, M = 8": Method("diloco", learners=8, sizes=LONG),
  "Streaming, M = 4": Method(
    "streaming_diloco", {"sync.num_fragments": 2}, sizes=("33k", "115k", "115k, long")
  ),
  "Decoupled as published, M = 4": Method("decoupled", TWELVE, sizes=(*LONG, "115k", "115k, long")),
  "Decoupled, Muon inside, M = 4": Method("decoupled", TWELVE | MUON, sizes=LONG),
  "DiLoCo without waiting, M = 4": Method("diloco", ASYNCHRONOUS, sizes=LONG),
  # Data-parallel, bit by bit.
  "exchange alone, M = 1": Method(fields=PLAIN, learners=1, of="data-parallel", sizes=()),
  "default, M = 1": Method(learners=1, sizes=(*LONG, "115k, long", "250k, long")),
  "default, M = 2": Method(learners=2, sizes=LONG),
  "default, M = 4": Method(sizes=ALL),
  "default, M = 8": Method(learners=8, sizes=(*LONG, "115k, long", "250k, long")),
  "default, M = 16": Method(learners=16, sizes=LONG),
  "default, Muon inside, M = 4": Method(fields=MUON, sizes=(*LONG, "115k", "115k, long")),
  "default, MoE, M = 4": Method(fields=MOE, sizes=LONG, beside="data-parallel, MoE"),
  "default, text and images, M = 4": Method(fields=IMAGES, sizes=LONG, beside=TEXT_AND_IMAGES),
  "default, overwrite, M = 4": Method(fields={"sync.apply": "overwrite"}, sizes=(*LONG, "115k")),
  "outer 0.7/0": variant(outer(0.7, 0.0), sizes=LONG),
  "outer 0.4/0.9": variant(outer(0.4, 0.9), sizes=LONG),
  "outer rate constant": variant({"outer.decay_share": 0.0}, sizes=LONG),
  "average": variant(AVERAGE),
  "H = 6": variant({"sync.sync_period": 6}),
  "H = 12": variant({"sync.sync_period": 12}),
  "H = 22": variant({"sync.sync_period": 22}),
  "H = 48": variant({"sync.sync_period": 48}),
  "mix": variant({"sync.apply": "mix"}, sizes=LONG),
  "overwrite, H = 26": variant({"sync.apply": "overwrite", "sync.sync_period": 26}),
  "fragments by layer": cut("layer"),
  "fragments by tensor": cut("tensor"),
  "layers strided": cut("strided"),
  "one fragment": variant({"sync.num_fragments": 1, "sync.num_shards": 1}),
  "tau = 1": variant({"sync.overlap_steps": 1}),
  "bf16 both ways": both_ways("bf16"),
  "int8 both ways": both_ways("int8"),
  "int4 both ways": both_ways("int4"),
  "K = M, two slow": variant({"sync.min_quorum": 4}, sizes=LONG, slowness=SLOW),
  "K = 1, two slow": variant({"sync.grace_safety": 0.0}, slowness=SLOW),
  "K = 1 + grace, two slow": variant(sizes=LONG, slowness=SLOW),
  "skewed data": variant({"data.custom": "skewed:source"}, sizes=LONG),
  "islands come and go": variant(sizes=LONG, presence=COME_AND_GO),
  "40 faults": variant(sizes=LONG, faults={"count": 40}),
  "160 faults": variant(sizes=("33k, long",), faults={"count": 160}),
  "12 kills, back with own moments": kills("own"),
  "12 kills, with a peer's": kills("peer"),
  "12 kills, with fresh ones": kills("fresh"),
  "average, M = 8": variant(AVERAGE, 8, sizes=LONG),
  "average, M = 16": variant(AVERAGE, 16, sizes=LONG),
  "average, twice the rate, M = 8": twice_the_rate(8),
  "average, twice the rate, M = 16": twice_the_rate(16),
  "momentum begins again": idea(restart=16),
  "outer rate warms up": idea(warm_up=0.1),
  "outer rate by rho": idea(steady_step=0.2),
  "first moments forgotten": idea(forget=1.0),
  "mean of five versions": idea(mean_of=5),
}
QUICK_ROWS = ("data-parallel", "default, M = 4", "exchange alone, M = 1", "DiLoCo, M = 4")


# --- One run


@dataclasses.dataclass(frozen=True)
class Point:
  """The tuned values. `factor`: of the outer learning rate, without an outer step of the inner."""

  rate: float = 8e-3
  batch: int = BATCH
  factor: float = 1.0


# The fields of a row on which the outcome of its runs depends.
OF_ROW = ("base", "fields", "learners", "how", "slowness", "faults", "presence", "ideas")


@dataclasses.dataclass(frozen=True)
class Run:
  """All that its outcome depends on."""

  size: str
  method: Method
  point: Point
  seed: int

  def told(self) -> dict[str, Any]:
    """The run as in a line of runs.jsonl."""
    of_row = {name: getattr(self.method, name) for name in OF_ROW}
    point = dataclasses.asdict(self.point)
    return {"size": self.size, **of_row, "point": point, "seed": self.seed}

  def config(self) -> Config:
    """The config of the run."""
    size, point, method = SIZES.get(self.size, QUICK), self.point, self.method
    islands = 1 if method.how == "together" else method.learners
    base = common.config_of(method.base, {})
    rate, outer_rate = point.rate, base.outer.learning_rate * point.factor
    if method.how != "exchange":
      rate, outer_rate = point.rate * point.factor, base.outer.learning_rate
    tokens = size.tokens
    if method.how == "alone":
      tokens, islands = tokens // method.learners, 1
    batch = point.batch // (method.learners if method.how == "alone" else islands)
    values = {
      **size.fields,
      "seed": self.seed,
      "islands.num_learners": islands,
      "islands.batch_size": batch,
      "islands.devices": 1,
      "inner.learning_rate": rate,
      "outer.learning_rate": outer_rate,
      "sync.snapshot_steps": 0,
      "network.drain_seconds": 1e3,
      "run.total_tokens": tokens,
    }
    if base.sync.blocking:
      values["sync.min_quorum"] = islands
    values |= method.fields
    config = common.config_of(method.base, values)
    span = config.planned_steps() * STEP_SECONDS
    plan = [
      Fault("join", name, at_seconds=begin * span, seconds=-1)
      for name, (begin, _) in method.presence.items()
      if begin
    ]
    if method.faults:
      shards = config.sync.num_shards
      plan += random_faults(
        self.seed, span_seconds=span, num_learners=islands, num_shards=shards, **method.faults
      )
      values["sync.snapshot_steps"], values["run.max_restarts"] = SNAPSHOT_STEPS, OUTLIVED
    values["chaos.faults"] = tuple(dataclasses.asdict(fault) for fault in plan)
    return common.config_of(method.base, values)


class Observed(Valued):
  """A world that records its commits' outer gradients."""

  def __init__(self, text: Text, run: Run):
    self.seen: list[Seen] = []
    row, faults = run.method, text.config.chaos.faults
    self._ideas, self._recent = row.ideas, Recent()
    super().__init__(text, run.seed, faults, row.slowness, row.presence)

  def merger(self, actor, fragments) -> Observer:
    if not self._ideas:
      return Observer(fragments, self.kept, self.config).watch(self.seen)
    merger = TriedMerger(fragments, self.kept, self.config)
    return merger.follow(self._ideas, self._recent).watch(self.seen)

  def island(self, actor) -> Any:
    if "forget" not in self._ideas:
      return super().island(actor)
    island = ForgetfulTrainer(self.config, self, actor.number, f"{self.seed} {actor.role}")
    island.forgets = self._ideas["forget"]
    return island

  def loss(self) -> float:
    return self.problem.loss(mean_values(self._recent)) if self._recent else super().loss()

  def merged(self) -> float:
    """The share of the trained tokens, those of killed islands too, that the global model has."""
    trained = sum(made * self.config.tokens_per_step(m) for m, made in enumerate(self.made))
    return statistics.mean(kept.state.merged_tokens for kept in self.kept.values()) / trained


def train(run: Run) -> dict[str, Any]:
  """The result of a run."""
  config = run.config()
  text, began = Text(config), time.monotonic()
  if run.method.how != "exchange":
    loss = text.trained_alone(config.planned_steps())
    return {"loss": loss, "seconds": time.monotonic() - began}
  world = Observed(text, run)
  loss = world.train()
  return {
    "loss": loss,
    "seconds": time.monotonic() - began,
    "merged": round(world.merged(), 4),
    "commits": len(world.seen),
    **outer_gradients.summary(world.seen),
    "course": outer_gradients.course(world.seen),
  }


# --- All runs, finished and to come


def known_by(line: Mapping[str, Any]) -> str:
  """A key, equal for runs of the same outcome; older lines lack fields that are newer."""
  told = ("size", *OF_ROW, "point", "seed")
  return json.dumps({name: line.get(name, {}) for name in told}, sort_keys=True)


class Runs:
  """The lines of WORKDIR/runs.jsonl."""

  def __init__(self, workdir: Path, trains: bool):
    self._kept, self._trains = common.Kept(workdir / "runs.jsonl", known_by), trains
    self._commit = commit_of_sources()

  def __call__(self, run: Run, row: str) -> dict[str, Any] | None:
    """The result of an earlier run, or of one made now; None if it may not be made."""
    found = self._kept.get(known_by(run.told()))
    if found is not None or not self._trains:
      return found
    found = {"row": row, **run.told(), **train(run)}
    found |= {"commit": self._commit, "machine": machine(), "time": time.time()}
    print(
      f"{run.size} {row} {run.point} seed {run.seed}:"
      f" {found['loss']:.4f} in {found['seconds']:.0f} s",
      flush=True,
    )
    return self._kept.add(found)


def commit_of_sources() -> str:
  """The git commit, with a + if files have changed since."""
  command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
  return subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True).stdout.strip()


def machine() -> str:
  """The machine's accelerator, or its processor and their number."""
  if jax.default_backend() != "cpu":
    return jax.devices()[0].device_kind
  lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
  names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
  return f"{os.cpu_count()} x {names[0] if names else platform.machine()}"


class Comparison:
  """All rows of one size.

  Args:
    size: its name.
    runs: of all sizes.
    seeds: how many of each row at its point.
    tunes: False: every row is at the first point of the grid.
    smaller: the size whose point each row begins at; then only rates are tried.
  """

  def __init__(
    self,
    size: str,
    runs: Runs,
    seeds: int,
    tunes: bool = True,
    smaller: Comparison | None = None,
  ):
    self.size, self._runs, self._seeds, self._tunes = size, runs, seeds, tunes
    self._smaller = smaller
    self._points: dict[str, Point | None] = {}

  def run(self, row: str, point: Point, seed: int) -> dict[str, Any] | None:
    """One run of a row."""
    return self._runs(Run(self.size, METHODS[row], point, seed), row)

  def point(self, row: str) -> Point | None:
    """The best point of the row's grid; None if the row is not there."""
    if row not in self._points:
      self._points[row] = self._tuned(row)
    return self._points[row]

  def _tuned(self, row: str) -> Point | None:
    if METHODS[row].of:
      return self.point(METHODS[row].of)
    best = self._smaller.point(row) if self._smaller else Point()
    if best is None or not self._tunes:
      return best
    size, learners = SIZES.get(self.size, QUICK), METHODS[row].learners
    best = dataclasses.replace(best, batch=size.batch or best.batch)
    grid: dict[str, Sequence[Any]] = {"rate": size.rates}
    if self._smaller is None:
      grid["batch"] = [batch for batch in BATCHES if batch >= learners]
      grid["factor"] = (1.0, *FACTORS)
    losses: dict[Point, float] = {}
    for name, values in grid.items():  # one coordinate after the other, each from the best point
      for point in [dataclasses.replace(best, **{name: value}) for value in values]:
        found = self.run(row, point, 0)
        if found is None:
          return None
        losses[point] = found["loss"]
      best = min(losses, key=losses.__getitem__)
    return best

  def row(self, row: str) -> list[dict[str, Any]]:
    """The row's runs at its point, by seed, as far as they are there."""
    point = self.point(row)
    if point is None:
      return []
    found = [self.run(row, point, seed) for seed in range(self._seeds)]
    return [each for each in found if each is not None]

  def relative(self, found: list[dict[str, Any]], to: str = "data-parallel") -> list[float]:
    """By seed, how much greater the loss is than that of the row `to`, in %."""
    other = {each["seed"]: each["loss"] for each in self.row(to)}
    return [100 * (f["loss"] / other[f["seed"]] - 1) for f in found if f["seed"] in other]
