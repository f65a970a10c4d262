"""`python -m tests.engines.stuck ARGUMENTS`: `ddiloco ARGUMENTS` where an island never ends to
compile, and a shard never ends its first turn.

It waits in C for a mutex that it holds itself: no signal interrupts that, and Python hears none in
the thread that does it, as with XLA's.
"""

from __future__ import annotations

import ctypes
import sys

from ddiloco import environment


def for_ever(_role) -> None:
  libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
  libc.pthread_mutex_lock(mutex)
  print("stuck", flush=True)
  libc.pthread_mutex_lock(mutex)
  raise AssertionError("it never comes here")


def main() -> None:
  environment.before_import()
  from ddiloco.cli import entry
  from ddiloco.roles.syncer import Syncer
  from ddiloco.training.island import Island

  Island.compile = Syncer.finish = for_ever
  sys.argv = ["ddiloco", *sys.argv[1:]]
  entry()


if __name__ == "__main__":
  main()
