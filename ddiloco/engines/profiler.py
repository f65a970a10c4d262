"""Traces of chosen steps, for TensorBoard and xprof, taken while a run goes on.

A line in WORKDIR/profiles.jsonl requests a trace (`ddiloco profile`). The process that has the
learner takes the trace on a thread of its own, which only watches the learner's steps: the learner
itself does nothing for it. A trace shows the whole process: in the threads engine all islands of
the run.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from ddiloco.checks import refusal, require
from ddiloco.observe.eventlog import Follower, Records
from ddiloco.observe.guards import Guard, ended
from ddiloco.protocol import events
from ddiloco.protocol.events import Event
from ddiloco.workdir import OUTCOME, PROFILE_REQUESTS, PROFILES, RequestFile, append_request

MOST_STEPS = 1000  # of one trace
STEP_BYTES = 1 << 20  # that a step of it takes, about
LOOK_SECONDS = 0.5
STEP_SECONDS = 0.01  # between two looks whether the steps of a trace are made
PATIENCE_SECONDS = 60.0  # for the next step, before the trace ends as it is
CLOSE_SECONDS = 30.0  # to write a trace


class ProfileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
  """A trace of a learner's next steps, from the global step `from_step` on, or later."""

  role: str
  steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)] = 5
  from_step: Annotated[int, msgspec.Meta(ge=0)] = 0


class Profiler:
  """Takes the traces of the learners of one process, one after the other.

  Args:
    workdir: traces go to `workdir/profiles/ROLE`.
    record: returns the recorder of events; called each time, since roles have several lives.

  Attributes:
    steps: learner of this process -> the global step after its last step.
  """

  def __init__(self, workdir: Path, record: Callable[[], Records]):
    self._workdir, self._record = workdir, record
    parse = lambda fields: msgspec.convert(fields, ProfileRequest)
    self._requests = RequestFile[ProfileRequest](workdir / PROFILE_REQUESTS, parse, "trace")
    self.steps: dict[str, int] = {}
    self._first: dict[str, int] = {}  # the same after the role's first step
    self._traced: tuple[str, list[int]] = "", []  # a learner, and its steps during its trace
    self._closing = threading.Event()
    self._thread = threading.Thread(target=self._serve, name="profiler", daemon=True)
    self._thread.start()

  def __call__(self, event: Event) -> None:
    """Takes an event of a role, on the role's thread."""
    if type(event) is events.Step:
      self._first.setdefault(event.role, event.global_step)
      self.steps[event.role] = event.global_step
      role, made = self._traced
      if event.role == role:
        made.append(event.global_step)

  def close(self) -> None:
    """Ends the trace under way as it is; no other trace is begun."""
    self._closing.set()
    ended(self._thread, CLOSE_SECONDS)

  def _serve(self) -> None:
    """Takes the traces that are asked for, until `close`."""
    asked, guard = list[tuple[float, ProfileRequest]](), Guard("what takes traces")
    while not self._closing.wait(LOOK_SECONDS):
      asked += guard(lambda: [*self._requests.poll()], instead=())
      # The step under way when a trace begins is not whole; the next one, `from_step`, must be.
      due = [a for a in asked if self.steps.get(a[1].role, -1) >= max(0, a[1].from_step - 2)]
      for age_seconds, request in due[:1]:
        asked.remove((age_seconds, request))
        if age_seconds and self._first[request.role] >= request.from_step:
          continue  # an earlier process had answered it
        try:
          self._trace(request)
        except Exception as error:  # a trace is being taken already, no disk, ...: the run goes on
          reason = f"{type(error).__name__}: {error}"
          self._record().record(events.Unprofiled(target=request.role, reason=reason))

  def _trace(self, request: ProfileRequest) -> None:
    import jax

    path = self._workdir / PROFILES / request.role
    path.mkdir(parents=True, exist_ok=True)
    # A trace that cannot be written would be JAX's last one in this process.
    with tempfile.TemporaryFile(dir=path) as room:
      os.posix_fallocate(room.fileno(), 0, request.steps * STEP_BYTES)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls would be most of the trace, and slow it down
    jax.profiler.start_trace(path, profiler_options=options)
    began = time.monotonic()
    try:
      whole = self._whole_steps(request)
      seconds = time.monotonic() - began
    finally:
      jax.profiler.stop_trace()
    self._record().record(
      events.Profiled(
        target=request.role,
        path=str(path.relative_to(self._workdir)),
        first_step=whole[0] if whole else 0,
        steps=len(whole),
        seconds=round(seconds, 3),
      )
    )

  def _whole_steps(self, request: ProfileRequest) -> list[int]:
    """The global steps that are whole in the trace; fewer than asked if no further step comes."""
    wanted = 1 + request.steps + 1  # one was under way, and the last may still be on the devices
    made, seen, until = list[int](), 0, time.monotonic() + PATIENCE_SECONDS
    self._traced = request.role, made
    while len(made) < wanted and time.monotonic() < until and not self._closing.wait(STEP_SECONDS):
      if len(made) > seen:
        seen, until = len(made), time.monotonic() + PATIENCE_SECONDS
    self._traced = "", []
    return made[1 : 1 + request.steps]


def take_profile(workdir: Path, request: ProfileRequest, wait_seconds: float) -> tuple[bool, str]:
  """Requests a trace, and waits for it: (whether it is there, its path or the reason).

  Raises:
    ConfigError: there is no such learner, its run is over, or the request cannot be written.
  """
  role, folder = request.role, workdir / "events"
  known = sorted(path.stem for path in folder.glob("learner-*.jsonl")) or ["there are none"]
  fix = f"give the workdir of a run, and one of its learners ({', '.join(known)})"
  there = (folder / f"{role}.jsonl").exists()
  require(there, "--workdir", str(workdir), f"has no events of {role}", fix)
  over = (workdir / OUTCOME).exists()
  require(not over, "--workdir", str(workdir), "its run is over", "trace a run that goes on")
  follower = Follower(workdir)
  follower.skip()
  try:
    append_request(workdir / PROFILE_REQUESTS, msgspec.structs.asdict(request))
  except OSError as error:
    rule, fix = f"cannot be asked for a trace ({error})", "make room, or ask as who may write there"
    raise refusal("--workdir", str(workdir), rule, fix) from error
  until = time.monotonic() + wait_seconds
  while time.monotonic() < until:
    for event in follower.poll():
      match event:
        case events.Profiled(target=target) if target == role:
          which = f"{event.steps} steps from global step {event.first_step} on"
          return event.steps > 0, f"{workdir / event.path}: {which}, {event.seconds:.1f} s"
        case events.Unprofiled(target=target) if target == role:
          return False, f"There is no trace: {event.reason}"
    time.sleep(LOOK_SECONDS)
  late = f"the trace is asked for, and not there after {wait_seconds:g} s; it may still come"
  return False, f"{workdir / PROFILES / role}: {late}"
