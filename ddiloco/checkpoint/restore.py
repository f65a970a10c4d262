"""How a role begins: with nothing, or with its part of a snapshot.

A role takes the newest committed snapshot that passes its checks; a damaged snapshot is named and
skipped. A learner's parameters may be old: the shards send newer versions, and its global step
becomes the run's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddiloco.checkpoint.signed_json import Damaged
from ddiloco.checks import is_there, refusal, require
from ddiloco.config import Config, ConfigError
from ddiloco.core.delta import Committed, Store
from ddiloco.core.fragments import Plan, owned_by, shard_of
from ddiloco.observe.eventlog import Records, newest_event
from ddiloco.observe.guards import warn
from ddiloco.protocol import events, learner, states, syncer
from ddiloco.protocol.messages import FragmentState
from ddiloco.protocol.states import LearnerPart, LearnerState, SyncerPart, SyncerState
from ddiloco.protocol.values import NotAState, from_json, replace

if TYPE_CHECKING:  # this module imports Orbax and JAX, which not every role needs
  from ddiloco.checkpoint.snapshots import Part, Storage


def open_storage(config: Config, plan: Plan, workdir: Path, run_id: str) -> Storage | None:
  """The storage of the run's snapshots; None if the run makes none.

  In `checkpoint.path` every run has a folder of its own name, `run_id`, so that no run takes
  another run's snapshots for its own.

  Raises:
    ConfigError: checkpoint.path is a file, or in a bucket whose package is not installed, or as of
      `weights.absolute`.
  """
  if not (config.sync.num_shards and config.sync.snapshot_steps):
    return None
  import fsspec

  from ddiloco.checkpoint import weights
  from ddiloco.checkpoint.snapshots import Storage

  own: Any = workdir / "checkpoints"
  if path := config.checkpoint.path:
    own = weights.absolute(path, "checkpoint.path") / run_id
    file = any(map(os.path.isfile, (own.parent, own)))
    require(not file, "checkpoint.path", path, f"it, or its {run_id}, is a file", "give a folder")
    kind, store, _ = path.partition("://")
    try:
      fsspec.get_filesystem_class(kind if store else "file")
    except ImportError as error:
      fix = "pip install 'ddiloco[gcs]' for gs://, or give a folder"
      raise refusal("checkpoint.path", path, f"cannot be reached ({error})", fix) from error
  return Storage(own, plan.plan_id, warn)


def newest_global_step(storage: Storage | None) -> int:
  """Roughly the global step at which the run goes on; -1 if it begins."""
  with contextlib.suppress(OSError):  # roles report it when they look for their parts
    return max(storage.committed() if storage is not None else (), default=-1)
  return -1


# --- learners -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ResumeState:
  """What a learner's incarnation begins with; its island holds the rest."""

  state: LearnerState
  # Arrays of the exchange, which removes them when it takes them over.
  arrays: MutableMapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  position: int = 0  # of its data, when `state` was captured
  fresh: bool = True  # the inner optimizer's state is new


def new_learner(
  config: Config, plan: Plan, number: int, incarnation: int, afresh: bool = False
) -> LearnerState:
  """The state of a learner that has nothing yet.

  `afresh`: after a quarantine. It takes no peer's moments: they may have caused the quarantine.
  """
  target, shards, checkpoint = config.run.total_tokens, config.sync.num_shards, config.checkpoint
  if not shards:  # it trains alone, for its share
    target = config.planned_steps() * config.tokens_per_step(number)
  owners = tuple(shard_of(p, shards) for p in range(len(plan.fragments))) if shards else ()
  asks = checkpoint.rejoin == "peer" and not afresh
  seconds = checkpoint.donor_seconds if asks else 0.0
  return learner.init(number, incarnation, owners, target, donor_seconds=seconds)


def begin_learner(
  state: LearnerState,
  config: Config,
  island,
  storage: Storage | None,
  recorder: Records,
  now: Callable[[], float] = time.monotonic,
) -> ResumeState:
  """Brings the island to where this learner begins: its own newest part that fits, or zeros.

  `state` is that of `new_learner`; `now` is a clock in seconds.
  """
  island.compile()
  role, began, found = f"learner-{state.learner}", now(), None
  if storage is not None and config.checkpoint.rejoin != "fresh":
    found = storage.find(role, island.place, lambda part: (part, _revived(part, state, island)))
  if found is None:
    island.reset()
    return ResumeState(state)
  part, beginning = found
  took, life = round(now() - began, 3), part.incarnation
  recorder.record(events.Restored(snapshot=part.snapshot, of_incarnation=life, seconds=took))
  return beginning


def _revived(part: Part, new: LearnerState, island) -> ResumeState:
  captured = from_json(LearnerPart, part.state)
  mine = {n: value for n, value in part.arrays.items() if n.startswith(("params/", "inner"))}
  island.restore(mine)
  rest = {name: value for name, value in part.arrays.items() if name not in mine}
  return ResumeState(learner.revive(captured.learner, new), rest, captured.position, fresh=False)


# --- shards ---------------------------------------------------------------------------------------


