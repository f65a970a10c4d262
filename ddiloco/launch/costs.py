"""What a run takes and costs, by prices that its user gives. PURE.

There is no table of prices here: they differ by region, agreement and week. Google's are at
https://cloud.google.com/tpu/pricing and https://cloud.google.com/compute/all-pricing.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ddiloco.checks import require
from ddiloco.launch.placement import Placement

NOT_COUNTED = (
  "Not counted: what crosses regions (`ddiloco plan` says how many bytes), the bucket, the file"
  " server, load balancers, a cluster's own fee, and whatever waits idle before and after."
)


@dataclasses.dataclass(frozen=True)
class Cost:
  """One kind of machine.

  Attributes:
    what: it is.
    count: chips, or machines.
    price: of one for an hour, US dollars; None: not known.
  """

  what: str
  count: int
  price: float | None

  @property
  def hourly(self) -> float | None:
    return None if self.price is None else self.count * self.price


def prices_of(texts: Sequence[str]) -> dict[str, float]:
  """Of `--prices`: dollars for a chip-hour by chip, and for a shard's machine ("shard").

  Raises:
    ConfigError: something is no price.
  """
  found = {}
  for text in texts:
    name, _, value = text.partition("=")
    try:
      price = float(value)
    except ValueError:
      price = math.nan
    rule = "must be NAME=DOLLARS an hour, for a chip or for shard"
    fix = "for example --prices=v5p=4.20,shard=1.10, from your own price list"
    require(bool(name) and 0 <= price < math.inf, "--prices", text, rule, fix)
    found[name] = price
  return found


def costs(placement: Placement, prices: Mapping[str, float], machines: int) -> list[Cost]:
  """Chips by kind, and `machines` for shards and evaluator."""
  chips: Counter[str] = Counter()
  for island in placement.islands:
    chips[island.shape.kind] += island.shape.chips
  found = [Cost(f"{kind} chips", count, prices.get(kind)) for kind, count in sorted(chips.items())]
  shards = Cost("machines of shards and evaluator", machines, prices.get("shard"))
  return [*found, shards] if machines else found


def in_words(found: Sequence[Cost], hours: float) -> list[str]:
  """For people, with the sum; what has no price is said to have none."""
  lines = []
  for each in found:
    price = "price not given" if each.price is None else f"{each.price:,.2f} $/h each"
    hourly = "" if each.hourly is None else f" = {each.hourly:,.2f} $/h"
    lines.append(f"{each.count:>6} {each.what}: {price}{hourly}")
  known = [each.hourly for each in found if each.hourly is not None]
  total = sum(known)
  partly = "" if len(known) == len(found) else " and what has no price"
  span = f", {total * hours:,.2f} $ in {hours:g} h" if hours else "; for how long: --hours"
  return [*lines, f"Together {total:,.2f} $ an hour{partly}{span}.", NOT_COUNTED]


def require_known(found: Sequence[Cost], hours: float) -> None:
  """Refuses to spend what has not been counted.

  Raises:
    ConfigError: a price or the hours are missing.
  """
  fix = "give --prices=v5p=DOLLARS,shard=DOLLARS for an hour of a chip and of a shard's machine"
  for each in found:
    require(each.price is not None, "--prices", each.what, "has no price", fix)
  fix = "give --hours, how long you mean to keep it; nothing ends by itself then"
  require(hours > 0, "--hours", hours, "must be greater than 0", fix)
