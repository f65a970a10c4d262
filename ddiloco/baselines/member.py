"""The process of one island in data-parallel: `python -m ddiloco.baselines.member`.

It imports everything once. For every world it forks a child that trains in it, so that who survives
a failure need not import again: a new world costs it to meet the others, to load the program and
its state. Nothing of a dead world is left in the child, and a collective that hangs ends with it.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

from ddiloco import environment
from ddiloco.baselines.orders import END, READY, Lines, Order, line

TURN_SECONDS = 0.01


class Member:
  """Does what it is told on file descriptor 0 and answers on 1. One thread, since it forks.

  Args:
    train: what the child of an order does.
  """

  def __init__(self, train: Callable[[Order], None]):
    self._train = train
    self._child = 0  # its process id; 0: none
    self._number = 0  # of its order

  def run(self) -> None:
    """Until its input ends."""
    lines = Lines()
    os.write(1, line(READY))
    try:
      while True:
        readable, _, _ = select.select([0], [], [], TURN_SECONDS)
        data = os.read(0, 4096) if readable else None
        if data == b"":
          return
        for message in lines.take(data or b""):
          self._end()
          if message != END:
            self._begin(Order(**message))
        self._reap(os.WNOHANG)
    finally:
      self._end()

  def _begin(self, order: Order) -> None:
    child = os.fork()
    if child:
      self._child, self._number = child, order.number
      return
    status = 1
    try:
      os.close(0)
      os.dup2(2, 1)  # 1 is ours to answer on; what gloo prints goes to the log
      self._train(order)
      status = 0
    except BaseException:  # the child must not go on as a second member, whatever it was
      traceback.print_exc()
    finally:
      os._exit(status)

  def _end(self) -> None:
    if self._child:
      os.kill(self._child, signal.SIGKILL)
      self._reap(0)

  def _reap(self, options: int) -> None:
    if self._child and os.waitpid(self._child, options)[0]:
      self._child = 0
      os.write(1, line(self._number))


def main() -> None:
  parser = argparse.ArgumentParser(description="One island of data-parallel.")
  parser.add_argument("--workdir", type=Path, required=True)
  parser.add_argument("--learner", type=int, required=True)
  arguments = parser.parse_args()
  environment.prepare(num_cpu_devices=1, cpu_only=True)
  import jax

  # What one world compiles, another may be handed from a folder that both use; with several
  # processes it then lacks functions ("NOT_FOUND: Function ... not found", JAX 0.10).
  jax.config.update("jax_enable_compilation_cache", False)
  from ddiloco.baselines.worker import Worker

  Member(Worker(arguments.workdir, arguments.learner).train).run()


if __name__ == "__main__":
  main()
