"""The network transport where the contract ends: restarts, partitions, slow links, strangers."""

import contextlib
import dataclasses
import errno
import itertools
import random
import socket
import sys
import threading
from unittest import mock

import numpy as np
import pytest
from proxy import Link

from ddiloco.config import NetworkConfig
from ddiloco.network import endpoint, frames
from ddiloco.network.frames import objection, seconds_since_2020
from ddiloco.network.keys import host_and_port
from ddiloco.network.peers import MAX_QUEUED, Peer
from ddiloco.network.transport import MAX_CONTROL, RunIdentity
from ddiloco.protocol import messages
from ddiloco.protocol.messages import Goodbye, Push, RequestMoments
from ddiloco.protocol.values import replace
from tests import says
from tests.network.net import QUICK, Net, blackhole, hello, push

SECONDS = 20.0


@pytest.fixture
def link_to():
  """Makes links whose far end is a url; returns (link, url of the near end)."""
  links = []

  def make(url: str, **options) -> tuple[Link, str]:
    links.append(Link(host_and_port(url), **options).start())
    return links[-1], f"tcp://127.0.0.1:{links[-1].port}"

  yield make
  for link in links:
    link.stop()


@pytest.mark.parametrize("field, value", [("run_id", "another"), ("plan_id", "another")])
def test_another_run_is_refused_with_a_reason(net, field, value):
  shard = net.connect("syncer-0")
  stranger = net.dial("learner-0", 0, **{field: value})
  net.wait_until(lambda: stranger.links()["syncer-0"]["state"] == "refused")
  assert "another" in stranger.links()["syncer-0"]["reason"]
  stranger.send("syncer-0", hello())
  assert shard.receive(0.2) is None
  net.wait_until(lambda: shard.counters.refused)


def test_another_shard_at_the_url_is_named(net):
  net.connect("syncer-0")
  learner = net.dial("learner-0", 0, to="syncer-1", url=net.url("syncer-0"))
  net.wait_until(lambda: learner.links()["syncer-1"]["state"] == "refused")
  assert "syncer-0 answers at" in learner.links()["syncer-1"]["reason"]


def test_why_greetings_are_refused():
  run = RunIdentity("run", "plan", 100, 100)
  good = frames.Greeting("run", "plan", "learner-3", 7, b"12345678", 2)
  assert objection(run, good, None) == objection(run, good, "learner-3") == ""
  ahead = seconds_since_2020() + 100_000
  for changes, owner, words in [
    ({}, "learner-2", "belongs to learner-2"),
    ({}, "", "not listed here any more"),
    ({"run_id": "b"}, None, "this is run 'run', not 'b'. Fix: "),
    ({"plan_id": "b"}, None, "other settings of model, data"),
    ({"plan_id": "b"}, None, "or run.init_from (plan, not b). Fix: give all roles the same"),
    ({"format": 1}, None, "wire format 1, this side"),
    ({"incarnation": ahead}, None, "clock"),
  ]:
    assert words in objection(run, replace(good, **changes), owner)


@pytest.mark.parametrize(
  "session, incarnation, outnumbers",
  [
    (b"12345678", 7, False),  # the same endpoint again
    (b"87654321", 8, False),  # a newer incarnation
    (b"87654321", 7, True),
    (b"87654321", 6, True),
  ],
)
def test_a_place_is_taken_by_the_newer_of_two(net, session, incarnation, outnumbers):
  peer = Peer("learner-3", 2, net.connect("syncer-0"))
  peer.meet(frames.Greeting("run", "plan", "learner-3", 7, b"12345678", 2))
  other = frames.Greeting("run", "plan", "learner-3", incarnation, session, 2)
  assert peer.outnumbers(other) == outnumbers


