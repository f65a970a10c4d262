"""A fleet of chips that fail, and every assumption about what a failure costs.

[paper]: "Decoupled DiLoCo for Resilient Distributed Pre-training" (arXiv 2604.21428) says so.
[inferred]: the paper does not say; these are the round values with which one set of assumptions
gives all of its Table 1 (`scripts/reproduce_table1.py` also shows what each of them is good for).
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from ddiloco.checked import coerce, require

SECONDS_PER_DAY = 86_400.0
SECONDS_PER_YEAR = 365.25 * SECONDS_PER_DAY
MOST_FAILURES = 10_000_000  # about 3 GB while they are worked through


def _field(default: Any, text: str) -> Any:
  """A field with its unit, meaning and source, which the command line shows too."""
  return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class Fleet:
  """Chips, how they fail, and what a failure costs. Wrong values raise ConfigError by name."""

  chips: int = _field(1_200_000, "Chips of the whole fleet.")
  learners: int = _field(8, "Learners that share the chips equally and never wait for each other.")
  days: float = _field(30.0, "Simulated time, days.")
  seed: int = _field(0, "Of the failures; the same ones strike whatever the number of learners.")
  mtbi_chip_years: float = _field(
    1.0, "Mean time between interruptions of one chip, years; Poisson [paper]."
  )
  chips_per_slice: int = _field(
    256, "Chips that go and come back together [inferred: a whole TPU v6e slice, Google's manual]."
  )
  notice_seconds: float = _field(
    2.0, "Training goes on this long after a failure: the step under way is finished [inferred]."
  )
  downscale_pause_seconds: float = _field(
    22.0, "A learner stands still this long to go on without the failed slices [inferred]."
  )
  upscale_pause_seconds: float = _field(
    22.0, "A learner stands still this long to take recovered slices in [inferred: as long]."
  )
  recovery_seconds: float = _field(
    120.0, "From a failure until its slice could work again [inferred]."
  )
  rejoin_wait_seconds: float = _field(
    180.0, "A recovered slice waits this long for some pause to end before it asks for one of its"
    " own [inferred: 2 to 3 minutes]."
  )  # fmt: skip
  inelastic_pause_seconds: float = _field(
    80.0, "Without elasticity: all stand still this long until the failed slice is replaced and"
    " the last checkpoint is restored [inferred]."
  )  # fmt: skip

  def __post_init__(self):
    hints = typing.get_type_hints(Fleet)
    for field in dataclasses.fields(self):
      coerce(hints[field.name], getattr(self, field.name), field.name)
    for name in ("chips", "learners", "days", "mtbi_chip_years", "chips_per_slice"):
      value = getattr(self, name)
      require(value > 0, name, value, "must be greater than 0", "set a positive value")
    for name in [f.name for f in dataclasses.fields(self) if f.name.endswith("_seconds")]:
      value = getattr(self, name)
      require(value >= 0, name, value, "must not be negative", "set 0 or more")
    require(self.seed >= 0, "seed", self.seed, "must not be negative", "set 0 or more")
    require(
      self.learners <= self.chips,
      "learners",
      self.learners,
      f"must not be more than chips = {self.chips}",
      "give every learner a chip",
    )
    require(
      self.expected_failures <= MOST_FAILURES,
      "days",
      self.days,
      f"means {self.expected_failures:,.0f} failures, more than {MOST_FAILURES:,}",
      "simulate fewer days",
    )

  @property
  def seconds(self) -> float:
    """The simulated time."""
    return self.days * SECONDS_PER_DAY

  @property
  def expected_failures(self) -> float:
    """Mean number of failures of the whole fleet in the simulated time."""
    return self.seconds * self.chips / (self.mtbi_chip_years * SECONDS_PER_YEAR)

  @property
  def slices_per_learner(self) -> int:
    """Whole slices of a learner: as near as possible to `chips_per_slice`, and at least one."""
    return max(1, round(self.chips / self.learners / self.chips_per_slice))
