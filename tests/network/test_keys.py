"""Only who has a listed key gets in, under its owner's address; everybody else is counted."""

import contextlib
import errno
import os
import random
import shutil
import signal
import socket as plain_sockets
import ssl
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from ddiloco.checks import ConfigError, Unanswered
from ddiloco.network import frames, keys
from ddiloco.network.keys import Keys, make_keys, public_file, require_keys, secret_file
from ddiloco.protocol.values import replace
from tests import says

SECONDS = 20  # until a test gives up on an event


@pytest.fixture
def folder(tmp_path):
  make_keys(tmp_path, learners=2, shards=2)
  return tmp_path


def new_certificate() -> bytes:
  return ssl.PEM_cert_to_DER_cert(keys._CERTIFICATE.search(keys._new_pair("a"))[0].decode())


# --- files ----------------------------------------------------------------------------------------


def test_makes_a_pair_for_every_role_that_only_its_user_reads(tmp_path):
  folder = tmp_path / "new" / "keys"
  made = make_keys(folder, learners=2, shards=1)
  assert made == ["learner-0", "learner-1", "syncer-0", "evaluator"]
  assert make_keys(tmp_path / "others", learners=0, shards=0) == ["evaluator"]
  assert sorted(p.name for p in (folder / "public").iterdir()) == sorted(f"{m}.key" for m in made)
  for name in made:
    assert (folder / "secret" / f"{name}.key_secret").stat().st_mode & 0o777 == 0o600
    assert b"secret" not in (folder / "public" / f"{name}.key").read_bytes()
    assert Keys.load(folder, name).address == name
  assert (folder / "secret").stat().st_mode & 0o777 == 0o700


def test_makes_what_is_missing_and_replaces_nothing(folder):
  before = {p: p.read_bytes() for p in folder.rglob("*.key*")}
  assert len(before) == 10
  (folder / "secret").chmod(0o755)
  assert make_keys(folder, learners=2, shards=2) == []
  assert (folder / "secret").stat().st_mode & 0o777 == 0o700
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
from ddiloco.network import keys
make, made = keys._make, []

def make_some(*given):
  made.extend([1] if (new := make(*given)) else [])
  if new and len(made) == 1:
    print("go", flush=True)  # when all is imported
  if len(made) == 15:
    sys.stdin.read()  # until it is killed
  return new

