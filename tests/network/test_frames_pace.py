"""A connection for fragments keeps to nine tenths of a slow link's rate, and of no other's."""

import itertools
import socket
import struct
import sys
import threading
import time
import types

import pytest

from ddiloco.network import frames, peers
from ddiloco.network.frames import TcpInfo

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own pacing")
MOST = frames._NO_LIMIT


class Sender:
  """A stand-in for a socket, most with always something to send: what the kernel tells of it."""

  def __init__(self, rate: float, queue_seconds: float, full_share: float = 0.0):
    self.rate, self.queue_us, self.full_share = rate, int(1e6 * queue_seconds), full_share
    self.seconds, self.limits = 0.0, []

  def getsockopt(self, level: int, option: int, size: int) -> bytes:
    info = TcpInfo(
      state=self.state(),
      packet_bytes=1000,
      unacked=self.unacked(),
      last_ack_ms=int(1e3 * self.silent_seconds()),
      rtt_us=100 + self.queue_us,
      least_rtt_us=100,
      busy_us=int(1e6 * self.busy_seconds()),
      full_us=int(1e6 * self.full_share * self.busy_seconds()),
      beyond=self.beyond(),
      acked_bytes=int(self.rate * self.sending_seconds()) - 1000 * self.beyond(),
    )
    return frames._TCP_INFO.pack(*info)[:size]

  def state(self) -> int:
    return 0

  def sends(self) -> bool:
    return True

  def beyond(self) -> int:
    return 0

  def unacked(self) -> int:
    return 1

  def busy_seconds(self) -> float:
    return self.seconds

  def sending_seconds(self) -> float:
    return self.busy_seconds()

  def silent_seconds(self) -> float:
    return 0.0

  def setsockopt(self, level: int, option: int, value: bytes) -> None:
    self.limits.append(struct.unpack("=I", value)[0])


class Interrupted(Sender):
  """Its link is gone for two seconds. A third of a second later the kernel's timer strikes, and in
  the end it takes a fifth to send what was lost."""

  def __init__(self, at_seconds: float):
    super().__init__(1.25e6, 0.05)
    self.at_seconds, self.back_seconds = at_seconds, at_seconds + 2.0

  def state(self) -> int:
    return frames._LOSS if self.at_seconds + 0.3 < self.seconds < self.back_seconds + 0.2 else 0

  def sending_seconds(self) -> float:
    return min(self.seconds, self.at_seconds) + max(0.0, self.seconds - self.back_seconds)

  def silent_seconds(self) -> float:
    gone = self.at_seconds < self.seconds < self.back_seconds
    return self.seconds - self.at_seconds if gone else 0.0


class Losing(Sender):
  """One packet is lost in each second and comes again at its end; those behind it arrive."""

  def state(self) -> int:
    return 3 if self.beyond() else 0  # the kernel recovers

  def beyond(self) -> int:
    return int(self.rate * (self.seconds % 1) / 1000)


class NowAndThen(Sender):
  """It has something to send for 0.4 seconds of every two."""

  def sends(self) -> bool:
    return self.seconds % 2 < 0.4

  def unacked(self) -> int:
    return self.seconds % 2 > 0.01

  def busy_seconds(self) -> float:
    return self.seconds // 2 * 0.4 + min(self.seconds % 2, 0.4)

  def silent_seconds(self) -> float:
    return 0.0 if self.unacked() else 1.6


def limits_of(sender: Sender, ticks: int, monkeypatch) -> list[int]:
  """The limits that `pace` sets in so many tenths of a second."""
  clock = types.SimpleNamespace(monotonic=lambda: sender.seconds)
  monkeypatch.setattr(frames, "time", clock)
  pace = frames.pace(sender)
  for tick in range(ticks):
    sender.seconds = tick / 10
    if sender.sends():
      next(pace)
  return sender.limits


@pytest.mark.parametrize(
  "sender, limits",
  [
    (Sender(1.25e6, 0.05), [1_111_000, 1_625_000]),  # without a limit the queue fills in no time
    (Interrupted(0.1), [1_111_000]),  # it kept to a seventh of its rate for 4.5 seconds
    (Interrupted(0.35), [1_111_000]),
    (Losing(1.25e6, 0.05), [1_111_000, 1_625_000]),
    (NowAndThen(1.25e6, 0.05), [1_111_000]),  # it had no limit
    (Sender(1.25e6, 0.001), []),  # its queue is short
    (Sender(2e9, 0.05), []),  # it is fast
    (Sender(20e6, 0.05, full_share=0.8), []),  # it is its reader that is slow
  ],
  ids=["slow", "outage", "beginning", "losses", "seldom", "short-queue", "fast", "slow-reader"],
)
def test_only_a_slow_link_has_a_limit_for_a_while(monkeypatch, sender, limits):
  found = limits_of(sender, 53, monkeypatch)  # until shortly after the limit ends
  assert found == pytest.approx(limits, rel=0.01)


