"""The processes engine divides the GPUs of its machine, on a machine that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from ddiloco import api, environment
from ddiloco.config import ConfigError, Fault
from ddiloco.engines import children, processes, session
from ddiloco.engines.children import Accelerator, Child, spawn_forked
from ddiloco.engines.processes import ProcessesEngine
from ddiloco.observe.guards import exited
from ddiloco.training import data
from tests.engines.real import tiny

TOLD = "tests.engines.told_gpus"


@pytest.fixture
def machine(monkeypatch):
  """Lets this machine seem to have so many accelerators; nothing else opens them."""

  def have(count: int, platform: str = "gpu", first: int = 0) -> None:
    found = tuple(Accelerator(platform, first + i) for i in range(count))
    monkeypatch.setattr(processes, "accelerators", lambda: found)
    monkeypatch.setattr(children, "accelerators", lambda: found)

  return have


def make(tmp_path, learners: int = 4, run=None, **islands) -> ProcessesEngine:
  config = tiny(1, learners, islands={"num_learners": learners, **islands}, run=run or {})
  engine = ProcessesEngine(config, tmp_path / "run", data.open_corpus(config.data), None)
  engine._spec = engine._place()
  return engine


def gpus_of(engine: ProcessesEngine, learner: int) -> list[str]:
  """The GPUs of each host of an island, as its command names them."""
  flags = [flag for words in engine._commands(f"learner-{learner}") for flag in words]
  return [flag.removeprefix("--gpus=") for flag in flags if flag.startswith("--gpus=")]


def test_each_learner_sees_its_own_gpus_and_a_restarted_one_its_old_ones(
  machine, tmp_path, monkeypatch
):
  """Each took the first ones; JAX then reserved most of the memory of all of them."""
  machine(8)
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,3,4,5,6,7,8")  # the user's, for the whole run
  engine = make(tmp_path, devices=2)
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "config.json").write_text(engine.config.to_json())

  def told(words, log):
    return spawn_forked([*words[:2], TOLD, *words[3:]], log)

  said = []
  for name in ("learner-0", "learner-3", "learner-3"):
    child = Child(name, tmp_path, [told])
    child.start(engine._commands(name))
    (process,) = child._processes
    assert exited(process.poll, 60.0, name) == 0, child.log.read_text()
    said.append(json.loads(child.last_words()))
    child.kill()
  first, last, again = said
  assert first == {
    **{"learner": 0, "host": 0, "hosts": "", "CUDA_VISIBLE_DEVICES": "1,2,3,4,5,6,7,8"},
    **{"jax_cuda_visible_devices": "0,1", "jax_rocm_visible_devices": "0,1"},
    "jax_platforms": "cpu",
  }
  assert (
    last
    == again
    == first
    | {
      **{"learner": 3, "jax_cuda_visible_devices": "6,7", "jax_rocm_visible_devices": "6,7"},
    }
  )
  assert not any("gpus" in word for word in engine._commands("syncer-0")[0])


def test_the_shares_are_those_of_the_threads_engine(machine, tmp_path):
  machine(8, first=4)  # the user has restricted the run to some, with JAX's own option
  uneven = {"1": {"devices": 4, "fsdp": 4, "batch_size": 4}}
  engine = make(tmp_path, learners=3, devices=1, overrides=uneven)
  assert [gpus_of(engine, m) for m in range(3)] == [["4"], ["5,6,7,8"], ["9"]]
  engine = make(tmp_path, learners=3, devices=0)
  assert [gpus_of(engine, m) for m in range(3)] == [["4,5"], ["6,7"], ["8,9"]]
  spare = {"evaluator_devices": 2}
  engine = make(tmp_path, learners=2, devices=0, run=spare, batch_size=6)
  assert [gpus_of(engine, m) for m in range(2)] == [["4,5,6"], ["7,8,9"]]


def test_a_learner_that_joins_gets_gpus_that_no_other_has_or_is_refused(machine, tmp_path):
  machine(8)
  engine = make(tmp_path, learners=3, devices=2)
  fed = []
  engine._feed = fed.append
  engine._requested(Fault("join", "learner-9", at_seconds=0.0))
  assert gpus_of(engine, 9) == ["6,7"] == gpus_of(engine, 9) and len(fed) == 1
  with pytest.raises(ConfigError, match=r"islands.devices = \[2\]: .* more than 0 devices.*Fix: "):
    engine._requested(Fault("join", "learner-4", at_seconds=0.0))
  assert len(fed) == 1 and gpus_of(engine, 0) == ["0,1"]


def test_the_hosts_of_an_island_on_one_machine_divide_its_gpus(machine, tmp_path):
  machine(8)
  engine = make(tmp_path, learners=2, devices=4, hosts=2, batch_size=4)
  assert [gpus_of(engine, m) for m in range(2)] == [["0,1", "2,3"], ["4,5", "6,7"]]
  meet = [[w for w in words if "--hosts=" in w] for words in engine._commands("learner-1")]
  assert meet[0] == meet[1] and meet[0][0].startswith("--hosts=tcp://127.0.0.1:")
  engine = make(tmp_path, learners=2, devices=0, hosts=2, batch_size=4)
  assert gpus_of(engine, 1) == ["4,5", "6,7"]
  with pytest.raises(ConfigError, match=r"islands\.hosts = 2: learner 0 gets 1 GPUs.*Fix: "):
    make(tmp_path, learners=8, devices=0, hosts=2)


@pytest.mark.parametrize(
  ("count", "fields", "said"),
  [
    (6, {"devices": 2}, r"islands.devices = \[2, 2, 2, 2\]: 4 learners need more than 6 devices"),
    (8, {"devices": 2, "run": {"evaluator_devices": 1}}, "4 learners need more than 7 devices"),
    (2, {"devices": 0}, "4 learners need more than 2 devices"),
  ],
)
def test_too_few_gpus_are_refused_before_anything_starts(machine, tmp_path, count, fields, said):
  machine(count)
  with pytest.raises(ConfigError, match=f"{said}.*Fix: lower it, islands.num_learners or run.eval"):
    make(tmp_path, **fields)
  run = {"evaluations": 0} | fields.pop("run", {})
  config = tiny(1, 4, islands={"num_learners": 4, **fields}, run=run)
  with pytest.raises(ConfigError, match=said):
    session.train(config, tmp_path / "run", engine="processes")
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("platform", "learners", "fields", "said"),
  [
    ("gpu", 4, {"attention": "splash"}, r"islands\.attention = 'splash': must be .*'gpu'"),
    (
      "gpu",
      4,
      {"devices": 0, "tensor": 4},
      r"islands\.\(data, fsdp, tensor\) = .*island's 2 devices",
    ),
    (
      "gpu",
      4,
      {"devices": 0, "batch_size": 3},
      r"islands\.batch_size = 3: must be a multiple of .* = 2",
    ),
    ("tpu", 1, {"devices": 16}, r"islands\.devices = 16: learner 0 sees 8 devices.*Fix: lower it"),
    ("tpu", 1, {"attention": "cudnn"}, r"islands\.attention = 'cudnn': must be .*'tpu'"),
  ],
)
def test_what_accelerators_do_not_take_is_refused_before_anything_starts(
  machine, tmp_path, platform, learners, fields, said
):
  machine(8, platform)
  with pytest.raises(ConfigError, match=said):
    make(tmp_path, learners, **{"batch_size": 16, **fields})


def test_a_learner_whose_island_its_gpus_do_not_take_does_not_join(machine, tmp_path):
  machine(8)
  engine = make(tmp_path, 3, devices=2, overrides={"9": {"attention": "splash"}})
  engine._feed = pytest.fail
  with pytest.raises(ConfigError, match=r"islands\.attention = 'splash'"):
    engine._requested(Fault("join", "learner-9", at_seconds=0.0))


def test_what_is_no_gpu_serves_one_process(machine, tmp_path):
  """A second process cannot open a machine's TPUs, and would train on its CPU."""
  machine(4, "tpu")
  several = r"--engine = 'processes': several processes cannot divide 4 devices"
  with pytest.raises(ConfigError, match=several):
    make(tmp_path, learners=2)
  with pytest.raises(ConfigError, match=several):
    make(tmp_path, learners=1, hosts=2, devices=2)
  engine = make(tmp_path, learners=1, batch_size=4)
  assert gpus_of(engine, 0) == []
  engine._feed = pytest.fail
  with pytest.raises(ConfigError, match=several):
    engine._requested(Fault("join", "learner-1", at_seconds=0.0))


