"""An island of two processes computes what the same island computes in one."""

from __future__ import annotations

import os
import queue
import re
import socket
import subprocess
import sys
import threading
import typing
import weakref
from types import SimpleNamespace
from unittest import mock

import jax
import msgspec
import numpy as np
import pytest

from ddiloco.engines.role_spec import free_urls
from ddiloco.network.host_links import HostLink, HostProgress
from ddiloco.roles import initial
from ddiloco.training import hosts
from ddiloco.training.island import Island, own_shards
from tests.training.two_hosts import batches, calls, config_of
from tests.waits import PATIENCE_SECONDS

# What a multislice job or another launcher leaves in the environment of every process.
POISON = {
  "MEGASCALE_COORDINATOR_ADDRESS": "192.0.2.1:8080",
  "MEGASCALE_NUM_SLICES": "4",
  "MEGASCALE_SLICE_ID": "3",
  "JAX_COORDINATOR_ADDRESS": "192.0.2.1:1234",
  "JAX_COORDINATOR_BIND_ADDRESS": "192.0.2.1:1234",
  "JAX_NUM_PROCESSES": "7",
  "JAX_PROCESS_ID": "5",
}
# What a site with a proxy leaves there; nothing listens. Hosts waited for each other for ever.
PROXY = {"http_proxy": "http://127.0.0.1:9"}


def together(mesh: str, folder) -> dict[str, np.ndarray]:
  """What comes out on two processes."""
  (url,) = free_urls(1)
  file = folder / "found.npz"
  command = [sys.executable, "-m", "tests.training.two_hosts"]
  processes = [
    subprocess.Popen(
      [*command, str(host), url, mesh, str(file)],
      env=os.environ | POISON | PROXY,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for host in range(2)
  ]
  try:
    said = [each.communicate()[0] for each in processes]
  finally:
    for each in processes:
      each.kill()
  assert [each.returncode for each in processes] == [0, 0], "\n".join(said)
  done = {next(line for line in text.splitlines() if line.startswith("done")) for text in said}
  assert len(done) == 1, "every order was carried out on every host"
  with np.load(file) as found:
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2x2x2", "1x4x2"])  # each host has all values, or several parts
def test_two_processes_are_the_same_island_as_one_whatever_the_environment_says(tmp_path, mesh):
  """What is only moved is the same bit by bit. Sums over devices are made in another order."""
  found = together(mesh, tmp_path)
  config = config_of(mesh, 1)
  plan = initial.make_plan(config)
  island = Island(config, 0, jax.devices()[:8], plan)
  alone = calls(island, plan, batches)
  assert found.keys() == alone.keys()
  assert np.array_equal(found["second"], found["again"]), "restored bit by bit"
  for name, value in alone.items():
    assert found[name].dtype == value.dtype and found[name].shape == value.shape
    np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=2e-6, err_msg=name)
  assert found["count"] == alone["count"] == 7


def test_a_host_that_cannot_move_values_says_so():
  """Or the leader would wait for it, and the island train for ever without a sync."""
  orders = [msgspec.msgpack.encode(hosts.Take(7))]
  link = SimpleNamespace(receive=orders.pop)
  shelf, told = hosts._Shelf(), []
  shelf.put(7, None)
  error = RuntimeError("RESOURCE_EXHAUSTED")
  shelf.get = mock.Mock(side_effect=error)
  hosts._move_values(None, link, shelf, HostProgress(), told.append)
  assert told == [error]


@pytest.mark.parametrize("ended", [False, True])
def test_a_connection_for_values_that_ends_alone_is_told(ended):
  """The thread ended without a word, and the leader may never hear that nobody answers. After the
  order to end it is no loss."""
  orders, threads, told = queue.SimpleQueue(), queue.SimpleQueue(), queue.SimpleQueue()
  over = threading.Event()

  def gone():
    threads.put(threading.current_thread())
    assert over.wait(PATIENCE_SECONDS)
    raise OSError("timed out")

  links = SimpleNamespace(
    orders=SimpleNamespace(receive=orders.get), values=SimpleNamespace(receive=gone)
  )
  args = None, links, None, HostProgress(), told.put
  following = threading.Thread(target=hosts.follow, args=args)
  following.start()
  if ended:
    orders.put(msgspec.msgpack.encode(hosts.HostOrder("end", (False,))))
    following.join()
  over.set()
  threads.get().join()
  orders.put(msgspec.msgpack.encode(hosts.HostOrder("end", (False,))))
  following.join()
  assert told.empty() == ended


