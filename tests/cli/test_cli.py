"""What is typed wrong is said on stderr in plain words, with status 2, before a device is used."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import ddiloco
from ddiloco import cli
from ddiloco.checkpoint import weights
from ddiloco.cli.arguments import Flags
from ddiloco.config import from_dict
from ddiloco.engines import session
from ddiloco.models.transformer import language_model
from ddiloco.workdir import claim, saved_config

ROOT = Path(__file__).parent.parent.parent
QUICKSTART = str(ROOT / "configs" / "quickstart.py")
TRAIN = ["train", f"--config={QUICKSTART}"]
COMMANDS = {
  "train": ["config", "workdir", "dry_run", "overwrite", "cpu"],
  "generate": ["workdir", "prompt", "tokens", "temperature", "seed", "cpu"],
  "evaluate": ["workdir", "cpu"],
  "report": ["workdir"],
}
ROLE = ["config", "workdir", "syncers", "run_id", "keys", "http", "term_status", "attached"]
FLAGS = {  # the words that --help has, of each command
  **COMMANDS,
  "learner": [*ROLE, "learner", "hosts", "host"],
  "syncer": [*ROLE, "shard", "bind"],
  "evaluator": [*ROLE, "cpu"],
  "keys": ["keys", "learners", "shards"],
  "export": ["workdir", "to", "format", "overwrite"],
  "plan": [
    "config",
    "parameters",
    "islands",
    "gbps",
    "latency_ms",
    "step_seconds",
    "codec",
    "json",
  ],
}


@pytest.mark.parametrize("command", FLAGS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help(command, flag, capsys):
  assert cli.main([command, flag]) == 0
  out, err = capsys.readouterr()
  assert out.startswith(f"ddiloco {command}: ") and err == ""
  for name in FLAGS[command]:
    assert f"--{name}:" in out or f"--[no]{name}:" in out
  assert ("--workdir" in out) == ("workdir" in FLAGS[command])
  assert not {"absl", "flagfile", "undefok", "pdb"} & set(out.replace(".", " ").split())


def test_usage_and_version(capsys):
  assert cli.main(["--help"]) == 0
  out = capsys.readouterr().out
  assert all(f"ddiloco {command} " in out for command in FLAGS)
  assert cli.main([]) == 2
  assert cli.main(["--version"]) == 0
  assert capsys.readouterr().out.endswith(f"ddiloco {ddiloco.__version__}\n")


def test_an_unknown_command_shows_the_usage(refused):
  text = refused("trian")
  assert "ddiloco train " in text
  assert text.endswith("ddiloco: there is no command 'trian'. Fix: did you mean train?\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_workdir_is_needed(refused, command):
  config = [f"--config={QUICKSTART}"] if command == "train" else []
  assert "--workdir: is needed. Fix: " in refused(command, *config)


@pytest.mark.parametrize("command", ["dashboard", "profile", "report", "trace", "evaluate"])
def test_a_workdir_that_can_be_no_path(refused, command, tmp_path):
  (tmp_path / "loop").symlink_to("loop")
  for path in ("x" * 300, "a\0b", tmp_path / "loop"):
    assert "cannot be reached (" in refused(command, f"--workdir={path}")
  # It made a folder "gs:" here, which no other host saw.
  assert "must be a folder of a file system" in refused(command, "--workdir=gs://bucket/run")


def test_the_config_is_needed(refused):
  assert "--config: is needed. Fix: " in refused("train", "--workdir=x")
  assert "--config: is needed" in refused("train", "--workdir=x", "--config.seed=1")
  assert "--config: is needed" in refused("train", "--workdir=x", "--config=")


@pytest.mark.parametrize(
  "text, parts",
  [
    (None, ["No such file"]),
    ("def get_config(:\n", ["SyntaxError", "line 1"]),
    ("x = 1\n", ["no get_config()"]),
    ("def get_config():\n  return 1 / 0\n", ["line 2", "ZeroDivisionError"]),
    ("import nowhere\n", ["line 1", "No module named 'nowhere'", "PYTHONPATH"]),
    ("def get_config():\n  pass\n", ["returned None", "default()"]),
    ("def get_config():\n  raise SystemExit(3)\n", ["line 2", "SystemExit: 3"]),
    ("raise SystemExit('no sums. Fix: add.')\n", ["line 1: SystemExit: no sums. Fix: add.\n"]),
    ("def get_config():\n  return {}\n", ["returned {}", "default()"]),
    (
      "from ddiloco import config\n"
      "def get_config():\n  c = config.default()\n  c.sync.min_qurum = 3\n  return c\n",
      ["line 4", "no field 'min_qurum'. Fix: did you mean 'min_quorum'.\n"],
    ),
    (
      "from ddiloco import config\ndef get_config():\n  c = config.default()\n  c.zzz = 3\n",
      ["line 4", "no field 'zzz'. Fix: ddiloco/config/schema.py has"],
    ),
    (
      "from ddiloco import config\n"
      "def get_config():\n  c = config.default()\n  c.sync.min_quorum = 'x'\n  return c\n",
      ["line 4", "min_quorum"],
    ),
  ],
)
def test_a_bad_experiment_file_is_named_with_its_line(refused, tmp_path, text, parts):
  file = tmp_path / "experiment.py"
  if text is not None:
    file.write_text(text)
  said = refused("train", f"--config={file}", f"--workdir={tmp_path / 'run'}")
  assert all(part in said for part in parts), said
  assert ". Fix: " in said


def test_a_folder_without_a_run_is_no_experiment(refused, tmp_path):
  """Python's own error, of a folder without a program, told users to install a package."""
  said = refused("train", f"--config={tmp_path}", "--workdir=x")
  assert f"--config={tmp_path}: holds no run's config" in said and ". Fix: " in said


