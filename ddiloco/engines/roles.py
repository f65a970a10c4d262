"""One process as one role: a learner, a syncer shard or the evaluator, in the foreground.

For JobSet, systemd, `gcloud ssh` or a shell. Exit status 0: finished, or asked to end and nothing
is lost; 1: work was lost (the last line says what); 130: Ctrl-C; wrong usage raises `ConfigError`.
"""

from __future__ import annotations

import math
import time

from ddiloco.config import Config, ConfigError
from ddiloco.core import syncer as syncer_rules
from ddiloco.core.fragments import gather, owned_by
from ddiloco.core.learner import unmerged_tokens
from ddiloco.core.learner_state import LearnerState
from ddiloco.core.syncer_state import SyncerState, complete
from ddiloco.engines.attend import FINISHED, LOST, Attendant, Ended, Place, unreached
from ddiloco.engines.workdir import COMPILED
from ddiloco.observe.style import compact
from ddiloco.runtime import initial
from ddiloco.runtime.exchange import Quarantined
from ddiloco.runtime.rejoin import (
  begin_learner,
  forget,
  new_learner,
  new_syncer,
  open_storage,
  restore_fragments,
)
from ddiloco.runtime.replica import Copies, Replication, buddy_of, recover
from ddiloco.runtime.store import Committed, MemoryStore, new_fragment
from ddiloco.runtime.syncer import Syncer
from ddiloco.runtime.transport import EVALUATOR_ADDRESS, learner_address, syncer_address

SETTLE_HELLOS = 18  # a learner that lost its shard tries again after at most 16 of them


def check_place(config: Config, place: Place) -> None:
  """Refuses what no role could run with.

  Raises:
    ConfigError: no shards in the config, or not one url for each.
  """
  shards = config.sync.num_shards
  if not shards:
    raise ConfigError(
      "sync.num_shards = 0: roles of their own meet at a syncer shard."
      " Fix: set it to 1 or more, or use `ddiloco train --engine=threads`."
    )
  if len(place.syncers) != shards:
    raise ConfigError(
      f"--syncers={','.join(place.syncers)}: names {len(place.syncers)} shards, the config has"
      f" sync.num_shards = {shards}. Fix: give the url of every shard, in order."
    )


# --- learner --------------------------------------------------------------------------------------


def run_learner(config: Config, number: int, place: Place) -> int:
  """Trains one island on the devices of this process until the run is over, or SIGTERM.

  Any number will do, also above islands.num_learners: learners come and go while the run goes on.
  """
  check_place(config, place)
  with Attendant(learner_address(number), config, place) as attendant:
    return attendant.run(lambda: _learner(attendant, number))


def _learner(attendant: Attendant, number: int) -> int:
  import jax

  from ddiloco.training import data
  from ddiloco.training.compiled import kept_in
  from ddiloco.training.island import Island

  config = attendant.config
  # A restarted learner finds the programs that it, or another one, has compiled before.
  with kept_in(attendant.place.workdir / COMPILED):
    stream = data.Stream(data.open_corpus(config.data), config, number)
    island = Island(config, number, _devices(config, number, jax.devices()), attendant.plan)
    attendant.ready = lambda: "compiling"
    seconds = island.compile()
    attendant.recorder.event("compiled", target=attendant.address, seconds=round(seconds, 3))
    return live(attendant, number, island, stream)


def live(attendant: Attendant, number: int, island, stream) -> int:
  """Trains on an island that is ready; quarantined, it starts afresh as a new incarnation.

  Returns the exit status.

  Raises:
    Ended: it was quarantined once too often.
  """
  config = attendant.config
  crashes = 0
  storage = open_storage(config, attendant.plan, attendant.place.workdir)
  while True:
    try:
      return _life(attendant, number, island, stream, storage if not crashes else None)
    except Quarantined as error:
      crashes += 1  # what it had was bad: from now on it begins with nothing
      again = crashes <= config.run.max_restarts
      text = f"was quarantined ({error})"
      if not again:
        raise Ended(f"{text} for the {crashes}th time; run.max_restarts allows no more") from error
      pause = config.run.restart_seconds * 2 ** (crashes - 1)
      attendant.say(f"{text}; starts afresh in {pause:g} s")
      if attendant.pause(pause):
        return FINISHED  # what it had was rejected: there is nothing to lose
      attendant.reborn()


def _life(attendant: Attendant, number: int, island, stream, storage) -> int:
  """One incarnation; without `storage` it begins with nothing."""
  from ddiloco.runtime.learner import Learner

  config, plan, recorder = attendant.config, attendant.plan, attendant.recorder
  new = new_learner(config, plan, number, attendant.incarnation)
  began = time.monotonic()
  beginning = begin_learner(new, config, plan, island, storage, recorder)
  if beginning.arrays:
    attendant.say(f"has its part of a snapshot, after {time.monotonic() - began:.1f} s")
  endpoint, saver = attendant.dial(), attendant.saver()
  role = Learner(beginning, config, plan, island, stream.iterate, endpoint, recorder, saver)
  exchange = role.exchange
  attendant.ready = lambda: _joining(exchange.state, endpoint.links(), config)
  attendant.progress = lambda: _trained(exchange.state, config)
  attendant.usual_seconds = lambda: exchange.state.step_seconds
  try:
    role.run(attendant.faults, attendant.stopped, config.network.drain_seconds)
  finally:
    attendant.disconnect()
    if saver is not None:
      saver.close(config.network.drain_seconds)
  return _left(attendant, exchange.state)


