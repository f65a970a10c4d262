"""A workdir that several processes share: one config, one start, whoever comes first."""

import concurrent.futures
import dataclasses
import errno
import fcntl
import itertools
import json
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from ddiloco import workdir
from ddiloco.checks import Unanswered, lasts
from ddiloco.config import Config, ConfigError, IslandsConfig, ModelConfig, RunConfig, from_dict
from ddiloco.roles import initial
from tests.engines.toy_world import World
from tests.roles import toy
from tests.waits import wait_for

CONFIG = from_dict({"seed": 3, "sync": {"num_shards": 2}})


def test_the_first_leaves_config_and_time_and_the_others_find_them(tmp_path):
  before = time.time()
  started = workdir.join(tmp_path / "run", CONFIG)
  assert before <= started <= time.time()
  assert workdir.join(tmp_path / "run", CONFIG) == started
  assert workdir.saved_config(tmp_path / "run") == CONFIG
  assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.json", "started"]


def test_many_at_once_agree(tmp_path):
  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    starts = set(pool.map(lambda _: workdir.join(tmp_path / "run", CONFIG), range(64)))
  assert len(starts) == 1
  assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.json", "started"]


def test_what_each_role_may_have_its_own_way(tmp_path):
  workdir.join(tmp_path, CONFIG)
  other = dataclasses.replace(
    CONFIG,
    islands=IslandsConfig(num_learners=2, batch_size=32),
    run=dataclasses.replace(CONFIG.run, restart_seconds=9.0),
    network=dataclasses.replace(CONFIG.network, streams=7),
    sync=dataclasses.replace(CONFIG.sync, value_threads=7),
  )
  workdir.join(tmp_path, other)
  assert workdir.check(tmp_path, other, overwrite=False), "nor does it matter when a run goes on"
  assert workdir.saved_config(tmp_path) == CONFIG, "the first one stays"


@pytest.mark.parametrize(
  "changes, text",
  [
    ({"seed": 4}, "seed = 4: the run in --workdir="),
    ({"run": RunConfig(total_tokens=5)}, "run.total_tokens = 5: "),
    ({"run": RunConfig(init_from="a")}, "run.init_from = 'a': "),
    ({"sync": dataclasses.replace(CONFIG.sync, sync_period=9)}, "sync.sync_period = 9: "),
    ({"model": dataclasses.replace(CONFIG.model, num_layers=9)}, "model.num_layers = 9: "),
  ],
)
def test_another_run_in_the_same_workdir_is_refused(tmp_path, changes, text):
  workdir.join(tmp_path, CONFIG)
  with pytest.raises(ConfigError) as error:
    workdir.join(tmp_path, dataclasses.replace(CONFIG, **changes))
  assert str(error.value).startswith(text) and ". Fix: use the same --config" in str(error.value)
  assert workdir.saved_config(tmp_path) == CONFIG


def test_a_run_goes_on_where_its_project_has_moved(tmp_path):
  """The run's own model was another one, and the fix named a config whose file is gone."""

  def mine(file: str) -> Config:
    return dataclasses.replace(CONFIG, model=ModelConfig(custom=f"{file}:model"))

  workdir.claim(tmp_path, mine("/old/mine.py"), overwrite=False)
  assert workdir.claim(tmp_path, mine("/new/mine.py"), overwrite=False)
  assert workdir.saved_config(tmp_path).model.custom == "/new/mine.py:model", "for `evaluate`"
  workdir.join(tmp_path, mine("/another/host/mine.py"))
  elsewhere = mine("/moved/mine.py")
  assert workdir.saved_config(tmp_path, elsewhere) == elsewhere
  with pytest.raises(ConfigError, match=r"^model.custom = 'other.py:model'"):
    workdir.saved_config(tmp_path, mine("/moved/other.py"))
  with pytest.raises(
    ConfigError, match=r"^model.custom = 'other.py:model': .* has 'mine.py:model'"
  ):
    workdir.claim(tmp_path, mine("/new/other.py"), overwrite=False)


