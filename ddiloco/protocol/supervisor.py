"""When roles start, start again, join, leave and are given up, and when a run is hopeless. PURE.

The one policy of every engine and of the simulator: a reducer `(state, event) -> (state, actions)`,
`supervise`. Engines tell it what they observe of their roles and perform its actions. They differ
in how a role is started, ended and observed. They also differ in planned faults: where roles
perform their own (threads, virtual time), the supervisor's state gets only the joins.

Deaths count only while they follow each other closely. After a healthy period of work a role's
count starts again: a run of a month may lose the same role a hundred times, and only a role that
cannot stay up ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ddiloco.config import Fault, RunConfig
from ddiloco.protocol.values import Frozen, replace

LONGEST_PAUSE_SECONDS = 60.0  # pauses double up to this, or stay at a greater `restart_seconds`
HEALTHY_PAUSES = 10  # a healthy period, in longest pauses: such a role is up 90 % of the time
HEALTHY_SECONDS = 60.0  # a healthy period at least: a wrong first step or round shows within that
GIVEN_UP = ("learner-", "syncer-")  # the evaluator is not: no other role writes the result
DOWN, UP, LEFT, GONE = "down", "up", "left", "gone"

# --- events ---------------------------------------------------------------------------------------


class Tick(Frozen):
  """Time has passed."""

  now: float
  global_step: int = 0
  seconds: float = 0.0  # since training began


class Working(Frozen):
  """A role does its work: its incarnation's healthy period counts from the first such event."""

  role: str
  now: float


class Exited(Frozen):
  """An incarnation has ended, and not in good order."""

  role: str
  now: float
  reason: str = ""
  kill: Fault | None = None  # planned, and performed by the role itself
  afresh: bool = False  # the role's state is bad: its next incarnation begins without it


class Left(Frozen):
  """A role has ended in good order, or is no longer needed: it starts again only if it joins."""

  role: str


class Requested(Frozen):
  """A fault was asked for while the run goes on."""

  fault: Fault


class Dismiss(Frozen):
  """All roles whose names begin with `kind` must end in good order; those that are down stay so."""

  kind: str


Event = Tick | Working | Exited | Left | Requested | Dismiss

# --- actions --------------------------------------------------------------------------------------


class Start(Frozen):
  """Start the role's next incarnation."""

  role: str
  life: int  # how often it was started before
  afresh: bool  # without the last one's state, which is bad


class Strike(Frozen):
  """A planned fault is due: perform it on its role, which is up. After a stall `Hold` follows,
  after a join the learner's `Start`."""

  fault: Fault


class Hold(Frozen):
  """Suspend the role's process, or let it go on."""

  role: str
  held: bool


class Terminate(Frozen):
  """Ask the role to end in good order."""

  role: str


class Lost(Frozen):
  """Say that an incarnation has ended, and why."""

  role: str
  reason: str


Action = Start | Strike | Hold | Terminate | Lost

# --- state ----------------------------------------------------------------------------------------


class Role(Frozen):
  """One role over all its incarnations, its lives; a new role starts at the first `Tick`. Only a
  planned join follows the phases LEFT and GONE."""

  phase: str = DOWN  # or UP, LEFT (in good order), GONE (given up, or killed for good)
  lives: int = 0  # how often it was started
  deaths: int = 0  # in a row, with no healthy period between them; planned ones do not count
  start_at: float = -math.inf  # when it is started, if it is down
  started_at: float = -math.inf  # when its newest incarnation started
  working_since: float = math.inf  # in this incarnation; inf: not yet
  afresh: bool = False  # its next incarnation begins without a state
  kill: Fault | None = None  # performed; None again when the end is seen
  held_until: float = -math.inf  # its process is suspended: a stall; -inf: it is not
  leaves_at: float = math.inf  # when it is asked to end
  asked_to_end: bool = False  # in this incarnation

  @property
  def ended(self) -> bool:
    """Whether the role starts again only if it joins."""
    return self.phase in (LEFT, GONE)


class Supervisor(Frozen):
  """All roles of a run."""

  run: RunConfig  # how often and how soon roles are started again
  roles: Mapping[str, Role]  # in the order of starts
  planned: tuple[Fault, ...] = ()  # joins, and faults to perform, that are not performed yet
  quorum: int = 0  # with fewer learners that have not ended the run is hopeless: at once, or ...
  patience_seconds: float = math.inf  # ... after so long, where some have left in good order
  shortest_life_seconds: float = 0.0  # between two starts of a role
  few_since: float = math.inf  # when learners became fewer than a quorum; inf: they are not
  dismissed: tuple[str, ...] = ()  # roles whose names begin so are not started any more
  hopeless: str = ""  # why the run can never reach its end; "": it can