def test_every_order_is_a_call_of_an_island():
  calls = typing.get_args(typing.get_type_hints(hosts.HostOrder)["call"])
  assert calls[-3:] == ("open", "drop", "end")
  assert all(callable(getattr(Island, call)) for call in calls[:-3])


@pytest.mark.parametrize(
  ("order", "refused"),
  [
    (hosts.HostOrder("load"), "Invalid enum value 'load'"),
    (hosts.HostOrder("__init__"), "Invalid enum value '__init__'"),
    (hosts.HostOrder("step", (1, "0.5")), "got `str`"),
    (hosts.HostOrder("copy_out", (1, False), "2"), "Expected `int | null`, got `str`"),
    (hosts.Take(1), "missing required field `call`"),
  ],
)
def test_a_wrong_order_is_refused(order, refused):
  with pytest.raises(msgspec.ValidationError, match=re.escape(refused)):
    hosts._ORDER.decode(msgspec.msgpack.encode(order))


def test_an_order_arrives_as_it_was_sent():
  order = hosts.HostOrder("apply", (1, hosts.Handle(2), 0.5, True), 3)
  assert hosts._ORDER.decode(msgspec.msgpack.encode(order)) == order


@pytest.fixture(scope="module")
def planned():
  """(An island, its plan)."""
  config = config_of("1x8x1", 1)
  plan = initial.make_plan(config)
  return Island(config, 0, jax.devices()[:8], plan), plan


@pytest.fixture
def led(planned):
  """(An island's leader, what its one follower keeps); both have all devices, in this process."""
  island, plan = planned
  island.reset()
  with socket.create_server(("127.0.0.1", 0)) as server:
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()
  shelf = hosts._Shelf()
  moved = island, HostLink(far), shelf, HostProgress(), lambda error: None
  threading.Thread(target=hosts._move_values, args=moved, daemon=True).start()
  orders = SimpleNamespace(send=lambda message: leader.sent.append(hosts._ORDER.decode(message)))
  links = SimpleNamespace(orders=orders, values=HostLink(near))
  leader = hosts.LeadingIsland(island, plan, {jax.process_index(): links}, HostProgress())
  leader.sent = []
  yield leader, shelf
  links.values.close()


def captured_by(led) -> dict[str, hosts.CapturedArray]:
  leader, shelf = led
  captured = leader.capture()
  shelf.put(next(iter(captured.values()))._value.number, leader.island.capture())
  return captured


def test_a_captured_array_is_gone_once_it_is_collected(led):
  """The whole state stayed on every host, and what JAX copies of an array that is read, until the
  last array was saved."""
  leader, shelf = led
  captured = captured_by(led)
  value = next(iter(captured.values()))._value
  kept = {
    name: [weakref.ref(each[name]) for each in (value.arrays, shelf.get(value.number))]
    for name in captured
  }
  state = {name: np.asarray(array) for name, array in leader.island.capture().items()}
  for name in list(captured):
    assert np.array_equal(np.asarray(captured.pop(name)), state[name])
  *names, _ = kept  # its thread may still hold the last one
  assert not any(array() is not None for name in names for array in kept[name])


def test_arrays_of_a_damaged_snapshot_are_dropped_before_those_of_the_next(led):
  """They stayed on the other hosts until the restore: up to three states where two have room."""
  leader, _ = led
  name, leaf = next(iter(leader.island.layout.leaves.items()))
  value = np.zeros(leaf.shape, leaf.dtype)
  damaged = leader.place(name, value)
  number = damaged.number
  del damaged
  another = leader.place(name, value).number
  drops = [hosts.HostOrder("drop", (hosts.Handle(each),)) for each in (number, another)]
  assert leader.sent == drops[:1]
  leader.end(asked=False)
  assert leader.sent[1:] == [drops[1], hosts.HostOrder("end", (False,))]


def test_an_array_of_the_present_state_makes_room_for_the_one_that_is_restored(led):
  """An island that began anew in its process needed room for two states."""
  leader, _ = led
  name, leaf = next(iter(leader.island.layout.leaves.items()))
  old = weakref.ref(leader.island._state[name])
  leader.place(name, np.zeros(leaf.shape, leaf.dtype))
  assert old() is None and name not in leader.island._state


def test_a_value_is_on_every_host_before_the_next_one_moves(led):
  leader, shelf = led
  size = leader._plan.fragments[0].size
  staged = leader.stage(0, np.ones(size, np.float32))
  assert staged.number in shelf._values
  state = leader.island.capture()
  for name, array in captured_by(led).items():
    assert np.array_equal(np.asarray(array), state[name]), "a host's answer is no part of a value"
  got = sum(array.nbytes for array in state.values())
  assert leader._progress.moved_bytes == 4 * size + got, "else it would seem to stand still"


