"""Fixtures of these tests."""

import pytest

from tests.launch import programs


@pytest.fixture
def cloud(tmp_path, monkeypatch) -> programs.Cloud:
  return programs.install(tmp_path, monkeypatch)