def members(state: Supervisor, kind: str = "") -> dict[str, Role]:
  """The roles whose names begin with `kind`."""
  return {name: role for name, role in state.roles.items() if name.startswith(kind)}


def next_wake(state: Supervisor) -> float:
  """When a restart, a departure or the end of a stall is due next; inf: none is foreseen."""
  times = [role.start_at for role in state.roles.values() if role.phase == DOWN]
  stays = [role for role in state.roles.values() if role.phase == UP and not role.asked_to_end]
  times += [role.held_until for role in stays if role.held_until > -math.inf]
  return min([*times, *(role.leaves_at for role in stays)], default=math.inf)


# --- the reducer ----------------------------------------------------------------------------------


def supervise(state: Supervisor, event: Event) -> tuple[Supervisor, list[Action]]:
  """(the state from now on, the engine's actions in order).

  An event of a role that has ended, or that the state does not have, changes nothing.
  """
  actions: list[Action] = []
  match event:
    case Tick():
      state = _perform_planned(state, event, actions)
      turned = {name: _turn(name, role, event.now, actions) for name, role in state.roles.items()}
      state = _judge(replace(state, roles=turned), event.now)
    case Requested(fault):
      state = replace(state, planned=(*state.planned, fault))
    case Working(name, now):
      state = _change(state, name, lambda r: replace(r, working_since=min(r.working_since, now)))
    case Left(name):
      state = _change(state, name, lambda r: replace(r, phase=LEFT))
    case Exited():
      state = _change(state, event.role, lambda r: _lose(state, r, event, actions))
      state = _judge(state, event.now)
    case Dismiss(kind):
      state = replace(state, dismissed=(*state.dismissed, kind))
      for name, role in members(state, kind).items():
        state = _put(state, name, _dismiss(name, role, actions))
  return state, actions


def _perform_planned(state: Supervisor, tick: Tick, actions: list[Action]) -> Supervisor:
  """Performs the faults that are due; those of a role that is down, or is killed now, wait. So does
  the join of a learner that still leaves."""
  roles, left = dict(state.roles), list[Fault]()
  for fault in state.planned:
    role, joins = roles.get(fault.role, Role(phase=LEFT)), fault.action == "join"
    ready = role.phase == UP
    if joins:
      ready = not fault.role.startswith(state.dismissed) and (role.ended or not role.asked_to_end)
    if not (ready and role.kill is None and due(fault, tick.global_step, tick.seconds)):
      left.append(fault)
    elif not joins or role.ended:  # a learner that is there already cannot join
      actions.append(Strike(fault))
      if joins:
        earliest = role.started_at + state.shortest_life_seconds
        role = Role(lives=role.lives, start_at=earliest)
      roles[fault.role] = _struck(role, fault, tick.now, actions)
  return replace(state, roles=roles, planned=tuple(left))


def _struck(role: Role, fault: Fault, now: float, actions: list[Action]) -> Role:
  """The role once a fault was performed on it."""
  match fault.action:
    case "kill":
      return replace(role, kill=fault)
    case "stall":
      if role.held_until == -math.inf:
        actions.append(Hold(fault.role, True))
      return replace(role, held_until=max(role.held_until, now + fault.seconds))
    case "join" if fault.seconds >= 0:
      return replace(role, leaves_at=now + fault.seconds)
  return role


def _turn(name: str, role: Role, now: float, actions: list[Action]) -> Role:
  """Does what is due for one role at a tick: a start, its departure, the end of a stall."""
  if role.phase == DOWN and now >= role.start_at:
    actions.append(Start(name, role.lives, role.afresh))
    return Role(UP, role.lives + 1, role.deaths, started_at=now, leaves_at=role.leaves_at)
  if role.phase == UP and now >= role.leaves_at and not role.asked_to_end:
    role = _terminate(name, role, actions)
  if role.phase == UP and -math.inf < role.held_until <= now:
    role = replace(role, held_until=-math.inf)
    actions.append(Hold(name, False))
  return role


