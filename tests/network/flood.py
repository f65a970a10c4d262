"""A listed learner that only floods a shard with control: `python -m tests.network.flood URL ...`.

Every message is whole and well-formed, in its own name, and of the incarnation it greeted as. Says
every second how many it has sent; nothing makes it read.
"""

from __future__ import annotations

import itertools
import socket
import sys
import time
from pathlib import Path

from ddiloco.network import frames
from ddiloco.network.frames import seconds_since_2020
from ddiloco.network.keys import Keys, host_and_port
from ddiloco.protocol import messages


def main(url: str, keys: str, run_id: str, plan_id: str, learner: int, fragments: int) -> None:
  address, incarnation = f"learner-{learner}", seconds_since_2020()
  connection = socket.create_connection(host_and_port(url))
  if keys:
    mine = Keys.load(Path(keys), address)
    connection = mine.context_to(mine.server_key("syncer-0")).wrap_socket(connection)
  greeting = frames.Greeting(run_id, plan_id, address, incarnation, b"floods!!", 1)
  connection.sendall(frames.encode(greeting))
  none = (-1,) * fragments
  say = [
    messages.Report(learner, incarnation, 1, 0.01, none, none, (0,) * fragments, False, 0),
    messages.RequestMoments(learner, incarnation, tuple(range(fragments))),
    messages.Goodbye(learner, incarnation),
  ]
  data = [frames.encode(frames.Control(messages.encode(m)[0])) for m in say]
  next_line = time.monotonic() + 1.0
  for count in itertools.count():
    connection.sendall(data[count % len(data)])
    if not count % 1000 and time.monotonic() >= next_line:
      next_line += 1.0
      print(count, flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:5], *map(int, sys.argv[5:]))
