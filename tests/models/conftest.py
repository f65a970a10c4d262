"""Every test of this room fails where an array is silently given more dimensions."""

import jax
import pytest


@pytest.fixture(autouse=True)
def no_silent_rank_promotion():
  with jax.numpy_rank_promotion("raise"):
    yield
