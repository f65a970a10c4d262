"""Fixtures of the network's tests."""

import contextlib

import pytest

from tests.network.net import Net


@pytest.fixture
def secure() -> bool:
  """Whether `net` has keys; a module, or a test's parameter, may say otherwise."""
  return False


@pytest.fixture
def net(secure):
  with contextlib.closing(Net("run", "plan", secure=secure)) as net:
    yield net
