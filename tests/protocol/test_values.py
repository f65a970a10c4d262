"""Values never change; from JSON states come back, and nothing else."""

import json
import types
import typing
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.config import SyncConfig
from ddiloco.protocol import messages, states, syncer
from ddiloco.protocol.learner import init
from ddiloco.protocol.messages import FragmentState
from ddiloco.protocol.states import LearnerState, Outstanding
from ddiloco.protocol.values import Frozen, NotAState, from_json, put, replace, to_json
from tests import says

STATES = [
  init(2, 7, (0, 1, 0), 100),
  syncer.init(1, 3, (states.FragmentState(4),), SyncConfig(), 100),
  states.Member(1, 0.5, (0,), (1,), (0,), (0.0,), (0.0,), (0.0,)),
  messages.Goodbye(3, 4),
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_a_copy_has_the_change_and_the_value_has_not(state):
  before = repr(state)
  for field in state.__struct_fields__:
    changed = replace(state, **{field: "new"})
    assert type(changed) is type(state) and getattr(changed, field) == "new" and changed != state
    assert replace(changed, **{field: getattr(state, field)}) == state
    with pytest.raises(AttributeError):
      setattr(state, field, "new")
  assert repr(state) == before


def test_a_default_mapping_is_not_shared():
  one, other = states.FragmentState(0), states.FragmentState(1)
  assert one.merged_rounds == {} and one.merged_rounds is not other.merged_rounds


def test_a_field_that_is_none_is_refused():
  with pytest.raises(TypeError, match="lerner"):
    replace(STATES[-1], lerner=1)


def test_put_changes_one_position():
  assert put((1, 2, 3), 1, 9) == (1, 9, 3)
  assert put((1,), 0, 9) == (9,)


# --- states as JSON -------------------------------------------------------------------------------


def values_of(hint):
  """Anything that a field of this type may hold."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin is typing.Annotated:
    kind, bounds = arguments
    if kind is int:
      return st.integers(bounds.ge, min(bounds.lt - 1, 2**53))
    return st.floats(0, allow_infinity=False) if kind is float else values_of(kind)
  if origin in (typing.Union, types.UnionType):
    return st.one_of(st.none(), *(values_of(a) for a in arguments if a is not type(None)))
  if isinstance(hint, type) and issubclass(hint, Frozen):
    hints = typing.get_type_hints(hint, include_extras=True)
    return st.deferred(lambda: st.builds(hint, **{n: values_of(h) for n, h in hints.items()}))
  if origin is tuple and arguments[-1] is not Ellipsis:
    return st.tuples(*map(values_of, arguments))
  if origin is tuple:
    return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
  if isinstance(origin, type) and issubclass(origin, Mapping):
    key, value = arguments
    if key is not int:  # what a shard knows for a while only, and no part has
      return st.just({})
    return st.dictionaries(values_of(key), values_of(value), max_size=2)
  if origin is typing.Literal:
    return st.sampled_from(arguments)
  if hint is types.NoneType:  # a payload, which is kept elsewhere
    return st.none()
  simple = {int: st.integers(-(2**53), 2**53), float: st.floats(allow_nan=False), str: st.text()}
  return {**simple, bool: st.booleans()}[hint]


def through_json(state):
  return json.loads(json.dumps(to_json(state)))


@pytest.mark.parametrize("cls", [LearnerState, FragmentState])
@settings(max_examples=40)
@given(data=st.data())
def test_any_state_comes_back_from_json(cls, data):
  state = data.draw(values_of(cls))
  assert from_json(cls, through_json(state)) == state


def spots(value, path=()):
  """Paths of all that is in a JSON value."""
  yield path
  if isinstance(value, dict | list):
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
      yield from spots(each, (*path, key))


def changed(value, path, new):
  copied = json.loads(json.dumps(value))
  at = copied
  for key in path[:-1]:
    at = at[key]
  at[path[-1]] = new
  return copied


def test_a_state_of_another_shape_is_refused_wherever_it_differs():
  state = init(1, 5, (0, 1, 0), 1000)
  good = through_json(state)
  assert from_json(LearnerState, good) == state
  for path in spots(good):
    if path:
      wrong = changed(good, path, {"no": "state"})
      with pytest.raises(NotAState, match="LearnerState"):
        from_json(LearnerState, wrong)
  for field in good:
    without = {name: value for name, value in good.items() if name != field}
    with pytest.raises(NotAState, match=rf"missing required field `{field}`|a field is missing"):
      from_json(LearnerState, without)
  with pytest.raises(NotAState, match=r"LearnerState: .*unknown field `another`"):
    from_json(LearnerState, {**good, "another": 1})
  outstanding = Outstanding(says.push(1, 5, 0, 7, 3, 2, 20, "f32"), at_step=4)
  with_push = through_json(state.with_fragment(0, outstanding=outstanding))
  assert from_json(LearnerState, with_push).fragments[0].outstanding == outstanding
  where = ("fragments", 0, "outstanding", "push", -1)
  with pytest.raises(NotAState, match=r"`null`, got `str` - at .*\.outstanding\.push\[\d+\]"):
    from_json(LearnerState, changed(with_push, where, "payloads are kept elsewhere"))
  for odd in (None, 3, "text", [], [good], {}):
    with pytest.raises(NotAState):
      from_json(LearnerState, odd)
