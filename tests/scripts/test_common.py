"""What scripts start runs with: configs, commands, what is used again and what is refused."""

import json
import sys

import pytest

from ddiloco import config as config_lib
from ddiloco.protocol.events import LOG_FORMAT


@pytest.fixture
def common(script, monkeypatch):
  """The module, with a program of a moment in place of a run: it leaves what it was told."""
  module = script("common")
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


def test_a_config_is_a_file_with_some_fields_changed(common):
  kill = {"action": "kill", "role": "learner-1", "at_step": 100, "seconds": 0.5}
  fields = {"sync.num_fragments": 6, "chaos.faults": (kill,), "outer.momentum": 0.0}
  config = common.config_of("default", fields)
  assert config.sync.num_fragments == 6 and config.outer.momentum == 0.0
  assert config.chaos.faults[0].role == "learner-1"
  assert config.model == config_lib.from_dict(config_lib.default()).model
  with pytest.raises(config_lib.ConfigError, match="no such field"):
    common.config_of("default", {"sync.fragments": 6})


def test_a_run_that_has_ended_is_made_again_only_with_another_config(common, tmp_path):
  config, workdir = common.config_of("default", {}), tmp_path / "a.b" / "run.1"
  for _ in range(2):
    events = common.train(config, workdir, "--engine=processes")
    assert [event.kind for event in events] == ["run_finished"]
  said = common.log_of(workdir).read_text()
  assert said.count("says") == 1 and "--engine=processes" in said and "--cpu" in said
  assert "--overwrite" in said
  common.train(common.config_of("default", {"seed": 7}), workdir)
  assert common.log_of(workdir).read_text().count("says") == 2
  saved = json.loads((workdir / "config.json").read_text())
  assert saved["seed"] == 7 and (tmp_path / "a.b" / "run.1.json").exists()


def test_a_run_that_fails_ends_the_script_with_its_last_words(common, tmp_path):
  with pytest.raises(SystemExit, match=r"run failed with status 1:[\s\S]*no cable"):
    common.train(common.config_of("default", {}), tmp_path / "run", "--fail")


def test_what_was_done_before_is_used_and_another_run_is_refused(common, tmp_path, capsys):
  config, workdir = common.config_of("default", {}), tmp_path / "run"
  assert not common.done_before(config, workdir)
  common.train(config, workdir)
  assert common.done_before(config, workdir)
  assert "run: done before, in" in capsys.readouterr().out
  with pytest.raises(SystemExit, match="holds another run"):
    common.done_before(common.config_of("default", {"seed": 7}), workdir)


@pytest.mark.parametrize("name", ["journey", "fuzz_decoder", "proxy", "lines"])
def test_help_is_the_whole_docstring(script, monkeypatch, capsys, name):
  module = script(name)
  monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
  with pytest.raises(SystemExit):
    module.main()
  assert module.__doc__ in capsys.readouterr().out
