"""The command line: `ddiloco COMMAND --config=FILE --workdir=DIR --config.FIELD=VALUE ...`.

Wrong flags and configs are reported before a device is touched, with exit status 2. Exit status 1:
work was lost, a storage did not answer, a run cannot reach its end any more, or a check failed;
130: stopped by Ctrl-C, or a run by SIGTERM: the work so far is merged and saved.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import gc
import io
import signal
import sys
from collections.abc import Callable, Sequence

from absl import flags

import ddiloco
from ddiloco.checks import FULL, Unanswered
from ddiloco.cli import runs
from ddiloco.cli.arguments import Helped, go_on_unheard
from ddiloco.cli.launch import launch
from ddiloco.cli.simulations import compile_islands, plan, simulate
from ddiloco.config import ConfigError
from ddiloco.environment import BAD_USAGE, FINISHED, INTERRUPTED, LOST, end_now, reader_may_leave

# A command imports JAX and compiles, which makes objects by the hundred thousand that nearly all
# stay. At Python's own threshold its garbage collector would look through them again and again.
gc.set_threshold(10_000)

# By name: the function, flags that are usual, and what the command does.
COMMANDS: dict[str, tuple[Callable[[list[str]], int], str, str]] = {
  "train": (runs.train, "--config=FILE --workdir=DIR", "trains; leaves DIR/report"),
  "generate": (runs.generate, "--workdir=DIR --prompt=TEXT", "prints text of the result"),
  "evaluate": (runs.evaluate, "--workdir=DIR", "prints the held-out loss"),
  "report": (runs.report, "--workdir=DIR", "draws DIR/report again"),
  "dashboard": (runs.dashboard, "--workdir=DIR [--bind=127.0.0.1:0]", "shows a run in a browser"),
  "profile": (runs.profile, "--workdir=DIR --learner=2 --steps=5", "takes a trace of its steps"),
  "trace": (runs.trace, "--workdir=DIR [--role=learner-2]", "prints and checks the log"),
  "replay": (runs.replay, "--workdir=DIR", "repeats it, bit by bit"),
  "export": (runs.export, "--workdir=DIR --to=PATH", "writes the weights there"),
  "simulate": (simulate, "--chips=1200000 | protocol --config=FILE", "simulates chips, or a run"),
  "plan": (plan, "--config=FILE --gbps=2 --step_seconds=1 ...", "says what links must carry"),
  "compile": (compile_islands, "--config=FILE --topology=v5p:4x4x4", "says if it fits its chips"),
  "launch": (launch, "gke|tpu-vms --config=FILE --dry_run ...", "runs it on Google Cloud"),
  "learner": (runs.learner, "--config=FILE --workdir=DIR --learner=3 ...", "trains one island"),
  "syncer": (runs.syncer, "--config=FILE --workdir=DIR --shard=0 ...", "merges some fragments"),
  "evaluator": (runs.evaluator, "--config=FILE --workdir=DIR --syncers=...", "saves the result"),
  "keys": (runs.keys, "--keys=DIR --learners=8 --shards=2", "makes keys of all roles"),
}

WORKERS = ("train", "learner", "syncer", "evaluator", "dashboard")  # others only print

USAGE = "\n".join(
  [
    "ddiloco: one model, trained across islands that may be far apart and failing.\n",
    *(f"  ddiloco {name:<10}{used:<44} {what}" for name, (_, used, what) in COMMANDS.items()),
    "\n`ddiloco COMMAND --help` lists a command's flags; --config.FIELD=VALUE changes a field.",
    "learner, syncer and evaluator are one process of a run each, in the foreground (for systemd,",
    "JobSet, ssh). FILE is one of configs/, one of your own, or the config.json of a run.",
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
    return LOST if isinstance(error, Unanswered) else BAD_USAGE
  except OSError as error:
    if error.errno not in FULL:
      raise
    fix = "make room on the disk that it writes to"
    print(f"ddiloco {arguments[0]}: {error}. Fix: {fix}.", file=sys.stderr)
    return LOST
  except KeyboardInterrupt:  # while compiling or drawing; a run handles Ctrl-C itself
    print(f"ddiloco {arguments[0]}: interrupted", file=sys.stderr)
    return INTERRUPTED


def entry() -> None:
  """Runs the command of this process, and ends the process; `ddiloco.__main__` calls it."""
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # of a locale that lacks a character, such as a dash
  if sys.argv[1:2] and sys.argv[1] in WORKERS:
    go_on_unheard()
  elif signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so that blocks clean up
  status = main()
  if status != INTERRUPTED:  # else a thread may be compiling, which cannot be interrupted
    atexit._run_exitfuncs()
  end_now(status)