def _devices(config: Config, number: int, visible: list) -> list:
  count = config.islands.island(number).devices or len(visible)
  if count > len(visible):
    raise ConfigError(
      f"islands.devices = {count}: learner {number} sees {len(visible)} devices."
      " Fix: lower it, or give the process more devices."
    )
  return visible[:count]


def _joining(state: LearnerState, links: dict, config: Config) -> str:
  """What a learner or the evaluator waits for; "" once it has joined."""
  if state.joined:
    return f"waits for a peer's moments of fragments {list(state.wants)}" if state.wants else ""
  if reason := unreached(links):
    return reason
  have = sum(f.fresh for f in state.fragments)
  if any(f.version >= 0 and not f.fresh for f in state.fragments):
    return f"is back; {have} of {len(state.fragments)} fragments are as new as their shards'"
  return (
    f"has {have} of {len(state.fragments)} fragments (shards give them out once"
    f" {config.sync.min_quorum} learners are there)"
  )


def _trained(state: LearnerState, config: Config) -> str:
  share = min(1.0, state.merged_tokens / config.run.total_tokens)
  speed = f", {1000 * state.step_seconds:.0f} ms a step" if state.step_seconds else ""
  return (
    f"clock {state.clock}{speed}, {compact(state.trained_tokens)} tokens trained here;"
    f" {share:.0%} of the run is merged"
  )


def _left(attendant: Attendant, state: LearnerState) -> int:
  """After the run nobody needs what is not merged; in the middle of it that is lost work."""
  unmerged = unmerged_tokens(state)
  if state.merged_tokens >= attendant.config.run.total_tokens or not unmerged:
    attendant.say(f"ends: {_trained(state, attendant.config)}; nothing is lost")
    return FINISHED
  attendant.say(
    f"ends with lost work: {unmerged} of its {state.trained_tokens} tokens were not merged within"
    f" network.drain_seconds = {attendant.config.network.drain_seconds:g}"
  )
  return LOST


# --- shard ----------------------------------------------------------------------------------------


def run_syncer(config: Config, shard: int, place: Place) -> int:
  """Owns its fragments until all of them are done and every learner has left, or SIGTERM.

  A restarted shard gets its fragments from its buddy; what nobody has any more is lost, said, and
  the exit status tells.
  """
  check_place(config, place)
  if not 0 <= shard < config.sync.num_shards:
    raise ConfigError(
      f"--shard={shard}: the config has sync.num_shards = {config.sync.num_shards}."
      f" Fix: use 0 to {config.sync.num_shards - 1}."
    )
  with Attendant(syncer_address(shard), config, place) as attendant:
    return attendant.run(lambda: _syncer(attendant, shard))


def _syncer(attendant: Attendant, shard: int) -> int:
  config, recorder = attendant.config, attendant.recorder
  owned = owned_by(shard, config.sync.num_shards, config.sync.num_fragments)
  endpoint = attendant.listen(shard)
  attendant.ready = lambda: f"looks for fragments {list(owned)}"
  settings, buddy = config.network, buddy_of(shard, config.sync.num_shards)
  copies = Copies(shard, attendant.incarnation, endpoint)
  replication = None
  if buddy != shard:
    replication = Replication(copies, buddy, settings.patience_seconds, recorder)
  # One that has come back does not know who is there before they had time to reach it again.
  settled_at = time.monotonic() + SETTLE_HELLOS * settings.hello_seconds
  store, state = _recover(attendant, shard, copies, owned, settled_at)
  saver, plan = attendant.saver(), attendant.plan
  role = Syncer(state, config, plan, endpoint, store, recorder, replication, saver)
  back = [committed for committed in role.committed.values() if committed.state.version]
  if replication is not None:  # a buddy that has restarted as well has them from here
    for committed in back:
      replication.committed(committed)
  attendant.say(f"serves fragments {', '.join(map(str, owned))} at {endpoint.bound}")
  attendant.ready = lambda: ""
  attendant.progress = lambda: _served(role, config)
  over_at = settled_at if back else 0.0
  faults, silence_seconds = attendant.faults, settings.silence_seconds
  try:
    role.run(faults, lambda: _finished(role, silence_seconds, over_at) or attendant.stopped())
    until = time.monotonic() + settings.drain_seconds  # told to end: the buddy gets what it lacks
    if replication is not None and not _complete(role):
      role.run(faults, lambda: not replication.missing() or time.monotonic() >= until)
  finally:
    attendant.disconnect()
    if saver is not None:
      saver.close(settings.drain_seconds)
  attendant.say(f"ends: {_served(role, config)}")
  return _shard_status(attendant, role)