keys._make = make_some
keys.make_keys(Path(sys.argv[1]), learners=100, shards=0)
"""


def test_makers_that_are_killed_or_run_at_once_leave_whole_pairs(tmp_path):
  seed = random.randrange(1 << 32)
  print(f"seed {seed}")
  chance, pipes = random.Random(seed), dict.fromkeys(["stdin", "stdout"], subprocess.PIPE)
  for _ in range(3):
    command = [sys.executable, "-c", MAKER, str(tmp_path)]
    makers = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for maker in makers:
      assert maker.stdout.readline() == b"go\n"
    time.sleep(chance.uniform(0, 0.05))
    for maker in makers:
      maker.kill()
      assert maker.wait() == -signal.SIGKILL, "it ended by itself"
      maker.stdout.close()
      maker.stdin.close()
    made = len(list((tmp_path / "public").glob("*.key")))
    print(f"{made} keys so far")
  make_keys(tmp_path, learners=100, shards=0)
  _, owners, problems = keys.read_public(tmp_path, {})
  assert len(owners) == 101 and problems == []
  for address in owners.values():
    public, secret = keys.read(secret_file(tmp_path, address))
    assert owners[public] == address and secret and keys._fits(secret_file(tmp_path, address))
    assert secret_file(tmp_path, address).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
  (tmp_path / "keys").write_text("a file")
  with pytest.raises(ConfigError, match=r"--keys = .*keys': cannot be written .*Fix: "):
    make_keys(tmp_path / "keys", learners=1, shards=1)


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


def _empty_certificate_in_public(folder):
  text = "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"
  public_file(folder, "learner-0").write_text(text)


def _curve_key_in_public(folder):
  text = '# CURVE key of learner-0\nmetadata\ncurve\n    public-key = "Yne@$w-vo<fVvi]a"\n'
  public_file(folder, "learner-0").write_text(text)


def _curve_secret(folder):
  secret_file(folder, "learner-1").write_text('curve\n    public-key = "a"\n    secret-key = "b"\n')


def _anothers_secret(folder):
  pair = secret_file(folder, "learner-0").read_bytes()
  own = public_file(folder, "learner-1").read_bytes()
  secret_file(folder, "learner-1").write_bytes(keys._PRIVATE.search(pair)[0] + own)


def _encrypted_secret(folder):
  path = secret_file(folder, "learner-1")
  path.write_bytes(path.read_bytes().replace(b" PRIVATE", b" ENCRYPTED PRIVATE"))


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
    (_curve_key_in_public, r"learner-0.key': is a CURVE key of an earlier version. Fix: make all"),
    (_curve_secret, r"learner-1.key_secret': is a CURVE key of an earlier version"),
    (_anothers_secret, r"learner-1.key_secret': is damaged"),
    (_encrypted_secret, r"learner-1.key_secret': is damaged"),
    (_two_roles_one_key, r"learner-7.key': is the same key as that of learner-0"),
    (_garbage_in_public, r"learner-0.key': is damaged"),
    (_empty_certificate_in_public, r"learner-0.key': is damaged"),
    (_stranger_in_public, r"learner-00.key': is not named after a role"),
  ],
)
def test_what_is_wrong_with_the_files_is_said(folder, spoil, says):
  Keys.load(folder, "learner-1")
  spoil(folder)
  with pytest.raises(ConfigError, match=rf"^--keys = .*{says}"):
    Keys.load(folder, "learner-1")


def test_what_lies_beside_the_keys_is_not_looked_at(folder):
  for name in ("README", ".learner-0.key", "learner-0.key.orig"):
    (folder / "public" / name).write_text("no key")
  assert Keys.load(folder, "learner-1")


def test_curve_keys_of_an_earlier_version_are_not_taken_for_keys_that_are_there(tmp_path):
  (tmp_path / "public").mkdir()
  public_file(tmp_path, "learner-0").write_text('curve\n    public-key = "a"\n')
  with pytest.raises(ConfigError, match=r"learner-0.key': is a CURVE key of an earlier version"):
    make_keys(tmp_path, learners=1, shards=1)


def test_the_secret_is_not_shown(folder):
  keys = Keys.load(folder, "learner-1")
  assert keys.secret.decode() not in repr(keys)
  assert "learner-1" in repr(keys)


# --- who is who -----------------------------------------------------------------------------------


def test_owner_follows_the_folder(folder):
  mine = Keys.load(folder, "syncer-0")
  public = {a: Keys.load(folder, a).public for a in ("learner-0", "learner-1")}
  assert mine.owner(public["learner-1"]) == "learner-1"
  stranger = new_certificate()
  assert mine.owner(stranger) is None

  public_file(folder, "learner-1").unlink()
  mine.refresh()
  assert mine.owner(public["learner-1"]) is None and mine.listed("learner-1") == b""
  assert mine.owner(public["learner-0"]) == "learner-0"

  make_keys(folder, learners=4, shards=2)
  late = [keys.read(public_file(folder, f"learner-{m}"))[0] for m in (2, 3)]
  shutil.copy(public_file(folder, "learner-0"), public_file(folder, "learner-9"))
  mine.refresh()
  assert mine.owner(late[0]) == "learner-2"
  assert mine.owner(public["learner-0"]) is None, "a key of two roles is nobody's"
  assert mine.owner(late[1]) == "learner-3", "and disturbs no other"
  public_file(folder, "learner-9").unlink()
  mine.refresh()
  assert mine.owner(public["learner-0"]) == "learner-0"


def test_only_files_that_are_new_or_have_changed_are_read_again(folder, monkeypatch):
  """A thousand files took a second and a half, and every stranger had them read."""
  mine, read, seen = Keys.load(folder, "syncer-0"), keys.read, []
  monkeypatch.setattr(keys, "read", lambda path: seen.append(path.stem) or read(path))
  for _ in range(100):
    assert mine.owner(new_certificate()) is None and mine.context()
  mine.refresh()
  assert not seen
  make_keys(folder, learners=3, shards=1)
  seen.clear()
  mine.refresh()
  assert seen == ["learner-2"]


def unreadable(path):
  raise OSError(errno.EMFILE, "Too many open files", str(path))


def test_a_folder_that_cannot_be_read_for_a_moment_is_read_again(folder, monkeypatch):
  mine = Keys.load(folder, "syncer-0")
  context = mine.context()
  make_keys(folder, learners=3, shards=1)
  late = keys.read(public_file(folder, "learner-2"))[0]
  with monkeypatch.context() as patch:
    patch.setattr(os, "scandir", unreadable)
    mine.refresh()
    assert mine.owner(late) is None
    assert mine.context() is context, "the thread for control reads no file, and makes none anew"
    with pytest.raises(Unanswered, match=r"public': cannot be listed \(.*\). Fix: let this user"):
      Keys.load(folder, "syncer-0")
  mine.refresh()
  assert mine.owner(late) == "learner-2" and mine.context() is not context


def test_a_file_for_which_no_descriptor_was_left_is_read_again(folder, monkeypatch):
  mine, read = Keys.load(folder, "syncer-0"), Path.read_bytes
  make_keys(folder, learners=3, shards=1)
  late = public_file(folder, "learner-2")
  key = keys.read(late)[0]
  with monkeypatch.context() as patch:
    patch.setattr(Path, "read_bytes", lambda path: unreadable(path) if path == late else read(path))
    mine.refresh()
    assert mine.owner(key) is None
    with pytest.raises(Unanswered, match=r"learner-2.key': Too many open files"):
      Keys.load(folder, "syncer-0")
  mine.refresh()
  assert mine.owner(key) == "learner-2"


def test_a_file_that_is_damaged_for_a_moment_ends_no_connection_and_admits_none(folder):
  """As while it is being copied."""
  mine, file = Keys.load(folder, "syncer-0"), public_file(folder, "learner-1")
  key, whole = mine.listed("learner-1"), file.read_bytes()
  file.write_bytes(whole[:-50])
  mine.refresh()
  assert mine.owner(key) is None and mine.listed("learner-1") == key
  file.write_bytes(whole)
  mine.refresh()
  assert mine.owner(key) == "learner-1"


def test_a_key_that_is_added_while_a_role_reads_the_folder_is_not_missed(folder, monkeypatch):
  real = keys.read_public

  def read_and_added(there, known):
    found = real(there, known)
    make_keys(there, learners=3, shards=1)
    return found

  with monkeypatch.context() as patch:
    patch.setattr(keys, "read_public", read_and_added)
    mine = Keys.load(folder, "syncer-0")
  mine.refresh()
  assert mine.owner(keys.read(public_file(folder, "learner-2"))[0]) == "learner-2"


def shaken(shard: Keys, learner: Keys) -> bool:
  """Whether both sides accept each other's key, after a handshake in memory."""
  server = shard.context().wrap_bio(
    to_server := ssl.MemoryBIO(), to_client := ssl.MemoryBIO(), True
  )
  client = learner.context_to(shard.public).wrap_bio(to_client, to_server)
  for side in (client, server, client):
    with contextlib.suppress(ssl.SSLWantReadError):
      side.do_handshake()
  server.do_handshake()
  with contextlib.suppress(ssl.SSLWantReadError):
    client.read(1)
  assert not client.session.has_ticket, "each connection shows its key"
  return client.getpeercert(True) == shard.public and server.getpeercert(True) == learner.public


