"""The rules by which roles decide, as formulas of numbers: no function here takes a state. PURE.

The rules that learners and shards share; when a round ends, with a reason in plain words, which
logs, live view and dashboard show; and what a shard believes of its members' claims.
"""

from __future__ import annotations

import bisect
import collections
import heapq
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from ddiloco.config import SyncConfig
from ddiloco.protocol.values import Frozen, replace

MAX_PATIENCE_SECONDS = 30.0
MOST_NAMES = 8  # of learners in a reason
AGREEMENT = 0.05  # mean cosine of the others below which their directions are noise
OPPOSITION = 0.5  # share of that cosine, with the other sign, from which a push opposes them
SHORTEST_STEP_SECONDS = 1e-4  # a believed step time is at least this
LONGEST_STEP_SECONDS = 600.0  # cap of a believed step time until the usual one is known
LEAST_CAP_SECONDS = 60.0  # after that the cap is at least this, and ...
STEP_TIME_RATIO = 16.0  # ... so many times the usual step time
LEAD = 16.0  # one learner alone makes the global step grow so much faster than others, at most
KEPT_SECONDS = 600.0  # so much of a lead that was possible, and not taken, can still be taken
ALONE_LEAD = 2.0  # the same where there are no two others to compare with
WASTE = 16  # a run makes at most so many times the steps its tokens need: work may be lost; ...
SHORT_RUN_STEPS = 100_000  # ... but any run may make so many: a short outage is many short steps
MOST_NORM = 1e15  # no push of a model that works is so long; far from where f32 overflows
COUNTED_PERIODS = 3  # sync periods; a push of more steps is stale

Ranking = tuple[tuple[float, int], ...]  # (value, learner), the smallest values first

# --- both sides -----------------------------------------------------------------------------------


def place_of(fragment: int, sync: SyncConfig) -> int:
  """A fragment's place in the period, from 1 to H: fragments are due one after the other."""
  return math.ceil(sync.sync_period * (fragment + 1) / sync.num_fragments)


def due_after(fragment: int, version: int, sync: SyncConfig, began: int | None = None) -> int:
  """Inner steps since its last sync after which a fragment is due.

  First rounds are spread over one period. `began`: the global step at which its last round began.
  If that was not at its place, because a learner left or came back, the next period is as much
  shorter or longer, by at most a half. So fragments come one after the other again, whichever shard
  has them. In lock-step `due_at` says when instead.
  """
  period, place = sync.sync_period, place_of(fragment, sync)
  if version == 0 or began is None:
    return period if version else place
  # Places come H and H + 1 steps apart in turn: a learner counts from its copy-out, which is half a
  # step after the pull, on average.
  late = (began - place) % (2 * period + 1) % period
  return period - (late if 2 * late <= period else late - period)


def due_at(fragment: int, version: int, sync: SyncConfig) -> int:
  """In lock-step, the global step at which a fragment of this version is due.

  Versions tell all learners the same, also one that has just come back: all wait for each other at
  the same step.
  """
  return place_of(fragment, sync) + version * sync.sync_period


def backed_off(
  patience_seconds: float, attempts: int, most_seconds: float = MAX_PATIENCE_SECONDS
) -> float:
  """Seconds to wait for an answer after so many unanswered attempts: doubling, up to a limit."""
  most = max(patience_seconds, most_seconds)
  return min(patience_seconds * 2 ** min(attempts, 5), most)


def numbered(incarnation: int, count: int) -> int:
  """The `count`-th round, push or commit of an incarnation, greater than any of an earlier one.

  With incarnations that count seconds it stays below 2^53, which JSON readers keep exactly.
  """
  return (incarnation << 24) + count


def smooth(old: float, new: float) -> float:
  """Exponential moving average: a fifth of each new value, but all of the first one."""
  return new if old == 0 else old + 0.2 * (new - old)


# --- when a round ends, and which pushes are merged -----------------------------------------------


class Decision(Frozen):
  """Whether a round is over, and why; it commits if it has a quorum then, else it is abandoned."""

  over: bool
  reason: str
  wake_at: float = math.inf  # seconds: look again then even if nothing happens


