"""What every config file says, as text: a changed default shows in a diff of `tests/golden/`.

`python -m tests.golden_configs` writes the texts anew. `default.txt` has every field; the others
have what differs from it, line by line.
"""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddiloco.config import from_dict

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
PRESETS = ("PRESETS", "STEPS")  # names that config files keep theirs under


def texts() -> dict[str, str]:
  """File in `tests/golden/` -> what it should hold."""
  found = {}
  for path in sorted((ROOT / "configs").glob("*.py")):
    module = runpy.run_path(str(path))
    named = (module.get(name) for name in PRESETS)
    presets = next((list(each) for each in named if isinstance(each, Mapping)), [])
    for preset in presets or [None]:
      made = module["get_config"](*([preset] if preset else []))
      name = path.stem + (f"-{preset}" if preset else "")
      found[f"{name}.txt"] = said(made, whole=name == "default")
  return found


def said(made: Any, whole: bool) -> str:
  """A line for every field, or for those that are not as by default."""
  plain = dict(lines(dataclasses.asdict(from_dict({}))))
  every = lines(dataclasses.asdict(from_dict(made)))
  return "".join(f"{k} = {v!r}\n" for k, v in every if whole or plain.get(k) != v)


def lines(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  for name, value in values.items():
    if isinstance(value, Mapping) and value:
      yield from lines(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", value


if __name__ == "__main__":
  GOLDEN.mkdir(exist_ok=True)
  for old in GOLDEN.glob("*.txt"):
    old.unlink()
  for name, text in texts().items():
    (GOLDEN / name).write_text(text)
  print(f"{len(texts())} configs in {GOLDEN}")
