"""What a role writes into its event log: one class for each kind of event. PURE.

An event is written and read through the same class. Its kind is the name of the class in small
letters (`RunStarted` is "run_started"). The role that records an event leaves the fields of `Event`
open; its recorder fills them in. On disk an event is one line of JSON, `encode` and
`decode` are its two directions: fields that have their default value are left out, and a number
that is not finite, which JSON has not, is the text "nan", "inf" or "-inf".
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, Union

import msgspec

LOG_FORMAT = 2  # of kinds and fields; logs of the first had no number
MOST_SECONDS = 1e11  # three thousand years
MOST_DEPTH = 16  # of lists and objects in each other; no event has more than four
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Mode = Literal["overwrite", "mix", "rebase"]


def _kind(name: str) -> str:
  return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class Event(msgspec.Struct, frozen=True, tag_field="kind", tag=_kind, omit_defaults=True):
  """What every event says of itself."""

  time: float = math.nan  # seconds since the run started, by the role's own clock
  role: str = ""  # whose log it is in
  incarnation: int = 0  # of the role
  format: int = 0  # `LOG_FORMAT`, in the first event that an incarnation writes

  @property
  def kind(self) -> str:
    """The name of the kind, as a log has it."""
    return str(type(self).__struct_config__.tag)


class Odd(Event, frozen=True, kw_only=True):
  """Not written: a line with a time and a role, of a kind or with fields this version has not."""

  said: str  # the kind that the line names
  reason: str  # what is wrong with it


@functools.lru_cache(maxsize=4096)
def parse_role(role: str) -> tuple[str, int]:
  """("learner", 2) of "learner-2"; a role without a number gets -1."""
  kind, _, number = role.partition("-")
  return kind, int(number) if number.isdigit() else -1


def format_role(kind: str, number: int) -> str:
  """ "learner-2" of ("learner", 2)."""
  return f"{kind}-{number}"


# --- any role -------------------------------------------------------------------------------------


class Started(Event, frozen=True, kw_only=True):
  """An incarnation begins: a learner with its devices, or a shard with its fragments."""

  devices: int = 0
  device_kind: str = ""  # as JAX names it: "TPU v5p", "NVIDIA H100 80GB HBM3", "cpu"
  mesh: tuple[int, ...] = ()  # data, fsdp, tensor
  batch_size: int = 0  # sequences
  hosts: int = 1  # processes of the island
  attention: str = ""  # its path: einsum, splash or cudnn
  flops_per_token: float = 0.0  # forward and backward; 0: the model does not say
  peak_flops_per_second: float = 0.0  # of one device; 0: not known
  learners: int = 0  # that its config plans; 0: as the saved config does
  planned_steps: int = 0
  fragments: tuple[int, ...] = ()  # of a shard


class Launched(Event, frozen=True, kw_only=True):
  """The process of a learner's incarnation is there; it has no devices yet."""


class Captured(Event, frozen=True, kw_only=True):
  """My state as it is now is my part of this snapshot; copying it took so many seconds."""

  snapshot: int
  seconds: float = 0.0


class Saved(Event, frozen=True, kw_only=True):
  """The part that was captured is on disk."""

  snapshot: int
  seconds: float = 0.0
  bytes: int = 0
  arrays: dict[str, int]  # the CRC-32 of each


class Unsaved(Event, frozen=True, kw_only=True):
  """My part of a snapshot is not saved; the run goes on without it."""

  snapshot: int
  reason: str


class Ignored(Event, frozen=True, kw_only=True):
  """A message that changes nothing here."""

  reason: str
  message: str = ""  # its type
  learner: int | None = None  # that sent it
  times: int = 1  # the same happened since the last such line


class Dropped(Event, frozen=True, kw_only=True):
  """A peer says that it did not take in messages of this role."""

  peer: str
  count: int
  reason: str


class Traffic(Event, frozen=True, kw_only=True):
  """What went over this incarnation's connection so far; see `network.transport.Counters`."""

  sent_bytes: int
  received_bytes: int
  payload_bytes: int = 0
  undelivered: int = 0
  malformed: int = 0
  overflowed: int = 0
  refused: int = 0


class Crash(Event, frozen=True, kw_only=True):
  """An unexpected exception ends the incarnation."""

  trace: str


