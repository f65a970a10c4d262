"""What is read off an island's compiled programs; here they are compiled for eight CPU devices."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from ddiloco.cli.simulations import fit_lines
from ddiloco.config import from_dict
from ddiloco.roles.initial import make_plan
from ddiloco.training import aot
from tests.training.test_aot_collectives import LOOP


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
  assert found.step is not None and found.fits and found.gathers_by_layer and not found.remedies
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


def test_a_programs_memory_is_that_of_its_arguments_and_of_what_it_adds():
  """Results in place of arguments add nothing. Of several programs the largest numbers count."""

  def lowered(**sizes):
    names = ("argument", "output", "alias", "temp", "generated_code", "host_output")
    memory = SimpleNamespace(**{f"{name}_size_in_bytes": sizes.get(name, 0) for name in names})
    program = SimpleNamespace(as_text=lambda: LOOP, memory_analysis=lambda: memory)
    return SimpleNamespace(compile=lambda: program)

  first = lowered(argument=100, output=60, alias=50, temp=7, generated_code=1, host_output=3)
  found = aot.compiled("two", [first, lowered(argument=10, output=30, host_output=5)], 4)
  assert (found.hbm_bytes, found.added_bytes, found.host_bytes, found.count) == (118, 30, 5, 2)
  assert found.largest_collective_bytes == 64 * 128 * 2
