"""The run that `tests/observe/conftest.py` makes up."""

from tests.observe.conftest import fake_clock, make, run_events

__all__ = ["fake_clock", "make", "run_events"]