@pytest.mark.parametrize("text, part", [(None, "No such file"), ("x = 1\n", "no get_config()")])
def test_a_preset_of_a_file_that_is_no_experiment(refused, tmp_path, text, part):
  file = tmp_path / "experiment.py"
  if text is not None:
    file.write_text(text)
  said = refused("train", f"--config={file}:east", "--workdir=x")
  assert part in said and "Fix: name a Python file whose get_config()" in said


def test_a_preset_that_is_not_there(refused):
  dense = ROOT / "configs" / "dense.py"
  assert f"--config={dense}:7m: preset = '7m': must be one of 100k, 1m" in refused(
    "train", f"--config={dense}:7m", "--workdir=x"
  )
  assert "get_config()" in refused("train", f"--config={QUICKSTART}:7m", "--workdir=x")
  region = f"--config.chaos={ROOT / 'configs' / 'chaos' / 'region.py'}:east"
  said = refused("train", f"--config={QUICKSTART}", region, "--workdir=x")
  assert "ValueError: could not convert" in said and "Fix: give after the colon what" in said
  said = refused("train", f"--config={QUICKSTART}", "--config.chaos=regoin.py", "--workdir=x")
  assert "returns a config, such as configs/chaos/region.py" in said


@pytest.mark.parametrize(
  "arguments, parts",
  [
    (["--config.sync.min_qurum=2"], ["sync.min_qurum = '2'", "did you mean 'min_quorum'"]),
    (["--config.snyc.min_quorum", "2"], ["snyc", "did you mean 'sync'"]),
    (["--config.nothing=2"], ["nothing", "known fields are seed, model"]),
    (["--config.islands.overrides.2.devices=2"], ["islands.overrides", "experiment file"]),
    (["--config.sync.min_quorum=abc"], ["--config.sync.min_quorum=abc", "config/schema.py"]),
    (["--config.sync.min_quorum"], ["--config.sync.min_quorum"]),
    (["--config.sync=3"], ["--config.sync=3"]),
    (["--config.sync.min_quorum=9"], ["sync.min_quorum = 9", "at most 4"]),
    (["--config.outer.momentum=nan"], ["outer.momentum = nan", "finite"]),
    (["--config.chaos.faults=3"], ["chaos.faults[0]"]),
    (["--wrokdir=x"], ["flag 'wrokdir'", "Did you mean: workdir"]),
    (["--gpu"], ["flag 'gpu'", "Fix: `ddiloco train --help`"]),
    (["--dry_run=maybe"], ["--dry_run=maybe"]),
    (["--flagfile=/nowhere"], ["/nowhere"]),
    (["stray"], ["'stray'", "--NAME=VALUE"]),
  ],
)
def test_wrong_flags_and_fields(refused, tmp_path, arguments, parts):
  text = refused(*TRAIN, f"--workdir={tmp_path / 'run'}", *arguments)
  assert all(part in text for part in parts), text


