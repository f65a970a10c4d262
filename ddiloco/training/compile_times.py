"""What a thread compiles while it trains: nothing, since programs are compiled ahead of time.

If it does all the same, its chips wait. Then the log says so, and the goodput ledger has a cause.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

LEAST_SECONDS = 0.01  # less is no more than a small array's; an event each would only be noise
_COMPILED = "/jax/core/compile/backend_compile_duration"  # also of programs out of the cache


@contextlib.contextmanager
def told_what_compiles(tell: Callable[[str, float], None]) -> Iterator[None]:
  """While it lasts, `tell(program, seconds)` for all that the calling thread has compiled."""
  me = threading.get_ident()

  def listen(event: str, seconds: float, **more: Any) -> None:
    if event == _COMPILED and threading.get_ident() == me and seconds >= LEAST_SECONDS:
      tell(str(more.get("fun_name", "a program")), seconds)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
