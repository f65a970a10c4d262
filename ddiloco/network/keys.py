"""Who may speak: the CURVE keys of a role, and the door that asks others for theirs.

Whoever is listed in DIR/public (see `certificates.py`) may come in, as that role. Adding a file
there lets somebody in while the run goes on; removing it shuts them out within seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq
import zmq.auth
from zmq.utils import z85

from ddiloco.checks import ConfigError, require
from ddiloco.network.transport import EVALUATOR_ADDRESS, learner_address, syncer_address
from ddiloco.protocol.messages import Publish, Value

# --- Key files of the roles: what `ddiloco keys` makes, and reading it without trust
# DIR/public/NAME.key           on every host: whom to let in, and whom one expects to meet
# DIR/secret/NAME.key_secret    only on the host of that role, readable by its owner only
#
# NAME is the role's: learner-3, syncer-0, evaluator. The files are ZeroMQ certificates.

KEY_BYTES = 32
_NAME = re.compile(r"(learner|syncer)-(0|[1-9][0-9]*)|evaluator")


def make_keys(folder: Path, learners: int, shards: int) -> list[str]:
  """Makes the keys that are missing, also the evaluator's; returns their names.

  A key that is there is never replaced. Several of these may run at once, and be killed.

  Raises:
    ConfigError: the folder cannot be written, or a secret key in it is damaged.
  """
  require(learners >= 0, "--learners", learners, "must not be negative", "give 0 or more")
  require(shards >= 0, "--shards", shards, "must not be negative", "give 0 or more")
  addresses = [learner_address(m) for m in range(learners)]
  addresses += [syncer_address(s) for s in range(shards)] + [EVALUATOR_ADDRESS]
  try:
    (folder / "secret").mkdir(0o700, parents=True, exist_ok=True)
    (folder / "secret").chmod(0o700)
    (folder / "public").mkdir(exist_ok=True)
    return [address for address in addresses if _make(folder, address)]
  except OSError as error:
    raise ConfigError(
      f"--keys = {str(folder)!r}: cannot be written ({error.strerror}: {error.filename})."
      " Fix: name a directory that you may write."
    ) from error


def instructions(folder: Path, made: list[str]) -> str:
  """What to do with the keys in `folder`, of which those named `made` are new."""
  if not made:
    return f"{folder}: all these keys are there already; none was made."
  one = next((name for name in made if name.startswith("learner")), made[0])
  return f"""{folder}: made keys of {", ".join(made)}.

Copy {folder / "public"} to every host. Roles that run already see what is added there.
Copy each secret only to the host of its role, and give it to nobody else: who has it is that role.
  {folder / "secret" / one}.key_secret  ->  DIR/secret/ on the host of {one}
