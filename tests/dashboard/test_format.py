"""The page's numbers, as Node computes them: a browser is not needed for these."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import ddiloco.dashboard
from ddiloco.observe.goodput import CAUSES
from ddiloco.observe.islands import PHASES

PAGE = Path(ddiloco.dashboard.__file__).parent / "page"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
@pytest.mark.parametrize("values, middle", [([100, 1], 50.5), ([3, 1, 100], 3), ([7], 7)])
def test_the_median_of_an_even_count_is_between_the_middle_two(values, middle, tmp_path):
  shutil.copy(PAGE / "format.js", tmp_path / "format.mjs")
  said = f"console.log(median({json.dumps(values)}))"
  script = f'import {{ median }} from "{tmp_path / "format.mjs"}"; {said}'
  command = [str(NODE), "--input-type=module", "-e", script]
  found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
  assert float(found.stdout) == middle


@pytest.mark.parametrize("file, names", [("goodput.js", CAUSES), ("rejoins.js", PHASES)])
def test_the_page_has_words_for_every_cause_and_phase(file, names):
  text = (PAGE / file).read_text()
  assert [name for name in names if f"\n  {name}: [" not in text] == []
