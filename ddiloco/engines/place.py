"""Where a role runs, and that it ends with whoever started it. Knows no JAX."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import socket
import sys
import threading
from pathlib import Path

PORTS = range(10_000, 32_000)  # below those the system gives to outgoing connections


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a role runs and whom it reaches: all that its process is told beside the config."""

  workdir: Path
  run_id: str
  syncers: tuple[str, ...]  # control urls of all shards, in order
  bind: str = ""  # a shard's own
  keys: Path | None = None  # folder; None: loopback only
  http: str = ""  # HOST:PORT of the probes, "": none


def end_with_parent() -> None:
  """Ends this process when the one that started it does, however that ends.

  Its end of our standard input closes then, also after a kill -9. On Linux the kernel sees to it as
  well, since a stopped process reads nothing.
  """
  if sys.platform == "linux":
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGKILL))

  def wait() -> None:
    while os.read(0, 4096):
      continue
    os._exit(1)

  threading.Thread(target=wait, name="parent", daemon=True).start()


def free_urls(count: int, host: str = "127.0.0.1") -> list[str]:
  """Urls of this machine for so many shards, each with its port and the next one free.

  Raises:
    OSError: there are not so many.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  held: list[socket.socket] = []
  urls: list[str] = []
  try:
    for port in random.SystemRandom().sample(PORTS[::2], len(PORTS[::2])):
      pair = [socket.socket(family), socket.socket(family)]
      held += pair
      try:
        for each, number in zip(pair, (port, port + 1)):
          each.bind((host, number))
      except OSError:
        continue  # somebody is there
      urls.append(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
      if len(urls) == count:
        return urls
  finally:
    for each in held:
      each.close()
  raise OSError(f"found no {count} pairs of free ports between {PORTS[0]} and {PORTS[-1]}")
