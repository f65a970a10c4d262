"""Key files of the roles: what `ddiloco keys` makes, and reading it without trust.

  DIR/public/NAME.key           on every host: whom to let in, and whom one expects to meet
  DIR/secret/NAME.key_secret    only on the host of that role, readable by its owner only

NAME is the role's address with "-" for "/": learner-3, syncer-0, evaluator. The files are ZeroMQ
certificates.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import tempfile
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from ddiloco.checked import ConfigError, require
from ddiloco.runtime.transport import EVALUATOR_ADDRESS, learner_address, syncer_address

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
    return [_name(address) for address in addresses if _make(folder, address)]
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
  {folder / "secret" / one}.key_secret  ->  DIR/secret/ on the host of {one.replace("-", "/")}
Start every role with --keys=DIR. To shut one out, remove DIR/public/NAME.key on the hosts of
the syncers, and both of its files here."""


def public_file(folder: Path, address: str) -> Path:
  """Where the public key of the role `address` is, "learner/3"."""
  return Path(folder) / "public" / f"{_name(address)}.key"


def secret_file(folder: Path, address: str) -> Path:
  """Where its secret key is."""
  return Path(folder) / "secret" / f"{_name(address)}.key_secret"


def _name(address: str) -> str:
  return address.replace("/", "-")


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
      key, address = read(path)[0], path.stem.replace("-", "/")
      other = owners.setdefault(key, address)
      twice |= {key} if other != address else set()
      rule = f"is the same key as that of {other}"
      require(other == address, "--keys", str(path), rule, "remove one, and make a new one")
    except ConfigError as error:
      problems.append(str(error))
  return {key: address for key, address in owners.items() if key not in twice}, problems
