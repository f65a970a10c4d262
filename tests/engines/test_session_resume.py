"""What a run goes on from is said as it is; one whose snapshots are gone is not begun anew.

The threads engine with islands in NumPy; where the processes engine decides, no process is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import shutil
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from ddiloco.checkpoint import restore, signed_json
from ddiloco.checkpoint.restore import Unfounded
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.config import (
  ChaosConfig,
  CheckpointConfig,
  Config,
  ConfigError,
  Fault,
  SyncConfig,
  from_dict,
)
from ddiloco.engines import session, threads
from ddiloco.engines.engine import RunResult
from ddiloco.engines.processes import ProcessesEngine
from ddiloco.observe.eventlog import read_events
from ddiloco.protocol import supervisor, syncer
from ddiloco.protocol.messages import FragmentState
from ddiloco.protocol.states import Round, SyncerState
from ddiloco.protocol.values import replace
from ddiloco.roles import initial
from ddiloco.training import data
from ddiloco.workdir import claim, held
from tests.cli.test_runs_export import OWN, of_own_model
from tests.engines.test_threads import TOKENS, Ran, make_config
from tests.waits import ended_threads, wait_for

EVERYBODY = {"learner-0", "learner-1", "syncer-0", "syncer-1"}


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
  return data.open_corpus(make_config().data)


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
  monkeypatch.setattr(signed_json, "PAUSES_SECONDS", ())
  monkeypatch.setattr(restore, "warn", lambda text: None)


def endless(**sync) -> Config:
  return make_config(
    learners=2,
    steps=10**6,
    sync={"snapshot_steps": 40, "min_quorum": 2, **sync},
    run={"evaluations": 0},
    checkpoint={"keep": 3},
  )


@pytest.fixture(scope="module")
def stopped(corpus, tmp_path_factory):
  """A run that was stopped when it had two snapshots of everybody."""
  workdir, whole = tmp_path_factory.mktemp("stopped") / "run", []

  def enough(event) -> bool:
    if event.kind == "snapshot" and set(event.roles) == EVERYBODY:
      whole.append(event.snapshot)
    return len(whole) >= 2

  assert Ran(endless(), corpus, workdir, stop_after=enough).outcome.reason == "stopped"
  return workdir


@pytest.fixture
def workdir(stopped, tmp_path):
  shutil.copytree(stopped, tmp_path / "run")
  return tmp_path / "run"


def storage_of(workdir) -> Storage:
  plan = initial.make_plan(endless())
  return Storage(workdir / "checkpoints", plan.plan_id, lambda text: None)


def soon_over(workdir, config: Config) -> Config:
  global_step = max(e.global_step for e in read_events(workdir) if e.kind == "step")
  run = dataclasses.replace(config.run, total_tokens=2 * (global_step + 60) * TOKENS)
  return dataclasses.replace(config, run=run)


def by_threads(corpus, config, workdir):
  Ran(config, corpus, workdir)


def by_processes(corpus, config, workdir):
  ProcessesEngine(config, workdir, corpus, lambda params: {"loss": 0.0}).run()


def refused(corpus, config, workdir, engine) -> str:
  """The text; nothing was changed."""
  files = lambda: {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
  before = files()
  with pytest.raises(ConfigError) as error:
    engine(corpus, config, workdir)
  assert files() == before
  return str(error.value)


ENGINES = pytest.mark.parametrize("engine", [by_threads, by_processes])


@ENGINES
def test_a_run_whose_checkpoints_are_gone_is_refused(corpus, workdir, engine, capsys):
  """A disk that is not mounted: the newest event log still knows how far it had come."""
  newest = storage_of(workdir).committed()[0]
  shutil.rmtree(workdir / "checkpoints")
  text = refused(corpus, endless(), workdir, engine)
  assert f"up to number {newest}, and none can be read" in text
  assert f"there is none in {workdir / 'checkpoints'}" in text
  assert "Fix: bring" in text and "--overwrite" in text
  assert "goes on" not in capsys.readouterr().out


@ENGINES
def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_each_is_named(
  corpus, workdir, engine
):
  committed = storage_of(workdir).committed()
  assert len(committed) >= 2
  for path in (workdir / "checkpoints").glob("0*/syncer-1/meta.json"):
    path.write_text("{")
  text = refused(corpus, endless(), workdir, engine)
  assert all(f"{n:08d}/syncer-1/meta.json" in text for n in committed)
  assert storage_of(workdir).committed() == committed


@ENGINES
def test_a_run_whose_checkpoints_lie_elsewhere_is_refused(corpus, workdir, engine, tmp_path):
  """checkpoint.path was left out, or leads to another disk by now."""
  settings = dataclasses.replace(endless().checkpoint, path=str(tmp_path / "other"))
  config = dataclasses.replace(endless(), checkpoint=settings)
  assert str(tmp_path / "other") in refused(corpus, config, workdir, engine)


@pytest.mark.parametrize(
  "engine, change",
  [
    (by_threads, {"snapshot_steps": 0}),
    (by_threads, {"num_shards": 0}),
    (by_processes, {"snapshot_steps": 0}),
  ],
)
def test_a_run_that_would_not_look_at_its_checkpoints_is_refused(corpus, workdir, engine, change):
  text = refused(corpus, endless(**change), workdir, engine)
  assert "none is looked for" in text


@pytest.mark.parametrize("change", [{"sync": {"snapshot_steps": 0}}, {"checkpoint": {"path": "x"}}])
def test_a_run_that_is_refused_keeps_its_config_and_its_outcome(workdir, change, monkeypatch):
  """It lost them: a finished run that could not go on with more tokens was not finished any more,
  and the next command trained its end again."""
  monkeypatch.chdir(workdir)
  claim(workdir, endless(), overwrite=False)
  (workdir / "outcome.json").write_text('{"reason": "finished"}')
  longer = dataclasses.asdict(endless())
  longer["run"]["total_tokens"] *= 2
  for section, fields in change.items():
    longer[section] |= fields
  files = lambda: {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
  before = files()
  with pytest.raises(ConfigError, match="and none can be read"):
    session.train(from_dict(longer), workdir)
  assert files() == before


def test_the_events_alone_do_not_matter_if_snapshots_can_be_read(corpus, workdir, capsys):
  config = soon_over(workdir, endless())
  shutil.rmtree(workdir / "events")
  newest = storage_of(workdir).committed()[0]
  assert Ran(config, corpus, workdir).outcome.reason == "finished"
  said = capsys.readouterr().out
  assert f"goes on from snapshot {newest}. There are no events here: {workdir}/checkpoints" in said


def test_logs_may_be_moved_away_while_the_run_goes_on(corpus, workdir):
  """Those of months fill a disk; nothing but pictures, figures and proofs need them."""
  moved = set[str]()

  def move(event) -> bool:
    if event.kind == "commit" and event.fragment == 0 and not moved:
      for path in list((workdir / "events").iterdir()):
        moved.add(path.rename(workdir / f"old-{path.name}").name)
    return False

  ran = Ran(soon_over(workdir, endless()), corpus, workdir, stop_after=move)
  assert ran.outcome.reason == "finished" and len(moved) >= 5
  assert {e.role for e in ran.events} >= EVERYBODY and ran.of("commit")


def test_it_goes_on_from_an_older_one_and_the_newest_is_set_aside_and_said(corpus, workdir, capsys):
  newest, older, *_ = storage_of(workdir).committed()
  path = workdir / "checkpoints" / f"{newest:08d}"
  (path / "syncer-1/meta.json").write_text("{")
  saved = {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}

  def saved_again(event) -> bool:
    """Numbers count steps, so that a slow save leaves some out: its own may be one of them."""
    return event.kind == "snapshot" and event.snapshot >= newest

  ran = Ran(endless(), corpus, workdir, stop_after=saved_again)
  assert ran.outcome.reason == "stopped"
  aside = path.with_name(f"{path.name}.aside")
  reads, _, said = capsys.readouterr().out.partition("is being read and checked.")
  assert reads.endswith(f"The newest snapshot in {workdir}, {newest}, "), "gigabytes take minutes"
  assert f"goes on from snapshot {older}. Passed over and set aside: {aside}." in said
  assert saved == {p.relative_to(aside): p.read_bytes() for p in aside.rglob("*") if p.is_file()}
  assert storage_of(workdir).committed()[0] >= newest, "it was saved again"


def test_what_a_run_goes_on_from_is_not_kept_beside_what_it_makes_of_it(
  corpus, workdir, monkeypatch
):
  """Values and momentum of a whole model stayed in memory until the run was over."""
  found, restore_fragments = [], restore.restore_fragments

  def recorded(*arguments):
    found.append(restore_fragments(*arguments))
    return found[-1]

  monkeypatch.setattr(restore, "restore_fragments", recorded)
  Ran(endless(), corpus, workdir, stop_after=lambda e: e.kind == "commit")
  (restored,) = found
  assert restored.snapshot and not restored.fragments


def test_a_learner_that_is_dead_is_gone_when_it_comes_back(corpus, tmp_path, monkeypatch):
  """What the new life reads took as much memory again, beside all that the old one had."""
  lives, kept = [], []

  class Mortal(threads.Learner):
    def __init__(self, *arguments):
      super().__init__(*arguments)
      if self.exchange.state.learner == 0:
        lives.append(weakref.ref(self))

  def left() -> int:
    gc.collect()
    return sum(life() is not None for life in lives)

  def begins(new, *arguments):
    if new.learner == 0:
      with contextlib.suppress(AssertionError):  # threads of the old life may still end
        wait_for(lambda: not left())
      kept.append(left())
    return begin_learner(new, *arguments)

  begin_learner = threads.restore.begin_learner
  monkeypatch.setattr(threads, "Learner", Mortal)
  monkeypatch.setattr(threads.restore, "begin_learner", begins)
  kill = {"action": "kill", "role": "learner-0", "at_step": 20, "seconds": 0.1}
  config = dataclasses.replace(endless(), chaos=from_dict({"chaos": {"faults": (kill,)}}).chaos)
  Ran(config, corpus, tmp_path, stop_after=lambda e: e.kind == "commit" and len(lives) > 1)
  assert len(kept) > 1 and not any(kept)


@pytest.mark.parametrize("spelled", [".", "../run", "inside/.."])
def test_snapshots_elsewhere_that_cannot_be_searched_are_not_overwritten(
  corpus, tmp_path, monkeypatch, spelled
):
  (tmp_path / "run" / "inside").mkdir(parents=True)
  monkeypatch.chdir(tmp_path / "run")
  (tmp_path / "shared").mkdir()
  (tmp_path / "shared" / "run").write_text("no folder")
  config = endless()
  config = dataclasses.replace(config, checkpoint=CheckpointConfig(path=str(tmp_path / "shared")))
  with pytest.raises(ConfigError, match=r"^checkpoint.path = .*is a file.*Fix: "):
    session.train(config, Path(spelled), overwrite=True)


def test_a_workdir_whose_checkpoints_could_not_be_read_is_refused_at_once(tmp_path):
  with pytest.raises(ConfigError, match=r"no path of a checkpoint may have a '\['.* Fix: "):
    session.train(endless(), tmp_path / "run[1]")
  assert not [*tmp_path.iterdir()]


def test_a_result_that_a_link_leads_to_such_a_path_is_refused_before_anything_is_deleted(tmp_path):
  (tmp_path / "run[1]" / "events").mkdir(parents=True)
  (tmp_path / "link").symlink_to(tmp_path / "run[1]")
  claim(tmp_path / "link", endless(), overwrite=False)
  with pytest.raises(ConfigError, match=r"^--workdir = '.*run\[1\].* may have a '\['.* Fix: "):
    session.train(endless(), tmp_path / "link", overwrite=True)
  assert (tmp_path / "link" / "events").exists()


def test_a_run_does_not_go_on_with_other_data(tmp_path, monkeypatch):
  """Other parts would be held out, some of which it has trained on."""
  text = tmp_path / "texts" / "m.txt"
  text.parent.mkdir()
  text.write_text("some words " * 20_000)
  source = {"source": "text", "path": f"{text.parent}/*.txt", "sequence_length": 32}
  config = make_config(learners=2, steps=30, data=source, run={"evaluations": 0})
  begun: list[Path] = []

  def trains(runner, config, workdir, *more) -> int:
    begun.append(workdir)
    return 0

  monkeypatch.setattr(session, "_train", trains)
  for _ in range(2):
    assert session.train(config, tmp_path / "run") == 0
  more = text.with_name("a.txt")
  more.write_text("other words")
  with pytest.raises(ConfigError, match=r"^data.path = .*began with other data.*Fix: bring"):
    session.train(config, tmp_path / "run")
  assert session.train(config, tmp_path / "run", overwrite=True) == 0 and len(begun) == 3


def test_roles_that_are_started_by_hand_note_their_data_and_refuse_others(tmp_path, monkeypatch):
  """They did not look: the order was another one, and other parts were held out."""
  monkeypatch.setattr(data, "_CHECKED_TOKENS", 5)
  fields = {"source": "tokens", "path": f"{tmp_path}/*.bin", "sequence_length": 8}
  config = make_config(learners=2, steps=30, data=fields)
  np.zeros(20_000, np.uint16).tofile(tmp_path / "0.bin")
  for _ in range(2):
    session.refuse_other_data(config, tmp_path, data.open_data(config.data))
  other, more = np.eye(2, 20_000, dtype=np.uint16), np.zeros(20_000, np.uint16)
  ends = {"0.bin": other[0]}, {"0.bin": other[1][::-1]}  # as long, with another beginning or end
  for changed in (*ends, {"0.bin": more, "1.bin": more}):  # the latter as one that is still copied
    for name, ids in changed.items():
      ids.tofile(tmp_path / name)
    with pytest.raises(ConfigError, match=r"^data.path = .*began with other data.*Fix: bring"):
      session.refuse_other_data(config, tmp_path, data.open_data(config.data))


@pytest.fixture
def untrained(monkeypatch):
  """Runs are over when they begin."""
  monkeypatch.setattr(session, "_train", lambda *_: 0)
  monkeypatch.setattr(session, "make_engine", lambda name: lambda *_: io.StringIO())
  monkeypatch.setattr(session, "evaluator", lambda *_: None)


@pytest.mark.usefixtures("untrained")
def test_a_run_that_goes_on_with_another_source_says_so(tmp_path, capsys):
  """It did so in silence, if it was killed before it had a result."""
  kept, changed = tmp_path / "kept.d" / "mine.py", tmp_path / "changed.d" / "mine.py"
  before, after = of_own_model(kept), of_own_model(changed, OWN + "# by now\n")
  for config, is_other in ((before, False), (before, False), (after, True), (after, False)):
    assert session.train(config, tmp_path / "run") == 0
    said = (
      f"WARNING: model.custom = '{changed}:model': its source is not the one with which the run"
    )
    assert (said in capsys.readouterr().err) == is_other


@pytest.mark.usefixtures("untrained")
def test_a_run_that_goes_on_deletes_what_killed_saves_have_left(tmp_path):
  """Each is as large as the model, and no later save would find it."""
  left = [tmp_path / f".result.{'4f3a' * 4}", tmp_path / "islands" / f".learner-1.{'4f3a' * 4}"]
  for _ in range(2):
    assert session.train(make_config(learners=2, steps=30), tmp_path) == 0
    assert not any(each.exists() for each in left)
    for each in left:
      each.mkdir(parents=True)


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
  ("engine", "learners", "devices", "parts"),
  [
    ("threads", 2, 0, True),
    ("threads", 1, 0, False),
    ("threads", 1, 1, True),
    ("ray", 2, 1, False),
  ],
)
def test_islands_are_parts_of_the_devices_of_their_process(
  tmp_path, monkeypatch, engine, learners, devices, parts
):
  told, config = [], make_config(learners=learners, steps=30, run={"evaluator_devices": devices})
  kept_in = lambda folder, parts: told.append(parts) or contextlib.nullcontext()
  monkeypatch.setattr(session, "kept_in", kept_in)
  assert session.train(config, tmp_path / "run", engine=engine) == 0 and told == [parts]


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("rate", [1.0, 3e-4, 0.0])
def test_an_optimizer_with_a_learning_rate_of_its_own_is_named(rate, tmp_path, capsys):
  """It trained a thousand times too slowly, in silence. At a rate of 0 a warm-up may begin."""
  (tmp_path / "mine.py").write_text(f"import optax\ndef inner(config): return optax.adam({rate})\n")
  inner = {"custom": f"{tmp_path}/mine.py:inner", "learning_rate": 0.004}
  config = make_config(learners=2, steps=30, inner=inner)
  assert session.train(config, tmp_path / "run") == 0
  said = "its first update of a gradient of 1 is 0.0003. Fix: give it a learning rate of 1: inner."
  assert (said in capsys.readouterr().err) == (0 < rate < 1)


def test_to_overwrite_begins_anew(corpus, workdir, capsys):
  shutil.rmtree(workdir / "checkpoints")
  config = make_config(learners=2, steps=30, sync={"snapshot_steps": 40}, run={"evaluations": 0})
  claim(workdir, config, overwrite=True)
  assert Ran(config, corpus, workdir).outcome.reason == "finished"
  assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
  "sync, why",
  [
    ({"snapshot_steps": 10**6}, "it was ended before its first snapshot was complete"),
    ({"snapshot_steps": 0}, "sync.snapshot_steps = 0 makes no snapshots"),
  ],
)
def test_a_run_ended_before_its_first_snapshot_begins_again_and_says_so(
  corpus, tmp_path, capsys, sync, why
):
  """As after a kill in minute two: the same command works, and does not say that it goes on."""
  ran = Ran(endless(**sync), corpus, tmp_path, stop_after=lambda e: e.kind == "commit")
  assert ran.of("commit") and capsys.readouterr().out == ""
  again = Ran(soon_over(tmp_path, endless(**sync)), corpus, tmp_path)
  assert again.outcome.reason == "finished"
  said = capsys.readouterr().out
  assert f"begins again from its initial values: {why}" in said and "goes on" not in said


# --- a single shard -------------------------------------------------------------------------------


def shard(*fragments) -> SyncerState:
  """Of (fragment, version, whether a round is under way)."""
  current = Round(7, 1, 0.0, (0,), 0.1, 0.0, 0, 0.0, 1.0)
  under_way = {i: current for i, (_, _, going) in enumerate(fragments) if going}
  states = tuple(FragmentState(p, version) for p, version, _ in fragments)
  return replace(syncer.init(0, 1, (), SyncConfig(), 100), fragments=states, under_way=under_way)


def test_a_shard_with_nothing_asks_and_waits_but_begins_no_round_from_nothing():
  unfounded = Unfounded((0, 2), "its run has snapshots, and none can be read.")
  assert unfounded.empty(shard((0, 0, False), (2, 0, False), (4, 0, False))) == [0, 2]
  assert not unfounded.refusal(shard((0, 0, False), (2, 0, False), (4, 5, True)))
  given_back = shard((0, 9, True), (2, 0, False))
  assert unfounded.empty(given_back) == [2] and not unfounded.refusal(given_back)
  said = unfounded.refusal(shard((0, 9, True), (2, 0, True)))
  assert "fragments [2] anew" in said and "none can be read. Fix: " in said
  assert not Unfounded((), "").refusal(shard((0, 0, True))), "a new run begins with nothing"


def test_of_a_log_that_cannot_be_read_nothing_is_concluded(workdir, monkeypatch):
  monkeypatch.setattr(
    restore,
    "newest_event",
    mock.Mock(side_effect=PermissionError(13, "Permission denied", "syncer-0.jsonl")),
  )
  text = restore.lost_snapshots(endless(), workdir, storage_of(workdir), [])
  assert "its events, which would tell" in text and "syncer-0.jsonl" in text


def test_a_log_that_cannot_be_read_does_not_end_a_run_that_begins_again(tmp_path, capsys):
  """Of it only depends what is said."""
  (tmp_path / "events" / "learner-0.jsonl").mkdir(parents=True)
  restore.go_on(endless(), tmp_path, storage_of(tmp_path), None, [])
  assert "begins again from its initial values" in capsys.readouterr().out


def test_of_two_runs_with_one_folder_of_snapshots_one_trains_at_a_time(tmp_path):
  """The second went on from the first one's snapshots, and both wrote into them."""
  path, name = str(tmp_path / "shared"), r"with its snapshots in .*/shared/run\. Fix: give"
  config = make_config(checkpoint={"path": path})
  with held(tmp_path / "a" / "run", path):
    with pytest.raises(ConfigError, match=rf"^checkpoint\.path = '{path}': .*{name}"):
      session.train(config, tmp_path / "b" / "run")
    with held(tmp_path / "b" / "another", path), held(tmp_path / "b" / "run", "gs://shared"):
      assert not (tmp_path / "b" / "run" / "config.json").exists()
  (tmp_path / "file").touch()
  with held(tmp_path / "a" / "run", path), held(tmp_path / "b" / "run", f"{tmp_path}/file"):
    pass  # it is free again; and where no lock can be, saving says what is wrong


