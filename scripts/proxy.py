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

Streams of one asyncio loop in a thread of its own. Standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

# --- A `Lane` is one direction of the link, a `Flow` one direction of one of its connections

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
OPEN, END, RESET = "open", "end", "reset"
Item = bytes | str


class Lane:
  """One direction of the link: turns at the bucket, then a first-in-first-out pipe of one delay."""

  def __init__(self, bits_per_second: float, delay_seconds: float):
    self.delay_seconds, self.carried_bytes = delay_seconds, 0
    self._bytes_per_second = bits_per_second / 8
    turn = int(self._bytes_per_second * TURN_SECONDS)
    self._turn_bytes = max(PACKET_BYTES, min(TURN_BYTES, turn)) if bits_per_second else READ_BYTES
    rate = (bits_per_second or UNLIMITED) / 8
    self.limit_bytes = int(rate * delay_seconds + max(SLACK_BYTES, rate * SLACK_SECONDS))
    self._turns = asyncio.Queue[Flow]()  # flows with data waiting, in order of their turns
    self._pipe = asyncio.Queue[tuple[float, Flow, Item]]()  # (arrival, ...)
    self._free_at = 0.0  # when the bucket will have let through all that it has taken
    self.open = asyncio.Event()  # unless the link is cut
    self.open.set()
    self.stood_seconds = self._cut_at = 0.0

  def clock(self) -> float:
    """Seconds, without those in which the link was cut."""
    now = asyncio.get_running_loop().time()
    return (now if self.open.is_set() else self._cut_at) - self.stood_seconds

  def cut(self) -> None:
    if self.open.is_set():
      self._cut_at = asyncio.get_running_loop().time()
      self.open.clear()

  def heal(self) -> None:
    if not self.open.is_set():
      self.stood_seconds += asyncio.get_running_loop().time() - self._cut_at
      self.open.set()

  def push(self, flow: Flow, item: Item) -> None:
    if not flow.waiting:
      self._turns.put_nowait(flow)
    flow.waiting.append(item)

  async def serve(self) -> None:
    """Lets flows take turns at the bucket, for ever."""
    while True:
      flow = await self._turns.get()
      await self._until(self._free_at)
      item, size = flow.waiting.popleft(), 0
      if isinstance(item, bytes):
        if rest := item[self._turn_bytes :]:
          flow.waiting.appendleft(rest)
        item = item[: self._turn_bytes]
        size = len(item)
      now = self.clock()
      self._free_at = max(self._free_at, now - BURST_SECONDS)
      if self._bytes_per_second:
        self._free_at += size / self._bytes_per_second
      if flow.waiting:
        self._turns.put_nowait(flow)
      self._pipe.put_nowait((max(self._free_at, now) + self.delay_seconds, flow, item))

  async def deliver(self) -> None:
    """Gives flows what has arrived at the other end, for ever."""
    while True:
      due, flow, item = await self._pipe.get()
      await self._until(due)
      self.carried_bytes += len(item) if isinstance(item, bytes) else 0
      flow.arrived.put_nowait(item)

  async def _until(self, due: float) -> None:
    await self.open.wait()
    while (left := due - self.clock()) > 0:
      await asyncio.sleep(left)
      await self.open.wait()


