"""An island of several hosts: one host leads, and the others make the same calls in the same order.

Every host has an `Island` over all devices of the island (`jax.distributed` joins their processes)
and holds the parts of arrays on its own devices. A program runs when all hosts dispatch it. So the
leader sends each call to the other hosts as an order, and then makes the call itself. No host waits
for an answer; hosts wait for each other only inside the program. So all hosts copy out and apply at
the same step boundary, and a learner on the leader need not know that there are several hosts.

Values leave and enter a device on the device's own host. The leader collects the parts of a copy,
and hands out the parts of a staged value, on another connection and beside the steps. Connections
are `network.host_links.HostLinks`; each call on one blocks until it is complete.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import jax
import msgspec
import numpy as np

from ddiloco.core.fragments import Plan
from ddiloco.models.model import Batch
from ddiloco.training.island import Island, own_shards, split_rows

# --- The leader's messages to the other hosts


class Handle(msgspec.Struct, frozen=True):
  """Stands in an order for a value: an array or list of arrays on the devices of all hosts."""

  number: int


class HostOrder(msgspec.Struct, frozen=True):
  """A call that all hosts make.

  Attributes:
    call: the name of a method of `Island`, or of the last three an order to `follow` itself: the
      batches of the next steps are those from a position on; some values are no longer needed; the
      island's work is over.
    arguments: of the call. A step's batch is not among them, since each host reads it itself. The
      arrays that are restored are in the order of `Island.layout`.
    result: the number of the value that the call returns; None: it is not kept.
  """

  call: Literal[
    *("reset", "restore", "step", "capture", "copy_out", "apply", "count", "set_count"),
    *("open", "drop", "end"),
  ]
  arguments: tuple[Handle | bool | int | float, ...] = ()
  result: int | None = None


class Take(msgspec.Struct, frozen=True, tag=True):
  """Send your parts of a value (`_sent`); with a name, those of one array of a captured state, and
  drop it. Say when you have."""

  value: int
  name: str = ""


class Put(msgspec.Struct, frozen=True, tag=True):
  """The parts of a value that you hold (`_held`) follow. Say when they are on your devices.

  The value is a fragment's pieces, of the parameters or of the moments, or with a name one array of
  the state.
  """

  value: int
  fragment: int = 0
  moments: bool = False
  name: str = ""


_ORDER, _MOVE = msgspec.msgpack.Decoder(HostOrder), msgspec.msgpack.Decoder(Take | Put)


# --- The parts of an array over all hosts' devices: every host knows which one has what

Part = tuple[tuple[int, int], ...]  # (start, stop) along every axis


def _part(index: tuple[slice, ...], shape: Sequence[int]) -> Part:
  return tuple(each.indices(n)[:2] for each, n in zip(index, shape))


def _shape(part: Part) -> list[int]:
  return [stop - start for start, stop in part]


def _slices(part: Part) -> tuple[slice, ...]:
  return tuple(slice(*each) for each in part)


def _held(leaf: jax.ShapeDtypeStruct, host: int) -> list[Part]:
  """The distinct parts that the devices of a host have, in order."""
  indices = leaf.sharding.devices_indices_map(leaf.shape).items()
  return sorted({_part(i, leaf.shape) for device, i in indices if device.process_index == host})


def _sent(array: jax.Array, host: int) -> list[Any]:
  """The parts that a host sends, in the same order on all hosts: each part of the array once over
  all hosts. (JAX lists the parts of other processes in the order of a set, another one in each.)"""
  parts = (shard for shard in array.global_shards if shard.replica_id == 0)
  mine = (shard for shard in parts if shard.device.process_index == host)
  return sorted(mine, key=lambda shard: _part(shard.index, array.shape))


def _place(leaf: jax.ShapeDtypeStruct, made: Callable[[Part], np.ndarray]) -> jax.Array:
  """The array over all hosts' devices; this host's parts are `made` in the order of `_held`."""
  parts = {part: made(part) for part in _held(leaf, jax.process_index())}
  return jax.make_array_from_callback(
    leaf.shape, leaf.sharding, lambda index: parts[_part(index, leaf.shape)]
  )


def _bytes(array: np.ndarray) -> memoryview:
  # Viewed as uint8, since bf16 arrays export no buffer.
  return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _write(link: Any, arrays: Iterable[np.ndarray], progress: Any) -> None:
  for array in arrays:
    link.write(_bytes(array))
    progress.moved_bytes += array.nbytes


def _read(link: Any, shape: Sequence[int], dtype: Any, progress: Any) -> np.ndarray:
  array = np.empty(shape, dtype)
  link.fill(_bytes(array))
  progress.moved_bytes += array.nbytes
  return array


def _leaves(island: Island, put: Put) -> list[jax.ShapeDtypeStruct]:
  """The arrays of a value that is put."""
  if put.name:
    return [island.room_for(put.name)]
  return island.piece_leaves(put.fragment, put.moments)


# --- The host that leads


class SharedValue:
  """An array or tree on all hosts' devices, with its number; `arrays` are the leader's handles.

  When the leader has no reference to a shared value any more, the other hosts drop theirs.
  """

  def __init__(self, number: int, arrays: Any, dropped: Callable[[int], None]):
    self.number, self.arrays = number, arrays
    weakref.finalize(self, dropped, number).atexit = False


class CapturedArray:
  """One array of a captured state: collected from all hosts when NumPy asks for it, once.

  Then it is gone there, with the copy that JAX keeps on the host of an array that was read.
  """

  def __init__(self, leader: LeadingIsland, value: SharedValue, name: str):
    array = value.arrays[name]
    self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
    self._leader, self._value, self._name = leader, value, name

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    whole = np.empty(self.shape, self.dtype)
    array = self._value.arrays.pop(self._name)
    self._leader.collect(self._value.number, [array], [whole], self._name)
    return whole.astype(dtype or self.dtype, copy=False)


class LeadingIsland:
  """Replaces `Island` for the learner, on the host that leads.

  Args:
    island: over the devices of all hosts.
    plan: how the model is partitioned.
    links: host -> connections to it, for all other hosts.
    progress: of this host (`network.host_links.HostProgress`); `done` counts the orders.
  """

  def __init__(self, island: Island, plan: Plan, links: Mapping[int, Any], progress: Any):
    self.island, self._plan, self._progress = island, plan, progress
    self.compile = island.compile  # every other host compiles for itself before it follows
    self.num_moments = island.num_moments
    self._order_links = [link.orders for link in links.values()]
    self._value_links = {host: link.values for host, link in links.items()}
    self._numbers = itertools.count()
    self._dropped: list[int] = []
    self._moving = threading.Lock()  # one value at a time uses the connections
    self._torn = False  # a value did not move to its end

  def describe(self) -> dict[str, Any]:
    """As of `Island`, with the number of hosts."""
    return {**self.island.describe(), "hosts": 1 + len(self._order_links)}

  def batches(self, read: Callable[[int], Iterator[Batch]], position: int) -> Iterator[Batch]:
    """`read(position)`, and the other hosts read theirs."""
    self._order("open", position)
    return read(position)

  def end(self, asked: bool) -> None:
    """Tells the other hosts that the work is over, and whether it is because a host was asked."""
    self._order("end", asked)

  # --- the same calls as of `Island`, on all hosts ------------------------------------------------

  def reset(self) -> None:
    self._call("reset")

  def place(self, name: str, value: np.ndarray) -> SharedValue | np.ndarray:
    """As of `Island`: this host reads a state array by array, and hands each out at once."""
    if not self.island.layout.fits(name, value):
      return value
    self._drop()  # of a damaged snapshot the other hosts may have all arrays but the last
    return self._put(Put(next(self._numbers), name=name), [value])

  def restore(self, arrays: Mapping[str, Any]) -> None:
    """As of `Island`, of what `place` has made of each array."""
    self.island.layout.check({n: getattr(array, "arrays", array) for n, array in arrays.items()})
    self._order("restore", *(arrays[name] for name in self.island.layout.leaves))
    self.island.restore({name: value.arrays for name, value in arrays.items()})

  @property
  def busy(self) -> bool:
    return self.island.busy

  def step(
    self, batch: Batch, schedule_step: int, rate_scale: float = 1.0
  ) -> dict[str, float] | None:
    self._order("step", schedule_step, rate_scale)
    return self.island.step(batch, schedule_step, rate_scale)

  def capture(self) -> dict[str, CapturedArray]:
    """As of `Island`. The thread that writes the state collects it array by array, between other
    values. So the state is never whole on this host, and no push waits for all of it."""
    value = self._shared("capture")
    return {name: CapturedArray(self, value, name) for name in value.arrays}

  def copy_out(self, fragment: int, moments: bool = False) -> SharedValue:
    return self._shared("copy_out", fragment, moments)

  def apply(self, fragment: int, staged: SharedValue, keep: float, moments: bool = False) -> None:
    self._call("apply", fragment, staged, keep, moments)

  def count(self) -> jax.Array:
    return self._call("count")

  def set_count(self, count: int) -> None:
    self._call("set_count", count)

  def _call(self, call: Any, *arguments: Any, result: int | None = None) -> Any:
    """Makes this call of `Island` on all hosts."""
    self._order(call, *arguments, result=result)
    mine = (each.arrays if isinstance(each, SharedValue) else each for each in arguments)
    return getattr(self.island, call)(*mine)

  def _shared(self, call: Any, *arguments: Any) -> SharedValue:
    """What this call of `Island` returns, on all hosts."""
    number = next(self._numbers)
    mine = self._call(call, *arguments, result=number)
    return SharedValue(number, mine, self._dropped.append)

  def _order(self, call: Any, *arguments: Any, result: int | None = None) -> None:
    self._drop()
    named = (Handle(each.number) if isinstance(each, SharedValue) else each for each in arguments)
    self._send(HostOrder(call, tuple(named), result))

  def _drop(self) -> None:
    if dropped := list(self._dropped):
      del self._dropped[: len(dropped)]  # other threads may append meanwhile
      self._send(HostOrder("drop", tuple(map(Handle, dropped))))

  def _send(self, order: HostOrder) -> None:
    message = msgspec.msgpack.encode(order)
    for link in self._order_links:
      link.send(message)
    self._progress.doing = _words(order)
    self._progress.done += 1

  # --- background thread --------------------------------------------------------------------------

  def to_host(self, copied: SharedValue, fragment: int) -> np.ndarray:
    """As of `Island`; every host sends its parts."""
    flat = np.empty(sum(array.size for array in copied.arrays), np.float32)
    views = split_rows(self._plan.fragments[fragment], flat)
    self.collect(copied.number, copied.arrays, views)
    return flat

  def stage(self, fragment: int, flat: np.ndarray, moments: bool = False) -> SharedValue:
    """As of `Island`; every host gets what it is to have."""
    views = split_rows(self._plan.fragments[fragment], flat)
    return self._put(Put(next(self._numbers), fragment, moments), views)

  @contextlib.contextmanager
  def _alone(self) -> Iterator[None]:
    """For one value at a time. What a value that failed has left in the connections would pass for
    the next one: then nothing is moved any more, and this process is about to end."""
    with self._moving:
      if self._torn:
        raise ConnectionError("a value before this one was not moved to its end")
      self._torn = True
      yield
      self._torn = False

  def collect(
    self, number: int, arrays: Sequence[jax.Array], views: Sequence[np.ndarray], name: str = ""
  ) -> None:
    """Writes the arrays of a value into `views`: own parts, and the parts that other hosts send."""
    links, message = self._value_links, msgspec.msgpack.encode(Take(number, name))
    with self._alone():
      for link in links.values():
        link.send(message)
      for array, view in zip(arrays, views, strict=True):
        for shard in own_shards(array):
          view[shard.index] = shard.data
      for host, link in links.items():
        for array, view in zip(arrays, views):
          for shard in _sent(array, host):
            shape = view[shard.index].shape
            view[shard.index] = _read(link, shape, view.dtype, self._progress)
        link.receive()  # one that had no part has looked for the value too: it may be dropped

  def _put(self, put: Put, arrays: Sequence[np.ndarray]) -> SharedValue:
    """Brings arrays onto the devices of all hosts; they are there when this returns."""
    links, message = self._value_links, msgspec.msgpack.encode(put)
    pairs = list(zip(arrays, _leaves(self.island, put), strict=True))
    with self._alone():
      for link in links.values():
        link.send(message)
      for host, link in links.items():
        for array, leaf in pairs:
          parts = _held(leaf, host)
          _write(link, (array[_slices(part)] for part in parts), self._progress)
      mine = [
        # A private copy: a CPU device may use host memory as it is.
        _place(leaf, lambda part, array=array: np.array(array[_slices(part)]))
        for array, leaf in pairs
      ]
      jax.block_until_ready(mine)
      for link in links.values():
        link.receive()  # it has them
    return SharedValue(put.value, mine[0] if put.name else mine, self._dropped.append)


# --- The hosts that follow


class _Shelf:
  """Values by number, shared by the thread that carries out orders and `_move_values`."""

  def __init__(self) -> None:
    self._values: dict[int, Future[Any]] = {}

  def put(self, number: int, value: Any) -> None:
    self._values.setdefault(number, Future()).set_result(value)

  def get(self, number: int) -> Any:
    """Waits until the value is there: the order that makes it may be under way."""
    return self._values.setdefault(number, Future()).result()

  def drop(self, number: int) -> None:
    self._values.pop(number, None)


def follow(
  island: Island,
  links: Any,
  read: Callable[[int], Iterator[Batch]],
  progress: Any,
  failed: Callable[[Exception], None],
) -> bool:
  """Carries out the leader's orders until the order `end`; returns whether a host was asked to end.

  Args:
    island: over the devices of all hosts, compiled.
    links: to the leader.
    read: this learner's batches from a position on.
    progress: of this host.
    failed: called by the thread that moves values, when it cannot go on before the order `end`. It
      should end the process: the leader waits for values, and the calling thread may be stuck
      inside a program for ever.

  Raises:
    OSError: the leader is gone.
  """
  shelf, over = _Shelf(), threading.Event()
  moved = island, links.values, shelf, progress, lambda error: over.is_set() or failed(error)
  threading.Thread(target=_move_values, args=moved, name="values", daemon=True).start()
  batches: Any = None
  asked: Any = False
  while not over.is_set():
    order = _ORDER.decode(links.orders.receive())
    progress.doing = _words(order)
    match order.call, order.arguments:
      case "step", arguments:
        progress.doing, progress.reading_since = "waits for its next batch", time.monotonic()
        batch = next(batches)
        progress.doing, progress.reading_since = _words(order), 0.0
        island.step(batch, *arguments)
      case "restore", handles:
        values = (shelf.get(handle.number) for handle in handles)
        island.restore(dict(zip(island.layout.leaves, values, strict=True)))
      case "open", (position,):
        if batches is not None:
          batches.close()  # ends the reading ahead
        batches = read(position)
      case "drop", handles:
        for handle in handles:
          shelf.drop(handle.number)
      case "end", (asked,):
        over.set()
      case call, arguments:
        mine = (shelf.get(a.number) if isinstance(a, Handle) else a for a in arguments)
        result = getattr(island, call)(*mine)
        if order.result is not None:
          shelf.put(order.result, result)
    progress.done += 1
  return asked


def _words(order: HostOrder) -> str:
  """What a host does, for one that asks why it is waited for."""
  known = {"step": "inside a step", "restore": "restores its state"}
  return known.get(order.call, f"{order.call}{order.arguments}")


def _move_values(
  island: Island, link: Any, shelf: _Shelf, progress: Any, failed: Callable[[Exception], Any]
) -> None:
  """Answers the leader's `Take` and `Put`, until it cannot any more."""
  try:
    while True:
      match _MOVE.decode(link.receive()):
        case Take(number, name):
          value = shelf.get(number)
          arrays = [value.pop(name)] if name else jax.tree.leaves(value)
          shards = (shard for array in arrays for shard in _sent(array, jax.process_index()))
          _write(link, (np.asarray(shard.data) for shard in shards), progress)
        case Put() as put:
          arrays = [
            _place(leaf, lambda part, kind=leaf.dtype: _read(link, _shape(part), kind, progress))
            for leaf in _leaves(island, put)
          ]
          jax.block_until_ready(arrays)
          shelf.put(put.value, arrays[0] if put.name else arrays)
      link.send(b"done")
  except Exception as error:  # the leader is gone, or a device has no memory
    failed(error)
