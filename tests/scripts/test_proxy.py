"""The stand-in for a network link keeps its rate and delay, is fair, bounded, and can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

import pytest
from proxy import BURST_SECONDS, Lane, Link

from tests.scripts.commands import SCRIPTS
from tests.waits import PATIENCE_SECONDS, wait_for


class Server:
  """Listens on a free port and runs `serve(connection)` in a thread per connection."""

  def __init__(self, serve: Callable[[socket.socket], None]):
    self._serve = serve
    self._listener = socket.create_server(("127.0.0.1", 0))
    self.address = self._listener.getsockname()
    self.accepted: list[socket.socket] = []
    self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 << 10)  # inherited
    threading.Thread(target=self._accept, daemon=True).start()

  def _accept(self) -> None:
    with contextlib.suppress(OSError):  # closed
      while True:
        connection, _ = self._listener.accept()
        self.accepted.append(connection)
        threading.Thread(target=self._run, args=(connection,), daemon=True).start()

  def _run(self, connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
      self._serve(connection)

  def close(self) -> None:
    for each in (self._listener, *self.accepted):
      with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
      each.close()


@contextlib.contextmanager
def served(serve: Callable[[socket.socket], None], **settings) -> Iterator[tuple[Link, Server]]:
  server = Server(serve)
  try:
    with Link(server.address, **settings) as link:
      yield link, server
  finally:
    server.close()


def echo(connection: socket.socket) -> None:
  while data := connection.recv(1 << 16):
    connection.sendall(data)
  connection.shutdown(socket.SHUT_WR)


def hold(connection: socket.socket) -> None:
  """Never reads."""


def dial(link: Link) -> socket.socket:
  connection = socket.create_connection((link.host, link.port), PATIENCE_SECONDS)
  connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  return connection


def exactly(connection: socket.socket, size: int) -> bytes:
  data = b""
  while len(data) < size:
    piece = connection.recv(size - len(data))
    assert piece, f"the connection ended after {len(data)} of {size} bytes"
    data += piece
  return data


def silent(connection: socket.socket, seconds: float) -> bool:
  """Whether nothing, not even an end, comes for so long."""
  connection.settimeout(seconds)
  try:
    connection.recv(1)
    return False
  except TimeoutError:
    return True
  finally:
    connection.settimeout(PATIENCE_SECONDS)


def round_trip(connection: socket.socket, data: bytes = b"x" * 100) -> float:
  before = time.monotonic()
  connection.sendall(data)
  assert exactly(connection, len(data)) == data
  return time.monotonic() - before


def accepted_bytes(connection: socket.socket) -> int:
  """How much a sender gets rid of until nothing moves for 0.4 s."""
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
  connection.settimeout(0.4)
  total = 0
  with contextlib.suppress(TimeoutError):
    while True:
      total += connection.send(bytes(64 << 10))
  return total


def test_it_leads_to_the_target_and_bytes_are_counted():
  with served(echo) as (link, server):
    for _ in range(2):
      with dial(link) as connection:
        round_trip(connection, b"hello")
    assert len(server.accepted) == 2
    assert link.bytes == (10, 10)


# --- rates and delays, in virtual time: a busy machine would be slower than the link


class VirtualLoop(asyncio.SelectorEventLoop):
  """A loop whose time passes when nothing is left to do before that; a turn takes a nanosecond."""

  _now = 0.0

  def __init__(self) -> None:
    super().__init__()
    select = self._selector.select

    def jump(timeout: float | None) -> list:
      assert timeout is not None, "nothing will ever happen"
      self._now += timeout + 1e-9
      return select(0.0)

    self._selector.select = jump

  def time(self) -> float:
    return self._now


def now() -> float:
  return asyncio.get_running_loop().time()


class End:
  """One end of a connection: what it sends, and what it gets when."""

  def __init__(self) -> None:
    self.source, self.transport = asyncio.StreamReader(), mock.Mock()
    self.got_bytes, self.got_at, self.ended_at = 0, math.nan, math.nan

  def send(self, size: int, ends: bool = True) -> None:
    self.source.feed_data(bytes(size))
    if ends:
      self.source.feed_eof()

  def write(self, data: bytes) -> None:
    self.got_bytes, self.got_at = self.got_bytes + len(data), now()

  async def drain(self) -> None:
    return

  def write_eof(self) -> None:
    self.ended_at = now()

  def close(self) -> None:
    return

  def is_closing(self) -> bool:
    return True


class Net:
  """A link without sockets."""

  def __init__(self, **settings: float):
    self.link = Link(("127.0.0.1", 1), **settings)
    self._far: list[End] = []  # which are dialled next

  def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def serve() -> None:
      for lane in self.link._lanes:
        tasks.extend(asyncio.create_task(each) for each in (lane.serve(), lane.deliver()))
      await work()

    tasks: list[asyncio.Task] = []
    with (
      mock.patch.object(self.link, "_dial", self._dial),
      contextlib.closing(self.link._listener),
      contextlib.closing(self.link._loop),
      asyncio.Runner(loop_factory=VirtualLoop) as runner,
    ):
      runner.run(serve())

  def connect(self) -> tuple[End, End, asyncio.Task]:
    """Both ends of a new connection, and its task, which ends when both have."""
    near, far = End(), End()
    self._far.append(far)
    return near, far, asyncio.create_task(self.link._carry(near.source, near))

  async def _dial(self) -> tuple[asyncio.StreamReader, End]:
    far = self._far.pop(0)
    return far.source, far


@pytest.mark.parametrize("mbit, size", [(10, 500_000), (200, 6_000_000)])
def test_each_direction_has_the_rate_for_itself(mbit, size):
  net = Net(bits_per_second=mbit * 1e6, delay_seconds=0.02)

  async def work() -> None:
    near, far, over = net.connect()
    for end in (near, far):
      end.send(size)
    await over
    seconds = 8e-6 * size / mbit
    assert (near.got_bytes, far.got_bytes) == (size, size) == net.link.bytes
    assert far.ended_at == pytest.approx(seconds + 0.02, abs=1e-3)
    # The far end is dialled a delay later, and its lane has a credit by then.
    assert near.ended_at == pytest.approx(seconds + 0.04 - BURST_SECONDS, abs=1e-3)

  net.run(work)


def test_the_delay_is_kept_also_by_ends():
  net = Net(delay_seconds=0.05)

  async def work() -> None:
    near, far, over = net.connect()
    near.send(100)
    await asyncio.sleep(0.07)
    assert (far.got_at, far.ended_at) == pytest.approx((0.05, 0.05), abs=1e-3)
    far.send(100)
    await over
    assert (near.got_at, near.ended_at) == pytest.approx((0.12, 0.12), abs=1e-3)

  net.run(work)


def test_a_small_message_does_not_wait_behind_bulk():
  net = Net(bits_per_second=10e6)

  async def work() -> None:
    bulk, control, far = net.connect()[0], *net.connect()[:2]
    bulk.send(1_250_000)
    await asyncio.sleep(0.2)
    for number in range(21):
      control.send(100, ends=False)
      await asyncio.sleep(0.03)
      assert far.got_bytes == 100 * (number + 1) and now() - far.got_at > 0.025
    assert now() < 1.0, "the link is still full"

  net.run(work)


def test_what_was_in_the_air_when_the_link_was_cut_arrives_later_by_the_cut():
  net = Net(delay_seconds=0.1)

  async def work() -> None:
    near, far, _ = net.connect()
    near.send(1, ends=False)
    await asyncio.sleep(0.03)
    await net.link._each(Lane.cut)
    await asyncio.sleep(0.3)
    assert not far.got_bytes
    await net.link._each(Lane.heal)
    await asyncio.sleep(0.1)
    assert far.got_at == pytest.approx(0.4, abs=1e-3)

  net.run(work)


def test_many_connections_share_evenly():
  number, size, net = 40, 50_000, Net(bits_per_second=20e6, delay_seconds=0.01)

  async def work() -> None:
    connections = [net.connect() for _ in range(number)]
    for near, far, _ in connections:
      near.send(size)
      far.send(0)
    for _, far, over in connections:
      await over
      assert far.got_bytes == size
      assert 0.75 < far.ended_at < 0.82, "all together take 0.8 s, so none went first"
    assert net.link.bytes.forward == number * size

  net.run(work)


# --- on sockets


def test_cut_hangs_and_heal_goes_on():
  with served(echo, delay_seconds=0.02) as (link, _), dial(link) as old:
    round_trip(old)
    link.cut()
    old.sendall(b"held")
    with dial(link) as new:
      new.sendall(b"also")
      assert silent(old, 0.2) and silent(new, 0.1)
      link.heal()
      assert exactly(old, 4) == b"held"
      assert exactly(new, 4) == b"also"
    round_trip(old)


def test_connections_given_up_during_a_cut_never_happened():
  with served(echo) as (link, server):
    link.cut()
    for _ in range(5):
      dial(link).close()
    with dial(link) as kept:
      wait_for(lambda: sum(each.ended for each in [*link._connections.values()]) == 5, "their ends")
      link.heal()
      round_trip(kept)
    assert len(server.accepted) == 1


@pytest.mark.parametrize("cut", [False, True], ids=["the other end does not read", "cut"])
def test_back_pressure_bounds_what_is_buffered(cut):
  bandwidth_x_delay, slack, kernel = 500_000, 700_000, 3_000_000
  with served(hold, bits_per_second=200e6, delay_seconds=0.02) as (link, _):
    if cut:
      link.cut()
    with dial(link) as connection:
      assert 0 < accepted_bytes(connection) < bandwidth_x_delay + slack + kernel
      (forward,) = link._connections.values()
      assert 0 < forward.buffered_bytes < bandwidth_x_delay + slack


def test_a_reset_arrives_as_a_reset():
  def reset(connection: socket.socket) -> None:
    connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()

  with served(reset) as (link, _), dial(link) as connection:
    connection.sendall(b"x")
    with pytest.raises(ConnectionResetError):
      connection.recv(1)


def test_a_target_that_refuses_resets_who_dialled_and_serves_when_it_is_back():
  server = Server(echo)
  server.close()
  with Link(server.address, delay_seconds=0.01) as link:
    with dial(link) as connection, pytest.raises(ConnectionResetError):
      connection.recv(1)
    with socket.create_server(server.address) as back, dial(link) as connection:
      back.settimeout(PATIENCE_SECONDS)
      accepted, _ = back.accept()
      with accepted:
        connection.sendall(b"x")
        assert accepted.recv(1) == b"x"


def test_a_waiting_link_takes_no_cpu():
  with served(hold, bits_per_second=1e6, delay_seconds=0.1) as (link, _), dial(link) as connection:
    link.cut()
    accepted_bytes(connection)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_stop_resets_connections_and_frees_the_port():
  with served(echo) as (link, server), dial(link) as connection:
    round_trip(connection)
    link.cut()
    with Link(server.address) as other:
      address = other.host, other.port
      ending = dial(other)
      round_trip(ending)
    with ending, pytest.raises(ConnectionResetError):
      ending.recv(1)
    with Link(server.address, listen=address) as again, dial(again) as connection:
      assert (again.host, again.port) == address
      round_trip(connection)


def test_to_stop_is_quiet_and_leaves_nothing_behind(caplog, recwarn):
  """In every state of a connection: used, hanging in a cut, dialled a moment ago."""
  gc.collect()
  recwarn.clear()  # what tests before this one have left
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(contextlib.closing(Server(echo)))
    for late in range(20):
      with Link(server.address) as link:
        used, *_ = (stack.enter_context(dial(link)) for _ in range(3))
        round_trip(used)
        if late % 2:
          link.cut()
        for _ in range(late):
          stack.enter_context(dial(link))
      assert not asyncio.all_tasks(link._loop)
  gc.collect()  # what is forgotten before its end says so then
  assert not caplog.records and not recwarn.list


def test_a_taken_port_is_an_error():
  with served(echo) as (link, server), pytest.raises(OSError, match="in use"):
    Link(server.address, listen=(link.host, link.port))


def test_command_line():
  server = Server(echo)
  host, port = server.address
  command = [sys.executable, str(SCRIPTS / "proxy.py"), "--listen=127.0.0.1:0"]
  command += [f"--to={host}:{port}", "--delay_ms=20", "--mbit=100"]
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  try:
    assert process.stdout is not None
    listening = process.stdout.readline().split()[0].rpartition(":")
    with socket.create_connection((listening[0], int(listening[2])), PATIENCE_SECONDS) as c:
      round_trip(c)
      assert round_trip(c) >= 0.04
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert output == "200 bytes there, 200 back\n"
  finally:
    process.kill()
    process.wait()
    server.close()
