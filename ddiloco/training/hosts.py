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

from ddiloco.core.fragments import Plan, split_flat
from ddiloco.models.model import Batch
from ddiloco.training.island import Island

# --- The leader's messages to the other hosts


class Call(msgspec.Struct, frozen=True, tag=True):
  """A call of `Island` that all hosts make. `value`: the number of an array or tree."""


class ResetCall(Call, frozen=True):
  """`reset()`."""


class RestoreCall(Call, frozen=True):
  """`restore(values)`, by name."""

  values: dict[str, int]


class OpenCall(Call, frozen=True):
  """The batches of the next steps are those from `position` on."""

  position: int


class StepCall(Call, frozen=True):
  """`step(next batch, ...)`."""

  schedule_step: int
  rate_scale: float


class FinishCall(Call, frozen=True):
  """`finish()`."""


class CaptureCall(Call, frozen=True):
  """value = `capture()`."""

  value: int


class CopyOutCall(Call, frozen=True):
  """value = `copy_out(fragment)`, or of its moments."""

  value: int
  fragment: int
  moments: bool = False


class ApplyCall(Call, frozen=True):
  """`apply(fragment, value, keep)`."""

  value: int
  fragment: int
  keep: float


class ApplyMomentsCall(Call, frozen=True):
  """`apply_moments(fragment, value, count)`."""

  value: int
  fragment: int
  count: int


class CountCall(Call, frozen=True):
  """`count()`."""


class Drop(Call, frozen=True):
  """These values are no longer needed."""

  values: tuple[int, ...]


class End(Call, frozen=True):
  """The island's work is over."""


class Take(Call, frozen=True):
  """Send me your parts of a value; with a name, of one array of a captured state, and drop it."""

  value: int
  name: str = ""


class Put(Call, frozen=True):
  """Your parts of a value follow; say when they are on your devices.

  The value is a fragment's pieces, its moments, or with a name one array of the state.
  """

  value: int
  fragment: int
  moments: bool = False
  name: str = ""


WITHOUT_VALUE = ResetCall | RestoreCall | OpenCall | StepCall | FinishCall | CountCall | Drop | End
WITH_VALUE = CaptureCall | CopyOutCall | ApplyCall | ApplyMomentsCall | Take | Put
ANY = msgspec.msgpack.Decoder(WITHOUT_VALUE | WITH_VALUE)
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
  pieces = island.piece_leaves(put.fragment)
  return pieces * island.num_moments if put.moments else pieces


