"""Hosts of one island meet whoever else calls, and the one that is lost or waited for is named."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import queue
import re
import socket
import sys
import threading
import time
import types

import msgspec
import pytest

from ddiloco import __version__
from ddiloco.engines.role_spec import free_urls
from ddiloco.network import host_links
from ddiloco.network.frames import TcpInfo
from ddiloco.network.host_links import (
  HostHello,
  HostLink,
  HostLinks,
  HostProgress,
  HostsApart,
  HostWatch,
  HostWelcome,
  IslandIdentity,
  Meeting,
  join,
)
from ddiloco.network.keys import Keys, host_and_port, make_keys
from tests.network.net import blackhole
from tests.waits import PATIENCE_SECONDS, AwakeClock, wait_for

ISLAND = IslandIdentity("run", "digest", learner=3, hosts=3)
SILENT_SECONDS = 1.0


@pytest.fixture
def url() -> str:
  return free_urls(1)[0]


def meet(url: str, keys=None, others=None):
  """The leader's links, and those of both other hosts."""
  meeting = Meeting(url, ISLAND, keys, SILENT_SECONDS)
  joined = {}

  def come(host: int) -> None:
    joined[host], coordinator = join(url, ISLAND, host, others or keys, PATIENCE_SECONDS)
    assert coordinator == meeting.coordinator

  threads = [threading.Thread(target=come, args=(host,)) for host in (1, 2)]
  for thread in threads:
    thread.start()
  links = meeting.wait(PATIENCE_SECONDS)
  for thread in threads:
    thread.join(PATIENCE_SECONDS)
  return links, joined


def keys_of(tmp_path, address: str) -> Keys:
  make_keys(tmp_path, 4, 1)
  return Keys.load(tmp_path, address)


def close(*links: HostLinks) -> None:
  for each in links:
    for link in each:
      link.close()


