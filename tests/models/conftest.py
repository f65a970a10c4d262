"""This room's tests refuse silent rank promotion, and compile quickly rather than well."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def quick_compilation():
  """Nearly all the time here is the compiler's, on models too small to gain from it."""
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def no_silent_rank_promotion():
  with jax.numpy_rank_promotion("raise"):
    yield
