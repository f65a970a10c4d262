"""A real syncer shard with fragments of full size: are all pushes merged, is control answered?

A shard runs in a process of its own, with the outer optimizer's momentum, int4 pushes and int4
publishes; this process plays M learners on loopback, message by message. Parts:

- Together: all learners push at the same time, and all pushes must be merged (`together_merged`).
  Meanwhile reports of one that joins must be answered: the longest answer while the shard measured
  and merged is `control_ms_while_merging`. `sync_seconds`: from the first push's arrival to that of
  the last publish.
- After a pause: the shard is stopped for 3 s (SIGSTOP) while pushes arrive; all of them must be
  merged, and no learner called lost (`after_pause_merged`).
- Commit: the shard's own arithmetic on one fragment in this process: merge, outer step, published
  update. In turn with NumPy copies between existing arrays, of as many bytes, on the same threads,
  one for each core: `commit_vs_copy`, a ratio of medians.
  The bytes of a commit are every input and output once: M pushes, value, published value and
  momentum in and out, the update. `arrival_seconds`: the work on one push while the round waits
  anyway; `int4_encode_gbps`, `int4_decode_gbps`: of f32 on one thread.
- Memory of the shard's process, less what it had before its fragments, per parameter: at rest (5 s
  after a round), and the most ever (`bytes_per_parameter`, `peak_bytes_per_parameter`).
- Copies: two shards with small fragments; bytes to the buddy over bytes to one learner, without the
  first round, in which copies are whole (`buddy_bytes_vs_publish`).

  python scripts/bench_shard.py [--values=508000000] [--fragments=1] [--learners=8] [--repeats=5]
                                [--quick]

Full size takes about 13 bytes of memory for each value at rest and 18 while it is merged. The last
line is one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import common
import numpy as np
from common import memory_bytes

from ddiloco.chaos import Faults
from ddiloco.checkpoint.buddy import Copies, Replication
from ddiloco.checkpoint.restore import new_syncer
from ddiloco.checks import require
from ddiloco.config import Config, from_dict
from ddiloco.core import codec, passes
from ddiloco.core.delta import measure, new_fragment
from ddiloco.core.fragments import Fragment, Piece, Plan, owned_by
from ddiloco.engines import virtual
from ddiloco.engines.virtual import seconds_of
from ddiloco.network.endpoint import KEPT_SECONDS, NetworkEndpoint, RunIdentity
from ddiloco.network.transport import learner_address, syncer_address
from ddiloco.protocol.events import Commit, Event, Member
from ddiloco.protocol.messages import INITIAL, Publish, Pull, Push, Report, Welcome
from ddiloco.roles.syncer import Syncer
from ddiloco.runtime import Runtime, ValueThreads

PATIENCE_SECONDS = 300.0
SHORT = 128  # values of the fragments' short vectors
PAUSE_SECONDS = 3.0
REST_SECONDS = KEPT_SECONDS + 2.0  # after a round: pushes and receive buffers are gone
STEP_SECONDS = 60.0  # as reported: the grace window lasts until all have answered


def plan_of(values: int, fragments: int) -> Plan:
  """Fragments of a matrix and a short vector each."""
  pieces = lambda: (
    Piece("matrix", None, 0, 1, (values - SHORT,), 0, average=False),
    Piece("norm", None, 0, 1, (SHORT,), values - SHORT, average=False),
  )
  return Plan(tuple(Fragment(p, pieces()) for p in range(fragments)))


def config_of(learners: int, shards: int, fragments: int) -> Config:
  sync = {"num_shards": shards, "num_fragments": fragments, "sync_period": 2, "overlap_steps": 1}
  codecs = {"push_codec": "int4", "publish_codec": "int4"}
  outer = {"learning_rate": 0.4, "momentum": 0.9}
  return from_dict({"islands": {"num_learners": learners}, "sync": sync | codecs, "outer": outer})


# --- The shard: a process of its own


class Recorder:
  """Sends commits and losses to the bench."""

  def __init__(self, pipe: Any):
    self._pipe, self._lock = pipe, threading.Lock()

  def record(self, event: Event) -> None:
    if isinstance(event, Commit):
      said: Any = ("commit", event.fragment, event.version, len(event.learners))
    elif isinstance(event, Member) and event.state == "lost":
      said = ("lost", event.learner)
    else:
      return
    with self._lock:
      self._pipe.send(said)

  def flush(self) -> None:
    pass


def serve(pipe: Any, shard: int, shards: int, values: int, fragments: int, learners: int) -> None:
  """A shard until it is told to end; sends its url, its commits, and its memory."""
  config, plan = config_of(learners, shards, fragments), plan_of(values, fragments)
  run = identity(plan)
  address = syncer_address(shard)
  endpoint = NetworkEndpoint(address, 1, run, config.network, bind="tcp://127.0.0.1:0")
  owned = owned_by(shard, shards, fragments)
  for p in owned:
    passes.compile_for(plan.fragments[p], config)
  before = memory_bytes()
  first = {p: np.full(values, 0.02, np.float32) for p in owned}
  store = {p: new_fragment(plan.fragments[p], value) for p, value in first.items()}
  del first
  replication = None
  pipe.send(("bound", endpoint.bound, before))
  if shards > 1:
    endpoint.dial(syncer_address(1 - shard), pipe.recv())
    copies = Copies(shard, 1, endpoint, plan, config)
    replication = Replication(copies, PATIENCE_SECONDS, Recorder(pipe))
  state, stop = new_syncer(config, shard, 1, store), threading.Event()
  runtime = Runtime(config, plan, endpoint, Recorder(pipe))
  role = Syncer(state, store, runtime, replication, in_place=True)

  def listen() -> None:
    while pipe.recv() != "end":
      pipe.send(("memory", memory_bytes(), memory_bytes("VmHWM"), endpoint.counters.sent_bytes))
    stop.set()

  threading.Thread(target=listen, daemon=True).start()
  role.run(Faults((), 0.0), stop.is_set)
  role.close()
  endpoint.close()


def identity(plan: Plan) -> RunIdentity:
  return RunIdentity("bench", "plan", 12 * max(plan.sizes), 32 * sum(plan.sizes))


class Shards:
  """The shards' processes, and the messages that they have sent."""

  def __init__(self, shards: int, values: int, fragments: int, learners: int):
    context = multiprocessing.get_context("spawn")
    self.commits: dict[tuple[int, int], int] = {}  # fragment, version -> pushes
    self.lost: list[int] = []
    self.pipes, self.processes, self.urls, self.before = [], [], [], []
    for s in range(shards):
      pipe, theirs = context.Pipe()
      sizes = s, shards, values, fragments, learners
      self.processes.append(context.Process(target=serve, args=(theirs, *sizes), daemon=True))
      self.processes[-1].start()
      self.pipes.append(pipe)
    for pipe in self.pipes:
      _, url, before = self._next(pipe, "bound")
      self.urls.append(url)
      self.before.append(before)
    if shards > 1:
      for s, pipe in enumerate(self.pipes):
        pipe.send(self.urls[1 - s])

  def _next(self, pipe: Any, kind: str) -> tuple:
    while True:
      if not pipe.poll(PATIENCE_SECONDS):
        raise TimeoutError(f"a shard says no {kind!r}")
      said = pipe.recv()
      if said[0] == "commit":
        self.commits[said[1], said[2]] = said[3]
      elif said[0] == "lost":
        self.lost.append(said[1])
      if said[0] == kind:
        return said

  def committed(self, fragment: int, version: int) -> int:
    """How many pushes this version merged; waits for it."""
    while (fragment, version) not in self.commits:
      self._next(self.pipes[fragment % len(self.pipes)], "commit")
    return self.commits[fragment, version]

  def memory(self, shard: int = 0) -> tuple[int, int, int]:
    """A shard's memory now, the most that it had, and the bytes that it has sent."""
    self.pipes[shard].send("memory")
    _, resident, peak, sent = self._next(self.pipes[shard], "memory")
    return resident, peak, sent

  def end(self) -> None:
    for pipe in self.pipes:
      pipe.send("end")
    for process in self.processes:
      process.join(30)
      process.kill()


