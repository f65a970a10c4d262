"""A run from end to end: workdir, engine, live view, result, baselines, report."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ddiloco.config import Config, ConfigError
from ddiloco.core import fragments
from ddiloco.engines.dashboard import Dashboard, Where
from ddiloco.engines.outcome import Outcome
from ddiloco.engines.workdir import (
  COMPILED,
  OURS,
  OUTCOME,
  check,
  claim,
  held,
  saved_config,
)
from ddiloco.models import arithmetic
from ddiloco.observe.live import LiveView
from ddiloco.observe.metrics import TensorBoard
from ddiloco.observe.report import write_report
from ddiloco.resilience import flows
from ddiloco.runtime import initial, weights
from ddiloco.runtime.rejoin import open_storage
from ddiloco.training import data, tokenizers
from ddiloco.training.compiled import kept_in
from ddiloco.training.evaluate import Evaluator
from ddiloco.training.generate import generate

EXIT_STATUS = {"finished": 0, "failed": 1, "stopped": 130}
ENGINES = {  # imported when they are asked for: Ray is not everybody's
  "threads": ("ddiloco.engines.threads", "ThreadsEngine"),
  "processes": ("ddiloco.engines.processes", "ProcessesEngine"),
  "ray": ("ddiloco.engines.ray", "RayEngine"),
}
EVALUATION_BATCH = 16  # sequences at most ...
EVALUATION_LOGITS = 1 << 26  # ... and values of logits at once: 256 MiB


def train(
  config: Config,
  workdir: Path,
  overwrite: bool = False,
  engine: str = "threads",
  options: Mapping[str, Any] | None = None,
  dashboard: Where | None = None,
) -> int:
  """Runs `config` in `workdir` on an engine of `ENGINES`; returns the process' exit status.

  A run that is there goes on from its newest snapshot. `options` are further arguments of the
  engine. `dashboard`: where the run can be watched, None: nowhere.
  """
  initial.make_plan(config)  # before a device is touched
  config = initial.absolute_start(config)
  if not check(workdir, config, overwrite):
    initial.checked_start(config)
    _refuse_own_start(config, workdir, overwrite)
    _refuse_others_snapshots(config, overwrite)
  corpus = data.open_corpus(config.data)
  loss = held_out_loss(config, corpus)
  runner = make_engine(engine)(config, workdir, corpus, loss, **(options or {}))
  served = Dashboard(workdir, dashboard) if dashboard else None  # its port is open, or refused
  with held(workdir), kept_in(workdir / COMPILED):
    goes_on = claim(workdir, config, overwrite)
    with served or contextlib.nullcontext():
      if served:
        print(f"Dashboard: {served.url}")
      return _train(runner, config, workdir, corpus, loss, goes_on)


def _train(
  runner: Any, config: Config, workdir: Path, corpus: data.Corpus, loss, goes_on: bool
) -> int:
  print(config.to_json())
  if goes_on:
    print(f"\nThe run in {workdir} goes on from its newest snapshot.")
  began = time.monotonic()
  board = TensorBoard(workdir)
  with LiveView() as live:
    outcome = runner.run([live, board])
  board.close()

  def compare() -> dict[str, float]:
    if not config.run.compare_alone or outcome.reason != "finished":
      return {}
    return _train_alone(config, workdir, corpus, loss, runner)

  conclude(config, workdir, outcome, loss, began, compare)
  return 1 if outcome.lost else EXIT_STATUS[outcome.reason]


def make_engine(name: str) -> Callable[..., Any]:
  """The engine's class: (config, workdir, corpus, loss) with run(listeners) -> Outcome, and steps.

  Raises:
    ConfigError: there is none of that name, or what it needs is not installed.
  """
  if name not in ENGINES:
    raise ConfigError(f"--engine={name}: must be one of {', '.join(ENGINES)}. Fix: use threads.")
  module, cls = ENGINES[name]
  try:
    return getattr(importlib.import_module(module), cls)
  except ModuleNotFoundError as error:
    raise ConfigError(
      f"--engine={name}: needs a package that is not installed ({error.name})."
      f" Fix: pip install 'ddiloco[{name}]'."
    ) from error


def conclude(
  config: Config,
  workdir: Path,
  outcome: Outcome,
  loss: Callable[[Mapping[str, np.ndarray]], float],
  began: float,
  compare: Callable[[], Mapping[str, Any]] = dict,
) -> None:
  """Leaves result, outcome and report in `workdir`, and prints the main numbers.

  Args:
    config: the run's.
    workdir: of the run.
    outcome: what its engine returned.
    loss: held-out loss of a parameter tree.
    began: `time.monotonic()` when it started.
    compare: called once the result is safe; gives what it is compared with.
  """
  params, losses = _best(outcome, loss)
  weights.save(workdir / "result", params)
  extra: dict[str, Any] = {
    "reason": outcome.reason,
    **_untrained(config, loss),
    "loss_merged": losses,
    "learner_steps": {str(m): steps for m, steps in sorted(outcome.steps.items())},
  }
  if outcome.lost:
    extra["lost"] = outcome.lost
  extra |= compare()
  if config.run.sample_tokens:
    run = config.run
    extra["sample"] = sample(workdir, config, run.prompt, run.sample_tokens, 0.7, config.seed)
  extra["seconds"] = round(time.monotonic() - began, 1)
  (workdir / OUTCOME).write_text(json.dumps(extra, indent=2) + "\n")
  _print_end(write_report(workdir, extra), workdir, extra)


def _refuse_own_start(config: Config, workdir: Path, overwrite: bool) -> None:
  """Replacing a run by one that starts from it would delete what it is to start from."""
  if not (overwrite and config.run.init_from):
    return
  start = Path(weights.locate(config.run.init_from, "run.init_from")).resolve()
  if any((workdir / name).resolve() in (start, *start.parents) for name in OURS):
    raise ConfigError(
      f"run.init_from = {config.run.init_from!r}: --overwrite would delete it with the run in"
      f" --workdir={workdir}. Fix: give the new run another --workdir."
    )


def _refuse_others_snapshots(config: Config, overwrite: bool) -> None:
  """Snapshots outside the workdir are not ours to delete, and a run goes on from what it finds."""
  path = config.checkpoint.path
  storage = open_storage(config, initial.make_plan(config), Path())
  if overwrite and path and storage is not None and storage.committed():
    raise ConfigError(
      f"checkpoint.path = {path!r}: has snapshots, and --overwrite deletes only what is in workdir."
      " Fix: choose another path, or delete them yourself."
    )


def _untrained(config: Config, loss) -> dict[str, float]:
  """Held-out loss of what the run started from; a run is not lost because that is gone by now."""
  try:
    return {"loss_untrained": loss(initial.initial_params(config))}
  except ConfigError as error:
    print(f"\nThe untrained model's loss is left out: {error}")
    return {}


def _best(outcome: Outcome, loss) -> tuple[Mapping[str, np.ndarray], float]:
  """The global model and its held-out loss; of islands that trained alone, the best one's."""
  candidates = list(outcome.island_params.values()) or [outcome.params]
  losses = [loss(params) for params in candidates]
  best = min(range(len(losses)), key=lambda i: (np.isnan(losses[i]), losses[i]))  # NaN is worst
  return candidates[best], losses[best]


