"""The table of compiled presets and the search for the largest batch, without a compiler."""

import pytest

from ddiloco.config import from_dict
from tests.config.test_presets import CONFIGS, load

GIB = 1 << 30


def row(batch: int, gib_a_row: float = 0.1, fixed: float = 3.0) -> dict:
  needed = fixed + gib_a_row * batch
  return {
    "config": "dense.py:12b",
    "island": f"v6e:8x8, mesh fsdp 64, {batch} x 2048 tokens a step",
    "chips": 64,
    "chip": {"hbm_bytes": 30 * GIB},
    "tokens": batch * 2048,
    "state_bytes": 1.5 * GIB,
    "beside_bytes": 1 * GIB,
    "needed_bytes": needed * GIB,
    "fits": needed <= 30,
    "gathers_by_layer": True,
    "flops_per_token": 1e9,
    "step_seconds": 1.0,
    "step": {"cpu_seconds": 50.0},
    "copies": [],
  }


@pytest.mark.parametrize("bend", [1.0, 1.2], ids=["in proportion", "bent"])
def test_the_largest_batch_leaves_a_tenth_free(script, monkeypatch, bend):
  report = script("aot_report")
  tried = []

  def compiled(config, topology, mfu, batch=0):
    tried.append(batch)
    return [row(batch, 0.1 * bend)]

  monkeypatch.setattr(report, "compiled", compiled)
  found = report.largest("dense.py:12b", "v6e:8x8", 0.4, row(64))
  # 0.9 x 30 GiB less 3 GiB that are there anyway, at 0.1 or 0.12 GiB a row, in whole rows of 64.
  assert found["tokens"] == {1.0: 192, 1.2: 192}[bend] * 2048
  assert len(tried) <= report.TRIES and found["largest"]


def test_the_table_has_a_line_for_every_row(script):
  report = script("aot_report")
  rows = [row(64), {**row(640), "largest": True}]
  text = report.table(rows).splitlines()
  assert len(text) == 4
  assert text[2].startswith("| dense 12b, v6e:8x8 | fsdp 64 | 64 x 2048 | 8.4 | 9.4 of 30.0 | yes")
  assert "largest" in text[3] and "**no**" in text[3]
  muon = {**row(64), "config": "dense.py:12b --config.inner.optimizer=muon"}
  assert report.name(muon) == "dense 12b, muon, v6e:8x8"


def test_every_row_names_a_config_that_there_is(script):
  report = script("aot_report")
  assert set(report.ROWS) >= report.LARGEST
  for config, topology in report.ROWS:
    file, _, preset = config.partition(" ")[0].partition(":")
    assert (CONFIGS / file).exists()
    made = from_dict(load(file.removesuffix(".py")).get_config(*([preset] if preset else [])))
    assert topology or made.islands.topology
