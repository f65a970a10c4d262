"""Authentication: the keys of the roles, and the TLS contexts that present and verify them.

The owner of a key that is listed in DIR/public may connect as that role. Adding a file there admits
a role while the run goes on; removing the file shuts the role out within seconds.

A key is an Ed25519 key with a self-signed certificate. There is no certificate authority: a
certificate is valid if it is, byte for byte, the one that is listed for a role.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import ipaddress
import os
import re
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ddiloco.checks import ConfigError, kind_of, refusal, require
from ddiloco.network.transport import EVALUATOR_ADDRESS, learner_address, syncer_address

# --- Key files of the roles: `ddiloco keys` makes them; every reader checks them
# DIR/public/NAME.key           on every host: the roles to accept, and the shards to expect
# DIR/secret/NAME.key_secret    only on the host of that role, readable by its owner only
#
# NAME is the role's: learner-3, syncer-0, evaluator. Both files are PEM: the certificate, and in
# the secret file the private key before it.

_NAME = re.compile(r"(learner|syncer)-(0|[1-9][0-9]*)|evaluator")
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\s*", re.DOTALL)
_PRIVATE = re.compile(rb"-----BEGIN PRIVATE KEY-----.*?-----END PRIVATE KEY-----\s*", re.DOTALL)
_COPY = "copy it from where `ddiloco keys` made it"
_FOREVER = datetime.datetime(2020, 1, 1), datetime.datetime(9999, 12, 31)  # clocks may be wrong


def make_keys(folder: Path, learners: int, shards: int) -> list[str]:
  """Makes the keys that are missing, also the evaluator's; returns their names.

  An existing key is never replaced. Several such calls may run at once, and may be killed.

  Raises:
    ConfigError: the folder cannot be written, or a key in it is damaged.
  """
  addresses = [learner_address(m) for m in range(learners)]
  addresses += [syncer_address(s) for s in range(shards)] + [EVALUATOR_ADDRESS]
  try:
    (folder / "secret").mkdir(0o700, parents=True, exist_ok=True)
    (folder / "secret").chmod(0o700)
    (folder / "public").mkdir(exist_ok=True)
    return [address for address in addresses if _make(folder, address)]
  except OSError as error:
    raise ConfigError(
      f"--keys = {str(folder)!r}: cannot be written ({error})."
      " Fix: name a directory that you may write."
    ) from error


def instructions(folder: Path, made: list[str]) -> str:
  """Instructions for the user on the keys in `folder`; those named `made` are new."""
  if not made:
    return f"{folder}: all these keys are there already; none was made."
  one = next((name for name in made if name.startswith("learner")), made[0])
  return f"""{folder}: made keys of {", ".join(made)}.

Copy {folder / "public"} to every host. Roles that run already see what is added there.
Copy each secret only to the host of its role, and nowhere else: a process that has it is that role.
  {folder / "secret" / one}.key_secret  ->  DIR/secret/ on the host of {one}
Start every role with --keys=DIR. To shut one out, remove DIR/public/NAME.key on the hosts of
the syncers, and both of its files here."""


def public_file(folder: Path, address: str) -> Path:
  """The file of the public key of the role `address`, "learner-3"."""
  return Path(folder) / "public" / f"{address}.key"


def secret_file(folder: Path, address: str) -> Path:
  """The file of the role's secret key."""
  return Path(folder) / "secret" / f"{address}.key_secret"


def _make(folder: Path, address: str) -> bool:
  """Makes a role's two files; False if its public key exists.

  The secret comes first: a public key without a secret is one whose secret was moved to its host.
  """
  public_path, secret_path = public_file(folder, address), secret_file(folder, address)
  if public_path.exists():
    read(public_path)  # raises if it is damaged or of an earlier version
    return False
  _place(secret_path, _new_pair(address), 0o600)
  public, _ = read(secret_path)  # it may be an earlier one, or that of another process
  _place(public_path, ssl.DER_cert_to_PEM_cert(public).encode(), 0o644)
  return True


def _new_pair(address: str) -> bytes:
  """A private key and its certificate, PEM."""
  from cryptography import x509  # only making keys needs it
  from cryptography.hazmat.primitives import serialization
  from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

  secret = Ed25519PrivateKey.generate()
  name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"ddiloco {address}")])
  certificate = (
    x509.CertificateBuilder()
    .subject_name(name)
    .issuer_name(name)
    .public_key(secret.public_key())
    .serial_number(x509.random_serial_number())
    .not_valid_before(_FOREVER[0])
    .not_valid_after(_FOREVER[1])
    .sign(secret, None)
  )
  pem = serialization.Encoding.PEM
  plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
  return secret.private_bytes(pem, *plain) + certificate.public_bytes(pem)


def _place(path: Path, data: bytes, mode: int) -> None:
  """Writes a whole new file or none; an existing file stays."""
  with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".", suffix=".part") as file:
    file.write(data)
    file.flush()
    os.fchmod(file.fileno(), mode)
    os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
      os.link(file.name, path)


