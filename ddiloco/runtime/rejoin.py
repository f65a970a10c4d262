"""How a role begins: anew, or with what a snapshot has of it.

Whatever it is that comes back, the newest committed snapshot that passes its checks counts; what is
damaged is named and passed over. A learner's parameters may be old: its shards send what is newer,
and its clock is the run's.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddiloco.config import Config, ConfigError
from ddiloco.core import causality, learner, saved, syncer
from ddiloco.core.fragments import Plan, owned_by, shard_of
from ddiloco.core.learner_state import LearnerState
from ddiloco.core.syncer_state import FragmentState, SyncerState
from ddiloco.observe.drain import warn
from ddiloco.observe.events import Recorder
from ddiloco.runtime.records import Damaged
from ddiloco.runtime.store import Committed, FragmentStore

if TYPE_CHECKING:  # it brings Orbax and JAX, which not every role needs
  from ddiloco.runtime.storage import Part, Storage


def open_storage(config: Config, plan: Plan, workdir: Path) -> Storage | None:
  """Where the run's snapshots are; None if it makes none.

  Raises:
    ConfigError: checkpoint.path is in a bucket whose package is not installed.
  """
  if not (config.sync.num_shards and config.sync.snapshot_steps):
    return None
  import fsspec

  from ddiloco.runtime.storage import Storage

  path = config.checkpoint.path
  kind, separator, _ = path.partition("://")
  try:
    fsspec.get_filesystem_class(kind if separator else "file")
  except (ImportError, ValueError) as error:
    raise ConfigError(
      f"checkpoint.path = {path!r}: cannot be reached ({error})."
      " Fix: pip install 'ddiloco[gcs]' for gs://, or give a folder."
    ) from error
  return Storage(path or workdir / "checkpoints", plan.plan_id, warn)


def newest_clock(config: Config, plan: Plan, workdir: Path) -> int:
  """About where the run goes on, in steps of its clock; -1 if it begins."""
  storage = open_storage(config, plan, workdir)
  try:
    committed = [] if storage is None else storage.committed()
  except OSError:  # roles that look for their parts say so
    committed = []
  return committed[0] * config.sync.snapshot_steps if committed else -1


def forget(storage: Storage, role: str, newer_than: int | None) -> None:
  """`Storage.forget`; what cannot be deleted is warned of."""
  try:
    storage.forget(role, newer_than)
  except OSError as error:
    warn(f"{role or 'run'}: what was saved before cannot be deleted: {error}. The run goes on.")


# --- learners -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Beginning:
  """What a learner's incarnation begins with; its island holds the rest."""

  state: LearnerState
  arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # of the exchange
  position: int = 0  # of its data, when `state` was recorded
  fresh: bool = True  # the inner optimizer has no past


def new_learner(config: Config, plan: Plan, number: int, incarnation: int) -> LearnerState:
  """A learner that has nothing yet."""
  target = config.run.total_tokens
  if not config.sync.num_shards:  # it trains alone, for its share
    target = config.planned_steps() * config.tokens_per_step(number)
  checkpoint = config.checkpoint
  seconds = checkpoint.donor_seconds if checkpoint.rejoin == "peer" else 0.0
  owners = _owners(config, plan)
  return learner.init(number, incarnation, owners, target, donor_seconds=seconds)


def _owners(config: Config, plan: Plan) -> tuple[int, ...]:
  shards = config.sync.num_shards
  return tuple(shard_of(p, shards) for p in range(len(plan.fragments))) if shards else ()


def begin_learner(
  state: LearnerState,
  config: Config,
  plan: Plan,
  island,
  storage: Storage | None,
  recorder: Recorder,
) -> Beginning:
  """Brings the island to where this learner begins: its own newest part, or zeros.

  `state` is that of `new_learner`.
  """
  island.compile()
  if storage is None or config.checkpoint.rejoin == "fresh":
    island.reset()
    return Beginning(state)
  role, began = f"learner-{state.learner}", time.monotonic()
  part = storage.find(role, island.shardings())
  if part is not None:
    try:
      beginning = _revived(part, state, config, plan, island)
    except (ValueError, KeyError, TypeError) as error:  # saved.NotAState is a ValueError
      what = f"{type(error).__name__}: {error}"
      warn(f"{role}: its part of snapshot {part.snapshot} does not fit: {what}. It starts afresh.")
    else:
      recorder.event(
        "restored",
        snapshot=part.snapshot,
        of_incarnation=part.incarnation,
        seconds=round(time.monotonic() - began, 3),
      )
      return beginning
  island.reset()
  return Beginning(state)


