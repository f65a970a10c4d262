"""Copies of frozen values with some fields changed. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
  from dataclasses import replace
else:

  def replace(value: T, **changes: Any) -> T:
    """`dataclasses.replace`, four times as fast, for classes that are nothing but their fields.

    That one sets every field through `object.__setattr__`. The reducers copy states several times a
    message, and a run has messages by learners, shards and steps.

    Raises:
      TypeError: it has no such field.
    """
    new = object.__new__(type(value))
    fields = new.__dict__
    fields.update(value.__dict__)
    if not changes.keys() <= fields.keys():
      raise TypeError(f"{type(value).__name__} has no field {sorted(changes.keys() - fields)}")
    fields.update(changes)
    return new


def put(values: tuple[T, ...], i: int, value: T) -> tuple[T, ...]:
  """The tuple with another value at position `i`."""
  return (*values[:i], value, *values[i + 1 :])


__all__ = ["put", "replace"]
