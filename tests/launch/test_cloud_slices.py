"""Islands on TPU VMs from create to delete, with a gcloud that keeps slices in a folder."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from ddiloco.launch.cloud import LaunchError, Slices
from tests.launch.placed import placed
from tests.launch.test_tpu_vms import MADE, RUN

FILES = {"config/config.json": "{}", "keys/public/learner-0.key": "public"}
SECRETS = {
  f"{role}.key_secret": f"secret of {role}" for role in ("learner-0", "learner-1", "syncer-0")
}
NAMES = ["run-learner-0", "run-learner-1"]


@pytest.fixture
def islands(cloud):
  """Made with changed options; each slice has two hosts here, or one."""
  cloud.has("hosts", "1")

  def make(watch_seconds: float = 100.0, **changed) -> Slices:
    usual = {"placement": MADE, "slice_minutes": 100 / 60, "recreations": 2}
    run = dataclasses.replace(RUN, **{**usual, **changed})
    alone = tuple(map(one_host, run.placement.islands))
    made = dataclasses.replace(run.placement, islands=alone)
    run = dataclasses.replace(run, placement=made)
    return Slices(run, FILES, SECRETS, watch_seconds, poll_seconds=0.01)

  return make


@pytest.fixture
def made(cloud, islands):
  """All islands run, and nothing has been asked since."""
  islands().create()
  cloud.forget()


def one_host(island):
  return dataclasses.replace(island, shape=dataclasses.replace(island.shape, hosts=1))


def verbs(cloud, name: str) -> list[str]:
  """What was done with a slice; looking is left out."""
  found = []
  for words in cloud.asked("gcloud"):
    text = json.dumps(words)
    if name in text and not ("describe" in words or "docker inspect" in text):
      found.append(words[4])
  return found


def test_slices_are_made_and_their_roles_started(cloud, islands, capsys):
  islands().create()
  assert list(cloud.slices()) == NAMES
  for name in NAMES:
    assert verbs(cloud, name) == ["create", "scp", "ssh"]
  home = cloud.folder / "home-run-learner-0" / "ddiloco"
  assert (home / "config" / "config.json").read_text() == "{}"
  (secret,) = (home / "keys" / "secret").iterdir()
  assert secret.name == "learner-0.key_secret" and secret.read_text() == "secret of learner-0"
  err = capsys.readouterr().err
  assert "learner-0: it runs (ready, hosts running 0)" in err
  assert "secret of" not in err + json.dumps(cloud.asked())


def test_twice_is_once(cloud, islands, made):
  islands().create()
  assert [verbs(cloud, name) for name in NAMES] == [[], []]


def test_an_island_is_not_made_in_two_zones(cloud, islands, made):
  """The slice in the first one would go on, and cost, and its learner have a double."""
  moved = placed(["v5p:2x2x2", "v6e:2x2"], ("us-east5-b=0", "us-east1-d=1"))
  said = r"learner-1 in europe-west4-a .tpu-vm.: is of this run.*Fix: .*: gcloud .*delete .*west4"
  with pytest.raises(LaunchError, match=said):
    islands(placement=moved).create()
  assert [words[4] for words in cloud.asked("gcloud")] == ["list", "list"]


def test_create_goes_on_where_it_stopped(cloud, islands, made):
  """Of one island there is the slice alone; the other has all."""
  path = cloud.folder / "slice-run-learner-0"
  path.write_text(json.dumps(json.loads(path.read_text()) | {"roles": []}))
  islands().create()
  assert [verbs(cloud, name) for name in NAMES] == [["scp", "ssh"], []]


def test_a_slice_that_is_taken_away_is_made_anew(cloud, islands, made, capsys):
  # Of learner 0: taken away, deleted; made (its plan's next line); seen, and then done.
  cloud.has("plan-run-learner-0", "PREEMPTED same same same same exited-0")
  cloud.has("plan-run-learner-1", "same exited-0")
  islands().watch()
  assert verbs(cloud, "run-learner-0")[:4] == ["delete", "create", "scp", "ssh"]
  assert verbs(cloud, "run-learner-1") == []
  assert "learner-0: deletes its slice, which was taken away" in capsys.readouterr().err


def test_there_is_a_limit_to_making_anew(cloud, islands, made):
  cloud.has("plan-run-learner-0", "PREEMPTED same PREEMPTED same PREEMPTED")
  cloud.has("plan-run-learner-1", "same exited-0")
  with pytest.raises(LaunchError, match=r"learner-0: its slice was taken away once more.*Fix: "):
    islands(recreations=1).watch()


def test_want_of_capacity_is_waited_out_within_a_limit(cloud, islands, capsys):
  cloud.has("plan-run-learner-0", "full used-up")
  islands().create()
  assert verbs(cloud, "run-learner-0") == ["create"] * 3 + ["scp", "ssh"]
  err = capsys.readouterr().err
  assert re.search("asks for its slice: gcloud failed, status 1: ERROR: .*no more capacity", err)
  assert "learner-0: waits until it runs (at most 100 s)" in err
  (cloud.folder / "slice-run-learner-0").unlink()
  cloud.has("plan-run-learner-0", "full " * 1000)
  said = r"learner-0: does not run after 0.5 s .absent, .*Fix: .* zone\.$"
  with pytest.raises(LaunchError, match=said):
    islands(slice_minutes=0.5 / 60).create()


@pytest.mark.parametrize(
  ("refused", "why"),
  [("no-quota", "Limit: 0 in"), ("no-zone", "PERMISSION_DENIED"), ("no-type", "INVALID_ARGUMENT")],
)
def test_what_is_refused_for_good_is_not_asked_for_again(cloud, islands, refused, why):
  """It was asked for until --slice_minutes had passed."""
  cloud.has("plan-run-learner-0", refused)
  with pytest.raises(LaunchError, match=rf"learner-0: asks for its slice: .*{why}.*Fix: "):
    islands().create()
  assert verbs(cloud, "run-learner-0") == ["create"]
  assert list(cloud.slices()) == NAMES[1:], "the other islands are made"


@pytest.mark.parametrize("queued", [False, True])
def test_a_zone_that_may_not_be_looked_into_is_said_at_once(cloud, islands, queued, capsys):
  cloud.has("hidden-run-learner-0")
  cloud.has("plan-run-learner-1", "same same active")
  with pytest.raises(LaunchError, match=r"learner-0: no slice .*PERMISSION_DENIED.*Fix: "):
    islands(queued=queued).create()
  assert verbs(cloud, "run-learner-0") == []
  assert re.search("learner-0: no slice .* The others go on.", capsys.readouterr().err)


def test_a_queued_request_that_is_refused_for_good_is_made_once(cloud, islands):
  """One that an earlier command has left is deleted first: the reason may be mended."""
  cloud.has("plan-run-learner-1", "same active " + "same " * 20)
  for left in ([], ["delete"]):
    cloud.forget()
    cloud.has("plan-run-learner-0", "same " * len(left) + "same denied")
    with pytest.raises(LaunchError, match=r"learner-0: no slice .*code 7: this service .*Fix: "):
      islands(queued=True).create()
    assert verbs(cloud, "run-learner-0") == [*left, "create"]


def test_a_slice_that_was_there_is_asked_for_again_whatever_is_answered(cloud, islands, made):
  """A watch is alone for days, and the cloud's refusal may be a mistake."""
  cloud.has("plan-run-learner-0", "same same PREEMPTED no-zone same same same same exited-0")
  cloud.has("plan-run-learner-1", "same exited-0")
  islands().watch()
  assert verbs(cloud, "run-learner-0") == ["delete", "create", "create", "scp", "ssh"]


