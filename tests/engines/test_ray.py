"""The Ray engine: what it refuses, and a whole run with a planned kill on a Ray of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from ddiloco import cli
from ddiloco.checkpoint import weights
from ddiloco.config import ConfigError, RunConfig, from_dict
from ddiloco.engines import processes, session
from ddiloco.engines.children import MEETING, RoleActor
from ddiloco.protocol.supervisor import UP, Role, Supervisor
from ddiloco.training import data
from tests.engines.real import RealRun, events_of, tiny
from tests.roles.toy import ListRecorder
from tests.waits import wait_for

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ddiloco[ray]")


def test_without_ray_it_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "ray", None)
  monkeypatch.delitem(sys.modules, "ddiloco.engines.ray", raising=False)
  with pytest.raises(ConfigError, match=r"--engine = 'ray': .*Fix: pip install 'ddiloco\[ray\]'"):
    session.make_engine("ray")


@needs_ray
def test_resources_of_an_island_are_options_of_its_actor():
  from ddiloco.engines.ray import actor_options

  assert actor_options({}) == {"num_cpus": 0, "resources": {}}, "fake islands share a laptop"
  assert actor_options({"TPU": 4, "CPU": 2, "GPU": 1}) == {
    "num_cpus": 2,
    "num_gpus": 1,
    "resources": {"TPU": 4},
  }


@needs_ray
def test_an_island_may_ask_for_a_tpu_slice_by_ray_s_own_name_for_it():
  """What Ray's own code calls host 0 of a slice is passed on, and Ray takes it."""
  import ray
  from ray._private.accelerators import tpu

  from ddiloco.engines.ray import actor_options

  if not hasattr(tpu, "infer_tpu_pod_type_from_topology"):
    pytest.skip("Ray before 2.52 has no function for it")
  for topology, kind, chips in [("2x4", "v6e", 8), ("2x2x1", "v5p", 4)]:
    head = f"TPU-{tpu.infer_tpu_pod_type_from_topology(topology, kind)}-head"
    config = from_dict({"islands": {"resources": {"TPU": chips, head: 1}}})
    options = actor_options(config.islands.island(0).resources)
    assert options == {"num_cpus": 0, "resources": {"TPU": chips, head: 1}}
    ray.remote(RoleActor).options(**options)  # Ray refuses here what it does not know
  assert head == "TPU-v5p-8-head", "v5p counts cores"
  with pytest.raises(ValueError, match="TPU"):
    ray.remote(RoleActor).options(resources={"TPU": 3})


@needs_ray
def test_islands_that_this_machine_cannot_hold_together_are_refused(capsys):
  """On a cluster, which may grow, they waited without a word."""
  from ddiloco.engines.ray import check_resources

  islands = {"num_learners": 3, "resources": {"TPU": 4}, "overrides": {"2": {"resources": {}}}}
  config = from_dict({"islands": islands})
  check_resources(config, {"TPU": 8.0, "CPU": 2.0})
  for there, said in [({"TPU": 4.0}, "ask for 8 TPU, this machine has 4"), ({}, "has 0")]:
    with pytest.raises(ConfigError, match=f"islands.resources = .*{said}.*Fix: .*--ray_address"):
      check_resources(config, there)
  check_resources(config, {"TPU": 8.0}, alone=False)
  assert not capsys.readouterr().err
  check_resources(config, {"TPU": 4.0}, alone=False)
  said = "WARNING: the islands together ask for 8 TPU, the cluster has 4. Until it has more, some"
  assert said in capsys.readouterr().err


@needs_ray
def test_islands_that_ask_for_nothing_where_there_are_gpus_are_refused():
  """Ray leaves the environment of such an actor as it is: all took the first GPU."""
  from ddiloco.engines.ray import check_asked

  overrides = {"1": {"resources": {"GPU": 2}}}
  config = from_dict({"islands": {"num_learners": 2, "devices": 2, "overrides": overrides}})
  check_asked(config, {"CPU": 8.0})
  for kind in ("GPU", "TPU"):
    with pytest.raises(ConfigError, match=rf"resources = {{}}: learner 0 .*Fix: .*{{'{kind}': 2}}"):
      check_asked(config, {"CPU": 8.0, kind: 8.0})
  check_asked(from_dict({"islands": {"resources": {"GPU": 1}}}), {"GPU": 8.0})


