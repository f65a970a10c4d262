"""Who runs where, on which slices, for how much, and what each role is told."""

import pytest

from ddiloco.config import ConfigError, from_dict
from ddiloco.launch.placement import (
  KINDS,
  cost_lines,
  host_flags,
  paid_for,
  place,
  prices_of,
  require_prices,
  role_command,
  shape_of,
)
from tests.launch.placed import BUCKET, config, placed

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
  ("tpu7x:2x2x1", 4, 1, "tpu7x-standard-4t", "tpu7x-8"),
  ("tpu7x:4x4x4", 64, 16, "tpu7x-standard-4t", "tpu7x-128"),
]


@pytest.mark.parametrize(("topology", "chips", "hosts", "machine", "accelerator"), TABLE)
def test_a_topology_has_its_names(topology, chips, hosts, machine, accelerator):
  shape = shape_of(topology)
  assert (shape.chips, shape.hosts) == (chips, hosts)
  assert (shape.machine_type, shape.accelerator_type) == (machine, accelerator)
  assert shape.chips_per_host * hosts == chips and topology.endswith(f":{shape.topology}")


def test_nodes_are_selected_and_vms_made_by_the_cloud_s_names():
  assert {name: (kind.gke_accelerator, kind.runtime) for name, kind in KINDS.items()} == {
    "v5e": ("tpu-v5-lite-podslice", "v2-alpha-tpuv5-lite"),
    "v5p": ("tpu-v5p-slice", "v2-alpha-tpuv5"),
    "v6e": ("tpu-v6e-slice", "v2-alpha-tpuv6e"),
    "tpu7x": ("tpu7x", ""),  # on GKE alone
    "a100": ("nvidia-a100-80gb", ""),
    "h100": ("nvidia-h100-80gb", ""),
    "h200": ("nvidia-h200-141gb", ""),
  }


def test_an_island_of_gpus_is_one_host():
  for topology, machine in (
    ("a100:4", "a2-ultragpu-4g"),
    ("h100:8", "a3-highgpu-8g"),
    ("h200:8", "a3-ultragpu-8g"),
  ):
    shape = shape_of(topology)
    assert (shape.hosts, shape.machine_type) == (1, machine)
    assert shape.chips == shape.devices == shape.chips_per_host == int(shape.topology)


@pytest.mark.parametrize(
  ("topology", "said"),
  [
    ("v7:2x2", "must be a chip"),
    ("v5p", "must be a chip"),
    ("v5p-8", "must be a chip"),
    ("v6e:0x4", "must be a chip"),
    ("v5p:4x4", "3 dimensions"),
    ("v6e:2x2x2", "2 dimensions"),
    ("v5p:1x1x1", r"neither one host \(2x2x1\) nor whole hosts"),
    ("v6e:3x3", "neither one host .* nor whole hosts"),
    ("v6e:4x2", r"neither one host \(1x1, 2x2, 2x4\) nor .* the smallest first"),
    ("v6e:1x4", "neither one host .* even numbers"),
    ("v5p:1x2x2", "neither one host .* even numbers"),
    ("v5p:4x4x2", "the smallest first"),
    ("h100:16", "one host"),
    ("h100:2x8", "one host"),
    ("h200:4", "one host"),
  ],
)
def test_what_is_no_slice_is_refused(topology, said):
  with pytest.raises(ConfigError, match=f"islands.topology = '{topology}': .*{said}.*Fix: "):
    shape_of(topology)


def test_numbers_of_thousands_of_digits_are_no_slice_and_no_learner():
  with pytest.raises(ConfigError, match=r"must be a chip .*Fix: "):
    shape_of(f"v6e:{'9' * 5000}x4")
  with pytest.raises(ConfigError, match=r"must say where islands are.*Fix: "):
    placed(["v6e:2x2"], (f"a=0-{'9' * 5000}",))


def test_the_names_are_those_that_ray_knows():
  """Ray computes chips of a host and names of slices by itself."""
  tpu = pytest.importorskip("ray._private.accelerators.tpu")
  if not hasattr(tpu, "get_chips_per_host"):
    pytest.skip("Ray before 2.52 computes neither")
  for topology, *_ in TABLE:
    shape = shape_of(topology)
    name = shape.accelerator_type.replace("tpu7x", "v7x")  # as Ray calls it
    generation = name.split("-")[0]
    assert tpu.get_chips_per_host(shape.topology, generation) == shape.chips_per_host
    found = tpu.infer_tpu_pod_type_from_topology(shape.topology, generation)
    assert found == name


def test_islands_get_the_devices_and_hosts_of_their_slices():
  made = placed(["v5p:4x4x4", "v6e:2x4", "tpu7x:2x2x2"])
  first, second, third = (made.config.islands.island(m) for m in range(3))
  assert (first.devices, first.hosts, second.devices, second.hosts) == (64, 16, 8, 1)
  assert (third.devices, third.hosts) == (16, 2), "each core of a TPU7x is a device of JAX"
  assert first.topology == "v5p:4x4x4", "what else was said of an island stays"
  assert made.config.checkpoint.path == BUCKET
  assert from_dict({"model": {}}).islands.overrides == {}, "the config given is left as it was"


def test_spot_islands_drain_in_the_time_they_are_given():
  assert placed(["v6e:2x2"]).config.network.drain_seconds == 25
  assert placed(["v6e:2x2"], spot=True).config.network.drain_seconds == 10
  short = placed(["v6e:2x2"], spot=True, network={"drain_seconds": 3.0})
  assert short.config.network.drain_seconds == 3