@pytest.fixture
def watchful(monkeypatch):
  """Connections without data ask for a sign of life every second."""
  if sys.platform != "linux":
    pytest.skip("the kernel's own account of a connection")
  options = [
    (level, name, 1 if name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL") else value)
    for level, name, value in host_links.ALIVE_OPTIONS
  ]
  monkeypatch.setattr(host_links, "ALIVE_OPTIONS", options)
  monkeypatch.setattr(host_links, "KEEPALIVE_SECONDS", 1)


def say(link: HostLink, data: bytes) -> None:
  link.send(b"first")
  link.write(memoryview(data))
  link.send(b"")


@pytest.mark.parametrize("secured", [False, True])
def test_messages_and_bytes_arrive_in_order_on_each_kind_of_connection(url, tmp_path, secured):
  links, joined = meet(url, keys_of(tmp_path, "learner-3") if secured else None)
  assert sorted(links) == sorted(joined) == [1, 2]
  for host in links:
    for kind in host_links.KINDS:
      mine, theirs = getattr(links[host], kind), getattr(joined[host], kind)
      data = bytes(range(256)) * 4096
      sender = threading.Thread(target=say, args=(mine, data))
      sender.start()
      assert theirs.receive() == b"first"
      found = bytearray(len(data))
      theirs.fill(memoryview(found))
      assert found == data and theirs.receive() == b""
      sender.join(PATIENCE_SECONDS)


def test_a_message_that_is_too_long_takes_no_memory():
  with (
    socket.create_server(("127.0.0.1", 0)) as listener,
    socket.create_connection(listener.getsockname()) as far,
  ):
    near = HostLink(listener.accept()[0])
    near._socket.settimeout(PATIENCE_SECONDS)
    far.sendall(b"\x0b\x00\x00\x00")
    with pytest.raises(ConnectionError, match="of 11 bytes, at most 10"):
      near.receive(10)
    near.close()


def test_what_a_thread_sends_while_another_one_closes_is_not_sent_in_the_clear(
  url, tmp_path, monkeypatch
):
  """TLS ended before the connection did."""
  links, joined = meet(url, keys_of(tmp_path, "learner-3"))
  mine, theirs, shutdown = links[1].values, joined[1].values, socket.socket.shutdown

  def as_it_closes(connected: socket.socket, how: int) -> None:
    if connected is mine._socket:
      mine.write(memoryview(b"values"))
    shutdown(connected, how)

  with monkeypatch.context() as patch:
    patch.setattr(socket.socket, "shutdown", as_it_closes)
    mine.close()
  seen = b"".join(iter(lambda: socket.socket.recv(theirs._socket, 4096), b""))
  assert seen and b"values" not in seen
  close(*links.values(), *joined.values())


def test_a_host_that_vanishes_without_a_word_is_noticed_on_every_connection(url):
  """Its machine lost its power, say: the connection for values stayed half open for ever."""
  links, joined = meet(url)
  for link in (each for links in (links, joined) for host in links.values() for each in host):
    assert link._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert link._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert link._socket.gettimeout() is None, "an order may be long in coming"
  close(*links.values(), *joined.values())


def test_who_does_not_come_is_named(url):
  meeting = Meeting(url, ISLAND, None, SILENT_SECONDS)
  held = join(url, ISLAND, 2, None, PATIENCE_SECONDS)
  said = r"hosts \[1\] of 3 have not come to 127.0.0.1:\d+ within 0.2 s. Fix"
  with pytest.raises(HostsApart, match=said):
    meeting.wait(0.2)
  close(held[0])


def test_an_ipv6_address_is_said_with_its_brackets():
  try:
    (url,) = free_urls(1, "::1")
  except OSError as error:
    pytest.skip(f"no IPv6 loopback here: {error}")
  meeting = Meeting(url, ISLAND, None, SILENT_SECONDS)
  meeting.close()
  assert meeting.at == url.removeprefix("tcp://")


@pytest.mark.parametrize(
  ("island", "host", "reason"),
  [
    (IslandIdentity("other", "digest", 3, 3), 1, "that of host 0 is 'run'. Fix: give all"),
    (IslandIdentity("run", "changed", 3, 3), 1, "its config is 'changed'"),
    (IslandIdentity("run", "digest", 2, 3), 1, "its learner is 2"),
    (IslandIdentity("run", "digest", 3, 4), 1, "its hosts is 4"),
    (ISLAND, 3, "there is no host 3 of 3"),
    (ISLAND, 0, "there is no host 0 of 3"),
  ],
)
def test_a_host_that_does_not_belong_is_refused_with_the_reason(url, island, host, reason):
  meeting = Meeting(url, ISLAND, None, SILENT_SECONDS)
  with pytest.raises(HostsApart, match=reason):
    join(url, island, host, None, PATIENCE_SECONDS)
  assert meeting.missing == [1, 2]
  meeting.close()


def test_a_host_of_another_version_is_refused_with_both_versions_and_a_fix(url, monkeypatch):
  """It made other calls than host 0 had ordered, or was not understood and tried again for long."""
  meeting = Meeting(url, ISLAND, None, SILENT_SECONDS)
  monkeypatch.setattr(host_links, "HostHello", functools.partial(HostHello, version="0.0.7"))
  both = rf"of version 0\.0\.7, that of host 0 is {re.escape(__version__)}\. Fix: install the same"
  with pytest.raises(HostsApart, match=both):
    join(url, ISLAND, 1, None, PATIENCE_SECONDS)
  meeting.close()


@pytest.mark.parametrize(
  ("hello", "version"),
  [({"version": "99.0", "who": 1}, "99.0"), ({"island": {}, "host": 1, "kind": "a"}, "unknown")],
)
def test_a_hello_of_another_version_need_not_be_understood_to_be_refused(url, hello, version):
  meeting = Meeting(url, ISLAND, None, SILENT_SECONDS)
  stranger = HostLink(socket.create_connection(host_and_port(url), PATIENCE_SECONDS))
  stranger.send(msgspec.msgpack.encode(hello))
  answer = msgspec.msgpack.decode(stranger.receive(), type=HostWelcome)
  assert f"of version {version}, that of host 0 is {__version__}" in answer.refused
  assert not answer.coordinator
  stranger.close()
  meeting.close()


def test_a_second_host_of_the_same_number_is_refused(url):
  meeting = Meeting(url, ISLAND, None, SILENT_SECONDS)
  held = join(url, ISLAND, 1, None, PATIENCE_SECONDS)
  with pytest.raises(HostsApart, match="host 1 is here already"):
    join(url, ISLAND, 1, None, PATIENCE_SECONDS)
  close(held[0])
  meeting.close()


@pytest.mark.parametrize("secured", [False, True])
def test_a_host_that_vanished_without_a_word_may_come_again(url, tmp_path, secured, watchful):
  """It was refused as here already for two minutes. One that lives keeps its place."""
  keys = keys_of(tmp_path, "learner-3") if secured else None
  meeting = Meeting(url, ISLAND, keys, SILENT_SECONDS)
  gone, _ = join(url, ISLAND, 1, keys, PATIENCE_SECONDS)
  blackhole(*gone)
  wait_for(lambda: meeting.missing != [2])
  back, _ = join(url, ISLAND, 1, keys, PATIENCE_SECONDS)
  time.sleep(4 * SILENT_SECONDS)
  with pytest.raises(HostsApart, match="host 1 is here already"):
    join(url, ISLAND, 1, keys, PATIENCE_SECONDS)
  close(gone, back)
  meeting.close()


def test_a_connection_that_is_cut_without_a_word_is_named(url, watchful):
  """Nobody noticed while the other connections were in order: no value came through any more."""
  links, joined = meet(url)
  told = queue.SimpleQueue()
  # As long as the kernel may be silent. The watch itself notices when all of this process stood.
  silent_seconds = 3 * SILENT_SECONDS
  rules = HostProgress(), silent_seconds, lambda reading: 1e9
  watches = [HostWatch({0: each}, *rules, lambda *_: None) for each in joined.values()]
  watches.append(HostWatch(links, *rules, lambda *what: told.put(what)))
  time.sleep(4 * SILENT_SECONDS)
  assert told.empty()
  blackhole(joined[2].values)
  links[2].values.send(b"take")
  host, reason = told.get(timeout=PATIENCE_SECONDS)
  assert host == 2 and "its connection for values" in reason
  for watch in watches:
    watch.end()
  close(*links.values(), *joined.values())


@pytest.mark.parametrize(
  ("unacked", "unsent_bytes", "deaf"), [(0, 0, True), (1, 0, True), (1, 5, True), (0, 5, False)]
)
def test_who_has_no_room_for_more_is_not_deaf(monkeypatch, unacked, unsent_bytes, deaf):
  """Its kernel is asked more and more rarely whether there is room again."""
  info = TcpInfo(unacked=unacked, unsent_bytes=unsent_bytes, last_ack_ms=10**6)
  monkeypatch.setattr(TcpInfo, "of", lambda connected: info)
  assert HostLink.deaf(types.SimpleNamespace(_socket=None), SILENT_SECONDS) == deaf


def test_an_address_that_is_no_host_name_is_an_error_with_a_fix():
  """No fix was named: such a name raises a UnicodeError, which is no OSError."""
  long = f"tcp://{'x' * 64}:1"
  with pytest.raises(HostsApart, match=r"host 0 is not reached.* Fix"):
    join(long, ISLAND, 1, None, 0.0)
  with pytest.raises(HostsApart, match=r"host 0 cannot listen there .*Fix"):
    Meeting(long, ISLAND, None, SILENT_SECONDS)


@pytest.mark.parametrize("secured", [False, True])
def test_a_host_that_ends_before_all_have_come_may_come_again(url, tmp_path, secured):
  """It was refused as here already until the last host came; then all had to start once more."""
  keys = keys_of(tmp_path, "learner-3") if secured else None
  meeting = Meeting(url, ISLAND, keys, SILENT_SECONDS)
  for _ in range(2):
    links, _ = join(url, ISLAND, 1, keys, PATIENCE_SECONDS)
    assert meeting.missing == [2]
    close(links)
  wait_for(lambda: meeting.missing == [1, 2])
  links = [join(url, ISLAND, host, keys, PATIENCE_SECONDS)[0] for host in (1, 2)]
  joined = meeting.wait(PATIENCE_SECONDS)
  joined[1].orders.send(b"order")
  assert links[0].orders.receive() == b"order"
  close(*links, *joined.values())


def test_a_leader_that_ends_between_two_connections_may_be_replaced(url):
  """The host kept the first connection, to nobody, and the new leader waited for it in vain."""
  island = IslandIdentity("run", "digest", learner=3, hosts=2)
  with socket.create_server(host_and_port(url)) as first:
    joined = queue.SimpleQueue()
    come = lambda: joined.put(join(url, island, 1, None, PATIENCE_SECONDS))
    threading.Thread(target=come, daemon=True).start()
    orders, _ = first.accept()
    HostLink(orders).receive()
    HostLink(orders).send(msgspec.msgpack.encode(HostWelcome("", "127.0.0.1:1")))
    values, _ = first.accept()
  orders.close()
  values.close()
  meeting = Meeting(url, island, None, SILENT_SECONDS)
  links = meeting.wait(PATIENCE_SECONDS)
  mine, coordinator = joined.get(timeout=PATIENCE_SECONDS)
  assert coordinator == meeting.coordinator
  links[1].orders.send(b"order")
  assert mine.orders.receive() == b"order"
  close(mine, *links.values())


def test_another_roles_key_and_no_key_do_not_open_an_island(url, tmp_path):
  mine, other = keys_of(tmp_path, "learner-3"), keys_of(tmp_path, "learner-2")
  meeting = Meeting(url, ISLAND, mine, SILENT_SECONDS)
  stranger = HostLink(
    other.context_to(mine.public).wrap_socket(socket.create_connection(host_and_port(url), 5.0))
  )
  stranger.send(msgspec.msgpack.encode(HostHello(ISLAND, 1, "orders")))
  answer = msgspec.msgpack.decode(stranger.receive(), type=HostWelcome)
  assert answer == HostWelcome("the key is another role's")
  with pytest.raises(HostsApart, match="host 0 is not reached"):
    join(url, ISLAND, 1, None, 0.3)
  assert meeting.missing == [1, 2]
  meeting.close()


@pytest.mark.parametrize(
  "garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x04\x00\x00\x00abcd"]
)
def test_garbage_on_the_port_keeps_nobody_out(url, garbage):
  meeting = Meeting(url, ISLAND, None, SILENT_SECONDS)
  with socket.create_connection(host_and_port(url), 5.0) as stranger:
    stranger.sendall(garbage)
    held = join(url, ISLAND, 1, None, PATIENCE_SECONDS)
    assert meeting.missing == [2]
  close(held[0])
  meeting.close()