def _terminate(name: str, role: Role, actions: list[Action]) -> Role:
  """Asks the role to end, and no longer holds its process, so that it can hear that."""
  actions.append(Terminate(name))
  return replace(role, asked_to_end=True, held_until=-math.inf)


def _dismiss(name: str, role: Role, actions: list[Action]) -> Role:
  if role.phase == UP:
    return _terminate(name, role, actions)
  return replace(role, phase=LEFT) if role.phase == DOWN else role


def _lose(state: Supervisor, role: Role, event: Exited, actions: list[Action]) -> Role:
  """An incarnation is over: the role's next one is planned, or there is none."""
  kill, deaths, reason = event.kill or role.kill, role.deaths, event.reason
  pause: float | None
  if kill is not None:
    pause, reason = kill.seconds if kill.seconds >= 0 else None, killed(kill)
  else:
    deaths, pause = after_exit(deaths, event.now - role.working_since, state.run)
    if pause is None and not event.role.startswith(GIVEN_UP):
      pause = LONGEST_PAUSE_SECONDS
  actions.append(Lost(event.role, reason))
  role = replace(role, deaths=deaths, kill=None, afresh=event.afresh)
  if pause is None or event.role.startswith(state.dismissed):
    return replace(role, phase=GONE if pause is None else LEFT)
  earliest = role.started_at + state.shortest_life_seconds
  return replace(role, phase=DOWN, start_at=max(event.now + pause, earliest))


def _judge(state: Supervisor, now: float) -> Supervisor:
  """Hopeless if a shard, or every possible quorum, is gone for good: nothing would ever merge."""
  shards = [name for name, role in members(state, "syncer-").items() if role.phase == GONE]
  learners, reason = members(state, "learner-"), ""
  left = [name for name, role in learners.items() if not role.ended]
  few_since = math.inf if len(left) >= state.quorum else min(state.few_since, now)
  # Learners may have left because all is merged.
  patience = state.patience_seconds if any(r.phase == LEFT for r in learners.values()) else 0.0
  if shards:
    reason = f"{shards[0]} is gone for good, and no other shard merges its fragments"
  elif now - few_since >= patience:
    names = ", ".join(left) or "none"
    reason = f"its quorum is {state.quorum} (sync.min_quorum), the learners that are left: {names}"
  return replace(state, hopeless=state.hopeless or reason, few_since=few_since)


def _change(state: Supervisor, name: str, change: Callable[[Role], Role]) -> Supervisor:
  """The state with `change` applied to this role, if it exists and has not ended."""
  role = state.roles.get(name)
  return state if role is None or role.ended else _put(state, name, change(role))


def _put(state: Supervisor, name: str, role: Role) -> Supervisor:
  return replace(state, roles={**state.roles, name: role})


# --- rules ----------------------------------------------------------------------------------------


def after_exit(deaths: int, worked_seconds: float, run: RunConfig) -> tuple[int, float | None]:
  """(deaths in a row from now on, seconds until the role is started again, None: it is given up).

  Args:
    deaths: in a row, before this one.
    worked_seconds: for how long the incarnation that ended did its work, -inf if it never
      began: a role that compiles for ten minutes and dies at its first step was never healthy.
    run: what the run allows.
  """
  deaths = 1 if worked_seconds >= healthy_seconds(run) else deaths + 1
  return deaths, pause_seconds(deaths, run) if deaths <= run.max_restarts else None


def pause_seconds(deaths: int, run: RunConfig) -> float:
  """The pause before the next incarnation, after so many deaths in a row."""
  most = max(LONGEST_PAUSE_SECONDS, run.restart_seconds)
  return min(most, run.restart_seconds * 2.0 ** min(deaths - 1, 100))


def healthy_seconds(run: RunConfig) -> float:
  """How long an incarnation must work until the deaths before it no longer count."""
  longest = pause_seconds(max(1, run.max_restarts), run)
  return max(HEALTHY_SECONDS, HEALTHY_PAUSES * longest)


def due(fault: Fault, global_step: int, seconds: float) -> bool:
  """Whether it is time for a fault: by the run's global step, or seconds since training began."""
  return global_step >= fault.at_step if fault.at_step >= 0 else seconds >= fault.at_seconds


def killed(kill: Fault) -> str:
  """The reason of an incarnation's end for a planned kill."""
  back = f"back in {kill.seconds:g} s" if kill.seconds >= 0 else "for good"
  return f"killed by plan, {back}"
