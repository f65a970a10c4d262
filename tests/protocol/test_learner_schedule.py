"""The schedule of learning rates follows what is merged, with however many learners."""

import itertools

from ddiloco.config import SyncConfig
from ddiloco.protocol.learner import init
from ddiloco.protocol.states import schedule_step
from ddiloco.protocol.values import replace
from tests.protocol.virtual import STEP_TOKENS, Pace, World

PLANNED = 240  # steps, of four learners
TOGETHER = 4 * STEP_TOKENS


def run(step_seconds, kills=(), **sync) -> dict[int, list[tuple[int, int]]]:
  """A whole run of four planned learners; `kills` = (learner, at seconds, for seconds).

  Returns where every learner is in the schedule, and the clock, after every step of its.
  """
  settings = {"num_fragments": 3, "num_shards": 2, "sync_period": 6, "overlap_steps": 2, **sync}
  pace = Pace(step_seconds, jitter=0.05)
  world = World(SyncConfig(**settings), pace, 0, target_tokens=PLANNED * TOGETHER, num_learners=4)
  for m in range(4, len(step_seconds)):
    world.start(("learner", m))
  for learner, at, seconds in kills:
    world.at(at, world.kill, ("learner", learner), seconds)
  world.run(1e4, stop=lambda: not world.working)
  assert not world.working, "it has ended"
  seen: dict[int, list[tuple[int, int]]] = {}
  for _, actor, event in world.history:
    if event.kind == "step":
      seen.setdefault(actor.number, []).append((event.schedule_step, event.global_step - 1))
  return seen


def test_in_lock_step_it_is_the_global_step():
  seen = run((0.1,) * 4, blocking=True, min_quorum=4, apply="overwrite", overlap_steps=0)
  assert all(at == global_step for steps in seen.values() for at, global_step in steps)
  assert len(seen[0]) >= PLANNED


def test_alone_it_is_the_steps():
  assert schedule_step(replace(init(0, 1, (), 100), step=7), TOGETHER) == 7


def test_with_learners_down_it_ends_when_the_run_does():
  """By the global step it would be over long before."""
  seen = run((0.1,) * 4, kills=[(1, 2.0, 12.0), (2, 8.0, 8.0), (3, 3.0, 15.0)])
  for steps in seen.values():
    last, global_step = steps[-1]
    assert abs(last - PLANNED) <= 12 and global_step > 1.2 * PLANNED


def test_with_more_learners_than_planned_it_still_ends():
  seen = run((0.1,) * 8)
  for steps in seen.values():
    last, global_step = steps[-1]
    assert abs(last - PLANNED) <= 12 and global_step < 0.7 * PLANNED


def test_it_never_jumps_by_more_than_a_sync():
  seen = run((0.1, 0.1, 0.13, 0.2), kills=[(1, 4.0, 5.0)])
  for steps in (seen[0], seen[2], seen[3]):  # whoever comes back skips what the others have done
    assert max(abs(b - a) for (a, _), (b, _) in itertools.pairwise(steps[5:])) <= 6
