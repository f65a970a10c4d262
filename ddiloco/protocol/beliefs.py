"""What a shard believes of what its members say of themselves. PURE.

A member with a valid key may say anything. A shard takes from it only what an honest member could
have said: a global step that another learner confirms or that one learner alone can have reached,
steps that fit into the time since its last merge, tokens that fit into its steps. What is claimed
beyond that is cut down where it steers the shard's own work (global step, due steps, step time),
and refused where it would count as work done (pushes). docs/design.md, "Whom a shard believes", has
the model.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
from collections.abc import Iterable

from ddiloco.config import SyncConfig
from ddiloco.protocol.values import replace

SHORTEST_STEP_SECONDS = 1e-4  # no inner step of any use is shorter
LONGEST_STEP_SECONDS = 600.0  # until the members' usual step is known, and never below ...
LEAST_CAP_SECONDS = 60.0  # ... this is a step time cut down
STEP_TIME_RATIO = 16.0  # a member's step is at most so many times the usual one
LEAD = 4.0  # one learner alone makes the global step grow at most so much faster than others' steps
ALONE_LEAD = 2.0  # the same where there are no two others to compare with
WASTE = 16  # a run makes at most so many times the steps its tokens need: work may be lost
COUNTED_PERIODS = 3  # sync periods; what is in a push of more steps is stale

Ranking = tuple[tuple[float, int], ...]  # (value, learner), best first


@dataclasses.dataclass(frozen=True)
class Beliefs:
  """What the bounds are taken from; a value of `SyncerState`."""

  reach_at: float  # when the run began, later when a learner was last found in front
  reach: float = 0.0  # the step that one learner alone can have come to by then
  claims: Ranking = ()  # the two highest global steps, negative, by different learners
  paces: Ranking = ()  # the three shortest steps in seconds, by different learners
  usual_step_seconds: float = 0.0  # median of those that were asked last; 0: not known yet


def slack_steps(sync: SyncConfig) -> int:
  """Steps by which what different roles see of the global step may differ."""
  return 2 * sync.sync_period + 8


def raised_global_step(
  beliefs: Beliefs,
  global_step: int,
  learner: int,
  claim: int,
  now: float,
  most_steps: float,
  sync: SyncConfig,
  num_learners: int,
) -> tuple[Beliefs, int]:
  """The global step after a learner has said how far it is.

  It is the highest step that two learners say they have reached, or that the first of them
  can have reached alone: no learner is believed to be `LEAD` times faster than the others.

  Args:
    beliefs: as they were.
    global_step: as it was.
    learner: that reports it.
    claim: what this learner says.
    now: seconds.
    most_steps: of the whole run.
    sync: the protocol's settings.
    num_learners: that are members, this one too; 0: a shard that has come back does not know yet
      who there is, and believes none alone.
  """
  if claim <= global_step:
    return beliefs, global_step
  claims = _ranked(beliefs.claims, (-claim, learner), 2)
  reach, reach_at = max(beliefs.reach, slack_steps(sync) / 2), beliefs.reach_at
  confirmed = -int(claims[1][0]) if len(claims) > 1 else 0
  front = claims[0][1]
  rate = _rate(beliefs.paces, front, num_learners) if num_learners else 0.0
  if rate > 0:
    reach += max(0.0, now - reach_at) * rate
    reach_at = max(now, reach_at)
  if confirmed > global_step:
    global_step = confirmed
    if confirmed > reach:
      reach, reach_at = float(confirmed), max(now, reach_at)
  if front == learner and num_learners:
    global_step = max(global_step, int(min(claim, reach, max(most_steps, global_step))))
  return replace(beliefs, claims=claims, reach=reach, reach_at=reach_at), global_step


def too_far_ahead(beliefs: Beliefs, global_step: int, sync: SyncConfig) -> int | None:
  """The learner that says it is further than is believed yet, so that its work would be refused.

  An island that trained while the others still started is asked when their pace is known.
  """
  claim, learner = beliefs.claims[0] if beliefs.claims else (0.0, None)
  return learner if -claim > global_step + sync.sync_period else None


def _rate(paces: Ranking, learner: int, num_learners: int) -> float:
  """Steps a second by which one learner alone can raise the global step."""
  others = [seconds for seconds, m in paces if m != learner]
  own = next((seconds for seconds, m in paces if m == learner), 0.0)
  if len(others) > 1:  # the median of three, any one of which may be a lie, of any length
    middle = statistics.median((own or math.inf, *others[:2]))
    return LEAD / max(middle, SHORTEST_STEP_SECONDS)
  if num_learners > 2:  # a member that never says how fast it is must not hold up the others
    return LEAD / max(own, *others, SHORTEST_STEP_SECONDS) if others else 0.0
  return ALONE_LEAD / max(own, SHORTEST_STEP_SECONDS)


def usual_pace(beliefs: Beliefs) -> float:
  """Seconds of a step of the faster members, 0 if it is not known: no one alone makes it longer."""
  paces = [seconds for seconds, _ in beliefs.paces]
  return step_seconds(beliefs, statistics.median_low(paces)) if paces else 0.0


def _ranked(ranking: Ranking, new: tuple[float, int], count: int) -> Ranking:
  """The ranking with a learner's new value instead of its old one; the smallest come first."""
  others = tuple(entry for entry in ranking if entry[1] != new[1])
  return tuple(sorted((*others, new)))[:count]


