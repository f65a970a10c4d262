"""Who is let in may lose that right, say too much, read nothing, or say nothing at all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from proxy import Link

from ddiloco.checks import ConfigError
from ddiloco.network import frames, peers
from ddiloco.network.frames import STRANGER_SECONDS, Door
from ddiloco.network.keys import Keys, host_and_port, make_keys, public_file, secret_file
from ddiloco.network.transport import Counters
from ddiloco.protocol.messages import Recovered, RequestMoments
from tests import says
from tests.network.net import QUICK, Net
from tests.waits import wait_for

SECONDS = 20.0
START_SECONDS = 90.0  # for a process of its own, which first imports, on a busy machine
SYNCER = "syncer-0"


with_and_without_keys = pytest.mark.parametrize("secure", [False, True], ids=["plain", "keys"])


@pytest.fixture
def secure():
  return True


def file_of(net: Net, address: str) -> Path:
  return public_file(net.folder, address)


# --- keys that are taken away ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_key_that_is_no_longer_listed_is_cut_off_while_its_connection_is_open(net, how):
  shard, learner, other = (net.connect(a) for a in (SYNCER, "learner-0", "learner-1"))
  learner.send(SYNCER, says.request(0, 0))
  assert shard.receive(SECONDS)
  value = np.zeros(100, np.uint8)
  publish = says.publish(0, 0, 0, 0, 1, 1, -1, 0, 0, (), "f32", value)
  for _ in range(3):
    shard.send("learner-0", publish)
    assert learner.receive(SECONDS)
  file = file_of(net, "learner-0")
  kept = file.read_text()
  if how == "removed":
    file.unlink()
  else:
    make_keys(net.folder / "new", learners=1, shards=0)
    shutil.copy(public_file(net.folder / "new", "learner-0"), file)
  net.wait_until(lambda: learner.links()[SYNCER]["state"] == "refused")
  assert "the key of learner-0 is not listed" in learner.links()[SYNCER]["reason"]
  assert not learner.fenced, "nobody else has its place"
  assert list(shard.links()) == ["learner-1"] and shard.counters.refused
  learner.send(SYNCER, says.request(0, 0))
  other.send(SYNCER, says.request(1, 0))
  assert shard.receive(SECONDS)[0] == "learner-1"
  assert shard.receive(0.2) is None

  file.write_text(kept)
  net.wait_up(learner, SYNCER)
  assert shard.receive(SECONDS)[0] == "learner-0", "what it had to say, it says when it may again"
  shard.send("learner-0", publish)
  assert learner.receive(SECONDS), "the shard has met it anew, and it has not"


def test_a_folder_of_keys_that_is_away_for_a_moment_cuts_nobody_off(net):
  shard, learner = net.connect(SYNCER), net.connect("learner-0")
  net.wait_until(lambda: all(c.wire for c in shard._accepted["learner-0"].channels))
  folder = net.folder
  (folder / "public").rename(folder / "away")
  assert shard.receive(2.5) is None
  learner.send(SYNCER, says.request(0, 0))
  assert shard.receive(SECONDS)[0] == "learner-0" and shard.counters.refused == 0
  (folder / "away").rename(folder / "public")


def test_a_disk_that_hangs_under_the_keys_holds_up_no_message(net, monkeypatch):
  """The thread for control read the files: a thousand took it a second and a half."""
  shard, learner = net.connect(SYNCER), net.connect("learner-0")
  reads, goes_on, read = threading.Semaphore(0), threading.Event(), Path.read_bytes

  def hangs(path: Path) -> bytes:
    if path.suffix == ".key":
      reads.release()
      goes_on.wait(SECONDS)
    return read(path)

  with monkeypatch.context() as patch:
    patch.setattr(Path, "read_bytes", hangs)
    file_of(net, "learner-1").touch()
    for _ in (shard, learner):
      assert reads.acquire(timeout=SECONDS)
    learner.send(SYNCER, says.request(0, 0))
    assert shard.receive(SECONDS / 2)
    shard.send("learner-0", says.pull(0, 0, 0, 0, 1, 0))
    assert learner.receive(SECONDS / 2)
    goes_on.set()


def test_a_shard_whose_key_is_removed_is_not_spoken_to_any_more(net):
  shard, learner = net.connect(SYNCER), net.connect("learner-0")
  file = file_of(net, SYNCER)
  kept = file.read_text()
  file.unlink()
  net.wait_until(lambda: "No such file" in learner.links()[SYNCER]["reason"])
  learner.send(SYNCER, says.request(0, 0))
  assert shard.receive(0.5) is None
  file.write_text(kept)
  assert shard.receive(SECONDS)


def test_a_shard_whose_key_cannot_be_read_for_a_moment_is_dialed_again(net, monkeypatch):
  shard, learner = net.connect(SYNCER), net.open("learner-0", 0)
  tried = threading.Event()

  def unreadable(keys, server):
    tried.set()
    raise ConfigError(f"{server}: Too many open files")

  with monkeypatch.context() as patch:
    patch.setattr(Keys, "server_key", unreadable)
    learner.dial(SYNCER, net.url(SYNCER))
    assert tried.wait(SECONDS)
    net.wait_until(lambda: "open files" in learner.links()[SYNCER]["reason"])
  net.wait_up(learner, SYNCER)
  learner.send(SYNCER, says.request(0, 0))
  assert shard.receive(SECONDS)


def test_a_shard_whose_key_was_replaced_is_not_spoken_to_any_more(net):
  shard, learner = net.connect(SYNCER), net.connect("learner-0")
  folder = net.folder
  make_keys(folder / "new", learners=0, shards=1)
  shutil.copy(public_file(folder / "new", SYNCER), file_of(net, SYNCER))
  net.wait_until(lambda: learner.links()[SYNCER]["state"] != "up")
  learner.send(SYNCER, says.request(0, 0))
  assert shard.receive(0.5) is None, "it may be in the hands of whoever stole the old key"
  net.wait_until(lambda: "another key" in learner.links()[SYNCER]["reason"])
  shard.close()
  shutil.copy(secret_file(folder / "new", SYNCER), secret_file(folder, SYNCER))
  again = net.open(SYNCER, 1)
  assert again.receive(SECONDS)[0] == "learner-0"


def test_a_shard_shows_its_new_key_also_if_the_public_file_came_before_the_secret_one(net):
  """So `ddiloco keys` says to copy them. It showed the old key until it was started again."""
  shard, learner = net.connect(SYNCER), net.connect("learner-0")
  folder = net.folder
  make_keys(folder / "new", learners=0, shards=1)
  shutil.copy(public_file(folder / "new", SYNCER), file_of(net, SYNCER))
  net.wait_until(lambda: "another key" in learner.links()[SYNCER]["reason"])
  shutil.copy(secret_file(folder / "new", SYNCER), secret_file(folder, SYNCER))
  net.wait_up(learner, SYNCER)
  learner.send(SYNCER, says.request(0, 0))
  assert shard.receive(SECONDS)


# --- what is dropped is said ----------------------------------------------------------------------


@with_and_without_keys
def test_who_drops_frames_knows_how_many_whose_and_why(net):
  shard, learner = net.connect(SYNCER), net.connect("learner-0")

  def damaged(header: bytes) -> bytes:
    return header[:-1] + bytes([header[-1] ^ 1])

  payload = np.zeros(100, np.uint8)
  for number in range(5):
    learner.send(SYNCER, RequestMoments(0, 0, (number,)), damaged)
    learner.send(SYNCER, says.push(0, 0, 0, number, 0, 1, 1, "f32", payload), damaged)
  learner.send(SYNCER, says.request(0, 0))
  assert shard.receive(SECONDS)[1] == says.request(0, 0)
  net.wait_until(lambda: shard.drops["learner-0"][0] == 10)
  assert "CRC" in shard.drops["learner-0"][1]
  shard.send("learner-0", says.pull(0, 0, 0, 0, 1, 0), damaged)
  net.wait_until(lambda: learner.drops.get(SYNCER))
  assert learner.receive(0.1) is None and learner.drops[SYNCER][0] == 1


@with_and_without_keys
def test_a_message_of_another_incarnation_than_was_greeted_is_dropped(net):
  shard, learner = net.open(SYNCER, 4), net.open("learner-0", 7)
  learner.dial(SYNCER, net.url(SYNCER))
  net.wait_up(learner, SYNCER)
  payload = np.zeros(100, np.uint8)
  for incarnation in (6, 8, 1 << 40):
    learner.send(SYNCER, says.request(0, incarnation))
    learner.send(SYNCER, says.push(0, incarnation, 0, 1, 0, 1, 1, "f32", payload))
  learner.send(SYNCER, says.request(0, 7))
  assert shard.receive(SECONDS)[1] == says.request(0, 7)
  assert shard.receive(0.1) is None
  net.wait_until(lambda: shard.drops["learner-0"][0] == 6)
  assert "greeted as incarnation 7" in shard.drops["learner-0"][1]
  for incarnation in (3, 5, 4):
    shard.send("learner-0", says.pull(0, incarnation, 7, 0, 1, 0))
  assert learner.receive(SECONDS)[1].incarnation == 4
  assert learner.counters.malformed == 2


# --- who does not read ----------------------------------------------------------------------------


def test_a_peer_that_does_not_read_costs_no_memory_for_ever():
  net = Net("run", "plan")
  shard = net.connect(SYNCER)
  with socket.socket() as peer:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.connect(host_and_port(net.url(SYNCER)))
    greeting = frames.Greeting("run", "plan", "learner-0", 0, b"abcdefgh", 1)
    peer.sendall(frames.encode(greeting))
    net.wait_until(lambda: shard.links().get("learner-0", {}).get("state") == "up")
    large = Recovered(0, 0, 0, tuple(range(50_000)), ())
    for _ in range(2000):
      shard.send("learner-0", large)
      peer.sendall(frames.encode(frames.Beat()))  # and is not silent
    net.wait_until(lambda: shard.counters.undelivered > 300)
    assert shard.counters.undelivered > 300
    told, member = threading.Event(), shard._accepted["learner-0"]
    for seconds in range(20):  # of signs of life
      shard.control_thread.call(shard._look_after, member, time.monotonic() + seconds)
    shard.control_thread.call(told.set)
    assert told.wait(SECONDS)
    assert len(member.control.wire._sending) <= 3
  net.close()


# --- who stood still ------------------------------------------------------------------------------

SLEEPER = """
import json, sys
from ddiloco.config import NetworkConfig
from ddiloco.network.endpoint import NetworkEndpoint, RunIdentity
from tests.network.net import push
url, settings = sys.argv[1], NetworkConfig(**json.loads(sys.argv[2]))
learner = NetworkEndpoint("learner-0", 0, RunIdentity("run", "plan", 1 << 30, 1 << 30), settings)
learner.dial("syncer-0", url)
while learner.links()["syncer-0"]["state"] != "up":
  learner.receive(0.01)
