"""What runs inside a Ray actor: one process of a role. Knows no JAX."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ddiloco.engines import children, role_spec
from ddiloco.observe.guards import exited

MEETING = "{meeting}"  # in a command: where the hosts of its island meet


class RoleActor:
  """Holds the process of one role on the machine where Ray put it; the role ends with the actor.

  A process of its own, and not the actor itself: it hears signals, a crash of it is its own, and it
  starts as a role does everywhere else. It sees the devices that Ray reserved for the actor.
  """

  def __init__(self) -> None:
    self._process: children.Process | None = None

  async def free_url(self, host: str) -> str:
    """A url on this machine, whose address is `host`; "": as Ray knows it."""
    from ray.util import get_node_ip_address

    return role_spec.free_urls(1, host or get_node_ip_address())[0]

  async def run(self, command: list[str], log: str, meeting: str = "") -> int:
    """The exit status of `command`, run by this machine's Python; output is appended to `log`.

    `meeting`: a url that stands for `MEETING` in the command.
    """
    if self._process is not None and self._process.poll() is None:
      # The driver believes us dead, as after a broken connection. Two of one role would be fenced.
      self._process.kill()
      exited(self._process, children.KILL_SECONDS, "the role's process before")
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    arguments = [word.replace(MEETING, meeting) for word in command[1:]]
    process = self._process = children.spawn([sys.executable, *arguments], Path(log))
    return await asyncio.to_thread(process.wait)

  async def signal(self, number: int) -> None:
    """Sends the process a signal, if it runs."""
    if self._process is not None and self._process.poll() is None:
      self._process.send_signal(number)
