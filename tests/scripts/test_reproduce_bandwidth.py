"""The reproduction runs, says what it promises, and its picture is one."""

import pytest

from tests.scripts import commands

GRID_STEP = 10 ** (4 / 49)  # between two bandwidths of the published table


@pytest.mark.slow
def test_it_prints_ours_beside_the_published_and_draws(here, tmp_path):
  picture = tmp_path / "bandwidth.png"
  result = commands.last(here("reproduce_bandwidth.py", f"--picture={picture}"))
  assert picture.read_bytes().startswith(b"\x89PNG")

  ours, published = result["required_gbps"], result["published_gbps"]
  ratios = [ours[m][p] / figure for m, row in published.items() for p, figure in row.items()]
  assert len(ratios) == 20
  error = max(max(r, 1 / r) for r in ratios) - 1
  assert error == pytest.approx(result["max_ratio_error"], abs=2e-3)
  assert error < GRID_STEP - 1, "further off than the published table's own resolution"

  assert result["reduction_vs_data_parallel"]["bf16"] > 100
  case = result["case_12b"]
  assert case["speedup_link_full"]["bf16"] > case["published_speedup"] == 20
  assert case["full_at_step_seconds"]["int4"] < case["full_at_step_seconds"]["bf16"] == 6
