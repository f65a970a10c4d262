"""How much memory saving or restoring a part takes beside its state; a process of its own.

  python -m tests.checkpoint.peak_memory FOLDER save|load MIB COUNT

Prints the MiB by which the process' peak rose, of a state of MIB MiB in COUNT arrays over eight
devices, an eighth of it in a window.
"""

import resource
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.checkpoint import snapshots
from tests import conftest as conftest  # eight devices


def peak_mib() -> float:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(folder: str, what: str, mib: int, count: int) -> None:
  mesh = Mesh(np.array(jax.devices()), ("fsdp",))
  sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
  snapshots.WINDOW_BYTES = (mib << 20) // 8
  storage = snapshots.Storage(folder, "plan", print)
  rows = (mib << 20) // 4 // count // 1024

  def leaf(i: int) -> jax.Array:
    parts = [np.full((rows // 8, 1024), i + d, np.float32) for d in range(8)]
    pieces = [jax.device_put(part, d) for part, d in zip(parts, jax.devices())]
    return jax.make_array_from_single_device_arrays((rows, 1024), sharding, pieces)

  storage.save(0, "learner-0", 0, {}, {"warm": np.ones(9)})  # imports, threads
  storage.load(0, "learner-0")
  names = [f"params/{i}" for i in range(count)]
  if what == "save":
    arrays = {name: leaf(i) for i, name in enumerate(names)}
    before = peak_mib()
    storage.save(1, "learner-0", 0, {}, arrays)
  else:
    before = peak_mib()
    place = lambda _, value: jax.block_until_ready(jax.device_put(value, sharding))
    arrays = storage.load(1, "learner-0", place).arrays
    assert all(float(arrays[name][0, 0]) == i for i, name in enumerate(names))
  print(peak_mib() - before)


if __name__ == "__main__":
  main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