@pytest.mark.parametrize("labels", [{}, {"labels": "ddiloco-run=run-learner"}])
def test_a_slice_of_that_name_that_is_not_of_the_run_is_left_alone(cloud, islands, labels):
  """One that its owner had stopped was deleted, and on one that ran the role was started."""
  for state in ("STOPPED", "READY"):
    slice_ = {"state": state, "roles": [], "flags": {"zone": "us-east5-b", **labels}}
    cloud.has("slice-run-learner-0", json.dumps(slice_))
    for act in ("create", "watch"):
      cloud.has("plan-run-learner-1", "same exited-0" if act == "watch" else "")
      with pytest.raises(LaunchError, match=r"learner-0: no slice .*run-learner-0 is not of this"):
        getattr(islands(), act)()
    assert verbs(cloud, "run-learner-0") == [] and cloud.slices()["run-learner-0"] == slice_
    assert islands().status()[0].startswith("learner-0 in us-east5-b: foreign: run-learner-0 is ")
    assert islands().delete() == [] and cloud.slices() == {"run-learner-0": slice_}


@pytest.mark.parametrize("queued", [False, True])
def test_another_operators_run_of_this_name_is_left_alone(cloud, islands, queued):
  """Its islands were taken for those that were asked for, which would never run."""
  for name in NAMES:
    cloud.has(f"plan-{name}", "same active same")
  islands(queued=queued, identity="mine").create()
  before = cloud.slices()
  for act in ("create", "watch"):
    with pytest.raises(LaunchError, match=r"learner-0: no slice .*with other --keys"):
      getattr(islands(queued=queued, identity="other"), act)()
  assert cloud.slices() == before
  for identity in ("mine", ""):  # "": the folder of keys is not here
    islands(queued=queued, identity=identity).create()