# --- learners (and the evaluator, which follows the model as they do) -----------------------------


class Restored(Event, frozen=True, kw_only=True):
  """My state is what was captured of that incarnation for that snapshot."""

  snapshot: int
  of_incarnation: int
  seconds: float = 0.0


class Compiled(Event, frozen=True, kw_only=True):
  """The programs of `target` are compiled, or were loaded; or one more, while it trains."""

  target: str
  seconds: float
  program: str = ""  # of those that were not meant to be compiled by now


class Joined(Event, frozen=True, kw_only=True):
  """Every fragment has arrived, so many seconds after the incarnation began."""

  global_step: int
  seconds: float = 0.0


class Step(Event, frozen=True, kw_only=True):
  """One inner step has ended."""

  step: int  # counted in this incarnation and those it goes on from
  global_step: int  # after the step
  position: int  # of the batch
  tokens: int
  seconds: float  # of the step alone
  gap_seconds: float  # since the step before it ended
  blocked_seconds: float = 0.0  # of these, spent waiting for a shard
  schedule_step: int | None = (
    None  # that the learning rate was for; None: the global step before it
  )
  rate_scale: float = 1.0
  loss: float | None = None  # nats per token; not of every step, since fetching it waits
  load_balance: float | None = None  # of mixtures of experts
  grad_norm: float | None = None  # before clipping
  learning_rate: float | None = None


class CopyOut(Event, frozen=True, kw_only=True):
  """My push for this round: what I have of the fragment beyond (fragment, base_round)."""

  fragment: int
  round: int
  version: int
  base_round: int
  steps: int
  tokens: int
  factor: float = 1.0  # it was poisoned by plan: what I have, times this


class Resend(Event, frozen=True, kw_only=True):
  """The push that was made for `old_round` answers `round` now."""

  fragment: int
  round: int
  old_round: int


class Push(Event, frozen=True, kw_only=True):
  """A push was encoded and sent for the first time; `bytes` of its frames."""

  fragment: int
  round: int
  version: int
  steps: int
  tokens: int
  bytes: int


class Stage(Event, frozen=True, kw_only=True):
  """The value (fragment, round) arrived; what it changes here is on its way to the devices."""

  fragment: int
  version: int
  round: int  # the one I have already: my push was rejected, and I go back to it
  mode: Mode
  included: bool  # my newest push of this fragment is part of it


class Apply(Event, frozen=True, kw_only=True):
  """The oldest staged value of the fragment was put into the parameters."""

  fragment: int
  version: int
  round: int
  mode: Mode
  included: bool


class Donated(Event, frozen=True, kw_only=True):
  """The fragment's inner optimizer moments were copied for a peer."""

  fragment: int
  donation: int


class Inherited(Event, frozen=True, kw_only=True):
  """My moments of the fragment are now what that learner donated."""

  fragment: int
  learner: int
  incarnation_of_donor: int
  donation: int


class NoDonor(Event, frozen=True, kw_only=True):
  """No peer gave moments of these fragments in time: they start at zero."""

  fragments: tuple[int, ...]


class Refused(Event, frozen=True, kw_only=True):
  """A shard rejected my push, and why; `rejoin`: I am quarantined and start afresh."""

  shard: int
  shard_incarnation: int
  fragment: int
  round: int
  rejoin: bool
  reason: str


class Stopped(Event, frozen=True, kw_only=True):
  """The role leaves in good order."""

  reason: str
  unmerged_tokens: int = 0  # trained and lost, of the fragment that lacks most


# --- shards ---------------------------------------------------------------------------------------


class Owns(Event, frozen=True, kw_only=True):
  """A shard serves a fragment with this value and the momentum of that round.

  An older round's momentum: a learner gave the value back, which knew nothing else of it.
  """

  fragment: int
  version: int
  round: int
  momentum_round: int
  exact: bool = True  # False: what learners have, without what a codec's rounding kept back


class Member(Event, frozen=True, kw_only=True):
  """What a learner is to the shard from now on: joined, lost, left or quarantined."""

  learner: int  # -1: the evaluator
  state: str
  reason: str


class Round(Event, frozen=True, kw_only=True):
  """A round begins: the shard asks these learners for their pushes."""

  fragment: int
  round: int
  version: int
  asked: tuple[int, ...]