def read(path: Path) -> tuple[bytes, bytes | None]:
  """(certificate, DER; private key, PEM, or None) in a key file.

  Raises:
    ConfigError: the file is missing, is damaged, or is of an earlier version. An Unanswered: its
      storage fails.
  """
  try:
    data = path.read_bytes()
  except OSError as error:
    raise refusal("--keys", str(path), str(error.strerror), _COPY, kind_of(error)) from error
  rule, fix = "is a CURVE key of an earlier version", "make all keys anew with `ddiloco keys`"
  require(b"public-key =" not in data, "--keys", str(path), rule, fix)
  certificate, secret = _CERTIFICATE.search(data), _PRIVATE.search(data)
  try:
    der = ssl.PEM_cert_to_DER_cert(certificate[0].decode().strip() if certificate else "")
    _probe().load_verify_locations(cadata=der)
  except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; ValueError: it is empty
    raise ConfigError(f"--keys = {str(path)!r}: is damaged. Fix: {_COPY}.") from error
  return der, secret and secret[0]


@functools.cache
def _probe() -> ssl.SSLContext:
  """Loads certificates to check them, and never connects: making one for each takes longer."""
  return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _context(protocol: int, trusted: list[bytes]) -> ssl.SSLContext:
  """TLS 1.3 with the owners of these certificates, DER, and no other peer."""
  context = ssl.SSLContext(protocol)
  context.minimum_version = ssl.TLSVersion.TLSv1_3
  context.check_hostname = False  # certificates name roles, not hosts
  context.verify_mode = ssl.CERT_REQUIRED
  if protocol == ssl.PROTOCOL_TLS_SERVER:
    context.num_tickets = 0  # no resumption: every connection presents its key
  for certificate in trusted:  # one at a time: a call keeps all other threads waiting
    context.load_verify_locations(cadata=certificate)
  return context


class PublicFile(NamedTuple):
  """The file of a public key, as it was read last."""

  stamp: tuple[int, int] | None  # of the certificate's file; None: there was none to see
  certificate: bytes  # DER; b"": it could never be read


def read_public(
  folder: Path, known: Mapping[str, PublicFile]
) -> tuple[dict[str, PublicFile], dict[bytes, str], list[ConfigError]]:
  """(address -> file, certificate -> address, problems); reads files that are not as in `known`.

  A file that cannot be read keeps the certificate that it had, which belongs to no role meanwhile.

  Raises:
    OSError: the folder cannot be read now.
  """
  files, owners = dict[str, PublicFile](), dict[bytes, list[str]]()
  problems: list[ConfigError] = []
  for entry in sorted(os.scandir(folder / "public"), key=lambda each: each.name):
    address, suffix = os.path.splitext(entry.name)
    if suffix != ".key" or address.startswith("."):
      continue
    file, stamp = known.get(address, PublicFile(None, b"")), _stamp(entry)
    try:
      named = _NAME.fullmatch(address) is not None
      require(named, "--keys", entry.path, "is not named after a role", "remove or rename it")
      if stamp is None or stamp != file.stamp:
        file = PublicFile(stamp, read(Path(entry.path))[0])
      owners.setdefault(file.certificate, []).append(address)
    except ConfigError as error:
      problems.append(error)
    files[address] = file
  for first, *others in owners.values():
    for path in (str(public_file(folder, other)) for other in others):
      rule, fix = f"is the same key as that of {first}", "remove one, and make a new one"
      problems.append(refusal("--keys", path, rule, fix))
  return files, {key: one for key, (one, *others) in owners.items() if not others}, problems


def _stamp(entry: os.DirEntry | Path) -> tuple[int, int] | None:
  """Time and inode of a file: they change when the file, or who may read it, does."""
  try:
    stat = entry.stat()
  except OSError:
    return None
  return stat.st_ctime_ns, stat.st_ino


# --- The owner of each key

_LABEL = "[A-Za-z0-9_-]{1,63}"  # of a host name; Python raises UnicodeError for other ones
_URL = re.compile(rf"tcp://(\*|\[[0-9A-Fa-f:.]+\]|{_LABEL}(?:\.{_LABEL})*\.?):([0-9]{{1,5}})")