def test_places_name_every_learner_once():
  made = placed(["v6e:2x2"] * 4, ("gke_p_us:east_x=0,2-3", "b=1"))
  assert [island.where for island in made.islands] == ["gke_p_us:east_x", "b"] + [
    "gke_p_us:east_x"
  ] * 2
  assert [island.where for island in placed(["v6e:2x2"] * 2).islands] == ["", ""]


@pytest.mark.parametrize(
  ("places", "said"),
  [
    (("a",), "must say where islands are"),
    (("a=",), "must say where islands are"),
    (("=0-1",), "must say where islands are"),
    (("a=x",), "must say where islands are"),
    (("a=0", "b=0-1"), r"each learner once, which is not so for \[0\]"),
    (("a=0-2",), "there is no learner 2"),
    (("a=0-99999999999",), "there is no learner 99999999999: islands.num_learners = 2"),
    (("a=0",), r"each learner once, which is not so for \[1\]"),
  ],
)
def test_wrong_places_are_refused(places, said):
  with pytest.raises(ConfigError, match=f"--place = .*{said}.*Fix: "):
    placed(["v6e:2x2"] * 2, places)


@pytest.mark.parametrize(
  ("changed", "said"),
  [
    ({"name": "Run"}, "--name"),
    ({"name": "x" * 31}, "--name"),
    ({"bucket": "/tmp/x"}, "--bucket"),
    ({"bucket": "gs://"}, "--bucket"),
    ({"bucket": "gs://bucket/[x]"}, "--bucket"),  # every role ended with status 2, on its machine
    ({"bucket": "gs://bucket/a*"}, "--bucket"),
    ({"image": ""}, "--image"),
    ({"config": config(["v6e:2x2"], shards=0)}, "sync.num_shards"),
    ({"config": config([""])}, "islands.topology of 0"),
    ({"config": config(["v6e:2x2"], model={"custom": "mine.py:model"})}, "model.custom"),
  ],
)
def test_what_cannot_be_placed_is_refused(changed, said):
  given = {"config": config(["v6e:2x2"]), "name": "run", "places": (), "bucket": BUCKET} | changed
  given = {"image": "image:1", **given}
  with pytest.raises(ConfigError, match=f"{said} = .*Fix: "):
    place(**given)


def test_a_batch_that_its_chips_cannot_share_is_refused():
  with pytest.raises(ConfigError, match=r"islands.batch_size = 6: .*Fix: use 8"):
    place(
      from_dict({"islands": {"num_learners": 1, "topology": "v6e:2x4", "batch_size": 6}}),
      *("run", (), BUCKET, "image:1"),
    )


def test_roles_are_told_what_they_need():
  made = placed(["v5p:2x2x2"])
  learner = role_command(made, "learner-0", ["tcp://a:1", "tcp://b:1"])
  assert learner[:2] == ["ddiloco", "learner"] and "--learner=0" in learner
  assert "--syncers=tcp://a:1,tcp://b:1" in learner and "--term_status=143" in learner
  syncer = role_command(made, "syncer-1", ["tcp://a:1", "tcp://b:1"])
  assert "--shard=1" in syncer and "--bind=tcp://0.0.0.0:7000" in syncer
  shape = made.islands[0].shape
  assert host_flags(shape, "1", "leader") == ["--host=1", "--hosts=tcp://leader:7001"]
  assert host_flags(placed(["v6e:2x4"]).islands[0].shape, "0", "leader") == []


MADE = placed(["v5p:4x4x4", "v5p:2x2x2", "v6e:8x8"])


def test_chips_and_machines_by_the_hour():
  counts, prices = paid_for(MADE, machines=3), {"v5p": 4.0, "v6e": 2.5, "shard": 1.0}
  assert counts == {"v5p": 72, "v6e": 64, "shard": 3}
  text = "\n".join(cost_lines(counts, prices, hours=10))
  for sum_of_one in ("288.00 $/h", "160.00 $/h", "3.00 $/h"):
    assert f"each = {sum_of_one}" in text
  assert "Together 451.00 $ an hour, 4,510.00 $ in 10 h." in text and "Not counted" in text
  assert "     3 machines of shards and evaluator: 1.00 $/h each" in text
  assert "machines of shards and evaluator" not in text.rpartition("Not counted")[2]
  require_prices(counts, prices, hours=10)


def test_machines_that_are_elsewhere_are_said_not_to_be_counted():
  *_, rest = cost_lines(paid_for(MADE, machines=0), {}, hours=10)
  assert rest.startswith("Not counted: the machines of shards and evaluator, what crosses regions")


def test_what_has_no_price_is_said_to_have_none_and_is_not_spent():
  counts, prices = paid_for(MADE, machines=3), prices_of(["v5p=4.2"])
  text = "\n".join(cost_lines(counts, prices, hours=0))
  assert "64 v6e chips: price not given" in text
  assert "Together 302.40 $ an hour and what has no price; for how long: --hours" in text
  with pytest.raises(ConfigError, match=r"--prices = 'v6e': has no price.*Fix: "):
    require_prices(counts, prices, hours=10)
  known = prices_of(["v5p=4", "v6e=2", "shard=0"])
  with pytest.raises(ConfigError, match=r"--hours = 0.0: .*Fix: "):
    require_prices(counts, known, hours=0.0)


@pytest.mark.parametrize("text", ["v5p", "v5p=", "=3", "v5p=-1", "v5p=nan", "v5p=inf", "v5p=two"])
def test_what_is_no_price_is_refused(text):
  with pytest.raises(ConfigError, match=r"--prices = .*Fix: "):
    prices_of([text])