@pytest.mark.parametrize("queued", [False, True])
def test_what_was_asked_for_in_the_other_way_is_not_asked_for_again(cloud, islands, queued):
  """A slice that was taken away could not be deleted in this way, and a request that waits would
  find its name taken."""
  for name in NAMES:
    cloud.has(f"plan-{name}", "same active same")
  islands(queued=queued).create()
  cloud.forget()
  there = "queued-resources" if queued else "tpu-vm"
  with pytest.raises(LaunchError, match=rf"run-learner-0 in us-east5-b .{there}.: .*nothing was"):
    islands(queued=not queued).create()
  assert {words[4] for words in cloud.asked("gcloud")} == {"list"}


def test_hosts_that_do_not_answer_yet_are_asked_again(cloud, islands, capsys):
  """As those of a slice that is only just there often do."""
  cloud.has("fails-ssh-run-learner-0", "docker run")
  islands().create()
  assert verbs(cloud, "run-learner-0") == ["create", "scp", "ssh", "scp", "ssh"]
  assert "learner-0: starts: gcloud failed, status 1: " in capsys.readouterr().err


def test_queued_resources_are_waited_for(cloud, islands):
  cloud.has("plan-run-learner-0", "same same same active")
  cloud.has("plan-run-learner-1", "same active")
  islands(queued=True).create()
  groups = {words[3] for words in cloud.asked("gcloud") if words[4] == "create"}
  assert groups == {"queued-resources"}
  assert [verbs(cloud, name) for name in NAMES] == [["create", "scp", "ssh"]] * 2


def test_a_request_that_is_refused_says_why_and_one_that_still_waits_is_said_to_cost(
  cloud, islands, capsys
):
  cloud.has("plan-run-learner-0", "same failed same failed")
  with pytest.raises(LaunchError) as raised:
    islands(queued=True, recreations=1, slice_minutes=3 / 60).create()
  first, second = str(raised.value).splitlines()
  assert "learner-0: its slice was taken away once more (failed: code 8: Quota " in first
  assert "learner-1: does not run after 3 s (waiting_for_resources, hosts not seen)" in second
  assert "raise --slice_minutes, or take another zone; it still costs, or will once it is" in second
  assert list(cloud.slices()) == NAMES


def test_a_request_whose_slice_is_not_there_yet_is_made_once(cloud, islands):
  """The service has granted it, and makes the slice, or has just taken it away."""
  for name in NAMES:
    cloud.has(f"plan-{name}", "same active")
    cloud.has(f"unmade-{name}")
  islands(queued=True).create()
  assert [verbs(cloud, name) for name in NAMES] == [["create", "scp", "ssh"]] * 2


def test_a_slice_that_is_deleted_elsewhere_is_not_made_anew(cloud, islands, made):
  """`delete` in another terminal means it: slices made after it would cost money unseen."""
  cloud.has("plan-run-learner-0", "same same deleted")
  cloud.has("plan-run-learner-1", "same exited-0")
  said = r"learner-0: its slice was deleted, and not by this command. Fix: .*create again"
  with pytest.raises(LaunchError, match=said):
    islands().watch()
  assert verbs(cloud, "run-learner-0") == []
  islands().create()
  assert list(cloud.slices()) == NAMES


def test_a_role_that_failed_ends_the_watch_and_create_starts_it_again(cloud, islands, made):
  cloud.has("plan-run-learner-0", "same exited-1")
  cloud.has("plan-run-learner-1", "same same same exited-0")
  with pytest.raises(
    LaunchError, match=r"learner-0: .*--max_restarts .*exited 1.*Fix: .*docker logs"
  ):
    islands().watch()
  assert json.loads((cloud.folder / "slice-run-learner-1").read_text())["roles"] == ["exited 0"]
  cloud.forget()
  islands().create()
  assert verbs(cloud, "run-learner-0") == ["scp", "ssh"] and verbs(cloud, "run-learner-1") == []


def test_watching_has_a_limit(cloud, islands, made):
  with pytest.raises(LaunchError, match=r"learner-1: is not done within 0.2 s; it goes on. Fix: "):
    islands(watch_seconds=0.2).watch()


def test_the_state_of_all_is_told(cloud, islands, made):
  (cloud.folder / "slice-run-learner-1").unlink()
  assert islands().status() == [
    "learner-0 in us-east5-b: ready, hosts running 0",
    "learner-1 in europe-west4-a: absent, hosts not seen",
  ]