def _shaped(island: Island, put: Put, arrays: list[jax.Array]) -> Any:
  """Those arrays as `Island` takes them."""
  if put.name:
    return arrays[0]
  if not put.moments:
    return arrays
  size = len(island.piece_leaves(put.fragment))
  return [arrays[start : start + size] for start in range(0, len(arrays), size)]


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
    self._order(OpenCall(position))
    return read(position)

  def end(self) -> None:
    """Tells the other hosts that the work is over."""
    self._order(End())

  # --- the same calls as of `Island`, on all hosts ------------------------------------------------

  def reset(self) -> None:
    self._order(ResetCall())
    self.island.reset()

  def place(self, name: str, value: np.ndarray) -> SharedValue | np.ndarray:
    """As of `Island`: this host reads a state array by array, and hands each out at once."""
    if not self.island.layout.fits(name, value):
      return value
    return self._put(Put(next(self._numbers), 0, name=name), [value])

  def restore(self, arrays: Mapping[str, SharedValue | np.ndarray]) -> None:
    """As of `Island`, of what `place` has made of each array."""
    self.island.layout.check({n: getattr(array, "arrays", array) for n, array in arrays.items()})
    ready = {
      name: array if isinstance(array, SharedValue) else self.place(name, array)
      for name, array in arrays.items()
    }
    self._order(RestoreCall({name: value.number for name, value in ready.items()}))
    self.island.restore({name: value.arrays for name, value in ready.items()})

  def step(
    self, batch: Batch, schedule_step: int, rate_scale: float = 1.0
  ) -> dict[str, float] | None:
    self._order(StepCall(schedule_step, rate_scale))
    return self.island.step(batch, schedule_step, rate_scale)

  def finish(self) -> dict[str, float] | None:
    self._order(FinishCall())
    return self.island.finish()

  def capture(self) -> dict[str, CapturedArray]:
    """As of `Island`. The thread that writes the state collects it array by array, between other
    values. So the state is never whole on this host, and no push waits for all of it."""
    number = next(self._numbers)
    self._order(CaptureCall(number))
    value = self._value(number, self.island.capture())
    return {name: CapturedArray(value, name, self._collect_one) for name in value.arrays}

  def copy_out(self, fragment: int) -> SharedValue:
    number = next(self._numbers)
    self._order(CopyOutCall(number, fragment))
    return self._value(number, self.island.copy_out(fragment))

  def apply(self, fragment: int, staged: SharedValue, keep: float) -> None:
    self._order(ApplyCall(staged.number, fragment, keep))
    self.island.apply(fragment, staged.arrays, keep)

  @property
  def num_moments(self) -> int:
    return self.island.num_moments

  def copy_out_moments(self, fragment: int) -> SharedValue:
    number = next(self._numbers)
    self._order(CopyOutCall(number, fragment, moments=True))
    return self._value(number, self.island.copy_out_moments(fragment))

  def apply_moments(self, fragment: int, staged: SharedValue, count: int) -> None:
    self._order(ApplyMomentsCall(staged.number, fragment, count))
    self.island.apply_moments(fragment, staged.arrays, count)

  def count(self) -> jax.Array | np.int32:
    self._order(CountCall())
    return self.island.count()

  def _order(self, order: Call) -> None:
    dropped = tuple(self._dropped)
    del self._dropped[: len(dropped)]  # other threads may append meanwhile
    for each in (Drop(dropped), order) if dropped else (order,):
      message = msgspec.msgpack.encode(each)
      for link in self._orders:
        link.send(message)
      self._progress.doing = _words(order)
      self._progress.done += 1

  def _value(self, number: int, arrays: Any) -> SharedValue:
    return SharedValue(number, arrays, self._dropped.append)

  # --- background thread --------------------------------------------------------------------------

  def to_host(self, copied: SharedValue, fragment: int) -> np.ndarray:
    """As of `Island`; every host sends its parts."""
    flat = np.empty(self._plan.fragments[fragment].size, np.float32)
    self._collect(copied.number, copied.arrays, self._pieces(fragment, [flat]))
    return flat

  def moments_to_host(self, copied: SharedValue, fragment: int) -> np.ndarray:
    """As of `Island`."""
    rows = np.empty((len(copied.arrays), self._plan.fragments[fragment].size), np.float32)
    self._collect(copied.number, jax.tree.leaves(copied.arrays), self._pieces(fragment, rows))
    return rows.reshape(-1)

  def stage(self, fragment: int, flat: np.ndarray) -> SharedValue:
    """As of `Island`; every host gets what it is to have."""
    return self._put(Put(next(self._numbers), fragment), self._pieces(fragment, [flat]))

  def stage_moments(self, fragment: int, flat: np.ndarray) -> SharedValue:
    """As of `Island`."""
    rows = self.island.rows_of_moments(fragment, flat)
    put = Put(next(self._numbers), fragment, moments=True)
    return self._put(put, self._pieces(fragment, rows))

  def _pieces(self, fragment: int, rows: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Views of the fragment's pieces in these flat vectors."""
    return [view for row in rows for view in split_flat(self._plan.fragments[fragment], row)]

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
    return self._value(put.value, _shaped(self.island, put, mine))


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
    failed: called by the thread that moves values, when it cannot go on. It should end the process:
      the leader waits for values, and the calling thread may be stuck inside a program for ever.

  Raises:
    OSError: the leader is gone.
  """
  shelf = _Shelf()
  moved = island, links.values, shelf, progress, failed
  threading.Thread(target=_move_values, args=moved, name="values", daemon=True).start()
  batches: Iterator[Batch] = iter(())
  while True:
    order = ANY.decode(links.orders.receive())
    progress.doing = _words(order)
    match order:
      case StepCall(schedule_step, rate_scale):
        progress.doing = "waits for its next batch"
        batch = next(batches)
        progress.doing = _words(order)
        island.step(batch, schedule_step, rate_scale)
      case CopyOutCall(value, fragment, moments):
        copy_out = island.copy_out_moments if moments else island.copy_out
        shelf.put(value, copy_out(fragment))
      case ApplyCall(value, fragment, keep):
        island.apply(fragment, shelf.get(value), keep)
      case ApplyMomentsCall(value, fragment, count):
        island.apply_moments(fragment, shelf.get(value), count)
      case CaptureCall(value):
        shelf.put(value, island.capture())
      case CountCall():
        island.count()
      case Drop(values):
        shelf.drop(values)
      case OpenCall(position):
        getattr(batches, "close", lambda: None)()  # ends the reading ahead
        batches = read(position)
      case RestoreCall(values):
        island.restore({name: shelf.get(number) for name, number in values.items()})
      case ResetCall():
        island.reset()
      case FinishCall():
        island.finish()
    progress.done += 1
    if isinstance(order, End):
      return


def _words(order: Call) -> str:
  """What a host does, for one that asks why it is waited for."""
  known = {StepCall: "inside a step", RestoreCall: "restores its state"}
  return known.get(type(order), str(order))


def _move_values(
  island: Island,
  link: HostConnection,
  shelf: _Shelf,
  progress: OwnProgress,
  failed: Callable[[Exception], None],
) -> None:
  """Answers the leader's `Take` and `Put` until the leader is gone."""
  host = jax.process_index()
  try:
    while True:
      match ANY.decode(link.receive()):
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
          shelf.put(put.value, _shaped(island, put, jax.block_until_ready(arrays)))
          link.send(DONE)
  except OSError:
    return  # the thread of `follow` gets the same error
  except Exception as error:  # a device without memory, or a copy that failed there
    failed(error)
