"""Every module is for something, and docs/design.md says about how many lines that takes."""

import re

import common
import lines
import pytest

PAGE = (common.ROOT / "docs" / "design.md").read_text()


def test_what_no_capability_names_is_an_error(monkeypatch):
  with pytest.raises(LookupError, match=r"core/new\.py is for nothing"):
    monkeypatch.setitem(lines.CAPABILITIES, lines.capability_of("core/outer.py"), ["core/o*.py"])
    lines.capability_of("core/new.py")


def test_the_special_stands_before_what_it_is_taken_from():
  assert lines.capability_of("training/hosts.py") != lines.capability_of("training/step.py")
  assert lines.capability_of("cli/launch.py") == lines.capability_of("launch/gke.py")


def test_the_page_has_every_capability_with_its_size():
  found = lines.by_capability()
  told = re.findall(r"^\| ([^|]+) \| (\d+) \| ([\d,]+) \| [\d,]+ \|$", PAGE, re.MULTILINE)
  sizes = {name: int(count.replace(",", "")) for name, _, count in told}
  assert sizes.keys() == {*found, "all"}
  for name, each in found.items():
    now = sum(module.lines for module in each)
    fix = "Fix: put the table of scripts/lines.py --markdown into docs/design.md"
    assert abs(now - sizes[name]) <= 30 + 0.1 * now, f"{name}: {now}, not {sizes[name]}. {fix}"
