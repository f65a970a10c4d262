"""One process as one role: a learner, a syncer shard or the evaluator, in the foreground.

For JobSet, systemd, ssh or a shell. Exit status 0: finished, or asked to end and nothing is lost;
1: work was lost (the last line says what); 130: Ctrl-C; wrong usage raises `ConfigError`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ddiloco.checkpoint import restore
from ddiloco.checkpoint.buddy import Copies, Replication, Sealer, recover
from ddiloco.checks import lasts, require
from ddiloco.config import Config
from ddiloco.core.delta import Committed, Store, new_fragment
from ddiloco.core.fragments import owned_by
from ddiloco.engines.island_hosts import FollowingHost, Hosts, check_hosts, name_lost_host
from ddiloco.engines.role_process import Ended, RoleRunner, unreached
from ddiloco.engines.role_spec import RoleSpec, check_spec
from ddiloco.environment import BAD_USAGE, FINISHED, LOST, end_now
from ddiloco.network.frames import incarnation_at
from ddiloco.network.transport import EVALUATOR_ADDRESS, learner_address, syncer_address
from ddiloco.observe.eventlog import newest_event
from ddiloco.observe.guards import say
from ddiloco.observe.run_state import merged_share
from ddiloco.observe.style import compact, percent
from ddiloco.protocol import events
from ddiloco.protocol import syncer as syncer_rules
from ddiloco.protocol.learner import unmerged_tokens
from ddiloco.protocol.messages import EVALUATOR, Goodbye
from ddiloco.protocol.states import LearnerState, SyncerState
from ddiloco.roles import initial
from ddiloco.roles.learner import Batches, Learner
from ddiloco.roles.syncer import Syncer
from ddiloco.runtime import Runtime
from ddiloco.workdir import COMPILED, LAST_KNOWN, RESULT, clear_outcome, outcome, reached_end

if TYPE_CHECKING:  # these modules import JAX, which a shard need not have
  from ddiloco.engines.engine import RunResult
  from ddiloco.training.data import Source

RECOVERY_HELLOS = 18  # hello periods: a learner that lost its shard retries within 16 of them
EARLIEST_SECONDS = 86_400  # round ids begin so long before the run's start by this host's clock

# --- learner --------------------------------------------------------------------------------------


def run_learner(config: Config, number: int, place: RoleSpec, corpus: Source | None = None) -> int:
  """Trains one island on the devices of this process until the run is over, or SIGTERM.

  Any number is allowed, also above islands.num_learners: learners come and go during a run.
  `corpus`: the data, if they are open already. Returns the exit status; of an island of several
  hosts the process ends here.
  """
  check_spec(config, place)
  check_hosts(config, number, place)
  if _is_finished(learner_address(number), config, place):
    return FINISHED
  if place.host:
    end_now(FollowingHost(config, number, place).run())
  with RoleRunner(learner_address(number), config, place) as runner:
    status = runner.run(lambda: _learner(runner, number, corpus))
  if place.hosts:
    end_now(status)  # JAX would wait for the other hosts
  return status


def _is_finished(address: str, config: Config, place: RoleSpec) -> bool:
  """Whether the run in the workdir is finished, which this says: its roles have ended, or will."""
  finished = reached_end(place.workdir, config)
  if finished:
    say(f"{address}: ends: the run in --workdir={place.workdir} is finished")
  return finished


def _learner(runner: RoleRunner, number: int, corpus: Source | None) -> int:
  runner.recorder.record(events.Launched())
  if not runner.place.hosts:
    return _train(runner, number, corpus, None)
  from ddiloco.training import data

  corpus = corpus or data.open_data(runner.config.data)
  hosts = Hosts(runner, number, data.digest(corpus))
  try:
    return _train(runner, number, corpus, hosts)
  except Exception as error:
    if lasts(error):
      runner.say(str(error))
      runner.recorder.close()
      os._exit(BAD_USAGE)  # JAX would wait for the other hosts
    name_lost_host()
    raise


def _train(runner: RoleRunner, number: int, corpus: Source | None, hosts: Hosts | None) -> int:
  """Trains on this process' devices, and on those of the other `hosts` of the island."""
  from ddiloco.engines import session
  from ddiloco.training import data
  from ddiloco.training.devices import island_devices, kept_in, told_what_compiles, usable
  from ddiloco.training.hosts import LeadingIsland
  from ddiloco.training.island import Island

  config = runner.config

  def compiled(program: str, seconds: float) -> None:
    took = round(seconds, 3)
    runner.recorder.record(events.Compiled(target=runner.address, seconds=took, program=program))

  # A restarted learner finds the programs that it, or another learner, has compiled before.
  with kept_in(runner.place.workdir / COMPILED):
    source = corpus or data.open_data(config.data)
    session.refuse_other_data(config, runner.place.workdir, source)
    devices = island_devices(config.islands.island(number), usable(), number)
    island = Island(config, number, devices, runner.plan)
    stream = data.Stream(source, config, number, island.rows)
    told = island.describe()
    runner.say(f"has its devices: {told['devices']} x {told['device_kind']}")
    runner.busy("compiling")
    compiled("", island.compile())
    with told_what_compiles(compiled):
      if hosts is None:
        return live(runner, number, island, stream.iterate)
      hosts.wait_until_compiled()
      leading = LeadingIsland(island, runner.plan, hosts.links, hosts.progress)
      status = live(runner, number, leading, functools.partial(leading.batches, stream.iterate))
      hosts.part(leading.end)
      return status


