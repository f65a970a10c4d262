"""The folder of what a run of the tests compiles; the next run deletes those of killed runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "ddiloco-compile-cache-"


def new_folder(parent: str | os.PathLike[str]) -> tuple[str, int]:
  """Makes a folder, and deletes those whose owners live no more.

  Returns:
    The folder, and the descriptor that marks it as owned: its lock ends with the process.
  """
  for left in Path(parent).glob(f"{PREFIX}*"):
    with contextlib.suppress(OSError):  # its owner lives, or another run was quicker
      lock = _locked(left)
      shutil.rmtree(left, ignore_errors=True)
      os.close(lock)
  while True:
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    with contextlib.suppress(OSError):  # a run that began at this moment took it for a remainder
      owned = _locked(folder)
      if os.path.exists(folder):
        return folder, owned
      os.close(owned)


def _locked(folder: str | os.PathLike[str]) -> int:
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    os.close(descriptor)
    raise
  return descriptor
