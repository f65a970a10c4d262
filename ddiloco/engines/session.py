"""A run from end to end: workdir, engine, live view, result, baselines, report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from ddiloco import custom
from ddiloco import workdir as workdirs
from ddiloco.checkpoint import weights
from ddiloco.checkpoint.restore import check_start, open_storage
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.checks import refusal, require, require_one_of
from ddiloco.config import Config, ConfigError
from ddiloco.core import fragments
from ddiloco.dashboard.server import Dashboard, Where
from ddiloco.engines.engine import RunResult, newer_result, save_result
from ddiloco.engines.role_spec import beside, terminates
from ddiloco.environment import FINISHED, INTERRUPTED, LOST
from ddiloco.models import transformer
from ddiloco.observe.eventlog import EventStream
from ddiloco.observe.guards import warn
from ddiloco.observe.live import LiveView, TensorBoard
from ddiloco.observe.report import write_report
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import loss_text
from ddiloco.roles import initial
from ddiloco.simulation import bandwidth
from ddiloco.training import data, evaluate, step
from ddiloco.training.devices import kept_in, usable
from ddiloco.training.evaluate import HeldoutLoss
from ddiloco.training.tokens import load_tokenizer

T = TypeVar("T")
EXIT_STATUS = {"finished": FINISHED, "failed": LOST, "stopped": INTERRUPTED}
ENGINES = ("threads", "processes", "ray")  # imported only when used: Ray may not be installed
ROOM = "make room, or the place writable"
SAVE_AGAIN_SECONDS = 10.0  # between two attempts to save the end of a run
EVALUATION_BATCH = 16  # sequences at most ...
EVALUATION_LOGITS = 1 << 26  # ... and values of logits at once: 256 MiB


def train(
  config: Config,
  workdir: Path,
  overwrite: bool = False,
  engine: str = "threads",
  options: Mapping[str, Any] | None = None,
  dashboard: Where | None = None,
  asked: threading.Event | None = None,
) -> int:
  """Runs `config` in `workdir` on an engine of `ENGINES`; returns the process' exit status.

  A run that is already in `workdir` goes on from its newest snapshot. `options` are further
  arguments of the engine. `dashboard`: where the run can be watched, None: nowhere. `asked` is set
  if a signal comes when the run is over, and only its end is measured and reported.
  """
  plan = _plan(config)
  workdirs.refuse_trained(workdir)  # before the data are opened, which may take long
  config = initial.absolute_start(config)
  # Refused now, not when there is a result.
  place = weights.followed if overwrite else weights.replaceable
  place(workdir / workdirs.RESULT, "--workdir")
  goes_on = workdirs.check(workdir, config, overwrite)
  storage = open_storage(config, plan, workdir, workdirs.run_name(workdir))
  if goes_on:
    check_start(config, workdir, storage)  # its files stay those of the last start
  else:
    initial.checked_start(config)
    _refuse_own_start(config, workdir, overwrite)
    _refuse_others_snapshots(config, storage, overwrite)
  corpus = data.open_data(config.data)
  if goes_on:
    known = refuse_other_data(config, workdir, corpus)
    initial.warn_of_other(config, known, "with which the run began, or went on")
  if config.inner.custom:
    _warn_of_own_rate(config)
  heldout = evaluator(config, corpus) if config.run.evaluations else None
  measure = heldout.measure if heldout is not None else None
  runner = make_engine(engine)(config, workdir, corpus, measure, **(options or {}))
  with contextlib.closing(runner):
    served = Dashboard(workdir, dashboard) if dashboard else None  # opens its port, or is refused
    alone = workdirs.held(workdir, config.checkpoint.path)
    parts = engine == "threads" and config.num_islands() + config.run.evaluator_devices > 1
    with alone, kept_in(workdir / workdirs.COMPILED, parts):
      workdirs.claim(workdir, config, overwrite)
      sources = json.dumps({"corpus": data.digest(corpus), **initial.sources(config)})
      workdirs.write_whole(workdir / workdirs.SOURCES, f"{sources}\n")
      islands = (workdir / workdirs.ISLANDS / f"learner-{m}" for m in range(config.num_islands()))
      for saved in (workdir / workdirs.RESULT, *islands):
        weights.clear(saved)
      with served or contextlib.nullcontext():
        if served:
          print(f"Dashboard: {served.url}")
        return _train(runner, config, workdir, corpus, heldout, asked or threading.Event())


def _plan(config: Config) -> fragments.Plan:
  """The plan; a model that cannot be partitioned so, or has nothing for the inner optimizer, is
  refused before a device is touched."""
  plan = initial.make_plan(config)
  step.optimizer(config.inner, custom.load_model(config.model).logical_axes())
  return plan


def _warn_of_own_rate(config: Config) -> None:
  """Warns of an optimizer of the user's own that seems to have a learning rate as well."""
  inner, length = config.inner, custom.first_update(config)
  if 0 < length < custom.OWN_RATE:
    rule = f"its first update of a gradient of 1 is {length:.1g}"
    fix = (
      f"give it a learning rate of 1: inner.learning_rate ({inner.learning_rate:g}) multiplies it"
    )
    warn(f"inner.custom = {inner.custom!r}: {rule}. Fix: {fix}.")