def live(runner: RoleRunner, number: int, island, batches: Batches) -> int:
  """Trains on a compiled island, in one incarnation after another; returns the exit status."""
  return runner.lives(lambda afresh: _life(runner, number, island, batches, afresh))


def _life(runner: RoleRunner, number: int, island, batches: Batches, afresh: bool) -> int:
  """One incarnation; `afresh`, or in a run without snapshots, it begins with nothing."""
  config, plan, recorder = runner.config, runner.plan, runner.recorder
  new = restore.new_learner(config, plan, number, runner.incarnation, afresh)
  began = time.monotonic()
  runner.busy("restoring a snapshot")
  storage = None if afresh else runner.storage
  beginning = restore.begin_learner(new, config, island, storage, recorder)
  if beginning.arrays:
    runner.say(f"has its part of a snapshot, after {time.monotonic() - began:.1f} s")
  endpoint, saver = runner.connect(), runner.saver()
  make = functools.partial(_make, runner)
  runtime = Runtime(config, plan, endpoint, recorder, saver, initial=make)
  role = Learner(beginning, island, batches, runtime)
  exchange = role.exchange
  runner.ready = lambda: _joining(exchange.state, endpoint.links(), config)
  runner.progress = lambda: _trained(exchange.state, config, runner.speed())
  runner.usual_seconds = lambda: role.usual_seconds

  try:
    role.run(runner.faults, runner.stopped, config.network.drain_seconds)
  finally:
    runner.disconnect()
    if saver is not None:
      saver.close(runner.time_left())
  return _left(runner, exchange.state)


def _make(runner: RoleRunner) -> Mapping[int, np.ndarray]:
  """All initial values; the role says that it makes them, which may take minutes."""
  before, mine = runner.ready, lambda: "the initial values, which it makes"
  runner.ready = mine
  try:
    return initial.initial_values(runner.config, runner.plan)
  finally:
    if runner.ready is mine:
      runner.ready = before


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
    f"has {have} of {len(state.fragments)} fragments (a shard gives out its own once it serves them"
    f" and sync.min_quorum = {config.sync.min_quorum} learners are there)"
  )


def _merged(state: LearnerState | SyncerState, config: Config) -> float:
  """Share of the run that is merged in the role's fragments."""
  return merged_share([f.merged_tokens for f in state.fragments], config.run.total_tokens)


def _trained(state: LearnerState, config: Config, fast: str = "") -> str:
  share = _merged(state, config)
  speed = f", {1000 * state.step_seconds:.0f} ms a step" if state.step_seconds else ""
  speed += fast and f", {fast}"
  here = f", {compact(state.trained_tokens)} tokens trained here" if state.trained_tokens else ""
  return f"global step {state.global_step}{speed}{here}; {percent(share)} of the run is merged"