def new_syncer(
  config: Config,
  shard: int,
  incarnation: int,
  store: Store,
  recovery_deadline: float = -math.inf,
  began_at: float | None = None,
  first_round: int = 0,
) -> SyncerState:
  """The state of a shard whose fragments are in the store; the rest as `protocol.syncer.init`.

  `began_at`: on `time.monotonic()`, when the run began; None: now.
  """
  owned = owned_by(shard, config.sync.num_shards, config.sync.num_fragments)
  newest = tuple(store[p].state for p in owned)
  islands = {*range(config.islands.num_learners), *map(int, config.islands.overrides)}
  islands.add(max(islands) + 1)  # without settings of its own, as learners that join may be
  sizes = [config.tokens_per_step(m) for m in islands]
  return syncer.init(
    shard,
    incarnation,
    newest,
    config.sync,
    config.run.total_tokens,
    recovery_deadline,
    first_round=first_round,
    began_at=time.monotonic() if began_at is None else began_at,
    planned_learners=config.islands.num_learners,
    step_tokens=max(sizes),
    fewest_tokens=min(sizes),
    passes_moments=config.checkpoint.rejoin == "peer",
  )


@dataclasses.dataclass
class Restored:
  """What a snapshot has of some fragments."""

  fragments: dict[int, Committed]
  snapshot: int
  global_step: int = 0
  step_tokens: int = 0
  vector_clock: Mapping[int, int] = dataclasses.field(default_factory=dict)

  def resume(self, state: SyncerState) -> SyncerState:
    """The state of a new shard that has these fragments, at the progress of their capture."""
    vector_clock = states.join_clocks(state.vector_clock, self.vector_clock)
    # Fragments from the buddy may be newer: a snapshot that they had a part in is not taken again.
    # Steps that are not merged yet may be of larger batches than those with which the run goes on.
    return replace(
      state,
      global_step=max(state.global_step, self.global_step),
      step_tokens=max(state.step_tokens, self.step_tokens),
      snapshot=max(state.snapshot, self.snapshot),
      vector_clock=vector_clock,
    )


def restore_fragments(
  storage: Storage,
  wanted: Collection[int],
  tried: list[str] | None = None,
  keep: bool = True,
  than: Mapping[int, int] | None = None,
) -> Restored | None:
  """These fragments as of the newest committed snapshot that has all of them undamaged.

  Any shard may have saved them: the number of shards may have changed. Skipped snapshots stay as
  they are; the reason for each is added to `tried`. Without `keep` every fragment is read and
  checked, and then dropped: for a supervisor, which alone reports what the run goes on from. `than`
  is fragment -> the last round of a value that the caller has: of these fragments only newer values
  are read, and none is missed.
  """
  tried = [] if tried is None else tried
  return storage.newest(lambda n: _restore(storage, n, wanted, keep, than or {}), tried)


def _restore(
  storage: Storage, snapshot: int, wanted: Collection[int], keep: bool, than: Mapping[int, int]
) -> Restored:
  lacks, restored = {*wanted} - than.keys(), Restored({}, snapshot)
  for role, digest in storage.manifest(snapshot)["parts"].items():
    if not role.startswith("syncer-"):
      continue
    meta = storage.meta(snapshot, role, digest)
    part = from_json(SyncerPart, meta["state"])
    restored.step_tokens = max(restored.step_tokens, part.step_tokens)
    mine = [f for f in part.fragments if f.index in wanted]
    mine = [f for f in mine if f.last_round > than.get(f.index, -math.inf)]
    if not mine:
      continue
    indices, place = {f.index for f in mine}, lambda name, value: value if keep else None
    names = [name for name in meta["arrays"] if int(name.partition("/")[0]) in indices]
    # In one go: many small fragments share a file, and to open it takes as long as all of them.
    arrays = storage.load(snapshot, role, place, names, committed=digest).arrays
    for f in mine:
      committed = _fragment(arrays, f, part.momentum_rounds[f.index])
      lacks.discard(f.index)
      if keep:
        restored.fragments[f.index] = committed
    restored.global_step = max(restored.global_step, part.global_step)
    restored.vector_clock = states.join_clocks(restored.vector_clock, part.vector_clock)
  if lacks:
    raise NotAState(f"it lacks fragments {sorted(lacks)}")
  return restored


def _fragment(arrays: Mapping[str, Any], f: FragmentState, momentum_round: int) -> Committed:
  """One fragment of a shard's part."""
  value = arrays[f"{f.index}/value"]
  published = arrays.get(f"{f.index}/published_value", value)
  return Committed(f, value, published, arrays.get(f"{f.index}/momentum"), momentum_round)


# --- What a run goes on from: it is reported, or the run is refused
# A run that has committed snapshots and can read none of them is refused, whatever is wrong with
# them: they may be on a disk that is not mounted. A run that ended before its first snapshot was
# complete has nothing to go on from; it begins again, and says so.