def _train_alone(
  config: Config, workdir: Path, corpus: data.Corpus, loss, runner: Any
) -> dict[str, float]:
  """Every island alone, without a syncer, for as many steps as the busiest one made together.

  What the exchange has to beat: the same islands, compiled steps and learning rates. Always in
  threads, whatever engine trained them together.
  """
  from ddiloco.engines.threads import ThreadsEngine

  steps = max(runner.steps.values())
  print(f"For comparison: every island alone, without a syncer, for {steps} steps each.")
  everybody = sum(config.tokens_per_step(m) for m in range(config.islands.num_learners))
  alone = dataclasses.replace(
    config,
    sync=dataclasses.replace(config.sync, num_shards=0),
    run=dataclasses.replace(config.run, total_tokens=steps * everybody),
    chaos=dataclasses.replace(config.chaos, faults=()),
  )
  islands = runner.islands if isinstance(runner, ThreadsEngine) else None
  engine = ThreadsEngine(alone, workdir / "alone", corpus, loss, islands)
  with LiveView() as live:
    outcome = engine.run([live])
  if outcome.reason != "finished":
    return {}  # half a comparison is none
  _, best = _best(outcome, loss)
  return {"loss_best_island_alone": best, "steps_alone": steps}


def held_out_loss(config: Config, corpus: data.Corpus):
  """A function: held-out loss (nats per token) of a parameter tree, on a device no island uses."""
  fit = EVALUATION_LOGITS // (config.data.sequence_length * config.model.vocab_size)
  batches = data.heldout_batches(corpus, config.data, max(1, min(EVALUATION_BATCH, fit)))
  return Evaluator(config.model, batches, jax.local_devices(backend="cpu")[-1]).loss


