"""A run on GKE, done: kubectl applies, reads and deletes what `gke.py` renders."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import yaml

from ddiloco.launch import gke
from ddiloco.launch.calls import LaunchError, Ran, attempt, call, say
from ddiloco.launch.gke import Document, GkeRun, JobSetState

CALL_SECONDS = 120.0  # for one question to a cluster
FINISHED, LOST = 0, 1


class _Dumper(yaml.SafeDumper):
  """Writes long texts line by line, and what stands twice, twice."""

  def ignore_aliases(self, data: object) -> bool:
    return True


_Dumper.add_representer(
  str,
  lambda dumper, text: dumper.represent_scalar(
    "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
  ),
)


def as_yaml(documents: Sequence[Document]) -> str:
  return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)


def create(found: Mapping[str, Sequence[Document]]) -> None:
  """Applies the documents of every cluster; what is there already stays as it is.

  Raises:
    LaunchError: a cluster refuses them.
  """
  for context, documents in found.items():
    what = f"{_named(context)}: {len(documents)} objects"
    apply = ["apply", "--server-side", "--field-manager=ddiloco", "--filename=-"]
    out = call(what, _kubectl(context, *apply), CALL_SECONDS, as_yaml(documents))
    for line in out.splitlines():
      say(line)


def status(run: GkeRun, only: str | None = None) -> list[JobSetState]:
  """Of all JobSets of the run, or those of the cluster `only`.

  Raises:
    LaunchError: a cluster does not answer.
  """
  found: list[JobSetState] = []
  for context in run.contexts() if only is None else [only]:
    listing = ["get", "jobsets.jobset.x-k8s.io", *_of_run(run), "--output=json"]
    what, command = f"{_named(context)}: its JobSets", _kubectl(context, *listing)
    listed = call(what, command, CALL_SECONDS, looks=True)
    found += gke.states(json.loads(listed))
  return found


def watch(run: GkeRun, limit_seconds: float, poll_seconds: float) -> int:
  """Says what changes until every JobSet has ended; the clusters themselves restart what fails.

  A cluster that does not answer is asked again. Returns 0 if all completed, 1 if one failed.

  Raises:
    LaunchError: they have not ended within the limit.
  """
  expected = len(run.placement.islands) + 2  # the shards, the evaluator
  until, said = time.monotonic() + limit_seconds, dict[str, str]()
  say(f"{run.name}: watches {expected} JobSets (at most {limit_seconds:g} s)")
  while True:
    try:
      seen = status(run)
    except LaunchError as error:
      say(str(error))
      seen = []
    for each in seen:
      if said.get(each.name) != str(each):
        said[each.name] = str(each)
        say(str(each))
    if len(seen) >= expected and all(each.end for each in seen):
      return FINISHED if all(each.end == "Completed" for each in seen) else LOST
    if time.monotonic() >= until:
      raise LaunchError(
        f"{run.name}: has not ended within {limit_seconds:g} s; it goes on."
        " Fix: watch it again, or `ddiloco launch gke delete`."
      )
    time.sleep(poll_seconds)


def delete(run: GkeRun, limit_seconds: float) -> list[str]:
  """Deletes all that `create` made; returns what is left, as kubectl names it."""
  left = []
  for context in run.contexts():
    where, which = _named(context), [gke.KINDS, *_of_run(run)]
    # In the foreground: what has pods is gone when they are, and they drain first.
    wait = ["--ignore-not-found", "--cascade=foreground", f"--timeout={limit_seconds:g}s"]
    what = f"{where}: deletes the run"
    done = attempt(what, _kubectl(context, "delete", *which, *wait), limit_seconds + CALL_SECONDS)
    if done.status != 0:
      say(f"{what}: {done.reason}")
    what = f"{where}: what is left"
    there = attempt(what, _kubectl(context, "get", *which, "--output=name"), CALL_SECONDS)
    left += _names(there, where)
  return left


def _names(there: Ran, where: str) -> list[str]:
  if there.status != 0:
    return [f"{where}: not known ({there.reason})"]
  return [f"{where}: {name}" for name in there.out.split()]


def _of_run(run: GkeRun) -> list[str]:
  return [f"--namespace={run.namespace}", f"--selector={gke.RUN}={run.name}"]


def _named(context: str) -> str:
  return context or "the current cluster"


def _kubectl(context: str, *words: str) -> list[str]:
  return ["kubectl", *([f"--context={context}"] if context else []), *words]
