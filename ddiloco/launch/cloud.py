"""A run in a cloud: calls kubectl and gcloud with what pure modules render.

`Clusters` applies the documents of `gke.py`, `Slices` runs the commands of `tpu_vms.py`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ddiloco.checks import refusal
from ddiloco.config import Config, from_dict
from ddiloco.launch import gke, tpu_vms
from ddiloco.launch.gke import Document, GkeRun, JobSetState
from ddiloco.launch.placement import PlacedIsland
from ddiloco.launch.tpu_vms import Need, Seen, Slice, TpuVmRun

T = TypeVar("T")
R = TypeVar("R")

# --- Calls of programs: each has a name, a limit and a line in the log

LONGEST_SECONDS = 7 * 86_400.0  # of a call; the system's own waits count milliseconds in 31 bits


class LaunchError(Exception):
  """The cloud did not do what was asked; the text says what, why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Ran:
  """The outcome of a call: exit status (None if it ran past its limit) and output."""

  status: int | None
  out: str
  error: str

  @property
  def reason(self) -> str:
    """The status and the output, of a long one its beginning and its end, in one line."""
    said = " ".join((self.error or self.out).split())
    short = said if len(said) <= 1000 else f"{said[:500]} ... {said[-500:]}"
    return f"status {self.status}: {short}"


def say(text: str) -> None:
  """Prints a line to the log, which is stderr, since documents go to stdout."""
  print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def attempt(
  what: str, command: Sequence[str], limit_seconds: float, stdin: str = "", looks: bool = False
) -> Ran:
  """Runs `command` for at most `limit_seconds`; `what` is its purpose, for the log.

  With `looks`, for repeated queries, it is logged only if it takes too long.

  Raises:
    ConfigError: there is no such program.
  """
  limit_seconds = min(limit_seconds, LONGEST_SECONDS)
  if not looks:
    say(f"{what} (at most {limit_seconds:g} s): {shlex.join(command)}")
  try:
    process = subprocess.Popen(
      list(command),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      errors="replace",  # of a host's greeting, for example
      start_new_session=True,  # so that gcloud's children can be killed with it
    )
  except FileNotFoundError as error:
    fix = "install it (docs/launch.md, step 1), or use --dry_run"
    raise refusal("PATH", command[0], "is not installed here", fix) from error
  try:
    out, error_text = process.communicate(stdin, timeout=limit_seconds)
  except subprocess.TimeoutExpired:
    _kill(process)
    say(f"{what}: gave up after {limit_seconds:g} s")
    return Ran(None, "", f"took longer than {limit_seconds:g} s")
  except BaseException:  # Ctrl-C
    _kill(process)
    raise
  return Ran(process.returncode, out, error_text)


def call(
  what: str, command: Sequence[str], limit_seconds: float, stdin: str = "", looks: bool = False
) -> str:
  """As `attempt`; returns the program's output.

  Raises:
    LaunchError: it failed.
  """
  ran = attempt(what, command, limit_seconds, stdin, looks)
  if ran.status != 0:
    raise LaunchError(
      f"{what}: {command[0]} failed, {ran.reason}. Fix: what it says, then the same command again."
    )
  return ran.out


def _kill(process: subprocess.Popen[str]) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.communicate()


# --- A run on GKE: the documents of `gke.py`

CALL_SECONDS = 120.0  # for one query, or one command on the hosts of a slice
_CONTEXTS = ("config", "get-contexts", "--output=name")


class _Dumper(yaml.SafeDumper):
  """Writes long texts line by line, and repeated objects in full instead of by reference."""

  def ignore_aliases(self, data: object) -> bool:
    return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
  # kubectl takes 1e3 for a number and y for true; PyYAML quotes neither.
  style = "|" if "\n" in text else "'" if text[:1].isdigit() or len(text) == 1 else None
  return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def as_yaml(documents: Sequence[Document]) -> str:
  return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)


