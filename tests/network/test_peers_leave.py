"""A connection that leaves ends when the far end has seen the end, and then leaves no memory."""

import contextlib
import gc
import socket
import time
import weakref

import numpy as np
import pytest
from proxy import Link

from ddiloco.network import frames, peers
from ddiloco.network.frames import MAX_FRAME_BYTES
from ddiloco.network.keys import host_and_port
from ddiloco.protocol.messages import Goodbye
from tests.network.net import SECONDS, Net, push


@contextlib.contextmanager
def io_thread():
  """One that does not run: the test takes its connection's turns itself."""
  thread = peers.IoThread("never started", print)
  yield thread
  thread.loop.close()


class Owner:
  reason = ""

  def next(self, wire, sent):
    return None

  def lost(self, wire, reason):
    self.reason = reason


def test_what_is_said_after_the_end_does_not_break_the_connection():
  """The far end may take a while to close, and a sign of life be due meanwhile."""
  with contextlib.ExitStack() as stack:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    far = stack.enter_context(socket.create_connection(listener.getsockname()))
    owner = Owner()
    wire = peers.FrameSocket(listener.accept()[0], owner, stack.enter_context(io_thread()))
    stack.callback(wire.close)
    wire.say(frames.Beat())
    wire.leave()
    wire.turn()
    assert far.recv(100) == frames.encode(frames.Beat()) and far.recv(100) == b""
    wire.say(frames.Beat())
    wire.turn()
    assert not owner.reason
    far.close()
    while not owner.reason:
      wire.turn()


@pytest.mark.parametrize(
  ("size", "ends"), [(0, True), (1, False), (MAX_FRAME_BYTES, False), (MAX_FRAME_BYTES + 1, True)]
)
def test_a_frame_of_an_impossible_size_ends_its_connection_and_takes_no_memory(
  monkeypatch, size, ends
):
  monkeypatch.setattr(peers, "FRAME_OPTIONS", ())
  mine, far = socket.socketpair(socket.AF_UNIX)
  with mine, far, io_thread() as thread:
    owner = Owner()
    wire = peers.FrameSocket(mine, owner, thread)
    far.sendall(frames.PREFIX.pack(size, 0))
    wire.turn()
    assert ("which no frame of ours does" in owner.reason) == (wire.fileno() < 0) == ends
    wire.close()


def test_a_flood_of_small_frames_has_its_turn_and_no_more(monkeypatch):
  monkeypatch.setattr(peers, "FRAME_OPTIONS", ())
  mine, far = socket.socketpair(socket.AF_UNIX)
  with mine, far, io_thread() as thread:
    heard, owner = [], Owner()
    owner.room, owner.arrived = lambda *_: frames.SCRATCH[:0], lambda *_: heard.append(1)
    wire = peers.FrameSocket(mine, owner, thread)
    far.sendall(2000 * frames.encode(frames.Beat()))
    wire.turn()
    assert 0 < len(heard) < 1000
    for _ in range(20):
      wire.turn()
    assert len(heard) == 2000
    wire.close()


class Fast(socket.socket):
  """A link that takes everything at once."""

  def send(self, data: memoryview, flags: int = 0) -> int:
    return len(data)


def test_who_always_has_more_to_send_has_its_turn_and_no_more(monkeypatch):
  monkeypatch.setattr(peers, "FRAME_OPTIONS", ())
  mine, far = socket.socketpair(socket.AF_UNIX)
  with far, Fast(fileno=mine.detach()) as fast, io_thread() as thread:
    parcels, owner = [(memoryview(bytes(1 << 18)),)] * 100, Owner()
    owner.next = lambda wire, sent: parcels.pop() if parcels else None
    wire = peers.FrameSocket(fast, owner, thread)
    wire.turn(False)
    assert 100 - len(parcels) == peers.BYTES_A_TURN >> 18
    wire.close()


class Receiver(Owner):
  def __init__(self, memory: np.ndarray):
    self.memory = memory

  def room(self, wire, frame, size):
    memory, self.memory = self.memory, None
    return memoryview(memory)


@pytest.mark.parametrize("breaks", [False, True])
def test_memory_of_what_broke_off_is_free_without_a_garbage_collection(breaks):
  """Python collects a role's garbage seldom, and a payload may have gigabytes."""
  memory = np.empty(1000, np.uint8)
  kept = weakref.ref(memory)
  mine, far = socket.socketpair(socket.AF_UNIX)
  with mine, far, io_thread() as thread, pytest.MonkeyPatch.context() as patched:
    patched.setattr(peers, "FRAME_OPTIONS", ())
    wire = peers.FrameSocket(mine, Receiver(memory), thread)
    del memory
    far.sendall(frames.encode(frames.Bulk(0, 1000, b""), 1000) + bytes(500))
    wire.turn()
    assert kept() is not None
    far.close()
    gc.disable()
    try:
      wire.turn() if breaks else wire.close()
      del wire
      assert kept() is None
    finally:
      gc.enable()


def test_memory_of_what_an_older_incarnation_was_sending_is_free_without_a_collection():
  with contextlib.closing(Net("run", "plan")) as net:
    shard, older, newer = (
      net.connect("syncer-0"),
      net.open("learner-0", 0),
      net.open("learner-0", 1),
    )
    with Link(host_and_port(net.url("syncer-0")), bits_per_second=100e6) as link:
      older.dial("syncer-0", f"tcp://127.0.0.1:{link.port}")
      older.send("syncer-0", push(1, 30_000_000))
      net.wait_until(lambda: link.bytes.forward > 1_000_000)
      assert not shard.buffers.free
      gc.disable()
      try:
        newer.dial("syncer-0", net.url("syncer-0"))
        net.wait_up(newer, "syncer-0")
        net.wait_until(lambda: shard.buffers.free)
      finally:
        gc.enable()


def test_a_goodbye_goes_over_the_next_connection_if_the_last_one_has_just_broken():
  with contextlib.closing(Net("run", "plan")) as net:
    shard, learner = net.connect("syncer-0"), net.connect("learner-0")
    control = learner._dialed["syncer-0"].control
    broken = control.wire
    broken._socket.shutdown(socket.SHUT_RDWR)
    net.wait_until(lambda: control.wire is not broken)
    learner.send("syncer-0", Goodbye(0, 0))
    learner.close(SECONDS)
    assert shard.receive(SECONDS).message == Goodbye(0, 0)


def test_a_far_end_that_has_gone_is_not_waited_for():
  with contextlib.closing(Net("run", "plan")) as net:
    shard, learner = net.connect("syncer-0"), net.connect("learner-0")
    shard.close(0.0)
    net.wait_until(lambda: learner.links()["syncer-0"]["state"] == "connecting")
    learner.send("syncer-0", Goodbye(0, 0))
    began = time.monotonic()
    learner.close(SECONDS)
    assert time.monotonic() - began < SECONDS / 2


def test_a_far_end_that_has_seen_the_end_is_not_waited_for():
  with contextlib.closing(Net("run", "plan")) as net:
    net.connect("syncer-0")
    learner, began = net.connect("learner-0"), time.monotonic()
    learner.close(SECONDS)
    assert time.monotonic() - began < SECONDS / 2