@pytest.mark.parametrize("option", ["sizes=[3]", "base=model.safetensors"])
def test_an_option_that_no_flag_changes_says_what_does(refused, tmp_path, option):
  """An option that is a list, or None: the error told of types, and of flags that do not help."""
  file, whole = tmp_path / "experiment.py", "--config.model.options={'sizes': [3], 'base': None}"
  file.write_text(
    "from ddiloco import config\ndef get_config():\n  c = config.default()\n"
    "  c.model.custom, c.model.options = 'mine.py:model', {'sizes': [1, 2], 'base': None}\n"
    "  return c\n"
  )
  said = refused("train", f"--config={file}", "--workdir=x", f"--config.model.options.{option}")
  assert f"config.model.options.{option.partition('=')[0]} is not supported" in said
  assert "Fix: give all options of the section together: --config.model.options=" in said
  given = Flags(["train", f"--config={file}", whole], "config")
  given.parse("")
  assert given.final_config().model.options == {"sizes": [3], "base": None}


@pytest.mark.parametrize("flag", ["--tokens=0", "--tokens=x", "--temperature=-1", "--promt=x"])
def test_wrong_flags_of_generate(refused, flag):
  assert flag.lstrip("-").split("=")[0] in refused("generate", "--workdir=x", flag)


@pytest.mark.parametrize("flag", ["--steps=0", "--steps=100000", "--from_step=-1"])
def test_wrong_flags_of_profile_are_said_with_a_fix(refused, flag):
  text = refused("profile", "--workdir=x", flag)
  assert flag in text and "Fix: " in text


def test_config_as_two_words_and_several_changes(monkeypatch, tmp_path):
  seen = []
  monkeypatch.setattr(session, "train", lambda config, *a, **k: seen.append(config) or 0)
  arguments = ["--config.sync.min_quorum=2", "--config.sync.push_codec", "int4", "--config.seed=5"]
  assert cli.main(["train", "--config", QUICKSTART, f"--workdir={tmp_path}", *arguments]) == 0
  assert (seen[0].sync.min_quorum, seen[0].sync.push_codec, seen[0].seed) == (2, "int4", 5)
  assert seen[0].model.num_layers == 2, "the file's own lines hold"


def test_a_workdir_in_the_home_folder_is_one_folder(monkeypatch, tmp_path):
  """In --workdir=~/... no shell reads the "~". Result and snapshots were in the home folder, and
  all else in a folder of this name: --overwrite left the old run's snapshots."""
  seen = []
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setattr(session, "train", lambda config, workdir, *a, **k: seen.append(workdir) or 0)
  assert cli.main([*TRAIN, "--workdir=~/run"]) == 0
  config = from_dict(SMALL)
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "config.json").write_text(config.to_json())
  (tmp_path / "run" / "outcome.json").write_text('{"reason": "finished"}')
  assert ddiloco.train(config, "~/run", cpu=True).workdir == tmp_path / "run"
  assert seen == [tmp_path / "run"] * 2
  assert cli.main(["keys", "--keys=~/keys", "--learners=1", "--shards=1"]) == 0
  assert (tmp_path / "keys" / "public").is_dir()