def test_to_overwrite_is_refused_where_snapshots_outside_the_workdir_would_stay(
  workdir, monkeypatch
):
  """The new run would go on from them."""
  monkeypatch.setattr(session, "make_engine", lambda _: pytest.fail("it begins"))
  shared = workdir.with_name("shared")
  shared.mkdir()
  (workdir / "checkpoints").rename(shared / "run")
  config = dataclasses.replace(endless(), checkpoint=CheckpointConfig(path=str(shared)))
  said = rf"^checkpoint\.path = '{shared}': has snapshots of 'run', .*Fix: choose another path"
  with pytest.raises(ConfigError, match=said):
    session.train(config, workdir, overwrite=True)
  assert (workdir / "events").exists()


# --- the result of a run that was stopped early ---------------------------------------------------


def test_a_run_stopped_before_its_evaluator_had_the_model_leaves_that_of_the_newest_snapshot(
  corpus, workdir, capsys
):
  """And not the initial values, in place of a better result that is there."""
  config = endless()
  engine = ProcessesEngine(config, workdir, corpus, lambda params: {"loss": 0.0})
  found, merged_tokens = engine._newest_params()
  newest = restore.newest_global_step(storage_of(workdir))
  assert f"that of snapshot {newest} is being read." in capsys.readouterr().out, "it may take long"
  plan = initial.make_plan(config)
  restored = restore.restore_fragments(storage_of(workdir), range(len(plan.fragments)))
  values = {p: c.value for p, c in restored.fragments.items()}
  expected = initial.Assembled(plan, config, values)
  assert merged_tokens == min(c.state.merged_tokens for c in restored.fragments.values()) > 0
  assert {n: v.tobytes() for n, v in found.items()} == {n: v.tobytes() for n, v in expected.items()}
  assert engine._outcome("stopped").lost == ""
  engine._global_step = 10**6
  assert engine._outcome("stopped").lost.startswith("evaluator: it never had the whole model")
  shutil.rmtree(workdir / "checkpoints")
  first, merged_tokens = engine._newest_params()
  assert {n: v.tobytes() for n, v in first.items()} != {n: v.tobytes() for n, v in found.items()}
  assert first.keys() == initial.initial_params(config).keys() and not merged_tokens


