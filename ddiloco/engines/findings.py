"""What a replay is compared with: the losses and the saved digests that are on the tape."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

import numpy as np

from ddiloco.core.tape import Entry, Recorded, Saved, Step, Tape
from ddiloco.runtime.arrays import fingerprint


class Findings:
  """Collects from all threads what was compared, and what is different."""

  def __init__(self, tape: Tape):
    self._saved = {
      (e.role, e.incarnation, e.operation.snapshot): e.operation.arrays
      for e in tape.entries()
      if isinstance(e.operation, Saved)
    }
    self._lock = threading.Lock()
    self.compared = {"losses": 0, "digests": 0, "values": 0}
    self.different = {"losses": 0, "digests": 0, "values": 0}
    self._first: tuple[float, str] | None = None

  @property
  def first(self) -> str:
    """The first difference in order of time, or ''."""
    return self._first[1] if self._first else ""

  def count(self, what: str, time: float, differences: list[str], compared: int) -> None:
    """So many were compared, and these were different, at this time of the run."""
    with self._lock:
      self.compared[what] += compared
      self.different[what] += len(differences)
      if differences and (self._first is None or time < self._first[0]):
        self._first = time, differences[0]

  def step(self, entry: Entry, metrics: Mapping[str, float] | None) -> None:
    """Compares the loss that a step showed, where both have one."""
    op = entry.operation
    assert isinstance(op, Step)
    if op.loss is None or metrics is None:
      return
    loss = metrics["loss"]
    same = loss == op.loss or (math.isnan(loss) and math.isnan(op.loss))
    text = f"{_where(entry)}: the loss of step {op.step} is {loss!r}, it was {op.loss!r}"
    self.count("losses", entry.time, [] if same else [text], 1)

  def saved(self, entry: Entry) -> bool:
    """Whether what is recorded here was saved, so that there are digests of it."""
    assert isinstance(entry.operation, Recorded)
    return (entry.role, entry.incarnation, entry.operation.snapshot) in self._saved

  def state(self, entry: Entry, arrays: Mapping[str, np.ndarray]) -> None:
    """Compares a recorded state with the digests of what was saved of it, if it was."""
    assert isinstance(entry.operation, Recorded)
    snapshot = entry.operation.snapshot
    saved = self._saved.get((entry.role, entry.incarnation, snapshot), {})
    differences = []
    for name in sorted(saved):
      mine = fingerprint(arrays[name])["crc32"] if name in arrays else "missing"
      if mine != saved[name]:
        text = f"{name} of snapshot {snapshot} is {mine}, {saved[name]} was saved"
        differences.append(f"{_where(entry)}: {text}")
    self.count("digests", entry.time, differences, len(saved))


def _where(entry: Entry) -> str:
  return f"{entry.role}, incarnation {entry.incarnation}, line {entry.line}"