@needs_ray
@pytest.mark.parametrize("cpu", [False, True])
def test_a_run_on_gpus_that_asks_ray_for_none_is_refused(tmp_path, monkeypatch, cpu):
  from ddiloco.engines import ray as engine

  monkeypatch.setattr(engine, "connect", lambda address: False)
  monkeypatch.setattr(engine.ray, "cluster_resources", lambda: {"GPU": 8.0})
  monkeypatch.setattr(processes, "accelerators", lambda: pytest.fail("Ray gives out devices"))
  config = tiny(steps=1)
  arguments = config, tmp_path, data.open_corpus(config.data), None, "auto", cpu
  if cpu:
    return engine.RayEngine(*arguments).close()
  with pytest.raises(ConfigError, match="learner 0 asks Ray for nothing"):
    engine.RayEngine(*arguments)


@needs_ray
@pytest.mark.parametrize(
  ("resources", "cpu", "taken"),
  [({}, True, False), ({}, False, False), ({"GPU": 1}, True, False), ({"GPU": 1}, False, True)],
)
def test_an_island_on_the_cpu_is_checked_before_ray_is_there(
  tmp_path, monkeypatch, resources, cpu, taken
):
  """What an island gets of Ray decides which attention it can have."""
  from ddiloco.engines import ray as engine

  connected = []
  monkeypatch.setattr(engine, "connect", connected.append)
  monkeypatch.setattr(engine.ray, "cluster_resources", lambda: {"GPU": 8.0})
  config = tiny(steps=1, islands={"attention": "cudnn", "resources": resources})
  arguments = config, tmp_path, data.open_corpus(config.data), None, "auto", cpu
  if taken:
    engine.RayEngine(*arguments).close()
  else:
    with pytest.raises(ConfigError, match=r"islands\.attention = 'cudnn': must be einsum"):
      engine.RayEngine(*arguments)
  assert connected == ["auto"] * taken


@needs_ray
@pytest.mark.parametrize("refused", ["islands.resources", "claimed by another run"])
def test_a_run_that_is_refused_leaves_no_ray_behind(tmp_path, monkeypatch, refused):
  """In a notebook it stayed, and the next run took it for the user's own: also --ray_address."""
  from ddiloco.engines import ray as engine

  def claim(*_):
    raise ConfigError("claimed by another run")

  here = []  # whether Ray runs
  monkeypatch.setattr(session.workdirs, "claim", claim)
  monkeypatch.setattr(engine, "connect", lambda address: not here.append(True))
  monkeypatch.setattr(engine.ray, "shutdown", here.pop)
  monkeypatch.setattr(engine.ray, "cluster_resources", dict)
  asked = {"TPU": 4} if refused.startswith("islands") else {}
  config = tiny(steps=1, islands={"num_learners": 1, "resources": asked}, run={"evaluations": 0})
  with pytest.raises(ConfigError, match=refused):
    session.train(config, tmp_path, engine="ray")
  assert not here


@needs_ray
@pytest.mark.parametrize("max_restarts", [0, 1])
def test_who_never_starts_again_gives_its_resources_back(monkeypatch, max_restarts):
  """They were kept until the run's end."""
  from ddiloco.engines import ray as engine

  killed: list[str] = []
  monkeypatch.setattr(engine.ray, "kill", killed.append)
  run = object.__new__(engine.RayEngine)
  run._actors = {("learner-0", 0): "a", ("learner-1", 0): "b", ("learner-1", 1): "c"}
  names, config = ("learner-0", "learner-1"), RunConfig(max_restarts=max_restarts)
  run._state = Supervisor(config, {name: Role(UP) for name in names})
  run._recorder, run._evaluated, run._ending = ListRecorder([]), None, False
  run._guard = lambda duty, *arguments: duty(*arguments)
  run._on_exit(types.SimpleNamespace(name="learner-1", bury=str), -signal.SIGKILL)
  assert killed == ([] if max_restarts else ["b", "c"])
  assert len(run._actors) == 3 - len(killed)