@pytest.mark.parametrize("secured", [False, True])
def test_callers_that_never_say_who_they_are_keep_nobody_out_for_long(
  url, tmp_path, monkeypatch, secured
):
  monkeypatch.setattr(host_links, "MOST_CALLERS", 4)
  monkeypatch.setattr(host_links, "HELLO_SECONDS", 0.5)
  keys = keys_of(tmp_path, "learner-3") if secured else None
  meeting = Meeting(url, ISLAND, keys, SILENT_SECONDS)
  strangers = [socket.create_connection(host_and_port(url), 5.0) for _ in range(12)]
  strangers[0].sendall(b"\x16\x03")  # the beginning of a greeting, with or without keys
  links, _ = join(url, ISLAND, 1, keys, PATIENCE_SECONDS)
  assert meeting.missing == [2]
  for stranger in strangers:
    stranger.settimeout(PATIENCE_SECONDS)
    with contextlib.suppress(ConnectionResetError):
      assert stranger.recv(1) == b"", "cut off"
    stranger.close()
  close(links)
  meeting.close()


@pytest.mark.parametrize(
  ("owner", "name", "error"),
  [
    (socket.socket, "accept", OSError(errno.EMFILE, "Too many open files")),
    (threading.Thread, "start", RuntimeError("can't start new thread")),
  ],
)
def test_a_caller_that_cannot_be_let_in_keeps_nobody_else_out(url, monkeypatch, owner, name, error):
  real, failures = getattr(owner, name), [error] * 2

  def crowded(this):
    if failures and (name == "accept" or "_admit" in this.name):
      raise failures.pop()
    return real(this)

  monkeypatch.setattr(owner, name, crowded)
  links, joined = meet(url)
  assert not failures and set(links) == set(joined) - {0} == {1, 2}
  close(*links.values(), *joined.values())