class Commit(Event, frozen=True, kw_only=True):
  """(fragment, round) is the outer step on (fragment, base_round) with these learners' pushes."""

  fragment: int
  round: int
  version: int
  base_round: int
  learners: tuple[int, ...]  # ascending
  incarnations: tuple[int, ...]  # of the learners
  steps: int  # of all pushes together
  tokens: int
  merged_tokens: int  # of the fragment, since the run began
  progress: float = 0.0  # the same as a share of the run's tokens: the outer rate follows it
  participants: dict[int, float] = {}  # by learner, its weight in the merge
  step_tokens: tuple[int, ...] = ()  # of a step of each learner, as the shard has it
  rejected: dict[int, str] = {}  # by learner, why
  opposing: dict[int, float] = {}  # by learner, the cosine with the others' sum
  agreement: float | None = None  # mean cosine of two of these pushes, of a sample of their values
  staleness: int | None = None  # the most inner steps that one of these pushes is from its base
  length: float | None = None  # of the merged outer gradient, over the mean of the pushes'
  rho: float | None = None  # its cosine with the one before it of this fragment, of such a sample
  missing: dict[int, str] = {}  # by learner, why it is not in the round
  reason: str = ""  # why the round ended when it did
  quorum_seconds: float = 0.0  # from its beginning to its quorum
  grace_seconds: float = 0.0  # from the quorum to its end
  merge_seconds: float = 0.0


class Abandoned(Event, frozen=True, kw_only=True):
  """A round ended without a commit."""

  fragment: int
  round: int
  reason: str
  rejected: dict[int, str] = {}  # by learner, why


class Recalled(Event, frozen=True, kw_only=True):
  """A learner gave back a newer value than the shard had."""

  fragment: int
  version: int
  round: int
  learner: int


class Lost(Event, frozen=True, kw_only=True):
  """A learner has newer values of an earlier life of this shard, and they come too late."""

  learner: int
  versions: dict[int, int]  # by fragment
  reason: str


class Snapshot(Event, frozen=True, kw_only=True):
  """Shard 0 has committed a snapshot with the parts of these roles."""

  snapshot: int
  roles: tuple[str, ...]
  seconds: float
  lacks: tuple[str, ...] = ()  # roles that were there when it began, and have no part in it


class Uncommitted(Event, frozen=True, kw_only=True):
  """Shard 0 has given a snapshot up."""

  snapshot: int
  reason: str = ""
  missing: tuple[str, ...] = ()  # roles whose parts did not come


class Replicated(Event, frozen=True, kw_only=True):
  """The shard's buddy is back and gets copies again."""

  buddy: int


class Unreplicated(Event, frozen=True, kw_only=True):
  """The shard's buddy is away: these fragments go on without a copy."""

  buddy: int
  fragments: tuple[int, ...]


# --- the evaluator --------------------------------------------------------------------------------


class Evaluation(Event, frozen=True, kw_only=True):
  """The held-out loss of the global model, in nats per token, and what else it measures."""

  merged_tokens: int
  global_step: int
  loss: float
  measures: dict[str, float] = {}


class Unevaluated(Event, frozen=True, kw_only=True):
  """An evaluation failed."""

  merged_tokens: int
  global_step: int
  reason: str


# --- the engine, or another supervisor of the roles -----------------------------------------------


class RunStarted(Event, frozen=True, kw_only=True):
  """The run begins, or goes on after all of it was gone."""

  name: str
  num_learners: int
  num_shards: int
  num_fragments: int
  total_tokens: int


class Fault(Event, frozen=True, kw_only=True):
  """A planned fault strikes `target`."""

  target: str
  action: str
  seconds: float = 0.0  # that it lasts; -1: for good
  detail: str = ""


class Exit(Event, frozen=True, kw_only=True):
  """An incarnation of `target` has ended other than in good order."""

  target: str
  reason: str


class Restart(Event, frozen=True, kw_only=True):
  """The next incarnation of `target` is started."""

  target: str


class Profiled(Event, frozen=True, kw_only=True):
  """A trace of `target`'s process is in `path`, with these steps of it as a whole."""

  target: str
  path: str  # in the workdir
  first_step: int  # global
  steps: int  # fewer than were asked for if it stood still or ended
  seconds: float  # that were traced


