"""Commands that read the trace of a run: trace, replay."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from ddiloco import environment
from ddiloco.cli.arguments import cpu_flag, parse, workdir_flag
from ddiloco.trace import text


def trace(arguments: list[str]) -> int:
  """Prints what moved the model, a line each, and checks that all of it fits together.

  Exit status 1: it does not, and the last lines say what and where. A proof needs every operation
  at hand: the trace of a long run takes about 0.6 kB of memory an event (6 GB for ten million).
  """
  values = flags.FlagValues()
  workdir_flag(values)
  flags.DEFINE_string(
    "role", "", "Print only this role's lines, e.g. learner-2.", flag_values=values
  )
  if not parse(values, arguments, trace.__doc__):
    return 0
  found = text.open_trace(Path(values["workdir"].value))
  try:
    text.print_trace(found, values["role"].value)
    status = 0 if text.print_invariants(found) else 1
    sys.stdout.flush()
    return status
  except BrokenPipeError:  # piped into head or less, which closed the pipe
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def replay(arguments: list[str]) -> int:
  """Makes every step and every commit of a run again: all must come out the same, bit by bit.

  Takes as many devices as the run had, of the same kind, and the memory of its trace. Compares
  losses, saved states and the result. The last line is JSON; exit status 1: the trace does not fit
  together, or something is different.
  """
  values = flags.FlagValues()
  workdir_flag(values)
  cpu_flag(values)
  if not parse(values, arguments, replay.__doc__):
    return 0
  workdir = Path(values["workdir"].value)
  found = text.open_trace(workdir)
  if not text.print_invariants(found):
    return 1
  environment.prepare(num_cpu_devices=text.devices_needed(found), cpu_only=values["cpu"].value)
  from ddiloco.trace.replay import replay_run

  columns = (*Progress.get_default_columns(), TimeElapsedColumn())
  with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
    task = bar.add_task("replay", total=None)
    summary, difference = replay_run(
      workdir, found, lambda done, of: bar.update(task, completed=done, total=of)
    )
  if difference:
    print(f"The first difference: {difference}")
  print(json.dumps(summary))
  return 0 if summary["identical"] else 1