def grace_seconds(
  step_seconds: float, quorum_seconds: float, sync_seconds: float, sync: SyncConfig
) -> float:
  """How long to wait for more learners once there is a quorum, within what the overlap hides.

  slack = tau * step - (quorum + sync); grace = gamma * slack, at least 0 and at most one step
  ("Decoupled DiLoCo", adaptive grace window). All arguments are measured seconds.

  >>> grace_seconds(1.0, 0.5, 0.7, SyncConfig(overlap_steps=2, grace_safety=0.5))
  0.4
  """
  slack = sync.overlap_steps * step_seconds - (quorum_seconds + sync_seconds)
  return min(max(0.0, sync.grace_safety * slack), step_seconds)


def decide(
  now: float,
  pushed: int,
  pending: Sequence[int],
  quorum_at: float,
  grace: float,
  quorum: int,
) -> Decision:
  """Whether one round is over.

  Args:
    now: seconds, on the same clock as `quorum_at`.
    pushed: learners whose push was accepted.
    pending: learners that were asked, live, and have not answered yet.
    quorum_at: when `pushed` reached the quorum, inf if it has not.
    grace: seconds to wait after that.
    quorum: learners that must have pushed.

  >>> decide(7.0, 2, (5,), quorum_at=6.5, grace=1.0, quorum=2).reason
  'grace: 0.500 s left for 5'
  """
  names = ", ".join(map(str, pending[:MOST_NAMES]))
  if len(pending) > MOST_NAMES:
    names += f" and {len(pending) - MOST_NAMES} more"
  if pushed < quorum:
    if (left := len(pending) + pushed) < quorum:
      return Decision(True, f"only {left} of {quorum} needed are left")
    return Decision(False, f"quorum: {pushed} of {quorum} have answered, waiting for {names}")
  if not pending:
    return Decision(True, f"all {pushed} asked have answered")
  deadline = quorum_at + grace
  if now >= deadline:
    return Decision(True, f"quorum of {pushed}, grace of {grace:.3f} s is over without {names}")
  return Decision(False, f"grace: {deadline - now:.3f} s left for {names}", deadline)


def grown_together(
  norms: Mapping[int, float], expected: Mapping[int, float], sync: SyncConfig
) -> list[int]:
  """The learners of a round whose pushes, two or more, are all out of proportion to the past, or
  none: something has changed for all, or those with good pushes are away. Arguments as of `screen`;
  pushes that it rejects whatever the others are do not count.

  >>> sync = SyncConfig()
  >>> grown_together({0: 90.0, 1: 99.0}, {0: 1.0, 1: 1.0}, sync)
  [0, 1]
  >>> grown_together({0: 90.0, 1: 1.0}, {0: 1.0, 1: 1.0}, sync)
  []
  """
  finite = _finite(norms)
  return [] if len(finite) < 2 or _in_proportion(finite, expected, sync) else sorted(finite)


def _finite(norms: Mapping[int, float]) -> dict[int, float]:
  return {m: norm for m, norm in norms.items() if norm <= MOST_NORM}


def _in_proportion(
  norms: Mapping[int, float], expected: Mapping[int, float], sync: SyncConfig
) -> dict[int, float]:
  """The norms that are in proportion to the past; all are if there is none."""
  ratio = sync.max_norm_ratio
  return {m: norm for m, norm in norms.items() if norm <= ratio * expected[m] or not expected[m]}