def _train(
  runner: Any,
  config: Config,
  workdir: Path,
  corpus: data.Source,
  heldout: HeldoutLoss | None,
  asked: threading.Event,
) -> int:
  print(f"Config: {workdir / 'config.json'}")
  # Around all of it: no signal between the run's end and its outcome ends the process.
  with terminates(runner.leave) as late:
    with contextlib.closing(TensorBoard(workdir)) as board, LiveView() as live:
      outcome = runner.run([live, board])

    def compare(run: RunState) -> dict[str, float]:
      if heldout is None or outcome.reason != "finished":
        return {}
      kinds = {kind for island in run.islands.values() for kind in island.chip_kinds}
      here = {device.device_kind for device in jax.devices()}
      rule = f"islands trained on {', '.join(sorted(kinds))}, which this process does not use"
      fix = "give another run sync.num_shards = 0 and --engine=threads: its islands train alone"
      require(kinds <= here, "run.compare_alone", True, rule, fix)
      # Not those that were lost and made again; and the global step may be ahead of every island's.
      steps = max(min(island.steps, island.global_step) for island in run.islands.values())
      return _train_alone(config, workdir, corpus, heldout, runner, steps)

    try:
      with terminates(asked):
        if late:
          asked.set()
        # Beside the main thread: a signal's handler, which sets `asked`, may run inside `wait`.
        pause = lambda seconds: beside(lambda: asked.wait(seconds))
        loss, compared = heldout and heldout.loss, compare if config.run.compare_alone else None
        conclude(config, workdir, outcome, loss, compared, pause)
    except OSError as error:
      print(f"\nThe run's end is not saved: {error}. Fix: {ROOM}; give the same command again.")
      return EXIT_STATUS["failed"]
  return LOST if outcome.lost else EXIT_STATUS[outcome.reason]


def make_engine(name: str) -> Callable[..., Any]:
  """The engine's class: (config, workdir, corpus, measure), and run(listeners) -> RunResult.

  Raises:
    ConfigError: there is no engine of that name, or a package that it needs is not installed.
  """
  require_one_of("--engine", name, ENGINES)
  try:
    return getattr(importlib.import_module(f"ddiloco.engines.{name}"), f"{name.title()}Engine")
  except ModuleNotFoundError as error:
    rule = f"needs a package that is not installed ({error.name})"
    raise refusal("--engine", name, rule, f"pip install 'ddiloco[{name}]'") from error


