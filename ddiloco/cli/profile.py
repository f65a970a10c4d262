"""The command that has steps of a run under way traced: profile."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from ddiloco.cli.arguments import parse, workdir_flag
from ddiloco.engines.profiler import ProfileRequest, take_profile
from ddiloco.workdir import PROFILES


def profile(arguments: list[str]) -> int:
  """Traces steps of a learner while its run goes on, for TensorBoard or xprof, and says where.

  The learner is not held up: the process it lives in takes the trace. In the threads engine that is
  the whole run. Nothing is lost if this command is ended while it waits.
  Exit status 1: no trace was taken, or not yet.
  """
  values = flags.FlagValues()
  workdir_flag(values)
  flags.DEFINE_integer("learner", 0, "Whose steps.", flag_values=values)
  flags.DEFINE_integer("steps", 5, "How many of them, as a whole.", flag_values=values)
  flags.DEFINE_integer(
    "from_step",
    0,
    "The first, as a global step; 0 or one that is over: the next.",
    flag_values=values,
  )
  flags.DEFINE_float("wait_seconds", 120.0, "For the trace to be there.", flag_values=values)
  if not parse(values, arguments, profile.__doc__):
    return 0
  workdir, role = Path(values["workdir"].value), f"learner-{values['learner'].value}"
  request = ProfileRequest(role, values["steps"].value, values["from_step"].value)
  there, said = take_profile(workdir, request, values["wait_seconds"].value)
  print(said)
  if there:
    print(f"To look at it: tensorboard --logdir={workdir / PROFILES} (with xprof installed)")
  return 0 if there else 1
