"""This package's tests refuse silent rank promotion."""

import jax
import pytest


@pytest.fixture(autouse=True)
def no_silent_rank_promotion():
  with jax.numpy_rank_promotion("raise"):
    yield