def noted_pace(beliefs: Beliefs, learner: int, seconds: float) -> Beliefs:
  """A learner has said how long its steps take."""
  if seconds <= 0 or (seconds, learner) in beliefs.paces:
    return beliefs
  return replace(beliefs, paces=_ranked(beliefs.paces, (seconds, learner), 3))


def refreshed(
  beliefs: Beliefs, present: Iterable[tuple[int, float]], usual_step_seconds: float
) -> Beliefs:
  """Forgets learners that are gone; `present`: (learner, step seconds) of those that are here."""
  here = {m: seconds for m, seconds in present}
  paces = heapq.nsmallest(3, ((seconds, m) for m, seconds in here.items() if seconds > 0))
  claims = tuple(claim for claim in beliefs.claims if claim[1] in here)
  return replace(beliefs, paces=tuple(paces), claims=claims, usual_step_seconds=usual_step_seconds)


def step_seconds(beliefs: Beliefs, claim: float) -> float:
  """How long a step of this member takes: a learner that never steps is lost in the end."""
  usual = beliefs.usual_step_seconds
  most = max(LEAST_CAP_SECONDS, STEP_TIME_RATIO * usual) if usual else LONGEST_STEP_SECONDS
  return min(claim, most)


def steps_since(claim: int, global_step: int, round_global_step: int, sync: SyncConfig) -> int:
  """Steps since its last sync: no more than the run has made since that round began."""
  return min(claim, max(0, global_step - round_global_step) + sync.overlap_steps + 2)


def push_fault(steps: int, tokens: int, steps_possible: int, step_tokens: int) -> str:
  """Why a push cannot hold the work it claims, or "".

  Args:
    steps: inner steps it claims.
    tokens: in these.
    steps_possible: since the learner's last push of this fragment was merged.
    step_tokens: of the largest step of any learner; 0: not known.
  """
  if steps < 1 or tokens < 1:
    return f"holds {steps} steps and {tokens} tokens"
  if steps > steps_possible:
    return f"claims {steps} steps since its last merge, at most {steps_possible} are possible"
  if step_tokens and tokens > steps * step_tokens:
    return f"claims {tokens} tokens in {steps} steps, at most {step_tokens} a step are possible"
  return ""


def counted_steps(steps: int, sync: SyncConfig) -> int:
  """The steps of a push that its norm is screened by: those of a few sync periods."""
  return min(steps, COUNTED_PERIODS * sync.sync_period)


def worth_steps(steps: int, sync: SyncConfig) -> float:
  """The steps of a push that its weight goes by, up to a few sync periods.

  Beyond them each further step makes the whole push staler: k times as many steps weigh k times
  less. An island that was away for long is merged, but moves the global model little.

  >>> sync = SyncConfig(sync_period=10)
  >>> [worth_steps(steps, sync) for steps in (10, 30, 60, 3000)]
  [10, 30, 15.0, 0.3]
  """
  most = COUNTED_PERIODS * sync.sync_period
  return steps if steps <= most else most * most / steps
