"""Keeps the queue of a slow link short, so that control need not wait there behind fragments.

The kernel fills the buffer of the narrowest link, in this host or far away, and control over
another connection stands in the same queue. So a connection for fragments is let go for a moment,
which shows how much the link carries, and keeps to nine tenths of that for a while: then the queue
drains. A link that carries a lot is left alone: its queue is short in time.
"""

from __future__ import annotations

import socket
import struct
import sys

FREE_SECONDS = 0.5  # of sending without a limit, to see what the link carries
LIMITED_SECONDS = 4.5
SHARE = 0.9  # of what it carried
QUEUE_SECONDS = 0.005  # a queue that is worth it
FAST_BYTES = 125e6  # a second: a link that is left alone
_SO_MAX_PACING_RATE = 47  # Linux; Python has no name for it
_NO_LIMIT = (1 << 32) - 1
# Places in Linux's struct tcp_info: round trip (us), bytes acknowledged, the least round trip (us),
# and for how long there was something to send (us).
_RTT, _ACKED, _MIN_RTT, _BUSY, _BYTES = 68, 120, 148, 168, 176


class Pacer:
  """How fast one connection may send.

  Args:
    connection: the socket.
  """

  def __init__(self, connection: socket.socket):
    self._socket = connection
    self._until = 0.0 if sys.platform == "linux" else float("inf")  # the present phase lasts
    self._free = False
    self._began = (0, 0)  # bytes acknowledged and microseconds of sending until the free phase

  def look(self, now: float) -> None:
    """Every now and then while it sends."""
    if now < self._until:
      return
    info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
    if len(info) < _BYTES:
      self._until = float("inf")  # a kernel that does not say so much
      return
    acked, busy = (struct.unpack_from("=Q", info, place)[0] for place in (_ACKED, _BUSY))
    rtt, least = (struct.unpack_from("=I", info, place)[0] / 1e6 for place in (_RTT, _MIN_RTT))
    busy_seconds = (busy - self._began[1]) / 1e6
    self._until = now + FREE_SECONDS
    if not self._free:
      self._free, self._began = True, (acked, busy)
      self._limit(_NO_LIMIT)
    elif busy_seconds >= FREE_SECONDS / 2:
      rate = (acked - self._began[0]) / busy_seconds
      self._began = acked, busy
      if rtt - least > QUEUE_SECONDS and 0 < rate < FAST_BYTES:
        self._free, self._until = False, now + LIMITED_SECONDS
        self._limit(int(SHARE * rate))

  def _limit(self, rate: int) -> None:
    self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", rate))
