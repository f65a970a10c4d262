"""The examples in the docstrings of the pure rules, and of `import ddiloco`, are true."""

from __future__ import annotations

import doctest

import pytest

from ddiloco import api
from ddiloco.core import codec, outer
from ddiloco.protocol import rules
from ddiloco.training import step


@pytest.mark.parametrize("module", [api, codec, outer, rules, step], ids=lambda m: m.__name__)
def test_examples(module):
  failed, tried = doctest.testmod(module)
  assert tried and not failed