def test_a_shard_that_cannot_read_its_own_key_for_a_moment_accepts_connections_again(folder):
  """It may have had no descriptor left."""
  shard, learner = (Keys.load(folder, address) for address in ("syncer-0", "learner-0"))
  secret = secret_file(folder, "syncer-0")
  away = secret.rename(secret.with_name("away"))
  with pytest.raises(OSError):
    shard.context()
  away.rename(secret)
  assert shaken(shard, learner)
  make_keys(folder, learners=3, shards=0)
  secret.rename(away)
  shard.refresh()
  assert shard.context(), "of the keys before"
  away.rename(secret)
  assert shaken(shard, learner)
  shard.refresh()
  assert shaken(shard, Keys.load(folder, "learner-2"))


def test_a_replaced_key_is_accepted_in_place_of_the_old_one(folder):
  """Both certificates name the same role."""
  shard = Keys.load(folder, "syncer-0")
  old = Keys.load(shutil.copytree(folder, folder / "old"), "learner-0")
  assert shaken(shard, old)
  secret_file(folder, "learner-0").unlink()
  public_file(folder, "learner-0").unlink()
  make_keys(folder, learners=1, shards=0)
  shard.refresh()
  assert shaken(shard, Keys.load(folder, "learner-0"))
  with pytest.raises(ssl.SSLError):
    shaken(shard, old)


def test_an_older_version_of_tls_is_refused(folder):
  shard, learner = (Keys.load(folder, address) for address in ("syncer-0", "learner-0"))
  older = learner.context_to(shard.public)
  older.minimum_version = older.maximum_version = ssl.TLSVersion.TLSv1_2
  with pytest.raises(ssl.SSLError, match="unsupported protocol"):
    shaken(shard, mock.Mock(context_to=lambda certificate: older))