class Clusters:
  """All clusters of a run on GKE.

  Args:
    run: the run, already checked.
  """

  def __init__(self, run: GkeRun):
    self._run = run
    self._silent = set[str]()  # clusters that did not answer the last look
    self._ours = [f"--namespace={run.namespace}", f"--selector={gke.RUN}={run.name}"]

  def create(self, found: Mapping[str, Sequence[Document]]) -> None:
    """Applies the documents of every cluster; objects that exist already stay, with this content.

    Raises:
      LaunchError: the run has other JobSets, in another cluster for example, or a cluster would
        refuse a document, and nothing was made; or a cluster does not answer any more.
    """
    others = self._elsewhere()
    for context, documents in found.items():
      made = {each["metadata"]["name"] for each in documents if each["kind"] == "JobSet"}
      for uid, name in _names(self._listed(context)):
        others.pop(uid, "")  # kubectl has another name of this cluster too
        if name not in made:
          others[uid] = f"{name} in {_named(context)}"
    if others:
      raise LaunchError(
        f"{', '.join(others.values())}: is of a run {self._run.name}, costs, and has no place in"
        " these flags; nothing was made. Fix: give the flags that it was made with (`ddiloco launch"
        " gke delete` with them ends it), or another --name."
      )
    apply = ["apply", "--server-side", "--field-manager=ddiloco", "--filename=-"]
    # A run that goes on would have got another config, or keys, before its JobSets were refused.
    for context, documents in found.items():
      what = f"{_named(context)}: whether it takes {len(documents)} objects"
      command = _kubectl(context, *apply, "--dry-run=server")
      ran = attempt(what, command, CALL_SECONDS, as_yaml(documents))
      if ran.status != 0:
        raise LaunchError(
          f"{what}: {ran.reason}; nothing was made or changed. Fix: what it says; where a field is"
          " immutable, the flags that the run was made with, or `ddiloco launch gke delete` first."
        )
    for context, documents in found.items():
      what = f"{_named(context)}: {len(documents)} objects"
      out = call(what, _kubectl(context, *apply), CALL_SECONDS, as_yaml(documents))
      for line in out.splitlines():
        say(line)

  def configs(self) -> list[Config]:
    """The configs of the run that clusters have, from earlier calls of `create`.

    Raises:
      LaunchError: a cluster does not answer.
    """
    listed = [self._listed(context, "configmaps") for context in self._run.contexts()]
    texts = [item.get("data", {}).get("config.json") for each in listed for item in each["items"]]
    return [from_dict(json.loads(text)) for text in texts if text]

  def status(self) -> list[JobSetState]:
    """The states of all JobSets of the run; those of a cluster that does not answer are `UNSEEN`,
    and why is said when it falls silent."""
    where = self._run.jobsets()
    found = gke.states([item for each in self._run.contexts() for item in self._look(each)], where)
    why = {n: f"{_named(c)} does not answer" for n, c in where.items() if c in self._silent}
    unseen = {name: JobSetState(name, jobs=gke.UNSEEN, reason=said) for name, said in why.items()}
    return [unseen.get(each.name, each) for each in found]

  def _look(self, context: str) -> list[dict[str, Any]]:
    """The run's JobSets in a cluster and their pods; none if it does not answer."""
    try:
      found = self._listed(context, f"{gke.JOBSETS},pods")["items"]
    except LaunchError as error:
      if context not in self._silent:
        say(str(error))
      self._silent.add(context)
      return []
    self._silent.discard(context)
    return found

  def _listed(self, context: str, kinds: str = gke.JOBSETS, *flags: str) -> dict[str, Any]:
    """What the run has of these kinds in a cluster, in kubectl's words."""
    listing = ["get", kinds, *self._ours, "--output=json", *flags]
    what, command = f"{_named(context)}: what it has of the run", _kubectl(context, *listing)
    return json.loads(call(what, command, CALL_SECONDS, looks=True))

  def _elsewhere(self) -> dict[str, str]:
    """JobSets of a run of this name in those of kubectl's clusters that this run does not name, as
    text, by uid. A cluster that does not answer is passed over, and said."""
    known = call("its clusters", _kubectl("", *_CONTEXTS), CALL_SECONDS, looks=True).splitlines()
    found = dict[str, str]()

    def ask(context: str) -> None:
      try:
        listed = self._listed(context, gke.JOBSETS, "--request-timeout=10s")
      except LaunchError as error:
        if "doesn't have a resource type" not in str(error):
          say(f"passed over, though the run may be there too: {error}")
      else:
        found.update({uid: f"{name} in {context}" for uid, name in _names(listed)})

    others = [context for context in known if context not in self._run.contexts()]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
      list(threads.map(ask, others))
    return found

  def watch(self, limit_seconds: float, poll_seconds: float) -> bool:
    """Reports changes until every JobSet has ended; the clusters themselves restart failed pods.

    A cluster that does not answer is asked again, and the others are watched. Returns whether all
    have completed.

    Raises:
      LaunchError: they were deleted, or have not ended within the limit.
    """
    until, seen, had = time.monotonic() + limit_seconds, list[JobSetState](), False
    count = len(self._run.jobsets())
    say(f"{self._run.name}: watches {count} JobSets (at most {limit_seconds:g} s)")
    while True:
      before, seen = seen, self.status()
      for each in (state for state in seen if state not in before):
        say(str(each))
      had = had or any(each.jobs > 0 for each in seen)
      if had and not any(each.jobs for each in seen):  # also none that is unseen
        raise LaunchError(
          f"{self._run.name}: was deleted, and not by this command."
          " Fix: if you want it back, create again."
        )
      if seen and all(each.end for each in seen):
        return all(each.end == "Completed" for each in seen)
      if time.monotonic() >= until:
        raise LaunchError(
          f"{self._run.name}: has not ended within {limit_seconds:g} s; it goes on."
          " Fix: watch it again, or `ddiloco launch gke delete`."
        )
      time.sleep(poll_seconds)

  def delete(self, limit_seconds: float) -> list[str]:
    """Deletes all objects that `create` made; returns kubectl's names of those that are left, also
    in clusters that this run does not name."""
    left = []
    for context in self._run.contexts():
      where, which = _named(context), [gke.KINDS, *self._ours]
      # In the foreground: an object with pods goes only after its pods, which drain first.
      wait = ["--ignore-not-found", "--cascade=foreground", f"--timeout={limit_seconds:.0f}s"]
      what = f"{where}: deletes the run"
      done = attempt(what, _kubectl(context, "delete", *which, *wait), limit_seconds + CALL_SECONDS)
      if done.status != 0:
        say(f"{what}: {done.reason}")
      what = f"{where}: what is left"
      there = attempt(what, _kubectl(context, "get", *which, "--output=name"), CALL_SECONDS)
      known = there.out.split() if there.status == 0 else [f"not known ({there.reason})"]
      left += [f"{where}: {name}" for name in known]
    rest = "a cluster that these flags do not name"
    return left + [f"{name}, {rest}" for name in self._elsewhere().values()]


