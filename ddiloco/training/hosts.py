"""An island of several hosts: one host leads, and the others make the same calls in the same order.

Every host has an `Island` over all devices of the island (`jax.distributed` joins their processes)
and holds the parts of arrays on its own devices. A program runs when all hosts dispatch it. So the
leader sends each call to the other hosts as an order, and then makes the call itself. No host waits
for an answer; hosts wait for each other only inside the program. So all hosts copy out and apply at
the same step boundary, and a learner on the leader need not know that there are several hosts.

Values leave and enter a device on the device's own host. The leader collects the parts of a copy,
and hands out the parts of a staged value, on another connection and beside the steps.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import msgspec
import numpy as np
from jax.sharding import NamedSharding

from ddiloco.core.fragments import Plan
from ddiloco.models.model import Batch
from ddiloco.training.island import Island, split_rows

# --- The leader's messages to the other hosts


class Handle(msgspec.Struct, frozen=True):
  """Stands in an order for a value: an array or list of arrays on the devices of all hosts."""

  number: int


class HostOrder(msgspec.Struct, frozen=True):
  """A call that all hosts make.

  Attributes:
    call: one of `ORDERS`: the name of a method of `Island`, or an order to `follow` itself.
    arguments: of the types that `ORDERS` says, with handles for values.
    result: the number of the value that the call returns; None: it is not kept.
  """

  call: str
  arguments: tuple[Any, ...] = ()
  result: int | None = None


# Call -> the types of its arguments.
ORDERS: dict[str, Any] = {
  "reset": tuple[()],
  "restore": tuple[dict[str, Handle]],
  "step": tuple[int, float],  # after the batch, which each host reads itself
  "finish": tuple[()],
  "capture": tuple[()],
  "copy_out": tuple[int, bool],
  "apply": tuple[int, Handle, float, bool],
  "count": tuple[()],
  "set_count": tuple[int],
  # To `follow` itself:
  "open": tuple[int],  # the batches of the next steps are those from this position on
  "drop": tuple[list[int]],  # these values are no longer needed
  "end": tuple[()],  # the island's work is over
}


def read_order(message: bytes) -> HostOrder:
  """The order in a message.

  Raises:
    msgspec.ValidationError: there is no such order, or its arguments are others.
  """
  order = _ORDER.decode(message)
  if order.call not in ORDERS:
    raise msgspec.ValidationError(
      f"there is no order {order.call!r}. Fix: run the same version of ddiloco on all hosts."
    )
  arguments = msgspec.convert(order.arguments, ORDERS[order.call])
  return msgspec.structs.replace(order, arguments=arguments)


class Take(msgspec.Struct, frozen=True, tag=True):
  """Send me your parts of a value; with a name, of one array of a captured state, and drop it."""

  value: int
  name: str = ""


class Put(msgspec.Struct, frozen=True, tag=True):
  """Your parts of a value follow; say when they are on your devices.

  The value is a fragment's pieces, of the parameters or of the moments, or with a name one array of
  the state.
  """

  value: int
  fragment: int
  moments: bool = False
  name: str = ""


_ORDER, _MOVE = msgspec.msgpack.Decoder(HostOrder), msgspec.msgpack.Decoder(Take | Put)
DONE = b"done"


class HostConnection(Protocol):
  """A connection to another host; every call blocks until it is complete."""

  def send(self, message: bytes) -> None: ...
  def receive(self) -> bytes: ...

  def write(self, data: memoryview) -> None:
    """Sends bytes that follow a message."""

  def fill(self, view: memoryview) -> None:
    """Reads the bytes that follow a message into `view`."""


class HostConnections(Protocol):
  """The two connections to one other host."""

  @property
  def orders(self) -> HostConnection: ...
  @property
  def values(self) -> HostConnection: ...


class OwnProgress(Protocol):
  """What this host reports of itself."""

  done: int  # orders given, or carried out
  moved_bytes: int
  doing: str


# --- Which host has what: the parts of an array over all hosts' devices

Part = tuple[tuple[int, int], ...]  # (start, stop) along every axis


def _part(index: tuple[slice, ...], shape: Sequence[int]) -> Part:
  return tuple(each.indices(n)[:2] for each, n in zip(index, shape))


def _slices(part: Part) -> tuple[slice, ...]:
  return tuple(slice(*each) for each in part)


@functools.cache
def parts_held(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, tuple[Part, ...]]:
  """Host -> the distinct parts that its devices have, in the same order everywhere."""
  found: dict[int, dict[Part, None]] = {}
  for device, index in sharding.devices_indices_map(shape).items():
    found.setdefault(device.process_index, {})[_part(index, shape)] = None
  return {host: tuple(sorted(parts)) for host, parts in found.items()}


@functools.cache
def parts_sent(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, tuple[Part, ...]]:
  """Host -> the parts that no earlier host has: together the whole array, once."""
  held, seen = parts_held(sharding, shape), set[Part]()
  sent = {}
  for host in sorted(held):
    sent[host] = tuple(part for part in held[host] if part not in seen)
    seen.update(held[host])
  return sent


def _own(array: jax.Array, host: int) -> Iterator[tuple[Part, np.ndarray]]:
  """The parts of an array that this host sends (`parts_sent`), in the host's memory."""
  here = {_part(shard.index, array.shape): shard for shard in array.addressable_shards}
  for part in parts_sent(array.sharding, array.shape)[host]:
    yield part, np.asarray(here[part].data)


