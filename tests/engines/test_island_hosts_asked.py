"""How a host that follows another one ends when it was asked to."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest

from ddiloco.config import ConfigError, from_dict
from ddiloco.engines import island_hosts
from ddiloco.engines.island_hosts import FollowingHost, Hosts
from ddiloco.engines.role_spec import RoleSpec
from ddiloco.network import host_links
from ddiloco.network.host_links import HostLink, HostLinks, HostProgress
from tests.waits import AwakeClock, wait_for
from tests.web import ask

PLACE = RoleSpec(Path("w"), "run", (), hosts="tcp://127.0.0.1:7001", host=1, term_status=143)


ENDS = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


@pytest.mark.parametrize(("asked", "status"), [*ENDS, (None, 0)])
def test_it_says_by_its_status_whether_it_was_asked(asked, status, monkeypatch):
  """Else Kubernetes would take a host that is evicted to be done. Ctrl-C had the status of
  SIGTERM."""

  def follow(host):
    host.joined.set()
    if asked:
      os.kill(os.getpid(), asked)
      assert host.asked.wait(10.0)
      while not host.progress.asked_to_end:  # host 0 hears it with the next sign of life
        time.sleep(0.01)

  monkeypatch.setattr(FollowingHost, "_follow", follow)
  assert FollowingHost(from_dict({}), 0, PLACE).run() == status


@pytest.mark.parametrize(("error", "status"), [(ConfigError("x: y"), 2), (ValueError("x"), 1)])
def test_its_status_says_whether_its_usage_was_wrong(error, status, monkeypatch):
  monkeypatch.setattr(FollowingHost, "_follow", mock.Mock(side_effect=error))
  monkeypatch.setattr(island_hosts, "name_lost_host", lambda: None)
  monkeypatch.setattr(island_hosts.os, "_exit", sys.exit)
  with pytest.raises(SystemExit) as ended:
    FollowingHost(from_dict({}), 0, PLACE).run()
  assert ended.value.code == status


def test_it_answers_probes(monkeypatch, capsys):
  """It ignored --http: so on GKE no island of several hosts had a probe, and a host 0 that hung
  between two orders was found by nobody."""
  place, answers = dataclasses.replace(PLACE, http="127.0.0.1:0"), []

  def follow(host):
    url = re.search(r"probes at (\S+)", capsys.readouterr().out)[1]
    for done in (0, island_hosts.COMPILED_ORDERS):
      host.progress.done = done
      wait_for(lambda done=done: ask(url, "/readyz")[0] == (200 if done else 503))
      answers.append(ask(url, "/livez")[0])
    answers.append(json.loads(ask(url, "/status")[1])["role"])

  def fail(host, error, status):
    raise error

  monkeypatch.setattr(FollowingHost, "_fail", fail)
  monkeypatch.setattr(FollowingHost, "_follow", follow)
  assert FollowingHost(from_dict({}), 0, place).run() == 0
  assert answers == [200, 200, "learner-0 host 1"]


def test_it_says_once_that_a_batch_is_late(monkeypatch, capsys):
  host, now, late = FollowingHost(from_dict({}), 0, PLACE), [100.0], []
  monkeypatch.setattr(island_hosts.time, "monotonic", lambda: now[0])
  for batch, waits in ((100.0, (30.0, 31.0, 99.0)), (0.0, (99.0,)), (200.0, (30.0, 31.0))):
    host.progress.reading_since = batch
    for seconds in waits:
      now[0] = batch + seconds
      host._hear()
      text = capsys.readouterr().out
      if "learner-0 host 1: has waited 30 s for its next batch" in text:
        late.append((batch, seconds))
        said = text
  assert late == [(100.0, 31.0), (200.0, 31.0)]
  assert "end after 600 s. Fix: bring the data nearer, or raise network.give_up_seconds" in said


def test_it_says_now_and_then_what_it_does(monkeypatch, capsys):
  """It was silent while it compiled, and then for the whole run."""
  now = [100.0]
  monkeypatch.setattr(island_hosts.time, "monotonic", lambda: now[0])
  host = FollowingHost(from_dict({}), 0, PLACE)
  looks = (9.0, "begins", 0), (10.0, "compiles", 0), (19.0, "loads", 0), (25.0, "a step", 7)
  for seconds, doing, done in looks:
    now[0], host.progress.doing, host.progress.done = 100.0 + seconds, doing, done
    host._hear()
  said = [line.partition("host 1: ")[2] for line in capsys.readouterr().out.splitlines()]
  assert said == [
    f"{doing} of host 0 carried out" for doing in ("compiles; 0 orders", "a step; 7 orders")
  ]


def joins(monkeypatch, links, compile=lambda: 1.0, follow=lambda *_: None):
  """What a host joins by these links: nothing but its own calls is real."""
  island = SimpleNamespace(compile=compile, rows=None)
  monkeypatch.setattr(island_hosts.host_links, "join", lambda *_: (links, "here"))
  monkeypatch.setattr(island_hosts, "_join", lambda *_: None)
  monkeypatch.setattr(island_hosts.initial, "make_plan", lambda _: None)
  monkeypatch.setattr("ddiloco.training.data.open_data", lambda _: None)
  monkeypatch.setattr("ddiloco.training.data.Stream", lambda *_: SimpleNamespace(iterate=int))
  monkeypatch.setattr("ddiloco.training.devices.island_devices", lambda *_: None)
  monkeypatch.setattr("ddiloco.training.island.Island", lambda *_: island)
  monkeypatch.setattr("ddiloco.training.hosts.follow", follow)


def test_it_has_carried_out_its_first_order_when_it_has_compiled(monkeypatch):
  """Else host 0 would take it for late, whatever it is told to do."""
  said, host = [], FollowingHost(from_dict({}), 0, PLACE)
  progress = host.progress
  links = SimpleNamespace(values=SimpleNamespace(send=lambda _: said.append(progress.done)))
  monkeypatch.setattr(
    island_hosts.host_links, "HostWatch", lambda *_, **__: SimpleNamespace(end=int)
  )
  joins(monkeypatch, links, compile=lambda: said.append(progress.done) or 1.0)
  host._follow()
  assert said == [0, island_hosts.COMPILED_ORDERS]


@pytest.mark.parametrize(("asked", "status"), [(True, 143), (False, 0)])
def test_it_ends_as_one_that_was_asked_when_another_host_was(asked, status, monkeypatch):
  """Where only host 0 was evicted its status, 0, told Kubernetes that it was done: it was not
  started again, and host 0 waited for it in vain."""
  host, watch = FollowingHost(from_dict({}), 0, PLACE), SimpleNamespace(end=int)
  links = SimpleNamespace(values=SimpleNamespace(send=lambda _: None))
  monkeypatch.setattr(island_hosts.host_links, "HostWatch", lambda *_, **__: watch)
  joins(monkeypatch, links, follow=lambda *_: asked)
  assert host.run() == status


@pytest.mark.parametrize("opened", [False, True])
def test_it_has_begun_when_it_opens_its_data(opened, monkeypatch):
  host, watch = FollowingHost(from_dict({}), 0, PLACE), SimpleNamespace(end=int)
  links = SimpleNamespace(values=SimpleNamespace(send=lambda _: None))
  monkeypatch.setattr(island_hosts.host_links, "HostWatch", lambda *_, **__: watch)

  def follow(island, links, read, *more):
    if opened:
      read(5)

  joins(monkeypatch, links, follow=follow)
  host._follow()
  assert host._began == opened


def test_data_that_break_off_are_not_taken_for_host_0(monkeypatch):
  """A storage that hung up was said to be host 0, and nothing was said of the data."""
  host, lost, watch = FollowingHost(from_dict({}), 0, PLACE), [], SimpleNamespace(end=int)
  links = SimpleNamespace(values=SimpleNamespace(send=lambda _: None))
  monkeypatch.setattr(island_hosts.host_links, "HostWatch", lambda *_, **__: watch)
  monkeypatch.setattr(FollowingHost, "_lost", lambda host, *told: lost.append(told))
  hung_up = ConnectionResetError("the storage hung up")
  joins(monkeypatch, links, follow=mock.Mock(side_effect=hung_up))
  with pytest.raises(ConnectionResetError, match="the storage hung up"):
    host._follow()
  assert not lost


def test_its_end_needs_no_room_on_the_disk_of_its_log(monkeypatch):
  """The error that it could not print was raised instead: its process stayed."""
  full = SimpleNamespace(write=mock.Mock(side_effect=OSError(errno.ENOSPC, "full")), flush=int)
  monkeypatch.setattr(sys, "stderr", full)
  monkeypatch.setattr(sys, "stdout", full)
  monkeypatch.setattr(island_hosts.os, "_exit", sys.exit)
  with pytest.raises(SystemExit) as ended:
    FollowingHost(from_dict({}), 0, PLACE)._fail(ValueError("x"))
  assert ended.value.code == 1 and full.write.called


def test_a_host_0_that_compiles_longer_is_not_lost(monkeypatch):
  """It was taken to be late with an order: after network.silence_seconds its island ended, before
  its programs were kept, and so again and again."""
  config, lost = from_dict({"network": {"silence_seconds": 1.0}}), []
  monkeypatch.setattr(HostLink, "__init__", lambda link, each: setattr(link, "_socket", each))
  mine, theirs = map(HostLink, socket.socketpair())

  def lead():
    with contextlib.suppress(OSError):
      while True:
        theirs.send(msgspec.msgpack.encode(HostProgress(doing="compiles")))
        theirs.receive()
        time.sleep(0.05)

  threading.Thread(target=lead, daemon=True).start()
  links = HostLinks(mine, SimpleNamespace(send=lambda _: None, deaf=lambda _: False), mine)
  monkeypatch.setattr(FollowingHost, "_lost", lambda host, *told: lost.append(told))
  with AwakeClock.running() as clock:
    monkeypatch.setattr(host_links, "time", clock)
    joins(monkeypatch, links, follow=lambda *_: clock.sleep(3.0))
    FollowingHost(config, 0, PLACE)._follow()
  theirs.close()
  assert not lost


@pytest.mark.parametrize(("asked", "status"), ENDS)
def test_a_host_ends_at_once_when_asked_before_its_island_has_met(asked, status, monkeypatch):
  """JAX waited for the others in the main thread, which then heard no signal for ten minutes."""
  over = threading.Event()

  def follow(*_):
    os.kill(os.getpid(), asked)
    over.wait(10.0)

  monkeypatch.setattr(FollowingHost, "_follow", follow)
  monkeypatch.setattr(island_hosts.os, "_exit", sys.exit)
  with pytest.raises(SystemExit) as ended:
    FollowingHost(from_dict({}), 0, PLACE).run()
  over.set()
  assert ended.value.code == status


@pytest.mark.parametrize(
  ("asked", "began", "status"), [(True, False, 143), (True, True, 1), (False, False, 1)]
)
def test_of_hosts_that_are_asked_to_end_before_they_have_begun_none_has_lost_work(
  asked, began, status, monkeypatch
):
  """The first one to end was lost to the others: their status, 1, told of lost work, and counted as
  a failure of the island. So it was while host 0 restored a snapshot, which are orders too."""
  orders = 40

  monkeypatch.setattr(island_hosts.os, "_exit", sys.exit)
  recorder = SimpleNamespace(record=lambda event: None, close=lambda: None)
  leads, follows = Hosts.__new__(Hosts), FollowingHost(from_dict({}), 0, PLACE)
  leads.progress = follows.progress = HostProgress(orders)
  follows._began = began
  leads._runner = SimpleNamespace(
    stop=threading.Event(),
    began=began,
    end_early=lambda: sys.exit(143),
    recorder=recorder,
    say=lambda text: None,
  )
  for host, event in ((leads, leads._runner.stop), (follows, follows.asked)):
    if asked:
      event.set()
    with pytest.raises(SystemExit) as ended:
      host._lost(1, "its connection has ended")
    assert ended.value.code == status


def test_a_host_0_says_no_longer_that_it_waits_for_hosts_that_have_come(monkeypatch):
  """While JAX's processes met, and its data were opened, it named an empty list of hosts."""
  said, config = [], from_dict({"islands": {"devices": 2, "hosts": 2}})
  runner = SimpleNamespace(config=config, place=PLACE, keys=None, stop=threading.Event())
  meeting = SimpleNamespace(missing=[], coordinator="here", wait=lambda seconds: {})
  monkeypatch.setattr(island_hosts.host_links, "Meeting", lambda *_: meeting)
  monkeypatch.setattr(island_hosts.host_links, "HostWatch", lambda *_: None)
  monkeypatch.setattr(island_hosts, "_join", lambda *_: said.append(runner.ready()))
  Hosts(runner, 0, "")
  assert said == ["starting"]


