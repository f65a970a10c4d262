"""This package's tests refuse silent rank promotion."""

import functools

import jax
import pytest

from ddiloco.models import layers


@pytest.fixture(autouse=True)
def no_silent_rank_promotion():
  with jax.numpy_rank_promotion("raise"):
    yield


@pytest.fixture
def interpreted_kernels(monkeypatch):
  """The kernels of attention, on a platform that cannot run them."""
  splash = functools.partial(layers.splash_attention, interpret=True)
  fused = functools.partial(layers.fused_attention, implementation="xla")
  monkeypatch.setattr(layers, "_KERNELS", {"splash": splash, "cudnn": fused})