def _finished(role: Syncer, silence_seconds: float, settled_at: float) -> bool:
  now = time.monotonic()
  return now >= settled_at and syncer_rules.finished(role.state, now, silence_seconds)


def _complete(role: Syncer) -> bool:
  return all(complete(role.state, f) for f in role.state.fragments)


def _shard_status(attendant: Attendant, role: Syncer) -> int:
  """Lost is what learners had and no shard has any more, and before the end what no buddy has."""
  had = {p: f"fragment {p} before version {v + 1}" for p, v in sorted(role.lost.items())}
  if had:
    attendant.say(f"was lost on the way: {', '.join(had.values())}")
  over = _complete(role)
  alone = role.replication is None
  left = [f for f in role.state.fragments if f.version > 0] if alone else role.replication.missing()
  if not over and left:
    attendant.say("ends with lost work: no other shard has all of its fragments")
  return LOST if had or (left and not over) else FINISHED


def _recover(
  attendant: Attendant, shard: int, copies: Copies, owned: tuple[int, ...], settled_at: float
) -> tuple[MemoryStore, SyncerState]:
  """(a store with the newest commit of every fragment, the state to begin with).

  From the buddy, else from the newest snapshot; what neither has begins anew. Learners that have
  newer values than that give them back, for which the first rounds wait until `settled_at`.
  """
  config, plan, restored = attendant.config, attendant.plan, None
  found = _ask_buddy(attendant, shard, copies)
  missing = [p for p in owned if p not in found]
  storage = open_storage(config, plan, attendant.place.workdir)
  if missing and storage is not None:
    restored = restore_fragments(storage, plan, missing)
  if storage is not None:
    newest = restored.snapshot if restored is not None else None
    forget(storage, attendant.recorder.role, newest)
  if restored is not None:
    found |= restored.fragments
    attendant.say(f"has from snapshot {restored.snapshot}: fragments {missing}")
  elif missing:
    params = initial.initial_params(config)
    for p in missing:
      found[p] = new_fragment(plan.fragments[p], gather(plan.fragments[p], params))
  store = MemoryStore()
  for committed in found.values():
    store.save(committed)
  settle_at = settled_at if missing else -math.inf
  state = new_syncer(config, shard, attendant.incarnation, store, settle_at)
  return store, restored.resume(state) if restored is not None else state


def _ask_buddy(attendant: Attendant, shard: int, copies: Copies) -> dict[int, Committed]:
  """What it holds of this shard's fragments; nothing if there is none, or it does not answer."""
  buddy = buddy_of(shard, attendant.config.sync.num_shards)
  if buddy == shard:
    return {}
  until = time.monotonic() + attendant.config.network.silence_seconds
  found = recover(
    copies.endpoint,
    copies,
    shard,
    attendant.incarnation,
    attendant.plan,
    buddy,
    lambda: not attendant.stopped() and time.monotonic() < until,
  )
  if found:
    versions = ", ".join(f"{p} at {c.state.version}" for p, c in sorted(found.items()))
    attendant.say(f"has from its buddy: fragments {versions}")
  return found


def _served(role: Syncer, config: Config) -> str:
  merged = min(f.merged_tokens for f in role.state.fragments)
  versions = ", ".join(f"{f.index} at {f.version}" for f in role.state.fragments)
  members = [m for m, member in sorted(role.state.members.items()) if not member.lost and m >= 0]
  share = min(1.0, merged / config.run.total_tokens)
  return f"{share:.0%} merged, versions {versions}; {len(members)} learners {members}"


# --- evaluator ------------------------------------------------------------------------------------


def run_evaluator(config: Config, place: Place) -> int:
  """Follows the global model, measures it, and leaves WORKDIR/result and the report at the end."""
  check_place(config, place)
  with Attendant(EVALUATOR_ADDRESS, config, place) as attendant:
    return attendant.run(lambda: _evaluator(attendant))


def _evaluator(attendant: Attendant) -> int:
  from ddiloco.engines import session
  from ddiloco.engines.outcome import Outcome
  from ddiloco.runtime.evaluator import Evaluator
  from ddiloco.training import data

  config, began = attendant.config, time.monotonic()
  attendant.ready = lambda: "reading the held-out data"
  loss = session.held_out_loss(config, data.open_corpus(config.data))
  endpoint = attendant.dial()
  role = Evaluator(
    config, attendant.plan, loss, endpoint, attendant.recorder, attendant.incarnation
  )
  attendant.ready = lambda: _joining(role.exchange.state, endpoint.links(), config)
  attendant.progress = lambda: _trained(role.exchange.state, config)
  try:
    role.run(attendant.stopped)
  finally:
    attendant.disconnect()
  state = role.exchange.state
  if not state.joined:
    raise Ended("ends before it had received the whole model: there is no result")
  finished = state.merged_tokens >= config.run.total_tokens
  outcome = Outcome("finished" if finished else "stopped", role.holder.params, {}, {})
  session.conclude(config, attendant.place.workdir, outcome, loss, began)
  return FINISHED
