"""A small run of the headline script: what it promises, at a size that means little."""

import math

import pytest

from tests.scripts import commands

PARTS = ("decoupled", "elastic", "inelastic")


@pytest.mark.slow
def test_decoupled_islands_get_more_done_than_data_parallel_under_the_same_kills(tmp_path, here):
  plot = tmp_path / "goodput.png"
  line = f"reproduce_goodput.py --quick --workdir={tmp_path} --plot={plot}"
  said = commands.said(line, optimized=False)
  result = commands.last(said)
  for part in PARTS:
    assert 0 < result[f"goodput_{part}"] <= 1 and 0 < result[f"uptime_{part}"] <= 1
    share = result["with_start_up"][part] + sum(result["causes"][part].values())
    assert math.isclose(share, 1, abs_tol=0.01), f"{part}: the accounts add up to {share}"
    assert result["with_start_up"][part] < result[f"goodput_{part}"]
    assert result["causes"][part]["discarded"] > 0 and result["kills_of"][part] > 0, said
  assert result["kills"] == result["kills_of"]["decoupled"]
  assert result["goodput_decoupled"] > result["goodput_elastic"] > 0, said
  assert result["uptime_decoupled"] > result["uptime_inelastic"], said
  assert plot.stat().st_size > 10_000
  again = here(line)
  assert again.count("done before") == len(PARTS)
  assert commands.last(again) == result