def test_a_meeting_that_is_over_leaves_no_thread(url):
  before = threading.enumerate()
  meeting = Meeting(url, ISLAND, None, SILENT_SECONDS)
  (door,) = [each for each in threading.enumerate() if each not in before]
  meeting.close()
  door.join(PATIENCE_SECONDS)
  assert door.name == "door" and not door.is_alive()


def test_a_port_that_is_taken_is_an_error_with_a_fix(url):
  meeting = Meeting(url, ISLAND, None, SILENT_SECONDS)
  with pytest.raises(HostsApart, match=r"host 0 cannot listen there .*Fix: end what has the port"):
    Meeting(url, ISLAND, None, SILENT_SECONDS)
  meeting.close()


def test_a_leader_that_never_comes_is_waited_for_that_long(url):
  with pytest.raises(HostsApart, match="host 0 is not reached"):
    join(url, ISLAND, 1, None, 0.0)


# --- signs of life


class Watched:
  """The watch of a leader with two others, whose answers the test gives by hand."""

  def __init__(self, limit_seconds: float, order_seconds: float | None = None):
    pairs = {host: socket.socketpair() for host in (1, 2)}
    self.theirs = {host: HostLink(b) for host, (_, b) in pairs.items()}
    self.progress, self.told = HostProgress(doing="inside a step"), queue.Queue()
    self.asked = threading.Event()
    self._answers = {host: queue.SimpleQueue() for host in pairs}
    self._threads = [threading.Thread(target=self._answer, args=(host,)) for host in pairs]
    for thread in self._threads:
      thread.start()
    count = len(host_links.KINDS)
    self._mine = {host: HostLinks(*[HostLink(a)] * count) for host, (a, _) in pairs.items()}
    self.watch = HostWatch(
      self._mine,
      self.progress,
      limit_seconds,
      lambda reading: limit_seconds if reading or order_seconds is None else order_seconds,
      lambda host, reason: self.told.put((host, reason)),
      self.asked.set,
    )

  def close(self) -> None:
    self.watch.end()
    close(*self._mine.values())
    for host, link in self.theirs.items():
      link.close()
      self._answers[host].put(b"")  # which nobody hears
    for thread in self._threads:
      thread.join(PATIENCE_SECONDS)

  def beat(self, host: int, done: int, doing: str = "inside a step", **more) -> None:
    with contextlib.suppress(queue.Empty):
      self._answers[host].get_nowait()
    self._answers[host].put(msgspec.msgpack.encode(HostProgress(done, 0, doing, **more)))

  def until_told(self, beat) -> tuple[int, str]:
    """Calls `beat` again and again; who is named at last, and why."""
    return wait_for(lambda: beat() or not self.told.empty()) and self.told.get_nowait()

  def untold(self, beat, seconds: float = 3.0) -> bool:
    """Whether nobody is named for so long."""
    clock = host_links.time
    over = clock.monotonic() + seconds
    while clock.monotonic() < over:
      beat()
      clock.sleep(0.1)
    return self.told.empty()

  def _answer(self, host: int) -> None:
    """Answers a beat of the leader with the newest one of the test, when there is one."""
    with contextlib.suppress(OSError):
      while True:
        self.theirs[host].receive()
        self.theirs[host].send(self._answers[host].get())


