"""The events in a role's event log: one class for each kind of event. PURE.

An event is written and read through the same class. Its kind is the name of the class in small
letters (`RunStarted` is "run_started"). The role that records an event leaves the fields of the
base class `Event` open; its recorder fills them in. On disk an event is one line of JSON (`encode`,
`decode`). Fields that have their default value are left out. A number that is not finite, which
JSON lacks, is the text "nan", "inf" or "-inf".
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, Literal, Union

import msgspec

from ddiloco.checks import is_number
from ddiloco.config.schema import MAX_FRAGMENTS

LOG_FORMAT = 8  # version of kinds and fields
MOST_SECONDS = 1e11  # three thousand years
MOST_DEPTH = 16  # of nested lists and objects; no event has more than four levels
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Few = Annotated[int, msgspec.Meta(ge=-1, le=MAX_FRAGMENTS)]  # -1: none; a view shows each
Mode = Literal["overwrite", "mix", "rebase", "halve", "reset"]  # reset: and without the residual
KEEPS_WORK = ("rebase", "halve")  # modes under which unmerged work stays in the parameters


def _kind(name: str) -> str:
  return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class Event(msgspec.Struct, frozen=True, tag_field="kind", tag=_kind, omit_defaults=True):
  """The fields that every event has."""

  time: float = math.nan  # seconds since the run started, by the role's own clock
  role: str = ""  # the role whose log the event is in
  incarnation: int = 0  # of the role
  format: int = 0  # `LOG_FORMAT`, in what an incarnation writes first, also after a failed write

  @property
  def kind(self) -> str:
    """The name of the kind, as a log has it."""
    return str(type(self).__struct_config__.tag)


@functools.lru_cache(maxsize=4096)
def parse_role(role: str) -> tuple[str, int]:
  """("learner", 2) of "learner-2"; a role without a number gets -1."""
  kind, _, number = role.partition("-")
  return kind, int(number) if is_number(number) else -1


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
  execution: dict[str, str | int] = {}  # its programs' attention (as chosen), remat, loss_chunks
  flops_per_token: float = 0.0  # forward and backward; 0: the model does not say
  peak_flops_per_second: float = 0.0  # of one device; 0: not known
  learners: int = 0  # that its config plans
  batch_sizes: tuple[int, ...] = ()  # of each of these; one number if all are equal
  planned_steps: int = 0
  fragments: tuple[int, ...] = ()  # of a shard


class Launched(Event, frozen=True, kw_only=True):
  """The process of a learner's incarnation has started; it has no devices yet."""


class Captured(Event, frozen=True, kw_only=True):
  """My present state is my part of this snapshot; copying it took so many seconds."""

  snapshot: int
  seconds: float = 0.0


class Saved(Event, frozen=True, kw_only=True):
  """The captured part of this snapshot is on disk."""

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
  times: int = 1  # how often this happened since the last such line


class Dropped(Event, frozen=True, kw_only=True):
  """Messages of a peer, or (its own name) events of this log, were dropped, and why the newest."""

  peer: str
  count: int
  reason: str


class Traffic(Event, frozen=True, kw_only=True):
  """Traffic of this incarnation's endpoint so far; see `network.transport.Counters`."""

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
  """My state is the one captured from that incarnation for that snapshot."""

  snapshot: int
  of_incarnation: int
  seconds: float = 0.0


class Compiled(Event, frozen=True, kw_only=True):
  """The programs of `target` were compiled or loaded; or one more was compiled during training."""

  target: str
  seconds: float
  program: str = ""  # the one compiled during training, when no compilation is expected


class Joined(Event, frozen=True, kw_only=True):
  """Every fragment has arrived, so many seconds after the incarnation began."""

  global_step: int
  seconds: float = 0.0


class Step(Event, frozen=True, kw_only=True):
  """One inner step has ended."""

  step: int  # of this incarnation and those it goes on from
  global_step: int  # after the step
  position: int  # of the batch
  tokens: int
  seconds: float  # of the step alone
  gap_seconds: float  # since the step before it ended
  blocked_seconds: float = 0.0  # of these, spent waiting for a shard
  data_seconds: float = 0.0  # and of these, spent waiting for the step's batch
  schedule_step: int | None = None  # that set the learning rate; None: the global step before it
  rate_scale: float = 1.0
  loss: float | None = None  # nats per token; not for every step, since reading it blocks
  load_balance: float | None = None  # of mixtures of experts
  grad_norm: float | None = None  # before clipping
  learning_rate: float | None = None


class CopyOut(Event, frozen=True, kw_only=True):
  """I copied out my push for this round: the change since the value (fragment, base_round)."""

  fragment: Few
  round: int
  version: int
  base_round: int
  steps: int
  tokens: int
  factor: float = 1.0  # not 1: the fault plan poisoned the push by this factor


class Resend(Event, frozen=True, kw_only=True):
  """The push made for `old_round` now answers `round`."""

  fragment: Few
  round: int
  old_round: int