def test_an_interrupt_outside_a_run_is_no_traceback(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(session, "train", mock.Mock(side_effect=KeyboardInterrupt))
  assert cli.main([*TRAIN, f"--workdir={tmp_path}"]) == 130
  assert capsys.readouterr().err == "ddiloco train: interrupted\n"


# --- workdirs -------------------------------------------------------------------------------------

SMALL = {
  "model": {"num_layers": 1, "model_dim": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4,
            "mlp_dim": 8},
  "data": {"source": "synthetic", "sequence_length": 8},
}  # fmt: skip


@pytest.fixture
def finished(tmp_path) -> Path:
  """What a run leaves that generate, evaluate and report need."""
  config = from_dict(SMALL)
  (tmp_path / "config.json").write_text(config.to_json())
  random = np.random.default_rng(0)
  params = {
    name: 0.01 * random.standard_normal(leaf.shape, np.float32)
    for name, leaf in language_model(config.model).shapes().items()
  }
  weights.save(tmp_path / "result", params)
  return tmp_path


def test_a_workdir_under_a_file_is_refused(refused, tmp_path):
  (tmp_path / "file").write_text("x")
  assert "cannot be written" in refused(*TRAIN, f"--workdir={tmp_path / 'file' / 'run'}")
  assert "cannot be written" in refused(*TRAIN, f"--workdir={tmp_path / 'file'}")


def test_a_workdir_with_another_run_is_left_alone(refused, finished):
  said = refused(*TRAIN, f"--workdir={finished}")
  assert "the run in --workdir=" in said and ". Fix: use the same --config" in said


def test_a_finished_run_is_not_trained_again(refused, finished):
  """Nor does it look as if nothing was missing where a kill came before the report."""
  for more, killed in ({"seconds": 1.0}, False), ({}, True):
    (finished / "outcome.json").write_text(json.dumps({"reason": "finished", **more}))
    said = refused("train", f"--config={finished / 'config.json'}", f"--workdir={finished}")
    assert "its run is finished" in said and "--overwrite" in said
    assert ("`ddiloco report`" in said) == killed


def test_overwrite_replaces_our_own_files_only(finished):
  (finished / "notes.txt").write_text("mine")
  (finished / "mine").mkdir()
  for folder in ("events", "report", "tensorboard", "alone"):
    (finished / folder).mkdir()
    (finished / folder / "old").write_text("x")
  assert not claim(finished, saved_config(finished), overwrite=True), "nothing goes on"
  left = ["config.json", "mine", "notes.txt", "started"]
  assert sorted(p.name for p in finished.iterdir()) == left
  assert (finished / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("command", ["generate", "evaluate", "report"])
@pytest.mark.parametrize("content", [None, b"{", b"\xff\xfe", b"[]", b'{"sync": {"x": 1}}'])
def test_a_folder_without_a_run_is_refused(refused, tmp_path, command, content):
  if content is not None:
    (tmp_path / "config.json").write_bytes(content)
  assert ". Fix: " in refused(command, f"--workdir={tmp_path}")
  if content is None:
    assert "holds no run" in refused(command, f"--workdir={tmp_path / 'nowhere'}")


@pytest.mark.parametrize("command", ["generate", "evaluate"])
@pytest.mark.parametrize("wrong", ["damaged", "of another model", "missing"])
def test_a_result_that_cannot_be_used_is_refused(refused, finished, command, wrong):
  if wrong == "damaged":
    for path in (finished / "result").rglob("*"):
      if path.is_file() and path.stat().st_size > 200:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  elif wrong == "missing":
    shutil.rmtree(finished / "result")
  else:
    other = from_dict({**SMALL, "model": {**SMALL["model"], "model_dim": 16}})
    (finished / "config.json").write_text(other.to_json())
  said = {
    "damaged": ("cannot be read", "Fix: "),
    "of another model": ("embedding", "Fix: "),
    "missing": ("does not exist. Fix: finish a run",),
  }
  text = refused(command, f"--workdir={finished}")
  assert all(part in text for part in said[wrong]), text


def test_evaluate_and_generate_a_result(finished, capsys, monkeypatch):
  assert cli.main(["evaluate", f"--workdir={finished}"]) == 0
  said = json.loads(capsys.readouterr().out)
  assert said["loss"] == pytest.approx(np.log(256), rel=0.1)
  assert said["bits_per_token"] == pytest.approx(said["loss"] / np.log(2))
  monkeypatch.setattr(session, "measure", lambda *_: {"loss": math.nan})
  assert cli.main(["evaluate", f"--workdir={finished}"]) == 0
  line = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
  assert line == {"loss": "nan", "workdir": str(finished)}, "JSON has no NaN"
  texts = []
  for _ in range(2):
    arguments = ["--prompt=ab", "--tokens=5", "--temperature=0.5", "--seed=3"]
    assert cli.main(["generate", f"--workdir={finished}", *arguments]) == 0
    texts.append(capsys.readouterr().out)
  assert texts[0] == texts[1] and texts[0].startswith("ab") and len(texts[0]) > 3


def test_report_of_a_run_that_was_cut_off(finished, capsys):
  for torn in ("", '{"reason": "fin', "[]"):
    (finished / "outcome.json").write_text(torn)
    assert cli.main(["report", f"--workdir={finished}"]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == finished / "report" / "index.html" and page.exists()


# --- whole processes ------------------------------------------------------------------------------


def process(*arguments: str, code: str = "") -> subprocess.CompletedProcess:
  command = [sys.executable, *(["-c", code] if code else ["-m", "ddiloco"]), *arguments]
  clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  return subprocess.run(command, capture_output=True, text=True, env=clean)


@pytest.mark.parametrize(
  "command", ["generate --tokens=3", "evaluate", "report", "export --to={}/model.safetensors"]
)
def test_commands_in_a_process_of_their_own(finished, command):
  """As a user types them: nothing has prepared the environment for them."""
  name, *more = command.format(finished).split()
  done = process(name, f"--workdir={finished}", *more)
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip()


def test_commands_without_a_model_import_no_jax(tmp_path):
  commands = [
    ["simulate", "--days=0.1"],
    ["keys", f"--keys={tmp_path / 'keys'}", "--learners=1", "--shards=1"],
    ["plan", "--parameters=12e9", "--islands=4", "--gbps=1", "--latency_ms=60", "--step_seconds=1"],
  ]
  code = f"""
import sys
from ddiloco import cli
for arguments in {commands}:
  assert cli.main(arguments) == 0 and "jax" not in sys.modules, arguments
"""
  done = process(code=code)
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "keys" / "secret").is_dir()


@pytest.mark.parametrize(("hears", "status"), [("default_int_handler", 130), ("SIG_IGN", 0)])
def test_an_interrupt_while_a_command_is_imported_is_no_traceback(hears, status):
  """Where a shell has put it into the background, Ctrl-C is not for it."""
  code = f"""
import os, runpy, signal, sys
class Interrupt:
  def find_spec(self, name, *_):
    if name == "ml_collections": os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.{hears})
runpy.run_module("ddiloco", run_name="__main__", alter_sys=True)
"""
  done = process("simulate", "--chips=1000", "--learners=2", code=code)
  assert (done.returncode, done.stderr) == (status, "ddiloco: interrupted\n" if status else "")
  assert bool(done.stdout) == (status == 0)


@pytest.mark.parametrize(("first", "status"), [(True, 143), (False, -15)])
def test_a_role_that_is_a_container_s_first_process_ends_while_it_is_imported(first, status):
  """The kernel drops a SIGTERM that such a process has no handler for: the role went on, until its
  pod was killed."""
  code = f"""
import os, runpy, signal, sys
mine, os.getpid = os.getpid(), lambda: {1 if first else 2}
class Terminate:
  def find_spec(self, name, *_):
    if name == "ml_collections": os.kill(mine, signal.SIGTERM)
sys.meta_path.insert(0, Terminate())
runpy.run_module("ddiloco", run_name="__main__", alter_sys=True)
"""
  done = process("learner", code=code)
  assert (done.returncode, done.stdout) == (status, "")


SWALLOWED = """
import gc, os, runpy, signal, sys
from ddiloco import cli
def train(arguments):
  gc.callbacks.append(lambda *_: os.kill(os.getpid(), getattr(signal, sys.argv[2])))
  gc.collect()
  return 0
cli.COMMANDS["train"], sys.argv = (train, "", ""), ["ddiloco", "train", *sys.argv[1:], "SIGINT"]
runpy.run_module("ddiloco", run_name="__main__")
"""
HAS_FULL = pytest.mark.skipif(
  not Path("/dev/full").exists(), reason="Linux has a disk that is always full"
)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_that_python_would_swallow_ends_a_run(name):
  """JAX calls Python when garbage is collected: the run trained to its end, with status 0. A
  SIGTERM while the result was measured had the status 143, and no word."""
  done = process(name, code=SWALLOWED)
  assert (done.returncode, done.stderr) == (130, "ddiloco: interrupted\n")


@HAS_FULL
def test_an_interrupt_that_cannot_be_said_ends_a_run_too():
  with open("/dev/full", "w") as full:
    assert subprocess.run([sys.executable, "-c", SWALLOWED], stderr=full).returncode == 130


def test_an_interrupt_gives_the_cursor_back_that_the_live_view_hides():
  ours, terminal = os.openpty()
  try:
    command = [sys.executable, "-c", SWALLOWED]
    assert subprocess.run(command, stdout=terminal, stderr=terminal).returncode == 130
    assert os.read(ours, 100) == b"\x1b[?25hddiloco: interrupted\r\n"
  finally:
    os.close(terminal)
    os.close(ours)


@HAS_FULL
def test_a_full_disk_under_what_is_printed_is_no_traceback():
  command = [sys.executable, "-m", "ddiloco", "simulate", "--chips=1000", "--learners=2"]
  with open("/dev/full", "w") as full:
    done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
  (line,) = done.stderr.splitlines()
  assert done.returncode == 1
  assert line.startswith("ddiloco simulate: ") and "No space left" in line and "Fix: " in line


def test_a_locale_without_a_dash_is_no_traceback():
  """`generate` and tables ended with a UnicodeEncodeError, and a run did not show its sample."""
  command = [sys.executable, "-m", "ddiloco", "simulate", "--chips=1000", "--days=1"]
  latin = os.environ | {"PYTHONIOENCODING": "latin-1"}
  done = subprocess.run(command, capture_output=True, env=latin)
  assert (done.returncode, done.stderr) == (0, b"")
  assert b"decoupled" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_python_m_ddiloco_needs_no_path():
  done = process("--version")
  assert (done.returncode, done.stdout) == (0, f"ddiloco {ddiloco.__version__}\n")


@pytest.mark.slow
def test_a_dry_run_prints_the_plan_and_touches_no_device(tmp_path):
  """Nor does a plan of the config."""
  code = (
    "import sys; from ddiloco import cli; status = cli.main(sys.argv[1:])\n"
    "status += cli.main(['plan', sys.argv[2], '--gbps=1', '--latency_ms=60', '--step_seconds=1'])\n"
    "from jax._src import xla_bridge\n"
    "assert not xla_bridge._backends, 'a device was touched'\n"
    "sys.exit(status)"
  )
  run = tmp_path / "run"
  done = process(*TRAIN, f"--workdir={run}", "--dry_run", code=code)
  assert done.returncode == 0, done.stderr
  assert '"min_quorum": 1' in done.stdout
  shown = "parameters", "tokens to train on, which the run reads 0.", "island 3", "fragments: 6"
  for part in (*shown, "shard 1: owns fragments 1, 3, 5"):
    assert part in done.stdout
  assert not run.exists()


def test_a_dry_run_says_that_it_has_not_seen_the_data():
  said = session.describe(from_dict({"data": {"source": "text", "path": "corpus/*.txt"}}))
  assert "\ndata: not checked: a source of your own, not on this machine, or long texts\n" in said


def test_what_is_wrong_with_the_data_is_said_without_a_traceback(refused, tmp_path):
  nothing = ["--config.data.source=text", f"--config.data.path={tmp_path}/*.txt"]
  said = refused(*TRAIN, f"--workdir={tmp_path / 'run'}", "--cpu", *nothing)
  assert "data.path" in said and "Fix: " in said
