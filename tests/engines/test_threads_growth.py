"""A process in which roles die again and again keeps nothing of their former lives."""

from __future__ import annotations

import collections
import gc
import os
import threading

from ddiloco.training import data
from tests.engines.test_threads import Ran, fault, make_config

KILLS, STEPS_APART = 24, 12
OF_A_LIFE = ("Learner", "Syncer", "Recorder", "Saver", "ThreadWorker", "QueueEndpoint")


def test_former_lives_leave_no_object_no_descriptor_and_no_thread(tmp_path):
  faults = [
    fault("kill", "learner-1" if n % 4 else "syncer-0", 30 + STEPS_APART * n, seconds=0.02)
    for n in range(KILLS)
  ]
  config = make_config(steps=10**6, chaos={"faults": faults}, sync={"snapshot_steps": 40})
  found, commits, restarts = list[collections.Counter[str]](), 0, 0

  def ended() -> bool:
    """Whether nothing of a former life is left; its threads may take a while to end."""
    return found[-1].total() <= max(each.total() for each in found[:3])

  def look(event) -> bool:
    """Whether all have been killed, and their former lives have ended."""
    nonlocal commits, restarts
    commits += event.kind == "commit"
    restarts += event.kind == "restart"
    if event.kind == "commit" and commits % 10 == 0:
      gc.collect()
      names = (type(each).__name__ for each in gc.get_objects())
      found.append(collections.Counter(name for name in names if name in OF_A_LIFE))
      return restarts == KILLS and (ended() or event.time > 200)
    return False

  corpus = data.open_corpus(config.data)
  gc.collect()  # other tests' objects
  threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
  ran = Ran(config, corpus, tmp_path, stop_after=look)
  assert len(ran.of("restart")) == KILLS and len(found) > 3 and ended(), found[-1]
  for left in set(threading.enumerate()) - threads:
    left.join(60.0)  # what a killed life was saving is written to its end
  assert set(threading.enumerate()) <= threads
  assert len(os.listdir("/proc/self/fd")) <= descriptors
