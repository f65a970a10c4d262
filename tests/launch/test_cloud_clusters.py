"""A run on GKE from create to delete, with a kubectl that keeps clusters in a folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess

import pytest

from ddiloco.launch import gke
from ddiloco.launch.cloud import Clusters, LaunchError
from tests.launch import programs
from tests.launch.placed import IMAGE, placed
from tests.launch.test_gke import PUBLIC, SECRETS

MADE = placed(["v6e:2x2"] * 2, ("east=0", "west=1"))
RUN = gke.GkeRun(MADE, "work", namespace="ours", shard_addresses=("10.0.0.1", "10.0.0.2"))
CLUSTERS = Clusters(RUN)
DOCUMENTS = RUN.documents(PUBLIC, SECRETS)
NAMES = {"east": ("run-shards", "run-evaluator", "run-learner-0"), "west": ("run-learner-1",)}


def test_each_cluster_is_given_its_own_and_twice_is_once(cloud):
  for _ in range(2):
    CLUSTERS.create(DOCUMENTS)
  applied = [words for words in cloud.asked("kubectl") if "apply" in words]
  assert [words[1] for words in applied] == ["--context=east", "--context=west"] * 4
  dry = [words[-1] == "--dry-run=server" for words in applied]
  assert dry == [True, True, False, False] * 2, "all are asked before one is given anything"
  assert all("--server-side" in words for words in applied), "no secret in an annotation"
  states = CLUSTERS.status()
  assert sorted(each.name for each in states) == sorted(sum(NAMES.values(), ()))
  assert [each for each in states if each.name in NAMES["west"]] == [
    gke.JobSetState("run-learner-1", jobs=1, reason="no pod")
  ]


def test_a_cluster_that_refuses_is_named(cloud):
  cloud.has("unreachable-west")
  with pytest.raises(LaunchError, match=r"west: .*Unable to connect.*Fix: "):
    CLUSTERS.create(DOCUMENTS)


MOVED = [
  (("east=0", "south=1"), "run-learner-1 in west"),
  (("east=0-1",), "run-learner-1 in west"),
  (("west=0", "east=1"), "run-learner-1 in west, .*run-shards in east"),
]


@pytest.mark.parametrize(("places", "said"), MOVED)
def test_an_island_is_not_made_in_two_clusters(cloud, places, said):
  """The JobSet in the first one would go on, and cost, and its learner have a double."""
  CLUSTERS.create(DOCUMENTS)
  cloud.forget()
  moved = dataclasses.replace(RUN, placement=placed(["v6e:2x2"] * 2, places))
  with pytest.raises(LaunchError, match=f"^{said}: is of a run run, costs.*Fix: "):
    Clusters(moved).create(moved.documents(PUBLIC, SECRETS))
  assert not any("apply" in words for words in cloud.asked())
  left = "run-learner-1 in west, a cluster that these flags do not name"
  assert Clusters(moved).delete(30) == ([] if "west" in moved.contexts() else [left])
  assert CLUSTERS.delete(30) == []
  Clusters(moved).create(moved.documents(PUBLIC, SECRETS))


def held(cloud) -> dict[str, str]:
  """What the clusters have."""
  return {str(path): path.read_text() for path in cloud.folder.glob("cluster-*/*")}


@pytest.mark.parametrize(("image", "key"), [("other:2", "secret"), (IMAGE, "other")])
def test_what_a_cluster_refuses_leaves_a_run_with_its_config_and_keys(cloud, image, key):
  """It had been given them before its JobSets were refused: a role that started again was given
  up, and with other keys all were shut out."""
  secrets = {f"{role}.key_secret": "secret" for role in ("learner-0", "learner-1")}
  CLUSTERS.create(RUN.documents(PUBLIC, secrets))
  before = held(cloud)
  made = placed(["v6e:2x2"] * 2, ("east=0", "west=1"), network={"streams": 4})
  run = dataclasses.replace(RUN, placement=dataclasses.replace(made, image=image))
  documents = run.documents({"learner-0.key": key}, dict.fromkeys(secrets, key))
  said = r"east: whether it takes .* immutable.*; nothing was made or changed\. Fix: .*delete"
  with pytest.raises(LaunchError, match=said):
    Clusters(run).create(documents)
  assert held(cloud) == before


def test_no_cluster_is_given_anything_before_all_would_take_it(cloud):
  image = dataclasses.replace(RUN, placement=dataclasses.replace(MADE, image="other:2"))
  documents = image.documents(PUBLIC, SECRETS)
  Clusters(image).create({"west": documents["west"], "east": []})
  before = held(cloud)
  with pytest.raises(LaunchError, match=r"west: whether it takes .* immutable"):
    CLUSTERS.create(DOCUMENTS)
  assert held(cloud) == before


def test_what_roles_may_differ_in_is_changed_while_a_run_goes_on(cloud):
  CLUSTERS.create(DOCUMENTS)
  made = placed(["v6e:2x2"] * 2, ("east=0", "west=1"), network={"streams": 4})
  run = dataclasses.replace(RUN, placement=made)
  Clusters(run).create(run.documents(PUBLIC, SECRETS))
  assert CLUSTERS.configs() == [made.config] * 2


def test_what_is_not_there_and_why_a_pod_waits_is_said(cloud):
  CLUSTERS.create({"east": DOCUMENTS["east"]})
  labels = {gke.RUN: "run", "jobset.sigs.k8s.io/jobset-name": "run-learner-0"}
  no_node = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3"}
  for name, conditions in (("a", []), ("b", [no_node]), ("c", [])):
    metadata, status = {"name": name, "labels": labels}, {"conditions": conditions}
    pod = {"kind": "Pod", "metadata": metadata, "status": status}
    cloud.has(f"cluster-east/pod@{name}", json.dumps(pod))
  assert list(map(str, CLUSTERS.status())) == [
    "run-shards: 0 of 2 ready (no pod)",
    "run-evaluator: 0 of 1 ready (no pod)",
    "run-learner-0: 0 of 1 ready (pod b: Unschedulable: 0/3)",
    "run-learner-1: is not there",
  ]


def test_a_cluster_of_two_names_and_those_that_do_not_answer_hinder_no_run(cloud, capsys):
  CLUSTERS.create(DOCUMENTS)
  (cloud.folder / "cluster-alias").symlink_to("cluster-east")
  for name, why in (("old", "unreachable"), ("plain", "without-jobset")):
    (cloud.folder / f"cluster-{name}").mkdir()
    cloud.has(f"{why}-{name}")
  CLUSTERS.create(DOCUMENTS)
  err = capsys.readouterr().err
  assert "the run may be there too: old: what it has of the run: kubectl failed, status 1: U" in err
  assert "plain" not in err


def test_what_is_deleted_is_gone_and_what_is_not_is_said(cloud):
  foreign = dict(DOCUMENTS["west"][0])
  foreign["metadata"] = {"name": "other-config", "labels": {gke.RUN: "other"}}
  CLUSTERS.create({"west": [foreign]})
  CLUSTERS.create(DOCUMENTS)
  assert CLUSTERS.delete(30) == []
  assert [p.name for p in (cloud.folder / "cluster-west").iterdir()] == ["configmap@other-config"]
  assert CLUSTERS.delete(30) == [], "also when nothing is there"
  CLUSTERS.create(DOCUMENTS)
  cloud.has("stuck", "run-learner-1")
  assert "west: jobset.jobset.x-k8s.io/run-learner-1" in CLUSTERS.delete(30)
  cloud.has("unreachable-east")
  assert "east: not known" in CLUSTERS.delete(30)[0], "not seen is not gone"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed here")
def test_kubectl_knows_every_flag(tmp_path, monkeypatch):
  """The real one refuses wrong flags before it looks for a cluster; here it finds none."""
  cloud = programs.install(tmp_path / "recorded", monkeypatch)
  (cloud.folder / "cluster-other").mkdir()
  CLUSTERS.create(DOCUMENTS)
  CLUSTERS.configs()
  CLUSTERS.status()
  CLUSTERS.delete(30)
  asked = {tuple(w for w in words if "--context" not in w) for words in cloud.asked("kubectl")}
  monkeypatch.undo()
  monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
  monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
  assert len(asked) == 9
  for words in [*asked, ("kubectl", "get", "pods", "--nonsense")]:
    command = [*words, "--request-timeout=1s"]
    done = subprocess.run(command, capture_output=True, text=True, input="{}")
    assert ("unknown flag" in done.stderr) == ("--nonsense" in words), words
    assert bool(done.returncode) == ("config" not in words), "only that needs no cluster"


def ended(cloud, ends: dict[str, dict]) -> None:
  CLUSTERS.create(DOCUMENTS)
  for context, names in NAMES.items():
    for name in names:
      cloud.set_status(context, name, ends.get(name, {"terminalState": "Completed"}))


def test_watching_ends_with_the_run(cloud, capsys):
  ended(cloud, {})
  assert CLUSTERS.watch(100, 0.01)
  err = capsys.readouterr().err
  assert "run: watches 4 JobSets (at most 100 s)" in err
  assert "run-learner-1: Completed" in err


def test_watching_tells_failure(cloud, capsys):
  message = [{"type": "Failed", "status": "True", "message": "reached max restarts"}]
  failed = {"terminalState": "Failed", "conditions": message, "restarts": 11}
  ended(cloud, {"run-learner-0": failed})
  assert not CLUSTERS.watch(100, 0.01)
  assert "run-learner-0: Failed, 11 restarts, 0 of them failures" in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_hides_no_other(cloud, capsys):
  """Nothing was said of a region that lived while the other one was gone, but an error at each
  look."""
  CLUSTERS.create(DOCUMENTS)
  cloud.has("unreachable-west")
  clusters = Clusters(RUN)
  for _ in range(2):
    assert list(map(str, clusters.status())) == [
      *("run-shards: 0 of 2 ready (no pod)", "run-evaluator: 0 of 1 ready (no pod)"),
      "run-learner-0: 0 of 1 ready (no pod)",
      "run-learner-1: is not seen (west does not answer)",
    ]
  assert capsys.readouterr().err.count("Unable to connect") == 1
  (cloud.folder / "unreachable-west").unlink()
  assert str(clusters.status()[-1]) == "run-learner-1: 0 of 1 ready (no pod)"
  cloud.has("unreachable-west")
  clusters.status()
  assert capsys.readouterr().err.count("Unable to connect") == 1, "it falls silent once more"


def test_watching_outlives_a_cluster_that_does_not_answer(cloud, capsys):
  ended(cloud, {})
  cloud.has("unreachable-once-west")
  assert CLUSTERS.watch(100, 0.01)
  err = capsys.readouterr().err
  assert "Unable to connect" in err and "run-learner-1: Completed" in err


GONE, THERE, UNSEEN = (gke.JobSetState("run-learner-0", jobs=jobs) for jobs in (0, 1, gke.UNSEEN))
DONE = dataclasses.replace(THERE, end="Completed")


@pytest.mark.parametrize("looks", [(GONE, THERE, GONE), (THERE, UNSEEN, GONE)])
def test_watching_ends_where_the_run_is_deleted(monkeypatch, looks):
  seen = list(looks)
  monkeypatch.setattr(Clusters, "status", lambda _: [seen.pop(0)])
  with pytest.raises(LaunchError, match=r"run: was deleted, and not by this command. Fix: "):
    CLUSTERS.watch(100, 0.01)


@pytest.mark.parametrize("looks", [(THERE, UNSEEN, UNSEEN, DONE), (UNSEEN, GONE, DONE)])
def test_watching_does_not_take_a_run_for_deleted_that_it_does_not_see(monkeypatch, looks):
  seen = list(looks)
  monkeypatch.setattr(Clusters, "status", lambda _: [seen.pop(0)])
  assert CLUSTERS.watch(100, 0.01)


def test_watching_has_a_limit(cloud):
  CLUSTERS.create(DOCUMENTS)
  with pytest.raises(LaunchError, match=r"run: has not ended within 0.1 s; it goes on. Fix: "):
    CLUSTERS.watch(0.1, 0.01)
