"""A connection for fragments keeps to nine tenths of a slow link's rate, and of no other's."""

import socket
import struct
import sys
import threading
import time
import types

import pytest

from ddiloco.network import frames

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own pacing")
MOST = frames._NO_LIMIT


class Sender:
  """A stand-in for a socket that has always something to send: what the kernel tells of it."""

  def __init__(self, rate: float, queue_seconds: float, full_share: float = 0.0):
    self.rate, self.queue_us, self.full_share = rate, int(1e6 * queue_seconds), full_share
    self.seconds, self.limits = 0.0, []

  def getsockopt(self, level: int, option: int, size: int) -> bytes:
    acked, busy = int(self.rate * self.seconds), int(1e6 * self.seconds)
    full = int(self.full_share * busy)
    return frames._TCP_INFO.pack(100 + self.queue_us, acked, 100, busy, full)[:size]

  def setsockopt(self, level: int, option: int, value: bytes) -> None:
    self.limits.append(struct.unpack("=I", value)[0])


@pytest.mark.parametrize(
  "sender, limits",
  [
    (Sender(1.25e6, 0.05), [MOST, 1_125_000, MOST]),
    (Sender(1.25e6, 0.001), [MOST]),  # its queue is short
    (Sender(2e9, 0.05), [MOST]),  # it is fast
    (Sender(20e6, 0.05, full_share=0.8), [MOST]),  # it is its reader that is slow
  ],
  ids=["slow", "short queue", "fast", "slow reader"],
)
def test_only_a_slow_link_has_a_limit_for_a_while(monkeypatch, sender, limits):
  clock = types.SimpleNamespace(monotonic=lambda: sender.seconds)
  monkeypatch.setattr(frames, "time", clock)
  pace = frames.pace(sender)
  for tick in range(53):  # until shortly after the limit ends
    sender.seconds = tick / 10
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
