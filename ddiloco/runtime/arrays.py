"""Flat trees name -> array at rest: Orbax writes and reads them, fingerprints prove them.

A fingerprint is {"shape": [...], "dtype": "float32", "crc32": ...} over the bytes in C order. Orbax
keeps checksums of its own over its indices, but none over the values.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

Arrays = Mapping[str, jax.Array | np.ndarray]
Fingerprint = dict[str, Any]


def fingerprint(value: jax.Array | np.ndarray) -> Fingerprint:
  host = np.asarray(value, order="C")
  # crc32 lets other threads run while it sums a large buffer; bf16 has no buffer of its own.
  checksum = zlib.crc32(host.reshape(-1).view(np.uint8).data)
  return {"shape": list(host.shape), "dtype": host.dtype.name, "crc32": checksum}


def fingerprints(arrays: Arrays) -> dict[str, Fingerprint]:
  """Of every array; also says which names cannot be told apart on storage.

  Raises:
    ValueError: a name has an empty component, as "", "a/" or "/a".
  """
  for name in arrays:
    if not all(name.split("/")):
      raise ValueError(f"array {name!r}: a name is parts joined by '/', none of them empty")
  return {name: fingerprint(value) for name, value in arrays.items()}


def write(path: epath.Path, arrays: Arrays) -> None:
  """Writes all at once or nothing; sharded arrays as they are, shard by shard.

  Args:
    path: an absolute directory; replaced if it is there.

  Raises:
    Exception: it cannot be written; every layer and file system has kinds of its own.
  """
  stored = {name: value for name, value in arrays.items() if value.size}  # Orbax refuses the others
  if stored:
    with _checkpointer() as checkpointer:
      checkpointer.save(path, args=ocp.args.PyTreeSave(stored), force=True)


def read(path: epath.Path, wanted: Mapping[str, Fingerprint]) -> dict[str, np.ndarray]:
  """The arrays `wanted`, on the host, bit by bit as they were when their fingerprints were taken.

  Raises:
    Exception: they cannot be read, or are not what their fingerprints say.
  """
  stored = {name: expected for name, expected in wanted.items() if 0 not in expected["shape"]}
  found: dict[str, Any] = {}
  if stored:
    host = ocp.RestoreArgs(restore_type=np.ndarray)
    with _checkpointer() as checkpointer:
      arguments = ocp.args.PyTreeRestore(
        item=dict.fromkeys(stored, 0),  # comes back as it is where the checkpoint has no such name
        restore_args=dict.fromkeys(stored, host),
        partial_restore=True,
      )
      found = checkpointer.restore(path, args=arguments)
  arrays = {}
  for name, expected in wanted.items():
    if name in stored:
      arrays[name] = found.pop(name)
    else:
      arrays[name] = np.empty(expected["shape"], np.dtype(expected["dtype"]))
    if not isinstance(arrays[name], np.ndarray):
      raise ValueError(f"array {name!r} is missing")
    if (actual := fingerprint(arrays[name])) != expected:
      raise ValueError(f"array {name!r} is {actual}, but {expected} was saved")
  return arrays


def _checkpointer() -> ocp.Checkpointer:
  """Saves in the caller's thread, and ends with the call.

  Uncompressed: weights hardly shrink, and a learner steps beside this. One database instead of one
  file per array (OCDBT, Orbax' default) is what object stores like.
  """
  return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