def test_a_value_is_complete_when_a_host_has_no_part_of_it(led, monkeypatch):
  """The host says so before it is dropped. Else it might look for it later, and wait for ever."""
  leader, shelf = led
  monkeypatch.setattr(hosts, "_sent", lambda array, host: [])
  copied = leader.copy_out(0)
  asked = threading.Thread(target=leader.to_host, args=(copied, 0), daemon=True)
  asked.start()
  asked.join(0.1)
  assert asked.is_alive(), "the host has not found it yet"
  shelf.put(copied.number, leader.island.copy_out(0))
  flat = leader.to_host(copied, 0)
  assert leader._progress.moved_bytes == 0
  assert np.array_equal(flat, leader.island.to_host(leader.island.copy_out(0), 0))


def test_what_a_failed_value_leaves_in_a_connection_is_no_other_value(led, monkeypatch):
  """The follower's "done" was read as the first bytes of the next array, which was then saved."""
  leader, _ = led
  captured = captured_by(led)
  name, *names = captured
  assert np.array_equal(np.asarray(captured[name]), leader.island.capture()[name])

  def full(*_):
    if threading.current_thread() is me:
      raise RuntimeError("RESOURCE_EXHAUSTED")
    return place(*_)

  me, place = threading.current_thread(), hosts._place
  monkeypatch.setattr(hosts, "_place", full)
  size = leader._plan.fragments[0].size
  with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
    leader.stage(0, np.ones(size, np.float32))
  for name in names:
    with pytest.raises(OSError, match="not moved to its end"):
      np.asarray(captured[name])


@pytest.fixture
def idle():
  """A connection for values over which nothing comes before the test is over."""
  over = threading.Event()

  def receive():
    over.wait(PATIENCE_SECONDS)
    raise OSError("the far end has gone")

  yield SimpleNamespace(receive=receive)
  over.set()


def test_each_time_an_island_begins_its_hosts_end_their_former_reading(idle):
  calls = ("open", (5,)), ("open", (7,)), ("end", (True,))
  orders = [hosts.HostOrder(*call) for call in calls]
  messages, opened = [msgspec.msgpack.encode(each) for each in reversed(orders)], []

  class Batches:
    def __init__(self, position):
      self.position, self.closed = position, False
      opened.append(self)

    def close(self):
      self.closed = True

  links = SimpleNamespace(orders=SimpleNamespace(receive=messages.pop), values=idle)
  progress = HostProgress()
  assert hosts.follow(None, links, Batches, progress, lambda error: None), "one was asked to end"
  assert [(each.position, each.closed) for each in opened] == [(5, True), (7, False)]
  assert progress.done == 3


def test_a_host_that_waits_for_its_data_says_so(idle):
  """Else it would be lost as soon as one that hangs inside a step."""
  orders = [
    hosts.HostOrder("open", (5,)),
    hosts.HostOrder("step", (5, 1.0)),
    hosts.HostOrder("end", (False,)),
  ]
  messages, said = [msgspec.msgpack.encode(each) for each in reversed(orders)], []
  progress = HostProgress()
  say = lambda *_: said.append((progress.doing, progress.reading_since > 0))

  def batches(_):
    yield say()

  links = SimpleNamespace(orders=SimpleNamespace(receive=messages.pop), values=idle)
  island = SimpleNamespace(step=say)
  assert not hosts.follow(island, links, batches, progress, lambda error: None)
  assert said == [("waits for its next batch", True), ("inside a step", False)]


def test_every_part_of_an_array_is_sent_once_and_is_one_that_is_held():
  config = config_of("2x2x2", 1)
  island = Island(config, 0, jax.devices()[:8], initial.make_plan(config))
  island.reset()
  for name, array in island.capture().items():
    seen, held = np.zeros(array.shape, int), hosts._held(island.layout.leaves[name], 0)
    assert len(set(held)) == len(held)
    assert not hosts._held(island.layout.leaves[name], 1) and not hosts._sent(array, 1)
    sent = [hosts._part(shard.index, array.shape) for shard in hosts._sent(array, 0)]
    assert sent == sorted(hosts._part(shard.index, array.shape) for shard in own_shards(array))
    for shard in own_shards(array):
      assert hosts._part(shard.index, array.shape) in held
      seen[shard.index] += 1
    assert (seen == 1).all()
