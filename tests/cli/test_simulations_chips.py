"""`ddiloco simulate` says where the chips' time goes, and needs no device for it."""

import dataclasses
import json

import pytest

from ddiloco import cli
from ddiloco.simulation import chips
from ddiloco.simulation.chips import Fleet

SMALL = ["--chips=300000", "--days=2", "--learners=4"]


@pytest.mark.parametrize("command", [["simulate"], ["simulate", "chips"]], ids=" ".join)
def test_the_table_is_what_the_simulator_says(command, capsys):
  assert cli.main([*command, *SMALL, "--seed=3", "--upscale_pause_seconds=5"]) == 0
  out, err = capsys.readouterr()
  fleet = Fleet(chips=300_000, days=2, learners=4, seed=3, upscale_pause_seconds=5)
  spent = chips.decoupled(fleet)
  lines = out.splitlines()
  assert err == "" and lines[0].startswith("300,000 chips, 2 days")
  assert f"{spent.failures:,} failures" in lines[0] and "(seed 3)" in lines[0]
  heads = ["goodput", "uptime", "downscale", "upscale", "restart", "absent"]
  assert lines[2].split() == heads
  rows = {line[:27].strip(): line[27:].split() for line in lines[3:]}
  assert list(rows) == [
    "data-parallel, not elastic",
    "data-parallel, elastic",
    "decoupled, 4 learners",
  ]
  assert rows["decoupled, 4 learners"] == [
    f"{spent.goodput:.2%}",
    f"{spent.uptime:.2%}",
    f"{spent.downscale / spent.total:.2%}",
    f"{spent.upscale / spent.total:.2%}",
    "–",
    f"{spent.absent / spent.total:.2%}",
  ]


def test_json(capsys):
  assert cli.main(["simulate", *SMALL, "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  fleet = Fleet(chips=300_000, days=2, learners=4)
  assert found["fleet"] == dataclasses.asdict(fleet)
  assert found["elastic"]["goodput"] == chips.elastic(fleet).goodput
  assert found["failures"] == chips.elastic(fleet).failures
  assert found["inelastic"]["restart"] == pytest.approx(1 - found["inelastic"]["goodput"])
  for row in ("inelastic", "elastic", "decoupled"):
    assert sum(v for k, v in found[row].items() if k != "uptime") == pytest.approx(1)


def test_help_has_every_assumption_with_its_source(capsys):
  assert cli.main(["simulate", "--help"]) == 0
  out = capsys.readouterr().out
  assert out.startswith("ddiloco simulate chips: Chips that fail")
  assert all(f"--{field.name}:" in out for field in dataclasses.fields(Fleet))
  assert "[paper]" in out and "[inferred]" in out
  assert cli.main(["--help"]) == 0
  assert "ddiloco simulate " in capsys.readouterr().out


@pytest.mark.parametrize(
  "arguments, says",
  [
    (["learner"], "'learner': must be one of chips, protocol"),
    (["chips", "more"], "'more': is not a flag"),
    (["--chips=0"], "simulate: --chips=0: must be greater than 0. Fix: set a positive value."),
    (["--days=nan"], "--days=nan: must be a finite number"),
    (["--days=1e6"], "simulate: --days=1000000.0: means 3,285,420,"),
    (["--learners=many"], "learners"),
    (["--learners=99999"], "--learners=99999: must not be more than chips = 1200000, or 32768"),
    (["--pause=3"], "pause"),
  ],
)
def test_what_is_typed_wrong_is_said(arguments, says, refused):
  said = refused("simulate", *arguments)
  assert said.startswith("ddiloco simulate") and says in said