@pytest.mark.parametrize("phase", ["up", "left", "down"])
def test_the_model_of_an_evaluator_that_has_died_is_no_result(corpus, workdir, monkeypatch, phase):
  """It was the result of a run that was stopped before the next one was there, and nothing said
  how old it was."""
  engine, joined = ProcessesEngine(endless(), workdir, corpus, None), SimpleNamespace(joined=True)
  engine._plan()
  roles = {**engine._state.roles, "evaluator": supervisor.Role(phase)}
  engine._state, engine._evaluated = replace(engine._state, roles=roles), joined
  monkeypatch.setattr(engine, "_take_turns", lambda over, seconds: over())
  engine._dismiss("syncer-")
  assert engine._evaluated is joined, "a snapshot has the end"
  engine._global_step += 1
  engine._dismiss("syncer-")
  assert engine._evaluated is (None if phase == "down" else joined)


def test_a_run_that_goes_on_and_is_stopped_at_once_leaves_the_result_as_it_is(
  corpus, workdir, capsys
):
  """Its newest snapshot is from before its end."""
  config = soon_over(workdir, endless())
  first = Ran(config, corpus, workdir)
  assert first.outcome.reason == "finished"
  session.conclude(config, workdir, first.outcome, None)
  result, longer = session.load_result(workdir, config), endless()
  again = Ran(longer, corpus, workdir, stop_after=lambda event: event.kind == "started")
  assert 0 < again.outcome.merged_tokens < first.outcome.merged_tokens
  session.conclude(longer, workdir, again.outcome, None)
  assert f"has seen {first.outcome.merged_tokens:,}" in capsys.readouterr().out
  for name, value in session.load_result(workdir, longer).items():
    assert value.tobytes() == result[name].tobytes()


