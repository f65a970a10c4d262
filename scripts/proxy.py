"""A stand-in for a network link: a TCP proxy with a rate, a delay, and a switch that cuts it.

    python scripts/proxy.py --listen=127.0.0.1:7000 --to=10.0.0.1:7000 --delay_ms=60

The model: all connections share one token bucket per direction, taking turns packet by packet; data
come out `delay_seconds` after they went in, and so do connection requests, ends and resets. Not
modelled: loss, and TCP's own control loops across the link, since each side talks to the proxy. So
a sender sees back-pressure once bandwidth x delay and a little more are under way.

While the link is cut its time stands still: connections hang without an error, new ones are
accepted and hang too, senders see back-pressure. When the link is healed, everything goes on where
it was, as after a partition shorter than TCP's timeouts. Connections that were opened and given up
during the cut never reach the other end.

Callbacks on one asyncio loop in a thread of its own; no busy waiting. Standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import enum
import errno
import itertools
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

# --- The parts of a `Link`: one direction of it, and the connections that share it
# A `ShapedLink` gives its flows turns at one token bucket, then delays their bytes. A `Flow` is one
# direction of one connection: it reads from one socket, passes the link, and writes to the other
# socket, with bounded buffers. A `Connection` is two flows and their two sockets. All run on one
# asyncio loop.

PACKET_BYTES = 1500  # the least that one connection sends in a turn
TURN_BYTES = 16 << 10  # the most that one connection sends in a turn
TURN_SECONDS = 0.001  # between these limits a turn is what the link carries in this time
BURST_SECONDS = 0.01  # of credit at most; makes up for a loop that wakes late
SLACK_BYTES = 256 << 10  # buffered for one connection beyond bandwidth x delay
SLACK_SECONDS = 0.02  # the same in time, for fast links
UNLIMITED = 1e9  # bits per second; bounds the buffers of an unlimited link
READ_BYTES = 64 << 10
KERNEL_BYTES = 256 << 10  # else the kernel's buffers would grow to uncounted megabytes
_VECTORS = 64  # buffers handed to the kernel in one call


class Mark(enum.Enum):
  """A mark that travels between bytes, in order with them."""

  OPEN = enum.auto()
  END = enum.auto()
  RESET = enum.auto()


def new_socket() -> socket.socket:
  """A TCP socket whose kernel buffers stay small."""
  new = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
  new.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
  new.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
  return new


class ShapedLink:
  """One direction of the link: turns at the bucket, then a first-in-first-out pipe of one delay."""

  def __init__(self, loop: asyncio.AbstractEventLoop, bits_per_second: float, delay_seconds: float):
    self.bits_per_second = bits_per_second
    self.delay_seconds = delay_seconds
    self.carried_bytes = 0
    self.cut_since: float | None = None
    self._loop = loop
    self._turns: deque[Flow] = deque()  # flows with data waiting, in order of their turns
    self._pipe: deque[tuple[float, Flow, memoryview | Mark]] = deque()  # (arrival, ...)
    self._free_at = 0.0  # when the bucket will have let through all that it has taken
    self._timer: asyncio.Handle | None = None

  def slack_bytes(self) -> int:
    return max(SLACK_BYTES, int(self.bits_per_second / 8 * SLACK_SECONDS))

  def limit_bytes(self) -> int:
    """The most bytes of one connection that may be buffered."""
    return int((self.bits_per_second or UNLIMITED) / 8 * self.delay_seconds) + self.slack_bytes()

  def push(self, flow: Flow, item: memoryview | Mark) -> None:
    if not flow.waiting:
      self._turns.append(flow)
    flow.waiting.append(item)
    self.wake()

  def wake(self) -> None:
    """Schedules `_run` soon."""
    if self.cut_since is None:
      self._stop_timer()
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
      if not isinstance(item, Mark):
        self.carried_bytes += len(item)
      flow.deliver(item)
    nexts = ([self._free_at] if self._turns else []) + ([self._pipe[0][0]] if self._pipe else [])
    self._stop_timer()  # a delivery may have woken us
    if nexts:
      self._timer = self._loop.call_at(min(nexts), self._run)

  def _serve(self, now: float) -> None:
    """Serves one turn of the next flow."""
    flow = self._turns.popleft()
    item = flow.waiting.popleft()
    if self.bits_per_second and not isinstance(item, Mark):
      bytes_per_second = self.bits_per_second / 8
      turn = max(PACKET_BYTES, min(TURN_BYTES, int(bytes_per_second * TURN_SECONDS)))
      if len(item) > turn:
        flow.waiting.appendleft(item[turn:])
        item = item[:turn]
      self._free_at += len(item) / bytes_per_second
    if flow.waiting:
      self._turns.append(flow)
    due = max(self._free_at, now) + self.delay_seconds
    if self._pipe:  # keeps the order if the delay was just made shorter
      due = max(due, self._pipe[-1][0])
    self._pipe.append((due, flow, item))


class Flow:
  """One direction of one connection: bytes go from `source` through the lane to `sink`."""

  def __init__(self, lane: ShapedLink, connection: Connection):
    self.lane = lane
    self.waiting: deque[memoryview | Mark] = deque()  # for the lane
    self.source: socket.socket | None = None
    self.sink: socket.socket | None = None
    self.ended = False  # the source has ended
    self.flushed = False  # the source has ended, and all its bytes have been written
    self._sink_lost = False
    self._arrived: deque[memoryview | Mark] = deque()  # not yet taken by the sink
    self._buffered_bytes = 0
    self._paused = False
    self._connection = connection
    self._loop = connection.loop

  def listen(self, source: socket.socket) -> None:
    self.source = source
    self._loop.add_reader(source, self._read, source)

  def end(self, mark: Mark) -> None:
    """The source has ended; the mark follows its last bytes."""
    self.ended = True
    if self.source is not None:
      self._loop.remove_reader(self.source)
    self.lane.push(self, mark)

  def deliver(self, item: memoryview | Mark) -> None:
    """Takes an item at the lane's other end."""
    if item is Mark.OPEN:
      self._connection.dial()
    elif item is Mark.RESET:
      self._connection.close(reset=True)
    elif not self._connection.closed:
      self._arrived.append(item)
      self.flush()

  def flush(self) -> None:
    """Writes as much as the sink takes; the rest when it takes more."""
    while self._arrived and self.sink is not None:
      try:
        if self._arrived[0] is Mark.END:
          self.flushed = True
          if not self._sink_lost:
            self.sink.shutdown(socket.SHUT_WR)
          self._arrived.popleft()
        else:
          self._written(self._send(self.sink))
      except (BlockingIOError, InterruptedError):
        self._loop.add_writer(self.sink, self._writable, self.sink)
        return
      except OSError:  # from now on all items are dropped
        self._sink_lost = True
        self._connection.lost(self)
    if self.flushed:
      self._connection.close_if_done()

  def resume(self) -> None:
    """Reads again if there is room."""
    room = self.lane.limit_bytes() - self._buffered_bytes
    if self._paused and not self.ended and 2 * room >= self.lane.slack_bytes():
      self._paused = False
      assert self.source is not None
      self.listen(self.source)

  def _send(self, sink: socket.socket) -> int:
    first = itertools.islice(self._arrived, _VECTORS)
    pieces = [item for item in first if not isinstance(item, Mark)]  # an end is the last item
    return sum(map(len, pieces)) if self._sink_lost else sink.sendmsg(pieces)

  def _written(self, count: int) -> None:
    self._buffered_bytes -= count
    while count:
      head = self._arrived.popleft()
      assert isinstance(head, memoryview)
      if len(head) > count:
        self._arrived.appendleft(head[count:])
      count -= min(count, len(head))
    self.resume()

  def _writable(self, sink: socket.socket) -> None:
    self._loop.remove_writer(sink)
    self.flush()

  def _read(self, source: socket.socket) -> None:
    try:
      data = source.recv(READ_BYTES)
    except (BlockingIOError, InterruptedError):
      return
    except OSError:
      self.end(Mark.RESET)
      return
    if not data:
      self.end(Mark.END)
      return
    self._buffered_bytes += len(data)
    if self._buffered_bytes >= self.lane.limit_bytes():
      self._paused = True
      self._loop.remove_reader(source)
    self.lane.push(self, memoryview(data))