def test_a_workdir_that_cannot_be_is_refused(tmp_path):
  (tmp_path / "file").write_text("x")
  with pytest.raises(ConfigError, match=r"cannot be written .*Fix: "):
    workdir.join(tmp_path / "file" / "run", CONFIG)


def test_a_torn_start_time_is_named_with_its_fix(tmp_path):
  """As a power cut leaves it: it was a traceback."""
  workdir.claim(tmp_path, CONFIG, overwrite=False)
  enters = (lambda: workdir.claim(tmp_path, CONFIG, False), lambda: workdir.join(tmp_path, CONFIG))
  for torn in (b"", b"\xff", b"yesterday", b"nan", b"-inf"):
    (tmp_path / "started").write_bytes(torn)
    for enter in enters:
      with pytest.raises(ConfigError, match=r"its file 'started' says no time .*Fix: "):
        enter()
  (tmp_path / "started").unlink()
  workdir.claim(tmp_path, CONFIG, overwrite=False)


@pytest.mark.parametrize(
  "text, said",
  [
    ("", "is torn, or no config ("),
    ('{"seed": 1', "is torn, or no config ("),
    pytest.param("[" * 10**5, "is torn, or no config (", id="deep"),
    ("[]", "config = []: must be a mapping"),
    ('{"sync": {"foo": 3}}', "sync.foo = 3: there is no such field"),
    ('{"model": {"num_layers": -1}}', "model.num_layers = -1: must be greater than 0"),
  ],
)
def test_a_config_that_is_none_is_named_with_its_file(tmp_path, text, said):
  """What was typed has no such field: the error once named nothing else."""
  (tmp_path / "config.json").write_text(text)
  for use in (workdir.saved_config, lambda place: workdir.check(place, CONFIG, overwrite=False)):
    with pytest.raises(ConfigError) as error:
      use(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: {said}")
    assert "Fix: " in str(error.value)


def test_a_workdir_out_of_reach_is_named(tmp_path, monkeypatch):
  """Tests may run as root, who may read all."""

  def denied(self, *_, **__):
    raise PermissionError(13, "Permission denied", str(self))

  monkeypatch.setattr(type(tmp_path), "stat", denied)
  monkeypatch.setattr(type(tmp_path), "read_text", denied)
  with pytest.raises(ConfigError, match=rf"^--workdir = '{tmp_path}': cannot be written .*Fix: "):
    workdir.check(tmp_path, CONFIG, overwrite=False)
  with pytest.raises(ConfigError, match=r"config.json: cannot be read .*denied.*Fix: ") as caught:
    workdir.saved_config(tmp_path)
  assert lasts(caught.value)


def test_what_is_said_of_a_run_is_nothing_where_it_is_torn(tmp_path):
  assert workdir.outcome(tmp_path) == {}
  torn = ("", "[1]", '{"reason": "sto', "[" * 10**5)
  for text, said in (*((text, {}) for text in torn), ('{"a": 1}', {"a": 1})):
    (tmp_path / workdir.OUTCOME).write_text(text)
    assert workdir.outcome(tmp_path) == said


def test_an_outcome_that_cannot_be_read_is_not_taken_for_none(tmp_path, monkeypatch):
  """A finished run was trained again where its file system did not answer for a moment."""
  (tmp_path / workdir.OUTCOME).write_text('{"reason": "finished"}')

  def stale(self, *_, **__):
    raise OSError(errno.ESTALE, "Stale file handle", str(self))

  with monkeypatch.context() as patch:
    patch.setattr(type(tmp_path), "read_text", stale)
    rule = rf"^--workdir = '{tmp_path}': its outcome.json cannot be read .*Stale.*Fix: "
    with pytest.raises(Unanswered, match=rule):
      workdir.reached_end(tmp_path, CONFIG)
    with pytest.raises(Unanswered, match=r"config.json: cannot be read .*Stale.*Fix: "):
      workdir.saved_config(tmp_path)


@pytest.mark.parametrize("kill_after", [0, 1, 2])
def test_a_finished_run_that_is_killed_while_it_begins_to_go_on_still_goes_on(
  tmp_path, monkeypatch, kill_after
):
  """Its config said more tokens already, and its outcome that it had finished them; or its outcome
  was gone, and its config said that it had never reached its end."""
  workdir.claim(tmp_path, CONFIG, False)
  over = {"reason": "finished", "total_tokens": CONFIG.run.total_tokens}
  (tmp_path / workdir.OUTCOME).write_text(json.dumps(over))
  calls = iter(range(9))

  def killed(real):
    def call(*arguments, **more):
      if next(calls) == kill_after:
        raise KeyboardInterrupt
      return real(*arguments, **more)

    return call

  with monkeypatch.context() as patched:
    patched.setattr(workdir, "write_whole", killed(workdir.write_whole))
    patched.setattr(Path, "unlink", killed(Path.unlink))
    with pytest.raises(KeyboardInterrupt):
      workdir.claim(tmp_path, longer(CONFIG), False)
  goes_on = workdir.saved_config(tmp_path) == longer(CONFIG)
  assert workdir.outcome(tmp_path) == ({} if goes_on else over)
  assert workdir.claim(tmp_path, longer(CONFIG), False), "it goes on"


def longer(config: Config) -> Config:
  run = dataclasses.replace(config.run, total_tokens=2 * config.run.total_tokens)
  return dataclasses.replace(config, run=run)


def test_single_roles_go_on_with_more_tokens_once_none_of_the_run_lives(tmp_path, monkeypatch):
  """As docs/launch.md says of a run that is over; each role was refused."""
  started = workdir.join(tmp_path, CONFIG)
  (tmp_path / workdir.OUTCOME).write_text('{"reason": "finished"}')
  assert workdir.reached_end(tmp_path, CONFIG) and not workdir.reached_end(tmp_path, longer(CONFIG))
  with pytest.raises(ConfigError, match=r"^seed = 7: the run in .* Fix: "):
    workdir.reached_end(tmp_path, dataclasses.replace(CONFIG, seed=7))
  monkeypatch.setattr(workdir, "END_SECONDS", 0.0)
  role = workdir.live_in(tmp_path)
  refusal = r"^run.total_tokens = 8000000: .* has 4000000; .* roles of its run live .* Fix: "
  with pytest.raises(ConfigError, match=refusal):
    workdir.join(tmp_path, longer(CONFIG))
  assert workdir.saved_config(tmp_path) == CONFIG and workdir.reached_end(tmp_path, CONFIG)
  role.close()
  monkeypatch.setattr(workdir, "write_whole", mock.Mock(side_effect=OSError(28, "full")))
  with pytest.raises(Unanswered, match=r"^run.total_tokens = 8000000: .* 4000000; .* full.*Fix: "):
    workdir.join(tmp_path, longer(CONFIG))
  with pytest.raises(ConfigError, match=r"seed = 4: the run in "):
    workdir.join(tmp_path, dataclasses.replace(longer(CONFIG), seed=4))
  monkeypatch.undo()
  monkeypatch.setattr(workdir, "END_SECONDS", 600.0)  # none waits once another one was quicker

  def enter(_: int) -> object:
    assert workdir.join(tmp_path, longer(CONFIG)) == started
    return workdir.live_in(tmp_path)

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for each in pool.map(enter, range(16)):
      each.close()
  assert workdir.saved_config(tmp_path) == longer(CONFIG) and workdir.outcome(tmp_path) == {}
  with pytest.raises(ConfigError, match=r"^run.total_tokens = 4000000: the run in "):
    workdir.join(tmp_path, CONFIG)


@pytest.mark.parametrize(
  ("field", "value"), [("num_shards", 3), ("min_quorum", 2), ("snapshot_steps", 7)]
)
def test_single_roles_change_what_a_run_may_change_once_none_of_it_lives(
  tmp_path, monkeypatch, field, value
):
  """Only `ddiloco train` did; who had started roles by hand was told to take another workdir."""
  workdir.join(tmp_path, CONFIG)
  changed = dataclasses.replace(CONFIG, sync=dataclasses.replace(CONFIG.sync, **{field: value}))
  monkeypatch.setattr(workdir, "END_SECONDS", 0.0)
  refusal = f"^sync.{field} = {value}: the run there has .*roles of its run live .*Fix: "
  with workdir.live_in(tmp_path), pytest.raises(ConfigError, match=refusal):
    workdir.join(tmp_path, changed)
  assert workdir.saved_config(tmp_path) == CONFIG
  workdir.join(tmp_path, changed)
  assert workdir.saved_config(tmp_path) == changed
  with workdir.live_in(tmp_path):
    workdir.join(tmp_path, changed)  # the other roles


@pytest.mark.parametrize(("before", "now"), [(2, 0), (0, 2)])
def test_islands_that_train_alone_do_not_go_on_with_shards_nor_the_reverse(tmp_path, before, now):
  """What they had learned was lost, and no replay came to the bits of both halves."""
  at = lambda count: from_dict({"seed": 3, "sync": {"num_shards": count}})
  workdir.claim(tmp_path, at(before), overwrite=False)
  with pytest.raises(ConfigError, match=rf"^sync.num_shards = {now}: the run in .* has {before}"):
    workdir.check(tmp_path, at(now), overwrite=False)
  assert not workdir.check(tmp_path, at(now), overwrite=True)


def test_a_role_with_more_tokens_leaves_a_run_that_trains_alone(tmp_path):
  workdir.claim(tmp_path, CONFIG, overwrite=False)
  with workdir.held(tmp_path), pytest.raises(ConfigError, match="another process trains in it"):
    workdir.join(tmp_path, longer(CONFIG))
  assert workdir.saved_config(tmp_path) == CONFIG


def test_to_overwrite_leaves_a_folder_that_is_elsewhere_alone(tmp_path):
  """A large disk, for example. Nothing is deleted before that is said."""
  run, large = tmp_path / "run", tmp_path / "large"
  workdir.claim(run, CONFIG, overwrite=False)
  for folder in (large, run / "alone"):
    folder.mkdir()
    (folder / "mine").touch()
  (run / "checkpoints").symlink_to(large)
  with pytest.raises(
    ConfigError, match=rf"^--workdir = '{run}': {run}/checkpoints leads elsewhere.*Fix: "
  ):
    workdir.claim(run, CONFIG, overwrite=True)
  assert (large / "mine").exists() and (run / "alone" / "mine").exists()
  (run / "checkpoints").unlink()
  (run / workdir.FAULTS).symlink_to(large / "mine")  # of a file only the link goes
  workdir.claim(run, CONFIG, overwrite=True)
  assert (large / "mine").exists() and not (run / "alone").exists()
  assert not (run / workdir.FAULTS).is_symlink()


@pytest.mark.parametrize("config", [None, "", "[]", '{"model": "mine"}'])
def test_to_overwrite_deletes_nothing_where_no_run_was(tmp_path, config):
  """A project has a folder for its logs too, and perhaps a config.json: both were deleted."""
  (tmp_path / "logs").mkdir()
  (tmp_path / "logs" / "mine").touch()
  if config is not None:
    (tmp_path / "config.json").write_text(config)
  said = rf"^--workdir = '{tmp_path}': --overwrite would delete logs.* in it, .*Fix: "
  with pytest.raises(ConfigError, match=said):
    workdir.claim(tmp_path, CONFIG, overwrite=True)
  assert (tmp_path / "logs" / "mine").exists()


@pytest.mark.parametrize("lost", ["config.json", "started"])
def test_a_run_that_lacks_a_file_can_be_overwritten(tmp_path, lost):
  workdir.claim(tmp_path, CONFIG, overwrite=False)
  (tmp_path / "events").mkdir()
  (tmp_path / lost).unlink()
  workdir.claim(tmp_path, CONFIG, overwrite=True)
  assert not (tmp_path / "events").exists()


def test_no_run_begins_or_goes_on_where_roles_live(tmp_path, monkeypatch):
  """They were started by hand, so nobody holds the lock of who trains. A run that went on trained
  beside them: two learners 0, and two shards 0 that committed snapshots."""
  monkeypatch.setattr(workdir, "END_SECONDS", 0.2)
  workdir.join(tmp_path, CONFIG)
  (tmp_path / "events").mkdir()
  (tmp_path / "events" / "learner-3.jsonl").write_text("mine")
  roles = [workdir.live_in(tmp_path) for _ in range(2)]
  for role in roles:
    for overwrite in (True, False):
      with pytest.raises(ConfigError, match=r"roles of its run live .*Fix: end them first"):
        workdir.claim(tmp_path, CONFIG, overwrite)
    assert (tmp_path / "events" / "learner-3.jsonl").read_text() == "mine"
    role.close()
  assert workdir.claim(tmp_path, CONFIG, overwrite=False)
  workdir.claim(tmp_path, CONFIG, overwrite=True)
  assert not (tmp_path / "events").exists()


def test_to_overwrite_deletes_what_a_killed_save_left_of_the_old_result(tmp_path):
  """Else it would be taken for the result of the new run."""
  workdir.claim(tmp_path, CONFIG, overwrite=False)
  for name in (".result.0123456789abcdef.old", ".result.notes"):
    (tmp_path / name).mkdir()
  workdir.claim(tmp_path, CONFIG, overwrite=True)
  assert [p.name for p in tmp_path.glob(".*")] == [".result.notes"]


@pytest.mark.parametrize("kill", range(3))
def test_to_overwrite_goes_on_wherever_it_was_killed(tmp_path, monkeypatch, kill):
  """What a killed save had left outlived the config: the next --overwrite took it for a stranger's,
  and a new run for its own result."""
  workdir.claim(tmp_path, CONFIG, overwrite=False)
  for name in (".result.0123456789abcdef.old", "events", "result"):
    (tmp_path / name).mkdir()
  rmtree, calls = shutil.rmtree, itertools.count()

  def killed(path):
    if next(calls) == kill:
      raise KeyboardInterrupt
    rmtree(path)

  monkeypatch.setattr(shutil, "rmtree", killed)
  (tmp_path / workdir.OUTCOME).write_text('{"reason": "finished"}')
  with pytest.raises(KeyboardInterrupt):
    workdir.claim(tmp_path, CONFIG, overwrite=True)
  assert (tmp_path / "config.json").exists()
  assert not workdir.outcome(tmp_path), "it was finished, and its events and result are gone"
  workdir.claim(tmp_path, CONFIG, overwrite=True)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "started"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_run_waits_for_roles_that_are_ending(tmp_path, monkeypatch, overwrite):
  """As those of a supervisor that was killed: they have a lock until all their memory is free. Of
  a large model that took longer than was waited, and the run was refused."""
  workdir.join(tmp_path, CONFIG)
  role, now = workdir.live_in(tmp_path), [0.0]

  def sleep(seconds: float) -> None:
    now[0] += seconds
    if now[0] > 20.0:
      role.close()

  clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=lambda: 7.0)
  monkeypatch.setattr(workdir, "time", clock)
  workdir.claim(tmp_path, CONFIG, overwrite)
  assert role.closed


