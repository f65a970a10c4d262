"""What other launchers leave in the environment joins no island to what is not its own.

And the environment stays as it is while XLA threads read it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddiloco import environment
from tests.training.test_hosts import POISON

ROOT = Path(__file__).parent.parent


def test_what_would_join_slices_or_processes_is_taken_away(monkeypatch):
  for name, value in POISON.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  environment.before_import()
  assert not POISON.keys() & os.environ.keys()
  assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_a_gpu_s_island_may_pin_as_much_memory_as_its_host_has(monkeypatch):
  """Else XLA pins 64 GB for all GPUs of a process, and a larger state's snapshot ends the role."""
  limit = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
  monkeypatch.delenv(limit, raising=False)
  pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 256 << 18}
  monkeypatch.setattr(os, "sysconf", pages.__getitem__)
  environment.before_import()
  assert os.environ[limit] == "256"
  monkeypatch.setenv(limit, "100")  # the user's own
  environment.before_import()
  assert os.environ[limit] == "100"


FORKED = """
import os, jax
from ddiloco import environment

environment.take_over({**os.environ, "JAX_PLATFORMS": "cuda"})
print(jax.config.jax_platforms)
environment.take_over({k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"})
print(jax.config.jax_platforms)
"""


def test_a_forked_role_uses_what_its_run_says_and_not_an_earlier_one():
  """The fork server has imported JAX, perhaps for a run on the CPU."""
  cpu = os.environ | {"JAX_PLATFORMS": "cpu"}
  done = subprocess.run([sys.executable, "-c", FORKED], env=cpu, capture_output=True, text=True)
  assert done.stdout.split() == ["cuda", "None"], done.stderr


IMPORTS_LATE = """
import sys
from ddiloco import environment

environment.prepare(num_cpu_devices=1, cpu_only=True)
import jax

jax.devices()


def changed(event, arguments):
  if event in ("os.putenv", "os.unsetenv"):
    raise AssertionError(f"{event}{arguments}")


sys.addaudithook(changed)
import matplotlib, numba, orbax.checkpoint, safetensors.numpy
from jax.experimental.pallas.ops.tpu import splash_attention
from tensorboardX.event_file_writer import EventsWriter
"""


def test_no_library_that_a_run_imports_late_sets_a_variable(tmp_path):
  without = {k: v for k, v in os.environ.items() if k != "CRC32C_SW_MODE"}
  done = subprocess.run(
    [sys.executable, "-c", IMPORTS_LATE],
    env=without | {"MPLCONFIGDIR": str(tmp_path)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_of_what_is_printed_may_leave(unbuffered):
  reader, output = os.pipe()
  os.close(reader)
  try:
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "ddiloco", "simulate", "--chips=1000", "--learners=2"]
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.PIPE)
  finally:
    os.close(output)
  assert (done.returncode, done.stderr) == (0, b"")


IN_A_BLOCK = """
from ddiloco.environment import reader_may_leave

with reader_may_leave():
  print(1)
  raise OSError("of another kind")
"""

OF_A_RUN = """
import sys
from ddiloco import cli


def train(arguments):
  print(1)
  raise BrokenPipeError("of another kind")


cli.COMMANDS["train"], sys.argv = (train, "", ""), ["ddiloco", "train"]
cli.entry()
"""


@pytest.mark.parametrize("program", [IN_A_BLOCK, OF_A_RUN])
def test_an_error_after_the_reader_has_left_is_not_lost(program):
  reader, output = os.pipe()
  os.close(reader)
  try:
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=variables, stdout=output, stderr=subprocess.PIPE)
  finally:
    os.close(output)
  assert done.returncode == 1 and b"of another kind" in done.stderr


def test_another_broken_pipe_is_an_error(capfd):
  with pytest.raises(BrokenPipeError), environment.reader_may_leave():
    raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize(("ends", "status"), [("return 1", 1), ("raise ConfigError('no')", 2)])
def test_a_reader_that_leaves_takes_no_status_and_no_error_away(ends, status):
  """A command that was refused had status 0, and said nothing, when its reader had left."""
  script = (
    "import sys\n"
    "from ddiloco import cli\n"
    "from ddiloco.config import ConfigError\n"
    "def check(arguments):\n"
    "  print('does not hold')\n"
    f"  {ends}\n"
    "cli.COMMANDS['check'] = check, '', ''\n"
    "sys.argv[1:] = ['check']\n"
    "cli.entry()\n"
  )
  reader, output = os.pipe()
  os.close(reader)
  try:
    variables = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=variables, stdout=output)
  finally:
    os.close(output)
  assert done.returncode == status


RAISES = """
import resource
from ddiloco.environment import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
assert raise_limit() == 300 and resource.getrlimit(resource.RLIMIT_NOFILE) == (300, 300)
assert raise_limit() == 300
print("fine")
"""


def test_a_process_takes_as_many_descriptors_as_the_system_lets_it_have():
  assert subprocess.check_output([sys.executable, "-c", RAISES]) == b"fine\n"


ENDS = """
from multiprocessing import util
from ddiloco import environment

print(util.get_temp_dir())
environment.end_now(130)
"""


def test_a_process_that_ends_at_once_leaves_no_folder_behind():
  """Each run of processes that was stopped left one, with the socket of its fork server."""
  done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
  folder = done.stdout.strip()
  assert done.returncode == 130 and folder, done.stderr
  assert not Path(folder).exists()