def test_a_slice_that_no_island_has_any_more_is_told_as_well(cloud, islands, made):
  fewer = dataclasses.replace(MADE, islands=MADE.islands[:1])
  assert islands(placement=fewer).status() == [
    "learner-0 in us-east5-b: ready, hosts running 0",
    "run-learner-1 in europe-west4-a: ready, hosts not seen; no island has it, and it costs",
  ]


@pytest.mark.parametrize("queued", [False, True])
def test_what_a_zone_has_that_does_not_answer_is_not_taken_for_deleted(cloud, islands, queued):
  """gcloud lists the other zones, and does not say that one is missing: its slices went on."""
  for name in NAMES:
    cloud.has(f"plan-{name}", "active active active")
  islands(queued=queued).create()
  cloud.has("silent-europe-west4-a")
  (left,) = islands(queued=queued).delete()
  assert left.startswith("run-learner-1 in europe-west4-a: unseen (status 1: ERROR: UNAVAILABLE")
  assert list(cloud.slices()) == ["run-learner-1"]
  (cloud.folder / "silent-europe-west4-a").unlink()
  assert islands(queued=queued).delete() == [] and cloud.slices() == {}


@pytest.mark.parametrize("queued", [False, True])
def test_delete_drains_first_and_says_what_is_left(cloud, islands, queued, capsys):
  for name in NAMES:
    cloud.has(f"plan-{name}", "active active active")
  islands(queued=queued).create()
  cloud.forget()
  cloud.has("stays-run-learner-1")
  cloud.has("fails-ssh-run-learner-0", "docker stop")
  state = "active" if queued else "ready"
  left = [f"run-learner-1 in europe-west4-a: {state}"]
  assert islands(queued=queued).delete() == left and list(cloud.slices()) == NAMES[1:]
  err = capsys.readouterr().err
  assert "run-learner-1: is deleted: status 1: ERROR: INTERNAL: try again" in err
  assert "run-learner-0: stops: status 1: ERROR: ssh exited with [255]" in err
  assert verbs(cloud, "run-learner-0") == ["ssh", "delete"], "its role is asked to end first"
  (cloud.folder / "stays-run-learner-1").unlink()
  assert islands(queued=queued).delete() == [] and cloud.slices() == {}
  assert islands(queued=queued).delete() == [], "also when nothing is there"


@pytest.mark.parametrize("queued", [False, True])
def test_delete_finds_the_slices_of_islands_that_the_config_has_no_more(cloud, islands, queued):
  """They cost money; those of other runs stay, also where names begin alike."""
  other = dataclasses.replace(MADE, name="run-learner")
  for placement in (MADE, other):
    for island in placement.islands:
      cloud.has(f"plan-{placement.name}-{island.role}", "active active active")
    islands(placement=placement, queued=queued).create()
  fewer = placed(["v5p:2x2x2"], ("us-east5-b=0",))
  assert islands(placement=fewer, queued=queued).delete() == []
  assert list(cloud.slices()) == ["run-learner-learner-0", "run-learner-learner-1"]


@pytest.mark.parametrize("queued", [False, True])
def test_delete_finds_what_was_asked_for_in_the_other_way(cloud, islands, queued):
  """A request that waits would get its slice hours later, and cost money from then on."""
  for island, more in zip(MADE.islands, ({"queue": "WAITING_FOR_RESOURCES"}, {})):
    flags = {"zone": island.where, "labels": "ddiloco-run=run"}
    each = {"state": "READY", "roles": [], "flags": flags, **more}
    cloud.has(f"slice-run-{island.role}", json.dumps(each))
  assert islands(queued=queued).delete() == [] and cloud.slices() == {}
  deleted = [(words[3], words[5]) for words in cloud.asked("gcloud") if words[4] == "delete"]
  assert sorted(deleted) == [("queued-resources", NAMES[0]), ("tpu-vm", NAMES[1])]


def test_what_cannot_be_listed_is_not_taken_for_gone(cloud, islands, made):
  cloud.has("unlisted")
  said = r"run: its slices .tpu-vm.: gcloud failed.*no answer.*Fix: "
  with pytest.raises(LaunchError, match=said):
    islands().delete()
  assert list(cloud.slices()) == NAMES


def test_a_role_that_drains_for_long_is_waited_for(cloud, islands, capsys):
  """Its slice is not deleted before."""
  made = placed(["v6e:2x2"], ("z=0",), network={"drain_seconds": 600.0})
  islands(placement=made).create()
  assert islands(placement=made).delete() == []
  limit = re.search(
    r"run-learner-0: stops .at most (\d+) s.: .*--time=610", capsys.readouterr().err
  )
  assert limit and int(limit[1]) > 610
