"""The commands that make a process one role: what is wrong is said with status 2, at once."""

import errno
import gc
import json
import sys
from pathlib import Path

import pytest

from ddiloco import cli, environment, workdir
from ddiloco.config import from_dict
from ddiloco.engines import session, single_roles

ROOT = Path(__file__).parent.parent.parent
QUICKSTART = f"--config={ROOT / 'configs' / 'quickstart.py'}"
SYNCERS = "--syncers=tcp://127.0.0.1:7000,tcp://127.0.0.1:7002"
ALL = [QUICKSTART, SYNCERS]
NEEDED = {
  "learner": ["--learner=0"],
  "syncer": ["--shard=0", "--bind=tcp://127.0.0.1:7000"],
  "evaluator": [],
}


@pytest.fixture(autouse=True)
def prepared(monkeypatch, no_device):
  """What the environment was told; the tests' own is made already."""
  calls = []
  monkeypatch.setattr(environment, "prepare", lambda **settings: calls.append(settings))
  return calls


@pytest.fixture
def place(monkeypatch):
  """What the role was called with beside its config, instead of running it."""
  seen = []

  def run(config, *arguments):
    seen.append(arguments)
    return 7

  monkeypatch.setattr(single_roles, "run_learner", run)
  monkeypatch.setattr(single_roles, "run_syncer", run)
  monkeypatch.setattr(single_roles, "run_evaluator", run)
  return seen


@pytest.mark.parametrize(
  "command",
  [
    ["learner", SYNCERS, "--learner=0"],
    ["evaluator", SYNCERS],
    ["train", "--dry_run"],
    ["plan", "--gbps=1", "--step_seconds=1"],
    ["launch", "gke", "--name=run", "--bucket=gs://bucket/run", "--image=image:1", "--claim=work"],
  ],
)
def test_data_that_do_not_fit_are_refused_before_anything_is_begun(refused, tmp_path, command):
  """A role's config would be that of the workdir's run, and no other one could follow."""
  text = tmp_path / "text.txt"
  text.write_text("a few words")
  told = [QUICKSTART, "--config.data.source=text", f"--config.data.path={text}"]
  told += ["--config.islands.topology=v6e:1x1", "--config.sync.num_shards=1"]
  told += [f"--workdir={tmp_path / 'run'}"] * (command[0] not in ("plan", "launch"))
  err = refused(*command, *told)
  assert "data.heldout_sequences = 64: " in err and "12 tokens" in err and "Fix: give more" in err


@pytest.mark.parametrize("role", NEEDED)
def test_no_garbage_is_collected_while_a_role_imports(place, monkeypatch, tmp_path, role):
  """It took a tenth of a role's start."""
  looks, made = [], []
  monkeypatch.setattr(environment, "prepare", lambda **settings: looks.append(gc.isenabled()))
  assert cli.main([role, *ALL, *NEEDED[role], f"--workdir={tmp_path}"]) == 7
  assert looks == [False] and gc.isenabled()
  assert not any(each is made for each in gc.get_objects()), "what was there is passed over"


