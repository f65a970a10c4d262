"""The directory that is a run's identity. Imports no JAX: it is used before devices exist."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from ddiloco.checks import Unanswered, is_there, kind_of, refusal, require
from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.observe.guards import say, warn

T = TypeVar("T")
OUTCOME = "outcome.json"  # facts for the report that are not in the events
LAST_KNOWN = "seconds"  # of these facts; not there: a kill came before the report
RESULT = "result"  # the trained global model
REMAINDERS = f".{RESULT}.{'[0-9a-f]' * 16}*"  # left by killed saves (`checkpoint/weights.py`)
SOURCES = "sources.json"  # digests of the corpus ("": the data are the user's own), and own parts
STARTED = "started"  # when the run began, unix seconds: the zero of all its event times
COMPILED = "compiled"  # compiled programs, for restarted learners
FAULTS = "faults.jsonl"  # faults requested during the run, one a line
PROFILES = "profiles"  # traces of chosen steps, by role: TensorBoard's or xprof's --logdir
PROFILE_REQUESTS = "profiles.jsonl"  # traces requested during the run, one a line
LOCK = "lock"  # held by the run that trains here
ROLES = "roles.lock"  # a shared lock, held by every role that lives here
LOOK_SECONDS, SILENT_SECONDS = 0.1, 2.0
# That the roles of a killed supervisor have to end: the kernel takes 0.1 s to free a GB of theirs.
END_SECONDS = 30.0
CHECKPOINTS = "checkpoints"
ISLANDS = "islands"  # in a run without shards, the parameters of each island
OURS = (
  *("alone", COMPILED, CHECKPOINTS, ISLANDS, "events", "logs", "tensorboard", "report", RESULT),
  *(PROFILES, PROFILE_REQUESTS, STARTED, SOURCES, FAULTS, "config.json"),
)
_TRAINED = (
  "another process trains in it at this moment. Fix: end that run, or choose another directory."
)
_ROLES_LIVE = (
  "roles of its run live (ddiloco learner, syncer or evaluator), whose files a run would delete, or"
  " mix with its own. Fix: end them first, or choose another directory."
)
# Sections in which roles of a run may differ; all the rest of the config must be the same.
FREE_SECTIONS = ("islands", "network", "checkpoint", "run", "chaos")
# Further fields that may change when a run goes on; but a run whose islands train alone, without
# shards, stays one.
MAY_CHANGE = ("run.total_tokens", "sync.num_shards", "sync.min_quorum", "sync.snapshot_steps")


def run_name(workdir: Path) -> str:
  """The run's name: that of its directory, however the path to it is spelled (".", "..")."""
  return Path(os.path.abspath(workdir)).name  # a link keeps its own name, as on other hosts


def require_local(field: str, workdir: str) -> None:
  """Refuses (ConfigError) a workdir in a bucket."""
  fix = "give a folder; only snapshots (--config.checkpoint.path) and exports may be in a bucket"
  require("://" not in workdir, field, workdir, "must be a folder of a file system", fix)


