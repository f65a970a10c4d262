"""The tape of the run in a workdir: reads it, prints it, says whether it fits together. No JAX."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from ddiloco.config import ConfigError
from ddiloco.core.invariants import check
from ddiloco.core.tape import Started, Tape
from ddiloco.engines.workdir import saved_config
from ddiloco.observe.tape import in_order, line_of, read_tape, role_style

MOST_PROBLEMS = 20  # that are shown: one mistake may spoil all that follows


def open_tape(workdir: Path) -> Tape:
  """The tape of a run.

  Raises:
    ConfigError: there is no run in `workdir`, or nothing happened in it yet.
  """
  saved_config(workdir)
  tape = read_tape(workdir)
  if not tape.roles:
    raise ConfigError(
      f"--workdir={workdir}: its run has no events. Fix: name a run that has begun to train."
    )
  return tape


def print_tape(tape: Tape, role: str = "") -> None:
  """Prints a line for every operation, of one role or of all; in colour on a terminal.

  Raises:
    ConfigError: there is no such role.
  """
  if role and role not in tape.roles:
    known = ", ".join(sorted(tape.roles))
    raise ConfigError(f"--role={role}: has no events in this run. Fix: use one of {known}.")
  console = Console(highlight=False, soft_wrap=True)
  for entry in in_order(tape, [role] if role else []):
    line = line_of(entry)
    if console.is_terminal:
      console.print(Text(line, style=role_style(entry)))
    else:
      print(line)


def print_invariants(tape: Tape) -> bool:
  """Prints what must hold, with counts, and what does not; returns whether all of it holds."""
  checked = check(tape)
  print(f"\nInvariants: {'VIOLATED' if checked.problems else 'all hold'}")
  for line in checked.summary:
    print(f"  {line}")
  for problem in checked.problems[:MOST_PROBLEMS]:
    print(f"violated: {problem}")
  if len(checked.problems) > MOST_PROBLEMS:
    print(f"... and {len(checked.problems) - MOST_PROBLEMS:,} more")
  return not checked.problems


def devices_needed(tape: Tape) -> int:
  """By a replay: those of all learners together, of each its largest island."""
  most: dict[str, int] = {}
  for entry in tape.entries():
    if isinstance(entry.operation, Started):
      most[entry.role] = max(most.get(entry.role, 0), entry.operation.devices)
  return max(1, sum(most.values()))
