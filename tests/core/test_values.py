"""The quick copy does what dataclasses' own does."""

import dataclasses
import functools

import pytest

from ddiloco.core import learner_state, messages, protocol, syncer, syncer_state
from ddiloco.core.learner import init
from ddiloco.core.values import put, replace

STATES = [
  init(2, 7, (0, 1, 0), 100),
  syncer.init(1, 3, (syncer_state.FragmentState(4),), 100),
  syncer_state.Member(1, 0.5, (0,), (1,), (0,), (0.0,), (0.0,), (0.0,)),
  messages.Goodbye(3, 4),
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_as_the_standard_library_does(state):
  before = dataclasses.asdict(state)
  for field in dataclasses.fields(state):
    changed = replace(state, **{field.name: "new"})
    assert type(changed) is type(state)
    assert changed == dataclasses.replace(state, **{field.name: "new"}) != state
    assert repr(changed) == repr(dataclasses.replace(state, **{field.name: "new"}))
  assert replace(state) == state and replace(state) is not state
  assert dataclasses.asdict(state) == before
  with pytest.raises(dataclasses.FrozenInstanceError):
    replace(state).anything = 1


def test_a_field_that_is_none_is_refused():
  with pytest.raises(TypeError, match=r"Goodbye has no field \['lerner'\]"):
    replace(STATES[-1], lerner=1)


@pytest.mark.parametrize("module", [learner_state, messages, protocol, syncer_state])
def test_values_of_the_protocol_are_nothing_but_their_fields(module):
  for found in vars(module).values():
    if not dataclasses.is_dataclass(found) or found.__module__ != module.__name__:
      continue
    assert not hasattr(found, "__post_init__") and not hasattr(found, "__slots__"), found
    cached = [v for v in vars(found).values() if isinstance(v, functools.cached_property)]
    assert not cached, found


def test_put_changes_one_position():
  assert put((1, 2, 3), 1, 9) == (1, 9, 3)
  assert put((1,), 0, 9) == (9,)
