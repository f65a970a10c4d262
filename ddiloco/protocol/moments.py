"""A healthy learner's inner moments, for a learner that joins a run under way. PURE.

Learners have no open ports, so the moments of a fragment travel from donor to joiner through the
shard that owns it. A shard has one donation under way at a time. It asks the learner that was asked
longest ago, and forwards the donation to all learners that wait for it: many joiners cost a donor
no more than one.
"""

from __future__ import annotations

import math

from ddiloco.protocol import actions, events, messages, rules, states
from ddiloco.protocol.actions import LearnerAction, Send, SyncerAction
from ddiloco.protocol.messages import ForwardMoments, Moments, ProvideMoments, RequestMoments
from ddiloco.protocol.states import LearnerOutcome, LearnerState, SyncerOutcome, SyncerState
from ddiloco.protocol.values import less, replace

ASK_SECONDS = 1.0  # between two requests of a joiner

# --- a shard --------------------------------------------------------------------------------------


def on_request_moments(
  state: SyncerState, ask: RequestMoments, now: float, unsent: bool = False
) -> SyncerOutcome:
  """A learner waits for moments of these fragments; it repeats the request until it has them, or
  until it waits for none any more.

  While messages to it are still queued here (`unsent`), moments that it asks for again may be among
  them.
  """
  if not state.passes_moments or ask.learner == messages.EVALUATOR:
    return state, [
      states.ignored(ask, "no moments are passed on: checkpoint.rejoin is not 'peer' here")
    ]
  mine = {f.index for f in state.fragments}
  count = state.in_window(state.moments_asked, ask.learner)[1]
  if count >= states.MOST_IN_WINDOW * len(mine):
    state = replace(state, asking={m: ps for m, ps in state.asking.items() if m != ask.learner})
    return state, [states.ignored(ask, f"{count} fragments' moments were asked for it lately")]
  asked = mine.intersection(ask.fragments)
  if unsent:
    asked &= {*state.asking.get(ask.learner, asked)}
  state = replace(state, asking={**state.asking, ask.learner: tuple(sorted(asked))})
  return _next(state, now)


def on_moments(state: SyncerState, moments: Moments, now: float) -> SyncerOutcome:
  """A donation has arrived: forwards it to all learners that wait for it."""
  given = state.donation
  if given is None or (given.donor, given.fragment) != (moments.learner, moments.fragment):
    return state, [states.ignored(moments, "it is no longer asked for")]
  if moments.count > state.global_step + rules.step_tolerance(state.sync):
    reason = f"claims {moments.count} optimizer steps, the run has made {state.global_step}"
    return state, [states.ignored(moments, reason)]
  todo: list[SyncerAction] = []
  for learner, fragments in sorted(state.asking.items()):
    member = state.members.get(learner)
    if member is None or moments.fragment not in fragments:
      continue
    left = tuple(p for p in fragments if p != moments.fragment)
    state = replace(state, asking={**state.asking, learner: left})
    same = ("fragment", "donation", "count", "payload")
    forwarded = ForwardMoments(
      *state.to(member.incarnation),
      donor=moments.learner,
      donor_incarnation=moments.incarnation,
      **{name: getattr(moments, name) for name in same},
    )
    todo.append(Send(learner, forwarded))
  state, more = _next(replace(state, donation=None), now)
  return state, [*todo, *more]