def _left(runner: RoleRunner, state: LearnerState) -> int:
  """The exit status of a learner that leaves: work not merged is lost, unless the run is over."""
  unmerged = unmerged_tokens(state)
  if state.merged_tokens >= runner.config.run.total_tokens or not unmerged:
    runner.say(f"ends: {_trained(state, runner.config)}; nothing is lost")
    return FINISHED
  runner.say(
    f"ends with lost work: {unmerged} of its {state.trained_tokens} tokens were not merged within"
    f" network.drain_seconds = {runner.config.network.drain_seconds:g}"
  )
  return LOST


# --- syncer shard ---------------------------------------------------------------------------------


def run_syncer(config: Config, shard: int, place: RoleSpec) -> int:
  """Owns its fragments until the evaluator has saved the final model and all have left, or SIGTERM.

  A restarted shard gets its fragments from its buddy. A fragment that no role has any more is lost:
  this is logged, and sets the exit status.
  """
  check_spec(config, place)
  count = config.sync.num_shards
  rule, fix = f"the config has sync.num_shards = {count}", f"use 0 to {count - 1}"
  require(0 <= shard < count, "--shard", shard, rule, fix)
  if _is_finished(syncer_address(shard), config, place):
    return FINISHED
  with RoleRunner(syncer_address(shard), config, place) as runner:
    return runner.run(lambda: _syncer(runner, shard))


def _syncer(runner: RoleRunner, shard: int) -> int:
  config, recorder = runner.config, runner.recorder
  owned = owned_by(shard, config.sync.num_shards, config.sync.num_fragments)
  endpoint = runner.connect()
  copies = Copies(shard, runner.incarnation, endpoint, runner.plan, config)
  replication = None
  if config.sync.num_shards > 1:
    replication = Replication(copies, config.network.patience_seconds, recorder)
  store, state, unfounded = _recover(runner, shard, copies, owned)
  rounds = (store[p].state.last_round for p in owned)
  runner.come_after(max(rounds, default=-1) >> 24)  # a round id contains its shard's incarnation
  saver, plan = runner.saver(), runner.plan
  keys, contract = runner.keys, initial.contract(config, plan)
  sealer = Sealer(keys.secret, runner.place.run_id, contract) if keys else None
  runtime = Runtime(config, plan, endpoint, recorder, saver)
  role = Syncer(state, store, runtime, replication, sealer, in_place=True)
  if saver is not None:
    saver.hold = lambda: "it has nothing to save yet" if unfounded.empty(role.state) else ""
  if replication is not None:
    replication.begin(c for c in role.committed.values() if c.state.version)
  runner.say(f"serves fragments {', '.join(map(str, owned))} at {endpoint.bound}")
  runner.ready = lambda: _untaken(role)
  runner.progress = lambda: _served(role, config)
  over, faults = _over(runner, role, unfounded), runner.faults
  try:
    role.run(faults, over)
    until = time.monotonic() + runner.time_left()  # the buddy still gets what it lacks
    if replication is not None and not syncer_rules.complete(role.state):
      kept = lambda: role.idle and not replication.missing()
      role.run(faults, lambda: kept() or time.monotonic() >= until)
  finally:
    role.close()
    runner.disconnect()
    if saver is not None:
      saver.close(runner.time_left())
  runner.say(f"ends: {_served(role, config)}")
  return _shard_status(runner, role)


def _over(runner: RoleRunner, role: Syncer, unfounded: restore.Unfounded) -> Callable[[], bool]:
  """What says whether the shard may end."""
  silence_seconds = runner.config.network.silence_seconds

  def over() -> bool:
    if refusal := unfounded.refusal(role.state):
      raise Ended(refusal)
    finished = syncer_rules.finished(role.state, time.monotonic(), silence_seconds)
    return (finished and role.idle) or runner.stopped()

  return over


def _untaken(role: Syncer) -> str:
  """What a shard waits for at the end, "": nothing, or an evaluator that is here."""
  member = role.state.members.get(EVALUATOR)
  gone = (member is None or member.lost) and not role.state.model_saved
  fix = "start it, with run.evaluations = 0 if it fails to evaluate"
  waits = f"the evaluator, which has not saved the final model ({fix})"
  return waits if gone and syncer_rules.complete(role.state) else ""


