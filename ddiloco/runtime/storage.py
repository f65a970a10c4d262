"""Durable snapshots: what comes back is complete and unchanged, or it is named and skipped.

  CHECKPOINTS/00000007/manifest.json         snapshot 7 is committed: the digests of its parts
  CHECKPOINTS/00000007/learner-3/meta.json   the part is complete: state, and a checksum per array
  CHECKPOINTS/00000007/learner-3/arrays/     the arrays, an Orbax checkpoint

Every file is written before the one that vouches for it, so a kill at any moment leaves a part
without its meta, or a snapshot without its manifest. Orbax waits until values are on the disk;
records do not wait, and one that a power cut tears does not match its digest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import fsspec.config
import jax
import numpy as np
from etils import epath

from ddiloco.runtime import arrays as arrays_lib
from ddiloco.runtime import records
from ddiloco.runtime.records import Damaged, Record

FORMAT = 1
MANIFEST = "manifest.json"
META = "meta.json"
ARRAYS = "arrays"

# Parts are written by other processes: a remembered listing of gs:// would never show them.
fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False


@dataclasses.dataclass(frozen=True)
class Part:
  """What one role saved for one snapshot, checked."""

  role: str
  snapshot: int
  incarnation: int  # of the role, when it saved this
  state: dict[str, Any]
  arrays: dict[str, jax.Array | np.ndarray]
  digest: str  # of its meta, and through that of everything in it


class Storage:
  """The snapshots of one run. Reads and writes in the caller's thread; any thread may.

  Args:
    path: the folder of all snapshots, local or gs://...; made when something is saved.
    plan_id: which tensors and fragments the parts are made of; parts of another plan are refused.
    warn: told what is skipped, and why.
  """

  def __init__(self, path: str | os.PathLike, plan_id: str, warn: Callable[[str], None]):
    root = epath.Path(path)
    self._root = root if root.is_absolute() else root.absolute()  # gs:// is absolute
    self._plan_id = plan_id
    self._warn = warn

  # --- parts --------------------------------------------------------------------------------------

  def save(
    self,
    snapshot: int,
    role: str,
    incarnation: int,
    state: Mapping[str, Any],
    arrays: arrays_lib.Arrays,
  ) -> Record:
    """Writes a part and returns its meta; replaces what this role saved for this snapshot before.

    Args:
      state: what JSON can hold; comes back as JSON has it (lists for tuples, names as strings).
      arrays: name -> array, on the host or over any mesh; not to be changed before this returns.

    Raises:
      OSError: it cannot be written (full, denied, ...). Nothing of the part is left, if that works.
    """
    part = self._part(snapshot, role)
    meta = records.sign(
      {
        **self._expected("part", snapshot),
        "role": role,
        "incarnation": incarnation,
        "state": dict(state),
        "arrays": arrays_lib.fingerprints(arrays),
      }
    )
    try:
      with records.one_error(part):
        _delete(part, META)
        part.mkdir(parents=True, exist_ok=True)
        arrays_lib.write(part / ARRAYS, arrays)
        records.write(part / META, meta)
    except OSError:
      # Room for others' parts. Should that fail too, the first error is the one that tells.
      with contextlib.suppress(OSError), records.one_error(part):
        _delete(part, META)
      raise
    return meta

  def meta(self, snapshot: int, role: str) -> Record:
    """The meta of a complete part: "state", "incarnation", "arrays", "digest", ...

    Raises:
      Damaged: there is none, or it is not what this role saved for this snapshot and plan.
    """
    path = self._part(snapshot, role) / META
    return records.read(path, {**self._expected("part", snapshot), "role": role})

  def load(
    self,
    snapshot: int,
    role: str,
    shardings: Mapping[str, jax.sharding.Sharding] = {},
    names: Collection[str] | None = None,
  ) -> Part:
    """A part with its arrays, each checked bit by bit.

    Args:
      shardings: arrays named here come back as jax.Arrays laid out so, on whatever mesh; the others
        as numpy. Names that the part does not have do not matter.
      names: only these arrays; all if None.

    Raises:
      Damaged: something of it is missing or changed.
      KeyError: the part has no array of this name.
      ValueError: JAX cannot hold an array as it was saved (64 bits), or divide it like this.
    """
    return self._load(self.meta(snapshot, role), shardings, names)

  def metas(self, snapshot: int) -> dict[str, Record]:
    """Role -> meta of the parts that are complete, whether committed or not.

    Raises:
      OSError: the file system cannot be asked.
    """
    found = {}
    for role in self._names(self._snapshot(snapshot)):
      if _is_role(role):
        with contextlib.suppress(Damaged):  # not yet complete, as a rule
          found[role] = self.meta(snapshot, role)
    return found

  def parts(self, snapshot: int) -> dict[str, str]:
    """Role -> digest of the parts that are complete, whether committed or not.

    Raises:
      OSError: the file system cannot be asked.
    """
    return {role: meta["digest"] for role, meta in self.metas(snapshot).items()}

  # --- snapshots ----------------------------------------------------------------------------------

  def commit(self, snapshot: int, roles: Collection[str]) -> None:
    """Declares the parts of `roles` to be the snapshot.

    Raises:
      Damaged: one of them is not complete.
      OSError: the manifest cannot be written.
    """
    digests = {role: self.meta(snapshot, role)["digest"] for role in sorted(roles)}
    manifest = records.sign({**self._expected("manifest", snapshot), "parts": digests})
    path = self._snapshot(snapshot) / MANIFEST
    with records.one_error(path):
      records.write(path, manifest)

  def manifest(self, snapshot: int) -> Record:
    """The manifest of a committed snapshot; "parts" is role -> digest.

    Raises:
      Damaged: there is none, or it is not what was committed for this snapshot and plan.
    """
    path = self._snapshot(snapshot) / MANIFEST
    return records.read(path, self._expected("manifest", snapshot))

  def committed(self) -> list[int]:
    """Snapshots that have a manifest, unchecked, the newest first.

    Raises:
      OSError: the file system cannot be asked.
    """
    with records.one_error(self._root):
      return [n for n in self._snapshots() if (self._snapshot(n) / MANIFEST).exists()]

  def find(self, role: str, shardings: Mapping[str, jax.sharding.Sharding] = {}) -> Part | None:
    """The newest committed and undamaged part of `role`, or None; warns of each one skipped.

    Snapshots without this role are passed by in silence.
    """
    try:
      committed = self.committed()
    except OSError as error:
      self._warn(f"checkpoints cannot be searched: {error}")
      return None
    for snapshot in committed:
      try:
        digest = self.manifest(snapshot)["parts"].get(role)
        if digest is None:
          continue
        meta = self.meta(snapshot, role)
        if meta["digest"] != digest:
          raise Damaged(self._part(snapshot, role), "is not the part that was committed")
        return self._load(meta, shardings, None)
      except Damaged as damage:
        self._warn(f"checkpoint skipped: {damage}")
    return None

  def prune(self, keep: int) -> None:
    """Deletes all but the newest `keep` committed snapshots, and what older ones left unfinished.

    The newest part of every role stays, in whatever snapshot: a learner that is away for long still
    finds its own. What cannot be deleted is warned of and stays until the next time.

    Raises:
      OSError: the file system cannot be asked.
    """
    committed = self.committed()
    if not committed:
      return
    if keep < 1:
      raise ValueError(f"keep = {keep}: must be at least 1, or nothing could be restored")
    newer: set[str] = set()  # roles that have a part in a newer snapshot
    for snapshot in self._snapshots():
      if snapshot > committed[0]:
        continue  # on its way
      roles = set[str]()
      with contextlib.suppress(Damaged):
        roles = self.manifest(snapshot)["parts"].keys() - newer
      try:
        if snapshot not in committed[:keep]:
          self._delete_but(snapshot, roles)
      except OSError as error:
        self._warn(f"old checkpoint cannot be deleted: {error}")
      newer |= roles

  def forget(self, role: str = "", newer_than: int | None = None) -> None:
    """Deletes what a role's former lives saved for snapshots that were never committed.

    Else a part of a past that will not be could stand in for one that is still to come.

    Args:
      role: whose; of all roles if empty.
      newer_than: the run goes on from this snapshot: newer ones are of that past too, although they
        are committed (something of them is damaged).

    Raises:
      OSError: the file system cannot be asked, or does not let it.
    """
    for snapshot in self._snapshots():
      folder = self._snapshot(snapshot)
      with records.one_error(folder):
        committed = (folder / MANIFEST).exists()
        if committed and newer_than is not None and snapshot > newer_than:
          (folder / MANIFEST).rmtree(missing_ok=True)
          committed = False
        if not committed and role:
          _delete(folder / role, META)
        elif not committed:
          _delete(folder, MANIFEST)

  # --- inside -------------------------------------------------------------------------------------

  def _snapshot(self, snapshot: int) -> epath.Path:
    return self._root / f"{snapshot:08d}"

  def _part(self, snapshot: int, role: str) -> epath.Path:
    if not _is_role(role):
      raise ValueError(f"role {role!r}: must be letters, digits and '-' (learner-3), for a folder")
    return self._snapshot(snapshot) / role

  def _names(self, path: epath.Path) -> list[str]:
    with records.one_error(path):
      try:
        return sorted(inside.name for inside in path.iterdir())
      except Exception as error:  # not there yet; object stores have errors of their own for that
        if isinstance(error, PermissionError) or path.exists():
          raise
        return []

  def _snapshots(self) -> list[int]:
    numbers = {int(name) for name in self._names(self._root) if re.fullmatch(r"[0-9]{8,}", name)}
    return sorted(numbers, reverse=True)

  def _delete_but(self, snapshot: int, roles: Collection[str]) -> None:
    path = self._snapshot(snapshot)
    with records.one_error(path):
      if not roles:
        _delete(path, MANIFEST)
      for name in self._names(path) if roles else ():
        if _is_role(name) and name not in roles:
          _delete(path / name, META)

  def _expected(self, kind: str, snapshot: int) -> Record:
    return {"format": FORMAT, "kind": kind, "plan": self._plan_id, "snapshot": snapshot}

  def _load(
    self,
    meta: Record,
    shardings: Mapping[str, jax.sharding.Sharding],
    names: Collection[str] | None,
  ) -> Part:
    path = self._part(meta["snapshot"], meta["role"]) / ARRAYS
    wanted = meta["arrays"] if names is None else {name: meta["arrays"][name] for name in names}
    try:
      arrays: dict[str, Any] = arrays_lib.read(path, wanted)
    except Exception as error:  # Orbax and what is below it raise whatever a damage leads them to
      raise Damaged(path, f"cannot be restored ({records.brief(error)})") from error
    # Checked on the host, then laid out: whatever mesh saved it, the bits are the same.
    layout = {name: shardings[name] for name in arrays if name in shardings}
    placed = jax.device_put({name: arrays[name] for name in layout}, layout)
    for name, value in placed.items():
      if value.dtype != arrays[name].dtype:
        raise ValueError(f"array {name!r}: JAX makes {value.dtype} of {arrays[name].dtype}")
    arrays.update(placed)
    fields = {name: meta[name] for name in ("role", "snapshot", "incarnation", "state", "digest")}
    return Part(arrays=arrays, **fields)


def _is_role(name: str) -> bool:
  return re.fullmatch(r"[A-Za-z0-9-]+", name) is not None


def _delete(folder: epath.Path, voucher: str) -> None:
  """Deletes the folder, first of all what makes it look complete."""
  if (folder / voucher).exists():
    (folder / voucher).rmtree(missing_ok=True)  # a file too
  folder.rmtree(missing_ok=True)