learner.send("syncer-0", push(1, 20_000_000))
sys.stdin.readline()
print(learner.counters.undelivered)
learner.close()
"""


def test_a_process_that_was_stopped_does_not_take_its_own_pause_for_its_peers_silence():
  quick = dataclasses.replace(QUICK, silence_seconds=8.0)  # a busy machine is late, too
  with contextlib.ExitStack() as stack:
    net = stack.enter_context(contextlib.closing(Net("run", "plan", settings=quick)))
    shard = net.connect(SYNCER)
    address = host_and_port(net.url(SYNCER))
    link = stack.enter_context(Link(address, bits_per_second=80e6))
    process = subprocess.Popen(
      [sys.executable, "-c", SLEEPER, f"tcp://127.0.0.1:{link.port}"]
      + [json.dumps(dataclasses.asdict(quick))],
      **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True},
    )
    try:
      net.wait_until(lambda: link.bytes.forward > 500_000)
      process.send_signal(signal.SIGSTOP)
      net.wait_until(lambda: "silent" in shard.links()["learner-0"]["reason"])
      assert shard.receive(1.5) is None
      process.send_signal(signal.SIGCONT)
      arrived = shard.receive(START_SECONDS)
      assert arrived and arrived.message.round == 1, "it went on with what it was sending"
      assert process.communicate("\n", timeout=START_SECONDS)[0].strip() == "0"
    finally:
      process.kill()


# --- who says nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize(
  "data", [frames.encode(frames.Beat()), frames.PREFIX.pack(frames.STRANGER_FRAME_BYTES + 1, 0)]
)
def test_a_stranger_that_does_not_greet_is_sent_off_at_once(data):
  with contextlib.closing(Net("run", "plan")) as net:
    shard = net.connect(SYNCER)
    address = host_and_port(net.url(SYNCER))
    with socket.create_connection(address, timeout=STRANGER_SECONDS / 2) as stranger:
      stranger.sendall(data)
      assert stranger.recv(100) == b"", "before it is too old"
    assert shard.counters.malformed == shard.counters.refused == 1


def hear(connected: socket.socket) -> bool:
  frames.fill(connected, memoryview(bytearray(1)))
  return True


@contextlib.contextmanager
def a_door(most: int, seconds: float, meet=hear, keys=None):
  """A function that connects to a door, and the door's counters."""
  counters, (listener, url) = Counters(), frames.bind("tcp://127.0.0.1:0")
  door = Door(listener, keys, meet, most, seconds, counters)
  with contextlib.closing(door), contextlib.ExitStack() as stack:

    def come() -> socket.socket:
      return stack.enter_context(socket.create_connection(host_and_port(url), SECONDS))

    yield come, counters