def test_a_partition_heals_and_nothing_is_lost(net, link_to):
  shard = net.connect("syncer-0")
  link, url = link_to(net.url("syncer-0"), bits_per_second=100e6)
  learner = net.dial("learner-0", 0, url=url)
  net.wait_up(learner, "syncer-0")
  message = push(1, 20_000_000)
  learner.send("syncer-0", message)
  net.wait_until(lambda: link.bytes.forward > 1_000_000)
  link.cut()
  learner.send("syncer-0", hello(0))
  assert shard.receive(0.5) is None
  link.heal()
  got = [shard.receive(SECONDS)[1] for _ in range(2)]
  assert got[0] == hello(0)
  assert got[1].payload.tobytes() == message.payload.tobytes()
  assert shard.receive(0.1) is None, "and nothing arrives twice"


def test_broken_connections_are_made_again_and_a_fragment_that_was_leaving_leaves_again(net):
  shard = net.connect("syncer-0")
  place = host_and_port(net.url("syncer-0"))
  learner, message = net.open("learner-0", 0), push(1, 30_000_000)
  with Link(place, bits_per_second=100e6) as link:
    learner.dial("syncer-0", f"tcp://127.0.0.1:{link.port}")
    net.wait_up(learner, "syncer-0")
    learner.send("syncer-0", message)
    net.wait_until(lambda: link.bytes.forward > 3_000_000)
  with Link(place, listen=("127.0.0.1", link.port)):
    received = shard.receive(SECONDS).message
    assert received.payload.tobytes() == message.payload.tobytes()
    assert shard.receive(0.1) is None, "and nothing arrives twice"
    assert not learner.counters.undelivered


def test_bulk_data_does_not_starve_heartbeats_at_10_mbit_s(net, link_to):
  """Control goes there and back beside a fragment, again and again before that has arrived."""
  shard = net.connect("syncer-0")
  link, url = link_to(net.url("syncer-0"), bits_per_second=10e6)
  learner = net.dial("learner-0", 0, url=url)
  net.wait_up(learner, "syncer-0")
  learner.send("syncer-0", push(1, 40_000_000))  # 32 s of this link
  numbers = itertools.count()
  while (number := next(numbers)) < 25 or link.bytes.forward < 1_000_000:
    learner.send("syncer-0", RequestMoments(0, 0, (number,)))
    assert shard.receive(SECONDS).message == RequestMoments(0, 0, (number,))
    shard.send("learner-0", says.pull(0, 0, 0, 0, number, 0))
    assert learner.receive(SECONDS)[1].round == number


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "keys"])
def test_a_member_that_is_slow_by_seconds_is_still_in(link_to, secure):
  """Everything between it and the shard takes a second and a half, and so does every answer."""
  net = Net("run", "plan", secure=secure, settings=NetworkConfig())
  shard = net.connect("syncer-0")
  _, url = link_to(net.url("syncer-0"), delay_seconds=1.5)
  learner, message = net.open("learner-0", 0), push(1, 300_000)
  learner.dial("syncer-0", url)
  net.wait_until(lambda: learner.links()["syncer-0"]["state"] == "up")
  learner.send("syncer-0", hello())
  learner.send("syncer-0", message)
  # Control and fragments have connections of their own, and either may be up first.
  arrived = {type(each): each for each in (shard.receive(SECONDS)[1], shard.receive(SECONDS)[1])}
  assert arrived[RequestMoments] == hello()
  assert arrived[Push].payload.tobytes() == message.payload.tobytes()
  shard.send("learner-0", says.pull(0, 0, 0, 0, 7, 0))
  assert learner.receive(SECONDS)[1].round == 7
  assert learner.links()["syncer-0"]["state"] == shard.links()["learner-0"]["state"] == "up"
  assert not learner.counters.undelivered and not shard.counters.undelivered
  net.close()


def test_a_silent_peer_costs_no_memory_for_ever(link_to):
  quick = dataclasses.replace(QUICK, silence_seconds=3.0)  # a busy machine is silent for a second
  net = Net("run", "plan", settings=quick)
  shard = net.connect("syncer-0")
  link, url = link_to(net.url("syncer-0"), bits_per_second=200e6)
  learner = net.dial("learner-0", 0, url=url)
  net.wait_up(learner, "syncer-0")
  learner.send("syncer-0", push(1, 60_000_000))  # more than the kernel takes
  incoming = shard._accepted["learner-0"].incoming
  net.wait_until(lambda: incoming._assemblies)
  link.cut()
  net.wait_until(lambda: learner.counters.undelivered)
  assert learner.links()["syncer-0"]["queued_bytes"] == 0
  assert "silent" in learner.links()["syncer-0"]["reason"]
  net.wait_until(lambda: shard._accepted["learner-0"].incoming is not incoming)
  link.heal()
  net.wait_up(learner, "syncer-0")
  learner.send("syncer-0", push(2, 1_000_000))
  assert shard.receive(SECONDS)[1].round == 2
  net.close()


