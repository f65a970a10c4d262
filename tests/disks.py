"""Disks that are full, stuck or out of reach, for the files of one test."""

from __future__ import annotations

import os
from pathlib import Path


def answer_for(folder, patch, name, answer):
  """Has `answer(real, file, ...)` in place of `os.NAME` for files of this folder only: other
  threads of this process have files of their own."""
  real = getattr(os, name)

  def answered(file, *arguments):
    mine = Path(os.readlink(f"/proc/self/fd/{file}")).is_relative_to(folder)
    return answer(real, file, *arguments) if mine else real(file, *arguments)

  patch.setattr(os, name, answered)