def _shard_status(runner: RoleRunner, role: Syncer) -> int:
  """The exit status. Lost are versions that learners had and no shard has any more; before the
  run's end, fragments that the buddy does not have; and a final model that no role has saved."""
  had = {p: f"fragment {p} before version {v + 1}" for p, v in sorted(role.lost.items())}
  if had:
    runner.say(f"was lost on the way: {', '.join(had.values())}")
  over = syncer_rules.complete(role.state)
  alone = role.replication is None
  left = [f for f in role.state.fragments if f.version > 0] if alone else role.replication.missing()
  if not over and left:
    runner.say("ends with lost work: no other shard has all of its fragments")
  if untaken := bool(_untaken(role)):
    runner.say(
      "ends before the evaluator has saved the final model. Fix: start all roles again, also the"
      " evaluator: they go on from the newest snapshot"
    )
  return LOST if had or untaken or (left and not over) else FINISHED


def _recover(
  runner: RoleRunner, shard: int, copies: Copies, owned: tuple[int, ...]
) -> tuple[Store, SyncerState, restore.Unfounded]:
  """(The newest commit of every fragment, the state to begin with, `Unfounded`).

  Fragments come from the buddy, or from the newest snapshot if only that has them, or has newer
  ones. A fragment that neither has begins from its initial value, if there never was a snapshot.
  Learners give newer values back, and the first rounds wait for them. If the run's snapshots are
  lost, learners must give the fragment back (`Unfounded`).
  """
  config, plan = runner.config, runner.plan
  found, unfounded = _ask_buddy(runner, copies), restore.Unfounded((), "")
  restored, tried, storage = None, list[str](), runner.storage
  if storage is not None:
    runner.busy("restoring a snapshot")
    # The former life may have gone on without its buddy, whose copies are then older.
    rounds = {p: committed.state.last_round for p, committed in found.items()}
    restored = restore.restore_fragments(storage, owned, tried, than=rounds)
  if restored is not None:
    found |= restored.fragments
    if taken := sorted(restored.fragments):
      runner.say(f"has from snapshot {restored.snapshot}: fragments {taken}")
  elif missing := [p for p in owned if p not in found]:
    runner.busy(f"making the initial values of fragments {missing}")
    for p, value in initial.initial_values(config, plan, missing).items():
      found[p] = new_fragment(plan.fragments[p], value)
    if lost := restore.lost_snapshots(config, runner.place.workdir, storage, tried):
      unfounded = restore.Unfounded(missing, lost)
      runner.say(f"has nothing of fragments {missing}, and asks the learners: {lost}")
    elif newest_event(runner.place.workdir, events.Commit, runner.recorder.role):
      runner.say(
        f"begins fragments {missing} again, unless a learner has them: no snapshot of this run was"
        " ever complete"
      )
  # The recovery deadline holds also with the buddy's copies: the former life may have gone on
  # without its buddy, and learners may have newer values.
  now, age_seconds = time.monotonic(), max(0.0, time.time() - runner.started)
  state = restore.new_syncer(
    config,
    shard,
    runner.incarnation,
    found,
    recovery_deadline=now + RECOVERY_HELLOS * config.network.hello_seconds,
    began_at=now - age_seconds,
    first_round=max(0, incarnation_at(runner.started) - EARLIEST_SECONDS) << 24,
  )
  return found, restored.resume(state) if restored is not None else state, unfounded


def _ask_buddy(runner: RoleRunner, copies: Copies) -> dict[int, Committed]:
  """The buddy's copies of this shard's fragments; {} without a buddy, or if it does not answer."""
  if runner.config.sync.num_shards == 1:
    return {}

  def keep_on(quiet_seconds: float) -> bool:
    runner.busy("asking its buddy for its fragments")  # which may take minutes
    return quiet_seconds < runner.config.network.silence_seconds

  found = recover(copies, keep_on)
  if found:
    versions = ", ".join(f"{p} at {c.state.version}" for p, c in sorted(found.items()))
    runner.say(f"has from its buddy: fragments {versions}")
  return found


def _served(role: Syncer, config: Config) -> str:
  versions = sorted(f.version for f in role.state.fragments)
  at = f"fragments at versions {versions[0]} to {versions[-1]}"
  members = [m for m, member in sorted(role.state.members.items()) if not member.lost and m >= 0]
  share, least = _merged(role.state, config), config.sync.min_quorum
  few = len(members) < least and not syncer_rules.complete(role.state)
  waits = f", and a round needs {least}" if few else ""
  return f"{percent(share)} merged, {at}; {len(members)} learners {members}{waits}"


