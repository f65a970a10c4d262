"""Commands about runs: train, run one role, watch, use the result, check and replay the trace."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from ddiloco import environment
from ddiloco.api import ready
from ddiloco.checks import is_number, refusal, require
from ddiloco.cli.arguments import Flags
from ddiloco.config import Config, ConfigError
from ddiloco.config.schema import MAX_FRAGMENTS, MAX_LEARNERS
from ddiloco.dashboard.server import Dashboard, Where, check_logs
from ddiloco.engines.profiler import MOST_STEPS, ProfileRequest, take_profile
from ddiloco.engines.role_spec import RoleSpec, beside, end_with_parent, terminates
from ddiloco.environment import FINISHED, LOST
from ddiloco.trace import text
from ddiloco.workdir import PROFILES, RESULT, refuse_trained, run_name

if TYPE_CHECKING:  # its module imports JAX
  from ddiloco.training.data import Corpus

Arrays = Mapping[str, Any]  # name -> np.ndarray
Save = Callable[[Arrays, dict[str, str]], Any]  # (arrays, metadata) -> the path that it has written


def train(arguments: list[str]) -> int:
  """Trains as the config says, shows the run live, and leaves result, events and report in workdir.

  With --dry_run it prints the final config, the islands, the fragments and their bytes on the wire,
  and touches no device.
  """
  given = Flags(arguments, "config", "workdir", "cpu")
  given.add("dry_run", False, "Print what would run, then exit.")
  given.add("overwrite", False, "Replace the run that is in workdir.")
  given.add(
    "engine",
    "threads",
    "threads: all of it in this process; processes: a process for each island and shard; ray: an"
    " actor for each, on this machine or a cluster.",
  )
  given.add(
    "ray_address",
    "",
    "With --engine=ray: HOST:PORT of a cluster, or auto; else a Ray of this machine alone. All"
    " nodes of a cluster must share workdir.",
  )
  given.add(
    "dashboard",
    "",
    "HOST:PORT that shows the run in a browser; 127.0.0.1:0: any free port. Else there is none.",
  )
  _add_access_flags(given)
  given.parse(train.__doc__)
  config, engine, address = given.final_config(), given.engine, given.ray_address
  rule, good = f"--engine={engine} does not use Ray", engine == "ray" or not address
  require(good, "--ray_address", address, rule, "add --engine=ray")
  cpu_only = given.cpu or given.dry_run  # Orbax looks for devices
  with environment.importing():
    ready(config, cpu_only, engine)
    from ddiloco.engines import session
    from ddiloco.training.data import check_here

  if given.dry_run:
    print(session.describe(config, check_here(config)))
    return FINISHED
  return session.train(
    config,
    given.workdir,
    overwrite=given.overwrite,
    engine=engine,
    options={"address": address, "cpu_only": given.cpu} if engine == "ray" else {},
    dashboard=_where(given, "dashboard") if given.dashboard else None,
  )


# --- Watch a run: the dashboard, a trace of its next steps


def dashboard(arguments: list[str]) -> int:
  """Serves one page about the run in workdir, while it runs or afterwards, until Ctrl-C.

  It reads only workdir, so it may run on any machine that can read workdir.
  """
  given = Flags(arguments, "workdir")
  given.add("bind", "127.0.0.1:0", "HOST:PORT, port 0: a free one.")
  _add_access_flags(given)
  given.parse(dashboard.__doc__)
  there, fix = given.workdir.is_dir(), "name the directory of a run"
  require(there, "--workdir", str(given.workdir), "is no directory", fix)
  check_logs(given.workdir)
  ended = threading.Event()
  with terminates(ended), Dashboard(given.workdir, _where(given, "bind")) as served:
    print(f"Dashboard of {given.workdir}: {served.url}   (Ctrl-C ends it)", flush=True)
    beside(ended.wait)
  print()  # after the terminal's own ^C
  return FINISHED


def _add_access_flags(given: Flags) -> None:
  """Adds --token and --allow_faults."""
  given.add(
    "token",
    "",
    "What the dashboard asks for; needed off loopback. @FILE reads it from a file, which hides it"
    " from `ps`.",
  )
  given.add("allow_faults", False, "Faults may be injected from the dashboard.")


def _where(given: Flags, flag: str) -> Where:
  """The dashboard's `Where` from the flags; its address is that of `flag`."""
  token = given.token
  if token.startswith("@"):
    try:
      token = Path(token[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
      raise refusal("--token", token, f"cannot be read ({error})", "name a file") from error
    require(bool(token), "--token", given.token, "is empty", "write a token into it")
  return Where(getattr(given, flag), token, given.allow_faults, f"--{flag}")


def profile(arguments: list[str]) -> int:
  """Profiles steps of a learner while its run goes on; prints the folder for TensorBoard or xprof.

  The learner is not held up: its process takes the profile. In the threads engine the process is
  the whole run. Nothing is lost if this command is ended while it waits. Exit status 1: no profile
  was taken, or not yet.
  """
  given = Flags(arguments, "workdir")
  given.add("learner", 0, "Number of the learner.")
  many = "Number of steps; a profile takes about a megabyte a step."
  given.add("steps", 5, many, least=1, most=MOST_STEPS)
  first = "Global step to begin at; 0, or one that is over: the next one."
  given.add("from_step", 0, first, least=0)
  given.add("wait_seconds", 120.0, "How long to wait for the profile.")
  given.parse(profile.__doc__)
  request = ProfileRequest(f"learner-{given.learner}", given.steps, given.from_step)
  there, said = take_profile(given.workdir, request, given.wait_seconds)
  print(said)
  if there:
    print(f"To look at it: tensorboard --logdir={given.workdir / PROFILES} (with xprof installed)")
  return FINISHED if there else LOST


# --- Use the result of a run


def generate(arguments: list[str]) -> int:
  """Lets the trained global model of a run continue a prompt."""
  given = Flags(arguments, "config", "workdir", "cpu")
  given.add("prompt", "", "Text to continue.")
  given.add("tokens", 200, "Number of tokens to write.", least=1)
  given.add("temperature", 0.7, "Temperature of the sampling; 0: greedy.", least=0.0)
  given.add("seed", 0, "Seed of the sampling.")
  given.parse(generate.__doc__)
  config = given.run_config()
  ready(config, cpu=given.cpu)
  from ddiloco.engines import session

  get = {name: getattr(given, name) for name in ("prompt", "tokens", "temperature", "seed")}
  print(session.sample(given.workdir, config, **get))
  return FINISHED


def evaluate(arguments: list[str]) -> int:
  """Prints the held-out loss of the trained global model of a run, as one JSON line."""
  given = Flags(arguments, "config", "workdir", "cpu")
  given.parse(evaluate.__doc__)
  config = given.run_config()
  ready(config, cpu=given.cpu)
  from ddiloco.engines import session

  measured = session.measure(given.workdir, config).items()
  said = {name: each if math.isfinite(each) else str(each) for name, each in measured}
  print(json.dumps({**said, "workdir": str(given.workdir)}))
  return FINISHED


def report(arguments: list[str]) -> int:
  """Draws the report of a run again from its event logs; also of a run that was cut off."""
  given = Flags(arguments, "workdir")
  given.parse(report.__doc__)
  from ddiloco.engines import session

  print(session.report(given.workdir))
  return FINISHED


def export(arguments: list[str]) -> int:
  """Writes the global model of a finished run as weights that can be read without ddiloco.

  --to=NAME.safetensors makes one local file; any other path a plain Orbax checkpoint, a directory,
  also gs://BUCKET/... Both hold f32 arrays with the model's own flat names, such as embedding,
  final_norm/scale or layers/attention/query. An array whose name begins with layers/ is all layers
  stacked: its first axis is the layer. The model, the tokenizer and the merged tokens are in the
  metadata. To start another run from it: ddiloco train --config.run.init_from=PATH.

  With --format=huggingface the path is a local folder with config.json, model.safetensors and the
  tokenizer, which transformers loads, and what builds on it: a Llama, or with experts a Mixtral.
  """
  given = Flags(arguments, "config", "workdir")
  given.add("to", str, "What to write: NAME.safetensors, or an Orbax directory.")
  given.add_choice("format", [*_FORMATS], "Whose names of arrays and files.")
  given.add("overwrite", False, "Replace what is there.")
  given.parse(export.__doc__)
  to = given.needed("to", "model.safetensors")
  workdir, overwrite = given.workdir, given.overwrite
  config = given.run_config()
  environment.prepare(num_cpu_devices=1, cpu_only=True)
  from ddiloco.checkpoint import weights
  from ddiloco.engines import session

  metadata = {  # for readers who have the weights alone
    "format": "ddiloco",
    "model": json.dumps(dataclasses.asdict(config.model)),
    "tokenizer": config.data.tokenizer,
    **weights.metadata(workdir / RESULT),
  }
  try:
    save = _FORMATS[given.format](config, to, overwrite)
    params = session.load_result(workdir, config)
    written = save(params, metadata)
  except ConfigError:
    raise
  except Exception as error:  # object stores and Orbax raise exceptions of their own
    rule = f"cannot be written ({type(error).__name__}: {error})"
    fix = "choose a path that you may write to, with enough room"
    raise refusal("--to", to, rule, fix) from error
  # A misspelled suffix makes a folder.
  form = "one file" if str(written).endswith(weights.SUFFIX) else "a folder"
  print(f"{written}: {sum(value.size for value in params.values()):,} parameters, in {form}")
  return FINISHED


def _as_weights(_: Config, to: str, overwrite: bool) -> Save:
  """Refuses to replace anything without --overwrite, and anything but weights even with it."""
  from ddiloco.checkpoint import weights

  path = weights.absolute(to, "--to")
  good = "://" not in to or not path.name.endswith(weights.SUFFIX)
  fix = f"write it here and copy it, or leave out {weights.SUFFIX} for an Orbax checkpoint"
  require(good, "--to", to, "a safetensors file can only be local", fix)
  weights.replaceable(path, "--to")
  free = overwrite or not weights.is_there(path)
  require(free, "--to", to, "exists", "choose another path, or add --overwrite")

  def save(params: Arrays, metadata: dict[str, str]) -> Any:
    weights.clear(to)
    return weights.save(to, params, metadata)

  return save


def _as_folder(config: Config, to: str, overwrite: bool) -> Save:
  """As `_as_weights`, for the folder that Hugging Face's classes load; refuses other models, too.

  Raises:
    ConfigError: also where the tokenizer cannot be read.
  """
  from ddiloco.checkpoint import weights
  from ddiloco.engines import session
  from ddiloco.training.tokens import load_tokenizer, shared_files

  model = config.model
  known = not (model.custom or model.image_size)
  rule, fix = "this model is no Llama and no Mixtral", "leave out --format, for plain arrays"
  require(known, "--format", "huggingface", rule, fix)
  rule, fix = "must be a local folder", "name one, and copy it then"
  require("://" not in to and not to.endswith(".safetensors"), "--to", to, rule, fix)
  folder = Path(to).expanduser().absolute()
  names = {file.name for file in folder.iterdir()} if os.path.lexists(folder) else set()
  end_token = load_tokenizer(config.data.tokenizer).end_token
  files = shared_files(config.data.tokenizer)
  ours = {_SHAPE, _TENSORS, *files}
  rule, fix = "has other files than such an export", "choose another path"
  left = f".{_TENSORS}."  # in names of what a killed export has left
  others = [name for name in names - ours if left not in name]
  require(not others, "--to", to, rule, fix)
  free = overwrite or not names
  require(free, "--to", to, "exists", "choose another path, or add --overwrite")

  def save(params: Arrays, metadata: dict[str, str]) -> Path:
    """config.json is written last: without it no reader takes the folder for a model. It is deleted
    once there is room for the new tensors."""
    shape, tensors = session.as_huggingface(config, params, end_token)
    whole, new = folder / _TENSORS, folder / f"{left}new{weights.SUFFIX}"
    for each in (whole, new):
      weights.clear(each)
    weights.save(new, tensors, {**metadata, "format": "pt"})  # readers ask for "pt"
    (folder / _SHAPE).unlink(missing_ok=True)
    new.replace(whole)
    for name, content in files.items():
      (folder / name).write_bytes(content)
    (folder / _SHAPE).write_text(json.dumps(shape, indent=2))
    return folder

  return save


_SHAPE, _TENSORS = "config.json", "model.safetensors"
# Of --format: refuses a path that is no place for it, and returns what writes there.
_FORMATS: dict[str, Callable[[Config, str, bool], Save]] = {
  "ddiloco": _as_weights,
  "huggingface": _as_folder,
}


# --- Verify a run: its trace, printed and checked, and performed again


def trace(arguments: list[str]) -> int:
  """Prints every operation that moved the model, a line each, and checks that they fit together.

  Exit status 1: they do not, and the last lines say what is wrong and where. The check needs all
  operations in memory: the trace of a long run takes about 0.6 kB an event (6 GB for ten million).
  """
  given = Flags(arguments, "workdir")
  given.add("role", "", "Print only this role's lines, e.g. learner-2.")
  given.parse(trace.__doc__)
  found = text.open_trace(given.workdir)
  text.print_trace(found, given.role)
  return FINISHED if text.print_invariants(found) else LOST


def replay(arguments: list[str]) -> int:
  """Makes every step and every commit of a run again: all must come out the same, bit by bit.

  Needs as many devices as the run had, of the same kind, and memory for its trace. Compares losses,
  saved states and the result. The last line is JSON; exit status 1: the trace does not fit
  together, or the replay differs from the run.
  """
  given = Flags(arguments, "config", "workdir", "cpu")
  given.parse(replay.__doc__)
  workdir, config = given.workdir, given.run_config()
  found = text.open_trace(workdir)
  if not text.print_invariants(found):
    return LOST
  needed = max(1, sum(found.devices().values()))
  environment.prepare(num_cpu_devices=needed, cpu_only=given.cpu)
  from ddiloco.trace.replay import replay_run

  columns = (*Progress.get_default_columns(), TimeElapsedColumn())
  with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
    task = bar.add_task("replay", total=None)
    summary, difference = replay_run(
      workdir, found, lambda done, of: bar.update(task, completed=done, total=of), config
    )
  if difference:
    print(f"The first difference: {difference}")
  print(json.dumps(summary))
  return FINISHED if summary["identical"] else LOST


# --- Run one role of a run in this process: learner, syncer, evaluator; and make keys for all roles


def keys(arguments: list[str]) -> int:
  """Makes keys for every role, needed where a run spans several machines.

  Prints which files to copy to which machine. With higher numbers it adds keys; it never replaces
  a key.
  """
  given = Flags(arguments)
  given.add("keys", str, "Directory of the keys.")
  given.add("learners", int, "How many learners.", least=0, most=MAX_LEARNERS)
  given.add("shards", int, "How many shards.", least=0, most=MAX_FRAGMENTS)
  given.parse(keys.__doc__)
  folder = Path(given.needed("keys", "DIR, the directory of the keys"))
  learners, shards = given.needed("learners", "8"), given.needed("shards", "2")
  from ddiloco.network.keys import instructions, make_keys

  print(instructions(folder, make_keys(folder, learners, shards)))
  return FINISHED


def learner(arguments: list[str]) -> int:
  """Trains one island on this process' devices, until the run is over or SIGTERM.

  An island of several hosts has one such process on each: host 0 leads, and talks to the shards.

  It may join a run at any time, under a number that no other learner has. Exit status 1: work was
  lost.
  """
  given = Flags(arguments, "config", "workdir", "cpu")
  _add_role_flags(given)
  _add_gpus(given)
  given.add("learner", int, "Number of the learner.", least=0, most=MAX_LEARNERS - 1)
  given.add(
    "hosts", "", "Where the hosts of an island meet (islands.hosts > 1): tcp://HOST:PORT of host 0."
  )
  given.add("host", 0, "Number of this host of the island; host 0 leads.", least=0)
  given.parse(learner.__doc__)
  config, place = given.final_config(), _place(given, hosts=given.hosts, host=given.host)
  number = given.needed("learner", "3, its number")
  island = config.islands.island(number)
  count = island.devices // island.hosts or 1
  with environment.importing():
    environment.prepare(num_cpu_devices=count, cpu_only=given.cpu, gpus=_gpus(given))
    from ddiloco.engines import single_roles

  # Host 0 looks for the others, whose config does not become that of the workdir's run.
  corpus = None if place.host else _checked_data(given, config)
  return single_roles.run_learner(config, number, place, corpus)


def syncer(arguments: list[str]) -> int:
  """Serves one shard's fragments, until the run is over or SIGTERM. Needs no accelerator.

  --syncers names all shards, this one too: each shard keeps copies of another one's fragments. Exit
  status 1: fragments were lost.
  """
  given = Flags(arguments, "config", "workdir")
  _add_role_flags(given)
  given.add("shard", int, "Number of the shard.", least=0)
  given.add("bind", str, "Where it listens, tcp://HOST:PORT.")
  given.parse(syncer.__doc__)
  config = given.final_config()
  shard = given.needed("shard", "0, its number")
  place = _place(given, bind=given.needed("bind", "tcp://127.0.0.1:7000"))
  if not given.attached:
    refuse_trained(place.workdir)
  with environment.importing():
    environment.prepare(num_cpu_devices=1, cpu_only=True)
    from ddiloco.engines.single_roles import run_syncer

  return run_syncer(config, shard, place)


def evaluator(arguments: list[str]) -> int:
  """Follows the global model, measures it, and leaves result and report in workdir.

  It trains nothing and delays no other role: a run goes on without it.
  """
  given = Flags(arguments, "config", "workdir", "cpu")
  _add_role_flags(given)
  _add_gpus(given)
  given.parse(evaluator.__doc__)
  config, place = given.final_config(), _place(given)
  refuse_trained(place.workdir)  # that run has one, in its own process
  devices = config.run.evaluator_devices
  cpu_only = given.cpu or not devices
  with environment.importing():
    environment.prepare(num_cpu_devices=devices or 1, cpu_only=cpu_only, gpus=_gpus(given))
    from ddiloco.engines import single_roles

  corpus = _checked_data(given, config) if config.run.evaluations else None
  return single_roles.run_evaluator(config, place, corpus)


def _checked_data(given: Flags, config: Config) -> Corpus | None:
  """The corpus, if it could be looked at. Data that do not fit are refused before the role's config
  becomes that of the workdir's run."""
  from ddiloco.training.data import check_here

  # The supervisor has looked for an attached role, whose restart should not take longer.
  return None if given.attached else check_here(config)


def _add_role_flags(given: Flags) -> None:
  """Adds the flags of every role."""
  given.add_fields(RoleSpec)
  given.add("keys", str, "Folder with this role's keys (ddiloco keys); needed off loopback.")
  given.add("attached", False, "End at once when standard input is closed.")


def _add_gpus(given: Flags) -> None:
  given.add("gpus", (), "Its own of the GPUs that JAX sees here, by number: 0,1. Else all.")


def _gpus(given: Flags) -> list[int]:
  rule, fix = "must be numbers of GPUs", "for example --gpus=0,1"
  require(all(map(is_number, given.gpus)), "--gpus", ",".join(given.gpus), rule, fix)
  return [int(number) for number in given.gpus]


def _place(given: Flags, **more: Any) -> RoleSpec:
  workdir = given.workdir
  given.needed("syncers", "tcp://HOST:PORT,..., the url of every shard")
  run_id = given.run_id or run_name(workdir)
  good, fix = "/" not in run_id and run_id not in ("", ".", ".."), "use letters, digits, - and _"
  require(good, "--run_id", run_id, "must be the name of a folder", fix)
  if given.attached:
    end_with_parent()
  fields = {**given.fields(RoleSpec), "run_id": run_id, **more}
  return RoleSpec(workdir, keys=Path(given.keys) if given.keys else None, **fields)