def _bytes(array: np.ndarray) -> memoryview:
  # Viewed as uint8, since bf16 arrays export no buffer.
  return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _receive(link: HostConnection, part: Part, dtype: Any, progress: OwnProgress) -> np.ndarray:
  array = np.empty([stop - start for start, stop in part], dtype)
  link.fill(_bytes(array))
  progress.moved_bytes += array.nbytes
  return array


def _place(leaf: jax.ShapeDtypeStruct, parts: Mapping[Part, np.ndarray]) -> jax.Array:
  """The array over all hosts' devices, from this host's parts."""
  return jax.make_array_from_callback(
    leaf.shape, leaf.sharding, lambda index: parts[_part(index, leaf.shape)]
  )


def _leaves(island: Island, put: Put) -> list[jax.ShapeDtypeStruct]:
  """The arrays of a value that is put."""
  if put.name:
    return [island.layout.leaves[put.name]]
  return island.piece_leaves(put.fragment, put.moments)


def _each(kind: type, change: Callable[[Any], Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
  """The arguments of a call, all of this kind changed."""
  return jax.tree.map(lambda each: change(each) if isinstance(each, kind) else each, arguments)


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

  def __init__(
    self, value: SharedValue, name: str, collect: Callable[[SharedValue, str], np.ndarray]
  ):
    array = value.arrays[name]
    self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
    self._value, self._name, self._collect = value, name, collect

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    return self._collect(self._value, self._name).astype(dtype or self.dtype, copy=False)


class LeadingIsland:
  """Replaces `Island` for the learner, on the host that leads.

  Args:
    island: over the devices of all hosts.
    plan: how the model is partitioned.
    links: host -> connections to it, for all other hosts.
    progress: of this host; `done` counts the orders.
  """

  def __init__(
    self, island: Island, plan: Plan, links: Mapping[int, HostConnections], progress: OwnProgress
  ):
    self.island, self._plan, self._progress = island, plan, progress
    self._orders = [each.orders for each in links.values()]
    self._values = {host: each.values for host, each in sorted(links.items())}
    self._numbers = itertools.count()
    self._dropped: list[int] = []
    self._moving = threading.Lock()  # one value at a time uses the connections
    self._torn = False  # a value did not move to its end

  def describe(self) -> dict[str, Any]:
    """As of `Island`, with the number of hosts."""
    return {**self.island.describe(), "hosts": 1 + len(self._orders)}

  def compile(self) -> float:
    """Compiles on this host; every other host compiles for itself before it follows."""
    return self.island.compile()

  def batches(self, read: Callable[[int], Iterator[Batch]], position: int) -> Iterator[Batch]:
    """`read(position)`, and the other hosts read theirs."""
    self._order("open", position)
    return read(position)

  def end(self) -> None:
    """Tells the other hosts that the work is over."""
    self._order("end")

  # --- the same calls as of `Island`, on all hosts ------------------------------------------------

  def reset(self) -> None:
    self._call("reset")

  def place(self, name: str, value: np.ndarray) -> SharedValue | np.ndarray:
    """As of `Island`: this host reads a state array by array, and hands each out at once."""
    if not self.island.layout.fits(name, value):
      return value
    self._drop()  # of a damaged snapshot the other hosts may have all arrays but the last
    return self._put(Put(next(self._numbers), 0, name=name), [value])

  def restore(self, arrays: Mapping[str, SharedValue | np.ndarray]) -> None:
    """As of `Island`, of what `place` has made of each array."""
    self.island.layout.check({n: getattr(array, "arrays", array) for n, array in arrays.items()})
    ready = {
      name: array if isinstance(array, SharedValue) else self.place(name, array)
      for name, array in arrays.items()
    }
    self._call("restore", ready)

  def step(
    self, batch: Batch, schedule_step: int, rate_scale: float = 1.0
  ) -> dict[str, float] | None:
    self._order("step", schedule_step, rate_scale)
    return self.island.step(batch, schedule_step, rate_scale)

  def finish(self) -> dict[str, float] | None:
    return self._call("finish")

  def capture(self) -> dict[str, CapturedArray]:
    """As of `Island`. The thread that writes the state collects it array by array, between other
    values. So the state is never whole on this host, and no push waits for all of it."""
    value = self._shared("capture")
    return {name: CapturedArray(value, name, self._collect_one) for name in value.arrays}

  def copy_out(self, fragment: int, moments: bool = False) -> SharedValue:
    return self._shared("copy_out", fragment, moments)

  def apply(self, fragment: int, staged: SharedValue, keep: float, moments: bool = False) -> None:
    self._call("apply", fragment, staged, keep, moments)

  @property
  def num_moments(self) -> int:
    return self.island.num_moments

  def count(self) -> jax.Array | np.int32:
    return self._call("count")

  def set_count(self, count: int) -> None:
    self._call("set_count", count)

  def _call(self, call: str, *arguments: Any, result: int | None = None) -> Any:
    """Makes this call of `Island` on all hosts."""
    self._order(call, *arguments, result=result)
    return getattr(self.island, call)(*_each(SharedValue, lambda v: v.arrays, arguments))

  def _shared(self, call: str, *arguments: Any) -> SharedValue:
    """What this call of `Island` returns, on all hosts."""
    number = next(self._numbers)
    return self._value(number, self._call(call, *arguments, result=number))

  def _order(self, call: str, *arguments: Any, result: int | None = None) -> None:
    self._drop()
    named = _each(SharedValue, lambda value: Handle(value.number), arguments)
    self._send(HostOrder(call, named, result))

  def _drop(self) -> None:
    if dropped := list(self._dropped):
      del self._dropped[: len(dropped)]  # other threads may append meanwhile
      self._send(HostOrder("drop", (dropped,)))

  def _send(self, order: HostOrder) -> None:
    message = msgspec.msgpack.encode(order)
    for link in self._orders:
      link.send(message)
    self._progress.doing = _words(order)
    self._progress.done += 1

  def _value(self, number: int, arrays: Any) -> SharedValue:
    return SharedValue(number, arrays, self._dropped.append)

  # --- background thread --------------------------------------------------------------------------

  def to_host(self, copied: SharedValue, fragment: int) -> np.ndarray:
    """As of `Island`; every host sends its parts."""
    part = self._plan.fragments[fragment]
    flat = np.empty(len(copied.arrays) // len(part.pieces) * part.size, np.float32)
    self._collect(copied.number, copied.arrays, split_rows(part, flat))
    return flat

  def stage(self, fragment: int, flat: np.ndarray, moments: bool = False) -> SharedValue:
    """As of `Island`; every host gets what it is to have."""
    views = self.island.views(fragment, flat, moments)
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

  def _collect_one(self, captured: SharedValue, name: str) -> np.ndarray:
    array = captured.arrays.pop(name)
    whole = np.empty(array.shape, array.dtype)
    self._collect(captured.number, [array], [whole], name)
    return whole

  def _collect(
    self, number: int, arrays: Sequence[jax.Array], views: Sequence[np.ndarray], name: str = ""
  ) -> None:
    """Writes the arrays of a value into `views`: own parts, and the parts that other hosts send."""
    sent = [parts_sent(array.sharding, array.shape) for array in arrays]
    # A host without a part is not asked: it might read the `Take` only after the value is dropped.
    asked = {h: link for h, link in self._values.items() if any(parts[h] for parts in sent)}
    with self._alone():
      for link in asked.values():
        link.send(msgspec.msgpack.encode(Take(number, name)))
      for array, view in zip(arrays, views, strict=True):
        for part, data in _own(array, jax.process_index()):
          view[_slices(part)] = data
      for host, link in asked.items():
        for array, view, parts in zip(arrays, views, sent):
          for part in parts[host]:
            view[_slices(part)] = _receive(link, part, array.dtype, self._progress)

  def _put(self, put: Put, arrays: Sequence[np.ndarray]) -> SharedValue:
    """Brings arrays onto the devices of all hosts; they are there when this returns."""
    leaves, message = _leaves(self.island, put), msgspec.msgpack.encode(put)
    held = [parts_held(leaf.sharding, leaf.shape) for leaf in leaves]
    with self._alone():
      for host, link in self._values.items():
        link.send(message)
        for array, parts in zip(arrays, held, strict=True):
          for part in parts[host]:
            data = _bytes(array[_slices(part)])
            link.write(data)
            self._progress.moved_bytes += data.nbytes
      mine = [
        # A private copy: a CPU device may use host memory as it is.
        _place(leaf, {p: np.array(a[_slices(p)]) for p in parts[jax.process_index()]})
        for a, leaf, parts in zip(arrays, leaves, held)
      ]
      jax.block_until_ready(mine)
      for link in self._values.values():
        link.receive()  # it has them
    return self._value(put.value, mine[0] if put.name else mine)


# --- The hosts that follow


class _Shelf:
  """Values by number, shared by the thread that carries out orders and `_move_values`."""

  def __init__(self) -> None:
    self._values: dict[int, Any] = {}
    self._changed = threading.Condition()

  def put(self, number: int, value: Any) -> None:
    with self._changed:
      self._values[number] = value
      self._changed.notify_all()

  def get(self, number: int) -> Any:
    """Waits until the value is there: the order that makes it may be under way."""
    with self._changed:
      self._changed.wait_for(lambda: number in self._values)
      return self._values[number]

  def drop(self, numbers: Iterable[int]) -> None:
    with self._changed:
      for number in numbers:
        self._values.pop(number, None)


def follow(
  island: Island,
  links: HostConnections,
  read: Callable[[int], Iterator[Batch]],
  progress: OwnProgress,
  failed: Callable[[Exception], None],
) -> None:
  """Carries out the leader's orders until the order `End`.

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

  def broken(error: Exception) -> None:
    if not over.is_set():
      failed(error)

  moved = island, links.values, shelf, progress, broken
  threading.Thread(target=_move_values, args=moved, name="values", daemon=True).start()
  batches: Iterator[Batch] = iter(())
  while True:
    order = read_order(links.orders.receive())
    progress.doing = _words(order)
    match order:
      case HostOrder("step", arguments):
        progress.doing = "waits for its next batch"
        batch = next(batches)
        progress.doing = _words(order)
        island.step(batch, *arguments)
      case HostOrder("open", (position,)):
        getattr(batches, "close", lambda: None)()  # ends the reading ahead
        batches = read(position)
      case HostOrder("drop", (numbers,)):
        shelf.drop(numbers)
      case HostOrder("end"):
        over.set()
        progress.done += 1
        return
      case _:
        _carry_out(island, order, shelf)
    progress.done += 1


def _carry_out(island: Island, order: HostOrder, shelf: _Shelf) -> None:
  arguments = _each(Handle, lambda handle: shelf.get(handle.number), order.arguments)
  result = getattr(island, order.call)(*arguments)
  if order.result is not None:
    shelf.put(order.result, result)


def _words(order: HostOrder) -> str:
  """What a host does, for one that asks why it is waited for."""
  known = {"step": "inside a step", "restore": "restores its state"}
  return known.get(order.call, f"{order.call}{order.arguments}")


def _move_values(
  island: Island,
  link: HostConnection,
  shelf: _Shelf,
  progress: OwnProgress,
  failed: Callable[[Exception], None],
) -> None:
  """Answers the leader's `Take` and `Put`, until it cannot any more."""
  host = jax.process_index()
  try:
    while True:
      match _MOVE.decode(link.receive()):
        case Take(number, name):
          value = shelf.get(number)
          for array in [value.pop(name)] if name else jax.tree.leaves(value):
            for _, data in _own(array, host):
              link.write(_bytes(data))
              progress.moved_bytes += data.nbytes
        case Put() as put:
          arrays = []
          for leaf in _leaves(island, put):
            held = parts_held(leaf.sharding, leaf.shape)[host]
            parts = {part: _receive(link, part, leaf.dtype, progress) for part in held}
            arrays.append(_place(leaf, parts))
          jax.block_until_ready(arrays)
          shelf.put(put.value, arrays[0] if put.name else arrays)
          link.send(DONE)
  except Exception as error:  # the leader is gone, or a device has no memory
    failed(error)