def test_no_role_begins_where_a_run_is_being_overwritten(tmp_path, monkeypatch):
  """It lived on unmarked, with the config of the run whose files were being deleted."""
  workdir.claim(tmp_path, CONFIG, overwrite=False)
  (tmp_path / "events").mkdir()
  rmtree, refused = shutil.rmtree, []

  def deleting(path):
    with pytest.raises(ConfigError, match="another process trains in it at this moment"):
      workdir.live_in(tmp_path)
    refused.append(path)
    rmtree(path)

  monkeypatch.setattr(shutil, "rmtree", deleting)
  monkeypatch.setattr(workdir, "END_SECONDS", 0.2)
  role = workdir.live_in(tmp_path)
  role.close()
  workdir.claim(tmp_path, CONFIG, overwrite=True)
  assert refused == [tmp_path / "events"]


@pytest.mark.slow
def test_to_overwrite_is_refused_while_a_real_role_lives(tmp_path, monkeypatch):
  monkeypatch.setattr(workdir, "END_SECONDS", 0.2)
  config = toy.config(1, 100, num_shards=1)
  with World(tmp_path, config) as world:
    world.start("syncer-0", f"--bind={world.urls[0]}")
    world.wait_for("started", "syncer-0")
    with pytest.raises(ConfigError, match="roles of its run live"):
      workdir.claim(tmp_path, config, overwrite=True)
    assert (tmp_path / "events" / "syncer-0.jsonl").exists()
    world.send(signal.SIGKILL, "syncer-0")
    wait_for(lambda: world.roles["syncer-0"].process.poll() is not None)
    workdir.claim(tmp_path, config, overwrite=True)
    assert not (tmp_path / "events").exists()


