"""What rounding costs: the small text model with lossy pushes and publishes, and with exact ones.

    python scripts/reproduce_codecs.py [--seeds=3] [--steps=600] [--codecs=int4] [--quick]

Four islands, the model of configs/quickstart.py, in virtual time with real vectors (see
virtual_training.py): both runs of a seed have the same data and the same pace, and differ only in
their codecs.

Last line: {"loss": {CODEC: [held-out loss, by seed]}, "difference": {CODEC: of the means, relative
to f32}, "steps": n}.
"""

from __future__ import annotations

import json
import statistics

import common
from virtual_training import Text, Valued

from ddiloco import environment


def final_loss(codec: str, seed: int, steps: int) -> float:
  """The held-out loss of the global model, with this codec both ways."""
  fields = {
    "seed": seed,
    "chaos.faults": (),
    "sync.snapshot_steps": 0,
    "sync.push_codec": codec,
    "sync.publish_codec": codec,
    "run.compare_alone": False,
  }
  config = common.config_of("quickstart", fields)
  tokens = steps * config.planned_tokens_per_step
  config = common.config_of("quickstart", {**fields, "run.total_tokens": tokens})
  return Valued(Text(config), seed).train()


def main() -> None:
  parser = common.parser(__doc__)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--steps", type=int, default=600, help="of every island")
  lossy = common.names_of(("bf16", "int8", "int4"))
  parser.add_argument("--codecs", type=lossy, default="int4", help="with commas")
  options = parser.parse_args()
  if options.quick:
    options.seeds, options.steps = 1, 30
  environment.prepare(1, cpu_only=True)
  loss: dict[str, list[float]] = {codec: [] for codec in ("f32", *options.codecs)}
  for seed in range(options.seeds):
    for codec, each in loss.items():
      each.append(round(final_loss(codec, seed, options.steps), 5))
      print(f"seed {seed}, {codec} both ways: loss {each[-1]:.4f}", flush=True)
  exact = statistics.mean(loss["f32"])
  mean = {codec: statistics.mean(loss[codec]) for codec in options.codecs}
  difference = {codec: round(each / exact - 1, 5) for codec, each in mean.items()}
  print(json.dumps({"loss": loss, "difference": difference, "steps": options.steps}))


if __name__ == "__main__":
  common.run_script(main)