def go_on(
  config: Config, workdir: Path, storage: Storage | None, snapshot: int | None, tried: Sequence[str]
) -> None:
  """Says what a whole run goes on from, and clears away other snapshots; before any role lives.

  Newer snapshots are set aside; parts of snapshots that were never committed are deleted.

  Args:
    config: the run's.
    workdir: of the run.
    storage: the run's snapshots; None if it makes none.
    snapshot: the newest that was found whole; None: there is none.
    tried: the snapshots that were skipped, and why.

  Raises:
    ConfigError: there are snapshots, and the run can go on from none of them; or newer ones cannot
      be set aside.
  """
  if storage is not None and snapshot is not None:
    try:
      moved = storage.set_aside(snapshot)
    except OSError as error:
      raise ConfigError(
        f"checkpoints: snapshots newer than {snapshot} cannot be read, nor set aside ({error})."
        f" Fix: make {storage.path} readable and writable, or move them away yourself."
      ) from error
    passed = f" Passed over and set aside: {', '.join(moved)}." if moved else ""
    lacks = _lacks(config, storage, snapshot)
    alone = not is_there(workdir / "events")
    whose = f" There are no events here: {storage.path} may be of another run of this name." * alone
    said = f"goes on from snapshot {snapshot}.{lacks}{passed}{whose}"
    print(f"\nThe run in {workdir} {said}", flush=True)
  else:
    refuse_lost(config, workdir, storage, tried)
    if is_there(workdir / "events"):
      again = f"begins again from its initial values: {_why(config)}"
      print(f"\nThe run in {workdir} {again}.", flush=True)
  if storage is not None:
    try:
      storage.forget()
    except OSError as error:
      warn(f"what was never committed cannot be deleted: {error}. The run goes on.")


def check_start(config: Config, workdir: Path, storage: Storage | None) -> None:
  """Refuses what `go_on` would refuse, as far as the names of snapshots tell; changes nothing.

  Raises:
    ConfigError: there were snapshots, and none is where this config looks for them.
  """
  tried = list[str]()
  if storage is None or storage.newest(lambda snapshot: snapshot, tried) is None:
    refuse_lost(config, workdir, storage, tried)


def refuse_lost(
  config: Config, workdir: Path, storage: Storage | None, tried: Sequence[str]
) -> None:
  """Refuses (ConfigError) to begin a run again that has had snapshots; arguments as of `go_on`."""
  if lost := lost_snapshots(config, workdir, storage, tried):
    where = "the checkpoints" if storage is None else str(storage.path)
    raise ConfigError(
      f"--workdir={workdir}: {lost} Fix: bring {where} back as it was, or the config"
      " that made it, and give the same command; or add --overwrite to begin anew."
    )


def _lacks(config: Config, storage: Storage, snapshot: int) -> str:
  """A sentence about the learners that the snapshot lacks."""
  with contextlib.suppress(Damaged):  # read a moment ago; the roles that need it will report more
    parts = storage.manifest(snapshot)["parts"]
    learners = (f"learner-{m}" for m in range(config.islands.num_learners))
    if lacks := [role for role in learners if role not in parts]:
      return f" It lacks {', '.join(lacks)}: these take an older part, if any."
  return ""


def _why(config: Config) -> str:
  if not config.sync.num_shards:
    return "islands that train alone make no snapshots"
  if not config.sync.snapshot_steps:
    return "sync.snapshot_steps = 0 makes no snapshots"
  return "it was ended before its first snapshot was complete"


def lost_snapshots(
  config: Config, workdir: Path, storage: Storage | None, tried: Sequence[str]
) -> str:
  """Which snapshots there were, and why none can be read; "" if there never was one."""
  try:
    newest = newest_event(workdir, events.Snapshot, "syncer-0")  # shard 0 commits snapshots
  except OSError as error:
    newest, tried = None, [*tried, f"its events, which would tell ({error})"]
  if newest is None and not tried:
    return ""
  known = f"up to number {newest.snapshot}" if newest else "of which its events know nothing"
  if storage is None:
    tried = [f"none is looked for, as {_why(config)}"]
  elif not tried:
    tried = [f"there is none in {storage.path}"]
  return f"its run has snapshots, {known}, and none can be read: {'; '.join(tried)}."


class Unfounded:
  """Watches a shard that came back without its fragments: it must not publish initial values.

  The shard asks the living learners, which give back the values that they have. Until it has them
  it takes no part in snapshots, and no round of such a fragment may begin.

  Args:
    fragments: those that the shard could not recover, although the run has had snapshots.
    lost: which snapshots these were, and why none can be read.
  """

  def __init__(self, fragments: Sequence[int], lost: str):
    self._fragments = tuple(fragments)
    self._lost = lost

  def empty(self, state: SyncerState) -> list[int]:
    """Fragments that have not been given back yet."""
    return [f.index for f in state.fragments if f.index in self._fragments and not f.version]

  def refusal(self, state: SyncerState) -> str:
    """Why the shard must end: a round of a fragment would begin from nothing. "": it need not."""
    empty = self.empty(state)
    if not any(state.fragments[i].index in empty for i in state.under_way):
      return ""
    return (
      f"would begin fragments {empty} anew in the middle of the run: neither its buddy nor any"
      f" learner has them, and {self._lost} Fix: bring the checkpoints back and start this shard"
      " again; or begin anew in another --workdir."
    )
