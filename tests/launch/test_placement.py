"""Who runs where, and what each role is told."""

import pytest

from ddiloco.config import ConfigError, from_dict
from ddiloco.launch.placement import host_flags, place, role_command
from tests.launch.placed import BUCKET, config, placed


def test_islands_get_the_devices_and_hosts_of_their_slices():
  made = placed(["v5p:4x4x4", "v6e:2x4"])
  first, second = (made.config.islands.island(m) for m in (0, 1))
  assert (first.devices, first.hosts, second.devices, second.hosts) == (64, 16, 8, 1)
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
    (("a",), "must say who is where"),
    (("a=",), "must say who is where"),
    (("a=x",), "must say who is where"),
    (("a=0", "b=0-1"), "learner 0 has a place already"),
    (("a=0-2",), "there is no learner 2"),
    (("a=0",), r"learners \[1\] have no place"),
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
  learner = role_command(made, "learner-0", ["tcp://a:1", "tcp://b:1"], "/f", "/w")
  assert learner[:2] == ["ddiloco", "learner"] and "--learner=0" in learner
  assert "--syncers=tcp://a:1,tcp://b:1" in learner and "--term_status=143" in learner
  syncer = role_command(made, "syncer-1", ["tcp://a:1", "tcp://b:1"], "/f", "/w")
  assert "--shard=1" in syncer and "--bind=tcp://0.0.0.0:7000" in syncer
  shape = made.islands[0].shape
  assert host_flags(shape, "1", "leader") == ["--host=1", "--hosts=tcp://leader:7001"]
  assert host_flags(placed(["v6e:2x4"]).islands[0].shape, "0", "leader") == []