def load_result(workdir: Path, config: Config) -> dict[str, np.ndarray]:
  """The trained global model of a run, name -> f32 array.

  Raises:
    ConfigError: there is none, or it is damaged or of another model.
  """
  path = workdir / "result"
  params = weights.load(path, "result")
  weights.require_fit(path, params, initial.shapes(config.model), "result")
  return params


def sample(
  workdir: Path, config: Config, prompt: str, tokens: int, temperature: float, seed: int
) -> str:
  """What the trained global model writes after `prompt`."""
  return prompt + generate(
    config.model,
    load_result(workdir, config),
    tokenizers.load(config.data.tokenizer),
    prompt,
    tokens,
    temperature=temperature,
    seed=seed,
    context_length=config.data.sequence_length,
  )


def evaluate(workdir: Path, config: Config) -> str:
  """One JSON line: held-out loss of the trained global model."""
  corpus = data.open_corpus(config.data)
  loss = held_out_loss(config, corpus)(load_result(workdir, config))
  return json.dumps(
    {"loss": loss, "bits_per_token": loss / float(np.log(2)), "workdir": str(workdir)}
  )


def report(workdir: Path) -> str:
  """Draws the report again from the events; returns where it is."""
  saved_config(workdir)
  known = workdir / OUTCOME
  try:
    extra = json.loads(known.read_text()) if known.exists() else {}
  except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
    raise ConfigError(
      f"{known}: cannot be read ({error}). Fix: delete it; the report then shows the events alone."
    ) from error
  return str(write_report(workdir, extra) / "index.html")


def _print_end(folder: Path, workdir: Path, extra: Mapping[str, Any]) -> None:
  print("\nHeld-out loss, nats per token (lower is better):")
  for name in ("loss_untrained", "loss_best_island_alone", "loss_merged"):
    if name in extra:
      print(f"  {name:<24} {extra[name]:.4f}")
  if "sample" in extra:
    print(f"\nThe merged model writes:\n{extra['sample']}")
  if "lost" in extra:
    print(f"\nWork was lost: {extra['lost']}")
  print(f"\nReport: {folder / 'index.html'}   Result: {workdir / 'result'}")


def describe(config: Config) -> str:
  """The dry run: final config, model, fragments and bytes, without touching a device."""
  plan, config = initial.make_plan(config), initial.checked_start(config)
  count = arithmetic.num_params(config.model)
  flops = arithmetic.flops_per_token(config.model, config.data.sequence_length)
  lines = [config.to_json(), "", f"model: {count:,} parameters, {flops:.3g} FLOPs per token"]
  steps = config.planned_steps()
  lines.append(f"run: {config.run.total_tokens:,} tokens, {steps:,} steps of every island")
  for m in range(config.islands.num_learners):
    island = config.islands.island(m)
    shape = f"data={island.data} fsdp={island.fsdp} tensor={island.tensor}"
    lines.append(
      f"island {m}: {island.devices or 'an even share of'} devices, {shape},"
      f" {config.tokens_per_step(m):,} tokens a step"
    )
  if config.sync.num_shards:
    sizes = [f.size for f in plan.fragments]
    lines.append(f"fragments: {len(sizes)}, {min(sizes):,} to {max(sizes):,} values each")
    for shard in range(config.sync.num_shards):
      owned = fragments.owned_by(shard, config.sync.num_shards, len(sizes))
      lines.append(f"shard {shard}: owns fragments {', '.join(map(str, owned))}")
    per_step = flows.exchanged(sizes, config.sync).per_step(config.sync)
    lines.append(
      f"traffic: about {per_step:,.0f} bytes per step and island, both ways together"
      " (ddiloco plan says more)"
    )
  return "\n".join(lines)
