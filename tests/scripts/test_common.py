"""What scripts start runs with: configs, commands, what is used again and what is refused."""

import ast
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from ddiloco import config as config_lib
from ddiloco.protocol.events import LOG_FORMAT
from tests.scripts.commands import SCRIPTS
from tests.scripts.commands import status as status_of
from tests.waits import wait_for


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


def test_a_run_that_has_ended_is_not_made_again_and_another_one_is_refused(
  common, tmp_path, capsys
):
  config, workdir = common.config_of("default", {}), tmp_path / "a.b" / "run.1"
  for _ in range(2):
    events = common.train(config, workdir, "--engine=processes")
    assert [event.kind for event in events] == ["run_finished"]
  assert "run.1: done before, in" in capsys.readouterr().out
  said = common.log_of(workdir).read_text()
  assert said.count("says") == 1 and "--engine=processes" in said and "--cpu" in said
  assert "--overwrite" in said and (tmp_path / "a.b" / "run.1.json").exists()
  with pytest.raises(config_lib.ConfigError, match="holds another run"):
    common.train(common.config_of("default", {"seed": 7}), workdir)


def test_a_run_that_fails_ends_the_script_with_its_last_words(common, tmp_path):
  with pytest.raises(SystemExit, match=r"run failed with status 1:[\s\S]*no cable"):
    common.train(common.config_of("default", {}), tmp_path / "run", "--fail")


SCRIPT = """
import sys, time
from pathlib import Path
import common
code = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(100)"
common.PROGRAM = (sys.executable, "-S", "-c", code)
common.start(common.config_of("default", {}), Path(sys.argv[1]))
print("started", flush=True)
time.sleep(100)
"""


def test_a_script_that_is_killed_leaves_no_run_behind(common, tmp_path):
  """The run trained on, and held its workdir."""
  workdir, scripts = tmp_path / "run", str(Path(common.__file__).parent)
  paths = os.pathsep.join([scripts, str(common.ROOT), os.environ.get("PYTHONPATH", "")])
  command = [sys.executable, "-c", SCRIPT, str(workdir)]
  run = 0
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
  ) as parent:
    try:
      assert parent.stdout.readline() == "started\n"
      log = common.log_of(workdir)  # the run says its number when its Python has begun
      wait_for(lambda: log.read_text().endswith("\n"), "its number")
      run = os.pidfd_open(int(log.read_text()))
    finally:
      parent.kill()
  try:
    ended, _, _ = select.select([run], [], [], 60)
    assert ended == [run]
  finally:
    with contextlib.suppress(ProcessLookupError):
      signal.pidfd_send_signal(run, signal.SIGKILL)
    os.close(run)


@pytest.mark.parametrize("name", ["journey", "fuzz_decoder", "proxy", "lines"])
def test_help_is_the_whole_docstring(script, monkeypatch, capsys, name):
  module = script(name)
  monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
  with pytest.raises(SystemExit):
    module.main()
  assert module.__doc__ in capsys.readouterr().out


def test_flags_have_defaults_and_quick_ones_and_wrong_ones_are_named(common, monkeypatch, capsys):
  def given(*arguments):
    monkeypatch.setattr(sys, "argv", ["some.py", *arguments])
    several = {"type": common.several(int), "default": "600,2000"}
    flags = {"seed": (7, "of all"), "first": 0, "most": float, "away": several}
    found = common.options("text", {"steps": 3}, steps=240, workdir=Path, **flags)
    return found.steps, found.seed, found.workdir, found.first, found.most, found.away

  assert given() == (240, 7, None, 0, None, [600, 2000])
  quick = "--quick", "--workdir=a", "--first=0", "--most=0.5", "--away=3"
  assert given(*quick) == (3, 7, Path("a"), 0, 0.5, [3])
  assert given("--workdir=~/a")[2] == Path.home() / "a", "no shell reads it there"
  for wrong in (
    *("--steps=0", "--steps=-1", "--steps=x", "--stepps=2", "--first=-1", "--most=0", "--most=nan"),
    *("--most=inf", "--away=", "--away=3,0", "--away=3,x"),
  ):
    with pytest.raises(SystemExit) as status:
      given(wrong)
    assert status.value.code == 2 and wrong.split("=")[0] in capsys.readouterr().err
  with pytest.raises(SystemExit):
    given("--help")
  said = capsys.readouterr().out
  assert "default: 240" in said and "of all (default: 7)" in said


