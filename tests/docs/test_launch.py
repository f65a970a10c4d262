"""Every `ddiloco` command of the page on clouds runs, dry; gcloud knows all of its own."""

from __future__ import annotations

import fnmatch
import importlib
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ddiloco import cli
from ddiloco.network.keys import secret_file
from tests.launch import programs

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "launch.md").read_text()


launch = importlib.import_module("ddiloco.cli.launch")  # which the command hides


def commands(program: str) -> list[list[str]]:
  """In blocks of bash."""
  blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
  lines = "".join(blocks).replace("\\\n", " ").splitlines()
  found = [shlex.split(line) for line in lines if line]
  assert {words[0] for words in found} == {"ddiloco", "gcloud"}
  return [words for words in found if words[0] == program]


def test_every_command_of_ours_runs_dry(tmp_path, monkeypatch, capsys):
  cloud = programs.install(tmp_path, monkeypatch)
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  said = []
  for _, *arguments in commands("ddiloco"):
    dry = ["--dry_run"] if arguments[0] == "launch" else []
    assert cli.main([*arguments, *dry]) == 0, arguments
    said.append(capsys.readouterr().out)
  assert cloud.asked() == []
  small = next(text for text in said if "first-learner-1" in text)
  assert "8 v6e chips" in small and "Together 9.50 $ an hour, 19.00 $ in 2 h." in small
  large = next(text for text in said if "regions-12b-shards" in text)
  assert "128 v5p chips" in large and "128 v6e chips" in large
  # The node pools that the page makes are those that the dry run asks for.
  create = "gcloud container node-pools create first-"
  made = [words for words in commands("gcloud") if shlex.join(words).startswith(create)]
  assert [line[2:] for line in small.splitlines() if line.startswith("# gcloud")] == [
    shlex.join(words) for words in made
  ]


def test_all_actions_are_told(capsys):
  for action in launch.ACTIONS:
    assert f"launch gke {action}" in PAGE or f"`{action}`" in PAGE
  for target in ("gke", "tpu-vms"):
    assert cli.main(["launch", target, "--help"]) == 0
  known = re.findall(r"--(?:\[no\])?(\w+)", capsys.readouterr().out)
  for flag in re.findall(r"`--(\w+)`", PAGE):
    assert flag in known, f"there is no --{flag}"


def test_secret_keys_do_not_get_into_the_image():
  """gcloud builds it of what git would take; keys made in the project's folder are not of that."""
  ignored = (ROOT / ".gitignore").read_text().split()
  secret = secret_file(Path("keys"), "learner-0")
  assert any(fnmatch.fnmatch(secret.name, pattern) for pattern in ignored)


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed here")
@pytest.mark.slow
def test_gcloud_knows_every_command(tmp_path, monkeypatch):
  monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
  listed = [{"command_string": shlex.join(words)} for words in commands("gcloud")]
  (tmp_path / "commands.json").write_text(json.dumps(listed))
  lint = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={tmp_path}/commands.json"]
  done = subprocess.run(lint, capture_output=True, text=True, check=True)
  checked = json.loads(done.stdout)
  assert {c["command_string"]: c["error_message"] for c in checked if not c["success"]} == {}
