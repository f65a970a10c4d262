"""Fixtures of the network's tests."""

import pytest

from tests.network.net import Net


@pytest.fixture
def net():
  net = Net("run", "plan")
  yield net
  net.close()
