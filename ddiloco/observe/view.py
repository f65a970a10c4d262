"""The state of a run as its events tell it: `fold(view, event) -> view`, time is in them. PURE.

The live terminal view draws it, and the report cuts its timeline from it, so both tell one story.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from ddiloco.observe.events import Event, parse_role

RECENT_COMMITS = 32  # over which the shown participation counts
RECENT_NOTES = 8
STALL_STEPS = 10.0  # silent for so many of its own steps, and at least STALL_SECONDS: stalled
STALL_SECONDS = 2.0
FIRST_STEP_SECONDS = 60.0  # the first step compiles
DOWN = ("lost", "restarting")


@dataclasses.dataclass(frozen=True)
class IslandView:
  """One learner. `tokens` counts all its incarnations, `step` and `clock` the present one."""

  state: str = "starting"  # joining, running, stalled, lost, left, quarantined, restarting
  incarnation: int = 0
  lives: int = 0  # incarnations seen to start
  step: int = 0
  clock: int = 0
  loss: float = math.nan
  tokens: int = 0
  tokens_per_second: float = math.nan
  step_seconds: float = math.nan
  step_time: float = math.nan  # when its last step ended
  took_part: tuple[bool, ...] = ()  # in the last commits, oldest first
  missed_time: float = math.nan
  missed_reason: str = ""  # why it was not in the last commit it missed
  returning: bool = False  # was down and has not been merged since

  @property
  def participation(self) -> float:
    """Share of the recent commits it took part in; NaN before the first."""
    return sum(self.took_part) / len(self.took_part) if self.took_part else math.nan

  def state_at(self, time: float) -> str:
    """`state`, or "stalled" if it should be running and has been silent for too long."""
    patience = max(STALL_SECONDS, STALL_STEPS * _or(self.step_seconds, 0.0))
    if not self.step:
      patience = FIRST_STEP_SECONDS
    silent = time - _or(self.step_time, time) > patience
    return "stalled" if self.state == "running" and silent else self.state


@dataclasses.dataclass(frozen=True)
class ShardView:
  """One syncer shard."""

  state: str = "starting"  # running, lost, restarting
  incarnation: int = 0
  fragments: tuple[int, ...] = ()
  commits: int = 0
  rejected: int = 0
  last_reason: str = ""  # why the last round was committed when it was


@dataclasses.dataclass(frozen=True)
class Note:
  """Something worth a line: tone is "bad", "good" or "plain"."""

  time: float
  text: str
  tone: str


@dataclasses.dataclass(frozen=True)
class RunView:
  """The whole run. Fold events into `RunView()`, in order of time."""

  name: str = ""
  time: float = 0.0  # of the newest event
  num_fragments: int = 0
  num_shards: int = 0
  total_tokens: int = 0
  islands: Mapping[int, IslandView] = dataclasses.field(default_factory=dict)
  shards: Mapping[int, ShardView] = dataclasses.field(default_factory=dict)
  merged_tokens: Mapping[int, int] = dataclasses.field(default_factory=dict)  # by fragment
  heldout_loss: float = math.nan
  notes: tuple[Note, ...] = ()
  num_notes: int = 0  # ever
  first_step_time: float = math.nan
  finished: str = ""  # why the run ended

  @property
  def tokens_done(self) -> float:
    """Merged tokens, the mean over fragments; where nobody syncs, the tokens trained."""
    if not self.num_shards:
      return float(sum(island.tokens for island in self.islands.values()))
    return sum(self.merged_tokens.values()) / max(1, self.num_fragments, len(self.merged_tokens))

  @property
  def progress(self) -> float:
    """Share of the run that is done, 0 to 1."""
    return min(1.0, self.tokens_done / self.total_tokens) if self.total_tokens else 0.0

  def seconds_left(self, time: float) -> float:
    """At the pace since the first step; NaN while that says nothing yet."""
    done = self.progress
    elapsed = time - self.first_step_time
    return elapsed * (1 - done) / done if done > 0.01 and elapsed > 0 else math.nan


def fold(view: RunView, event: Event) -> RunView:
  """The view after an event. Kinds it does not know only move the time."""
  view = _replace(view, time=max(view.time, event["time"]))
  handler = _HANDLERS.get(event["kind"])
  return view if handler is None else handler(view, event, *parse_role(event["role"]))


def _replace(view: Any, **changes: Any) -> Any:
  """`dataclasses.replace` at a tenth of its cost: none of these has an __init__ with rules."""
  new = object.__new__(type(view))
  new.__dict__.update(view.__dict__, **changes)
  return new


def _or(value: float, otherwise: float) -> float:
  return value if math.isfinite(value) else otherwise


def _island(view: RunView, learner: int, **changes: Any) -> RunView:
  old = view.islands.get(learner, IslandView())
  return _replace(view, islands={**view.islands, learner: _replace(old, **changes)})


def _shard(view: RunView, shard: int, **changes: Any) -> RunView:
  old = view.shards.get(shard, ShardView())
  return _replace(view, shards={**view.shards, shard: _replace(old, **changes)})


def _note(view: RunView, event: Event, text: str, tone: str) -> RunView:
  if any(note.text == text and event["time"] - note.time < 5.0 for note in view.notes):
    return view  # every shard tells of the same member
  notes = (*view.notes, Note(event["time"], text, tone))[-RECENT_NOTES:]
  return _replace(view, notes=notes, num_notes=view.num_notes + 1)


def role_name(role: str) -> str:
  """ "learner-2" or "learner/2" as people say it: "island 2"; "syncer-0": "shard 0"."""
  kind, number = parse_role(role)
  name = {"learner": "island", "syncer": "shard"}.get(kind, kind)
  return f"{name} {number}" if number >= 0 else name


def _target(view: RunView, target: str, down: bool, **changes: Any) -> RunView:
  kind, number = parse_role(target)
  if kind == "learner" and number >= 0:
    return _island(view, number, **changes, **({"returning": True} if down else {}))
  return _shard(view, number, **changes) if kind == "syncer" and number >= 0 else view


def _run_started(view: RunView, event: Event, _kind: str, _number: int) -> RunView:
  return _replace(
    view,
    name=event["name"],
    num_fragments=event["num_fragments"],
    num_shards=event["num_shards"],
    total_tokens=event["total_tokens"],
    finished="",  # a run that goes on
    islands={m: IslandView() for m in range(event["num_learners"])} | dict(view.islands),
    shards={s: ShardView() for s in range(event["num_shards"])} | dict(view.shards),
  )


def _run_finished(view: RunView, event: Event, _kind: str, _number: int) -> RunView:
  view = _replace(view, finished=event.get("reason") or "finished")
  return _note(view, event, f"the run is over: {view.finished}", "plain")


def _started(view: RunView, event: Event, kind: str, number: int) -> RunView:
  if kind == "syncer":
    fragments = tuple(event.get("fragments", ()))
    changes = {"state": "running", "incarnation": event["incarnation"], "fragments": fragments}
    return _shard(view, number, **changes)
  if kind != "learner":
    return view
  old = view.islands.get(number, IslandView())
  lives = old.lives + (not old.lives or event["incarnation"] != old.incarnation)
  restarted = {"lives": lives, "step": 0, "tokens_per_second": math.nan, "step_time": math.nan}
  return _island(view, number, state="joining", incarnation=event["incarnation"], **restarted)


def _joined(view: RunView, event: Event, kind: str, number: int) -> RunView:
  if kind != "learner":
    return view
  clock, seconds = event.get("clock", 0), event.get("seconds", math.nan)
  text = f"{role_name(event['role'])} joined at clock {clock} after {seconds:.1f} s"
  view = _island(view, number, state="running", clock=clock, step_time=event["time"])
  return _note(view, event, text, "good")


def _compiled(view: RunView, event: Event, _kind: str, _number: int) -> RunView:
  text = f"{role_name(event['target'])} is compiled after {event['seconds']:.0f} s"
  return _note(view, event, text, "plain")


def _restored(view: RunView, event: Event, _kind: str, _number: int) -> RunView:
  text = f"{role_name(event['role'])} has its part of snapshot {event['snapshot']}"
  return _note(view, event, text, "good")


def _recalled(view: RunView, event: Event, _kind: str, _number: int) -> RunView:
  given = f"fragment {event['fragment']} at version {event['version']}"
  text = f"{role_name(event['role'])} got {given} back from island {event['learner']}"
  return _note(view, event, text, "good")


def _unsaved(view: RunView, event: Event, _kind: str, _number: int) -> RunView:
  who, number = role_name(event["role"]), event["snapshot"]
  return _note(view, event, f"{who} is not in snapshot {number}: {event['reason']}", "bad")


def _step(view: RunView, event: Event, kind: str, number: int) -> RunView:
  old = view.islands.get(number, IslandView())
  if kind != "learner" or event["incarnation"] < old.incarnation:
    return view  # a predecessor's last words
  passed = event["time"] - old.step_time if old.step else math.nan
  rate = event["tokens"] / passed if passed > 0 else event["tokens"] / max(1e-9, event["seconds"])
  smoothed = 0.8 * old.tokens_per_second + 0.2 * rate if old.step > 1 else rate
  if math.isnan(view.first_step_time):
    view = _replace(view, first_step_time=event["time"])
  return _island(
    view,
    number,
    state=old.state if old.state in ("quarantined", "left") else "running",  # told late
    incarnation=event["incarnation"],
    step=event["step"],
    clock=event["clock"],
    loss=event.get("loss", old.loss),
    tokens=old.tokens + event["tokens"],
    tokens_per_second=_or(smoothed, rate),
    step_seconds=event["seconds"],
    step_time=event["time"],
  )


def _stopped(view: RunView, event: Event, kind: str, number: int) -> RunView:
  if kind != "learner":
    return view
  text = f"{role_name(event['role'])} stopped: {event.get('reason', '')}"
  return _note(_island(view, number, state="left"), event, text, "plain")


def _member(view: RunView, event: Event, kind: str, number: int) -> RunView:
  learner, state = int(event["learner"]), event["state"]
  if learner < 0 or state == "joined":  # the evaluator; a learner tells of its joining itself
    return view
  island = view.islands.get(learner, IslandView())
  stepping = island.state == "running" and island.state_at(event["time"]) == "running"
  if state == "quarantined" or (island.state == "running" and not stepping):
    view = _island(view, learner, state=state)
  reason = event.get("reason", "")
  view = _island(view, learner, missed_time=event["time"], missed_reason=reason or state)
  if state == "left" or island.state in DOWN or island.state == "left":
    return view  # already said
  text = f"the syncer counts island {learner} as {state}" + (f": {reason}" if reason else "")
  return _note(view, event, text, "bad")


def _commit(view: RunView, event: Event, kind: str, number: int) -> RunView:
  absent = {int(m): why for m, why in {**event["missing"], **event["rejected"]}.items()}
  taking = {int(m) for m in event["participants"]}
  for learner in sorted({*view.islands, *(m for m in (*taking, *absent) if m >= 0)}):
    island = view.islands.get(learner, IslandView())
    changes: dict[str, Any] = {
      "took_part": (*island.took_part, learner in taking)[-RECENT_COMMITS:]
    }
    if learner in taking and island.returning and island.state == "running":
      changes["returning"] = False
      view = _note(view, event, f"island {learner} is merged again", "good")
    elif learner in absent:
      changes |= {"missed_time": event["time"], "missed_reason": absent[learner]}
    view = _island(view, learner, **changes)
  shard = view.shards.get(number, ShardView())
  view = _replace(
    view, merged_tokens={**view.merged_tokens, event["fragment"]: event["merged_tokens"]}
  )
  for learner, why in event["rejected"].items():
    view = _note(view, event, f"update of island {learner} rejected: {why}", "bad")
  return _shard(
    view,
    number,
    commits=shard.commits + 1,
    rejected=shard.rejected + len(event["rejected"]),
    last_reason=event.get("reason", ""),
  )


def _abandoned(view: RunView, event: Event, _kind: str, number: int) -> RunView:
  for learner, why in event["rejected"].items():
    view = _note(view, event, f"update of island {learner} rejected: {why}", "bad")
  shard = view.shards.get(number, ShardView())
  rejected = shard.rejected + len(event["rejected"])
  return _shard(view, number, rejected=rejected, last_reason=event["reason"])


def _fault(view: RunView, event: Event, _kind: str, _number: int) -> RunView:
  action, target = event["action"], event["target"]
  detail = f" ({event['detail']})" if event.get("detail") else ""
  if action in ("kill", "stall"):
    view = _target(view, target, action == "kill", state="lost" if action == "kill" else "stalled")
  return _note(view, event, f"{role_name(target)}: planned {action}{detail}", "bad")


def _exit(view: RunView, event: Event, _kind: str, _number: int) -> RunView:
  kind, number = parse_role(event["target"])
  island = view.islands.get(number) if kind == "learner" else None
  if view.finished or (island is not None and island.state == "left"):
    return view  # an exit in good order
  view = _target(view, event["target"], True, state="lost")
  return _note(view, event, f"{role_name(event['target'])} is down: {event['reason']}", "bad")


def _restart(view: RunView, event: Event, _kind: str, _number: int) -> RunView:
  view = _target(view, event["target"], True, state="restarting")
  return _note(view, event, f"{role_name(event['target'])} restarts", "plain")


def _evaluation(view: RunView, event: Event, _kind: str, _number: int) -> RunView:
  return _replace(view, heldout_loss=event["loss"])


_HANDLERS: Mapping[str, Callable[[RunView, Event, str, int], RunView]] = {
  "run_started": _run_started,
  "run_finished": _run_finished,
  "compiled": _compiled,
  "started": _started,
  "joined": _joined,
  "restored": _restored,
  "recalled": _recalled,
  "unsaved": _unsaved,
  "step": _step,
  "stopped": _stopped,
  "member": _member,
  "commit": _commit,
  "abandoned": _abandoned,
  "fault": _fault,
  "exit": _exit,
  "restart": _restart,
  "evaluation": _evaluation,
}
KINDS = frozenset(_HANDLERS)