class Connection:
  """One connection through the link: `near` has been accepted, `far` is dialled a delay later."""

  def __init__(
    self,
    loop: asyncio.AbstractEventLoop,
    lanes: tuple[ShapedLink, ShapedLink],
    near: socket.socket,
    target: tuple[str, int],
    forget: Callable[[Connection], None],
  ):
    """`forget` is called with the connection when it has closed."""
    self.loop = loop
    self.closed = False
    self.opened = False
    self._target = target
    self._forget = forget
    self._near = near
    self._far: socket.socket | None = None
    self.forward = Flow(lanes[0], self)
    self.backward = Flow(lanes[1], self)
    self.backward.sink = near
    self.forward.lane.push(self.forward, Mark.OPEN)
    self.forward.listen(near)

  def dial(self) -> None:
    if self.closed:
      return
    self.opened = True
    self._far = far = new_socket()
    far.setblocking(False)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if far.connect_ex(self._target) in (0, errno.EINPROGRESS):
      self.loop.add_writer(far, self._dialled, far)
    else:
      self.backward.end(Mark.RESET)  # no route; the other end gets the reset a delay later

  def _dialled(self, far: socket.socket) -> None:
    self.loop.remove_writer(far)
    if far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
      self.backward.end(Mark.RESET)  # refused
      return
    self.forward.sink = far
    self.backward.listen(far)
    self.forward.flush()

  def lost(self, flow: Flow) -> None:
    """Writing to the sink of `flow` failed, its owner is gone: resets the other end."""
    (self.backward if flow is self.forward else self.forward).end(Mark.RESET)

  def close_if_done(self) -> None:
    if self.forward.flushed and self.backward.flushed:
      self.close(reset=False)

  def close(self, reset: bool) -> None:
    """Drops both ends; `reset`: abruptly, so that their owners get an error."""
    if self.closed:
      return
    self.closed = True
    self._forget(self)
    for end in (self._near, self._far):
      if end is not None:
        self.loop.remove_reader(end)
        self.loop.remove_writer(end)
        if reset:
          end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()


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
    self._loop.add_reader(self._listener, self._accept)
    self._thread.start()
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
  def bytes(self) -> PassedBytes:
    """The bytes that have passed so far."""
    return PassedBytes(*(lane.carried_bytes for lane in self._lanes))

  def _accept(self) -> None:
    try:
      near, _ = self._listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
      return  # the dialling side has given up already
    near.setblocking(False)
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self._connections.add(
      Connection(self._loop, self._lanes, near, self._target, self._connections.discard)
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
    self._loop.remove_reader(self._listener)
    self._listener.close()
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
    done.result(CALL_SECONDS)


def _listen(address: tuple[str, int]) -> socket.socket:
  listener = new_socket()
  try:
    listener.setblocking(False)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(128)
  except BaseException:
    listener.close()
    raise
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
