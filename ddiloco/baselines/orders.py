"""What the supervisor and the islands' processes tell each other: a line of JSON each.

To an island, on its standard input: an `Order`, or END. Its end means: end, and everything of
yours. From an island, on its standard output: READY when it has imported what it needs, and the
number of the order whose process has ended.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

END, READY = "end", "ready"


@dataclasses.dataclass(frozen=True)
class Order:
  """Train in this world, until the next order. It ends the one before."""

  number: int  # counts the run's worlds
  rank: int
  size: int
  port: int
  started: float  # unix seconds; event times count from there
  state: str  # file to begin with
  step: int  # that it is after
  remember: bool  # keep every step for the next world, as an elastic island's memory does
  train: bool = True  # else only see that this world's program is there


class Lines:
  """Whole messages from pieces of a stream."""

  def __init__(self) -> None:
    self._rest = b""

  def take(self, data: bytes) -> list[Any]:
    """The messages that are complete with these bytes."""
    *lines, self._rest = (self._rest + data).split(b"\n")
    return [json.loads(line) for line in lines]


def line(message: Any) -> bytes:
  """A message as it travels."""
  return json.dumps(message).encode() + b"\n"
