"""`ddiloco launch`: what it prints, what it refuses to spend, and the clouds it leaves."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from unittest import mock

import pytest
import yaml

from ddiloco import cli
from ddiloco.launch import gke
from ddiloco.launch.cloud import LaunchError
from ddiloco.network.keys import make_keys
from tests.launch import programs
from tests.launch.placed import config, placed

launch = importlib.import_module("ddiloco.cli.launch")  # which the command hides


@pytest.fixture
def cloud(tmp_path, monkeypatch) -> programs.Cloud:
  monkeypatch.chdir(tmp_path)
  cloud = programs.install(tmp_path, monkeypatch)
  cloud.has("hosts", "1")
  return cloud


@pytest.fixture
def flags(tmp_path) -> list[str]:
  """A run of two islands in two places, with keys."""
  make_keys(tmp_path / "keys", 2, 2)
  (tmp_path / "config.json").write_text(config(["v6e:2x2", "v6e:2x4"]).to_json())
  return [
    *(f"--config={tmp_path / 'config.json'}", "--name=run", "--bucket=gs://bucket/run"),
    *(f"--keys={tmp_path / 'keys'}", "--image=image:1", "--place=east=0", "--place=west=1"),
    *("--poll_seconds=0.01", "--prices=v6e=2.5,shard=1", "--hours=10"),
  ]


GKE = ["--claim=work", "--shard_addresses=10.0.0.1,10.0.0.2"]
TPU_VMS = ["--syncers=tcp://10.0.0.1:7000,tcp://10.0.0.2:7000"]


def test_a_dry_run_prints_all_and_touches_nothing(cloud, flags, capsys):
  assert cli.main(["launch", "gke", *flags, *GKE, "--dry_run"]) == 0
  out = capsys.readouterr().out
  found = [each for each in yaml.safe_load_all(out) if each]
  jobsets = [each["metadata"]["name"] for each in found if each["kind"] == "JobSet"]
  assert jobsets == ["run-shards", "run-evaluator", "run-learner-0", "run-learner-1"]
  assert "12 v6e chips: 2.50 $/h each" in out and "330.00 $ in 10 h" in out
  assert "gcloud container node-pools create run-learner-1" in out
  assert "PRIVATE KEY" not in out and "bytes, not shown" in out and "BEGIN CERTIFICATE" in out
  assert cli.main(["launch", "tpu-vms", "create", *flags, *TPU_VMS, "--dry_run"]) == 0
  lines = capsys.readouterr().out.splitlines()
  commands = [shlex.split(line) for line in lines if not line.startswith("#")]
  assert [words[4] for words in commands] == ["create", "describe", "scp", "ssh"] * 2
  assert cloud.asked() == []


def test_one_is_not_named_as_many(cloud, flags, capsys):
  assert cli.main(["launch", "gke", *flags, *GKE, "--dry_run"]) == 0
  out = capsys.readouterr().out
  assert "run: islands: 2, places: 2" in out
  assert "learner-0 in east: v6e 2x2, hosts: 1, chips of each: 4" in out


@pytest.mark.parametrize("target", ["gke", "tpu-vms"])
@pytest.mark.parametrize("action", ["status", "watch", "delete"])
def test_every_action_has_a_dry_run(target, action, cloud, flags, capsys):
  more = GKE if target == "gke" else TPU_VMS
  assert cli.main(["launch", target, action, *flags, *more, "--dry_run"]) == 0
  out = capsys.readouterr().out
  assert out and cloud.asked() == []
  if (target, action) == ("tpu-vms", "delete"):
    commands = [shlex.split(line) for line in out.splitlines() if not line.startswith("#")]
    assert [words[4] for words in commands] == ["list"] * 2 + ["describe", "ssh", "delete"] * 2


@pytest.mark.parametrize(
  ("changed", "said"),
  [
    ([], "--yes = False: was not given, nothing was made. Fix: "),
    (["--yes", "--prices=v6e=2.5"], "has no price"),
    (["--yes", "--hours=0"], "--hours = 0.0"),
    (["--yes", "--watch_hours=nan"], "--watch_hours=nan"),
    (["--yes", "--poll_seconds=1e12"], "--poll_seconds=1000000000000.0: must be at most 1e+09"),
    (["--yes", "--keys=none"], "--keys = 'none': lacks "),
  ],
)
def test_nothing_is_spent_unasked(changed, said, cloud, flags, capsys):
  assert cli.main(["launch", "gke", *flags, *GKE, *changed]) == 2
  assert said in capsys.readouterr().err and cloud.asked() == []


def test_a_damaged_key_is_refused_before_it_costs(cloud, flags, tmp_path, capsys):
  for kind, name in (("secret", "learner-1.key_secret"), ("public", "syncer-0.key")):
    path = tmp_path / "keys" / kind / name
    whole = path.read_text()
    path.write_text(whole[:100])
    for more in (["gke", *flags, *GKE], ["tpu-vms", *flags, *TPU_VMS]):
      assert cli.main(["launch", *more, "--yes"]) == 2
      assert f"--keys = '{path}': is damaged. Fix: " in capsys.readouterr().err
    path.write_text(whole)
  assert cloud.asked() == []


@pytest.mark.parametrize(
  ("words", "said"),
  [
    ([], "must name where"),
    (["aws"], "must name where"),
    (["--name=first", "gke"], "must name where"),  # the name was dropped
    (["gke", "explode"], "must be one of create, status, watch, delete"),
  ],
)
def test_what_is_not_there_is_refused(words, said, capsys):
  assert cli.main(["launch", *words]) == 2
  assert said in capsys.readouterr().err


@pytest.mark.parametrize(
  "words",
  [["--help"], ["gke", "--help"], ["tpu-vms", "--help"], ["tpu-vms", "delete", "--help"],
   ["--help", "gke"]],
)  # fmt: skip
def test_help(words, capsys):
  assert cli.main(["launch", *words]) == 0
  out = capsys.readouterr().out
  assert "ddiloco launch tpu-vms [create|status|watch|delete]" in out and "--dry_run" in out


def test_a_run_on_gke_from_create_to_delete(cloud, flags, capsys):
  launch = lambda action, *more: cli.main(["launch", "gke", action, *flags, *GKE, *more])
  assert launch("create", "--yes") == 0
  err = capsys.readouterr().err
  assert "330.00 $ in 10 h" in err, "what it costs stands in the log"
  secret = cloud.folder / "cluster-east" / "secret@run-syncer-1-key"
  (text,) = json.loads(secret.read_text())["stringData"].values()
  assert text.startswith("-----BEGIN PRIVATE KEY-----") and text not in err
  assert launch("status") == 0
  assert "run-shards: 0 of 2 ready" in capsys.readouterr().out
  for context, name in [("east", n) for n in ("shards", "evaluator", "learner-0")] + [
    ("west", "learner-1")
  ]:
    cloud.set_status(context, f"run-{name}", {"terminalState": "Completed"})
  assert launch("watch") == 0
  assert launch("delete") == 0
  assert "Left alone, and paid for: node pools, gs://bucket/run" in capsys.readouterr().out
  assert launch("create", "--yes") == 0
  cloud.has("stuck", "run-learner-1")
  assert launch("delete") == 1
  assert "west: jobset.jobset.x-k8s.io/run-learner-1" in capsys.readouterr().out


@pytest.mark.parametrize("changed", ["--config.outer.momentum=0.3", "--bucket=gs://bucket/other"])
def test_a_run_that_is_there_keeps_what_its_roles_share(cloud, flags, changed, capsys):
  """A role that started again would refuse the other config, and be given up."""
  assert cli.main(["launch", "gke", *flags, *GKE, "--yes"]) == 0
  assert cli.main(["launch", "gke", *flags, *GKE, "--yes", "--config.islands.remat=full"]) == 0
  cloud.forget()
  assert cli.main(["launch", "gke", *flags, *GKE, "--yes", changed]) == 2
  assert "the run run is there already, with " in capsys.readouterr().err
  assert not any("apply" in words for words in cloud.asked())
  assert cli.main(["launch", "gke", "delete", *flags, *GKE]) == 0
  assert cli.main(["launch", "gke", *flags, *GKE, "--yes", changed]) == 0


def test_islands_on_tpu_vms_from_create_to_delete(cloud, flags, capsys):
  def launch(action, *more):
    return cli.main(["launch", "tpu-vms", action, *flags, *TPU_VMS, *more])

  assert launch("create") == 2
  assert launch("watch") == 2, "it makes slices anew, which costs"
  assert cloud.asked() == []
  assert launch("create", "--yes") == 0
  (labels,) = {node["flags"]["labels"] for node in cloud.slices().values()}
  assert re.fullmatch("ddiloco-run=run,ddiloco-identity=[0-9a-f]{16}", labels)
  assert launch("status") == 0
  assert "learner-1 in west: ready, hosts running 0" in capsys.readouterr().out
  for learner in (0, 1):
    cloud.has(f"plan-run-learner-{learner}", "same exited-0")
  assert launch("watch", "--yes") == 0
  assert capsys.readouterr().err.count(": it is done (ready, hosts exited 0)") == 2
  assert launch("delete") == 0
  assert "No slice of run is left." in capsys.readouterr().out and cloud.slices() == {}


def test_slices_are_not_taken_for_those_of_another_config(cloud, flags, capsys):
  """They were said to run as asked; one that was made anew would have been refused by shards."""
  create = ["launch", "tpu-vms", *flags, *TPU_VMS, "--yes"]
  assert cli.main(create) == 0
  assert cli.main([*create, "--config.islands.remat=full"]) == 0
  assert cli.main([*create, "--config.outer.momentum=0.3"]) == 1
  assert "with other --keys or another config; choose another --name" in capsys.readouterr().err


@pytest.mark.parametrize(("target", "more"), [("gke", GKE), ("tpu-vms", TPU_VMS)])
@pytest.mark.parametrize(
  ("end", "status"), [(KeyboardInterrupt, 130), (LaunchError("no answer"), 1), (None, 0)]
)
def test_what_costs_from_now_on_is_said_however_it_ends(
  target, more, end, status, flags, monkeypatch, capsys
):
  """Also when a watch has seen the end of the run, at night."""
  clouds = mock.Mock()
  clouds.watch.side_effect = clouds.create.side_effect = end
  clouds.configs.return_value = []
  monkeypatch.setattr(launch, "Clusters" if target == "gke" else "Slices", lambda *_: clouds)
  said = f"What was made stays, and costs, until `ddiloco launch {target} delete`"
  for action in ("create", "watch"):
    assert cli.main(["launch", target, action, *flags, *more, "--yes"]) == status
    assert said in capsys.readouterr().err


def test_data_that_do_not_fit_hinder_create_alone(cloud, flags, tmp_path, capsys):
  (tmp_path / "tiny.txt").write_text("ab")
  small = "--config.data.source=text", f"--config.data.path={tmp_path / 'tiny.txt'}"
  more = [*flags, *GKE, *small, "--dry_run"]
  assert cli.main(["launch", "gke", "delete", *more]) == 0
  assert cli.main(["launch", "gke", "create", *more]) == 2
  assert "data." in capsys.readouterr().err


def test_what_the_cloud_refuses_is_said(cloud, flags, capsys):
  cloud.has("unreachable-east")
  assert cli.main(["launch", "gke", "status", *flags, *GKE]) == 1
  assert "Unable to connect to the server" in capsys.readouterr().err


def test_every_role_knows_the_flags_it_is_given(cloud, tmp_path, capsys):
  """Of an island of several hosts too; what is rendered is what the commands take."""
  made = placed(["v6e:4x4"])
  run = gke.GkeRun(made, "work")
  for document in run.documents({}, {})[""]:
    if document["kind"] != "JobSet":
      continue
    for job in document["spec"]["replicatedJobs"]:
      (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
      program, command, *given = container["command"]
      assert program == "ddiloco" and cli.main([command, "--help"]) == 0
      known = capsys.readouterr().out
      for flag in given:
        name = flag[2:].partition("=")[0]
        assert f"--{name}" in known or name == "config", f"{command} has no --{name}"