def test_who_sends_no_message_is_heard_all_the_same(net, monkeypatch):
  monkeypatch.setattr(endpoint, "BEAT_SECONDS", 0.1)
  shard, learner = net.connect("syncer-0"), net.connect("learner-0")
  net.wait_until(lambda: shard._accepted)
  for peer in (shard._accepted["learner-0"], learner._dialed["syncer-0"]):
    before = peer.heard_at
    net.wait_until(lambda peer=peer, before=before: peer.heard_at > before)
    assert peer.state == "up"


def test_who_is_held_back_since_its_messages_wait_here_is_not_silent(net):
  shard, learner = net.connect("syncer-0"), net.connect("learner-0")
  for number in range(MAX_CONTROL):
    learner.send("syncer-0", RequestMoments(0, 0, (number,)))
  net.wait_until(lambda: shard._accepted and shard._accepted["learner-0"].control.wire.waits)
  peer = shard._accepted["learner-0"]
  before = peer.heard_at
  net.wait_until(lambda: peer.heard_at > before)
  assert peer.state == "up" and peer.control.wire.waits


def test_a_connection_that_breaks_after_it_was_replaced_takes_nothing_with_it(net):
  net.connect("syncer-0")
  learner = net.connect("learner-0")
  control = learner._dialed["syncer-0"].control
  wire = control.wire
  learner.on_lost(control, object(), "late")
  assert control.wire is wire and learner.links()["syncer-0"]["state"] == "up"


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of the kernel's")
def test_a_shard_whose_control_falls_silent_is_dialed_again_while_fragments_come(monkeypatch):
  """They may have another path, and were taken for signs of life."""
  monkeypatch.setattr(endpoint, "BEAT_SECONDS", 0.1)
  patient = dataclasses.replace(QUICK, silence_seconds=10 * SECONDS)
  with contextlib.closing(Net("run", "plan", settings=patient)) as net:
    shard, net.settings = net.connect("syncer-0"), dataclasses.replace(QUICK, silence_seconds=1.5)
    learner = net.connect("learner-0")
    control = learner._dialed["syncer-0"].control
    silent, payload = control.wire, np.zeros(100, np.uint8)
    blackhole(silent)

    def dialed_again() -> bool:
      shard.send("learner-0", says.publish(0, 0, 0, 0, 1, 1, -1, 0, 0, (), "f32", payload))
      learner.receive(0.0)
      return control.wire not in (silent, None)

    net.wait_until(dialed_again)
    net.wait_up(learner, "syncer-0")
    assert control.wire is not silent and silent.fileno() < 0


def test_who_dials_in_vain_stops_when_its_endpoint_ends():
  patient = dataclasses.replace(QUICK, hello_seconds=10 * SECONDS)
  with contextlib.closing(Net("run", "plan", settings=patient)) as net:
    before = threading.enumerate()
    learner = net.dial("learner-0", 0)
    net.wait_until(lambda: "nothing answers" in learner.links()["syncer-0"]["reason"])
    new = [each for each in threading.enumerate() if each not in before]
    (dials,) = [each for each in new if each.name == "dial-syncer-0"]
    learner.close()
    dials.join(SECONDS)
    assert not dials.is_alive()


