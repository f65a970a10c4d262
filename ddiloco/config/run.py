"""How long a run is and what it leaves."""

from __future__ import annotations

import dataclasses

from ddiloco.checked import not_negative, positive


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