def test_on_the_cpu_nothing_is_divided(tmp_path):
  engine = make(tmp_path, learners=9)
  assert gpus_of(engine, 0) == gpus_of(engine, 8) == gpus_of(engine, 100) == []


# --- the evaluator, in the supervisor's process

EVALUATOR = """
import jax
from ddiloco import environment

environment.prepare(num_cpu_devices=1, supervises=True, gpus=[6, 7])
print(jax.config.values["jax_platforms"], jax.config.values["jax_cuda_visible_devices"])
"""


@pytest.mark.parametrize(("platforms", "used"), [("", "None"), ("cuda", "cuda,cpu")])
def test_the_evaluator_s_gpus_are_all_that_the_supervisor_opens(platforms, used):
  variables = os.environ | {"JAX_PLATFORMS": platforms}
  command = [sys.executable, "-c", EVALUATOR]
  done = subprocess.run(command, env=variables, capture_output=True, text=True)
  assert done.stdout.split() == [*([used] if platforms else []), "6,7"], done.stderr


@pytest.mark.parametrize(
  ("engine", "cpu", "asked", "gpus"),
  [
    ("processes", False, 2, [6, 7]),
    ("processes", False, 0, []),
    ("processes", True, 2, []),
    ("threads", False, 2, []),  # it has all of them, and takes the last ones
    ("ray", False, 2, []),
  ],
)
def test_the_evaluator_has_the_last_gpus(machine, monkeypatch, engine, cpu, asked, gpus):
  machine(8)
  calls = []
  monkeypatch.setattr(environment, "prepare", lambda **settings: calls.append(settings))
  api.ready(tiny(1, 2, run={"evaluator_devices": asked}), cpu, engine)
  (call,) = calls
  assert call["gpus"] == gpus and call["supervises"] == (engine != "threads")


