"""Each invariant of a trace: a good one has no problem, and each way to break it is found."""

import copy
import random
import re

import pytest

from ddiloco.protocol import events
from ddiloco.trace.check import MergedSteps, StepRange, check, ranges
from ddiloco.trace.operations import read_logs
from tests.made_events import nothing
from tests.trace.traces import Log, Logs, find, good, typed

ONE, TWO, SHARD = "learner-0", "learner-1", "syncer-0"


def problems(logs: Logs) -> list[str]:
  return list(check(read_logs(typed(logs))).problems)


def drop(role: str, kind: str, **fields):
  def mutate(logs: Logs) -> None:
    logs[role].remove(find(logs, role, kind, **fields))

  return mutate


def change(role: str, kind: str, where: dict, /, **to):
  def mutate(logs: Logs) -> None:
    find(logs, role, kind, **where).update(to)

  return mutate


def add_after(role: str, kind: str, where: dict, /, **event):
  def mutate(logs: Logs) -> None:
    before = find(logs, role, kind, **where)
    place = logs[role].index(before) + 1
    logs[role].insert(place, {**before, **event})

  return mutate


def lose_fields(role: str, kind: str, *names: str):
  def mutate(logs: Logs) -> None:
    for name in names:
      del find(logs, role, kind)[name]

  return mutate


def test_nothing_is_wrong_with_a_good_trace():
  checked = check(read_logs(typed(good())))
  assert not checked.problems
  assert checked.counts == {
    "learners": 2, "incarnations": 3, "started": 4, "step": 16, "copy_out": 6, "commit": 4,
    "merged": 5, "ranges": 6, "stage": 8, "apply": 8, "captured": 2, "saved": 1, "restored": 1,
    "donated": 1, "inherited": 1, "owns": 1,
  }  # fmt: skip
  assert checked.summary[0].startswith("16 steps of 2 learners in 3 incarnations")


def test_a_value_that_is_given_back_is_of_a_later_round_and_may_be_of_an_earlier_version():
  shard, one, two = Log(SHARD), Log(ONE), Log(TWO)
  first = {"fragment": 0, "version": 0, "round": -1, "momentum_round": -1}
  shard.on(0).add("owns", **first)
  one.on(0).apply(-1, 0, "overwrite").steps(1).copy_out(0, 0, -1, steps=1)
  shard.commit(0, 1, -1, {0: 0}, steps=[1], merged=1)
  one.apply(0, 1, included=True).steps(1).copy_out(1, 1, 0, steps=1)
  shard.commit(1, 2, 0, {0: 0}, steps=[1], merged=2)
  shard.on(1).add("owns", **first)  # it has lost both
  two.on(0).apply(-1, 0, "overwrite").steps(1).copy_out(9, 0, -1, steps=1)
  shard.commit(9, 1, -1, {1: 0}, steps=[1], merged=1)
  shard.on(2).add("owns", fragment=0, version=2, round=1, momentum_round=1)
  shard.add("owns", fragment=0, version=1, round=9, momentum_round=1)
  assert problems({SHARD: shard.events, ONE: one.events, TWO: two.events}) == []


def test_a_learner_may_have_two_values_on_their_way_at_once():
  shard, one, two = Log(SHARD), Log(ONE), Log(TWO)
  shard.on(0).add("owns", fragment=0, version=0, round=-1, momentum_round=-1)
  two.on(0).apply(-1, 0, "overwrite").steps(1).copy_out(0, 0, -1, steps=1)
  shard.commit(0, 1, -1, {1: 0}, steps=[1], merged=1)
  two.apply(0, 1, included=True).steps(1).copy_out(1, 1, 0, steps=1)
  shard.commit(1, 2, 0, {1: 0}, steps=[1], merged=2)
  one.on(0).apply(-1, 0, "overwrite")
  for kind in ("stage", "apply"):
    for n in (0, 1):
      one.add(kind, fragment=0, round=n, version=n + 1, mode="rebase", included=False)
  assert problems({SHARD: shard.events, ONE: one.events, TWO: two.events}) == []


def resend(logs: Logs) -> None:
  """Of a push that is not the newest."""
  pushed = find(logs, ONE, "copy_out", round=1)
  head = {name: pushed[name] for name in ("time", "role", "incarnation", "fragment")}
  again = {**nothing("resend"), **head, "kind": "resend", "round": 5, "old_round": 0}
  logs[ONE].insert(logs[ONE].index(pushed) + 1, again)


