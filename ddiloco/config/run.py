"""How long a run is, what it leaves, and which faults strike it on purpose."""

from __future__ import annotations

import dataclasses

from ddiloco.checked import is_number, not_negative, one_of, positive, require


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """How long, how often to look, and what to leave behind."""

  total_tokens: int = 4_000_000  # merged into the global model; the run ends there
  init_from: str = ""  # weights to start from, else random: .safetensors, Orbax or a run's workdir
  evaluations: int = 20  # of the global model on the held-out split, spread over the run
  compare_alone: bool = False  # afterwards train every island alone on as many of its own steps
  prompt: str = "def "  # of the sample that is printed at the end
  sample_tokens: int = 160
  restart_seconds: float = 1.0  # until a crashed or quarantined role is back; doubles each time
  max_restarts: int = 5  # of one role (planned faults do not count)

  def __post_init__(self):
    positive("run", self, "total_tokens")
    not_negative("run", self, "evaluations", "sample_tokens", "restart_seconds", "max_restarts")


@dataclasses.dataclass(frozen=True)
class Fault:
  """One planned fault: what happens to which role, when (run's clock or time), for how long."""

  action: str  # kill, stall or slow
  role: str  # "learner/2" or "syncer/0"
  at_step: int = -1  # of the run's clock; -1: by time
  at_seconds: float = -1.0  # since the run started; -1: by step
  seconds: float = 5.0  # until a killed role restarts (-1: never), or a stall or slowness ends
  factor: float = 2.0  # by which `slow` stretches every step

  def __post_init__(self):
    one_of("chaos.faults", self, "action", "kill", "stall", "slow")
    kind, _, number = self.role.partition("/")
    require(
      kind in ("learner", "syncer") and is_number(number),
      "chaos.faults.role",
      self.role,
      "must name a role",
      "use 'learner/2' or 'syncer/0'",
    )
    require(
      (self.at_step >= 0) != (self.at_seconds >= 0),
      "chaos.faults.(at_step, at_seconds)",
      (self.at_step, self.at_seconds),
      "exactly one of them says when",
      "set one and leave the other -1",
    )
    require(
      self.seconds >= 0 or (self.action == "kill" and self.seconds == -1),
      "chaos.faults.seconds",
      self.seconds,
      "must not be negative (kill takes -1: never comes back)",
      "use 5",
    )
    require(self.factor >= 1, "chaos.faults.factor", self.factor, "must be at least 1", "use 2")


@dataclasses.dataclass(frozen=True)
class ChaosConfig:
  """Faults on purpose, as data."""

  faults: tuple[Fault, ...] = ()
