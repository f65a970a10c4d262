"""Kills, stops, partitions, newcomers: real processes and signals around toy islands.

In each case the others go on without one blocked step, who was away comes back by itself, all agree
on the final versions, none ever goes back, and the run reaches its tokens with exit status 0.
"""

from __future__ import annotations

import collections
import dataclasses
import signal

import pytest

from ddiloco.config import NetworkConfig
from ddiloco.engines.role_spec import free_urls
from tests.engines.toy_world import World
from tests.roles import toy

pytestmark = pytest.mark.slow

LEARNERS, SHARDS = 3, 2
STEP_SECONDS = 0.04
STEPS, STEPS_A_LIFE = 220, 120  # of each learner, if all live; more for every further strike
LIVENESS_SECONDS = 1.0
LONGEST_GAP_SECONDS = 1.0  # of those that nothing happens to, on a machine that never pauses
KILL, STOP, GO_ON, TERMINATE = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM


@pytest.fixture
def world(tmp_path):
  yield from make_world(tmp_path)


@pytest.fixture
def world_of_two_strikes(tmp_path):
  yield from make_world(tmp_path, STEPS + STEPS_A_LIFE)


@pytest.fixture
def world_of_three_strikes(tmp_path):
  yield from make_world(tmp_path, STEPS + 2 * STEPS_A_LIFE)


@pytest.fixture
def world_of_clocks(tmp_path):
  """Who is dead is soon known to be, and the run is long enough for three more lives."""
  yield from make_world(tmp_path, STEPS + 3 * STEPS_A_LIFE, silence_seconds=2.0)


def make_world(tmp_path, steps: int = STEPS, **network):
  config = toy.config(
    LEARNERS,
    steps,
    num_shards=SHARDS,
    num_fragments=4,
    sync_period=9,
    liveness_seconds=LIVENESS_SECONDS,
    max_norm_ratio=1e9,  # toy islands pull to different places, so lengths say nothing
  )
  config = dataclasses.replace(
    config,
    run=dataclasses.replace(config.run, restart_seconds=0.1),
    network=NetworkConfig(hello_seconds=0.2, patience_seconds=0.5, drain_seconds=10.0, **network),
  )
  with World(tmp_path / "run", config, None, f"--step_seconds={STEP_SECONDS}") as world:
    yield world


def begin(world: World) -> None:
  """Until every learner has had a part in every fragment."""
  world.begin()
  world.wait("a first commit of everything", lambda: everybody_takes_part(world))


def everybody_takes_part(world: World, after: float = -1.0, fragments=None) -> bool:
  """Whether every learner of the config has a part in commits of these fragments (all)."""
  seen = collections.defaultdict(set)
  for commit in world.find("commit", after=after):
    seen[commit.fragment] |= set(commit.learners)
  fragments = range(world.config.sync.num_fragments) if fragments is None else fragments
  return all(seen[p] >= set(range(LEARNERS)) for p in fragments)


def away(world: World, learner: int) -> float:
  """When the last shard has noticed that it hears nothing."""
  lost = [
    world.wait_for("member", f"syncer-{s}", learner=learner, state="lost") for s in range(SHARDS)
  ]
  return max(event.time for event in lost)


def check_the_end(world: World, others, **statuses: int) -> None:
  """All ends well; `others` are the learners that nothing happened to."""
  assert world.wait_end() == dict.fromkeys(world.roles, 0) | statuses
  check_agreement(world)
  check_versions_grow(world)
  check_undisturbed(world, others)


def check_agreement(world: World) -> None:
  """The last version that each learner applied is the last that the owner committed."""
  final = {e.fragment: e.version for e in world.find("commit")}
  tokens = {e.fragment: e.merged_tokens for e in world.find("commit")}
  assert min(tokens.values()) >= world.config.run.total_tokens and len(tokens) == 4, tokens
  for m in range(LEARNERS):
    lives = {e.incarnation for e in world.find("started", f"learner-{m}")}
    found = world.find("apply", f"learner-{m}", incarnation=max(lives))
    applied = {e.fragment: e.version for e in found}
    assert applied == final, f"learner {m} ends with other versions than were committed"


