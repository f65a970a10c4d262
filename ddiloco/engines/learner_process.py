"""One process as one role: a learner, a syncer shard or the evaluator, in the foreground.

For JobSet, systemd, `gcloud ssh` or a shell. Exit status 0: finished, or asked to end and nothing
is lost; 1: work was lost (the last line says what); 130: Ctrl-C; wrong usage raises `ConfigError`.
"""

from __future__ import annotations

import functools
import os
import time

from ddiloco.checkpoint.restore import begin_learner, new_learner, open_storage
from ddiloco.config import Config, ConfigError
from ddiloco.engines.children import BAD_USAGE
from ddiloco.engines.island_hosts import Hosts, check_hosts, run_host
from ddiloco.engines.role_process import FINISHED, LOST, Ended, RoleRunner, unreached
from ddiloco.engines.role_spec import Outnumbered, RoleSpec, check_spec
from ddiloco.network.host_links import HostsApart
from ddiloco.network.transport import EVALUATOR_ADDRESS, learner_address
from ddiloco.observe.style import compact
from ddiloco.protocol import events
from ddiloco.protocol.learner import unmerged_tokens
from ddiloco.protocol.states import LearnerState
from ddiloco.protocol.supervisor import after_exit
from ddiloco.roles import initial
from ddiloco.roles.exchange import Quarantined
from ddiloco.roles.learner import Batches
from ddiloco.runtime import Runtime
from ddiloco.workdir import COMPILED, RESULT

# --- learner --------------------------------------------------------------------------------------


def run_learner(config: Config, number: int, place: RoleSpec) -> int:
  """Trains one island on the devices of this process until the run is over, or SIGTERM.

  Any number will do, also above islands.num_learners: learners come and go while the run goes on.
  """
  check_spec(config, place)
  check_hosts(config, number, place)
  if place.host:
    return run_host(config, number, place)
  with RoleRunner(learner_address(number), config, place) as runner:
    status = runner.run(lambda: _learner(runner, number))
  if place.hosts and status == LOST:
    os._exit(status)  # JAX would wait for the other hosts
  return status


def _learner(runner: RoleRunner, number: int) -> int:
  runner.recorder.record(events.Launched())
  if not runner.place.hosts:
    return _train(runner, number, None)
  try:
    hosts = Hosts(runner, number)
  except HostsApart as error:
    raise Ended(str(error)) from error
  try:
    status = _train(runner, number, hosts)
  except ConfigError as error:
    runner.say(str(error))
    runner.recorder.close()
    os._exit(BAD_USAGE)  # as below
  hosts.part()
  return status


def _train(runner: RoleRunner, number: int, hosts: Hosts | None) -> int:
  """On this process' devices, and on those of the other `hosts` of the island."""
  import jax

  from ddiloco.training import data
  from ddiloco.training.compile_times import told_what_compiles
  from ddiloco.training.devices import island_devices, kept_in
  from ddiloco.training.hosts import LeadingIsland
  from ddiloco.training.island import Island

  config = runner.config
  # A restarted learner finds the programs that it, or another one, has compiled before.
  with kept_in(runner.place.workdir / COMPILED):
    stream = data.Stream(data.open_data(config.data), config, number)
    devices = island_devices(config.islands.island(number), jax.devices(), number)
    island = Island(config, number, devices, runner.plan)
    runner.ready = lambda: "compiling"
    seconds = island.compile()
    runner.recorder.record(events.Compiled(target=runner.address, seconds=round(seconds, 3)))
    with told_what_compiles(functools.partial(_record_compiled, runner)):
      if hosts is None:
        return live(runner, number, island, stream.iterate)
      hosts.wait_until_compiled()
      leading = LeadingIsland(island, runner.plan, hosts.links, hosts.progress)
      status = live(runner, number, leading, functools.partial(leading.batches, stream.iterate))
      leading.end()
      return status


def _record_compiled(runner: RoleRunner, program: str, seconds: float) -> None:
  """A program was compiled in the middle of training."""
  compiled = events.Compiled(target=runner.address, seconds=round(seconds, 3), program=program)
  runner.recorder.record(compiled)


def live(runner: RoleRunner, number: int, island, batches: Batches) -> int:
  """Trains on an island that is ready; quarantined, it starts afresh as a new incarnation.

  Returns the exit status.

  Raises:
    Ended: it was quarantined once too often in a row.
  """
  config, deaths, afresh = runner.config, 0, False
  storage = open_storage(config, runner.plan, runner.place.workdir)
  while True:
    began = time.monotonic()
    try:
      return _life(runner, number, island, batches, storage, afresh)
    except Quarantined as error:
      afresh = True  # what it had was bad: from now on it begins with nothing
      deaths, pause = after_exit(deaths, time.monotonic() - began, config.run)
      text = f"was quarantined ({error})"
      if pause is None:
        raise Ended(
          f"{text} for the {deaths}th time in a row; run.max_restarts allows no more"
        ) from error
      runner.say(f"{text}; starts afresh in {pause:g} s")
      if runner.pause(pause):
        return FINISHED  # what it had was rejected: there is nothing to lose
      runner.reborn()
    except Outnumbered as refusal:
      if runner.begin_anew(refusal):
        return FINISHED  # it had done nothing