def conclude(
  config: Config,
  workdir: Path,
  outcome: RunResult,
  loss: Callable[[Mapping[str, np.ndarray]], float] | None,
  compare: Callable[[RunState], Mapping[str, Any]] | None = None,
  pause: Callable[[float], bool | None] = time.sleep,
) -> None:
  """Leaves result, outcome and report in `workdir`, and prints the main numbers.

  The result is saved first, for which a full disk has network.give_up_seconds to get room. A later
  step that fails (a loss for which there is no memory, ...) or is interrupted is reported and left
  out: it can be repeated later, and the exit status is about the training.

  Args:
    config: the run's. With run.evaluations = 0 nothing is evaluated.
    workdir: of the run.
    outcome: what the run's engine returned.
    loss: held-out loss of a parameter tree; None where nothing is evaluated.
    compare: called once the result is saved, with the run's state; returns the numbers to compare
      the result with. None: with nothing.
    pause: waits for so many seconds; true: asked to end, it tries no more to save what failed, and
      measures nothing.

  Raises:
    OSError: the result cannot be saved. Then no outcome is written: the run can go on.
  """
  extra: dict[str, Any] = {"reason": outcome.reason, "total_tokens": config.run.total_tokens}
  if outcome.reason == "failed":
    extra["why"] = outcome.why
  measured = lambda: _merged(config, workdir, outcome, loss)
  patience = config.network.give_up_seconds, pause
  seen = config, workdir, outcome.merged_tokens
  if newer := until_saved(lambda: newer_result(*seen), *patience):
    extra["left_out"] = {"the model of this start": newer}
    measured = lambda: {"loss_merged": loss(load_result(workdir, config))}
  else:
    until_saved(lambda: _save(config, workdir, outcome), *patience)
  if outcome.lost:
    extra["lost"] = outcome.lost
  until_saved(lambda: write_outcome(workdir, extra), *patience)
  saved = f"The result is saved in {workdir / workdirs.RESULT}"
  print(f"\n{saved}. Its figures and the report follow.", flush=True)
  told = functools.cache(lambda: _state(config, workdir))  # the log is read once
  run = config.run
  if run.evaluations and loss is not None:
    untrained = lambda: _untrained(config, loss, told())
    _measure("the untrained model's loss", extra, untrained, pause)
    _measure("the result's loss", extra, measured, pause)
    if compare is not None:
      _attempt("the comparison", extra, lambda: compare(told()), pause)
  if run.sample_tokens and evaluate.makes_text(config.model):
    arguments = run.prompt, run.sample_tokens, 0.7, config.seed
    _measure("the sample", extra, lambda: {"sample": sample(workdir, config, *arguments)}, pause)
  _attempt("the count of steps", extra, lambda: _learner_steps(told()))
  began, last = workdirs.start_time, workdirs.LAST_KNOWN  # of the run, also if it went on
  took = lambda: {last: max(0.0, round(time.time() - began(workdir), 1))}
  _attempt("the time of the run", extra, lambda: _date(workdir) | took())
  _attempt("the report", extra, lambda: _write_end(workdir, told(), extra))
  _print_end(config, workdir, extra)


def until_saved(save: Callable[[], T], seconds: float, pause: Callable[[float], bool | None]) -> T:
  """What `save` returns; it is called for so long again while it raises OSError: the end of a run
  is worth that."""
  until = time.monotonic() + seconds
  while True:
    try:
      return save()
    except OSError as error:
      if (left := until - time.monotonic()) <= 0:
        raise
      again = f"It is tried again for {left:.0f} s"
      print(f"\nThe run's end is not saved yet: {error}. Fix: {ROOM}. {again}.", flush=True)
      if pause(min(SAVE_AGAIN_SECONDS, seconds)):
        raise


def _save(config: Config, workdir: Path, outcome: RunResult) -> None:
  """Saves the result; of islands that trained alone all, since the best is not known yet."""
  if not outcome.saved:
    print(f"\nThe result is being saved in {workdir / workdirs.RESULT} ...", flush=True)
    save_result(config, workdir, outcome.params, outcome.merged_tokens)
  if len(outcome.island_params) > 1:
    for m, params in outcome.island_params.items():
      weights.save(workdir / workdirs.ISLANDS / f"learner-{m}", params)


def write_outcome(workdir: Path, extra: Mapping[str, Any]) -> None:
  """Writes what is known of a run's end beside its events; an earlier outcome is replaced.

  Raises:
    OSError: it cannot be written.
  """
  workdirs.write_whole(workdir / workdirs.OUTCOME, json.dumps(extra, indent=2) + "\n")


def _state(config: Config, workdir: Path) -> RunState:
  """The state of a run by its events."""
  return RunState(config).read(EventStream(workdir))