def _next(state: SyncerState, now: float) -> SyncerOutcome:
  """Asks the next donor, unless a donation is under way and not late. Where there is none, and none
  may come back, no learner needs to wait."""
  donors, given = [m for m in state.members if _can_give(state, m)], state.donation
  if given is not None and now < given.until and given.donor in donors:
    return state, []
  asking = {m: ps for m, ps in state.asking.items() if m in state.members and ps}
  if not donors and state.recovery_over(now):
    todo: list[SyncerAction] = []
    for m in sorted(asking):
      to, why = state.to(state.members[m].incarnation), "no donor is here"
      no = messages.Rejection(*to, fragment=-1, round=-1, rejoin=False, reason=why)
      todo.append(Send(m, no))
    return replace(state, donation=None, asking={}), todo
  if not asking or not donors:
    return state, []
  asked = state.donors_asked
  donor = min(donors, key=lambda m: (asked.get(m, 0), m))
  member = state.members[donor]
  patience = max(state.sync.liveness_seconds, 10 * member.step_seconds, 3 * member.delivery_seconds)
  wanted = min(p for ps in asking.values() for p in ps)
  donation = states.MomentTransfer(wanted, donor, now + patience)
  ask = ProvideMoments(*state.to(member.incarnation), wanted)
  asked, counts = {**asked, donor: max(asked.values(), default=0) + 1}, state.moments_asked
  for m in (m for m, ps in asking.items() if wanted in ps):  # it may not want them any more later
    counts = state.counted(counts, m)
  state = replace(state, donation=donation, donors_asked=asked, moments_asked=counts)
  return state, [Send(donor, ask)]


def _can_give(state: SyncerState, learner: int) -> bool:
  member = state.members[learner]
  healthy = not (member.lost or member.quarantined or member.leaving or member.rejections)
  trains = learner != messages.EVALUATOR and member.step_seconds > 0 and min(member.versions) >= 0
  return healthy and trains and not state.asking.get(learner)


# --- a learner ------------------------------------------------------------------------------------


def want(state: LearnerState, now: float) -> LearnerState:
  """After joining a run under way, waits `donor_seconds` for a peer's moments, and again for each
  next fragment's; 0: does not wait."""
  if not (state.donor_seconds and state.trains and state.global_step and state.shards):
    return state
  wants = tuple(range(len(state.fragments)))
  return replace(state, wants=wants, wants_until=now + state.donor_seconds)


def ask(state: LearnerState, now: float) -> LearnerOutcome:
  """Asks the shards for the moments it still waits for; gives up at `wants_until`, which is now if
  a shard has said that there is no donor, and says so."""
  over = now >= state.wants_until
  if not state.wants or (now < state.ask_at and not over):
    return state, []
  todo: list[LearnerAction] = []
  for shard in range(len(state.shards)):
    lacks = (p for p in state.wants if p not in state.staging)
    mine = tuple(p for p in lacks if state.fragments[p].shard == shard)
    if mine:
      todo.append(Send(shard, RequestMoments(*state.me, () if over else mine)))
  if over:
    return replace(state, wants=()), [events.NoDonor(fragments=state.wants), *todo]
  return replace(state, ask_at=now + ASK_SECONDS), todo


def on_provide_moments(state: LearnerState, provide: ProvideMoments) -> LearnerOutcome:
  """Copies the moments of one fragment at this step boundary, as for a push; costs no step."""
  if not (state.trains and state.joined) or state.wants or state.leaving:
    return state, []
  state = replace(state, donations=state.donations + 1)
  moments = Moments(
    *state.me,
    fragment=provide.fragment,
    donation=state.donations,
    count=0,  # the role fills it in, with the payload
  )
  return state, [Send(provide.shard, moments)]


def on_forward_moments(state: LearnerState, forwarded: ForwardMoments) -> LearnerOutcome:
  """Takes a peer's moments, also those of a slower peer: to wait would not bring newer ones."""
  p = forwarded.fragment
  if p not in state.wants or p in state.staging:
    return state, []
  return replace(state, staging=(*state.staging, p)), [actions.TakeMoments(forwarded)]


def taken(state: LearnerState, event: actions.Taken) -> LearnerOutcome:
  """The moments lie on the devices now: they are applied, unless no longer wanted."""
  p = event.fragment
  if p not in state.wants:
    return state, []
  state = replace(state, staging=less(state.staging, p))
  if event.content is None:  # it goes on asking: another donor's moments may be good
    return state, []
  state = replace(state, wants=less(state.wants, p))
  if state.wants_until > -math.inf:  # of a large model all together take longer
    state = replace(state, wants_until=event.now + state.donor_seconds)
  return state, [actions.ApplyMoments(event.content)]
