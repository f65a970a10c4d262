"""A connection for fragments keeps to nine tenths of a slow link's rate, and of no other's."""

import socket
import struct
import sys
import threading
import time
import types

import pytest

from ddiloco.network import frames
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
      unacked=self.unacked(),
      last_ack_ms=int(1e3 * self.silent_seconds()),
      rtt_us=100 + self.queue_us,
      acked_bytes=int(self.rate * self.sending_seconds()),
      least_rtt_us=100,
      busy_us=int(1e6 * self.busy_seconds()),
      full_us=int(1e6 * self.full_share * self.busy_seconds()),
    )
    return frames._TCP_INFO.pack(*info)[:size]

  def state(self) -> int:
    return 0

  def sends(self) -> bool:
    return True

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


@pytest.mark.parametrize(
  "sender, limits",
  [
    (Sender(1.25e6, 0.05), [MOST, 1_125_000, MOST]),
    (Interrupted(0.1), [MOST, 1_125_000]),  # it kept to a seventh of its rate for 4.5 seconds
    (Interrupted(0.35), [MOST, 1_125_000]),
    (NowAndThen(1.25e6, 0.05), [MOST, 1_125_000]),  # it had no limit
    (Sender(1.25e6, 0.001), [MOST]),  # its queue is short
    (Sender(2e9, 0.05), [MOST]),  # it is fast
    (Sender(20e6, 0.05, full_share=0.8), [MOST]),  # it is its reader that is slow
  ],
  ids=["slow", "outage", "its beginning", "now and then", "short queue", "fast", "slow reader"],
)
def test_only_a_slow_link_has_a_limit_for_a_while(monkeypatch, sender, limits):
  clock = types.SimpleNamespace(monotonic=lambda: sender.seconds)
  monkeypatch.setattr(frames, "time", clock)
  pace = frames.pace(sender)
  for tick in range(53):  # until shortly after the limit ends
    sender.seconds = tick / 10
    if sender.sends():
      next(pace)
  assert sender.limits == pytest.approx(limits, rel=0.01)


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
  assert limits == [MOST]