def test_a_file_that_nobody_could_read_is_read_once_its_mode_is_mended(folder, monkeypatch):
  """Its contents and their time do not change with the mode."""
  mine, read = Keys.load(folder, "syncer-0"), Path.read_bytes
  make_keys(folder, learners=3, shards=1)
  late = public_file(folder, "learner-2")
  key = keys.read(late)[0]

  def denied(path):
    if path == late and not path.stat().st_mode & 0o004:
      raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return read(path)

  monkeypatch.setattr(Path, "read_bytes", denied)
  for mode, owner in ((0o600, None), (0o644, "learner-2")):
    late.chmod(mode)
    mine.refresh()
    assert mine.owner(key) == owner


def test_a_folder_that_vanishes_lets_nobody_in(folder):
  mine = Keys.load(folder, "syncer-0")
  learner = Keys.load(folder, "learner-0").public
  shutil.rmtree(folder / "public")
  mine.refresh()
  assert mine.owner(learner) is None
  with pytest.raises(ConfigError, match=r"public/syncer-1.key': No such file"):
    mine.server_key("syncer-1")


# --- the door -------------------------------------------------------------------------------------


@pytest.fixture
def secure():
  return True


def shake_hands(net, context: ssl.SSLContext | None, say: bytes = b"") -> bytes:
  """What a shard answers to whoever shows this key, or none, and says so; until it hangs up."""
  with plain_sockets.create_connection(keys.host_and_port(net.url("syncer-0")), 20) as connection:
    try:
      speaker = context.wrap_socket(connection) if context else connection
      speaker.sendall(say)
      return b"".join(iter(lambda: speaker.recv(4096), b""))
    except OSError as error:
      return str(error).encode()


def context_of(folder, address: str, server: bytes) -> ssl.SSLContext:
  return Keys.load(folder, address).context_to(server)


def test_everything_is_tls_1_3_and_each_side_has_shown_its_key(net):
  shard, learner = net.connect("syncer-0"), net.connect("learner-1")
  dialed, accepted = learner._dialed["syncer-0"], shard._accepted
  net.wait_until(lambda: "learner-1" in accepted)
  accepted_channels = accepted["learner-1"].channels
  net.wait_until(lambda: all(c.wire for c in (*dialed.channels, *accepted_channels)))
  for channels, theirs in (
    (dialed.channels, Keys.load(net.folder, "syncer-0")),
    (accepted_channels, Keys.load(net.folder, "learner-1")),
  ):
    for channel in channels:
      assert channel.wire._socket.version() == "TLSv1.3"
      assert frames.certificate(channel.wire._socket) == theirs.public


def test_a_key_that_is_not_listed_gets_nothing_through_until_it_is(net, tmp_path):
  shard = net.connect("syncer-0")
  make_keys(tmp_path, learners=6, shards=1)
  shutil.copy(public_file(net.folder, "syncer-0"), public_file(tmp_path, "syncer-0"))
  greeting = frames.encode(frames.Greeting("run", "plan", "learner-5", 0, b"a" * 8, 1))
  stranger = keys._context(ssl.PROTOCOL_TLS_CLIENT, [net.keys("syncer-0").public])
  keys._show(stranger, secret_file(tmp_path, "learner-5"))
  said = [shake_hands(net, stranger, greeting) for _ in range(5)]
  assert all(b"alert" in each.lower() for each in said), said
  net.wait_until(lambda: shard.counters.refused == 5)
  assert not shard.links()
  shutil.copy(public_file(tmp_path, "learner-5"), public_file(net.folder, "learner-5"))
  shutil.copy(secret_file(tmp_path, "learner-5"), secret_file(net.folder, "learner-5"))
  late = net.connect("learner-5")
  late.send("syncer-0", says.request(5, 0))
  assert shard.receive(SECONDS).sender == "learner-5"


def test_who_is_not_listed_is_told_so_and_tries_again_by_itself(net, tmp_path):
  shard = net.connect("syncer-0")
  mine = shutil.copytree(net.folder, tmp_path / "mine")
  kept = public_file(mine, "learner-1")
  public_file(net.folder, "learner-1").unlink()
  learner = net.dial("learner-1", 0, Keys.load(mine, "learner-1"))
  net.wait_until(lambda: learner.links()["syncer-0"]["state"] == "refused")
  assert "the key of learner-1 is not listed" in learner.links()["syncer-0"]["reason"]
  shutil.copy(kept, public_file(net.folder, "learner-1"))
  net.wait_up(learner, "syncer-0")
  assert shard.counters.refused


