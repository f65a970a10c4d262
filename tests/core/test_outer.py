import dataclasses

import numpy as np
import pytest

from ddiloco.config import OuterConfig
from ddiloco.core import outer


def f32(*values):
  return np.array(values, np.float32)


def test_without_momentum_there_is_no_state_and_the_step_is_plain():
  config = OuterConfig(learning_rate=0.5, momentum=0.0)
  assert outer.init(3, config) is None
  value, delta = f32(1, 2, 3), f32(2, -4, 0)
  new = outer.update(value, None, delta, config)
  np.testing.assert_array_equal(new, f32(0, 4, 3))
  np.testing.assert_array_equal(value, f32(1, 2, 3))
  np.testing.assert_array_equal(delta, f32(2, -4, 0))


@pytest.mark.parametrize(
  ("nesterov", "first", "second"),
  [
    # value 8, lr 1/2, mu 1/2, delta 4 twice. m: 4, then 6.
    (True, 5.0, 1.5),  # steps (4 + 2) / 2 = 3, then (4 + 3) / 2 = 3.5
    (False, 6.0, 3.0),  # steps 4 / 2 = 2, then 6 / 2 = 3
  ],
)
def test_golden_momentum(nesterov, first, second):
  config = OuterConfig(learning_rate=0.5, momentum=0.5, nesterov=nesterov)
  momentum = outer.init(1, config)
  assert momentum.dtype == np.float32 and not momentum.any()
  value = outer.update(f32(8), momentum, f32(4), config)
  momentum = outer.followed(momentum, f32(8), value, config)
  assert (value[0], momentum[0]) == (first, pytest.approx(4.0))
  before, value = value, outer.update(value, momentum, f32(4), config)
  momentum = outer.followed(momentum, before, value, config)
  assert (value[0], momentum[0]) == (second, pytest.approx(6.0))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [True, False])
def test_parts_aliasing_and_given_buffers_change_no_bit(momentum, nesterov):
  config = OuterConfig(learning_rate=0.7, momentum=momentum, nesterov=nesterov)
  rng = np.random.default_rng(0)
  value, delta, speed = rng.standard_normal((3, 100)).astype(np.float32)
  speed = speed if momentum else None
  whole = outer.update(value, speed, delta, config)
  followed = outer.followed(speed, value, whole, config)
  parts, scratch = delta.copy(), np.empty(37, np.float32)
  speeds = np.empty_like(value)
  for start in range(0, 100, 37):
    here = slice(start, min(start + 37, 100))
    mine = None if speed is None else speed[here]
    out, room = parts[here], scratch[: parts[here].size]
    room[:] = np.nan
    result = outer.update(value[here], mine, out, config, out, room)
    assert result is out and np.isfinite(room).all(), "the step needs no memory of its own"
    room[:] = np.nan
    outer.followed(mine, value[here], out, config, speeds[here], room)
    assert np.isfinite(room).all() == bool(momentum)
  np.testing.assert_array_equal(parts, whole)
  if momentum:
    np.testing.assert_array_equal(speeds, followed)
    assert not np.array_equal(speed, followed)


def test_one_learner_lr_one_without_momentum_lands_on_the_learner():
  local, value = f32(0.25, -1.5), f32(1, 2)
  new = outer.update(value, None, value - local, OuterConfig(learning_rate=1.0, momentum=0.0))
  np.testing.assert_array_equal(new, local)


def test_over_the_last_tokens_the_rate_falls_to_a_share_of_itself():
  config = OuterConfig(learning_rate=0.8, decay_share=0.25, final_share=0.1)
  rates = [outer.at(config, x).learning_rate for x in (0.0, 0.75, 0.875, 1.0, 1.5)]
  assert rates == pytest.approx([0.8, 0.8, 0.44, 0.08, 0.08])
  falling = outer.at(config, 0.9)
  assert falling == dataclasses.replace(
    config, learning_rate=falling.learning_rate, final_share=1.0
  )
  slowest = OuterConfig(learning_rate=1e-6, final_share=1e-6)
  assert outer.at(slowest, 1.0).learning_rate == pytest.approx(1e-12)
  for constant in (
    dataclasses.replace(config, decay_share=0.0),
    dataclasses.replace(config, final_share=1.0),
  ):
    assert {outer.at(constant, x).learning_rate for x in (0.0, 0.8, 1.0, 2.0)} == {0.8}