# --- evaluator ------------------------------------------------------------------------------------


def run_evaluator(config: Config, place: RoleSpec, corpus: Source | None = None) -> int:
  """Follows and measures the global model, and leaves WORKDIR/result and the report at the end.

  `corpus`: the data, if they are open already.
  """
  check_spec(config, place)
  finished = _is_finished(EVALUATOR_ADDRESS, config, place)
  with RoleRunner(EVALUATOR_ADDRESS, config, place) as runner:
    return runner.run(lambda: _leave(runner) if finished else _evaluator(runner, corpus))


def _leave(runner: RoleRunner) -> int:
  """Says goodbye once more: a shard that did not hear it, and shares no workdir, still waits. If a
  life before was killed as it measured the end, for its memory perhaps, leaves just the report."""
  endpoint = runner.connect()
  for shard in range(runner.config.sync.num_shards):
    endpoint.send(syncer_address(shard), Goodbye(EVALUATOR, runner.incarnation))
  if LAST_KNOWN not in outcome(runner.place.workdir):
    from ddiloco.engines.engine import RunResult

    runner.disconnect()
    tokens = runner.config.run.total_tokens
    _conclude(runner, RunResult("finished", {}, {}, saved=True, merged_tokens=tokens), None)
    runner.say("was killed before this report; `ddiloco evaluate` prints the result's loss")
  return FINISHED


def _conclude(runner: RoleRunner, result: RunResult, loss: Any) -> None:
  """`session.conclude`, as a role says it."""
  from ddiloco.engines import session

  runner.busy("measuring the result and writing the report")
  try:
    session.conclude(runner.config, runner.place.workdir, result, loss, pause=runner.stop.wait)
  except OSError as error:
    fix = f"{session.ROOM}; start it again"
    raise Ended(f"the run's end is not saved: {error}. Fix: {fix}") from error


def _evaluator(runner: RoleRunner, corpus: Source | None) -> int:
  from ddiloco.checkpoint import weights
  from ddiloco.engines import session
  from ddiloco.engines.engine import RunResult, save_result
  from ddiloco.roles.evaluator import Evaluator
  from ddiloco.training import data

  config = runner.config
  result = runner.place.workdir / RESULT
  weights.replaceable(result, "--workdir")  # refused now, not at the end when there is a result
  clear_outcome(runner.place.workdir)
  measure = loss = None
  if config.run.evaluations:
    runner.busy("reading the held-out data")
    source = corpus or data.open_data(config.data)
    session.refuse_other_data(config, runner.place.workdir, source)
    heldout = session.evaluator(config, source)
    measure, loss = heldout.measure, heldout.loss
  endpoint = runner.connect()
  make = functools.partial(_make, runner)
  runtime = Runtime(config, runner.plan, endpoint, runner.recorder, initial=make)
  weights.clear(result)

  def save(params: initial.Assembled, merged_tokens: int) -> None:
    def end() -> None:
      save_result(config, runner.place.workdir, params, merged_tokens)
      # Roles that start from now on, this one perhaps, know that the run needs them no more.
      over = {"reason": "finished", "total_tokens": config.run.total_tokens}
      session.write_outcome(runner.place.workdir, over)

    runner.busy("saving the result")
    session.until_saved(end, config.network.give_up_seconds, runner.stop.wait)
    runner.busy("measuring the result")

  role = Evaluator(measure, runtime, runner.incarnation, save=save)
  runner.ready = lambda: _joining(role.exchange.state, endpoint.links(), config)
  runner.progress = lambda: _trained(role.exchange.state, config)
  # Once it has left, shards end: it may reach none any more.
  stopped = lambda: runner.stop.is_set() if role.saved else runner.stopped()
  try:
    role.run(stopped)
  finally:
    runner.disconnect()
  state = role.exchange.state
  if not state.joined:
    runner.say("ends, as asked, before it had received the whole model: there is no result")
    return FINISHED
  if role.finished and not role.saved:
    raise Ended("has not saved the final model, which the shards keep. Fix: start it again")
  reason = "finished" if role.finished else "stopped"
  seen = role.saved, role.final_loss, state.merged_tokens
  _conclude(runner, RunResult(reason, role.store.params(), {}, "", *seen), loss)
  return FINISHED