# --- Learners, played message by message


class Learner:
  """Reports, pushes the same update whenever it is asked, and notes when versions arrive."""

  def __init__(self, number: int, config: Config, plan: Plan, urls: list[str], update: np.ndarray):
    self.number, self._plan, self._update = number, plan, update
    self.endpoint = NetworkEndpoint(learner_address(number), 1, identity(plan), config.network)
    for s, url in enumerate(urls):
      self.endpoint.dial(syncer_address(s), url)
    self.rounds = dict.fromkeys(range(len(plan.fragments)), INITIAL)
    self.versions = dict.fromkeys(range(len(plan.fragments)), 0)
    self.got_at: dict[tuple[int, int], float] = {}
    self.answers: list[float] = []  # seconds until a welcome came
    self.welcomes = 0  # received
    self.pushed_at: list[float] = []
    self._pushed_round = -1
    self.step, self.since = 0, 0
    self.pulls: list[Pull] = []  # which it has not answered yet
    self.hold = threading.Event()  # pushes wait until it is set
    self.hold.set()
    self.asked_at: float | None = None
    self._stop = threading.Event()
    self._shards = len(urls)
    for s in range(self._shards):
      self.hello(s)
    self._thread = threading.Thread(target=self._live, daemon=True)
    self._thread.start()

  def _of(self, shard: int) -> list[int]:
    return list(owned_by(shard, self._shards, len(self._plan.fragments)))

  def hello(self, shard: int = 0) -> None:
    self.asked_at = time.monotonic()
    self._report(shard, joins=True)

  def report(self, since: int) -> None:
    """Reports so many steps since the last sync of every fragment."""
    self.step += max(0, since - self.since)
    self.since = since
    for s in range(self._shards):
      self._report(s)

  def _report(self, shard: int, joins: bool = False) -> None:
    mine = self._of(shard)
    report = Report(
      learner=self.number,
      incarnation=1,
      global_step=self.step,
      step_seconds=STEP_SECONDS,
      versions=tuple(self.versions[p] for p in mine),
      rounds=tuple(self.rounds[p] for p in mine),
      steps_since_sync=tuple(self.since for _ in mine),
      leaving=False,
      snapshot=0,
      joins=joins,
    )
    self.endpoint.send(syncer_address(shard), report)

  def _live(self) -> None:
    while not self._stop.is_set():
      arrived = self.endpoint.receive(0.1)
      match arrived.message if arrived else None:
        case Welcome():
          self.welcomes += 1
          if self.asked_at is not None:
            self.answers.append(time.monotonic() - self.asked_at)
            self.asked_at = None
        case Pull() as pull:
          self.pulls.append(pull)
        case Publish() as publish:
          p = publish.fragment
          self.versions[p], self.rounds[p] = publish.version, publish.round
          self.got_at[p, publish.version] = time.monotonic()
          self.since = 0  # what asks for a welcome reports it: nothing is due
      while self.pulls and self.hold.is_set():
        self._push(self.pulls.pop(0))

  def _push(self, pull: Pull) -> None:
    to = syncer_address(pull.shard)
    if pull.round == self._pushed_round and self.endpoint.unsent(to):
      return  # as a learner does: this push is on its way already
    self._pushed_round = pull.round
    push = Push(
      learner=self.number,
      incarnation=1,
      fragment=pull.fragment,
      round=pull.round,
      base_version=pull.base_version,
      steps=2,
      tokens=2 * 1024,
      snapshot=0,
      count=self.step,
      codec="int4",
      payload=self._update,
    )
    self.pushed_at.append(time.monotonic())
    self.endpoint.send(to, push)

  def close(self) -> None:
    self._stop.set()
    self._thread.join(10)
    self.endpoint.close()


