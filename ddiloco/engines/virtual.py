"""The engine of virtual time: no arrays, no devices, no waiting; events and report as in real runs.

It also measures how fast this machine merges, for virtual shards and the planner.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ddiloco import workdir as workdirs
from ddiloco.checks import is_there, require
from ddiloco.config import Config
from ddiloco.core import codec
from ddiloco.core.codec import Encoded
from ddiloco.core.delta import Committed, commit, measure
from ddiloco.core.fragments import Fragment, Piece
from ddiloco.core.passes import Share, compile_for
from ddiloco.observe.eventlog import to_line
from ddiloco.observe.style import percent
from ddiloco.protocol.events import Commit, Event
from ddiloco.protocol.messages import FragmentState
from ddiloco.runtime import ValueThreads
from ddiloco.simulation import bandwidth
from ddiloco.simulation.bandwidth import F32_BYTES
from ddiloco.simulation.run import Account, Speeds, VirtualRun

LINES = 1000  # of one role that are kept until they are written
TELL_SECONDS = 5.0  # between two lines of progress, on stderr


class Logs:
  """Writes events to the same files as a real run's roles, many at a time."""

  def __init__(self, workdir: Path):
    self._folder = workdir / "events"
    self._lines: dict[str, list[bytes]] = {}

  def take(self, event: Event) -> None:
    begins = event.role not in self._lines
    lines = self._lines.setdefault(event.role, [])
    lines.append(to_line(event, begins))
    if len(lines) >= LINES:
      self._write(event.role, lines)

  def close(self) -> None:
    for role, lines in self._lines.items():
      self._write(role, lines)

  def _write(self, role: str, lines: list[bytes]) -> None:
    self._folder.mkdir(exist_ok=True)
    with (self._folder / f"{role}.jsonl").open("ab") as file:
      file.writelines(lines)
    lines.clear()


def simulate(
  config: Config,
  setting: Speeds,
  workdir: Path | None = None,
  overwrite: bool = False,
  most_seconds: float = math.inf,
) -> dict[str, Any]:
  """Runs `config` in virtual time; returns the run's numbers, as JSON has them.

  Args:
    config: the run's.
    setting: how fast everything is.
    workdir: gets the events, for dashboard and report; None: they are not kept.
    overwrite: replace a run that is there.
    most_seconds: of virtual time, after which the run stops.

  Raises:
    ConfigError: a value in config or setting is invalid, or the workdir is another run's.
  """
  began, account = time.monotonic(), Account()
  logs, tell_at = Logs(workdir) if workdir is not None else None, began + TELL_SECONDS

  def emit(event: Event) -> None:
    nonlocal tell_at
    account.take(event)
    if logs is not None:
      logs.take(event)
    if isinstance(event, Commit) and time.monotonic() >= tell_at:
      tell_at = time.monotonic() + TELL_SECONDS
      merged = f"{percent(account.run.progress)} merged"
      text = f"{event.time:,.0f} s of virtual time: {account.steps:,} steps, {merged}"
      print(text, file=sys.stderr, flush=True)

  run = VirtualRun(config, setting, emit)
  with contextlib.ExitStack() as stack:
    if workdir is not None and logs is not None:  # it is touched only after the checks
      free = overwrite or not is_there(workdir / "events")
      # It cannot go on: its events would be there twice.
      fix = "choose another directory, or add --overwrite to replace it"
      require(free, "--workdir", str(workdir), "holds a run", fix)
      stack.enter_context(workdirs.held(workdir))
      workdirs.claim(workdir, config, overwrite)
      stack.callback(logs.close)
    end = {"reason": run.finish(most_seconds), "virtual_seconds": round(run.now, 3)}
    if workdir is not None:  # says that no real run can go on here
      workdirs.write_whole(workdir / workdirs.OUTCOME, json.dumps(end) + "\n")
  return {
    **end,
    "learners": config.islands.num_learners,
    "wall_seconds": round(time.monotonic() - began, 3),
    "global_step": run.step,
    "merged_tokens": min(f.merged_tokens for f in run.store.values()),
    **account.summary(),
    **account.aftermath.numbers(),
    "unplanned_exits": [msgspec.to_builtins(event) for event in account.aftermath.unplanned()],
  }


# --- How fast this machine merges, measured on a test fragment

VALUES = 32 << 20  # of the fragment: more than caches hold
PUSHES, REPEATS = 4, 3


def random_push(size: int, name: str) -> Encoded:
  """A payload that repeats one chunk of random values."""
  values = np.random.default_rng(0).standard_normal(min(size, codec.CHUNK), np.float32)
  push = codec.empty(size, name)
  for start in range(0, size, codec.CHUNK):
    here = values[: size - start] * np.float32(1e-3)
    codec.encode_chunk(here, push, size, start, np.empty_like(here))
  return push


def commits(fragment: Fragment, config: Config, pushes: int, share: Share) -> Callable[[], object]:
  """A function that makes the same commit, of `pushes` random pushes, at every call."""
  compile_for(fragment, config)
  value = np.full(fragment.size, 0.02, np.float32)
  published = value if config.sync.publish_codec == "f32" else value - np.float32(1e-5)
  momentum = value * np.float32(0.05) if config.outer.momentum else None
  old = Committed(FragmentState(0), value, published, momentum)
  learners = tuple(range(pushes))
  each = (random_push(fragment.size, config.sync.push_codec) for _ in learners)
  arrived = {m: measure(fragment, push, share) for m, push in zip(learners, each)}
  steps, tokens = (24,) * pushes, tuple(24 * 1024 + m for m in learners)
  what = Commit(
    fragment=0,
    round=0,
    version=1,
    base_round=-1,
    learners=learners,
    incarnations=(0,) * pushes,
    steps=steps,
    tokens=tokens,
    merged_tokens=sum(tokens),
    step_tokens=(1024,) * pushes,
  )
  return lambda: commit(fragment, old, arrived, what, config, share, in_place=True)


def seconds_of(work: Callable[[], object]) -> float:
  """Seconds that one call takes."""
  began = time.perf_counter()
  work()
  return time.perf_counter() - began


def merge_gbytes(config: Config) -> float:
  """GB/s of f32 that a shard of this machine touches, as the planner counts them; takes seconds.

  Measured on commits in the run's codecs and with its outer optimizer, by as many threads as a
  shard of this config has; the median of `REPEATS`.
  """
  fragment = Fragment(0, (Piece("values", None, 0, VALUES, (VALUES,), 0, average=False),))
  count = config.sync.value_threads or len(os.sched_getaffinity(0))
  with ValueThreads(count) as threads:
    work = commits(fragment, config, PUSHES, threads.share)
    work()  # the first call touches all memory, and is not measured
    seconds = statistics.median(seconds_of(work) for _ in range(REPEATS))
  vectors = bandwidth.commit_vectors(config.sync, config.outer.momentum > 0, PUSHES)
  return vectors * F32_BYTES * VALUES / seconds / 1e9