def agreed(config: Config) -> str:
  return initial.contract(config, initial.make_plan(config))


@pytest.mark.parametrize(
  "section, field, value, same",
  [
    ("sync", "sync_period", 7, False),
    ("sync", "num_fragments", 3, False),
    ("model", "rope_theta", 5.0, False),
    ("inner", "learning_rate", 1.0, False),
    ("outer", "momentum", 0.5, False),
    ("data", "sequence_length", 16, False),
    ("data", "tokenizer", "sentencepiece:x", False),
    ("run", "total_tokens", 5, False),
    ("run", "init_from", "a.safetensors", False),
    ("data", "heldout_sequences", 3, True),
    ("sync", "value_threads", 3, True),
    ("run", "evaluations", 3, True),
    ("network", "streams", 3, True),
    ("islands", "batch_size", 3, True),
  ],
)
def test_the_contract_is_what_all_roles_must_agree_on(section, field, value, same):
  changed = dataclasses.replace(getattr(CONFIG, section), **{field: value})
  other = dataclasses.replace(CONFIG, **{section: changed})
  assert (agreed(other) == agreed(CONFIG)) == same


def test_the_contract_is_short_and_knows_the_seed():
  assert len(agreed(CONFIG)) == 16
  assert agreed(dataclasses.replace(CONFIG, seed=4)) != agreed(CONFIG)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "disk full")])