def test_what_has_no_room_waits_at_its_sender_and_comes_as_soon_as_there_is_some(net):
  """A role that takes late gets everything, and holds no more than agreed until then."""
  size, count = 3_000_000, 20
  shard = net.endpoints["syncer-0"] = net.open("syncer-0", 0, queue_bytes=2 * size)
  learner = net.connect("learner-0")
  for i in range(count):
    learner.send("syncer-0", push(i, size))
  net.wait_until(lambda: shard.waiting)
  peer = shard._accepted["learner-0"]
  net.wait_until(lambda: any(channel.wire.waits for channel in peer.bulk))
  most = 0
  for i in range(count):
    assert shard.receive(SECONDS).message.round == i
    with peer.incoming._lock:  # else one that is just complete counts twice
      arriving = sum(each.size for each in peer.incoming._assemblies.values())
      most = max(most, shard.waiting_bulk("learner-0")[1] + arriving)
  assert most <= 2 * size
  assert not learner.counters.undelivered


def test_memory_of_a_payload_is_free_when_its_role_has_done_with_it(net, monkeypatch):
  monkeypatch.setattr(endpoint, "KEPT_SECONDS", 1e9)
  sender, shard = net.connect("learner-0"), net.connect("syncer-0")
  sender.send("syncer-0", says.push(0, 0, 0, 7, 0, 1, 1, "f32", np.zeros(4 << 20, np.uint8)))
  arrived = shard.receive(SECONDS)
  assert not shard.buffers.free
  assert arrived.message.payload.size == 4 << 20
  del arrived  # and nothing else arrives
  net.wait_until(lambda: shard.buffers.free)
  monkeypatch.setattr(endpoint, "KEPT_SECONDS", 0.0)
  net.wait_until(lambda: not shard.buffers.free)


def test_a_peer_that_is_never_reached_has_a_bounded_queue_however_small_its_messages(net):
  learner = net.dial("learner-0", 0)
  for i in range(3 * MAX_QUEUED):
    learner.send("syncer-0", push(i, 4))
    learner.send("syncer-0", RequestMoments(0, 0, (i,)))
  assert learner.counters.undelivered == 2 * 2 * MAX_QUEUED


def test_two_shards_that_dial_each_other(net):
  a, b = net.open("syncer-0", 0), net.open("syncer-1", 0)
  a.dial("syncer-1", net.url("syncer-1"))
  b.dial("syncer-0", net.url("syncer-0"))
  net.wait_up(a, "syncer-1")
  net.wait_up(b, "syncer-0")
  publish = says.publish(0, 0, 0, 0, 1, 1, -1, 0, 0, (), "f32", np.arange(100, dtype=np.uint8))
  a.send("syncer-1", publish)
  sender, message, *_ = b.receive(SECONDS)
  assert sender == "syncer-0"
  assert bytes(message.payload) == bytes(range(100))
  b.send("syncer-0", replace(publish, shard=1))
  assert a.receive(SECONDS)[0] == "syncer-1"


def test_an_endpoint_whose_thread_has_failed_says_why_and_is_not_fenced(net):
  learner = net.open("learner-0", 0)

  def fail():
    raise ValueError("no cable")

  learner._bulk[0].call(fail)
  net.wait_until(lambda: learner._closed)  # its role must not go on without a network
  assert learner.broken == "its network thread failed: ValueError('no cable')"
  assert not learner.fenced and learner.outnumbered == (0, 0)
  shard = net.open("syncer-0", 0)
  shard.control_thread.call(fail)
  net.wait_until(lambda: not any(each.is_alive() for each in shard._threads))
  shard.close()
  net.open("syncer-0", 1)  # the port is free


def test_a_goodbye_is_still_delivered_by_close(net):
  shard, learner = net.connect("syncer-0"), net.connect("learner-0")
  learner.send("syncer-0", Goodbye(0, 0))
  learner.close()
  assert shard.receive(SECONDS)[:2] == ("learner-0", Goodbye(0, 0))


