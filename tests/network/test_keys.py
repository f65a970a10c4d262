"""Only who has a listed key gets in, under its owner's address; everybody else is counted."""

import contextlib
import errno
import os
import random
import shutil
import socket as plain_sockets
import subprocess
import sys
import time
import types

import pytest
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ddiloco.checks import ConfigError
from ddiloco.network import keys
from ddiloco.network.keys import (
  Arrivals,
  Keys,
  make_authenticator,
  make_keys,
  public_file,
  require_keys,
  secret_file,
)

SECONDS = 20  # until a test gives up on an event


@pytest.fixture
def folder(tmp_path):
  make_keys(tmp_path, learners=2, shards=2)
  return tmp_path


class Shard:
  """A guarded socket of syncer-0, and everything that was said about refusals."""

  def __init__(self, folder):
    self.keys = Keys.load(folder, "syncer-0")
    self.context = zmq.Context()
    self.reasons: list[str] = []
    self.gone = 0
    self.authenticator = make_authenticator(self.context, self.keys, self.reasons.append)
    self.authenticator.start()
    self.socket = self.context.socket(zmq.ROUTER)
    self.keys.guard(self.socket)
    self.arrivals = Arrivals()
    self.monitor = self.socket.get_monitor_socket(Arrivals.EVENTS)
    self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
    self.url = f"tcp://127.0.0.1:{self.port}"

  def wait_refused(self, count: int) -> list[str]:
    deadline = time.monotonic() + SECONDS
    while len(self.reasons) < count and time.monotonic() < deadline:
      self.look(timeout_ms=20)
    assert len(self.reasons) >= count, self.reasons
    return self.reasons

  def look(self, timeout_ms: int = 0) -> None:
    while self.monitor.poll(timeout_ms):
      event = recv_monitor_message(self.monitor)
      reason = self.arrivals.see(int(event["event"]), int(event["value"]))
      self.gone += event["event"] == zmq.EVENT_DISCONNECTED
      self.reasons += [reason] if reason else []
      timeout_ms = 0

  def receive(self, timeout_ms: int = 1000 * SECONDS) -> tuple[str, bytes] | None:
    if not self.socket.poll(timeout_ms):
      return None
    frame = self.socket.recv_multipart(copy=False)[-1]
    return frame.get("User-Id"), frame.bytes

  def close(self):
    self.authenticator.stop()
    self.context.destroy(0)


@pytest.fixture
def shard(folder):
  shard = Shard(folder)
  yield shard
  shard.close()


@pytest.fixture
def dial():
  """A DEALER that says hello, with these keys, to the server with this key."""
  context, dialed = zmq.Context(), []  # a socket that nobody holds is closed

  def dial(url, pair=None, server_key=b"", say=b"hello"):
    socket = context.socket(zmq.DEALER)
    socket.reconnect_ivl, socket.linger = 50, 0
    if pair:
      (socket.curve_publickey, socket.curve_secretkey), socket.curve_serverkey = pair, server_key
    dialed.append((socket, socket.get_monitor_socket()))
    socket.connect(url)
    socket.send(say)
    return dialed[-1]

  yield dial
  context.destroy(0)


def pair(keys):
  return keys.public, keys.secret


def wait_event(monitor, *wanted):
  while monitor.poll(1000 * SECONDS):
    event = recv_monitor_message(monitor)
    if event["event"] in wanted:
      return event
  raise AssertionError("no such event")


# --- files ----------------------------------------------------------------------------------------


def test_makes_a_pair_for_every_role_that_only_its_user_reads(tmp_path):
  folder = tmp_path / "new" / "keys"
  made = make_keys(folder, learners=2, shards=1)
  assert made == ["learner-0", "learner-1", "syncer-0", "evaluator"]
  assert sorted(p.name for p in (folder / "public").iterdir()) == sorted(f"{m}.key" for m in made)
  for name in made:
    assert (folder / "secret" / f"{name}.key_secret").stat().st_mode & 0o777 == 0o600
    assert b"secret" not in (folder / "public" / f"{name}.key").read_bytes()
    assert Keys.load(folder, name).address == name
  assert (folder / "secret").stat().st_mode & 0o777 == 0o700


def test_makes_what_is_missing_and_replaces_nothing(folder):
  before = {p: p.read_bytes() for p in folder.rglob("*.key*")}
  assert len(before) == 10
  assert make_keys(folder, learners=2, shards=2) == []
  assert make_keys(folder, learners=3, shards=2) == ["learner-2"]
  assert {p: p.read_bytes() for p in before} == before


