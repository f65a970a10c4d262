"""The trace of a run as text: a line for each operation, in order of time."""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ddiloco.config import ConfigError
from ddiloco.observe.eventlog import lines_of, logs_in
from ddiloco.observe.style import MUTED, island_colour, loss_text
from ddiloco.protocol import events
from ddiloco.trace.check import check
from ddiloco.trace.operations import INITIAL, Entry, Operation, Trace, read_logs
from ddiloco.workdir import saved_config


def read_trace(workdir: str | os.PathLike[str]) -> Trace:
  """The trace in WORKDIR/events; an empty one without that folder.

  Raises:
    ConfigError: a log is of another format.
  """
  logs = {path: lines_of(path, 0, path.stat().st_size) for path in logs_in(workdir)}
  return read_logs({path.stem: map(events.decode, lines) for path, lines in logs.items()})


def in_order(trace: Trace, roles: Collection[str] = ()) -> Iterator[Entry]:
  """The entries of these roles (none: of all) by time; each role keeps its own order.

  Clocks of several hosts differ, so entries of nearly the same time may be in the wrong order.
  """
  logs = map(trace.entries_of, roles or trace.roles)
  timed = (zip(itertools.accumulate((e.time for e in log), max), log) for log in logs)
  return (entry for _, entry in heapq.merge(*timed, key=lambda pair: pair[0]))


def line_of(entry: Entry) -> str:
  """One operation in one line: time, role and incarnation, what happened."""
  who = f"{entry.role}.{entry.incarnation}"
  return f"{entry.time:10.3f} s  {who:<14} {describe(entry.operation)}"


def describe(operation: Operation) -> str:
  """What happened, in words."""
  match operation:
    case events.Started() as op:
      home = f": {op.devices} devices, mesh {list(op.mesh)}, batch {op.batch_size}"
      return f"started{home if op.devices else ''}"
    case events.Restored(snapshot=snapshot, of_incarnation=incarnation):
      return f"restored from snapshot {snapshot} of incarnation {incarnation}"
    case events.Step() as op:
      slow = "" if op.rate_scale == 1 else f", rate x {op.rate_scale:.3g}"
      loss = "" if op.loss is None else f", loss {loss_text(op.loss)}"
      where = f"global step {op.global_step}, batch {op.position}"
      return f"step {op.step}: {where}, {op.tokens} tokens{slow}{loss}"
    case events.CopyOut() as op:
      base = f"version {op.version} ({_round(op.base_round)})"
      what = f"{op.steps} steps, {op.tokens} tokens on {base}"
      return f"copy_out {_value(op.fragment, op.round)}: {what}"
    case events.Resend() as op:
      return f"resend  {_value(op.fragment, op.round)}: the push for {_round(op.old_round)}"
    case events.Stage() as op:
      mine = ", my push is in it" if op.included else ""
      return f"stage   {_value(op.fragment, op.round)}: version {op.version}, {op.mode}{mine}"
    case events.Apply() as op:
      return f"apply   {_value(op.fragment, op.round)}: version {op.version}"
    case events.Captured(snapshot=snapshot):
      return f"captured for snapshot {snapshot}"
    case events.Saved(snapshot=snapshot, arrays=arrays):
      return f"saved snapshot {snapshot}: {len(arrays)} arrays"
    case events.Donated(fragment=fragment, donation=donation):
      return f"donated fragment {fragment}'s moments: donation {donation}"
    case events.Inherited() as op:
      whose = f"learner {op.learner} (incarnation {op.incarnation_of_donor})"
      return f"inherited fragment {op.fragment}'s moments: donation {op.donation} of {whose}"
    case events.Owns() as op:
      momentum = "none" if op.momentum_round == INITIAL else f"of {_round(op.momentum_round)}"
      text = f"version {op.version}, momentum {momentum}"
      return f"owns    {_value(op.fragment, op.round)}: {text}"
    case events.Commit() as op:
      whose = ", ".join(f"{m}.{i}" for m, i in zip(op.learners, op.incarnations))
      text = f"version {op.version} on {_round(op.base_round)} of learners {whose}"
      return f"commit  {_value(op.fragment, op.round)}: {text}; {op.tokens} tokens"


def _round(round_id: int) -> str:
  return "initial" if round_id == INITIAL else f"round {round_id}"


def _value(fragment: int, round_id: int) -> str:
  return f"fragment {fragment} {_round(round_id)}"


# --- Reads, prints and checks the trace of the run in a workdir. No JAX

MOST_PROBLEMS = 20  # shown at most: one mistake may cause many more


def open_trace(workdir: Path) -> Trace:
  """The trace of a run.

  Raises:
    ConfigError: there is no run in `workdir`, its logs have no operation yet, or cannot be read,
      for example since another version of ddiloco wrote them.
  """
  saved_config(workdir)
  try:
    trace = read_trace(workdir)
  except OSError as error:
    raise ConfigError(
      f"--workdir={workdir}: a log of its events cannot be read ({error}). Fix: make it readable;"
      " what one role did is a part of the proof."
    ) from error
  if not trace.roles:
    raise ConfigError(
      f"--workdir={workdir}: its run has no events. Fix: name a run that has begun to train."
    )
  return trace


def print_trace(trace: Trace, role: str = "") -> None:
  """Prints a line for every operation, of one role or of all; in colour on a terminal.

  Raises:
    ConfigError: there is no such role.
  """
  if role and role not in trace.roles:
    known = ", ".join(sorted(trace.roles))
    raise ConfigError(f"--role={role}: has no events in this run. Fix: use one of {known}.")
  console = Console(highlight=False, soft_wrap=True)
  for entry in in_order(trace, [role] if role else []):
    line = line_of(entry)
    if console.is_terminal:  # an island has its colour
      style = island_colour(entry.number) if entry.role.startswith("learner") else MUTED
      console.print(Text(line, style=style))
    else:
      print(line)


def print_invariants(trace: Trace) -> bool:
  """Prints the invariants with counts, then the problems; returns whether there are none."""
  checked = check(trace)
  print(f"\nInvariants: {'VIOLATED' if checked.problems else 'all hold'}")
  for line in checked.summary:
    print(f"  {line}")
  for problem in checked.problems[:MOST_PROBLEMS]:
    print(f"violated: {problem}")
  if len(checked.problems) > MOST_PROBLEMS:
    print(f"... and {len(checked.problems) - MOST_PROBLEMS:,} more")
  return not checked.problems


def devices_needed(trace: Trace) -> int:
  """The devices that a replay needs: of each learner as many as its largest island has."""
  return max(1, sum(trace.devices().values()))
