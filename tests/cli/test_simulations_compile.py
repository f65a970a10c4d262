"""`ddiloco compile`: what it asks for, says and refuses; a small island of chips, where libtpu or
JAX's part for CUDA is installed."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from ddiloco.cli.simulations import fit_lines
from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.training import aot
from ddiloco.training.aot import Collective

ROOT = Path(__file__).parents[2]
TINY = ["--config=configs/dense.py:100k", "--config.islands.batch_size=8"]
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="libtpu, 0.7 GB, is not installed here"
)

# Neither is imported, nor is a GPU looked for.
CUDA = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") is not None for n in (12, 13))

STEP = aot.Program(
  name="step",
  hbm_bytes=6 << 30,
  added_bytes=4 << 30,
  host_bytes=0,
  count=1,
  cpu_seconds=50.0,
  collectives=(Collective("all-gather", 76, 4 << 30),),
  largest_collective_bytes=9,
)


FOR = aot.IslandConfig(devices=0, batch_size=128), Config()


@pytest.fixture(autouse=True)
def own_level():
  """What the command sets is for its own process."""
  before = jax.config.jax_optimization_level
  yield
  jax.config.update("jax_optimization_level", before)


def made(**changed) -> aot.Fit:
  values = {
    "island": "v5p:4x4x4",
    "chips": 64,
    "chip": aot.CHIPS["v5p"],
    "parameters": 12_000_000_000,
    "state_bytes": 2 << 30,
    "beside_bytes": 2 << 30,
    "host_bytes": 3 << 30,
    "step": STEP,
    "needed_bytes": 8 << 30,
    "copies": (),
    "layer_bytes": 9,  # as large as a collective of the step
    "flops_per_token": 72e9,
    "tokens": 128 * 2048,
    "remedies": (),
    **changed,
  }
  return aot.Fit(**values)


def test_a_step_takes_its_flops_over_what_the_chips_reach():
  assert made().step_seconds(0.5) == pytest.approx(72e9 * 128 * 2048 / (64 * 459e12 * 0.5))


def test_it_says_whether_it_fits_and_what_is_gathered():
  text = "\n".join(fit_lines([0, 1], made(), 0.5))
  assert "island 0, 1: v5p:4x4x4" in text and "8.00 of 95.74 GiB a device: fits, 92% free" in text
  assert "host memory  3.00 GiB a device" in text
  assert "gathered one layer at a time" in text and "76 all-gather 4.29 GB" in text
  text = "\n".join(fit_lines([0], made(layer_bytes=8), 0.5))
  assert "MORE THAN A LAYER" in text


def test_what_does_not_fit_comes_with_remedies():
  wide = made(needed_bytes=200 << 30, chip=aot.CHIPS["v6e"])
  found = aot._remedies(wide, 1 << 30, *FOR)
  assert any("remat" in each for each in found) and any("loss_chunks" in each for each in found)
  # 20 GiB of parameters and moments, and 2 of fragments on their way: with 10 of gradients, as
  # where matrices have one moment, these alone are too much for 31 GiB; with 5 they are not.
  full = made(state_bytes=20 << 30, needed_bytes=200 << 30, chip=aot.CHIPS["v6e"])
  assert not any(each.startswith("mesh: p") for each in aot._remedies(full, 5 << 30, *FOR))
  assert aot._remedies(full, 10 << 30, *FOR)[0].endswith(f" {math.ceil(64 * 32 / 25)} chips")
  text = "\n".join(fit_lines([0], made(needed_bytes=200 << 30, step=None, remedies=found), 0.4))
  assert "DOES NOT FIT" in text and "to make it fit: remat" in text


def test_remedies_are_settings_that_the_config_takes():
  config = from_dict(
    {
      "model": {"vocab_size": 252},
      "inner": {"accumulation_steps": 3},
      "islands": {"devices": 8, "batch_size": 240},
    }
  )
  wide = made(chips=8, needed_bytes=35 << 30, chip=aot.CHIPS["v6e"])
  island = config.islands.island(0)
  found = aot._remedies(wide, 1 << 29, island, config)
  assert "loss: islands.loss_chunks = 4" in found
  batch = int(re.search(r"islands.batch_size = (\d+)", "".join(found))[1])  # type: ignore[index]
  assert 0 < batch < 240 and batch % (8 * 3) == 0
  steps = int(re.search(r"accumulation_steps = (\d+)", "".join(found))[1])  # type: ignore[index]
  island.require_even_batch(8, steps, 0)
  assert 240 / steps <= batch / 3 and steps == 5, "micro-batches as small as those of that batch"
  wider = made(chips=8, needed_bytes=400 << 30, chip=wide.chip)
  full = aot._remedies(wider, 1 << 29, island, config)
  assert "mesh: fewer rows" in full[-1] and not any("batch:" in each for each in full)


@pytest.mark.parametrize(
  "topology",
  ["v7:2x2", "v5p", "v5p-8", "v5p:2x2x2x2", "v6e:ax2", "v5p:8", "h100", "h100:2x2x2", "h100:x8"],
)
def test_unknown_topologies_are_refused(topology):
  with pytest.raises(ConfigError, match="v5p:4x4x4"):
    aot.chip(topology)


def test_a_gpu_s_memory_is_what_jax_takes_of_it():
  h100 = aot.chip("h100:8")
  assert h100 == aot.chip("h100:2x8") and h100.flops_per_second == 989e12
  assert h100.hbm_bytes / (1 << 30) == pytest.approx(0.75 * 79.1, rel=1e-3)
  assert "cuda_compute_capability { major: 9 }" in h100.target
  assert "cuda_compute_capability { major: 8 }" in aot.chip("a100:1").target


@pytest.mark.parametrize(
  ("flags", "said"),
  [([], "islands.topology"), (["--topology=v5p:2x2x1", "--mfu=2"], "--mfu=2")],
)
def test_wrong_flags_are_refused(flags, said, refused):
  assert said in refused("compile", *TINY, *flags)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is here")
def test_without_libtpu_it_says_what_to_install(refused):
  assert "ddiloco[tpu]" in refused("compile", *TINY, "--topology=v5p:2x2x1")


@pytest.mark.skipif(CUDA, reason="JAX's part for CUDA is here")
def test_without_cuda_s_libraries_it_says_what_to_install(refused):
  said = refused("compile", *TINY, "--topology=h100:8")
  assert "topology = 'h100:8': JAX's cuda plugin refuses it" in said and "ddiloco[cuda]" in said


def test_a_program_without_room_says_what_it_needs():
  said = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO"
  refused = f"{said} temporaries (99.5G) exceeds available HBM (15.75G). Used 1.0G before."
  assert aot.wanted_bytes(jax.errors.JaxRuntimeError(refused)) == 99.5 * (1 << 30)
  with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
    aot.wanted_bytes(jax.errors.JaxRuntimeError("INTERNAL: something else (Used 3G)"))


def test_a_model_of_the_users_own_is_refused(refused):
  flags = ["--config=examples/own_model.py", "--topology=v5p:2x2x1"]
  assert "model.custom" in refused("compile", *flags)


def fit_of(topology: str, preset: str = "100k") -> dict:
  """What the command says of a small island; in a process of its own: libraries stay loaded."""
  command = [sys.executable, "-m", "ddiloco", "compile", f"--config=configs/dense.py:{preset}"]
  command += ["--config.islands.batch_size=8", f"--topology={topology}", "--json"]
  done = subprocess.run(
    [*command, "--config.islands.devices=0", "--config.model.compute_dtype=bfloat16"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  (found,) = json.loads(done.stdout.splitlines()[-1])
  return found


@needs_libtpu
@pytest.mark.slow
def test_a_small_island_of_real_chips():
  found = fit_of("v5e:2x2", "1m")  # so large that the program's own code, 94 kB, does not count
  assert found["islands"] == [0, 1, 2, 3] and found["fits"] and found["gathers_by_layer"]
  assert found["chips"] == 4 and found["parameters"] == 1_017_216
  kinds = {each["kind"] for each in found["step"]["collectives"]}
  assert kinds & {"all-gather", "all-reduce"}
  assert "attention splash" in found["island"]
  # A snapshot's copy goes straight to the host: no second state on the chips.
  assert found["host_bytes"] >= found["state_bytes"]
  snapshot = found["copies"][-1]
  assert snapshot["name"] == "snapshot" and snapshot["added_bytes"] < 0.1 * found["state_bytes"]


@pytest.mark.skipif(not CUDA, reason="CUDA's libraries, 5 GB, are not installed here")
@pytest.mark.slow
@pytest.mark.parametrize(
  ("topology", "gpus", "preset"),
  [("h100:8", 8, "100m"), ("a100:2x2", 4, "100m"), ("h200:1", 1, "100k")],
)
def test_a_small_island_of_real_gpus(topology, gpus, preset):
  """XLA compiles its kernels, cuDNN's attention among them, and touches no GPU."""
  found = fit_of(topology, preset)
  assert found["chips"] == gpus and found["fits"] and "attention cudnn" in found["island"]
  kinds = {each["kind"]: each for each in found["step"]["collectives"]}
  assert found["gathers_by_layer"] and bool(kinds) == (gpus > 1)
  # Of twelve layers, forward and backward; fewer would be unrolled, and gathered together.
  assert gpus == 1 or kinds["all-gather"]["times"] >= 24
  snapshot = found["copies"][-1]
  assert found["host_bytes"] == found["state_bytes"] > 10 * abs(snapshot["added_bytes"])