def test_connections_of_nobody_are_cut_off_when_they_are_too_many():
  with a_door(most=20, seconds=SECONDS) as (come, counters):
    idlers = [come() for _ in range(30)]
    assert [idler.recv(1) for idler in idlers[:10]] == [b""] * 10, "the oldest go"
    for idler in idlers[10:]:
      idler.setblocking(False)
      with pytest.raises(BlockingIOError):
        idler.recv(1)
    wait_for(lambda: counters.refused >= 10)
    assert counters.refused == 10


def test_who_is_let_in_counts_as_a_stranger_no_more():
  threads, members, held = [], [], []

  def meet(connected: socket.socket) -> bool:
    threads.append(threading.current_thread())
    held.append(connected)
    return hear(connected)

  with a_door(2, SECONDS, meet) as (come, _):
    for n in range(4):
      members.append(come())
      members[n].sendall(b"x")
      wait_for(lambda n=n: len(threads) > n and not threads[n].is_alive())
    for member in members:
      member.setblocking(False)
      with pytest.raises(BlockingIOError):
        member.recv(1)
    for each in held:
      each.close()


def test_a_connection_of_nobody_that_says_nothing_is_cut_off_after_a_while():
  with a_door(most=20, seconds=0.2) as (come, counters):
    assert come().recv(1) == b"" and counters.refused == 1, "counted before it is cut off"


