"""Parts of payloads may be lost with a connection; messages arrive whole, once, in order."""

import contextlib
import gc
import itertools
import socket
import weakref

import numpy as np
import pytest

from ddiloco.network import frames, peers
from ddiloco.network.endpoint import KEPT_SECONDS, LEAST_KEPT_BYTES, BufferPool
from ddiloco.network.peers import Forget, Incoming, Peer
from ddiloco.network.transport import RunIdentity
from ddiloco.protocol.messages import MalformedMessage

RUN = RunIdentity("run", "plan", max_payload_bytes=1000, queue_bytes=1500)


@pytest.fixture(autouse=True)
def headers(monkeypatch):
  """One header is bad, all others are good."""

  def open_frame(sender: str, incarnation: int, header: bytes, payload: bytes) -> None:
    if header == b"bad":
      raise MalformedMessage("not from here")

  monkeypatch.setattr(peers, "open_frame", open_frame)


class Inbox:
  """A stand-in for the endpoint: messages that the role has not taken yet."""

  def __init__(self, run: RunIdentity, thread: peers.IoThread | None = None):
    self.control_thread, self.bulk_threads = thread, itertools.repeat(thread)
    self.run, self.buffers, self.messages = run, BufferPool(), []

  def put(self, sender: str, header: bytes, payload: np.ndarray, incarnation: int) -> None:
    self.messages.append((header, payload))

  def waiting_bulk(self, sender: str) -> tuple[int, int]:
    return len(self.messages), sum(len(h) + len(p) for h, p in self.messages)


class Box(Incoming):
  """One that counts how often connections are woken since there is room."""

  def __init__(self, streams: int, run: RunIdentity):
    self.inbox, self.woken = Inbox(run), 0
    peer = Peer("learner-0", streams, self.inbox)
    peer.wake_bulk = self.wake
    super().__init__(peer)

  def wake(self) -> None:
    self.woken += 1

  @property
  def bytes(self) -> int:
    """Of the messages that are arriving, or are not taken yet."""
    return sum(each.size for each in self._assemblies.values()) + self.inbox.waiting_bulk("")[1]


def incoming(streams: int = 2, run: RunIdentity = RUN) -> Box:
  return Box(streams, run)


def part(box: Box, stream: int, number: int, total: int = 100, header=b"h"):
  """A stream's part comes; what is whole now; () if there is no room."""
  place = frames.part(stream, box._streams, total)
  bulk = frames.Bulk(number, total, header)
  memory = box.room(stream, bulk, place.stop - place.start)
  if memory is None:
    return ()
  memory[:] = bytes((number + k) % 256 for k in range(total))[place]
  return arrived(box, stream, number)


def arrived(box: Box, stream: int, number: int):
  """The message that is whole now."""
  count = len(box.inbox.messages)
  box.arrived(stream, number)
  return box.inbox.messages[-1] if len(box.inbox.messages) > count else None


def test_a_message_is_whole_with_its_last_part():
  box = incoming(streams=3)
  assert part(box, 2, 0) is part(box, 0, 0) is None
  header, payload = part(box, 1, 0)
  assert header == b"h" and bytes(payload) == bytes(range(100))


def test_one_that_lacks_the_part_of_a_stream_that_is_past_it_is_lost_and_holds_up_nobody():
  box = incoming()
  assert part(box, 0, 0) is None
  assert part(box, 0, 1) is None
  assert box.bytes == 202
  assert part(box, 1, 1)[1][0] == 1, "its stream lost the part of 0"
  assert box.bytes == 101, "what is not taken yet"


def test_a_part_that_broke_off_comes_again_from_its_beginning():
  box = incoming()
  part(box, 0, 0)
  box.room(1, frames.Bulk(0, 100, b"h"), 50)[:10] = bytes(10)
  assert bytes(part(box, 1, 0)[1]) == bytes(range(100))


def test_what_a_peer_began_to_send_and_never_ends_is_forgotten_and_takes_no_memory():
  inbox = Inbox(RUN)
  peer, frame = Peer("learner-0", 2, inbox), frames.Bulk(0, 100, b"h")
  memory = peer.incoming.room(0, frame, 50)
  kept = weakref.ref(memory.obj)
  del memory
  assert kept() is not None
  peer.forget()
  assert kept() is None
  peer.incoming.arrived(0, 0)
  assert not inbox.messages, "these bytes went elsewhere"
  assert peer.incoming.room(0, frame, 50) is not None, "it may come again"


@pytest.mark.parametrize("streams", [1, 2])
def test_what_is_whole_does_not_arrive_twice(streams):
  """A sender whose connection broke with the last bytes does not know that they came."""
  box = incoming(streams)
  assert [part(box, k, 0) for k in range(streams)][-1]
  with pytest.raises(Forget):
    part(box, 0, 0)
  assert [part(box, k, 1) for k in range(streams)][-1]


def test_what_has_no_room_waits_until_something_is_taken():
  box = incoming(1)
  assert part(box, 0, 0, 900) and part(box, 0, 1, 900) == () and not box.woken
  box.inbox.messages.pop()
  assert part(box, 0, 1, 900)
  box = incoming(1, RunIdentity("run", "plan", 1000, queue_bytes=10))
  assert part(box, 0, 0, 900), "one is let in whatever its size"


def test_a_lost_message_makes_room_for_those_that_wait():
  box = incoming(2)
  part(box, 0, 0, 900)
  assert part(box, 0, 1, 900) == ()
  assert part(box, 1, 1, 900) is None, "stream 1 has lost its part of 0"
  assert box.woken == 1 and part(box, 0, 1, 900)