def check_versions_grow(world: World) -> None:
  """What anybody has seen of a fragment is never made again, and nobody goes back.

  A shard may die with a commit in its log that has not reached its buddy: nobody has that version,
  and the next life makes it anew. So it is where a life that was stopped goes on beside the next
  one: it may merge what had reached its machine before it hears that it may not speak any more.
  """
  lives: dict[str, int] = {}  # by shard, the newest
  applied: dict[tuple, int] = {}
  reached: dict[int, int] = {}  # by fragment, the newest version that a learner has
  both = [*world.find("commit"), *world.find("apply")]
  for event in sorted(both, key=lambda event: event.time):
    p, version = event.fragment, event.version
    if event.kind == "commit":
      lives[event.role] = newest = max(event.incarnation, lives.get(event.role, 0))
      if event.incarnation < newest:
        heard = any(world.find("apply", fragment=p, round=event.round))
        assert not heard, "a learner has what a life merged that was over"
        continue
      assert version > reached.get(p, 0), f"fragment {p} goes back from {reached[p]} to {version}"
      continue
    key = event.role, event.incarnation, p
    assert version > applied.get(key, -1), f"{key} goes back to {version}"
    applied[key] = version
    reached[p] = max(version, reached.get(p, 0))
  assert not list(world.find("lost")), "a shard says that versions were lost"


def check_undisturbed(world: World, learners) -> None:
  for learner in learners:
    steps = list(world.find("step", f"learner-{learner}"))
    assert len(steps) > STEPS / 2
    assert [e.step for e in steps] == list(range(1, len(steps) + 1)), "one life, every step"
    assert not any(e.blocked_seconds for e in steps), "a step was blocked"
    longest, most = max(e.gap_seconds for e in steps), LONGEST_GAP_SECONDS
    most += 2 * world.longest_pause
    assert longest < most, f"learner {learner} paused for {longest:.2f} s, {most:.2f} are allowed"


# --- killed ---------------------------------------------------------------------------------------


def test_killed_roles_come_back(world_of_three_strikes):
  """A learner, then a shard, then one of each at once."""
  world = world_of_three_strikes
  begin(world)
  for killed in (["learner-2"], ["syncer-0"], ["learner-2", "syncer-1"]):
    at = world.send(KILL, *killed)
    back = max(again(world, name, at) for name in killed)
    world.wait("a part of all of them", lambda back=back: everybody_takes_part(world, back))
  check_the_end(world, [0, 1])
  for shard in range(SHARDS):
    assert "has from its buddy: fragments" in world.roles[f"syncer-{shard}"].said()


def test_two_shards_killed_at_once_get_their_values_back_from_the_learners(world):
  """Who holds the only copies of each other is gone; but learners have what they last received."""
  shards = [f"syncer-{s}" for s in range(SHARDS)]
  begin(world)
  at = world.send(KILL, *shards)
  for name in shards:
    world.wait_for("regained", name, at)
  check_the_end(world, range(LEARNERS))


@pytest.mark.parametrize("name", ["learner-2", "syncer-1"])
def test_killed_roles_come_back_also_when_their_clock_has_stepped(world_of_clocks, name):
  """Back by hours, then ahead by hours, then corrected."""
  world = world_of_clocks
  begin(world)
  command = world.roles[name].command
  for seconds in (18_000, -18_000, 0):
    world.roles[name].command = [*command, f"--late_clock_seconds={seconds}"]
    back = again(world, name, world.send(KILL, name))
    world.wait("its part in every fragment", lambda back=back: everybody_takes_part(world, back))
  check_the_end(world, [m for m in range(LEARNERS) if f"learner-{m}" != name])


def again(world: World, name: str, killed_at: float) -> float:
  """When its next life has started, which has a greater incarnation."""
  before = max(e.incarnation for e in world.find("started", name) if e.time <= killed_at)

  def lives() -> list[float]:
    found = world.find("started", name, killed_at)
    return [e.time for e in found if e.incarnation > before]

  world.wait(f"a greater incarnation of {name}", lives)
  return lives()[0]


# --- silent ---------------------------------------------------------------------------------------


def test_a_stopped_learner_goes_on_where_it_was(world):
  begin(world)
  world.send(STOP, "learner-2")
  away(world, 2)
  goes_on = world.send(GO_ON, "learner-2")
  world.wait_for("member", "syncer-0", goes_on, learner=2, state="joined")
  world.wait("its part in every fragment", lambda: everybody_takes_part(world, goes_on))
  check_the_end(world, [0, 1])