MUTATIONS = [
  # (what is broken, how, who must say it, what must be said)
  ("a step is missing", drop(ONE, "step", step=2), ONE, "step 3 follows step 1"),
  ("a step was counted twice", add_after(ONE, "step", {"step": 2}), ONE, "step 2 follows step 2"),
  ("the global step goes back", change(ONE, "step", {"step": 3}, global_step=1), ONE,
   "the global step went back"),
  ("the global step stands still", change(ONE, "step", {"step": 3}, global_step=2), ONE,
   "the global step went back from 2 to 2"),
  ("a batch twice", change(ONE, "step", {"step": 3}, position=1), ONE, "batch 1 follows batch 1"),
  ("no tokens", change(ONE, "step", {"step": 1}, tokens=0), ONE, "a step of 0 tokens"),
  ("a copy-out says too many steps", change(ONE, "copy_out", {"round": 1}, steps=3), ONE,
   "says 3 steps and 20 tokens, but 2 steps and 20 tokens"),
  ("a copy-out says other tokens",
   change(TWO, "copy_out", {"round": 0}, tokens=31), TWO, "31 tokens"),
  ("a copy-out on another base", change(ONE, "copy_out", {"round": 2}, base_round=0), ONE,
   r"copied out on version 2 of round 0, but its base is version 2 of round 1"),
  ("a copy-out of another version", change(ONE, "copy_out", {"round": 1}, version=0), ONE,
   "copied out on version 0"),
  ("a push of another base is merged", change(ONE, "copy_out", {"round": 2}, base_round=0), SHARD,
   "learner 0 copied its push out on round 0"),
  ("nothing is there to be rebased", change(ONE, "stage", {"round": -1}, mode="rebase"), ONE,
   "by rebase, but has nothing of fragment 0"),
  ("rounds go back", change(ONE, "copy_out", {"round": 1}, round=0), ONE,
   "answers round 0 after round 0"),
  ("a copy-out is missing", drop(TWO, "copy_out", round=3), SHARD, "never made"),
  ("a commit of another incarnation", change(SHARD, "commit", {"round": 3}, incarnations=[0]),
   SHARD,
   r"needs push 3 of fragment 0 by learner-1 \(incarnation 0\), which was never"),
  ("a commit is missing", drop(SHARD, "commit", round=1), ONE, "value 1 of fragment 0"),
  ("a commit on another base", change(SHARD, "commit", {"round": 2}, base_round=0), SHARD,
   "commits on round 0, but has round 1"),
  ("a version is left out", change(SHARD, "commit", {"round": 2}, version=4), SHARD,
   "version 4 follows 2"),
  ("a round twice", add_after(SHARD, "commit", {"round": 2}), SHARD, "committed twice"),
  ("commit says other steps", change(SHARD, "commit", {"round": 0}, steps=[2, 2]), SHARD,
   r"says \(2, 2\) steps, the pushes make it \(2, 3\)"),
  ("commit says other tokens", change(SHARD, "commit", {"round": 3}, tokens=[1]), SHARD,
   r"says \(1,\) tokens, the pushes make it \(50,\)"),
  ("tokens do not add up", change(SHARD, "commit", {"round": 1}, merged_tokens=80), SHARD,
   "says 80 merged_tokens, the pushes make it 70"),
  ("an unknown value is applied", change(ONE, "stage", {"round": 1}, round=9), ONE,
   "value 9 of fragment 0, which was never made"),
  ("applied as another version", change(ONE, "stage", {"round": 1}, version=3), ONE,
   "has round 1 as version 3, it is 2"),
  ("an older value is applied", change(TWO, "stage", {"round": 2}, round=0, version=1), TWO,
   "takes round 0 after round 1"),
  ("a push is included that is not", change(TWO, "stage", {"round": 1}, included=True), TWO,
   "round 1 does not include its push for round 1, but is said to"),
  ("a push is included, and there is none",
   change(TWO, "stage", {"round": 2}, included=True), TWO, "but it has none"),
  ("a push is not included that is", change(ONE, "stage", {"round": 0}, included=False), ONE,
   "round 0 includes its push for round 0, but is said not to"),
  ("applied, but not staged", drop(ONE, "stage", round=1), ONE, "which was not staged"),
  ("copied out, but nothing is there", drop(ONE, "stage", round=-1), ONE, "while it has none"),
  ("taken twice", add_after(TWO, "stage", {"round": 1}), TWO, "takes round 1 after round 1"),
  ("an older push is sent again", resend, ONE, "push for round 0 again, which is not its newest"),
  ("another value applied than staged", change(ONE, "apply", {"round": 1}, mode="mix"), ONE,
   "applies another value than was staged"),
  ("a copy-out while a value is on its way", drop(ONE, "apply", round=0), ONE,
   "newer one is on its way"),
  ("owns another version", change(SHARD, "owns", {}, version=1), SHARD,
   r"owns no round \(initial\) as version 1, it is 0"),
  ("owns a momentum of no round", change(SHARD, "owns", {}, momentum_round=-9), SHARD,
   "needs momentum -9 of fragment 0, which was never made"),
  ("owns too new a momentum", change(SHARD, "owns", {}, momentum_round=0), SHARD, "later round"),
  ("owns nothing", drop(SHARD, "owns"), SHARD, "commits fragment 0, which it does not own"),
  ("the shard goes back", add_after(SHARD, "commit", {"round": 1}, kind="owns", version=1, round=0,
   momentum_round=-1), SHARD, "round 0 follows round 1 in the same incarnation"),
  ("what is inherited was never donated", drop(ONE, "donated"), TWO,
   r"needs donation 1 of fragment 0 by learner-0 \(incarnation 0\), which was never made"),
  ("what is restored was never captured", drop(TWO, "captured"), TWO,
   r"needs state 1 by learner-1 \(incarnation 0\), which was never made"),
  ("what is saved was never captured", drop(TWO, "captured"), TWO, "saved, but never captured"),
  ("it never started", drop(TWO, "started"), TWO, "does not say that it started"),
  ("it started twice", add_after(TWO, "started", {}), TWO, "says again that it started"),
  ("an unknown kind", change(TWO, "stopped", {}, kind="teleported"), TWO,
   "unknown kind 'teleported'"),
  ("a field is missing", lose_fields(ONE, "copy_out", "base_round"), ONE,
   "copy_out: .*`base_round`"),
  ("a field of another type", change(ONE, "stage", {"round": 0}, included=1), ONE,
   "stage: .*`included`|stage: .*included"),
  ("an unknown mode", change(ONE, "stage", {"round": 0}, mode="guess"), ONE,
   "stage: .*'guess'"),
  ("incarnations are missing", change(SHARD, "commit", {"round": 0}, incarnations=[0]), SHARD,
   "incarnations"),
  ("a learner twice", change(SHARD, "commit", {"round": 0}, learners=[0, 0]), SHARD,
   r"commit has learners, .* \(\(0, 0\), \(0, 0\), \(2, 3\)"),
  ("twice, and the rest as if once", change(SHARD, "commit", {"round": 1}, learners=[0, 0]), SHARD,
   r"commit has learners, .* \(\(0, 0\), \(0,\)"),
  ("steps are missing", change(SHARD, "commit", {"round": 0}, steps=[5]), SHARD,
   "commit has learners"),
  ("the sizes of steps are missing", change(SHARD, "commit", {"round": 0}, step_tokens=[]), SHARD,
   "commit has learners"),
  ("no learner", change(SHARD, "commit", {"round": 1}, learners=[], incarnations=[], steps=[],
   tokens=[], step_tokens=[]), SHARD, "commit has learners"),
]  # fmt: skip


