"""Compiled programs outlive the process: whoever starts again finds them in a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

# Everything is kept, however quick it was to compile: a role has a hundred small programs.
_KEEP_ALL = {
  "jax_persistent_cache_min_compile_time_secs": 0.0,
  "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextlib.contextmanager
def kept_in(folder: str | os.PathLike[str]) -> Iterator[None]:
  """While it lasts, what this process compiles is kept in `folder`, and found there again.

  Several processes may share it. An entry that a kill has torn is compiled anew. A user's own
  folder (JAX_COMPILATION_CACHE_DIR), which many runs may share, goes before.
  """
  chosen = jax.config.jax_compilation_cache_dir or os.fspath(folder)
  settings = {"jax_compilation_cache_dir": chosen, **_KEEP_ALL}
  before = {name: getattr(jax.config, name) for name in settings}
  _use(settings)
  try:
    yield
  finally:
    _use(before)


def _use(settings: dict[str, object]) -> None:
  for name, value in settings.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()  # JAX looks at the folder once only
