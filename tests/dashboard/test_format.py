"""The page's numbers, as Node computes them: a browser is not needed for these."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

import ddiloco.dashboard
from ddiloco.observe.goodput import CAUSES
from ddiloco.observe.style import loss_text, rounded
from tests.observe.test_tracks_rejoins import PHASES

PAGE = Path(ddiloco.dashboard.__file__).parent / "page"
NODE = shutil.which("node")


def computed(tmp_path: Path, function: str, argument: str) -> str:
  """What a function of format.js returns, as text."""
  shutil.copy(PAGE / "format.js", tmp_path / "format.mjs")
  said = f"console.log({function}({argument}))"
  script = f'import {{ {function} }} from "{tmp_path / "format.mjs"}"; {said}'
  command = [str(NODE), "--input-type=module", "-e", script]
  done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
  return done.stdout.removesuffix("\n")


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
@pytest.mark.parametrize("values, middle", [([100, 1], 50.5), ([3, 1, 100], 3), ([7], 7)])
def test_the_median_of_an_even_count_is_between_the_middle_two(values, middle, tmp_path):
  assert float(computed(tmp_path, "median", json.dumps(values))) == middle


LOSSES = [
  *((5.5451774, "5.545"), (1234.5678, "1234.568"), (0.25, "0.250"), (0.1, "0.100")),
  *((0.04321, "0.0432"), (0.00030004, "0.000300"), (-2.0, "-2.000"), (0.0, "0.00")),
]


@pytest.mark.parametrize("loss, text", [*LOSSES, (3e-9, "3.00e-09"), (math.nan, "–")])
def test_no_loss_is_shown_as_zero_but_zero(loss, text):
  """A custom model's loss of 0.0003 was 0.000 everywhere, and 0.0 in summary.json below 5e-7."""
  assert loss_text(loss) == text
  assert rounded(loss) == (None if math.isnan(loss) else pytest.approx(loss, rel=1e-6))


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
@pytest.mark.parametrize("loss, text", [*LOSSES, (3e-9, "3.00e-9"), ("null", "–")])
def test_the_page_shows_losses_as_the_terminal_does(loss, text, tmp_path):
  assert computed(tmp_path, "loss", str(loss)) == text


@pytest.mark.parametrize("file, names", [("goodput.js", CAUSES), ("rejoins.js", PHASES)])
def test_the_page_has_words_for_every_cause_and_phase(file, names):
  text = (PAGE / file).read_text()
  assert [name for name in names if f"\n  {name}: [" not in text] == []
