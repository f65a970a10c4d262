"""Commands for TPU VMs, as gcloud itself reads them, and what an island needs next."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import subprocess

import pytest

from ddiloco.config import ConfigError
from ddiloco.launch import gke, tpu_vms
from ddiloco.launch.tpu_vms import Need, Seen, next_need
from tests.launch.placed import IMAGE, placed

MADE = placed(["v5p:2x2x2", "v6e:2x2"], ("us-east5-b=0", "europe-west4-a=1"), spot=True)
FIRST, SECOND = MADE.islands
RUN = tpu_vms.TpuVmRun(MADE, ("tcp://10.0.0.1:7000", "tcp://10.0.0.2:7000"), "proj")


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed here")
@pytest.mark.slow
def test_gcloud_knows_every_command(tmp_path, monkeypatch):
  """Its own parser reads them, and runs none of them."""
  monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
  run, each = RUN, RUN.slice(FIRST)
  several = placed(["v6e:4x4", "tpu7x:2x2x2", "h100:8"], ("gke_p_us-east5-a_c=0-2",), spot=True)
  commands = [
    run.create(FIRST),
    dataclasses.replace(run, queued=True).create(FIRST),
    run.describe(each),
    run.describe(each, "queued-resources"),
    *map(run.list_all, tpu_vms.GROUPS),
    *(run.delete(each, group) for group in tpu_vms.GROUPS),
    run.copy(each, "ddiloco"),
    run.on_hosts(each, "true"),
    *map(shlex.split, gke.GkeRun(several, "work").node_pools()),
    ["gcloud", "compute", "tpus", "tpu-vm", "create", "wrong", "--nonsense"],
  ]
  file = tmp_path / "commands.json"
  file.write_text(json.dumps([{"command_string": shlex.join(command)} for command in commands]))
  lint = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={file}"]
  done = subprocess.run(lint, capture_output=True, text=True, check=True)
  checked = json.loads(done.stdout)
  assert [each["error_message"] for each in checked[:-1]] == [None] * (len(commands) - 1)
  assert not checked[-1]["success"], "it can tell"


def test_a_slice_is_asked_for_by_its_own_names():
  command = RUN.create(FIRST)
  assert command[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "create", "run-learner-0"]
  assert {"--accelerator-type=v5p-16", "--version=v2-alpha-tpuv5", "--spot"} <= set(command)
  assert {"--zone=us-east5-b", "--project=proj"} <= set(command)
  queued = dataclasses.replace(RUN, queued=True, placement=placed(["v5p:2x2x2"], ("z=0",))).create(
    FIRST
  )
  assert {"--node-id=run-learner-0", "--runtime-version=v2-alpha-tpuv5"} <= set(queued)
  assert "--spot" not in queued
  other = dataclasses.replace(RUN, runtime_version="v3", project="")
  assert "--version=v3" in other.create(FIRST)
  assert not any("--project" in word for word in other.create(FIRST)), "it is gcloud's own"


def test_the_script_of_a_host_is_one_that_a_shell_reads(tmp_path):
  """A shell runs it, with stand-ins for what is on a host: the role gets all that it is told."""
  script = RUN.start_script(FIRST, "10.1.0.1")
  for name in ("sudo", "curl"):
    path = tmp_path / name
    said = (
      "echo 1"
      if name == "curl"
      else f'printf "%s\\n" "$@" >> {tmp_path}/asked; echo >> {tmp_path}/asked'
    )
    path.write_text(f"#!/bin/sh\n{said}\n")
    path.chmod(0o755)
  secret = tmp_path / "ddiloco" / "keys" / "secret"
  secret.mkdir(parents=True)
  (secret / "learner-0.key_secret").touch()
  environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
  subprocess.run(["sh", "-c", script], env=environment, check=True)
  _, login, docker = (tmp_path / "asked").read_text().strip().split("\n\n")
  assert login.splitlines() == [
    "gcloud",
    "auth",
    "configure-docker",
    "us-docker.pkg.dev",
    "--quiet",
  ]
  words = docker.splitlines()
  assert words[:3] == ["docker", "run", "--detach"] and "--restart=on-failure:10" in words
  assert f"--volume={tmp_path}/ddiloco:/ddiloco:ro" in words
  assert "--env=JAX_PLATFORMS=tpu,cpu" in words
  role = words[words.index(IMAGE) + 1 :]
  assert role[:2] == ["ddiloco", "learner"] and "--learner=0" in role
  assert "--host=1" in role and "--hosts=tcp://10.1.0.1:7001" in role
  assert (secret / "learner-0.key_secret").stat().st_mode & 0o777 == 0o600
  look = subprocess.run(
    ["sh", "-c", RUN.look_script()], env=environment, check=True, capture_output=True, text=True
  )
  assert tpu_vms.seen_roles(f"some noise\n{look.stdout}") == ("",), "what docker said: nothing"
  (tmp_path / "sudo").write_text("#!/bin/sh\necho\nexit 1\n")
  look = subprocess.run(
    ["sh", "-c", RUN.look_script()], env=environment, check=True, capture_output=True, text=True
  )
  assert tpu_vms.seen_roles(look.stdout) == ("none",)
  alone = RUN.start_script(SECOND, "10.1.0.1")
  assert "--host=" not in alone


@pytest.mark.parametrize(
  ("image", "known"), [("eu.gcr.io/p/i:1", True), ("gcr.io/p/i", True), ("docker.io/p/i:1", False)]
)
def test_a_host_logs_in_to_google_s_registries_alone(image, known):
  script = dataclasses.replace(RUN, placement=dataclasses.replace(MADE, image=image))
  assert ("configure-docker" in script.start_script(FIRST, "10.1.0.1")) == known


@pytest.mark.parametrize("described", [{}, {"state": {}}])
def test_a_state_that_is_not_told(described):
  assert tpu_vms.seen_slice(described) == Seen("STATE_UNSPECIFIED")


def test_no_restarts_are_none():
  """Docker takes on-failure:0 for restarts without a limit."""
  never = dataclasses.replace(RUN, placement=dataclasses.replace(MADE, max_restarts=0))
  assert "--restart=no " in never.start_script(FIRST, "10.1.0.1")


@pytest.mark.parametrize(
  ("seen", "step"),
  [
    (Seen("ABSENT"), Need.CREATE),
    (Seen("CREATING"), Need.WAIT),
    (Seen("WAITING_FOR_RESOURCES"), Need.WAIT),
    (Seen("REPAIRING"), Need.WAIT),
    (Seen("UNSEEN", error="status 1: no answer"), Need.WAIT),
    (Seen("PREEMPTED"), Need.DELETE),
    (Seen("TERMINATED"), Need.DELETE),
    (Seen("SUSPENDED"), Need.DELETE),
    (Seen("READY", ("none", "none")), Need.START),
    (Seen("READY", ("running 0", "none")), Need.START),
    (Seen("READY", ("running 0", "created 0")), Need.START),
    (Seen("READY", ("created 127",)), Need.START),
    (Seen("READY", ("running 0", "running 0")), Need.RUN),
    (Seen("READY", ("running 0", "restarting 1")), Need.RUN),
    (Seen("READY", ("running 0", "exited 0")), Need.RUN),
    (Seen("READY", ("exited 0", "exited 0")), Need.DONE),
    (Seen("READY", ("running 0", "exited 1")), Need.FAILED),
    (Seen("READY", ("exited 143",)), Need.FAILED),
  ],
)
def test_what_an_island_needs_next(seen, step):
  assert next_need(seen) is step


@pytest.mark.parametrize(
  ("changed", "made", "said"),
  [
    ({"syncers": ("tcp://a:1",)}, MADE, "--syncers"),
    ({"syncers": ("tcp://a:1", "b:1")}, MADE, "--syncers = 'b:1'"),
    ({"syncers": ("tcp://a:1", "tcp://b:70000")}, MADE, "--syncers = 'tcp://b:70000'"),
    ({"syncers": ("tcp://a:1", "tcp://b:0")}, MADE, "--syncers = 'tcp://b:0'"),
    ({"syncers": ("tcp://a:1", "tcp://a:1")}, MADE, "--syncers = 'tcp://a:1': is given twice"),
    ({}, placed(["v6e:2x2"]), "--place"),
    # Slices were made, and no role could start, or none could reach a shard.
    ({"host_folder": ""}, MADE, "--host_folder"),
    ({"host_folder": "work/x"}, MADE, "--host_folder = 'work/x'"),
    ({"host_folder": "/a:b"}, MADE, "--host_folder = '/a:b'"),
    ({"syncers": ("tcp://a:1", "tcp://127.0.0.1:1")}, MADE, "each machine takes it for itself"),
    ({"syncers": ("tcp://[::1]:1", "tcp://a:1")}, MADE, "each machine takes it for itself"),
    ({"syncers": ("tcp://0.0.0.0:1", "tcp://a:1")}, MADE, "each machine takes it for itself"),
    ({}, placed(["h100:8"], ("a=0",)), "islands.topology = 'h100:8': the TPU API"),
    ({}, placed(["tpu7x:2x2x1"], ("a=0",)), "islands.topology = 'tpu7x:2x2x1': the TPU API"),
  ],
)
def test_what_is_missing_is_named(changed, made, said):
  with pytest.raises(ConfigError, match=f"{said}.*Fix: "):
    dataclasses.replace(RUN, placement=made, **changed).check()