@contextlib.contextmanager
def held(workdir: Path, snapshots: str = "") -> Iterator[None]:
  """In this context no other run trains in the workdir; the lock ends with the process at latest.

  Nor does one of the same name that has the same folder `snapshots` (checkpoint.path), as far as
  that has locks: a bucket has none.

  Raises:
    ConfigError: another run trains there, or the directory cannot be written.
  """
  with contextlib.ExitStack() as stack:
    with _writing(workdir):
      workdir.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context((workdir / LOCK).open("a"))
      _lock(file, fcntl.LOCK_EX, f"--workdir={workdir}: {_TRAINED}")
    if snapshots and "://" not in snapshots:
      with contextlib.suppress(OSError):  # if it cannot be written, saving says so
        folder = Path(snapshots).expanduser() / run_name(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context((folder / LOCK).open("a"))
        rule = f"another run of this name trains at this moment, with its snapshots in {folder}"
        fix = "give the workdir another name, or choose another path"
        _lock(file, fcntl.LOCK_EX, str(refusal("checkpoint.path", snapshots, rule, fix)))
    yield  # outside the inner context: an error of the caller is not about the lock


def _lock(
  file: IO[str],
  kind: int,
  refusal: str,
  seconds: float = LOOK_SECONDS,
  needless: Callable[[], bool] = lambda: False,
) -> None:
  """Takes the kernel lock of a file, for which it waits at most so long, or until it is `needless`.

  The least is one more look: a process that only asks whether the lock is free has it for a moment.
  A wait of more than `SILENT_SECONDS` is said.

  Raises:
    ConfigError: `refusal`, if another process still has it then.
    OSError: the file system has no locks.
  """
  began, said = time.monotonic(), False
  while True:
    try:
      return fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
      waited = time.monotonic() - began
      if waited >= seconds or needless():
        raise ConfigError(refusal) from None
    if waited >= SILENT_SECONDS and not said:
      said = True
      say(f"Waits at most {seconds:g} s for other processes, which have {file.name} locked.")
    time.sleep(LOOK_SECONDS)


def refuse_trained(workdir: Path) -> None:
  """Refuses (ConfigError) a workdir in which a run trains: it has shards of its own."""
  # No run ever trained there; or a file system without locks, where none can.
  with contextlib.suppress(OSError), (workdir / LOCK).open() as file:
    _lock(file, fcntl.LOCK_SH, f"--workdir={workdir}: {_TRAINED}")


def under_way(workdir: Path) -> bool:
  """Whether a run, or a role that was started by hand, lives here, as far as its locks say."""
  for name, mode, kind in ((LOCK, "r", fcntl.LOCK_SH), (ROLES, "r+", fcntl.LOCK_EX)):
    with contextlib.suppress(OSError), (workdir / name).open(mode) as file:
      try:
        _lock(file, kind, "")
      except ConfigError:
        return True
  return False


def live_in(workdir: Path) -> IO[str] | None:
  """Marks that a role lives here, until the returned file is closed or the process ends.

  The mark is a kernel lock, which other machines see too, over NFS. A file system without locks is
  no reason to refuse: no run can train there, so none can overwrite.

  Raises:
    ConfigError: a run that begins there has been deleting files for long.
  """
  with contextlib.suppress(OSError):
    file = (workdir / ROLES).open("a+")
    _lock(file, fcntl.LOCK_SH, f"--workdir={workdir}: {_TRAINED}", END_SECONDS)
    return file
  return None


def check(workdir: Path, config: Config, overwrite: bool) -> bool:
  """Whether a run in `workdir` would go on; changes nothing.

  Raises:
    ConfigError: the run there is finished, has another config, or cannot be read.
  """
  if overwrite:
    return False
  with _writing(workdir):
    if not is_there(workdir / "config.json"):
      return False
  end, rule = outcome(workdir), "its run is finished"
  simulated, other = "holds a simulated run", "choose another directory, or add --overwrite"
  require("virtual_seconds" not in end, "--workdir", str(workdir), simulated, other)
  _refuse_another(workdir, config, saved_config(workdir), MAY_CHANGE)
  over = end.get("reason") == "finished" and not _is_longer(config, workdir)
  again = "add --overwrite to replace that run, or go on with a greater --config.run.total_tokens"
  fix = f"choose another directory, {again}"
  if LAST_KNOWN not in end:
    rule += ", and was killed before its report was drawn, which `ddiloco report` does"
  require(not over, "--workdir", str(workdir), rule, fix)
  return True


def outcome(workdir: Path) -> dict[str, Any]:
  """The content of outcome.json; empty before the run's end, also where a finished run begins to go
  on with more tokens, or if a kill has torn the file."""
  found = mapping(workdir / OUTCOME)
  match mapping(workdir / "config.json"):
    case {"run": {"total_tokens": tokens}} if found.get("total_tokens", tokens) != tokens:
      return {}
  return found


def reached_end(workdir: Path, config: Config) -> bool:
  """Whether the run in `workdir` has reached its end, and `config` makes it no longer.

  Raises:
    ConfigError: it has, and had another config.
  """
  if outcome(workdir).get("reason") != "finished":
    return False
  _refuse_another(workdir, config, saved_config(workdir), ("run.total_tokens",))
  return not _is_longer(config, workdir)


def _is_longer(config: Config, workdir: Path) -> bool:
  """Whether `config` has more tokens than the run in `workdir`."""
  return config.run.total_tokens > saved_config(workdir).run.total_tokens


def _changed(config: Config, workdir: Path) -> tuple[str, Any, Any] | None:
  """(field, its value in `config`, in the run's own) of the first field that `config` changes, of
  those that may change when a run goes on; None: it changes none, or makes the run shorter."""
  saved = saved_config(workdir)
  changes = (each for each in differences(config, saved) if each[0] in MAY_CHANGE)
  shorter = config.run.total_tokens < saved.run.total_tokens
  return None if shorter else next(changes, None)


def clear_outcome(workdir: Path) -> None:
  """Deletes the outcome of a run that goes on: an evaluator that was stopped has left it.

  Raises:
    ConfigError: the directory cannot be written.
  """
  with _writing(workdir):
    tempfile.TemporaryFile(dir=workdir).close()
    (workdir / OUTCOME).unlink(missing_ok=True)


def mapping(path: Path) -> dict[str, Any]:
  """The mapping in a file of JSON of a workdir; empty if there is none, or no such file.

  Raises:
    Unanswered: it cannot be read.
  """
  try:
    found = json.loads(path.read_text())
  except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
    return {}
  except OSError as error:
    rule, fix = f"its {path.name} cannot be read ({error})", "make it readable"
    raise refusal("--workdir", str(path.parent), rule, fix, Unanswered) from error
  return found if isinstance(found, dict) else {}


def claim(
  workdir: Path, config: Config, overwrite: bool, needless: Callable[[], bool] = lambda: False
) -> bool:
  """Makes the workdir this run's own; returns whether a run in it goes on.

  With `overwrite` the files of an earlier run are removed; other files stay. Refused while roles
  live here that were started by hand: they would train beside this run, in the same files. It waits
  for those that end, unless that becomes `needless`.
  """
  goes_on = check(workdir, config, overwrite)
  with _writing(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
    ours = left_by_a_run(workdir) if overwrite else []
    _refuse_to_delete(workdir, ours)
    with contextlib.ExitStack() as stack:
      with contextlib.suppress(FileNotFoundError):  # no role ever lived here
        roles = stack.enter_context((workdir / ROLES).open("r+"))
        live = f"--workdir={workdir}: {_ROLES_LIVE}"
        _lock(roles, fcntl.LOCK_EX, live, END_SECONDS, needless)
      for path in ours:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
      write_whole(workdir / "config.json", config.to_json() + "\n")
      (workdir / OUTCOME).unlink(missing_ok=True)
      start_time(workdir)
  return goes_on


def left_by_a_run(workdir: Path) -> list[Path]:
  """What --overwrite deletes, there or not. First what says that the run is over: of its files some
  are gone soon. The files that tell of a run, config.json, come last.

  A remainder of the old result that outlived them would be taken for the next run's result.
  """
  return [workdir / OUTCOME, *workdir.glob(REMAINDERS), *(workdir / name for name in OURS)]


def _refuse_to_delete(workdir: Path, paths: Collection[Path]) -> None:
  """Refuses links to folders elsewhere, and what no run has left here: other programs' files have
  such names too. A run's config may be torn, or that of another version."""
  for path in paths:
    linked = path.is_symlink() and path.is_dir()
    rule = f"{path} leads elsewhere, and --overwrite deletes only what is in the workdir itself"
    fix = "remove the link, and what it leads to if that is not needed"
    require(not linked, "--workdir", str(workdir), rule, fix)
  there = [path.name for path in paths if is_there(path)]
  values = mapping(workdir / "config.json")
  ours = (workdir / STARTED).exists() or {"islands", "sync"} <= values.keys()
  rule = f"--overwrite would delete {', '.join(there)} in it, but it holds no run (no config.json)"
  fix = "choose another directory, or move them away"
  require(ours or not there, "--workdir", str(workdir), rule, fix)


def start_time(workdir: Path, began: float | None = None) -> float:
  """When the run in `workdir` began, in unix seconds: `began`, or now, if no file says so yet.

  Raises:
    OSError: the directory cannot be written.
    ConfigError: the file with the time is torn, for example by a power cut.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  _write_once(workdir / STARTED, f"{time.time() if began is None else began}\n")
  if (found := started(workdir)) is None:
    rule = f"its file {STARTED!r} says no time in unix seconds"
    fix = "write when the run began into it, or delete it: times of events then begin at 0 again"
    raise refusal("--workdir", str(workdir), rule, fix)
  return found


def started(workdir: Path) -> float | None:
  """When the run in `workdir` began, in unix seconds; None if no file says so, or it is torn.

  Raises:
    OSError: the directory cannot be reached.
  """
  try:
    found = float((workdir / STARTED).read_text())
  except (FileNotFoundError, NotADirectoryError, ValueError):
    return None
  return found if math.isfinite(found) else None


@contextlib.contextmanager
def _writing(workdir: Path) -> Iterator[None]:
  """In this context an OSError becomes a ConfigError: the workdir cannot be written."""
  try:
    yield
  except OSError as error:
    rule = f"cannot be written ({error})"
    fix = "choose a directory that you may write to, with enough room"
    raise refusal("--workdir", str(workdir), rule, fix, kind_of(error)) from error


def saved_config(workdir: Path, mine: Config | None = None) -> Config:
  """The config a run was started with; or `mine`, which may say where its project is now.

  Raises:
    ConfigError: there is no run in `workdir`, its config is torn or of another version, or `mine`
      is that of another run.
  """
  saved = read_config(workdir / "config.json", str(workdir / "config.json"))
  if mine is not None:
    _refuse_another(workdir, mine, saved)
  return mine or saved


def read_config(path: Path, named: str) -> Config:
  """The config in a file, which errors name so.

  Raises:
    ConfigError: the file is not there, cannot be read, is torn, or is of another version.
  """
  try:
    return from_dict(json.loads(path.read_text()))
  except ConfigError as error:
    raise ConfigError(f"{named}: {error}") from error
  except (FileNotFoundError, NotADirectoryError) as error:
    fix = "name the directory of a run"
    raise ConfigError(f"{named}: holds no run's config ({error.strerror}). Fix: {fix}.") from error
  except OSError as error:
    fix = "make it readable, or start again when its storage answers"
    raise kind_of(error)(f"{named}: cannot be read ({error}). Fix: {fix}.") from error
  except (ValueError, RecursionError) as error:
    fix = "copy it again, or move it away and repeat the command that trained: it goes on"
    raise ConfigError(f"{named}: is torn, or no config ({error}). Fix: {fix}.") from error


def join(workdir: Path, config: Config, began: float | None = None) -> float:
  """Enters the workdir of a run that several processes share, on one machine or one file system.

  The first role writes its config and the time; restarted roles find them again. A run none of
  whose roles lives goes on with the config of the first role that changes what may change then.
  `began`: when the run began, if that is known; it is written where it was deleted.

  Returns:
    When the run began, in unix seconds; event times count from there.

  Raises:
    ConfigError: the directory cannot be written, or holds a run with another config.
  """
  with _writing(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
    _write_once(workdir / "config.json", config.to_json() + "\n")
    started = start_time(workdir, began)
  if _changed(config, workdir):
    refuse_trained(workdir)
    try:
      claim(workdir, config, False, needless=lambda: not _changed(config, workdir))
    except ConfigError as error:
      if change := _changed(config, workdir):  # else another role was quicker, and lives
        field, ours, theirs = change
        text = f"{field} = {ours!r}: the run there has {theirs!r}; {error}"
        raise type(error)(text) from error
  _refuse_another(workdir, config, saved_config(workdir))
  return started


def _write_once(path: Path, text: str) -> None:
  """Writes a new file, whole or not at all; an existing file stays as it is."""
  if not path.exists():
    with contextlib.suppress(FileExistsError):  # another process was quicker: its text counts
      write_whole(path, text, os.link)


def write_whole(path: Path, text: str, place: Callable[[Path, Path], None] = os.replace) -> None:
  """Writes a file, whole or not at all; an existing file is replaced only then."""
  mine = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
  try:
    mine.write_text(text)
    place(mine, path)
  finally:
    mine.unlink(missing_ok=True)


def _refuse_another(
  workdir: Path, mine: Config, saved: Config, may_change: Collection[str] = ()
) -> None:
  """Refuses a config that differs from the saved one in what roles of one run share."""
  for name, ours, theirs in differences(mine, saved):
    rule = f"the run in --workdir={workdir} has {theirs!r}"
    it = f"--config={workdir / 'config.json'} is it"
    fix = f"use the same --config ({it}), or another --workdir"
    alone = name == "sync.num_shards" and not (ours and theirs)
    require(name in may_change and not alone, name, ours, rule, fix)


def differences(mine: Config, saved: Config) -> list[tuple[str, Any, Any]]:
  """(field, its value in `mine`, in `saved`) of those that differ, but must not in one run."""
  theirs = fixed(saved)
  return [(name, ours, theirs[name]) for name, ours in fixed(mine).items() if ours != theirs[name]]


def fixed(config: Config) -> dict[str, Any]:
  """What all roles of a run share, by name: every field outside `FREE_SECTIONS` but one, and the
  run's length and start.

  Of a custom part the folder does not count: the project may have moved, or be elsewhere on another
  machine that shares the workdir.
  """
  found = {f"run.{name}": getattr(config.run, name) for name in ("total_tokens", "init_from")}
  for name in (f.name for f in dataclasses.fields(config) if f.name not in FREE_SECTIONS):
    value = getattr(config, name)
    inner = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    found |= {f"{name}.{f.name}": getattr(value, f.name) for f in inner} or {name: value}
  del found["sync.value_threads"]  # of one machine
  for name in (name for name in found if name.endswith(".custom")):
    found[name] = found[name].rpartition("/")[2]
  return found


# --- Requests to a run while it goes on: lines of JSON in a file of its workdir
# Write access to the file is enough to make a request. The process that can carry out the request
# polls the file.


def append_request(path: Path, fields: Mapping[str, Any]) -> None:
  """Appends a request, with the time of now.

  Raises:
    OSError: the line cannot be written.
  """
  # Unix seconds. The line before may be one that a full disk has cut off.
  line = "\n" + json.dumps({"time": time.time(), **fields}) + "\n"
  file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
  try:
    # One call, so that lines of several processes do not mix; a full disk takes the beginning.
    if os.write(file, line.encode()) < len(line):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
  finally:
    os.close(file)


class RequestFile(Generic[T]):
  """Reads requests.

  Args:
    path: of the file.
    parse: makes a request of a line's fields, without its time.
    what: the kind of request in a word, for warnings.
    news_only: skip the lines that are there already.
  """

  def __init__(
    self,
    path: Path,
    parse: Callable[[dict[str, Any]], T],
    what: str,
    news_only: bool = False,
  ):
    self._path, self._parse, self._what = path, parse, what
    self._news_at = path.stat().st_size if is_there(path) else 0
    self._at = self._news_at if news_only else 0

  def poll(self) -> Iterator[tuple[float, T]]:
    """(age in seconds, the request) of every line since the last call.

    The age of a line that this reader has found there is by the clock of the one who wrote it; a
    later line is new, whatever its time.
    """
    try:
      with self._path.open("rb") as file:
        file.seek(self._at)
        *lines, _ = file.read().split(b"\n")  # the last is still being written, or empty
    except FileNotFoundError:
      return
    for line in lines:
      new = self._at >= self._news_at
      self._at += len(line) + 1
      if not line:
        continue
      try:
        fields = json.loads(line)
        age_seconds = time.time() - float(fields.pop("time"))
        yield 0.0 if new else max(0.0, age_seconds), self._parse(fields)
      except Exception as error:  # anything may be in the file
        warn(f"{self._path}: a line asks for no {self._what} ({error}). It is ignored.")
