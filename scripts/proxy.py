"""A stand-in for a network link: a TCP proxy with a rate, a delay, and a switch that cuts it.

    python scripts/proxy.py --listen=127.0.0.1:7000 --to=10.0.0.1:7000 --delay_ms=60 [--mbit=10]

The model: all connections share one token bucket per direction, taking turns packet by packet; data
come out `delay_seconds` after they went in, and so do connection requests, ends and resets. Not
modelled: loss, and TCP's own control loops across the link, since each side talks to the proxy. So
a sender sees back-pressure once bandwidth x delay and a little more are under way.

While the link is cut its time stands still: connections hang without an error, new ones are
accepted and hang too, senders see back-pressure. When the link is healed, everything goes on where
it was, as after a partition shorter than TCP's timeouts. Connections that were opened and given up
during the cut never reach the other end.

Protocols of one asyncio loop in a thread of its own. Standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

# --- The parts of a `Link`: one direction of it, and the connections that share it
# A `ShapedLink` gives its flows turns at one token bucket, then delays their bytes. A `Flow` is one
# direction of one connection: it takes what one end receives through the link to the other end,
# with bounded buffers. An `End` is one socket, a `Connection` two of them.

PACKET_BYTES = 1500  # the least that one connection sends in a turn
TURN_BYTES = 16 << 10  # the most that one connection sends in a turn
TURN_SECONDS = 0.001  # between these limits a turn is what the link carries in this time
BURST_SECONDS = 0.01  # of credit at most; makes up for a loop that wakes late
SLACK_BYTES = 256 << 10  # buffered for one connection beyond bandwidth x delay
SLACK_SECONDS = 0.02  # the same in time, for fast links
UNLIMITED = 1e9  # bits per second; bounds the buffers of an unlimited link
READ_BYTES = 64 << 10
KERNEL_BYTES = 256 << 10  # else the kernel's buffers would grow to uncounted megabytes


# Travels over the link: bytes, or what happens at the other end after all bytes before it.
Item = memoryview | Callable[[], None]


class ShapedLink:
  """One direction of the link: turns at the bucket, then a first-in-first-out pipe of one delay."""

  def __init__(self, loop: asyncio.AbstractEventLoop, bits_per_second: float, delay_seconds: float):
    self.bits_per_second = bits_per_second
    self.delay_seconds = delay_seconds
    self.carried_bytes = 0
    self.cut_since: float | None = None
    self._loop = loop
    self._turns: deque[Flow] = deque()  # flows with data waiting, in order of their turns
    self._pipe: deque[tuple[float, Flow, Item]] = deque()  # (arrival, ...)
    self._free_at = 0.0  # when the bucket will have let through all that it has taken
    self._timer: asyncio.Handle | None = None

  def slack_bytes(self) -> int:
    return max(SLACK_BYTES, int(self.bits_per_second / 8 * SLACK_SECONDS))

  def limit_bytes(self) -> int:
    """The most bytes of one connection that may be buffered."""
    return int((self.bits_per_second or UNLIMITED) / 8 * self.delay_seconds) + self.slack_bytes()

  def push(self, flow: Flow, item: Item) -> None:
    if not flow.waiting:
      self._turns.append(flow)
    flow.waiting.append(item)
    self.wake()

  def wake(self) -> None:
    """Runs soon, unless the link is cut."""
    self._stop_timer()
    if self.cut_since is None:
      self._timer = self._loop.call_soon(self._run)

  def cut(self) -> None:
    if self.cut_since is None:
      self.cut_since = self._loop.time()
      self._stop_timer()

  def heal(self) -> None:
    if self.cut_since is not None:
      lost_seconds = self._loop.time() - self.cut_since
      self.cut_since = None
      self._pipe = deque((due + lost_seconds, flow, item) for due, flow, item in self._pipe)
      self.wake()

  def _stop_timer(self) -> None:
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None

  def _run(self) -> None:
    now = self._loop.time()
    self._free_at = max(self._free_at, now - BURST_SECONDS)
    while self._turns and self._free_at <= now:
      self._serve(now)
    while self._pipe and self._pipe[0][0] <= now:
      _, flow, item = self._pipe.popleft()
      if isinstance(item, memoryview):
        self.carried_bytes += len(item)
        flow.deliver(item)
      else:
        item()
    nexts = ([self._free_at] if self._turns else []) + ([self._pipe[0][0]] if self._pipe else [])
    self._stop_timer()  # a delivery may have woken us
    if nexts:
      self._timer = self._loop.call_at(min(nexts), self._run)

  def _serve(self, now: float) -> None:
    """Serves one turn of the next flow."""
    flow = self._turns.popleft()
    item = flow.waiting.popleft()
    if self.bits_per_second and isinstance(item, memoryview):
      bytes_per_second = self.bits_per_second / 8
      turn = max(PACKET_BYTES, min(TURN_BYTES, int(bytes_per_second * TURN_SECONDS)))
      if len(item) > turn:
        flow.waiting.appendleft(item[turn:])
        item = item[:turn]
      self._free_at += len(item) / bytes_per_second
    if flow.waiting:
      self._turns.append(flow)
    self._pipe.append((max(self._free_at, now) + self.delay_seconds, flow, item))


class Flow:
  """One direction of one connection: bytes go from `source` through the lane to `sink`."""

  def __init__(self, lane: ShapedLink, connection: Connection):
    self.lane, self._connection = lane, connection
    self.waiting: deque[Item] = deque()  # for the lane
    self.source: End | None = None
    self.sink: End | None = None
    self.ended = False  # the source has ended
    self.flushed = False  # the source has ended, and all its bytes have been given to the sink
    self._arrived: deque[memoryview] = deque()  # not yet taken by the sink; empty: the end
    self._buffered_bytes = 0

  def take(self, data: bytes) -> None:
    """Takes bytes of the source, which rests while too many are under way."""
    self._buffered_bytes += len(data)
    if self._buffered_bytes >= self.lane.limit_bytes() and self.source is not None:
      self.source.transport.pause_reading()
    self.lane.push(self, memoryview(data))

  def end(self, reset: bool) -> None:
    """The source has ended, and so does the sink, after the last bytes."""
    self.ended = True
    close = functools.partial(self._connection.close, reset=True)
    self.lane.push(self, close if reset else memoryview(b""))

  def deliver(self, data: memoryview) -> None:
    """Takes bytes at the lane's other end."""
    if not self._connection.closed:
      self._arrived.append(data)
      self.flush()

  def flush(self) -> None:
    """Writes as much as the sink takes; the rest when it takes more."""
    while self._arrived and self.sink is not None and self.sink.takes:
      data = self._arrived.popleft()
      self._buffered_bytes -= len(data)
      if data:
        self.sink.transport.write(data)
      else:
        self.flushed = True
        self.sink.transport.write_eof()
        self._connection.close_if_done()
    room = self.lane.limit_bytes() - self._buffered_bytes
    if self.source is not None and not self.ended and 2 * room >= self.lane.slack_bytes():
      self.source.transport.resume_reading()


