"""What a run over long links has come to, from its event logs: the last line of `scripts/wan.sh`.

  python scripts/wan_summary.py --workdir=DIR --mbit=200 --delay_ms=60

Last line, JSON, by learner: `utilisation`: the share of the time between the end of its first step
and the end of its last that went into inner steps. `blocked_seconds`: of that time, how long the
protocol made it wait. `bytes`: sent and received, all connections together. `step_seconds`: median.
For the run: `loss` on held-out data (null if no evaluator saw the end), `mbit`, `delay_ms` one way.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from ddiloco.observe.eventlog import Event, read_events
from ddiloco.protocol.events import parse_role


def utilisation(steps: list[Event]) -> float | None:
  """Of one learner's step events in order of time; None where there are too few to say."""
  if len(steps) < 2 or steps[-1].time <= steps[0].time:
    return None
  inside = sum(step.seconds for step in steps[1:])  # the first one's time ends where ours begins
  return round(inside / (steps[-1].time - steps[0].time), 4)


def moved_bytes(traffic: list[Event]) -> int:
  """Sent and received; counters restart with every incarnation."""
  last = {event.incarnation: event for event in traffic}
  return sum(event.sent_bytes + event.received_bytes for event in last.values())


def summarise(workdir: Path) -> dict[str, Any]:
  steps: dict[str, list[Event]] = defaultdict(list)
  traffic: dict[str, list[Event]] = defaultdict(list)
  for event in read_events(workdir):
    kind, number = parse_role(event.role)
    if kind == "learner" and event.kind in ("step", "traffic"):
      (steps if event.kind == "step" else traffic)[str(number)].append(event)
  outcome = workdir / "outcome.json"
  learners = sorted(steps, key=int)
  return {
    "utilisation": {m: utilisation(steps[m]) for m in learners},
    "blocked_seconds": {
      m: round(sum(step.blocked_seconds for step in steps[m][1:]), 3) for m in learners
    },
    "bytes": {m: moved_bytes(traffic[m]) for m in learners},
    "steps": {m: len(steps[m]) for m in learners},
    "step_seconds": {
      m: round(statistics.median(step.seconds for step in steps[m]), 4) for m in learners
    },
    "loss": json.loads(outcome.read_text()).get("loss_merged") if outcome.exists() else None,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--workdir", type=Path, required=True)
  parser.add_argument("--mbit", type=float, required=True)
  parser.add_argument("--delay_ms", type=float, required=True)
  args = parser.parse_args()
  result = summarise(args.workdir)
  for m, share in result["utilisation"].items():
    print(
      f"island {m}: {result['steps'][m]} steps of {1e3 * result['step_seconds'][m]:.0f} ms,"
      f" {'?' if share is None else f'{share:.1%}'} of the time in steps,"
      f" blocked {result['blocked_seconds'][m]:g} s, {result['bytes'][m] / 1e6:.1f} MB moved"
    )
  print(json.dumps({**result, "mbit": args.mbit, "delay_ms": args.delay_ms}))


if __name__ == "__main__":
  main()