def test_what_was_said_to_a_stranger_is_read_before_its_connection_is_closed():
  def refuse(connected: socket.socket) -> bool:
    connected.sendall(b"no")
    return False

  with a_door(20, SECONDS, refuse) as (come, _):
    stranger = come()
    stranger.sendall(bytes(100_000))  # which nobody reads: closed at once, it would be reset
    assert stranger.recv(10) == b"no" and stranger.recv(10) == b""


def test_who_is_gone_before_it_is_accepted_holds_up_nobody(monkeypatch):
  """A key has come to be unreadable, or the far end has reset its connection: the next one comes at
  once, and not after the pause for a lack of descriptors."""
  monkeypatch.setattr(frames, "PAUSE_SECONDS", 10 * SECONDS)
  tries, context = [], ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

  def gone():
    tries.append(1)
    if len(tries) < 20:
      raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
    return context

  keys = types.SimpleNamespace(context=gone)
  with a_door(50, SECONDS, keys=keys) as (come, _):
    for _ in range(19):
      assert come().recv(1) == b""
    come().sendall(b"no handshake")
    wait_for(lambda: len(tries) == 20)


def test_what_fails_for_one_stranger_does_not_end_the_network_thread(monkeypatch):
  failed, busy, done = [], threading.Event(), []
  thread = peers.IoThread("asked", failed.append)
  thread.start()
  with pytest.raises(OSError, match="gone"):
    thread.ask(gone := mock.Mock(side_effect=OSError("gone")))
  assert gone.called and thread.ask(lambda: 5) == 5
  monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.1)
  thread.call(busy.wait, SECONDS)
  with pytest.raises(TimeoutError):
    thread.ask(done.append, "its connection is closed by now")
  busy.set()
  monkeypatch.undo()
  assert thread.ask(lambda: 6) == 6 and not done and not failed
  thread.stop()
  thread.join(SECONDS)


def test_who_asks_a_thread_that_ends_is_told_so_at_once(monkeypatch):
  """Strangers at the door of an endpoint that was closed waited for ten seconds."""
  monkeypatch.setattr(peers, "ANSWER_SECONDS", SECONDS)
  thread, done = peers.IoThread("asked", print), []
  ends, asked = threading.Event(), threading.Event()
  call = thread.call

  def end() -> None:
    thread.loop.stop()
    ends.set()
    asked.wait(SECONDS)

  thread.start()
  call(end)
  assert ends.wait(SECONDS)
  monkeypatch.setattr(thread, "call", lambda *given: call(*given) or asked.set())
  began = time.monotonic()
  for _ in range(2):  # before its end, and after it
    with pytest.raises(TimeoutError, match="has ended"):
      thread.ask(done.append, 1)
  assert not done and time.monotonic() - began < SECONDS / 2


