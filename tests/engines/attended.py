"""A role of its own process whose endpoint is a stand-in, told on standard input what happens.

`python -m tests.engines.attended DIR`: a line "ready", "fenced", "cut", or "speak" (say something
and wait until the runner has looked again). Every line is answered in DIR/answers, since nobody
may hear what the process says.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from ddiloco.config import from_dict
from ddiloco.engines import role_process
from ddiloco.engines.role_process import RoleRunner
from ddiloco.engines.role_spec import RoleSpec
from tests.engines.test_role_process import Endpoint

TURNS = 5


def main() -> int:
  folder = Path(sys.argv[1])
  role_process.LOOK_SECONDS, role_process.PROGRESS_SECONDS = 0.01, 0.01
  role_process.NetworkEndpoint = Endpoint
  config = from_dict({"network": {"give_up_seconds": 0.5}, "sync": {"num_shards": 1}})
  place = RoleSpec(folder / "run", "run", ("tcp://127.0.0.1:7000",), http="127.0.0.1:0")
  looks, waits_for = threading.Semaphore(0), "joining"

  def ready() -> str:
    looks.release()
    return waits_for

  with RoleRunner("learner-0", config, place) as runner:
    endpoint = runner.connect()
    runner.ready = ready
    answers = os.open(folder / "answers", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(answers, f"{runner.health.url}\n".encode())

    def listen() -> None:
      nonlocal waits_for
      for line in sys.stdin:
        match line.strip():
          case "ready":
            waits_for = ""
          case "fenced":
            endpoint.endpoint.fenced = "a newer incarnation of learner-0 is here"
          case "cut":
            endpoint.endpoint.state = "connecting"
          case "speak":
            runner.say("does anybody hear this?")
            for _ in range(TURNS):
              looks.acquire(timeout=20)
        os.write(answers, line.encode())

    threading.Thread(target=listen, daemon=True).start()

    def role() -> int:
      while not runner.stopped():
        runner.stop.wait(0.01)
      return role_process.FINISHED

    return runner.run(role)


if __name__ == "__main__":
  from ddiloco.cli.arguments import go_on_unheard

  go_on_unheard()
  sys.exit(main())