def _life(runner: RoleRunner, number: int, island, batches: Batches, storage, afresh: bool) -> int:
  """One incarnation; `afresh`, or without `storage`, it begins with nothing."""
  from ddiloco.roles.learner import Learner

  config, plan, recorder = runner.config, runner.plan, runner.recorder
  new = new_learner(config, plan, number, runner.incarnation, afresh)
  began = time.monotonic()
  runner.busy("restoring a snapshot")  # a second life has come round before
  found = None if afresh else storage
  beginning = begin_learner(new, config, plan, island, found, recorder)
  if beginning.arrays:
    runner.say(f"has its part of a snapshot, after {time.monotonic() - began:.1f} s")
  endpoint, saver = runner.dial(), runner.saver()
  runtime = Runtime(endpoint, recorder, saver, initial=runner.initial_values)
  role = Learner(beginning, config, plan, island, batches, runtime)
  exchange = role.exchange
  runner.ready = lambda: _joining(exchange.state, endpoint.links(), config)
  runner.progress = lambda: _trained(exchange.state, config, runner.speed())
  runner.usual_seconds = lambda: exchange.state.step_seconds

  try:
    role.run(runner.faults, runner.stopped, config.network.drain_seconds)
  finally:
    runner.disconnect()
    if saver is not None:
      saver.close(config.network.drain_seconds)
  return _left(runner, exchange.state)


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


def _trained(state: LearnerState, config: Config, fast: str = "") -> str:
  share = min(1.0, state.merged_tokens / config.run.total_tokens)
  speed = f", {1000 * state.step_seconds:.0f} ms a step" if state.step_seconds else ""
  speed += f", {fast}" if fast else ""
  return (
    f"global step {state.global_step}{speed}, {compact(state.trained_tokens)} tokens trained here;"
    f" {share:.0%} of the run is merged"
  )


def _left(runner: RoleRunner, state: LearnerState) -> int:
  """Unmerged work is not needed after the run; in the middle of it, it is lost work."""
  unmerged = unmerged_tokens(state)
  if state.merged_tokens >= runner.config.run.total_tokens or not unmerged:
    runner.say(f"ends: {_trained(state, runner.config)}; nothing is lost")
    return FINISHED
  runner.say(
    f"ends with lost work: {unmerged} of its {state.trained_tokens} tokens were not merged within"
    f" network.drain_seconds = {runner.config.network.drain_seconds:g}"
  )
  return LOST


# --- evaluator ------------------------------------------------------------------------------------


def run_evaluator(config: Config, place: RoleSpec) -> int:
  """Follows the global model, measures it, and leaves WORKDIR/result and the report at the end."""
  check_spec(config, place)
  with RoleRunner(EVALUATOR_ADDRESS, config, place) as runner:
    return runner.run(lambda: _evaluator(runner))


def _evaluator(runner: RoleRunner) -> int:
  from ddiloco.checkpoint import weights
  from ddiloco.engines import session
  from ddiloco.engines.engine import RunResult
  from ddiloco.roles.evaluator import Evaluator
  from ddiloco.training import data

  config, began = runner.config, time.monotonic()
  measure = loss = None
  if config.run.evaluations:
    runner.ready = lambda: "reading the held-out data"
    heldout = session.evaluator(config, data.open_data(config.data))
    measure, loss = heldout.measure, heldout.loss
  endpoint = runner.dial()
  runtime = Runtime(endpoint, runner.recorder, initial=runner.initial_values)
  result = runner.place.workdir / RESULT

  def save(params: initial.Assembled) -> None:
    runner.busy("saving and measuring the result")
    weights.save(result, params)

  role = Evaluator(*(config, runner.plan, measure, runtime, runner.incarnation), save=save)
  runner.ready = lambda: _joining(role.exchange.state, endpoint.links(), config)
  runner.progress = lambda: _trained(role.exchange.state, config)
  try:
    role.run(runner.stopped)
  finally:
    runner.disconnect()
  state = role.exchange.state
  if not state.joined:
    raise Ended("ends before it had received the whole model: there is no result")
  finished = state.merged_tokens >= config.run.total_tokens
  reason = "finished" if finished else "stopped"
  outcome = RunResult(reason, role.store.params(), {}, {}, saved=role.saved)
  runner.busy("writing the report")
  try:
    session.conclude(config, runner.place.workdir, outcome, loss, began)
  except OSError as error:
    raise Ended(f"the run's end is not saved: {error}. Fix: make room, start it again") from error
  return FINISHED
