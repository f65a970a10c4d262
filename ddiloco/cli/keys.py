"""The command that makes the roles' keys."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from ddiloco.cli.arguments import needed, parse


def keys(arguments: list[str]) -> int:
  """Makes CURVE keys for every role, needed where a run leaves this machine.

  Prints what to copy where. With higher numbers it adds keys; it never replaces one.
  """
  values = flags.FlagValues()
  flags.DEFINE_string("keys", None, "Directory of the keys.", flag_values=values)
  flags.DEFINE_integer("learners", None, "How many learners.", lower_bound=0, flag_values=values)
  flags.DEFINE_integer("shards", None, "How many shards.", lower_bound=0, flag_values=values)
  if not parse(values, arguments, keys.__doc__):
    return 0
  folder = Path(needed(values, "keys", "DIR, the directory of the keys"))
  learners, shards = needed(values, "learners", "8"), needed(values, "shards", "2")
  from ddiloco.runtime import certificates

  print(certificates.instructions(folder, certificates.make_keys(folder, learners, shards)))
  return 0