class End(asyncio.BufferedProtocol):
  """One socket of a connection.

  Args:
    out: takes what the socket receives.
    into: gives what is written to it.
  """

  transport: Any

  def __init__(self, out: Flow, into: Flow):
    self._out, self._into = out, into
    self._memory = bytearray(READ_BYTES)
    self.takes = True  # all that was written is in the kernel

  def connection_made(self, transport: asyncio.BaseTransport) -> None:
    self.transport = transport
    self.transport.set_write_buffer_limits(0)
    self._out.source = self._into.sink = self
    self._into.flush()

  def get_buffer(self, sizehint: int) -> bytearray:
    return self._memory

  def buffer_updated(self, nbytes: int) -> None:
    self._out.take(bytes(self._memory[:nbytes]))

  def eof_received(self) -> bool:
    self._out.end(reset=False)
    return True  # the other direction goes on

  def pause_writing(self) -> None:
    self.takes = False

  def resume_writing(self) -> None:
    self.takes = True
    self._into.flush()

  def connection_lost(self, error: Exception | None) -> None:
    if error is not None:  # reset by its owner: so is the other end, a delay later
      self._into.sink = None
      self._out.end(reset=True)

  def close(self, reset: bool) -> None:
    if self.transport.is_closing():
      return
    if reset:
      linger, mine = struct.pack("ii", 1, 0), self.transport.get_extra_info("socket")
      mine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
      self.transport.abort()
    else:
      self.transport.close()


class Connection:
  """One connection through the link: the near end has been accepted, the far one is dialled a delay
  later. `forget` is called with the connection when it has closed."""

  def __init__(
    self,
    lanes: tuple[ShapedLink, ShapedLink],
    target: tuple[str, int],
    forget: Callable[[Connection], None],
  ):
    self.closed = False
    self._target, self._forget = target, forget
    self.forward, self.backward = (Flow(lane, self) for lane in lanes)
    self.near = End(self.forward, self.backward)
    self.dialling: asyncio.Task | None = None  # the loop itself holds tasks weakly
    self.forward.lane.push(self.forward, self.dial)

  def dial(self) -> None:
    if not self.closed:
      self.dialling = asyncio.ensure_future(self._dial())

  async def _dial(self) -> None:
    loop, far = asyncio.get_running_loop(), new_socket()
    try:
      await loop.sock_connect(far, self._target)
      await loop.create_connection(lambda: End(self.backward, self.forward), sock=far)
    except OSError:  # refused, or no route; the other end gets the reset a delay later
      far.close()
      self.backward.end(reset=True)

  def close_if_done(self) -> None:
    if self.forward.flushed and self.backward.flushed:
      self.close(reset=False)

  def close(self, reset: bool) -> None:
    """Drops both ends; `reset`: abruptly, so that their owners get an error."""
    if not self.closed:
      self.closed = True
      self._forget(self)
      if self.dialling is not None:
        self.dialling.cancel()
      for flow in (self.forward, self.backward):
        if flow.source is not None:
          flow.source.close(reset)