Start every role with --keys=DIR. To shut one out, remove DIR/public/NAME.key on the hosts of
the syncers, and both of its files here."""


def public_file(folder: Path, address: str) -> Path:
  """Where the public key of the role `address` is, "learner-3"."""
  return Path(folder) / "public" / f"{address}.key"


def secret_file(folder: Path, address: str) -> Path:
  """Where its secret key is."""
  return Path(folder) / "secret" / f"{address}.key_secret"


def _make(folder: Path, address: str) -> bool:
  """The secret first: a public key without a secret is one whose secret was moved to its host."""
  public_path, secret_path = public_file(folder, address), secret_file(folder, address)
  if public_path.exists():
    return False
  if not secret_path.exists():
    public, secret = zmq.curve_keypair()
    _place(secret_path, _certificate(address, public, secret), 0o600)
  public, _ = read(secret_path)  # that of another process, if it was quicker
  _place(public_path, _certificate(address, public), 0o644)
  return True


def _certificate(address: str, public: bytes, secret: bytes | None = None) -> str:
  text = f'# CURVE key of {address}\nmetadata\ncurve\n    public-key = "{public.decode()}"\n'
  return text + (f'    secret-key = "{secret.decode()}"\n' if secret else "")


def _place(path: Path, text: str, mode: int) -> None:
  """A whole new file or none; one that is there already stays."""
  with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", suffix=".part") as file:
    file.write(text)
    file.flush()
    os.fchmod(file.fileno(), mode)
    os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
      os.link(file.name, path)


def read(path: Path) -> tuple[bytes, bytes | None]:
  """(public key, secret key or None) in a certificate, Z85.

  Raises:
    ConfigError: it is missing, cannot be read, or is damaged.
  """
  fix = "copy it from where `ddiloco keys` made it"
  try:
    with path.open("rb"):  # load_certificate does not say why
      public, secret = zmq.auth.load_certificate(path)
  except OSError as error:
    raise ConfigError(f"--keys = {str(path)!r}: {error.strerror}. Fix: {fix}.") from error
  except (ValueError, IndexError):
    public = secret = b""
  good = _is_key(public) and (secret is None or _is_key(secret))
  require(good, "--keys", str(path), "is damaged", fix)
  return public, secret


def _is_key(text: bytes) -> bool:
  try:
    return len(z85.decode(text)) == KEY_BYTES
  except (KeyError, ValueError, struct.error):
    return False


def read_public(folder: Path) -> tuple[dict[bytes, str], list[str]]:
  """(address of every public key, what is wrong with the others)."""
  owners: dict[bytes, str] = {}
  problems, twice = [], set()
  for path in sorted((folder / "public").glob("[!.]*.key")):
    try:
      known = _NAME.fullmatch(path.stem) is not None
      require(known, "--keys", str(path), "is not named after a role", "remove or rename it")
      key, address = read(path)[0], path.stem
      other = owners.setdefault(key, address)
      twice |= {key} if other != address else set()
      rule = f"is the same key as that of {other}"
      require(other == address, "--keys", str(path), rule, "remove one, and make a new one")
    except ConfigError as error:
      problems.append(str(error))
  return {key: address for key, address in owners.items() if key not in twice}, problems


REREAD_SECONDS = 1.0  # strangers cannot make the folder be read more often
_URL = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_DOOR = "inproc://zeromq.zap.01"  # where ZeroMQ asks (ZAP, rfc.zeromq.org/spec/27)
_DOMAIN = b"ddiloco"
KEY_PROPERTY = "Key"  # of every message that came over a connection: its key, Z85


@dataclasses.dataclass(frozen=True)
class Keys:
  """The keys of one role, and those of everybody it may meet; `secret` and `public` are Z85."""

  folder: Path
  address: str
  public: bytes
  secret: bytes = dataclasses.field(repr=False)
  _listed: _Listed = dataclasses.field(repr=False, compare=False)

  @classmethod
  def load(cls, folder: Path, address: str) -> Keys:
    """Reads what the role `address` needs.

    Raises:
      ConfigError: a file is missing, damaged, readable by others, or does not fit the others.
    """
    folder, made = Path(folder), "copy both of this role's files again from where they were made"
    path, public_path = secret_file(folder, address), public_file(folder, address)
    public, secret = read(path)
    mode = path.stat().st_mode & 0o777
    rule = f"is a secret that others may read (mode {mode:04o})"
    require(not mode & 0o077, "--keys", str(path), rule, f"chmod 600 {path}")
    fits = secret is not None and zmq.curve_public(secret) == public
    require(fits, "--keys", str(path), "is damaged", made)
    fits = read(public_path)[0] == public
    require(fits, "--keys", str(public_path), "does not belong to this role's secret key", made)
    owners, problems = read_public(folder)
    if problems:
      raise ConfigError(problems[0])
    return cls(folder, address, public, secret or b"", _Listed(folder, owners))

  def server_key(self, peer: str) -> bytes:
    """The public key to expect of the shard `peer`, "syncer-0"; ConfigError if it has none."""
    return read(public_file(self.folder, peer))[0]

  def owner(self, public_key: bytes) -> str | None:
    """Whose key this is, "learner-3", as the folder says now; None: nobody's. Raw or Z85."""
    if len(public_key) == KEY_BYTES:
      public_key = z85.encode(public_key)
    return self._listed.owner(public_key)

  def withdrawn(self, address: str, public_key: bytes) -> bool:
    """Whether the folder lists this key as that of `address` no more.

    A folder that is away as a whole, or a file that cannot be read now, withdraws nothing: it shuts
    out who comes, but a disk that is away for a moment must not end a run.
    """
    path = public_file(self.folder, address)
    try:
      return read(path)[0] != public_key
    except ConfigError:
      return path.parent.is_dir() and not path.exists()

  def guard(self, socket: zmq.Socket) -> None:
    """Before it binds: only who has a listed key gets in; nobody, while no one is at the door."""
    socket.curve_server = True
    socket.curve_secretkey, socket.curve_publickey = self.secret, self.public
    # without these two, ZeroMQ lets everybody in when no authenticator runs
    socket.zap_domain = _DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

  def unlock(self, socket: zmq.Socket, peer: str) -> None:
    """Before it connects: speaks as this role, to the shard `peer` and nobody else."""
    socket.curve_serverkey = self.server_key(peer)
    socket.curve_secretkey, socket.curve_publickey = self.secret, self.public