def test_an_evaluator_that_measures_nothing_does_not_look_at_the_data(place, tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("a few words")
  told = [*ALL, "--config.data.source=text", f"--config.data.path={text}"]
  told += [f"--workdir={tmp_path / 'run'}", "--config.run.evaluations=0"]
  assert cli.main(["evaluator", *told]) == 7
  ((_, corpus),) = place
  assert corpus is None


def test_a_plan_does_not_look_at_data_that_are_elsewhere(tmp_path):
  told = [QUICKSTART, "--config.data.source=text", f"--config.data.path={tmp_path}/*.txt"]
  assert cli.main(["plan", *told, "--gbps=1", "--step_seconds=1"]) == 0
  (tmp_path / "gone.txt").symlink_to(tmp_path / "elsewhere")
  (tmp_path / "folder.txt").mkdir()
  assert cli.main(["plan", *told, "--gbps=1", "--step_seconds=1"]) == 0
  told[1:] = [f"--config.data.tokenizer=sentencepiece:{tmp_path / 'no.model'}"]
  assert cli.main(["plan", *told, "--gbps=1", "--step_seconds=1"]) == 0


@pytest.mark.parametrize("command", NEEDED)
def test_what_every_role_needs(refused, command, tmp_path, place):
  workdir = f"--workdir={tmp_path / 'run'}"
  assert "--workdir: is needed" in refused(command, *ALL, *NEEDED[command])
  assert "--config: is needed" in refused(command, SYNCERS, workdir, *NEEDED[command])
  assert "--syncers: is needed" in refused(command, QUICKSTART, workdir, *NEEDED[command])
  for flag in NEEDED[command]:
    name = flag.partition("=")[0]
    others = [each for each in NEEDED[command] if each != flag]
    assert f"{name}: is needed. Fix: give {name}=" in refused(command, *ALL, workdir, *others)
  if command == "syncer":  # with --bind=$UNSET it listened nowhere
    assert "--bind: is needed" in refused(command, *ALL, workdir, "--shard=0", "--bind=")


@pytest.mark.parametrize(
  "arguments, part",
  [
    (["learner", "--learner=-1"], "learner"),
    (["learner", "--learner=x"], "learner"),
    (["syncer", "--shard=9", "--bind=tcp://127.0.0.1:0"], "--shard = 9: the config has"),
    (["evaluator", "--config.sync.num_shards=3"], "names 2 shards"),
    (["evaluator", "--config.sync.num_shards=0"], "sync.num_shards = 0"),
    (["syncer", "--shard=0", "--bind=tcp://0.0.0.0:7000"], "needs keys"),
    (["syncer", "--shard=0", "--bind=127.0.0.1:7000"], "tcp://HOST:PORT"),
    (["evaluator", "--keys=nowhere"], "--keys"),
  ],
)
def test_wrong_values_are_refused_before_anything_is_done(refused, tmp_path, arguments, part):
  said = refused(*arguments, *ALL, f"--workdir={tmp_path / 'run'}")
  assert part in said and ("Fix: " in said or said.startswith("ddiloco learner: flag --learner="))


def test_each_shard_has_a_url_of_its_own(refused, tmp_path):
  twice = "--syncers=tcp://127.0.0.1:7000,tcp://127.0.0.1:7000"
  said = refused("evaluator", QUICKSTART, twice, f"--workdir={tmp_path / 'run'}")
  assert twice.partition("=")[2] in said and "names one url twice. Fix: " in said


def test_syncers_beyond_this_machine_need_keys(refused, tmp_path):
  far = "--syncers=tcp://127.0.0.1:7000,tcp://10.0.0.1:7000"
  said = refused("evaluator", QUICKSTART, far, f"--workdir={tmp_path / 'run'}")
  assert "--syncers" in said and "needs keys" in said


def test_a_learner_gets_the_devices_of_its_island(place, prepared, tmp_path):
  changes = ["--config.islands.devices=4", "--config.islands.batch_size=8"]
  arguments = ["learner", *ALL, "--learner=11", f"--workdir={tmp_path / 'run'}", "--cpu", *changes]
  assert cli.main(arguments) == 7
  ((number, where, corpus),) = place
  assert number == 11 and where.workdir == tmp_path / "run" and where.run_id == "run"
  assert len(corpus.train), "the data that were looked at are not opened again"
  assert where.syncers == ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7002")
  assert (where.bind, where.keys, where.http) == ("", None, "")
  assert prepared == [{"num_cpu_devices": 4, "cpu_only": True, "gpus": []}]


def test_a_learner_or_an_evaluator_may_get_some_of_the_gpus(place, prepared, refused, tmp_path):
  workdir = f"--workdir={tmp_path / 'run'}"
  assert cli.main(["learner", *ALL, "--learner=1", workdir, "--gpus=2,3"]) == 7
  asked = "--config.run.evaluator_devices=1"
  assert cli.main(["evaluator", *ALL, workdir, asked, "--gpus=4"]) == 7
  assert [call["gpus"] for call in prepared] == [[2, 3], [4]]
  said = refused("learner", *ALL, "--learner=1", workdir, "--gpus=2,GPU-8f")
  assert "--gpus = '2,GPU-8f': must be numbers of GPUs. Fix: for example --gpus=0,1." in said


def test_a_shard_needs_no_accelerator(place, prepared, tmp_path):
  more = [f"--workdir={tmp_path / 'run'}", "--run_id=big", "--keys=k", "--http=127.0.0.1:0"]
  assert cli.main(["syncer", *ALL, *NEEDED["syncer"], *more]) == 7
  ((number, where),) = place
  assert number == 0 and where.bind == "tcp://127.0.0.1:7000"
  assert (where.run_id, where.keys, where.http) == ("big", Path("k"), "127.0.0.1:0")
  assert prepared == [{"num_cpu_devices": 1, "cpu_only": True}]


def test_an_evaluator_is_refused_where_a_run_trains(place, tmp_path, capsys):
  """It took the place of the run's own, and deleted the run's result."""
  with workdir.held(tmp_path):
    assert cli.main(["evaluator", *ALL, f"--workdir={tmp_path}"]) == 2 and not place
    assert "another process trains in it" in capsys.readouterr().err
  assert cli.main(["evaluator", *ALL, f"--workdir={tmp_path}"]) == 7


def test_a_shard_is_refused_where_a_run_trains(place, tmp_path, capsys, monkeypatch):
  """It was a second run in the same files, and both committed snapshots. The run's own are not."""
  shard = ["syncer", *ALL, *NEEDED["syncer"], f"--workdir={tmp_path}"]
  with workdir.held(tmp_path):
    assert cli.main(shard) == 2 and not place
    assert "another process trains in it" in capsys.readouterr().err
    monkeypatch.setattr("ddiloco.cli.runs.end_with_parent", lambda: None)
    assert cli.main([*shard, "--attached"]) == 7
  assert cli.main(shard) == 7
  with workdir.held(tmp_path):
    pass  # a shard takes nothing from a run that begins


@pytest.mark.parametrize("name", ["../other", ".", "a/b"])
def test_a_run_is_named_as_a_folder_can_be(refused, tmp_path, name):
  place = f"--workdir={tmp_path / 'r'}", f"--run_id={name}"
  said = refused("syncer", *ALL, *NEEDED["syncer"], *place)
  assert f"--run_id = {name!r}: " in said and "Fix: " in said


# --- train ----------------------------------------------------------------------------------------


def test_engines_by_name(monkeypatch, tmp_path, refused):
  seen = []
  monkeypatch.setattr(session, "train", lambda *a, **k: seen.append(k["engine"]) or 0)
  workdir = f"--workdir={tmp_path / 'run'}"
  assert cli.main(["train", QUICKSTART, workdir]) == 0
  assert cli.main(["train", QUICKSTART, workdir, "--engine=processes"]) == 0
  assert seen == ["threads", "processes"]


def test_who_supervises_leaves_the_accelerators_to_the_others(monkeypatch, tmp_path, prepared):
  monkeypatch.setattr(session, "train", lambda *a, **k: 0)
  for engine in ("threads", "processes"):
    cli.main(["train", QUICKSTART, f"--workdir={tmp_path / 'run'}", f"--engine={engine}"])
  assert [call["supervises"] for call in prepared] == [False, True]


def test_an_unknown_engine_and_one_that_is_not_installed(refused, monkeypatch, tmp_path):
  train = ["train", QUICKSTART, f"--workdir={tmp_path / 'run'}", "--config.data.source=synthetic"]
  assert "must be one of threads, processes, ray" in refused(*train, "--engine=thread")
  monkeypatch.setitem(sys.modules, "ray", None)
  monkeypatch.delitem(sys.modules, "ddiloco.engines.ray", raising=False)
  assert "Fix: pip install 'ddiloco[ray]'" in refused(*train, "--engine=ray")


def test_the_saved_config_of_a_run_is_a_config(monkeypatch, tmp_path, refused):
  config = from_dict(
    {
      "seed": 5,
      "islands": {"overrides": {"2": {"devices": 2}}, "resources": {"TPU": 4}},
      "chaos": {"faults": [{"action": "kill", "role": "learner-2", "at_step": 3}]},
    }
  )
  run = tmp_path / "run"
  run.mkdir()
  (run / "config.json").write_text(config.to_json())
  seen = []
  monkeypatch.setattr(session, "train", lambda config, *a, **k: seen.append(config) or 0)
  arguments = ["train", f"--config={run / 'config.json'}", f"--workdir={tmp_path / 'again'}"]
  assert cli.main(arguments) == 0
  assert cli.main([*arguments, "--config.seed=6", "--config.sync.min_quorum=2"]) == 0
  assert seen[0] == config
  assert (seen[1].seed, seen[1].sync.min_quorum) == (6, 2)


@pytest.mark.parametrize(
  "text, part",
  [
    (None, "holds no run's config"),
    ("{", "is torn, or no config ("),
    (json.dumps({"sync": {"min_qurum": 3}}), "did you mean 'min_quorum'"),
    (json.dumps([1]), "must be a mapping"),
  ],
)
def test_a_bad_saved_config(refused, tmp_path, text, part):
  file = tmp_path / "config.json"
  if text is not None:
    file.write_text(text)
  said = refused("train", f"--config={file}", f"--workdir={tmp_path / 'run'}")
  assert part in said and "Fix: " in said


@pytest.mark.parametrize("role", NEEDED)
def test_a_workdir_that_does_not_answer_is_no_wrong_usage(role, tmp_path, monkeypatch, capsys):
  """After that scripts/slurm.sh starts a role no more."""
  read = Path.read_text

  def stale(self, *arguments, **more):
    if self.parent == tmp_path:
      raise OSError(errno.ESTALE, "Stale file handle", str(self))
    return read(self, *arguments, **more)

  monkeypatch.setattr(Path, "read_text", stale)
  assert cli.main([role, *ALL, *NEEDED[role], f"--workdir={tmp_path}"]) == 1
  assert "its outcome.json cannot be read" in capsys.readouterr().err