class Unprofiled(Event, frozen=True, kw_only=True):
  """A trace that was asked for could not be taken."""

  target: str
  reason: str


class Hung(Event, frozen=True, kw_only=True):
  """`target`'s loop has not come round for so long; it is left alone."""

  target: str
  seconds: float
  usual_seconds: float  # of one of its steps; 0: it has not made one
  stacks: str  # of all threads of its process, its own first


class RunFinished(Event, frozen=True, kw_only=True):
  """The run is over: finished, stopped or failed."""

  reason: str


IMPORTANT = frozenset(  # on disk at once, since a kill often follows
  {Started, Restored, Joined, Stopped, Refused, Recalled, Crash, Member, Snapshot, Unsaved}
  | {Fault, Exit, Restart, RunStarted, RunFinished, Hung, Profiled, Unprofiled}
)


def stamped(event: Event, time: float, role: str, incarnation: int) -> Event:
  """The event of this role at this time, in seconds since the run started."""
  return msgspec.structs.replace(event, time=round(time, 6), role=role, incarnation=incarnation)


KINDS: dict[str, type[Event]] = {
  _kind(cls.__name__): cls for cls in Event.__subclasses__() if cls is not Odd
}

# --- lines of JSON --------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
  """What JSON does not know: NumPy scalars as numbers, anything else as text."""
  item = getattr(value, "item", None)
  return item() if item is not None and getattr(value, "size", 1) == 1 else str(value)


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_AnyEvent: Any = Union[tuple(KINDS.values())]  # noqa: UP007
_decoder = msgspec.json.Decoder(_AnyEvent)


def encode(event: Event) -> bytes:
  """The event's line, without an end."""
  line = _encoder.encode(event)
  if b"null" in line:  # a number that is not finite, or a text that says so
    line = _encoder.encode(finite(msgspec.to_builtins(event, enc_hook=_plain)))
  return line


def decode(line: bytes) -> Event | None:
  """The event of a line; None if it is no event at all, such as a torn one.

  An event of an unknown kind, or with fields that are missing or of another type, is an `Odd`.
  """
  try:
    event = _decoder.decode(line)
  except (msgspec.ValidationError, RecursionError):
    event = _decode_slowly(line)
  except ValueError:  # torn or binary
    return None
  good = event is not None and event.role and abs(event.time) < MOST_SECONDS
  return event if good else None


def _decode_slowly(line: bytes) -> Event | None:
  """With numbers that are not finite, or odd."""
  try:
    fields = _restored(msgspec.json.decode(line), MOST_DEPTH)
  except (ValueError, RecursionError):  # torn, or thousands of brackets deep
    return None
  try:
    return msgspec.convert(fields, _AnyEvent, str_keys=True)
  except msgspec.ValidationError as error:
    return _odd(fields, str(error))


def _odd(fields: Any, reason: str) -> Odd | None:
  try:
    said = fields["kind"]
    reason = f"{said}: {reason}" if said in KINDS else f"event of unknown kind {said!r}"
    what = {"kind": "odd", "said": said, "reason": reason}
    return msgspec.convert({**fields, **what}, Odd)
  except (KeyError, TypeError, msgspec.ValidationError):  # it has no time, role or kind
    return None


def finite(value: Any) -> Any:
  """A copy that JSON can say: "nan", "inf" and "-inf" for numbers that are not finite."""
  if isinstance(value, dict):
    return {str(key): finite(each) for key, each in value.items()}
  if isinstance(value, list | tuple):
    return [finite(each) for each in value]
  if not isinstance(value, str | int | float | None):
    value = _plain(value)
  if isinstance(value, float) and not math.isfinite(value):
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
  return value


def _restored(value: Any, levels: int) -> Any:
  """With its numbers that are not finite.

  Raises:
    ValueError: lists and objects are inside each other more than so often.
  """
  if isinstance(value, dict | list) and not levels:
    raise ValueError("nested beyond sense")
  if isinstance(value, dict):
    return {key: _restored(each, levels - 1) for key, each in value.items()}
  if isinstance(value, list):
    return [_restored(each, levels - 1) for each in value]
  return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
