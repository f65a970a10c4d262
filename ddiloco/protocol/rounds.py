"""One sync of one fragment: due, pull, push, commit, publish. PURE."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from ddiloco.protocol import events, rules
from ddiloco.protocol.actions import Read, ReadDone, Send, SyncerAction
from ddiloco.protocol.messages import EVALUATOR, FragmentState, Pull, Push, Rejection
from ddiloco.protocol.states import WINDOW_PERIODS, Round, SyncerOutcome, SyncerState, ignored
from ddiloco.protocol.values import less, put, replace


def start_rounds(state: SyncerState, now: float) -> SyncerOutcome:
  """Starts rounds of dirty fragments that a quorum is due for; all that can push are asked."""
  todo: list[SyncerAction] = []
  if not state.recovery_over(now):
    return state, todo
  if now < state.recovery_deadline:  # all were here: one that leaves later is awaited no more
    state = replace(state, recovery_deadline=-math.inf)
  waiting: list[int] = []
  for i in sorted(state.dirty):
    f = state.fragments[i]
    if i in state.under_way or state.complete(f):
      continue
    if now < _value_due_at(state, f):
      waiting.append(i)
      continue
    asked = _available(state, i)
    due = [m for m in asked if state.is_due(m, i)]
    leaving = [m for m in due if state.brings_last_work(m)]
    if leaving and not state.sync.blocking:
      due = asked  # a leaving learner cannot wait until a quorum is due
    quorum = _quorum(state, i, asked)
    if len(due) < quorum:
      state, said = _say_ahead(state, i, len(due), quorum)
      todo += said
      continue
    # Unique over the shard's incarnations, so that no push for an earlier one is taken for ours.
    round_id = rules.numbered(state.incarnation, state.rounds)
    there = [state.members[m] for m in asked]
    step_seconds = statistics.median_low(member.step_seconds for member in there)
    known = [member.sync_seconds for member in there if member.sync_seconds]
    sync_seconds = statistics.median_low(known) if known else 0.0
    paces = ((m, v.step_seconds) for m, v in state.members.items() if not v.lost and m >= 0)
    state = replace(state, beliefs=rules.refreshed(state.beliefs, paces, step_seconds))
    current = Round(
      id=round_id,
      quorum=quorum,
      started_at=now,
      pending=tuple(asked),
      step_seconds=step_seconds,
      sync_seconds=sync_seconds,
      global_step=state.global_step,
      pulled_at=now,
      deadline=now + _pull_patience(state, 1),
    )
    for m in leaving:
      state = replace(state, farewells=state.counted(state.farewells, m))
    state = replace(state, rounds=state.rounds + 1, said_ahead=False).with_round(i, current)
    todo += [_pull(state, f, current, m) for m in asked]
    todo.append(_round_event(f, current))
  return replace(state, dirty=tuple(waiting)), todo


def _value_due_at(state: SyncerState, f: FragmentState) -> float:
  """When a fragment stops waiting for newer values that learners were asked for; -inf: no value.

  Only the first request to each learner counts: a learner that has no such value does not hold the
  fragment up forever. If a learner does not answer, the shard asks another one after
  `liveness_seconds`; so the fragment waits twice as long.
  """
  mine = [each for (p, _), each in state.value_requests.items() if p == f.index]
  asked = [each.first_at for each in mine if state.is_newer(f, each.round)]
  patience = max(2 * state.sync.liveness_seconds, 3 * state.delivery_seconds)
  return max(asked, default=-math.inf) + patience


def _quorum(state: SyncerState, i: int, asked: list[int]) -> int:
  """K; where all learners that are here leave, as many as can still push: no other push will ever
  come, and a learner with nothing left to push would be missing from K. A fragment's first round,
  before it has merged anything, always takes K."""
  version = state.fragments[i].version
  here = [m for m, v in state.members.items() if m >= 0 and not (v.lost or v.quarantined)]
  last = (state.brings_last_work(m) and state.members[m].versions[i] == version for m in here)
  return min(state.quorum, max(1, len(asked))) if version and all(last) else state.quorum


def _say_ahead(state: SyncerState, i: int, due: int, quorum: int) -> SyncerOutcome:
  """Says, once until a round begins, that a quorum is due only with a learner that is not believed:
  without a round no commit says it."""
  m = rules.too_far_ahead(state.beliefs, state.global_step, state.sync)
  if m is None or m not in state.members or state.said_ahead or due + 1 < quorum:
    return state, []
  if not (state.could_push(m, i) and state.is_due(m, i)):
    return state, []
  rule = f"{rules.LEAD:g} times as fast as the others are (rules.LEAD)"
  fix = f"give it a larger islands.batch_size, or lower sync.min_quorum = {state.quorum}"
  if state.global_step + 1 > state.most_steps:
    rule = "as many times as its tokens need, since most steps were lost (rules.WASTE)"
    fix = "raise run.total_tokens"
  claim = -int(state.beliefs.claims[0][0])
  reason = (
    f"it says that it is at step {claim}, one learner alone is believed up to step"
    f" {state.global_step}, {rule}; so it is not asked, and without it no round begins. Fix: {fix}"
  )
  return replace(state, said_ahead=True), [events.Member(learner=m, state="ahead", reason=reason)]


def _available(state: SyncerState, i: int) -> list[int]:
  """The members that could push this fragment now, and whose push would be believed."""
  ahead = rules.too_far_ahead(state.beliefs, state.global_step, state.sync)
  return sorted(m for m in state.members if m != ahead and state.could_push(m, i))


def _pull(state: SyncerState, f: FragmentState, current: Round, learner: int) -> Send:
  to = state.to(state.members[learner].incarnation)
  return Send(learner, Pull(*to, f.index, current.id, f.version, state.snapshot))


def _round_event(f: FragmentState, current: Round) -> events.Round:
  asked = tuple(sorted({*current.pending, *current.pushes, *current.rejected}))
  return events.Round(
    fragment=f.index, round=current.id, version=f.version, asked=asked, quorum=current.quorum
  )


def on_push(state: SyncerState, push: Push, now: float) -> SyncerOutcome:
  """Has the first push of each asked learner measured, and ignores everything else."""
  i, me = state.position(push.fragment), push.learner
  current = None if i is None else state.under_way.get(i)
  if i is None or current is None or current.id != push.round:
    return state, [ignored(push, "late: its round is over")]
  if me not in current.pending:
    answered = me in {*current.measuring, *current.pushes, *current.rejected}
    return state, [ignored(push, "a duplicate" if answered else "it is no longer asked for")]
  pending, measuring = less(current.pending, me), (*current.measuring, me)
  current = replace(current, pending=pending, measuring=measuring)
  return state.with_round(i, current), [Read(push, now)]


def keep_push(state: SyncerState, push: Push, event: ReadDone) -> SyncerOutcome:
  """Keeps or rejects a push that was measured, for which its round has waited."""
  i = next((i for i, each in state.under_way.items() if each.id == push.round), None)
  if i is None:
    return state, [ignored(push, "late: its round is over")]
  current, me = state.under_way[i], push.learner
  current = replace(current, measuring=less(current.measuring, me))
  if fault := _push_fault(state, state.fragments[i], push, event):
    current = replace(current, rejected={**current.rejected, me: fault})
    return state.with_round(i, current).mark_dirty([i]), []
  pairs = {(min(m, me), max(m, me)): product for m, product in event.products.items()}
  current = replace(
    current,
    pushes={**current.pushes, me: replace(push, payload=None)},
    norms={**current.norms, me: event.norm},
    products={**current.products, **pairs},
  )
  if current.quorum_at == math.inf and len(current.pushes) >= current.quorum:
    seconds = rules.smooth(state.quorum_seconds, _quorum_seconds(state, current, event.now))
    state = replace(state, quorum_seconds=seconds)
    current = replace(current, quorum_at=event.now)
  return state.with_round(i, current).mark_dirty([i]).heard(me, push.count), []


def _push_fault(state: SyncerState, f: FragmentState, push: Push, event: ReadDone) -> str:
  """Why a push of the round is rejected, or ""."""
  if push.base_version != f.version:
    return f"based on version {push.base_version}, the fragment is at {f.version}"
  since = f.merged_global_steps.get(push.learner, 0)
  possible = max(0, state.global_step - since) + rules.step_tolerance(state.sync)
  claimed = rules.push_fault(push.steps, push.tokens, possible, state.step_tokens)
  finite = "" if math.isfinite(event.norm) else f"not finite ({event.norm})"
  return claimed or event.fault or finite


def _quorum_seconds(state: SyncerState, current: Round, now: float) -> float:
  """Seconds from the start of this round to its quorum. After a repeated pull they do not count
  from the start, since the wait for a lost message is no measure of the link: patience that learned
  from its own length would grow without end. A round in which this shard itself stood still does
  not count either."""
  if current.started_at < state.awake_since:
    return state.quorum_seconds
  if current.pulls == 1:
    return max(0.0, now - current.started_at)
  return max(state.quorum_seconds, now - current.pulled_at)


def _pull_patience(state: SyncerState, pulls: int) -> float:
  step = rules.usual_pace(state.beliefs)  # a learner answers a pull at the end of its step
  usual = 3 * max(state.quorum_seconds, step)
  return rules.backed_off(max(state.sync.liveness_seconds, usual), pulls - 1)


def advance_rounds(state: SyncerState, now: float) -> SyncerOutcome:
  """Looks at the rounds of dirty fragments and those past their deadline: ends them if they can.

  A round with a push that is here and not measured yet waits for the measurement.
  """
  todo: list[SyncerAction] = []
  for i, current in sorted(state.under_way.items()):
    f = state.fragments[i]
    if current.measuring or not (i in state.dirty or now >= current.deadline):
      continue
    # Where a late version costs no work, the wait for more learners may be longer.
    way_back = 0.0 if state.sync.apply in events.KEEPS_WORK else current.sync_seconds
    grace = rules.grace_seconds(current.step_seconds, state.quorum_seconds, way_back, state.sync)
    pending, count = current.pending, len(current.pushes)
    decision = rules.decide(now, count, pending, current.quorum_at, grace, current.quorum)
    if decision.over:
      state, ended = end_round(state, i, current, decision.reason, now)
      todo += ended
      continue
    if now >= current.pulled_at + _pull_patience(state, current.pulls):
      current = replace(current, pulled_at=now, pulls=current.pulls + 1)
      # A member that is heard, and whose pushes never come, must not stop the fragment: those that
      # have become able to push meanwhile are asked too.
      more = {*_available(state, i)} - {*pending, *current.pushes, *current.rejected}
      if more:
        pending = tuple(sorted({*pending, *more}))
        current = replace(current, pending=pending)
        todo.append(_round_event(f, current))
      # A pull or a push got lost; the same push comes again.
      todo += [_pull(state, f, current, m) for m in pending]
    deadline = min(
      current.pulled_at + _pull_patience(state, current.pulls),
      decision.wake_at,
      now + state.sync.liveness_seconds,  # patience is learned: it may be shorter by then
    )
    state = state.with_round(i, replace(current, deadline=deadline))
  return state, todo


def end_round(state: SyncerState, i: int, current: Round, why: str, now: float) -> SyncerOutcome:
  """Screens the pushes, and commits if a quorum of them is left. Members that were sent the version
  before get the update; all others get the whole value when they report next."""
  f, most = state.fragments[i], rules.COUNTED_PERIODS * state.sync.sync_period
  steps = {m: min(p.steps, most) for m, p in current.pushes.items()}
  expected, settled = _expected(state, i, current, steps)
  grown = rules.grown_together(current.norms, expected, state.sync) if settled else []
  times = state.grown_together.get(i, 0) + 1 if grown else 0
  state = replace(state, grown_together={**state.grown_together, i: times})
  lasting = times > state.sync.quarantine_after
  rejected = rules.screen(current.norms, steps, expected, state.sync, settled, lasting)
  candidates = sorted(m for m in current.pushes if m not in rejected)
  opposing = rules.opposing(current.products, candidates)
  state, contrary = _count_opposing(state, candidates, opposing)
  rejected = {**current.rejected, **rejected, **contrary}
  current = replace(current, rejected=rejected)
  merged = sorted(m for m in current.pushes if m not in rejected)
  todo: list[SyncerAction] = []
  committed = len(merged) >= current.quorum
  if committed:
    state, commit = _commit(state, i, current, why, merged, opposing, now)
    todo.append(commit)
  else:
    reason = f"{len(merged)} of {current.quorum} needed were left: {why}"
    todo.append(
      events.Abandoned(fragment=f.index, round=current.id, reason=reason, rejected=rejected)
    )
  state = state.with_round(i, None).mark_dirty([i])
  for m in merged:
    state = _credit(state, m, i, current.norms[m] / steps[m])
  for m, reason in rejected.items():
    state, told = _reject(state, m, i, current.id, reason, m not in grown)
    todo += told
  for m, member in sorted(state.members.items()):
    if committed and member.sent[i] == f.version and not member.lost:
      state, publish = state.publish_to(i, m, now, f.last_round)
      todo.append(publish)
  return state, todo


def _expected(
  state: SyncerState, i: int, current: Round, steps: Mapping[int, int]
) -> tuple[dict[int, float], bool]:
  """`expected` and `settled` of `rules.screen` for the pushes of a round.

  The usual norm per step, the median of the learners' pasts, times the steps of a push, but at
  least those of a whole period: fewer steps need not make a shorter push, since steps cancel out.
  It grows with the global step, as pushes do while a learning rate warms up, but only since the
  fragment's last commit. A learner's own past alone does not count: one that is merged while it
  diverges could grow from round to round.
  """
  f = state.fragments[i]
  known = {m: member.norms[i] for m, member in state.members.items() if member.norms[i]}
  # Lately: after months most members may be long lost, with pasts of when pushes were longer.
  since = f.global_step - WINDOW_PERIODS * state.sync.sync_period
  lately = [n for m, n in known.items() if f.merged_global_steps.get(m, 0) >= since]
  usual = statistics.median(lately or known.values()) if known else 0.0
  growth = max(1.0, current.global_step / max(1, f.global_step))
  expected = {m: growth * usual * max(steps[m], state.sync.sync_period) for m in current.norms}
  return expected, len(known) > 1  # a single learner with a past may be a bad one


def _commit(
  state: SyncerState,
  i: int,
  current: Round,
  why: str,
  merged: list[int],
  opposing: Mapping[int, float],
  now: float,
) -> tuple[SyncerState, events.Commit]:
  """The fragment's next version, which has these learners' pushes."""
  f = state.fragments[i]
  pushes = [current.pushes[m] for m in merged]
  tokens = tuple(p.tokens for p in pushes)
  merged_tokens = f.merged_tokens + sum(tokens)
  agreement = rules.agreement(current.products, merged)
  commit = events.Commit(
    fragment=f.index,
    round=current.id,
    version=f.version + 1,
    learners=tuple(merged),
    progress=merged_tokens / state.target_tokens,
    steps=tuple(p.steps for p in pushes),
    tokens=tokens,
    base_round=f.last_round,
    incarnations=tuple(p.incarnation for p in pushes),
    rejected=dict(current.rejected),
    opposing={m: round(cosine, 4) for m, cosine in opposing.items()},
    agreement=None if agreement is None else round(agreement, 4),
    missing=_missing(state, i, current),
    reason=why,
    merged_tokens=merged_tokens,
    quorum_seconds=current.quorum_at - current.started_at,
    grace_seconds=now - current.quorum_at,
  )
  # A push may claim a few more steps than the run has made; its learner's next one then fewer.
  reached = {
    p.learner: max(current.global_step, f.merged_global_steps.get(p.learner, 0) + p.steps)
    for p in pushes
  }
  state = state.heard(state.key, state.vector_clock[state.key] + 1).with_fragment(
    i,
    version=commit.version,
    merged_tokens=merged_tokens,
    merged_rounds={**f.merged_rounds, **dict.fromkeys(merged, current.id)},
    merged_global_steps={**f.merged_global_steps, **reached},
    last_round=current.id,
    global_step=current.global_step,
  )
  return state, commit


def _missing(state: SyncerState, i: int, current: Round) -> dict[int, str]:
  """Why each member that trains had no part in this round, in plain words."""
  reasons = {}
  ahead = rules.too_far_ahead(state.beliefs, state.global_step, state.sync)
  for learner, m in sorted(state.members.items()):
    if learner == EVALUATOR or learner in current.pushes or learner in current.rejected:
      continue
    if m.lost:
      reasons[learner] = "lost"
    elif m.quarantined:
      reasons[learner] = "quarantined"
    elif learner in current.pending:
      reasons[learner] = "did not answer within the grace window"
    elif m.versions[i] < state.fragments[i].version:
      reasons[learner] = f"had not received version {state.fragments[i].version} yet"
    elif learner == ahead:
      reasons[learner] = "says that it is further than one learner is believed to be"
    else:
      reasons[learner] = "had made no step since its last sync when the round began"
  return reasons


def _credit(state: SyncerState, learner: int, i: int, norm_per_step: float) -> SyncerState:
  member = state.members.get(learner)
  if member is None:
    return state
  norms = put(member.norms, i, rules.smooth(member.norms[i], norm_per_step))
  return state.with_member(learner, norms=norms, rejections=0)


def _count_opposing(
  state: SyncerState, learners: list[int], opposing: Mapping[int, float]
) -> tuple[SyncerState, dict[int, str]]:
  """Rejects learners whose pushes pointed against all others `quarantine_after` times in a row.

  The count is by learner and not by incarnation, so that a restart does not reset it.
  """
  opposed = {m: times for m, times in state.opposed.items() if m not in learners or m in opposing}
  rejected = {}
  for m, cosine in opposing.items():
    opposed[m] = times = opposed.get(m, 0) + 1
    if times >= state.sync.quarantine_after:
      rejected[m] = f"opposes all others (cosine {cosine:.2f}), {times} times in a row"
  return (replace(state, opposed=opposed) if opposed != state.opposed else state), rejected


def _reject(
  state: SyncerState, learner: int, i: int, round_id: int, reason: str, counts: bool
) -> SyncerOutcome:
  """The learner goes back to its base; rejected again and again, it must start afresh. Where all
  pushes grew together that does not count: it may be right."""
  member = state.members.get(learner)
  if member is None:
    return state, []
  rejections = member.rejections + counts
  quarantined = rejections >= state.sync.quarantine_after
  to, fragment = state.to(member.incarnation), state.fragments[i].index
  rejection = Rejection(*to, fragment, round_id, quarantined, reason)
  todo: list[SyncerAction] = [Send(learner, rejection)]
  if quarantined:
    reason = f"rejected {rejections} times: {reason}"
    todo.append(events.Member(learner=learner, state="quarantined", reason=reason))
  return state.with_member(learner, rejections=rejections, quarantined=quarantined), todo
