"""One look for the terminal, the plots and the report: an island has one colour everywhere."""

from __future__ import annotations

import math

# Okabe and Ito's palette (safe for the colour-blind), without its yellow, which fades on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A5195", "#5F5F5F")
GLOBAL_MODEL = "#111111"
MUTED = "#9A9A9A"
FAINT = "#DDDDDD"


def island_colour(learner: int) -> str:
  """The hex colour of a learner's island; repeats after eight."""
  return PALETTE[learner % len(PALETTE)]


def shard_colour(shard: int, num_shards: int) -> str:
  """A grey for a shard, dark to light: colours are for islands."""
  level = round(0x30 + 0x78 * shard / max(1, num_shards))
  return f"#{level:02x}{level:02x}{level:02x}"


def _greater(value: float) -> float:
  """The next number away from 0. Where two roundings are as near, Python would take the even one,
  the page's JavaScript takes the greater: 1.25M would be 1.2M here and 1.3M there."""
  return math.nextafter(value, math.copysign(math.inf, value)) if value else value


def compact(value: float) -> str:
  """A count in four characters or so: 950, 12.3k, 4.0M; a dash if it is not finite."""
  if not math.isfinite(value):
    return "–"
  for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
    if abs(value) >= 0.9995 * limit:
      scaled = _greater(value / limit)
      return f"{scaled:.0f}{unit}" if abs(scaled) >= 99.95 else f"{scaled:.1f}{unit}"
  return f"{_greater(value):.0f}"


def bytes_text(count: float) -> str:
  """A number of bytes: 950 B, 12.3 kB, 4.0 MB.

  The page has the same function in JavaScript (`bytes` in dashboard/page/format.js).
  """
  number = compact(count)
  unit = number[-1] if number[-1] in "kMGT" else ""
  return f"{number.removesuffix(unit)} {unit}B" if math.isfinite(count) else number


def percent(share: float, digits: int = 0) -> str:
  """A share as 97%. Only all of it is 100%: 99.7% are 99%.

  The page has the same function in JavaScript (`percent` in dashboard/page/format.js).
  """
  most = 100.0 if share >= 1 else 100.0 - 10.0**-digits
  return f"{_greater(min(100 * share, most)):.{digits}f}%"


def rounded(value: float, digits: int = 6) -> float | None:
  """A number for JSON with so many decimals, below 1 with so many significant digits.

  JSON has no infinity and no NaN: None for these.
  """
  if not math.isfinite(value):
    return None
  return round(value, digits) if abs(value) >= 1 else float(f"{value:.{digits}g}")


def clock_time(seconds: float) -> str:
  """Seconds as 0:07, 12:34, 1:02:03 or 30 d 1:02:03; a dash if they are not finite."""
  if not math.isfinite(seconds):
    return "–"
  minutes, rest = divmod(int(max(0.0, seconds)), 60)
  hours, minutes = divmod(minutes, 60)
  days, hours = divmod(hours, 24)
  day = f"{days} d " if days else ""
  return f"{day}{hours}:{minutes:02d}:{rest:02d}" if days or hours else f"{minutes}:{rest:02d}"


def time_unit(seconds: float) -> str:
  """What the parts of such a time are."""
  return "h:min:s" if seconds >= 3600 else "min:s"


def plain(name: str) -> str:
  """The name of a model's measure with spaces: "image loss" for "image_loss"."""
  return name.replace("_", " ")


def loss_text(loss: float) -> str:
  """A loss with three decimals, below 0.1 with three significant digits; a dash before the first.

  The page has the same function in JavaScript (`loss` in dashboard/page/format.js).
  """
  if not math.isfinite(loss):
    return "–"
  return f"{_greater(loss):.3f}" if abs(loss) >= 0.1 else f"{_greater(loss):#.3g}"