class _Listed:
  """The public keys in a folder; follows what is added and removed there."""

  def __init__(self, folder: Path, owners: dict[bytes, str]):
    self._folder, self._owners = folder, owners
    self._read_at = time.monotonic()
    self._lock = threading.Lock()

  def owner(self, key: bytes) -> str | None:
    with self._lock:
      address = self._owners.get(key)
      if address is not None and self._still(address, key):
        return address
      if address is None and time.monotonic() - self._read_at < REREAD_SECONDS:
        return None
      self._read_at = time.monotonic()
      try:
        self._owners, _ = read_public(self._folder)  # what is damaged there is nobody's key
      except OSError:  # no disk or no descriptor now: refused, and read again for the next one
        return None
      return self._owners.get(key)

  def _still(self, address: str, key: bytes) -> bool:
    try:
      return read(public_file(self._folder, address))[0] == key
    except ConfigError:  # gone, or no key any more
      return False


class Authenticator:
  """Answers ZeroMQ whether a connection may come in, in a thread of its own.

  There can be one per context. It must run before guarded sockets of that context bind, else they
  turn everybody away. Every message of who came in has the owner's address as its "User-Id".

  Args:
    context: of the sockets.
    keys: whom to let in.
    on_refused: called with the reason, in this thread; must be quick and not raise.
  """

  def __init__(self, context: zmq.Context, keys: Keys, on_refused: Callable[[str], None]):
    self._context, self._keys, self._on_refused = context, keys, on_refused
    self._thread: threading.Thread | None = None
    self._bell: zmq.Socket | None = None

  def start(self) -> None:
    """From now on connections are answered."""
    door, bell_end = self._context.socket(zmq.REP), self._context.socket(zmq.PAIR)
    self._bell = self._context.socket(zmq.PAIR)
    for socket in (door, bell_end, self._bell):
      socket.linger = 0
    door.bind(_DOOR)
    ring = f"inproc://authenticator-{secrets.token_hex(8)}"  # the last one is freed some time later
    self._bell.bind(ring)
    bell_end.connect(ring)
    self._thread = threading.Thread(
      target=self._run, args=(door, bell_end), name="authenticator", daemon=True
    )
    self._thread.start()

  def stop(self) -> None:
    """No connection is let in any more; those that are stay."""
    if self._thread is None or self._bell is None:
      return
    with self._bell:
      with contextlib.suppress(zmq.Again, zmq.ContextTerminated):  # it has ended by itself
        self._bell.send(b"", zmq.DONTWAIT)
      self._thread.join(timeout=5)
    self._thread = None

  def _run(self, door: zmq.Socket, bell: zmq.Socket) -> None:
    poller = zmq.Poller()
    poller.register(door, zmq.POLLIN)
    poller.register(bell, zmq.POLLIN)
    with door, bell, contextlib.suppress(zmq.ContextTerminated):
      while bell not in dict(poller.poll()):
        with contextlib.suppress(zmq.Again):  # it was something that a REP socket drops
          self._answer(door, door.recv_multipart(zmq.DONTWAIT))
      door.unbind(_DOOR)  # now; closing it does so some time later

  def _answer(self, door: zmq.Socket, request: list[bytes]) -> None:
    address, reason = self._decide(request)
    # 400 is told to the other side; 300 would leave it waiting until its handshake times out
    code, text = (b"200", b"OK") if address else (b"400", b"refused")
    number = request[1] if len(request) > 1 else b""
    shown = _property(KEY_PROPERTY, z85.encode(request[6])) if address else b""
    door.send_multipart([b"1.0", number, code, text, (address or "").encode(), shown])
    if not address:
      self._on_refused(reason)

  def _decide(self, request: list[bytes]) -> tuple[str | None, str]:
    """(whose connection this is, why it is refused)."""
    if len(request) < 6 or request[0] != b"1.0":
      return None, "a question that is not ZAP 1.0"
    host = request[3].decode("ascii", "replace")
    if request[5] != b"CURVE" or len(request) != 7 or len(request[6]) != KEY_BYTES:
      return None, f"{host}: has no CURVE key"
    return self._keys.owner(request[6]), f"{host}: its key is not listed"


