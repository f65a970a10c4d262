"""The runtime of a role: a clock, workers for long work, and a driver of its loop.

A role's loop is a generator that says what it waits for, and never blocks itself. It yields

- a time, in seconds on its clock (`math.inf`: forever): wait for a message until then. The driver
  resumes the loop with the `Delivery`, or with None when the time has come, when the endpoint was
  woken, or when the loop should check its stop signals.
- None: let the time of the work so far pass. The loop yields None after all work that may have
  taken time, before any other role hears of the result. In real time that time has passed already;
  in virtual time (`simulation/world.py`) it was charged to the clock, and passes now.

So the same loops run on threads and in virtual time. A job of a worker is a generator of the same
kind, but it gets no messages.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ddiloco.config import Config, SyncConfig
from ddiloco.core.delta import Deltas, Merger, Store
from ddiloco.core.fragments import Fragment, Plan
from ddiloco.core.passes import COMPILED_FROM
from ddiloco.network.transport import Endpoint
from ddiloco.observe.eventlog import Records
from ddiloco.observe.guards import ended
from ddiloco.protocol import events

T = TypeVar("T")
Loop = Generator[float | None, Any, T]
Job = Iterable[float | None]


class ThreadWorker:
  """Does jobs in the background, one after the other, on a thread of its own.

  Args:
    name: of the thread.
    begin: called first, on the thread.
    failed: called when a job has failed.

  Attributes:
    failure: the exception of a job; after a failure no further job is done.
    ending: whether the worker was told to end: a job should wait for other roles only for what they
      have begun, and is dropped when the worker's time is up.
  """

  def __init__(
    self,
    name: str,
    begin: Callable[[], None] = lambda: None,
    failed: Callable[[], None] = lambda: None,
  ):
    self.failure: Exception | None = None
    self.ending = False
    self._begin, self._failed = begin, failed
    self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    self._closing = threading.Event()
    self._thread = threading.Thread(target=self._work, name=name, daemon=True)
    self._thread.start()

  def put(self, job: Job) -> None:
    """Adds a job after all others."""
    self._jobs.put(job)

  def close(self, patience_seconds: float, most_seconds: float) -> None:
    """Ends the worker: all jobs get `patience_seconds`, the job then under way `most_seconds`; 0:
    it goes on alone."""
    self.ending = True
    self._jobs.put(None)
    self._thread.join(patience_seconds)
    self._closing.set()
    if most_seconds:
      ended(self._thread, most_seconds)

  def _work(self) -> None:
    try:
      self._begin()
      while (job := self._jobs.get()) is not None and not self._closing.is_set():
        for until in job:
          if until is not None and self._closing.wait(until - time.monotonic()):
            break  # there is no more time to wait for others
    except Exception as error:  # the role's loop raises it again
      self.failure = error
      self._failed()
    while not self._jobs.empty():  # a dropped job may hold a copy of a whole state
      self._jobs.get()


class Time:
  """The machine's clock, sleep and background workers.

  In virtual time the roles have another object with these methods (`simulation/world.py`).
  """

  worker = ThreadWorker

  def now(self) -> float:
    """Seconds on the role's clock, which is also that of its messages' arrivals."""
    return time.monotonic()

  def sleep(self, seconds: float) -> None:
    """Lets so much time pass; in virtual time it passes when the loop next yields None."""
    time.sleep(seconds)


REAL_TIME = Time()


@dataclasses.dataclass(frozen=True)
class Runtime:
  """What a role runs with; objects that compute on vectors have stand-ins in virtual time."""

  config: Config  # the run's
  plan: Plan  # how the model is partitioned; the same on every role
  endpoint: Endpoint  # its connection
  recorder: Records  # event log
  saver: Any = None  # `checkpoint.saver.Saver`: writes its parts of snapshots; None: no snapshots
  time: Time = REAL_TIME
  deltas: Callable[[SyncConfig], Deltas] = Deltas  # a learner's
  merger: Callable[[Mapping[int, Fragment], Store, Config, bool], Merger] = Merger  # a shard's
  # Makes initial values, by fragment, on a learner's machine. On a `ConfigError`, or for a fragment
  # that is missing in the result, the shard must send the value.
  initial: Callable[[], Mapping[int, Any]] = dict


class ValueThreads(concurrent.futures.ThreadPoolExecutor):
  """Threads that share work among themselves; `share` is a `passes.Share`.

  Each thread takes the next item when it is done with one. `map` of the base class would wake the
  caller for every result, and so take the GIL and a core from the threads at work.
  """

  def __init__(self, count: int):
    super().__init__(max(1, count), "values")
    self.count = count

  def share(self, work: Callable[[Any], Any], each: Iterable[Any]) -> list[Any]:
    """The results of `work` in the order of `each`; raises its error when all threads are done."""
    if self.count < 2:
      return list(map(work, each))
    todo, numbers = list(each), itertools.count()
    results = [None] * len(todo)

    def take() -> None:
      while (number := next(numbers)) < len(todo):
        results[number] = work(todo[number])

    taking = [self.submit(take) for _ in range(min(self.count, len(todo)))]
    for done in concurrent.futures.wait(taking).done:
      done.result(timeout=0)
    return results


CLOSE_SECONDS = 30.0  # for a role's worker to finish its present job
TRAFFIC_SECONDS = 1.0  # between two lines of the log about a role's traffic


class WorkingRole:
  """The base of roles whose loop has a worker in the background, called `name`.

  Jobs on the values of a fragment, up to `size` of them, may use `sync.value_threads` threads, the
  caller's own included; 0: `share` of the cores that this process may use.
  """

  def __init__(self, runtime: Runtime, name: str, size: int, share: float = 1.0):
    self.config, self.endpoint = runtime.config, runtime.endpoint
    self.recorder, self.time = runtime.recorder, runtime.time
    self._saver = runtime.saver
    self._worker = self.time.worker(name, failed=self.endpoint.wake)
    count = self.config.sync.value_threads or int(share * len(os.sched_getaffinity(0)))
    # Work on small fragments would be done before threads have begun.
    self._threads = ValueThreads(count if size >= COMPILED_FROM else 1)
    self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._traffic_at = -math.inf

  def _tell(self, news: Any) -> None:
    """Wakes the loop with news of a job."""
    self._news.put(news)
    self.endpoint.wake()

  def _told(self) -> Any:
    """The next news of a job, None if there is none; raises the error of a job that has failed."""
    if failure := self._worker.failure:
      raise RuntimeError(f"the background thread failed: {failure!r}") from failure
    return None if self._news.empty() else self._news.get_nowait()

  def _count_traffic(self, always: bool = False) -> None:
    now = self.time.now()
    if always or now - self._traffic_at >= TRAFFIC_SECONDS:
      self._traffic_at = now
      self.recorder.record(events.Traffic(**vars(self.endpoint.counters)))

  def close(self) -> None:
    """Ends the worker; the jobs left are dropped."""
    self._worker.close(0.0, CLOSE_SECONDS)
    self._threads.shutdown(wait=False)


_roles, _roles_lock = 0, threading.Lock()  # number of roles that live in this process


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
  """While a role lives, Python's garbage collector skips all objects from before its start.

  A collection holds the GIL while it goes over all objects, a tenth of a second with JAX and its
  programs loaded. During that time no step can be dispatched and no message answered.
  """
  global _roles
  with _roles_lock:
    _roles += 1
    if _roles == 1:
      gc.collect()
      gc.freeze()
  try:
    yield
  finally:
    with _roles_lock:
      _roles -= 1
      if not _roles:
        gc.unfreeze()


@short_collections()
def drive(loop: Loop[T], endpoint: Endpoint, look_seconds: float) -> T:
  """Runs a role's loop on this thread and the machine's clock; returns the loop's result.

  A waiting loop is resumed at least every `look_seconds`, since stop signals wake no loop.
  """
  news = None
  try:
    while True:
      until, news = loop.send(news), None
      if until is not None:
        news = endpoint.receive(max(0.0, min(until - time.monotonic(), look_seconds)))
  except StopIteration as end:
    return end.value
  finally:
    loop.close()