class Flow:
  """One direction of one connection, with bounded buffers."""

  def __init__(self, lane: Lane):
    self.lane = lane
    self.waiting: deque[Item] = deque()  # for the lane
    self.arrived = asyncio.Queue[Item]()
    self.ended = False  # the source has ended
    self.buffered_bytes = 0
    self._taken = asyncio.Event()  # the sink has taken some

  async def read(self, source: asyncio.StreamReader) -> None:
    """Takes what the source gives, which rests while too much is under way."""
    end = END
    try:
      while data := await source.read(READ_BYTES):
        self.buffered_bytes += len(data)
        self.lane.push(self, data)
        while self.buffered_bytes >= self.lane.limit_bytes:
          self._taken.clear()
          await self._taken.wait()
    except OSError:
      end = RESET
    self.ended = True
    self.lane.push(self, end)

  async def write(self, sink: asyncio.StreamWriter) -> None:
    """Gives the sink what arrives, to its end.

    Raises:
      ConnectionResetError: it was a reset.
    """
    while (item := await self.arrived.get()) != END:
      if not isinstance(item, bytes):
        raise ConnectionResetError
      with contextlib.suppress(OSError):  # reset by its owner, as the other flow hears
        sink.write(item)
        await sink.drain()
      self.buffered_bytes -= len(item)
      self._taken.set()
    with contextlib.suppress(OSError):
      sink.write_eof()


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
    self._lanes = [Lane(bits_per_second, delay_seconds) for _ in range(2)]
    self._tasks: list[asyncio.Task[None]] = []  # of the lanes
    self._connections: dict[asyncio.Task | None, Flow] = {}  # the way there of each
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)

  def start(self) -> Link:
    """Opens the link; returns itself."""
    self._thread.start()
    self._call(self._open())
    return self

  def stop(self) -> None:
    """Closes the link and resets its connections."""
    self._call(self._close())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(CALL_SECONDS)
    self._loop.close()

  def __enter__(self) -> Link:
    return self.start()

  def __exit__(self, *_: object) -> None:
    self.stop()

  def cut(self) -> None:
    """Stops all traffic from now on, without an error at either end."""
    self._call(self._each(Lane.cut))

  def heal(self) -> None:
    """Everything goes on where it was."""
    self._call(self._each(Lane.heal))

  @property
  def bytes(self) -> PassedBytes:
    """The bytes that have passed so far."""
    return PassedBytes(*(lane.carried_bytes for lane in self._lanes))

  def _call(self, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` on the link's thread and waits for it."""
    asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS)

  async def _each(self, what: Callable[[Lane], None]) -> None:
    for lane in self._lanes:
      what(lane)

  async def _open(self) -> None:
    works = [work for lane in self._lanes for work in (lane.serve(), lane.deliver())]
    self._tasks = [asyncio.create_task(work) for work in works]
    self._server = await asyncio.start_server(self._accept, sock=self._listener)

  async def _close(self) -> None:
    # The server is closed last, and a connection that was accepted a moment ago first begins: else
    # nothing would close its socket.
    self._loop.remove_reader(self._listener)
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
      for task in (*self._tasks, *filter(None, self._connections)):
        task.cancel()
      await asyncio.wait(tasks, timeout=TURN_SECONDS)
    self._server.close()

  def _accept(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Begins a connection. Were this `_carry`, asyncio would log every task that `_close` cancels.

    The loop holds the task until it begins, `_connections` from then on.
    """
    self._loop.create_task(self._carry(source, sink))

  async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """One connection: its near end has been accepted, the far one is dialled a delay later."""
    forward, backward = (Flow(lane) for lane in self._lanes)
    task, sinks, reset = asyncio.current_task(), [sink], True
    self._connections[task] = forward
    sink.transport.set_write_buffer_limits(0)
    stood_seconds = forward.lane.stood_seconds
    forward.lane.push(forward, OPEN)
    try:
      async with asyncio.TaskGroup() as ends:
        ends.create_task(forward.read(source))
        ends.create_task(backward.write(sink))
        await forward.arrived.get()
        if forward.ended and forward.lane.stood_seconds > stood_seconds:
          raise ConnectionResetError  # given up during a cut
        try:
          far = await self._dial()
        except OSError:  # refused, or no route; the other end gets the reset a delay later
          backward.lane.push(backward, RESET)
        else:
          sinks.append(far[1])
          ends.create_task(backward.read(far[0]))
          ends.create_task(forward.write(far[1]))
      reset = False
    except* ConnectionResetError:
      pass
    finally:
      del self._connections[task]
      for each in sinks:
        _close(each, reset)

  async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    far = new_socket()
    try:
      await asyncio.get_running_loop().sock_connect(far, self._target)
    except BaseException:  # cancelled, too
      far.close()
      raise
    source, sink = await asyncio.open_connection(sock=far)
    sink.transport.set_write_buffer_limits(0)
    return source, sink


def _close(sink: asyncio.StreamWriter, reset: bool) -> None:
  """Closes a socket; `reset`: abruptly, so that its owner gets an error."""
  if reset and not sink.is_closing():
    linger = struct.pack("ii", 1, 0)
    sink.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    sink.transport.abort()
  sink.close()


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
