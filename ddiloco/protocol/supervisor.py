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

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ddiloco.config import Fault, RunConfig
from ddiloco.protocol.values import replace

LONGEST_PAUSE_SECONDS = 60.0  # pauses double up to this, or stay at a greater `restart_seconds`
HEALTHY_PAUSES = 10  # a healthy period, in longest pauses: such a role is up 90 % of the time
HEALTHY_SECONDS = 60.0  # a healthy period at least: a wrong first step or round shows within that
DUTY_SECONDS = 0.1  # cycle of a slowed process: it runs for a part of it and stands for the rest
DOWN, UP, LEFT, GONE = "down", "up", "left", "gone"

# --- events ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tick:
  """Time has passed."""

  now: float
  global_step: int = 0
  seconds: float = 0.0  # since training began


@dataclasses.dataclass(frozen=True)
class Working:
  """A role does its work in this life: its healthy period counts from the first such event."""

  role: str
  now: float


@dataclasses.dataclass(frozen=True)
class Exited:
  """A life has ended, and not in good order."""

  role: str
  now: float
  reason: str = ""
  kill: Fault | None = None  # planned, and performed by the role itself
  afresh: bool = False  # the role's state is bad: its next life begins without it


@dataclasses.dataclass(frozen=True)
class Left:
  """A role has ended in good order, or is no longer needed: it never starts again."""

  role: str


@dataclasses.dataclass(frozen=True)
class Requested:
  """A fault was asked for while the run goes on."""

  fault: Fault


@dataclasses.dataclass(frozen=True)
class Dismiss:
  """All roles whose names begin with `kind` must end in good order; those that are down stay so."""

  kind: str


Event = Tick | Working | Exited | Left | Requested | Dismiss

# --- actions --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
  """Start the role's next life."""

  role: str
  life: int  # how often it was started before
  afresh: bool  # without its last life's state, which is bad


@dataclasses.dataclass(frozen=True)
class Strike:
  """A planned fault is due: perform it on its role, which is up. Of a stall, `Hold` follows; of a
  join, the learner's `Start`."""

  fault: Fault


@dataclasses.dataclass(frozen=True)
class Hold:
  """Suspend the role's process, or let it go on."""

  role: str
  held: bool


@dataclasses.dataclass(frozen=True)
class Terminate:
  """Ask the role to end in good order."""

  role: str


@dataclasses.dataclass(frozen=True)
class Lost:
  """Say that a life has ended, and why."""

  role: str
  reason: str


Action = Start | Strike | Hold | Terminate | Lost

# --- state ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Holds:
  """The stalls and slow times of one process. `now`: seconds, always of the same clock."""

  stalled_until: float = -math.inf
  slow_since: float = -math.inf
  slow_until: float = -math.inf
  slow_factor: float = 1.0

  def add(self, fault: Fault, now: float) -> Holds:
    """A stall or a slowness begins."""
    until = now + fault.seconds
    if fault.action == "stall":
      return replace(self, stalled_until=max(self.stalled_until, until))
    return replace(self, slow_since=now, slow_until=until, slow_factor=fault.factor)

  def active(self, now: float) -> bool:
    """Whether a stall or slowness lasts, so that `held` may change soon."""
    return now < max(self.stalled_until, self.slow_until)

  def held(self, now: float) -> bool:
    """Whether the process should stand still: stalled, or in the idle part of a duty cycle."""
    if now < self.stalled_until:
      return True
    if now >= self.slow_until:
      return False
    return (now - self.slow_since) % DUTY_SECONDS >= DUTY_SECONDS / self.slow_factor


@dataclasses.dataclass(frozen=True)
class Role:
  """One role over all its lives. Nothing follows the phases LEFT and GONE."""

  phase: str = DOWN  # or UP, LEFT (in good order), GONE (given up, or killed for good)
  lives: int = 0  # how often it was started
  deaths: int = 0  # in a row, with no healthy period between them; planned ones do not count
  start_at: float = -math.inf  # when it is started, if it is down
  started_at: float = -math.inf  # when its newest life started
  working_since: float = math.inf  # in this life; inf: it does not work yet
  afresh: bool = False  # its next life begins without a state
  faults: tuple[Fault, ...] = ()  # planned for it, and not performed yet
  kill: Fault | None = None  # performed; None again when the life's end is seen
  holds: Holds = Holds()  # of this life
  held: bool = False  # its process is suspended because of `holds`
  leaves_at: float = math.inf  # when it is asked to end
  asked_to_end: bool = False  # in this life
  dismissed: bool = False  # it is not started again

  @property
  def ended(self) -> bool:
    """Whether the role never starts again."""
    return self.phase in (LEFT, GONE)