def test_who_waits_while_no_descriptor_is_left_does_not_keep_the_thread_busy(monkeypatch):
  accept, failures = socket.socket.accept, []

  def crowded(listener):
    if len(failures) < 3:
      failures.append(time.monotonic())
      raise OSError(errno.EMFILE, "Too many open files")
    return accept(listener)

  monkeypatch.setattr(socket.socket, "accept", crowded)
  with a_door(20, 0.2) as (come, _):
    assert come().recv(1) == b"", "a moment later it looks again"
    assert failures[2] - failures[0] >= 0.2


CROWDED = """
import os, resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from tests import says
from tests.network.net import Net
net = Net("run", "plan", secure=sys.argv[1] == "keys")
shard, early = net.connect("syncer-0"), net.connect("learner-0")
print(net.url("syncer-0"), flush=True)
sys.stdin.readline()  # they all have come
deadline = time.monotonic() + 20.0
while True:  # a burst may have them all, until it is cut off a moment later
  try:
    if len(os.listdir("/proc/self/fd")) < 200:
      break
  except OSError:
    pass
  assert time.monotonic() < deadline, "no descriptors are left for files"
  time.sleep(0.01)
print("comes", net._folder.name if net._folder else "", flush=True)
early.send("syncer-0", says.request(0, 0))
for _ in range(2):
  sender, *_ = shard.receive(60.0)
  shard.send(sender, says.pull(0, 0, 0, 0, 1, 0))
assert early.receive(20.0)
sys.stdin.readline()  # the other one has its answer too
kept = [open(os.devnull) for _ in range(32)]
print("fine", len(os.listdir("/proc/self/fd")) - 32, flush=True)
net.close()
"""

LATE = """
import pathlib, sys, time
from tests import says
from tests.network.net import QUICK
from ddiloco.network.endpoint import NetworkEndpoint, RunIdentity
from ddiloco.network.keys import Keys
port, folder = sys.argv[1], sys.argv[2]
keys = Keys.load(pathlib.Path(folder), "learner-1") if folder else None
identity = RunIdentity("run", "plan", 1 << 30, 1 << 30)
learner = NetworkEndpoint("learner-1", 0, identity, QUICK, keys=keys)
learner.dial("syncer-0", f"tcp://127.0.0.1:{port}")
deadline = time.monotonic() + 40.0
while learner.links()["syncer-0"]["state"] != "up":
  assert time.monotonic() < deadline, learner.links()
  time.sleep(0.01)
learner.send("syncer-0", says.request(1, 0))
print(learner.receive(20.0).sender, flush=True)
learner.close(linger_seconds=0)
"""

IDLERS = """
import socket, sys, time
port, held = int(sys.argv[1]), []
for number in range(316):
  try:
    held.append(socket.create_connection(("127.0.0.1", port), timeout=2.0))
    if number % 3 == 0:
      held[-1].sendall(b"\\x16\\x03\\x01\\x00")  # begins to speak TLS, and stops
  except OSError:
    pass
print(len(held), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("keys", ["plain", "keys"])
def test_hundreds_of_idle_connections_keep_no_member_out_and_leave_room_for_files(keys):
  """316 of them, to a process that may have 256 descriptors and cannot raise that."""
  with contextlib.ExitStack() as stack:

    def start(*program: str) -> subprocess.Popen:
      pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
      process = subprocess.Popen([sys.executable, "-c", *program], **pipes, text=True)
      stack.callback(process.communicate)
      stack.callback(process.kill)
      return process

    shard = start(CROWDED, keys)
    port = shard.stdout.readline().strip().rpartition(":")[2]
    idlers = start(IDLERS, port)
    assert int(idlers.stdout.readline()) > 200, "most could connect, if only for a moment"
    shard.stdin.write("\n")
    shard.stdin.flush()
    comes, _, folder = shard.stdout.readline().strip().partition(" ")
    assert comes == "comes", shard.communicate()[1]
    said, wrong = start(LATE, port, folder).communicate()
    assert said == "syncer-0\n", wrong
    said, wrong = shard.communicate("\n")
    assert said.startswith("fine"), wrong
    assert int(said.split()[1]) < 200
