"""The command `ddiloco`, which `python -m ddiloco` is too."""

import contextlib
import functools
import os
import signal
import sys

from ddiloco.environment import INTERRUPTED, TERMINATED, end_now, importing


def entry() -> None:
  """The console script."""
  if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a shell
    signal.signal(signal.SIGINT, functools.partial(_end, INTERRUPTED))
  if sys.argv[1:2] == ["train"]:  # of a whole run SIGTERM is as Ctrl-C, also before and after it
    signal.signal(signal.SIGTERM, functools.partial(_end, INTERRUPTED))
  elif os.getpid() == 1:  # of a container: without a handler the kernel would drop the signal
    signal.signal(signal.SIGTERM, functools.partial(_end, TERMINATED))
  with importing():
    from ddiloco import cli

  cli.entry()


def _end(status: int, *_: object) -> None:
  """Ends this process at once, without a KeyboardInterrupt.

  Imports, which take seconds, and what JAX adds to the garbage collector would swallow that: the
  command would go on.
  """
  with contextlib.suppress(OSError):  # an exception could be swallowed as well
    if os.isatty(1):
      os.write(1, b"\x1b[?25h")  # shows the cursor, which the live view hides
    os.write(2, b"ddiloco: interrupted\n")  # a print may be under way in this thread
  end_now(status)


if __name__ == "__main__":
  entry()