class Faster(Sender):
  """Its link carries all that its limit lets through, after the first few seconds. It still looks
  as if there was a queue: the far end is slow to acknowledge what comes one by one."""

  arrived = before = 0.0

  def sending_seconds(self) -> float:
    limit = min(self.rate if self.seconds < 3.0 else MOST, *self.limits[-1:], MOST)
    self.arrived += (self.seconds - self.before) * limit
    self.before = self.seconds
    return self.arrived / self.rate


def test_a_link_that_has_become_faster_has_no_limit_soon(monkeypatch):
  first, *others, last = limits_of(Faster(1.25e6, 0.05), 200, monkeypatch)
  assert first == pytest.approx(1_111_000, rel=0.01) and last == MOST
  for slower, faster in itertools.pairwise([first, *others]):
    assert slower < faster < 1.5 * slower, "its queue may be full in a moment"


class Hindered(Sender):
  """Others have the link for itself now and then, for longer than a measurement takes."""

  def __init__(self, rate: float, least: float):
    super().__init__(rate, 0.05)
    self.least = least

  def sending_seconds(self) -> float:
    rounds, rest = divmod(self.seconds, 10.0)  # free for five seconds, hindered for five
    share = self.least / self.rate
    return (rounds * (1 + share) + min(rest / 5, 1.0) + share * max(rest / 5 - 1, 0.0)) * 5


def test_a_rate_that_was_found_too_low_does_not_last(monkeypatch):
  limits = limits_of(Hindered(1.25e6, 5e4), 400, monkeypatch)
  found = [limit for limit in limits if limit != MOST]
  assert len(found) > 4 and min(found) > 1e6
  least, *_ = limits_of(Sender(5e3, 0.05), 20, monkeypatch)
  assert least == frames.LEAST_BYTES, "a pause after a packet lasts minutes else"


def test_a_limit_ends_though_there_is_nothing_more_to_send(monkeypatch):
  """The kernel has the last data of a message and keeps to the limit: the message took minutes.
  The limit grows as long as the link carries it."""
  waiting = [memoryview(bytes(60_000))]
  owner = types.SimpleNamespace(next=lambda wire, sent: (waiting.pop(),) if waiting else None)
  slow = TcpInfo(rtt_us=50_000, busy_us=10**6, acked_bytes=1000)
  limits, limit = [], frames._limit
  monkeypatch.setattr(frames, "_limit", lambda c, rate: limits.append(rate) or limit(c, rate))
  found, of = iter([TcpInfo(), slow]), TcpInfo.of
  monkeypatch.setattr(TcpInfo, "of", lambda connection: next(found, None) or of(connection))
  monkeypatch.setattr(frames, "FREE_SECONDS", 0.0)
  monkeypatch.setattr(frames, "LIMITED_SECONDS", 0.5)
  monkeypatch.setattr(frames, "LEAST_BYTES", 4e3)
  thread = peers.IoThread("io", print)
  with socket.create_server(("127.0.0.1", 0)) as listener:
    near = socket.socket()
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # it keeps to no rate
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1448)  # as on a network
    near.connect(listener.getsockname())
    far = listener.accept()[0]
  wire = peers.FrameSocket(near, owner, thread, paced=True)
  next(wire._pace)  # its next turn sets the limit of 4 kB a second
  monkeypatch.setattr(frames, "FREE_SECONDS", 0.1)
  thread.start()
  try:
    wire.wake()
    left = 60_000
    while left:
      left -= len(far.recv(left))
    assert limits[-1] > 10_000, "15 s with the first limit"
  finally:
    thread.stop()
    thread.join()
    far.close()


def test_a_reader_that_stands_still_for_a_moment_does_not_make_a_fast_link_slow(monkeypatch):
  """Delayed acknowledgements of a full reader look like a queue on the way."""
  limits, limit = [], frames._limit
  monkeypatch.setattr(frames, "_limit", lambda c, rate: limits.append(rate) or limit(c, rate))
  with socket.create_server(("127.0.0.1", 0)) as listener:
    with socket.create_connection(listener.getsockname()) as near, listener.accept()[0] as far:
      near.setblocking(False)
      over = time.monotonic() + 1.5

      def read_slowly() -> None:
        while time.monotonic() < over and far.recv(1 << 20):
          time.sleep(0.05)

      reader = threading.Thread(target=read_slowly)
      reader.start()
      pace, data = frames.pace(near), bytes(1 << 20)
      while time.monotonic() < over:
        next(pace)
        try:
          near.send(data)
        except BlockingIOError:
          time.sleep(0.001)
    reader.join()
  assert limits == []