class Bench:
  """One shard and its learners, round after round of all fragments."""

  def __init__(self, shards: int, values: int, fragments: int, learners: int):
    config, plan = config_of(learners, shards, fragments), plan_of(values, fragments)
    self.shards = Shards(shards, values, fragments, learners)
    update = virtual.random_push(values, "int4").payload
    self.learners = [Learner(m, config, plan, self.shards.urls, update) for m in range(learners)]
    self.fragments, self.version = fragments, 0
    self._wait(lambda: all(each.welcomes >= shards for each in self.learners), "a welcome")

  def begin(self) -> None:
    """Lets all learners report steps, so that a round of each fragment is due."""
    shards = len(self.shards.urls)
    wanted = [each.welcomes + shards for each in self.learners]
    for learner in self.learners:  # all can be asked before the first is due
      learner.report(1)
      for s in range(shards):
        learner.hello(s)  # its answer shows that the shard has taken the report
    self._wait(lambda: all(e.welcomes >= n for e, n in zip(self.learners, wanted)), "a welcome")
    for learner in self.learners:
      learner.report(2)

  def _wait(self, done: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not done():
      if time.monotonic() > until:
        raise TimeoutError(f"{what} did not reach all learners")
      time.sleep(0.01)

  def round(self, ask_seconds: float = 0.0) -> tuple[float, list[int]]:
    """(seconds from the first push to the last publish, pushes merged in each fragment).

    With `ask_seconds` learner 0 asks for a welcome that often meanwhile, and notes the answers.
    """
    self.version += 1
    over, asker = threading.Event(), self.learners[0]
    for learner in self.learners:
      learner.pushed_at.clear()

    def ask() -> None:
      while not over.wait(ask_seconds):
        if asker.pushed_at and asker.asked_at is None:
          asker.hello()

    if ask_seconds:
      threading.Thread(target=ask, daemon=True).start()
    self.begin()
    merged = [self.shards.committed(p, self.version) for p in range(self.fragments)]
    seconds = self._delivered() - min(min(each.pushed_at) for each in self.learners)
    over.set()
    for learner in self.learners:
      learner.report(0)
    return seconds, merged

  def _delivered(self) -> float:
    wanted = [(p, self.version) for p in range(self.fragments)]
    arrived = lambda: all(key in e.got_at for e in self.learners for key in wanted)
    self._wait(arrived, f"version {self.version}")
    return max(each.got_at[key] for each in self.learners for key in wanted)

  def end(self) -> None:
    for learner in self.learners:
      learner.close()
    self.shards.end()


# --- The parts


def bench_rounds(values: int, fragments: int, learners: int) -> dict[str, Any]:
  """The parts "together", "after a pause" and "memory"."""
  bench = Bench(1, values, fragments, learners)
  try:
    bench.round()  # the first touches all memory
    asker = bench.learners[0]
    asker.answers.clear()
    seconds, together = bench.round(ask_seconds=0.005)
    control = sorted(asker.answers)
    time.sleep(REST_SECONDS)
    resident, peak, _ = bench.shards.memory()
    print(f"together: {together} of {learners} merged in {seconds:.2f} s", flush=True)
    paused = pause(bench)
    print(f"after a pause of {PAUSE_SECONDS:g} s: {paused} merged", flush=True)
    parameters = values * fragments
    return {
      "together_merged": min(together) / learners,
      "after_pause_merged": min(paused) / learners,
      "called_lost": len(bench.shards.lost),
      "control_ms_while_merging": round(1e3 * control[-1], 1),
      "control_ms_99_percent": round(1e3 * control[len(control) * 99 // 100], 1),
      "control_ms_median": round(1e3 * control[len(control) // 2], 2),
      "sync_seconds": round(seconds, 3),
      "bytes_per_parameter": round((resident - bench.shards.before[0]) / parameters, 2),
      "peak_bytes_per_parameter": round((peak - bench.shards.before[0]) / parameters, 2),
    }
  finally:
    bench.end()


def pause(bench: Bench) -> list[int]:
  """The part "after a pause": pushes arrive at a shard that is stopped."""
  shard = bench.shards.processes[0].pid
  assert shard is not None, "it has been started"
  for learner in bench.learners:
    learner.hold.clear()
  bench.version += 1
  bench.begin()
  bench._wait(lambda: all(len(e.pulls) >= bench.fragments for e in bench.learners), "a pull")
  os.kill(shard, signal.SIGSTOP)
  for learner in bench.learners:
    learner.hold.set()
  time.sleep(PAUSE_SECONDS)
  os.kill(shard, signal.SIGCONT)
  merged = [bench.shards.committed(p, bench.version) for p in range(bench.fragments)]
  bench._delivered()
  return merged


def bench_commit(fragment: Fragment, learners: int, repeats: int) -> dict[str, float]:
  """The part "commit": seconds of an arrival and of a commit, and both beside a copy."""
  size, count = fragment.size, len(os.sched_getaffinity(0))
  push = virtual.random_push(size, "int4")
  moved = (learners + 1) * push.payload.nbytes + 6 * 4 * size
  part = np.ones(min(size, moved // 8 // count), np.float32)
  copies = max(1, round(moved / 8 / count / part.size))
  targets = [np.ones_like(part) for _ in range(count)]

  def copy_to(target: np.ndarray) -> None:
    for _ in range(copies):
      np.copyto(target, part)

  with ValueThreads(count) as threads:
    commit = virtual.commits(fragment, config_of(learners, 1, 1), learners, threads.share)
    copy = lambda: threads.share(copy_to, targets)
    arrive = lambda: measure(fragment, push, threads.share)
    arrival = statistics.median(seconds_of(arrive) for _ in range(repeats))
    commit()
    copy()
    pairs = [(seconds_of(copy), seconds_of(commit)) for _ in range(repeats)]
    tracemalloc.start()
    commit()
    extra_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
  copied, committed = (statistics.median(column) for column in zip(*pairs))
  copied_bytes = 8 * part.size * copies * count
  return {
    "arrival_seconds": arrival,
    "commit_seconds": committed,
    "commit_gbps": moved / committed / 1e9,
    "copy_gbps": copied_bytes / copied / 1e9,
    "commit_vs_copy": moved / committed * copied / copied_bytes,
    "extra_fragments": extra_bytes / 4 / size,
    "threads": count,
  }


def bench_codec(size: int, repeats: int) -> dict[str, float]:
  """Median GB/s of f32 that int4 encodes and decodes on one thread."""
  delta = np.random.default_rng(0).standard_normal(size, np.float32)
  payload = codec.encode(delta, "int4")
  work: dict[str, Callable[[], Any]] = {
    "encode": lambda: codec.encode(delta, "int4"),
    "decode": lambda: codec.decode(payload, size, "int4"),
  }
  return {
    f"int4_{name}_gbps": delta.nbytes
    / 1e9
    / statistics.median(seconds_of(do) for _ in range(repeats))
    for name, do in work.items()
  }


def bench_copies(values: int, learners: int) -> dict[str, Any]:
  """Bytes to a buddy over bytes of one learner's publishes."""
  bench = Bench(2, values, 2, learners)

  def moved() -> np.ndarray:
    """Bytes to buddies, and to a learner on average: all that shards send are these."""
    sent = sum(bench.shards.memory(s)[2] for s in (0, 1))
    received = sum(each.endpoint.counters.received_bytes for each in bench.learners)
    return np.array([sent - received, received / learners])

  try:
    bench.round()
    first = moved()
    for _ in range(3):
      bench.round()
    copies, publishes = moved() - first
  finally:
    bench.end()
  return {"buddy_bytes_vs_publish": round(copies / publishes, 3)}


def main() -> None:
  quick = {"values": 1_000_000}
  args = common.options(
    __doc__, quick, values=508_000_000, fragments=1, learners=8, repeats=(5, "of the commit")
  )
  values = args.values
  fix = "give a million or more"
  require(values > SHORT, "--values", values, f"a fragment has a vector of {SHORT}", fix)
  result = bench_rounds(values, args.fragments, args.learners)
  found = bench_commit(plan_of(values, 1).fragments[0], args.learners, args.repeats)
  found |= bench_codec(min(values, 32 << 20), args.repeats)
  result |= {name: round(value, 4) for name, value in found.items()}
  result |= bench_copies(min(values, 8_000_000), args.learners)
  result |= {"values": values, "fragments": args.fragments, "learners": args.learners}
  print(json.dumps(result))


if __name__ == "__main__":
  common.run_script(main)
