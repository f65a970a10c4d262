"""A synthetic, realistic run: four islands, two shards, learner 2 killed at 20 s, back at 27 s."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest

from ddiloco.observe.eventlog import to_line
from ddiloco.observe.run_state import RunState
from tests.made_events import changed
from tests.made_events import made as event

KILL, RESTART, JOINED, END = 20.0, 24.0, 27.0, 60.0
STEP_SECONDS = {0: 0.10, 1: 0.11, 2: 0.10, 3: 0.14}
TOKENS = 8 * 128
FRAGMENTS, SHARDS = 4, 2


def step_event(time, learner, step, incarnation=0, **changes):
  fields = {
    "step": step,
    "global_step": step,
    "loss": 3.0,
    "grad_norm": 1.0,
    "learning_rate": 1e-3,
    "tokens": TOKENS,
    "seconds": 0.1,
    "gap_seconds": 0.1,
    "blocked_seconds": 0.0,
  }
  return event(time, f"learner-{learner}", "step", incarnation, **{**fields, **changes})


def commit_event(time, shard=0, **changes):
  fields = {
    "fragment": 0,
    "round": 1,
    "version": 1,
    "base_round": -1,
    "weights": {0: 0.5, 1: 0.5},
    "rejected": {},
    "missing": {},
    "reason": "all 2 asked have answered",
    "steps": (24, 24),
    "tokens": (TOKENS, TOKENS),
    "merged_tokens": 2 * TOKENS,
    "quorum_seconds": 0.05,
    "grace_seconds": 0.02,
    "merge_seconds": 0.004,
  }
  return event(time, f"syncer-{shard}", "commit", **{**fields, **changes})


def run_started(**changes):
  fields = {
    "name": "quickstart",
    "num_learners": 4,
    "num_shards": SHARDS,
    "num_fragments": FRAGMENTS,
    "total_tokens": 2_000_000,
  }
  return event(0.0, "engine", "run_started", **{**fields, **changes})


def _life(rng, learner, incarnation, start, joined, end, global_step):
  role = f"learner-{learner}"
  yield event(start, role, "started", incarnation, devices=1, mesh=[1, 1, 1], batch_size=8)
  yield event(joined, role, "joined", incarnation, global_step=global_step, seconds=joined - start)
  time, step, previous = joined + 0.6, 0, joined
  while time < end:
    step += 1
    global_step += 1
    loss = 1.6 + 3.9 * math.exp(-(time - 3.5) / 9) + rng.gauss(0, 0.08)
    if incarnation and step < 12:
      loss += 0.15 * (12 - step) / 12
    yield step_event(
      time,
      learner,
      step,
      incarnation,
      global_step=global_step,
      loss=loss,
      seconds=0.09,
      gap_seconds=time - previous if step > 1 else 0.6,
    )
    if step % 20 == 0 or time > end - 0.3:
      sent, received = 260_000 * step // 24, 210_000 * step // 24
      yield event(time, role, "traffic", incarnation, sent_bytes=sent, received_bytes=received)
    previous = time
    time += STEP_SECONDS[learner] * rng.uniform(0.93, 1.12)


def _sync(rng, alive):
  merged = dict.fromkeys(range(FRAGMENTS), 0)
  sent = dict.fromkeys(range(SHARDS), 0)
  received = dict.fromkeys(range(SHARDS), 0)
  time, round_id = 5.0, 0
  while time < END - 0.4:
    fragment = round_id % FRAGMENTS
    shard = fragment % SHARDS
    role = f"syncer-{shard}"
    here = [m for m in range(4) if alive(m, time)]
    missing = {m: "silent for 2.1 s, counted as lost" for m in range(4) if m not in here}
    rejected = {}
    reason = f"all {len(here)} asked have answered"
    if rng.random() < 0.25 and 3 in here:
      here.remove(3)
      missing[3] = "no answer within the grace window"
      reason = f"quorum of {len(here)}, grace of 0.081 s is over without 3"
    if round_id == 55:
      here.remove(1)
      rejected[1] = "norm 41.2 is over sync.max_norm_ratio (10) x 1.31"
    yield event(
      time - 0.15,
      role,
      "round",
      fragment=fragment,
      round=round_id,
      version=round_id // 4,
      asked=here,
    )
    tokens = (6 * TOKENS,) * len(here)
    merged[fragment] += sum(tokens) * FRAGMENTS
    yield commit_event(
      time,
      shard,
      fragment=fragment,
      round=round_id,
      version=round_id // 4 + 1,
      base_round=max(-1, round_id - FRAGMENTS),
      weights={m: 1 / len(here) for m in here},
      rejected=rejected,
      missing=missing,
      reason=reason,
      steps=(6,) * len(here),
      tokens=tokens,
      merged_tokens=merged[fragment],
    )
    sent[shard] += 190_000 * len(here)
    received[shard] += 190_000 * len(here)
    if round_id % 3 == 0 or time > END - 2:
      yield event(time, role, "traffic", sent_bytes=sent[shard], received_bytes=received[shard])
    round_id += 1
    time += 0.62 * rng.uniform(0.85, 1.15)


def make_run(seed=7):
  """About two thousand events, sorted by time; `seed` moves the jitter, not the story."""
  rng = random.Random(seed)

  def alive(m, t):
    return not (m == 2 and KILL <= t < JOINED + 1.5)

  events = [run_started()]
  for shard in range(SHARDS):
    owned = list(range(shard, FRAGMENTS, SHARDS))
    events.append(event(0.4 + 0.1 * shard, f"syncer-{shard}", "started", fragments=owned))
  for m in range(4):
    end = KILL if m == 2 else END
    events += _life(rng, m, 0, 0.8, 2.9 + 0.2 * m, end, 0)
    events.append(event(END, f"learner-{m}", "stopped", int(m == 2), reason="the run is over"))
  events += [
    event(KILL, "engine", "fault", target="learner-2", action="kill", detail="restart after 4 s"),
    event(KILL + 0.05, "engine", "exit", target="learner-2", reason="killed by the fault plan"),
    event(RESTART, "engine", "restart", target="learner-2"),
  ]
  for shard in range(SHARDS):
    events.append(
      event(
        KILL + 2.1, f"syncer-{shard}", "member", learner=2, state="lost", reason="silent for 2.1 s"
      )
    )
  events += _life(rng, 2, 1, RESTART + 0.8, JOINED, END, 230)
  events += _sync(rng, alive)
  for k in range(13):
    time = 3.2 + k * (END - 3.6) / 12
    events.append(
      event(
        time,
        "evaluator",
        "evaluation",
        merged_tokens=int(2_000_000 * (time - 3.2) / 57) if k else 0,
        global_step=9 * k,
        loss=5.545 if k == 0 else 1.55 + 3.6 * math.exp(-(time - 3.2) / 8.5),
      )
    )
  events.append(event(END + 0.3, "engine", "run_finished", reason="all tokens merged"))
  return sorted(events, key=lambda each: each.time)


def write_log(workdir, events):
  """The events as their roles would have written them."""
  (workdir / "events").mkdir(parents=True, exist_ok=True)
  for role in {each.role for each in events}:
    mine = [each for each in events if each.role == role]
    lines = [to_line(each, begins=not i) for i, each in enumerate(mine)]
    (workdir / "events" / f"{role}.jsonl").write_bytes(b"".join(lines))


def fold(events) -> RunState:
  """The state of a run after these events."""
  return RunState().read(events)


def line(time, role="learner-0", **fields) -> bytes:
  """The line of a step."""
  return to_line(event(time, role, "step", **fields), begins=True)


def times(events) -> list[float]:
  return [each.time for each in events]


@pytest.fixture
def log(tmp_path):
  """Appends bytes to a role's log."""
  (tmp_path / "events").mkdir()

  def append(data: bytes, role: str = "learner-0") -> None:
    with (tmp_path / "events" / f"{role}.jsonl").open("ab") as file:
      file.write(data)

  return append


@pytest.fixture(scope="session")
def run_events():
  return make_run()


class FakeClock:
  """Shows what the test sets."""

  def __init__(self, now=100.0):
    self.now = now

  def __call__(self):
    return self.now


@pytest.fixture
def fake_clock():
  return FakeClock()


@pytest.fixture
def make():
  """The builders of events above, for tests (which cannot import a conftest)."""
  return SimpleNamespace(
    event=event,
    changed=changed,
    step=step_event,
    commit=commit_event,
    run_started=run_started,
    run=make_run,
    write_log=write_log,
  )