def test_what_another_stream_is_past_takes_no_room_from_what_can_be_whole():
  """Stream 0 lost its part of 0 with a connection, and is ahead by all the room there is."""
  box = incoming(run=RunIdentity("run", "plan", 1000, queue_bytes=250))
  assert part(box, 0, 1) is part(box, 0, 2) is None
  with pytest.raises(Forget):
    part(box, 1, 0)
  assert part(box, 1, 1)[1][0] == 1 and part(box, 1, 2)[1][0] == 2


def test_headers_that_are_not_let_in_take_no_memory():
  box = incoming()
  with pytest.raises(MalformedMessage):
    part(box, 0, 0, header=b"bad")
  assert not box._assemblies and not box.bytes


def test_a_connection_of_the_session_before_says_nothing_to_this_one():
  peer = Peer("syncer-0", 1, Inbox(RUN), url="tcp://there")
  peer.meet(frames.Greeting("run", "plan", "syncer-0", 1, b"session1", 1))
  before, now = object(), object()
  peer.bulk[0].wire = now
  with pytest.raises(Forget):
    peer.bulk[0].room(before, frames.Bulk(0, 100, b"h"), 100)


@pytest.mark.parametrize(
  "total, header, why", [(1001, b"h", "exceeds 1000"), (100, b"bad", "not from here")]
)
def test_what_may_not_come_is_said_once_and_takes_no_memory(total, header, why):
  box = incoming()
  with pytest.raises(MalformedMessage, match=why):
    part(box, 1, 0, total, header=header)
  with pytest.raises(Forget):
    part(box, 0, 0, total, header=header)
  assert box.bytes == 0 and not box._assemblies
  assert part(box, 0, 1) is None and part(box, 1, 1), "what follows comes"


def test_a_connection_that_was_replaced_writes_into_no_message_that_is_whole(monkeypatch):
  """Its thread may be busy, so that it ends late: a push could change after it was measured."""
  monkeypatch.setattr(peers, "FRAME_OPTIONS", ())  # sockets of a pair have none, and no pace
  monkeypatch.setattr(frames, "pace", lambda connection: itertools.repeat(0.0))
  thread, frame = peers.IoThread("never started", print), frames.Bulk(0, 100, b"h")
  inbox = Inbox(RUN, thread)
  peer = Peer("learner-0", 1, inbox)
  with contextlib.ExitStack() as stack:
    stack.callback(thread.loop.close)
    wires, far = [], []
    for data in (bytes(50), bytes(range(100))):
      mine, theirs = map(stack.enter_context, socket.socketpair())
      wires.append(peer.bulk[0].attach(mine))
      far.append(theirs)
      theirs.sendall(frames.encode(frame, 100) + data)
      far[0].sendall(b"\xff" * 10)
      thread.loop.call_soon(thread.loop.stop)  # it has time again
      thread.loop.run_forever()
    older, newer = wires
    assert older.fileno() < 0
    ((_, payload),) = inbox.messages
    assert bytes(payload) == bytes(range(100))
    newer.close()


@pytest.mark.parametrize("size", [0, 49, 51, 100])
def test_a_part_of_another_size_is_malformed(size):
  with pytest.raises(MalformedMessage, match="are no part 1 of 100"):
    incoming().room(1, frames.Bulk(0, 100, b"h"), size)


def test_streams_that_disagree_on_the_total_are_malformed():
  box = incoming()
  part(box, 0, 0, 100)
  with pytest.raises(MalformedMessage, match="102 bytes in all, or 100"):
    part(box, 1, 0, 102)


# --- memory that is used again --------------------------------------------------------------------


def address(memory: np.ndarray) -> int:
  return memory.__array_interface__["data"][0]


def test_memory_is_used_again_once_nobody_holds_any_view_of_it():
  pool = BufferPool()
  first = pool.take(2 * LEAST_KEPT_BYTES)
  view = memoryview(first[10:].view(np.uint8)[::2])
  where = address(first)
  del first
  gc.collect()
  other = pool.take(2 * LEAST_KEPT_BYTES)
  assert address(other) != where, "somebody still reads it"
  del view
  gc.collect()
  again = pool.take(LEAST_KEPT_BYTES + 5)
  assert address(again) == where and again.shape == (LEAST_KEPT_BYTES + 5,)
  assert address(pool.take(LEAST_KEPT_BYTES)) != where


def test_memory_that_is_much_too_large_is_not_taken_and_idle_memory_is_freed():
  pool = BufferPool()
  pool.take(10 * LEAST_KEPT_BYTES)
  pool.take(2 * LEAST_KEPT_BYTES)
  assert len(pool.free) == 2, "neither fits the other"
  used_at = max(since for since, _ in pool.free)
  pool.release(used_at + KEPT_SECONDS / 2)
  assert len(pool.free) == 2
  pool.release(used_at + KEPT_SECONDS)
  assert not pool.free


def test_of_memory_that_is_free_the_newest_is_used_first():
  """With the oldest first, every payload came into memory that no cache had any more."""
  pool = BufferPool()
  held = [pool.take(LEAST_KEPT_BYTES) for _ in range(3)]
  where = [address(each) for each in held]
  while held:
    held.pop(0)
  assert [address(pool.take(LEAST_KEPT_BYTES)) for _ in range(2)] == [where[-1]] * 2