@needs_ray
def test_a_learner_that_joins_during_the_run_gets_an_actor(monkeypatch):
  """Nobody had started one for it, and it was given up."""
  from ddiloco.engines import ray as engine

  run, started = object.__new__(engine.RayEngine), []
  config = tiny(steps=1, islands={"resources": {"TPU": 4}})
  run.config, run._actors = config, {("learner-0", 0): "a"}
  new = types.SimpleNamespace(remote=lambda: "b")
  made_by = types.SimpleNamespace(options=lambda **how: started.append(how["resources"]) or new)
  monkeypatch.setattr(engine.ray, "remote", lambda _: made_by)
  made = []
  monkeypatch.setattr(engine, "RemoteProcess", lambda actor, *_: made.append(actor))
  run._meetings = {}
  for name in ("learner-0", "learner-7", "learner-7"):
    run._spawn(name, 0)(["command"], Path("log"))
  assert made == ["a", "b", "b"] and started == [{"TPU": 4}] and ("learner-7", 0) in run._actors
  spawn = run._spawn("learner-0", 0)  # of the learner's `Child`, which outlives its lives
  del run._actors["learner-0", 0]  # it has left, and now it joins again
  spawn(["command"], Path("log"))
  assert made[3] == "b" and started == [{"TPU": 4}] * 2


class RemoteActor:
  """Stands for a handle of Ray's: its calls are noted, as (retries, argument)."""

  def __init__(self):
    self.calls: list[tuple[int, object]] = []
    self.run = self.signal = types.SimpleNamespace(options=self._options)
    self.__ray_ready__ = types.SimpleNamespace(remote=lambda: "placed")

  def _options(self, max_task_retries):
    def remote(*call):
      self.calls.append((max_task_retries, call[0]))
      return "under way"

    return types.SimpleNamespace(remote=remote)


@needs_ray
def test_a_signal_is_for_one_life(monkeypatch):
  """Ray would repeat it for the next life, and tell the user that the actor was killed."""
  from ddiloco.engines import ray as engine

  actor = RemoteActor()
  monkeypatch.setattr(engine.ray, "wait", lambda refs, timeout: (refs if "placed" in refs else [],))
  process = engine.RemoteProcess(actor, ["command"], Path("log"))
  assert process.poll() is None
  process.send_signal(signal.SIGTERM)
  assert actor.calls == [(0, ["command"]), (0, signal.SIGTERM)]


@needs_ray
def test_a_role_for_which_ray_has_no_place_is_not_begun_and_ends_at_once(monkeypatch):
  """The end of a run waited for it, and said that its work was lost. While a node was being lost
  each start failed at once, and the role was given up."""
  from ddiloco.engines import ray as engine

  monkeypatch.setattr(engine.ray, "wait", lambda refs, timeout: ([],))
  monkeypatch.setattr(engine.ray, "kill", lambda *_, **__: pytest.fail("nothing runs"))
  for number in (signal.SIGTERM, signal.SIGKILL):
    actor = RemoteActor()
    process = engine.RemoteProcess(actor, ["command"], Path("log"))
    process.send_signal(signal.SIGCONT)
    assert process.poll() is None and not actor.calls
    process.send_signal(number)
    assert process.poll() == -number and not actor.calls


@needs_ray
def test_a_cluster_that_is_not_there_is_refused(monkeypatch):
  from ddiloco.engines.ray import connect

  with pytest.raises(ConfigError, match=r"--ray_address = 'nonsense': cannot be joined .*Fix: "):
    connect("nonsense")
  monkeypatch.setattr("ray.is_initialized", lambda: True)
  assert not connect("nonsense"), "the user's program has joined a cluster"


def test_an_address_without_ray_is_refused(tmp_path, capsys):
  (tmp_path / "config.json").write_text(tiny(steps=1).to_json())
  flags = [f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path / 'run'}"]
  assert cli.main(["train", *flags, "--engine=processes", "--ray_address=auto"]) == 2
  said = capsys.readouterr().err
  assert (
    "--ray_address = 'auto': --engine=processes does not use Ray. Fix: add --engine=ray." in said
  )
  assert not (tmp_path / "run").exists()