class Push(Event, frozen=True, kw_only=True):
  """A push was encoded and sent for the first time; `bytes`: size of its frame."""

  fragment: Few
  round: int
  version: int
  steps: int
  tokens: int
  bytes: int


class Stage(Event, frozen=True, kw_only=True):
  """The value (fragment, round) arrived; its changes are on their way to the devices."""

  fragment: Few
  version: int
  round: int  # if I have it already, my push was rejected and I go back to this value
  mode: Mode
  included: bool  # my newest push of this fragment is part of it


class Apply(Event, frozen=True, kw_only=True):
  """The oldest staged value of the fragment was put into the parameters."""

  fragment: Few
  version: int
  round: int
  mode: Mode
  included: bool


class Donated(Event, frozen=True, kw_only=True):
  """The fragment's inner optimizer moments were copied for a peer."""

  fragment: Few
  donation: int


class Inherited(Event, frozen=True, kw_only=True):
  """My moments of the fragment are now those that this learner donated."""

  fragment: Few
  learner: int
  incarnation_of_donor: int
  donation: int


class NoDonor(Event, frozen=True, kw_only=True):
  """No peer is there to give moments of these, or in time: my own stay, zeros if I began afresh."""

  fragments: tuple[int, ...]


class Rejected(Event, frozen=True, kw_only=True):
  """A shard rejected my push. `rejoin`: I am quarantined and start afresh."""

  shard: int
  shard_incarnation: int
  fragment: Few
  round: int
  rejoin: bool
  reason: str


class Stopped(Event, frozen=True, kw_only=True):
  """The role leaves in good order."""

  reason: str
  unmerged_tokens: int = 0  # trained and lost, of the fragment with the most such tokens


# --- shards ---------------------------------------------------------------------------------------


class Owns(Event, frozen=True, kw_only=True):
  """A shard serves a fragment with this value, and the momentum of `momentum_round`, which is older
  if a learner gave the value back: a learner has no momentum."""

  fragment: Few
  version: int
  round: int
  momentum_round: int
  exact: bool = True  # False: the value that learners have, with a codec's rounding
  merged_tokens: int = 0  # that the value has seen


class Member(Event, frozen=True, kw_only=True):
  """The shard's view of a learner: joined, lost, left, quarantined or (no round begins) ahead."""

  learner: int  # -1: the evaluator
  state: str
  reason: str


class Round(Event, frozen=True, kw_only=True):
  """The shard asks these learners for pushes: a round begins, or goes on with more learners."""

  fragment: Few
  round: int
  version: int
  asked: tuple[int, ...]
  quorum: int = 1  # of them that must have pushed


class Commit(Event, frozen=True, kw_only=True):
  """(fragment, round) is the outer step on (fragment, base_round) with these learners' pushes."""

  fragment: Few
  round: int
  version: int
  base_round: int
  learners: tuple[int, ...]  # ascending
  incarnations: tuple[int, ...]  # of the learners
  steps: tuple[int, ...]  # inner steps in the push of each learner
  tokens: tuple[int, ...]  # and its tokens
  merged_tokens: int  # of the fragment, since the run began
  progress: float = 0.0  # the same as a share of the run's tokens: the outer rate follows it
  weights: dict[int, float] = {}  # by learner, its weight in the merge
  step_tokens: tuple[int, ...] = ()  # of a step of each learner, as the shard knows it
  rejected: dict[int, str] = {}  # by learner, why
  opposing: dict[int, float] = {}  # by learner, its mean cosine with the others
  agreement: float | None = None  # mean cosine of two of these pushes, of a sample of their values
  length: float | None = None  # of the merged outer gradient, over the mean of the pushes'
  rho: float | None = None  # cosine with the fragment's previous merged one, of such a sample
  missing: dict[int, str] = {}  # by learner, why it has no part in the round
  reason: str = ""  # why the round ended when it did
  quorum_seconds: float = 0.0  # from its beginning to its quorum
  grace_seconds: float = 0.0  # from the quorum to its end
  merge_seconds: float = 0.0

  @property
  def staleness(self) -> int:
    """The most inner steps that one of these pushes is from its base."""
    return max(self.steps, default=0)


class Abandoned(Event, frozen=True, kw_only=True):
  """A round ended without a commit."""

  fragment: Few
  round: int
  reason: str
  rejected: dict[int, str] = {}  # by learner, why


class Regained(Event, frozen=True, kw_only=True):
  """A learner gave the shard a newer value than it had."""

  fragment: Few
  version: int
  round: int
  learner: int
  merged_tokens: int = 0  # that the value has seen


class Lost(Event, frozen=True, kw_only=True):
  """A learner has values of an earlier incarnation of this shard that come too late to be used."""

  learner: int
  versions: dict[int, int]  # by fragment
  reason: str


