"""What holds a learner's parameters: an island, or plain arrays in the evaluator and in tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np


class Holder(Protocol):
  """Between two steps it is asked for copies and told what to put in; neither ever waits."""

  def cut(self, fragment: int) -> Any:
    """A copy of one fragment, taken now without blocking."""
    ...

  def to_host(self, pieces: Any, fragment: int) -> np.ndarray:
    """That copy as a flat f32 vector [size]; called in the background."""
    ...

  def stage(self, fragment: int, flat: np.ndarray) -> Any:
    """Brings a flat f32 vector to the devices; called in the background."""
    ...

  def apply(self, fragment: int, staged: Any, keep: float) -> None:
    """parameters <- keep * parameters + staged, without blocking; keep 0 forgets them."""
    ...

  def capture(self) -> Mapping[str, Any]:
    """Copies of all that is on the devices, by name, taken now without blocking; for a snapshot."""
    ...

  num_moments: int  # vectors of the inner optimizer that are as large as the parameters

  def cut_moments(self, fragment: int) -> Any:
    """A copy of one fragment's moments, taken now without blocking."""
    ...

  def count(self) -> Any:
    """The inner optimizer's steps so far; `int` of it may wait."""
    ...

  def moments_to_host(self, pieces: Any, fragment: int) -> np.ndarray:
    """That copy as flat f32 [num_moments * size]; called in the background."""
    ...

  def stage_moments(self, fragment: int, flat: np.ndarray) -> Any:
    """Brings moments to the devices; called in the background."""
    ...

  def apply_moments(self, fragment: int, staged: Any, count: int) -> None:
    """Puts them into the optimizer state, without blocking."""
    ...