@dataclasses.dataclass(eq=False)
class Keys:
  """The key of one role, and the public keys of all roles as `refresh` has read them last.

  Attributes:
    folder: of the files.
    address: of the role.
    public: its certificate, DER.
    secret: its private key, PEM.
  """

  folder: Path
  address: str
  public: bytes
  secret: bytes = dataclasses.field(repr=False)
  _files: dict[str, PublicFile] = dataclasses.field(repr=False)  # by address
  _owners: dict[bytes, str] = dataclasses.field(repr=False)  # certificate -> address
  # For accepting connections: (what it was made of, context).
  _accepts: tuple[object, ssl.SSLContext] | None = dataclasses.field(default=None, repr=False)

  @classmethod
  def load(cls, folder: Path, address: str) -> Keys:
    """Reads the keys that the role `address` needs.

    Raises:
      ConfigError: a file is missing, damaged, readable by others, or does not fit the others.
    """
    folder, made = Path(folder), "copy both of this role's files again from where they were made"
    path, public_path = secret_file(folder, address), public_file(folder, address)
    public, secret = read(path)
    mode = path.stat().st_mode & 0o777
    rule = f"is a secret that others may read (mode {mode:04o})"
    require(not mode & 0o077, "--keys", str(path), rule, f"chmod 600 {path}")
    fits = secret is not None and _fits(path)
    require(fits, "--keys", str(path), "is damaged", made)
    fits = read(public_path)[0] == public
    require(fits, "--keys", str(public_path), "does not belong to this role's secret key", made)
    try:
      files, owners, problems = read_public(folder, {})
    except OSError as error:
      rule, fix = f"cannot be listed ({error.strerror})", "let this user read the folder"
      raise refusal("--keys", str(public_path.parent), rule, fix, kind_of(error)) from error
    if problems:
      raise problems[0]
    return cls(folder, address, public, secret or b"", files, owners)

  def refresh(self) -> None:
    """Reads files that are new or have changed; may take long, and is called in one thread.

    When the folder cannot be read, all keys stay listed, so that a disk that is away for a moment
    ends no connection; but newcomers are refused.
    """
    try:
      self._files, self._owners, _ = read_public(self.folder, self._files)
    except OSError:
      self._owners = {}
      return
    if self._accepts is not None and self._accepts[0] != self._now():  # a role that dials has none
      with contextlib.suppress(OSError):  # our own key cannot be read now
        self._accepts = self._accept()

  def server_key(self, peer: str) -> bytes:
    """The certificate to expect of the shard `peer`, "syncer-0"; ConfigError if none is listed."""
    return read(public_file(self.folder, peer))[0]

  def owner(self, certificate: bytes) -> str | None:
    """The role that this key belongs to, "learner-3"; None: no role."""
    return self._owners.get(certificate)

  def listed(self, address: str) -> bytes:
    """The certificate that is listed for a role; b"": its file is gone."""
    file = self._files.get(address)
    return file.certificate if file else b""

  def context(self) -> ssl.SSLContext:
    """For accepting connections: any listed key is valid; `owner` gives its role, or none where a
    key was removed a moment ago. Reads a file only in the first call that succeeds.

    Raises:
      OSError: our own key cannot be read now, and never was in an earlier call.
    """
    accepts = self._accepts
    if accepts is None:
      accepts = self._accepts = self._accept()
    return accepts[1]

  def _now(self) -> tuple[dict[bytes, str], tuple[int, int] | None]:
    """(Owners whose keys are valid, the stamp of our own key): what a context is made of."""
    return self._owners, _stamp(secret_file(self.folder, self.address))

  def _accept(self) -> tuple[object, ssl.SSLContext]:
    made_of = self._now()
    context = _context(ssl.PROTOCOL_TLS_SERVER, [*made_of[0]])
    _show(context, secret_file(self.folder, self.address))
    return made_of, context

  def context_to(self, certificate: bytes) -> ssl.SSLContext:
    """For dialing, as this role: only the shard with this certificate is accepted."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, [certificate])
    _show(context, secret_file(self.folder, self.address))
    return context


def _show(context: ssl.SSLContext, path: Path) -> None:
  """Lets a context present the key in this file."""
  context.load_cert_chain(path, password=lambda: b"")  # for an encrypted key: no terminal prompt


def _fits(path: Path) -> bool:
  """Whether the private key in a file belongs to its certificate."""
  try:
    _show(_context(ssl.PROTOCOL_TLS_CLIENT, []), path)
  except OSError:
    return False
  return True


# --- The urls of roles


def host_and_port(url: str) -> tuple[str, int]:
  """Host and port of tcp://HOST:PORT; the host without brackets."""
  host, _, port = url.removeprefix("tcp://").rpartition(":")
  return host.strip("[]"), int(port)


def require_keys(url: str, keys: Keys | None, flag: str) -> None:
  """Refuses a url that is not tcp://HOST:PORT, and without keys one beyond this machine.

  Names are not resolved: only 127.0.0.0/8, ::1 and localhost count as this machine.

  Raises:
    ConfigError: names `flag`, the url, the rule and the fix.
  """
  match = _URL.fullmatch(url)
  host = match[1].strip("[]").lower() if match else ""
  good = match is not None and int(match[2]) < 65536 and (":" not in host or _ip(host))
  rule = "must be tcp://HOST:PORT with a port of at most 65535"
  require(good, flag, url, rule, "write it as tcp://127.0.0.1:7000 or tcp://[::1]:7000")
  require(
    is_loopback(host) or keys is not None,
    flag,
    url,
    "can be reached from other machines, which needs keys",
    "make them with `ddiloco keys --keys=DIR` and give --keys=DIR, or stay on tcp://127.0.0.1:PORT",
  )


def is_loopback(host: str) -> bool:
  """Whether only this machine can reach `host`, with or without brackets. Resolves no names."""
  host = host.strip("[]").lower()
  return host == "localhost" or bool((ip := _ip(host)) and ip.is_loopback)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
  with contextlib.suppress(ValueError):
    return ipaddress.ip_address(host)
  return None
