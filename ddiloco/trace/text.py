"""The trace of a run as text: a line for each operation, in order of time."""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path

import msgspec

from ddiloco.config import ConfigError
from ddiloco.observe.eventlog import lines_of, logs_in
from ddiloco.protocol.events import Event, decode
from ddiloco.trace.check import check
from ddiloco.trace.operations import Operation, Trace, read_logs
from ddiloco.workdir import saved_config


def read_trace(workdir: str | os.PathLike[str]) -> Trace:
  """The trace in WORKDIR/events; an empty one without that folder.

  What a line needs is in another log before the line is written. So of a run under way the lines
  that were there at first have all that they need a moment later; lines that came in between may
  not.

  Raises:
    ConfigError: a log is of another format.
  """
  first, then = _sizes(workdir), _sizes(workdir)
  logs = {p.stem: (decode(each) for _, each in lines_of(p, 0, n)) for p, n in then.items()}
  late = {p.stem: sum(1 for _ in lines_of(p, first.get(p, 0), n)) for p, n in then.items()}
  return read_logs(logs, late)


def _sizes(workdir: str | os.PathLike[str]) -> dict[Path, int]:
  """The size of every log, in bytes."""
  return {path: path.stat().st_size for path in logs_in(workdir)}


def line_of(op: Operation) -> str:
  """One operation in one line: time, role and incarnation, kind, and fields as in its log."""
  fields = msgspec.to_builtins(op).items()  # without those that have their default
  said = ", ".join(
    f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
    for name, value in fields
    if name not in (*Event.__struct_fields__, "kind") and not isinstance(value, dict)
  )
  return f"{op.time:10.3f} s  {f'{op.role}.{op.incarnation}':<14} {op.kind:<9} {said}"


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


def print_trace(trace: Trace, role: str) -> None:
  """Prints a line for every operation of a role ("": of all), by time; each role keeps its order.

  Clocks of several hosts differ, so operations of nearly the same time may be in the wrong order.

  Raises:
    ConfigError: there is no such role.
  """
  if role and role not in trace.roles:
    known = ", ".join(sorted(trace.roles))
    raise ConfigError(f"--role={role}: has no events in this run. Fix: use one of {known}.")
  logs = ([e.operation for e in trace.roles[each]] for each in ([role] if role else trace.roles))
  timed = [pair for log in logs for pair in zip(accumulate((op.time for op in log), max), log)]
  for _, op in sorted(timed, key=lambda pair: pair[0]):
    print(line_of(op))


def print_invariants(trace: Trace) -> bool:
  """Prints the invariants with counts, then the problems; returns whether there are none."""
  checked = check(trace)
  print(f"\nInvariants: {'VIOLATED' if checked.problems else 'all hold'}")
  for line in checked.summary:
    print(f"  {line}")
  if trace.left_out:
    print(
      f"not known yet, and left out: the newest {trace.left_out:,} operations, since they need what"
      " other logs do not have yet (the run is under way)"
    )
  for problem in checked.problems[:MOST_PROBLEMS]:
    print(f"violated: {problem}")
  if len(checked.problems) > MOST_PROBLEMS:
    print(f"... and {len(checked.problems) - MOST_PROBLEMS:,} more")
  return not checked.problems
