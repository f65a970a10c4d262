"""Shared by the scripts beside this file: arguments, runs as a user starts them, results."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

for _needed in ("ddiloco", "jax"):
  if importlib.util.find_spec(_needed) is None:
    _fix = "source .venv/bin/activate; where there is none yet, `bash scripts/venv.sh` makes it"
    _who = f"{Path(sys.argv[0]).name}: {sys.executable} has no package {_needed!r}"
    print(f"{_who}. Fix: {_fix}.", file=sys.stderr)
    sys.exit(2)

from ddiloco import api, environment
from ddiloco import workdir as workdirs
from ddiloco.checks import refusal, require
from ddiloco.config import Config, ConfigError, check_field, from_dict
from ddiloco.observe import plots
from ddiloco.observe.eventlog import EventLog, GrowingLog, read_events
from ddiloco.protocol.events import Commit, RunFinished, Started

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
SAID_CHARACTERS = 4000  # shown of the log of a run that failed
PATIENCE_SECONDS = 300.0
PROGRAM = (sys.executable, "-m", "ddiloco", "train")
# Before a command: the kernel kills it when the thread that started it ends, also by kill -9.
TIED = ("setpriv", "--pdeathsig=KILL")

# --- A script from its start to its end


def run_script(main: Callable[[], int | None]) -> NoReturn:
  """Runs a script; ends this process with the status that `main` returns.

  Neither Ctrl-C, nor a reader that has enough (`| head`), nor wrong usage makes a traceback.
  """
  status: int | None = environment.FINISHED
  try:
    with environment.reader_may_leave():
      status = main()
  except ConfigError as error:
    print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    status = environment.BAD_USAGE
  except KeyboardInterrupt:
    status = environment.INTERRUPTED
  sys.exit(status)


# --- Arguments


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
  """--help is the script's docstring, and the flags with their defaults."""


def options(
  text: str | None, quick: Mapping[str, Any] | None = None, /, **flags: Any
) -> argparse.Namespace:
  """The values of a script's flags.

  Args:
    text: the script's docstring.
    quick: the values of flags with --quick; None: there is no --quick.
    flags: by name a default, or (default, help). A type is a flag without default, False a switch,
      a dict what `add_argument` takes. Numbers must be positive; 0 is one where it is the default.
  """
  parser = argparse.ArgumentParser(description=text, formatter_class=_Help)
  of_default = "default: %(default)s"  # argparse shows none of a flag without a text
  told = {n: flag if isinstance(flag, tuple) else (flag, of_default) for n, flag in flags.items()}
  if quick is not None:
    told["quick"] = False, "a smoke test: numbers mean little"
  for name, (default, what) in told.items():
    how = {"type": type(default), "default": default}
    if isinstance(default, type | dict):
      how = default if isinstance(default, dict) else {"type": default}
    elif default is False:
      how = {"action": "store_true"}
    parser.add_argument(f"--{name}", **{"help": what, **how})
  found = parser.parse_args()
  vars(found).update(quick if quick and found.quick else {})
  for name, (default, _) in told.items():
    value, least = getattr(found, name), "at least" if default == 0 else "above"
    if isinstance(value, Path):  # no shell reads the "~" of --workdir=~/runs
      setattr(found, name, value.expanduser())
    number = isinstance(value, int | float) and not isinstance(default, dict)
    if number and not (0 <= value < math.inf and (value or default == 0)):
      parser.error(f"--{name}={value}: must be {least} 0. Fix: for example --{name}=1")
  return found


ENGINE = {"choices": ["threads", "processes"], "default": "threads"}  # a flag


def names_of(known: Iterable[str], separator: str = ",") -> Callable[[str], list[str]]:
  """The type of an argument: some of the known names."""

  def split(text: str) -> list[str]:
    found = [name for name in text.split(separator) if name]
    if unknown := set(found).difference(known):
      unknown_names = ", ".join(sorted(unknown))
      raise argparse.ArgumentTypeError(f"{unknown_names} is none of {f'{separator} '.join(known)}")
    return found

  return split


def several(kind: type[float], separator: str = ",") -> Callable[[str], list[float]]:
  """The type of an argument that is one positive number or several."""

  def numbers(text: str) -> list[float]:
    found = [kind(each) for each in text.split(separator)]
    if not min(found) > 0:
      raise ValueError
    return found

  return numbers


def _new_file(text: str) -> Path:
  """The type of an argument that names a file to write: refused now, and not after hours."""
  path = Path(text).expanduser()
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()
  except OSError as error:
    raise argparse.ArgumentTypeError(f"{path} cannot be written ({error})") from error
  if path.is_dir():
    raise argparse.ArgumentTypeError(f"{path} is a folder. Fix: name a file in it")
  return path


