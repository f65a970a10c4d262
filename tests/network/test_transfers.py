"""Chunks may be lost, doubled and reordered; messages arrive whole, once, in order."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.network.frames import Chunk
from ddiloco.network.transfers import MAX_AHEAD, MAX_BACKOFF, MAX_HEADER_BYTES, Incoming, Outgoing
from ddiloco.protocol.wire import MalformedMessage

CHUNK = 4096
SESSION = b"12345678"


def outgoing(window=1 << 20, patience=1.0) -> Outgoing:
  out = Outgoing(window, patience)
  out.restart(CHUNK)
  return out


def incoming(max_bytes=1 << 30, largest=1 << 20, check=lambda header: None) -> Incoming:
  return Incoming(CHUNK, 0, largest, max_bytes, check)


def payload(number: int, size: int) -> memoryview:
  return memoryview(np.random.default_rng(number).integers(0, 256, size, np.uint8)).cast("B")


def drain(out: Outgoing, now: float = 0.0) -> list:
  items = []
  while (item := out.next(SESSION, now)) is not None:
    items.append(item)
  return items


def test_the_window_bounds_what_is_under_way():
  out = outgoing(window=3 * CHUNK)
  out.add(0, b"h", payload(0, 10 * CHUNK))
  assert [c.offset // CHUNK for c, _ in drain(out)] == [0, 1, 2]
  out.acknowledge(0, 0, 0.1)
  assert [c.offset // CHUNK for c, _ in drain(out)] == [3]


def test_a_chunk_larger_than_the_window_still_goes_alone():
  out = outgoing(window=100)
  out.add(0, b"h", payload(0, 2 * CHUNK))
  assert len(drain(out)) == 1


def test_the_last_answer_frees_the_payload():
  out = outgoing()
  out.add(0, b"h", payload(0, CHUNK + 1))
  drain(out)
  assert out.acknowledge(0, CHUNK, 0.1) == 0
  assert out.acknowledge(0, CHUNK, 0.1) == 0, "answered twice"
  assert out.acknowledge(0, 0, 0.1) == CHUNK + 1
  assert len(out) == 0
  assert out.oldest(1) == 1


def test_what_nobody_answers_goes_again_with_growing_patience():
  out = outgoing(patience=1.0)
  out.add(0, b"h", payload(0, 2 * CHUNK))
  drain(out, now=0.0)
  now = 0.0
  pauses = []
  for _ in range(8):
    before = now
    while not out.resend_overdue(now):
      now += 0.25
      assert drain(out, now) == []
    pauses.append(now - before)
    assert len(drain(out, now)) == 2
  assert pauses == sorted(pauses)
  assert pauses[-1] <= pauses[0] * 2**MAX_BACKOFF + 1
  assert out.acknowledge(0, 0, now) == 0
  assert out.acknowledge(0, CHUNK, now) == 2 * CHUNK


def test_what_the_peer_wants_now_goes_again_at_once():
  out = outgoing()
  out.add(0, b"h", payload(0, 2 * CHUNK))
  drain(out)
  out.want(0, CHUNK, now=0.1)
  assert [c.offset for c, _ in drain(out, now=0.1)] == [CHUNK]
  out.acknowledge(0, CHUNK, now=0.2)
  for number, offset in [(0, CHUNK), (0, 7), (5, 0)]:  # answered, and never sent
    out.want(number, offset, now=0.3)
    assert not drain(out, now=0.3)
  assert out.acknowledge(0, 0, now=0.4) == 2 * CHUNK


def test_answers_that_keep_coming_never_cause_a_resend():
  """A slow link: each chunk waits long, but something is answered all the time."""
  out = outgoing(patience=1.0)
  out.add(0, b"h", payload(0, 100 * CHUNK))
  drain(out, now=0.0)
  for i in range(100):
    assert out.resend_overdue(0.8 * (i + 1)) == 0
    out.acknowledge(0, i * CHUNK, 0.8 * (i + 1))


def test_patience_adapts_to_the_usual_time_between_answers():
  out = outgoing(patience=0.1)
  out.add(0, b"h", payload(0, 50 * CHUNK))
  drain(out, now=0.0)
  for i in range(50):
    out.acknowledge(0, i * CHUNK, 5.0 * (i + 1))
  assert out.patience() > 10


def test_another_chunk_size_starts_every_message_again():
  out = outgoing()
  out.add(0, b"h", payload(0, 4 * CHUNK))
  drain(out)
  out.acknowledge(0, 0, 0.1)
  out.restart(2 * CHUNK)
  assert [(c.offset, len(d)) for c, d in drain(out)] == [(0, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK)]
  out.acknowledge(0, 0, 0.2)
  assert out.acknowledge(0, 2 * CHUNK, 0.2) == 4 * CHUNK


@settings(deadline=None)  # a busy machine is no error
@given(seed=st.integers(0, 2**32 - 1))
def test_messages_arrive_whole_once_and_in_order_over_a_lossy_link(seed):
  rng = random.Random(seed)
  out, inc = outgoing(window=rng.choice([CHUNK, 4 * CHUNK, 1 << 20])), incoming()
  sizes = [rng.choice([0, 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7]) for _ in range(rng.randint(1, 6))]
  for number, size in enumerate(sizes):
    out.add(number, b"%d" % number, payload(number, size))
  link, got, now = [], [], 0.0
  for _ in range(10_000):
    if not len(out):
      break
    now += 0.5
    out.resend_overdue(now)
    for item in drain(out, now):
      link += [item] * rng.choice([0, 1, 1, 1, 2])
    rng.shuffle(link)
    for chunk, data in [link.pop() for _ in range(rng.randint(0, len(link)))]:
      if inc.accept(chunk, data) and rng.random() < 0.8:
        out.acknowledge(chunk.transfer, chunk.offset, now)
      got += inc.deliver()
    if rng.random() < 0.05:
      out.restart(CHUNK)
      inc.skip_to(out.oldest(len(sizes)))
  assert len(out) == 0, f"seed {seed}"
  assert [int(header) for header, _ in got] == list(range(len(sizes)))
  for (_, data), (number, size) in zip(got, enumerate(sizes)):
    assert data.tobytes() == bytes(payload(number, size))
  assert inc.bytes == sum(sizes)


def chunk(number=0, offset=0, total=CHUNK, header=b"h") -> Chunk:
  return Chunk(SESSION, number, offset, total, header)


@pytest.mark.parametrize(
  "bad, data",
  [
    (chunk(total=(1 << 20) + 1), b""),
    (chunk(offset=1), bytes(CHUNK)),
    (chunk(offset=2 * CHUNK), b""),
    (chunk(), bytes(CHUNK - 1)),
    (chunk(total=10), bytes(11)),
  ],
)
def test_what_does_not_fit_is_refused_and_holds_up_nothing(bad, data):
  inc = incoming()
  with pytest.raises(MalformedMessage):
    inc.accept(bad, memoryview(data))
  assert inc.bytes == 0
  assert inc.accept(chunk(number=1, total=2), memoryview(b"ok"))
  assert [bytes(data) for _, data in inc.deliver()] == [b"ok"]


def test_a_header_that_may_not_come_from_here_costs_no_memory():
  def check(header):
    raise MalformedMessage("no")

  inc = incoming(check=check)
  with pytest.raises(MalformedMessage):
    inc.accept(chunk(total=1 << 20), memoryview(bytes(CHUNK)))
  assert inc.bytes == 0
  assert inc.accept(chunk(total=1 << 20), memoryview(bytes(CHUNK))), "and does not come again"
  assert inc.deliver() == []


def test_chunks_of_one_message_that_disagree_drop_it():
  inc = incoming()
  assert inc.accept(chunk(total=2 * CHUNK), memoryview(bytes(CHUNK)))
  with pytest.raises(MalformedMessage):
    inc.accept(chunk(offset=CHUNK, total=3 * CHUNK), memoryview(bytes(CHUNK)))
  assert inc.bytes == 0


def test_memory_is_bounded_but_the_next_in_order_is_always_let_in():
  inc = incoming(max_bytes=2 * CHUNK)
  data = memoryview(bytes(CHUNK))
  assert inc.accept(chunk(number=1), data)
  assert inc.accept(chunk(number=2), data)
  assert not inc.accept(chunk(number=3), data)
  assert inc.accept(chunk(number=0), data)
  assert len(inc.deliver()) == 3
  for _ in range(3):
    inc.taken(CHUNK)
  assert inc.accept(chunk(number=3), data)


@pytest.mark.parametrize(
  "size, header, most",
  [(CHUNK, b"h", 3), (0, b"h", MAX_AHEAD), (0, bytes(1 << 20), MAX_HEADER_BYTES >> 20)],
  ids=["payloads", "empty", "headers"],
)
def test_what_the_role_does_not_take_is_bounded_however_much_comes(size, header, most):
  """Each message is next in order, since those before it were handed on and wait in the inbox."""
  inc, data, taken = incoming(max_bytes=3 * CHUNK), memoryview(bytes(size)), 0
  for number in range(2 * MAX_AHEAD):
    if not inc.accept(chunk(number, total=size, header=header), data):
      break
    taken += len(inc.deliver())
  assert taken == most
  inc.taken(size, len(header))
  assert inc.accept(chunk(taken, total=size, header=header), data), "it comes again"


def test_given_up_transfers_are_skipped():
  inc = incoming()
  data = memoryview(bytes(CHUNK))
  inc.accept(chunk(number=0, total=2 * CHUNK), data)
  inc.accept(chunk(number=1), data)
  inc.accept(chunk(number=2), data)
  inc.skip_to(2)
  assert len(inc.deliver()) == 1
  assert inc.bytes == CHUNK


def test_what_is_kept_for_later_is_bounded_also_if_it_is_empty_or_refused():
  def check(header):
    if header == b"bad":
      raise MalformedMessage("no")

  inc = incoming(check=check)
  for number in (MAX_AHEAD, 1 << 61):
    for header in (b"h", b"bad"):
      assert not inc.accept(chunk(number=number, total=0, header=header), memoryview(b""))
  assert inc.accept(chunk(number=0, total=0), memoryview(b""))
  assert len(inc.deliver()) == 1
  assert inc.accept(chunk(number=MAX_AHEAD, total=0), memoryview(b"")), "it comes again"
