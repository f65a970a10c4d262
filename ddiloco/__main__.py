"""The command `ddiloco`, which `python -m ddiloco` is too."""

import signal

from ddiloco.environment import INTERRUPTED, end_now


def entry() -> None:
  """The console script."""
  heard = signal.getsignal(signal.SIGINT)
  if heard is signal.default_int_handler:  # else Ctrl-C is ignored, as in a shell's background
    # The imports take a second, and some of them would swallow a KeyboardInterrupt.
    signal.signal(signal.SIGINT, lambda *_: end_now(INTERRUPTED))
  from ddiloco import cli

  signal.signal(signal.SIGINT, heard)
  cli.entry()


if __name__ == "__main__":
  entry()
