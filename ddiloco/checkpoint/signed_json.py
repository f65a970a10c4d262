"""JSON files with a digest of their own content; they may vouch for other files by digests too."""

from __future__ import annotations

import contextlib
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
UNNAMED = ".tmp"  # end of a record's path until it has its name; deleted there, it gets none
PAUSES_SECONDS = (0.1, 1.0, 4.0)  # before a failed read is repeated
T = TypeVar("T")


class Damaged(OSError):
  """What must not be restored, or cannot be read. The text names the path and what is wrong."""

  def __init__(self, path: epath.Path, what: str):
    super().__init__(f"{path}: {what}")


def patiently(path: epath.Path, read: Callable[[], T]) -> T:
  """What `read` returns of `path`. It is called again after pauses while it fails: a disk or a
  network may answer the next time.

  Raises:
    Damaged: `read` raises it, or nothing is there, or it still fails.
  """
  pauses = list(PAUSES_SECONDS)
  while True:
    try:
      return read()
    except Damaged:
      raise
    except Exception as error:  # of Orbax, TensorStore, file systems: all kinds
      if is_missing(error):
        raise Damaged(path, "is missing") from None
      if not pauses:
        raise Damaged(path, f"cannot be read ({brief(error)})") from error
    time.sleep(pauses.pop(0))


def is_missing(error: Exception) -> bool:
  """Whether a file system says that nothing is at a path."""
  named = type(error).__name__ == "NotFoundError"  # of TensorFlow's file systems
  return named or isinstance(error, FileNotFoundError | NotADirectoryError)


def write(
  path: epath.Path, content: Mapping[str, Any], look: Callable[[], None] = lambda: None
) -> SignedJson:
  """Writes a record whole or not at all: by a rename, or on an object store a copy, as atomic.

  Its content is on the disk before it has its name: what it takes the place of may be deleted next.

  Args:
    look: called before it gets its name, which an exception prevents.

  Returns:
    The content as a reader will see it (JSON: lists for tuples), and a digest of that.

  Raises:
    TypeError: JSON has no such value.
  """
  signed = json.loads(json.dumps(dict(content)))
  signed = {**signed, "digest": _digest(signed)}
  temporary = path.with_name(f"{path.name}{UNNAMED}")
  with temporary.open("w") as file:
    file.write(json.dumps(signed))
    file.flush()
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):  # no file, but an object
      os.fsync(file.fileno())
  look()
  temporary.replace(path)
  return signed


def read(path: epath.Path, expected: Mapping[str, Any]) -> SignedJson:
  """The signed record at `path`.

  Args:
    expected: fields that the record must have, with these values.

  Raises:
    Damaged: the file is missing, changed, of something else, or cannot be read.
  """
  text = patiently(path, path.read_bytes)
  try:
    signed = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise Damaged(path, f"cannot be read ({brief(error)})") from error
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
  except OSError as error:
    if error.errno is None or error.filename is not None:
      raise
    raise OSError(error.errno, error.strerror, str(path)) from error
  except Exception as error:
    if found := re.search(r"os_error_code='(\d+)'", str(error)):  # a full disk, a quota, ...
      raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
    raise OSError(f"{path}: {brief(error)}") from error


def listed(path: epath.Path) -> list[str]:
  """The names in a folder; [] where there is none.

  Raises:
    Damaged: it cannot be listed.
  """

  def names() -> list[str]:
    try:
      return sorted(inside.name for inside in path.iterdir())
    except Exception as error:
      if is_missing(error):
        return []
      raise

  return patiently(path, names)


def brief(error: Exception) -> str:
  """One line with both ends of the text: TensorStore says first what failed, and last why."""
  # Errors of a bucket's file system have no number, and only a path or nothing for a text.
  told = type(error) in (OSError, Damaged) or getattr(error, "errno", None) is not None
  said = str(error) if told else f"{type(error).__name__}: {error}"
  text, *_ = " ".join(said.split()).split(" [tensorstore_spec=")
  return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


def _digest(signed: SignedJson) -> str:
  return hashlib.sha256(json.dumps(signed, sort_keys=True).encode()).hexdigest()
