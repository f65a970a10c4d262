"""Messages in short, for tests: what a test does not care about has a value that fits.

A version is taken to be the work of the round before it (0 made version 1), which holds where one
fragment commits alone and its shard has never been restarted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddiloco.protocol import events, messages, syncer
from ddiloco.protocol.actions import Read, ReadDone, Received, Send, SyncerAction, Tick
from ddiloco.protocol.states import SyncerState
from ddiloco.protocol.values import Frozen, replace


def take_in(state: SyncerState, event) -> tuple[SyncerState, list[SyncerAction]]:
  """One event at a shard; the message of a `ReadDone` arrives first.

  Whatever it sends must be a message that its receiver can read.
  """
  state, actions = _take_in(state, event)
  for message in [a.message for a in sends(actions)]:
    header, _ = messages.encode(message)
    messages.decode(header, b"" if isinstance(message, messages.BULK) else None)
  return state, actions


def _take_in(state: SyncerState, event) -> tuple[SyncerState, list[SyncerAction]]:
  if isinstance(event, ReadDone):
    state, actions = syncer.syncer_on(state, Received(event.message, event.now))
    if not any(isinstance(action, Read) for action in actions):
      return state, actions
    state, more = syncer.syncer_on(state, event)
    return state, [*(a for a in actions if not isinstance(a, Read)), *more]
  return syncer.syncer_on(state, event)


def sends(actions: Iterable, kind: type = object) -> list[Send]:
  """Those actions that send a message of this kind."""
  return [a for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def shard_on(state: SyncerState, event) -> tuple[SyncerState, list[SyncerAction]]:
  """A shard that takes in one message and then decides, as it does when no more has arrived."""
  state, actions = take_in(state, event)
  if not isinstance(event, Received | ReadDone):
    return state, actions
  state, decided = syncer.syncer_on(state, Tick(event.now))
  return state, [*actions, *decided]


def event_of(message: messages.Message, now: float, **found) -> Received | ReadDone:
  """What happens to a role with a message; of a push or a value, that it was read."""
  is_read = isinstance(message, messages.Push | messages.Value)
  return ReadDone(message, now, **found) if is_read else Received(message, now, **found)


def applied(fragment: int, version: int, made_by: int, mode: str, included: bool) -> events.Apply:
  return events.Apply(
    fragment=fragment, version=version, round=made_by, mode=mode, included=included
  )


def hello(
  learner: int, incarnation: int, rounds: tuple[int, ...] = (messages.NOTHING,) * 2
) -> messages.Report:
  """The first report of a life, which has nothing yet unless `rounds` says so."""
  versions = tuple(max(-1, r + 1) for r in rounds)
  steps = tuple(0 for _ in rounds)
  return report(learner, incarnation, 0, 0.0, versions, steps, rounds=rounds, joins=True)


def request(learner: int, incarnation: int) -> messages.RequestMoments:
  """A message that is no report: of a learner's reports only the newest waits for a shard."""
  return messages.RequestMoments(learner, incarnation, ())


def report(
  learner: int,
  incarnation: int,
  global_step: int,
  step_seconds: float,
  versions: tuple[int, ...],
  steps_since_sync: tuple[int, ...],
  leaving: bool = False,
  **more,
) -> messages.Report:
  rounds = more.pop("rounds", tuple(v - 1 for v in versions))
  snapshot = more.pop("snapshot", 0)
  who = (learner, incarnation, global_step, step_seconds)
  return messages.Report(*who, versions, rounds, steps_since_sync, leaving, snapshot, **more)


def push(
  learner: int,
  incarnation: int,
  fragment: int,
  round: int,
  base_version: int,
  steps: int,
  tokens: int,
  codec: str,
  payload=None,
) -> messages.Push:
  who = (learner, incarnation, fragment, round, base_version, steps, tokens)
  return messages.Push(*who, snapshot=0, count=0, codec=codec, payload=payload)


def welcome(
  shard: int,
  incarnation: int,
  learner_incarnation: int,
  global_step: int,
  fragments: tuple[int, ...],
) -> messages.Welcome:
  rounds = tuple(messages.INITIAL for _ in fragments)
  return messages.Welcome(
    shard, incarnation, learner_incarnation, global_step, fragments, rounds, 0
  )


def pull(
  shard: int,
  incarnation: int,
  learner_incarnation: int,
  fragment: int,
  round: int,
  base_version: int,
) -> messages.Pull:
  who = (shard, incarnation, learner_incarnation, fragment, round, base_version)
  return messages.Pull(*who, snapshot=0)


def publish(
  shard: int,
  incarnation: int,
  learner_incarnation: int,
  fragment: int,
  round: int,
  version: int,
  base_version: int,
  global_step: int,
  merged_tokens: int,
  merged_rounds: tuple[int, ...],
  codec: str,
  payload=None,
) -> messages.Publish:
  base_round = messages.NOTHING if base_version < 0 else base_version - 1
  which = (shard, incarnation, learner_incarnation, fragment, round, version)
  return messages.Publish(
    *which, base_round, global_step, merged_tokens, by_learner(*merged_rounds),
    snapshot=0, count=0, seal="", codec=codec, payload=payload,
  )  # fmt: skip


def value(
  learner: int,
  incarnation: int,
  fragment: int,
  version: int,
  round: int,
  merged_tokens: int,
  merged_rounds: Mapping[int, int],
  seal: str = "",
  payload: Any = None,
) -> messages.Value:
  """A value that a learner gives back."""
  header = messages.Publish(
    0, 0, learner, fragment, round, version, messages.NOTHING, 0, merged_tokens, merged_rounds,
    snapshot=0, count=0, seal=seal, codec="f32",
  )  # fmt: skip
  return messages.Value(learner, incarnation, header, 0, 0, payload)


def by_learner(*numbers: int) -> dict[int, int]:
  """Of learner, number, learner, number, ..."""
  return dict(zip(numbers[::2], numbers[1::2], strict=True))


def plain(thing):
  """A message or an action without its snapshot number and count, for comparisons."""
  if not isinstance(thing, Frozen):
    return thing
  names = {*thing.__struct_fields__}
  changes = {"snapshot": 0} if "snapshot" in names else {}
  if isinstance(thing, messages.Push | messages.Publish | messages.Value):
    changes["count"] = 0
  for name in names & {"message", "push", "publish"}:
    changes[name] = plain(getattr(thing, name))
  return replace(thing, **changes)
