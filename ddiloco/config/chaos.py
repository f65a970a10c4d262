"""Which faults strike a run on purpose: a plan is data, whatever engine performs it.

| action    | what happens to the role                                        | its own field     |
|-----------|-----------------------------------------------------------------|-------------------|
| kill      | is dead at once, back after `seconds` (-1: never)               |                   |
| stall     | stands still                                                    |                   |
| slow      | everything it does takes longer                                 | `factor`          |
| join      | a learner beyond islands.num_learners comes, leaves again after |                   |
|           | `seconds` (-1: stays)                                           |                   |
| cut       | no message reaches it or leaves it                              |                   |
| drop      | messages are lost                                               | `share` of them   |
| delay     | messages take longer, and keep their order                      | `delay_seconds`   |
| duplicate | messages come twice                                             | `share`           |
| reorder   | messages are held up for up to `delay_seconds`, others pass     | `share`           |
| corrupt   | bits of messages flip                                           | `share`           |
| throttle  | its links carry no more than `bits_per_second`, each direction  | `bits_per_second` |
| disk      | its disk is full: nothing of a snapshot can be written          |                   |
| poison    | its outer gradients are multiplied                              | `factor`          |

All but kill and join end after `seconds`. Those of messages concern the role's links to `peers`, or
all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ddiloco.checks import is_number, not_negative, one_of, positive, require

TO_ROLES = ("kill", "stall", "slow", "join")
TO_MESSAGES = ("cut", "drop", "delay", "duplicate", "reorder", "corrupt", "throttle")
INSIDE = (*TO_MESSAGES, "disk", "poison")  # performed by the role itself, not from outside
ACTIONS = (*TO_ROLES, *INSIDE)


@dataclasses.dataclass(frozen=True)
class Fault:
  """One planned fault: what happens to whom, when (global step or time), for how long."""

  action: str  # one of those above
  role: str  # "learner-2", "syncer-0", or "region-NAME": all of chaos.regions.NAME at once
  at_step: int = -1  # the global step; -1: by time
  at_seconds: float = -1.0  # since training began; -1: by step
  seconds: float = 5.0  # how long
  factor: float = 2.0
  share: float = 1.0
  delay_seconds: float = 0.5
  bits_per_second: float = 1e6
  peers: tuple[str, ...] = ()  # roles; "!learner-2": all but this one. Empty: all

  def __post_init__(self):
    one_of("chaos.faults", self, "action", *ACTIONS)
    require(
      _is_role(self.role) or self.role.startswith("region-"),
      "chaos.faults.role",
      self.role,
      "must name a role or a region",
      "use 'learner-2', 'syncer-0' or 'region-NAME'",
    )
    for peer in self.peers:
      require(
        _is_role(peer.removeprefix("!")),
        "chaos.faults.peers",
        peer,
        "must name a role",
        "use 'syncer-0', or '!syncer-0' for all but it",
      )
    require(
      (self.at_step >= 0) != (self.at_seconds >= 0),
      "chaos.faults.(at_step, at_seconds)",
      (self.at_step, self.at_seconds),
      "exactly one of them says when",
      "set one and leave the other -1",
    )
    ends = self.action not in ("kill", "join")
    require(
      self.seconds >= 0 or (not ends and self.seconds == -1),
      "chaos.faults.seconds",
      self.seconds,
      "must not be negative (kill and join take -1: for good)",
      "use 5",
    )
    least = 0 if self.action == "poison" else 1
    field = "chaos.faults.factor"
    require(self.factor >= least, field, self.factor, f"must be at least {least}", "use 2")
    in_range = 0 < self.share <= 1
    require(in_range, "chaos.faults.share", self.share, "must lie in (0, 1]", "use 0.5")
    not_negative("chaos.faults", self, "delay_seconds")
    positive("chaos.faults", self, "bits_per_second")


@dataclasses.dataclass(frozen=True)
class ChaosConfig:
  """Faults on purpose, as data."""

  faults: tuple[Fault, ...] = ()
  regions: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # name -> roles

  def __post_init__(self):
    for name, roles in self.regions.items():
      for role in roles:
        require(
          _is_role(role), f"chaos.regions.{name}", role, "must name a role", "use 'learner-2'"
        )
    for fault in self.faults:
      kind, _, name = fault.role.partition("-")
      require(
        kind != "region" or name in self.regions,
        "chaos.faults.role",
        fault.role,
        f"is none of chaos.regions ({', '.join(self.regions) or 'there are none'})",
        "add it there: name -> list of roles",
      )

  def num_joining(self) -> int:
    """How many learners are brought in."""
    return len({fault.role for fault in self.faults if fault.action == "join"})

  def of_roles(self) -> tuple[Fault, ...]:
    """The faults, those of regions as one for each of their roles.

    What strikes the messages of a region strikes those that leave or enter it.
    """
    found: list[Fault] = []
    for fault in self.faults:
      kind, _, name = fault.role.partition("-")
      roles = self.regions[name] if kind == "region" else (fault.role,)
      outside = tuple(f"!{role}" for role in roles) if kind == "region" else ()
      peers = fault.peers or outside
      found += [dataclasses.replace(fault, role=role, peers=peers) for role in roles]
    return tuple(found)


def _is_role(name: str) -> bool:
  kind, _, number = name.partition("-")
  return kind in ("learner", "syncer") and is_number(number)