@pytest.mark.parametrize("path", ["file/x.png", "folder"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
  common, monkeypatch, capsys, tmp_path, path
):
  """It was found out by a traceback after the work, whose result was not even printed."""
  (tmp_path / "file").touch()
  (tmp_path / "folder").mkdir()
  monkeypatch.setattr(sys, "argv", ["some.py", f"--picture={tmp_path / 'new' / 'x.png'}"])
  assert common.options("text", picture=common.OUTPUT).picture == tmp_path / "new" / "x.png"
  assert [*(tmp_path / "new").iterdir()] == [], "it is only looked at"
  monkeypatch.setattr(sys, "argv", ["some.py", f"--picture={tmp_path / path}"])
  with pytest.raises(SystemExit) as status:
    common.options("text", picture=common.OUTPUT)
  assert status.value.code == 2 and f"--picture: {tmp_path / path}" in capsys.readouterr().err


def test_a_workdir_that_cannot_be_written_is_refused(common, tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(config_lib.ConfigError, match=r"--workdir = .*cannot be written"):
    common.make_folder(tmp_path / "file" / "run")
  common.make_folder(tmp_path)
  with pytest.raises(config_lib.ConfigError, match=r"File exists.*Fix: choose a new directory"):
    common.make_folder(tmp_path, new=True)


def test_a_table_may_be_empty_and_its_columns_stand_apart(common, capsys):
  common.show({})
  common.show({"row": {"seconds_per_sync": 1.5, "a_name_of_16_too": None}})
  head, row = capsys.readouterr().out.splitlines()[-2:]
  assert head.split() == ["seconds_per_sync", "a_name_of_16_too"]
  assert row.split() == ["row", "1.50", "None"]


# --- Every script


def mains() -> list[Path]:
  """The scripts that a user runs."""
  return [path for path in sorted(SCRIPTS.glob("*.py")) if "__main__" in path.read_text()]


def test_contributing_says_what_every_script_is_for():
  page = (SCRIPTS.parent / "CONTRIBUTING.md").read_text()
  section = page.partition("## The scripts")[2].partition("\n## ")[0]
  files = [path.name for path in SCRIPTS.iterdir() if path.suffix in (".py", ".sh")]
  assert [name for name in files if f"`{name}`" not in section] == []
  named = re.findall(r"`([a-z_0-9]+\.(?:py|sh))`", section)
  assert set(named) == set(files), "and no other"
  results = (SCRIPTS.parent / "docs" / "results.md").read_text()
  titles = re.findall(r'"([A-Z][^"]+)"', section)
  assert titles and [each for each in titles if f"## {each}\n" not in results] == []


HIDDEN = {"process", "slow"}  # of processes that a script starts itself


@pytest.mark.parametrize("path", mains(), ids=lambda path: path.stem)
def test_a_docstring_names_every_flag_of_its_script(path):
  tree = ast.parse(path.read_text())
  doc, flags = ast.get_docstring(tree) or "", list[str]()
  for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
    kind = ast.unparse(call.func).removeprefix("common.")
    if kind.endswith(".add_argument"):
      flags += [str(ast.literal_eval(name)) for name in call.args]
    elif kind == "options":  # of common.py
      flags += [f"--{keyword.arg}" for keyword in call.keywords if keyword.arg not in HIDDEN]
      flags += ["--quick"] * (len(call.args) > 1)
  assert [flag for flag in flags if flag not in doc] == []


@pytest.mark.parametrize("path", mains(), ids=lambda path: path.stem)
def test_every_script_ends_in_the_same_way(path):
  own = {"proxy": "the standard library alone, since a link starts fast"}
  assert "run_script(main)" in path.read_text().splitlines()[-1] or path.stem in own


@pytest.mark.parametrize(
  ("name", "wrong"),
  [
    ("aot_report", "--only=zzz"),
    ("bench_shard", "--values=100"),
    ("mixed_hardware", "--workdir=."),
    ("reproduce_quality", "--missed=rebase"),
    ("wan_summary", "--workdir=nowhere --mbit=1 --delay_ms=1"),
  ],
)
def test_wrong_input_is_refused_in_one_line(
  script, monkeypatch, capsys, tmp_path: Path, name: str, wrong: str
):
  module = script(name)
  monkeypatch.chdir(tmp_path)
  assert status_of(module, monkeypatch, *wrong.split()) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"{name}.py: {wrong.partition('=')[0]} = ") and "Fix: " in line


IMPORTS_COMMON = re.compile(r"^import common|^from common import", re.MULTILINE)
# The decoder's modules are instrumented before anything else imports them.
RUN = [
  path.name
  for path in sorted(SCRIPTS.glob("*.py"))
  if "__main__" in (text := path.read_text()) and IMPORTS_COMMON.search(text)
  if path.stem != "fuzz_decoder"
]


@pytest.mark.parametrize("name", RUN)
def test_a_script_outside_the_environment_says_how_to_enter_it(name):
  """It ended in a traceback, for the package that it happened to import first."""
  bare = [sys.executable, "-S", str(SCRIPTS / name)]  # without any installed package
  env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
  done = subprocess.run(bare, env=env, capture_output=True, text=True)
  (line,) = done.stderr.splitlines()
  assert done.returncode == 2 and line.startswith(f"{name}: ")
  assert "no package 'ddiloco'. Fix: source .venv/bin/activate" in line


@pytest.mark.parametrize(("said", "status"), [("print(7)", 0), ("return print(7) or 3", 3)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_script_whose_reader_has_left_ends_without_a_traceback(said, status, unbuffered):
  code = f"import common\ndef main():\n  {said}\ncommon.run_script(main)"
  reader, output = os.pipe()
  os.close(reader)
  try:
    variables = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command, pipes = [sys.executable, "-c", code], {"stdout": output, "stderr": subprocess.PIPE}
    done = subprocess.run(command, cwd=SCRIPTS, env=variables, **pipes)
  finally:
    os.close(output)
  left = unbuffered and status  # it ended early
  assert (done.returncode, done.stderr) == (0 if left else status, b"")


@pytest.mark.parametrize(
  ("error", "status", "said"),
  [
    (KeyboardInterrupt(), 130, ""),
    (
      config_lib.ConfigError("--seeds=x: must be a number."),
      2,
      "a.py: --seeds=x: must be a number.\n",
    ),
  ],
)
def test_neither_ctrl_c_nor_wrong_usage_is_a_traceback(
  script, monkeypatch, capsys, error, status, said
):
  monkeypatch.setattr(sys, "argv", ["scripts/a.py"])
  with pytest.raises(SystemExit) as ended:
    script("common").run_script(mock.Mock(side_effect=error))
  assert ended.value.code == status and capsys.readouterr() == ("", said)
