"""Several incarnations of one role, one after the other or at once: only the newest is heard."""

import gc
import os
import socket
import threading

import numpy as np
import pytest
from proxy import Link

from ddiloco.network.keys import host_and_port
from ddiloco.network.peers import Peer
from tests import says
from tests.network.net import hello, push

SECONDS = 20.0


def test_a_shard_restarted_on_the_same_address_is_found_again(net):
  first, learner = net.connect("syncer-0"), net.connect("learner-0")
  learner.send("syncer-0", hello())
  assert first.receive(SECONDS)
  first.close()
  second = net.open("syncer-0", incarnation=1)
  net.wait_until(lambda: second.links().get("learner-0", {}).get("state") == "up")
  learner.send("syncer-0", hello())
  assert second.receive(SECONDS)[:2] == ("learner-0", hello())
  second.send("learner-0", says.pull(0, 1, 0, 0, 7, 0))
  assert learner.receive(SECONDS)[1].round == 7


def test_a_restarted_shard_does_not_wait_for_what_was_meant_for_the_one_before(net):
  first, learner = net.connect("syncer-0"), net.connect("learner-0")
  first.close()
  for number in (1, 2):
    learner.send("syncer-0", push(number, 1000))
  second = net.open("syncer-0", incarnation=1)
  net.wait_until(lambda: learner.counters.undelivered == 2)
  learner.send("syncer-0", push(3, 1000))
  arrived = second.receive(SECONDS)
  assert arrived and arrived[1].round == 3


def test_the_older_of_two_learners_is_told_that_it_is_fenced(net):
  net.connect("syncer-0")
  old, new = net.open("learner-0", 4), net.open("learner-0", 5)
  for endpoint in (old, new):
    endpoint.dial("syncer-0", net.url("syncer-0"))
  net.wait_until(lambda: old.fenced)
  assert "incarnation" in old.fenced
  assert "5" in old.fenced
  net.wait_until(lambda: old._dialed["syncer-0"].control.wire is None)
  assert old.links()["syncer-0"]["state"] == "refused"
  net.wait_up(new, "syncer-0")
  assert not new.fenced
  late = net.dial("learner-0", 5)
  net.wait_until(lambda: late.fenced)
  assert old.receive(0) is None


def test_a_restarted_shard_is_answered_before_it_has_been_dialed_again(net):
  a, b = net.open("syncer-0", 0), net.open("syncer-1", 0)
  a.dial("syncer-1", net.url("syncer-1"))
  net.wait_up(a, "syncer-1")
  b.close()
  again = net.dial("syncer-1", 1)
  net.wait_until(lambda: ("up", 1) in [(p.state, p.incarnation) for p in a._named("syncer-1")])
  publish = says.publish(0, 0, 0, 0, 1, 1, -1, 0, 0, (), "f32", np.arange(100, dtype=np.uint8))
  a.send("syncer-1", publish)
  arrived = again.receive(SECONDS)
  assert arrived and bytes(arrived[1].payload) == bytes(range(100))


class Front:
  """One address for whichever shard listens at the url that it is told."""

  def __init__(self, url: str):
    self._link = self._open(url, ("127.0.0.1", 0))
    self.url = f"tcp://127.0.0.1:{self._link.port}"

  def _open(self, url: str, listen: tuple[str, int]) -> Link:
    return Link(host_and_port(url), listen=listen).start()

  def leads_to(self, url: str) -> None:
    self._link.stop()
    self._link = self._open(url, ("127.0.0.1", self._link.port))

  def close(self) -> None:
    self._link.stop()


