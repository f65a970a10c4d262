"""When does a round commit? Minimum quorum, adaptive grace, screening: rules with reasons. PURE.

Every verdict comes with its reason in plain words, which logs, live view and dashboard show.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from ddiloco.config import SyncConfig

MOST_NAMES = 8  # of learners in a reason
AGREEMENT = 0.05  # mean cosine of the others below which their directions are noise
OPPOSITION = 0.5  # share of that cosine, with the other sign, from which an update opposes them


@dataclasses.dataclass(frozen=True)
class Decision:
  verdict: str  # wait, commit or abandon
  reason: str
  wake_at: float | None = None  # look again at this time even if nothing happens


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
  quorum_at: float | None,
  grace: float,
  sync: SyncConfig,
) -> Decision:
  """Verdict on one round.

  Args:
    now: seconds, on the same clock as `quorum_at`.
    pushed: learners whose push was accepted.
    pending: learners that were asked, live, and have not answered yet.
    quorum_at: when `pushed` reached the quorum, None if it has not.
    grace: seconds to wait after that.
    sync: the protocol's settings.

  >>> decide(7.0, 2, (5,), quorum_at=6.5, grace=1.0, sync=SyncConfig(min_quorum=2)).reason
  'grace: 0.500 s left for 5'
  """
  names = ", ".join(map(str, pending[:MOST_NAMES]))
  if len(pending) > MOST_NAMES:
    names += f" and {len(pending) - MOST_NAMES} more"
  if pushed < sync.min_quorum:
    if (left := len(pending) + pushed) < sync.min_quorum:
      return Decision("abandon", f"only {left} of {sync.min_quorum} needed are left")
    return Decision(
      "wait", f"quorum: {pushed} of {sync.min_quorum} have answered, waiting for {names}"
    )
  if not pending:
    return Decision("commit", f"all {pushed} asked have answered")
  deadline = (quorum_at if quorum_at is not None else now) + grace
  if now >= deadline:
    return Decision("commit", f"quorum of {pushed}, grace of {grace:.3f} s is over without {names}")
  return Decision("wait", f"grace: {deadline - now:.3f} s left for {names}", deadline)


def screen(
  norms: Mapping[int, float],
  steps: Mapping[int, int],
  past: Mapping[int, float],
  ratio: float,
  period: int,
) -> dict[int, str]:
  """Which updates are out of all proportion, and why.

  An update is rejected if its norm exceeds `ratio` times every reference there is: the median of
  the other participants' norms, and the learner's own past. So a sudden growth that all share
  passes, and so does a learner that is alone before any has a past. More steps may make a longer
  update: against an update of fewer steps it may be longer by as much. Fewer steps need not make a
  shorter one, since steps cancel out: against its past, an update counts as one of a whole period.
  An update of zeros where the others moved is rejected too: nothing was learned, so its tokens must
  not count.

  Args:
    norms: by learner, of the outer gradients at hand; non-finite ones are always rejected.
    steps: by learner, inner steps in its outer gradient.
    past: by learner, the smoothed norm per step of its accepted updates of this fragment, or of the
      others' if it is new; 0: there are none.
    ratio: `sync.max_norm_ratio`.
    period: `sync.sync_period`, in steps.
  """
  rejected = {}
  finite = {m: norm for m, norm in norms.items() if math.isfinite(norm)}
  # Against an update of as many steps all others look alike: sorted once for each such number.
  scaled = {
    count: sorted(norm * max(1.0, count / steps[m]) for m, norm in finite.items())
    for count in {steps[m] for m in finite}
  }
  for learner, norm in norms.items():
    if not math.isfinite(norm):
      rejected[learner] = f"not finite (norm {norm})"
      continue
    own = past[learner] * max(steps[learner], period)
    usual = _median_without(scaled[steps[learner]], norm)
    references = [r for r in (usual, own) if r > 0]
    if norm == 0 and usual > 0:  # not against its past: a schedule may end at a rate of 0
      rejected[learner] = f"all zeros, after {steps[learner]} steps"
    elif references and norm > ratio * max(references):
      rejected[learner] = f"norm {norm:.3g} is over {ratio:g} x {max(references):.3g}"
  return rejected


def _median_without(ordered: Sequence[float], value: float) -> float:
  """The median of sorted values but one of them; 0 if that was all."""
  at = bisect.bisect_left(ordered, value)
  left = len(ordered) - 1
  if not left:
    return 0.0
  low, high = (i + (i >= at) for i in ((left - 1) // 2, left // 2))
  return (ordered[low] + ordered[high]) / 2


def agreement(products: Mapping[tuple[int, int], float], learners: Sequence[int]) -> float | None:
  """The mean cosine of two updates; None of fewer than two. The arguments are those of `opposing`.

  What several islands learned in common is in all of their updates, and the noise of their batches
  is not: updates of cosine 0 have an average half as long as one of four, and equal ones as long.

  >>> agreement({(0, 0): 4.0, (1, 1): 1.0, (0, 1): 1.0}, [0, 1])
  0.5
  """
  found = _cosines(products, learners)
  return sum(found.values()) / len(found) if found else None


def _cosines(
  products: Mapping[tuple[int, int], float], learners: Sequence[int]
) -> dict[tuple[int, int], float]:
  """By pair of these learners."""
  norms = {m: math.sqrt(products[m, m]) for m in learners if products.get((m, m), 0.0) > 0}
  return {
    (a, b): product / (norms[a] * norms[b])
    for (a, b), product in products.items()
    if a != b and a in norms and b in norms
  }


def opposing(
  products: Mapping[tuple[int, int], float], learners: Sequence[int]
) -> dict[int, float]:
  """Learners whose update points against all others', which agree; with its mean cosine to them.

  Honest outer gradients are nearly orthogonal and agree a little; one with its sign flipped has
  their cosine with the other sign. Of two, neither can be told to be the wrong one: three are
  needed.

  Args:
    products: inner products of two updates, or of one with itself; the smaller learner first.
    learners: whose updates are compared; those without products are left out.

  >>> agree = {(m, m): 1.0 for m in range(3)} | {(0, 1): 0.2}
  >>> opposing({**agree, (0, 2): -0.2, (1, 2): -0.2}, [0, 1, 2])
  {2: -0.2}
  """
  towards: dict[int, float] = collections.defaultdict(float)  # sum of the cosines with all others
  for (a, b), cosine in _cosines(products, learners).items():
    towards[a] += cosine
    towards[b] += cosine
  others = len(towards) - 1
  if others < 2:
    return {}
  total = sum(towards.values())  # of all pairs, twice
  found = {}
  for m, toward in towards.items():
    agreement = (total - 2 * toward) / (others * (others - 1))
    if agreement > AGREEMENT and toward / others < -OPPOSITION * agreement:
      found[m] = toward / others
  return found