def test_what_fails_while_the_workdir_is_held_keeps_its_name(tmp_path, error):
  """A closed terminal was called a workdir that cannot be written."""
  with pytest.raises(OSError) as raised, workdir.held(tmp_path):
    raise error
  assert raised.value is error
  with workdir.held(tmp_path):
    pass  # and nobody holds it any more


def test_a_workdir_that_cannot_be_held_says_so(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ConfigError, match=r"--workdir.*cannot be written"):
    workdir.held(tmp_path / "file").__enter__()
  with workdir.held(tmp_path), pytest.raises(ConfigError, match="another process trains in it"):
    workdir.held(tmp_path).__enter__()


def test_who_only_looks_whether_a_run_lives_stands_in_no_run_s_way(tmp_path, monkeypatch):
  """To look is to take a lock for a moment: a run that began in that moment was refused."""
  with workdir.held(tmp_path):
    pass
  with (tmp_path / workdir.LOCK).open() as looks:
    fcntl.flock(looks, fcntl.LOCK_SH)
    monkeypatch.setattr(workdir.time, "sleep", lambda _: fcntl.flock(looks, fcntl.LOCK_UN))
    with workdir.held(tmp_path):
      assert workdir.under_way(tmp_path)


def test_a_full_disk_leaves_no_torn_file(tmp_path, monkeypatch):
  write_text = Path.write_text

  def full(self, text):
    write_text(self, text[:9])
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(type(tmp_path), "write_text", full)
  with pytest.raises(Unanswered, match=r"No space left .*Fix: .* enough room"):
    workdir.join(tmp_path, CONFIG)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spelled", ["run", "run/inside/..", "run/../run/"])
def test_a_run_has_the_name_of_its_directory_however_that_is_spelled(
  tmp_path, monkeypatch, spelled
):
  """In a shared checkpoint.path, a run in ".." had its snapshots beside the folder for its own."""
  (tmp_path / "run" / "inside").mkdir(parents=True)
  monkeypatch.chdir(tmp_path)
  assert workdir.run_name(Path(spelled)) == "run"
  monkeypatch.chdir(tmp_path / "run" / "inside")
  assert workdir.run_name(Path("..")) == "run"