def _names(listed: Mapping[str, Any]) -> list[tuple[str, str]]:
  """(uid, name) of JobSets that `_listed` found."""
  return [(each["metadata"]["uid"], each["metadata"]["name"]) for each in listed["items"]]


def _named(context: str) -> str:
  return context or "the current cluster"


def _kubectl(context: str, *words: str) -> list[str]:
  return ["kubectl", *([f"--context={context}"] if context else []), *words]


# --- Islands on TPU VMs: the commands of `tpu_vms.py`

COPY_SECONDS = 300.0
START_SECONDS = 1200.0  # the image is fetched first


class Slices:
  """All islands of a run; each has a thread of its own here.

  Args:
    run: the run, already checked.
    files: files of every host, by path under its folder: config and public keys.
    secrets: secret keys by file name; a host gets that of its own role alone.
    watch_seconds: the longest until roles are done.
    poll_seconds: between two looks.
  """

  def __init__(
    self,
    run: TpuVmRun,
    files: Mapping[str, str],
    secrets: Mapping[str, str],
    watch_seconds: float,
    poll_seconds: float,
  ):
    self._run, self._islands = run, run.placement.islands
    self._slice_seconds = 60 * run.slice_minutes
    self._files, self._secrets = files, secrets
    self._watch_seconds, self._poll_seconds = watch_seconds, poll_seconds
    self._ended = threading.Event()  # set by Ctrl-C

  def create(self) -> None:
    """Works until every role runs, or is done already.

    Raises:
      LaunchError: the run has a slice that no island has any more, in another zone for example, and
        nothing was made; or an island does not run within its limits, and the others do.
    """
    wanted = [self._run.slice(island) for island in self._islands]
    for each, (group, _) in self._listed().items():
      if each not in wanted or group != self._run.group:
        delete = shlex.join(self._run.delete(each, group))
        raise LaunchError(
          f"{each.name} in {each.zone} ({group}): is of this run, costs, and is not what these"
          " flags ask for; nothing was made. Fix: give the flags that it was made with, or delete"
          f" it: {delete}."
        )
    self._each(lambda island: self._keep(island, (Need.RUN, Need.DONE), again=True), self._islands)

  def watch(self) -> None:
    """Works until every role is done; a slice that was taken away is made anew.

    Raises:
      LaunchError: an island has failed; the others were watched to their end.
    """
    self._each(lambda island: self._keep(island, (Need.DONE,), again=False), self._islands)

  def status(self) -> list[str]:
    """A line for each island, and for each slice that none of them has.

    Raises:
      LaunchError: gcloud does not say which slices there are.
    """

    def one(island: PlacedIsland) -> str:
      return f"{island.role} in {island.where}: {self._look(island)}"

    mine = {self._run.slice(island) for island in self._islands}
    others = ((each, seen) for each, (_, seen) in self._listed().items() if each not in mine)
    more = [
      f"{name} in {zone}: {seen}; no island has it, and it costs" for (name, zone), seen in others
    ]
    return [*self._each(one, self._islands), *more]

  def delete(self) -> list[str]:
    """Lets roles drain, and deletes all slices with the label of the run and all requests for them,
    also those of islands that its config has no more; returns a line for each that is left.

    Raises:
      LaunchError: gcloud does not say which slices there are.
    """
    there = self._listed()

    def do(what: str, command: Sequence[str], limit_seconds: float) -> None:
      ran = attempt(what, command, limit_seconds)
      if ran.status != 0:
        say(f"{what}: {ran.reason}")

    def one(each: Slice) -> None:
      if self._describe(each, "tpu-vm").slice == "READY":
        stop = self._run.on_hosts(each, self._run.stop_script())
        do(f"{each.name}: stops", stop, self._run.stop_seconds + CALL_SECONDS)
      delete = self._run.delete(each, there[each][0])
      do(f"{each.name}: is deleted", delete, self._slice_seconds)

    self._each(one, there)
    left = {each: seen for each, (_, seen) in self._listed().items()}
    # gcloud leaves out, and does not say so, what is in zones that do not answer.
    mine = [each for each in map(self._run.slice, self._islands) if each not in left]
    left |= zip(mine, self._each(lambda each: self._describe(each, self._run.group), mine))
    return [
      f"{name} in {zone}: {seen.slice.lower()}{f' ({seen.error})' if seen.error else ''}"
      for (name, zone), seen in left.items()
      if seen.slice == "UNSEEN" or not (seen.slice == "ABSENT" or self._run.foreign(seen))
    ]

  def _listed(self) -> dict[Slice, tuple[str, Seen]]:
    """What the run has, with and without --queued; a slice that was asked for by a queued resource
    is deleted with it."""
    found = dict[Slice, tuple[str, Seen]]()
    for group in tpu_vms.GROUPS:
      what = f"{self._run.name}: its slices ({group})"
      said = json.loads(call(what, self._run.list_all(group), CALL_SECONDS))
      found |= {each: (group, seen) for each, seen in tpu_vms.listed(said, self._run.name).items()}
    return found

  # --- one island ---------------------------------------------------------------------------------

  def _each(self, one: Callable[[T], R], them: Collection[T]) -> list[R]:
    """Calls `one` for all at once; raises their LaunchErrors together, after all ended."""
    with concurrent.futures.ThreadPoolExecutor(max(1, len(them))) as threads:
      try:
        done = [threads.submit(one, each) for each in them]
        for each in concurrent.futures.as_completed(done):
          if each.exception() and not all(other.done() for other in done):
            say(f"{each.exception()} The others go on.")
      except BaseException:  # Ctrl-C
        say("ends with the calls that are under way; Ctrl-C again: at once")
        self._ended.set()
        raise
    wrong = [str(each.exception()) for each in done if isinstance(each.exception(), LaunchError)]
    if wrong:
      raise LaunchError("\n".join(wrong))
    return [each.result() for each in done]

  def _keep(self, island: PlacedIsland, until: tuple[Need, ...], again: bool) -> None:
    """Does what the island needs until that is in `until`; `again`: restarts a role that failed.

    Raises:
      LaunchError: the island is refused for good, has failed, has not run for too long, or was made
        anew too often.
    """
    role, said, recreations = island.role, "", self._run.recreations
    asked = started = had = False
    new = True  # never there yet; a slice that was there is asked for again, whatever is answered
    deadline, must_run_by = time.monotonic() + self._watch_seconds, math.inf
    while not self._ended.is_set():
      seen, now = self._look(island), time.monotonic()
      need, before = tpu_vms.next_need(seen), said
      asked = asked or need is not Need.DELETE  # not so: a request of an earlier command
      if need is Need.FAILED and again and not started:
        need = Need.START
      said = f"{role}: {need.value} ({seen})"
      if said != before:
        say(said)
      if need in until:
        return
      if need is Need.RUN:
        must_run_by = math.inf
      elif math.isinf(must_run_by):
        must_run_by = now + self._slice_seconds
        say(f"{role}: waits until it runs (at most {self._slice_seconds:g} s)")
      why = fix = ""
      if need is Need.FAILED:
        why = f"its role was stopped, or has used up its --max_restarts ({seen})"
        fix = f"see `sudo docker logs {self._run.name}` on its hosts, then create again"
      elif new and asked and (seen.slice == "FOREIGN" or tpu_vms.refused_for_good(seen.error)):
        why, fix = f"no slice will be had so ({seen})", "what it says, then create again"
      elif need is Need.CREATE and had:
        why = "its slice was deleted, and not by this command"
        fix = "if you want it back, create again"
      elif now >= deadline:
        why = f"is not done within {self._watch_seconds:g} s; it goes on"
        fix = "watch it again, or delete it"
      elif now >= must_run_by:
        why = f"does not run after {self._slice_seconds:g} s ({seen})"
        fix = "see above what was refused; raise --slice_minutes, or take another zone"
        if seen.slice != "ABSENT":
          fix += "; it still costs, or will once it is there, until you delete it"
      elif need is Need.DELETE and not recreations:
        why = f"its slice was taken away once more ({seen}), --recreations={self._run.recreations}"
        fix = "raise that, take another zone, or leave out --spot"
      if why:
        raise LaunchError(f"{role}: {why}. Fix: {fix}.")
      new = new and seen.slice != "READY"
      had = (had or seen.slice == "READY") and need is not Need.DELETE
      try:
        self._do(island, need, seen)
        started, recreations = started or need is Need.START, recreations - (need is Need.DELETE)
      except LaunchError as error:  # no capacity now, no answer, no ssh yet: tries again
        if new and tpu_vms.refused_for_good(str(error)):
          raise
        say(str(error))
      self._ended.wait(self._poll_seconds)

  def _do(self, island: PlacedIsland, need: Need, seen: Seen) -> None:
    role, limit, each = island.role, self._slice_seconds, self._run.slice(island)
    if need is Need.CREATE:
      call(f"{role}: asks for its slice", self._run.create(island), limit)
    elif need is Need.DELETE:
      gone = self._run.delete(each, self._run.group)
      call(f"{role}: deletes its slice, which was taken away", gone, limit)
    elif need is Need.START:
      with tempfile.TemporaryDirectory(prefix="ddiloco-launch-") as temporary:
        folder = Path(temporary) / tpu_vms.STAGED
        secret = f"{role}.key_secret"
        stage(folder, self._files, {secret: self._secrets[secret]})
        copy = self._run.copy(each, str(folder))
        call(f"{role}: brings config and keys", copy, COPY_SECONDS)
      command = self._run.on_hosts(each, self._run.start_script(island, seen.leader))
      call(f"{role}: starts", command, START_SECONDS)

  def _look(self, island: PlacedIsland) -> Seen:
    """The state of the slice and its roles; "UNSEEN" with the reason if a query failed, "FOREIGN":
    a slice of this name is of another run."""
    each = self._run.slice(island)
    seen = self._describe(each, self._run.group)
    if seen.slice not in ("ABSENT", "UNSEEN") and self._run.foreign(seen):
      why = f"{each.name} is not of this run, or was made with other --keys or another config"
      return Seen("FOREIGN", error=f"{why}; choose another --name, or delete it first")
    if self._run.queued and seen.slice == "ACTIVE":
      request, seen = seen, self._describe(each, "tpu-vm")
      if seen.slice == "ABSENT":
        return request  # it still asks for the slice, and no second request could be made
    if seen.slice != "READY":
      return seen
    command = self._run.on_hosts(each, self._run.look_script())
    ran = attempt(f"{island.role}: its hosts", command, CALL_SECONDS, looks=True)
    roles = tpu_vms.seen_roles(ran.out)
    if ran.status != 0 or len(roles) != island.shape.hosts:
      return Seen("UNSEEN", error=ran.reason)
    return dataclasses.replace(seen, roles=roles)

  def _describe(self, each: Slice, group: str) -> Seen:
    ran = attempt(
      f"{each.name}: its {group}", self._run.describe(each, group), CALL_SECONDS, looks=True
    )
    if ran.status == 0:
      return tpu_vms.seen_slice(json.loads(ran.out))
    return Seen("ABSENT") if "NOT_FOUND" in ran.error else Seen("UNSEEN", error=ran.reason)


def stage(folder: Path, files: Mapping[str, str], secrets: Mapping[str, str]) -> None:
  """Writes the files of a host; only their owner can read the secrets."""
  for name, text in files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
  (folder / "keys" / "secret").mkdir(mode=0o700, parents=True)
  for name, text in secrets.items():
    path = folder / "keys" / "secret" / name
    path.touch(0o600)
    path.write_text(text)
