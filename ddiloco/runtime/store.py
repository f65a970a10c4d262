"""Committed fragments, and where they live, so that they outlive the shard's incarnation."""

from __future__ import annotations

import dataclasses
import threading
from typing import Protocol

import numpy as np

from ddiloco.core.fragments import Fragment
from ddiloco.core.syncer_state import FragmentState


@dataclasses.dataclass(frozen=True)
class Committed:
  """One fragment after its newest commit. Vectors are flat f32 [size] and never written again."""

  state: FragmentState  # version, merged tokens, who took part; no round under way
  value: np.ndarray  # the global value
  view: np.ndarray  # what learners were sent: `value`, or what a lossy publish codec made of it
  momentum: np.ndarray | None  # of the outer optimizer, None without
  momentum_round: int = -1  # that made the momentum; an older one if only the value was given back


class FragmentStore(Protocol):
  """Keeps the newest commit of every fragment; replaced as a whole, never half."""

  def load(self, fragment: int) -> Committed | None: ...

  def save(self, committed: Committed) -> None: ...


class MemoryStore:
  """Lives as long as the process: enough for roles that are threads of it."""

  def __init__(self) -> None:
    self._fragments: dict[int, Committed] = {}
    self._lock = threading.Lock()

  def load(self, fragment: int) -> Committed | None:
    with self._lock:
      return self._fragments.get(fragment)

  def save(self, committed: Committed) -> None:
    with self._lock:
      self._fragments[committed.state.index] = committed


def new_fragment(fragment: Fragment, value: np.ndarray) -> Committed:
  """Version 0 of a fragment: its initial value, before any round."""
  return Committed(FragmentState(fragment.index), value, value, None)
