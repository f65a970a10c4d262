"""JSON files that vouch for others, and say of themselves whether they are what was written."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

Record = dict[str, Any]


class Damaged(Exception):
  """What must not be restored. The text names the path and what is wrong with it."""

  def __init__(self, path: epath.Path, what: str):
    super().__init__(f"{path}: {what}")


def sign(content: Mapping[str, Any]) -> Record:
  """The content as a reader will see it (JSON: lists for tuples), and a digest of that.

  Raises:
    TypeError: JSON has no such value.
  """
  record = json.loads(json.dumps(dict(content)))
  return {**record, "digest": _digest(record)}


def write(path: epath.Path, record: Record) -> None:
  """Whole or not at all: a rename, or on an object store a copy, which is as atomic."""
  temporary = path.with_name(f"{path.name}.tmp")
  temporary.write_text(json.dumps(record))
  temporary.replace(path)


def read(path: epath.Path, expected: Mapping[str, Any]) -> Record:
  """The signed record at `path`.

  Args:
    expected: fields that it must have, with these values.

  Raises:
    Damaged: there is none, it was changed, or it is another one.
  """
  try:
    record = json.loads(path.read_text())
  except FileNotFoundError:
    raise Damaged(path, "is missing") from None
  except Exception as error:  # not text, not JSON, a folder, denied, ...
    raise Damaged(path, f"cannot be read ({brief(error)})") from error
  digest = record.pop("digest", None) if isinstance(record, dict) else None
  if digest is None or digest != _digest(record):
    raise Damaged(path, "is not what was written (its digest differs)")
  for field, value in expected.items():
    if record.get(field) != value:
      raise Damaged(path, f"belongs to another {field}: {record.get(field)!r}, not {value!r}")
  return {**record, "digest": digest}


@contextlib.contextmanager
def one_error(path: epath.Path) -> Iterator[None]:
  """Makes an OSError of what the layers below raise: TensorStore's ValueError, errors of HTTP."""
  try:
    yield
  except OSError:
    raise
  except Exception as error:
    raise OSError(f"{path}: {brief(error)}") from error


def brief(error: Exception) -> str:
  """One line with both ends: TensorStore says at the front what failed, and at the back why."""
  text, *_ = " ".join(f"{type(error).__name__}: {error}".split()).split(" [tensorstore_spec=")
  return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


def _digest(record: Record) -> str:
  return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