def screen(
  norms: Mapping[int, float],
  steps: Mapping[int, int],
  expected: Mapping[int, float],
  sync: SyncConfig,
  settled: bool = True,
  lasting: bool = False,
) -> dict[int, str]:
  """Which pushes are out of all proportion, and why.

  A push is rejected if its norm exceeds `sync.max_norm_ratio` times every reference there is: the
  median of the other participants' norms, and what the past leads one to expect. Others that are
  out of proportion to the past are no reference. Of two middle norms the shorter one counts: two
  bad pushes beside a good one are no majority of others. But while no past protects the good ones
  (not `settled`) all others are references, and the longer one counts: one push that is far too
  short, beside two good ones, must not have both rejected, round after round. So a sudden growth
  that all share passes then, up to `MOST_NORM`, and later only once it is `lasting`; a single
  learner passes while there is no past. More steps may make a longer push: against a push of fewer
  steps it may be longer by the ratio of their steps. A push of zeros where the others moved is
  rejected too: nothing was learned, so its tokens must not count.

  Args:
    norms: by learner, of the outer gradients at hand; non-finite ones are always rejected, and
      those above `MOST_NORM`.
    steps: by learner, inner steps in its outer gradient.
    expected: by learner, the usual norm of a push of its steps; 0: there is no past.
    sync: the protocol's settings.
    settled: whether two learners or more have a past of this fragment.
    lasting: whether pushes of this fragment have grown together for some rounds.
  """
  rejected, ratio, finite = {}, sync.max_norm_ratio, _finite(norms)
  trusted = _in_proportion(finite, expected, sync) if settled and not lasting else finite
  # The references, sorted, as they count against a push of `count` steps: once for each number.
  scaled = {
    count: sorted(norm * max(1.0, count / steps[m]) for m, norm in trusted.items())
    for count in {steps[m] for m in finite}
  }
  ordered = sorted(finite.values())
  for learner, norm in norms.items():
    if not math.isfinite(norm):
      rejected[learner] = f"not finite (norm {norm})"
      continue
    if learner not in finite:
      rejected[learner] = f"norm {norm:.3g} is longer than any push"
      continue
    shorter, longer = _middle(scaled[steps[learner]], norm if learner in trusted else None)
    references = [r for r in (shorter if settled else longer, expected[learner]) if r > 0]
    # The past does not matter for zeros: a schedule may end at a rate of 0.
    if norm == 0 and _middle(ordered, norm)[1] > 0:
      rejected[learner] = f"all zeros, after {steps[learner]} steps"
    elif references and norm > ratio * max(references):
      bound = f"sync.max_norm_ratio ({ratio:g}) x {max(references):.3g}"
      rejected[learner] = f"norm {norm:.3g} is over {bound}"
  return rejected