OUTPUT = {"type": _new_file}  # a flag


def make_folder(path: Path, new: bool = False) -> None:
  """Makes a folder in that of --workdir, or this itself; `new`: there must be none."""
  try:
    path.mkdir(parents=True, exist_ok=not new)
  except OSError as error:
    fix = f"choose a {'new ' * new}directory that you may write to"
    raise refusal("--workdir", str(path), f"cannot be written ({error})", fix) from error


@contextlib.contextmanager
def folder(kept: Path | None = None) -> Iterator[Path]:
  """A context with the folder of --workdir, which stays, or else with a temporary one."""
  with tempfile.TemporaryDirectory(prefix="ddiloco-") as scratch:
    yield (kept or Path(scratch)).absolute()


# --- Configs


def config_of(name: str, fields: Mapping[str, Any]) -> Config:
  """configs/NAME.py, or NAME:PRESET, with some fields changed, as {"sync.num_fragments": 6}."""
  file, colon, preset = name.partition(":")
  values = api.load(f"{ROOT / 'configs' / file}.py{colon}{preset}")
  for field, value in fields.items():
    check_field(field, value)
  values.update_from_flattened_dict(dict(fields))
  return from_dict(values)


def small(layers: int, width: int, length: int, tiny: bool = False, **sections: Any) -> Config:
  """A config with a small model, on sequences of so many made-up tokens, and other sections.

  `tiny`: one head of keys, and a hidden layer of two widths instead of three.
  """
  heads = max(2, width // 32)
  model = {"num_layers": layers, "model_dim": width, "mlp_dim": (2 if tiny else 3) * width}
  model |= {"num_heads": heads, "num_kv_heads": 1 if tiny else heads, "head_dim": width // heads}
  data = {"source": "synthetic", "sequence_length": length, "heldout_sequences": 16}
  return from_dict({"model": model, "data": data, **sections})


# --- Runs in processes of their own


def log_of(workdir: Path) -> Path:
  """The file with the output of all starts of a run."""
  return workdir.with_name(f"{workdir.name}.log")


def last_words(workdir: Path) -> str:
  """The end of that output."""
  return log_of(workdir).read_text(errors="replace")[-SAID_CHARACTERS:]


def start(config: Config, workdir: Path, *flags: str, cpu: bool = True) -> subprocess.Popen[bytes]:
  """Starts `ddiloco train`, which ends with this script; config and output are beside `workdir`.

  `cpu`: on fake CPU devices.
  """
  make_folder(workdir.parent)
  file = workdir.with_name(f"{workdir.name}.json")
  file.write_text(config.to_json())
  command = [*TIED, *PROGRAM, f"--config={file}", f"--workdir={workdir}"]
  command += [*flags, *(["--cpu"] if cpu else [])]
  with log_of(workdir).open("ab") as log:
    return subprocess.Popen(command, stdout=log, stderr=log)


def train(config: Config, workdir: Path, *flags: str) -> EventLog:
  """The events of a run that has ended: an earlier one, or a new one."""
  if not done_before(config, workdir):
    print(f"--- {workdir.name}: output in {log_of(workdir)}", flush=True)
    if status := start(config, workdir, "--overwrite", *flags).wait():
      sys.exit(f"{workdir.name} failed with status {status}:\n{last_words(workdir)}")
  return read_events(workdir)


def done_before(config: Config, workdir: Path) -> bool:
  """Whether a run of this config has ended in `workdir`; another run there is refused."""
  if not read_events(workdir).of(RunFinished):
    return False
  same = workdirs.saved_config(workdir) == config
  require(same, "--workdir", str(workdir), "holds another run", "choose another one")
  print(f"{workdir.name}: done before, in {workdir}", flush=True)
  return True


def wait_for(
  what: str, found: Callable[[], Any], works: Callable[[], bool], said: Callable[[], str]
) -> Any:
  """The first true `found()`; ends the script if `works()` is false, or the wait takes too long.

  `said`: the end of the message then.
  """
  until = time.monotonic() + PATIENCE_SECONDS
  while not (value := found()):
    if not works() or time.monotonic() > until:
      sys.exit(f"waited in vain for {what}: {said()}")
    time.sleep(0.2)
  return value


class Run:
  """A run of `ddiloco train --engine=processes`, which starts now, and its events so far."""

  def __init__(self, config: Config, workdir: Path, cpu: bool = True):
    self.workdir, self.began = workdir, time.time()
    self._log = GrowingLog(workdir)
    self._process = start(config, workdir, "--engine=processes", cpu=cpu)

  def __enter__(self) -> Run:
    return self

  def __exit__(self, *_: object) -> None:
    """Ends the run by SIGTERM, after which it saves its work."""
    self._process.send_signal(signal.SIGTERM)
    try:
      self._process.wait(PATIENCE_SECONDS)
    finally:
      self._process.kill()

  @property
  def log(self) -> EventLog:
    """All events so far."""
    return self._log.read()

  def wait_for(self, what: str, found: Callable[[EventLog], Any]) -> Any:
    """The first true `found(events)`."""
    print(f"waiting for {what} ...", flush=True)
    works, said = lambda: self._process.poll() is None, lambda: last_words(self.workdir)
    return wait_for(what, lambda: found(self.log), works, said)

  def kill(self, *flags: str) -> None:
    """kill -9 of its processes that have these flags; the run starts them again. Linux."""
    for pid in processes_of(self.workdir, *flags):
      with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGKILL)


def merged(log: EventLog, learner: int, lives: int = 1) -> list[Commit]:
  """The commits with pushes of a learner's newest life, once it has had so many lives."""
  incarnations = {e.incarnation for e in log.of(Started, f"learner-{learner}")}
  if len(incarnations) < lives:
    return []
  own = learner, max(incarnations)
  return [e for e in log.of(Commit) if own in zip(e.learners, e.incarnations)]


def processes_of(workdir: Path, *flags: str) -> list[int]:
  """Other live processes whose command line names the workdir: a run and its roles (Linux).

  With `flags` only processes that have all these flags too, such as `--learner=2`.
  """
  wanted = [f" {word} ".encode() for word in (f"--workdir={workdir}", *flags)]
  found = []
  for folder in Path("/proc").glob("[0-9]*"):
    try:
      line = b" %b " % (folder / "cmdline").read_bytes().replace(b"\0", b" ")
      dead = (folder / "stat").read_text().rpartition(") ")[2][0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
      continue  # that process has just ended
    if all(word in line for word in wanted) and not dead and int(folder.name) != os.getpid():
      found.append(int(folder.name))
  return found


# --- Results


class Kept:
  """Results in a file, a line of JSON each; other processes may add to the file.

  `key_of`: the key of a result.
  """

  def __init__(self, file: Path, key_of: Callable[[dict[str, Any]], Any]):
    self._file, self._key_of = file, key_of
    self._found: dict[Any, dict[str, Any]] = {}
    make_folder(file.parent)

  def get(self, key: Any) -> dict[str, Any] | None:
    """The result with this key, if there is one by now."""
    if key not in self._found and self._file.exists():
      lines = map(json.loads, self._file.read_text().splitlines())
      self._found = {self._key_of(each): each for each in lines}
    return self._found.get(key)

  def made(self, key: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result with this key: an earlier one, or that of `make`, which is added."""
    return self.get(key) or self.add(make())

  def add(self, found: dict[str, Any]) -> dict[str, Any]:
    """Adds a result."""
    with self._file.open("a") as file:
      file.write(json.dumps(found) + "\n")
    self._found[self._key_of(found)] = found
    return found


def show(rows: Mapping[str, Mapping[str, Any]], digits: int = 2) -> None:
  """Prints rows by name; the columns are those of the first row."""
  columns = next(iter(rows.values()), ())
  for name, row in {"": dict(zip(columns, columns)), **rows}.items():
    cells = (
      f"{each:.{digits}f}" if isinstance(each, float) else str(each) for each in row.values()
    )
    print(f"{name:<36}" + "".join(f" {cell:>15}" for cell in cells), flush=True)


def middle(values: Sequence[float], digits: int = 4) -> float | None:
  """The median, rounded; None without values."""
  return round(statistics.median(values), digits) if values else None


def spread(values: Sequence[float], digits: int, sign: str = "") -> str:
  """Mean and standard deviation; `sign`: "+" for a mean that is a difference."""
  text = f"{statistics.mean(values):{sign}.{digits}f}"
  return text + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def memory_bytes(key: str = "VmRSS") -> int:
  """Memory of this process; "VmHWM": the most that it ever had. Linux."""
  lines = Path("/proc/self/status").read_text().splitlines()
  return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


@contextlib.contextmanager
def picture(
  path: Path, height_inches: float, rows: int = 1, **options: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
  """A context with a figure in the style of the report; the figure is written at its end."""
  with plots.styled():
    figure, axes = plots.new_figure(height_inches, rows, **options)
    yield figure, axes
    path.parent.mkdir(parents=True, exist_ok=True)
    plots.save(figure, path)