def test_a_secret_that_was_moved_away_is_not_replaced(folder):
  secret_file(folder, "learner-1").unlink()
  assert make_keys(folder, learners=2, shards=2) == []
  assert not secret_file(folder, "learner-1").exists()


def test_a_pair_whose_making_was_cut_off_is_completed(folder):
  wanted = Keys.load(folder, "learner-1").public
  public_file(folder, "learner-1").unlink()
  assert make_keys(folder, learners=2, shards=2) == ["learner-1"]
  assert Keys.load(folder, "learner-1").public == wanted


MAKER = """
import sys
from pathlib import Path
from ddiloco.network.keys import make_keys
print("go", flush=True)
make_keys(Path(sys.argv[1]), learners=100, shards=0)
"""


def test_makers_that_are_killed_or_run_at_once_leave_whole_pairs(tmp_path):
  seed = random.randrange(1 << 32)
  print(f"seed {seed}")
  chance, cut = random.Random(seed), 0
  for _ in range(3):
    command = [sys.executable, "-c", MAKER, str(tmp_path)]
    makers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for maker in makers:
      maker.stdout.readline()
    time.sleep(chance.uniform(0, 0.05))
    for maker in makers:
      maker.kill()
      cut += maker.wait() != 0
      maker.stdout.close()
    made = len(list((tmp_path / "public").glob("*.key")))
    print(f"{made} keys so far")
  assert cut, "none was killed while it worked"
  make_keys(tmp_path, learners=100, shards=0)
  owners, problems = keys.read_public(tmp_path)
  assert len(owners) == 101 and problems == []
  for address in owners.values():
    public, secret = keys.read(secret_file(tmp_path, address))
    assert owners[public] == address and zmq.curve_public(secret) == public
    assert secret_file(tmp_path, address).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
  (tmp_path / "keys").write_text("a file")
  with pytest.raises(ConfigError, match=r"--keys = .*keys': cannot be written .*Fix: "):
    make_keys(tmp_path / "keys", learners=1, shards=1)
  with pytest.raises(ConfigError, match=r"--learners = -1: .*Fix: "):
    make_keys(tmp_path, learners=-1, shards=1)


def _drop_public(folder):
  public_file(folder, "learner-1").unlink()


def _drop_secret(folder):
  secret_file(folder, "learner-1").unlink()


def _open_to_group(folder):
  secret_file(folder, "learner-1").chmod(0o640)


def _other_pair(folder):
  shutil.copy(public_file(folder, "learner-0"), public_file(folder, "learner-1"))


def _public_in_place_of_secret(folder):
  secret_file(folder, "learner-1").write_bytes(public_file(folder, "learner-1").read_bytes())


def _half_a_secret(folder):
  path = secret_file(folder, "learner-1")
  path.write_bytes(path.read_bytes()[:-20])


def _two_roles_one_key(folder):
  shutil.copy(public_file(folder, "learner-0"), public_file(folder, "learner-7"))


def _garbage_in_public(folder):
  public_file(folder, "learner-0").write_bytes(os.urandom(300) + b"\npublic-key\n")


def _stranger_in_public(folder):
  shutil.copy(public_file(folder, "learner-0"), folder / "public" / "learner-00.key")


@pytest.mark.parametrize(
  "spoil, says",
  [
    (_drop_public, r"public/learner-1.key': No such file.*Fix: copy it from where"),
    (_drop_secret, r"secret/learner-1.key_secret': No such file"),
    (_open_to_group, r"others may read \(mode 0640\). Fix: chmod 600 "),
    (_other_pair, r"public/learner-1.key': does not belong"),
    (_public_in_place_of_secret, r"learner-1.key_secret': is damaged"),
    (_half_a_secret, r"learner-1.key_secret': is damaged"),
    (_two_roles_one_key, r"learner-7.key': is the same key as that of learner-0"),
    (_garbage_in_public, r"learner-0.key': is damaged"),
    (_stranger_in_public, r"learner-00.key': is not named after a role"),
  ],
)
def test_what_is_wrong_with_the_files_is_said(folder, spoil, says):
  Keys.load(folder, "learner-1")
  spoil(folder)
  with pytest.raises(ConfigError, match=rf"^--keys = .*{says}"):
    Keys.load(folder, "learner-1")