# --- what JAX finds, asked of it in another process

MACHINE = """
  import json, os, types
  from pathlib import Path
  said = {name: os.environ.get(name) for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "OWN")}
  Path(__file__).with_name("said").write_text(json.dumps(said))
  def devices():
    return [types.SimpleNamespace(platform="gpu", local_hardware_id=n) for n in (2, 5)]
"""


ON_THE_CPU = """
  import types
  devices = lambda: [types.SimpleNamespace(platform="cpu", local_hardware_id=None)]
"""


@pytest.fixture
def jax_of(monkeypatch, tmp_path):
  """Lets other processes find this code as JAX."""

  def put(code: str) -> None:
    (tmp_path / "jax.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

  monkeypatch.delenv("JAX_PLATFORMS")
  children._found.cache_clear()
  yield put
  children._found.cache_clear()


def test_jax_is_asked_once_in_a_process_that_reserves_no_memory(jax_of, tmp_path, monkeypatch):
  monkeypatch.setenv("OWN", "kept")
  jax_of(MACHINE)
  assert children.accelerators() == (Accelerator("gpu", 2), Accelerator("gpu", 5))
  said = json.loads((tmp_path / "said").read_text())
  assert said == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OWN": "kept"}
  jax_of("raise SystemExit('not once more: this process may have some of them')")
  assert len(children.accelerators()) == 2
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # --cpu
  assert children.accelerators() == ()


def test_where_jax_takes_the_cpu_there_are_none(jax_of):
  jax_of(ON_THE_CPU)
  assert children.accelerators() == ()


def test_the_real_jax_says_what_it_is_asked_for(jax_of):
  assert all(each.platform != "cpu" and each.number >= 0 for each in children.accelerators())


def test_devices_that_cannot_be_opened_are_an_error_with_jax_s_own_words(jax_of, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  failed = r"^JAX_PLATFORMS = 'cuda': JAX finds no such devices here \(OSError: no driver\)\. Fix: "
  jax_of("def devices(): raise OSError('no driver')")
  with pytest.raises(ConfigError, match=failed):
    children.accelerators()


@pytest.mark.parametrize("platforms", ["cuda,cpu", "tpu"])
def test_a_run_that_shall_have_accelerators_takes_no_cpu(jax_of, monkeypatch, platforms):
  monkeypatch.setenv("JAX_PLATFORMS", platforms)
  jax_of(ON_THE_CPU)
  with pytest.raises(ConfigError, match=r"JAX finds no such devices here \(only the CPU\)"):
    children.accelerators()
