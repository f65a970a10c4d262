"""`python -m tests.engines.told_gpus learner ...`: as `ddiloco learner`, up to its devices.

It prints what JAX was told of them before it makes them, as JSON, and trains nothing.
"""

import json
import os
import sys

import jax

from ddiloco import cli
from ddiloco.engines import single_roles

OPTIONS = ("jax_cuda_visible_devices", "jax_rocm_visible_devices", "jax_platforms")


def told(config, number, place, corpus=None) -> int:
  assert not jax._src.xla_bridge.backends_are_initialized()
  said = {"learner": number, "host": place.host, "hosts": place.hosts}
  said["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES")
  print(json.dumps(said | {name: jax.config.values[name] for name in OPTIONS}))
  return 0


if __name__ == "__main__":
  single_roles.run_learner = told
  sys.exit(cli.main(sys.argv[1:]))
