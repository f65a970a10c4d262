"""The stand-in for a network link keeps its rate and delay, is fair, bounded, and can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from proxy import Link

from tests.scripts.commands import SCRIPTS

PATIENCE_SECONDS = 60.0


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


def count(connection: socket.socket) -> None:
  """Reads to the end, then answers how many bytes came and in how many seconds after the first."""
  total, first = len(connection.recv(1 << 16)), time.monotonic()
  while data := connection.recv(1 << 16):
    total += len(data)
  connection.sendall(struct.pack("!qd", total, time.monotonic() - first))
  connection.shutdown(socket.SHUT_WR)


def hold(connection: socket.socket) -> None:
  """Never reads."""


def echo_control(connection: socket.socket) -> None:
  """Echoes the x-es of `round_trip`; other connections are read to their end and not answered."""
  if connection.recv(1, socket.MSG_PEEK) == b"x":
    echo(connection)
  while connection.recv(1 << 16):
    pass


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


def within(low: float, high: float, measure: Callable[[], float]) -> bool:
  """One of ten measurements lies in between: the machine may be busy with something else."""
  seen = []
  for _ in range(10):
    seen.append(measure())
    if low <= seen[-1] <= high:
      return True
  raise AssertionError(f"none of {seen} lies in [{low}, {high}]")


def test_it_leads_to_the_target_and_bytes_are_counted():
  with served(echo) as (link, server):
    for _ in range(2):
      with dial(link) as connection:
        round_trip(connection, b"hello")
    assert len(server.accepted) == 2
    assert link.bytes == (10, 10)


@pytest.mark.parametrize("mbit, size", [(10, 500_000), (200, 6_000_000)])
def test_the_rate_is_kept(mbit, size):
  with served(count, bits_per_second=mbit * 1e6, delay_seconds=0.02) as (link, _):

    def rate() -> float:
      with dial(link) as connection:
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        total, seconds = struct.unpack("!qd", exactly(connection, 16))
      assert total == size
      return 8e-6 * total / seconds / mbit

    assert within(0.9, 1.1, rate)


def test_each_direction_has_the_rate_for_itself():
  with served(echo, bits_per_second=40e6) as (link, _), dial(link) as connection:

    def seconds() -> float:
      sender = threading.Thread(target=connection.sendall, args=(bytes(2_000_000),))
      before = time.monotonic()
      sender.start()
      exactly(connection, 2_000_000)
      sender.join()
      return time.monotonic() - before

    assert within(0.38, 0.5, seconds)  # 0.8 s if they shared


def test_the_delay_is_kept_also_by_ends():
  with served(echo, delay_seconds=0.05) as (link, _), dial(link) as connection:
    round_trip(connection)
    assert within(0.1, 0.12, lambda: round_trip(connection))
    before = time.monotonic()
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b""
    assert time.monotonic() - before >= 0.1


def test_a_small_message_does_not_wait_behind_bulk():
  with contextlib.ExitStack() as stack:
    link, _ = stack.enter_context(served(echo_control, bits_per_second=10e6))
    control, bulk = stack.enter_context(dial(link)), stack.enter_context(dial(link))
    bulk.settimeout(0.1)
    stop = threading.Event()

    def saturate() -> None:
      while not stop.is_set():
        with contextlib.suppress(TimeoutError):
          bulk.send(bytes(64 << 10))

    sender = threading.Thread(target=saturate)
    sender.start()
    try:
      while link.bytes.forward < 200_000:
        time.sleep(0.005)
      assert within(0, 0.01, lambda: statistics.median(round_trip(control) for _ in range(21)))
    finally:
      stop.set()
      sender.join()


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


def test_what_was_in_the_air_when_the_link_was_cut_arrives_later_by_the_cut():
  with served(echo, delay_seconds=0.1) as (link, _), dial(link) as connection:
    round_trip(connection)
    before = time.monotonic()
    connection.sendall(b"x")
    time.sleep(0.03)
    link.cut()
    assert silent(connection, 0.3)
    link.heal()
    exactly(connection, 1)
    assert time.monotonic() - before >= 0.5


def test_connections_given_up_during_a_cut_never_happened():
  with served(echo) as (link, server):
    link.cut()
    for _ in range(5):
      dial(link).close()
    with dial(link) as kept:
      time.sleep(0.1)  # so that the ends have been read
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


def test_many_connections_share_evenly():
  number, size = 40, 50_000
  with served(count, bits_per_second=20e6, delay_seconds=0.01) as (link, _):
    connections = [dial(link) for i in range(number)]
    seconds, together = [], threading.Barrier(number)

    def run(connection: socket.socket) -> None:
      with connection:
        together.wait()
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        total, took = struct.unpack("!qd", exactly(connection, 16))
        assert total == size
        seconds.append(took)

    threads = [threading.Thread(target=run, args=(c,)) for c in connections]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert len(seconds) == number
    assert link.bytes.forward == number * size
    assert statistics.median(seconds) > 0.4  # all together take 0.8 s, so none went first


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
