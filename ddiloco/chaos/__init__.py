"""Planned faults as data, and what makes them happen."""
