"""Durable snapshots: a part that is restored is complete and unchanged; others are skipped by name.

  CHECKPOINTS/00000200/manifest.json         snapshot 200 is committed: the digests of its parts
  CHECKPOINTS/00000200/learner-3/meta.json   the part is complete: state, and a checksum per array
  CHECKPOINTS/00000200/learner-3/arrays/0    some of the arrays, an Orbax checkpoint; then 1, 2, ...

A snapshot's number is the global step at which it was due.

Arrays go to the disk and come back a window at a time, so that saving and restoring take no more
memory of the host than the largest array and `WINDOW_BYTES`, however large the state is.

Every file is written before the one that vouches for it, so a kill at any moment leaves a part
without its meta, or a snapshot without its manifest. Each waits until it is on the disk: after a
power cut the newest snapshot is whole, and older ones may be deleted.

A committed snapshot is deleted when newer snapshots are committed, and for no other reason. A
reader that cannot read a snapshot tries again, then skips it: the fault may be the reader's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import zlib
from collections.abc import Callable, Collection, Mapping, MutableMapping, Set
from typing import Any, TypeVar

import fsspec
import jax
import numpy as np
from etils import epath

from ddiloco.checkpoint import signed_json, weights
from ddiloco.checkpoint.signed_json import Damaged, SignedJson
from ddiloco.checks import FULL

# --- Flat trees name -> array at rest: Orbax writes and reads them, fingerprints prove them
# A fingerprint is {"shape": [...], "dtype": "float32", "crc32": ...} over the bytes in C order.
# Orbax keeps checksums of its own over its indices, but none over the values.

Fingerprint = dict[str, Any]


def fingerprint(value: jax.Array | np.ndarray) -> Fingerprint:
  host = np.asarray(value, order="C")
  # crc32 lets other threads run while it sums a large buffer; bf16 arrays export none, hence uint8.
  checksum = zlib.crc32(host.reshape(-1).view(np.uint8).data)
  return {"shape": list(host.shape), "dtype": host.dtype.name, "crc32": checksum}


def write_all(
  folder: epath.Path, arrays: MutableMapping[str, jax.Array | np.ndarray]
) -> tuple[dict[str, Fingerprint], list[list[str]]]:
  """Writes one window after the other, and removes the written arrays from `arrays`.

  An array is whole on the host only while its window is written. Then it is freed, unless something
  else refers to it; so is the copy that JAX keeps on the host of an array that was read.

  Args:
    folder: an absolute directory that is not there yet.

  Returns:
    Every array's fingerprint, and of each window the names in it.

  Raises:
    Exception: the arrays cannot be written; every layer and file system has its own exceptions.
  """
  found: dict[str, Fingerprint] = {}
  windows: list[list[str]] = []
  window: dict[str, np.ndarray] = {}
  for name in [*arrays]:
    host = np.asarray(arrays.pop(name), order="C")
    found[name] = fingerprint(host)
    if host.size:  # Orbax refuses empty arrays
      window[name] = host
    del host
    if window and (not arrays or sum(v.nbytes for v in window.values()) >= WINDOW_BYTES):
      weights.write(folder / str(len(windows)), window)
      windows.append(list(window))
      window = {}
  return found, windows


def read(
  path: epath.Path, window: Collection[str], wanted: Mapping[str, Fingerprint]
) -> dict[str, np.ndarray]:
  """The arrays `wanted` of one window, on the host, bit by bit as they were written.

  Raises:
    Damaged: they are not what their fingerprints say.
    Exception: they cannot be read.
  """
  found = weights.read(path, dict.fromkeys(window, 0), wanted)
  for name, expected in wanted.items():
    if (actual := fingerprint(found[name])) != expected:
      raise Damaged(path.parent, f"array {name!r} is {actual}, but {expected} was saved")
  return found


FORMAT = 10
WINDOW_BYTES = 128 << 20  # of arrays that are on the host at once, beside the largest array
MANIFEST = "manifest.json"
META = "meta.json"
ARRAYS = "arrays"
ROLE = re.compile(r"(learner|syncer)-[0-9]+")
DECLINED = ".declined"  # 00000200/learner-3.declined: why learner 3 will save no part
ASIDE = "aside"  # 00000200.aside: no snapshot any more, never touched again

# Other processes write parts too: a cached listing of gs:// would never show them.
fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False


T = TypeVar("T")
Place = Callable[[str, np.ndarray], Any]  # (name, array) -> what a part has in its place


@dataclasses.dataclass(frozen=True)
class Part:
  """What one role saved for one snapshot, checked."""

  snapshot: int
  incarnation: int  # of the role, when it saved this
  state: dict[str, Any]
  arrays: dict[str, Any]  # as `Place` has made them


class Storage:
  """The snapshots of one run. Reads and writes in the caller's thread; any thread may call.

  Args:
    path: the folder of all snapshots, local or gs://...; made when something is saved.
    plan_id: which tensors and fragments the parts are made of; parts of another plan are refused.
    warn: called with what is skipped, and why.
  """

  def __init__(self, path: str | os.PathLike, plan_id: str, warn: Callable[[str], None]):
    self.path = weights.absolute(path, "checkpoints")
    self._plan_id = plan_id
    self._warn = warn

  # --- parts --------------------------------------------------------------------------------------

  def save(
    self,
    snapshot: int,
    role: str,
    incarnation: int,
    state: Mapping[str, Any],
    arrays: MutableMapping[str, jax.Array | np.ndarray],
  ) -> SignedJson:
    """Writes a part and returns its meta; replaces what this role saved for this snapshot before.

    Args:
      state: values that JSON can hold; they come back as JSON has them (lists for tuples, names as
        strings).
      arrays: name -> array, on the host or over any mesh; not to be changed before this returns.
        Emptied while arrays are written: this may free the last reference to their memory.

    Raises:
      ValueError: a name has an empty component, as "", "a/" or "/a": storage cannot tell it apart.
      OSError: it cannot be written (full, denied, ...). Its remainder is deleted, if possible.
    """
    part = self._part(snapshot, role)
    if odd := [name for name in arrays if not all(name.split("/"))]:
      raise ValueError(f"array {odd[0]!r}: a name is parts joined by '/', none of them empty")
    try:
      with signed_json.one_error(part):
        _delete(part)
        part.mkdir(parents=True, exist_ok=True)
        self._note(snapshot, role).unlink(missing_ok=True)
        found, windows = write_all(part / ARRAYS, arrays)
        meta = {
          **self._expected("part", snapshot),
          "role": role,
          "incarnation": incarnation,
          "state": dict(state),
          "arrays": found,
          "windows": windows,
        }
        signed = signed_json.write(part / META, meta)
        # A new life of this role may be deleting the part (`_forget`), or shard 0 its snapshot
        # (`_clear`): both sides write first and look afterwards.
        lost = {str(n) for n in range(len(windows))}.difference(signed_json.listed(part / ARRAYS))
        if lost or role in self.declined(snapshot):
          raise Damaged(part, "was given up while it was written")
    except OSError:
      # Frees room for other parts. If that fails too, the first error is raised: it tells more.
      # Where a bucket's answer was lost, the part may be complete, and be committed at this moment.
      with contextlib.suppress(OSError):
        self._forget(snapshot, role)
      raise
    return signed

  def meta(self, snapshot: int, role: str, committed: str = "") -> SignedJson:
    """The meta of a complete part: "state", "incarnation", "arrays", "digest", ...

    Args:
      committed: the digest that the manifest has for it; "": any.

    Raises:
      Damaged: the meta is missing, or is not what this role saved for this snapshot and plan, or
        not what was committed.
    """
    path = self._part(snapshot, role) / META
    expected = {**self._expected("part", snapshot), "role": role}
    meta = signed_json.read(path, expected)
    if committed not in ("", meta["digest"]):
      raise Damaged(path.parent, "is not the part that was committed")
    return meta

  def load(
    self,
    snapshot: int,
    role: str,
    place: Place = lambda name, value: value,
    names: Collection[str] | None = None,
    committed: str = "",
  ) -> Part:
    """A part with its arrays, each checked bit by bit.

    Args:
      place: what becomes of each array once it has been checked on the host, before the next window
        is read.
      names: only these arrays; all if None.
      committed: as of `meta`.

    Raises:
      Damaged: something of it is missing or changed.
      KeyError: the part has no array of this name.
      ValueError: `place` does not take an array.
      Exception: any other error of `place`.
    """
    meta = self.meta(snapshot, role, committed)
    path, stored = self._part(snapshot, role) / ARRAYS, meta["arrays"]
    wanted = stored if names is None else {name: stored[name] for name in names}
    arrays: dict[str, Any] = {
      name: np.empty(each["shape"], np.dtype(each["dtype"]))
      for name, each in wanted.items()
      if 0 in each["shape"]
    }
    for number, window in enumerate(meta["windows"]):
      mine = {name: wanted[name] for name in window if name in wanted}
      if mine:
        reads = functools.partial(read, path / str(number), window, mine)
        found = signed_json.patiently(path, reads)
        for name in mine:  # one after the other: what is placed is let go of here
          arrays[name] = place(name, found.pop(name))
    arrays = {name: arrays[name] for name in wanted}
    return Part(snapshot, meta["incarnation"], meta["state"], arrays)

  def decline(self, snapshot: int, role: str, reason: str) -> None:
    """Leaves a note that this role will save no part, so that no role waits for one.

    Raises:
      OSError: the note cannot be written.
    """
    note = self._note(snapshot, role)
    with signed_json.one_error(note):
      note.parent.mkdir(parents=True, exist_ok=True)
      note.write_text(reason)

  def declined(self, snapshot: int) -> set[str]:
    """The roles that have left a note that they will save no part.

    Raises:
      OSError: the file system cannot be asked.
    """
    names = signed_json.listed(self._snapshot(snapshot))
    return {name.removesuffix(DECLINED) for name in names if name.endswith(DECLINED)}

  def growth(self, snapshot: int, roles: Collection[str]) -> dict[str, int]:
    """Role -> bytes of its part so far, complete or not: they grow while the part is written.

    0: it has not been begun. (A folder counts, where the file system has folders.)
    """
    found = dict.fromkeys(roles, 0)
    for role in roles:
      path = self._part(snapshot, role)
      # Files are renamed meanwhile; the next call tells more than that it has been begun.
      with contextlib.suppress(OSError), signed_json.one_error(path):
        found[role] = int(path.exists())
        # Not by epath's own `stat`, which fails where the user has no name, as in many containers.
        kind, separator, _ = str(path).partition("://")
        files = fsspec.filesystem(kind if separator else "file")
        there = files.find(str(path), withdirs=True, detail=True)
        found[role] = sum(file["size"] for file in there.values())
    return found

  def metas(self, snapshot: int) -> dict[str, SignedJson]:
    """Role -> meta of the parts that are complete, whether committed or not.

    Raises:
      OSError: the file system cannot be asked.
    """
    found = {}
    for role in sorted(self._roles(snapshot)):
      with contextlib.suppress(Damaged):  # usually a part that is not complete yet
        found[role] = self.meta(snapshot, role)
    return found

  # --- snapshots ----------------------------------------------------------------------------------

  def commit(self, snapshot: int, roles: Collection[str]) -> None:
    """Declares the parts of `roles` to be the snapshot.

    Raises:
      Damaged: one of them is not complete.
      OSError: the manifest cannot be written.
    """
    digests = self._digests(snapshot, roles)
    path = self._snapshot(snapshot) / MANIFEST

    def look() -> None:
      if self.declined(snapshot) & {*roles} or self._digests(snapshot, roles) != digests:
        raise Damaged(path, "is withdrawn: a part was replaced while it was committed")

    with signed_json.one_error(path):
      signed_json.write(path, {**self._expected("manifest", snapshot), "parts": digests}, look)

  def is_committed(self, snapshot: int) -> bool:
    """Whether the snapshot has a manifest, unchecked: then its parts must not be replaced.

    Raises:
      OSError: the file system cannot be asked.
    """
    return MANIFEST in signed_json.listed(self._snapshot(snapshot))

  def is_past(self, snapshot: int) -> bool:
    """Whether the snapshot, or a newer one, is committed: no role waits for a part of it.

    Raises:
      OSError: the file system cannot be asked.
    """
    return any(self.is_committed(n) for n in self._snapshots() if n >= snapshot)

  def _digests(self, snapshot: int, roles: Collection[str]) -> dict[str, str]:
    return {role: self.meta(snapshot, role)["digest"] for role in sorted(roles)}

  def manifest(self, snapshot: int) -> SignedJson:
    """The manifest of a committed snapshot; "parts" is role -> digest.

    Raises:
      Damaged: the manifest is missing, or is not what was committed for this snapshot and plan.
    """
    path = self._snapshot(snapshot) / MANIFEST
    return signed_json.read(path, self._expected("manifest", snapshot))

  def committed(self) -> list[int]:
    """Snapshots that have a manifest, unchecked, the newest first.

    Raises:
      OSError: the file system cannot be asked.
    """
    return [n for n in self._snapshots() if self.is_committed(n)]

  def newest(self, read: Callable[[int], T | None], tried: list[str]) -> T | None:
    """What `read` makes of the newest committed snapshot of which it makes something.

    Snapshots that it cannot read are skipped, with a warning; the reasons are added to `tried`.

    Raises:
      OSError: of `read`, for a reason beside the storage: it has lost another host, for example.
    """

    def skip(which: str, error: Exception) -> None:
      tried.append(said := f"{which} skipped: {signed_json.brief(error)}")
      self._warn(said)

    passed = set[int]()
    while True:
      try:
        snapshots = [n for n in self._snapshots() if n not in passed]
      except Damaged as error:
        skip("checkpoints", error)
        return None
      for snapshot in snapshots:
        try:
          if self.is_committed(snapshot) and (found := read(snapshot)) is not None:
            return found
        except (Damaged, KeyError, TypeError, ValueError) as error:
          skip(f"checkpoint {snapshot}", error)
          passed.add(snapshot)
          break  # it may have been deleted while it was read, since a newer one was committed
      else:
        return None

  def find(
    self,
    role: str,
    place: Place = lambda name, value: value,
    use: Callable[[Part], Any] = lambda part: part,
  ) -> Any | None:
    """What `use` makes of the newest committed part of `role` that is undamaged, and of which it
    makes something; None if there is none. Warns of each one skipped.

    Snapshots without this role are skipped without a warning.
    """

    def part(snapshot: int) -> Any | None:
      digest = self.manifest(snapshot)["parts"].get(role)
      return digest and use(self.load(snapshot, role, place, committed=digest))

    return self.newest(part, [])

  def prune(self, keep: int, over: int = 0, since: int = 0) -> None:
    """Deletes all but the newest `keep` committed snapshots, and older ones never committed.

    The newest part of every learner stays, in snapshots from `since` on: one that was away for long
    still finds its own. So does a part that may still be written. If a deletion fails, there is a
    warning, and the next call tries again.

    Args:
      keep: how many, at least 1.
      over: this snapshot and those before it will not be committed any more: their parts would fill
        the disk as long as no snapshot can be committed.
      since: the oldest snapshot in which anything stays beside the newest `keep`.

    Raises:
      OSError: the file system cannot be asked.
    """
    committed, kept = self.committed(), 0
    newer: set[str] = set()  # learners that have a part in a newer snapshot
    begun: set[str] = set()  # roles that have begun one
    for snapshot in self._snapshots():
      roles = set[str]()
      try:
        parts = self._roles(snapshot)
        last, begun = parts - begun, begun | parts
        if snapshot > max([over, *committed]):
          continue  # its parts are still being saved
        whole = snapshot in committed
        saved = self.manifest(snapshot)["parts"] if whole else ()
        kept += whole  # here: no other run's counts, and none that nobody can read
        stays = snapshot >= since
        roles = {role for role in saved if stays and role.startswith("learner-")} - newer
        if not whole or kept > keep:
          self._clear(snapshot, whole, roles, last if stays else frozenset())
      except OSError as error:  # also if it is another run's, or unreadable: not ours to delete
        self._warn(f"old checkpoint stays: {error}")
      newer |= roles

  def forget(self, role: str = "") -> None:
    """Deletes what a role's former incarnations saved for snapshots that were never committed.

    Otherwise such an old part could be committed in place of a part that is still to come.

    Args:
      role: name of the role; empty: all roles, if the caller knows that none of them lives.

    Raises:
      OSError: the file system cannot be asked, or refuses.
    """
    for snapshot in self._snapshots():
      if not self.is_committed(snapshot):
        self._forget(snapshot, role) if role else self._clear(snapshot, False)

  def _clear(
    self, snapshot: int, whole: bool, roles: Set[str] = frozenset(), last: Set[str] = frozenset()
  ) -> None:
    """Deletes a snapshot; no remainder ever looks more complete than it is.

    Args:
      whole: it is committed.
      roles: whose parts stay.
      last: roles that have begun no newer part: one without a meta may still be written, and stays.
    """
    path = self._snapshot(snapshot)
    with signed_json.one_error(path):
      stay = roles | {role for role in last if META not in signed_json.listed(path / role)}
      if whole and not roles:
        (path / MANIFEST).rmtree(missing_ok=True)  # a file too
      for role in self._roles(snapshot) - stay:
        _delete(path / role) if whole else self._forget(snapshot, role)
      for role in stay - roles:
        with contextlib.suppress(OSError):  # without the note it stays until the next time
          self.decline(snapshot, role, "its snapshot is given up")
      # A folder or file of this name, and what is in it, may be another program's.
      ours = whole or all(
        n.endswith((DECLINED, signed_json.UNNAMED)) for n in signed_json.listed(path)
      )
      if not stay and ours and path.is_dir():
        path.rmtree(missing_ok=True)

  def _forget(self, snapshot: int, role: str) -> None:
    """Deletes what a role has left for a snapshot, unless the snapshot is committed by now.

    Shard 0 may commit it at this moment. Both sides write into its folder first, and look there
    afterwards; a folder of a network file system looks as it was until then. Shard 0 sees the note
    and yields (`commit`); or it has not named its manifest yet, and cannot any more; or the
    manifest is seen here. Whenever either side is killed, what a manifest vouches for is whole.
    """
    folder, note = self._snapshot(snapshot), self._note(snapshot, role)
    with signed_json.one_error(folder):
      if not {role, note.name}.intersection(signed_json.listed(folder)):
        return
      note.unlink(missing_ok=True)
      try:
        note.write_text("")
      except OSError as error:  # no room even for that: then there is none for a manifest
        if error.errno not in FULL:
          raise
      (folder / f"{MANIFEST}{signed_json.UNNAMED}").unlink(missing_ok=True)
      if not self.is_committed(snapshot):
        try:
          _delete(folder / role)
        finally:
          # Its former life may write it only now (`save`).
          (folder / role / META).unlink(missing_ok=True)
      note.unlink(missing_ok=True)

  def set_aside(self, newer_than: int) -> list[str]:
    """Renames committed snapshots newer than the one that the run goes on from: they are damaged.

    Their numbers will be used again. Only for a caller that knows that no role lives. Returns the
    new paths.

    Raises:
      OSError: the file system cannot be asked, or refuses.
    """
    moved = []
    for snapshot in self.committed():
      if snapshot > newer_than:
        path, names = self._snapshot(snapshot), signed_json.listed(self.path)
        aside = (f"{path.name}.{ASIDE}{n or ''}" for n in range(len(names) + 1))
        target = path.with_name(next(name for name in aside if name not in names))
        with signed_json.one_error(path):
          path.rename(target)
        moved.append(str(target))
    return moved

  # --- inside -------------------------------------------------------------------------------------

  def _snapshot(self, snapshot: int) -> epath.Path:
    return self.path / f"{snapshot:08d}"

  def _part(self, snapshot: int, role: str) -> epath.Path:
    if not ROLE.fullmatch(role):
      raise ValueError(f"role {role!r}: saves no parts; learners and shards do, such as learner-3")
    return self._snapshot(snapshot) / role

  def _note(self, snapshot: int, role: str) -> epath.Path:
    return self._snapshot(snapshot) / f"{role}{DECLINED}"

  def _snapshots(self) -> list[int]:
    names = signed_json.listed(self.path)
    return sorted((int(name) for name in names if re.fullmatch(r"[0-9]{8,}", name)), reverse=True)

  def _roles(self, snapshot: int) -> set[str]:
    """The roles that have a part, complete or not."""
    return {*filter(ROLE.fullmatch, signed_json.listed(self._snapshot(snapshot)))}

  def _expected(self, kind: str, snapshot: int) -> SignedJson:
    return {"format": FORMAT, "kind": kind, "plan": self._plan_id, "snapshot": snapshot}


def _delete(part: epath.Path) -> None:
  """Deletes a part, beginning with the file that makes it look complete."""
  (part / META).rmtree(missing_ok=True)  # a file too
  part.rmtree(missing_ok=True)