@pytest.mark.parametrize(("mutate", "role", "text"), [m[1:] for m in MUTATIONS],
                         ids=[m[0] for m in MUTATIONS])  # fmt: skip
def test_every_broken_invariant_is_found(mutate, role, text):
  logs = copy.deepcopy(good())
  mutate(logs)
  said = [p for p in problems(logs) if p.startswith(f"{role}, incarnation ")]
  assert any(re.search(text, p) for p in said), problems(logs)


def test_rounds_grow_also_where_a_fragment_moves_to_another_shard():
  other = Log("syncer-1").on(0).add("owns", fragment=0, version=4, round=3, momentum_round=3)
  other.commit(2, 5, 3, {0: 0}, steps=[1], merged=14)
  said = [p for p in problems({**good(), "syncer-1": other.events}) if p.startswith("syncer-1")]
  assert any("round 2 of fragment 0 comes after a later one" in text for text in said), said


def test_rounds_grow_over_all_lives_of_a_shard():
  """One that lost what it had committed gives none of its rounds again, nor an earlier one."""
  shard, one, two = Log(SHARD), Log(ONE), Log(TWO)
  for life, (log, round_) in enumerate(((one, 3), (two, 2))):
    shard.on(life).add("owns", fragment=0, version=0, round=-1, momentum_round=-1)
    log.on(0).apply(-1, 0, "overwrite").steps(1).copy_out(round_, 0, -1, steps=1)
    shard.commit(round_, 1, -1, {life: 0}, steps=[1], merged=1)
  said = problems({SHARD: shard.events, ONE: one.events, TWO: two.events})
  assert len(said) == 1 and "round 2 of fragment 0 comes after a later one" in said[0]