def test_two_incarnations_of_a_shard_at_once_no_split(net):
  """Whichever of the two a learner's connection leads to, it hears the newer one alone."""
  old = net.open("syncer-0", 5)
  old_url = net.urls.pop("syncer-0")
  new = net.open("syncer-0", 6)
  front = Front(old_url)
  try:
    learner = net.dial("learner-0", 1, url=front.url)
    net.wait_up(learner, "syncer-0")
    front.leads_to(net.url("syncer-0"))
    net.wait_until(lambda: new.links().get("learner-0", {}).get("state") == "up")
    new.send("learner-0", says.pull(0, 6, 1, 0, 7, 0))
    assert learner.receive(SECONDS), "the learner has heard the newer one"
    front.leads_to(old_url)  # which has come back, and knows nothing of the newer one
    net.wait_until(lambda: learner.links()["syncer-0"]["state"] == "refused")
    assert "incarnation 5 is an old one, 6 was here" in learner.links()["syncer-0"]["reason"]
    old.send("learner-0", says.pull(0, 5, 1, 0, 7, 0))
    learner.send("syncer-0", hello(1))
    assert learner.receive(0.5) is None and old.receive(0.0) is None
    front.leads_to(net.url("syncer-0"))
    net.wait_up(learner, "syncer-0")
    learner.send("syncer-0", hello(1))
    assert new.receive(SECONDS)[:2] == ("learner-0", hello(1))
  finally:
    front.close()


def test_fragments_follow_control_to_a_newer_shard(net):
  old, old_url = net.open("syncer-0", 5), net.urls.pop("syncer-0")
  new, learner = net.open("syncer-0", 6), net.dial("learner-0", 1, url=old_url)
  peer = learner._dialed["syncer-0"]
  net.wait_until(lambda: all(channel.wire for channel in peer.channels))
  peer.url = net.url("syncer-0")  # its name leads elsewhere now
  peer.control.wire._socket.shutdown(socket.SHUT_RDWR)
  net.wait_until(lambda: peer.incarnation == 6)
  learner.send("syncer-0", says.push(0, 1, 0, 7, 0, 1, 1, "f32", np.ones(1000, np.uint8)))
  arrived = new.receive(SECONDS)
  assert arrived and arrived.message.round == 7 and old.receive(0.0) is None


def test_the_older_of_two_shards_is_fenced_by_its_buddy_and_its_copies_reach_nobody(net):
  net.connect("syncer-1")
  old, new = net.open("syncer-0", 5), None
  del net.urls["syncer-0"]
  old.dial("syncer-1", net.url("syncer-1"))
  net.wait_up(old, "syncer-1")
  publish = says.publish(0, 5, 0, 0, 1, 1, -1, 0, 0, (), "f32", np.arange(100, dtype=np.uint8))
  buddy = net.endpoints["syncer-1"]
  old.send("syncer-1", publish)
  assert buddy.receive(SECONDS), "as long as there is no newer one"
  new = net.dial("syncer-0", 6, to="syncer-1")
  net.wait_until(lambda: old.fenced)
  assert "a newer incarnation of syncer-0 is here (6)" in old.fenced
  assert old.outnumbered == (0, 0), "for good: the newer one lives"
  old.send("syncer-1", publish)
  assert buddy.receive(0.3) is None and not new.fenced


@pytest.mark.parametrize("secure", [False, True])
def test_a_learner_that_comes_and_goes_for_months_leaves_nothing_at_its_shard(net):
  shard = net.connect("syncer-0")

  def left() -> tuple[int, int, int]:
    """Descriptors and threads of this process, and its peers."""
    gc.collect()
    # By type(): isinstance asks a weak proxy, which another test may have left, what it stands for.
    peers = sum(type(each) is Peer for each in gc.get_objects())
    return len(os.listdir("/proc/self/fd")), threading.active_count(), peers

  def live(incarnation: int) -> None:
    learner = net.dial("learner-0", incarnation)
    net.wait_up(learner, "syncer-0")
    learner.send("syncer-0", says.push(0, incarnation, 0, 1, 0, 1, 1, "f32", np.ones(5000)))
    assert shard.receive(SECONDS)
    learner.close(0.0)
    net.all.remove(learner)

  for incarnation in range(3):
    live(incarnation)
  before = left()
  for incarnation in range(3, 10):
    live(incarnation)
  net.wait_until(lambda: all(now <= then for now, then in zip(left(), before)))
