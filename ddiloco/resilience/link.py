"""A stand-in for a network link: a TCP proxy with a rate, a delay, and a switch that cuts it.

    python -m ddiloco.resilience.link --listen=127.0.0.1:7000 --to=10.0.0.1:7000 --delay_ms=60

What it models: all connections share one token bucket per direction, taking turns packet by packet;
whatever goes in comes out `delay_seconds` later, connection requests, ends and resets included. Not
modelled: loss, and TCP's own control loops across the link, since each side talks to the proxy. So
a sender sees back-pressure once bandwidth x delay and a little more are under way.

While the link is cut its time stands still: connections hang without being told, new ones are
accepted and hang too, senders run into back-pressure. Healed, everything goes on where it was, as
after a partition shorter than TCP's patience. Connections that were begun and given up meanwhile
never happened.

Callbacks on one asyncio loop in a thread of its own; no busy waiting. Standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import itertools
import signal
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

from ddiloco.resilience.lane import Connection, Lane, new_socket

_ATTEMPTS = 100  # to find a free row of ports


class Traffic(NamedTuple):
  """Payload bytes that went through the link: from those who dial, and back to them."""

  forward: int
  backward: int


class Link:
  """A link from local ports to `target`'s ports, of which there are `ports` in a row.

  Args:
    target: (host, first port) where the link leads.
    delay_seconds: one way.
    bits_per_second: of payload, per direction, for all connections together; 0: unlimited.
    ports: how many consecutive ports are carried over (ours: control and bulk).
    listen: (host, first port) of this end; port 0 takes a free row.

  Raises:
    OSError: the ports to listen on are taken.
  """

  def __init__(
    self,
    target: tuple[str, int],
    delay_seconds: float = 0.0,
    bits_per_second: float = 0.0,
    ports: int = 2,
    listen: tuple[str, int] = ("127.0.0.1", 0),
  ):
    host = socket.gethostbyname(target[0])
    self._targets = [(host, target[1] + i) for i in range(ports)]
    self._listeners = _listen(listen, ports)
    self.host, self.port = self._listeners[0].getsockname()
    self._loop = asyncio.new_event_loop()
    rate_and_delay = bits_per_second, delay_seconds
    self._lanes = Lane(self._loop, *rate_and_delay), Lane(self._loop, *rate_and_delay)
    self._connections: set[Connection] = set()
    self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)

  def start(self) -> Link:
    """Opens the link; returns itself."""
    for listener, target in zip(self._listeners, self._targets):
      self._loop.add_reader(listener, self._accept, listener, target)
    self._thread.start()
    return self

  def stop(self) -> None:
    """Closes the link and resets its connections."""
    self._call(self._close)
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  def __enter__(self) -> Link:
    return self.start()

  def __exit__(self, *_: object) -> None:
    self.stop()

  def cut(self) -> None:
    """Nothing passes from now on, and nobody is told."""
    self._call(self._cut)

  def heal(self) -> None:
    """Everything goes on where it was."""
    self._call(self._heal)

  def set(self, delay_seconds: float | None = None, bits_per_second: float | None = None) -> None:
    """Changes delay (one way) or rate from now on; None leaves it as it is."""

    def change() -> None:
      for lane in self._lanes:
        if delay_seconds is not None:
          lane.delay_seconds = delay_seconds
        if bits_per_second is not None:
          lane.bits_per_second = bits_per_second
        lane.wake()
      for connection in self._connections:
        connection.forward.resume()
        connection.backward.resume()

    self._call(change)

  @property
  def bytes(self) -> Traffic:
    """What has passed so far."""
    return Traffic(*(lane.carried_bytes for lane in self._lanes))

  def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
    try:
      near, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
      return  # given up before we came to it
    near.setblocking(False)
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self._connections.add(
      Connection(self._loop, self._lanes, near, target, self._connections.discard)
    )

  def _cut(self) -> None:
    for lane in self._lanes:
      lane.cut()

  def _heal(self) -> None:
    for connection in list(self._connections):
      if connection.forward.ended and not connection.opened:
        connection.close(reset=True)
    for lane in self._lanes:
      lane.heal()

  def _close(self) -> None:
    for listener in self._listeners:
      self._loop.remove_reader(listener)
      listener.close()
    for connection in list(self._connections):
      connection.close(reset=True)
    self._cut()

  def _call(self, function: Callable[[], object]) -> None:
    """Runs `function` on the link's thread and waits for it."""
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
      try:
        function()
        done.set_result(None)
      except Exception as error:
        done.set_exception(error)

    self._loop.call_soon_threadsafe(run)
    done.result()


def _listen(address: tuple[str, int], ports: int) -> list[socket.socket]:
  """Listening sockets on consecutive ports; port 0: on any free row of them."""
  host, first = address
  for attempt in itertools.count(1):
    opened: list[socket.socket] = []
    try:
      for i in range(ports):
        port = opened[0].getsockname()[1] + i if opened else first
        opened.append(new_socket())
        opened[-1].setblocking(False)
        opened[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened[-1].bind((host, port))
        opened[-1].listen(128)
      return opened
    except (OSError, OverflowError):  # overflow: the row would go past port 65535
      for each in opened:
        each.close()
      if first or attempt == _ATTEMPTS:
        raise
  raise AssertionError("unreachable")


def _address(text: str) -> tuple[str, int]:
  host, _, port = text.rpartition(":")
  if not host or not port.isdecimal():
    raise argparse.ArgumentTypeError(f"{text!r} must be HOST:PORT, for example 127.0.0.1:7000")
  return host, int(port)


def main() -> None:
  parser = argparse.ArgumentParser(
    prog="python -m ddiloco.resilience.link",
    description="Carries two consecutive TCP ports over a link of a set delay and rate.",
  )
  parser.add_argument("--listen", type=_address, required=True, help="HOST:PORT; 0: any free pair")
  parser.add_argument("--to", type=_address, required=True, help="HOST:PORT")
  parser.add_argument("--delay_ms", type=float, default=0.0, help="one way")
  parser.add_argument("--mbit", type=float, default=0.0, help="Mbit/s each way; 0: unlimited")
  args = parser.parse_args()
  ends = {signal.SIGINT, signal.SIGTERM}
  signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before there are threads
  with Link(args.to, args.delay_ms / 1e3, args.mbit * 1e6, listen=args.listen) as link:
    print(f"{link.host}:{link.port} leads to {args.to[0]}:{args.to[1]}", flush=True)
    signal.sigwait(ends)
    print(f"{link.bytes.forward:,} bytes there, {link.bytes.backward:,} back", flush=True)


if __name__ == "__main__":
  main()