@pytest.fixture
def watch(monkeypatch):
  """Makes `Watched` ones, which end with the test. Who is silent could have spoken meanwhile."""
  # A pair of sockets knows no TCP_NODELAY.
  monkeypatch.setattr(HostLink, "__init__", lambda self, each: setattr(self, "_socket", each))
  with AwakeClock.running() as clock, contextlib.ExitStack() as ends:
    monkeypatch.setattr(host_links, "time", clock)
    yield lambda *given, **more: ends.enter_context(contextlib.closing(Watched(*given, **more)))


def test_a_host_whose_connection_ends_is_named_once(watch):
  watched = watch(limit_seconds=1e9)
  watched.theirs[2].close()
  host, reason = watched.told.get(timeout=PATIENCE_SECONDS)
  assert host == 2 and "connection has ended" in reason
  watched.theirs[1].close()
  time.sleep(0)  # nothing to wait for: what must not come
  assert watched.told.empty()


def test_faults_that_are_found_at_once_are_told_once(watch):
  watched, found = watch(limit_seconds=1e9), threading.Barrier(2)
  watched.watch.end()

  class Over(threading.Event):
    def is_set(self) -> bool:
      was = super().is_set()
      with contextlib.suppress(threading.BrokenBarrierError):
        found.wait(0.5)  # for the other thread, if it looks as well before this one has told
      return was

  watched.watch._over = Over()
  threads = [threading.Thread(target=watched.watch._tell, args=(h, "lost")) for h in (1, 2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(PATIENCE_SECONDS)
  assert watched.told.qsize() == 1


def test_a_host_that_falls_silent_is_named_and_one_that_beats_is_not(watch):
  watched = watch(limit_seconds=1.5)
  host, reason = watched.until_told(lambda: watched.beat(1, 0))
  assert host == 2 and "it was not heard for" in reason


def test_host_0_that_has_not_been_heard_yet_is_not_silent(watch):
  """A host that came early ended when the last host came more than `network.silence_seconds` later,
  and was refused when it came again."""
  mine, theirs = map(HostLink, socket.socketpair())
  told, links = queue.SimpleQueue(), HostLinks(*[mine] * len(host_links.KINDS))
  host_0 = HostWatch({0: links}, HostProgress(), 1.0, lambda _: 1e9, lambda *what: told.put(what))
  host_links.time.sleep(2.5)
  assert told.empty()
  theirs.send(msgspec.msgpack.encode(HostProgress()))
  assert told.get(timeout=PATIENCE_SECONDS)[0] == 0, "which then falls silent"
  host_0.end()
  close(links)


def test_who_is_waited_for_is_named_with_what_it_does(watch):
  """The limit is that for a host that waits for its data."""
  watched = watch(limit_seconds=1.5, order_seconds=1e9)
  watched.progress.done = 7

  def beat() -> None:
    watched.beat(1, 7)
    watched.beat(2, 6, "waits for its next batch", reading_since=3.0)

  host, reason = watched.until_told(beat)
  assert host == 2 and "host 2: waits for its next batch" in reason
  assert "nothing has moved" in reason and "host 1" not in reason


def test_an_order_may_take_longer_than_a_silence(watch):
  """As the first steps do: programs are loaded, and what is usual is not known."""
  watched = watch(limit_seconds=1.5, order_seconds=1e9)
  watched.progress.done = 1
  assert watched.untold(lambda: watched.beat(1, 0) or watched.beat(2, 0))


def test_an_island_without_orders_is_left_alone(watch):
  watched = watch(limit_seconds=1e9, order_seconds=1.0)
  watched.progress.done, watched.watch._beats = 5, {1: HostProgress(5), 2: HostProgress(5)}
  for now in (0.0, 1e6):
    watched.watch._check_progress(now)
  assert watched.told.empty()


def test_an_island_that_moves_is_left_alone_however_far_behind(watch):
  watched, done = watch(limit_seconds=1.5), itertools.count(1)
  watched.progress.done = 100
  assert watched.untold(lambda: watched.beat(1, next(done)) or watched.beat(2, 0))


def test_a_first_beat_that_comes_during_a_look_does_not_end_the_watch(watch):
  watched = watch(100.0)
  watched.watch.end()

  class Orders(int):
    def __gt__(self, done: int) -> bool:
      watched.watch._beats[2] = HostProgress(0, 0, "begins")  # as the thread of host 2 does
      return int(self) > done

  watched.watch._beats = {1: HostProgress(0, 0, "begins")}
  watched.progress.done = Orders(1)
  watched.watch._check_progress(host_links.time.monotonic())
  assert set(watched.watch._beats) == {1, 2}


def test_a_host_that_was_asked_to_end_is_heard(watch):
  watched = watch(limit_seconds=1e9)
  watched.beat(1, 0)
  wait_for(lambda: 1 in watched.watch._beats)
  assert not watched.asked.is_set()
  watched.beat(2, 0, asked_to_end=True)
  assert watched.asked.wait(PATIENCE_SECONDS)
  watched.watch.end()
  watched.theirs[1].close()
  assert watched.told.empty()
