"""Every test runs on the CPU with eight fake devices; see ddiloco/environment.py for why so."""

import atexit
import gc
import importlib.metadata
import os
import shutil
import signal
import tempfile

import hypothesis
import pytest

from ddiloco import environment, runtime
from tests.compile_cache import new_folder
from tests.waits import ended_threads

gc.disable()  # until all tests are imported

# XLA's old emitters compile in a third of the time, unless a program is cut into parts (32, for as
# many threads), which takes twice as long. A newer version lacks them, and ends a process whose
# flags name one that it does not know.
KNOWN = importlib.metadata.version("jaxlib").startswith("0.10.")
UNSPLIT = "--xla_cpu_parallel_codegen_split_count=1"
QUICK_TO_COMPILE = f"--xla_cpu_use_fusion_emitters=false {UNSPLIT}" if KNOWN else ""

# An example may take any time: a busy machine is no fault.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# What one test or one of its processes compiles, none compiles again, in none of pytest's workers.
if "PYTEST_XDIST_WORKER" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"], _ = new_folder(tempfile.gettempdir())
  atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# XLA's optimizations take longer than what they speed up here.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["XLA_FLAGS"] = QUICK_TO_COMPILE
environment.prepare(num_cpu_devices=8, cpu_only=True)

# A shell starts what runs in its background with SIGINT ignored, which the processes of tests about
# Ctrl-C would inherit.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

RUNS = ("scripts", "docs", "engines", "examples", "baselines")  # whole runs of real processes
RUNS_SHARE = 0.8  # of the other files: beside these the last of the runs begins


def pytest_collection_modifyitems(items):
  """Files with whole runs, which wait for much of their time, go beside files that only compute.

  Else all of pytest's workers would wait together first, and compute together in the end. What is
  left for the end is short, so that they end at the same time.
  """
  files = list(dict.fromkeys(item.path for item in items))
  runs = [file for package in RUNS for file in files if file.parent.name == package]
  others = [file for file in files if file not in runs]
  place = {file: n / len(others) for n, file in enumerate(others)}
  place |= {file: RUNS_SHARE * n / len(runs) for n, file in enumerate(runs)}
  items.sort(key=lambda item: place[item.path])


def pytest_collection_finish(session):
  """What is imported stays, so the garbage collector need not look through it again and again.

  As if a role lived all the time: else each role of a test would begin with such a look.
  """
  session.short_collections = runtime.short_collections()
  session.short_collections.__enter__()
  gc.enable()


@pytest.fixture(autouse=True)
def own_signals():
  """A role that has ended ignores SIGTERM, and so would every process that a later test starts."""
  before = signal.getsignal(signal.SIGTERM)
  yield
  signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def no_thread_is_left():
  """A thread that outlives its test meets the patches, the files and the limits of later tests."""
  with ended_threads():
    yield
