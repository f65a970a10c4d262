"""A run's status in Prometheus' text format (version 0.0.4). PURE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KIND = "text/plain; version=0.0.4; charset=utf-8"
PHASES = ("empty", "starting", "running", "silent", "over")
STATES = ("joining", "running", "stalled", "quarantined", "down", "left", "ended", "unknown")
Sample = tuple[dict[str, str], Any]


def exposition(status: Mapping[str, Any]) -> str:
  """Every number of `status.status`; what is not known yet is left out."""
  lines = []
  for name, kind, help_, samples in _metrics(status):
    known = [(labels, value) for labels, value in samples if value is not None]
    if not known:
      continue
    lines += [f"# HELP ddiloco_{name} {help_}", f"# TYPE ddiloco_{name} {kind}"]
    lines += [f"ddiloco_{name}{_labels(labels)} {float(value)!r}" for labels, value in known]
  return "\n".join(lines) + "\n"


def _metrics(status: Mapping[str, Any]) -> Iterator[tuple[str, str, str, list[Sample]]]:
  phases: list[Sample] = [({"phase": phase}, status["phase"] == phase) for phase in PHASES]
  yield "run_phase", "gauge", "1 for the phase the run is in.", phases
  for name, kind, key, help_ in (
    ("run_seconds", "gauge", "seconds", "Seconds since the run started."),
    ("run_progress_ratio", "gauge", "progress", "Share of the token budget that is merged."),
    ("run_tokens", "gauge", "tokens_done", "Tokens in the global model."),
    ("run_tokens_per_second", "gauge", "tokens_per_second", "Tokens trained per second now."),
    ("run_tokens_per_second_per_chip", "gauge", "tokens_per_second_per_chip", "Of chips at work."),
    ("run_mfu_ratio", "gauge", "mfu", "Model FLOPs utilisation of the chips at work."),
    ("heldout_loss", "gauge", "heldout_loss", "Nats per token of the global model."),
    ("commits_total", "counter", "commits", "Rounds that were committed."),
    ("agreement", "gauge", "agreement", "Mean cosine of two islands' updates, lately."),
    ("hangs_total", "counter", "hangs", "Times that a learner's loop hung."),
  ):
    yield name, kind, help_, [({}, status[key])]
  others: list[Sample] = [({"measure": n}, v) for n, v in status["heldout_measures"].items()]
  yield "heldout_measure", "gauge", "What else held-out data say of the global model.", others
  yield from _islands(status["islands"])
  yield from _fragments(status)
  yield from _links(status["links"])
  yield from _goodput(status["goodput"] or {"causes": {}})


def _islands(islands: list[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, list[Sample]]]:
  states: list[Sample] = [
    ({"island": str(i["number"]), "state": state}, i["state"] == state)
    for i in islands
    for state in STATES
  ]
  yield "island_state", "gauge", "1 for the state the island is in.", states
  for name, kind, key, help_ in (
    ("island_global_step", "gauge", "global_step", "The global step as this island knows it."),
    ("island_loss", "gauge", "loss", "Training loss of the last step, nats per token."),
    ("island_tokens_total", "counter", "tokens", "Tokens trained in all its lives."),
    ("island_tokens_per_second", "gauge", "tokens_per_second", "Tokens trained per second now."),
    (
      "island_tokens_per_second_per_chip",
      "gauge",
      "tokens_per_second_per_chip",
      "Tokens trained per second and chip now.",
    ),
    ("island_mfu_ratio", "gauge", "mfu", "Model FLOPs utilisation now; not where it is unknown."),
    ("island_restarts_total", "counter", "restarts", "How often it was started again."),
    ("island_participation_ratio", "gauge", "participation", "Share of all commits it is in."),
  ):
    yield name, kind, help_, [({"island": str(i["number"])}, i[key]) for i in islands]


def _fragments(status: Mapping[str, Any]) -> Iterator[tuple[str, str, str, list[Sample]]]:
  versions: list[Sample] = [
    ({"fragment": str(p)}, version) for p, version in enumerate(status["fragments"])
  ]
  yield "fragment_version", "gauge", "Version of the global model.", versions
  rejected: list[Sample] = [({"shard": str(s["number"])}, s["rejected"]) for s in status["shards"]]
  yield "rejected_updates_total", "counter", "Updates that were rejected.", rejected


def _links(links: list[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, list[Sample]]]:
  for direction in ("sent", "received"):
    samples: list[Sample] = [({"role": i["role"]}, i[f"{direction}_bytes"]) for i in links]
    yield f"{direction}_bytes_total", "counter", f"Bytes {direction} by a role.", samples


def _goodput(account: Mapping[str, Any]) -> Iterator[tuple[str, str, str, list[Sample]]]:
  yield (
    "goodput_ratio",
    "gauge",
    "Share of chip time whose work is in the global model.",
    [({}, account.get("goodput"))],
  )
  yield (
    "uptime_ratio",
    "gauge",
    "Share of time in which some island trained.",
    [({}, account.get("uptime"))],
  )
  causes: list[Sample] = [({"cause": name}, share) for name, share in account["causes"].items()]
  yield "lost_time_ratio", "gauge", "Share of chip time by cause; adds up to 1 - goodput.", causes


def _labels(labels: Mapping[str, str]) -> str:
  escaped = (
    (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
    for name, value in labels.items()
  )
  text = ",".join(f'{name}="{value}"' for name, value in escaped)
  return f"{{{text}}}" if text else ""