CALL_SECONDS = 30.0  # for the link's thread to answer a call


class PassedBytes(NamedTuple):
  """Payload bytes that went through the link: from the dialling side, and back to it."""

  forward: int
  backward: int


class Link:
  """A link from a local port to `target`.

  Args:
    target: (host, port) where the link leads.
    delay_seconds: one way.
    bits_per_second: of payload, per direction, for all connections together; 0: unlimited.
    listen: (host, port) of this end; port 0 takes a free one.

  Raises:
    OSError: the port to listen on is taken.
  """

  def __init__(
    self,
    target: tuple[str, int],
    delay_seconds: float = 0.0,
    bits_per_second: float = 0.0,
    listen: tuple[str, int] = ("127.0.0.1", 0),
  ):
    self._target = socket.gethostbyname(target[0]), target[1]
    self._listener = _listen(listen)
    self.host, self.port = self._listener.getsockname()
    self._loop = asyncio.new_event_loop()
    rate_and_delay = bits_per_second, delay_seconds
    self._lanes = ShapedLink(self._loop, *rate_and_delay), ShapedLink(self._loop, *rate_and_delay)
    self._connections: set[Connection] = set()
    self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)

  def start(self) -> Link:
    """Opens the link; returns itself."""
    self._thread.start()
    serve = self._loop.create_server(self._accept, sock=self._listener)
    self._server = asyncio.run_coroutine_threadsafe(serve, self._loop).result(CALL_SECONDS)
    return self

  def stop(self) -> None:
    """Closes the link and resets its connections."""
    self._call(self._close)
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(CALL_SECONDS)
    if self._thread.is_alive():
      raise TimeoutError(f"the link's thread has not ended within {CALL_SECONDS:g} s")
    self._loop.close()

  def __enter__(self) -> Link:
    return self.start()

  def __exit__(self, *_: object) -> None:
    self.stop()

  def cut(self) -> None:
    """Stops all traffic from now on, without an error at either end."""
    self._call(self._cut)

  def heal(self) -> None:
    """Everything goes on where it was."""
    self._call(self._heal)

  @property
  def bytes(self) -> PassedBytes:
    """The bytes that have passed so far."""
    return PassedBytes(*(lane.carried_bytes for lane in self._lanes))

  def _accept(self) -> End:
    connection = Connection(self._lanes, self._target, self._connections.discard)
    self._connections.add(connection)
    return connection.near

  def _cut(self) -> None:
    for lane in self._lanes:
      lane.cut()

  def _heal(self) -> None:
    for connection in list(self._connections):
      if connection.forward.ended and connection.dialling is None:
        connection.close(reset=True)
    for lane in self._lanes:
      lane.heal()

  def _close(self) -> None:
    self._server.close()
    for connection in list(self._connections):
      connection.close(reset=True)
    self._cut()

  def _call(self, function: Callable[[], object]) -> None:
    """Runs `function` on the link's thread and waits for it."""

    async def call() -> None:
      function()

    asyncio.run_coroutine_threadsafe(call(), self._loop).result(CALL_SECONDS)


def new_socket() -> socket.socket:
  """A TCP socket that does not block, and whose kernel buffers stay small."""
  new = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
  new.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
  new.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
  new.setblocking(False)
  return new


def _listen(address: tuple[str, int]) -> socket.socket:
  with contextlib.ExitStack() as stack:
    listener = stack.enter_context(new_socket())
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(128)
    stack.pop_all()
  return listener


def _address(text: str) -> tuple[str, int]:
  host, _, port = text.rpartition(":")
  if not host or not port.isdecimal():
    raise argparse.ArgumentTypeError(f"{text!r} must be HOST:PORT, for example 127.0.0.1:7000")
  return host, int(port)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--listen", type=_address, required=True, help="HOST:PORT; 0: any free port")
  parser.add_argument("--to", type=_address, required=True, help="HOST:PORT")
  parser.add_argument("--delay_ms", type=float, default=0.0, help="one way")
  parser.add_argument("--mbit", type=float, default=0.0, help="Mbit/s each way; 0: unlimited")
  args = parser.parse_args()
  ends = {signal.SIGINT, signal.SIGTERM}
  signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before threads start, which inherit it
  with Link(args.to, args.delay_ms / 1e3, args.mbit * 1e6, listen=args.listen) as link:
    print(f"{link.host}:{link.port} leads to {args.to[0]}:{args.to[1]}", flush=True)
    signal.sigwait(ends)
    print(f"{link.bytes.forward:,} bytes there, {link.bytes.backward:,} back", flush=True)


if __name__ == "__main__":
  main()