def test_no_key_gets_nothing_through(net):
  shard = net.connect("syncer-0")
  for certificate in (False, True):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if certificate else None
    if context:
      context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    greeting = frames.encode(frames.Greeting("run", "plan", "learner-1", 0, b"a" * 8, 1))
    said = shake_hands(net, context, greeting)
    assert b"syncer-0" not in said, "it says nothing to strangers"
  net.wait_until(lambda: shard.counters.refused == 2)
  assert not shard.links()


def test_a_shard_with_another_key_than_the_listed_one_hears_nothing(net, tmp_path):
  """It may be anybody who has taken the address."""
  shard = net.connect("syncer-0")
  make_keys(tmp_path, learners=1, shards=1)
  context = context_of(net.folder, "learner-0", Keys.load(tmp_path, "syncer-0").public)
  assert b"certificate verify failed" in shake_hands(net, context)
  net.wait_until(lambda: shard.counters.refused == 1)
  shutil.copy(public_file(tmp_path, "syncer-0"), public_file(net.folder, "syncer-0"))
  learner = net.dial("learner-0", 0)
  net.wait_until(lambda: "has another key" in learner.links()["syncer-0"]["reason"])


def test_a_listed_key_speaks_for_its_owner_alone(net):
  shard = net.connect("syncer-0")
  context = context_of(net.folder, "learner-0", net.keys("syncer-0").public)
  greeting = frames.encode(frames.Greeting("run", "plan", "learner-1", 0, b"a" * 8, 1))
  assert b"this key belongs to learner-0, not to learner-1" in shake_hands(net, context, greeting)
  assert not shard.links() and shard.counters.refused == 1


def test_a_connection_for_fragments_must_show_its_sessions_key(net):
  shard, learner = net.connect("syncer-0"), net.connect("learner-0")
  context = context_of(net.folder, "learner-1", net.keys("syncer-0").public)
  for address in ("learner-0", "learner-1"):
    greeting = replace(learner._greeting, address=address, stream=0)
    assert shake_hands(net, context, frames.encode(greeting)) == b""
  net.wait_until(lambda: shard.counters.refused == 2)


# --- which addresses need keys --------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "LOCALHOST", "[::1]"])
def test_loopback_needs_no_keys(host):
  for port in (7000, 0, 65535):
    assert require_keys(f"tcp://{host}:{port}", None, "--bind") is None, "else it raises"


@pytest.mark.parametrize(
  "host", ["*", "0.0.0.0", "[::]", "10.0.0.7", "syncer-0.a.org.", "[fd00::1]", "127.1", "eth0"]
)
def test_other_addresses_need_keys(folder, host):
  with pytest.raises(ConfigError, match=r"--bind = 'tcp://.*needs keys. Fix: .*ddiloco keys"):
    require_keys(f"tcp://{host}:7000", None, "--bind")
  require_keys(f"tcp://{host}:7000", Keys.load(folder, "learner-0"), "--bind")


@pytest.mark.parametrize(
  "url",
  [
    "", "127.0.0.1:7000", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:65536",
    "tcp://127.0.0.1:-1", "tcp://127.0.0.1:7000/", "tcp://:7000", "ipc:///tmp/x", "tcp://::1:7000",
    "tcp://[fe80::zz]:1", "tcp://[:::]:1", "tcp://127.0.0.1:7000 ", "tcp://1.2.3.4;127.0.0.1:7000",
    "inproc://x", "tcp://127.0.0.1@10.0.0.1:70", "tcp://127.0.0.1:*", "tcp://127.0.0.1:٧",
    "tcp://host..org:7000", "tcp://.org:7000", f"tcp://{64 * 'a'}:7000",
  ],
)  # fmt: skip
def test_what_is_no_address_is_refused(folder, url):
  for mine in (None, Keys.load(folder, "learner-0")):
    with pytest.raises(ConfigError, match=r"--syncers = .*must be tcp://HOST:PORT.*Fix: "):
      require_keys(url, mine, "--syncers")


def test_a_folder_with_a_stale_handle_withdraws_nothing(folder, monkeypatch):
  mine = Keys.load(folder, "syncer-0")
  learner = keys.read(public_file(folder, "learner-0"))[0]
  assert mine.listed("learner-0") == learner
  with monkeypatch.context() as patch:
    patch.setattr(os, "scandir", mock.Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    mine.refresh()
    assert mine.listed("learner-0") == learner
  public_file(folder, "learner-0").unlink()
  mine.refresh()
  assert mine.listed("learner-0") == b""
