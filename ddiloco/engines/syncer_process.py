"""One process as a syncer shard; see `engines/learner_process.py` for the others."""

from __future__ import annotations

import time

from ddiloco.checkpoint.buddy import Copies, Replication, buddy_of, recover
from ddiloco.checkpoint.restore import (
  Unfounded,
  lost_snapshots,
  new_syncer,
  newest_rounds,
  open_storage,
  restore_fragments,
)
from ddiloco.config import Config, ConfigError
from ddiloco.core.commit import Committed, MemoryStore, new_fragment
from ddiloco.core.fragments import owned_by
from ddiloco.engines.role_process import FINISHED, LOST, Ended, RoleRunner
from ddiloco.engines.role_spec import RoleSpec, check_spec
from ddiloco.network.handshake import incarnation_at
from ddiloco.network.seals import Sealer
from ddiloco.network.transport import syncer_address
from ddiloco.observe.eventlog import newest_event
from ddiloco.protocol import events
from ddiloco.protocol import syncer as syncer_rules
from ddiloco.protocol.messages import NOTHING
from ddiloco.protocol.states import SyncerState, complete
from ddiloco.roles import initial
from ddiloco.roles.syncer import Syncer
from ddiloco.runtime import Runtime

RECOVERY_HELLOS = 18  # a learner that lost its shard tries again after at most 16 of them
EARLIEST_SECONDS = 86_400  # before the run began by this host's clock: rounds of its shards


def run_syncer(config: Config, shard: int, place: RoleSpec) -> int:
  """Owns its fragments until all of them are done and every learner has left, or SIGTERM.

  A restarted shard gets its fragments from its buddy; a fragment that no role has any more is lost,
  which is said and sets the exit status.
  """
  check_spec(config, place)
  if not 0 <= shard < config.sync.num_shards:
    raise ConfigError(
      f"--shard={shard}: the config has sync.num_shards = {config.sync.num_shards}."
      f" Fix: use 0 to {config.sync.num_shards - 1}."
    )
  with RoleRunner(syncer_address(shard), config, place) as runner:
    return runner.run(lambda: _syncer(runner, shard))


def _syncer(runner: RoleRunner, shard: int) -> int:
  config, recorder = runner.config, runner.recorder
  owned = owned_by(shard, config.sync.num_shards, config.sync.num_fragments)
  endpoint = runner.listen(shard)
  runner.ready = lambda: f"looks for fragments {list(owned)}"
  settings, buddy = config.network, buddy_of(shard, config.sync.num_shards)
  copies = Copies(shard, runner.incarnation, endpoint, runner.plan, config)
  replication = None
  if buddy != shard:
    replication = Replication(copies, buddy, settings.patience_seconds, recorder)
  store, state, unfounded = _recover(runner, shard, copies, owned)
  rounds = (store.load(p).state.last_round for p in owned)
  runner.come_after(max(rounds, default=-1) >> 24)  # a round names the life that made it
  saver, plan = runner.saver(), runner.plan
  keys, contract = runner.keys, initial.contract(config, plan)
  sealer = Sealer(keys.secret, runner.place.run_id, contract) if keys else None
  runtime = Runtime(endpoint, recorder, saver)
  role = Syncer(state, config, plan, store, runtime, replication, sealer)
  if saver is not None:
    saver.hold = lambda: "it has nothing to save yet" if unfounded.empty(role.state) else ""
  back = any(committed.state.version for committed in role.committed.values())
  if replication is not None:
    replication.begin(c for c in role.committed.values() if c.state.version)
  runner.say(f"serves fragments {', '.join(map(str, owned))} at {endpoint.bound}")
  runner.ready = lambda: ""
  runner.progress = lambda: _served(role, config)
  over_at = state.recovery_deadline if back else 0.0
  faults, silence_seconds = runner.faults, settings.silence_seconds

  def over() -> bool:
    if refusal := unfounded.refusal(role.state):
      raise Ended(refusal)
    return _finished(role, silence_seconds, over_at) or runner.stopped()

  try:
    role.run(faults, over)
    until = time.monotonic() + settings.drain_seconds  # told to end: the buddy gets what it lacks
    if replication is not None and not _complete(role):
      kept = lambda: role.idle and not replication.missing()  # noqa: E731
      role.run(faults, lambda: kept() or time.monotonic() >= until)
  finally:
    role.close()
    runner.disconnect()
    if saver is not None:
      saver.close(settings.drain_seconds)
  runner.say(f"ends: {_served(role, config)}")
  return _shard_status(runner, role)


def _finished(role: Syncer, silence_seconds: float, settled_at: float) -> bool:
  now = time.monotonic()
  over = now >= settled_at and syncer_rules.finished(role.state, now, silence_seconds)
  return over and role.idle