def test_who_ends_does_not_come_back_while_another_far_end_lets_it_wait(net):
  shard, learner = net.open("syncer-0", 0), net.open("learner-0", 0)
  greetings, let_in = [], shard.let_in

  def noted(wire, frame):
    greetings.append(frame)
    return let_in(wire, frame)

  shard.let_in = noted
  with socket.create_server(("127.0.0.1", 0)) as listener:
    learner.dial("syncer-0", net.url("syncer-0"))
    learner.dial("syncer-1", f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    slow = listener.accept()[0]
    slow.sendall(frames.encode(frames.Greeting("run", "plan", "syncer-1", 0, b"a" * 8, 2)))
    for peer in ("syncer-0", "syncer-1"):
      net.wait_up(learner, peer)
    net.wait_until(lambda: len(greetings) == 1 + QUICK.streams)
    learner.close(linger_seconds=1.0)
    slow.close()
  assert len(greetings) == 1 + QUICK.streams


def test_garbage_changes_nothing(net):
  shard, learner = net.connect("syncer-0"), net.connect("learner-0")
  place = host_and_port(net.url("syncer-0"))
  rng = random.Random(0)
  for _ in range(20):
    with socket.create_connection(place) as stranger:
      stranger.sendall(rng.randbytes(rng.choice([1, 12, 64, 5000])))
  learner.send("syncer-0", hello())
  assert shard.receive(SECONDS)[:2] == ("learner-0", hello())
  net.wait_until(lambda: shard.counters.refused == 20)
  assert list(shard.links()) == ["learner-0"]


ODD = {
  "an empty frame": frames.PREFIX.pack(0, 0),
  "no msgpack": frames.PREFIX.pack(1, 0) + b"\xc1",
  "no greeting": frames.encode(frames.Control(b"x" * 100)),
  "half a greeting": frames.encode(frames.Greeting("run", "plan", "learner-9", 0, b"a" * 8, 1))[
    :-1
  ],
  "a greeting with payload": frames.encode(
    frames.Greeting("run", "plan", "learner-9", 0, b"a" * 8, 1), 4
  )
  + b"data",
  "a huge frame": frames.PREFIX.pack(frames.MAX_FRAME_BYTES, 0),
  "a huge payload": frames.encode(frames.Bulk(0, 1 << 40, b"header"), 1 << 40) + b"data",
  "a fragment that no shard has": frames.encode(frames.Bulk(0, 4, b"header"), 4) + b"data",
  "nobody's session": frames.encode(
    frames.Greeting("run", "plan", "learner-0", 0, b"a" * 8, 1, stream=0)
  ),
}


NO_TLS = {
  "http": b"GET / HTTP/1.0\r\n\r\n",
  "zeros": bytes(200),
  "ones": b"\xff" * 200,
  "a plain greeting": frames.encode(frames.Greeting("run", "plan", "learner-1", 0, b"a" * 8, 1)),
  "half a handshake": b"\x16\x03\x01\x02\x00\x01\x00",
  "nothing": b"",
}


@pytest.mark.parametrize(
  ("odd", "secure"),
  [*((name, False) for name in ODD), *((name, True) for name in NO_TLS)],
  ids=str,
)
def test_strangers_change_nothing_and_are_counted_once(net, odd, secure):
  """Where there are no keys they speak our frames."""
  shard, learner = net.connect("syncer-0"), net.connect("learner-0")
  before = shard.counters.received_bytes
  place = host_and_port(net.url("syncer-0"))
  with (
    socket.create_connection(place, timeout=SECONDS) as stranger,
    contextlib.suppress(OSError if secure else ()),
  ):
    stranger.sendall(NO_TLS[odd] if secure else ODD[odd])  # it may be cut off before its end
    stranger.shutdown(socket.SHUT_WR)
    while stranger.recv(4096):
      pass
  learner.send("syncer-0", hello())
  assert shard.receive(SECONDS)[:2] == ("learner-0", hello())
  net.wait_until(lambda: shard.counters.refused == 1)
  assert shard.receive(0.1) is None
  assert shard.counters.received_bytes - before < 200
  assert shard.counters.refused == 1 and list(shard.links()) == ["learner-0"]


def test_odd_frames_of_a_member_are_dropped_and_it_goes_on(net):
  """On the connection for control, after a good greeting."""
  shard = net.connect("syncer-0")
  place = host_and_port(net.url("syncer-0"))
  greeting = frames.Greeting("run", "plan", "learner-0", 0, b"a" * 8, 1)
  odd = [
    ODD[name] for name in ("no msgpack", "a greeting with payload", "a fragment that no shard has")
  ]
  good = frames.encode(frames.Control(messages.encode(hello())[0]))
  with socket.create_connection(place, timeout=SECONDS) as member:
    member.sendall(b"".join([frames.encode(greeting), *odd, frames.encode(greeting), good]))
    assert shard.receive(SECONDS)[:2] == ("learner-0", hello())
  net.wait_until(lambda: shard.counters.malformed == 4)
  assert shard.counters.refused == 0


def test_nobody_listening_is_said(net):
  learner = net.dial("learner-0", 0)
  net.wait_until(lambda: "nothing answers" in learner.links()["syncer-0"]["reason"])
  assert learner.links()["syncer-0"]["state"] == "connecting"
  with socket.create_server(host_and_port(net.url("syncer-0"))) as listener:
    listener.accept()[0].close()
    net.wait_until(lambda: "one side has no keys" in learner.links()["syncer-0"]["reason"])
    learner._quiet_seconds = 0.1
    net.wait_until(lambda: "it stands still" in learner.links()["syncer-0"]["reason"])


def test_a_refusal_is_not_hidden_by_a_connection_for_fragments_that_fails_meanwhile(
  net, monkeypatch
):
  net.connect("syncer-0")
  learner, states = net.connect("learner-0"), []
  peer = learner._dialed["syncer-0"]
  net.wait_until(lambda: all(channel.wire for channel in peer.channels))

  def dial(channel):
    if channel is peer.control:
      states.append(peer.state)
    else:
      peer.control.hang_up()
      peer.state = "refused"
    raise ConnectionError("late")

  monkeypatch.setattr(learner, "_dial", dial)
  peer.bulk[0].hang_up()
  net.wait_until(lambda: states)
  assert states[0] == "refused"


def test_an_attempt_to_connect_is_not_the_last_however_it_fails(net, monkeypatch):
  net.connect("syncer-0")
  learner = net.open("learner-0", 0)
  with monkeypatch.context() as patch:
    patch.setattr(frames, "connect", mock.Mock(side_effect=ValueError("no such cable")))
    learner.dial("syncer-0", net.url("syncer-0"))
    net.wait_until(lambda: "no such cable" in learner.links()["syncer-0"]["reason"])
  net.wait_up(learner, "syncer-0")
  assert learner.links()["syncer-0"]["state"] == "up"


def test_a_taken_port_is_an_os_error_that_names_it(net):
  port = int(net.url("syncer-0").rpartition(":")[2])
  error = pytest.raises(OSError, match=f"already in use.*{port}")
  with socket.create_server(("127.0.0.1", port)), error as raised:
    net.open("syncer-0", 1)
  assert raised.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "keys"])
