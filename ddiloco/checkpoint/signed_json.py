"""JSON files with a digest of their own content; they may vouch for other files by digests too."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from etils import epath

SignedJson = dict[str, Any]
PAUSES_SECONDS = (0.1, 1.0, 4.0)  # before a failed read is repeated
T = TypeVar("T")

# Errors that say what is at a path; all others mean that the file system cannot tell just now.
_TELLING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
_BUSY = (  # how TensorStore begins the errors of a bucket that does not answer, or not this time
  *("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "UNKNOWN"),
  *("PERMISSION_DENIED", "UNAUTHENTICATED"),
)
_NETWORK = {"aiohttp", "gcsfs", "google", "requests"}  # packages that raise network errors


class Damaged(Exception):
  """A file that must not be restored. The text names the path and what is wrong with it."""

  def __init__(self, path: epath.Path, what: str):
    super().__init__(f"{path}: {what}")


class Unreadable(Damaged):
  """A file that could not be read this time. Its content is unknown, and may be whole."""


def not_read(path: epath.Path, what: str, error: Exception) -> Damaged:
  """The exception for an error while reading: Unreadable if the error is passing, else Damaged."""
  kind = Unreadable if is_passing(error) else Damaged
  return kind(path, f"{what} ({brief(error)})")


def is_passing(error: Exception) -> bool:
  """Whether an error comes from a disk or a network, and so says nothing of the content."""
  code = _errno(error)
  if code is not None:
    return code not in _TELLING
  if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
    return False  # raised without an errno
  package = type(error).__module__.partition(".")[0]
  return isinstance(error, OSError) or package in _NETWORK or str(error).startswith(_BUSY)


def _errno(error: Exception) -> int | None:
  """The errno behind an error; TensorStore raises ValueErrors, with the errno in their text."""
  if isinstance(error, OSError):
    return error.errno
  found = re.search(r"os_error_code='(\d+)'", str(error))
  return int(found[1]) if found else None


def sign(content: Mapping[str, Any]) -> SignedJson:
  """The content as a reader will see it (JSON: lists for tuples), and a digest of that.

  Raises:
    TypeError: JSON has no such value.
  """
  signed = json.loads(json.dumps(dict(content)))
  return {**signed, "digest": _digest(signed)}


def write(path: epath.Path, signed: SignedJson) -> None:
  """Writes a file whole or not at all: by a rename, or on an object store a copy, as atomic.

  Its content is on the disk before it has its name: what it takes the place of may be deleted next.
  """
  temporary = path.with_name(f"{path.name}.tmp")
  with temporary.open("w") as file:
    file.write(json.dumps(signed))
    file.flush()
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):  # no file, but an object
      os.fsync(file.fileno())
  temporary.replace(path)


def read(path: epath.Path, expected: Mapping[str, Any]) -> SignedJson:
  """The signed record at `path`.

  Args:
    expected: fields that the record must have, with these values.

  Raises:
    Damaged: the file is missing, changed, or of something else; Unreadable: it may be whole.
  """
  try:
    signed = json.loads(path.read_text())
  except FileNotFoundError:
    raise Damaged(path, "is missing") from None
  except Exception as error:  # not text, not JSON, a folder, denied, a disk that fails, ...
    raise not_read(path, "cannot be read", error) from error
  digest = signed.pop("digest", None) if isinstance(signed, dict) else None
  if digest is None or digest != _digest(signed):
    raise Damaged(path, "is not what was written (its digest differs)")
  for field, value in expected.items():
    if signed.get(field) != value:
      raise Damaged(path, f"belongs to another {field}: {signed.get(field)!r}, not {value!r}")
  return {**signed, "digest": digest}


@contextlib.contextmanager
def one_error(path: epath.Path) -> Iterator[None]:
  """Turns errors of the layers below into OSError: TensorStore's ValueError, errors of HTTP.

  The OSError's text names `path`; its errno is the file system's own where that is known.
  """
  try:
    yield
  except Exception as error:
    code, named = _errno(error), getattr(error, "filename", None)
    if code is not None and named is None:  # a full disk, a quota, a limit on file sizes, ...
      raise OSError(code, os.strerror(code), str(path)) from error
    if isinstance(error, OSError):
      raise
    raise OSError(f"{path}: {brief(error)}") from error


def patiently(read: Callable[[], T]) -> T:
  """What `read` returns; it is called again after pauses while the file system fails."""
  for pause in PAUSES_SECONDS:
    try:
      return read()
    except (Unreadable, OSError) as error:
      if isinstance(error, OSError) and not is_passing(error):
        raise
      time.sleep(pause)
  return read()


def listed(path: epath.Path) -> list[str]:
  """The names in a folder; [] if it is missing, which `exists` would not tell from a failure.

  Raises:
    OSError: the file system cannot be asked.
  """
  with one_error(path):
    try:
      return sorted(inside.name for inside in path.iterdir())
    except FileNotFoundError:
      return []
    except Exception as error:
      missing = type(error).__name__ == "NotFoundError"  # of TensorFlow's file systems
      above = isinstance(error, NotADirectoryError) and not path.exists()
      if not (missing or above):
        raise
      return []


def brief(error: Exception) -> str:
  """One line with both ends of the text: TensorStore says first what failed, and last why."""
  text, *_ = " ".join(f"{type(error).__name__}: {error}".split()).split(" [tensorstore_spec=")
  return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


def _digest(signed: SignedJson) -> str:
  return hashlib.sha256(json.dumps(signed, sort_keys=True).encode()).hexdigest()