@pytest.mark.parametrize(
  ("reason", "error"), [("stopped", KeyboardInterrupt), ("failed", RuntimeError)]
)
def test_islands_alone_that_do_not_reach_their_end_are_no_comparison(
  tmp_path, monkeypatch, reason, error
):
  began: list[Config] = []

  class Ends:
    def __init__(self, config, *_):
      began.append(config)

    def run(self, _) -> RunResult:
      return RunResult(reason, {}, {0: {}}, why="none is left")

  monkeypatch.setattr("ddiloco.engines.threads.ThreadsEngine", Ends)
  kill, several = Fault("kill", "learner-0", at_step=1), {"devices": 2, "hosts": 2}
  islands = dataclasses.replace(endless().islands, **several, overrides={"1": several})
  config = dataclasses.replace(endless(), chaos=ChaosConfig(faults=(kill,)), islands=islands)
  heldout = SimpleNamespace(measure=None, loss=lambda tree: 1.0)
  with pytest.raises(error):
    session._train_alone(config, tmp_path, None, heldout, None, 7)
  (alone,) = began
  assert (alone.sync.num_shards, alone.chaos.faults, alone.planned_steps()) == (0, (), 7)
  each = [alone.islands.island(m) for m in range(2)]  # this process has no other hosts
  assert [(island.hosts, island.devices) for island in each] == [(1, 2)] * 2


def test_a_run_that_is_interrupted_while_it_begins_leaves_no_thread(tmp_path):
  """In a notebook each of them left the thread that writes TensorBoard's files."""
  run = mock.Mock(side_effect=KeyboardInterrupt)
  with ended_threads(1.0), pytest.raises(KeyboardInterrupt):
    runner = SimpleNamespace(leave=threading.Event(), run=run)
    session._train(runner, endless(), tmp_path, None, None, threading.Event())