def _property(name: str, value: bytes) -> bytes:
  """As ZeroMQ wants what every message of a connection is to carry (ZMTP metadata)."""
  return bytes([len(name)]) + name.encode() + len(value).to_bytes(4, "big") + value


def make_authenticator(
  context: zmq.Context, keys: Keys, on_refused: Callable[[str], None]
) -> Authenticator:
  """See `Authenticator`; the caller starts and stops it."""
  return Authenticator(context, keys, on_refused)


class Arrivals:
  """Tells from a listening socket's monitor who came to nothing before anybody asked for a key.

  ZeroMQ does not name the connection whose handshake ended, and says nothing at all of one that
  never spoke its protocol. So handshakes are taken to be those of the newest connection: a reason
  may come early or late while a stranger hangs on, and when handshakes overlap, be one too many.
  """

  EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
  )

  def __init__(self) -> None:
    self._new: dict[int, None] = {}  # file descriptors, oldest first, in or before the handshake
    self._failed = 0  # their end was told, that they are gone not yet

  def see(self, event: int, value: int) -> str:
    """One event, in order; why a connection was turned away by it, "" if none was.

    Keys that are not listed give "": the authenticator has counted them.
    """
    match event:
      case zmq.EVENT_ACCEPTED:
        self._new[value] = None
      case zmq.EVENT_HANDSHAKE_SUCCEEDED if self._new:
        self._new.popitem()
      case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        self._failed += 1
      case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        self._failed += 1
        return "a handshake without keys, or meant for another key than this shard's"
      case zmq.EVENT_DISCONNECTED:
        known = value in self._new
        self._new.pop(value, None)
        if self._failed:
          self._failed -= 1
          if not known and self._new:
            self._new.popitem()
        elif known:
          return "a connection that does not speak ZeroMQ"
    return ""


def require_keys(url: str, keys: Keys | None, flag: str) -> None:
  """Refuses a url that is not tcp://HOST:PORT, and one beyond this machine without keys.

  Names are not resolved: only 127.0.0.0/8, ::1 and localhost are this machine.

  Raises:
    ConfigError: naming `flag`, the url, the rule and the fix.
  """
  match = _URL.fullmatch(url)
  host = match[1].strip("[]").lower() if match else ""
  good = match is not None and int(match[2]) < 65535 and (":" not in host or _is_ip(host))
  rule = "must be tcp://HOST:PORT with a port of at most 65534 (the next port is used too)"
  require(good, flag, url, rule, "write it as tcp://127.0.0.1:7000 or tcp://[::1]:7000")
  require(
    is_loopback(host) or keys is not None,
    flag,
    url,
    "can be reached from other machines, which needs keys",
    "make them with `ddiloco keys --keys=DIR` and give --keys=DIR, or stay on tcp://127.0.0.1:PORT",
  )


def is_loopback(host: str) -> bool:
  """Whether only this machine can reach `host`. Names are not resolved; brackets are let pass."""
  host = host.strip("[]").lower()
  return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def _is_ip(host: str) -> bool:
  try:
    ipaddress.ip_address(host)
  except ValueError:
    return False
  return True


# --- A shard's proof that a value is its own, for the day it gets it back from a learner
# A shard that dies with its copies takes its newest values from learners (`RequestValue`, `Value`).
# A learner could send weights of its own instead. So every publish carries a seal: an HMAC, under a
# key that only the shard has, over the value as learners then have it and over all that is said of
# it. The learner returns it with the value. Without keys, on loopback, everything is trusted and
# nothing is sealed.


class Sealer:
  """Seals the values of one shard.

  Args:
    secret: of the shard, the same in all its lives.
    run_id: of the run ...
    plan_id: ... and of what its roles share: a value of another run fits neither.
  """

  def __init__(self, secret: bytes, run_id: str, plan_id: str):
    self._secret, self._run = secret, (run_id, plan_id)

  def seal(self, of: Publish | Value, value: np.ndarray) -> str:
    """The seal of a fragment's value f32 [size], about which `of` speaks."""
    said = (of.fragment, of.round, of.version, of.merged_tokens, of.participants, of.merged_rounds)
    digest = hashlib.sha256(np.ascontiguousarray(value).view(np.uint8).data).hexdigest()
    text = json.dumps([*self._run, *said, digest])
    return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

  def fits(self, of: Value, value: np.ndarray) -> bool:
    """Whether this shard, in one of its lives, has published just this."""
    return hmac.compare_digest(of.seal, self.seal(of, value))
