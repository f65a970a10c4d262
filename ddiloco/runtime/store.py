"""Where a shard's committed fragments live, so that they outlive the shard's incarnation."""

from __future__ import annotations

import dataclasses
import threading
from typing import Protocol

import numpy as np

from ddiloco.core.syncer_state import FragmentState


@dataclasses.dataclass(frozen=True)
class Committed:
  """One fragment after its newest commit; vectors are flat f32 [size].

  `value` and `view` are never written again. `momentum` is: the next commit updates it in place,
  so a store that outlives a process must have its own copy.
  """

  state: FragmentState  # version, merged tokens, who took part; no round under way
  value: np.ndarray  # the global value
  view: np.ndarray  # what learners were sent: `value`, or what a lossy publish codec made of it
  momentum: np.ndarray | None  # of the outer optimizer, None without


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
