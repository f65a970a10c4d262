"""The tape of a run as text: a line for each operation, in order of time."""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddiloco.core import tape_reader
from ddiloco.core.tape import (
  INITIAL,
  Apply,
  Commit,
  Cut,
  Donated,
  Entry,
  Inherited,
  Operation,
  Owns,
  Recorded,
  Resend,
  Restored,
  Saved,
  Stage,
  Started,
  Step,
  Tape,
)
from ddiloco.observe.events import Event, parse_line
from ddiloco.observe.style import MUTED, island_colour


def read_tape(workdir: str | os.PathLike[str]) -> Tape:
  """The tape in WORKDIR/events; without the folder an empty one."""
  paths = (Path(workdir) / "events").glob("*.jsonl")
  return tape_reader.read({path.stem: _lines(path) for path in paths})


def _lines(path: Path) -> Iterator[Event | None]:
  lines = path.read_bytes().split(b"\n")
  return (parse_line(line) for line in (lines if lines[-1] else lines[:-1]))


def in_order(tape: Tape, roles: Iterable[str] = ()) -> Iterator[Entry]:
  """The entries of these roles (none: of all) by time; each role keeps its own order.

  Clocks of several hosts differ, and so may the order of what happened at nearly the same time.
  """
  chosen = list(roles) or list(tape.roles)
  return (entry for _, _, entry in heapq.merge(*(_timed(tape, role) for role in chosen)))


def _timed(tape: Tape, role: str) -> Iterator[tuple[float, tuple[str, int], Entry]]:
  entries = [e for life in tape.roles[role] for e in life.entries]
  times = itertools.accumulate((e.time for e in entries), max)
  return ((time, (role, i), e) for i, (time, e) in enumerate(zip(times, entries)))


def line_of(entry: Entry) -> str:
  """One operation in one line: time, role and incarnation, what happened."""
  who = f"{entry.role}.{entry.incarnation}"
  return f"{entry.time:10.3f} s  {who:<14} {describe(entry.operation)}"


def role_style(entry: Entry) -> str:
  """The line's colour: an island's own, or grey."""
  return island_colour(entry.number) if entry.role.startswith("learner") else MUTED


def describe(operation: Operation) -> str:
  """What happened, in words."""
  match operation:
    case Started() as op:
      home = f": {op.devices} devices, mesh {list(op.mesh)}, batch {op.batch_size}"
      where = home if op.devices else ""
      return f"started{where}"
    case Restored(snapshot, incarnation):
      return f"restored from snapshot {snapshot} of incarnation {incarnation}"
    case Step() as op:
      slow = "" if op.rate_scale == 1 else f", rate x {op.rate_scale:.3g}"
      loss = "" if op.loss is None else f", loss {op.loss:.4f}"
      return (
        f"step {op.step}: clock {op.clock}, batch {op.position}, {op.tokens} tokens{slow}{loss}"
      )
    case Cut() as op:
      base = f"version {op.version} ({_round(op.base_round)})"
      what = f"{op.steps} steps, {op.tokens} tokens on {base}"
      return f"cut     {_value(op.fragment, op.round)}: {what}"
    case Resend() as op:
      return f"resend  {_value(op.fragment, op.round)}: the push for {_round(op.old_round)}"
    case Stage() as op:
      mine = ", my push is in it" if op.included else ""
      return f"stage   {_value(op.fragment, op.round)}: version {op.version}, {op.mode}{mine}"
    case Apply() as op:
      return f"apply   {_value(op.fragment, op.round)}: version {op.version}"
    case Recorded(snapshot):
      return f"recorded for snapshot {snapshot}"
    case Saved(snapshot, arrays):
      return f"saved snapshot {snapshot}: {len(arrays)} arrays"
    case Donated(fragment, donation):
      return f"donated fragment {fragment}'s moments: donation {donation}"
    case Inherited() as op:
      whose = f"learner {op.learner} (incarnation {op.incarnation_of_donor})"
      return f"inherited fragment {op.fragment}'s moments: donation {op.donation} of {whose}"
    case Owns() as op:
      momentum = "none" if op.momentum_round == INITIAL else f"of {_round(op.momentum_round)}"
      text = f"version {op.version}, momentum {momentum}"
      return f"owns    {_value(op.fragment, op.round)}: {text}"
    case Commit() as op:
      whose = ", ".join(f"{m}.{i}" for m, i in zip(op.learners, op.incarnations))
      text = f"version {op.version} on {_round(op.base_round)} of learners {whose}"
      return f"commit  {_value(op.fragment, op.round)}: {text}; {op.tokens} tokens"


def _round(round_id: int) -> str:
  return "initial" if round_id == INITIAL else f"round {round_id}"


def _value(fragment: int, round_id: int) -> str:
  return f"fragment {fragment} {_round(round_id)}"