def test_a_stopped_shard_goes_on_where_it_was_and_nobody_counts_as_lost(world):
  begin(world)
  stopped = world.send(STOP, "syncer-1")
  world.wait(
    "steps for longer than the liveness deadline",
    lambda: all(
      any(world.find("step", f"learner-{m}", stopped + 3 * LIVENESS_SECONDS))
      for m in range(LEARNERS)
    ),
  )
  assert any(world.find("commit", "syncer-0", stopped + LIVENESS_SECONDS)), "the other one goes on"
  goes_on = world.send(GO_ON, "syncer-1")
  world.wait("its commits", lambda: everybody_takes_part(world, goes_on, fragments=world.owned(1)))
  assert not any(world.find("member", "syncer-1", stopped, state="lost"))
  check_the_end(world, range(LEARNERS))


def test_a_partitioned_island_comes_back_when_the_link_heals(world):
  world.put_behind_links(2)
  begin(world)
  world.cut(2)
  lost = away(world, 2)
  alone = lost + LIVENESS_SECONDS
  world.wait("steps of the island alone", lambda: any(world.find("step", "learner-2", alone)))
  world.heal(2)
  for s in range(SHARDS):
    world.wait_for("member", f"syncer-{s}", lost, learner=2, state="joined")
  world.wait("its part in every fragment", lambda: everybody_takes_part(world, lost))
  check_the_end(world, range(LEARNERS))  # it trained on, alone


def test_two_incarnations_of_a_shard_at_once_no_split(world):
  """One is stopped, another takes its place elsewhere, and the first one goes on: it must end."""
  world.may_fail.add("syncer-1")
  world.put_front(1)
  begin(world)
  old = max(e.incarnation for e in world.find("started", "syncer-1"))
  stopped = world.send(STOP, "syncer-1")
  (url,) = free_urls(1)
  world.start("syncer-1", f"--bind={url}", after=" anew")
  world.put_front(1, url)
  new = world.wait_for("commit", "syncer-1", stopped)
  assert new.incarnation > old
  goes_on = world.send(GO_ON, "syncer-1")
  assert world.wait_end(["syncer-1"]) == {"syncer-1": 1}
  said = world.roles["syncer-1"].said()
  assert "incarnation" in said and str(new.incarnation) in said
  world.wait(
    "its successor's commits", lambda: everybody_takes_part(world, goes_on, world.owned(1))
  )
  check_the_end(world, range(LEARNERS), **{"syncer-1": 1})
  # What the first one had merged before it was stopped may be sent and applied this late.
  too_late = {e.round for e in world.find("commit", "syncer-1", goes_on) if e.incarnation == old}
  heard = [e for e in world.find("apply", after=goes_on) if e.round in too_late]
  assert not heard, "a learner applied what the first one merged when its successor was there"


# --- newcomers ------------------------------------------------------------------------------------


def test_a_learner_beyond_the_planned_number_joins_and_leaves(world):
  begin(world)
  world.start("learner-7")
  world.wait_for("joined", "learner-7")
  world.wait("its part in a commit", lambda: any(7 in e.learners for e in world.find("commit")))
  asked = world.send(TERMINATE, "learner-7")
  assert world.wait_end(["learner-7"]) == {"learner-7": 0}
  (stopped,) = world.find("stopped", "learner-7")
  assert stopped.unmerged_tokens == 0 and "everything it had is merged" in stopped.reason
  for s in range(SHARDS):
    world.wait_for("member", f"syncer-{s}", asked, learner=7, state="left")
  trained = sum(e.tokens for e in world.find("step", "learner-7"))
  assert trained > 0 and not any(world.find("step", "learner-7", asked + LIVENESS_SECONDS))
  check_the_end(world, range(LEARNERS))


def test_an_older_incarnation_of_a_learner_is_turned_away(world_of_two_strikes):
  """A host whose clock is late, and one that was stopped while another took its place."""
  world = world_of_two_strikes
  world.may_fail |= {"learner-2 late", "learner-2"}
  begin(world)
  late = world.start("learner-2", "--late_clock_seconds=1000", after=" late")
  assert world.wait_end([late.name]) == {late.name: 1}
  assert "may not speak any more" in late.said() and "learner-2 is here already" in late.said()
  stopped = world.send(STOP, "learner-2")
  world.start("learner-2", after=" anew")
  joined = world.wait_for("joined", "learner-2", stopped)
  world.send(GO_ON, "learner-2")
  assert world.wait_end(["learner-2"]) == {"learner-2": 1}
  old = world.roles["learner-2"].said()
  assert "a newer incarnation of learner-2 is here" in old and str(joined.incarnation) in old
  check_the_end(world, [0, 1], **{late.name: 1, "learner-2": 1})