def _date(workdir: Path) -> dict[str, str]:
  """When the run began, by the calendar, if that is known."""
  began = workdirs.started(workdir)
  return {} if began is None else {"began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began))}


def _learner_steps(run: RunState) -> dict[str, dict[str, int]]:
  """Inner steps of every learner, in all its incarnations of all starts of the run."""
  made = {str(m): island.steps for m, island in sorted(run.islands.items()) if island.steps}
  return {"learner_steps": made}


def _write_end(workdir: Path, run: RunState, extra: Mapping[str, Any]) -> Mapping[str, Any]:
  """Writes all that is known at the end, and the report that shows it."""
  write_outcome(workdir, extra)
  write_report(workdir, extra, run)
  return {}


def _attempt(
  what: str,
  extra: dict[str, Any],
  make: Callable[[], Mapping[str, Any]],
  pause: Callable[[float], bool | None] = time.sleep,
) -> None:
  """Adds what `make` returns to `extra`; an exception is noted there under "left_out"."""
  try:
    if pause(0.0):
      raise KeyboardInterrupt
    extra |= make()
  except KeyboardInterrupt:
    reason = "interrupted"
  except Exception as error:
    reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
  else:
    return
  extra["left_out"] = {**extra.get("left_out", {}), what: reason}


def _measure(
  what: str,
  extra: dict[str, Any],
  make: Callable[[], Mapping[str, Any]],
  pause: Callable[[float], bool | None],
) -> None:
  """`_attempt`, said, and beside the main thread, which could hear no second Ctrl-C while `make`
  computes."""

  def begin() -> Mapping[str, Any]:
    print(f"  {what} ...", flush=True)  # that of a large model may take long
    return make()

  _attempt(what, extra, lambda: beside(begin), pause)


def _refuse_own_start(config: Config, workdir: Path, overwrite: bool) -> None:
  """Refuses to replace a run by one that starts from its weights: these would be deleted."""
  if not (overwrite and config.run.init_from):
    return
  field, value = "run.init_from", config.run.init_from
  start = Path(weights.locate(value, field)).resolve()
  own = any(path.resolve() in (start, *start.parents) for path in workdirs.left_by_a_run(workdir))
  rule = f"--overwrite would delete it with the run in --workdir={workdir}"
  require(not own, field, value, rule, "give the new run another --workdir")


def refuse_other_data(config: Config, workdir: Path, source: data.Source) -> dict[str, Any]:
  """Refuses to go on with other data: what was trained on might be held out then, and be measured
  as if it had never been seen. Roles that are started by hand note theirs.

  Returns:
    The digests with which the run began.
  """
  digest, file = data.digest(source), workdir / workdirs.SOURCES
  known = workdirs.mapping(file)
  if "corpus" not in known:
    known["corpus"] = digest
    workdirs.write_whole(file, f"{json.dumps(known)}\n")
  began = f"the run in --workdir={workdir} began with other data (of data.source"
  rule = f"{began} {config.data.source!r}), of which other parts are held out"
  fix = "bring the old files back, or begin another run from this one's result (run.init_from)"
  require(known["corpus"] == digest, "data.path", config.data.path, rule, fix)
  return known


def _refuse_others_snapshots(config: Config, storage: Storage | None, overwrite: bool) -> None:
  """Refuses to overwrite a run with snapshots outside the workdir: they would not be deleted, and
  the new run would go on from them."""
  path = config.checkpoint.path
  if not (overwrite and path and storage is not None):
    return
  try:
    there = storage.committed()
  except OSError as error:
    rule, fix = f"cannot be searched for snapshots ({error})", "choose one you may read and write"
    raise refusal("checkpoint.path", path, rule, fix) from error
  name = storage.path.name
  rule = f"has snapshots of {name!r}, and --overwrite deletes only what is in workdir"
  fix = "choose another path or name, or delete them yourself"
  require(not there, "checkpoint.path", path, rule, fix)


def _untrained(config: Config, loss: Callable[..., float], run: RunState) -> dict[str, float]:
  """Held-out loss of the initial parameters; made again if no evaluator of the run measured it."""
  known = next((e.loss for e in run.curves.evaluations.items if not e.global_step), None)
  return {"loss_untrained": loss(initial.initial_params(config)) if known is None else known}


def _merged(config: Config, workdir: Path, outcome: RunResult, loss) -> dict[str, Any]:
  """Held-out loss of the result; if islands trained alone, the best one becomes the result."""
  if not outcome.island_params:
    known = outcome.loss  # of a large model it takes long
    return {"loss_merged": loss(outcome.params) if known is None else known}
  best, value = _best(outcome, loss)
  save_result(config, workdir, outcome.island_params[best], outcome.merged_tokens)
  return {"loss_merged": value, "result_of_learner": best}


def _best(outcome: RunResult, loss) -> tuple[int, float]:
  """Of islands that trained alone, the best and its held-out loss; NaN is worst."""
  losses = {m: loss(params) for m, params in outcome.island_params.items()}
  best = min(losses, key=lambda m: (np.isnan(losses[m]), losses[m]))
  return best, losses[best]


def _train_alone(
  config: Config, workdir: Path, corpus: data.Source, heldout: HeldoutLoss, runner: Any, steps: int
) -> dict[str, float]:
  """Trains every island alone, without a syncer, for the `steps` that the busiest learner made.

  This is the baseline for the exchange: the same islands, compiled steps and learning rates. It
  always runs in threads, whatever engine made the run.
  """
  from ddiloco.engines.threads import ThreadsEngine

  print(f"For comparison: every island alone, without a syncer, for {steps} steps each.")
  # All devices of an island are in this process.
  overrides = {m: {**own, "hosts": 1} for m, own in config.islands.overrides.items()}
  alone = dataclasses.replace(
    config,
    islands=dataclasses.replace(config.islands, hosts=1, overrides=overrides),
    sync=dataclasses.replace(config.sync, num_shards=0),
    run=dataclasses.replace(config.run, total_tokens=steps * config.planned_tokens_per_step),
    chaos=dataclasses.replace(config.chaos, faults=()),
  )
  islands = runner.islands if isinstance(runner, ThreadsEngine) else None
  engine = ThreadsEngine(alone, workdir / "alone", corpus, heldout.measure, islands)
  with LiveView() as live:
    outcome = engine.run([live])
  if outcome.reason == "stopped":
    raise KeyboardInterrupt
  if outcome.reason == "failed":
    raise RuntimeError(outcome.why)
  _, best = _best(outcome, heldout.loss)
  return {"loss_best_island_alone": best, "steps_alone": steps}


def evaluator(config: Config, corpus: data.Source) -> HeldoutLoss:
  """Measures parameter trees on the held-out data, on devices that no island uses.

  Raises:
    ConfigError: JAX has fewer devices than run.evaluator_devices here, or not those that are asked
      for, or the model cannot be measured with the user's own held-out batches.
  """
  asked = config.run.evaluator_devices
  devices = usable()[-asked:] if asked else jax.local_devices(backend="cpu")[-1:]
  rule, fix = f"JAX has {len(devices)} devices in this process", "lower it, or 0: one of the CPU"
  require(len(devices) >= asked, "run.evaluator_devices", asked, rule, fix)
  fit = len(devices) * EVALUATION_LOGITS // (config.data.sequence_length * config.model.vocab_size)
  batch_size = max(len(devices), min(EVALUATION_BATCH, fit))
  batches = evaluate.read_heldout(config, corpus, batch_size)
  return HeldoutLoss(config.model, batches, devices)


def load_result(workdir: Path, config: Config) -> dict[str, np.ndarray]:
  """The trained global model of a run, name -> f32 array.

  Raises:
    ConfigError: there is no result, or it is damaged or of another model.
  """
  path = workdir / workdirs.RESULT
  params = weights.load(path, "result")
  weights.require_fit(path, params, initial.shapes(config.model), "result")
  initial.warn_of_changes(config, path)
  return params


def as_huggingface(
  config: Config, params: Mapping[str, np.ndarray], end_token: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """The model for Hugging Face's classes: what its config.json says, and its tensors.

  Args:
    config: the run's.
    params: the model's own arrays.
    end_token: of its tokenizer.
  """
  shape = {
    **transformer.huggingface_config(config.model),
    "max_position_embeddings": config.data.sequence_length,
    "bos_token_id": None,
    "eos_token_id": end_token,
  }
  return shape, transformer.huggingface_tensors(config.model, params)


def sample(
  workdir: Path, config: Config, prompt: str, tokens: int, temperature: float, seed: int
) -> str:
  """What the trained global model writes after `prompt`.

  Raises:
    ConfigError: the model makes no text, or there is no result.
  """
  evaluate.refuse_without_text(config.model)
  params, tokenizer = load_result(workdir, config), load_tokenizer(config.data.tokenizer)
  how = {"temperature": temperature, "seed": seed, "context_length": config.data.sequence_length}
  return prompt + evaluate.generate(config.model, params, tokenizer, prompt, tokens, **how)


def measure(workdir: Path, config: Config) -> dict[str, float]:
  """The held-out measures of the trained global model.

  Raises:
    ConfigError: there is no result, or it is damaged or of another model.
  """
  params = load_result(workdir, config)
  measured = evaluator(config, data.open_data(config.data)).measure(params)
  if evaluate.makes_text(config.model):
    measured["bits_per_token"] = measured["loss"] / float(np.log(2))
  return measured


def report(workdir: Path) -> str:
  """Draws the report again from the events; returns its path.

  Raises:
    ConfigError: there is no run, a file of it cannot be read, or the report cannot be written.
  """
  config = workdirs.saved_config(workdir)
  try:
    lives = {"under_way": True} if workdirs.under_way(workdir) else {}
    extra = workdirs.outcome(workdir) | lives | _date(workdir)
    return str(write_report(workdir, extra, _state(config, workdir)) / "index.html")
  except OSError as error:
    rule, place = f"its report cannot be drawn ({error})", workdir / "report"
    fix = f"make room, its events readable and {place} a directory you may write to"
    raise refusal("--workdir", str(workdir), rule, fix) from error


def _print_end(config: Config, workdir: Path, extra: Mapping[str, Any]) -> None:
  result = "merged model" if config.sync.num_shards else "best island"
  losses = {
    "untrained": extra.get("loss_untrained"),
    "best island alone": extra.get("loss_best_island_alone"),
    result: extra.get("loss_merged"),
  }
  if known := {name: loss for name, loss in losses.items() if loss is not None}:
    unit = ", nats per token" * evaluate.makes_text(config.model)
    print(f"\nHeld-out loss{unit} (lower is better):")
    for name, loss in known.items():
      print(f"  {name:<18} {loss_text(loss)}")
  for what, reason in extra.get("left_out", {}).items():
    print(f"\nWARNING: {what} is left out: {reason}. The result is saved.")
  if "sample" in extra:
    print(f"\nThe {result} writes:\n{extra['sample']}")
  if "lost" in extra:
    print(f"\nWork was lost: {extra['lost']}")
  drawn = "the report" not in extra.get("left_out", {})
  report = f"Report: {workdir / 'report' / 'index.html'}   " if drawn else ""
  print(f"\n{report}Result: {workdir / workdirs.RESULT}")
  if extra["reason"] != "finished":
    why = f" ({extra['why']})" if "why" in extra else ""
    print(f"The run is not finished{why}: the same command goes on with it.")


def describe(config: Config, corpus: data.Corpus | None = None) -> str:
  """The dry run: final config, model, data, fragments and bytes, without touching a device."""
  plan, config = _plan(config), initial.checked_start(config)
  lines = [config.to_json(), "", f"model: {sum(plan.sizes):,} parameters"]
  if flops := custom.flops_per_token(config):
    lines[-1] += f", {flops:.3g} FLOPs per token"
  steps = config.planned_steps()
  lines.append(f"run: {config.run.total_tokens:,} tokens, {steps:,} steps of every island")
  if corpus is not None:
    tokens = len(corpus.train) * config.data.sequence_length
    epochs = config.run.total_tokens / tokens
    lines.append(f"data: {tokens:,} tokens to train on, which the run reads {epochs:.3g} times")
  else:  # see data.check_here
    lines.append("data: not checked: a source of your own, not on this machine, or long texts")
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
    per_step = bandwidth.exchanged(sizes, config.sync).per_step(config.sync)
    lines.append(
      f"traffic: about {per_step:,.0f} bytes per step and island, both ways together"
      " (ddiloco plan says more)"
    )
  return "\n".join(lines)