def _complete(role: Syncer) -> bool:
  return all(complete(role.state, f) for f in role.state.fragments)


def _shard_status(runner: RoleRunner, role: Syncer) -> int:
  """Lost is what learners had and no shard has any more, and before the end what no buddy has."""
  had = {p: f"fragment {p} before version {v + 1}" for p, v in sorted(role.lost.items())}
  if had:
    runner.say(f"was lost on the way: {', '.join(had.values())}")
  over = _complete(role)
  alone = role.replication is None
  left = [f for f in role.state.fragments if f.version > 0] if alone else role.replication.missing()
  if not over and left:
    runner.say("ends with lost work: no other shard has all of its fragments")
  return LOST if had or (left and not over) else FINISHED


def _recover(
  runner: RoleRunner, shard: int, copies: Copies, owned: tuple[int, ...]
) -> tuple[MemoryStore, SyncerState, Unfounded]:
  """(a store with the newest commit of every fragment, the state to begin with, what has none).

  From the buddy, but from the newest snapshot what only that has, or has newer; what neither has
  begins anew if there never was a snapshot. Learners that have newer values give them back: the
  first rounds wait for those, and after lost snapshots there are no others.
  """
  config, plan = runner.config, runner.plan
  found, unfounded = _ask_buddy(runner, shard, copies), Unfounded((), "")
  restored, tried = None, list[str]()
  storage = open_storage(config, plan, runner.place.workdir)
  # It may have gone on alone, cut off from its buddy, whose copies are older than snapshots then.
  rounds = newest_rounds(storage) if found and storage is not None else {}
  wanted = [p for p in owned if p not in found or _newer(rounds.get(p, NOTHING), found[p])]
  if wanted and storage is not None:
    restored = restore_fragments(storage, plan, wanted, tried)
  if restored is not None:
    taken = {
      p: committed
      for p, committed in restored.fragments.items()  # of an older one, if the newest is damaged
      if p not in found or _newer(committed.state.last_round, found[p])
    }
    found |= taken
    if taken:
      runner.say(f"has from snapshot {restored.snapshot}: fragments {sorted(taken)}")
  elif missing := [p for p in owned if p not in found]:
    for p, value in initial.initial_values(config, plan, missing).items():
      found[p] = new_fragment(plan.fragments[p], value)
    if lost := lost_snapshots(config, runner.place.workdir, storage, tried):
      unfounded = Unfounded(missing, lost)
      runner.say(f"has nothing of fragments {missing}, and asks the learners: {lost}")
    elif newest_event(runner.place.workdir, events.Commit, runner.recorder.role):
      runner.say(
        f"begins fragments {missing} again, unless a learner has them: no snapshot of this run was"
        " ever complete"
      )
  store = MemoryStore(outlives=False)
  for committed in found.values():
    store.save(committed)
  # Also with its buddy's copies: it may have gone on without a buddy that was cut off from it.
  age_seconds = max(0.0, time.time() - runner.started)
  state = new_syncer(
    config,
    shard,
    runner.incarnation,
    store,
    recovery_deadline=time.monotonic() + RECOVERY_HELLOS * config.network.hello_seconds,
    began_at=time.monotonic() - age_seconds,
    first_round=max(0, incarnation_at(runner.started) - EARLIEST_SECONDS) << 24,
  )
  return store, restored.resume(state) if restored is not None else state, unfounded


def _newer(last_round: int, than: Committed) -> bool:
  return last_round > than.state.last_round


def _ask_buddy(runner: RoleRunner, shard: int, copies: Copies) -> dict[int, Committed]:
  """What it holds of this shard's fragments; nothing if there is none, or it does not answer."""
  buddy = buddy_of(shard, runner.config.sync.num_shards)
  if buddy == shard:
    return {}

  def keep_on(quiet_seconds: float) -> bool:
    stopped = runner.stopped()
    # Being asked is no beginning: until the role runs, much else may take minutes without a beat.
    runner.busy("recovering its fragments")
    return not stopped and quiet_seconds < runner.config.network.silence_seconds

  found = recover(
    copies.endpoint,
    copies,
    shard,
    runner.incarnation,
    runner.plan,
    buddy,
    keep_on,
  )
  if found:
    versions = ", ".join(f"{p} at {c.state.version}" for p, c in sorted(found.items()))
    runner.say(f"has from its buddy: fragments {versions}")
  return found


def _served(role: Syncer, config: Config) -> str:
  merged = min(f.merged_tokens for f in role.state.fragments)
  versions = ", ".join(f"{f.index} at {f.version}" for f in role.state.fragments)
  members = [m for m, member in sorted(role.state.members.items()) if not member.lost and m >= 0]
  share = min(1.0, merged / config.run.total_tokens)
  return f"{share:.0%} merged, versions {versions}; {len(members)} learners {members}"
