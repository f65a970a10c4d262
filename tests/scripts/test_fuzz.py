"""The fuzzer runs as promised, and tells what it finds."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "fuzz_decoder.py"
INPUTS = 20_000


def run(*arguments: str, code: str = "") -> subprocess.CompletedProcess:
  """The script as a user calls it; `code` runs before it in the same process."""
  start = ["-c", f"{code}\nimport runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"]
  command = [sys.executable, *(start if code else [str(SCRIPT)]), *arguments]
  pipes = {"capture_output": True, "text": True}
  return subprocess.run(command, cwd=SCRIPT.parent, **pipes)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("atheris"), reason="atheris is not installed")
def test_nothing_that_breaks_the_rule_is_found():
  done = run(f"--runs={INPUTS}")
  assert done.returncode == 0, done.stdout + done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  assert result.keys() == {"inputs", "accepted", "malformed", "seconds", "seed"}
  assert result["inputs"] == result["accepted"] + result["malformed"] == INPUTS
  assert result["accepted"] > 0.05 * INPUTS and result["malformed"] > 0.05 * INPUTS, result


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("atheris"), reason="atheris is not installed")
def test_a_decoder_that_crashes_is_found_and_its_input_can_be_replayed():
  broken = """
import ddiloco.network.frames as frames
frames._decode = None
"""
  done = run(f"--runs={INPUTS}", code=broken)
  assert done.returncode == 1, done.stdout + done.stderr
  (line,) = [line for line in done.stdout.splitlines() if "--replay=" in line]
  replay = line[line.index("--replay=") :]
  again = run(replay, code=broken)
  assert again.returncode == 1 and "TypeError" in again.stderr
  assert run(replay).returncode == 0, "the true decoder"


def test_without_atheris_it_says_what_to_install():
  done = run("--runs=1", code="import sys; sys.modules['atheris'] = None")
  assert done.returncode == 2 and not done.stdout
  assert "atheris" in done.stderr and "pip install -e .[fuzz]" in done.stderr


def test_every_kind_of_message_and_frame_is_a_seed_and_accepted(script, monkeypatch):
  monkeypatch.setitem(sys.modules, "atheris", None)
  fuzz = script("fuzz_decoder")
  seeds, kinds = fuzz.seeds(), len(fuzz.messages.KINDS)
  assert kinds > 7 and len(seeds) > 4 * kinds, (kinds, len(seeds))
  assert {seed[0] for seed in seeds} == set(range(len(fuzz.TARGETS)))
  refused = [seed.hex() for seed in seeds if not fuzz.try_one(seed)]
  assert not refused, refused
