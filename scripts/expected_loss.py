"""The loss that a config's docstring names: the run in virtual time, with several seeds.

    python scripts/expected_loss.py [--configs='quickstart;default;dense:100k'] [--seeds=3]
      [--kinds='untrained;alone;together;adamw;merged'] [--rates='0.5;1']
      [--workdir=runs/expected_loss]

A run is a function of its config and seed alone (virtual_training.py), whatever else the machine
does; the config's own faults strike it. "alone" is one island without exchange for as many
steps, "together" data-parallel with the batches of all islands, at equal tokens, with the config's
inner rate times the best of --rates at seed 0; "adamw" is the same with AdamW inside. "int4",
"int8" and "bf16" are "merged" with this codec for pushes and publishes: what rounding costs. Every
run that has ended is a line of WORKDIR/runs.jsonl and is not made again. A run takes half a minute
to five minutes of a core; all of them take hours.

Last line: {CONFIG: {"merged": [by seed], "alone": [...], "together": [...], "untrained": [...]}}.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import common
from common import spread
from virtual_training import Losses, Text, Valued

from ddiloco import environment
from ddiloco.config import Config
from ddiloco.training.devices import kept_in

CONFIGS = "quickstart;default;decoupled;streaming_diloco;diloco;data_parallel;tutorial;dense:100k"
RATES = "0.35;0.5;0.7;1"
LOSSY = ("bf16", "int8", "int4")
KINDS = ("untrained", "alone", "together", "adamw", "merged", *LOSSY)
DATA_PARALLEL = {"together": {}, "adamw": {"optimizer": "adamw"}}  # changes of `inner`


def config_of(name: str, seed: int, more: Mapping[str, Any] | None = None) -> Config:
  """The config of configs/NAME.py, or of its preset NAME:PRESET; islands have one device each."""
  fields = {"seed": seed, "islands.devices": 1, "network.drain_seconds": 1e3} | dict(more or {})
  return common.config_of(name, fields)


def together(config: Config, rate: float, **changes: Any) -> Config:
  """Data-parallel at the same tokens, the inner rate times `rate`; `changes`: of `inner`."""
  islands = dataclasses.replace(
    config.islands,
    num_learners=1,
    batch_size=config.islands.batch_size * config.islands.num_learners,
  )
  rate *= config.inner.learning_rate
  inner = dataclasses.replace(config.inner, learning_rate=rate, **changes)
  sync = dataclasses.replace(config.sync, num_shards=0, min_quorum=1)
  return dataclasses.replace(config, islands=islands, inner=inner, sync=sync, chaos=NO_CHAOS)


NO_CHAOS = common.config_of("default", {}).chaos


def loss(kind: str, config: Config) -> float:
  """The loss of one run, or of a part of it."""
  text = Text(config)
  if kind == "untrained":
    return text.loss(text.initial)
  if kind not in ("merged", *LOSSY) or not config.sync.num_shards:
    return text.trained_alone(config.planned_steps())
  return Valued(text, config.seed, config.chaos.faults).train()


def expected(
  name: str, kinds: list[str], seeds: int, rates: list[float], losses: Losses
) -> dict[str, Any]:
  """The losses of one config by kind, each by seed."""

  def run(kind: str, config: Config) -> float:
    return losses.of(name, kind, config, functools.partial(loss, kind))

  configs = [config_of(name, seed) for seed in range(seeds)]
  found: dict[str, Any] = {}
  for kind in kinds:
    of_kind = configs
    if (changes := DATA_PARALLEL.get(kind)) is not None:
      tried = {rate: run(kind, together(configs[0], rate, **changes)) for rate in rates}
      best = min(tried, key=tried.__getitem__)
      of_kind = [together(config, best, **changes) for config in configs]
      found[f"rate of {kind}"] = of_kind[0].inner.learning_rate
    if kind in LOSSY:
      codecs = {"sync.push_codec": kind, "sync.publish_codec": kind}
      of_kind = [config_of(name, seed, codecs) for seed in range(seeds)]
    found[kind] = [run(kind, config) for config in of_kind]
  return found


def said(name: str, found: dict[str, Any]) -> str:
  """In one line."""
  parts = [f"{kind} {spread(found[kind], 3)}" for kind in KINDS if kind in found]
  for one, other in (
    *(("merged", kind) for kind in DATA_PARALLEL),
    *((k, "merged") for k in LOSSY),
  ):
    if one in found and other in found:
      relative = [100 * (m / t - 1) for m, t in zip(found[one], found[other])]
      rate = found.get(f"rate of {other}")
      of_rate = f" (rate {rate:g})" if rate else ""
      parts.append(f"{one} against {other} {spread(relative, 2, '+')} %{of_rate}")
  return f"{name}: {', '.join(parts)}"


def main() -> None:
  options = common.options(
    __doc__,
    configs=CONFIGS,
    kinds={"type": common.names_of(KINDS, ";"), "default": "untrained;alone;together;merged"},
    seeds=3,
    workdir=common.ROOT / "runs" / "expected_loss",
    rates={"type": common.several(float, ";"), "default": RATES},
  )
  environment.prepare(1, cpu_only=True)
  losses, result = Losses(options.workdir / "runs.jsonl"), {}
  with kept_in(options.workdir / "compiled"):
    for name in options.configs.split(";"):
      result[name] = expected(name, options.kinds, options.seeds, options.rates, losses)
      print(said(name, result[name]), flush=True)
  print(json.dumps(result))


if __name__ == "__main__":
  common.run_script(main)