def _revived(part: Part, new: LearnerState, config: Config, plan: Plan, island) -> Beginning:
  old = saved.from_json(LearnerState, part.state["learner"])
  if len(old.fragments) != len(new.fragments) or old.learner != new.learner:
    raise saved.NotAState("it is of another learner or plan")
  position = saved.from_json(int, part.state["position"])
  mine = {n: value for n, value in part.arrays.items() if n.startswith(("params/", "inner/"))}
  island.restore(mine)
  rest = {name: value for name, value in part.arrays.items() if name not in mine}
  revived = learner.revive(old, new.incarnation, _owners(config, plan), new.target_tokens)
  revived = dataclasses.replace(revived, donor_seconds=new.donor_seconds)
  return Beginning(revived, rest, position, fresh=False)


def learner_part(state: LearnerState, position: int) -> dict[str, Any]:
  """A learner's state as a part has it; `position` of its data."""
  seen = saved.to_json(state.seen)
  return {
    "key": state.learner,
    "seen": seen,
    "clock": state.clock,
    "position": position,
    "learner": saved.to_json(state),
  }


# --- shards ---------------------------------------------------------------------------------------


def new_syncer(
  config: Config, shard: int, incarnation: int, store: FragmentStore, settle_at: float = -math.inf
) -> SyncerState:
  """A shard that owns what the store has of its fragments."""
  owned = owned_by(shard, config.sync.num_shards, config.sync.num_fragments)
  newest = tuple(store.load(p).state for p in owned)
  planned = config.islands.num_learners
  return syncer.init(shard, incarnation, newest, config.run.total_tokens, settle_at, planned)


@dataclasses.dataclass(frozen=True)
class Restored:
  """What a snapshot has of some fragments."""

  fragments: dict[int, Committed]
  snapshot: int
  clock: int
  seen: Mapping[int, int]

  def resume(self, state: SyncerState) -> SyncerState:
    """A new shard that has these fragments, where the run was when they were recorded."""
    seen = causality.join(state.seen, self.seen)
    return dataclasses.replace(state, clock=self.clock, snapshot=self.snapshot, seen=seen)


def syncer_part(state: SyncerState, momentum_rounds: Mapping[int, int]) -> dict[str, Any]:
  """A shard's state as a part has it."""
  return {
    "key": causality.shard_key(state.shard),
    "seen": saved.to_json(state.seen),
    "clock": state.clock,
    "fragments": [saved.to_json(dataclasses.replace(f, round=None)) for f in state.fragments],
    "momentum_rounds": saved.to_json(momentum_rounds),
  }


def restore_fragments(storage: Storage, plan: Plan, wanted: Collection[int]) -> Restored | None:
  """These fragments as of the newest committed snapshot that has all of them undamaged.

  Whichever shard saved them: the number of shards may have changed.
  """
  try:
    committed = storage.committed()
  except OSError as error:
    warn(f"checkpoints cannot be searched: {error}")
    return None
  for snapshot in committed:
    try:
      return _restore(storage, plan, snapshot, set(wanted))
    except Damaged as damage:
      warn(f"checkpoint skipped: {damage}")
    except (saved.NotAState, KeyError, TypeError, ValueError) as error:
      warn(f"checkpoint {snapshot} skipped: {type(error).__name__}: {error}")
  return None


def _restore(storage: Storage, plan: Plan, snapshot: int, wanted: set[int]) -> Restored:
  found: dict[int, Committed] = {}
  clock, seen = 0, {}
  for role, digest in storage.manifest(snapshot)["parts"].items():
    if not role.startswith("syncer-"):
      continue
    meta = storage.meta(snapshot, role)
    if meta["digest"] != digest:
      raise saved.NotAState(f"{role} is not the part that was committed")
    state = meta["state"]
    states = [saved.from_json(FragmentState, f) for f in state["fragments"]]
    rounds = dict(state["momentum_rounds"])
    mine = {f.index: f for f in states if f.index in wanted}
    names = [name for name in meta["arrays"] if int(name.partition("/")[0]) in mine]
    arrays = storage.load(snapshot, role, names=names).arrays
    for p, f in mine.items():
      value = arrays[f"{p}/value"]
      if value.shape != (plan.fragments[p].size,):
        raise saved.NotAState(f"fragment {p} has {value.shape[0]} values")
      view, momentum = arrays.get(f"{p}/view", value), arrays.get(f"{p}/momentum")
      found[p] = Committed(f, value, view, momentum, rounds[p])
    if mine:
      clock = max(clock, state["clock"])
      seen = causality.join(seen, dict(map(tuple, state["seen"])))
  if found.keys() != wanted:
    raise saved.NotAState(f"it lacks fragments {sorted(wanted - found.keys())}")
  return Restored(found, snapshot, clock, seen)