@dataclasses.dataclass(frozen=True)
class Supervisor:
  """All roles of a run."""

  run: RunConfig  # how often and how soon roles are started again
  quorum: int = 0  # with fewer learners that are not gone the run is hopeless
  shortest_life_seconds: float = 0.0  # between two starts of a role
  roles: Mapping[str, Role] = dataclasses.field(default_factory=dict)  # in the order of starts
  joins: tuple[Fault, ...] = ()  # of learners that have not come yet
  planned: tuple[Fault, ...] = ()  # all other planned faults
  hopeless: str = ""  # why the run can never reach its end; "": it can


def init(
  run: RunConfig,
  roles: Iterable[str],
  planned: Sequence[Fault] = (),
  quorum: int = 0,
  shortest_life_seconds: float = 0.0,
) -> Supervisor:
  """All roles are down, and start at the first `Tick`; `planned`: joins, and faults to perform."""
  joins = tuple(fault for fault in planned if fault.action == "join")
  others = tuple(fault for fault in planned if fault.action != "join")
  first = {name: Role(faults=_of(name, others)) for name in roles}
  return Supervisor(run, quorum, shortest_life_seconds, first, joins, others)


def add_running(state: Supervisor, name: str) -> Supervisor:
  """A role whose first life is running already: the supervisor did not start it."""
  return _put(state, name, Role(phase=UP, lives=1))


def members(state: Supervisor, kind: str = "") -> dict[str, Role]:
  """The roles whose names begin with `kind`."""
  return {name: role for name, role in state.roles.items() if name.startswith(kind)}


def pressing(state: Supervisor, now: float) -> bool:
  """Whether a role is stalled or slowed by plan, so that the next `Tick` should come soon."""
  return any(role.phase == UP and role.holds.active(now) for role in state.roles.values())


def next_wake(state: Supervisor) -> float:
  """When a restart or a departure is due next; inf: none is foreseen."""
  times = [role.start_at for role in state.roles.values() if role.phase == DOWN]
  stays = [role for role in state.roles.values() if role.phase == UP and not role.asked_to_end]
  return min([*times, *(role.leaves_at for role in stays)], default=math.inf)


# --- the reducer ----------------------------------------------------------------------------------


def supervise(state: Supervisor, event: Event) -> tuple[Supervisor, list[Action]]:
  """(the state from now on, the engine's actions in order).

  An event of a role that has ended, or that the state does not have, changes nothing.
  """
  actions: list[Action] = []
  match event:
    case Tick():
      state = _welcome(state, event, actions)
      for name, role in state.roles.items():
        state = _put(state, name, _turn(name, role, event, actions))
    case Requested(fault) if fault.action == "join":
      state = replace(state, joins=(*state.joins, fault))
    case Requested(fault):
      state = _change(state, fault.role, lambda r: replace(r, faults=(*r.faults, fault)))
    case Working(name, now):
      state = _change(state, name, lambda r: replace(r, working_since=min(r.working_since, now)))
    case Left(name):
      state = _change(state, name, _leave)
    case Exited():
      state = _judge(_change(state, event.role, lambda r: _lose(state, r, event, actions)))
    case Dismiss(kind):
      for name, role in members(state, kind).items():
        state = _put(state, name, _dismiss(name, role, actions))
  return state, actions


def _welcome(state: Supervisor, tick: Tick, actions: list[Action]) -> Supervisor:
  """Adds the learners that join now; a join of a learner that is there already has no effect."""
  while state.joins:
    fault, joins = strike(state.joins, tick.global_step, tick.seconds)
    if fault is None:
      break
    state = replace(state, joins=joins)
    if fault.role not in state.roles:
      leaves_at = tick.now + fault.seconds if fault.seconds >= 0 else math.inf
      newcomer = Role(faults=_of(fault.role, state.planned), leaves_at=leaves_at)
      state = _put(state, fault.role, newcomer)
      actions.append(Strike(fault))
  return state


def _turn(name: str, role: Role, tick: Tick, actions: list[Action]) -> Role:
  """Does what is due for one role at a tick: a start, faults, its departure."""
  now = tick.now
  if role.phase == DOWN and now >= role.start_at:
    actions.append(Start(name, role.lives, role.afresh))
    return replace(
      role,
      phase=UP,
      lives=role.lives + 1,
      started_at=now,
      working_since=math.inf,
      afresh=False,
      asked_to_end=False,
    )
  if role.phase != UP:
    return role
  while role.faults and role.kill is None:  # faults after a kill are for the next life
    fault, left = strike(role.faults, tick.global_step, tick.seconds)
    if fault is None:
      break
    actions.append(Strike(fault))
    role = replace(role, faults=left)
    if fault.action == "kill":
      role = replace(role, kill=fault)
    elif fault.action in ("stall", "slow"):
      role = replace(role, holds=role.holds.add(fault, now))
  if now >= role.leaves_at and not role.asked_to_end:
    role = _terminate(name, role, actions)
  if role.holds.held(now) != role.held:
    role = replace(role, held=not role.held)
    actions.append(Hold(name, role.held))
  return role