@pytest.mark.parametrize("ends", [True, False])
def test_host_0_ends_after_the_others_and_waits_for_none_that_hangs(ends, monkeypatch, capsys):
  """Of one that was killed at the end, or hung, it heard after 100 s, and JAX aborted it."""
  config = from_dict({"network": {"silence_seconds": 60.0 if ends else 0.05}})
  seen = [False, False, True] if ends else itertools.repeat(False)
  looks, calls = iter(seen), mock.Mock()
  host = Hosts.__new__(Hosts)
  host._runner = SimpleNamespace(config=config, stop=threading.Event())
  host._watch = calls.watch
  link = SimpleNamespace(gone=lambda seconds: next(looks))
  host.links = {1: SimpleNamespace(orders=link)}
  calls.tell.side_effect = BrokenPipeError  # it was killed just then
  host.part(calls.tell)
  late = "host 1 of this island has not ended within 0.05 s and is waited for no longer"
  assert (late in capsys.readouterr().err) != ends
  first = "one that ended at once, as it was told, was taken for lost, and all its work"
  assert calls.mock_calls == [mock.call.watch.end(), mock.call.tell(False)], first
  assert not ends or not list(looks)


def test_what_hosts_must_share_is_told_apart(tmp_path, monkeypatch):
  """With other data some rows came twice, and some never. With another text of their model, or
  another JAX, hosts computed parts of different steps."""
  config = from_dict({"islands": {"devices": 2, "hosts": 2}})
  agreed = lambda data="a1", config=config: island_hosts._agreed(config, 0, PLACE, data)
  mine = agreed()
  assert mine == agreed() and mine.custom == ""
  assert agreed("b2") == msgspec.structs.replace(mine, data="b2") != mine
  own = tmp_path / "own.py"
  custom = from_dict({"model": {"custom": f"{own}:model"}})
  own.write_text("FACTOR = 1.0")
  one = agreed(config=custom)
  own.write_text("FACTOR = 2.0")
  other = agreed(config=custom)
  assert one.config == other.config and one.custom != other.custom
  monkeypatch.setattr("jax.__version__", "0.0.7")
  assert agreed() == msgspec.structs.replace(mine, jax="0.0.7")
