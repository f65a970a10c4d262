"""The command line: `ddiloco COMMAND --config=FILE --workdir=DIR --config.FIELD=VALUE ...`.

Wrong flags and configs are reported before a device is touched, with exit status 2. Exit status 1:
work was lost, or a check failed; 130: stopped by Ctrl-C, or a run by SIGTERM: the work so far is
merged and saved.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import errno
import signal
import sys
from collections.abc import Callable, Sequence

from absl import flags

import ddiloco
from ddiloco.cli import runs
from ddiloco.cli.arguments import Helped, go_on_unheard
from ddiloco.cli.launch import launch
from ddiloco.cli.simulations import compile_islands, plan, simulate
from ddiloco.config import ConfigError
from ddiloco.environment import (
  BAD_USAGE,
  FINISHED,
  INTERRUPTED,
  LOST,
  end_now,
  reader_may_leave,
)

# By name: the function, flags that are usual, and what the command does.
COMMANDS: dict[str, tuple[Callable[[list[str]], int], str, str]] = {
  "train": (runs.train, "--config=FILE --workdir=DIR", "train; makes DIR/report"),
  "generate": (runs.generate, "--workdir=DIR --prompt=TEXT", "let the result write"),
  "evaluate": (runs.evaluate, "--workdir=DIR", "held-out loss of it"),
  "report": (runs.report, "--workdir=DIR", "draw DIR/report again"),
  "dashboard": (runs.dashboard, "--workdir=DIR [--bind=127.0.0.1:0]", "watch it in a browser"),
  "profile": (runs.profile, "--workdir=DIR --learner=2 --steps=5", "trace of its next steps"),
  "trace": (runs.trace, "--workdir=DIR [--role=learner-2]", "what happened, checked"),
  "replay": (runs.replay, "--workdir=DIR", "do it again and compare"),
  "export": (runs.export, "--workdir=DIR --to=PATH", "the result, for others"),
  "simulate": (simulate, "--chips=1200000 | protocol --config=FILE", "in virtual time"),
  "plan": (plan, "--config=FILE --gbps=2 --step_seconds=1 ...", "do links carry it?"),
  "compile": (compile_islands, "--config=FILE --topology=v5p:4x4x4", "does it fit a TPU?"),
  "launch": (launch, "gke|tpu-vms --config=FILE --dry_run ...", "bring it to a cloud"),
  "learner": (runs.learner, "--config=FILE --workdir=DIR --learner=3 ...", "one role"),
  "syncer": (runs.syncer, "--config=FILE --workdir=DIR --shard=0 ...", "one role"),
  "evaluator": (runs.evaluator, "--config=FILE --workdir=DIR --syncers=...", "one role"),
  "keys": (runs.keys, "--keys=DIR --learners=8 --shards=2", "for several machines"),
}

WORKERS = ("train", "learner", "syncer", "evaluator", "dashboard")  # others only print

USAGE = "\n".join(
  [
    "ddiloco: one model, trained across islands that may be far apart and failing.\n",
    *(f"  ddiloco {name:<10}{used:<44} {what}" for name, (_, used, what) in COMMANDS.items()),
    "\n`ddiloco COMMAND --help` lists a command's flags; --config.FIELD=VALUE changes a field. One",
    "role is one process, in the foreground (for systemd, JobSet, ssh). Experiments are files in",
    "configs/, or the config.json of a run.",
  ]
)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit status."""
  arguments = list(sys.argv[1:] if argv is None else argv)
  if not arguments or arguments[0] in ("-h", "--help", "help"):
    print(USAGE)
    return FINISHED if arguments else BAD_USAGE
  if arguments[0] == "--version":
    print(f"ddiloco {ddiloco.__version__}")
    return FINISHED
  if arguments[0] not in COMMANDS:
    close = difflib.get_close_matches(arguments[0], COMMANDS, 1)
    fix = f"did you mean {close[0]}?" if close else "use one of those above."
    print(f"{USAGE}\n\nddiloco: there is no command {arguments[0]!r}. Fix: {fix}", file=sys.stderr)
    return BAD_USAGE
  try:
    with contextlib.nullcontext() if arguments[0] in WORKERS else reader_may_leave():
      return COMMANDS[arguments[0]][0](arguments)
    return FINISHED  # its reader left
  except Helped:
    return FINISHED
  except (ConfigError, flags.Error) as error:  # the latter of --flagfile, which is read first
    print(f"ddiloco {arguments[0]}: {error}", file=sys.stderr)
    return BAD_USAGE
  except OSError as error:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
      raise
    fix = "make room on the disk that it writes to"
    print(f"ddiloco {arguments[0]}: {error}. Fix: {fix}.", file=sys.stderr)
    return LOST
  except KeyboardInterrupt:  # while compiling or drawing; a run handles Ctrl-C itself
    print(f"ddiloco {arguments[0]}: interrupted", file=sys.stderr)
    return INTERRUPTED


def entry() -> None:
  """Runs the command of this process, and ends the process; `ddiloco.__main__` calls it."""
  if sys.argv[1:2] and sys.argv[1] in WORKERS:
    go_on_unheard()
  elif signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so that blocks clean up
  status = main()
  if status != INTERRUPTED:  # else a thread may be compiling, which cannot be interrupted
    atexit._run_exitfuncs()
  end_now(status)
