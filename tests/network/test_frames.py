"""Frames and parts of payloads: what is sent is what is read, and anything else is malformed."""

import contextlib
import itertools
import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.network import frames
from ddiloco.network.keys import host_and_port
from ddiloco.protocol.messages import MalformedMessage
from ddiloco.protocol.values import replace

FRAMES = [
  frames.Greeting("run", "plan", "learner-1", 5, b"12345678", 2),
  frames.GreetingRefused(True, "why"),
  frames.Beat(),
  frames.Control(b"header"),
  frames.Bulk(1, 3, b"header"),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda f: type(f).__name__)
def test_frames_survive_the_way_there_and_nothing_less_does(frame):
  data = frames.encode(frame, 7)
  assert frames.PREFIX.unpack(data[: frames.PREFIX.size]) == (len(data) - frames.PREFIX.size, 7)
  data = data[frames.PREFIX.size :]
  assert frames.decode(data) == frame
  for cut in range(len(data)):
    with pytest.raises(MalformedMessage):
      frames.decode(data[:cut])
  with pytest.raises(MalformedMessage):
    frames.decode(data + b"\x00")


@pytest.mark.parametrize("changes", [{"streams": 0}, {"streams": 65}, {"session": b"short"}])
def test_a_greeting_out_of_range_is_malformed(changes):
  data = frames.encode(replace(FRAMES[0], **changes))[frames.PREFIX.size :]
  (field,) = changes
  with pytest.raises(MalformedMessage, match=f"^frame is not valid: .*`{field}`"):
    frames.decode(data)


def test_any_bytes_are_a_frame_or_malformed():
  chance = random.Random(1)
  for _ in range(20_000):
    with contextlib.suppress(MalformedMessage):
      frame = frames.decode(chance.randbytes(chance.randrange(60)))
      assert type(frame) in map(type, FRAMES)


@pytest.mark.parametrize("frame", FRAMES, ids=lambda f: type(f).__name__)
def test_a_changed_byte_gives_a_frame_or_malformed(frame):
  """Every byte of it, changed to every other."""
  whole = frames.encode(frame)[frames.PREFIX.size :]
  for place, byte in itertools.product(range(len(whole)), range(256)):
    with contextlib.suppress(MalformedMessage):
      changed = frames.decode(whole[:place] + bytes([byte]) + whole[place + 1 :])
      assert frames.decode(frames.encode(changed)[frames.PREFIX.size :]) == changed


@given(total=st.integers(0, 1 << 40), streams=st.integers(1, 64))
def test_the_parts_of_a_payload_are_all_of_it(total, streams):
  parts = [frames.part(k, streams, total) for k in range(streams)]
  assert parts[0].start == 0 and parts[-1].stop == total
  assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
  assert max(p.stop - p.start for p in parts) == -(-total // streams)


def test_a_star_is_every_address_of_this_machine():
  listener, url = frames.bind("tcp://*:0")
  with listener:
    _, port = host_and_port(url)
    with socket.create_connection(("127.0.0.1", port), 20.0) as near:
      assert near.getpeername()[1] == port


@pytest.mark.parametrize(
  ("host", "at", "near"),
  [("me", "127.0.0.1", True), ("me", "0.0.0.0", False), ("localhost", "127.0.0.1", False)],
)
def test_a_name_that_is_this_machine_alone_is_said(monkeypatch, host, at, near):
  """A shard at its machine's own name, which was 127.0.1.1 there, waited in vain, and silently."""
  found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, 0))]
  monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
  listener, url = frames.bind(f"tcp://{host}:0")
  with listener:
    said = frames.near_only(listener, url)
  assert bool(said) == near and (not near or f"since me is {at} here. Fix: " in said)
