"""JSON files that vouch for others, and say of themselves whether they are what was written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from etils import epath

SignedJson = dict[str, Any]
PAUSES_SECONDS = (0.1, 1.0, 4.0)  # before what could not be read is read again
T = TypeVar("T")

# Errors that say what is at a path; all others say that the file system cannot look just now.
_TELLING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
_BUSY = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED")
_NETWORK = {"aiohttp", "gcsfs", "google", "requests"}  # packages whose errors are the network's


class Damaged(Exception):
  """What must not be restored. The text names the path and what is wrong with it."""

  def __init__(self, path: epath.Path, what: str):
    super().__init__(f"{path}: {what}")


class Unreadable(Damaged):
  """What could not be read this time. Nothing is known of what it holds, and it may be whole."""


def not_read(path: epath.Path, what: str, error: Exception) -> Damaged:
  """What to make of an error while reading: the content is bad, or it could not be looked at."""
  kind = Unreadable if is_passing(error) else Damaged
  return kind(path, f"{what} ({brief(error)})")


def is_passing(error: Exception) -> bool:
  """Whether an error is a disk's or a network's, so that it says nothing of the content."""
  code = _errno(error)
  if code is not None:
    return code not in _TELLING
  if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
    return False  # raised without a number
  package = type(error).__module__.partition(".")[0]
  return isinstance(error, OSError) or package in _NETWORK or str(error).startswith(_BUSY)


def _errno(error: Exception) -> int | None:
  """The number behind it; TensorStore, which raises ValueErrors, has it in the text."""
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
  """Whole or not at all: a rename, or on an object store a copy, which is as atomic."""
  temporary = path.with_name(f"{path.name}.tmp")
  temporary.write_text(json.dumps(signed))
  temporary.replace(path)


def read(path: epath.Path, expected: Mapping[str, Any]) -> SignedJson:
  """The signed record at `path`.

  Args:
    expected: fields that it must have, with these values.

  Raises:
    Damaged: there is none, it was changed, or it is another one; Unreadable: it may be whole.
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
  """Makes an OSError of what the layers below raise: TensorStore's ValueError, errors of HTTP.

  Its text names `path`; it has the number of the file system's own error where that is known.
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
  """What `read` returns, after a while if the file system fails at first."""
  for pause in PAUSES_SECONDS:
    try:
      return read()
    except (Unreadable, OSError) as error:
      if isinstance(error, OSError) and not is_passing(error):
        raise
      time.sleep(pause)
  return read()


def listed(path: epath.Path) -> list[str]:
  """What is in a folder; nothing if there is none. `exists` would not tell that from a failure.

  Raises:
    OSError: it cannot be asked.
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
  """One line with both ends: TensorStore says at the front what failed, and at the back why."""
  text, *_ = " ".join(f"{type(error).__name__}: {error}".split()).split(" [tensorstore_spec=")
  return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


def _digest(signed: SignedJson) -> str:
  return hashlib.sha256(json.dumps(signed, sort_keys=True).encode()).hexdigest()