def _terminate(name: str, role: Role, actions: list[Action]) -> Role:
  """Asks the role to end, and no longer holds its process, so that it can hear that."""
  actions.append(Terminate(name))
  return replace(role, asked_to_end=True, holds=Holds(), held=False)


def _dismiss(name: str, role: Role, actions: list[Action]) -> Role:
  if role.phase == UP:
    return replace(_terminate(name, role, actions), dismissed=True)
  return _leave(role) if role.phase == DOWN else role


def _lose(state: Supervisor, role: Role, event: Exited, actions: list[Action]) -> Role:
  """A life is over: the role's next one is planned, or there is none."""
  kill, deaths, reason = event.kill or role.kill, role.deaths, event.reason
  pause: float | None
  if kill is not None:
    pause, reason = kill.seconds if kill.seconds >= 0 else None, killed(kill)
  else:
    worked_seconds = max(0.0, event.now - role.working_since)
    deaths, pause = after_exit(deaths, worked_seconds, state.run)
  actions.append(Lost(event.role, reason))
  role = replace(role, deaths=deaths, kill=None, afresh=event.afresh, holds=Holds(), held=False)
  if pause is None or role.dismissed:
    return replace(role, phase=GONE if pause is None else LEFT)
  earliest = role.started_at + state.shortest_life_seconds
  return replace(role, phase=DOWN, start_at=max(event.now + pause, earliest))


def _judge(state: Supervisor) -> Supervisor:
  """Hopeless if a shard, or every possible quorum, is gone for good: nothing would ever merge."""
  shards = [name for name, role in members(state, "syncer-").items() if role.phase == GONE]
  left = sum(role.phase != GONE for role in members(state, "learner-").values())
  reason = ""
  if shards:
    reason = f"{shards[0]} is gone for good, and no other shard merges its fragments"
  elif left < state.quorum:
    reason = f"{left} learners are left, and {state.quorum} are needed"
  return replace(state, hopeless=state.hopeless or reason)


def _leave(role: Role) -> Role:
  return replace(role, phase=LEFT, holds=Holds(), held=False)


def _change(state: Supervisor, name: str, change: Callable[[Role], Role]) -> Supervisor:
  """The state with `change` applied to this role, if it exists and has not ended."""
  role = state.roles.get(name)
  return state if role is None or role.ended else _put(state, name, change(role))


def _put(state: Supervisor, name: str, role: Role) -> Supervisor:
  same = state.roles.get(name) is role
  return state if same else replace(state, roles={**state.roles, name: role})


def _of(name: str, faults: Sequence[Fault]) -> tuple[Fault, ...]:
  return tuple(fault for fault in faults if fault.role == name)


# --- rules ----------------------------------------------------------------------------------------


def after_exit(deaths: int, worked_seconds: float, run: RunConfig) -> tuple[int, float | None]:
  """(deaths in a row from now on, seconds until the role is started again, None: it is given up).

  Args:
    deaths: in a row, before this one.
    worked_seconds: for how long the role did its work in the life that ended, 0 if it never began:
      a role that compiles for ten minutes and dies at its first step was never healthy.
    run: what the run allows.
  """
  deaths = 1 if worked_seconds >= healthy_seconds(run) else deaths + 1
  return deaths, pause_seconds(deaths, run) if deaths <= run.max_restarts else None


def pause_seconds(deaths: int, run: RunConfig) -> float:
  """The pause before the next life, after so many deaths in a row."""
  most = max(LONGEST_PAUSE_SECONDS, run.restart_seconds)
  return min(most, run.restart_seconds * 2.0 ** min(deaths - 1, 100))


def healthy_seconds(run: RunConfig) -> float:
  """How long a life must work until the deaths before it no longer count."""
  longest = pause_seconds(max(1, run.max_restarts), run)
  return max(HEALTHY_SECONDS, HEALTHY_PAUSES * longest)


def strike(
  plan: tuple[Fault, ...], global_step: int, seconds: float
) -> tuple[Fault | None, tuple[Fault, ...]]:
  """(the first fault of the plan that is due, the plan without it).

  Args:
    plan: faults that are not performed yet.
    global_step: of the run.
    seconds: since training began.
  """
  for i, fault in enumerate(plan):
    due = global_step >= fault.at_step if fault.at_step >= 0 else seconds >= fault.at_seconds
    if due:
      return fault, plan[:i] + plan[i + 1 :]
  return None, plan


def killed(kill: Fault) -> str:
  """The reason of a life's end for a planned kill."""
  back = f"back in {kill.seconds:g} s" if kill.seconds >= 0 else "for good"
  return f"killed by plan, {back}"