class Snapshot(Event, frozen=True, kw_only=True):
  """Shard 0 has committed a snapshot with the parts of these roles."""

  snapshot: int
  roles: tuple[str, ...]
  seconds: float
  # Roles that were up when the snapshot began, have not left since, and have no part in it.
  lacks: tuple[str, ...] = ()


class Uncommitted(Event, frozen=True, kw_only=True):
  """Shard 0 has given up a snapshot."""

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
  """The held-out loss of the global model, in nats per token, and other measures."""

  merged_tokens: int
  global_step: int  # 0: of the initial model
  loss: float
  measures: dict[str, float] = {}


class Unevaluated(Event, frozen=True, kw_only=True):
  """An evaluation failed."""

  merged_tokens: int
  global_step: int
  reason: str


# --- the engine, or another supervisor of the roles -----------------------------------------------


class RunStarted(Event, frozen=True, kw_only=True):
  """The run begins, or goes on after all its roles had ended."""

  name: str
  num_learners: Few
  num_shards: Few
  num_fragments: Few
  total_tokens: int


class Fault(Event, frozen=True, kw_only=True):
  """A planned fault strikes `target`."""

  target: str
  action: str
  seconds: float = 0.0  # how long it lasts; -1: for good
  detail: str = ""


class Exit(Event, frozen=True, kw_only=True):
  """An incarnation of `target` has ended, and not in good order."""

  target: str
  reason: str


class Restart(Event, frozen=True, kw_only=True):
  """The next incarnation of `target` is started."""

  target: str


class Profiled(Event, frozen=True, kw_only=True):
  """A trace of `target`'s process is in `path`; it has these steps from beginning to end."""

  target: str
  path: str  # in the workdir
  first_step: int  # its global step
  steps: int  # fewer than were asked for if the process stood still or ended
  seconds: float  # that were traced


class Unprofiled(Event, frozen=True, kw_only=True):
  """A trace that was asked for could not be taken."""

  target: str
  reason: str


class Hung(Event, frozen=True, kw_only=True):
  """`target`'s loop has made no turn for so long."""

  target: str
  seconds: float
  usual_seconds: float  # of one of its steps; 0: not known yet, its first ones also load programs
  stacks: str  # of all threads of its process, the loop's own first


class RunFinished(Event, frozen=True, kw_only=True):
  """The run is over: finished, stopped or failed."""

  reason: str


IMPORTANT = frozenset(  # written to disk at once, since a kill often follows
  {Started, Restored, Joined, Stopped, Rejected, Regained, Crash, Member, Snapshot, Unsaved}
  | {Fault, Exit, Restart, RunStarted, RunFinished, Hung, Profiled, Unprofiled}
)


def stamped(event: Event, time: float, role: str, incarnation: int) -> Event:
  """The event of this role at this time, in seconds since the run started."""
  return msgspec.structs.replace(event, time=round(time, 6), role=role, incarnation=incarnation)


KINDS: dict[str, type[Event]] = {_kind(cls.__name__): cls for cls in Event.__subclasses__()}


class Odd(Event, frozen=True, kw_only=True):
  """Only read: a line with a time and a role, of an unknown kind or with unreadable fields."""

  said: str  # the kind that the line names
  reason: str  # what is wrong with it


# --- lines of JSON --------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
  """For values without a form in JSON: NumPy scalars become numbers, all others text."""
  return value.item() if hasattr(value, "item") else str(value)


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_AnyEvent: Any = Union[tuple(KINDS.values())]  # noqa: UP007
_decoder = msgspec.json.Decoder(_AnyEvent)


def encode(event: Event) -> bytes:
  """The event's line, without its newline."""
  try:
    line = _encoder.encode(event)
  except UnicodeEncodeError:  # a text with a lone surrogate, as from a path that is not UTF-8
    line = b"null"
  if b"null" in line:  # a number that is not finite, or a text that says so
    line = _encoder.encode(finite(msgspec.to_builtins(event, enc_hook=_plain)))
  return line


def decode(line: bytes) -> Event | None:
  """The event of a line; None if the line is no event at all, such as a torn one.

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
  """`decode` for events with numbers that are not finite, and for an `Odd`."""
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
  """A copy that JSON can hold: "nan", "inf" and "-inf" for numbers that are not finite, and escapes
  in a text that is no Unicode."""
  if isinstance(value, dict):
    return {finite(str(key)): finite(each) for key, each in value.items()}
  if isinstance(value, list | tuple):
    return [finite(each) for each in value]
  if isinstance(value, str):
    return value.encode(errors="backslashreplace").decode()
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value


def _restored(value: Any, levels: int) -> Any:
  """The value with "nan", "inf" and "-inf" as numbers again.

  Raises:
    ValueError: values are nested `levels` deep.
  """
  if not levels:
    raise ValueError("nested beyond sense")
  if isinstance(value, dict):
    return {key: _restored(each, levels - 1) for key, each in value.items()}
  if isinstance(value, list):
    return [_restored(each, levels - 1) for each in value]
  return _NOT_FINITE.get(value, value)
