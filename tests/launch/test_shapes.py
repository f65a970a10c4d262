"""A topology's names in the cloud, against the table that Google gives for it."""

import pytest

from ddiloco.config import ConfigError
from ddiloco.launch.shapes import shape_of

# topology, chips, hosts, machine type of GKE, accelerator type of the TPU API
TABLE = [
  ("v5e:1x1", 1, 1, "ct5lp-hightpu-1t", "v5litepod-1"),
  ("v5e:2x2", 4, 1, "ct5lp-hightpu-4t", "v5litepod-4"),
  ("v5e:2x4", 8, 1, "ct5lp-hightpu-8t", "v5litepod-8"),
  ("v5e:4x4", 16, 4, "ct5lp-hightpu-4t", "v5litepod-16"),
  ("v5p:2x2x1", 4, 1, "ct5p-hightpu-4t", "v5p-8"),
  ("v5p:2x2x2", 8, 2, "ct5p-hightpu-4t", "v5p-16"),
  ("v5p:4x4x4", 64, 16, "ct5p-hightpu-4t", "v5p-128"),
  ("v6e:1x1", 1, 1, "ct6e-standard-1t", "v6e-1"),
  ("v6e:2x4", 8, 1, "ct6e-standard-8t", "v6e-8"),
  ("v6e:8x8", 64, 16, "ct6e-standard-4t", "v6e-64"),
  ("v6e:16x16", 256, 64, "ct6e-standard-4t", "v6e-256"),
]


@pytest.mark.parametrize(("topology", "chips", "hosts", "machine", "accelerator"), TABLE)
def test_a_topology_has_its_names(topology, chips, hosts, machine, accelerator):
  shape = shape_of(topology)
  assert (shape.chips, shape.hosts) == (chips, hosts)
  assert (shape.machine_type, shape.accelerator_type) == (machine, accelerator)
  assert shape.chips_per_host * hosts == chips and topology.endswith(f":{shape.topology}")


@pytest.mark.parametrize(
  ("topology", "said"),
  [
    ("v7:2x2", "must be a chip"),
    ("v5p", "must be a chip"),
    ("v5p-8", "must be a chip"),
    ("v6e:0x4", "must be a chip"),
    ("v5p:4x4", "3 dimensions"),
    ("v6e:2x2x2", "2 dimensions"),
    ("v5p:1x1x1", "neither one host nor whole hosts"),
    ("v6e:3x3", "neither one host nor whole hosts"),
  ],
)
def test_what_is_no_slice_is_refused(topology, said):
  with pytest.raises(ConfigError, match=f"islands.topology = '{topology}': .*{said}.*Fix: "):
    shape_of(topology)


def test_the_names_are_those_that_ray_knows():
  """Ray computes chips of a host and names of slices by itself."""
  tpu = pytest.importorskip("ray._private.accelerators.tpu")
  for topology, *_ in TABLE:
    shape = shape_of(topology)
    generation = shape.accelerator_type.split("-")[0]
    assert tpu.get_chips_per_host(shape.topology, generation) == shape.chips_per_host
    found = tpu.infer_tpu_pod_type_from_topology(shape.topology, generation)
    assert found == shape.accelerator_type
