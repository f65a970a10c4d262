"""Single roles: what they say and how they end; then a run put together by hand, of real ones."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import socket
import sys
import time
import types
import unittest.mock
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from ddiloco import workdir
from ddiloco.chaos import ask_for
from ddiloco.checkpoint.restore import Unfounded
from ddiloco.config import Config, ConfigError, Fault, from_dict
from ddiloco.core.delta import Committed
from ddiloco.core.fragments import owned_by
from ddiloco.engines import session, single_roles
from ddiloco.engines.children import Child, spawn_forked
from ddiloco.engines.processes import free_urls
from ddiloco.engines.role_process import FINISHED, LOST, Ended, connect
from ddiloco.engines.role_spec import RoleSpec
from ddiloco.engines.single_roles import run_syncer
from ddiloco.network.frames import seconds_since_2020
from ddiloco.observe.guards import exited
from ddiloco.observe.run_state import RunState
from ddiloco.protocol import learner, syncer
from ddiloco.protocol.actions import Received
from ddiloco.protocol.messages import EVALUATOR, NOTHING, FragmentState, Goodbye, Moments
from ddiloco.protocol.values import replace
from ddiloco.roles import initial
from ddiloco.training import data
from tests import says
from tests.engines.real import RealRun, events_of, tiny
from tests.made_events import made
from tests.waits import PATIENCE_SECONDS, wait_for
from tests.web import ask

CONFIG = from_dict({"sync": {"num_shards": 2, "num_fragments": 4, "min_quorum": 3}})
UP = {"syncer-0": {"state": "up"}, "syncer-1": {"state": "up"}}


def state(versions=(0, 0, 0, 0), tokens=0, merged=0):
  fresh = learner.init(3, 5, (0, 1, 0, 1), CONFIG.run.total_tokens)
  fragments = tuple(
    replace(f, version=v, fresh=v >= 0, tokens=tokens, merged_tokens=merged)
    for f, v in zip(fresh.fragments, versions)
  )
  return replace(fresh, fragments=fragments, trained_tokens=100)


def test_a_role_says_that_it_makes_initial_values(monkeypatch):
  """Of 12 billion parameters that takes minutes, when it seemed to wait for other roles."""
  runner, before = types.SimpleNamespace(config=1, plan=2), lambda: "has 0 of 4 fragments"
  made = lambda *given: (given, runner.ready())
  runner.ready = before
  monkeypatch.setattr(initial, "initial_values", made)
  assert single_roles._make(runner) == ((1, 2), "the initial values, which it makes")
  assert runner.ready is before


def test_what_a_joining_role_waits_for():
  assert single_roles._joining(state(), UP, CONFIG) == ""
  waits = single_roles._joining(state((0, -1, 0, -1)), UP, CONFIG)
  assert waits.startswith("has 2 of 4 fragments (a shard gives out its own once it serves them")
  assert "sync.min_quorum = 3 learners" in waits
  links = {**UP, "syncer-1": {"state": "refused", "reason": "its key is not listed"}}
  waits = single_roles._joining(state((0, -1, 0, -1)), links, CONFIG)
  assert waits == "syncer-1 is refused (its key is not listed)"
  assert single_roles._joining(state(), links, CONFIG) == "", "once joined it goes on without"
  stale = tuple(replace(f, fresh=False) for f in state().fragments)
  back = replace(state(), fragments=stale)
  assert single_roles._joining(back, UP, CONFIG).startswith("is back; 0 of 4 fragments")
  waits = single_roles._joining(replace(state(), wants=(1, 3)), UP, CONFIG)
  assert waits == "waits for a peer's moments of fragments [1, 3]"


def test_a_shard_that_has_too_few_learners_for_a_round_says_so():
  """Its versions stood still, and no line said why."""
  shard = syncer.init(0, 1, (FragmentState(0, 3),), CONFIG.sync, CONFIG.run.total_tokens)
  role = types.SimpleNamespace(state=shard)
  for m, more in ((0, ", and a round needs 3"), (1, ", and a round needs 3"), (2, "")):
    role.state, _ = syncer.syncer_on(role.state, Received(says.hello(m, 0, (NOTHING,)), 1.0))
    here = list(range(m + 1))
    said = f"0% merged, fragments at versions 3 to 3; {m + 1} learners {here}{more}"
    assert single_roles._served(role, CONFIG) == said


def test_an_evaluator_that_trains_nothing_does_not_count_its_tokens():
  follows = replace(state(), trained_tokens=0, global_step=7)
  assert single_roles._trained(follows, CONFIG) == "global step 7; 0% of the run is merged"
  assert ", 100 tokens trained here; 0%" in single_roles._trained(state(), CONFIG)


def test_a_role_says_the_share_of_the_run_that_the_page_shows():
  """Of four fragments two are complete, one of them far beyond the end, and one has nothing."""
  total = CONFIG.run.total_tokens
  tokens = (total, 3 * total, total // 2, 0)
  mine = (replace(f, merged_tokens=each) for f, each in zip(state().fragments, tokens))
  said = single_roles._trained(replace(state(), fragments=tuple(mine)), CONFIG)
  assert "; 63% of the run is merged" in said
  owned = tuple(FragmentState(p, 3, merged_tokens=each) for p, each in enumerate(tokens))
  shard = syncer.init(0, 1, owned, CONFIG.sync, total)
  role = types.SimpleNamespace(state=shard)
  assert single_roles._served(role, CONFIG).startswith("63% merged")
  page = RunState(CONFIG)
  for p, each in enumerate(tokens):
    page.add(made(1.0, "syncer-0", "owns", fragment=p, merged_tokens=each))
  assert page.progress == 0.625


class Opened(Exception):
  """What a role reads its data from."""


def read(*arguments):
  """Stands in for what reads the data."""
  raise Opened(next(each for each in arguments if each != CONFIG))


class Said:
  config = CONFIG

  def __init__(self):
    self.lines = []

  def say(self, text):
    self.lines.append(text)


@pytest.mark.parametrize(
  "tokens, merged, status",
  [(0, 0, FINISHED), (7, 0, LOST), (7, CONFIG.run.total_tokens, FINISHED)],
)
def test_what_is_not_merged_in_the_middle_of_a_run_is_lost(tokens, merged, status):
  said = Said()
  assert single_roles._left(said, state(tokens=tokens, merged=merged)) == status
  (line,) = said.lines
  assert ("7 of its 100 tokens were not merged" in line) == (status == LOST)
  assert ("nothing is lost" in line) == (status == FINISHED)


BOTH = "tcp://127.0.0.1:7000", "tcp://127.0.0.1:7002"


def test_places_that_cannot_work(tmp_path):
  place = RoleSpec(tmp_path / "run", "run", ("tcp://127.0.0.1:7000",))
  with pytest.raises(ConfigError, match=r"names 1 shards, the config has sync.num_shards = 2"):
    single_roles.run_learner(CONFIG, 0, place)
  with pytest.raises(ConfigError, match=r"--shard = 2: .*Fix: use 0 to 1"):
    run_syncer(CONFIG, 2, dataclasses.replace(place, syncers=BOTH))
  with pytest.raises(ConfigError, match=r"--syncers = .*: names one url twice. Fix: "):
    run_syncer(CONFIG, 0, dataclasses.replace(place, syncers=place.syncers * 2))
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_role_of_a_finished_run_says_so_at_once(tmp_path, capsys, hosts):
  """It compiled, and then looked for shards until network.give_up_seconds."""
  islands = dataclasses.replace(CONFIG.islands, hosts=hosts, devices=hosts)
  config = dataclasses.replace(CONFIG, islands=islands)
  workdir.join(tmp_path, config)
  (tmp_path / "outcome.json").write_text(json.dumps({"reason": "finished", "seconds": 1.0}))
  place = RoleSpec(tmp_path, "run", BOTH)
  for host in range(hosts):
    mine = dataclasses.replace(place, host=host, hosts="tcp://127.0.0.1:7001" if hosts > 1 else "")
    assert single_roles.run_learner(config, 3, mine) == FINISHED
    assert "learner-3: ends: the run in --workdir=" in capsys.readouterr().out
  for shard in range(2):  # it waited for learners, which have ended, for ever
    assert run_syncer(config, shard, place) == FINISHED
    assert f"syncer-{shard}: ends: the run in --workdir=" in capsys.readouterr().out
  # Also an evaluator: the run's shards may be gone.
  assert single_roles.run_evaluator(config, place) == FINISHED
  assert "evaluator: ends: the run in --workdir=" in capsys.readouterr().out
  with pytest.raises(ConfigError, match=r"^seed = 7: "):
    single_roles.run_learner(dataclasses.replace(config, seed=7), 3, mine)


def test_an_evaluator_that_is_started_again_says_goodbye_to_a_shard_that_did_not_hear_it(tmp_path):
  """The shard shares no workdir: it said to start the evaluator, which ended without a word."""
  workdir.join(tmp_path, CONFIG)
  (tmp_path / "outcome.json").write_text(json.dumps({"reason": "finished", "seconds": 1.0}))
  place = RoleSpec(tmp_path, "run", tuple(free_urls(2)))
  serves = dataclasses.replace(place, bind=place.syncers[1])
  plan, now = initial.make_plan(CONFIG), seconds_since_2020()
  with contextlib.closing(connect(CONFIG, plan, serves, "syncer-1", now, None)) as shard:
    assert single_roles.run_evaluator(CONFIG, place) == FINISHED
    assert isinstance(shard.receive(PATIENCE_SECONDS).message, Goodbye)


def test_an_evaluator_that_was_killed_while_it_measured_the_end_leaves_the_report(
  tmp_path, monkeypatch, capsys
):
  """The run was over without one."""
  monkeypatch.setattr("ddiloco.observe.report._draw", lambda *_: None)
  monkeypatch.setattr(
    initial, "initial_params", lambda _: pytest.fail("of memory there may be none")
  )
  run = dataclasses.replace(CONFIG.run, sample_tokens=0)
  config = dataclasses.replace(CONFIG, run=run)
  workdir.join(tmp_path, config)
  over = {"reason": "finished", "total_tokens": config.run.total_tokens}
  session.write_outcome(tmp_path, over)
  place = RoleSpec(tmp_path, "run", tuple(free_urls(2)))
  for _ in range(2):
    assert single_roles.run_evaluator(config, place) == FINISHED
    assert (tmp_path / "report" / "index.html").exists()
    known = workdir.outcome(tmp_path)
    assert over.items() <= known.items() and known["seconds"] >= 0 and "left_out" not in known
    monkeypatch.setattr(session, "conclude", read)
  assert capsys.readouterr().out.count("`ddiloco evaluate` prints the result's loss") == 1


def test_the_moments_of_an_optimizer_with_more_of_them_than_adam_reach_their_shard(tmp_path):
  """Adan has four. A donor lost its connection, with the pushes on it, whenever it was asked."""
  place, now = RoleSpec(tmp_path, "run", tuple(free_urls(2))), seconds_since_2020()
  serves = dataclasses.replace(place, bind=place.syncers[0])
  peer = dataclasses.replace(CONFIG.checkpoint, rejoin="peer")
  config, plan = dataclasses.replace(CONFIG, checkpoint=peer), initial.make_plan(CONFIG)
  payload = np.zeros(5 * 4 * max(plan.sizes), np.uint8)
  given = Moments(0, now, fragment=0, donation=1, count=0, payload=payload)
  shard = connect(config, plan, serves, "syncer-0", now, None)
  donor = connect(config, plan, place, "learner-0", now, None)
  with contextlib.closing(shard), contextlib.closing(donor):
    donor.send("syncer-0", given)
    assert len(shard.receive(PATIENCE_SECONDS).message.payload) == len(payload)


def test_a_shard_of_a_finished_run_that_is_given_more_tokens_serves_it(tmp_path, monkeypatch):
  workdir.join(tmp_path, CONFIG)
  (tmp_path / "outcome.json").write_text(json.dumps({"reason": "finished"}))
  run = dataclasses.replace(CONFIG.run, total_tokens=CONFIG.run.total_tokens + 1)
  monkeypatch.setattr(single_roles, "_syncer", lambda runner, shard: LOST)
  place = RoleSpec(tmp_path, "run", tuple(free_urls(2)), bind="tcp://127.0.0.1:0")
  assert run_syncer(dataclasses.replace(CONFIG, run=run), 0, place) == LOST, "it has begun"
  assert not (tmp_path / "outcome.json").exists()


def test_an_evaluator_that_could_not_save_the_result_is_refused_at_once(tmp_path, monkeypatch):
  """It noticed at the end of the run."""
  monkeypatch.setattr(
    "ddiloco.workdir.tempfile.TemporaryFile",
    mock.Mock(side_effect=OSError(errno.EROFS, "Read-only file system")),
  )
  runner = types.SimpleNamespace(config=CONFIG, place=RoleSpec(tmp_path, "run", ()))
  with pytest.raises(ConfigError, match=r"--workdir = .*cannot be written .*Read-only.*Fix: "):
    single_roles._evaluator(runner, None)


def test_an_evaluator_whose_result_could_not_be_read_is_refused_before_it_says_anything(tmp_path):
  runner = types.SimpleNamespace(config=CONFIG, place=RoleSpec(tmp_path / "run*", "run", ()))
  (tmp_path / "run*").mkdir()
  (tmp_path / "run*" / "outcome.json").write_text("{}")
  with pytest.raises(ConfigError, match=r"^--workdir = .* may have a '\*'\. Fix: "):
    single_roles._evaluator(runner, None)
  assert (tmp_path / "run*" / "outcome.json").exists()


def test_an_evaluator_that_comes_back_says_that_the_run_goes_on(tmp_path, monkeypatch):
  """Dashboard and profile took the run for over, since an evaluator before this one was stopped."""
  file = tmp_path / "outcome.json"
  file.write_text(json.dumps({"reason": "stopped"}))
  monkeypatch.setattr(session, "evaluator", read)
  runner = unittest.mock.MagicMock(config=CONFIG, place=RoleSpec(tmp_path, "run", ()))
  with pytest.raises(Opened):
    single_roles._evaluator(runner, "open")
  assert not file.exists()


@pytest.mark.parametrize("full_for, leaves", [(2, True), (10**6, False)])
def test_an_evaluator_saves_the_final_model_once_there_is_room_and_else_its_shards_keep_it(
  tmp_path, monkeypatch, full_for, leaves
):
  """It left the shards, which ended, and only then waited for room."""
  tried: list[str] = []

  def save_result(*_) -> None:
    tried.append("")
    if len(tried) <= full_for:
      raise OSError(errno.ENOSPC, "No space left on device")

  class Ends:
    finished, saved, final_loss = True, False, None
    exchange = types.SimpleNamespace(state=types.SimpleNamespace(joined=True, merged_tokens=7))
    store = types.SimpleNamespace(params=dict)

    def __init__(self, *_, save):
      self._save = save

    def run(self, stopped) -> None:
      with contextlib.suppress(OSError):
        self._save({}, 7)
        self.saved = True
        assert not stopped(), "while it measures, shards may be gone"

  monkeypatch.setattr("ddiloco.roles.evaluator.Evaluator", Ends)
  monkeypatch.setattr("ddiloco.engines.engine.save_result", save_result)
  monkeypatch.setattr(session, "evaluator", lambda *_: types.SimpleNamespace(measure=0, loss=0))
  monkeypatch.setattr(session, "conclude", lambda *_, **__: tried.append("concluded"))
  runner = unittest.mock.MagicMock(config=CONFIG)
  runner.place = RoleSpec(tmp_path, "run", ())
  runner.stopped.side_effect = Ended("has reached no shard for 300 s")
  runner.stop.is_set = lambda: False
  runner.stop.wait = lambda seconds: len(tried) > 5  # then it is asked to end
  ends = pytest.raises(Ended, match=r"which the shards keep\. Fix: ")
  with contextlib.nullcontext() if leaves else ends:
    assert single_roles._evaluator(runner, "open") == FINISHED
  assert (tried[-1] == "concluded") == leaves and len(tried) == (4 if leaves else 6)
  # It may die while it measures: its next life could not reach the shards, which have ended.
  over = {"reason": "finished", "total_tokens": CONFIG.run.total_tokens}
  assert workdir.outcome(tmp_path) == (over if leaves else {})


def test_an_evaluator_that_is_asked_to_end_before_it_has_the_model_loses_nothing(
  tmp_path, monkeypatch
):
  """Its exit status said that work was lost: of Kubernetes it took one of its restarts."""

  class Asked:
    finished = saved = False
    exchange = types.SimpleNamespace(state=types.SimpleNamespace(joined=False))

    def __init__(self, *_, save):
      return

    def run(self, stopped) -> None:
      return

  monkeypatch.setattr("ddiloco.roles.evaluator.Evaluator", Asked)
  monkeypatch.setattr(session, "evaluator", lambda *_: types.SimpleNamespace(measure=0, loss=0))
  runner = unittest.mock.MagicMock(config=CONFIG)
  runner.place = RoleSpec(tmp_path, "run", ())
  assert single_roles._evaluator(runner, "open") == FINISHED
  assert "there is no result" in runner.say.call_args.args[0]
  assert not workdir.outcome(tmp_path)


@pytest.mark.parametrize("evaluator", ["is here", "is silent", "was never here", "has saved it"])
def test_a_final_model_that_no_evaluator_has_saved_is_lost(evaluator):
  said, lost = Said(), evaluator in ("is silent", "was never here")
  status = LOST if lost else FINISHED
  fragment = FragmentState(0, 3, merged_tokens=CONFIG.run.total_tokens, last_round=2)
  shard = syncer.init(0, 1, (fragment,), CONFIG.sync, CONFIG.run.total_tokens)
  if evaluator != "was never here":
    shard, _ = syncer.syncer_on(shard, Received(says.hello(EVALUATOR, 0, (NOTHING,)), 1.0))
  if evaluator == "is silent":
    shard = shard.with_member(EVALUATOR, lost=True)
  if evaluator == "has saved it":
    shard, _ = syncer.syncer_on(shard, Received(Goodbye(EVALUATOR, 0), 1.0))
  role = types.SimpleNamespace(state=shard, lost={}, replication=None)
  assert ("evaluator" in single_roles._untaken(role)) == lost
  assert single_roles._shard_status(said, role) == status
  assert any("Fix: start all roles again" in line for line in said.lines) == lost


def test_a_shard_that_is_back_with_a_complete_run_waits_for_the_evaluator(monkeypatch):
  """It ended when none had come for network.give_up_seconds: nobody ever got the model."""
  fragment = FragmentState(0, 3, merged_tokens=CONFIG.run.total_tokens, last_round=2)
  target, now = CONFIG.run.total_tokens, time.monotonic()
  shard = syncer.init(0, 1, (fragment,), CONFIG.sync, target, recovery_deadline=now)
  role = types.SimpleNamespace(state=shard, idle=True)
  runner = types.SimpleNamespace(config=CONFIG, stopped=lambda: False)
  over = single_roles._over(runner, role, Unfounded((), ""))
  assert not over()
  with monkeypatch.context() as later:
    later.setattr(single_roles.time, "monotonic", lambda: now + 1e6)
    assert not over()
  hello, gone = says.hello(EVALUATOR, 0, (NOTHING,)), Goodbye(EVALUATOR, 0)
  role.state, _ = syncer.syncer_on(shard, Received(hello, time.monotonic()))
  assert not over(), "it is here"
  role.state, _ = syncer.syncer_on(role.state, Received(gone, time.monotonic()))
  assert over(), "it has the model"


@pytest.mark.parametrize("role", ["learner", "evaluator"])
def test_data_that_are_open_already_are_not_opened_again(tmp_path, monkeypatch, role):
  """Text was tokenized twice."""
  monkeypatch.setattr(data, "open_data", lambda _: "opened again")
  monkeypatch.setattr(data, "Stream", read)
  monkeypatch.setattr(session, "evaluator", read)
  island = types.SimpleNamespace(rows=None)
  monkeypatch.setattr("ddiloco.training.island.Island", lambda *_: island)
  place = RoleSpec(tmp_path, "run", ())
  runner = unittest.mock.MagicMock(config=CONFIG, place=place, plan=None)
  run = {
    "learner": lambda corpus: single_roles._train(runner, 0, corpus, None),
    "evaluator": lambda corpus: single_roles._evaluator(runner, corpus),
  }[role]
  for corpus, opened in (("open", "open"), (None, "opened again")):
    with pytest.raises(Opened, match=f"^{opened}$"):
      run(corpus)


def test_a_port_that_is_really_taken_is_one_line_with_the_fix(tmp_path):
  urls = free_urls(2)
  port = int(urls[0].rpartition(":")[2])
  flags = "--shard=0", f"--syncers={','.join(urls)}", f"--bind={urls[0]}"
  with (
    socket.create_server(("127.0.0.1", port)),
    RealRun(tmp_path, tiny(10), "syncer", *flags) as run,
  ):
    assert run.ends() == LOST
  said = run.said()
  assert "Traceback" not in said, said
  (line,) = [line for line in said.splitlines() if "cannot listen" in line]
  assert urls[0] in line and "already in use" in line and str(port) in line
  assert "Fix: end the process that has it, or choose another --bind" in line


class ByHand(contextlib.ExitStack):
  """Roles started one by one; none outlives the block.

  They are forked from a process that has imported everything: `real.RealRun` starts from nothing.
  """

  def __init__(self, folder: Path, config: Config):
    super().__init__()
    self.workdir, self.children = folder / "run", {}
    self.urls = free_urls(config.sync.num_shards)
    file = folder / "config.json"
    file.write_text(config.to_json())
    where = f"--config={file}", f"--workdir={self.workdir}"
    self._common = (*where, f"--syncers={','.join(self.urls)}")

  def start(self, name: str, *arguments: str) -> tuple[Child, Path]:
    child = self.children[name] = Child(name, self.workdir.parent, [spawn_forked])
    self.callback(child.kill)
    child.start([[sys.executable, "-m", "ddiloco", *arguments, *self._common]])
    return child, child.log

  def ended(self, name: str) -> tuple[int | None, str]:
    child = self.children[name]
    return exited(child.poll, PATIENCE_SECONDS, name), child.log.read_text()

  def end_well(self, *names: str) -> None:
    for name in names:
      status, said = self.ended(name)
      assert status == 0, f"{name}:\n{said}"


@pytest.mark.slow
def test_a_run_put_together_by_hand(tmp_path):
  """A learner nobody planned joins late; its own successor fences it, and leaves in good order.

  Learner 0 goes on all the while; it, the shards and the evaluator end by themselves.
  """
  # Steps are slow until two processes have come and gone, one after the other.
  run = ByHand(tmp_path, tiny(700, learners=1, min_step_seconds=0.01))
  workdir, ended = run.workdir, run.ended

  def slower(factor) -> None:
    for name in ("learner-0", "learner-7"):
      ask_for(workdir, Fault("slow", name, at_seconds=0.0, seconds=1e6, factor=factor))

  with run:
    for s, url in enumerate(run.urls):
      run.start(f"syncer-{s}", "syncer", f"--shard={s}", f"--bind={url}")
    run.start("evaluator", "evaluator")
    zero, log = run.start("zero", "learner", "--learner=0", "--cpu", "--http=127.0.0.1:0")
    wait_for(lambda: events_of(workdir, "started", "learner-0"), "a start of 0", zero, log)
    slower(40.0)
    first, said = run.start("first", "learner", "--learner=7", "--cpu")
    assert "learner-0: has its devices: 1 x cpu" in log.read_text()
    wait_for(lambda: events_of(workdir, "commit"), "the first commit", zero, log)
    url = log.read_text().split("probes at ")[1].split()[0]
    wait_for(lambda: ask(url, "/readyz")[0] == 200, "readiness of 0", zero, log)

    log = said
    wait_for(lambda: events_of(workdir, "push", "learner-7"), "a push of 7", first, log)
    second, log = run.start("second", "learner", "--learner=7", "--cpu")
    assert ended("first")[0] == 1
    assert "may not speak any more" in ended("first")[1]
    incarnation = max(e.incarnation for e in events_of(workdir, "started", "learner-7"))
    wait_for(
      lambda: [e for e in events_of(workdir, "push", "learner-7") if e.incarnation == incarnation],
      "a push of its successor",
      second,
      log,
    )
    second.terminate()
    assert ended("second")[0] == 0, ended("second")[1]
    assert "nothing is lost" in ended("second")[1]
    assert zero.poll() is None, "the run goes on"
    slower(1.0)

    run.end_well("zero", "evaluator", "syncer-0", "syncer-1")
  merged = {m for e in events_of(workdir, "commit") for m in e.weights}
  assert merged == {0, 7}
  assert sum(e.blocked_seconds for e in events_of(workdir, "step", "learner-0")) == 0
  outcome = json.loads((workdir / "outcome.json").read_text())
  assert outcome["reason"] == "finished"
  assert outcome["loss_merged"] < outcome["loss_untrained"] - 0.5
  assert (workdir / "result").is_dir() and (workdir / "report" / "index.html").exists()


@pytest.mark.slow
def test_an_evaluator_that_comes_back_after_the_end_gets_the_model(tmp_path):
  """Its shards had ended by then, with status 0, and the model with them: at once if it had been
  asked to end, as by the scheduler of its machine, else after network.give_up_seconds."""
  network = {"silence_seconds": 1.5, "hello_seconds": 0.1, "give_up_seconds": 5.0}
  sync = {"num_shards": 1}
  run = ByHand(tmp_path, tiny(100, learners=1, min_step_seconds=0.06, network=network, sync=sync))
  workdir = run.workdir
  patient = "--config.network.give_up_seconds=60"  # with a shard that a busy machine keeps waiting

  with run:
    shard, shard_log = run.start("syncer", "syncer", "--shard=0", f"--bind={run.urls[0]}")
    wait_for(lambda: events_of(workdir, "started", "syncer-0"), "the shard", shard, shard_log)
    evaluator, log = run.start("evaluator", "evaluator", patient)
    run.start("learner", "learner", "--learner=0", "--cpu", patient)
    wait_for(lambda: events_of(workdir, "joined", "evaluator"), "the evaluator", evaluator, log)
    evaluator.terminate()
    run.end_well("evaluator", "learner")
    waits = "waits: the evaluator, which has not saved the final model"
    wait_for(lambda: waits in shard_log.read_text(), "the shard to wait", shard, shard_log)
    run.start("again", "evaluator", patient)
    run.end_well("again", "syncer")
  assert json.loads((workdir / "outcome.json").read_text())["reason"] == "finished"
  assert (workdir / "result").is_dir()


def test_a_restarted_shard_settles_also_with_all_of_its_buddys_copies(tmp_path, monkeypatch):
  """The buddy may have been cut off from it while it went on: learners have newer values then."""
  plan = initial.make_plan(CONFIG)
  owned = owned_by(0, CONFIG.sync.num_shards, CONFIG.sync.num_fragments)
  copies = {}
  for p in owned:
    value = np.zeros(plan.fragments[p].size, np.float32)
    copies[p] = Committed(
      FragmentState(p, version=3, last_round=7, global_step=9), value, value, None
    )
  monkeypatch.setattr(single_roles, "_ask_buddy", lambda *_: copies)
  runner = types.SimpleNamespace(
    config=CONFIG,
    plan=plan,
    place=RoleSpec(tmp_path, "run", ()),
    storage=None,
    started=time.time() - 100,
    incarnation=seconds_since_2020(),
    recorder=types.SimpleNamespace(role="syncer-0"),
    say=lambda text: None,
  )
  began = time.monotonic()
  _, state, _ = single_roles._recover(runner, 0, None, owned)
  patience = single_roles.RECOVERY_HELLOS * CONFIG.network.hello_seconds
  assert began + patience <= state.recovery_deadline <= time.monotonic() + patience
  assert (state.global_step, state.fragments[0].version) == (9, 3)
  assert state.beliefs.reach_at <= began - 99, "the run is older than this life"
  assert 0 < state.first_round < state.incarnation << 24
