"""What is read off an island's compiled programs; here they are compiled for eight CPU devices."""

from __future__ import annotations

import jax
import pytest

from ddiloco.cli.simulations import fit_lines
from ddiloco.config import from_dict
from ddiloco.roles.initial import make_plan
from ddiloco.training import aot


@pytest.mark.parametrize("fragments", [pytest.param(2, marks=pytest.mark.slow), 12])
def test_an_island_and_all_its_programs(fragments):
  config = from_dict(
    {
      "model": {"num_layers": 6, "vocab_size": 512},
      "data": {"sequence_length": 16},
      "islands": {"devices": 8, "batch_size": 8, "fsdp": 8, "remat": "full", "loss_chunks": 4},
      "sync": {"num_fragments": fragments},
    }
  )
  found = aot.fit(config, 0, make_plan(config), "v5p:2x2x2", jax.devices()[:8])
  assert found.step is not None and found.fits and found.gathers_by_layer
  assert found.chips == 8 and found.tokens == 8 * 16
  assert found.state_bytes >= 3 * 4 * found.parameters / 8  # parameters and two moments
  out, into, snapshot = found.copies
  assert (out.name, into.name) == ("copy out", "apply") and out.count == into.count <= 8
  assert snapshot.name == "snapshot" and snapshot.count == 1
  assert not any(program.collectives for program in found.copies)
  # A CPU has no memory of another kind: what the program adds is a second state.
  assert found.beside_bytes > snapshot.added_bytes >= found.state_bytes
  text = "\n".join(fit_lines([0], found, 0.4))
  assert f"s of CPU to compile {out.count} programs" in text and "no collective leaves" in text