def test_dropped_messages_are_no_lost_events():
  for peer, found in ((SHARD, 0), (ONE, 1)):
    logs = good()
    head = {name: logs[ONE][-1][name] for name in ("time", "role", "incarnation")}
    what = {"kind": "dropped", "peer": peer, "count": 3, "reason": "full"}
    logs[ONE].append({**nothing("dropped"), **head, **what})
    said = problems(logs)
    assert len(said) == found and all("3 events before it could not be" in s for s in said), said


def test_a_step_merged_twice_on_the_way_to_a_value_is_found():
  """The restored learner forgets that its steps were merged, and all counts agree with that."""
  logs = good()
  logs["syncer-0"].remove(find(logs, SHARD, "commit", round=1))
  both = {"learners": [0, 1], "incarnations": [0, 0]}
  both |= {"steps": [1, 3], "tokens": [10, 30], "merged_tokens": 90}
  first = find(logs, SHARD, "commit", round=0)
  logs[SHARD].insert(2, {**first, "round": 1, "version": 2, "base_round": 0, **both})
  logs[SHARD].sort(key=lambda e: (e["kind"] == "commit", e.get("round", 0)))
  find(logs, SHARD, "commit", round=2)["merged_tokens"] = 100
  find(logs, SHARD, "commit", round=3)["merged_tokens"] = 150
  said = problems(logs)
  assert any("merges steps 4 to 6 of incarnation 0 of learner 1" in text for text in said), said
  assert any("round 1 includes its push for round 1, but is said not to" in t for t in said), said


def test_the_same_steps_may_be_merged_on_two_branches():
  """All is lost after round 1 and the shard begins again from round 0: nothing counts twice."""
  logs = good()
  again = find(logs, SHARD, "commit", round=1)
  owns = {"kind": "owns", "fragment": 0, "version": 1, "round": 0, "momentum_round": -1}
  at = logs[SHARD].index(again) + 1
  head = {"time": 9.0, "role": SHARD, "incarnation": 1}
  logs[SHARD] = [
    *logs[SHARD][:at],
    {**head, "kind": "started"},
    {**head, **owns},
  ]
  logs[SHARD] += [{**again, **head, "round": 1 << 24}]
  logs[ONE] = logs[ONE][: logs[ONE].index(find(logs, ONE, "copy_out", round=1)) + 1]
  logs[ONE].append({**find(logs, ONE, "copy_out", round=1), "kind": "resend", "old_round": 1})
  logs[ONE][-1]["round"] = 1 << 24
  logs[TWO] = [e for e in logs[TWO] if e["incarnation"] == 0]
  assert problems(logs) == []
  logs[SHARD][-2].update(round=1, version=2)  # now round 1 is an ancestor
  logs[SHARD][-1].update(base_round=1, version=3, merged_tokens=90)
  assert any("which round 1 has merged some already" in text for text in problems(logs))