def test_the_secret_is_not_shown(folder):
  keys = Keys.load(folder, "learner-1")
  assert keys.secret.decode() not in repr(keys)
  assert "learner-1" in repr(keys)


# --- who is who -----------------------------------------------------------------------------------


def test_owner_follows_the_folder(folder, monkeypatch):
  now = [100.0]
  monkeypatch.setattr(keys, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
  mine = Keys.load(folder, "syncer-0")
  public = {a: Keys.load(folder, a).public for a in ("learner-0", "learner-1")}
  assert mine.owner(public["learner-1"]) == "learner-1"
  assert mine.owner(z85.decode(public["learner-1"])) == "learner-1", "ZeroMQ asks with raw keys"
  stranger, _ = zmq.curve_keypair()
  assert mine.owner(stranger) is None

  public_file(folder, "learner-1").unlink()
  assert mine.owner(public["learner-1"]) is None, "at once"
  assert mine.owner(public["learner-0"]) == "learner-0"

  now[0] += 10
  make_keys(folder, learners=4, shards=2)
  late = [keys.read(public_file(folder, f"learner-{m}"))[0] for m in (2, 3)]
  assert mine.owner(late[0]) == "learner-2"
  shutil.copy(public_file(folder, "learner-0"), public_file(folder, "learner-9"))
  now[0] += 10
  assert mine.owner(stranger) is None
  assert mine.owner(public["learner-0"]) is None, "a key of two roles is nobody's"
  assert mine.owner(late[1]) == "learner-3", "and disturbs no other"


def test_strangers_do_not_make_it_read_more_than_once_a_second(folder, monkeypatch):
  now, reads = [100.0], []
  monkeypatch.setattr(keys, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
  mine = Keys.load(folder, "syncer-0")
  real = keys.read_public
  monkeypatch.setattr(keys, "read_public", lambda f: reads.append(now[0]) or real(f))
  for _ in range(1000):
    now[0] += 0.01
    assert mine.owner(zmq.curve_keypair()[0]) is None
  assert 8 <= len(reads) <= 10


def unreadable(path):
  raise OSError(errno.EMFILE, "Too many open files", str(path))


def test_a_folder_that_cannot_be_read_for_a_moment_is_read_again(folder, monkeypatch):
  now = [100.0]
  monkeypatch.setattr(keys, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
  mine = Keys.load(folder, "syncer-0")
  make_keys(folder, learners=3, shards=1)
  late = keys.read(public_file(folder, "learner-2"))[0]
  now[0] += 10
  with monkeypatch.context() as patch:
    patch.setattr(keys, "read_public", unreadable)
    assert mine.owner(late) is None
  now[0] += 10
  assert mine.owner(late) == "learner-2"


def test_a_folder_that_vanishes_lets_nobody_in(folder):
  mine = Keys.load(folder, "syncer-0")
  learner = Keys.load(folder, "learner-0").public
  shutil.rmtree(folder / "public")
  assert mine.owner(learner) is None
  with pytest.raises(ConfigError, match=r"public/syncer-1.key': No such file"):
    mine.server_key("syncer-1")


# --- the door -------------------------------------------------------------------------------------


def test_a_listed_key_comes_in_under_its_owners_address(folder, shard, dial):
  for address in ("learner-1", "evaluator", "syncer-1"):
    mine = Keys.load(folder, address)
    assert mine.server_key("syncer-0") == shard.keys.public
    client, monitor = dial(shard.url, pair(mine), mine.server_key("syncer-0"), address.encode())
    assert shard.receive() == (address, address.encode())
    wait_event(monitor, zmq.EVENT_HANDSHAKE_SUCCEEDED)
    client.close()
  deadline = time.monotonic() + SECONDS
  while shard.gone < 3 and time.monotonic() < deadline:
    shard.look(timeout_ms=20)
  assert (shard.gone, shard.reasons) == (3, [])


def test_unlock_dials_only_the_shard_that_was_meant(folder, shard):
  context = zmq.Context()
  with context.socket(zmq.DEALER) as socket:
    Keys.load(folder, "learner-0").unlock(socket, "syncer-0")
    socket.connect(shard.url)
    socket.send(b"hello")
    assert shard.receive() == ("learner-0", b"hello")
    socket.linger = 0
  context.term()


GARBAGE = {
  "http": b"GET / HTTP/1.0\r\n\r\n",
  "zeros": bytes(200),
  "ones": b"\xff" * 200,
  "not curve": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48) + b"\x04\x26\x05HELLO" * 8,
  "another mechanism": b"\xff" + bytes(7) + b"\x01\x7f\x03\x00NULL" + bytes(49),
  "half a greeting": b"\xff" + bytes(7) + b"\x01\x7f\x03\x00",
  "nothing": b"",
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_on_the_port_is_counted_once_and_harms_nobody(folder, shard, dial, garbage):
  learner = Keys.load(folder, "learner-0")
  listed, _ = dial(shard.url, pair(learner), shard.keys.public)
  assert shard.receive() == ("learner-0", b"hello")
  with plain_sockets.create_connection(("127.0.0.1", shard.port)) as stranger:
    stranger.settimeout(SECONDS)
    with contextlib.suppress(OSError):  # it may have been cut off already
      stranger.sendall(GARBAGE[garbage])
      stranger.shutdown(plain_sockets.SHUT_WR)
      while stranger.recv(4096):
        pass
  assert len(shard.wait_refused(1)) == 1
  listed.send(b"again")
  assert shard.receive() == ("learner-0", b"again")
  assert shard.receive(timeout_ms=0) is None
  shard.look()
  assert len(shard.reasons) == 1


def test_no_key_gets_nothing_through(shard, dial):
  dial(shard.url)
  assert "without keys" in shard.wait_refused(1)[0]
  assert shard.receive(timeout_ms=0) is None


def test_a_wrong_server_key_gets_nothing_through_and_tries_again_by_itself(folder, shard, dial):
  learner = Keys.load(folder, "learner-0")
  _, monitor = dial(shard.url, pair(learner), zmq.curve_keypair()[0])
  wait_event(monitor, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)  # all that it learns
  wait_event(monitor, zmq.EVENT_CONNECT_RETRIED)
  wait_event(monitor, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
  assert "another key" in shard.wait_refused(2)[0]
  assert shard.receive(timeout_ms=0) is None


def test_who_is_refused_learns_it_and_must_dial_again(folder, shard, dial):
  """What a transport does on EVENT_HANDSHAKE_FAILED_AUTH: libzmq itself gives up on that peer."""
  make_keys(folder / "other", learners=6, shards=1)
  late = Keys.load(folder / "other", "learner-5")
  socket, monitor = dial(shard.url, pair(late), shard.keys.public)
  assert wait_event(monitor, zmq.EVENT_HANDSHAKE_FAILED_AUTH)["value"] == 400
  wait_event(monitor, zmq.EVENT_DISCONNECTED)
  assert shard.wait_refused(1) == ["127.0.0.1: its key is not listed"]

  shutil.copy(public_file(folder / "other", "learner-5"), public_file(folder, "learner-5"))
  time.sleep(keys.REREAD_SECONDS)  # what the shard has read may be as old
  assert not monitor.poll(0), "it does not try again"
  socket.disconnect(shard.url)
  socket.connect(shard.url)  # the same socket will do; what was queued is lost
  socket.send(b"now")
  assert shard.receive() == ("learner-5", b"now")

  public_file(folder, "learner-5").unlink()
  socket.disconnect(shard.url)
  socket.connect(shard.url)
  wait_event(monitor, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
  assert len(shard.wait_refused(2)) == 2 and shard.receive(timeout_ms=0) is None


def test_nobody_at_the_door_lets_nobody_in(folder, dial):
  shard = Shard(folder)
  try:
    shard.authenticator.stop()
    dial(shard.url, pair(Keys.load(folder, "learner-0")), shard.keys.public)
    shard.wait_refused(1)
    assert shard.receive(timeout_ms=0) is None
    shard.authenticator.start()
    dial(shard.url, pair(Keys.load(folder, "learner-0")), shard.keys.public)
    assert shard.receive() == ("learner-0", b"hello")
  finally:
    shard.close()


def test_odd_questions_do_not_end_the_door(folder, shard, dial):
  key = z85.decode(shard.keys.public)
  asker = shard.context.socket(zmq.DEALER)
  asker.connect("inproc://zeromq.zap.01")
  head = [b"", b"1.0", b"7", b"ddiloco", b"1.2.3.4", b"", b"CURVE"]
  odd = [
    [b"", b""],
    [b"", b"1.0"],
    head,
    [*head, b"short"],
    [*head, key, key],
    [b"", b"2.0", *head[2:], key],
    [*head[:4], b"\xff\xfe", b"", b"PLAIN", b"user", b"password"],
    [*head[:6], b"NULL"],
    [*head, bytes(32)],
  ]
  for question in odd:
    asker.send_multipart(question)
    assert asker.poll(1000 * SECONDS), question
    assert asker.recv_multipart()[3] == b"400", question
  assert len(shard.wait_refused(len(odd))) == len(odd)
  for dropped in ([b"no delimiter"], [b""], [b"", b""], [b"x"] * 9):
    asker.send_multipart(dropped)
  assert asker.recv_multipart()[3] == b"400", "of the one that is a question"
  asker.send_multipart([*head, key])
  assert asker.poll(1000 * SECONDS)
  shown = b"\x03Key\x00\x00\x00\x28" + shard.keys.public
  assert asker.recv_multipart() == [b"", b"1.0", b"7", b"200", b"OK", b"syncer-0", shown]
  asker.close()
  dial(shard.url, pair(Keys.load(folder, "learner-0")), shard.keys.public)
  assert shard.receive() == ("learner-0", b"hello")


def test_stop_is_quick_and_may_come_twice(shard):
  start = time.monotonic()
  shard.authenticator.stop()
  shard.authenticator.stop()
  assert time.monotonic() - start < 2


def test_arrivals_count_exactly_while_strangers_hang_on():
  """Connections end in one of five ways and stay for a while; file descriptors are used again."""
  seed = random.randrange(1 << 32)
  print(f"seed {seed}")
  chance = random.Random(seed)
  ends = {  # what is told after a connection was accepted, times it is to be counted
    "good": (zmq.EVENT_HANDSHAKE_SUCCEEDED, 0),
    "not listed": (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 0),
    "plain": (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 1),
    "wrong key": (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 1),
    "garbage": (None, 1),
  }
  for _ in range(200):
    arrivals, wanted, events, open_, free = Arrivals(), 0, [], [], set(range(8))
    for _ in range(60):
      if free and (chance.random() < 0.5 or not open_):
        fd, (end, count) = free.pop(), ends[chance.choice(sorted(ends))]
        events += [(zmq.EVENT_ACCEPTED, fd)] + ([(end, 32)] if end else [])
        open_.append(fd)
        wanted += count
      else:
        fd = open_.pop(chance.randrange(len(open_)))
        events.append((zmq.EVENT_DISCONNECTED, fd))
        free.add(fd)
    events += [(zmq.EVENT_DISCONNECTED, fd) for fd in open_]
    assert sum(arrivals.see(*event) != "" for event in events) == wanted


# --- which addresses need keys --------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "LOCALHOST", "[::1]"])
def test_loopback_needs_no_keys(host):
  require_keys(f"tcp://{host}:7000", None, "--bind")
  require_keys(f"tcp://{host}:0", None, "--bind")


@pytest.mark.parametrize(
  "host", ["*", "0.0.0.0", "[::]", "10.0.0.7", "syncer-0.example.org", "[fd00::1]", "127.1", "eth0"]
)
def test_other_addresses_need_keys(folder, host):
  with pytest.raises(ConfigError, match=r"--bind = 'tcp://.*needs keys. Fix: .*ddiloco keys"):
    require_keys(f"tcp://{host}:7000", None, "--bind")
  require_keys(f"tcp://{host}:7000", Keys.load(folder, "learner-0"), "--bind")


@pytest.mark.parametrize(
  "url",
  [
    "", "127.0.0.1:7000", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:65535",
    "tcp://127.0.0.1:-1", "tcp://127.0.0.1:7000/", "tcp://:7000", "ipc:///tmp/x", "tcp://::1:7000",
    "tcp://[fe80::zz]:1", "tcp://[:::]:1", "tcp://127.0.0.1:7000 ", "tcp://1.2.3.4;127.0.0.1:7000",
    "inproc://x", "tcp://127.0.0.1@10.0.0.1:70", "tcp://127.0.0.1:*", "tcp://127.0.0.1:٧",
  ],
)  # fmt: skip
def test_what_is_no_address_is_refused(folder, url):
  for mine in (None, Keys.load(folder, "learner-0")):
    with pytest.raises(ConfigError, match=r"--syncers = .*must be tcp://HOST:PORT.*Fix: "):
      require_keys(url, mine, "--syncers")