def test_an_actor_never_holds_two_processes_of_its_role(tmp_path):
  """The driver may take it for dead and start the role again, after a broken connection."""
  actor, log = RoleActor(), tmp_path / "logs" / "learner-0.log"

  async def two_lives() -> list[int]:
    sleep = ["python", "-c", "import time; print('here', flush=True); time.sleep(100)"]
    first = asyncio.create_task(actor.run(sleep, str(log)))
    while not (log.exists() and log.read_text()):
      await asyncio.sleep(0.01)
    second = actor.run(["python", "-c", "print('there'); raise SystemExit(3)"], str(log))
    return list(await asyncio.gather(first, second))

  assert asyncio.run(two_lives()) == [-signal.SIGKILL, 3]
  assert log.read_text() == "here\nthere\n"
  asyncio.run(actor.signal(signal.SIGTERM))  # nobody is there to hear it

  async def told() -> int:
    life = asyncio.create_task(actor.run(["python", "-c", "input()"], str(log)))
    while not life.done():
      await actor.signal(signal.SIGTERM)
      await asyncio.sleep(0.01)
    return life.result()

  assert asyncio.run(told()) == -signal.SIGTERM


def test_an_actor_is_told_where_the_hosts_of_its_island_meet(tmp_path):
  log, says = tmp_path / "learner-0.log", ["python", "-c", f"print('--hosts={MEETING}')"]
  assert asyncio.run(RoleActor().run(says, str(log), "tcp://10.0.0.1:7")) == 0
  assert log.read_text() == "--hosts=tcp://10.0.0.1:7\n"


def marked(mark: str) -> list[str]:
  """Processes that have inherited `mark` in their environment (Linux)."""
  found = []
  for folder in Path("/proc").glob("[0-9]*"):
    try:
      if mark.encode() in (folder / "environ").read_bytes():
        found.append((folder / "comm").read_text().strip())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
      continue  # it has just ended, or is none of ours
  return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("ray")
  kill = {"action": "kill", "role": "learner-1", "at_step": 80, "seconds": 0.0}
  # With a quorum of two, training starts with both, and is not over before both are back.
  # A pace leaves the cores to the one that comes back, which has two processes.
  sync = {"num_shards": 1, "min_quorum": 2}
  islands = {"num_learners": 2, "batch_size": 2, "min_step_seconds": 0.02}
  islands["overrides"] = {"1": {"devices": 2, "hosts": 2, "fsdp": 2}}
  config = tiny(steps=400, islands=islands, sync=sync, chaos={"faults": [kill]})
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("OF_TEST", str(folder))
    run = RealRun(folder, config, "train", "--engine=ray", "--cpu")
  with run:
    run.wait_for(lambda: run.events("joined"), "a learner")
    names = set(marked(str(folder)))
    return run.ends(), run.workdir, run.said(), names


@needs_ray
@pytest.mark.slow
def test_after_the_kill_of_an_actor_the_run_finishes(run):
  status, workdir, said, _ = run
  assert status == 0, said
  outcome = json.loads((workdir / "outcome.json").read_text())
  assert outcome["reason"] == "finished" and "lost" not in outcome
  assert outcome["loss_merged"] < outcome["loss_untrained"] - 0.5
  params = weights.load(workdir / "result")
  assert params and all(np.isfinite(value).all() for value in params.values())
  assert "RuntimeWarning" not in said and "(raylet)" not in said, "Ray is quiet"


@needs_ray
@pytest.mark.slow
def test_ray_started_it_again_and_the_survivor_never_waited(run):
  _, workdir, said, _ = run
  assert [e.target for e in events_of(workdir, "restart")] == ["learner-1"], said
  assert [e.reason for e in events_of(workdir, "exit")] == ["killed by plan, back in 0 s"]
  assert [e.hosts for e in events_of(workdir, "started", "learner-1")] == [2, 2]
  first, second = events_of(workdir, "joined", "learner-1")
  assert second.incarnation > first.incarnation
  steps = events_of(workdir, "step", "learner-0")
  between = [e for e in steps if first.time < e.time < second.time]
  assert len(between) > 20 and sum(e.blocked_seconds for e in steps) == 0


@needs_ray
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_neither_roles_nor_ray_are_left_behind(run):
  _, workdir, _, names = run
  assert "raylet" in names and any(name.startswith("ray::RoleActor") for name in names), names
  wait_for(lambda: not marked(str(workdir.parent)), "the end of Ray")