@pytest.mark.parametrize("streams", [1, 3])
def test_a_fragment_is_spread_over_as_many_connections_as_are_set(streams, secure):
  settings = dataclasses.replace(QUICK, streams=streams)
  net = Net("run", "plan", secure=secure, settings=settings)
  try:
    shard, learner = net.connect("syncer-0"), net.connect("learner-0")
    for number, size in enumerate((0, 1, 2, 4_000_001)):
      message = push(number, size)
      learner.send("syncer-0", message)
      assert shard.receive(SECONDS)[1].payload.tobytes() == message.payload.tobytes()
    assert all(c.wire for c in shard._accepted["learner-0"].channels)
    assert len(shard._accepted["learner-0"].bulk) == streams
  finally:
    net.close()


def test_many_threads_may_send_at_once(net):
  shard, learner = net.connect("syncer-0"), net.connect("learner-0")
  threads = [
    threading.Thread(target=lambda: [learner.send("syncer-0", push(1, 100_000)) for _ in range(20)])
    for _ in range(4)
  ]
  for thread in threads:
    thread.start()
  for _ in range(80):
    assert shard.receive(SECONDS) is not None
  for thread in threads:
    thread.join()
  assert learner.counters.undelivered == 0


def test_settings_are_checked():
  with pytest.raises(ValueError, match=r"network.streams = 65: must be at most 64. Fix: "):
    NetworkConfig(streams=65)
