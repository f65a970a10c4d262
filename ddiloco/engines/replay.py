"""Replay: a run's tape performed again, a thread for each role, and compared bit by bit.

What a run did follows from its tape alone: which batch each step took, which steps each push held,
which pushes each commit merged, and when each version was applied. How fast anybody was, who waited
and what was sent twice leaves no trace in any value. So a replay needs no clock and no network: a
role waits only for what it needs and another has to make first.
"""

from __future__ import annotations

import collections
import functools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ddiloco.config import Config
from ddiloco.core.fragments import gather
from ddiloco.core.invariants import check
from ddiloco.core.tape import INITIAL, Key, Started, Tape, Value, needs
from ddiloco.engines.findings import Findings
from ddiloco.engines.players import Home, LearnerPlayer, ShardPlayer, Watcher
from ddiloco.runtime import initial
from ddiloco.runtime.store import new_fragment

POLL_SECONDS = 0.2


class Stopped(Exception):
  """Another role's thread has failed."""


class Board:
  """What was made and is still needed by somebody; whoever needs more waits.

  What is taken for the last time is forgotten, so a replay needs hardly more memory than its run.
  """

  def __init__(self, tape: Tape):
    self._uses = collections.Counter(key for entry in tape.entries() for key in needs(entry))
    self._made: dict[Key, Any] = {}
    self._changed = threading.Condition()
    self.failure: BaseException | None = None

  def wanted(self, key: Key) -> bool:
    """Whether anybody will still take it."""
    return self._uses[key] > 0

  def put(self, made: Mapping[Any, Any]) -> None:
    """These exist now."""
    with self._changed:
      self._made |= {key: value for key, value in made.items() if self.wanted(key)}
      self._changed.notify_all()

  def take(self, keys: tuple[Key, ...]) -> dict[Key, Any]:
    """All of these, as soon as they exist.

    Raises:
      Stopped: a role has failed, and what is needed may never come.
    """
    with self._changed:
      self._changed.wait_for(lambda: self.failure or all(key in self._made for key in keys))
      if self.failure is not None:
        raise Stopped
      given = {key: self._made[key] for key in keys}
      for key in keys:
        self._uses[key] -= 1
        if not self._uses[key]:
          del self._made[key]
      return given

  def fail(self, failure: BaseException) -> None:
    """Ends every wait."""
    with self._changed:
      self.failure = self.failure or failure
      self._changed.notify_all()


class Replay:
  """A tape performed on islands of this process.

  Args:
    config: the run's.
    tape: its tape.
    homes: the island and the data of (a learner, what it said when it started), called in the
      learner's thread.

  Raises:
    ValueError: the tape has problems; the text is the first. Without any nobody waits in vain.
  """

  def __init__(self, config: Config, tape: Tape, homes: Callable[[int, Started], Home]):
    checked = check(tape)
    if checked.problems:
      raise ValueError(f"the tape does not fit together: {checked.problems[0]}")
    self.counts, self.findings = checked.counts, Findings(tape)
    self._tape, self._board = tape, Board(tape)
    self._plan, first = initial.make_plan(config), initial.initial_params(config)
    for p, fragment in enumerate(self._plan.fragments):
      self._board.put({Value(p, INITIAL): new_fragment(fragment, gather(fragment, first))})
    alone = None if config.sync.num_shards else first
    self._players: dict[str, LearnerPlayer | ShardPlayer | Watcher] = {}
    for role, lives in tape.roles.items():
      if role.startswith("learner"):
        home = functools.partial(homes, lives[0].number)
        player = LearnerPlayer(config, home, self.findings, self._board.wanted, alone)
      elif role.startswith("syncer"):
        player = ShardPlayer(config, self._plan, self.findings)
      else:
        player = Watcher()
      self._players[role] = player
    self._done: dict[str, int] = dict.fromkeys(self._players, 0)

  def run(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
    """Performs all of it; `progress` is told now and then how many operations are done, of all.

    Raises:
      Exception: what failed in a role's thread.
    """
    of = len(self._tape.entries())
    threads = [
      threading.Thread(target=self._guarded, args=(role,), name=f"replay-{role}", daemon=True)
      for role in self._players
    ]
    try:
      for thread in threads:
        thread.start()
      for thread in threads:
        while thread.is_alive():
          thread.join(POLL_SECONDS)
          progress(sum(self._done.values()), of)
    except BaseException as error:  # Ctrl-C: nobody waits any more
      self._board.fail(error)
      raise
    if self._board.failure is not None:
      raise self._board.failure

  def _guarded(self, role: str) -> None:
    try:
      player = self._players[role]
      for life in self._tape.roles[role]:
        player.begin(life)
        for entry in life.entries:
          self._board.put(player.perform(entry, self._board.take(needs(entry))))
          self._done[role] += 1
    except Stopped:
      return
    except BaseException as error:  # raised by `run`
      self._board.fail(error)

  def compare_result(self, result: Mapping[str, np.ndarray]) -> None:
    """Compares the global model that the run left, fragment by fragment.

    It is what the shards had at the end, or what the evaluator had received by then: values with a
    lossy publish codec's rounding. Without shards it is the model of one of the islands.
    """
    shards = [p for p in self._players.values() if isinstance(p, ShardPlayer)]
    if not shards:
      models = [p.island.params_on_host() for p in self._players.values() if p.island]
      same = any(all(_same(mine[name], result[name]) for name in result) for mine in models)
      self.findings.count("values", math.inf, [] if same else ["the result is no island's"], 1)
      return
    differences = []
    watched = [p.views for p in self._players.values() if isinstance(p, Watcher)]
    for p, fragment in enumerate(self._plan.fragments):
      newest = max(
        (shard.newest[p] for shard in shards if p in shard.newest),
        key=lambda committed: committed.state.last_round,
      )
      seen = [views[p] for views in watched if p in views]
      if not any(_same(gather(fragment, result), v) for v in (newest.value, newest.view, *seen)):
        differences.append(f"fragment {p} of the result is another than the replay's")
    self.findings.count("values", math.inf, differences, len(self._plan.fragments))


def _same(a: np.ndarray, b: np.ndarray) -> bool:
  """Bit by bit, so that NaN equals itself and -0 does not equal 0."""
  return a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()