def _middle(ordered: Sequence[float], without: float | None) -> tuple[float, float]:
  """The two middle ones of the sorted values without this one of them; 0 if no other is left.

  >>> _middle([1.0, 2.0, 3.0, 4.0], 2.0), _middle([1.0, 2.0, 4.0], 2.0), _middle([1.0, 2.0], None)
  ((3.0, 3.0), (1.0, 4.0), (1.0, 2.0))
  """
  at = len(ordered) if without is None else bisect.bisect_left(ordered, without)
  left = len(ordered) - (without is not None)
  if not left:
    return 0.0, 0.0
  low, high = (ordered[i + (i >= at)] for i in ((left - 1) // 2, left // 2))
  return low, high


def agreement(products: Mapping[tuple[int, int], float], learners: Sequence[int]) -> float | None:
  """The mean cosine over pairs of pushes; None for fewer than two. Arguments as of `opposing`.

  Progress that several islands have in common is in all of their pushes, and the noise of their
  batches is not. The average of four pushes of cosine 0 is half as long as each of them; that of
  equal pushes is as long.

  >>> agreement({(0, 0): 4.0, (1, 1): 16.0, (0, 1): 4.0}, [0, 1])
  0.5
  """
  found = _cosines(products, learners)
  return sum(found.values()) / len(found) if found else None


def _cosines(
  products: Mapping[tuple[int, int], float], learners: Sequence[int]
) -> dict[tuple[int, int], float]:
  """The cosine of each pair of these learners' pushes."""
  norms = {m: math.sqrt(products[m, m]) for m in learners if products.get((m, m), 0.0) > 0}
  return {
    (a, b): product / (norms[a] * norms[b])
    for (a, b), product in products.items()
    if a != b and a in norms and b in norms
  }


def opposing(
  products: Mapping[tuple[int, int], float], learners: Sequence[int]
) -> dict[int, float]:
  """Learners whose push points against all others, which agree; with its mean cosine to them.

  Honest outer gradients are nearly orthogonal and agree a little; one with its sign flipped has
  the same cosine to the others with the other sign. Of two opposed pushes neither can be called the
  wrong one: three are needed.

  Args:
    products: inner products of two pushes, or of one with itself; the smaller learner first.
    learners: whose pushes are compared; learners without products are left out.

  >>> agree = {(m, m): 1.0 for m in range(3)} | {(0, 1): 0.2}
  >>> opposing({**agree, (0, 2): -0.2, (1, 2): -0.2}, [0, 1, 2])
  {2: -0.2}
  >>> opposing({**agree, (0, 1): -1.0}, [0, 1])
  {}
  """
  towards: dict[int, float] = collections.defaultdict(float)  # sum of the cosines with all others
  for (a, b), cosine in _cosines(products, learners).items():
    towards[a] += cosine
    towards[b] += cosine
  others = len(towards) - 1
  if others < 2:
    return {}
  total = sum(towards.values())  # each pair counts twice
  found = {}
  for m, toward in towards.items():
    common = (total - 2 * toward) / (others * (others - 1))  # mean cosine among the others
    if common > AGREEMENT and toward / others < -OPPOSITION * common:
      found[m] = toward / others
  return found


# --- what a shard believes ------------------------------------------------------------------------
# A member with a valid key may claim anything. A shard believes only claims that an honest member
# could make: a global step that another learner confirms or that one learner alone can have
# reached, steps that fit into the time since its last merge, tokens that fit into its steps. A
# greater claim is cut down where it steers the shard's own work (global step, due steps, step
# time), and rejected where it would count as work done (pushes). docs/design.md, "Whom a shard
# believes", has the model.


class Beliefs(Frozen):
  """The numbers that the bounds are computed from; a part of `SyncerState`."""

  reach_at: float  # when the run began; later, when `reach` was last computed
  reach: float = 0.0  # the step that one learner alone can have reached by then
  claims: Ranking = ()  # the two highest global steps, negated, claimed by different learners
  snapshots: Ranking = ()  # the same of the numbers of snapshots
  paces: Ranking = ()  # the three shortest step times in seconds, of different learners
  usual_step_seconds: float = 0.0  # median of the learners asked last; 0: not known yet


def step_tolerance(sync: SyncConfig) -> int:
  """Steps by which the global step may differ between roles."""
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

  It is the highest step that two learners claim, or that the foremost learner can have reached
  alone: no learner is believed to be more than `LEAD` times faster than the others. A lead that was
  possible and not taken is kept for the last `KEPT_SECONDS` only, or after months one claim could
  end the run. At `LEAD` times the pace that is enough for an island that was cut off for hours.

  Args:
    beliefs: before this report.
    global_step: before this report.
    learner: the one that reports.
    claim: its global step, as it says.
    now: seconds.
    most_steps: of the whole run.
    sync: the protocol's settings.
    num_learners: learners that are members, with this one; 0: a restarted shard does not know its
      members yet, and believes no single learner.
  """
  if claim <= global_step:
    # An earlier incarnation may have claimed more, and this one begins where the run is.
    claims = tuple(each for each in beliefs.claims if each[1] != learner or each[0] >= -claim)
    known = beliefs if len(claims) == len(beliefs.claims) else replace(beliefs, claims=claims)
    return known, global_step
  claims = _ranked(beliefs.claims, (-claim, learner), 2)
  least = step_tolerance(sync) / 2
  reach, reach_at = max(beliefs.reach, global_step, least), beliefs.reach_at
  front = claims[0][1]
  rate = _rate(beliefs.paces, front, num_learners) if num_learners else 0.0
  if rate > 0:
    reach += max(0.0, now - reach_at) * rate
    reach_at = max(now, reach_at)
    if num_learners > 2:
      reach = min(reach, global_step + max(least, KEPT_SECONDS * rate))
  global_step = max(global_step, confirmed(claims))
  if num_learners:  # one that is not foremost is confirmed
    global_step = max(global_step, int(min(claim, reach, max(most_steps, global_step))))
  return replace(beliefs, claims=claims, reach=reach, reach_at=reach_at), global_step


def too_far_ahead(beliefs: Beliefs, global_step: int, sync: SyncConfig) -> int | None:
  """The learner that claims a step so far beyond the global step that its push would be rejected.

  It may be an island that trained while the others started: it is asked when their pace is known.
  """
  claim, learner = beliefs.claims[0] if beliefs.claims else (0.0, None)
  return learner if -claim > global_step + sync.sync_period else None


def _rate(paces: Ranking, learner: int, num_learners: int) -> float:
  """Steps a second by which one learner alone can raise the global step."""
  others = [seconds for seconds, m in paces if m != learner]
  own = next((seconds for seconds, m in paces if m == learner), 0.0)
  if len(others) > 1:  # the median of three: any one of them may be a lie
    middle = statistics.median((own or math.inf, *others[:2]))
    return LEAD / max(middle, SHORTEST_STEP_SECONDS)
  if num_learners > 2:  # a member that never says how fast it is must not hold up the others
    return LEAD / max(own, *others, SHORTEST_STEP_SECONDS) if others else 0.0
  return ALONE_LEAD / max(own, SHORTEST_STEP_SECONDS)


def confirmed(claims: Ranking) -> int:
  """The highest number that two learners claim; 0: there is none."""
  return -int(claims[1][0]) if len(claims) > 1 else 0


def noted_snapshot(beliefs: Beliefs, learner: int, number: int) -> Beliefs:
  """A learner has said that a snapshot of this number has begun."""
  return replace(beliefs, snapshots=_ranked(beliefs.snapshots, (-number, learner), 2))


def usual_pace(beliefs: Beliefs) -> float:
  """Step time of the faster members, 0 if not known: no single member can make it longer."""
  paces = [seconds for seconds, _ in beliefs.paces]
  return believed_step_seconds(beliefs, statistics.median_low(paces)) if paces else 0.0


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
  """Forgets learners that are gone; `present`: (learner, step seconds) of those still here."""
  here = {m: seconds for m, seconds in present}
  paces = heapq.nsmallest(3, ((seconds, m) for m, seconds in here.items() if seconds > 0))
  claims = tuple(claim for claim in beliefs.claims if claim[1] in here)
  return replace(beliefs, paces=tuple(paces), claims=claims, usual_step_seconds=usual_step_seconds)


def believed_step_seconds(beliefs: Beliefs, claim: float) -> float:
  """A member's step time, capped, so that a learner that never steps is lost in the end."""
  usual = beliefs.usual_step_seconds
  most = max(LEAST_CAP_SECONDS, STEP_TIME_RATIO * usual) if usual else LONGEST_STEP_SECONDS
  return min(claim, most)


def believed_steps_since(claim: int, global_step: int, since: int, sync: SyncConfig) -> int:
  """A member's steps since its last sync, at most about those of the run since step `since`.

  In lock-step every claim is believed: a learner says H where it is due, also one that has come
  back and made one step. Otherwise it could wait for ever, and all others with it.
  """
  if sync.blocking:
    return claim
  return min(claim, max(0, global_step - since) + sync.overlap_steps + 2)


def push_fault(steps: int, tokens: int, steps_possible: int, step_tokens: int) -> str:
  """Why a push cannot hold the work it claims, or "".

  Args:
    steps: inner steps it claims.
    tokens: tokens it claims.
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


def worth_steps(steps: int, sync: SyncConfig) -> float:
  """The steps of a push that count for its weight.

  Beyond `COUNTED_PERIODS` sync periods each further step makes the whole push staler: k times as
  many steps weigh k times less. The push of an island that was away for long is merged, but moves
  the global model little.

  >>> sync = SyncConfig(sync_period=10)
  >>> [worth_steps(steps, sync) for steps in (10, 30, 60, 3000)]
  [10, 30, 15.0, 0.3]
  """
  most = COUNTED_PERIODS * sync.sync_period
  return steps if steps <= most else most * most / steps
