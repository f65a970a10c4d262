"""An island that trains on images and text: cut over four devices it computes what one does."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import numpy as np
import pytest

from ddiloco.api import experiment
from ddiloco.config import from_dict
from ddiloco.roles import initial
from ddiloco.training import data
from ddiloco.training.island import Island

pytestmark = pytest.mark.skipif(not find_spec("sklearn"), reason="needs ddiloco[examples]")


def trained(**islands) -> tuple[Island, list[dict]]:
  made = experiment("configs/text_image.py", "config")
  made.data.source, made.model.num_layers = "synthetic", 2
  made.islands.update(num_learners=1, **islands)
  made.chaos.faults = ()
  config = from_dict(made)
  stream = data.Stream(data.open_data(config.data), config, 0)
  devices = jax.devices()[: config.islands.devices]
  island = Island(config, 0, devices, initial.make_plan(config))
  island.load(initial.initial_params(config))
  return island, [island.step(stream.batch(position), position) for position in range(4)]


@pytest.mark.slow
def test_four_devices_compute_what_one_does():
  plain, wanted = trained(devices=1)
  cut, metrics = trained(devices=4, fsdp=2, tensor=2, remat="full", loss_chunks=4)
  assert cut.layout.shardings["params/patches/projection"].spec == jax.sharding.PartitionSpec(
    None, "fsdp"
  )
  for name in ("loss", "grad_norm"):
    found, expected = ([each[name] for each in these] for these in (metrics, wanted))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
  # Its state goes to one device bit by bit, the moments of the patches too.
  arrays = {name: np.asarray(value) for name, value in cut.capture().items()}
  assert sum(name.endswith("patches/places") for name in arrays) == 3
  plain.restore(arrays)
  for name, value in plain.capture().items():
    np.testing.assert_array_equal(np.asarray(value), arrays[name], err_msg=name)
