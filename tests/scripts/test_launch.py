"""What scripts start runs with: configs, commands, what is used again and what is refused."""

import importlib.util
import json
import sys

import pytest

from ddiloco import config as config_lib
from ddiloco.protocol.events import LOG_FORMAT
from tests.scripts.commands import SCRIPTS


def load(name: str):
  spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture
def launch(monkeypatch):
  """The module, with a program of a moment in place of a run: it leaves what it was told."""
  module = load("launch")
  stand_in = """
import json, pathlib, sys
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
workdir = pathlib.Path(flags["workdir"])
print("says", sys.argv[1:])
if "--fail" in sys.argv: sys.exit("no cable")
(workdir / "events").mkdir(parents=True, exist_ok=True)
(workdir / "config.json").write_text(pathlib.Path(flags["config"]).read_text())
(workdir / "outcome.json").write_text('{"reason": "finished"}')
line = {"time": 0.0, "role": "engine", "incarnation": 0, "kind": "run_finished", "reason": "",
        "format": LOG_FORMAT}
with (workdir / "events" / "engine.jsonl").open("a") as file: file.write(json.dumps(line) + "\\n")
"""
  stand_in = stand_in.replace("LOG_FORMAT", str(LOG_FORMAT))
  monkeypatch.setattr(module, "PROGRAM", (sys.executable, "-S", "-c", stand_in))
  return module


def test_a_config_is_a_file_with_some_fields_changed(launch):
  kill = {"action": "kill", "role": "learner-1", "at_step": 100, "seconds": 0.5}
  fields = {"sync.num_fragments": 6, "chaos.faults": (kill,), "outer.momentum": 0.0}
  config = launch.config_of("default", fields)
  assert config.sync.num_fragments == 6 and config.outer.momentum == 0.0
  assert config.chaos.faults[0].role == "learner-1"
  assert config.model == config_lib.from_dict(config_lib.default()).model
  with pytest.raises(config_lib.ConfigError, match="no such field"):
    launch.config_of("default", {"sync.fragments": 6})


def test_a_run_that_has_ended_is_made_again_only_with_another_config(launch, tmp_path):
  config, workdir = launch.config_of("default", {}), tmp_path / "a.b" / "run.1"
  for _ in range(2):
    events = launch.train(config, workdir, "--engine=processes")
    assert [event.kind for event in events] == ["run_finished"]
  said = launch.log_of(workdir).read_text()
  assert said.count("says") == 1 and "--engine=processes" in said and "--cpu" in said
  assert "--overwrite" in said
  launch.train(launch.config_of("default", {"seed": 7}), workdir)
  assert launch.log_of(workdir).read_text().count("says") == 2
  saved = json.loads((workdir / "config.json").read_text())
  assert saved["seed"] == 7 and (tmp_path / "a.b" / "run.1.json").exists()


def test_a_run_that_fails_ends_the_script_with_its_last_words(launch, tmp_path):
  with pytest.raises(SystemExit, match=r"run failed with status 1:[\s\S]*no cable"):
    launch.train(launch.config_of("default", {}), tmp_path / "run", "--fail")


def test_what_was_done_before_is_used_and_another_run_is_refused(launch, tmp_path, capsys):
  config, workdir = launch.config_of("default", {}), tmp_path / "run"
  assert not launch.done_before(config, workdir)
  launch.train(config, workdir)
  assert launch.done_before(config, workdir)
  assert "run: done before, in" in capsys.readouterr().out
  with pytest.raises(SystemExit, match="holds another run"):
    launch.done_before(launch.config_of("default", {"seed": 7}), workdir)