@pytest.mark.parametrize("cut_off", range(1, 8))
def test_the_end_of_an_incarnation_may_be_missing(cut_off):
  """A killed learner's last second is not on disk: fewer steps, a push that nobody merged."""
  logs = good()
  killed = [e for e in logs[TWO] if e["incarnation"] == 0]
  assert [e["kind"] for e in killed[-5:]] == ["step", "captured", "saved", "step", "step"]
  rest = [e for e in logs[TWO] if e["incarnation"] == 1]
  needed = len(killed) - 4 if cut_off > 2 else len(killed) - cut_off
  logs[TWO] = killed[:needed] + rest if cut_off <= 2 else killed[:needed]
  if cut_off > 2:  # without its snapshot it cannot come back as it was
    logs[SHARD].remove(find(logs, SHARD, "commit", round=3))
    logs[TWO] = logs[TWO][: len(logs[TWO]) - (cut_off - 3)]
  assert problems(logs) == []


def test_a_life_may_have_a_smaller_number_than_the_one_before_it():
  """Its host's clock was set back. It restores its state before a shard can refuse it for that."""
  logs, number = good(), {0: 7, 1: 3}
  for event in logs["learner-1"]:
    for name in {"incarnation", "of_incarnation"} & event.keys():
      event[name] = number[event[name]]
  for event in logs["syncer-0"]:
    if event["kind"] == "commit":
      who = zip(event["learners"], event["incarnations"])
      event["incarnations"] = [number[life] if m == 1 else life for m, life in who]
  assert problems(logs) == []


def test_a_torn_line_may_only_be_the_last_of_an_incarnation():
  logs = good()
  last = max(i for i, e in enumerate(logs[TWO]) if e["incarnation"] == 0)
  torn = {**logs, TWO: [*logs[TWO][: last + 1], None, *logs[TWO][last + 1 :]]}
  assert problems(torn) == []
  assert problems({**logs, TWO: [*logs[TWO], None]}) == []
  torn = {**logs, TWO: [*logs[TWO][:last], None, *logs[TWO][last:]]}
  assert problems(torn) == [
    f"{TWO}, incarnation 0, line {last + 1}: cannot be read, and more follows"
  ]


def test_problems_name_role_incarnation_and_line():
  logs = good()
  event = find(logs, TWO, "copy_out", round=3)
  event["tokens"] = 1
  line = logs[TWO].index(event) + 1
  assert problems(logs) == [
    f"{TWO}, incarnation 1, line {line}: copy-out says 5 steps and 1 tokens,"
    " but 5 steps and 50 tokens are not merged"
  ]


def test_roles_that_wait_for_each_other_are_no_hang():
  """LearnerRole 0 applies round 1 before it copies out the push that round 1 consists of."""
  logs = good()
  stage, copied = find(logs, ONE, "stage", round=1), find(logs, ONE, "copy_out", round=1)
  logs[ONE].remove(stage)
  logs[ONE].insert(logs[ONE].index(copied), stage)
  assert any("which was never made" in text for text in problems(logs))


def test_other_roles_and_files_are_no_trace():
  logs = {**good(), "engine": [{"time": 0.0, "role": "engine", "kind": "anything"}]}
  assert problems(logs) == []
  watched = {"time": 0.0, "role": "evaluator", "incarnation": 0, "kind": "stage", "fragment": 0}
  watched |= {"version": 4, "round": 3, "mode": "overwrite", "included": False}
  assert problems({**good(), "evaluator": [watched]}) == []
  assert problems({**good(), "evaluator": [{**watched, "round": 7}]})


def test_steps_make_ranges():
  fields = {"global_step": 0, "position": 0, "tokens": 1, "seconds": 0.0, "gap_seconds": 0.0}
  steps = [(0, 3), (0, 4), (2, 5), (2, 6), (2, 8)]
  made = [events.Step(incarnation=life, step=step, **fields) for life, step in steps]
  assert ranges(made) == [StepRange(0, 3, 4), StepRange(2, 5, 6), StepRange(2, 8, 8)]
  assert ranges([]) == []


def test_merged_finds_every_overlap():
  """Against a plain search, for random stretches."""
  for seed in range(50):
    source = random.Random(seed)
    merged, plain = MergedSteps(), []
    for round_id in range(30):
      first = source.randrange(60)
      last = first + source.randrange(12)
      expected = sorted(r for a, b, r in plain if a <= last and b >= first)
      assert sorted(merged.rounds(first, last)) == expected, f"{seed=}"
      merged.add(first, last, round_id)
      plain.append((first, last, round_id))
