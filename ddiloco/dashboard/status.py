"""A run's status as one JSON object, which the page shows, and as metrics for Prometheus. PURE.

The object's size depends on the number of islands and fragments, not on how long the run is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ddiloco.config import SyncConfig
from ddiloco.observe.eventlog import FLUSH_SECONDS
from ddiloco.observe.islands import (
  DOWN,
  OUTER_GRADIENTS,
  UNKNOWN,
  IslandState,
  finite_or,
  phase,
  role_name,
)
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import clock_time, island_colour, rounded
from ddiloco.protocol.events import parse_role

LAG_SECONDS = 2 * FLUSH_SECONDS  # an event may be so old when it is read: that is no stall
SILENT_SECONDS = 60.0  # a run without new events for so long is silent: no role writes ...
SHOWN_REJOINS = 12
STARTING_SECONDS = 900.0  # ... before the first step, which compiles, for so long
OVER = {
  "finished": "The run is over: it merged all its tokens.",
  "stopped": "The run was stopped. It can go on from its newest snapshot.",
  "failed": "The run has failed: a shard, or every possible quorum, was gone for good.",
}


def status(
  run: RunState, now: float, sync: SyncConfig | None = None, reason: str = ""
) -> dict[str, Any]:
  """The status of a run.

  Args:
    run: its state from the events so far.
    now: seconds since it started; once the run is over, or its roles write no more, the time of its
      newest event counts instead.
    sync: the run's section; None: not known.
    reason: why the run ended, if another source than its events says it.
  """
  state, text = _phase(run, now, reason)
  now = max(now, run.time) if state in ("starting", "running") else run.time
  seen = now - LAG_SECONDS if state == "running" else now
  fragments = range(max([run.num_fragments, *(p + 1 for p in run.versions)]))
  spans = run.tracks.spans(now, seen)
  islands = [_island(run, m, state, seen, fragments) for m in sorted(run.islands)]
  speed, rate = UNKNOWN, None
  if state == "running":
    speed = run.speed(seen)
    rate = round(finite_or(speed.tokens_per_second, 0))  # 0 if all islands stand still
  return {
    "name": run.name,
    "phase": state,
    "text": text,
    "seconds": round(now, 1),
    "seconds_left": rounded(run.seconds_left(now)) if state == "running" else None,
    "progress": round(run.progress, 5),
    "tokens_done": round(run.tokens_done),
    "total_tokens": run.total_tokens,
    "tokens_per_second": rate,
    **speed.as_json(),
    "heldout_loss": rounded(run.heldout_loss),
    "heldout_measures": {n: rounded(each) for n, each in run.heldout_measures.items()},
    "commits": run.commits,
    "outer_gradients": {name: rounded(each) for name, each in run.outer_gradients.items()},
    "solo": (run.solo if state == "running" else "") or None,
    "merging": bool(run.num_shards or run.shards),
    "islands": islands,
    "shards": _shards(run),
    "fragments": [run.versions.get(p) for p in fragments],
    "waiting": _waiting(run, state, sync),
    "goodput": _goodput(run),
    "timeline": _timeline(run, spans),
    "curves": _curves(run),
    "heat": run.heat.as_json(spans, sorted(run.islands), now),
    "rejoins": run.rejoins.as_json(SHOWN_REJOINS),
    "hangs": run.num_hangs,
    "links": run.traffic.as_json(seen),
    "odd_events": run.odd_events,
    "log_events": [
      {"time": round(log_event.time, 2), "text": log_event.text, "tone": log_event.tone}
      for log_event in run.log_events
    ],
  }


def _phase(run: RunState, now: float, reason: str) -> tuple[str, str]:
  """(empty, starting, running, silent or over; a sentence that explains it)."""
  reason = run.finished or reason
  if reason:
    return "over", OVER.get(reason, f"The run is over: {reason}.")
  if not run.num_events:
    return "empty", "Nothing is known yet: no role has written an event."
  started, silent = math.isfinite(run.first_step_time), now - run.time
  if silent > SILENT_SECONDS and all(i.state == "left" for i in run.islands.values()):
    return "over", "The run is over: every island has left."
  if silent > (SILENT_SECONDS if started else STARTING_SECONDS):
    ago = f"No role has written for {clock_time(silent)} (min:s)"
    return "silent", f"{ago}: the run was killed, or it writes where this cannot read."
  if not started:
    return "starting", "The run is starting: islands load, compile and say hello."
  return "running", "The run is under way."


def _island(run: RunState, m: int, state: str, seen: float, fragments: range) -> dict[str, Any]:
  island = run.islands[m]
  shown = _shown(island, state, seen)
  speed = island.speed if shown == "running" else UNKNOWN
  return {
    "number": m,
    "colour": island_colour(m),
    "state": shown,
    "restarts": max(0, island.lives - 1),
    "chips": island.chips,
    "chip_kinds": list(island.chip_kinds),
    "step": island.step,
    "global_step": island.global_step,
    "loss": rounded(island.loss),
    "tokens": island.tokens,
    "tokens_per_second": rounded(speed.tokens_per_second),
    **speed.as_json(),
    "step_seconds": rounded(island.step_seconds),
    "participation": run.participation(m),
    "participation_recent": rounded(island.participation),
    "versions": [island.versions.get(p) for p in fragments],
  }


def _shards(run: RunState) -> list[dict[str, Any]]:
  return [
    {
      "number": s,
      "state": phase(shard.state),
      "fragments": list(shard.fragments),
      "commits": shard.commits,
      "rejected": shard.rejected,
      "reason": shard.last_reason,
    }
    for s, shard in sorted(run.shards.items())
  ]


def _waiting(run: RunState, state: str, sync: SyncConfig | None) -> dict[str, Any]:
  panel = run.rounds.as_json()
  if state in ("over", "silent"):
    return panel | {"text": "No role waits: there is no run under way.", "open": 0}
  if not run.num_shards and not run.shards:
    return panel | {"text": "There is no syncer: every island trains alone."}
  # At the time of the newest event: nothing later is known.
  text = run.rounds.waiting(run.islands, run.time, sync)
  down = [s for s, shard in sorted(run.shards.items()) if shard.state in DOWN]
  if down:
    who = f"{'Shard' if len(down) == 1 else 'Shards'} {', '.join(map(str, down))}"
    verb, whose, they = ("is", "its", "it is") if len(down) == 1 else ("are", "their", "they are")
    others = "" if len(down) == len(run.shards) else f" {text}"
    text = f"{who} {verb} down: {whose} fragments have no rounds until {they} back.{others}"
  return panel | {"text": text}


def _goodput(run: RunState) -> dict[str, Any] | None:
  account = run.ledger.report(run.time)
  if not account.chip_seconds:
    return None
  return {
    "goodput": rounded(account.goodput),
    "goodput_training": rounded(account.goodput_training),
    "uptime": rounded(account.uptime),
    "chip_seconds": round(account.chip_seconds, 1),
    "causes": {name: round(share, 5) for name, share in account.causes.items()},
    "islands": {
      str(m): {"goodput": rounded(each.goodput), "liveness": rounded(each.liveness)}
      for m, each in account.learners.items()
    },
  }


def _timeline(run: RunState, spans: dict[str, list[list]]) -> dict[str, Any]:
  tracks = run.tracks
  order = sorted(spans, key=parse_role)
  return {
    "lanes": [{"role": r, "name": role_name(r), "spans": spans[r]} for r in order],
    "marks": list(tracks.marks),
    "marks_left_out": tracks.num_marks - len(tracks.marks),
  }


def _curves(run: RunState) -> dict[str, Any]:
  series, islands = run.curves.page, sorted(run.islands)
  return {
    "width_seconds": series.width_seconds,
    "heldout": [(round(e.time, 2), rounded(e.loss)) for e in run.curves.evaluations.items],
    "loss": {str(m): series.means(f"loss {m}") for m in islands},
    "participation": {str(m): series.means(f"participation {m}", 2) for m in islands},
    "commits": {str(s): series.counts(f"commits {s}") for s in sorted(run.shards)},
  }


def _shown(island: IslandState, run: str, seen: float) -> str:
  """The state to show. A finished run has no running islands; those of a silent run are unknown."""
  if island.state == "left":
    return "left"
  if run == "over":
    return "ended"
  return "unknown" if run == "silent" else phase(island.state_at(seen))


# --- The same in Prometheus' text format (version 0.0.4)

METRICS_KIND = "text/plain; version=0.0.4; charset=utf-8"
PHASES = ("empty", "starting", "running", "silent", "over")
STATES = ("joining", "running", "stalled", "quarantined", "down", "left", "ended", "unknown")
OF_RUN = (  # name, key of the status, help
  ("run_seconds", "seconds", "Seconds since the run started."),
  ("run_progress_ratio", "progress", "Share of the token budget that is merged."),
  ("run_tokens", "tokens_done", "Tokens in the global model."),
  ("run_tokens_per_second", "tokens_per_second", "Tokens trained per second now."),
  ("run_tokens_per_second_per_chip", "tokens_per_second_per_chip", "Of chips at work."),
  ("run_mfu_ratio", "mfu", "Model FLOPs utilisation of the chips at work."),
  ("heldout_loss", "heldout_loss", "Nats per token of the global model."),
  ("commits_total", "commits", "Rounds that were committed."),
  ("hangs_total", "hangs", "Times that a learner's loop hung."),
)
OF_ISLANDS = (  # the same for each island
  ("global_step", "global_step", "The global step as this island knows it."),
  ("loss", "loss", "Training loss of the last step, nats per token."),
  ("tokens_total", "tokens", "Tokens trained in all its lives."),
  ("tokens_per_second", "tokens_per_second", "Tokens trained per second now."),
  ("tokens_per_second_per_chip", "tokens_per_second_per_chip", "Tokens per second and chip now."),
  ("mfu_ratio", "mfu", "Model FLOPs utilisation now; not where it is unknown."),
  ("restarts_total", "restarts", "How often it was started again."),
  ("participation_ratio", "participation", "Share of all commits it is in."),
)
Samples = list[tuple[dict[str, str], Any]]  # labels, value


def exposition(status: Mapping[str, Any]) -> str:
  """Every number of `status`; unknown ones are left out."""
  lines = []
  for name, help_, samples in _metrics(status):
    known = [(labels, value) for labels, value in samples if value is not None]
    if not known:
      continue
    kind = "counter" if name.endswith("_total") else "gauge"
    lines += [f"# HELP ddiloco_{name} {help_}", f"# TYPE ddiloco_{name} {kind}"]
    lines += [f"ddiloco_{name}{_labels(labels)} {float(value)!r}" for labels, value in known]
  return "\n".join(lines) + "\n"


def _metrics(status: Mapping[str, Any]) -> Iterator[tuple[str, str, Samples]]:
  """The name, the help and the samples of each metric."""
  islands, links = status["islands"], status["links"]
  phases = {phase: status["phase"] == phase for phase in PHASES}
  yield "run_phase", "1 for the phase the run is in.", _each("phase", phases)
  for name, key, help_ in OF_RUN:
    yield name, help_, [({}, status[key])]
  for name, what in OUTER_GRADIENTS.items():
    value = status["outer_gradients"][name]
    yield f"outer_gradient_{name}", f"{what.capitalize()}, lately.", [({}, value)]
  measures = _each("measure", status["heldout_measures"])
  yield "heldout_measure", "What else held-out data say of the global model.", measures
  states: Samples = [
    ({"island": str(i["number"]), "state": state}, i["state"] == state)
    for i in islands
    for state in STATES
  ]
  yield "island_state", "1 for the state the island is in.", states
  for name, key, help_ in OF_ISLANDS:
    yield f"island_{name}", help_, _each("island", {i["number"]: i[key] for i in islands})
  versions = _each("fragment", dict(enumerate(status["fragments"])))
  yield "fragment_version", "Version of the global model.", versions
  rejected = _each("shard", {s["number"]: s["rejected"] for s in status["shards"]})
  yield "rejected_updates_total", "Updates that were rejected.", rejected
  for way in ("sent", "received"):
    moved = _each("role", {link["role"]: link[f"{way}_bytes"] for link in links})
    yield f"{way}_bytes_total", f"Bytes {way} by a role.", moved
  yield from _goodput_metrics(status["goodput"] or {})


def _goodput_metrics(account: Mapping[str, Any]) -> Iterator[tuple[str, str, Samples]]:
  useful = "Share of chip time whose work is in the global model."
  yield "goodput_ratio", useful, [({}, account.get("goodput"))]
  up = "Share of time in which some island trained."
  yield "uptime_ratio", up, [({}, account.get("uptime"))]
  causes = _each("cause", account.get("causes", {}))
  yield "lost_time_ratio", "Share of chip time by cause; adds up to 1 - goodput.", causes


def _each(label: str, values: Mapping[Any, Any]) -> Samples:
  """A sample for each value, with its key as the label."""
  return [({label: str(name)}, value) for name, value in values.items()]


def _labels(labels: Mapping[str, str]) -> str:
  escaped = (
    (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
    for name, value in labels.items()
  )
  text = ",".join(f'{name}="{value}"' for name, value in escaped)
  return f"{{{text}}}" if text else ""
